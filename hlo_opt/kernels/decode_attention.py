"""The kernel for `hlo_opt.decode_attention`: one query against a cache that is updated in place.

The caches stay in HBM in the layout XLA gives them, which depends on their shape (found by
compiling with libtpu): minor to major

- `rows`: depth, head, key, where depth fills whole lanes and heads whole sublanes;
- `heads`: depth, key, head, where depth fills lanes but the heads do not fill sublanes;
- `lanes`: key, depth, head, where depth does not fill lanes.

A transposition into that order costs nothing, in any other order it would copy the cache. The grid
walks over batch and blocks of keys; the length is a prefetched scalar, so that blocks behind it are
not fetched. In the block that holds the position the new keys and values are put into the tile, and
the smallest aligned piece of the cache around it is written back through the aliased output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hlo_opt import compat
from hlo_opt.kernels import Candidate, register_kernel, rows
from hlo_opt.kernels.attention import (
    EXTRA_TYPES,
    TERMS,
    AttentionKernel,
    AttentionSpec,
    Captured,
    arrange,
    common_reasons,
    dot,
    matmul_types,
    probs_reasons,
    restore,
    score_bias,
)
from hlo_opt.kernels.rows import LANES
from hlo_opt.patterns.score import FAR_BELOW, Linear
from hlo_opt.targets import Target

# What two buffers of a block of keys and one of values may take of the 16 MB of VMEM that v5e
# gives a kernel; queries, extras and results are small beside them.
BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Layout:
    """How a cache lies in HBM: the order of its dimensions, and the unit written back.

    Attributes:
      order: roles, major to minor.
      unit: how many keys are written together; a power of two.
    """

    name: str
    order: tuple[str, str, str, str]
    unit: int

    @property
    def key_axis(self) -> int:
        """Place of the keys in `order`."""
        return self.order.index("key")

    def shape(self, **sizes: Any) -> tuple[Any, ...]:
        """Sizes by role in this order; roles not given have size 1."""
        return tuple(sizes.get(role, 1) for role in self.order)


def layout_of(dims: Sequence[str], heads: int, depth: int, dtype: np.dtype) -> Layout:
    """The layout XLA:TPU gives a cache that enters a program.

    Args:
      dims: roles of the cache's dimensions, major to minor.
    """
    if depth % LANES:
        return Layout("lanes", ("batch", "kv_head", "depth", "key"), LANES)
    packed = 4 // dtype.itemsize
    heads_first = "kv_head" in dims and list(dims).index("kv_head") < list(dims).index("key")
    if heads_first:
        return Layout("heads", ("batch", "kv_head", "key", "depth"), 8 * packed)
    if rows.is_layout((heads, depth), dtype):
        return Layout("rows", ("batch", "key", "kv_head", "depth"), 1)
    return Layout("heads", ("batch", "kv_head", "key", "depth"), 8 * packed)


@register_kernel
class DecodeAttention(AttentionKernel):
    """One query a sequence, the cache updated by the same call."""

    composite = "hlo_opt.decode_attention"
    name = "Pallas decode attention"
    rank = 10
    leading = 6
    updated = (3, 4)

    def reasons(self, spec: AttentionSpec) -> Iterator[str]:
        yield from common_reasons(spec)
        yield from _cache_reasons(spec)
        if spec.sink:
            yield "the softmax has a sink"
        if spec.size("query") != 1:
            yield f"{spec.size('query')} queries, the kernel takes one"
        for extra in spec.extras:
            if extra.dtype.name not in EXTRA_TYPES:
                yield f"a mask or bias computed in {extra.dtype}"
        yield from probs_reasons(spec)

    def candidates(self, spec: AttentionSpec, target: Target) -> Sequence[Candidate]:
        block = _block(spec)
        return [Candidate(f"{self.name}, block k={block}, cache in place", (("block", block),))]

    def build(self, spec: AttentionSpec, candidate: Candidate) -> Callable[..., Any]:
        return _Program(spec, dict(candidate.config)["block"]).run


def _cache_reasons(spec: AttentionSpec) -> Iterator[str]:
    keys, values, position = spec.arguments[3:6]
    for cache, new, dims in ((keys, 1, spec.k_dims), (values, 2, spec.v_dims)):
        written = tuple(
            spec.size("query") if dim == "key" else size
            for dim, size in zip(dims, cache.shape, strict=True)
        )
        if spec.arguments[new] != replace(cache, shape=written):
            yield f"{spec.arguments[new]} is written into a cache {cache} of {', '.join(dims)}"
    if position.shape:
        yield f"a position {position}"
    if spec.size("key") % LANES:
        yield f"{spec.size('key')} key positions, not a multiple of {LANES}"
    if keys.dtype != values.dtype or keys.dtype.name not in ("bfloat16", "float32"):
        yield f"caches of {keys.dtype} and {values.dtype}"
    if position.dtype.name not in ("int32", "uint32"):
        yield f"a position in {position.dtype}"
    deepest = max(spec.size("depth"), spec.size("value_depth"))
    if keys.dtype == np.float32 and deepest > LANES:
        yield f"f32 caches of depth {deepest}, which Mosaic takes minutes to compile"
    if not _block(spec):
        yield f"128 keys of all heads take more than {BLOCK_BYTES >> 20} MB of VMEM"


def _block(spec: AttentionSpec) -> int:
    """Keys in a block: the largest that fits; 0 where none does."""
    cache, heads = spec.arguments[3], spec.size("kv_head")
    padded = [-(-spec.size(role) // LANES) * LANES for role in ("depth", "value_depth")]
    each = max(heads, 8) * sum(padded) * cache.dtype.itemsize * 2
    sizes = (b for b in (1024, 512, 256, 128) if spec.size("key") % b == 0)
    return next((b for b in sizes if b * each <= BLOCK_BYTES), 0)


class _Program:
    """The JAX function around the kernel, for one composite and block size."""

    def __init__(self, spec: AttentionSpec, block: int) -> None:
        self.spec = spec
        self.block = block
        self.heads, self.group = spec.size("kv_head"), spec.size("group")
        self.length = spec.size("key")
        self.batch = math.prod(spec.size(role) for role in spec.batch_roles)
        cache = spec.arguments[3].dtype
        sides = ((spec.k_dims, "depth"), (spec.v_dims, "value_depth"))
        self.layouts = [
            layout_of(dims, self.heads, spec.size(depth), cache) for dims, depth in sides
        ]
        self.score = Captured(spec.score)
        self.probs = Captured(spec.probs) if spec.probs else None

    def run(
        self, q: Any, k_new: Any, v_new: Any, k: Any, v: Any, position: Any, *extras: Any
    ) -> Any:
        """The composite's results from its operands."""
        import jax.numpy as jnp

        spec = self.spec
        caches = [self._arranged(k, spec.k_dims, 0), self._arranged(v, spec.v_dims, 1)]
        news = [self._arranged(k_new, spec.k_dims, 0), self._arranged(v_new, spec.v_dims, 1)]
        q = arrange(q, spec.q_dims, spec, ("batch", "kv_head", "group", "depth"))
        # `dynamic_update_slice` clamps, a uint32 from above only.
        start = jnp.clip(position, 0, self.length - 1).astype(jnp.int32)
        last = jnp.maximum(self._limit(extras) - 1, start) // self.block
        out, *updated = self._call(
            jnp.stack([start, last.astype(jnp.int32)]), q, news, caches, self._tiles(extras)
        )
        out = restore(out[:, :, :, None].astype(spec.result.dtype), spec)
        return out, *(
            self._restored(cache, dims, side, like)
            for side, (cache, dims, like) in enumerate(
                zip(updated, (spec.k_dims, spec.v_dims), (k, v), strict=True)
            )
        )

    def _roles(self, side: int) -> tuple[str, ...]:
        """Roles of a cache in its layout; the depth of values has a name of its own."""
        names = {"depth": ("depth", "value_depth")[side]}
        return tuple(names.get(role, role) for role in self.layouts[side].order)

    def _arranged(self, x: Any, dims: Sequence[str], side: int) -> Any:
        """A cache, or what is written to it, in the cache's layout."""
        wanted = self._roles(side)
        key = x.shape[list(dims).index("key")]
        return arrange(x, dims, self.spec, wanted, {"key": key})

    def _restored(self, x: Any, dims: Sequence[str], side: int, like: Any) -> Any:
        """Inverse of `_arranged`."""
        spec = self.spec
        full = [
            name
            for role in self._roles(side)
            for name in (spec.batch_roles if role == "batch" else (role,))
        ]
        names = [name for dim in dims if dim != "1" for name in dim.split("*")]
        x = x.reshape([spec.size(name) for name in full])
        rest = [name for name in full if name not in names]
        return x.transpose([full.index(name) for name in (*rest, *names)]).reshape(like.shape)

    def _limit(self, extras: Sequence[Any]) -> Any:
        """Keys that have to be read: up to the last open one, all where a row sees none.

        A row that sees nothing averages all values where masks are finite, so nothing is skipped.
        """
        import jax.numpy as jnp

        if not isinstance(self.spec.form, Linear):
            return jnp.int32(self.length)
        bias = score_bias(self.spec, extras)
        if bias.shape[-1] == 1:
            return jnp.int32(self.length)
        opened = bias > 0.5 * FAR_BELOW
        keys = jnp.arange(1, self.length + 1, dtype=jnp.int32)
        ends = jnp.max(jnp.where(opened, keys, 0), axis=-1)
        return jnp.where(jnp.all(ends > 0), jnp.max(ends), self.length)

    def _tiles(self, extras: Sequence[Any]) -> list[Any]:
        """Extras as `[batch, kv_head, group, key]`, sizes 1 where they do not vary."""
        import jax.numpy as jnp

        tiles = []
        for extra, dims in zip(extras, self.spec.extra_dims, strict=True):
            tile = arrange(extra, dims, self.spec, ("batch", "kv_head", "group", "key"))
            tiles.append(tile.astype(jnp.int32) if tile.dtype == jnp.bool_ else tile)
        return tiles

    def _piece(self, side: int, keys: int) -> tuple[Any, ...]:
        """The shape of some keys of one sequence's cache."""
        depth = self.spec.size(("depth", "value_depth")[side])
        return self.layouts[side].shape(kv_head=self.heads, key=keys, depth=depth)

    def _block_spec(self, side: int) -> Any:
        """The blocks of a cache that are read."""
        from jax.experimental import pallas as pl

        layout = self.layouts[side]
        return pl.BlockSpec(
            self._piece(side, self.block),
            lambda b, j, s: layout.shape(batch=b, kv_head=0, key=_least(j, s[1]), depth=0),
        )

    def _unit_spec(self, side: int) -> Any:
        """The piece of a cache that is written."""
        import jax
        from jax.experimental import pallas as pl

        layout = self.layouts[side]
        shift = layout.unit.bit_length() - 1
        return pl.BlockSpec(
            self._piece(side, layout.unit),
            lambda b, j, s: layout.shape(
                batch=b, kv_head=0, key=jax.lax.shift_right_logical(s[0], shift), depth=0
            ),
        )

    def _tile_spec(self, x: Any) -> Any:
        """The tiles of an extra, of what `_tiles` gave."""
        from jax.experimental import pallas as pl

        keys = self.block if x.shape[3] > 1 else 1
        return pl.BlockSpec(
            (1, *x.shape[1:3], keys),
            lambda b, j, s: (
                b if x.shape[0] > 1 else 0,
                0,
                0,
                _least(j, s[1]) if keys > 1 else 0,
            ),
        )

    def _call(
        self, scalars: Any, q: Any, news: list[Any], caches: list[Any], tiles: list[Any]
    ) -> Any:
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        def whole(x: Any) -> Any:
            return pl.BlockSpec((1, *x.shape[1:]), lambda b, j, s: (b, *[0] * (x.ndim - 1)))

        depth = self.spec.size("value_depth")
        out = jax.ShapeDtypeStruct((*q.shape[:3], depth), jnp.float32)
        scratch = [(self.heads, self.group, last) for last in (1, 1, depth)]
        return pl.pallas_call(
            self._kernel,
            out_shape=[out, *(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in caches)],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(self.batch, self.length // self.block),
                in_specs=[
                    whole(q),
                    *map(whole, news),
                    *(self._block_spec(side) for side in (0, 1)),
                    *map(self._tile_spec, tiles),
                ],
                out_specs=[whole(out), *(self._unit_spec(side) for side in (0, 1))],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            input_output_aliases={4: 1, 5: 2},
            name="hlo_opt_decode_attention",
        )(scalars, q, *news, *(_in_hbm(cache) for cache in caches), *tiles)

    def _kernel(
        self, scalars: Any, q: Any, k_new: Any, v_new: Any, k: Any, v: Any, *rest: Any
    ) -> None:
        """One block of keys of one sequence; refs are blocks in VMEM."""
        import jax.numpy as jnp
        from jax.experimental import pallas as pl

        *tiles, out, k_out, v_out, top, total, acc = rest
        b, j = pl.program_id(0), pl.program_id(1)
        start, last = scalars[0], scalars[1]

        @pl.when(j == 0)
        def _() -> None:
            top[...] = jnp.full(top.shape, -jnp.inf, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            acc[...] = jnp.zeros(acc.shape, jnp.float32)

        first = j * self.block
        holds = (start >= first) & (start < first + self.block)

        def attend(written: bool) -> None:
            for head in range(self.heads):
                place = start - first if written else None
                keys = self._load(0, k, k_new, head, place)
                values = self._load(1, v, v_new, head, place)
                extras = [t[0, min(head, t.shape[1] - 1)] for t in tiles]
                self._attend(b, head, first, q[0, head], keys, values, extras, (top, total, acc))

        @pl.when(holds)
        def _() -> None:
            attend(written=True)
            for side, refs in enumerate(((k, k_new, k_out), (v, v_new, v_out))):
                self._write_back(side, *refs, start, first)

        @pl.when(jnp.logical_not(holds) & (j <= last))
        def _() -> None:
            attend(written=False)

        @pl.when(j == self.length // self.block - 1)
        def _() -> None:
            out[0] = acc[...] / total[...]

    def _load(self, side: int, ref: Any, new: Any, head: int, place: Any) -> Any:
        """The tile of one head, `[key, depth]`, or `[depth, key]` in lanes; patched at `place`."""
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl

        rows = self.layouts[side].name == "rows"
        if rows and (depth := ref.shape[-1]) == LANES:  # a strided load, which wider rows lack
            flat = ref.at[0].reshape(self.block * self.heads, depth)
            tile = flat[pl.ds(head, self.block, stride=self.heads), :]
        else:
            tile = ref[0, :, head, :] if rows else ref[0, head]
        if place is None:
            return tile
        row = new[0, :, head, :] if rows else new[0, head]
        axis = 1 if self.layouts[side].name == "lanes" else 0
        keys = jax.lax.broadcasted_iota(jnp.int32, tile.shape, axis)
        return jnp.where(keys == place, row, tile)

    def _attend(
        self, b: Any, head: int, first: Any, q: Any, k: Any, v: Any, extras: list[Any], state: Any
    ) -> None:
        """One step of online softmax for the queries `[group, depth]` of one head."""
        import jax
        import jax.numpy as jnp

        top, total, acc = state
        qk_type, pv_type = matmul_types(self.spec)
        sides = [0 if layout.name == "lanes" else 1 for layout in self.layouts]
        logit = dot(q.astype(qk_type), k.astype(qk_type), sides[0], _terms(qk_type))
        heads = head * self.group + jax.lax.broadcasted_iota(jnp.int32, (self.group, 1), 0)
        keys = first + jax.lax.broadcasted_iota(jnp.int32, (1, self.block), 1)
        inputs = (*self._typed(extras), b, heads, jnp.int32(0), keys)
        x = jnp.broadcast_to(self.score(logit, *inputs), logit.shape)
        before = top[head]
        now = jnp.maximum(before, jnp.max(x, axis=1, keepdims=True))
        # While all is -inf, nothing must be subtracted: exp(-inf) is the zero that is wanted.
        safe = jnp.where(now == -jnp.inf, 0.0, now)
        p = jnp.exp(x - safe)
        fade = jnp.exp(before - safe)
        total[head] = total[head] * fade + jnp.sum(p, axis=1, keepdims=True)
        if self.probs is not None:
            p = jnp.broadcast_to(self.probs(p, *inputs), p.shape)
        product = dot(p.astype(pv_type), v.astype(pv_type), 1 - sides[1], _terms(pv_type))
        acc[head] = acc[head] * fade + product
        top[head] = now

    def _typed(self, extras: list[Any]) -> list[Any]:
        """Loaded extras in the types the captured functions take."""
        import jax.numpy as jnp

        types = [argument.dtype for argument in self.spec.extras]
        return [
            extra != 0 if type_ == jnp.bool_ else extra
            for extra, type_ in zip(extras, types, strict=True)
        ]

    def _write_back(self, side: int, ref: Any, new: Any, out: Any, start: Any, first: Any) -> None:
        """Fills the piece of the cache that is written: the new row among its neighbours."""
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl

        layout = self.layouts[side]
        if layout.unit == 1:
            out[...] = new[...]
            return
        offset = pl.multiple_of((start & -layout.unit) - first, layout.unit)
        piece: list[Any] = [slice(None)] * 4
        piece[layout.key_axis] = pl.ds(offset, layout.unit)
        old = ref[tuple(piece)]
        keys = jax.lax.broadcasted_iota(jnp.int32, old.shape, layout.key_axis)
        out[...] = jnp.where(keys == start - first - offset, new[...], old)


def _in_hbm(cache: Any) -> Any:
    """Keeps XLA from moving a small cache to VMEM and back, all of it, around the call."""
    from jax.experimental.pallas import tpu as pltpu

    if compat.interpreting():  # jax 0.10's interpreter knows no memory spaces
        return cache
    return pltpu.with_memory_space_constraint(cache, pltpu.HBM)


def _least(j: Any, last: Any) -> Any:
    """Blocks behind the last one are that one again, so that nothing is fetched for them."""
    import jax.numpy as jnp

    return jnp.minimum(j, last)


def _terms(type_: Any) -> int | None:
    """How many products of a type are summed in one go; None for all."""
    return TERMS if np.dtype(type_) == np.float32 else None
