"""What `raise-attention` and `raise-softmax` recognise, and what they must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from meaning import composites

from hlo_opt import ir as hlo_ir
from hlo_opt.ir.walk import functions
from hlo_opt.passes.normalize import Normalize
from hlo_opt.passes.raise_attention import RaiseAttention
from hlo_opt.passes.raise_softmax import RaiseSoftmax
from hlo_opt.pipeline import PassContext

B, S, H, K, D = 2, 32, 8, 2, 16
G = H // K


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def raised(fn: Callable[..., Any], *args: Any) -> tuple[ir.Module, PassContext]:
    module = hlo_ir.parse(jax.jit(fn).lower(*args).as_text())
    ctx = PassContext()
    for one in (Normalize(), RaiseAttention(), RaiseSoftmax()):
        one.run(module, ctx)
        module.operation.verify()
    return module, ctx


def strings(op: ir.Operation, name: str) -> list[str]:
    attribute = ir.DictAttr(op.attributes["composite_attributes"])[name]
    return [ir.StringAttr(a).value for a in ir.ArrayAttr(attribute)]


def roles(op: ir.Operation) -> dict[str, int]:
    attribute = ir.DictAttr(ir.DictAttr(op.attributes["composite_attributes"])["roles"])
    return {entry.name: ir.IntegerAttr(entry.attr).value for entry in attribute}


def missed(ctx: PassContext) -> list[str]:
    return [r.message for r in ctx.remarks if r.kind == "missed" and r.structure == "attention"]


def causal(s: int = S) -> jax.Array:
    return jnp.tril(jnp.ones((s, s), bool))


def bshd(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x, axis=-1), v)


def bhsd_masked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = (q * D**-0.5) @ k.swapaxes(-1, -2)
    p = jax.nn.softmax(jnp.where(causal(), x, -1e9), axis=-1)
    return p @ v


def grouped_by_repeat(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return bshd(q, jnp.repeat(k, G, axis=2), jnp.repeat(v, G, axis=2))


def grouped_by_tile(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return bshd(q, jnp.tile(k, (1, 1, G, 1)), jnp.tile(v, (1, 1, G, 1)))


def grouped_by_query(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.einsum("bqkgd,bskd->bkgqs", q.reshape(B, S, K, G, D), k)
    x = jnp.where(causal(), x / np.sqrt(D), jnp.finfo(x.dtype).min)
    p = jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(B, S, H, D)


def merged_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(B * H, S, D) for x in (q, k, v))
    return jax.nn.softmax(q @ k.transpose(0, 2, 1), axis=-1) @ v


def reciprocal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    p = e * (1.0 / jnp.sum(e, axis=-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


MHA = (spec(B, S, H, D),) * 3
GQA = (spec(B, S, H, D), spec(B, S, K, D), spec(B, S, K, D))


@pytest.mark.parametrize(
    ("fn", "args", "q_dims", "k_dims"),
    [
        (bshd, MHA, "batch query kv_head depth", "batch key kv_head depth"),
        (
            bhsd_masked,
            (spec(B, H, S, D),) * 3,
            "batch kv_head query depth",
            "batch kv_head key depth",
        ),
        (grouped_by_repeat, GQA, "batch query kv_head*group depth", "batch key kv_head depth"),
        (grouped_by_tile, GQA, "batch query group*kv_head depth", "batch key kv_head depth"),
        (grouped_by_query, GQA, "batch query kv_head*group depth", "batch key kv_head depth"),
        (merged_heads, MHA, "batch query kv_head depth", "batch key kv_head depth"),
        (reciprocal, MHA, "batch query kv_head depth", "batch key kv_head depth"),
        (
            jax.nn.dot_product_attention,
            GQA,
            "batch query kv_head*group depth",
            "batch key kv_head depth",
        ),
    ],
)
def test_spellings(fn: Callable[..., Any], args: tuple[Any, ...], q_dims: str, k_dims: str) -> None:
    module, ctx = raised(fn, *args)
    (op,) = composites(module, "hlo_opt.attention")
    assert strings(op, "q_dims") == q_dims.split()
    assert strings(op, "k_dims") == k_dims.split()
    assert not composites(module, "hlo_opt.softmax")
    assert roles(op)["query"] == roles(op)["key"] == S
    assert [r.kind for r in ctx.remarks] == ["applied"]


def test_bf16_with_f32_softmax_keeps_types() -> None:
    args = tuple(spec(*a.shape, dtype=jnp.bfloat16) for a in GQA)
    module, _ = raised(grouped_by_query, *args)
    (op,) = composites(module, "hlo_opt.attention")
    attributes = ir.DictAttr(op.attributes["composite_attributes"])
    types = {
        n: str(attributes[n]) for n in ("qk_type", "logits_type", "softmax_type", "probs_type")
    }
    assert types == {
        "qk_type": "bf16",
        "logits_type": "bf16",
        "softmax_type": "f32",
        "probs_type": "bf16",
    }


def test_padding_enters_as_batch_by_key() -> None:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
        x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        mask = causal()[None, None] & (valid != 0)[:, None, None, :]
        bias = jnp.where(mask, 0.0, jnp.finfo(x.dtype).min)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x + bias, axis=-1), v)

    module, _ = raised(fn, *MHA, spec(B, S, dtype=jnp.int32))
    (op,) = composites(module, "hlo_opt.attention")
    dims = ir.DictAttr(op.attributes["composite_attributes"])["extra_dims"]
    assert str(dims) == '[["batch", "key"]]'


def test_inside_scan() -> None:
    def fn(q: jax.Array, ks: jax.Array, vs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, kv: (bshd(x, *kv), None), q, (ks, vs))[0]

    module, _ = raised(fn, spec(B, S, H, D), spec(3, B, S, H, D), spec(3, B, S, H, D))
    assert len(composites(module, "hlo_opt.attention")) == 1


def test_equal_layers_share_a_decomposition() -> None:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(4):
            q = jnp.tanh(grouped_by_query(q, k, v))
        return q

    module, _ = raised(fn, *GQA)
    assert len(composites(module, "hlo_opt.attention")) == 4
    assert len(list(functions(module))) == 3  # main, one decomposition, one score


def test_raising_twice_changes_nothing() -> None:
    module, ctx = raised(bshd, *MHA)
    before = str(module)
    for one in (Normalize(), RaiseAttention(), RaiseSoftmax()):
        one.run(module, ctx)
    assert str(module) == before


def test_min_seq() -> None:
    module = hlo_ir.parse(jax.jit(bshd).lower(*MHA).as_text())
    ctx = PassContext()
    RaiseAttention(min_seq=S + 1).run(module, ctx)
    assert not composites(module, "hlo_opt.attention")
    assert "min-seq" in missed(ctx)[0]


# Near misses: programs that look like attention and are not, or cannot be replaced by one.


def over_queries(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x, axis=2), v)


def probabilities_returned(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v), p


def logits_returned(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x, axis=-1), v), x.sum()


def dropout(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, p.shape)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(keep, p / 0.9, 0), v)


def two_logits(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.einsum("bqhd,bkhd->bhqk", k, q)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x, axis=-1), v)


def part_of_the_keys(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p[..., : S // 2], v[:, : S // 2])


def shifted_probabilities(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.roll(p, 1, axis=-1), v)


@pytest.mark.parametrize(
    "fn",
    [
        over_queries,
        probabilities_returned,
        logits_returned,
        dropout,
        two_logits,
        part_of_the_keys,
        shifted_probabilities,
    ],
)
def test_near_misses_are_left_alone(fn: Callable[..., Any]) -> None:
    module, ctx = raised(fn, *MHA)
    assert not composites(module, "hlo_opt.attention")
    if (
        fn is not shifted_probabilities
    ):  # nothing elementwise leads to a matmul: no attention at all
        assert missed(ctx)


def not_divided_by_the_sum(x: jax.Array) -> jax.Array:
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / jnp.maximum(e.sum(-1, keepdims=True), 2.0)


def divided_by_another_rows_sum(x: jax.Array) -> jax.Array:
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / jnp.flip(e.sum(-1, keepdims=True), 0)


def square_transposed_sum(x: jax.Array) -> jax.Array:
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1)[None, :]


def times_the_sum(x: jax.Array) -> jax.Array:
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / (1.0 / e.sum(-1, keepdims=True))


def subtracts_the_mean(x: jax.Array) -> jax.Array:
    e = jnp.exp(x - x.mean(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    "fn",
    [
        not_divided_by_the_sum,
        divided_by_another_rows_sum,
        square_transposed_sum,
        times_the_sum,
        subtracts_the_mean,
    ],
)
def test_not_a_softmax(fn: Callable[..., Any]) -> None:
    module, _ = raised(fn, spec(S, S))
    assert not composites(module, "hlo_opt.softmax")


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_alone(axis: int) -> None:
    module, _ = raised(lambda x: jax.nn.softmax(x, axis=axis) * 2, spec(3, 4, 5))
    (op,) = composites(module, "hlo_opt.softmax")
    attributes = ir.DictAttr(op.attributes["composite_attributes"])
    assert ir.IntegerAttr(attributes["axis"]).value == axis


def test_an_exponential_that_went_with_an_attention_is_not_looked_at_again() -> None:
    """The guard on the probabilities has an exponential of its own, behind that of the softmax."""

    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        p = jax.nn.softmax(x, axis=-1)
        p = p * jnp.exp(-jnp.arange(S) / S)
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    _, ctx = raised(fn, *[spec(B, S, K, D)] * 3)
    assert sum(r.kind == "applied" for r in ctx.remarks) == 1
