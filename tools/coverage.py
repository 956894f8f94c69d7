"""How many attentions of public models are raised, and lowered for targets.

Reads the modules of the folder that HLO_OPT_CORPUS names, and how many attentions each has from
EXPECTED.json in it. Prints one line for each module, then why attentions were left. Exits with
status 1 where a module that is no training step has fewer raised than expected, or fails.

Usage: tools/coverage.py [--targets v5e,v6e] [WORD...]; words select modules whose names hold one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hlo_opt import ir as hlo_ir
from hlo_opt.errors import HloOptError
from hlo_opt.pipeline import PassContext, run_pipeline

RAISING = ("attention", "decode_attention")


@dataclass
class Coverage:
    """What became of one module's attentions; `failure` is the error's one line, if any."""

    raised: int = 0
    lowered: dict[str, int] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    failure: str = ""


def cover(path: Path, targets: list[str]) -> Coverage:
    """Raises one module, and lowers the result for every target."""
    result = Coverage()
    try:
        ctx = PassContext()
        module = run_pipeline(hlo_ir.read(path), "raise", ctx)
        said = [r for r in ctx.remarks if r.structure in RAISING]
        result.raised = sum(r.kind == "applied" for r in said)
        result.missed = [r.message for r in said if r.kind == "missed"]
        for target in targets:
            ctx = PassContext(target=target)
            run_pipeline(module, "lower", ctx)
            said = [r for r in ctx.remarks if "attention" in r.structure]
            result.lowered[target] = sum(r.kind == "applied" for r in said)
            result.missed += [f"{target}: {r.message}" for r in said if r.kind == "missed"]
    except HloOptError as error:
        result.failure = error.message
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only modules whose names hold one of these")
    parser.add_argument("--targets", default="", help="targets to lower for, with commas")
    options = parser.parse_args()
    corpus = Path(os.environ.get("HLO_OPT_CORPUS", "no-corpus"))
    if not (corpus / "EXPECTED.json").is_file():
        print("error: HLO_OPT_CORPUS names no folder with an EXPECTED.json", file=sys.stderr)
        return 2
    modules = json.loads((corpus / "EXPECTED.json").read_text())["modules"]
    chosen = [n for n in sorted(modules) if not options.words or any(w in n for w in options.words)]
    return report(corpus, modules, chosen, [t for t in options.targets.split(",") if t])


def report(corpus: Path, modules: dict[str, dict], chosen: list[str], targets: list[str]) -> int:
    """Prints the table; returns the exit status."""
    reasons: Counter[tuple[str, str]] = Counter()
    raised, expected, short = 0, 0, 0
    head = f"{'package':22} {'model':34} {'kind':16} raised / expected"
    print(head, *(f"lowered {target}" for target in targets), sep="  ")
    for name in chosen:
        module = modules[name]
        found = cover(corpus / name, targets)
        wanted = module["attention"]
        words = [f"{module['package']:22} {module['model']:34} {module['kind']:16}"]
        words.append(f"{found.raised:6} / {wanted}")
        words += [f"{target} {count}" for target, count in found.lowered.items()]
        if found.failure or (found.raised < wanted and module["kind"] != "train"):
            short += 1
            words.append(found.failure or "SHORT")
        print(*words, sep="  ")
        if module["kind"] != "train":
            raised += found.raised
            expected += wanted
        reasons.update(
            (kind, reason)
            for reason in found.missed
            for kind in ["train" if module["kind"] == "train" else "other"]
        )
    print(f"\nwithout training steps: {raised} of {expected} attentions raised")
    for (kind, reason), count in sorted(reasons.items(), key=lambda item: -item[1]):
        print(f"{count:6} x {'(train) ' if kind == 'train' else ''}{reason}")
    return int(short > 0)


if __name__ == "__main__":
    sys.exit(main())
