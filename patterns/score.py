"""What a captured score function is, for kernels that need to know: scale, masks, bias.

The score function of an `hlo_opt.attention` is interpreted over an abstract domain: what depends
on the logit is `scale * logit` plus masks and a bias; indices are affine; predicates on indices
are inequalities. Causality is derived from the inequality, never assumed from a mask's presence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
from jaxlib.mlir import ir

from hlo_opt.ir.signature import numpy_dtype
from hlo_opt.ir.walk import direction, element_type, is_bool, scalar, splat_attribute

INDEX_NAMES = ("batch", "head", "query", "key")
# Masks at or below this value leave no weight next to an unmasked logit of any sane size.
FAR_BELOW = -1e8


@dataclass(frozen=True)
class AtLeast:
    """`sum(coefficient * index) + offset >= 0` over integer indices.

    A scalar extra that counts as an index (see `analyse`) is called `extra0`, `extra1`, ….
    """

    terms: tuple[tuple[str, int], ...]
    offset: int

    def negated(self) -> AtLeast:
        return AtLeast(tuple((n, -c) for n, c in self.terms), -self.offset - 1)


@dataclass(frozen=True)
class Data:
    """A predicate or number that depends on extras, or that is not understood further."""


@dataclass(frozen=True)
class Both:
    """Conjunction of predicates."""

    parts: tuple[AtLeast | Data, ...]


Predicate = AtLeast | Data | Both


@dataclass(frozen=True)
class Mask:
    """Where `open` does not hold, the logit becomes `value`, or `value` is added to it."""

    open: Predicate
    value: float
    additive: bool


@dataclass(frozen=True)
class Linear:
    """A score of the form `scale * logit + bias`, then masked; masks apply in order.

    Attributes:
      bias: whether something other than a mask is added.
    """

    scale: float
    bias: bool = False
    masks: tuple[Mask, ...] = ()


@dataclass(frozen=True)
class NotLinear:
    """The score is another function of the logit; `reason` says which."""

    reason: str


@dataclass(frozen=True)
class _Affine:
    terms: tuple[tuple[str, int], ...]
    offset: int


@dataclass(frozen=True)
class _Choice:
    """`yes` where the predicate holds, `no` elsewhere; both constant."""

    predicate: Predicate
    yes: float
    no: float


@dataclass(frozen=True)
class _Terms:
    """A sum of additive masks, each 0 where it is open, and of a bias if `bias`."""

    masks: tuple[Mask, ...]
    bias: bool


_Value = Linear | NotLinear | _Affine | _Choice | _Terms | Data | AtLeast | Both | float


def analyse(function: ir.Operation, scalars: Collection[int] = ()) -> Linear | NotLinear:
    """Describes a score (or probs) function; see `docs/composites.md` for its arguments.

    Args:
      scalars: numbers of the extras that are rank-0 operands of the composite: integers among them
        are followed like indices.
    """
    block = function.regions[0].blocks[0]
    arguments = list(block.arguments)
    values: dict[ir.Value, _Value] = {argument: Data() for argument in arguments}
    values[arguments[0]] = Linear(1.0)
    for name, argument in zip(INDEX_NAMES, arguments[-4:], strict=True):
        values[argument] = _Affine(((name, 1),), 0)
    for extra in scalars:
        if holds_indices(element_type(arguments[1 + extra])):
            values[arguments[1 + extra]] = _Affine(((f"extra{extra}", 1),), 0)
    for op in block.operations:
        if op.operation.name == "func.return":
            result = values[op.operands[0]]
            return result if isinstance(result, Linear | NotLinear) else NotLinear("a constant")
        values[op.results[0]] = _interpret(op.operation, [values[o] for o in op.operands])
    return NotLinear("no result")


def _interpret(op: ir.Operation, operands: list[_Value]) -> _Value:
    for operand in operands:
        if isinstance(operand, NotLinear):
            return operand
    rule = _RULES.get(op.name)
    result = rule(op, operands) if rule is not None else None
    if result is not None:
        return result
    if any(isinstance(operand, Linear) for operand in operands):
        return NotLinear(_NAMES.get(op.name, f"{op.name.removeprefix('stablehlo.')} of the logit"))
    return Data()


_NAMES = {"stablehlo.tanh": "a soft cap (tanh)"}


def _constant(op: ir.Operation, operands: list[_Value]) -> _Value | None:
    attribute = splat_attribute(op)
    number = scalar(attribute.get_splat_value()) if attribute is not None else None
    return float(number) if number is not None else None


def _convert(op: ir.Operation, operands: list[_Value]) -> _Value | None:
    (value,) = operands
    after = element_type(op.results[0])
    if isinstance(value, Linear):
        return value if isinstance(after, ir.FloatType) else None
    if isinstance(value, _Terms):
        return value if isinstance(after, ir.F32Type) else None
    if is_bool(op.results[0]):
        return None
    if isinstance(value, _Affine):
        return value if holds_indices(after) else None
    if isinstance(value, AtLeast | Both):
        return _Choice(value, 1.0, 0.0)
    if isinstance(value, _Choice):
        yes, no = _rounded(value.yes, after), _rounded(value.no, after)
        return _Choice(value.predicate, yes, no) if yes is not None and no is not None else None
    return _rounded(value, after) if isinstance(value, float) else None


def holds_indices(type_: ir.Type | None) -> bool:
    """Whether indices and their differences are exact: narrow and unsigned types wrap or round."""
    if isinstance(type_, ir.IntegerType):
        return type_.width >= 32 and not type_.is_unsigned
    return isinstance(type_, ir.FloatType) and type_.width >= 32


def _rounded(value: float, type_: ir.Type) -> float | None:
    """A constant converted to a float type, or to an integer type that holds it exactly."""
    if isinstance(type_, ir.FloatType):
        dtype = numpy_dtype(type_)
        return float(np.asarray(value).astype(dtype)) if dtype is not None else None
    return value if value.is_integer() and 0 <= value <= 127 else None


def _number(value: _Value) -> float | None:
    return value if isinstance(value, float) else None


def _multiply(op: ir.Operation, operands: list[_Value]) -> _Value | None:
    left, right = operands
    if isinstance(left, float):
        left, right = right, left
    factor = _number(right)
    return _scaled(left, factor) if factor is not None else None


def _divide(op: ir.Operation, operands: list[_Value]) -> _Value | None:
    left, right = operands
    divisor = _number(right)
    if not isinstance(left, Linear) or not divisor:
        return None
    return _scaled(left, 1.0 / divisor)


def _negate(op: ir.Operation, operands: list[_Value]) -> _Value | None:
    return _scaled(operands[0], -1.0)


def _scaled(value: _Value, factor: float) -> _Value | None:
    if isinstance(value, Linear):
        masks = tuple(replace(m, value=m.value * factor) for m in value.masks)
        return replace(value, scale=value.scale * factor, masks=masks)
    if isinstance(value, _Affine) and factor.is_integer():
        k = int(factor)
        return _Affine(tuple((n, c * k) for n, c in value.terms), value.offset * k)
    if isinstance(value, _Choice):
        return _Choice(value.predicate, value.yes * factor, value.no * factor)
    return value * factor if isinstance(value, float) else None


def _add(op: ir.Operation, operands: list[_Value]) -> _Value | None:
    left, right = operands
    if isinstance(right, Linear):
        left, right = right, left
    if isinstance(left, Linear):
        return _shifted(left, right)
    if isinstance(left, float | _Affine) and isinstance(right, float | _Affine):
        return _sum(_affine(left), _affine(right))
    if not isinstance(element_type(op.results[0]), ir.F32Type | ir.BF16Type):
        return None  # closed masks may add up to another number than in f32
    terms = [_terms(value) for value in operands]
    if any(term.masks for term in terms):
        masks = tuple(mask for term in terms for mask in term.masks)
        return _Terms(masks, any(term.bias for term in terms))
    return None


def _terms(value: _Value) -> _Terms:
    """What does not depend on the logit, as something that is added to it."""
    if isinstance(value, _Terms):
        return value
    if isinstance(value, _Choice) and value.yes == 0.0:
        return _Terms((Mask(value.predicate, value.no, True),), False)
    return _Terms((), value != 0.0)


def _subtract(op: ir.Operation, operands: list[_Value]) -> _Value | None:
    left, right = operands
    opposite = _scaled(right, -1.0)
    if opposite is not None:
        return _add(op, [left, opposite])
    return replace(left, bias=True) if isinstance(left, Linear) else None


def _shifted(logit: Linear, other: _Value) -> _Value | None:
    """The logit plus something that does not depend on it."""
    if isinstance(other, Linear):
        return NotLinear("the logit used twice")
    if other == 0.0:
        return logit
    if isinstance(other, _Terms):
        return replace(logit, masks=(*logit.masks, *other.masks), bias=logit.bias or other.bias)
    if isinstance(other, _Choice) and other.yes == 0.0:
        return replace(logit, masks=(*logit.masks, Mask(other.predicate, other.no, True)))
    return replace(logit, bias=True)


def _affine(value: float | _Affine) -> _Affine | None:
    if isinstance(value, _Affine):
        return value
    return _Affine((), int(value)) if value.is_integer() else None


def _sum(left: _Affine | None, right: _Affine | None) -> _Value | None:
    if left is None or right is None:
        return None
    terms = dict(left.terms)
    for name, coefficient in right.terms:
        terms[name] = terms.get(name, 0) + coefficient
    kept = tuple(sorted((n, c) for n, c in terms.items() if c))
    offset = left.offset + right.offset
    return _Affine(kept, offset) if kept else float(offset)


def _compare(op: ir.Operation, operands: list[_Value]) -> _Value | None:
    left, right = operands
    if not isinstance(left, float | _Affine) or not isinstance(right, float | _Affine):
        return None
    a, b = _affine(left), _affine(right)
    which = direction(op)
    if which in ("LE", "LT"):
        a, b = b, a
    if a is None or b is None or which in ("EQ", "NE"):
        return None
    difference = _sum(a, _Affine(tuple((n, -c) for n, c in b.terms), -b.offset))
    if not isinstance(difference, _Affine):
        return None
    strict = which in ("LT", "GT")
    return AtLeast(difference.terms, difference.offset - strict)


def _and(op: ir.Operation, operands: list[_Value]) -> _Value | None:
    parts: list[AtLeast | Data] = []
    for operand in operands:
        if isinstance(operand, Both):
            parts.extend(operand.parts)
        elif isinstance(operand, AtLeast | Data):
            parts.append(operand)
        else:
            return None
    return Both(tuple(dict.fromkeys(parts)))


def _not(op: ir.Operation, operands: list[_Value]) -> _Value | None:
    (value,) = operands
    return value.negated() if isinstance(value, AtLeast) else None


def _select(op: ir.Operation, operands: list[_Value]) -> _Value | None:
    predicate, yes, no = operands
    if not isinstance(predicate, AtLeast | Both | Data):
        return None
    if isinstance(yes, Linear) and isinstance(no, float):
        return replace(yes, masks=(*yes.masks, Mask(predicate, no, False)))
    if isinstance(no, Linear) and isinstance(yes, float):
        opposite = predicate.negated() if isinstance(predicate, AtLeast) else Data()
        return replace(no, masks=(*no.masks, Mask(opposite, yes, False)))
    if isinstance(yes, float) and isinstance(no, float):
        if is_bool(op.results[0]) and (yes, no) == (1.0, 0.0):
            return predicate
        if no == 0.0 and yes != 0.0:
            opposite = predicate.negated() if isinstance(predicate, AtLeast) else Data()
            return _Choice(opposite, no, yes)
        return _Choice(predicate, yes, no)
    return None


_RULES: dict[str, Callable[[ir.Operation, list[_Value]], _Value | None]] = {
    "stablehlo.add": _add,
    "stablehlo.and": _and,
    "stablehlo.compare": _compare,
    "stablehlo.constant": _constant,
    "stablehlo.convert": _convert,
    "stablehlo.divide": _divide,
    "stablehlo.multiply": _multiply,
    "stablehlo.negate": _negate,
    "stablehlo.not": _not,
    "stablehlo.select": _select,
    "stablehlo.subtract": _subtract,
}


@dataclass(frozen=True)
class Bound:
    """Keys behind `sum(extras) + offset` are masked away, `query` added where `by_query`.

    Attributes:
      extras: numbers of rank-0 extras.
    """

    extras: tuple[int, ...]
    offset: int
    by_query: bool


def key_bounds(score: Linear) -> list[Bound]:
    """The positions behind which a mask closes every key for good."""
    masks: list[Mask] = []
    for mask in score.masks:
        if not mask.additive and mask.value > FAR_BELOW:
            masks.clear()  # it may write over closed keys
        masks.append(mask)
    parts = [
        part
        for mask in masks
        if mask.value <= FAR_BELOW
        for part in (mask.open.parts if isinstance(mask.open, Both) else (mask.open,))
        if isinstance(part, AtLeast)
    ]
    bounds = []
    for part in parts:
        terms = dict(part.terms)
        query = terms.pop("query", 0)
        extras = all(n.startswith("extra") and c == 1 for n, c in terms.items() if n != "key")
        if terms.pop("key", 0) == -1 and query in (0, 1) and terms and extras:
            numbers = tuple(int(name.removeprefix("extra")) for name in terms)
            bounds.append(Bound(numbers, part.offset, bool(query)))
    return bounds


def reach(predicate: Predicate) -> tuple[int | None, int | None] | None:
    """`(left, right)` where the predicate is exactly `query - left <= key <= query + right`.

    None stands for a side without a limit, and for any other predicate.
    """
    limits: dict[int, int] = {}
    for part in predicate.parts if isinstance(predicate, Both) else (predicate,):
        if not isinstance(part, AtLeast):
            return None
        terms = dict(part.terms)
        side = terms.get("query", 0)
        if terms != {"query": side, "key": -side} or abs(side) != 1:
            return None
        limits[side] = min(part.offset, limits.get(side, part.offset))
    return limits.get(-1), limits.get(1)


def causal_offset(predicate: Predicate) -> int | None:
    """`c` where the predicate is exactly `key <= query + c`; None where it is anything else."""
    limits = reach(predicate)
    return limits[1] if limits is not None and limits[0] is None else None


def describe(score: Linear | NotLinear) -> str:
    """The score in a few words, for remarks."""
    if isinstance(score, NotLinear):
        return score.reason
    words = [] if score.scale == 1.0 else [f"scale {score.scale:.4g}"]
    words += [_describe_mask(mask) for mask in score.masks]
    if score.bias:
        words.append("bias")
    return ", ".join(words)


def _describe_mask(mask: Mask) -> str:
    parts = mask.open.parts if isinstance(mask.open, Both) else (mask.open,)
    words = []
    for part in parts:
        if isinstance(part, Data):
            words.append("mask from data")
        elif (offset := causal_offset(part)) is not None:
            words.append("causal" if offset == 0 else f"causal offset {offset:+d}")
        elif dict(part.terms) == {"query": -1, "key": 1}:
            words.append(f"window {part.offset + 1}")
        else:
            words.append("mask on positions")
    return " and ".join(words)


def is_homogeneous(function: ir.Operation, guards_only: bool = False) -> bool:
    """Whether `f(c * x) = c * f(x)` for the first argument of a captured function and any c > 0.

    So that `probs` may be applied to probabilities that are not yet normalised.

    Args:
      guards_only: whether `f(x)` is moreover either `x` or zero, whatever `x` is (NaN, too).
    """
    block = function.regions[0].blocks[0]
    multiples = {block.arguments[0]}
    zeros: set[ir.Value] = set()
    dependent = {block.arguments[0]}
    for op in block.operations:
        operands = list(op.operands)
        if op.operation.name == "func.return":
            return operands[0] in multiples
        if op.operation.name == "stablehlo.constant" and _constant(op.operation, []) == 0.0:
            zeros.add(op.results[0])
        if op.operation.name == "stablehlo.convert" and operands[0] in zeros:
            zeros.add(op.results[0])
        if any(operand in dependent for operand in operands):
            dependent.add(op.results[0])
            allowed = not guards_only or op.operation.name in _GUARDS
            if allowed and _keeps_multiples(op.operation, operands, multiples, zeros, dependent):
                multiples.add(op.results[0])
    return False


_GUARDS = ("stablehlo.select", "stablehlo.convert")


def _keeps_multiples(
    op: ir.Operation,
    operands: list[ir.Value],
    multiples: set[ir.Value],
    zeros: set[ir.Value],
    dependent: set[ir.Value],
) -> bool:
    """Whether an op with a dependent operand gives a multiple of the argument."""
    either = [operand in multiples or operand in zeros for operand in operands]
    free = [operand not in dependent for operand in operands]
    match op.name:
        case "stablehlo.multiply":
            return (operands[0] in multiples and free[1]) or (operands[1] in multiples and free[0])
        case "stablehlo.divide":
            return operands[0] in multiples and free[1]
        case "stablehlo.select":
            return free[0] and either[1] and either[2]
        case "stablehlo.add" | "stablehlo.subtract":
            return all(either)
        case "stablehlo.convert":
            return either[0] and isinstance(element_type(op.results[0]), ir.FloatType)
        case "stablehlo.negate":
            return either[0]
    return False
