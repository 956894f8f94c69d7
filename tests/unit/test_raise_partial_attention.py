"""Attention that is normalised after the second matmul or not at all, and sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

from hlo_opt import ir as hlo_ir
from hlo_opt.pipeline import PassContext, run_pipeline
from hlo_opt.verify import verify_pipeline

Array = jax.Array
B, S, H, D = 2, 160, 4, 64


def args(dtype: Any = jnp.float32, *extras: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    shapes = [(B, S, H, D), (B, S, H // 2, D), (B, S, H // 2, D)]
    return [
        *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes),
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in extras),
    ]


def logits(q: Array, k: Array) -> Array:
    """`[b, kv, g, q, k]`, causal."""
    b, s, _, d = q.shape
    grouped = q.reshape(b, s, k.shape[2], -1, d)
    x = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k).astype(jnp.float32) * d**-0.5
    return jnp.where(jnp.arange(s)[:, None] >= jnp.arange(k.shape[1]), x, -1e30)


def weighted(p: Array, v: Array) -> Array:
    return jnp.einsum("bkgqs,bskd->bqkgd", p.astype(v.dtype), v)


def exponentials(q: Array, k: Array) -> tuple[Array, Array]:
    """Exponentials and the row maximum."""
    x = logits(q, k)
    top = x.max(-1, keepdims=True)
    return jnp.exp(x - top), top


def by_row(x: Array) -> Array:
    """A row statistic in the result's order."""
    return x.transpose(0, 3, 1, 2, 4)


def divided(q: Array, k: Array, v: Array) -> Array:
    p, _ = exponentials(q, k)
    return weighted(p, v) / by_row(p.sum(-1, keepdims=True)).astype(v.dtype)


def reciprocal(q: Array, k: Array, v: Array) -> Array:
    p, _ = exponentials(q, k)
    return (1 / by_row(p.sum(-1, keepdims=True))).astype(v.dtype) * weighted(p, v)


def no_maximum(q: Array, k: Array, v: Array) -> Array:
    p = jnp.exp(logits(q, k))
    return weighted(p, v) / by_row(p.sum(-1, keepdims=True)).astype(v.dtype)


def merged_heads(q: Array, k: Array, v: Array) -> Array:
    p, _ = exponentials(q, k)
    total = by_row(p.sum(-1, keepdims=True)).reshape(B, S, H, 1)
    return weighted(p, v).reshape(B, S, H, D) / total.astype(v.dtype)


def two_parts(q: Array, k: Array, v: Array) -> Array:
    """Keys in two halves, merged by their maxima and sums."""
    parts = []
    for half in (slice(0, 96), slice(96, S)):
        x = jnp.einsum("bqkgd,bskd->bkgqs", q.reshape(B, S, H // 2, 2, D), k[:, half])
        x = x.astype(jnp.float32) * D**-0.5
        top = x.max(-1, keepdims=True)
        p = jnp.exp(x - top)
        parts.append((weighted(p, v[:, half]), by_row(top), by_row(p.sum(-1, keepdims=True))))
    best = jnp.maximum(parts[0][1], parts[1][1])
    out = sum(o * jnp.exp(t - best) for o, t, _ in parts)
    total = sum(s * jnp.exp(t - best) for _, t, s in parts)
    return out / total


def statistics_given_too(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    p, top = exponentials(q, k)
    total = p.sum(-1, keepdims=True)
    return weighted(p, v), top, total, jnp.log(total) + top


def sink_column(q: Array, k: Array, v: Array, sink: Array) -> Array:
    x = logits(q, k)
    column = jnp.broadcast_to(sink.reshape(1, H // 2, 2, 1, 1), (*x.shape[:-1], 1))
    p = jax.nn.softmax(jnp.concatenate([x, column], axis=-1), axis=-1)
    return weighted(p[..., :-1], v)


def sink_first(q: Array, k: Array, v: Array, sink: Array) -> Array:
    x = logits(q, k)
    column = jnp.broadcast_to(sink.reshape(1, H // 2, 2, 1, 1), (*x.shape[:-1], 1))
    x = jnp.concatenate([column, x], axis=-1)
    x = x - x.max(-1, keepdims=True)  # twice
    return weighted(jax.nn.softmax(x, axis=-1)[..., 1:], v)


SPELLINGS: dict[str, tuple[Callable[..., Any], list[Any], list[str]]] = {
    "divided": (divided, args(), [""]),
    "divided in bf16": (divided, args(jnp.bfloat16), [""]),
    "reciprocal": (reciprocal, args(), [""]),
    "no maximum": (no_maximum, args(), [""]),
    "merged heads": (merged_heads, args(), [""]),
    "two parts": (two_parts, args(), ["statistics"] * 2),
    "statistics given, too": (statistics_given_too, args(), ["statistics"]),
    "sink": (sink_column, args(jnp.float32, (H,)), ["sink"]),
    "sink first": (sink_first, args(jnp.float32, (H,)), ["sink"]),
}


def module_of(fn: Callable[..., Any], shapes: list[Any]) -> ir.Module:
    return hlo_ir.parse(jax.jit(fn).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text())


def raised(fn: Callable[..., Any], shapes: list[Any]) -> tuple[list[str], list[str]]:
    """What each attention has besides its score, and reasons of refusals."""
    ctx = PassContext()
    module = run_pipeline(module_of(fn, shapes), "raise", ctx)
    found = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.composite" and "attention" in str(op.attributes["name"]):
            attributes = {a.name for a in ir.DictAttr(op.attributes["composite_attributes"])}
            assert (len(op.results) == 3) == ("max_dims" in attributes)
            found.append("statistics" if "max_dims" in attributes else "")
            found[-1] += "sink" if "sink" in attributes else ""
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found, [r.message for r in ctx.remarks if r.kind == "missed"]


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    fn, shapes, wanted = SPELLINGS[name]
    assert raised(fn, shapes)[0] == wanted
    report = verify_pipeline(module_of(fn, shapes), "inference", "v5e")
    assert report.ok, report.table()
    assert report.kernels == len(wanted)


def other_sum(q: Array, k: Array, v: Array) -> Array:
    p, _ = exponentials(q, k)
    return weighted(p, v) / by_row((p * 2).sum(-1, keepdims=True))


def sum_of_some_keys(q: Array, k: Array, v: Array) -> Array:
    p, _ = exponentials(q, k)
    return weighted(p, v) / by_row(p[..., :100].sum(-1, keepdims=True))


def sum_of_other_heads(q: Array, k: Array, v: Array) -> Array:
    p, _ = exponentials(q, k)
    return weighted(p, v) / by_row(p.sum(-1, keepdims=True))[:, :, ::-1]


def guarded_sum(q: Array, k: Array, v: Array) -> Array:
    p = jnp.exp(logits(q, k))
    return weighted(p, v) / by_row(p.sum(-1, keepdims=True) + 1e-6)


def sum_alone(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    p, _ = exponentials(q, k)
    return weighted(p, v), p


def two_columns(q: Array, k: Array, v: Array, sink: Array) -> Array:
    x = logits(q, k)
    column = jnp.broadcast_to(sink.reshape(1, H // 2, 2, 1, 1), (*x.shape[:-1], 1))
    p = jax.nn.softmax(jnp.concatenate([x, column], axis=-1), axis=-1)
    return weighted(p[..., 1:], v)  # the first key is cut off instead


def other_maximum(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """What is subtracted is the maximum of something else."""
    x = logits(q, k)
    top = (x * 1.5).max(-1, keepdims=True)
    p = jnp.exp(x - top)
    return weighted(p, v), top, p.sum(-1)


NEAR_MISSES = [
    (other_sum, []),
    (sum_of_some_keys, []),
    (sum_of_other_heads, []),
    (guarded_sum, []),
    (sum_alone, []),
    (two_columns, [(H,)]),
    (other_maximum, []),
]


@pytest.mark.parametrize(("fn", "extras"), NEAR_MISSES, ids=lambda x: getattr(x, "__name__", ""))
def test_near_misses_keep_their_meaning(fn: Callable[..., Any], extras: list[Any]) -> None:
    """Whatever of them is raised, as a partial attention, must be right."""
    shapes = args(jnp.float32, *extras)
    found, _ = raised(fn, shapes)
    assert "" not in found
    # Without a maximum, what is added to the sum is a sink.
    assert ("sink" in found) == (fn is guarded_sum)
    report = verify_pipeline(module_of(fn, shapes), "raise", None)
    assert report.ok, report.table()


def test_rows_of_minus_infinity() -> None:
    """A first half without a key for some rows is NaN in the original, and so it stays."""

    def fn(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
        x = jnp.where(jnp.arange(S)[:, None] >= jnp.arange(S) + 8, logits(q, k), -jnp.inf)
        top = x.max(-1, keepdims=True)
        p = jnp.exp(x - top)
        return weighted(p, v), top, p.sum(-1)

    report = verify_pipeline(module_of(fn, args()), "inference", "v5e")
    assert report.ok, report.table()
    assert report.kernels == 1


def test_a_statistic_used_before_the_values_are_there() -> None:
    def fn(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        p, top = exponentials(q, k)
        total = p.sum(-1, keepdims=True)
        v = v + jnp.tanh(total.sum() + top.sum())  # the values depend on them
        return weighted(p, v), total

    found, reasons = raised(fn, args())
    assert found == []
    assert any("uses a row statistic before the attention ends" in r for r in reasons)
