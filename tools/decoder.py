"""A Llama-style decoder in plain JAX, the input of the benchmarks: nothing but ops to recognise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Config:
    """Sizes of the model; weights are bfloat16."""

    layers: int
    sequence: int = 1024
    hidden: int = 1024
    heads: int = 8
    kv_heads: int = 2
    depth: int = 128
    intermediate: int = 2816
    vocabulary: int = 1024
    batch: int = 1


def parameters(config: Config) -> dict[str, Any]:
    """Shapes of the weights, as a tree of `jax.ShapeDtypeStruct`."""

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    h, d = config.hidden, config.depth
    layer = {
        "norm1": weight(h),
        "q": weight(h, config.heads, d),
        "k": weight(h, config.kv_heads, d),
        "v": weight(h, config.kv_heads, d),
        "o": weight(config.heads, d, h),
        "norm2": weight(h),
        "gate": weight(h, config.intermediate),
        "up": weight(h, config.intermediate),
        "down": weight(config.intermediate, h),
    }
    return {
        "embedding": weight(config.vocabulary, h),
        "norm": weight(h),
        "layers": [dict(layer) for _ in range(config.layers)],
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def rotary(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    left, right = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    batch, length, heads, depth = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], depth)
    logits = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k) * depth**-0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    weights = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(q.shape)


def forward(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Logits `[batch, sequence, vocabulary]` of int32 tokens `[batch, sequence]`."""
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        y = rms_norm(x, layer["norm1"])
        q = rotary(jnp.einsum("bsh,hnd->bsnd", y, layer["q"]))
        k = rotary(jnp.einsum("bsh,hnd->bsnd", y, layer["k"]))
        v = jnp.einsum("bsh,hnd->bsnd", y, layer["v"])
        x = x + jnp.einsum("bsnd,ndh->bsh", attention(q, k, v), layer["o"])
        y = rms_norm(x, layer["norm2"])
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    return rms_norm(x, params["norm"]) @ params["embedding"].T


def lower(config: Config) -> jax.stages.Lowered:
    """The model lowered for TPU."""
    tokens = jax.ShapeDtypeStruct((config.batch, config.sequence), jnp.int32)
    traced = jax.jit(forward).trace(parameters(config), tokens)
    return traced.lower(lowering_platforms=("tpu",))
