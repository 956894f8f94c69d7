"""The decode step as XLA's TPU compiler sees it: one kernel, caches aliased and never copied."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import decode
import hlo_opt

pytestmark = [pytest.mark.slow, pytest.mark.tpu]

B, S = 2, 1024


def step(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
    ks = jax.lax.dynamic_update_slice(ks, k, (0, at, 0, 0))
    vs = jax.lax.dynamic_update_slice(vs, v, (0, at, 0, 0))
    b, n, h, d = q.shape
    q = q.reshape(b, n, ks.shape[2], -1, d)
    x = jnp.einsum("bqkgd,bskd->bkgqs", q, ks, preferred_element_type=jnp.float32)
    x = jnp.where(jnp.arange(ks.shape[1]) <= at, x * d**-0.5, -1e30)
    p = jax.nn.softmax(x, axis=-1).astype(vs.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", p, vs).reshape(b, n, h, d), ks, vs


def arguments(kv: int, group: int, d: int, dtype: Any) -> list[jax.ShapeDtypeStruct]:
    new, cache = (B, 1, kv, d), (B, S, kv, d)
    shapes = ((B, 1, kv * group, d), new, new, cache, cache)
    position = jax.ShapeDtypeStruct((), jnp.int32)
    return [*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), position]


@pytest.mark.parametrize(
    ("kv", "group", "d", "dtype"),
    [
        (8, 4, 128, jnp.bfloat16),  # rows
        (8, 4, 128, jnp.float32),
        (2, 4, 128, jnp.bfloat16),
        (1, 8, 128, jnp.float32),
        (1, 8, 128, jnp.bfloat16),  # heads
        (12, 1, 128, jnp.bfloat16),
        (2, 4, 64, jnp.bfloat16),  # lanes
        (3, 2, 80, jnp.float32),
        (1, 4, 64, jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_caches_are_updated_in_place(target: str, kv: int, group: int, d: int, dtype: Any) -> None:
    given = arguments(kv, group, d, dtype)
    jitted = hlo_opt.jit(step, target=target, donate_argnums=(3, 4))
    compiled = jitted.lower(*given).compile()
    report = compiled.report
    assert report.kernels == 1
    assert report.alias_bytes >= decode.cache_bytes(given[3:5])
    assert decode.copies(compiled.as_text(), given[3].shape) == []


def test_the_search_for_copies_finds_them() -> None:
    given = arguments(8, 4, 128, jnp.bfloat16)
    kept = hlo_opt.jit(step, target="v5e").lower(*given).compile()
    assert kept.report.alias_bytes == 0
    assert len(decode.copies(kept.as_text(), given[3].shape)) >= 2


@pytest.mark.parametrize("target", ["v4", "v5p", "tpu7x"])
def test_other_generations_compile(target: str) -> None:
    given = arguments(8, 4, 128, jnp.bfloat16)
    compiled = hlo_opt.jit(step, target=target, donate_argnums=(3, 4)).lower(*given).compile()
    assert compiled.report.kernels == 1
    assert decode.copies(compiled.as_text(), given[3].shape) == []
