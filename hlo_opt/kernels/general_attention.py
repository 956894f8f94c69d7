"""The general kernel for `hlo_opt.attention`: flash attention around any captured score.

The block body applies the captured score function to the tile of logits, with extras cut to the
tile and positions from the grid, and `probs` to the probabilities. Heads of a group share one tile
of keys and values. Which tiles are visited, and in which the conditions on positions need no
evaluation, is decided by `mask.analyse_tiles`; tiles are skipped only where every row provably sees
a key, or where nothing but -inf closes them.

A tile has keys along sublanes and rows (queries) along lanes, so that a row's maximum and sum are
made of whole registers and take none to keep. Sums and maxima are f32.
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
    """Rows and keys of a block, and how many keys are computed at a time."""
    rows = spec.size("query")
    if rows * spec.size("group") <= 1024:
        rows *= spec.size("group")
    q, k = (min(1024, -(-size // LANES) * LANES) for size in (rows, spec.size("key")))
    return q, k, k


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
        # Few queries: the heads of a group are rows of one block. Otherwise each is walked over.
        self.flat = self.group * self.queries <= block_q
        self.rows = self.group * self.queries if self.flat else self.queries
        self.block_q, self.block_k, self.compute = block_q, block_k, compute
        self.tiling = Tiling(
            self.queries, self.keys, self.queries if self.flat else block_q, block_k
        )
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
        spec = self.spec
        qk_type, pv_type = matmul_types(spec)
        q = arrange(q, spec.q_dims, spec, ("batch", "kv_head", "group", "query", "depth"))
        k = arrange(k, spec.k_dims, spec, ("batch", "kv_head", "key", "depth")).astype(qk_type)
        v = arrange(v, spec.v_dims, spec, ("batch", "kv_head", "key", "value_depth"))
        q = q.reshape(self.batch, -1, self.rows, q.shape[-1]).astype(qk_type)
        tiles = [self._tile(x, dims) for x, dims in zip(extras, spec.extra_dims, strict=True)]
        steps = self._steps(extras)
        out, *statistics = self._call(steps, q, k, v.astype(pv_type), tiles)
        shape = (self.batch, self.heads, self.group, self.queries, -1)
        return restore(out.reshape(shape).astype(spec.result.dtype), spec)

    def _tile(self, x: Any, dims: Sequence[str]) -> Any:
        """An extra as `[batch, head, row, key]`, sizes 1 where it does not vary."""
        import jax.numpy as jnp

        x = arrange(x, dims, self.spec, ROLES)
        if x.dtype == jnp.bool_:
            x = x.astype(jnp.int8 if x.shape[3] > 1 and x.shape[4] > 1 else jnp.int32)
        batch, heads, group, queries, keys = x.shape
        if not self.flat:
            if group > 1:
                x = jnp.broadcast_to(x, (batch, self.heads, group, queries, keys))
            return x.reshape(batch, -1, queries, keys)
        if group * queries > 1:
            x = jnp.broadcast_to(x, (batch, heads, self.group, self.queries, keys))
        return x.reshape(batch, heads, -1, keys)

    def _steps(self, extras: Sequence[Any]) -> Steps:
        states = np.asarray(self.analysis.states)
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
        if self.spec.extras:
            return False
        with jax.ensure_compile_time_eval():
            query = jnp.arange(self.queries, dtype=jnp.int32)[:, None]
            last = jnp.full_like(query, self.keys - 1)
            aligned = jnp.clip(query + self.keys - self.queries, 0, self.keys - 1)
            key = jnp.concatenate([jnp.minimum(query, last), aligned, 0 * query, last], axis=1)
            value = self.score(jnp.float32(0), jnp.int32(0), jnp.int32(0), query, key)
            opened = jnp.broadcast_to(value > 0.5 * FAR_BELOW, key.shape)
            return bool(jnp.all(jnp.any(opened, axis=1)))

    def _call(self, steps: Steps, q: Any, k: Any, v: Any, tiles: list[Any]) -> Any:
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        share = q.shape[1] // self.heads

        def rows(last: int) -> Any:
            return pl.BlockSpec(
                (1, 1, self.block_q, last),
                lambda b, h, t, query, key, state: (b, h, query[t], 0),
            )

        def columns(last: int) -> Any:
            return pl.BlockSpec(
                (1, 1, self.block_k, last),
                lambda b, h, t, query, key, state: (b, jax.lax.div(h, share), key[t], 0),
            )

        depth, value_depth = self.spec.size("depth"), self.spec.size("value_depth")
        out = jax.ShapeDtypeStruct((*q.shape[:-1], value_depth), self.spec.result.dtype)
        scratch = [(1, self.block_q), (8, self.block_q), (value_depth, self.block_q)]
        tables = (steps.query, steps.key, steps.state.reshape(-1))
        return pl.pallas_call(
            lambda *refs: self._kernel(steps, *refs),
            out_shape=[out],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(tables),
                grid=(self.batch, q.shape[1], steps.count),
                in_specs=[
                    rows(depth),
                    columns(depth),
                    columns(value_depth),
                    *map(self._tile_spec, tiles),
                ],
                out_specs=[rows(value_depth)],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=64 * 2**20,
            ),
            name="hlo_opt_attention",
        )(*map(jnp.asarray, tables), q, k, v, *tiles)

    def _tile_spec(self, x: Any) -> Any:
        import jax
        from jax.experimental import pallas as pl

        batch, heads, query, key = x.shape
        # Heads are walked over one by one; what varies over key-value heads alone is shared.
        share = 1 if self.flat or heads > self.heads else self.group
        return pl.BlockSpec(
            (1, 1, self.block_q if query > 1 else 1, self.block_k if key > 1 else 1),
            lambda b, h, t, qs, ks, state: (
                b if batch > 1 else 0,
                jax.lax.div(h, share) if heads > 1 else 0,
                qs[t] if query > 1 else 0,
                ks[t] if key > 1 else 0,
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

            @pl.when(kind == one)
            def _(one: int = one) -> None:
                self._attend(one == OPEN, b, h, i, j, q, k, v, tiles, (top, total, acc))

        @pl.when(last_here)
        def _() -> None:
            whole = jnp.sum(total[...], axis=0, keepdims=True)
            out[0, 0] = (acc[...] / whole).T.astype(out.dtype)

    def _positions(self, h: Any, i: Any) -> tuple[Any, Any]:
        """Head and query indices of a block's rows, `[1, rows]` or scalars."""
        import jax
        import jax.numpy as jnp

        row = jax.lax.broadcasted_iota(jnp.int32, (1, self.block_q), 1)
        if not self.flat:
            return h, i * self.block_q + row
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
        shape = (self.compute, self.block_q)
        heads, positions = self._positions(h, i)
        for c in range(self.block_k // self.compute):
            part = slice(c * self.compute, (c + 1) * self.compute)
            s = _dot(k[0, 0, part], q[0, 0], (1, 1))
            values = v[0, 0, part]
            first = j * self.block_k + c * self.compute
            keys = first + jax.lax.broadcasted_iota(jnp.int32, (self.compute, 1), 0)
            inputs = (*self._loaded(tiles, part), b, heads, positions, keys)
            before = top[...]
            if scale is None or scale <= 0:
                x = jnp.broadcast_to(self.score(s, *inputs, known=known), shape)
                if self.keys % self.block_k and not is_open:
                    x = jnp.where(keys < self.keys, x, -jnp.inf)
                    values = jnp.where(keys < self.keys, values, jnp.zeros_like(values))
                now = jnp.maximum(before, jnp.max(x, axis=0, keepdims=True))
                p = jnp.exp(x - now)
            elif k.dtype == jnp.float32:
                s = s * scale
                now = jnp.maximum(before, jnp.max(s, axis=0, keepdims=True))
                p = jnp.exp(s - now)
            else:
                now = jnp.maximum(before, jnp.max(s, axis=0, keepdims=True) * scale)
                p = jnp.exp2(s * (scale * LOG2E) - now * LOG2E)
            fade = jnp.exp(before - now)
            top[...] = now
            total[...] = total[...] * fade + jnp.sum(p.reshape(-1, 8, self.block_q), axis=0)
            if self.probs is not None:
                p = jnp.broadcast_to(self.probs(p, *inputs, known=known), shape)
            acc[...] = acc[...] * fade + _dot(values, p.astype(values.dtype), (0, 0))

    def _loaded(self, tiles: Sequence[Any], part: slice) -> list[Any]:
        """Extras of some keys as `[key, row]`, in the types the captured functions take."""
        import jax.numpy as jnp

        loaded = []
        for tile, type_ in zip(tiles, self.spec.extras, strict=True):
            x = tile[0, 0, :, part] if tile.shape[3] > 1 else tile[0, 0]
            if x.dtype.itemsize < 4:
                x = x.astype(jnp.float32 if x.dtype == jnp.bfloat16 else jnp.int32)
            if x.shape[1] > 1:  # along sublanes
                rows = x.shape[0]
                x = jnp.broadcast_to(x, (LANES, x.shape[1])).T[:, :1] if rows == 1 else x.T
            elif x.shape[0] > 1:
                x = jnp.broadcast_to(x, (x.shape[0], LANES)).T[:1]
            loaded.append(x != 0 if type_.dtype == jnp.bool_ else x.astype(type_.dtype))
        return loaded


def _dot(left: Any, right: Any, contracted: tuple[int, int]) -> Any:
    """The product of two matrices over one dimension of each; f32."""
    import jax
    import jax.numpy as jnp

    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
