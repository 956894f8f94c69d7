"""Expectations in comments, as MLIR's `--verify-diagnostics` has them.

`// expected-remark@+1 {{text}}` wants a remark with that text on the next line; `expected-error`
an error. `@-1`, `@above`, `@below` and `@unknown` (no location) work too; without `@` the comment's
own line is meant. Every remark and every error must be expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hlo_opt.errors import HloOptError
from hlo_opt.remarks import Remark

_COMMENT = re.compile(r"expected-(remark|error)(?:@([-+]\d+|above|below|unknown))?\s*\{\{(.*?)\}\}")


@dataclass(frozen=True)
class Diagnostic:
    """A remark or an error, at a line of the input or nowhere."""

    kind: str
    line: int | None
    text: str


def check(source: str, remarks: Iterable[Remark], error: HloOptError | None) -> list[str]:
    """Compares what was said with what the source expects.

    Returns:
      one line of text, starting with a line number, for every difference.
    """
    said = [Diagnostic("remark", _line(r.location), str(r)) for r in remarks]
    if error is not None:
        said.append(Diagnostic("error", _line(error.location or ""), error.message))
    problems = []
    for wanted in expectations(source):
        found = next(
            (
                d
                for d in said
                if (d.kind, d.line) == (wanted.kind, wanted.line) and wanted.text in d.text
            ),
            None,
        )
        if found is None:
            problems.append(
                f'{wanted.line or 0}: expected {wanted.kind} "{wanted.text}" was not made'
            )
        else:
            said.remove(found)
    return problems + [f"{d.line or 0}: unexpected {d.kind}: {d.text}" for d in said]


def expectations(source: str) -> list[Diagnostic]:
    """What the comments of a source expect."""
    found = []
    for number, text in enumerate(source.splitlines(), start=1):
        for kind, where, message in _COMMENT.findall(text):
            offset = {"": 0, "above": -1, "below": 1, "unknown": None}.get(where, where)
            line = None if offset is None else number + int(offset)
            found.append(Diagnostic(kind, line, message))
    return found


def _line(location: str) -> int | None:
    match = re.search(r":(\d+)(?::\d+)?$", location)
    return int(match[1]) if match else None
