#!/bin/sh
# Type-checks the package as installed: checkers do not see the mapped folders in the source tree.
# Usage: tools/typecheck.sh PYTHON
set -e
python="$1"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$(pwd)
case "$python" in /*) ;; *) python="$root/$python" ;; esac
"$python" -m pip install --quiet --no-deps --target "$work/site" "$root"
expected=$(find hlo_opt passes patterns -name '*.py' | wc -l)
cd "$work"
MYPYPATH="$work/site" "$python" -m mypy --config-file "$root/pyproject.toml" \
    --python-executable "$python" -p hlo_opt | tee out.txt
grep -q "no issues found in $expected source files" out.txt || {
    echo "expected $expected files to be checked" >&2
    exit 1
}
