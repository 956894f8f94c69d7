"""Recognises softmax: exponentials divided by their own sum along one axis.

The algebra: `exp(x - m) / sum(exp(x - m))`, where `m` does not vary along the axis and therefore
cancels. Whether the division is a division or a product with a reciprocal, and what broadcasts,
reshapes and converts stand in between, is immaterial.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxlib.mlir import ir

from hlo_opt.ir.index import Index, Opaque, Space, Split, pull_back, shape_of
from hlo_opt.ir.walk import defining_op, ops_between, reduction, splat


@dataclass(frozen=True)
class Softmax:
    """A softmax of `x` along `axis`.

    Attributes:
      x: what the softmax is taken of.
      exponential: result of the exponential; its element type is the type softmax is computed in.
      result: the normalised probabilities (result of the division), same shape as `x`.
      axis: dimension of `x`.
    """

    x: ir.Value
    exponential: ir.Value
    result: ir.Value
    axis: int


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
      the match; a refusal where the exponentials are summed and divided but it is not a softmax;
      None where this exponential has nothing to do with one.
    """
    exponential = exp.results[0]
    if not isinstance(exponential.type, ir.RankedTensorType) or not shape_of(exponential):
        return None
    total = _sum_of(exponential)
    if total is None:
        return None
    sum_op, axis = total
    result = _quotient(exponential, sum_op.results[0], axis)
    if result is None:
        return None
    x = _without_row_statistic(exp.operands[0], axis)
    if isinstance(x, Refusal):
        return x
    return Softmax(x, exponential, result, axis)


def _sum_of(value: ir.Value) -> tuple[ir.Operation, int] | None:
    """The op that sums `value` along one dimension, and that dimension."""
    for use in value.uses:
        op = use.owner.operation
        if op.name == "stablehlo.convert":
            if (found := _sum_of(op.results[0])) is not None:
                return found
        elif (kind := reduction(op)) is not None:
            name, dims = kind
            if name == "stablehlo.add" and len(dims) == 1 and splat(op.operands[1]) == 0:
                return op, dims[0]
    return None


def _quotient(exponential: ir.Value, total: ir.Value, axis: int) -> ir.Value | None:
    """The value that is `exponential` divided by the broadcast `total`."""
    for use in exponential.uses:
        op = use.owner.operation
        if op.name == "stablehlo.convert":
            if (found := _quotient(op.results[0], total, axis)) is not None:
                return found
        elif op.name == "stablehlo.divide" and use.operand_number == 0:
            if row_source(op.operands[1], axis) == total:
                return op.results[0]
        elif op.name == "stablehlo.multiply":
            other = row_source(op.operands[1 - use.operand_number], axis)
            inverse = defining_op(other) if other is not None else None
            if (
                inverse is not None
                and inverse.name == "stablehlo.divide"
                and splat(inverse.operands[0]) == 1
                and _through_converts(inverse.operands[1]) == total
            ):
                return op.results[0]
    return None


def _through_converts(value: ir.Value) -> ir.Value:
    while (op := defining_op(value)) is not None and op.name == "stablehlo.convert":
        value = op.operands[0]
    return value


def row_source(value: ir.Value, axis: int) -> ir.Value | None:
    """The value without dimension `axis` that `value` repeats along `axis`, or None.

    The source has the other dimensions of `value` in their order (or with extra unit dimensions);
    layout ops and converts in between are looked through.
    """
    space = Space()
    index = [space.new(size) for size in shape_of(value)]
    wanted = [part for dim, part in enumerate(index) if dim != axis]
    while (op := defining_op(value)) is not None:
        if op.name == "stablehlo.convert":
            value = op.operands[0]
            continue
        try:
            index = pull_back(op, index, space)
        except (Opaque, Split):
            break
        value = op.operands[0]
        # A value of higher rank still carries inserted unit dimensions.
        if len(shape_of(value)) == len(wanted) and _same_dims(index, wanted):
            return _through_converts(value)
    return None


def _same_dims(left: list[Index], right: list[Index]) -> bool:
    return [i for i in left if i.terms] == [i for i in right if i.terms]


def _without_row_statistic(value: ir.Value, axis: int) -> ir.Value | Refusal:
    """`x` where `value` is `x - broadcast(m)` and `m` comes from the maximum of `x`."""
    op = defining_op(value)
    if op is None or op.name != "stablehlo.subtract":
        return value
    x = op.operands[0]
    row = row_source(op.operands[1], axis)
    if row is None:
        return value
    if not _is_row_maximum(row, x, axis):
        return Refusal("what is subtracted before the exponential is not the row maximum", op)
    return x


def _is_row_maximum(row: ir.Value, x: ir.Value, axis: int) -> bool:
    """Whether `row` is the maximum of `x` along `axis`, possibly raised to a constant."""
    op = defining_op(_through_converts(row))
    if op is None:
        return False
    if op.name == "stablehlo.maximum":
        left, right = op.operands[0], op.operands[1]
        lowest = [splat(left), splat(right)]
        if float("-inf") not in lowest:
            return False
        return _is_row_maximum(right if lowest[0] is not None else left, x, axis)
    if op.name in ("stablehlo.reshape", "stablehlo.broadcast_in_dim"):
        return shape_of(op.operands[0]) == [s for s in shape_of(op.results[0]) if s != 1] and (
            _is_row_maximum(op.operands[0], x, axis)
        )
    kind = reduction(op)
    return (
        kind == ("stablehlo.maximum", [axis])
        and _through_converts(op.operands[0]) == _through_converts(x)
        and splat(op.operands[1]) == float("-inf")
    )


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
