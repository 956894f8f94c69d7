"""Heads of blocks that lie as `[position, head, depth]`, as XLA keeps arguments of that shape.

One head's tile is a strided load of sublanes. Heads narrower than 32 bits share one: a pair of
heads is read, or written, at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hlo_opt import compat

LANES = 128


def is_layout(shape: tuple[int, int], dtype: np.dtype) -> bool:
    """Whether XLA:TPU lays an argument of shape `[…, head, depth]` out in that order.

    Found by compiling with libtpu: depth has to fill lanes, and heads sublanes.
    """
    heads, depth = shape
    return (
        depth % LANES == 0
        and dtype.name in ("bfloat16", "float32")
        and (heads % 8 == 0 or heads in (2, 4) or heads == at_once(dtype) == 1)
    )


def at_once(dtype: Any) -> int:
    """Heads that share sublanes, of bf16 or f32."""
    return 4 // np.dtype(dtype).itemsize


def load(ref: Any, first: int) -> list[Any]:
    """Tiles `[position, depth]` of `at_once` heads, the first a multiple of that.

    Args:
      ref: `[position, head, depth]`.
    """
    import jax
    import jax.numpy as jnp

    dtype = ref.dtype
    flat, places = _words(ref, first)
    words = jnp.concatenate([flat[place] for place in places], axis=1)
    if at_once(dtype) == 1:
        return [words]
    halves = [words << 16, words & np.uint32(0xFFFF0000)]
    return [jax.lax.bitcast_convert_type(half, jnp.float32).astype(dtype) for half in halves]


def store(ref: Any, first: int, tiles: list[Any]) -> None:
    """Inverse of `load`: writes f32 tiles `[position, depth]` of `at_once` heads."""
    import jax
    import jax.numpy as jnp

    rounded = [tile.astype(ref.dtype) for tile in tiles]
    if compat.interpreting() and not compat.interpreter_stores_in_views():
        ref[:, first : first + len(tiles), :] = jnp.stack(rounded, axis=1)
        return
    if at_once(ref.dtype) == 1:
        (words,) = rounded
    else:
        bits = [
            jax.lax.bitcast_convert_type(tile.astype(jnp.float32), jnp.uint32) for tile in rounded
        ]
        words = (bits[0] >> 16) | bits[1]
    flat, places = _words(ref, first)
    for number, place in enumerate(places):
        flat[place] = words[:, number * LANES : (number + 1) * LANES]


def _words(ref: Any, first: int) -> tuple[Any, list[Any]]:
    """A view of a block as 32-bit words, and where a head or a pair is in it, by 128 lanes."""
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    pack = at_once(ref.dtype)
    if pack > 1:
        ref = ref.bitcast(jnp.uint32)
    count, heads, depth = ref.shape
    positions = pl.ds(first // pack, count, stride=heads)
    places = [(positions, pl.ds(lane, LANES)) for lane in range(0, depth, LANES)]
    return ref.reshape(count * heads, depth), places
