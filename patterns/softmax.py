"""Recognises softmax: exponentials divided by their own sum along one axis.

The algebra: `exp(x - m) / sum(exp(x - m))`, where `m` does not vary along the axis and therefore
cancels. Whether the division is a division or a product with a reciprocal, and what broadcasts,
reshapes and converts stand in between, is immaterial.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxlib.mlir import ir

from hlo_opt.ir.index import (
    LAYOUT_OPS,
    DynamicShape,
    Index,
    Opaque,
    Space,
    Split,
    pull_back,
    shape_of,
)
from hlo_opt.ir.walk import defining_op, ops_between, reduction, splat


@dataclass(frozen=True)
class Softmax:
    """A softmax of `x` along `axis`.

    Attributes:
      x: what the softmax is taken of.
      exponential: result of the exponential; its element type is the type softmax is computed in.
      result: the normalised probabilities (result of the division), same shape as `x`; the
        exponential where `total` is given.
      axis: dimension of `x`.
      total: the sum of the exponentials, where nothing is divided by it before the matmul.
      maximum: the row maximum that is subtracted, if any, where `total` is given.
      sink: one more column of the softmax, of size 1 along `axis`, that `result` leaves out.
    """

    x: ir.Value
    exponential: ir.Value
    result: ir.Value
    axis: int
    total: ir.Value | None = None
    maximum: ir.Value | None = None
    sink: ir.Value | None = None


@dataclass(frozen=True)
class Refusal:
    """Why something that looks like a structure is not taken for one.

    Attributes:
      reason: in words a model author understands.
      op: the op that broke the match.
    """

    reason: str
    op: ir.Operation


def match_softmax(exp: ir.Operation) -> Softmax | Refusal | None:
    """Recognises the softmax around a `stablehlo.exponential`.

    Returns:
      the match; a refusal where the exponentials are divided by their sum but it is not a softmax;
      None where this exponential has nothing to do with one.
    """
    exponential = exp.results[0]
    if not isinstance(exponential.type, ir.RankedTensorType) or not exponential.type.rank:
        return None
    try:
        return _match(exp, exponential)
    except DynamicShape:
        return Refusal("a shape is dynamic", exp)


def _match(exp: ir.Operation, exponential: ir.Value) -> Softmax | Refusal | None:
    for result, find_sum, factor in _divisions(exponential):
        axis = _reduced_axis(find_sum, factor, exponential)
        if axis is not None:
            x = _without_row_maxima(exp.operands[0], axis)
            return x if isinstance(x, Refusal) else Softmax(x, exponential, result, axis)
    return None


@dataclass(frozen=True)
class _Statistic:
    """How a row statistic is spelled: a reduction, and what may be done to its result.

    Attributes:
      combine, initial: the reducing op and what it starts from.
      inverted: the reciprocal of the reduction is meant.
    """

    combine: str
    initial: float
    inverted: bool = False

    def strip(self, value: ir.Value) -> ir.Value | None:
        """The reduction's result, given the statistic without its broadcast; None if it is not."""
        op = defining_op(value)
        if op is None:
            return None
        if self.inverted:
            return op.operands[1] if op.name == _DIVIDE and splat(op.operands[0]) == 1 else None
        if self == _MAXIMUM and op.name == "stablehlo.select":
            # Where the maximum is not finite, zero is subtracted; the softmax is NaN all the same.
            test = defining_op(op.operands[0])
            guards = test is not None and test.name == "stablehlo.is_finite"
            guards = guards and test.operands[0] == op.operands[1]  # type: ignore[union-attr]
            return op.operands[1] if guards and splat(op.operands[2]) == 0 else None
        if self == _MAXIMUM and op.name == "stablehlo.maximum":
            lowest = [splat(operand) == self.initial for operand in op.operands]
            return op.operands[lowest.index(False)] if lowest.count(True) == 1 else None
        return value


_DIVIDE = "stablehlo.divide"
_MAXIMUM = _Statistic("stablehlo.maximum", float("-inf"))
_SUM = _Statistic("stablehlo.add", 0.0)
_RECIPROCAL_SUM = _Statistic("stablehlo.add", 0.0, inverted=True)


def _divisions(value: ir.Value) -> Iterator[tuple[ir.Value, _Statistic, ir.Value]]:
    """Results of dividing `value` by something of its shape; what that must be, and what it is."""
    for use in value.uses:
        op = use.owner.operation
        if op.name == "stablehlo.convert":
            yield from _divisions(op.results[0])
        elif op.name == _DIVIDE and use.operand_number == 0:
            yield op.results[0], _SUM, op.operands[1]
        elif op.name == "stablehlo.multiply":
            yield op.results[0], _RECIPROCAL_SUM, op.operands[1 - use.operand_number]


def _follow(value: ir.Value, index: list[Index], space: Space) -> tuple[ir.Value, list[Index]]:
    """Where an element comes from, through layout ops, converts and what keeps a row statistic."""
    while (op := defining_op(value)) is not None:
        if op.name in LAYOUT_OPS:
            try:
                index = pull_back(op, index, space)
            except Opaque:
                break
            value = op.operands[0]
        elif op.name == "stablehlo.convert":
            value = op.operands[0]
        else:
            break
    return value, index


def match_partial(exp: ir.Operation) -> Softmax | None:
    """Recognises exponentials that are summed along an axis, but not divided by their sum.

    `x` less its own maximum along the axis, or plain `x`.
    """
    exponential = exp.results[0]
    try:
        for op in _sums(exponential):
            (axis,) = reduction(op)[1]  # type: ignore[index]
            x = _without_row_maxima(exp.operands[0], axis)
            if isinstance(x, Refusal):
                return None
            maximum = _row_maximum(exp.operands[0], x)
            return Softmax(x, exponential, exponential, axis, op.results[0], maximum)
    except DynamicShape:
        pass
    return None


def _sums(value: ir.Value) -> Iterator[ir.Operation]:
    """Sums of a tensor along one dimension, seen through converts."""
    for use in value.uses:
        op = use.owner.operation
        if op.name == "stablehlo.convert":
            yield from _sums(op.results[0])
        kind = reduction(op)
        if (
            kind is not None
            and kind[0] == _SUM.combine
            and len(kind[1]) == 1
            and splat(op.operands[1]) == 0
        ):
            yield op


def _row_maximum(shifted: ir.Value, x: ir.Value) -> ir.Value | None:
    """The reduction whose result is subtracted from `x`, if it is subtracted once and as it is."""
    op = defining_op(shifted)
    if op is None or op.name != "stablehlo.subtract" or op.operands[0] != x:
        return None
    op = defining_op(op.operands[1])
    while op is not None and op.name in (*LAYOUT_OPS, "stablehlo.convert"):
        op = defining_op(op.operands[0])
    return op.results[0] if op is not None and op.name == "stablehlo.reduce" else None


def cut_sink(softmax: Softmax) -> Softmax:
    """A softmax of logits with one more column that is cut off again, as one with a sink."""
    joined = defining_op(softmax.x)
    if joined is None or joined.name != "stablehlo.concatenate" or len(joined.operands) != 2:
        return softmax
    if ir.IntegerAttr(joined.attributes["dimension"]).value != softmax.axis:
        return softmax
    sizes = [shape_of(operand)[softmax.axis] for operand in joined.operands]
    if 1 not in sizes:
        return softmax
    place = 1 if sizes[1] == 1 else 0
    uses = list(softmax.result.uses)
    cut = uses[0].owner.operation if len(uses) == 1 else None
    while cut is not None and cut.name == "stablehlo.convert":
        uses = list(cut.results[0].uses)
        cut = uses[0].owner.operation if len(uses) == 1 else None
    if cut is None or cut.name != "stablehlo.slice":
        return softmax
    first = 1 - place if place == 0 else 0
    starts = list(ir.DenseI64ArrayAttr(cut.attributes["start_indices"]))
    wanted = shape_of(joined.operands[1 - place])
    if shape_of(cut.results[0]) != wanted or starts[softmax.axis] != first:
        return softmax
    return replace(
        softmax, x=joined.operands[1 - place], sink=joined.operands[place], result=cut.results[0]
    )


def _reduced_axis(statistic: _Statistic, value: ir.Value, of: ir.Value) -> int | None:
    """The dimension of `of` along which `value`, of its shape, repeats the statistic of `of`."""
    space = Space()
    start = [space.new(size) for size in shape_of(of)]
    while True:
        try:
            return _reduced_axis_at(statistic, value, of, [space.refine(i) for i in start], space)
        except Split as request:
            space.split(request)


def _reduced_axis_at(
    statistic: _Statistic, value: ir.Value, of: ir.Value, index: list[Index], space: Space
) -> int | None:
    row, row_index = _follow(value, list(index), space)
    stripped = statistic.strip(row)
    if stripped is None:
        return None
    row, row_index = _follow(stripped, row_index, space)
    op = defining_op(row)
    kind = reduction(op) if op is not None else None
    if op is None or kind is None or kind[0] != statistic.combine or len(kind[1]) != 1:
        return None
    if splat(op.operands[1]) != statistic.initial:
        return None
    kept = {atom for part in row_index for atom in part.atoms}
    axes = [d for d, part in enumerate(index) if part.terms and not kept & set(part.atoms)]
    if len(axes) != 1:
        return None
    if shape_of(op.operands[0])[kind[1][0]] != shape_of(of)[axes[0]]:
        return None  # a part of it
    row_index.insert(kind[1][0], index[axes[0]])
    same = _follow(op.operands[0], row_index, space) == _follow(of, list(index), space)
    return axes[0] if same else None


def _without_row_maxima(value: ir.Value, axis: int) -> ir.Value | Refusal:
    """`_without_row_maximum` as often as one is subtracted."""
    x = _without_row_maximum(value, axis)
    while not isinstance(x, Refusal) and x != value:
        value = x
        x = _without_row_maximum(value, axis)
        if isinstance(x, Refusal):
            return value
    return x


def _without_row_maximum(value: ir.Value, axis: int) -> ir.Value | Refusal:
    """`x` where `value` is `x - broadcast(m)` and `m` is the maximum of `x` along `axis`."""
    op = defining_op(value)
    if op is None or op.name != "stablehlo.subtract":
        return value
    x, statistic = op.operands[0], op.operands[1]
    if _reduced_axis(_MAXIMUM, statistic, x) == axis:
        return x
    space = Space()
    index = [space.new(size) for size in shape_of(statistic)]
    try:
        _, kept = _follow(statistic, list(index), space)
    except Split:
        return value
    if index[axis].atoms and not any(set(i.atoms) & set(index[axis].atoms) for i in kept):
        return Refusal("what is subtracted before the exponential is not the row maximum", op)
    return value


def softmax_ops(match: Softmax) -> tuple[ir.Operation, ...] | Refusal:
    """All ops between `x` and the result, operands before users; a refusal where one is not ours.

    A softmax whose exponentials or sums are used elsewhere is left alone.
    """
    last = defining_op(match.result)
    assert last is not None
    inside = ops_between(last, [match.x])
    ours = set(inside)
    dependent: set[ir.Operation] = set()
    for op in inside:
        fed = any(o == match.x or defining_op(o) in dependent for o in op.operands)
        if op.block != last.block and op.name != "stablehlo.constant":
            return Refusal("the softmax is spread over several blocks", op)
        if not fed:
            continue
        dependent.add(op)
        if op != last and any(use.owner.operation not in ours for use in op.results[0].uses):
            return Refusal("an intermediate result of the softmax is also used elsewhere", op)
    return inside
