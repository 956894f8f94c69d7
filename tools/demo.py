"""The main job on a real model graph: transformers' Flax Llama through `hlo_opt.jit`, for TPU.

Lowers the model for a TPU v5e that is not there, prints what was fused, checks the numbers with
the kernels interpreted on CPU, and compiles before and after with XLA's TPU compiler.
"""

from __future__ import annotations

import os

# Before anything imports JAX or transformers: no accelerator is looked for, no framework is missed.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import hlo_opt
from hlo_opt import compat
from hlo_opt import ir as hlo_ir
from hlo_opt.targets import TPU_NAMES, CompileReport, compile_module
from hlo_opt.verify import verify_pipeline

LAYERS, SEQUENCE, HEADS, KV_HEADS, DEPTH = 4, 2048, 16, 4, 64
TARGET = "v5e"
FOLDER = Path(".demo")


def model() -> tuple[Any, Any]:
    """The model's forward function and the shapes of its bf16 parameters."""
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_flax_llama import FlaxLlamaForCausalLMModule

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=HEADS * DEPTH,
        intermediate_size=2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=SEQUENCE,
    )
    module = FlaxLlamaForCausalLMModule(config, dtype=jnp.bfloat16)

    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        """Logits `[batch, sequence, vocabulary]` of int32 tokens `[batch, sequence]`."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = jnp.ones_like(tokens)
        return module.apply({"params": params}, tokens, mask, positions).logits

    tokens = jnp.zeros((1, SEQUENCE), jnp.int32)
    variables = jax.eval_shape(module.init, jax.random.key(0), tokens, tokens, tokens)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), variables["params"]
    )
    return forward, params


class Steps:
    """Prints what is being done and how long it took."""

    def __init__(self, total: int) -> None:
        self.total, self.number, self.start = total, 0, time.perf_counter()

    def begin(self, text: str) -> None:
        self.number += 1
        seconds = time.perf_counter() - self.start
        print(f"\n[{self.number}/{self.total}] {text} ({seconds:.0f} s so far)", flush=True)


def compared(before: CompileReport, after: CompileReport) -> str:
    saved = 1 - after.temporary_bytes / max(before.temporary_bytes, 1)
    return (
        f"temporary HBM on {TARGET}: {before.temporary_bytes:,} bytes before, "
        f"{after.temporary_bytes:,} after ({saved:.0%} less); Pallas kernels: {after.kernels}"
    )


def main() -> int:
    steps = Steps(5)
    steps.begin(
        f"Lower Flax Llama: {LAYERS} layers, {SEQUENCE} tokens, GQA {HEADS}/{KV_HEADS}, bf16"
    )
    forward, params = model()
    tokens = jax.ShapeDtypeStruct((1, SEQUENCE), jnp.int32)
    lowered = jax.jit(forward).trace(params, tokens).lower(lowering_platforms=("tpu",))
    original = hlo_ir.parse(compat.module_bytecode(lowered))

    steps.begin(f"The same through hlo_opt.jit, for {TARGET}")
    ours = hlo_opt.jit(forward, target=TARGET)
    rewritten = ours.lower(params, tokens)
    for remark in ours.remarks:
        print(f"  {remark}")
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"llama_{TARGET}.mlir"
    path.write_text(rewritten.as_text())
    raised = sum(r.kind == "applied" and r.pass_name == "raise-attention" for r in ours.remarks)
    fused = sum(r.kind == "applied" and r.pass_name == "lower-composites" for r in ours.remarks)
    print(f"  {raised} of {LAYERS} attentions raised, {fused} lowered to a Pallas kernel")

    steps.begin("Check against float64 on CPU, kernels interpreted")
    report = verify_pipeline(original, "inference", TARGET)
    print(report.table())

    steps.begin(f"Compile before and after with XLA's compiler for {TARGET}")
    before = compile_module(original, TARGET)
    after = rewritten.compile().report
    print(f"  {compared(before, after)}")

    steps.begin("Compile for every generation")
    kernels = {TARGET: after.kernels}
    for name in TPU_NAMES:
        if name not in kernels:
            kernels[name] = (
                hlo_opt.jit(forward, target=name).lower(params, tokens).compile().report.kernels
            )
        print(f"  {name:6} {kernels[name]} Pallas kernels", flush=True)

    print(f"\nRewritten module: {path}")
    fine = report.ok and raised == fused == LAYERS and set(kernels.values()) == {LAYERS}
    print("All attentions fused, numbers hold." if fine else "The demo FAILED.")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
