"""The main job on a real model graph: transformers' Flax Llama through `hlo_opt.jit`, for TPU.

Prefill: lowers the model for a TPU v5e that is not there, prints what was fused, checks the numbers
with the kernels interpreted on CPU, compiles before and after with XLA's TPU compiler. Decode: 32
greedy steps with the cache donated, plain and with int8 weights, against `jax.jit`.
"""

from __future__ import annotations

import os

# Before anything imports JAX or transformers: no accelerator is looked for, no framework is missed.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import decode
import hlo_opt
from flax_llama import DEPTH, HEADS, KV_HEADS, LAYERS, VOCABULARY, Llama
from hlo_opt import compat
from hlo_opt import ir as hlo_ir
from hlo_opt.targets import TPU_NAMES, CompileReport, compile_module
from hlo_opt.verify import verify_pipeline

SEQUENCE = 2048
TARGET = "v5e"
FOLDER = Path(".demo")
# Decoding: sequences, prompt tokens, greedy steps, positions of the cache; for the TPU, longer.
BATCH, PROMPT, STEPS, LENGTH = 2, 64, 32, 512
TPU_BATCH, TPU_LENGTH, TPU_TARGETS = 8, 2048, ("v5e", "v6e")


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


def applied(remarks: Any, name: str) -> int:
    """How often a pass did something."""
    return sum(r.kind == "applied" and r.pass_name == name for r in remarks)


def prefill(steps: Steps) -> bool:
    """The whole sequence at once, bf16; says whether all went well."""
    steps.begin(
        f"Lower Flax Llama: {LAYERS} layers, {SEQUENCE} tokens, GQA {HEADS}/{KV_HEADS}, depth "
        f"{DEPTH}, bf16"
    )
    model = Llama(SEQUENCE, jnp.bfloat16)
    params, tokens = model.parameter_shapes(), jax.ShapeDtypeStruct((1, SEQUENCE), jnp.int32)
    lowered = jax.jit(model.forward).trace(params, tokens).lower(lowering_platforms=("tpu",))
    original = hlo_ir.parse(compat.module_bytecode(lowered))

    steps.begin(f"The same through hlo_opt.jit, for {TARGET}")
    ours = hlo_opt.jit(model.forward, target=TARGET)
    rewritten = ours.lower(params, tokens)
    for remark in ours.remarks:
        print(f"  {remark}")
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"llama_{TARGET}.mlir"
    path.write_text(rewritten.as_text())
    raised = applied(ours.remarks, "raise-attention")
    fused = applied(ours.remarks, "lower-composites")
    print(f"  {raised} of {LAYERS} attentions raised, {fused} lowered to a Pallas kernel: {path}")

    steps.begin("Check against float64 on CPU, kernels interpreted")
    report = verify_pipeline(original, "inference", TARGET)
    print(report.table())

    steps.begin(f"Compile before and after with XLA's compiler for {TARGET}, after for all others")
    before = compile_module(original, TARGET)
    after = rewritten.compile().report
    print(f"  {compared(before, after)}")
    kernels = {TARGET: after.kernels}
    for name in TPU_NAMES:
        if name not in kernels:
            jitted = hlo_opt.jit(model.forward, target=name)
            kernels[name] = jitted.lower(params, tokens).compile().report.kernels
        print(f"  {name:6} {kernels[name]} Pallas kernels", flush=True)
    return report.ok and raised == fused == LAYERS and set(kernels.values()) == {LAYERS}


def decoding(steps: Steps) -> bool:
    """Greedy steps on CPU, kernels interpreted; says whether all went well."""
    model = Llama(LENGTH, jnp.float32)
    params, cache = model.parameters(), model.cache(BATCH)
    reference = jax.jit(model.step, donate_argnums=1)
    prompt = jax.random.randint(jax.random.key(1), (BATCH, PROMPT), 0, VOCABULARY)
    logits, cache = reference(params, cache, prompt, jnp.int32(0))
    first = jnp.argmax(logits, -1)[:, None].astype(jnp.int32)

    def run(ours: Any, given: Any) -> decode.Lockstep:
        start = jax.tree.map(jnp.copy, cache)
        found = decode.decode(reference, ours, (params, given), start, first, PROMPT, STEPS)
        print(f"  {found}", flush=True)
        return found

    steps.begin(f"{STEPS} greedy decode steps after a prompt of {PROMPT}, f32, cache donated")
    ours = hlo_opt.jit(model.step, pipeline=decode.INTERPRETED, donate_argnums=1)
    plain = run(ours, params)
    for remark in ours.remarks:
        print(f"  {remark}")

    steps.begin("The same steps with int8 weights")
    step = hlo_opt.jit(
        model.step,
        parameters="params",
        pipeline=decode.INTERPRETED_INT8,
        donate_argnames="cache",
    )
    int8 = run(step, step.prepare(params))
    weights = [r for r in step.remarks if r.kind == "applied" and r.pass_name == "quantize"]
    print(f"  {len(weights)} weights quantized, the first: {weights[0].message}")
    fused = applied(ours.remarks, "raise-decode-attention")
    return (
        fused == applied(ours.remarks, "lower-composites") == LAYERS
        and plain.same_tokens == plain.tokens
        and plain.cache_error < 1e-4
        and int8.logits_error < 0.1 * int8.logits_rms
    )


def decoding_on_tpu(steps: Steps) -> bool:
    """The step as TPU compilers see it, bf16; says whether all went well."""
    steps.begin(
        f"The decode step for TPU, bf16, {TPU_BATCH} x {TPU_LENGTH} positions, cache donated"
    )
    model = Llama(TPU_LENGTH, jnp.bfloat16)
    shapes = model.parameter_shapes()
    cache = jax.eval_shape(lambda: model.cache(TPU_BATCH))
    rest = (
        cache,
        jax.ShapeDtypeStruct((TPU_BATCH, 1), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    fine = True
    for target in TPU_TARGETS:
        plain = hlo_opt.jit(model.step, target=target, donate_argnums=1)
        int8 = hlo_opt.jit(
            model.step,
            target=target,
            parameters="params",
            pipeline="inference{weights=int8}",
            donate_argnames="cache",
        )
        sizes = []
        for name, step, given in (("bf16", plain, shapes), ("int8", int8, int8.prepare(shapes))):
            compiled = step.lower(given, *rest).compile()
            report = compiled.report
            copied = decode.copies(compiled.as_text(), (TPU_BATCH, TPU_LENGTH, KV_HEADS, DEPTH))
            print(f"  {name} {decode.describe(report, cache)}; copies of a cache {len(copied)}")
            sizes.append(report.argument_bytes)
            fine &= report.kernels == LAYERS and not copied
            fine &= report.alias_bytes >= decode.cache_bytes(cache)
        fine &= sizes[1] < sizes[0]
    return fine


def main() -> int:
    steps = Steps(7)
    fine = [part(steps) for part in (prefill, decoding, decoding_on_tpu)]
    print("\nAll attentions fused, numbers hold." if all(fine) else "\nThe demo FAILED.")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
