"""JAX's splash attention as the first kernel for attention: when it is taken, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxlib.mlir import ir

from hlo_opt import ir as hlo_ir
from hlo_opt.ir.walk import functions
from hlo_opt.kernels import kernels_for
from hlo_opt.kernels.attention import AttentionSpec
from hlo_opt.kernels.splash_attention import SplashAttention
from hlo_opt.passes import lower_composites
from hlo_opt.patterns.score import AtLeast, Linear, Mask
from hlo_opt.pipeline import PassContext, run_pipeline
from hlo_opt.verify import compare, verify_pipeline

pytestmark = pytest.mark.usefixtures("library_kernels")

S, D = 256, 64
SPLASH = "lowered: Pallas splash attention"
FLASH = "lowered: Pallas flash attention"


def shapes(
    dtype: Any = jnp.float32,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    s: int = S,
    keys: int | None = None,
    d: int = D,
    value_d: int | None = None,
) -> tuple[jax.ShapeDtypeStruct, ...]:
    sizes = ((s, heads, d), (keys or s, kv_heads, d), (keys or s, kv_heads, value_d or d))
    return tuple(jax.ShapeDtypeStruct((2, *size), dtype) for size in sizes)


def attention(
    *masks: Callable[[Any, Any], Any],
    scale: float = 0.125,
    value: float = -1e30,
    logits: Any = None,
    additive: bool = False,
    score: Callable[[Any], Any] = lambda x: x,
) -> Callable[..., jax.Array]:
    """Attention `[batch, sequence, head, depth]` with masks of query and key positions."""

    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        b, s, h, d = q.shape
        grouped = q.reshape(b, s, k.shape[2], h // k.shape[2], d)
        x = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k, preferred_element_type=logits)
        x = score(x.astype(jnp.float32) * scale)
        for mask in masks:
            open_ = mask(jnp.arange(s)[:, None], jnp.arange(k.shape[1])[None])
            x = x + jnp.where(open_, 0, value) if additive else jnp.where(open_, x, value)
        p = jax.nn.softmax(x, axis=-1).astype(v.dtype)
        return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(b, s, h, v.shape[-1])

    return fn


def causal(q: Any, k: Any) -> Any:
    return q >= k


def near(q: Any, k: Any) -> Any:
    return q - k < 50


def window(q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 50)


def module_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> ir.Module:
    return hlo_ir.parse(jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text())


def lowered(module: ir.Module, interpret: bool = False) -> tuple[ir.Module, list[str]]:
    ctx = PassContext(target="v5e", interpret=interpret)
    result = run_pipeline(module, "inference", ctx)
    return result, [r.message for r in ctx.remarks if r.pass_name == "lower-composites"]


def label(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The only remark of lowering, without the blocks."""
    (remark,) = lowered(module_of(fn, args))[1]
    return remark.split(", blocks")[0]


def test_the_order_of_kernels() -> None:
    names = [kernel.name for kernel in kernels_for("hlo_opt.attention", "tpu")]
    assert names == [
        "Pallas general attention",
        "Pallas splash attention",
        "Pallas flash attention",
    ]


MASKS: list[tuple[Callable[[Any, Any], Any], ...]] = [
    (causal,),
    (),
    (window,),
    (near,),
    (causal, near),
    (lambda q, k: q + 7 >= k,),
    (lambda q, k: (q - k < 140) & (k - q < 140),),
    (lambda q, k: (q - k < 9) & (q + 200 > k),),
]
SHAPES: list[dict[str, int]] = [
    {},
    {"kv_heads": 4},
    {"kv_heads": 1},
    {"s": 512, "d": 128, "value_d": 64},
    {"keys": 512},
    {"d": 192},
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sizes", SHAPES)
def test_numbers_of_every_shape(sizes: Any, dtype: Any) -> None:
    holds(attention(causal), shapes(dtype, **sizes))


@pytest.mark.parametrize("masks", MASKS)
def test_numbers_of_every_mask(masks: Any) -> None:
    holds(attention(*masks), shapes(jnp.bfloat16))
    if masks:
        holds(attention(*masks, value=-1e9, additive=True), shapes())


def holds(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    module = module_of(fn, args)
    assert lowered(module, interpret=True)[1][0].startswith(SPLASH)
    report = verify_pipeline(module, "inference", "v5e")
    assert report.kernels == 1
    assert report.ok, report.table()


def test_blocks_that_are_skipped_hold() -> None:
    """Several blocks a row, some of them masked as a whole, at the start and at the end."""
    for mask in (causal, lambda q, k: (q >= k) & (q - k < 300)):
        holds(attention(mask), shapes(heads=1, kv_heads=1, s=2048))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (attention(lambda q, k: q > k), shapes()),  # the first query sees nothing
        (attention(lambda q, k: q >= k + 9, additive=True), shapes()),
        (attention(lambda q, k: q - k < 50), shapes(s=512, keys=256)),  # nor do the last ones
        (attention(lambda q, k: (q >= k + 5) & (q - k < 5)), shapes()),
        (attention(lambda q, k: (q + k) % 2 == 0), shapes()),
        (attention(lambda q, k: (q >= k) | (k < 9)), shapes()),
        (attention(lambda q, k: q >= 2 * k), shapes()),
        (attention(lambda q, k: k < 100), shapes()),
    ],
)
def test_other_masks_are_left_to_flash(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    assert label(fn, args) == FLASH


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (attention(near, causal, value=-9.0), shapes(), "a mask gives -9, which is not far below"),
        (
            attention(causal, score=lambda x: 9 * jnp.tanh(x)),
            shapes(),
            "the score function is not linear in the logit: a soft",
        ),
        (attention(causal), shapes(s=200), "200 query positions, not a multiple of 128"),
        (attention(causal), shapes(d=640, value_d=128), "depth 640 is larger than 512"),
        (attention(causal), shapes(jnp.float16), "matmuls in f16"),
    ],
)
def test_refusals(fn: Callable[..., Any], args: tuple[Any, ...], reason: str) -> None:
    result, (remark,) = lowered(module_of(fn, args))
    assert f"Pallas splash attention: {reason}" in remark
    assert "; Pallas flash attention: " in remark
    assert str(result).count("stablehlo.composite") == 1


@pytest.mark.parametrize(
    ("dtype", "logits", "scale", "expected"),
    [
        (jnp.bfloat16, jnp.float32, 0.125, SPLASH),
        (jnp.bfloat16, jnp.float32, 1.0, SPLASH),
        (jnp.bfloat16, jnp.float32, 0.1, FLASH),
        (jnp.bfloat16, None, 0.1, SPLASH),
        (jnp.float32, None, 0.1, SPLASH),
    ],
)
def test_scales_that_would_round_the_queries_are_left_to_flash(
    dtype: Any, logits: Any, scale: float, expected: str
) -> None:
    assert label(attention(causal, scale=scale, logits=logits), shapes(dtype)) == expected


@pytest.mark.parametrize(("precision", "expected"), [("default", FLASH), ("highest", SPLASH)])
def test_bf16_queries_multiplied_in_f32(precision: str, expected: str) -> None:
    """Their products are exact on a TPU even at default precision, until they are scaled."""

    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        return attention(causal, scale=0.1)(*wide)

    with jax.default_matmul_precision(precision):
        assert label(fn, shapes(jnp.bfloat16)) == expected


@pytest.mark.parametrize(("logits", "ok"), [(None, True), (jnp.float32, False)])
def test_scaled_queries_against_large_logits(
    monkeypatch: pytest.MonkeyPatch, logits: Any, ok: bool
) -> None:
    """What is refused would break the rule, what is not holds: here a few channels dominate."""
    monkeypatch.setattr("hlo_opt.kernels.splash_attention._scale_reasons", lambda spec: iter(()))
    module = module_of(attention(causal, scale=0.1, logits=logits), shapes(jnp.bfloat16))
    result, (remark,) = lowered(module, interpret=True)
    assert remark.startswith(SPLASH)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape.shape) for shape in shapes()]
    for array in arrays[:2]:
        array[..., [5, 40]] *= 20
    (errors,) = compare(module, result, [a.astype(ml_dtypes.bfloat16) for a in arrays])
    assert errors.ok is ok, errors


def test_equal_kernels_become_one_function_and_keys_are_not_repeated() -> None:
    def layers(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(4):
            q = jnp.tanh(attention(causal)(q, k, v))
        return q

    module, remarks = lowered(module_of(layers, shapes()))
    assert len(remarks) == 4
    assert len(list(functions(module))) == 2
    (kernel,) = [line for line in str(module).splitlines() if "@tpu_custom_call" in line]
    assert kernel.count(f"tensor<2x2x{S}x{D}xf32>") == 2  # [batch, kv_head, key, depth]
    assert kernel.count(f"tensor<2x4x{S}x{D}xf32>") == 2  # queries and the result


@pytest.mark.parametrize("first", [True, False])
def test_interpreted_and_compiled_kernels_do_not_mix(first: bool) -> None:
    """JAX caches traces by the mask's function, and a full mask has none."""
    lower_composites._lower.cache_clear()
    module = module_of(attention(scale=0.25 if first else 0.5), shapes())
    for interpret in (first, not first):
        text = str(lowered(module, interpret)[0])
        assert ("@tpu_custom_call" in text) is not interpret


def test_long_sequences_stay_small() -> None:
    """No mask of a whole sequence is stored: 8192 positions squared would be 64 MB."""
    module, _ = lowered(module_of(attention(window), shapes(jnp.bfloat16, s=8192)))
    assert len(str(module)) < 200_000


@pytest.mark.parametrize(
    ("masks", "sizes", "blocks"),
    [
        ((causal,), {"s": 2048}, "blocks q=1024, k=1024/512"),
        ((causal,), {"s": 1536}, "blocks q=768, k=768/384"),
        ((window,), {"s": 2048}, "blocks q=512, k=512/512"),
        ((causal,), {"s": 2048, "d": 256}, "blocks q=1024, k=1024/512"),
        ((causal,), {"s": 2048, "d": 256, "dtype": jnp.float32}, "blocks q=512, k=512/512"),
    ],
)
def test_blocks(masks: Any, sizes: dict[str, Any], blocks: str) -> None:
    sizes = {"dtype": jnp.bfloat16, **sizes}
    assert lowered(module_of(attention(*masks), shapes(**sizes)))[1] == [f"{SPLASH}, {blocks}"]


# Errors planted in the kernel itself.


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    build = SplashAttention.build

    def planted(change: Callable[[AttentionSpec], AttentionSpec]) -> None:
        lower_composites._lower.cache_clear()
        monkeypatch.setattr(
            SplashAttention, "build", lambda self, s, candidate: build(self, change(s), candidate)
        )

    yield planted
    lower_composites._lower.cache_clear()


def wrong_scale(s: AttentionSpec) -> AttentionSpec:
    assert isinstance(s.form, Linear)
    return replace(s, form=replace(s.form, scale=s.form.scale * 1.01))


def mask_off_by_one(s: AttentionSpec) -> AttentionSpec:
    assert isinstance(s.form, Linear)
    (mask,) = s.form.masks
    assert isinstance(mask.open, AtLeast)
    wider = replace(mask.open, offset=mask.open.offset + 1)
    return replace(s, form=replace(s.form, masks=(Mask(wider, mask.value, mask.additive),)))


def swapped_heads(s: AttentionSpec) -> AttentionSpec:
    return replace(s, q_dims=tuple(d.replace("kv_head*group", "group*kv_head") for d in s.q_dims))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("change", [wrong_scale, mask_off_by_one, swapped_heads])
def test_errors_planted_in_the_kernel_are_caught(
    plant: Callable[..., None], change: Callable[[AttentionSpec], AttentionSpec], dtype: Any
) -> None:
    module = module_of(attention(causal), shapes(dtype))
    assert verify_pipeline(module, "inference", "v5e").ok
    plant(change)
    report = verify_pipeline(module, "inference", "v5e")
    assert report.kernels == 1
    assert not report.ok
