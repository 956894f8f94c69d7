"""Random attention programs, and what they mean: the generator behind `fuzz_attention.py`.

A `Recipe` says how an attention is spelled: which einsums, where the scale goes, what masks it and
how, where it is normalised, what stands around it. `NEAR_MISSES` break one thing each. The oracle
evaluates modules in float64 with NumPy, and `hlo_opt.attention` composites by the formula of
`docs/composites.md` instead of by their decomposition, so that captured functions are checked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from hlo_opt import ir as hlo_ir
from hlo_opt.ir.walk import direction, element_type, functions, reduction, scalar, symbol_name
from hlo_opt.kernels import No
from hlo_opt.kernels.attention import AttentionSpec, arrange, restore
from hlo_opt.kernels.general_attention import GeneralAttention

NONE = "none"
CHOICES: dict[str, tuple[Any, ...]] = {
    "batch": (1, 2, 3),
    "queries": (1, 5, 8, 12),
    "more_keys": (0, 0, 3, 4),
    "kv_heads": (1, 2, 3),
    "group": (1, 1, 2, 4),
    "depth": (4, 8),
    "value_depth": (4, 8, 6),
    "dtype": ("float32", "float32", "bfloat16", "float16"),
    "layout": ("bqhd", "bhqd", "qbhd"),
    "idiom": ("einsum", "matmul", "k first", "vmap"),
    "sharing": ("grouped", "repeat", "tile", "broadcast"),
    "logits": ("as is", "preferred f32", "cast f32"),
    "scale": ("q", "k", "multiply", "divide", NONE, "both"),
    "cap": (NONE, NONE, NONE, "tanh"),
    "bias": (NONE, NONE, NONE, "table", "heads", "slopes", "buckets"),
    "mask": (
        NONE,
        "causal",
        "causal",
        "to the end",
        "constant",
        "padding",
        "causal and padding",
        "segments",
        "window",
        "chunks",
        "position",
        "prefix",
        "given",
        "cast",
    ),
    "how": ("select", "select", "add", "not select", "multiply", "twice"),
    "value": (-math.inf, "lowest", -1e9, -1e4),
    "maximum": ("softmax", "subtracted", NONE, "guarded", "twice"),
    "divided": ("before", "before", "after", "reciprocal", "never"),
    "guard": (NONE, NONE, NONE, "mask", "any"),
    "sink": (NONE, NONE, NONE, NONE, "column", "first column"),
    "around": (NONE, NONE, "jit", "scan", "while", "remat"),
    "out": ("as is", "merged", "transposed"),
}
NEAR_MISSES = (
    "softmax over queries",
    "probabilities returned",
    "dropout",
    "sum of other exponentials",
    "sum of some keys",
    "mask of logits",
    "logits rounded",
    "values reversed",
    "keys rolled",
    "maximum of neighbours",
    "probabilities squared",
    "logits returned",
)


@dataclass(frozen=True)
class Recipe:
    """One choice of every axis in `CHOICES`, and what is broken."""

    batch: int
    queries: int
    more_keys: int
    kv_heads: int
    group: int
    depth: int
    value_depth: int
    dtype: str
    layout: str
    idiom: str
    sharing: str
    logits: str
    scale: str
    cap: str
    bias: str
    mask: str
    how: str
    value: float | str
    maximum: str
    divided: str
    guard: str
    sink: str
    around: str
    out: str
    miss: str = ""

    @classmethod
    def draw(cls, choose: Callable[[str, Sequence[Any]], Any], near_misses: bool) -> Recipe:
        """A recipe from a function that chooses one of several values for a name."""
        chosen = {name: choose(name, values) for name, values in CHOICES.items()}
        miss = choose("miss", ("", "", *NEAR_MISSES)) if near_misses else ""
        recipe = cls(**chosen, miss=miss)
        changes: dict[str, Any] = {}
        if recipe.mask == NONE:
            changes |= {"how": "select", "guard": NONE}
        if recipe.how == "multiply":
            changes |= {"guard": NONE}
        if recipe.sink != NONE and recipe.divided != "before":
            changes |= {"divided": "before"}
        if recipe.maximum == "softmax" and recipe.divided != "before":
            changes |= {"maximum": "subtracted"}
        if recipe.divided == "never" and recipe.maximum in (NONE, "guarded", "twice"):
            changes |= {"maximum": "subtracted"}
        if recipe.guard != NONE and recipe.divided == "never":
            changes |= {"guard": NONE}
        if recipe.miss == "softmax over queries":
            changes |= {"divided": "before", "sink": NONE}
        if recipe.idiom == "vmap":
            changes |= {"sharing": "repeat"}
        return dataclasses.replace(recipe, **changes)

    @property
    def keys(self) -> int:
        return max(2, self.queries + self.more_keys)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """q, k, v, and what masks and biases are made of."""
        sizes = {"b": self.batch, "d": self.depth}
        kinds = [
            {**sizes, "q": self.queries, "h": self.heads},
            {**sizes, "q": self.keys, "h": self.kv_heads},
            {**sizes, "q": self.keys, "h": self.kv_heads, "d": self.value_depth},
        ]
        qkv = [(tuple(kind[axis] for axis in self.layout), self.dtype) for kind in kinds]
        extras: list[tuple[tuple[int, ...], str]] = []
        if self.mask in ("padding", "causal and padding"):
            extras.append(((self.batch, self.keys), "bool"))
        elif self.mask == "cast" or self.mask == "segments":
            extras.append(((self.batch, self.keys), "int32"))
        elif self.mask == "position":
            extras.append(((), "int32"))
        elif self.mask == "given":
            extras.append(((self.batch, 1, self.queries, self.keys), "bool"))
        if self.bias == "table":
            extras.append(((self.queries, self.keys), "float32"))
        elif self.bias == "heads":
            extras.append(((1, self.heads, self.queries, self.keys), "float32"))
        elif self.bias in ("slopes", "buckets"):
            extras.append(((self.heads,), "float32"))
        if self.sink != NONE:
            extras.append(((self.heads,), "float32"))
        return [jax.ShapeDtypeStruct(shape, type_) for shape, type_ in (*qkv, *extras)]

    def inputs(self, seed: int) -> list[np.ndarray]:
        """Random inputs."""
        rng = np.random.default_rng(seed)
        found = []
        for x in self.shapes():
            if x.dtype == bool:
                mask = rng.random(x.shape) < 0.7
                mask[..., 0] = True  # no row without a key: NaN compares as NaN, but says little
                found.append(mask)
            elif x.dtype == np.int32:
                found.append(np.asarray(rng.integers(0, 3, x.shape), np.int32))
            else:
                found.append(rng.standard_normal(x.shape).astype(x.dtype))
        return found

    def function(self) -> Callable[..., Any]:
        """The program as a JAX function of `shapes()`."""
        return _around(_Spelling(self).attend, self)

    def module(self) -> ir.Module:
        """The program as JAX lowers it."""
        lowered = jax.jit(self.function()).trace(*self.shapes()).lower(lowering_platforms=("tpu",))
        return hlo_ir.parse(lowered.as_text())


class _Spelling:
    """Writes the attention of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.r = recipe

    def attend(self, q: Any, k: Any, v: Any, *extras: Any) -> Any:
        """The attention; the result's layout is `[batch, query, head, depth]` or as asked."""
        r, rest = self.r, list(extras)
        order = [r.layout.index(axis) for axis in "bhqd"]
        q, k, v = (x.transpose(order) for x in (q, k, v))
        if r.miss == "keys rolled":  # the mask and the values are not
            k = jnp.roll(k, 1, axis=2)
        mask = self._mask(rest)
        bias = self._bias(rest)
        sink = rest.pop(0) if r.sink != NONE else None
        x = self._logits(q, k)
        x = self._scored(x, mask, bias)
        weights, total, top = self._softmax(x, sink)
        if r.guard == "mask":
            weights = jnp.where(mask, weights, 0)
        elif r.guard == "any":
            weights = jnp.where(jnp.any(mask, axis=-1, keepdims=True), weights, 0)
        if r.miss == "dropout":
            weights = weights * (jnp.sin(1e4 * weights) > 0)
        if r.miss == "probabilities squared":
            weights = weights * weights
        if r.miss == "values reversed":
            v = v * jnp.max(weights)
        out = self._weighted(weights.astype(v.dtype), v)
        results = []
        if r.divided == "after":
            out = out / total.astype(out.dtype)
        elif r.divided == "reciprocal":
            out = out * (1 / total).astype(out.dtype)
        elif r.divided == "never":
            results = [total, top]
        if r.miss == "probabilities returned":
            results.append(weights)
        if r.miss == "logits returned":
            results.append(x)
        out = out.transpose(0, 2, 1, 3)
        if r.out == "merged":
            out = out.reshape(*out.shape[:2], -1)
        elif r.out == "transposed":
            out = out.transpose(1, 0, 3, 2)
        return (out, *results) if results else out

    def _shared(self, x: Any) -> Any:
        """Keys or values for all heads, where they are not grouped."""
        r = self.r
        if r.sharing == "repeat":
            return jnp.repeat(x, r.group, axis=1)
        if r.sharing == "tile":
            return jnp.tile(x, (1, r.group, 1, 1))
        wide = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], r.group, *x.shape[2:]))
        return wide.reshape(x.shape[0], -1, *x.shape[2:])

    def _logits(self, q: Any, k: Any) -> Any:
        """`[b, h, q, k]`."""
        r = self.r
        factor = r.depth**-0.5
        if r.scale in ("q", "both"):
            q = q * jnp.asarray(factor if r.scale == "q" else factor**0.5, q.dtype)
        if r.scale in ("k", "both"):
            k = k * jnp.asarray(factor if r.scale == "k" else factor**0.5, k.dtype)
        wanted = jnp.float32 if r.logits == "preferred f32" else None
        if r.sharing == "grouped":
            q = q.reshape(r.batch, r.kv_heads, r.group, r.queries, r.depth)
            if r.idiom == "k first":
                x = jnp.einsum("bhkd,bhgqd->bhkgq", k, q, preferred_element_type=wanted)
                x = x.transpose(0, 1, 3, 4, 2)
            else:
                x = jnp.einsum("bhgqd,bhkd->bhgqk", q, k, preferred_element_type=wanted)
            x = x.reshape(r.batch, r.heads, r.queries, r.keys)
        else:
            k = self._shared(k)
            if r.idiom == "matmul":
                x = jnp.matmul(q, jnp.swapaxes(k, 2, 3), preferred_element_type=wanted)
            elif r.idiom == "k first":
                x = jnp.einsum("bhkd,bhqd->bhkq", k, q, preferred_element_type=wanted)
                x = x.transpose(0, 1, 3, 2)
            elif r.idiom == "vmap":
                product = jax.vmap(jax.vmap(lambda a, b: jnp.dot(a, b.T)))
                x = product(q, k)
            else:
                x = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=wanted)
        if r.logits == "cast f32":
            x = x.astype(jnp.float32)
        if r.miss == "logits rounded":
            x = x.astype(jnp.int32).astype(x.dtype)
        if r.scale == "multiply":
            x = x * jnp.asarray(factor, x.dtype)
        elif r.scale == "divide":
            x = x / jnp.asarray(r.depth**0.5, x.dtype)
        return x

    def _mask(self, rest: list[Any]) -> Any:
        """What is open, broadcasting to `[b, h, q, k]`; None without a mask."""
        r = self.r
        rows, columns = jnp.arange(r.queries)[:, None], jnp.arange(r.keys)[None]
        match r.mask:
            case "none":
                return None
            case "causal":
                return (rows >= columns)[None, None]
            case "to the end":
                return (rows + r.more_keys >= columns)[None, None]
            case "constant":
                table = np.tril(np.ones((1, 1, 16, 16), bool))
                return jnp.asarray(table)[:, :, r.keys - r.queries : r.keys, : r.keys]
            case "padding":
                return rest.pop(0)[:, None, None]
            case "causal and padding":
                return (rows >= columns)[None, None] & rest.pop(0)[:, None, None]
            case "segments":
                ids = rest.pop(0)
                return (ids[:, None, : r.queries, None] == ids[:, None, None]) | (columns == 0)
            case "window":
                return ((rows >= columns) & (rows - columns < 3))[None, None]
            case "chunks":
                return ((rows >= columns) & (rows // 4 == columns // 4))[None, None]
            case "position":
                return (columns <= rows + rest.pop(0))[None, None]
            case "prefix":
                return ((rows >= columns) | (columns < 2))[None, None]
            case "given":
                return rest.pop(0)
            case "cast":
                kept = (rest.pop(0) > 0).astype(jnp.float32)[:, None, None]
                return (kept.astype(jnp.int32) > 0) | (columns == 0)
        raise AssertionError(r.mask)

    def _bias(self, rest: list[Any]) -> Any:
        r = self.r
        rows, columns = jnp.arange(r.queries)[:, None], jnp.arange(r.keys)[None]
        match r.bias:
            case "table":
                return rest.pop(0)[None, None]
            case "heads":
                return rest.pop(0)
            case "slopes":
                return rest.pop(0)[None, :, None, None] * (columns - rows)
            case "buckets":
                table = rest.pop(0)
                near = jnp.minimum(jnp.abs(columns - rows), 3)
                return table[None, :, None, None] * near.astype(jnp.float32)
        return None

    def _scored(self, x: Any, mask: Any, bias: Any) -> Any:
        r = self.r
        if r.cap == "tanh":
            x = jnp.asarray(3, x.dtype) * jnp.tanh(x / jnp.asarray(3, x.dtype))
        if bias is not None:
            x = x + bias.astype(x.dtype)
        if r.miss == "mask of logits":
            x = jnp.where(x < jnp.max(x, axis=-1, keepdims=True), x, 0)
        if mask is None:
            return x
        low = float(jnp.finfo(x.dtype).min) if r.value == "lowest" else r.value
        if x.dtype == jnp.float16 and isinstance(low, float) and -math.inf < low < -6e4:
            low = float(jnp.finfo(x.dtype).min)
        value = jnp.asarray(low, x.dtype)
        match r.how:
            case "select":
                return jnp.where(mask, x, value)
            case "not select":
                return jnp.where(~mask, value, x)
            case "add":
                return x + jnp.where(mask, jnp.asarray(0, x.dtype), value)
            case "multiply":
                return x * mask.astype(x.dtype)
            case "twice":
                return jnp.where(mask, jnp.where(mask, x, jnp.asarray(-5, x.dtype)), value)
        raise AssertionError(r.how)

    def _softmax(self, x: Any, sink: Any) -> tuple[Any, Any, Any]:
        """Weights `[b, h, q, k]`, their sum and the maximum where they are not divided by it."""
        r = self.r
        axis = -2 if r.miss == "softmax over queries" else -1
        if sink is not None:
            column = jnp.broadcast_to(sink[None, :, None, None], (*x.shape[:3], 1)).astype(x.dtype)
            parts = [x, column] if r.sink == "column" else [column, x]
            x = jnp.concatenate(parts, axis=-1)
        top = jnp.max(x, axis=axis, keepdims=True)
        if r.maximum == "softmax":
            weights = jax.nn.softmax(x, axis=axis)
            return self._cut(weights), None, None
        if r.maximum == "guarded":
            top = jnp.where(jnp.isfinite(top), top, 0)
        elif r.maximum == "twice":
            x = x - jax.lax.stop_gradient(top)
            top = jnp.max(x, axis=axis, keepdims=True)
        if r.miss == "maximum of neighbours":
            top = jnp.roll(top, 1, axis=2)
        weights = jnp.exp(x if r.maximum == NONE else x - top)
        summed = weights
        if r.miss == "sum of other exponentials":
            summed = jnp.exp(x * 0.5)
        elif r.miss == "sum of some keys":
            summed = weights[..., : max(1, r.keys - 1)]
        total = jnp.sum(summed.astype(jnp.float32), axis=axis, keepdims=True).astype(x.dtype)
        if r.divided == "before":
            return self._cut(weights / total), None, None
        return weights, total, top

    def _cut(self, weights: Any) -> Any:
        if self.r.sink == "column":
            return weights[..., :-1]
        return weights[..., 1:] if self.r.sink == "first column" else weights

    def _weighted(self, p: Any, v: Any) -> Any:
        """`[b, h, q, d]`."""
        r = self.r
        if r.sharing == "grouped":
            p = p.reshape(r.batch, r.kv_heads, r.group, r.queries, r.keys)
            if r.idiom == "k first":
                out = jnp.einsum("bhkd,bhgqk->bhdgq", v, p).transpose(0, 1, 3, 4, 2)
            else:
                out = jnp.einsum("bhgqk,bhkd->bhgqd", p, v)
            return out.reshape(r.batch, r.heads, r.queries, r.value_depth)
        v = self._shared(v)
        return jnp.matmul(p, v) if r.idiom == "matmul" else jnp.einsum("bhqk,bhkd->bhqd", p, v)


def _around(attend: Callable[..., Any], recipe: Recipe) -> Callable[..., Any]:
    """The attention inside of what programs have around it."""
    match recipe.around:
        case "jit":
            return lambda *args: jax.jit(attend)(*args)
        case "remat":
            return lambda *args: jax.checkpoint(attend)(*args)  # type: ignore[attr-defined]
        case "scan":

            def scanned(q: Any, *rest: Any) -> Any:
                def step(total: Any, factor: Any) -> tuple[Any, Any]:
                    return total + 1, attend(q * factor, *rest)

                return jax.lax.scan(step, jnp.int32(0), jnp.asarray([1, 0.5]).astype(q.dtype))[1]

            return scanned
        case "while":

            def looped(q: Any, *rest: Any) -> Any:
                def body(_: Any, state: Any) -> Any:
                    return jax.tree.map(lambda x, y: x + y, state, attend(q, *rest))

                return jax.lax.fori_loop(0, 2, body, attend(q, *rest))

            return looped
    return attend


# The oracle.


class Interpreter:
    """Evaluates a module's `main` in NumPy: floats in float64, without intermediate rounding.

    Args:
      formula: evaluate `hlo_opt.attention` composites by their documented meaning.
    """

    def __init__(self, module: ir.Module, formula: bool) -> None:
        self.module = module
        self.formula = formula
        self.functions = {symbol_name(f): f for f in functions(module)}

    def run(self, *inputs: np.ndarray) -> list[np.ndarray]:
        """The results of `main`."""
        with np.errstate(all="ignore"):
            wide = [_wide(np.asarray(x)) for x in inputs]
            return self.call(self.functions["main"], wide)

    def call(self, function: ir.Operation, inputs: Sequence[Any]) -> list[Any]:
        return self.block(function.regions[0].blocks[0], inputs, {})

    def block(self, block: ir.Block, inputs: Sequence[Any], outer: Mapping[Any, Any]) -> list[Any]:
        values = {**outer, **dict(zip(block.arguments, inputs, strict=True))}
        for view in block.operations:
            op = view.operation
            operands = [values[o] for o in op.operands]
            if op.name in ("func.return", "stablehlo.return"):
                return operands
            results = self._one(op, operands, values)
            for result, value in zip(op.results, results, strict=True):
                values[result] = value
        raise AssertionError("a block without a return")

    def _one(self, op: ir.Operation, x: list[Any], values: Mapping[Any, Any]) -> list[Any]:
        match op.name:
            case "func.call":
                name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
                return self.call(self.functions[name], x)
            case "stablehlo.composite":
                return self._composite(op, x)
            case "stablehlo.while":
                while bool(self.block(op.regions[0].blocks[0], x, values)[0]):
                    x = self.block(op.regions[1].blocks[0], x, values)
                return x
            case "stablehlo.optimization_barrier":
                return x
        return [np.asarray(_TENSOR[op.name](op, *x))]

    def _composite(self, op: ir.Operation, x: list[Any]) -> list[Any]:
        if not self.formula or ir.StringAttr(op.attributes["name"]).value != "hlo_opt.attention":
            name = ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value
            return self.call(self.functions[name], x)
        spec = GeneralAttention().spec(op, self.module)
        if isinstance(spec, No):
            raise AssertionError(f"a raised composite is malformed: {spec.reason}")
        attributes = ir.DictAttr(op.attributes["composite_attributes"])

        def captured(name: str) -> Callable[..., Any] | None:
            if name not in attributes:
                return None
            function = self.functions[ir.FlatSymbolRefAttr(attributes[name]).value]
            return lambda *args: self.call(function, args)[0]

        return formula(spec, x, captured)


def formula(
    spec: AttentionSpec, x: list[Any], captured: Callable[[str], Callable[..., Any] | None]
) -> list[Any]:
    """What `docs/composites.md` says an attention composite means, on whole float64 arrays."""
    rows = ("batch", "kv_head", "group", "query", "key")
    q = arrange(x[0], spec.q_dims, spec, (*rows[:4], "depth"))
    k = arrange(x[1], spec.k_dims, spec, ("batch", "kv_head", "key", "depth"))
    v = arrange(x[2], spec.v_dims, spec, ("batch", "kv_head", "key", "value_depth"))
    logits = np.einsum("bhgqd,bhkd->bhgqk", q, k)
    shape = logits.shape
    extras = [
        np.broadcast_to(arrange(e, dims, spec, rows), shape)
        for e, dims in zip(x[3:], spec.extra_dims, strict=True)
    ]
    b, h, g, n, m = np.indices(shape)
    indices = [b, h * shape[2] + g, n, m]
    score, probs, sink = (captured(name) for name in ("score", "probs", "sink"))
    assert score is not None
    s = score(logits, *extras, *indices)
    top = s.max(-1, keepdims=True)
    if sink is not None:
        first = [e[..., :1] for e in (*extras, *indices)]
        extra = np.broadcast_to(sink(np.zeros_like(top), *first), top.shape)
        top = np.maximum(top, extra)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(extra - top)
    if not spec.statistics:
        p = p / total
    if probs is not None:
        p = np.broadcast_to(probs(p, *extras, *indices), shape)
    out = np.einsum("bhgqk,bhkd->bhgqd", p, v)
    results = [restore(out, spec)]
    if spec.statistics:
        results += [restore(top, spec, 0), restore(total, spec, 1)]
    return results


def _wide(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind in "biu" else x.astype(np.float64)


def _type(op: ir.Operation) -> np.dtype:
    type_ = element_type(op.results[0])
    if isinstance(type_, ir.IntegerType):
        if type_.width == 1:
            return np.dtype(bool)
        return np.dtype(f"{'u' if type_.is_unsigned else ''}int{type_.width}")
    return np.dtype(np.float64)


def _shape(op: ir.Operation) -> list[int]:
    return list(ir.RankedTensorType(op.results[0].type).shape)


def _ints(op: ir.Operation, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[name]))


def _constant(op: ir.Operation) -> Any:
    attribute = ir.DenseElementsAttr(op.attributes["value"])
    if attribute.is_splat:
        return np.full(_shape(op), scalar(attribute.get_splat_value()), _type(op))
    kinds = {"bool": ir.DenseIntElementsAttr, "int32": ir.DenseIntElementsAttr}
    cls = kinds.get(_type(op).name, ir.DenseFPElementsAttr)
    found = cls(attribute)  # type: ignore[operator]
    return np.asarray([found[n] for n in range(len(found))], _type(op)).reshape(_shape(op))


def _iota(op: ir.Operation) -> Any:
    shape, axis = _shape(op), ir.IntegerAttr(op.attributes["iota_dimension"]).value
    line = np.arange(shape[axis], dtype=_type(op))
    return np.broadcast_to(line.reshape([-1 if d == axis else 1 for d in range(len(shape))]), shape)


def _broadcast(op: ir.Operation, x: Any) -> Any:
    shape, dims = _shape(op), _ints(op, "broadcast_dimensions")
    order = np.argsort(dims)
    x = x.transpose(order)
    wide = [1] * len(shape)
    for size, dim in zip(x.shape, sorted(dims), strict=True):
        wide[dim] = size
    return np.broadcast_to(x.reshape(wide), shape)


def _slice(op: ir.Operation, x: Any) -> Any:
    names = ("start_indices", "limit_indices", "strides")
    parts = zip(*(_ints(op, name) for name in names), strict=True)
    return x[tuple(slice(*part) for part in parts)]


def _dynamic_slice(op: ir.Operation, x: Any, *starts: Any) -> Any:
    sizes = _ints(op, "slice_sizes")
    firsts = [int(np.clip(s, 0, n - m)) for s, n, m in zip(starts, x.shape, sizes, strict=True)]
    return x[tuple(slice(f, f + m) for f, m in zip(firsts, sizes, strict=True))]


def _dynamic_update_slice(op: ir.Operation, x: Any, update: Any, *starts: Any) -> Any:
    x = x.copy()
    firsts = [
        int(np.clip(s, 0, n - m)) for s, n, m in zip(starts, x.shape, update.shape, strict=True)
    ]
    x[tuple(slice(f, f + m) for f, m in zip(firsts, update.shape, strict=True))] = update
    return x


def _dot(op: ir.Operation, x: Any, y: Any) -> Any:
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    left = [next(letters) for _ in x.shape]
    right = [next(letters) for _ in y.shape]
    batch = list(zip(numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions, strict=True))
    both = list(
        zip(numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions, strict=True)
    )
    for i, j in (*batch, *both):
        right[j] = left[i]
    inner = {left[i] for i, _ in (*batch, *both)}
    out = [left[i] for i, _ in batch]
    out += [c for c in left if c not in inner] + [c for c in right if c not in inner]
    return np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(out)}", x, y).astype(_type(op))


def _reduce(op: ir.Operation, x: Any, initial: Any) -> Any:
    kind = reduction(op)
    assert kind is not None
    name, dims = kind
    table: dict[str, Any] = {
        "stablehlo.add": np.add,
        "stablehlo.maximum": np.maximum,
        "stablehlo.or": np.logical_or,
        "stablehlo.and": np.logical_and,
    }
    result = table[name].reduce(x, axis=tuple(dims))
    return table[name](result, initial)


def _convert(op: ir.Operation, x: Any) -> Any:
    return x != 0 if _type(op).kind == "b" else np.asarray(x).astype(_type(op))


def _compare(op: ir.Operation, x: Any, y: Any) -> Any:
    table = {
        "EQ": np.equal,
        "NE": np.not_equal,
        "GE": np.greater_equal,
        "GT": np.greater,
        "LE": np.less_equal,
        "LT": np.less,
    }
    return table[direction(op)](x, y)


def _divide(op: ir.Operation, x: Any, y: Any) -> Any:
    if np.asarray(x).dtype.kind == "f":
        return x / y
    return (np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))).astype(_type(op))


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda op, *x: fn(*x)


_TENSOR: dict[str, Callable[..., Any]] = {
    f"stablehlo.{name}": fn
    for name, fn in {
        "abs": _plain(np.abs),
        "add": _plain(np.add),
        "and": _plain(np.bitwise_and),
        "broadcast_in_dim": _broadcast,
        "clamp": lambda op, low, x, high: np.minimum(np.maximum(x, low), high),
        "compare": _compare,
        "concatenate": lambda op, *x: np.concatenate(
            x, axis=ir.IntegerAttr(op.attributes["dimension"]).value
        ),
        "constant": _constant,
        "convert": _convert,
        "cosine": _plain(np.cos),
        "divide": _divide,
        "dot_general": _dot,
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update_slice,
        "exponential": _plain(np.exp),
        "floor": _plain(np.floor),
        "iota": _iota,
        "is_finite": _plain(np.isfinite),
        "log": _plain(np.log),
        "maximum": _plain(np.maximum),
        "minimum": _plain(np.minimum),
        "multiply": _plain(np.multiply),
        "negate": _plain(np.negative),
        "not": _plain(np.invert),
        "or": _plain(np.bitwise_or),
        "power": _plain(np.power),
        "reduce": _reduce,
        "remainder": _plain(np.fmod),
        "reshape": lambda op, x: x.reshape(_shape(op)),
        "rsqrt": lambda op, x: 1 / np.sqrt(x),
        "select": _plain(np.where),
        "sign": _plain(np.sign),
        "sine": _plain(np.sin),
        "slice": _slice,
        "sqrt": _plain(np.sqrt),
        "subtract": _plain(np.subtract),
        "tanh": _plain(np.tanh),
        "transpose": lambda op, x: x.transpose(_ints(op, "permutation")),
        "xor": _plain(np.bitwise_xor),
    }.items()
}
