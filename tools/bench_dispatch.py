"""Per-call overhead of `hlo_opt.jit` against `jax.jit`, side by side, with 300 parameter leaves.

Exits with status 1 where ours costs more than 1.1 times JAX's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import hlo_opt

LEAVES = 300
ROUNDS = 40
CALLS = 50
LIMIT = 1.1


def step(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + params["leaf0"]


def seconds(fun: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        fun(*args)
    return (time.perf_counter() - start) / CALLS


def main() -> int:
    params = {f"leaf{n}": jnp.zeros(()) for n in range(LEAVES)}
    x = jnp.zeros(())
    options = {"keep_unused": True}
    plain, ours = jax.jit(step, **options), hlo_opt.jit(step, **options)
    plain(params, x).block_until_ready()
    ours(params, x).block_until_ready()
    times: dict[str, list[float]] = {"jax.jit": [], "hlo_opt.jit": []}
    for _ in range(ROUNDS):  # interleaved, so that both see the same machine
        times["jax.jit"].append(seconds(plain, params, x))
        times["hlo_opt.jit"].append(seconds(ours, params, x))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:12} {value * 1e6:7.1f} us per call, {LEAVES} leaves")
    ratio = medians["hlo_opt.jit"] / medians["jax.jit"]
    print(f"ratio {ratio:.3f}, limit {LIMIT}")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
