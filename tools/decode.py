"""Greedy decoding before and after, in lockstep, and what TPU compilers make of a decode step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlo_opt.targets import CompileReport

# What runs on this host what a v5e would run: kernels through Pallas's interpreter.
INTERPRETED = "raise,lower-composites{target=v5e interpret=true},symbol-dce"
INTERPRETED_INT8 = (
    "raise,hoist-weights,quantize{weights=int8},"
    "lower-composites{target=v5e interpret=true},symbol-dce"
)


def random_parameters(shapes: Any, seed: int) -> Any:
    """A tree of random parameters: vectors one, matrices so that activations keep their scale.

    Args:
      shapes: a tree of `jax.ShapeDtypeStruct`.
    """
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = [
        jax.random.normal(key, s.shape, s.dtype) * max(s.shape[0], s.shape[-1] // 4) ** -0.5
        if len(s.shape) > 1
        else jnp.ones(s.shape, s.dtype)
        for key, s in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, made)


@dataclass
class Lockstep:
    """Two decodings of the same tokens.

    Attributes:
      same_tokens, tokens: how many greedy choices agree, of how many.
      logits_rms, logits_error: RMS of the logits and of their difference.
      cache_error: the largest difference of any cache at any step.
    """

    same_tokens: int = 0
    tokens: int = 0
    logits_rms: float = 0.0
    logits_error: float = 0.0
    cache_error: float = 0.0

    def __str__(self) -> str:
        return (
            f"tokens equal: {self.same_tokens} of {self.tokens}; logits RMS {self.logits_rms:.3g}, "
            f"RMS error {self.logits_error:.3g}; largest cache difference {self.cache_error:.3g}"
        )


def decode(
    reference: Callable[..., Any],
    ours: Callable[..., Any],
    params: tuple[Any, Any],
    cache: Any,
    tokens: jax.Array,
    position: int,
    steps: int,
) -> Lockstep:
    """Decodes greedily with two step functions, both fed the reference's tokens.

    Args:
      reference, ours: from `(params, cache, tokens [batch, 1], position)` to `(logits, cache)`;
        the cache is donated.
      params: what each of them takes.
      cache: where both start.
      tokens: the first tokens, `[batch, 1]`.
    """
    caches = [jax.tree.map(jnp.copy, cache) for _ in (reference, ours)]
    found, errors, squares = Lockstep(), [], []
    for at in range(position, position + steps):
        made = []
        for number, step in enumerate((reference, ours)):
            logits, caches[number] = step(params[number], caches[number], tokens, jnp.int32(at))
            made.append(np.asarray(logits, np.float64))
        choices = [logits.argmax(-1) for logits in made]
        found.same_tokens += int((choices[0] == choices[1]).sum())
        found.tokens += choices[0].size
        errors.append(np.mean((made[0] - made[1]) ** 2))
        squares.append(np.mean(made[0] ** 2))
        differences = jax.tree.map(_largest_difference, *caches)
        found.cache_error = max(found.cache_error, *jax.tree.leaves(differences))
        tokens = jnp.asarray(choices[0][:, None], jnp.int32)
    found.logits_error = math.sqrt(np.mean(errors))
    found.logits_rms = math.sqrt(np.mean(squares))
    return found


def _largest_difference(a: jax.Array, b: jax.Array) -> float:
    return float(jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))))


def cache_bytes(cache: Any) -> int:
    """Bytes of all arrays of a cache that hold keys or values."""
    leaves = [leaf for leaf in jax.tree.leaves(cache) if len(leaf.shape) > 2]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def copies(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions of optimised HLO that write a new buffer of a shape, in any order of dimensions.

    What stands inside fusions writes no buffer of its own, and results of the Pallas call are
    its operands.
    """
    wanted, found, fused = sorted(n for n in shape if n > 1), [], False
    for line in hlo.splitlines():
        if line and not line.startswith(" "):
            fused = line.startswith("%fused")
        match = re.match(r"\s+(?:ROOT )?%?\S+ = \(?\w+\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if fused or match is None or match[2] in _NO_BUFFER:
            continue
        if sorted(n for n in map(int, match[1].split(",")) if n > 1) == wanted:
            found.append(line.strip()[:160])
    return found


_NO_BUFFER = ("parameter", "bitcast", "get-tuple-element", "tuple", "custom-call")


def describe(report: CompileReport, cache: Any) -> str:
    """What a compiler says of a decode step in a line."""
    held = cache_bytes(cache)
    aliased = "all of the cache" if report.alias_bytes >= held else "not all of the cache"
    return (
        f"{report.target:6} arguments {report.argument_bytes:,} bytes; aliased "
        f"{report.alias_bytes:,} ({aliased}); temporaries {report.temporary_bytes:,}; "
        f"Pallas kernels {report.kernels}"
    )
