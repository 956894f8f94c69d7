"""Kernels for `hlo_opt.attention`: what they share, and JAX's Pallas flash attention for TPU.

The composite's layout is arranged to `[batch, kv_head, group, sequence, depth]` around the kernel.
For flash attention batch, heads and groups are mapped with `jax.vmap`: keys and values are not
mapped over the group, so they are never repeated. What a kernel has no parameter for is refused
with a reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxlib.mlir import ir

from hlo_opt.errors import HloOptError
from hlo_opt.ir.scalar import tensor0
from hlo_opt.ir.signature import ArrayType, array_type, function_types
from hlo_opt.ir.walk import element_type, functions, symbol_name
from hlo_opt.kernels import Candidate, No, register_kernel, rows
from hlo_opt.patterns.score import (
    FAR_BELOW,
    Linear,
    NotLinear,
    analyse,
    causal_offset,
    is_homogeneous,
)
from hlo_opt.targets import Target

# What Mosaic computes in, on every generation.
EXTRA_TYPES = frozenset({"bool", "int32", "uint32", "float32", "bfloat16"})
# What captured functions vary over, in the order of a tile's dimensions.
ROLES = ("batch", "kv_head", "group", "query", "key")
# How many f32 products are summed in one go for few rows. Summing in a row, as CPUs do in the
# interpreter, 16 keep the error below that of XLA's own matrix-vector products; a TPU has no use
# for it.
TERMS = 16
# What the kernel itself adds where its causal mask is closed: 0.7 of the lowest f32.
MASKED = -0.7 * 3.4028234663852886e38


@dataclass(frozen=True)
class AttentionSpec:
    """Everything that determines a kernel for an `hlo_opt.attention`; see `docs/composites.md`.

    Attributes:
      arguments: types of the operands, the extras last.
      result: type of the (first) result.
      score, probs, sink: text of the captured functions; empty where there is none.
      form: what `score` is.
      statistics: dimensions and types of the row maximum and the sum, where they are results.
      in_rows: which of q, k, v and out enter or leave the program as
        `[…, position, head, depth]`, which XLA does not lay out otherwise.
    """

    arguments: tuple[ArrayType, ...]
    result: ArrayType
    roles: tuple[tuple[str, int], ...]
    q_dims: tuple[str, ...]
    k_dims: tuple[str, ...]
    v_dims: tuple[str, ...]
    out_dims: tuple[str, ...]
    extra_dims: tuple[tuple[str, ...], ...]
    qk_precision: tuple[str, ...]
    pv_precision: tuple[str, ...]
    qk_type: str
    logits_type: str
    probs_type: str
    score: str
    form: Linear | NotLinear
    probs: str = ""
    sink: str = ""
    statistics: tuple[tuple[tuple[str, ...], ArrayType], ...] = ()
    in_rows: frozenset[str] = frozenset()

    def size(self, role: str) -> int:
        """The size of a role; roles that do not occur have size 1."""
        return dict(self.roles).get(role, 1)

    @property
    def extras(self) -> tuple[ArrayType, ...]:
        """Types of the extras."""
        return self.arguments[len(self.arguments) - len(self.extra_dims) :]

    @property
    def batch_roles(self) -> tuple[str, ...]:
        """Batch roles, outer first."""
        names = [name for name, _ in self.roles if name.startswith("batch")]
        return tuple(sorted(names, key=lambda name: int(name[5:] or 0)))


def attention_spec(op: ir.Operation, module: ir.Module, leading: int) -> AttentionSpec | No:
    """Reads the attributes of an attention composite, and checks them against its operands.

    Args:
      leading: number of operands before the extras.
    """
    try:
        spec = _read(op, module, leading)
    except HloOptError as error:
        return No(error.message.removeprefix("error: "))
    except ValueError as error:  # a cast
        return No(f"an attribute of the composite is not of its documented type: {error}")
    if isinstance(spec, No):
        return spec
    return next((No(reason) for reason in _misfits(spec)), spec)


def _read(op: ir.Operation, module: ir.Module, leading: int) -> AttentionSpec | No:
    if "composite_attributes" not in op.attributes:
        return No("the composite has no attributes")
    attributes = ir.DictAttr(op.attributes["composite_attributes"])
    needed = {"roles", "q_dims", "k_dims", "v_dims", "out_dims", "extra_dims", "score"}
    needed |= {"qk_precision", "pv_precision", "qk_type", "probs_type"}
    missing = needed - {entry.name for entry in attributes}
    if missing:
        return No(f"the composite has no attribute {', '.join(sorted(missing))}")
    table = {symbol_name(function): function for function in functions(module)}
    score = table.get(ir.FlatSymbolRefAttr(attributes["score"]).value)
    if score is None:
        return No("the composite's score function is not in the module")
    if len(op.operands) != leading + len(ir.ArrayAttr(attributes["extra_dims"])):
        return No("the composite's operands do not fit its extra_dims")
    extras = list(op.operands)[leading:]
    for name in ("score", *(name for name in ("probs", "sink") if name in attributes)):
        function = table.get(ir.FlatSymbolRefAttr(attributes[name]).value)
        if function is None or not _is_captured(function, extras):
            return No(f"the composite's {name} is no function of the documented type")
    roles = ir.DictAttr(attributes["roles"])

    def captured(name: str) -> str:
        if name not in attributes:
            return ""
        return _anonymous(table[ir.FlatSymbolRefAttr(attributes[name]).value])

    spec = AttentionSpec(
        arguments=tuple(array_type(operand.type) for operand in op.operands),
        result=array_type(op.results[0].type),
        roles=tuple((r.name, ir.IntegerAttr(r.attr).value) for r in roles),
        q_dims=_strings(attributes["q_dims"]),
        k_dims=_strings(attributes["k_dims"]),
        v_dims=_strings(attributes["v_dims"]),
        out_dims=_strings(attributes["out_dims"]),
        extra_dims=tuple(_strings(a) for a in ir.ArrayAttr(attributes["extra_dims"])),
        qk_precision=_strings(attributes["qk_precision"]),
        pv_precision=_strings(attributes["pv_precision"]),
        qk_type=_type(attributes, "qk_type"),
        logits_type=_type(attributes, "logits_type") if "logits_type" in attributes else "",
        probs_type=_type(attributes, "probs_type"),
        score=_anonymous(score),
        form=analyse(score),
        statistics=tuple(
            (_strings(attributes[name]), array_type(result.type))
            for name, result in zip(("max_dims", "sum_dims"), list(op.results)[1:], strict=False)
            if name in attributes
        ),
        probs=captured("probs"),
        sink=captured("sink"),
    )
    return replace(spec, in_rows=_in_rows(op, spec)) if leading == 3 else spec


def _in_rows(op: ir.Operation, spec: AttentionSpec) -> frozenset[str]:
    """See `AttentionSpec.in_rows`."""
    heads, groups = ("kv_head", "group"), ("kv_head",)
    sides = (
        ("q", op.operands[0], spec.q_dims, ("query", *heads, "depth")),
        ("k", op.operands[1], spec.k_dims, ("key", *groups, "depth")),
        ("v", op.operands[2], spec.v_dims, ("key", *groups, "value_depth")),
        ("out", op.results[0], spec.out_dims, ("query", *heads, "value_depth")),
    )
    found = set()
    for name, value, dims, roles in sides:
        named = [tuple(n for n in dim.split("*") if spec.size(n) > 1) for dim in dims]
        wanted = [n for n in (*spec.batch_roles, *roles) if spec.size(n) > 1]
        shape = (math.prod(map(spec.size, roles[1:-1])), spec.size(roles[-1]))
        ends = _results_of_main if name == "out" else _argument_of_main
        for type_, names in ends(value, named, spec):
            in_order = [n for dim in names for n in dim] == wanted
            if in_order and type_.shape[-2:] == shape and rows.is_layout(shape, type_.dtype):
                found.add(name)
    return frozenset(found)


_Names = Sequence[tuple[str, ...]]


def _argument_of_main(
    value: ir.Value, names: _Names, spec: AttentionSpec
) -> Iterator[tuple[ArrayType, _Names]]:
    """The program's argument that is `value` in another shape or order, and its roles."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        function = owner.owner.operation
        if function.name == "func.func" and symbol_name(function) == "main":
            yield array_type(value.type), names
        return
    op = owner.operation
    if op.name == "stablehlo.transpose":
        order = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
        names = [names[order.index(n)] for n in range(len(order))]
    elif op.name == "stablehlo.reshape":
        names = _regrouped(names, array_type(op.operands[0].type).shape, spec)
    else:
        return
    if names:
        yield from _argument_of_main(op.operands[0], names, spec)


def _results_of_main(
    value: ir.Value, names: _Names, spec: AttentionSpec
) -> Iterator[tuple[ArrayType, _Names]]:
    """The program's results that are `value` in another shape or order, as `_argument_of_main`."""
    for use in value.uses:
        op = use.owner.operation
        if op.name == "func.return" and symbol_name(op.parent.operation) == "main":
            yield array_type(value.type), names
        elif op.name == "stablehlo.transpose":
            order = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
            yield from _results_of_main(op.results[0], [names[n] for n in order], spec)
        elif op.name == "stablehlo.reshape":
            shape = array_type(op.results[0].type).shape
            if regrouped := _regrouped(names, shape, spec):
                yield from _results_of_main(op.results[0], regrouped, spec)


def _regrouped(names: _Names, shape: Sequence[int], spec: AttentionSpec) -> _Names:
    """Roles of the dimensions of a reshaped array; none where a role would be split."""
    left = [name for dim in names for name in dim]
    found = []
    for size in shape:
        dim: list[str] = []
        while left and math.prod(map(spec.size, dim)) < size:
            dim.append(left.pop(0))
        if math.prod(map(spec.size, dim)) != size:
            return []
        found.append(tuple(dim))
    return found


def _is_captured(function: ir.Operation, extras: Sequence[ir.Value]) -> bool:
    """Whether a function has the type of `score` and `probs`, and a body."""
    with function.context, ir.Location.unknown():
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        passed = (element_type(extra) for extra in extras)
        inputs = [tensor0(type_) for type_ in (f32, *passed, *[i32] * 4)]
        wanted = (inputs, [tensor0(f32)])
    return bool(list(function.regions[0].blocks)) and function_types(function) == wanted


_ROLE = re.compile(r"batch(?:[1-9]\d*)?|kv_head|group|query|key|depth|value_depth")


def _misfits(spec: AttentionSpec) -> Iterator[str]:
    """What in a composite's attributes does not describe its operands and result."""
    for role, size in spec.roles:
        if not _ROLE.fullmatch(role) or size < 1:
            yield f"the composite has a role {role} of size {size}"
            return
    for pair in (spec.qk_precision, spec.pv_precision):
        if len(pair) != 2 or not {*pair} <= {"DEFAULT", "HIGH", "HIGHEST"}:
            yield "the composite's precisions are not two of DEFAULT, HIGH and HIGHEST"
    count = len(spec.arguments) - len(spec.extras)
    # k and v are operands 1 and 2 of three, 3 and 4 of six.
    q, (k, v) = spec.arguments[0], spec.arguments[count // 2 : count // 2 + 2]
    shared = {"batch", *spec.batch_roles, "kv_head"}
    own = {*shared, "group", "query"}
    described = [
        ("q", q, spec.q_dims, {*own, "depth"}),
        ("k", k, spec.k_dims, {*shared, "key", "depth"}),
        ("v", v, spec.v_dims, {*shared, "key", "value_depth"}),
        ("out", spec.result, spec.out_dims, {*own, "value_depth"}),
    ]
    for name, x, dims, roles in described:
        if not _fits(x, dims, spec, roles):
            yield f"the composite's {name}_dims do not describe {x}"
    for dims, type_ in spec.statistics:
        if not _fits(type_, dims, spec, own):
            yield f"the composite's max_dims or sum_dims do not describe {type_}"
    if spec.statistics and (len(spec.statistics) != 2 or spec.probs or spec.sink):
        yield "the composite has statistics and also probs or a sink, or one of them only"
    for extra, dims in zip(spec.extras, spec.extra_dims, strict=True):
        if not _fits(extra, dims, spec, {*own, "key"}, whole=False):
            yield f"the composite's extra_dims do not describe {extra}"


def _fits(
    x: ArrayType, dims: Sequence[str], spec: AttentionSpec, roles: set[str], whole: bool = True
) -> bool:
    """Whether dimensions name each of some roles once (some of them, if not `whole`)."""
    names = [name for dim in dims if dim != "1" for name in dim.split("*")]
    needed = {role for role, size in spec.roles if size > 1 and role in roles} if whole else set()
    sizes = [math.prod(spec.size(n) for n in d.split("*") if n != "1") for d in dims]
    return len(names) == len({*names}) and needed <= {*names} <= roles and sizes == [*x.shape]


def _type(attributes: ir.DictAttr, name: str) -> str:
    return str(ir.TypeAttr(attributes[name]).value)


def _strings(attribute: ir.Attribute) -> tuple[str, ...]:
    return tuple(ir.StringAttr(a).value for a in ir.ArrayAttr(attribute))


def _anonymous(function: ir.Operation) -> str:
    """A function's text under a fixed name, so that equal functions have equal text."""
    text: str = function.get_asm(use_local_scope=True)
    return text.replace(f"@{symbol_name(function)}(", "@f(", 1)


def arrange(
    x: Any,
    dims: Sequence[str],
    spec: AttentionSpec,
    wanted: Sequence[str],
    sizes: Mapping[str, int] | None = None,
) -> Any:
    """Gives an array one dimension for each wanted role, in that order.

    Args:
      x: array whose dimensions are described by `dims`.
      wanted: role names; `"batch"` stands for all batch roles as one dimension. Roles that the
        array does not vary over get size 1.
      sizes: sizes of roles that are others in this array than in the composite.
    """
    names = [name for dim in dims if dim != "1" for name in dim.split("*")]
    size = {name: (sizes or {}).get(name, spec.size(name)) for name in names}
    x = x.reshape([size[name] for name in names])
    order: list[str] = []
    for role in wanted:
        order += [r for r in spec.batch_roles if r in names] if role == "batch" else [role]
    present = [name for name in order if name in names]
    x = x.transpose([names.index(name) for name in present])
    shape = []
    for role in wanted:
        held = spec.batch_roles if role == "batch" else (role,)
        shape.append(math.prod(size[r] for r in held if r in names))
    return x.reshape(shape)


def restore(x: Any, spec: AttentionSpec, statistic: int | None = None) -> Any:
    """Inverse of `arrange` for a result.

    Args:
      x: `[batch, kv_head, group, query, value_depth]`, without depth for a statistic.
      statistic: 0 for the maximum, 1 for the sum.
    """
    full = (*spec.batch_roles, "kv_head", "group", "query")
    if statistic is None:
        full, dims, type_ = (*full, "value_depth"), spec.out_dims, spec.result
    else:
        dims, type_ = spec.statistics[statistic]
    x = x.reshape([spec.size(role) for role in full])
    order = [name for dim in dims if dim != "1" for name in dim.split("*")]
    rest = [name for name in full if name not in order]
    x = x.transpose([full.index(name) for name in (*rest, *order)])
    return x.reshape(type_.shape)


def dot(left: Any, right: Any, contracted: int, terms: int | None = None) -> Any:
    """`[m, n]` of `left` `[m, d]` and `right`, whose dimension `contracted` is d; f32.

    Args:
      terms: the sum is made of sums of so many products: what is summed in one go loses precision
        with its length.
    """
    import jax
    import jax.numpy as jnp

    dims = (((1,), (contracted,)), ((), ()))
    step = terms or left.shape[1]
    total: Any = 0.0
    for first in range(0, left.shape[1], step):
        part = slice(first, first + step)
        pair = (left[:, part], right[:, part] if contracted else right[part])
        total += jax.lax.dot_general(*pair, dims, preferred_element_type=jnp.float32)
    return total


class Captured:
    """A captured scalar function, to be called on arrays that broadcast together.

    Args:
      text: the function, as in `AttentionSpec.score`.
    """

    def __init__(self, text: str) -> None:
        from hlo_opt import ir as hlo_ir

        self._module = hlo_ir.parse(text)  # its functions live as long as it does
        (self.function,) = functions(self._module)

    def __call__(self, *arguments: Any, known: Mapping[ir.Value, bool] | None = None) -> Any:
        from hlo_opt.trace import evaluate

        return evaluate(self.function, *arguments, known=known)


def score_bias(spec: AttentionSpec, extras: Sequence[Any]) -> Any:
    """The score of a zero logit, `[batch, kv_head, group, query, key]`, sizes 1 where constant."""
    import jax.numpy as jnp

    tiles = [
        arrange(extra, dims, spec, ROLES)
        for extra, dims in zip(extras, spec.extra_dims, strict=True)
    ]
    batch = math.prod(spec.size(role) for role in spec.batch_roles)
    heads = spec.size("kv_head") * spec.size("group")
    indices = [
        jnp.arange(batch, dtype=jnp.int32).reshape(-1, 1, 1, 1, 1),
        jnp.arange(heads, dtype=jnp.int32).reshape(1, spec.size("kv_head"), -1, 1, 1),
        jnp.arange(spec.size("query"), dtype=jnp.int32).reshape(1, 1, 1, -1, 1),
        jnp.arange(spec.size("key"), dtype=jnp.int32).reshape(1, 1, 1, 1, -1),
    ]
    return Captured(spec.score)(jnp.float32(0), *tiles, *indices)


def probs_reasons(spec: AttentionSpec, guards: bool = False) -> Iterator[str]:
    """Why `probs` may not be applied to probabilities that are not yet normalised.

    Args:
      guards: whether the kernel knows what guards make of a row that is NaN.
    """
    if not spec.probs:
        return
    probs = Captured(spec.probs)
    if not is_homogeneous(probs.function):
        yield "the function applied to the probabilities is not a multiple of them"
    form = spec.form
    finite = (
        isinstance(form, Linear)
        and not form.bias
        and all(mask.value > -math.inf for mask in form.masks)
    )
    if not finite and not (guards and is_homogeneous(probs.function, guards_only=True)):
        # Softmax of -inf alone is NaN, of which a guard makes zero.
        yield "a function is applied to probabilities that may be NaN"


class AttentionKernel:
    """What kernels for `hlo_opt.attention` have in common."""

    composite = "hlo_opt.attention"
    platforms = frozenset({"tpu"})
    leading = 3  # operands before the extras
    updated: tuple[int, ...] = ()  # operands that are results too, behind the first

    def reasons(self, spec: AttentionSpec) -> Iterator[str]:
        """Why the kernel does not compute the same function; only the first is asked for."""
        raise NotImplementedError

    def supports(self, spec: AttentionSpec, target: Target) -> No | None:
        return next((No(reason) for reason in self.reasons(spec)), None)

    def spec(self, op: ir.Operation, module: ir.Module) -> AttentionSpec | No:
        spec = attention_spec(op, module, self.leading)
        if isinstance(spec, No):
            return spec
        results = [str(result.type) for result in op.results]
        own = [str(op.operands[n].type) for n in self.updated]
        if results[1:] != own and not spec.statistics:
            return No(f"the composite has results of types {', '.join(results)}")
        return spec

    def arguments(self, spec: AttentionSpec) -> Sequence[ArrayType]:
        return spec.arguments

    def precision(self, spec: AttentionSpec) -> str:
        asked = precisions(spec)
        return min(asked).lower() if asked else "default"


@register_kernel
class FlashAttention(AttentionKernel):
    """`jax.experimental.pallas.ops.tpu.flash_attention`."""

    name = "Pallas flash attention"
    rank = 20

    def reasons(self, spec: AttentionSpec) -> Iterator[str]:
        yield from shape_reasons(spec)
        yield from _depth_reasons(spec)
        yield from score_reasons(spec)
        assert isinstance(spec.form, Linear)
        yield from _mask_reasons(spec.form)

    def candidates(self, spec: AttentionSpec, target: Target) -> Sequence[Candidate]:
        # 1024 x 1024 in steps of 512 is within reach of the best on every generation for bf16 at
        # depth 128, the library's default of 128 is 5 to 10 times slower. A bias and f32 operands
        # need room: v4 and v5e let a kernel have 16 MB of VMEM unless it asks for more.
        narrow = precisions(spec) <= {"DEFAULT"} and spec.qk_type == "bf16"
        assert isinstance(spec.form, Linear)
        largest = 1024 if not _needs_bias(spec.form) and narrow else 512
        q = block_size(spec.size("query"), largest)
        major = block_size(spec.size("key"), largest)
        minor = block_size(major, 512)
        config = (("block_q", q), ("block_k_major", major), ("block_k", minor))
        return [Candidate(f"{self.name}, blocks q={q}, k={major}/{minor}", config)]

    def build(self, spec: AttentionSpec, candidate: Candidate) -> Callable[..., Any]:
        import jax
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu import flash_attention as flash

        form = spec.form
        assert isinstance(form, Linear)
        blocks = flash.BlockSizes(block_b=1, **dict(candidate.config))
        result_type = spec.result.dtype

        def one_head(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return flash.flash_attention(
                q[None, None],
                k[None, None],
                v[None, None],
                None if bias is None else bias[None, None],
                causal=_is_causal(form),
                sm_scale=form.scale,
                block_sizes=blocks,
            )[0, 0]

        def kernel(q: Any, k: Any, v: Any, *extras: Any) -> Any:
            q = arrange(q, spec.q_dims, spec, ("batch", "kv_head", "group", "query", "depth"))
            k = arrange(k, spec.k_dims, spec, ("batch", "kv_head", "key", "depth"))
            v = arrange(v, spec.v_dims, spec, ("batch", "kv_head", "key", "value_depth"))
            qk_type, pv_type = matmul_types(spec)
            q, k, v = q.astype(qk_type), k.astype(qk_type), v.astype(pv_type)
            bias = _bias(spec, form, extras) if _needs_bias(form) else None
            axes = [None if bias is None or bias.shape[i] == 1 else 0 for i in range(3)]
            if bias is not None:
                squeezed = tuple(i for i in range(3) if axes[i] is None)
                bias = jnp.squeeze(bias, squeezed)
            over_group = jax.vmap(one_head, (0, None, None, axes[2]))
            over_heads = jax.vmap(over_group, (0, 0, 0, axes[1]))
            out = jax.vmap(over_heads, (0, 0, 0, axes[0]))(q, k, v, bias)
            return restore(out.astype(result_type), spec)

        return kernel


def _bias(spec: AttentionSpec, form: Linear, extras: Sequence[Any]) -> Any:
    """What is added to `q k` before the scale: zero where open, far below where masked.

    The kernel computes `(q k + bias) * scale`, and its running maximum must stay finite.
    """
    import jax.numpy as jnp

    lowest = MASKED / max(form.scale, 1.0)
    value = score_bias(spec, extras)
    (mask,) = form.masks
    if mask.additive:
        bias = jnp.maximum(value / form.scale, lowest)
    else:
        bias = jnp.where(value < 0.5 * FAR_BELOW, lowest, 0.0)
    shape = (*bias.shape[:3], spec.size("query"), spec.size("key"))
    return jnp.broadcast_to(bias.astype(jnp.float32), shape)


def _needs_bias(form: Linear) -> bool:
    return bool(form.masks) and not _is_causal(form)


def _is_causal(form: Linear) -> bool:
    return (
        len(form.masks) == 1
        and not form.bias
        and causal_offset(form.masks[0].open) == 0
        and form.masks[0].value <= FAR_BELOW
    )


def precisions(spec: AttentionSpec) -> set[str]:
    """Precisions asked for that matter: products of bf16 are exact whatever is asked."""
    pairs = ((spec.qk_type, spec.qk_precision), (spec.probs_type, spec.pv_precision))
    return {name for type_, names in pairs if type_ != "bf16" for name in names}


def matmul_types(spec: AttentionSpec) -> tuple[Any, Any]:
    """Element types the kernel multiplies in, never narrower than the original's."""
    import jax.numpy as jnp

    qk_type = jnp.promote_types(_jnp_type(spec.qk_type), spec.result.dtype)
    if precisions(spec) - {"DEFAULT"}:  # Mosaic multiplies bf16 at default precision only
        return jnp.float32, jnp.float32
    return qk_type, _jnp_type(spec.probs_type)


def _jnp_type(name: str) -> Any:
    import jax.numpy as jnp

    return {"bf16": jnp.bfloat16, "f32": jnp.float32, "f16": jnp.float16}[name]


def block_size(size: int, largest: int) -> int:
    """The largest multiple of 128 up to `largest` that divides `size`."""
    return next(b for b in range(min(largest, size), 0, -128) if size % b == 0)


def shape_reasons(spec: AttentionSpec) -> Iterator[str]:
    """Shapes and types that no kernel here takes."""
    for role in ("query", "key"):
        if spec.size(role) % 128:
            yield f"{spec.size(role)} {role} positions, not a multiple of 128"
    yield from common_reasons(spec)


def common_reasons(spec: AttentionSpec) -> Iterator[str]:
    """What no kernel here multiplies or holds."""
    if {spec.qk_type, spec.probs_type} - {"bf16", "f32"}:
        yield f"matmuls in {spec.qk_type} and {spec.probs_type}"
    if any(argument.dtype.itemsize > 4 for argument in spec.arguments):
        yield "a mask or bias is computed in 64 bits"
    if spec.result.dtype.itemsize > 4:
        yield f"a result in {spec.result.dtype}"
    if len(precisions(spec)) > 1:
        yield "the matmuls ask for different precisions"


def score_reasons(spec: AttentionSpec) -> Iterator[str]:
    """Scores that no kernel here computes, whatever the masks."""
    form = spec.form
    if spec.probs:
        yield "a function is applied to the probabilities"
    if spec.sink:
        yield "the softmax has a sink"
    if spec.statistics:
        yield "the softmax is not normalised"
    if isinstance(form, NotLinear):
        yield f"the score function is not linear in the logit: {form.reason}"
    elif form.bias:
        yield "the score function adds a bias, which may hold values the kernel cannot mask with"
    elif form.scale <= 0:
        yield f"the scale {form.scale} is not positive"


def _depth_reasons(spec: AttentionSpec) -> Iterator[str]:
    depth, value_depth = spec.size("depth"), spec.size("value_depth")
    if depth != value_depth:
        yield f"depth {depth} of q and k differs from depth {value_depth} of v"
    if depth > 128 and depth % 128:
        yield f"depth {depth} is larger than 128 and not a multiple of it"


def _mask_reasons(form: Linear) -> Iterator[str]:
    if len(form.masks) > 1:
        yield "the score function applies several masks"
    if _needs_bias(form):
        mask = form.masks[0]
        if mask.value == -math.inf:
            yield "a mask that is not causal writes -inf, with which a row may have no maximum"
        if not mask.additive and mask.value > FAR_BELOW:
            yield f"a mask writes {mask.value:g}, which is not far below every logit"
