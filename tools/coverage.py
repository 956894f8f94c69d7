"""How many attentions of a folder of modules are raised and lowered: package x model x kind.

Reads `EXPECTED.json` in the folder (`HLO_OPT_CORPUS` by default), which says how many attentions
each module has. Exit status 1 where a module that is no training step has fewer raised.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import hlo_opt
from hlo_opt.errors import HloOptError


@dataclass
class Row:
    """Counts of one module; `reasons` are those of the attentions that were missed."""

    name: str
    kind: str
    expected: int
    raised: int = 0
    lowered: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def short(self) -> bool:
        """Whether fewer attentions are raised than there are."""
        return self.raised < self.expected and self.kind != "train"


def rows(folder: Path, target: str) -> Iterator[Row]:
    """Raises and lowers every module that is described."""
    described = json.loads((folder / "EXPECTED.json").read_text())["modules"]
    for name, facts in sorted(described.items()):
        row = Row(name.removesuffix(".mlir"), facts["kind"], facts["attention"])
        try:
            remarks = hlo_opt.apply(folder / name, target=target).remarks
        except HloOptError as error:
            row.reasons[str(error)] += 1
            yield row
            continue
        for remark in remarks:
            if "attention" not in remark.structure:
                continue
            lowering = remark.pass_name == "lower-composites"
            if remark.kind == "missed":
                row.reasons[remark.message] += 1
            elif lowering:
                row.lowered += 1
            else:
                row.raised += 1
        yield row


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", default=os.environ.get("HLO_OPT_CORPUS"))
    parser.add_argument("--target", default="v5e")
    parser.add_argument("--reasons", action="store_true", help="say why attentions were missed")
    options = parser.parse_args()
    if options.folder is None or not (Path(options.folder) / "EXPECTED.json").exists():
        parser.error("no folder with an EXPECTED.json: give one, or set HLO_OPT_CORPUS")
    total: Counter[str] = Counter()
    print(f"{'module':56} {'expected':>8} {'raised':>7} {'lowered':>8}")
    for row in rows(Path(options.folder), options.target):
        mark = "  <-- missed" if row.short else ""
        print(f"{row.name:56} {row.expected:8} {row.raised:7} {row.lowered:8}{mark}")
        if options.reasons or row.short:
            for reason, count in row.reasons.items():
                print(f"    {count} x {reason}")
        kind = "train" if row.kind == "train" else "inference"
        total[f"{kind} expected"] += row.expected
        total[f"{kind} raised"] += min(row.raised, row.expected)
        total[f"{kind} lowered"] += row.lowered
        total["short"] += row.short
    for kind in ("inference", "train"):
        print(
            f"{kind}: {total[f'{kind} raised']} of {total[f'{kind} expected']} raised, "
            f"{total[f'{kind} lowered']} lowered for {options.target}"
        )
    return 1 if total["short"] else 0


if __name__ == "__main__":
    sys.exit(main())
