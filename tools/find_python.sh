#!/bin/sh
# Prints the newest working Python from 3.11 to 3.14, looking on the PATH and among pyenv's versions.
# With an argument such as 3.11, only that version counts.
root="${PYENV_ROOT:-$HOME/.pyenv}/versions"
for version in ${1:-3.14 3.13 3.12 3.11}; do
    for python in "$root/$version"*/bin/python "python$version"; do
        # pyenv's shims exist for versions that are not active, and fail when run.
        if "$python" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" \
            >/dev/null 2>&1; then
            command -v "$python"
            exit 0
        fi
    done
done
echo "no Python ${1:-3.11 or newer} found; set PYTHON=/path/to/python" >&2
exit 1
