"""Kernel for `hlo_opt.attention`: JAX's Pallas splash attention for TPU.

It visits only blocks in which a query sees a key, reads keys and values of grouped heads once
without repeating them, and computes masks from positions. It has no scale and no bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hlo_opt.kernels import Candidate, register_kernel
from hlo_opt.kernels.attention import (
    AttentionKernel,
    AttentionSpec,
    arrange,
    block_size,
    matmul_types,
    precisions,
    restore,
    score_reasons,
    shape_reasons,
)
from hlo_opt.patterns.score import FAR_BELOW, AtLeast, Both, Data, Linear, reach
from hlo_opt.targets import Target

# How many keys before and after its own position a query sees; None where there is no limit.
Band = tuple[int | None, int | None]


@register_kernel
class SplashAttention(AttentionKernel):
    """`jax.experimental.pallas.ops.tpu.splash_attention`."""

    name = "Pallas splash attention"
    rank = 10

    def reasons(self, spec: AttentionSpec) -> Iterator[str]:
        yield from shape_reasons(spec)
        yield from _depth_reasons(spec)
        yield from score_reasons(spec)
        yield from _band_reasons(spec)
        yield from _scale_reasons(spec)

    def candidates(self, spec: AttentionSpec, target: Target) -> Sequence[Candidate]:
        import jax.numpy as jnp

        # 1024 x 1024 in steps of 512 is within reach of the best on every generation for bf16 at
        # depth 128. Deep rows need room: v4, v5e and v5p let a kernel have 16 MB of VMEM. Of blocks
        # wider than a narrow band most is masked.
        depth = max(spec.size("depth"), spec.size("value_depth"))
        row_bytes = depth * max(jnp.dtype(type_).itemsize for type_ in matmul_types(spec))
        left, right = _band(spec) or (None, None)
        narrow = left is not None and right is not None and left + right < 1024
        largest = 512 if narrow or row_bytes > 512 else 1024
        q = block_size(spec.size("query"), largest)
        kv = block_size(spec.size("key"), largest)
        compute = block_size(kv, 512)
        config = (("block_q", q), ("block_kv", kv), ("block_kv_compute", compute))
        return [Candidate(f"{self.name}, blocks q={q}, k={kv}/{compute}", config)]

    def build(self, spec: AttentionSpec, candidate: Candidate) -> Callable[..., Any]:
        import jax
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        form, band = spec.form, _band(spec)
        assert isinstance(form, Linear)
        assert band is not None
        sizes = dict(candidate.config)
        blocks = splash.BlockSizes(sizes["block_q"], sizes["block_kv"], sizes["block_kv_compute"])
        heads = spec.size("kv_head") * spec.size("group")

        def kernel(q: Any, k: Any, v: Any, *extras: Any) -> Any:
            q = arrange(q, spec.q_dims, spec, ("batch", "kv_head", "group", "query", "depth"))
            k = arrange(k, spec.k_dims, spec, ("batch", "kv_head", "key", "depth"))
            v = arrange(v, spec.v_dims, spec, ("batch", "kv_head", "key", "value_depth"))
            qk_type, pv_type = matmul_types(spec)
            q = q.reshape(q.shape[0], heads, *q.shape[3:]).astype(jnp.float32) * form.scale
            q, k, v = q.astype(qk_type), k.astype(qk_type), v.astype(pv_type)
            attend = splash.make_splash_mha_single_device(
                splash.MultiHeadMask([_mask(spec, band)] * heads), block_sizes=blocks
            )
            out = jax.vmap(attend)(q, k, v)
            return restore(out.astype(spec.result.dtype), spec)

        return kernel


def _mask(spec: AttentionSpec, band: Band) -> Any:
    """The band as one of the library's masks, which the kernel computes from positions."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (spec.size("query"), spec.size("key"))
    left, right = band
    if left is not None:
        return splash.LocalMask(shape, (left, right), offset=0)
    return splash.FullMask(shape) if right is None else splash.CausalMask(shape, offset=right)


def _band(spec: AttentionSpec) -> Band | None:
    """The keys that all masks together leave open; None where they are not a band."""
    assert isinstance(spec.form, Linear)
    parts: list[AtLeast | Data] = []
    for mask in spec.form.masks:
        parts += mask.open.parts if isinstance(mask.open, Both) else [mask.open]
    return reach(Both(tuple(parts)))


def _depth_reasons(spec: AttentionSpec) -> Iterator[str]:
    depth = max(spec.size("depth"), spec.size("value_depth"))
    if depth > 512:
        yield f"depth {depth} is larger than 512"


def _band_reasons(spec: AttentionSpec) -> Iterator[str]:
    assert isinstance(spec.form, Linear)
    for mask in spec.form.masks:
        if not mask.value <= FAR_BELOW:
            yield f"a mask gives {mask.value:g}, which is not far below every logit"
    band = _band(spec)
    if band is None:
        yield "a mask is not a band of positions around the query's own"
    else:
        left, right = (math.inf if limit is None else limit for limit in band)
        # A row that sees nothing would be divided by zero: the kernel visits no block for it.
        if left + right < 0 or right < 0 or spec.size("query") - left > spec.size("key"):
            yield "a query sees no key"


def _scale_reasons(spec: AttentionSpec) -> Iterator[str]:
    """Scales that cannot be multiplied into q without a rounding the original does not have.

    Scaling q by a power of two is exact. Any other scale is multiplied in f32, and what follows
    rounds the product to bf16 where the matmul is in bf16, or in f32 at default precision on a
    TPU, whose matrix unit multiplies in bf16. That is no worse than the original where

    - the matmuls ask for more than default precision: nothing is rounded to bf16;
    - q itself is f32: the matrix unit rounded it before, now it rounds the scaled q;
    - the original rounds logits to bf16: an error relative to each product `q[d] * k[d]`, of which
      the part that all keys share cancels in the softmax, in place of one relative to their sum.

    Otherwise (bf16 values whose products and sums stay f32) the original's logits have no error of
    that size, and large ones would get one that the softmax's exponential shows. CPU runs cannot
    show what the matrix unit does, so that this is decided here.
    """
    assert isinstance(spec.form, Linear)
    exact = math.frexp(spec.form.scale)[0] == 0.5 or bool(precisions(spec) - {"DEFAULT"})
    rounded = str(spec.arguments[0].dtype) == "float32" or spec.logits_type == "bf16"
    if not exact and not rounded:
        yield f"the scale {spec.form.scale:.4g} would round q, and the original's logits are f32"
