"""The numerical check itself: float64 form, inputs, rule, and that planted errors are caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxlib.mlir import ir

from hlo_opt import compat
from hlo_opt import ir as hlo_ir
from hlo_opt.errors import HloOptError
from hlo_opt.kernels import No
from hlo_opt.kernels.attention import AttentionSpec, FlashAttention
from hlo_opt.kernels.splash_attention import SplashAttention
from hlo_opt.passes import lower_composites
from hlo_opt.patterns.score import Data, Linear, Mask
from hlo_opt.verify import compare, infer_inputs, load_inputs, to_float64, verify_pipeline

B, S, H, K, D = 1, 256, 4, 2, 64


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def module_of(fn: Callable[..., Any], *args: Any) -> ir.Module:
    return hlo_ir.parse(jax.jit(fn).lower(*args).as_text())


def causal(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float = D**-0.5, shift: int = 0
) -> jax.Array:
    x = jnp.einsum("bqkgd,bskd->bkgqs", q.reshape(B, S, K, H // K, D), k) * scale
    mask = jnp.arange(S)[:, None] + shift >= jnp.arange(S)[None, :]
    p = jax.nn.softmax(jnp.where(mask, x.astype(jnp.float32), -1e30), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(q.shape)


def qkv(dtype: Any = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (spec(B, S, H, D, dtype=dtype), *(spec(B, S, K, D, dtype=dtype),) * 2)


# The float64 form.


def test_float64_has_no_other_float_and_keeps_bits() -> None:
    def fn(x: jax.Array, key: jax.Array) -> Any:
        noise = jax.random.uniform(jax.random.wrap_key_data(key), x.shape)
        low = (x.astype(jnp.bfloat16) * 3).astype(jnp.float32)
        return jax.lax.scan(lambda c, y: (c + y, c), jnp.float32(0), low)[0], noise

    module = module_of(fn, spec(8), spec(2, dtype=jnp.uint32))
    wide = to_float64(module)
    x, key = np.arange(8, dtype=np.float32) / 7, np.array([1, 2], np.uint32)
    total, noise = compat.run_on_cpu(wide, [x.astype(np.float64), key])
    assert total.dtype == noise.dtype == np.float64
    np.testing.assert_allclose(total, 3 * np.sum(x.astype(np.float64)), rtol=1e-14)
    np.testing.assert_array_equal(
        noise, np.asarray(jax.random.uniform(jax.random.wrap_key_data(key), (8,)), np.float64)
    )
    assert str(module) == str(hlo_ir.parse(str(module)))  # the original is left alone


def test_float64_of_composites() -> None:
    from hlo_opt.pipeline import PassContext, run_pipeline

    module = run_pipeline(module_of(causal, *qkv()), "raise", PassContext())
    assert "composite" in str(module)
    assert "composite" not in str(to_float64(module))


# Inputs.


def test_inputs_follow_from_use() -> None:
    def fn(table: jax.Array, tokens: jax.Array, mask: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        x = table[tokens] * g
        x = jnp.where(mask[..., None] != 0, x, 0.0)
        return x @ w

    args = (
        spec(11, 64),
        spec(2, 9, dtype=jnp.int32),
        spec(2, 9, dtype=jnp.int32),
        spec(64, 5),
        spec(64),
    )
    _, tokens, mask, w, g = infer_inputs(module_of(fn, *args))
    assert tokens.min() >= 0
    assert tokens.max() <= 10
    assert len(np.unique(tokens)) > 3
    assert set(np.unique(mask)) == {0, 1}
    assert mask[:, 0].all()
    assert 0.5 / 8 < w.std() < 2 / 8  # fan-in 64
    assert abs(g.mean() - 1) < 0.1


def test_inputs_reach_into_loops() -> None:
    def fn(x: jax.Array, start: jax.Array) -> jax.Array:
        def body(_: int, carry: Any) -> Any:
            total, position = carry
            return total + jax.lax.dynamic_slice(x, (position,), (4,)), position

        return jax.lax.fori_loop(0, 3, body, (jnp.zeros(4), start))[0]

    (_, start) = infer_inputs(module_of(fn, spec(10), spec(dtype=jnp.int32)))
    assert 0 <= start <= 6


def test_every_mask_row_keeps_something() -> None:
    module = module_of(lambda m: m, spec(2, 8, 8, dtype=jnp.bool_))
    (mask,) = infer_inputs(module)
    assert mask.dtype == bool
    assert not mask.all()
    assert mask[:, np.arange(8), np.arange(8)].all()


def test_inputs_from_a_file(tmp_path: Path) -> None:
    module = module_of(lambda x: x + 1, spec(3))
    np.savez(tmp_path / "inputs.npz", np.arange(3))
    (x,) = load_inputs(module, tmp_path / "inputs.npz")
    assert (x.dtype, list(x)) == (np.float32, [0, 1, 2])
    np.savez(tmp_path / "wrong.npz", np.arange(4))
    with pytest.raises(HloOptError, match=r"argument 0 is float32\[3\], the file has \(4,\)"):
        load_inputs(module, tmp_path / "wrong.npz")


# The rule.


def errors(original: Callable[..., Any], other: Callable[..., Any], *args: Any) -> Any:
    first, second = module_of(original, *args), module_of(other, *args)
    return compare(first, second, infer_inputs(first))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", [{"scale": D**-0.5 * 1.01}, {"shift": -1}, {"shift": 1}])
def test_wrong_rewrites_fail(dtype: Any, options: dict[str, Any]) -> None:
    def wrong(*args: jax.Array) -> jax.Array:
        return causal(*args, **options)

    (output,) = errors(causal, wrong, *qkv(dtype))
    assert not output.ok


def test_less_accurate_rewrites_fail() -> None:
    def narrow(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        half = (x.astype(jnp.bfloat16) for x in (q, k, v))
        return causal(*half).astype(q.dtype)

    (output,) = errors(causal, narrow, *qkv())
    assert not output.ok


def test_harmless_rewrites_hold() -> None:
    def wide(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return causal(*(x.astype(jnp.float32) for x in (q, k, v))).astype(q.dtype)

    (output,) = errors(causal, wide, *qkv(jnp.bfloat16))
    assert output.ok
    assert 0 < output.after_rms < output.before_rms


def test_integers_and_nan_places_must_be_equal() -> None:
    x = (spec(16),)
    (output,) = errors(lambda x: jnp.argmax(x), lambda x: jnp.argmax(-x), *x)
    assert "values differ" in output.problem
    (output,) = errors(lambda x: jnp.log(x), lambda x: jnp.log(jnp.abs(x)), *x)
    assert "NaN in other places" in output.problem
    (output,) = errors(lambda x: x, lambda x: x.astype(jnp.bfloat16), *x)
    assert "became bfloat16[16]" in output.problem
    (output,) = errors(lambda x: x * jnp.nan, lambda x: x * jnp.nan, *x)
    assert "no finite value" in output.problem


def test_a_pipeline_that_lowers_nothing_is_no_check() -> None:
    module = module_of(lambda x: x + 1, spec(3))
    report = verify_pipeline(module, "inference", "v5e")
    assert report.numerics_ok
    assert not report.ok
    assert "no composite became a kernel" in report.table()
    assert verify_pipeline(module, "raise", "v5e").ok


def test_partitioned_modules_are_not_run() -> None:
    text = str(module_of(lambda x: x + 1, spec(3))).replace("partitions = 1", "partitions = 2")
    with pytest.raises(HloOptError, match="partitioned"):
        verify_pipeline(hlo_ir.parse(text), "cse", None)


# Errors planted in the kernel itself.


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, library_kernels: None) -> Iterator[Callable[..., None]]:
    build = FlashAttention.build
    monkeypatch.setattr(SplashAttention, "supports", lambda *_: No("not tested here"))

    def planted(change: Callable[[AttentionSpec], AttentionSpec]) -> None:
        lower_composites._lower.cache_clear()
        monkeypatch.setattr(
            FlashAttention, "build", lambda self, s, candidate: build(self, change(s), candidate)
        )

    yield planted
    lower_composites._lower.cache_clear()


def wrong_scale(s: AttentionSpec) -> AttentionSpec:
    assert isinstance(s.form, Linear)
    return replace(s, form=replace(s.form, scale=s.form.scale * 1.01))


def mask_off_by_one(s: AttentionSpec) -> AttentionSpec:
    assert isinstance(s.form, Linear)
    changed = s.score.replace("compare  GE", "compare  GT").replace("compare GE", "compare GT")
    assert changed != s.score
    return replace(s, score=changed, form=replace(s.form, masks=(Mask(Data(), -1e30, False),)))


def swapped_heads(s: AttentionSpec) -> AttentionSpec:
    return replace(s, q_dims=tuple(d.replace("kv_head*group", "group*kv_head") for d in s.q_dims))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("change", [wrong_scale, mask_off_by_one, swapped_heads])
def test_errors_planted_in_the_kernel_are_caught(
    plant: Callable[..., None], change: Callable[[AttentionSpec], AttentionSpec], dtype: Any
) -> None:
    module = module_of(causal, *qkv(dtype))
    assert verify_pipeline(module, "inference", "v5e").ok
    plant(change)
    report = verify_pipeline(module, "inference", "v5e")
    assert report.kernels == 1
    assert not report.ok
    assert "FAILED" in report.table()


def test_the_check_s_own_arithmetic() -> None:
    from hlo_opt.verify.compare import _ulp

    assert _ulp(np.dtype(np.float32), 1.5) == 2.0**-23
    assert _ulp(np.dtype(ml_dtypes.bfloat16), 5.0) == 2.0**-7 * 4
