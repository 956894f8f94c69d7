"""Predicted time of attention kernels: ours, and JAX's flash and splash.

Method (a first, simple one): libtpu writes the final instruction bundles of a kernel
(`*packed-bundles-post-ra.txt`, with stalls). A Pallas kernel is one loop over grid steps with
predicated regions: the start of a row of blocks, the bodies for the kinds of tiles, its end. Time
is bundles x how often each runs, at one bundle a cycle. How often is known from which tiles are
visited. Memory is not modelled: reading keys and values is taken to hide behind the work on them.
Kernels on two cores (v5p) are taken to split evenly. XLA's own fusions, whose loops are nested, are
beyond this method. Nothing here was measured on a TPU.

    python tools/bench_attention.py --targets v5e v6e --update docs/performance.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Peak FLOP/s over FLOP a cycle, as published measurements fit (GHz).
CLOCK = {"v5e": 1.50, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.20}
CORES = {"v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 1}
EXPONENTIALS = 1024  # a cycle, one vector register
BLOCKS = ((1024, 1024, 512), (512, 1024, 512), (1024, 1024, 1024), (512, 512, 512))
HEADS = ((8, 8), (32, 8))
SEQUENCES = (2048, 8192)
START, END = "<!-- bench_attention -->", "<!-- /bench_attention -->"


@dataclass(frozen=True)
class Kernel:
    """A kernel to be compiled.

    Attributes:
      name: `general`, `flash`, `splash`, or `scored` (ours with soft cap, window and slopes).
      blocks: of queries and keys, and keys computed at a time for the library's; empty for our
        own choice.
    """

    name: str
    target: str
    causal: bool
    depth: int
    group: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cost:
    """Bundles of a kernel: of every grid step, and of each predicated region, in order."""

    step: int
    regions: tuple[int, ...]


def build(kernel: Kernel, sequence: int) -> tuple[Any, list[Any]]:
    """The kernel as a JAX function on `[batch, head, position, depth]`, and its arguments."""
    import jax
    import ml_dtypes
    import numpy as np

    from hlo_opt.ir.signature import ArrayType

    bf16 = np.dtype(ml_dtypes.bfloat16)
    # Two heads: a grid dimension of one would make it another loop.
    shape = (1, 2, sequence, kernel.depth)
    args = [ArrayType(shape, bf16)] * 3
    if kernel.name == "flash":
        from jax.experimental.pallas.ops.tpu import flash_attention as flash

        sizes = dict(zip(("block_q", "block_k_major", "block_k"), kernel.blocks, strict=True))

        def fn(q: Any, k: Any, v: Any) -> Any:
            blocks = flash.BlockSizes(block_b=1, **sizes)
            scale = kernel.depth**-0.5
            return flash.flash_attention(
                q, k, v, causal=kernel.causal, sm_scale=scale, block_sizes=blocks
            )

        return fn, args
    if kernel.name == "splash":
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        mask = splash.CausalMask if kernel.causal else splash.FullMask
        masks = splash.MultiHeadMask([mask((sequence, sequence))] * 2)

        def fn(q: Any, k: Any, v: Any) -> Any:
            blocks = splash.BlockSizes(*kernel.blocks)
            return jax.vmap(splash.make_splash_mha_single_device(masks, block_sizes=blocks))(
                q, k, v
            )

        return fn, args
    spec, program = ours(kernel, sequence, 2)
    return program.run, list(spec.arguments)


def ours(kernel: Kernel, sequence: int, kv_heads: int) -> tuple[Any, Any]:
    """Our kernel's description and program."""
    import jax
    import jax.numpy as jnp
    from meaning import composites

    from hlo_opt import ir as hlo_ir
    from hlo_opt.kernels import No
    from hlo_opt.kernels.general_attention import GeneralAttention, Program
    from hlo_opt.pipeline import PassContext, run_pipeline
    from hlo_opt.targets import get_target

    scored = kernel.name == "scored"

    def fn(q: Any, k: Any, v: Any, *slopes: Any) -> Any:
        q = q.reshape(1, kv_heads, kernel.group, sequence, kernel.depth)
        x = jnp.einsum("bkgqd,bksd->bkgqs", q, k, preferred_element_type=jnp.float32)
        x = x * kernel.depth**-0.5
        rows, columns = jnp.arange(sequence)[:, None], jnp.arange(sequence)[None]
        if scored:
            x = 30 * jnp.tanh(x / 30) + slopes[0].reshape(1, kv_heads, -1, 1, 1) * (columns - rows)
        if kernel.causal:
            open_ = rows >= columns
            if scored:
                open_ &= rows - columns < 4096
            x = jnp.where(open_, x, -1e30)
        p = jax.nn.softmax(x, axis=-1).astype(v.dtype)
        return jnp.einsum("bkgqs,bksd->bkgqd", p, v)

    heads = kv_heads * kernel.group
    args = [
        jax.ShapeDtypeStruct((1, n, sequence, kernel.depth), jnp.bfloat16)
        for n in (heads, kv_heads, kv_heads)
    ]
    if scored:
        args.append(jax.ShapeDtypeStruct((heads,), jnp.float32))
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    module = run_pipeline(hlo_ir.parse(text), "raise", PassContext())
    (op,) = composites(module, "hlo_opt.attention")
    spec = GeneralAttention().spec(op, module)
    assert not isinstance(spec, No), spec.reason
    candidate = GeneralAttention().candidates(spec, get_target(kernel.target))[0]
    config = dict(candidate.config)
    if kernel.blocks:
        config |= dict(zip(("block_q", "block_k"), kernel.blocks, strict=True))
    return spec, Program(spec, **config)


def compile_here(kernel: Kernel) -> None:
    """Compiles a kernel in this process, whose libtpu was told to write what it makes."""
    from hlo_opt import compat
    from hlo_opt import ir as hlo_ir
    from hlo_opt.targets import get_target
    from hlo_opt.trace import lower_function

    fn, args = build(kernel, max(SEQUENCES[0], 2 * max(kernel.blocks or (0,))))
    target = get_target(kernel.target)
    bytecode = lower_function(fn, args, platform="tpu", device_kind=target.device_kind)
    compat.compile_for_topology(hlo_ir.parse(bytecode), target.topology, {})


def bundles(kernel: Kernel) -> Cost | None:
    """Compiles a kernel in a worker process and reads its bundles; None where it is refused."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = {
            "LIBTPU_INIT_ARGS": flags,
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        command = [sys.executable, __file__, "--worker", json.dumps(kernel.__dict__)]
        run = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        if run.returncode:
            return None
        costs = [
            read_bundles(path.read_text(errors="replace"))
            for path in Path(folder).rglob("*packed-bundles-post-ra.txt")
            if "schedule" not in path.name and re.search("attention|splash", path.name)
        ]
    known = [cost for cost in costs if cost is not None]
    return max(known, key=lambda cost: cost.step + sum(cost.regions), default=None)


_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|\d+)\s+(?:LB|PF|PB|LH|LE|CT)?\s*:\s*>*")
_BRANCH = re.compile(r"sbr\.rel.*?target bundleno = (\d+)")


def read_bundles(text: str) -> Cost | None:
    """The loop over grid steps: bundles outside and inside of its predicated regions."""
    branches: list[tuple[int, int]] = []
    here = 0
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            here = int(match[1], 0)
        if branch := _BRANCH.search(line):
            branches.append((here, int(branch[1])))
    loops = [(target, at) for at, target in branches if target < at]
    if not loops:
        return None
    first, last = max(loops, key=lambda loop: loop[1] - loop[0])
    inside = [(at, to) for at, to in branches if first < at < to <= last]
    # The outermost region skips everything while the pipeline fills: not a region of its own.
    whole = [r for r in inside if r[1] - r[0] > 0.8 * (last - first) and _holds(r, inside)]
    regions = [
        r
        for r in inside
        if r not in whole and not any(_within(r, o) for o in inside if o not in whole)
    ]
    lengths = tuple(to - at for at, to in regions)
    return Cost(last - first - sum(lengths), lengths)


def _within(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a != b and b[0] <= a[0] and a[1] <= b[1]


def _holds(region: tuple[int, int], others: Sequence[tuple[int, int]]) -> bool:
    return sum(_within(other, region) for other in others) >= 2


def cycles(kernel: Kernel, cost: Cost, heads: int, sequence: int) -> float:
    """Cycles of a kernel over all heads."""
    if kernel.name in ("general", "scored"):
        import jax.numpy as jnp

        from hlo_opt.kernels.general_attention import FIRST

        spec, program = ours(kernel, sequence, 1)
        steps = program._steps([jnp.zeros((1, 1, kernel.group, 1, 1)) for _ in spec.extras])
        states = [int(state) % FIRST for state in steps.state[0]]
        kinds = [states.count(kind) for kind in sorted(steps.kinds)]
        rows, count = len(set(steps.query.tolist())), steps.count
        walks = heads // kernel.group
    else:
        q, k, _ = kernel.blocks
        blocks = [(i, j) for i in range(sequence // q) for j in range(sequence // k)]
        seen = [b for b in blocks if not kernel.causal or b[1] * k < (b[0] + 1) * q]
        kinds, rows, count, walks = [len(seen)], sequence // q, len(blocks), heads
    large = [r for r in cost.regions if r > 700]
    small = sum(cost.regions) - sum(large)
    if len(large) != len(kinds) and (large or cost.step < 700):
        return float("nan")  # bodies have branches of their own: not read by this method
    total = cost.step * count + small * rows
    total += sum(n * length for n, length in zip(kinds, large, strict=False))
    return walks * total


def limit(target: str, causal: bool, depth: int, heads: int, s: int) -> float:
    """Microseconds: the larger of matmuls at peak rate and exponentials."""
    from hlo_opt.targets import get_target

    pairs = heads * s * s * (0.5 if causal else 1)
    matmul = 4 * pairs * depth / (get_target(target).info.bf16_ops_per_second * CORES[target])
    exponentials = pairs / EXPONENTIALS / CLOCK[target] / 1e9 / CORES[target]
    return max(matmul, exponentials) * 1e6


class Cache:
    """Costs by kernel, on disk, so that an interrupted run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def bundles(self, kernel: Kernel) -> Cost | None:
        key = json.dumps(kernel.__dict__)
        if key not in self.found:
            cost = bundles(kernel)
            self.found[key] = None if cost is None else [cost.step, list(cost.regions)]
            self.path.write_text(json.dumps(self.found))
            print(key, self.found[key], file=sys.stderr, flush=True)
        value = self.found[key]
        return None if value is None else Cost(value[0], tuple(value[1]))


def time_of(cache: Cache, kernel: Kernel, heads: int, s: int) -> float:
    """Microseconds; NaN where the kernel is refused."""
    cost = cache.bundles(kernel)
    if cost is None:
        return float("nan")
    return cycles(kernel, cost, heads, s) / CORES[kernel.target] / CLOCK[kernel.target] / 1e3


def table_rows(cache: Cache, targets: Sequence[str], depths: Sequence[int]) -> Iterator[list[str]]:
    """The table's rows."""
    for target, causal, depth in itertools.product(targets, (True, False), depths):
        for (q_heads, kv_heads), s in itertools.product(HEADS, SEQUENCES):
            group = q_heads // kv_heads
            own = time_of(cache, Kernel("general", target, causal, depth, group), q_heads, s)
            library = {
                name: min(
                    (
                        time
                        for blocks in BLOCKS
                        for time in [
                            time_of(
                                cache, Kernel(name, target, causal, depth, 1, blocks), q_heads, s
                            )
                        ]
                        if time == time
                    ),
                    default=float("nan"),
                )
                for name in ("flash", "splash")
            }
            scored = float("nan")
            if causal and depth == 128:
                kernel = Kernel("scored", target, causal, depth, group)
                scored = time_of(cache, kernel, q_heads, s)
            best = min(t for t in (*library.values(), float("inf")) if t == t)
            bound = limit(target, causal, depth, q_heads, s)
            mask = "causal" if causal else "full"
            cells = [own, library["flash"], library["splash"], scored]
            yield [
                f"{target} {mask} {q_heads}/{kv_heads} {s} {depth}",
                *(f"{t:,.0f}" if t == t else "-" for t in cells),
                f"{own / best:.2f}",
                f"{own / bound:.1f}",
            ]


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(CLOCK), choices=list(CLOCK))
    parser.add_argument("--depths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "attention.json"))
    parser.add_argument("--update", type=Path, help="a document whose table is replaced")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        facts = json.loads(options.worker)
        compile_here(Kernel(**{**facts, "blocks": tuple(facts["blocks"])}))
        return 0
    head = ["target, mask, heads, S, D", "ours", "flash", "splash", "scored"]
    head += ["ours / best library", "ours / limit"]
    found = list(table_rows(Cache(options.cache), options.targets, options.depths))
    assert all(len(row) == len(head) for row in found)
    table = [head, ["---"] * len(head), *found]
    text = "\n".join("| " + " | ".join(row) + " |" for row in table)
    print(text)
    if options.update is not None:
        document = options.update.read_text()
        before, rest = document.split(START, 1)
        options.update.write_text(f"{before}{START}\n{text}\n{END}{rest.split(END, 1)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
