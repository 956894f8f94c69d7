"""Writes the CHECK lines of a test from what its RUN line prints now.

Usage: python -m hlo_opt.testing.generate_checks TEST.mlir [--load=MODULE …] > NEW.mlir

Look at the result before you keep it: it says what the pass does, not what it should do.
"""

from __future__ import annotations

import importlib
import io
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from hlo_opt.driver import Driver
from hlo_opt.errors import HloOptError
from hlo_opt.testing.tool import LOAD

_RUN = re.compile(r"//\s*RUN:\s*hlo-opt\s+(.*?)\s*\|\s*FileCheck\b.*%s")
_FUNCTION = re.compile(r"func\.func\b.*?@([\w.$-]+)")
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")


def generate(path: Path) -> str:
    """The test's text with CHECK lines for its first RUN line. Raises `HloOptError`."""
    text = path.read_text()
    run = _RUN.search(text)
    if run is None:
        raise HloOptError("error: no line 'RUN: hlo-opt … | FileCheck %s'", location=str(path))
    arguments = [str(path) if word == "%s" else word for word in shlex.split(run[1])]
    output, errors = io.BytesIO(), io.StringIO()
    if Driver(arguments, stdout=output, stderr=errors).run() != 0:
        raise HloOptError(f"error: the RUN line fails: {errors.getvalue().strip()}")
    kept = [line for line in text.splitlines() if not re.match(r"\s*//\s*CHECK", line)]
    checks = list(check_lines(output.getvalue().decode().splitlines()))
    place = max(n for n, line in enumerate(kept) if "RUN:" in line) + 1
    return "\n".join([*kept[:place], "", *checks, *kept[place:]]) + "\n"


def check_lines(output: Iterable[str]) -> Iterator[str]:
    """CHECK lines for printed IR; SSA names become variables, functions start afresh."""
    names: dict[str, str] = {}
    follows = False
    for line in output:
        stripped = line.strip()
        if not stripped or re.match(r"module\b|}$|#", stripped):
            follows = False
            continue
        if function := _FUNCTION.search(stripped):
            names.clear()
            yield f"// CHECK-LABEL: @{function[1]}"
            for argument in re.findall(r"(%[\w$.-]+):", stripped):
                yield f"// CHECK-SAME: {_named(argument, names)}"
            follows = False
            continue
        pattern = _VALUE.sub(lambda match: _named(match[0], names), stripped)
        pattern = pattern.replace("[[[", "{{\\[}}[[").replace("{{[", "{{\\[")
        yield f"// CHECK{'-NEXT' if follows else ''}: {pattern}"
        follows = True


def _named(value: str, names: dict[str, str]) -> str:
    """The variable for a value: its definition the first time, a use afterwards."""
    if value in names:
        return f"[[{names[value]}]]"
    names[value] = f"V{len(names)}"
    return f"[[{names[value]}:%[a-zA-Z0-9_#]+]]"


def main(arguments: list[str]) -> int:
    """Prints the test with its CHECK lines."""
    for argument in arguments:
        if argument.startswith(LOAD):
            importlib.import_module(argument.removeprefix(LOAD))
    paths = [argument for argument in arguments if not argument.startswith(LOAD)]
    try:
        for path in paths:
            sys.stdout.write(generate(Path(path)))
    except (HloOptError, OSError) as error:
        print(f"generate_checks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
