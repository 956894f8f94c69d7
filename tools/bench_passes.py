"""Time of the whole `inference` pipeline on unrolled decoders of 10 to 80 layers.

Kernel lowering is included: every size is measured in a process of its own, with nothing cached.
Exits with status 1 where 80 layers take more than 2 s, or much more than 8 times 10 layers.
"""

from __future__ import annotations

import subprocess
import sys
import time

from jaxlib.mlir import ir

import decoder
from hlo_opt import ir as hlo_ir
from hlo_opt.ir.walk import functions, symbol_name
from hlo_opt.pipeline import PassContext, run_pipeline

LAYERS = (10, 20, 40, 80)
LIMIT_SECONDS = 2.0
LIMIT_GROWTH = 12.0
REPEATS = 3


def count_ops(module: ir.Module) -> int:
    count = 0

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal count
        count += 1
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return count


def measure(layers: int) -> None:
    """Prints ops, seconds of each stage and the number of kernel functions."""
    module = hlo_ir.parse(decoder.lower(decoder.Config(layers)).as_text())
    baseline = time.perf_counter()
    run_pipeline(module, "cse,canonicalize", PassContext())
    baseline = time.perf_counter() - baseline
    ctx = PassContext(target="v5e")
    start = time.perf_counter()
    raised = run_pipeline(module, "raise", ctx)
    middle = time.perf_counter()
    lowered = run_pipeline(raised, "lower", ctx)
    end = time.perf_counter()
    kernels = sum("attention.pallas" in symbol_name(f) for f in functions(lowered))
    calls = sum(r.kind == "applied" and r.pass_name == "lower-composites" for r in ctx.remarks)
    print(
        f"{layers} {count_ops(module)} {baseline:.3f} {middle - start:.3f} {end - middle:.3f} "
        f"{end - start:.3f} {calls} {kernels}"
    )


def main() -> int:
    print("layers   ops  cse+canonicalize   raise   lower   total  lowered  kernel functions")
    totals, raising = {}, {}
    for layers in LAYERS:
        line = min((once(layers) for _ in range(REPEATS)), key=lambda columns: float(columns[5]))
        n, ops, base, up, down, total, calls, kernels = line
        seconds = f"{base:>16} s {up:>6} s {down:>6} s {total:>5} s"
        print(f"{n:>6} {ops:>6} {seconds} {calls:>7} {kernels:>8}")
        totals[layers], raising[layers] = float(total), float(up)
    growth = raising[80] / raising[10]
    print(
        f"80 layers: {totals[80]:.2f} s (limit {LIMIT_SECONDS} s); raising takes {growth:.1f} x "
        f"the time of 10 layers (linear: 8, limit {LIMIT_GROWTH})"
    )
    return int(totals[80] > LIMIT_SECONDS or growth > LIMIT_GROWTH)


def once(layers: int) -> list[str]:
    """The columns of one run in a fresh process."""
    command = [sys.executable, __file__, str(layers)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]))
    else:
        sys.exit(main())
