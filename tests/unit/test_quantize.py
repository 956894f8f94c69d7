"""Weights as int8: results, bounds, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

import decoder
import hlo_opt
from hlo_opt import ir as hlo_ir
from hlo_opt.errors import HloOptError
from hlo_opt.ir.prepared import split
from hlo_opt.ir.signature import function_types, main_function
from hlo_opt.verify import verify_pipeline
from hlo_opt.verify.compare import run, run_prepared

F32, BF16 = jnp.float32, jnp.bfloat16
PIPELINE = "normalize,hoist-weights{parameters=params},quantize{min-elements=1}"


def lowered(fn: Callable[..., Any], *args: Any) -> ir.Module:
    traced = jax.jit(fn).trace(*args)  # for TPU: XLA:CPU has no ragged matmul
    return hlo_ir.parse(traced.lower(lowering_platforms=("tpu",)).as_text(debug_info=True))


def normal(seed: int, *shape: int, dtype: Any = F32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def quantized(
    fn: Callable[..., Any], *args: Any, pipeline: str = PIPELINE
) -> tuple[hlo_opt.api.Result, list[np.ndarray]]:
    """Quantizes and runs; checks that a second run changes nothing."""
    module = lowered(fn, *args)
    result = hlo_opt.apply(module, pipeline)
    again = hlo_opt.apply(result.module, "hoist-weights,quantize{min-elements=1}").module
    assert str(again) == str(result.module)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(args)]
    return result, run_prepared(result.module, leaves)


def applied(result: hlo_opt.api.Result) -> list[str]:
    return [r.args["path"] for r in result.remarks if r.kind == "applied" and "path" in r.args]


def missed(result: hlo_opt.api.Result) -> list[str]:
    return [r.message for r in result.remarks if r.kind == "missed"]


def stand_in(result: hlo_opt.api.Result, w: np.ndarray, summed: tuple[int, ...]) -> np.ndarray:
    """The weight as int8 stands for it, in float64; checks how it was rounded."""
    parts = split(result.module)
    assert parts is not None
    q, scale = (array.astype(np.float64) for array in run(parts.prepare, [w]))
    wide = w.astype(np.float64)
    scale = np.expand_dims(scale, summed)
    np.testing.assert_allclose(scale, np.abs(wide).max(summed, keepdims=True) / 127, rtol=1e-6)
    assert np.all(np.abs(q) <= 127)
    assert np.all(np.abs(q * scale - wide) <= 0.5 * scale * (1 + 1e-4))
    return q * scale


# Every way a weight can stand in a matmul: equation, shape of x, shape of w, summed dimensions.
EQUATIONS = [
    ("bsh,ht->bst", (2, 3, 64), (64, 48), (0,)),
    ("bsh,th->bst", (2, 3, 64), (48, 64), (1,)),
    ("th,bsh->tbs", (2, 3, 64), (48, 64), (1,)),
    ("bsh,hnd->bsnd", (2, 3, 64), (64, 4, 16), (0,)),
    ("bsnd,ndh->bsh", (2, 3, 4, 16), (4, 16, 64), (0, 1)),
    ("esh,eht->est", (4, 3, 64), (4, 64, 48), (1,)),
    ("eth,esh->ets", (4, 3, 64), (4, 48, 64), (2,)),
    ("sh,h->s", (3, 64), (64,), (0,)),
]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("equation", "x_shape", "w_shape", "summed"), EQUATIONS)
def test_results_are_those_of_rounded_weights(
    equation: str,
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    summed: tuple[int, ...],
    dtype: Any,
) -> None:
    first_is_weight = equation.startswith(("th", "eth"))

    def f(params: jax.Array, x: jax.Array) -> jax.Array:
        operands = (params, x) if first_is_weight else (x, params)
        return jnp.einsum(equation, *operands)

    x, w = normal(0, *x_shape, dtype=dtype), normal(1, *w_shape, dtype=dtype)
    result, (out,) = quantized(f, w, x)
    assert applied(result) == ["params"]
    assert out.dtype == dtype
    weight, wide = stand_in(result, w, summed), x.astype(np.float64)
    ours = (weight, wide) if first_is_weight else (wide, weight)
    expected = np.einsum(equation, *ours)
    # Only the arithmetic is left as a source of error: one rounding of the result's type.
    epsilon = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        out.astype(np.float64), expected, rtol=epsilon, atol=64 * 6e-8 * np.abs(expected).max()
    )


def test_types_in_main_and_bytes_in_remarks() -> None:
    result, _ = quantized(lambda params, x: x @ params, normal(1, 64, 32), normal(0, 8, 64))
    types = [str(type_) for type_ in function_types(main_function(result.module))[0]]
    assert types == ["tensor<64x32xi8>", "tensor<32xf32>", "tensor<8x64xf32>"]
    message = "params to int8: 64x32, 8,192 -> 2,176 bytes"
    assert [r.message for r in result.remarks if r.args.get("path")] == [message]


def test_the_scale_is_applied_to_f32_results() -> None:
    """A bf16 matmul is asked for f32, and is rounded once, after the scale."""
    w, x = normal(1, 64, 32, dtype=BF16), normal(0, 8, 64, dtype=BF16)
    result, _ = quantized(lambda params, x: x @ params, w, x)
    assert re.search(
        r"dot_general.*xbf16>, tensor<64x32xbf16>\) -> tensor<8x32xf32>", str(result.module)
    )


def test_casts_and_layout_between_parameter_and_matmul() -> None:
    def f(params: dict[str, jax.Array], x: jax.Array) -> Any:
        w = params["w"]  # in three forms: it stays one argument
        split = w.reshape(8, 8, 32).transpose(2, 0, 1).reshape(32, 64)
        return (
            x @ w,
            x @ split.T.astype(F32),
            jnp.einsum("sab,abt->st", x.reshape(4, 8, 8), w.reshape(8, 8, 32)),
        )

    w, x = normal(1, 64, 32, dtype=BF16), normal(0, 4, 64)
    result, outs = quantized(f, {"w": w}, x)
    assert applied(result) == ["params['w']"]
    expected = x.astype(np.float64) @ stand_in(result, w, (0,))
    for out in outs:
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=1e-2, atol=1e-4)


def test_a_reshape_that_mixes_is_left_alone() -> None:
    def f(params: jax.Array, x: jax.Array) -> Any:
        return x @ params, x @ params.reshape(32, 64).T

    result, _ = quantized(f, normal(1, 64, 32), normal(0, 4, 64))
    assert missed(result) == ["params: a reshape mixes summed and kept dimensions"]


def test_zero_channels_stay_zero_and_small_ones_survive() -> None:
    w = normal(1, 64, 32)
    w[:, 3] = 0
    w[:, 4] = 1e-44  # smaller than any scale
    w[:, 5] *= 1e30
    x = normal(0, 8, 64)
    _, (out,) = quantized(lambda params, x: x @ params, w, x)
    assert np.all(out[:, 3] == 0)
    assert np.all(np.abs(out[:, 4]) < 1e-40)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("size", [64, 128])  # XLA:CPU's maximum drops NaN at some sizes
def test_bad_weights_are_not_hidden(bad: float, dtype: Any, size: int) -> None:
    w, x = normal(1, size, size, dtype=dtype), normal(0, 8, size, dtype=dtype)
    w[5, 3] = bad
    _, (out,) = quantized(lambda params, x: x @ params, w, x)
    wide = out.astype(np.float64)
    assert np.isnan(wide[:, 3]).all()
    assert np.isfinite(np.delete(wide, 3, axis=1)).all()


S = jax.ShapeDtypeStruct


def remarks_of(fn: Callable[..., Any], *args: Any, options: str = "") -> list[str]:
    module = lowered(fn, *args)
    pipeline = f"normalize,hoist-weights{{parameters=params}},quantize{{{options}}}"
    return missed(hlo_opt.apply(module, pipeline))


W, X = S((64, 64), F32), S((8, 64), F32)


def tied(params: jax.Array, x: jax.Array) -> jax.Array:
    return params[jnp.argmax(x, -1)] @ params.T


def both_ways(params: jax.Array, x: jax.Array) -> jax.Array:
    return (x @ params) @ params.T


def scanned(params: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, w: (c @ w, None), x, params)[0]


def experts(params: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, params, jnp.full((2,), 4, jnp.int32))


def small(params: jax.Array, x: jax.Array) -> jax.Array:
    return x @ params


def exact(params: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.dot(x, params, precision="BF16_BF16_F32_X3")


@pytest.mark.parametrize(
    ("fn", "params", "reason"),
    [
        (tied, W, "params: also used by stablehlo.gather"),
        (both_ways, W, "params: several matmuls sum over different dimensions of it"),
        (scanned, S((3, 64, 64), F32), "params: used by stablehlo.while"),
        (experts, S((2, 64, 64), F32), "params: used by chlo.ragged_dot"),
        (exact, W, "params: a matmul asks for a particular algorithm"),
        (small, S((64, 8), F32), "params: 512 elements, fewer than min-elements=4096"),
    ],
)
def test_what_is_left_alone_is_said(fn: Any, params: Any, reason: str) -> None:
    assert remarks_of(fn, params, X) == [reason]


def test_two_parameters_in_one_matmul() -> None:
    def f(params: dict[str, jax.Array], x: jax.Array) -> Any:
        return params["a"].T @ params["b"], x @ params["a"][:, :64].T

    w = normal(1, 8, 512)
    result, _ = quantized(f, {"a": w, "b": w + 1}, normal(0, 4, 64))
    reason = "both operands of a matmul are parameters"
    assert applied(result) == []
    assert missed(result)[-1] == f"params['b']: {reason}"


def test_integers_and_small_floats_are_left_alone() -> None:
    def f(params: dict[str, jax.Array], x: jax.Array) -> Any:
        return x @ params["i"].astype(F32), x @ params["f"].astype(F32)

    params = {"i": S((64, 64), jnp.int8), "f": S((64, 64), jnp.float8_e4m3fn)}
    assert remarks_of(f, params, X) == []


def test_exclude() -> None:
    def f(params: dict[str, Any], x: jax.Array) -> jax.Array:
        for layer in params["layers"]:
            x = x @ layer["q"]
        return x @ params["lm_head"]

    params = {"layers": [{"q": W}, {"q": W}], "lm_head": W}
    for exclude, kept in (
        ("*lm_head*", ["params['layers'][0]['q']", "params['layers'][1]['q']"]),
        ("params['layers'][0]*", ["params['layers'][1]['q']", "params['lm_head']"]),
        ("*[0]['q'],*head'*", ["params['layers'][1]['q']"]),
    ):
        text = f'inference{{weights=int8 parameters=params exclude="{exclude}"}}'
        result = hlo_opt.apply(lowered(f, params, X), text)
        assert applied(result) == kept
    options = "exclude=*no_such*"
    assert remarks_of(f, params, X, options=options) == ["exclude=*no_such* matches no parameter"]


def test_weights_of_functions_that_are_not_inlined() -> None:
    text = """func.func @main(%w: tensor<64x64xf32>, %x: tensor<4x64xf32>) -> tensor<4x64xf32> {
      %0 = call @layer(%x, %w) : (tensor<4x64xf32>, tensor<64x64xf32>) -> tensor<4x64xf32>
      return %0 : tensor<4x64xf32>
    }
    func.func private @layer(%x: tensor<4x64xf32>, %w: tensor<64x64xf32>) -> tensor<4x64xf32>
        attributes {no_inline} {
      %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<4x64xf32>, tensor<64x64xf32>) -> tensor<4x64xf32>
      return %0 : tensor<4x64xf32>
    }
    """
    result = hlo_opt.apply(text, "normalize,hoist-weights{parameters=0},quantize")
    assert missed(result) == ["arg0: used by func.call"]


def test_remarks_name_the_model_s_line() -> None:
    module = lowered(lambda params, x: x @ params, W, X)
    result = hlo_opt.apply(module, PIPELINE)
    assert "test_quantize.py" in result.remarks[-1].location


def test_partitioned_modules_are_left_alone() -> None:
    text = str(lowered(lambda params, x: x @ params, W, X))
    text = text.replace("num_partitions = 1", "num_partitions = 8")
    result = hlo_opt.apply(text, "hoist-weights{parameters=0},quantize")
    assert "i8" not in str(result.module)


def test_wrong_settings() -> None:
    with pytest.raises(HloOptError, match="can be quantized to 'int8', not to 'int4'"):
        hlo_opt.apply("module {\n}", "quantize{weights=int4}")
    with pytest.raises(HloOptError, match="can be quantized to 'int8', not to 'int4'"):
        hlo_opt.jit(lambda x: x, pipeline="inference{weights=int4}")
    with pytest.raises(HloOptError, match="run hoist-weights"):
        hlo_opt.apply(lowered(lambda params, x: x @ params, W, X), "quantize")
    with pytest.raises(HloOptError, match="with weights=int8"):
        hlo_opt.apply("module {\n}", "inference{exclude=*a*}")


CONFIG = decoder.Config(
    layers=2, sequence=128, hidden=256, heads=4, kv_heads=2, depth=64, intermediate=512
)


def test_verify_of_a_decoder() -> None:
    tokens = S((1, CONFIG.sequence), jnp.int32)
    module = lowered(decoder.forward, decoder.parameters(CONFIG), tokens)
    report = verify_pipeline(module, "inference{weights=int8 parameters=params}", "v5e")
    assert report.ok, report.table()
    assert report.quantized
    assert report.kernels == CONFIG.layers
    # int8 costs something, and the table shows it.
    assert report.outputs[0].after_rms > 1.05 * report.outputs[0].before_rms
    assert "weights were quantized: 5%" in report.table()


def test_the_looser_bound_catches_wrong_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    from hlo_opt.passes import quantize

    module = lowered(lambda params, x: x @ params, W, X)
    pipeline = "normalize,hoist-weights{parameters=params},quantize"
    assert verify_pipeline(module, pipeline, None).ok
    monkeypatch.setattr(quantize, "LARGEST", 7)  # as coarse as int4
    assert not verify_pipeline(module, pipeline, None).ok


def test_matmuls_of_the_original_are_not_changed() -> None:
    w, x = normal(1, 64, 64), normal(0, 8, 64)
    module = lowered(lambda params, x: x @ params, w, x)
    before = str(module)
    hlo_opt.apply(module, PIPELINE)
    assert str(module) == before
    np.testing.assert_allclose(run(module, [w, x])[0], x @ w, rtol=1e-4, atol=1e-4)
