"""Random attention programs, and near misses, through the recogniser and the kernels.

Every program is raised and evaluated in float64 twice, as it was and with its composites replaced
by their documented formula; every `--kernels`-th is also lowered, interpreted and checked by the
numerical rule for RMS errors. Exit status 1 where a result is wrong, something crashes, or an
attention is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from attention_programs import Interpreter, Recipe

from hlo_opt.pipeline import PassContext, run_pipeline
from hlo_opt.verify import FACTOR, OutputErrors, verify_pipeline


@dataclass
class Outcome:
    """What became of one program; `problem` is empty where all is well."""

    raised: int = 0
    problem: str = ""
    reasons: list[str] = field(default_factory=list)


def check(recipe: Recipe, seed: int, kernels: bool) -> Outcome:
    """Raises one program and compares what it means before and after."""
    module = recipe.module()
    ctx = PassContext()
    raised = run_pipeline(module, "raise", ctx)
    outcome = Outcome(
        sum(r.kind == "applied" and "attention" in r.structure for r in ctx.remarks),
        reasons=[r.message for r in ctx.remarks if r.kind == "missed"],
    )
    inputs = recipe.inputs(seed)
    before = Interpreter(module, formula=False).run(*inputs)
    after = Interpreter(raised, formula=True).run(*inputs)
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        if a.dtype.kind == "f" and not _same(a, b):
            worst = np.nanmax(np.abs(a - b)) if np.isfinite(a).any() else np.nan
            outcome.problem = f"result {number} differs by {worst:.2g}"
    if not outcome.raised and not recipe.miss:
        outcome.problem = "missed: " + "; ".join(outcome.reasons)
    if kernels and outcome.raised and not outcome.problem:
        report = verify_pipeline(module, "inference", "v5e", inputs=inputs)
        if not all(map(_holds, report.outputs)):
            outcome.problem = "kernel: " + report.table()
    return outcome


def _choose(choice: Callable[[Sequence[Any]], Any], _: str, values: Sequence[Any]) -> Any:
    return choice(values)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal up to f32 constants inside captured functions."""
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True))


def _holds(output: OutputErrors) -> bool:
    """The rule for RMS errors; the largest of so few errors is luck, within a few units."""
    if output.problem:
        return output.problem == "no finite value to compare"
    bound = 4 * output.before_max + 2 * output.ulp
    return output.after_max <= bound and (
        output.after_rms <= FACTOR * output.before_rms + output.ulp
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the programs and prints what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=1000, help="how many programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", type=int, default=50, help="lower every so many-th")
    parser.add_argument("--keep", type=int, default=10, help="stop after so many problems")
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    problems = 0
    start = time.time()
    for number in range(options.n):
        seed = options.seed * 1_000_000 + number
        choice = random.Random(seed).choice
        recipe = Recipe.draw(partial(_choose, choice), near_misses=number % 2 == 1)
        try:
            outcome = check(recipe, seed, options.kernels > 0 and number % options.kernels == 0)
        except Exception as error:  # a crash is what is looked for
            outcome = Outcome(problem=f"{type(error).__name__}: {error}")
        kind = recipe.miss or "attention"
        counts[f"{kind}: {'raised' if outcome.raised else 'left alone'}"] += 1
        if outcome.problem:
            problems += 1
            print(f"seed {seed}: {outcome.problem[:600]}\n    {recipe}", flush=True)
            if problems >= options.keep:
                break
    for kind, count in sorted(counts.items()):
        print(f"{count:7} {kind}")
    print(f"{sum(counts.values())} programs, {problems} problems, {time.time() - start:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
