"""Ways to write attention: each is raised, and its attributes mean what the program computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from meaning import assert_means_its_decomposition, composites

from hlo_opt import ir as hlo_ir
from hlo_opt.passes.normalize import Normalize
from hlo_opt.passes.raise_attention import RaiseAttention
from hlo_opt.pipeline import PassContext
from hlo_opt.verify.compare import run

B, S, T, H, K, D, E = 2, 8, 12, 4, 2, 16, 24
LOG2E = float(np.log2(np.e))


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def raised(fn: Callable[..., Any], *args: Any) -> tuple[ir.Module, PassContext]:
    module = hlo_ir.parse(jax.jit(fn).lower(*args).as_text())
    ctx = PassContext()
    for one in (Normalize(), RaiseAttention()):
        one.run(module, ctx)
        module.operation.verify()
    return module, ctx


Q, KV, V = spec(B, S, H, D), spec(B, T, H, D), spec(B, T, H, E)
BIAS, VALID, SINKS = spec(B, H, S, T), spec(B, T, dtype=jnp.bool_), spec(H)


def logits(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5


def values(p: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def closed() -> jax.Array:
    return jnp.arange(S)[:, None] + T - S < jnp.arange(T)


def row(x: jax.Array) -> jax.Array:
    """A row statistic `[b, h, q]` in the layout of the output."""
    return x.transpose(0, 2, 1)[..., None]


# Division behind the second matmul.


def divided_after(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return values(e, v) / row(e.sum(-1))


def divided_after_no_maximum(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    e = jnp.exp(logits(q, k))
    return values(e, v) / row(e.sum(-1))


def multiplied_after(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.where(closed(), -1e9, logits(q, k))
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return (1 / row(e.sum(-1))) * values(e, v)


def divided_after_merging_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    out = values(e, v).reshape(B, S, H * E)
    return out / jnp.repeat(e.sum(-1).transpose(0, 2, 1), E, axis=-1)


def divided_after_in_mixed_types(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    total = e.astype(jnp.float32).sum(-1).astype(jnp.bfloat16)
    return values(e, v) / row(total)


def divided_after_grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.einsum("bqkgd,bskd->bkgqs", q.reshape(B, S, K, H // K, D), k[:, :, :K])
    x = x.reshape(B, H, S, T)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    p = e.reshape(B, K, H // K, S, T)
    out = jnp.einsum("bkgqs,bskd->bqkgd", p, v[:, :, :K]).reshape(B, S, H, E)
    return out / row(e.sum(-1))


# Softmax in other words.


def base_two(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k) * LOG2E
    e = jnp.exp2(x - x.max(-1, keepdims=True))
    return values(e / e.sum(-1, keepdims=True), v)


def base_two_by_power(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k) * LOG2E
    e = jnp.power(2.0, x - x.max(-1, keepdims=True))
    return values(e / e.sum(-1, keepdims=True), v)


def base_two_after(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp((x - x.max(-1, keepdims=True)) * 0.5)
    return values(e, v) / row(e.sum(-1))


def maximum_where_finite(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - jnp.where(jnp.isfinite(m), m, 0))
    return values(e / e.sum(-1, keepdims=True), v)


def maximum_above_lowest(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    m = jnp.maximum(x.max(-1, keepdims=True), jnp.finfo(x.dtype).min)
    e = jnp.exp(x - jax.lax.stop_gradient(m))
    return values(e / e.sum(-1, keepdims=True), v)


def maximum_twice(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    return values(jax.nn.softmax(x - x.max(-1, keepdims=True), axis=-1), v)


def sum_above_epsilon(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return values(e / jnp.maximum(e.sum(-1, keepdims=True), 1e-6), v)


def sum_where_not_zero(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    total = e.sum(-1, keepdims=True)
    return values(e / jnp.where(total == 0, 1.0, total), v)


# Scales.


def scale_on_k(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k * D**-0.5)
    return values(jax.nn.softmax(x, axis=-1), v)


def scale_on_both(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.einsum("bqhd,bkhd->bhqk", q * D**-0.25, k * D**-0.25)
    return values(jax.nn.softmax(x, axis=-1), v)


def soft_cap(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = 50.0 * jnp.tanh(logits(q, k) / 50.0)
    return values(jax.nn.softmax(jnp.where(closed(), -1e9, x), axis=-1), v)


def normed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k = (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) for x in (q, k))
    return values(jax.nn.softmax(logits(q, k), axis=-1), v)


def latent(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    shared = k[:, :, :1]
    k = jnp.concatenate([k, jnp.broadcast_to(shared, (B, T, H, D))], -1)
    q = jnp.concatenate([q, q * 2], -1)
    return values(jax.nn.softmax(logits(q, k), axis=-1), v)


# Masks.


def mask_filled_with_infinity(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.where(closed(), -jnp.inf, logits(q, k))
    return values(jax.nn.softmax(x, axis=-1), v)


def mask_added_by_baddbmm(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(B * H, x.shape[1], -1) for x in (q, k, v))
    x = bias.reshape(B * H, S, T) + 0.25 * (q @ k.transpose(0, 2, 1))
    return (jax.nn.softmax(x.reshape(B, H, S, T), axis=-1).reshape(B * H, S, T)) @ v


def mask_multiplied(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    x = logits(q, k) * valid[:, None, None].astype(jnp.float32)
    return values(jax.nn.softmax(x, axis=-1), v)


def mask_cast(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    keep = valid.astype(jnp.int32).astype(jnp.float32)[:, None, None]
    x = logits(q, k) + (1.0 - keep) * -1e9
    return values(jax.nn.softmax(x, axis=-1), v)


def guarded_probabilities(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    keep = valid[:, None, None]
    p = jax.nn.softmax(jnp.where(keep, logits(q, k), -1e9), axis=-1)
    return values(jnp.where(keep, p, 0), v)


def masks_summed_first(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    slopes = 2.0 ** -jnp.arange(H, dtype=jnp.float32)
    alibi = slopes[:, None, None] * jnp.arange(T, dtype=jnp.float32)
    bias = jnp.where(closed(), -1e9, 0.0) + alibi
    x = logits(q, k) + (bias + jnp.where(valid, 0.0, -1e9)[:, None, None])
    return values(jax.nn.softmax(x, axis=-1), v)


def head_mask_by_matmul(q: jax.Array, k: jax.Array, v: jax.Array, heads: jax.Array) -> jax.Array:
    p = jnp.einsum("bhqk,h->bhqk", jax.nn.softmax(logits(q, k), axis=-1), heads)
    return values(p, v)


# Dimensions.


def without_batch(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k)), v)


def without_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ k.T, axis=-1) @ v


def one_query(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return values(jax.nn.softmax(logits(q[:, :1], k), axis=-1), v)


def tiled_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (jnp.concatenate([x[:, :, :K]] * (H // K), axis=2) for x in (k, v))
    return values(jax.nn.softmax(logits(q, k), axis=-1), v)


def mapped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    one = lambda q, k, v: jax.nn.softmax(q @ k.T / 4, axis=-1) @ v  # noqa: E731
    return jax.vmap(jax.vmap(one, 1, 1))(q, k, v)


def in_a_loop(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    step = jax.checkpoint(lambda i, q: jnp.tanh(divided_after(q, k, v))[..., :D])
    return jax.lax.fori_loop(0, 3, step, q)


def in_while(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda q: q.sum() < 1, lambda q: soft_cap(q, k, v)[..., :D], q)


# Sinks.


def sink_column(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    column = jnp.broadcast_to(sinks[None, :, None, None], (B, H, S, 1))
    x = jnp.concatenate([jnp.where(closed(), -1e9, logits(q, k)), column], -1)
    x = x - x.max(-1, keepdims=True)
    return values(jax.nn.softmax(x, axis=-1)[..., :-1], v)


def sink_column_first(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    column = jnp.broadcast_to(sinks[None, :, None, None], (B, H, S, 1))
    p = jax.nn.softmax(jnp.concatenate([column, logits(q, k)], -1), axis=-1)
    return values(p.astype(jnp.bfloat16)[..., 1:], v.astype(jnp.bfloat16))


def sink_in_the_sum(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    x, s = logits(q, k), sinks[:, None, None]
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - m)
    return values(e / (e.sum(-1, keepdims=True) + jnp.exp(s - m)), v)


def sink_in_the_maximum(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    x, s = logits(q, k), sinks[:, None, None]
    m = jnp.maximum(s, x.max(-1, keepdims=True))
    e = jnp.exp(x - m)
    return values(e / (jnp.exp(s - m) + e.sum(-1, keepdims=True)), v)


def sink_divided_after(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    x, s = logits(q, k), sinks[:, None, None]
    m = jnp.maximum(x.max(-1, keepdims=True), s)
    e = jnp.exp(x - m)
    return values(e, v) / row((e.sum(-1, keepdims=True) + jnp.exp(s - m))[..., 0])


def sink_column_divided_after(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array
) -> jax.Array:
    column = jnp.broadcast_to(sinks[None, :, None, None], (B, H, S, 1))
    x = jnp.concatenate([logits(q, k), column], -1)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return values(e[..., :-1], v) / row(e.sum(-1))


def sink_of_zero(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - m)
    return values(e / (jnp.exp(-m) + e.sum(-1, keepdims=True)), v)


def sink_of_zero_without_maximum(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    e = jnp.exp(logits(q, k))
    return values(e / (1 + e.sum(-1, keepdims=True)), v)


def exponentials_guarded(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return values(jnp.where(closed(), 0, e), v) / row(e.sum(-1))


QKV = (Q, KV, V)
SPELLINGS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    *((fn, QKV) for fn in (divided_after, divided_after_no_maximum, multiplied_after)),
    *((fn, QKV) for fn in (divided_after_merging_heads, divided_after_in_mixed_types)),
    *((fn, QKV) for fn in (divided_after_grouped, base_two, base_two_by_power, base_two_after)),
    *((fn, QKV) for fn in (maximum_where_finite, maximum_above_lowest, maximum_twice)),
    *((fn, QKV) for fn in (sum_above_epsilon, sum_where_not_zero, scale_on_k, scale_on_both)),
    *((fn, QKV) for fn in (soft_cap, normed, latent, mask_filled_with_infinity)),
    (exponentials_guarded, QKV),
    (mask_added_by_baddbmm, (*QKV, BIAS)),
    *((fn, (*QKV, VALID)) for fn in (mask_multiplied, mask_cast, guarded_probabilities)),
    (masks_summed_first, (*QKV, VALID)),
    (head_mask_by_matmul, (*QKV, spec(H, dtype=jnp.int32))),
    (without_batch, (spec(S, H, D), spec(T, H, D), spec(T, H, E))),
    (without_heads, (spec(S, D), spec(T, D), spec(T, E))),
    *((fn, QKV) for fn in (one_query, tiled_heads, mapped, in_a_loop, in_while)),
    *((fn, (*QKV, SINKS)) for fn in (sink_column, sink_column_first, sink_in_the_sum)),
    *((fn, (*QKV, SINKS)) for fn in (sink_in_the_maximum, sink_divided_after)),
    (sink_column_divided_after, (*QKV, SINKS)),
    *((fn, QKV) for fn in (sink_of_zero, sink_of_zero_without_maximum)),
]


@pytest.mark.parametrize(("fn", "args"), SPELLINGS, ids=[fn.__name__ for fn, _ in SPELLINGS])
def test_is_raised_and_means_the_same(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    module, ctx = raised(fn, *args)
    found = composites(module, "hlo_opt.attention")
    assert len(found) == 1, [str(r) for r in ctx.remarks]
    attributes = ir.DictAttr(found[0].attributes["composite_attributes"])
    assert ("sink" in attributes) == fn.__name__.startswith("sink")
    assert len(found[0].results) == 1
    assert_means_its_decomposition(found[0], module)


# Parts of an attention: row statistics are results too.


def partial(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = jnp.where(closed(), -1e9, logits(q, k))
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - m)
    return values(e, v), m, e.sum(-1)


def merged(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Two halves of the keys, as decoding over two caches does it."""
    one, two = partial_half(q, k[:, : T // 2], v[:, : T // 2]), partial_half(q, k, v)
    m = jnp.maximum(one[1], two[1])
    a, b = jnp.exp(one[1] - m), jnp.exp(two[1] - m)
    total = a * one[2] + b * two[2]
    return one[0] * (a / total) + two[0] * (b / total)


def partial_half(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = logits(q, k)
    m = x.max(-1)
    e = jnp.exp(x - m[..., None])
    return values(e, v), row(m), row(e.sum(-1))


def epsilon_added(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return values(e, v) / row(e.sum(-1) + 1e-3)


def divided_by_another_row(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return values(e, v) / row(jnp.flip(e.sum(-1), 2))


def normalised_with_log_of_sum(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = logits(q, k)
    m = x.max(-1)
    e = jnp.exp(x - m[..., None])
    total = e.sum(-1)
    return values(e, v) / row(total), m + jnp.log(total)


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (partial, 1),
        (merged, 2),
        (epsilon_added, 1),
        (divided_by_another_row, 1),
        (normalised_with_log_of_sum, 1),
    ],
)
def test_parts_are_raised_with_statistics(fn: Callable[..., Any], count: int) -> None:
    module, ctx = raised(fn, *QKV)
    found = composites(module, "hlo_opt.attention")
    assert len(found) == count, [str(r) for r in ctx.remarks]
    for op in found:
        assert len(op.results) == 3
        assert_means_its_decomposition(op, module)


def test_what_is_made_of_statistics_moves_behind_the_composite() -> None:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        x = logits(q, k)
        m = x.max(-1)
        early = jnp.tanh(m)
        e = jnp.exp(x - m[..., None])
        return early + 1, values(e, v), e.sum(-1)

    module, _ = raised(fn, *QKV)
    assert len(composites(module, "hlo_opt.attention")) == 1
    args = [
        np.random.default_rng(n).standard_normal(a.shape).astype("f4") for n, a in enumerate(QKV)
    ]
    for got, wanted in zip(run(module, args), jax.jit(fn)(*args), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


# Near misses, and why they are refused.


def sink_at_the_wrong_end(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    column = jnp.broadcast_to(sinks[None, :, None, None], (B, H, S, 1))
    p = jax.nn.softmax(jnp.concatenate([logits(q, k), column], -1), axis=-1)
    return values(p[..., 1:], v)


def two_sink_columns(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    column = jnp.broadcast_to(sinks[None, :, None, None], (B, H, S, 2))
    p = jax.nn.softmax(jnp.concatenate([logits(q, k), column], -1), axis=-1)
    return values(p[..., :-2], v)


def sink_over_keys(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    x = logits(q, k)
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - m)
    s = jnp.arange(T) * sinks[:, None, None]
    return values(e / (e.sum(-1, keepdims=True) + jnp.exp(s - m)), v)


def sink_not_shifted(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return values(e / (e.sum(-1, keepdims=True) + jnp.exp(sinks[:, None, None])), v)


def sink_shifted_by_another(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array
) -> jax.Array:
    x, s = logits(q, k), sinks[:, None, None]
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - m)
    return values(e / (e.sum(-1, keepdims=True) + jnp.exp(s - jnp.flip(m, 2))), v)


def sink_and_other_maximum(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    x, s = logits(q, k), sinks[:, None, None]
    m = jnp.maximum(x.max(-1, keepdims=True), 2 * s)
    e = jnp.exp(x - m)
    return values(e / (e.sum(-1, keepdims=True) + jnp.exp(s - m)), v)


def sink_in_the_maximum_only(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array
) -> jax.Array:
    x, s = logits(q, k), sinks[:, None, None]
    e = jnp.exp(x - jnp.maximum(x.max(-1, keepdims=True), s))
    return values(e / e.sum(-1, keepdims=True), v)


def sink_in_a_part(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> Any:
    x, s = logits(q, k), sinks[:, None, None]
    m = jnp.maximum(x.max(-1, keepdims=True), s)
    e = jnp.exp(x - m)
    return values(e, v), m, e.sum(-1)


def sum_of_another(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    m = x.max(-1, keepdims=True)
    e, other = jnp.exp(x - m), jnp.exp(x * 2 - m)
    return values(e, v) / row(other.sum(-1) + 0 * e.sum(-1))


def maximum_of_another(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = logits(q, k)
    m = (2 * x).max(-1, keepdims=True)
    e = jnp.exp(x - m)
    return values(e, v), m, e.sum(-1)


def some_keys_of_all(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = logits(q, k)
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - m)
    return values(e[..., : T // 2], v[:, : T // 2]), m, e.sum(-1)


def sum_over_queries(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = logits(q, k)
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - m)
    return values(e, v), m, e.sum(-2)


def exponentials_returned(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = logits(q, k)
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - m)
    return values(e, v), m, e.sum(-1), e


def exponentials_squared(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return values(e * e, v) / row(e.sum(-1))


def part_without_maximum(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    e = jnp.exp(logits(q, k))
    return values(e, v), e.sum(-1)


def part_with_guarded_maximum(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = logits(q, k)
    m = x.max(-1, keepdims=True)
    m = jnp.where(jnp.isfinite(m), m, 0)
    e = jnp.exp(x - m)
    return values(e, v), m, e.sum(-1)


def part_in_base_two(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = logits(q, k)
    m = x.max(-1, keepdims=True)
    e = jnp.exp2(x - m)
    return values(e, v), m, e.sum(-1)


def values_of_the_maximum(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = logits(q, k)
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - m)
    return values(e, v * m.sum()), m, e.sum(-1)


def maximum_clamped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - jnp.maximum(x.max(-1, keepdims=True), -1.0))
    return values(e / e.sum(-1, keepdims=True), v)


def sum_clamped_for_empty_rows(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.where(closed(), -jnp.inf, logits(q, k))
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - jnp.where(jnp.isfinite(m), m, 0))
    return values(e / jnp.maximum(e.sum(-1, keepdims=True), 1e-6), v)


def sum_clamped_without_maximum(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    e = jnp.exp(logits(q, k))
    return values(e / jnp.maximum(e.sum(-1, keepdims=True), 1e-6), v)


def epsilon_in_the_sum(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return values(e / (e.sum(-1, keepdims=True) + 1e-6), v)


def differential(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    one, two = (jax.nn.softmax(logits(q * n, k), axis=-1) for n in (1, 2))
    return values(one - 0.5 * two, v)


def differential_of_one_matmul(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    return values(jax.nn.softmax(x, axis=-1) - 0.5 * jax.nn.softmax(x * 2, axis=-1), v)


def gated_by_logits(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    return values(jax.nn.softmax(x, axis=-1) * jax.nn.sigmoid(x), v)


def probabilities_cut_to_integers(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    p = jax.nn.softmax(logits(q, k), axis=-1)
    return values((p * 8).astype(jnp.int32).astype(jnp.float32), v)


def sum_of_integers(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = logits(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    total = e.astype(jnp.int32).sum(-1, keepdims=True).astype(jnp.float32)
    return values(e / total, v)


def values_by_query(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    p = jax.nn.softmax(logits(q, k), axis=-1)
    weights = jnp.sin(jnp.arange(S * T).reshape(S, T, 1))
    return jnp.einsum("bhqk,bhqkd->bqhd", p, v.transpose(0, 2, 1, 3)[:, :, None] * weights)


NEAR_MISSES: dict[Callable[..., Any], str] = {
    sink_at_the_wrong_end: "no sink",
    two_sink_columns: "do not reach the matmul",
    sink_over_keys: "varies over the keys",
    sink_not_shifted: "not shifted by the maximum",
    sink_shifted_by_another: "not shifted by the maximum",
    sink_and_other_maximum: "not the row maximum",
    sink_in_the_maximum_only: "not the row maximum",
    sink_in_a_part: "not the row maximum",
    sum_of_another: "not the sum of the exponentials",
    maximum_of_another: "not the row maximum",
    some_keys_of_all: "do not reach the matmul",
    sum_over_queries: "another axis",
    exponentials_returned: "used elsewhere",
    exponentials_squared: "changed before the second matmul",
    part_without_maximum: "not divided by their sum",
    part_with_guarded_maximum: "not just the row maximum",
    part_in_base_two: "another base",
    values_of_the_maximum: "before the attention ends",
    maximum_clamped: "not the row maximum",
    sum_clamped_for_empty_rows: "rows without any key",
    sum_clamped_without_maximum: "no maximum is subtracted",
    epsilon_in_the_sum: "a constant is added to the sum",
    differential: "two softmaxes",
    differential_of_one_matmul: "two softmaxes",
    gated_by_logits: "beside the softmax",
    values_by_query: "in different ways",
}


@pytest.mark.parametrize("fn", NEAR_MISSES, ids=lambda fn: fn.__name__)
def test_near_misses_are_refused_with_a_reason(fn: Callable[..., Any]) -> None:
    module, ctx = raised(fn, *QKV, *([SINKS] if "sink" in fn.__name__ else []))
    assert not composites(module, "hlo_opt.attention")
    messages = [r.message for r in ctx.remarks if r.kind == "missed"]
    assert messages, "no reason was given"
    assert all(NEAR_MISSES[fn] in message for message in messages), messages


def sum_of_some_keys(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = logits(q, k)
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - m)
    return values(e, v), m, e[..., : T // 2].sum(-1)


def test_a_sum_over_some_keys_is_no_softmax() -> None:
    module, ctx = raised(sum_of_some_keys, *QKV)
    assert not composites(module, "hlo_opt.attention")
    assert not ctx.remarks


def test_integers_in_between_are_no_softmax() -> None:
    module, _ = raised(sum_of_integers, *QKV)
    assert not composites(module, "hlo_opt.attention")
    module, _ = raised(probabilities_cut_to_integers, *QKV)
    for op in composites(module, "hlo_opt.attention"):
        assert "probs" in ir.DictAttr(op.attributes["composite_attributes"])
        assert_means_its_decomposition(op, module)
