"""What an attention composite means by its attributes, to compare its decomposition with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from hlo_opt.ir.walk import functions, symbol_name
from hlo_opt.kernels.attention import AttentionSpec, Captured, arrange, attention_spec
from hlo_opt.verify.compare import run

HEADS = ("batch", "kv_head", "group", "query", "key")


def composites(module: ir.Module, name: str) -> list[ir.Operation]:
    """The composites of a name, in program order."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.composite" and ir.StringAttr(op.attributes["name"]).value == name:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def assert_means_its_decomposition(op: ir.Operation, module: ir.Module, seed: int = 0) -> None:
    """Runs a composite's decomposition and its attributes on random operands."""
    spec = attention_spec(op, module, 3)
    assert isinstance(spec, AttentionSpec), spec
    rng = np.random.default_rng(seed)
    operands = [_draw(a.shape, a.dtype, rng) for a in spec.arguments]
    small = np.float32(spec.size("depth") ** -0.5)  # logits of size one round little in bf16
    operands[0] = (operands[0] * small).astype(operands[0].dtype)
    wanted = by_attributes(spec, operands)
    got = run(_decomposition(op, module), operands)
    assert len(got) == len(wanted)
    narrow = "bf16" in str(op) or "f16" in str(op)
    for before, after, value in zip(got, wanted, op.results, strict=True):
        assert before.shape == after.shape, value
        scale = float(np.nanmax(np.abs(after))) or 1.0
        np.testing.assert_allclose(
            before.astype(np.float32), after, rtol=0, atol=(0.04 if narrow else 2e-5) * scale
        )


def _draw(shape: Sequence[int], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    if dtype.kind == "b":
        return rng.random(shape) < 0.8
    if dtype.kind in "iu":
        return rng.integers(0, 3, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def _decomposition(op: ir.Operation, module: ir.Module) -> ir.Module:
    name = ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value
    (function,) = (f for f in functions(module) if symbol_name(f) == name)
    with module.context, ir.Location.unknown():
        alone = ir.Module.create()
        with ir.InsertionPoint(alone.body):
            copy = function.clone()
        copy.attributes["sym_name"] = ir.StringAttr.get("main")
        copy.attributes["sym_visibility"] = ir.StringAttr.get("public")
    return alone


def by_attributes(spec: AttentionSpec, operands: Sequence[Any]) -> list[np.ndarray]:
    """The results `docs/composites.md` gives for an `hlo_opt.attention`, in f32."""
    q, k, v = (
        arrange(jnp.asarray(x, jnp.float32), dims, spec, wanted)
        for x, dims, wanted in (
            (operands[0], spec.q_dims, ("batch", "kv_head", "group", "query", "depth")),
            (operands[1], spec.k_dims, ("batch", "kv_head", "key", "depth")),
            (operands[2], spec.v_dims, ("batch", "kv_head", "key", "value_depth")),
        )
    )
    logits = jnp.einsum("bhgqd,bhkd->bhgqk", q, k, precision="highest")
    arguments = _arguments(spec, operands[3:])
    s = jnp.broadcast_to(Captured(spec.score)(logits, *arguments), logits.shape)
    everything = s
    if spec.sink:
        first = [a[..., :1] if a.ndim else a for a in arguments]
        sink = Captured(spec.sink)(logits[..., :1], *first)
        column = jnp.broadcast_to(sink, (*s.shape[:-1], 1))
        everything = jnp.concatenate([s, column], -1)
    top = everything.max(-1, keepdims=True)
    total = jnp.exp(everything - top).sum(-1, keepdims=True)
    p = jnp.exp(s - top)
    if not spec.statistics:
        p = p / total
    if spec.probs:
        p = Captured(spec.probs)(p, *arguments)
    p = jnp.broadcast_to(p, logits.shape)
    out = jnp.einsum("bhgqk,bhkd->bhgqd", p, v, precision="highest")
    results = [_laid_out(out, spec.out_dims, spec, "value_depth")]
    for (dims, _), statistic in zip(spec.statistics, (top, total), strict=False):
        results.append(_laid_out(statistic, dims, spec, "value_depth"))
    return [np.asarray(result) for result in results]


def _arguments(spec: AttentionSpec, extras: Sequence[Any]) -> list[Any]:
    tiles = [
        arrange(jnp.asarray(extra), dims, spec, HEADS)
        for extra, dims in zip(extras, spec.extra_dims, strict=True)
    ]
    batch = int(np.prod([spec.size(role) for role in spec.batch_roles]))
    heads = spec.size("kv_head") * spec.size("group")
    shapes = [(-1, 1, 1, 1, 1), (1, spec.size("kv_head"), -1, 1, 1), (1, 1, 1, -1, 1)]
    counts = [batch, heads, spec.size("query"), spec.size("key")]
    return tiles + [
        jnp.arange(count, dtype=jnp.int32).reshape(shape)
        for count, shape in zip(counts, [*shapes, (1, 1, 1, 1, -1)], strict=True)
    ]


def _laid_out(x: Any, dims: Sequence[str], spec: AttentionSpec, last: str) -> Any:
    """From `[batch, kv_head, group, query, last]` to the dimensions given."""
    full = (*spec.batch_roles, "kv_head", "group", "query", last)
    x = x.reshape([*(spec.size(role) for role in full[:-1]), x.shape[-1]])
    names = [name for dim in dims if dim != "1" for name in dim.split("*")]
    rest = [name for name in full if name not in names]
    x = x.transpose([full.index(name) for name in (*rest, *names)])
    sizes = [[x.shape[len(rest) + names.index(n)] for n in d.split("*") if n != "1"] for d in dims]
    return x.reshape([int(np.prod(size)) for size in sizes])
