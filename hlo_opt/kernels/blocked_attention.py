"""Kernel for `hlo_opt.attention` on CPU: blocks of queries and keys with an online softmax.

Plain JAX, without Pallas. Logits exist one tile at a time, which stays in the CPU's cache; the
decomposition writes all of them to memory and reads them again several times. Scores and masks of
any form are evaluated on the tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hlo_opt.kernels import Candidate, register_kernel
from hlo_opt.kernels.attention import (
    ROLES,
    AttentionKernel,
    AttentionSpec,
    Captured,
    arrange,
    dot,
    matmul_types,
    probs_reasons,
    restore,
)
from hlo_opt.patterns.score import FAR_BELOW, Both, Linear, NotLinear, reach
from hlo_opt.targets import Target

# A tile has up to so many rows (queries times groups) and keys: 1 MB of f32 logits. Half and twice
# of either were no faster (tools/bench_cpu_attention.py).
ROWS = 512
KEYS = 512
# What is smaller stays in cache anyway, or makes tiles so small that the loops show: there the
# decomposition is about as fast. Measured, see docs/performance.md.
LOGITS_BYTES = 16 * 2**20
SHORTEST = {"query": 256, "key": 512}


@register_kernel
class BlockedAttention(AttentionKernel):
    """Attention without the whole logits."""

    name = "blocked attention"
    rank = 10
    platforms = frozenset({"cpu"})

    def reasons(self, spec: AttentionSpec) -> Iterator[str]:
        yield from _type_reasons(spec)
        yield from _size_reasons(spec)
        yield from probs_reasons(spec)

    def candidates(self, spec: AttentionSpec, target: Target) -> Sequence[Candidate]:
        rows = max(ROWS // spec.size("group"), 16)
        q, k = _block(spec.size("query"), rows), _block(spec.size("key"), KEYS)
        config = (("block_q", q), ("block_k", k))
        return [Candidate(f"{self.name}, blocks q={q}, k={k}", config)]

    def build(self, spec: AttentionSpec, candidate: Candidate) -> Callable[..., Any]:
        return _Program(spec, **dict(candidate.config)).run


def _block(size: int, largest: int) -> int:
    """The size of blocks that cover `size`: a divisor where there is a large one, else padded."""
    if size <= largest:
        return size
    exact = [b for b in range(largest, largest // 2, -1) if size % b == 0]
    even = -(-size // -(-size // largest))
    return exact[0] if exact else min(-(-even // 16) * 16, largest)


def _type_reasons(spec: AttentionSpec) -> Iterator[str]:
    for type_ in (spec.qk_type, spec.probs_type):
        if type_ not in ("bf16", "f16", "f32"):
            yield f"matmuls in {type_}"
    if any(
        x.dtype.itemsize > 4
        for x in (*spec.arguments, spec.result, *(x for _, x in spec.statistics))
    ):
        yield "an operand or result of 64 bits"


def _size_reasons(spec: AttentionSpec) -> Iterator[str]:
    for role, shortest in SHORTEST.items():
        if spec.size(role) < shortest:
            yield f"{spec.size(role)} {role} positions, fewer than {shortest}"
    count = math.prod(spec.size(role) for role in (*spec.batch_roles, "kv_head", "group"))
    logits = 4 * count * spec.size("query") * spec.size("key")
    if logits < LOGITS_BYTES:
        yield f"logits of {logits >> 20} MB, less than {LOGITS_BYTES >> 20} MB"


def _band(form: Linear | NotLinear) -> tuple[int | None, int | None]:
    """`left, right` such that keys outside `query - left … query + right` are closed for good."""
    lefts: list[int] = []
    rights: list[int] = []
    if not isinstance(form, Linear) or form.bias:
        return None, None
    for mask in form.masks:
        if not mask.value <= FAR_BELOW:
            if not mask.additive or mask.value > 0:
                lefts, rights = [], []  # it may write over closed keys
            continue
        for part in mask.open.parts if isinstance(mask.open, Both) else (mask.open,):
            left, right = reach(part) or (None, None)
            lefts += [] if left is None else [left]
            rights += [] if right is None else [right]
    return min(lefts, default=None), min(rights, default=None)


class _Program:
    """The JAX function for one composite and block sizes.

    Attributes:
      blocks: numbers of blocks of queries and of keys; the last may be padded.
    """

    def __init__(self, spec: AttentionSpec, block_q: int, block_k: int) -> None:
        self.spec = spec
        self.sizes = block_q, block_k
        self.lengths = spec.size("query"), spec.size("key")
        self.blocks = -(-self.lengths[0] // block_q), -(-self.lengths[1] // block_k)
        self.batch = math.prod(spec.size(role) for role in spec.batch_roles)
        self.heads, self.group = spec.size("kv_head"), spec.size("group")
        self.band = _band(spec.form)
        self.skips = self.band != (None, None)
        self.score = Captured(spec.score)
        self.probs = Captured(spec.probs) if spec.probs else None
        self.sink = Captured(spec.sink) if spec.sink else None

    def run(self, q: Any, k: Any, v: Any, *extras: Any) -> Any:
        """The composite's results from its operands."""
        import jax
        import jax.numpy as jnp

        spec = self.spec
        qk_type, pv_type = matmul_types(spec)
        outer = ("batch", "kv_head")
        q = arrange(q, spec.q_dims, spec, (*outer, "group", "query", "depth")).astype(qk_type)
        k = arrange(k, spec.k_dims, spec, (*outer, "key", "depth")).astype(qk_type)
        v = arrange(v, spec.v_dims, spec, (*outer, "key", "value_depth")).astype(pv_type)
        q, k, v = self._padded(q, 3, 0), self._padded(k, 2, 1), self._padded(v, 2, 1)
        tiles = [
            self._padded(self._padded(arrange(x, dims, spec, ROLES), 3, 0), 4, 1)
            for x, dims in zip(extras, spec.extra_dims, strict=True)
        ]
        leaks = self._leaks(v) if self.skips else None
        depths = (spec.size("value_depth"), *[1] * len(spec.statistics))
        types = (spec.result.dtype, *(x.dtype for _, x in spec.statistics))
        results = [
            jnp.zeros((*q.shape[:4], depth), type_)
            for depth, type_ in zip(depths, types, strict=True)
        ]

        def step(t: Any, results: list[Any]) -> list[Any]:
            n, i = jax.lax.div(t, self.blocks[0]), jax.lax.rem(t, self.blocks[0])
            place = jax.lax.div(n, self.heads), jax.lax.rem(n, self.heads)
            found = self._rows(place, i, q, k, v, tiles, leaks)
            at = (*place, 0, i * self.sizes[0], 0)
            return [
                jax.lax.dynamic_update_slice(old, new[None, None].astype(old.dtype), at)
                for old, new in zip(results, found, strict=False)
            ]

        count = self.batch * self.heads * self.blocks[0]
        results = jax.lax.fori_loop(0, count, step, results)
        return self._restored([x[:, :, :, : self.lengths[0]] for x in results])

    def _restored(self, results: Sequence[Any]) -> Any:
        """Results in the composite's layouts."""
        out, *statistics = results
        out = restore(out, self.spec)
        further = [restore(x, self.spec, n) for n, x in enumerate(statistics)]
        return (out, *further) if further else out

    def _padded(self, x: Any, axis: int, side: int) -> Any:
        """Zeros behind an axis of queries (side 0) or keys (1), up to whole blocks."""
        import jax.numpy as jnp

        missing = self.blocks[side] * self.sizes[side] - self.lengths[side]
        if not missing or x.shape[axis] == 1 != self.lengths[side]:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, missing)
        return jnp.pad(x, widths)

    def _leaks(self, v: Any) -> tuple[Any, Any]:
        """NaN where a value before, or from, a block of keys on is not finite; zero elsewhere.

        A probability of zero times such a value is NaN, also in a block that is skipped.

        Returns:
          two arrays `[batch, kv_head, block + 1, value_depth]`.
        """
        import jax.numpy as jnp

        x = jnp.where(jnp.isfinite(v), 0.0, jnp.nan).astype(jnp.float32)
        x = x.reshape(*v.shape[:2], self.blocks[1], self.sizes[1], v.shape[3]).sum(3)
        none = jnp.zeros_like(x[:, :, :1])
        before = jnp.concatenate([none, jnp.cumsum(x, 2)], 2)
        after = jnp.concatenate([jnp.flip(jnp.cumsum(jnp.flip(x, 2), 2), 2), none], 2)
        return before, after

    def _rows(
        self, place: tuple[Any, Any], i: Any, q: Any, k: Any, v: Any, tiles: Any, leaks: Any
    ) -> tuple[Any, Any, Any]:
        """Output, maximum and sum of one block of queries of one head, `[group, query, …]`.

        Args:
          place: batch and key-value head.
          i: number of the block.
        """
        import jax
        import jax.numpy as jnp

        count = self.blocks[1]
        low, high = self._visited(i)
        rows = self._slice(q, (*place, 0, i * self.sizes[0], 0), (self.group, self.sizes[0], None))
        step = self._step(place, i, high, rows, k, v, tiles)
        state = self._start(place, i, tiles)
        state = jax.lax.fori_loop(0, high - low, step, state)
        if leaks is not None:
            # Closed keys weigh nothing beside an open one. A row that saw none may average them.
            blind = jnp.any(state[0] <= 0.5 * FAR_BELOW)
            state = jax.lax.fori_loop(high - low, jnp.where(blind, count, high - low), step, state)
            shape = (1, v.shape[3])
            skipped = self._slice(leaks[0], (*place, low, 0), shape)
            skipped += self._slice(leaks[1], (*place, high, 0), shape)
            state = (*state[:2], state[2] + jnp.where(blind, 0.0, skipped))
        top, total, out = state
        if self.spec.statistics:
            nothing = top == -jnp.inf
            return jnp.where(nothing, jnp.nan, out), top, jnp.where(nothing, jnp.nan, total)
        return out / total, top, total

    def _visited(self, i: Any) -> tuple[Any, Any]:
        """The blocks of keys, from and up to, that a block of queries can see."""
        import jax
        import jax.numpy as jnp

        (block_q, block_k), (left, right) = self.sizes, self.band
        low, high = jnp.int32(0), jnp.int32(self.blocks[1])
        if left is not None:
            first = jnp.maximum(i * block_q - left, 0)
            low = jnp.minimum(jax.lax.div(first, block_k), high)
        if right is not None:
            behind = jnp.maximum(i * block_q + block_q + right, 0)
            high = jnp.minimum(jax.lax.div(behind + block_k - 1, block_k), high)
        return low, jnp.maximum(low, high)

    def _start(self, place: tuple[Any, Any], i: Any, tiles: Any) -> tuple[Any, Any, Any]:
        """Maximum, sum and output before the first key: the sink's."""
        import jax.numpy as jnp

        shape = (self.group, self.sizes[0])
        out = jnp.zeros((*shape, self.spec.size("value_depth")), jnp.float32)
        if self.sink is None:
            return jnp.full((*shape, 1), -jnp.inf), jnp.zeros((*shape, 1)), out
        top = self.sink(jnp.float32(0), *self._context(place, i, 0, 1, tiles))
        return jnp.broadcast_to(top, (*shape, 1)), jnp.ones((*shape, 1)), out

    def _context(
        self, place: tuple[Any, Any], i: Any, key: Any, keys: int, tiles: Any
    ) -> list[Any]:
        """What captured functions take behind the logit, to broadcast to `[group, query, key]`."""
        import jax.numpy as jnp

        query = i * self.sizes[0]
        parts = []
        for x in tiles:
            wanted = (1, 1, self.group, self.sizes[0], keys)
            at = (*place, 0, query, key)
            varies = [size > 1 for size in x.shape]
            start = [a if moves else 0 for a, moves in zip(at, varies, strict=True)]
            sizes = [s if moves else 1 for s, moves in zip(wanted, varies, strict=True)]
            parts.append(self._slice(x, start, sizes[2:]))
        head = place[1] * self.group + jnp.arange(self.group, dtype=jnp.int32)
        return [
            *parts,
            jnp.int32(place[0]),
            head.reshape(-1, 1, 1),
            query + jnp.arange(self.sizes[0], dtype=jnp.int32).reshape(1, -1, 1),
            key + jnp.arange(keys, dtype=jnp.int32).reshape(1, 1, -1),
        ]

    def _slice(self, x: Any, start: Sequence[Any], sizes: Sequence[int | None]) -> Any:
        """A piece of one head, `[…sizes]`; None takes a whole axis."""
        import jax

        full = [x.shape[x.ndim - len(sizes) + n] if s is None else s for n, s in enumerate(sizes)]
        leading = [1] * (x.ndim - len(full))
        return jax.lax.dynamic_slice(x, start, [*leading, *full]).reshape(full)

    def _step(
        self, place: tuple[Any, Any], i: Any, high: Any, rows: Any, k: Any, v: Any, tiles: Any
    ) -> Callable[[Any, Any], Any]:
        """What one block of keys adds to maximum, sum and output of a block of queries."""
        import jax
        import jax.numpy as jnp

        block, count, (_, length) = self.sizes[1], self.blocks[1], self.lengths
        shape = (self.group, self.sizes[0], block)

        def step(t: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            # From the last visible block down, and then those that are behind it.
            j = jax.lax.rem(high - 1 - t + count, count) if self.skips else t
            at = (*place, j * block, 0)
            keys, values = (self._slice(x, at, (block, x.shape[3])) for x in (k, v))
            context = self._context(place, i, j * block, block, tiles)
            logits = dot(rows.reshape(-1, rows.shape[2]), keys, 1).reshape(shape)
            scores = jnp.broadcast_to(self.score(logits, *context), shape)
            if count * block != length:
                scores = jnp.where(context[-1] < length, scores, -jnp.inf)
            old, total, out = state
            top = jnp.maximum(old, jnp.max(scores, axis=-1, keepdims=True))
            finite = jnp.where(top == -jnp.inf, 0.0, top)  # nothing seen yet
            weights, decay = jnp.exp(scores - finite), jnp.exp(old - finite)
            total = total * decay + jnp.sum(weights, axis=-1, keepdims=True)
            if self.probs is not None:
                weights = jnp.broadcast_to(self.probs(weights, *context), shape)
            added = dot(weights.reshape(-1, block).astype(v.dtype), values, 0)
            return top, total, out * decay + added.reshape(out.shape)

        return step
