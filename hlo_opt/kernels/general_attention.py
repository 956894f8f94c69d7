"""The general kernel for `hlo_opt.attention`: flash attention around any captured score.

The block body applies the captured score function to the tile of logits, with extras cut to the
tile and positions from the grid, and `probs` to the probabilities. Heads of a group share one tile
of keys and values. Which tiles are visited, and in which the conditions on positions need no
evaluation, is decided by `mask.analyse_tiles`; tiles are skipped only where every row provably sees
a key, or where nothing but -inf closes them.

Sums and maxima are f32. A row's sum is kept for each lane and added up at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from hlo_opt.kernels import Candidate, register_kernel
from hlo_opt.kernels.attention import (
    AttentionKernel,
    AttentionSpec,
    Captured,
    arrange,
    common_reasons,
    matmul_types,
    restore,
)
from hlo_opt.kernels.mask import CLOSED, MIXED, OPEN, Analysis, Fact, Range, Tiling, analyse_tiles
from hlo_opt.patterns.score import FAR_BELOW
from hlo_opt.targets import Target

LANES = 128
LOWEST = float(np.finfo(np.float32).min)
LOG2E = math.log2(math.e)
ROLES = ("batch", "kv_head", "group", "query", "key")


@register_kernel
class GeneralAttention(AttentionKernel):
    """Our own flash attention."""

    name = "Pallas general attention"
    rank = 5

    def reasons(self, spec: AttentionSpec) -> Iterator[str]:
        yield from common_reasons(spec)
        for extra in spec.extras:
            if extra.dtype.name not in EXTRA_TYPES:
                yield f"a mask or bias computed in {extra.dtype}"

    def candidates(self, spec: AttentionSpec, target: Target) -> Sequence[Candidate]:
        q, k, compute = _blocks(spec)
        config = (("block_q", q), ("block_k", k), ("compute", compute))
        return [Candidate(f"{self.name}, blocks q={q}, k={k}/{compute}", config)]

    def build(self, spec: AttentionSpec, candidate: Candidate) -> Callable[..., Any]:
        return Program(spec, **dict(candidate.config)).run


# What Mosaic computes in, on every generation.
EXTRA_TYPES = frozenset({"bool", "int32", "uint32", "float32", "bfloat16"})


def _blocks(spec: AttentionSpec) -> tuple[int, int, int]:
    group, queries, keys = (spec.size(role) for role in ("group", "query", "key"))
    q = min(queries, max(128, 1024 // group))
    k = keys if keys <= 1024 else 1024
    return q, k, 512 if k % 512 == 0 else k


@dataclass(frozen=True)
class Steps:
    """Which tiles the grid visits, in order.

    Attributes:
      count: grid steps for one head.
      query, key: block indices for each step, `[count]`.
      state: `[sequences, count]`, one of them for all sequences or one each.
      kinds: the states that occur.
    """

    count: int
    query: Any
    key: Any
    state: Any
    kinds: frozenset[int]


class Program:
    """The JAX function around the kernel, for one composite and block sizes."""

    def __init__(self, spec: AttentionSpec, block_q: int, block_k: int, compute: int) -> None:
        self.spec = spec
        self.group, self.queries, self.keys = (
            spec.size(role) for role in ("group", "query", "key")
        )
        self.heads = spec.size("kv_head")
        self.batch = math.prod(spec.size(role) for role in spec.batch_roles)
        # All rows in one block: heads and positions are one dimension.
        self.flat = block_q >= self.queries
        self.tiling = Tiling(self.queries, self.keys, block_q, block_k)
        self.groups, self.block_q = (
            (1, self.group * self.queries) if self.flat else (self.group, block_q)
        )
        self.rows = self.groups * self.block_q
        self.block_k, self.compute = block_k, compute
        self.score = Captured(spec.score)
        self.probs = Captured(spec.probs) if spec.probs else None
        self.sink = Captured(spec.sink) if spec.sink else None
        self.analysis = self._analyse()

    def _analyse(self) -> Analysis:
        sizes = (self.batch, self.heads * self.group)
        nothing: list[Fact] = [None] * len(self.spec.extras)
        return analyse_tiles(self.score.function, self.tiling, sizes, nothing)

    def run(self, q: Any, k: Any, v: Any, *extras: Any) -> Any:
        """The composite's results from its operands."""
        import jax.numpy as jnp

        spec = self.spec
        qk_type, pv_type = matmul_types(spec)
        q = arrange(q, spec.q_dims, spec, ("batch", "kv_head", "group", "query", "depth"))
        k = arrange(k, spec.k_dims, spec, ("batch", "kv_head", "key", "depth")).astype(qk_type)
        v = arrange(v, spec.v_dims, spec, ("batch", "kv_head", "key", "value_depth"))
        q = self._flattened(q).astype(qk_type)
        tiles = [self._tile(x, dims) for x, dims in zip(extras, spec.extra_dims, strict=True)]
        steps = self._steps(extras)
        out, *statistics = self._call(steps, q, k, v.astype(pv_type), tiles)
        shape = (self.batch, self.heads, self.group, self.queries, -1)
        return restore(out.reshape(shape).astype(spec.result.dtype), spec)

    def _flattened(self, x: Any) -> Any:
        """Heads of a group and positions (axes 2 and 3) as one dimension, where they are."""
        if not self.flat:
            return x
        return x.reshape(*x.shape[:2], 1, x.shape[2] * x.shape[3], *x.shape[4:])

    def _tile(self, x: Any, dims: Sequence[str]) -> Any:
        """An extra as `[batch, kv_head, group, query, key]`, sizes 1 where it does not vary."""
        import jax.numpy as jnp

        x = arrange(x, dims, self.spec, ROLES)
        if x.dtype == jnp.bool_:
            x = x.astype(jnp.int8 if x.shape[3] > 1 and x.shape[4] > 1 else jnp.int32)
        if self.flat and x.shape[2] * x.shape[3] > 1:
            x = jnp.broadcast_to(x, (*x.shape[:2], self.group, self.queries, x.shape[4]))
        return self._flattened(x)

    def _steps(self, extras: Sequence[Any]) -> Steps:
        states = np.asarray(self.analysis.states)
        queries, keys = states.shape
        if not self._rows_see_a_key():
            states = np.where(states == CLOSED, MIXED, states)
        states = states.copy()
        if self.keys % self.block_k:
            states[:, -1] = np.where(states[:, -1] == OPEN, MIXED, states[:, -1])
        for row in states:  # a result must be written, whatever it is
            if not row.any():
                row[0] = MIXED
        visited = np.argwhere(states != CLOSED)
        return Steps(
            count=len(visited),
            query=visited[:, 0].astype(np.int32),
            key=visited[:, 1].astype(np.int32),
            state=states[states != CLOSED].astype(np.int32)[None],
            kinds=frozenset(states[states != CLOSED].tolist()),
        )

    def _rows_see_a_key(self) -> bool:
        """Whether every row provably sees a key that depends on positions alone."""
        import jax
        import jax.numpy as jnp

        if not (np.asarray(self.analysis.states) == CLOSED).any():
            return True
        with jax.ensure_compile_time_eval():
            query = jnp.arange(self.queries, dtype=jnp.int32)[:, None]
            last = jnp.full_like(query, self.keys - 1)
            aligned = jnp.clip(query + self.keys - self.queries, 0, self.keys - 1)
            key = jnp.concatenate([jnp.minimum(query, last), aligned, 0 * query, last], axis=1)
            if self.spec.extras:
                return False
            value = self.score(jnp.float32(0), jnp.int32(0), jnp.int32(0), query, key)
            opened = jnp.broadcast_to(value > 0.5 * FAR_BELOW, key.shape)
            return bool(jnp.all(jnp.any(opened, axis=1)))

    def _call(self, steps: Steps, q: Any, k: Any, v: Any, tiles: list[Any]) -> Any:
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        depth, value_depth = self.spec.size("depth"), self.spec.size("value_depth")
        count = steps.count

        def place(t: Any, query: Any) -> Any:
            return query[t]

        def rows(last: int) -> Any:
            return pl.BlockSpec(
                (1, 1, self.groups, self.block_q, last),
                lambda b, h, t, query, key, state: (b, h, 0, query[t], 0),
            )

        def columns(last: int) -> Any:
            return pl.BlockSpec(
                (1, 1, self.block_k, last),
                lambda b, h, t, query, key, state: (b, h, key[t], 0),
            )

        out = jax.ShapeDtypeStruct((*q.shape[:-1], value_depth), self.spec.result.dtype)
        wide = [(self.rows, LANES), (self.rows, LANES), (self.rows, value_depth)]
        return pl.pallas_call(
            lambda *refs: self._kernel(steps, *refs),
            out_shape=[out],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(self.batch, self.heads, count),
                in_specs=[
                    rows(depth),
                    columns(depth),
                    columns(value_depth),
                    *map(self._tile_spec, tiles),
                ],
                out_specs=[rows(value_depth)],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in wide],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
            ),
            name="hlo_opt_attention",
        )(
            jnp.asarray(steps.query),
            jnp.asarray(steps.key),
            jnp.asarray(steps.state).reshape(-1),
            q,
            k,
            v,
            *tiles,
        )

    def _tile_spec(self, x: Any) -> Any:
        from jax.experimental import pallas as pl

        batch, head, group, query, key = (size > 1 for size in x.shape)
        return pl.BlockSpec(
            (
                1,
                1,
                x.shape[2],
                self.block_q if query else 1,
                self.block_k if key else 1,
            ),
            lambda b, h, t, qs, ks, state: (
                b if batch else 0,
                h if head else 0,
                0,
                qs[t] if query else 0,
                ks[t] if key else 0,
            ),
        )

    def _kernel(
        self, steps: Steps, query: Any, key: Any, state: Any, q: Any, k: Any, v: Any, *rest: Any
    ) -> None:
        """One tile; refs are blocks in VMEM."""
        import jax.numpy as jnp
        from jax.experimental import pallas as pl

        *tiles, out, top, total, acc = rest
        b, h, t = (pl.program_id(axis) for axis in range(3))
        i, j, kind = query[t], key[t], state[t]
        last = steps.count - 1
        first_here = (t == 0) | (query[jnp.maximum(t - 1, 0)] != i)
        last_here = (t == last) | (query[jnp.minimum(t + 1, last)] != i)

        @pl.when(first_here)
        def _() -> None:
            top[...] = jnp.full(top.shape, LOWEST, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            acc[...] = jnp.zeros(acc.shape, jnp.float32)

        for one in sorted(steps.kinds):
            if len(steps.kinds) == 1:
                self._attend(one == OPEN, b, h, i, j, q, k, v, tiles, (top, total, acc))
                continue

            @pl.when(kind == one)
            def _(one: int = one) -> None:
                self._attend(one == OPEN, b, h, i, j, q, k, v, tiles, (top, total, acc))

        @pl.when(last_here)
        def _() -> None:
            whole = jnp.sum(total[...], axis=1, keepdims=True)
            result = acc[...] / whole
            out[0, 0] = result.reshape(out.shape[2:]).astype(out.dtype)

    def _positions(self, h: Any, i: Any) -> tuple[Any, Any]:
        """Head and query indices of a block's rows, broadcasting to `[groups, block_q, 1]`."""
        import jax
        import jax.numpy as jnp

        if not self.flat:
            shape = (self.groups, 1, 1)
            heads = h * self.group + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
            rows = jax.lax.broadcasted_iota(jnp.int32, (1, self.block_q, 1), 1)
            return heads, i * self.block_q + rows
        row = jax.lax.broadcasted_iota(jnp.int32, (1, self.block_q, 1), 1)
        if self.group == 1:
            return h, row
        if self.queries == 1:
            return h * self.group + row, jnp.int32(0)
        size = jnp.int32(self.queries)
        return h * self.group + jax.lax.div(row, size), jax.lax.rem(row, size)

    def _attend(
        self,
        is_open: bool,
        b: Any,
        h: Any,
        i: Any,
        j: Any,
        q: Any,
        k: Any,
        v: Any,
        tiles: Sequence[Any],
        state: tuple[Any, Any, Any],
    ) -> None:
        """Online softmax over one tile, `compute` keys at a time."""
        import jax
        import jax.numpy as jnp

        top, total, acc = state
        known = self.analysis.known if is_open else None
        scale = self.analysis.scale if is_open else None
        queries = q[0, 0].reshape(self.rows, -1)
        shape = (self.groups, self.block_q, self.compute)
        edge = bool(self.keys % self.block_k) and not is_open
        heads, positions = self._positions(h, i)
        m, l, o = top[...], total[...], acc[...]
        for c in range(self.block_k // self.compute):
            part = slice(c * self.compute, (c + 1) * self.compute)
            s = _dot(queries, k[0, 0, part], 1)
            values = v[0, 0, part]
            keys = j * self.block_k + c * self.compute
            keys = keys + jax.lax.broadcasted_iota(jnp.int32, (1, 1, self.compute), 2)
            inputs = (*self._loaded(tiles, part), b, heads, positions, keys)
            if scale is None or scale <= 0:
                x = self.score(s.reshape(shape), *inputs, known=known)
                x = jnp.broadcast_to(x, shape)
                if edge:
                    x = jnp.where(keys < self.keys, x, -jnp.inf)
                    rows = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
                    left = self.keys - j * self.block_k - c * self.compute
                    values = jnp.where(rows < left, values, jnp.zeros_like(values))
                x = x.reshape(self.rows, self.compute)
                now = jnp.maximum(m, jnp.max(x, axis=1, keepdims=True))
                p = jnp.exp(x - _across(now, x.shape))
            elif queries.dtype == jnp.float32:
                s = s * scale
                now = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
                p = jnp.exp(s - _across(now, s.shape))
            else:
                now = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True) * scale)
                p = jnp.exp2(s * (scale * LOG2E) - _across(now * LOG2E, s.shape))
            fade = jnp.exp(m - now)
            l = l * fade + _by_lane(p)
            if self.probs is not None:
                p = self.probs(p.reshape(shape), *inputs, known=known)
                p = jnp.broadcast_to(p, shape).reshape(self.rows, self.compute)
            o = o * _across(fade, o.shape) + _dot(p.astype(values.dtype), values, 0)
            m = now
        top[...], total[...], acc[...] = m, l, o

    def _loaded(self, tiles: Sequence[Any], part: slice) -> list[Any]:
        """Extras of some keys, in the types the captured functions take."""
        import jax.numpy as jnp

        loaded = []
        for tile, type_ in zip(tiles, self.spec.extras, strict=True):
            x = tile[0, 0, :, :, part] if tile.shape[4] > 1 else tile[0, 0]
            loaded.append(x.astype(jnp.int32) != 0 if type_.dtype == jnp.bool_ else x)
        return loaded


def _across(x: Any, shape: tuple[int, ...]) -> Any:
    """`[rows, 128]` with equal lanes as `[rows, n]`."""
    import jax.numpy as jnp

    width = shape[1]
    if width <= LANES:
        return x[:, :width]
    if width % LANES:
        return jnp.broadcast_to(x[:, :1], shape)
    return jnp.concatenate([x] * (width // LANES), axis=1)


def _by_lane(p: Any) -> Any:
    """Sums of `[rows, n]` by lane, `[rows, 128]`."""
    import jax.numpy as jnp

    width = p.shape[1]
    if width % LANES:
        p = jnp.pad(p, ((0, 0), (0, -width % LANES)))
    parts = [p[:, n : n + LANES] for n in range(0, p.shape[1], LANES)]
    while len(parts) > 1:
        parts = [sum(parts[n : n + 2]) for n in range(0, len(parts), 2)]
    return parts[0]


def _dot(left: Any, right: Any, contracted: int) -> Any:
    """`[m, n]` of `left` `[m, d]` and `right`, whose dimension `contracted` is d; f32."""
    import jax
    import jax.numpy as jnp

    dims = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
