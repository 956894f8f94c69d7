"""Time and peak temporary bytes of attention on CPU: decomposition against blocks.

Prints one line of a Markdown table for each case; `chosen` says what the rule takes. Exits with
status 1 where blocks are chosen and are slower by more than a tenth.

Usage: bench_cpu_attention.py [LENGTH…]
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hlo_opt
from hlo_opt import ir as hlo_ir
from hlo_opt.kernels import blocked_attention
from hlo_opt.pipeline import PassContext, run_pipeline

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
HEADS = ((8, 8), (8, 2))  # of queries, of keys and values
DEPTH = 64
SLACK = 1.1


def attention(causal: bool) -> Callable[..., jax.Array]:
    """Attention of `[batch, sequence, head, depth]` with f32 logits."""

    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        b, s, h, d = q.shape
        grouped = q.reshape(b, s, k.shape[2], h // k.shape[2], d)
        x = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k, preferred_element_type=jnp.float32)
        x = x * d**-0.5
        if causal:
            x = jnp.where(jnp.tri(s, k.shape[1], dtype=bool), x, -1e30)
        p = jax.nn.softmax(x, axis=-1).astype(v.dtype)
        return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(q.shape)

    return fn


def measure(compiled: list[Any], inputs: list[jax.Array]) -> list[float]:
    """The least milliseconds a call of each takes, in turns: five, or what fits 5 s."""
    seconds: list[list[float]] = [[] for _ in compiled]
    for call in compiled:
        jax.block_until_ready(call(*inputs))
    began = time.perf_counter()
    while not seconds[0] or (len(seconds[0]) < 5 and time.perf_counter() - began < 5):
        for runs, call in zip(seconds, compiled, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call(*inputs))
            runs.append(time.perf_counter() - start)
    return [1e3 * min(runs) for runs in seconds]


def is_chosen(lowered: Any) -> bool:
    """Whether the rule takes blocks."""
    module = hlo_ir.parse(lowered.as_text())
    return "composite" not in str(run_pipeline(module, "inference", PassContext(target="cpu")))


def case(length: int, heads: tuple[int, int], dtype: Any, causal: bool) -> bool:
    """Prints a line; returns whether nothing got slower."""
    rng = np.random.default_rng(0)
    shapes = [(1, length, count, DEPTH) for count in (heads[0], heads[1], heads[1])]
    inputs = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    lowered = jax.jit(attention(causal)).lower(*inputs)
    chosen = is_chosen(lowered)
    rule = blocked_attention.LOGITS_BYTES, blocked_attention.SHORTEST
    blocked_attention.LOGITS_BYTES, blocked_attention.SHORTEST = 0, {}
    blocked = hlo_opt.optimize(lowered, target="cpu")
    blocked_attention.LOGITS_BYTES, blocked_attention.SHORTEST = rule
    compiled = [lowered.compile(), blocked.compile()]
    before, after = measure(compiled, inputs)
    megabytes = [c.memory_analysis().temp_size_in_bytes / 2**20 for c in compiled]
    print(
        f"| {length} | {heads[0]}/{heads[1]} | {jnp.dtype(dtype).name} "
        f"| {'causal' if causal else 'full'} | {before:.1f} | {after:.1f} "
        f"| {megabytes[0]:.0f} | {megabytes[1]:.0f} | {'blocks' if chosen else 'decomposition'} |",
        flush=True,
    )
    return not chosen or after <= SLACK * before


def main() -> int:
    print("| S | heads | type | mask | ms before | ms blocks | MB before | MB blocks | chosen |")
    print("|---|---|---|---|---|---|---|---|---|")
    lengths = [int(word) for word in sys.argv[1:]] or LENGTHS
    types = (jnp.float32, jnp.bfloat16)
    cases = itertools.product(lengths, HEADS, types, (True, False))
    return 0 if all([case(*one) for one in cases]) else 1


if __name__ == "__main__":
    sys.exit(main())
