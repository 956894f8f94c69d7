"""Situations that public reports tell of, each through raising and the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

from hlo_opt import ir as hlo_ir
from hlo_opt.pipeline import PassContext, run_pipeline
from hlo_opt.verify import FACTOR, verify_pipeline
from hlo_opt.verify.compare import run

Array = jax.Array
B, S, H, D = 2, 192, 4, 64
LOWEST = float(np.finfo(np.float32).min)


def f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def qkv(s: int = S, keys: int | None = None, d: int = D, dv: int | None = None) -> list[np.ndarray]:
    keys = keys or s
    return [f32(B, H, s, d), f32(B, H, keys, d), f32(B, H, keys, dv or d)]


def logits(q: Array, k: Array) -> Array:
    return jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5


def values(x: Array, v: Array) -> Array:
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(x, axis=-1), v)


def lowered(fn: Callable[..., Any], inputs: list[Any]) -> ir.Module:
    return hlo_ir.parse(jax.jit(fn).trace(*inputs).lower(lowering_platforms=("tpu",)).as_text())


def check(fn: Callable[..., Any], inputs: list[Any], kernels: int = 1) -> None:
    report = verify_pipeline(lowered(fn, inputs), "inference", "v5e", inputs=inputs)
    for out in report.outputs:  # the largest error is luck: CPUs sum in another order
        assert not out.problem
        assert out.after_rms <= FACTOR * out.before_rms + out.ulp, report.table()
        assert out.after_max <= 3 * out.before_max + out.ulp, report.table()
    assert report.kernels == kernels


def both(fn: Callable[..., Any], inputs: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Results of the original and of the rewritten module."""
    module = lowered(fn, inputs)
    ctx = PassContext(target="v5e", interpret=True)
    rewritten = run_pipeline(module, "inference", ctx)
    assert any(r.kind == "applied" and r.pass_name == "lower-composites" for r in ctx.remarks)
    return run(module, inputs)[0], run(rewritten, inputs)[0]


def valid(count: int = S) -> np.ndarray:
    mask = np.ones((B, count), bool)
    mask[1, count - 70 :] = False
    return mask


def test_a_mask_whose_type_is_cast_on_the_way() -> None:
    def fn(q: Array, k: Array, v: Array, mask: Array) -> Array:
        cast = mask.astype(jnp.float32).astype(jnp.int8).astype(jnp.float32)
        return values(logits(q, k) + (1 - cast)[:, None, None] * LOWEST, v)

    check(fn, [*qkv(), valid()])


def test_a_vision_encoder_without_a_mask_and_the_scale_on_q() -> None:
    def fn(q: Array, k: Array, v: Array) -> Array:
        return values(jnp.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k), v)

    check(fn, qkv(s=197))


def test_a_causal_mask_cut_from_a_larger_buffer() -> None:
    buffer = np.tril(np.ones((1, 1, 512, 512), bool))

    def fn(q: Array, k: Array, v: Array) -> Array:
        s, t = q.shape[2], k.shape[2]
        return values(jnp.where(buffer[:, :, t - s : t, :t], logits(q, k), LOWEST), v)

    check(fn, qkv(s=100, keys=S))


@pytest.mark.parametrize("value", [-jnp.inf, LOWEST, -1e9])
def test_padding_and_causal_masks_together(value: float) -> None:
    def fn(q: Array, k: Array, v: Array, mask: Array) -> Array:
        open_ = jnp.tril(jnp.ones((S, S), bool)) & mask[:, None, None]
        return values(jnp.where(open_, logits(q, k), value), v)

    check(fn, [*qkv(), valid()])


def test_fewer_queries_than_keys_aligned_to_the_end() -> None:
    def fn(q: Array, k: Array, v: Array) -> Array:
        s, t = q.shape[2], k.shape[2]
        open_ = jnp.arange(s)[:, None] + (t - s) >= jnp.arange(t)
        return values(jnp.where(open_, logits(q, k), -1e9), v)

    check(fn, qkv(s=70, keys=500))


def test_nan_in_padded_keys_stays_behind_a_select() -> None:
    def fn(q: Array, k: Array, v: Array, mask: Array) -> Array:
        return values(jnp.where(mask[:, None, None], logits(q, k), LOWEST), v)

    inputs = [*qkv(), valid()]
    inputs[1][1, :, S - 70 :] = np.nan
    before, after = both(fn, inputs)
    assert np.isfinite(before).all()
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("which", ["keys and an added mask", "values"])
def test_nan_in_padding_leaks_where_the_original_leaks(which: str) -> None:
    def fn(q: Array, k: Array, v: Array, mask: Array) -> Array:
        x, m = logits(q, k), mask[:, None, None]
        added = x + jnp.where(m, 0, LOWEST)
        return values(added if which.startswith("keys") else jnp.where(m, x, LOWEST), v)

    inputs = [*qkv(), valid()]
    inputs[1 if which.startswith("keys") else 2][1, :, S - 70 :] = np.nan
    before, after = both(fn, inputs)
    assert np.isnan(before[1]).all()
    assert np.array_equal(np.isnan(after), np.isnan(before))


def test_zero_and_one_multiplied_into_the_scores_is_no_mask() -> None:
    def fn(q: Array, k: Array, v: Array, mask: Array) -> Array:
        return values(logits(q, k) * mask.astype(jnp.float32)[:, None, None], v)

    check(fn, [*qkv(), valid()])


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (192, 128)])
def test_depths(d: int, dv: int) -> None:
    def fn(q: Array, k: Array, v: Array) -> Array:
        return values(jnp.where(jnp.tril(jnp.ones((S, S), bool)), logits(q, k), -1e9), v)

    check(fn, qkv(d=d, dv=dv))


def test_a_mask_of_a_traced_position_in_a_loop() -> None:
    def fn(q: Array, k: Array, v: Array) -> Array:
        def body(at: Array, total: Array) -> Array:
            open_ = jnp.arange(k.shape[2]) <= at + jnp.arange(q.shape[2])[:, None]
            return total + values(jnp.where(open_, logits(q, k), LOWEST), v)

        return jax.lax.fori_loop(0, 3, body, jnp.zeros_like(q))

    check(fn, qkv(s=16, keys=S))


@pytest.mark.parametrize("value", [-1e9, LOWEST, -jnp.inf])
def test_rows_with_every_key_masked(value: float) -> None:
    """They average all values, or are NaN."""

    def fn(q: Array, k: Array, v: Array, mask: Array) -> Array:
        return values(jnp.where(mask[:, None], logits(q, k), value), v)

    mask = np.ones((B, S, S), bool)
    mask[0, 3:9] = False
    before, after = both(fn, [*qkv(), mask])
    if value == -jnp.inf:
        assert np.isnan(before[0, :, 3:9]).all()
    else:
        np.testing.assert_allclose(before[0, :, 3], qkv()[2][0].mean(axis=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
