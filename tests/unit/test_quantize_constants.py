"""`quantize-constants`: int8 constants in StableHLO's quantized types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

import hlo_opt
from hlo_opt import ir as hlo_ir
from hlo_opt.ir.module import Format, serialize
from hlo_opt.remarks import Remark
from hlo_opt.verify.compare import run

LEGALIZE = "builtin.module(func.func(stablehlo-legalize-quant-to-math,chlo-legalize-to-stablehlo))"
RANDOM = np.random.default_rng(0)
W = RANDOM.standard_normal((64, 32)).astype(np.float32) * np.arange(1, 33, dtype=np.float32)
X = np.eye(64, dtype=np.float32)


def module_of(fn: Callable[..., Any], *shapes: Any) -> ir.Module:
    return hlo_ir.parse(jax.jit(fn).lower(*shapes).as_text())


def quantized(
    fn: Callable[..., Any], *inputs: Any, options: str = ""
) -> tuple[ir.Module, tuple[Remark, ...]]:
    result = hlo_opt.apply(module_of(fn, *inputs), f"quantize-constants{options}")
    return result.module, result.remarks


def outputs(module: ir.Module, *inputs: Any) -> list[np.ndarray]:
    return run(hlo_opt.apply(module, LEGALIZE).module, inputs)


def test_every_weight_is_within_half_a_step() -> None:
    module, (remark,) = quantized(lambda x: x @ jnp.asarray(W), X)
    assert "!quant.uniform<i8<-127:127>:f32:1, {" in str(module)
    assert remark.message == "weights to int8: 64x32, 32 scales, 8,192 -> 2,176 bytes"
    (found,) = outputs(module, X)
    steps = np.abs(W).max(axis=0) / 127
    assert (np.abs(found - W) <= steps * 0.5001).all()
    assert np.abs(found - W).max() > 0.4 * steps.min()  # it is int8, not the float constant


def test_the_error_of_a_matmul_is_that_of_rounding() -> None:
    x = RANDOM.standard_normal((16, 64)).astype(np.float32)
    module, _ = quantized(lambda x: x @ jnp.asarray(W), x)
    (found,) = outputs(module, x)
    steps = np.abs(W).max(axis=0) / 127
    # Rounding errors are uniform: their RMS is a step over the root of 12.
    expected = np.sqrt((x**2).sum(axis=1, keepdims=True)) * steps / np.sqrt(12)
    ratio = np.sqrt(np.mean(((found - x.astype(np.float64) @ W) / expected) ** 2))
    assert 0.8 < ratio < 1.2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats(dtype: Any) -> None:
    narrow = W.astype(dtype)
    x = X.astype(dtype)
    module, (remark,) = quantized(lambda x: x @ jnp.asarray(narrow), x)
    assert remark.kind == "applied"
    (found,) = outputs(module, x)
    wide = narrow.astype(np.float32)
    steps = np.abs(wide).max(axis=0) / 127
    error = np.abs(found.astype(np.float32) - wide)
    assert (error <= steps * 0.51 + np.abs(wide) * 2.0**-7).all()


def test_transposed_and_converted_weights() -> None:
    narrow = W.T.astype(jnp.bfloat16)
    module, (remark,) = quantized(lambda x: x @ jnp.asarray(narrow).astype(jnp.float32).T, X)
    assert "i8<-127:127>:f32:1, {" in str(module)
    assert "32 scales" in remark.message
    (found,) = outputs(module, X)
    wide = narrow.T.astype(np.float32)
    assert (
        np.abs(found - wide) <= np.abs(wide).max(axis=0) / 127 * 0.51 + np.abs(wide) / 128
    ).all()


def test_several_output_dimensions_share_one_scale() -> None:
    weight = W.reshape(64, 4, 8)
    module, (remark,) = quantized(lambda x: jnp.einsum("ab,bcd->acd", x, jnp.asarray(weight)), X)
    assert "one scale" in remark.message
    (found,) = outputs(module, X)
    assert (np.abs(found - weight) <= np.abs(W).max() / 127 * 0.5001).all()


def test_a_channel_of_zeros_stays_zero() -> None:
    weight = W.copy()
    weight[:, 5] = 0
    module, _ = quantized(lambda x: x @ jnp.asarray(weight), X)
    (found,) = outputs(module, X)
    assert (found[:, 5] == 0).all()
    assert np.isfinite(found).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_left_alone(value: float) -> None:
    weight = W.copy()
    weight[3, 3] = value
    module, (remark,) = quantized(lambda x: x @ jnp.asarray(weight), X)
    assert "quant.uniform" not in str(module)
    assert (remark.kind, remark.message) == ("missed", "a NaN or infinity among the weights")


def test_other_uses_of_a_constant_keep_it() -> None:
    def fn(x: jax.Array) -> Any:
        weight = jnp.asarray(W)
        return x @ weight, weight * 2

    module, _ = quantized(fn, X)
    _, kept = outputs(module, X)
    np.testing.assert_array_equal(kept, W * 2)


def test_small_constants_and_splats_are_left_alone() -> None:
    assert not quantized(lambda x: x @ jnp.asarray(W[:, :8]), X)[1]
    assert (
        len(quantized(lambda x: x @ jnp.asarray(W[:, :8]), X, options="{min-elements=9}")[1]) == 1
    )
    assert not quantized(lambda x: x @ jnp.full((64, 64), 0.5), X)[1]


def test_equal_uses_share_and_the_pass_is_idempotent() -> None:
    def fn(x: jax.Array) -> Any:
        weight = jnp.asarray(W)
        return x @ weight, (x * 2) @ weight

    module, remarks = quantized(fn, X)
    assert len(remarks) == 1
    assert str(module).count("uniform_dequantize") == 1
    again = hlo_opt.apply(module, "quantize-constants")
    assert str(again.module) == str(module)
    assert not again.remarks


def test_quantized_modules_pass_through_formats_and_pipelines() -> None:
    module, _ = quantized(lambda x: x @ jnp.asarray(W), X)
    reference = outputs(module, X)[0]
    for format in (Format.MLIR, Format.BYTECODE, Format.ARTIFACT):
        back = hlo_ir.parse(serialize(module, format))
        np.testing.assert_array_equal(outputs(back, X)[0], reference)
    for pipeline in ("raise", "inference"):
        through = hlo_opt.apply(module, pipeline, target="v5e").module
        assert "quant.uniform" in str(through)
        np.testing.assert_array_equal(outputs(through, X)[0], reference)


@pytest.mark.slow
@pytest.mark.tpu
def test_xla_s_tpu_compiler_takes_the_legalised_form() -> None:
    from hlo_opt.targets import compile_module

    x = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
    weight = W.astype(jnp.bfloat16)
    module, _ = quantized(lambda x: x @ jnp.asarray(weight), x)
    report = compile_module(hlo_opt.apply(module, LEGALIZE).module, "v5e")
    assert report.output_bytes >= 8 * 32 * 2
