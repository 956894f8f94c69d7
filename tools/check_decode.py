"""Decode steps of public packages, before and after: 32 greedy steps and two TPU compilers.

Usage: python tools/check_decode.py transformers|tunix (the package must be installed)
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

import decode
import hlo_opt

BATCH, PROMPT, STEPS = 2, 64, 32
MODELS = {"transformers": "flax_llama", "tunix": "tunix_llama"}


def lockstep(model: Any) -> bool:
    """Runs the steps with kernels interpreted; says whether tokens and caches are the same."""
    params, cache = model.parameters(), model.cache(BATCH)
    reference = jax.jit(model.step, donate_argnums=1)
    ours = hlo_opt.jit(model.step, pipeline=decode.INTERPRETED, donate_argnums=1)
    prompt = jax.random.randint(jax.random.key(1), (BATCH, PROMPT), 0, 4096)
    logits, cache = reference(params, cache, prompt, jnp.int32(0))
    first = jnp.argmax(logits, -1)[:, None].astype(jnp.int32)
    found = decode.decode(reference, ours, (params, params), cache, first, PROMPT, STEPS)
    print(f"f32, {STEPS} steps, batch {BATCH}: {found}", flush=True)
    return found.same_tokens == found.tokens and found.cache_error < 1e-4


def compiled(model: Any, target: str, layers: int) -> bool:
    """Compiles the step in bf16; says whether every layer is one kernel and no cache is copied."""
    batch, shapes = 8, model.parameter_shapes()
    cache = jax.eval_shape(lambda: model.cache(batch))
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    position = jax.ShapeDtypeStruct((), jnp.int32)
    step = hlo_opt.jit(model.step, target=target, donate_argnums=1)
    result = step.lower(shapes, cache, tokens, position).compile()
    caches = {leaf.shape for leaf in jax.tree.leaves(cache) if len(leaf.shape) > 2}
    copied = [line for shape in caches for line in decode.copies(result.as_text(), shape)]
    print(decode.describe(result.report, cache), f"; copies of a cache: {len(copied)}", flush=True)
    for line in copied:
        print("   ", line)
    held = decode.cache_bytes(cache)
    return result.report.kernels == layers and result.report.alias_bytes >= held and not copied


def main(package: str) -> int:
    module = importlib.import_module(MODELS[package])
    fine = lockstep(module.Llama(512, jnp.float32))
    for target in ("v5e", "v6e"):
        fine &= compiled(module.Llama(2048, jnp.bfloat16), target, module.LAYERS)
    print("holds" if fine else "FAILED")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
