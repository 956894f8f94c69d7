"""The general kernel for `hlo_opt.attention`: flash attention around any captured score.

The block body applies the captured score function to the tile of logits, with extras cut to the
tile and positions from the grid, and `probs` to the probabilities. Rows of all heads of a group
share one tile of keys and values. Which tiles are visited, and in which of them conditions on
positions need no evaluation, is decided by `mask.analyse_tiles`; tiles are skipped only where every
row provably sees a key.

Sums and maxima are f32. A row's sum is kept for each lane and added up at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hlo_opt.kernels import Candidate, No, register_kernel
from hlo_opt.kernels.attention import (
    EXTRA_TYPES,
    ROLES,
    TERMS,
    AttentionKernel,
    AttentionSpec,
    Captured,
    FlashAttention,
    arrange,
    common_reasons,
    dot,
    matmul_types,
    probs_reasons,
    restore,
)
from hlo_opt.kernels.mask import CLOSED, MIXED, OPEN, Analysis, Fact, Range, Tiling, analyse_tiles
from hlo_opt.kernels.rows import LANES, at_once, load, store
from hlo_opt.kernels.splash_attention import SplashAttention
from hlo_opt.patterns.score import FAR_BELOW, is_homogeneous
from hlo_opt.targets import Target

LOWEST = float(np.finfo(np.float32).min)
LOG2E = math.log2(math.e)
# Integers that are widened, where nothing is computed in them.
NARROW_TYPES = frozenset({"int8", "uint8", "int16", "uint16"})
# Rows of one block, over all heads of a group.
ROWS = 1024
# With no more rows f32 products are summed `TERMS` at a time.
FEW_ROWS = 16
# Prefetched tables with more entries are made for all sequences together.
LARGEST_TABLE = 1 << 15
# Added to a tile's state: where a block of queries begins and ends.
FIRST, LAST = 4, 8


@register_kernel
class GeneralAttention(AttentionKernel):
    """Our own flash attention."""

    name = "Pallas general attention"
    rank = 5

    def precision(self, spec: AttentionSpec) -> str:
        return "highest" if _in_f16(spec) else super().precision(spec)

    def supports(self, spec: AttentionSpec, target: Target) -> No | None:
        # Predicted 1.1 to 1.2 times JAX's kernels there; see docs/performance.md.
        deep = min(spec.size("depth"), spec.size("value_depth")) >= 256
        if target.name == "tpu7x" and deep and spec.qk_type == "bf16":
            others = (SplashAttention(), FlashAttention())
            if any(kernel.supports(spec, target) is None for kernel in others):
                return No("JAX's kernel is predicted to be faster at this depth")
        return super().supports(spec, target)

    def reasons(self, spec: AttentionSpec) -> Iterator[str]:
        yield from common_reasons(_widened(spec))
        for number, extra in enumerate(spec.extras):
            narrow = extra.dtype.name in NARROW_TYPES and _is_only_read(spec, 1 + number)
            if extra.dtype.name not in EXTRA_TYPES and not narrow:
                yield f"a mask or bias computed in {extra.dtype}"
        yield from probs_reasons(spec, guards=True)

    def candidates(self, spec: AttentionSpec, target: Target) -> Sequence[Candidate]:
        q, k = _blocks(spec, target)
        limit = max(16, min(64, (target.info.vmem_capacity_bytes >> 20) * 3 // 4))
        config: dict[str, Any] = {"block_q": q, "block_k": k, "vmem": limit}
        label = f"{self.name}, blocks q={q}, k={k}"
        if spec.in_rows and (layout := _in_rows(spec, target, q, k, limit << 20)):
            config |= layout
            label = f"{self.name}, blocks q={config['block_q']}, k={k}, {layout['held']} heads"
        return [Candidate(label, tuple(config.items()))]

    def build(self, spec: AttentionSpec, candidate: Candidate) -> Callable[..., Any]:
        config: dict[str, Any] = dict(candidate.config)
        return Program(_widened(spec), **config).run


def _is_only_read(spec: AttentionSpec, argument: int) -> bool:
    """Whether captured functions only convert or compare an argument."""
    for text in filter(None, (spec.score, spec.probs, spec.sink)):
        captured = Captured(text)
        for use in captured.function.regions[0].blocks[0].arguments[argument].uses:
            if use.owner.operation.name not in ("stablehlo.convert", "stablehlo.compare"):
                return False
    return True


def _in_f16(spec: AttentionSpec) -> bool:
    return "f16" in (spec.qk_type, spec.probs_type)


def _widened(spec: AttentionSpec) -> AttentionSpec:
    """With matmuls in f32 instead of f16, which Mosaic does not have; all of f16 fits f32."""
    wide = {"f16": "f32"}
    return replace(
        spec,
        qk_type=wide.get(spec.qk_type, spec.qk_type),
        probs_type=wide.get(spec.probs_type, spec.probs_type),
    )


def _blocks(spec: AttentionSpec, target: Target) -> tuple[int, int]:
    """Queries and keys of a block."""
    group, queries, keys = (spec.size(role) for role in ("group", "query", "key"))
    small = target.info.vmem_capacity_bytes <= 16 << 20
    rows = ROWS // 2 if small else ROWS
    q = queries if group * queries <= rows else min(queries, max(32, rows // group // 32 * 32))
    if q < queries:
        q = max(32, q // 32 * 32)
    k = min(keys, 512 if small or q * group > 2 * rows else 1024)
    return q, k


def _in_rows(
    spec: AttentionSpec, target: Target, block_q: int, block_k: int, vmem: int
) -> dict[str, Any] | None:
    """The program's arguments for operands that lie as `[position, head, depth]`.

    Args:
      vmem: bytes that the kernel may take.
    """
    heads, queries = spec.size("kv_head"), spec.size("query")
    batch = math.prod(spec.size(role) for role in spec.batch_roles)
    held = 8 if heads % 8 == 0 else heads
    qk_type, pv_type = matmul_types(spec)
    types = zip("qkv", spec.arguments, (qk_type, qk_type, pv_type), strict=False)
    # What is converted first can be transposed on the way.
    names = spec.in_rows - {name for name, x, type_ in types if x.dtype != type_}
    for role, sides in (("depth", {"q", "k"}), ("value_depth", {"v", "out"})):
        if spec.size(role) != LANES:  # Mosaic has strided loads of whole registers only
            names -= sides
    if spec.statistics:
        names -= {"out"}
    # Two cores share the dimensions of a grid, which may all be one here.
    parts = target.cores if batch * (heads // held) % target.cores else 1
    if parts > 1:
        block_q = min(block_q, -(-queries // parts // 32) * 32)
        if block_q >= queries:
            return None
    if block_q == queries and (spec.size("group") > 1 or queries % 16):
        names -= {"q", "out"}  # heads of a group and their positions are one dimension
    while names and _bytes(spec, names, held, block_q, block_k) > vmem:
        block_q = block_q // 2 // 32 * 32
        if not block_q:
            return None
    if not names:
        return None
    return {"block_q": block_q, "in_rows": names, "held": held, "parts": parts}


def _bytes(
    spec: AttentionSpec, in_rows: Collection[str], held: int, block_q: int, block_k: int
) -> int:
    """VMEM that a program takes, about: two buffers of each block, scratch and logits."""
    padded = [-(-spec.size(role) // LANES) * LANES for role in ("depth", "value_depth")]
    rows = max(block_q * spec.size("group"), 8)
    scratch = 4 * (3 * LANES + padded[1]) + 4 * padded[0] * ("q" in in_rows)
    width = max(x.dtype.itemsize for x in (*spec.arguments[:3], spec.result))
    blocks = 2 * held * (rows + block_k) * sum(padded) * width
    extras = 0
    for x, dims in zip(spec.extras, spec.extra_dims, strict=True):
        names = {name for dim in dims for name in dim.split("*")}
        shape = [max(block_q, 8) if "query" in names else 8, block_k if "key" in names else LANES]
        shape += [held] * ("kv_head" in names) + [spec.size("group")] * ("group" in names)
        extras += 2 * max(x.dtype.itemsize, 4) * math.prod(shape)
    return held * rows * scratch + blocks + extras + 2 * 4 * rows * block_k


@dataclass(frozen=True)
class Steps:
    """Which tiles the grid visits, in order.

    Attributes:
      count: grid steps for one head and part.
      query: query block of each step, `[parts * count]`.
      key: the key block that is fetched, `[sequences, parts * count]`; one row if it is the same
        for all.
      state: `OPEN`, `MIXED` or `CLOSED`, plus `FIRST` and `LAST` in a row, as `key`.
      kinds: states other than `CLOSED` that may occur.
      analysis: what was found, for open tiles.
    """

    count: int
    query: Any
    key: Any
    state: Any
    kinds: frozenset[int]
    analysis: Analysis


class Program:
    """The JAX function around the kernel, for one composite and block sizes.

    Args:
      block_q, block_k: queries and keys of a tile.
      vmem: MB of VMEM the kernel may take.
      in_rows: which of q, k, v and out lie as `[position, head, depth]`, the others as
        `[head, position, depth]`.
      held: heads of keys in a block.
      parts: blocks of queries are shared out to so many parts of the grid.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        block_q: int,
        block_k: int,
        vmem: int,
        in_rows: frozenset[str] = frozenset(),
        held: int = 1,
        parts: int = 1,
    ) -> None:
        self.spec = spec
        self.group, self.queries, self.keys = (
            spec.size(role) for role in ("group", "query", "key")
        )
        self.heads = spec.size("kv_head")
        self.batch = math.prod(spec.size(role) for role in spec.batch_roles)
        self.tiling = Tiling(self.queries, self.keys, block_q, block_k)
        self.block_k, self.vmem = block_k, vmem
        # All rows in one block: the heads of a group and their positions are one dimension.
        self.flat = block_q == self.queries
        self.groups = 1 if self.flat else self.group
        self.block_q = self.group * self.queries if self.flat else block_q
        self.rows = self.groups * self.block_q
        self.in_rows, self.held, self.parts = in_rows, held, parts
        self.score = Captured(spec.score)
        self.probs = Captured(spec.probs) if spec.probs else None
        # A softmax of -inf alone is NaN; where guards close the whole row, the result is zero.
        self.guarded = self.probs is not None and is_homogeneous(
            self.probs.function, guards_only=True
        )
        self.sink = Captured(spec.sink) if spec.sink else None

    def _analyse(self, extras: Sequence[Fact]) -> Analysis:
        sizes = (self.batch, self.heads * self.group)
        return analyse_tiles(self.score.function, self.tiling, sizes, extras)

    def run(self, q: Any, k: Any, v: Any, *extras: Any) -> Any:
        """The composite's results from its operands."""
        import jax.numpy as jnp

        spec = self.spec
        qk_type, pv_type = matmul_types(spec)
        q = self._operand("q", q, spec.q_dims, ("kv_head", "group"), "query", "depth")
        k = self._operand("k", k, spec.k_dims, ("kv_head",), "key", "depth")
        v = self._operand("v", v, spec.v_dims, ("kv_head",), "key", "value_depth")
        arranged = [
            arrange(x, dims, spec, ROLES) for x, dims in zip(extras, spec.extra_dims, strict=True)
        ]
        out, *statistics = self._call(
            _shared_out(self._steps(arranged), self.parts),
            q.astype(qk_type),
            k.astype(qk_type),
            v.astype(pv_type),
            [self._tile(x) for x in arranged],
        )
        if "out" in self.in_rows:
            out = out.reshape(*out.shape[:2], self.heads, self.group, out.shape[-1])
            out = out.transpose(0, 2, 3, 1, 4)
        if not spec.statistics:
            return restore(out.astype(spec.result.dtype), spec)
        top, total = statistics
        nothing = total == 0  # all scores are -inf: the exponentials of their differences are NaN
        total, out = (jnp.where(nothing, jnp.nan, x) for x in (total, out))
        top = jnp.where(nothing, -jnp.inf, top)
        top_type, total_type = (type_.dtype for _, type_ in spec.statistics)
        return (
            restore(out.astype(spec.result.dtype), spec),
            restore(top.astype(top_type), spec, 0),  # exact: scores are rounded to it
            restore(total.astype(total_type), spec, 1),
        )

    def _operand(
        self, name: str, x: Any, dims: Sequence[str], heads: tuple[str, ...], *last: str
    ) -> Any:
        """An operand as the kernel takes it: heads before positions, or behind them."""
        position, depth = last
        if name in self.in_rows:
            x = arrange(x, dims, self.spec, ("batch", position, *heads, depth))
            return x.reshape(*x.shape[:2], -1, x.shape[-1])
        x = arrange(x, dims, self.spec, ("batch", *heads, position, depth))
        return x if name != "q" else self._flattened(x)

    def _flattened(self, x: Any) -> Any:
        """Heads of a group and positions (axes 2 and 3) as one dimension, where they are."""
        if not self.flat:
            return x
        return x.reshape(*x.shape[:2], 1, x.shape[2] * x.shape[3], *x.shape[4:])

    def _tile(self, x: Any) -> Any:
        """An extra, from `[batch, kv_head, group, query, key]`, as the kernel takes it."""
        import jax.numpy as jnp

        if x.dtype == jnp.bool_ or x.dtype.name in NARROW_TYPES:
            large = x.shape[3] > 1 and x.shape[4] > 1 and self.tiling.block_q % 32 == 0
            x = x.astype(jnp.int8 if large and x.dtype in (jnp.bool_, jnp.int8) else jnp.int32)
        if self.flat and x.shape[2] * x.shape[3] > 1:
            x = jnp.broadcast_to(x, (*x.shape[:2], self.group, self.queries, x.shape[4]))
        return self._flattened(x)

    def _steps(self, extras: Sequence[Any]) -> Steps:
        """The tiles to visit; decided while compiling where no extra matters, else at run time.

        Args:
          extras: as `[batch, kv_head, group, query, key]`.
        """
        analysis = self._analyse([None] * len(extras))
        if extras and not (np.asarray(analysis.states) == CLOSED).any():
            analysis = self._analyse([_interval(x) for x in extras])
        if not isinstance(analysis.states, np.ndarray):
            seen = self._rows_see_a_key(extras)
            return self._dynamic_steps(analysis, analysis.states, seen, frozenset({OPEN, MIXED}))
        states = self._edges(analysis.states, np)
        if not (states == CLOSED).any():
            return _compressed(analysis, states)
        seen = self._rows_see_a_key(extras)
        if isinstance(seen, np.ndarray):
            states = states if seen.all() else np.where(states, states, MIXED)
            return _compressed(analysis, states)
        kinds = frozenset({*states.ravel().tolist(), MIXED} - {CLOSED})
        return self._dynamic_steps(analysis, states, seen, kinds)

    def _edges(self, states: Any, xp: Any) -> Any:
        """A partial block of keys at the end is never open."""
        if self.keys % self.block_k == 0:
            return states
        last = np.arange(states.shape[1])[None] == states.shape[1] - 1
        return xp.where(last & (states == OPEN), MIXED, states)

    def _rows_see_a_key(self, extras: Sequence[Any]) -> Any:
        """Whether each query surely sees one of a few keys, in all heads: `[batch or 1, query]`.

        The score is evaluated, of a zero logit, at the first and last key and on the diagonals that
        start at the first and end at the last. NumPy where that depends on positions alone.
        """
        import jax
        import jax.numpy as jnp

        query = np.arange(self.queries, dtype=np.int32)[:, None]
        ends = (0, self.keys - 1)
        key = np.concatenate(
            [
                np.clip(query, *ends),
                np.clip(query + self.keys - self.queries, *ends),
                *(np.full_like(query, end) for end in ends),
            ],
            axis=1,
        )

        def seen(*extras: Any) -> Any:
            places = [
                jnp.take_along_axis(
                    jnp.broadcast_to(x, (*x.shape[:3], self.queries, x.shape[4])),
                    jnp.broadcast_to(key, (*x.shape[:3], *key.shape)),
                    axis=-1,
                )
                if x.shape[4] > 1
                else x
                for x in extras
            ]
            batch = jnp.arange(self.batch, dtype=jnp.int32).reshape(-1, 1, 1, 1, 1)
            head = jnp.arange(self.heads * self.group, dtype=jnp.int32)
            head = head.reshape(1, self.heads, self.group, 1, 1)
            value = self.score(jnp.float32(0), *places, batch, head, query, key)
            shape = jnp.broadcast_shapes(value.shape, (1, 1, 1, *key.shape))
            opened = jnp.broadcast_to(value > 0.5 * FAR_BELOW, shape)
            return jnp.all(jnp.any(opened, axis=-1), axis=(1, 2))

        arguments = list(self.score.function.regions[0].blocks[0].arguments)
        if any(list(argument.uses) for argument in arguments[1:-4]):
            return seen(*extras)
        with jax.ensure_compile_time_eval():
            return np.asarray(seen(*[jnp.zeros((1,) * 5)] * len(extras)))

    def _dynamic_steps(
        self, analysis: Analysis, states: Any, seen: Any, kinds: frozenset[int]
    ) -> Steps:
        """All tiles; closed ones are skipped where every row of their block sees a key."""
        import jax
        import jax.numpy as jnp

        states = self._edges(states, jnp)
        seen = jnp.asarray(seen)
        blocks, keys = self.tiling.shape
        size = self.tiling.block_q
        padded = jnp.pad(seen, ((0, 0), (0, blocks * size - self.queries)), constant_values=True)
        seen = jnp.all(padded.reshape(-1, blocks, size), axis=2)
        if seen.size * keys > LARGEST_TABLE:
            seen = jnp.all(seen, axis=0, keepdims=True)
        closed = (states == CLOSED)[None] & seen[:, :, None]
        states = jnp.where(closed, CLOSED, jnp.maximum(states, MIXED))
        # Nothing is fetched for a closed tile: its block is the one before.
        fetched = jax.lax.cummax(jnp.where(closed, 0, jnp.arange(keys)), axis=2)
        return Steps(
            count=blocks * keys,
            query=np.repeat(np.arange(blocks, dtype=np.int32), keys),
            key=fetched.reshape(-1, blocks * keys).astype(jnp.int32),
            state=states.reshape(-1, blocks * keys).astype(jnp.int32)
            + _ends(np.repeat(np.arange(blocks), keys)),
            kinds=kinds,
            analysis=analysis,
        )

    def _call(self, steps: Steps, q: Any, k: Any, v: Any, tiles: list[Any]) -> Any:
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        held, block = self.held, self._head_block
        at = partial(self._step, steps)

        def entry(b: Any, h: Any, t: Any) -> Any:
            return _entry(steps.key, b, at(h, t))

        def rows(last: int, in_rows: bool = False) -> Any:
            if in_rows:
                return pl.BlockSpec(
                    (1, self.block_q, held * self.group, last),
                    lambda b, h, t, query, key, state: (b, query[at(h, t)], block(h), 0),
                )
            return pl.BlockSpec(
                (1, held, self.groups, self.block_q, last),
                lambda b, h, t, query, key, state: (b, block(h), 0, query[at(h, t)], 0),
            )

        def columns(last: int, in_rows: bool) -> Any:
            if in_rows:
                return pl.BlockSpec(
                    (1, self.block_k, held, last),
                    lambda b, h, t, query, key, state: (b, key[entry(b, h, t)], block(h), 0),
                )
            return pl.BlockSpec(
                (1, held, self.block_k, last),
                lambda b, h, t, query, key, state: (b, block(h), key[entry(b, h, t)], 0),
            )

        depth, value_depth = self.spec.size("depth"), self.spec.size("value_depth")
        statistics = bool(self.spec.statistics)
        wide = statistics or self.spec.result.dtype == np.float16  # which Mosaic lacks
        out_type = jnp.float32 if wide else self.spec.result.dtype
        positions = self.group * self.queries if self.flat else self.queries
        shape: tuple[int, ...] = (self.batch, self.heads, self.groups, positions)
        outs = [(rows(1), (*shape, 1), jnp.float32)] * (2 * statistics)
        if "out" in self.in_rows:
            shape = (self.batch, self.queries, self.heads * self.group)
        first = (rows(value_depth, "out" in self.in_rows), (*shape, value_depth), out_type)
        statistic = ((self.rows, LANES), jnp.float32)
        scratch = [statistic, statistic, ((self.rows, value_depth), jnp.float32)]
        scratch += [statistic] * self.guarded
        for name, x, size in (
            ("q", q, (self.rows, depth)),
            ("k", k, (self.block_k, depth)),
            ("v", v, (self.block_k, value_depth)),
        ):
            if name in self.in_rows:
                scratch.append((size, x.dtype))
        tables = (steps.query, steps.key.reshape(-1), steps.state.reshape(-1))
        return pl.pallas_call(
            lambda *refs: self._kernel(steps, *refs),
            out_shape=[jax.ShapeDtypeStruct(shape, type_) for _, shape, type_ in (first, *outs)],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(tables),
                grid=(self.batch, self.heads // held * self.parts, steps.count),
                in_specs=[
                    rows(depth, "q" in self.in_rows),
                    columns(depth, "k" in self.in_rows),
                    columns(value_depth, "v" in self.in_rows),
                    *(self._tile_spec(x, steps) for x in tiles),
                ],
                out_specs=[spec for spec, _, _ in (first, *outs)],
                scratch_shapes=[pltpu.VMEM((held, *shape), type_) for shape, type_ in scratch],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=self.vmem << 20,
            ),
            name="hlo_opt_attention",
        )(*map(jnp.asarray, tables), q, k, v, *tiles)

    def _head_block(self, h: Any) -> Any:
        """The block of heads at a place of the grid."""
        import jax

        return jax.lax.div(h, np.int32(self.parts)) if self.parts > 1 else h

    def _step(self, steps: Steps, h: Any, t: Any) -> Any:
        """The place in `steps` of a place of the grid."""
        import jax

        return jax.lax.rem(h, np.int32(self.parts)) * steps.count + t if self.parts > 1 else t

    def _tile_spec(self, x: Any, steps: Steps) -> Any:
        from jax.experimental import pallas as pl

        batch, head, _, query, key = (size > 1 for size in x.shape)
        return pl.BlockSpec(
            (
                1,
                self.held if head else 1,
                x.shape[2],
                self.block_q if query else 1,
                self.block_k if key else 1,
            ),
            lambda b, h, t, qs, ks, state: (
                b if batch else 0,
                self._head_block(h) if head else 0,
                0,
                qs[self._step(steps, h, t)] if query else 0,
                ks[_entry(steps.key, b, self._step(steps, h, t))] if key else 0,
            ),
        )

    def _kernel(
        self, steps: Steps, query: Any, key: Any, state: Any, q: Any, k: Any, v: Any, *rest: Any
    ) -> None:
        """One tile of every head held; refs are blocks in VMEM."""
        import jax.numpy as jnp
        from jax.experimental import pallas as pl

        count, results = len(self.spec.extras), 1 + 2 * bool(self.spec.statistics)
        tiles, outs, scratch = rest[:count], rest[count : count + results], rest[count + results :]
        held = 3 + self.guarded
        scratch, arranged = scratch[:held], iter(scratch[held:])
        # Where heads are not the outer dimension of a block, a copy has them there.
        queries, keys, values = (
            next(arranged) if name in self.in_rows else x.at[0]
            for name, x in (("q", q), ("k", k), ("v", v))
        )
        b, h, first = (pl.program_id(axis) for axis in range(3))
        h, t = self._head_block(h), self._step(steps, h, first)
        i, j = query[t], key[_entry(steps.key, b, t)]
        place = state[_entry(steps.state, b, t)]
        kind = place & (FIRST - 1)

        def rows(head: Any) -> tuple[Any, ...]:
            return (
                jnp.full((1, 1, 1), b, jnp.int32),
                *self._positions(h * self.held + head, i),
            )

        @pl.when((place & FIRST) != 0)
        def _() -> None:
            def start(head: Any) -> None:
                indices = (*rows(head), jnp.zeros((1, 1, 1), jnp.int32))
                self._start(self._loaded(tiles, head), indices, [x.at[head] for x in scratch])

            _for_each(self.held, start)
            if "q" in self.in_rows:
                for head, tile in _heads(q.at[0]):
                    queries[self._place(head)] = tile

        moved = [
            (x, copy)
            for name, x, copy in (("k", k, keys), ("v", v, values))
            if name in self.in_rows
        ]
        if moved:
            before = key[_entry(steps.key, b, jnp.maximum(t - 1, 0))]

            @pl.when((kind != CLOSED) & ((first == 0) | (j != before)))
            def _() -> None:
                for x, copy in moved:
                    for head, tile in _heads(x.at[0]):
                        copy[head] = tile

        def attend(opened: Analysis | None, head: Any) -> None:
            self._attend(
                opened,
                (*self._loaded(tiles, head), *rows(head), self._keys(j)),
                queries[head].reshape(self.rows, -1),
                keys[head],
                values[head],
                [x.at[head] for x in scratch],
            )

        for one in sorted(steps.kinds):

            @pl.when(kind == one)
            def _(one: int = one) -> None:
                _for_each(self.held, partial(attend, steps.analysis if one == OPEN else None))

        @pl.when((place & LAST) != 0)
        def _() -> None:
            def finish(head: Any) -> None:
                found = self._results([x.at[head] for x in scratch])
                for out, result in zip(outs, found, strict=True):
                    out[0, head] = result.reshape(out.shape[2:]).astype(out.dtype)

            if "out" not in self.in_rows:
                _for_each(self.held, finish)
                return
            pack = at_once(outs[0].dtype)
            for first in range(0, self.held * self.group, pack):
                places = [self._place(first + n) for n in range(pack)]
                found = [self._results([x.at[place] for x in scratch]) for place in places]
                store(outs[0].at[0], first, [tile for (tile,) in found])

    def _place(self, number: int) -> tuple[Any, ...]:
        """Where a block's query head is in what is held as `[head, row, n]`."""
        from jax.experimental import pallas as pl

        head, number = divmod(number, self.groups)
        return head, pl.ds(number * self.block_q, self.block_q)

    def _results(self, scratch: Sequence[Any]) -> list[Any]:
        """A head's results once all keys are seen: what was summed, or its average."""
        import jax.numpy as jnp

        top, total, acc, *unguarded = scratch
        whole = jnp.sum(total[...], axis=1, keepdims=True)
        if self.guarded:
            count = jnp.sum(unguarded[0][...], axis=1, keepdims=True)
            whole = jnp.where(count == 0, 1.0, whole)
        if self.spec.statistics:
            return [acc[...], top[:, :1], whole]
        return [acc[...] / whole]

    def _positions(self, h: Any, i: Any) -> tuple[Any, Any]:
        """Head and query indices of a block's rows, which broadcast to `[groups, block_q, 1]`.

        None is a scalar: Mosaic has less arithmetic for scalars than for vectors.
        """
        import jax
        import jax.numpy as jnp

        h = jnp.full((1, 1, 1), h, jnp.int32)

        row = jax.lax.broadcasted_iota(jnp.int32, (1, self.block_q, 1), 1)
        if not self.flat:
            heads = jax.lax.broadcasted_iota(jnp.int32, (self.groups, 1, 1), 0)
            return h * self.group + heads, i * self.block_q + row
        if self.group == 1:
            return h, row
        if self.queries == 1:
            return h * self.group + row, jnp.zeros((1, 1, 1), jnp.int32)
        size = jnp.int32(self.queries)
        return h * self.group + jax.lax.div(row, size), jax.lax.rem(row, size)

    def _keys(self, j: Any) -> Any:
        """Key indices of a block, `[1, 1, block_k]`."""
        import jax
        import jax.numpy as jnp

        keys = jax.lax.broadcasted_iota(jnp.int32, (1, 1, self.block_k), 2)
        return j * self.block_k + keys

    def _start(
        self, loaded: Sequence[Any], indices: tuple[Any, ...], scratch: Sequence[Any]
    ) -> None:
        """The state before the first tile: nothing seen, or the sink."""
        import jax
        import jax.numpy as jnp

        top, total, acc, *unguarded = scratch
        for ref in (acc, *unguarded):
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
        if self.sink is None:
            top[...] = jnp.full(top.shape, LOWEST, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            return
        extras = [x[..., :1] for x in loaded]
        shape = (self.groups, self.block_q, LANES)
        sink = self.sink(jnp.float32(0), *extras, *indices)
        sink = jnp.broadcast_to(sink, shape).reshape(self.rows, LANES)
        lanes = jax.lax.broadcasted_iota(jnp.int32, sink.shape, 1)
        top[...] = jnp.maximum(sink, LOWEST)
        total[...] = jnp.where(lanes == 0, jnp.exp(sink - jnp.maximum(sink, LOWEST)), 0.0)

    def _attend(
        self,
        opened: Analysis | None,
        inputs: tuple[Any, ...],
        q: Any,
        k: Any,
        values: Any,
        scratch: Sequence[Any],
    ) -> None:
        """Online softmax over one tile.

        Args:
          opened: what is known of an open tile; None for another.
          inputs: extras and indices, as the captured functions take them.
          q, k, values: `[rows, depth]`, `[key, depth]` and `[key, value_depth]`.
        """
        import jax
        import jax.numpy as jnp

        top, total, acc, *unguarded = scratch
        known = opened.known if opened is not None else None
        scale = opened.scale if opened is not None and not self.spec.statistics else None
        shape = (self.groups, self.block_q, self.block_k)
        s = dot(q, k, 1, self._terms(k))
        before = top[...]
        if scale is not None and scale > 0 and k.dtype != jnp.float32:
            # One product for an element instead of two: its scale and the base of the exponential.
            now = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True) * scale)
            p = jnp.exp2(s * (scale * LOG2E) - _across(now * LOG2E, s.shape))
        else:
            s = jnp.broadcast_to(self.score(s.reshape(shape), *inputs, known=known), shape)
            if self.keys % self.block_k and opened is None:
                s = jnp.where(inputs[-1] < self.keys, s, -jnp.inf)
                row = jax.lax.broadcasted_iota(jnp.int32, (self.block_k, 1), 0)
                inside = row < self.keys - inputs[-1][0, 0, 0]
                values = jnp.where(inside, values, jnp.zeros_like(values))
            s = s.reshape(self.rows, self.block_k)
            if self.spec.statistics:  # the maximum is one of the scores as the original rounds them
                s = s.astype(self.spec.statistics[0][1].dtype).astype(jnp.float32)
            now = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
            p = jnp.exp(s - _across(now, s.shape))
        fade = jnp.exp(before - now)
        top[...] = now
        total[...] = total[...] * fade + _by_lane(p)
        if self.guarded:
            assert self.probs is not None
            one = jnp.broadcast_to(self.probs(jnp.float32(1), *inputs, known=known), shape)
            unguarded[0][...] += _by_lane(one.reshape(self.rows, self.block_k))
        if self.probs is not None:
            p = jnp.broadcast_to(self.probs(p.reshape(shape), *inputs, known=known), shape)
            p = p.reshape(self.rows, self.block_k)
        product = dot(p.astype(values.dtype), values, 0, self._terms(values))
        acc[...] = acc[...] * _across(fade, acc.shape) + product

    def _loaded(self, tiles: Sequence[Any], head: Any) -> list[Any]:
        """Extras of a tile, in the types the captured functions take."""
        import jax.numpy as jnp

        loaded = []
        for tile, type_ in zip(tiles, self.spec.extras, strict=True):
            x = tile[0, head if tile.shape[1] > 1 else 0]
            if type_.dtype == jnp.bool_ or type_.dtype.name in NARROW_TYPES:
                x = x.astype(jnp.int32)
            loaded.append(x != 0 if type_.dtype == jnp.bool_ else x)
        return loaded

    def _terms(self, x: Any) -> int | None:
        """How many products are summed in one go; None for all."""
        few = self.rows <= FEW_ROWS and np.dtype(x.dtype) == np.float32
        return TERMS if few else None


def _compressed(analysis: Analysis, states: np.ndarray) -> Steps:
    """The tiles that are not closed, and one for every block of queries, whose result is due."""
    states = states.copy()
    states[~states.any(axis=1), 0] = MIXED
    visited = np.argwhere(states != CLOSED).astype(np.int32)
    kinds = states[states != CLOSED].astype(np.int32)
    return Steps(
        count=len(visited),
        query=visited[:, 0],
        key=visited[None, :, 1],
        state=(kinds + _ends(visited[:, 0]))[None],
        kinds=frozenset(kinds.tolist()),
        analysis=analysis,
    )


def _shared_out(steps: Steps, parts: int) -> Steps:
    """The same steps, blocks of queries shared out evenly; nothing is done in steps to fill up."""
    import jax.numpy as jnp

    if parts == 1:
        return steps
    blocks = [np.flatnonzero(steps.query == block) for block in np.unique(steps.query)]
    taken: list[list[np.ndarray]] = [[] for _ in range(parts)]
    for block in sorted(blocks, key=len, reverse=True):
        min(taken, key=lambda part: sum(map(len, part))).append(block)
    places = [np.sort(np.concatenate(part)) for part in taken]
    count = max(map(len, places))
    padded = [np.pad(place, (0, count - len(place)), constant_values=-1) for place in places]
    take = np.concatenate(padded)
    idle = take < 0
    # Then the last block of queries stays, which is written once more.
    take = np.concatenate([np.where(part < 0, part.max(), part) for part in padded])
    return replace(
        steps,
        count=count,
        query=steps.query[take],
        key=steps.key[:, take],
        state=jnp.where(idle, CLOSED, steps.state[:, take]),
    )


def _ends(query: np.ndarray) -> np.ndarray:
    """`FIRST` and `LAST` for the steps of each block of queries."""
    change = np.flatnonzero(np.diff(query))
    places = np.zeros(len(query), np.int32)
    places[[0, *(change + 1)]] += FIRST
    places[[*change, -1]] += LAST
    return places


def _for_each(count: int, body: Callable[[Any], None]) -> None:
    """Runs a kernel's `body` for every number below `count`."""
    import jax

    if count == 1:
        body(0)
    else:
        jax.lax.fori_loop(0, count, lambda n, _: body(n), None)


def _heads(ref: Any) -> Iterator[tuple[int, Any]]:
    """Number and tile `[position, depth]` of every head of `[position, head, depth]`."""
    for first in range(0, ref.shape[1], at_once(ref.dtype)):
        yield from enumerate(load(ref, first), first)


def _interval(x: Any) -> Fact:
    """What is known of an extra's integers, over all it varies over."""
    import jax.numpy as jnp

    if x.dtype != jnp.int32 or (x.shape[3] > 1 and x.shape[4] > 1):
        return None
    return Range(jnp.min(x), jnp.max(x))


def _entry(table: Any, b: Any, t: Any) -> Any:
    """The place in a flattened table `[sequences or 1, count]`."""
    return b * table.shape[1] + t if table.shape[0] > 1 else t


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

    if p.shape[1] % LANES:
        p = jnp.pad(p, ((0, 0), (0, -p.shape[1] % LANES)))
    parts = [p[:, n : n + LANES] for n in range(0, p.shape[1], LANES)]
    while len(parts) > 1:
        parts = [sum(parts[n : n + 2]) for n in range(0, len(parts), 2)]
    return parts[0]
