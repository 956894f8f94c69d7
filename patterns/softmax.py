"""Recognises softmax: exponentials divided by their own sum along one axis.

The algebra: `exp(x - m) / sum(exp(x - m))`, where `m` does not vary along the axis and therefore
cancels. Whether the division is a division or a product with a reciprocal, and what broadcasts,
reshapes and converts stand in between, is immaterial. A term `exp(s - m)` added to the sum is one
more logit `s` of the row without a value: a sink. Any base above one is as good as e.
"""

from __future__ import annotations

import math
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
from hlo_opt.ir.walk import (
    defining_op,
    direction,
    element_type,
    is_float_convert,
    ops_between,
    reduction,
    splat,
)

# What a sink is: a tensor's element, or a number.
Sink = tuple[ir.Value, list[Index]] | float


@dataclass(frozen=True)
class Softmax:
    """A softmax of `factor * x` along `axis`.

    Attributes:
      x: what the softmax is taken of.
      exponential: result of the exponential; its element type is the type softmax is computed in.
      result: the normalised probabilities (result of the division), same shape as `x`; the
        exponentials themselves where they are not normalised here (see `match_exponentials`).
      axis: dimension of `x`.
      maxima: what was subtracted, in the shape of `x`, outermost first.
      factor: above zero; not 1 where the exponential has another base than e.
      total: the sum of the exponentials where they are not normalised here.
      denominator: what the exponentials are divided by (multiplied by, if `inverted`).
      sink: whether the denominator has another term (`sink_of` tells which).
      column: a sink that is one more column of the exponentials, cut off behind the softmax.
      shift: how far that column moves the others along the axis: 1 where it is the first.
    """

    x: ir.Value
    exponential: ir.Value
    result: ir.Value
    axis: int
    maxima: tuple[ir.Value, ...] = ()
    factor: float = 1.0
    total: ir.Value | None = None
    denominator: ir.Value | None = None
    inverted: bool = False
    sink: bool = False
    column: ir.Value | None = None
    shift: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether `result` is the softmax of `x` over its axis, and nothing else."""
        return self.factor == 1 and not self.sink and self.total is None


@dataclass(frozen=True)
class Refusal:
    """Why something that looks like a structure is not taken for one.

    Attributes:
      reason: in words a model author understands.
      op: the op that broke the match.
    """

    reason: str
    op: ir.Operation


class No(Exception):
    """Carries a refusal out of a matcher's steps."""

    def __init__(self, reason: str, op: ir.Operation) -> None:
        super().__init__(reason)
        self.refusal = Refusal(reason, op)


# What a softmax's exponential may be.
EXPONENTIALS = ("stablehlo.exponential", "stablehlo.power")


def match_softmax(exp: ir.Operation) -> Softmax | Refusal | None:
    """Recognises the softmax around an exponential (one of `EXPONENTIALS`).

    Returns:
      the match; a refusal where the exponentials are divided by their sum but it is not a softmax;
      None where this exponential has nothing to do with one.
    """
    exponential = exp.results[0]
    if not isinstance(exponential.type, ir.RankedTensorType) or not exponential.type.rank:
        return None
    exponent = _exponent(exp)
    if exponent is None:
        return None
    try:
        return _match(exponential, *exponent)
    except DynamicShape:
        return Refusal("a shape is dynamic", exp)
    except No as no:
        return no.refusal


def match_exponentials(exp: ir.Operation) -> Softmax | Refusal | None:
    """Recognises exponentials that are summed along one axis and not divided by the sum.

    Returns:
      a match with `total`, whose `result` is the exponentials; what `match_softmax` returns.
    """
    exponential = exp.results[0]
    if not isinstance(exponential.type, ir.RankedTensorType) or not exponential.type.rank:
        return None
    exponent = _exponent(exp)
    total = _total(exponential) if exponent is not None else None
    if exponent is None or total is None:
        return None
    try:
        axis = total[1]
        x, maxima, factor = _without_maxima(exponent[0], axis)
    except DynamicShape:
        return Refusal("a shape is dynamic", exp)
    except No as no:
        return no.refusal
    return Softmax(x, exponential, exponential, axis, maxima, factor * exponent[1], total=total[0])


def _exponent(exp: ir.Operation) -> tuple[ir.Value, float] | None:
    """What is exponentiated, and the natural logarithm of the base; None for no exponential."""
    if exp.name != "stablehlo.power":
        return exp.operands[0], 1.0
    base = splat(exp.operands[0])
    if (
        base is None
        or not 1 < base < math.inf
        or not isinstance(element_type(exp.results[0]), ir.FloatType)
    ):
        return None
    return exp.operands[1], math.log(base)


def _total(exponential: ir.Value) -> tuple[ir.Value, int] | None:
    """The result of a sum of the exponentials along one axis, and that axis."""
    for use in exponential.uses:
        op = use.owner.operation
        if is_float_convert(op):
            found = _total(op.results[0])
            if found is not None:
                return found
        kind = reduction(op)
        if kind is None or kind[0] != _SUM.combine or len(kind[1]) != 1:
            continue
        if splat(op.operands[1]) == _SUM.initial:
            return op.results[0], kind[1][0]
    return None


def _match(exponential: ir.Value, exponent: ir.Value, log_base: float) -> Softmax | None:
    for result, find_sum, divisor in _divisions(exponential):
        row = _reduced_axis(find_sum, divisor, exponential)
        if row is None:
            continue
        axis, has_sink, guard = row
        x, maxima, factor = _without_maxima(exponent, axis)
        match = Softmax(
            x,
            exponential,
            result,
            axis,
            maxima,
            factor * log_base,
            denominator=divisor,
            inverted=find_sum.inverted,
            sink=has_sink,
        )
        check_denominator(match, guard)
        if has_sink or any(_row_of(_MAXIMUM, maximum).extra for maximum in maxima):
            _check_sink(match)
        return match
    return None


def check_denominator(match: Softmax, guard: ir.Operation | None) -> None:
    """A guard against small sums changes nothing where the largest exponential is one.

    Raises:
      No: it may change something.
    """
    if guard is None:
        return
    if not match.maxima:
        raise No("the sum of the exponentials is clamped, and no maximum is subtracted", guard)
    if match.sink or match.column is not None:
        raise No("the sum of the exponentials is clamped beside an attention sink", guard)
    for maximum in match.maxima:
        row = _row_of(_MAXIMUM, maximum)
        if row.guard is not None:
            raise No("rows without any key are given a result of their own", guard)
        if element_type(maximum) != element_type(row.reduce.operands[0]) or row.extra is not None:
            raise No("the sum of the exponentials is clamped, and may be below one", guard)


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


@dataclass(frozen=True)
class _Row:
    """A row statistic that was found.

    Attributes:
      reduce: the reduction.
      index: into its result.
      extra: what else is added to the sum, or compared with the maximum.
      guard: the op that changes the reduction's result in special cases only.
    """

    reduce: ir.Operation
    index: list[Index]
    extra: tuple[ir.Value, list[Index]] | None = None
    guard: ir.Operation | None = None


_DIVIDE = "stablehlo.divide"
_MAXIMUM = _Statistic("stablehlo.maximum", float("-inf"))
_SUM = _Statistic("stablehlo.add", 0.0)
_RECIPROCAL_SUM = _Statistic("stablehlo.add", 0.0, inverted=True)


def _divisions(value: ir.Value) -> Iterator[tuple[ir.Value, _Statistic, ir.Value]]:
    """Results of dividing `value` by something of its shape; what that must be, and what it is."""
    for use in value.uses:
        op = use.owner.operation
        if is_float_convert(op):
            yield from _divisions(op.results[0])
        elif op.name == _DIVIDE and use.operand_number == 0:
            yield op.results[0], _SUM, op.operands[1]
        elif op.name == "stablehlo.multiply":
            yield op.results[0], _RECIPROCAL_SUM, op.operands[1 - use.operand_number]


def follow(value: ir.Value, index: list[Index], space: Space) -> tuple[ir.Value, list[Index]]:
    """Where an element comes from, through layout ops, converts and what keeps a row statistic."""
    while (op := defining_op(value)) is not None:
        if op.name in LAYOUT_OPS:
            try:
                index = pull_back(op, index, space)
            except Opaque:
                break
            value = op.operands[0]
        elif is_float_convert(op):
            value = op.operands[0]
        else:
            break
    return value, index


def _row(statistic: _Statistic, value: ir.Value, index: list[Index], space: Space) -> _Row | None:
    """The reduction that an element of `value` is, through what may be done to it."""
    value, index = follow(value, index, space)
    op = defining_op(value)
    if op is None:
        return None
    if statistic.inverted:
        if op.name != _DIVIDE or splat(op.operands[0]) != 1:
            return None
        return _row(replace(statistic, inverted=False), op.operands[1], index, space)
    if op.name == "stablehlo.reduce":
        kind = reduction(op)
        if kind is None or kind[0] != statistic.combine or len(kind[1]) != 1:
            return None
        return _Row(op, index) if splat(op.operands[1]) == statistic.initial else None
    guarded = _unguarded(statistic, op)
    if guarded is not None:
        row = _row(statistic, guarded, index, space)
        return replace(row, guard=op) if row is not None else None
    if op.name == statistic.combine:
        for number, operand in enumerate(op.operands):
            other = op.operands[1 - number]
            if statistic == _MAXIMUM and splat(other) == statistic.initial:
                return _row(statistic, operand, index, space)
            row = _row(statistic, operand, index, space)
            if row is not None and row.extra is None:
                return replace(row, extra=(other, index))
    return None


def _unguarded(statistic: _Statistic, op: ir.Operation) -> ir.Value | None:
    """The operand that a guard passes through in all but special cases, if `op` is a guard.

    For sums these are sums below one, for maxima infinite ones.
    """
    if op.name == "stablehlo.maximum":
        for number, operand in enumerate(op.operands):
            other = splat(op.operands[1 - number])
            lowest = _lowest(operand) if statistic == _MAXIMUM else 1.0
            if other is not None and statistic.initial < other <= lowest:
                return operand
            if other is not None and statistic == _SUM and other <= 0:
                return operand
    if op.name != "stablehlo.select":
        return None
    predicate, yes, no = op.operands
    test = defining_op(predicate)
    if test is None:
        return None
    if test.name == "stablehlo.is_finite" and statistic == _MAXIMUM:
        return yes if test.operands[0] == yes and splat(no) is not None else None
    if test.name != "stablehlo.compare":
        return None
    special = statistic.initial
    if direction(test) == "EQ" and splat(yes) is not None:
        kept = no
    elif direction(test) in ("NE", "GT") and splat(no) is not None:
        kept = yes
    else:
        return None
    return kept if test.operands[0] == kept and splat(test.operands[1]) == special else None


def _lowest(value: ir.Value) -> float:
    """The lowest finite number of a float type (close enough for the narrow ones: above -inf)."""
    type_ = element_type(value)
    if isinstance(type_, ir.F32Type):
        return -3.4028234663852886e38
    if isinstance(type_, ir.BF16Type):
        return -3.3895313892515355e38
    return -65504.0 if isinstance(type_, ir.F16Type) else -math.inf


def _reduced_axis(
    statistic: _Statistic, value: ir.Value, of: ir.Value
) -> tuple[int, bool, ir.Operation | None] | None:
    """The dimension of `of` along which `value`, of its shape, repeats the statistic of `of`.

    Also whether something else enters the statistic, and a guard.
    """
    space = Space()
    start = [space.new(size) for size in shape_of(of)]
    while True:
        try:
            index = [space.refine(i) for i in start]
            row = _row(statistic, value, list(index), space)
            axis = _axis(row, of, index, space) if row is not None else None
            if row is None or axis is None:
                return None
            return axis, row.extra is not None, row.guard
        except Split as request:
            space.split(request)


def _axis(row: _Row, of: ir.Value, index: list[Index], space: Space) -> int | None:
    """The dimension of `of`, at `index`, that a row reduces, if it reduces just that."""
    kept = {atom for part in row.index for atom in part.atoms}
    axes = [d for d, part in enumerate(index) if part.terms and not kept & set(part.atoms)]
    if len(axes) != 1:
        return None
    return axes[0] if _reduces(row, of, index, axes[0], space) else None


def _reduces(row: _Row, of: ir.Value, index: list[Index], axis: int, space: Space) -> bool:
    kind = reduction(row.reduce)
    assert kind is not None
    if shape_of(row.reduce.operands[0])[kind[1][0]] != shape_of(of)[axis]:
        return False  # a part of it
    row_index = list(row.index)
    row_index.insert(kind[1][0], index[axis])
    return follow(row.reduce.operands[0], row_index, space) == follow(of, list(index), space)


def _without_maxima(value: ir.Value, axis: int) -> tuple[ir.Value, tuple[ir.Value, ...], float]:
    """`x`, the maxima and `factor` where `value` is `factor * (x - maxima)`.

    Raises:
      No: something else is subtracted that is constant along the axis.
    """
    maxima: list[ir.Value] = []
    factor = 1.0
    while True:
        inner, scale = _scaled_difference(value)
        op = defining_op(inner)
        if op is None or op.name != "stablehlo.subtract":
            break
        x, statistic = op.operands[0], op.operands[1]
        row = _reduced_axis(_MAXIMUM, statistic, x)
        if row is None or row[0] != axis:
            if _is_constant_along(statistic, axis):
                raise No("what is subtracted before the exponential is not the row maximum", op)
            break
        maxima.append(statistic)
        factor *= scale
        value = x
    return value, tuple(maxima), factor


def _scaled_difference(value: ir.Value) -> tuple[ir.Value, float]:
    """What a value is a positive multiple of, through converts, and the factor."""
    factor = 1.0
    while (op := defining_op(value)) is not None:
        if is_float_convert(op):
            value = op.operands[0]
            continue
        scales = [splat(o) for o in op.operands] if op.name == "stablehlo.multiply" else []
        number = next((n for n, s in enumerate(scales) if s is not None and s > 0), None)
        if number is None or scales[number] == math.inf:
            break
        factor *= scales[number] or 1.0
        value = op.operands[1 - number]
    return value, factor


def _is_constant_along(value: ir.Value, axis: int) -> bool:
    """Whether a tensor visibly repeats along an axis of more than one entry."""
    space = Space()
    index = [space.new(size) for size in shape_of(value)]
    try:
        _, kept = follow(value, list(index), space)
    except Split:
        return False
    atoms = set(index[axis].atoms)
    return bool(atoms) and not any(atoms & set(i.atoms) for i in kept)


def _row_of(statistic: _Statistic, value: ir.Value) -> _Row:
    """The row of a value that is known to be one, in a space of its own."""
    space = Space()
    start = [space.new(size) for size in shape_of(value)]
    while True:
        try:
            row = _row(statistic, value, [space.refine(i) for i in start], space)
        except Split as request:
            space.split(request)
            continue
        assert row is not None
        return row


def maximum_row(
    match: Softmax, index: list[Index], space: Space
) -> tuple[ir.Operation, list[Index]]:
    """The reduction whose result is subtracted from `x` at `index`, as it is, and its index.

    Raises:
      No: there is no such one.
      Split: see `hlo_opt.ir.index`.
    """
    exp = defining_op(match.exponential)
    assert exp is not None
    if len(match.maxima) != 1:
        raise No("the exponentials are not divided by their sum", exp)
    row = _row(_MAXIMUM, match.maxima[0], index, space)
    assert row is not None
    if row.extra is not None or row.guard is not None:
        raise No("what is subtracted from a partial attention is not just the row maximum", exp)
    types = {
        str(element_type(value))
        for value in (match.x, match.maxima[0], row.reduce.operands[0], row.reduce.results[0])
    }
    if len(types) > 1:
        raise No("the maximum of a partial attention is rounded before it is subtracted", exp)
    return row.reduce, row.index


def sum_row(
    match: Softmax,
    denominator: ir.Value,
    inverted: bool,
    at: list[Index],
    exponential_index: list[Index],
    space: Space,
) -> tuple[bool, ir.Operation | None] | None:
    """Whether a denominator has a sink, and its guard, if it is the exponentials' sum.

    Args:
      at: index into the denominator.
      exponential_index: that of an exponential of the row.
    """
    row = _row(_RECIPROCAL_SUM if inverted else _SUM, denominator, at, space)
    if row is None or not _reduces(row, match.exponential, exponential_index, match.axis, space):
        return None
    key = set(exponential_index[match.axis].atoms)
    if any(key & set(part.atoms) for part in row.index):
        return None
    return row.extra is not None, row.guard


def _check_sink(match: Softmax) -> None:
    space = Space()
    start = [space.new(size) for size in shape_of(match.x)]
    while True:
        try:
            index = [space.refine(i) for i in start]
            sink_of(match, index, list(index), space)
            return
        except Split as request:
            space.split(request)


def sink_of(match: Softmax, index: list[Index], at: list[Index], space: Space) -> Sink | None:
    """The sink of the row that `index` (into `x`) stands in.

    Args:
      at: index into the denominator.

    Raises:
      No: the term in the denominator is no sink, or the maximum is that of something else.
      Split: see `hlo_opt.ir.index`.
    """
    exp = defining_op(match.exponential)
    assert exp is not None
    rows = [_row(_MAXIMUM, maximum, list(index), space) for maximum in match.maxima]
    extras = [row.extra for row in rows if row is not None and row.extra is not None]
    if match.column is not None:
        if extras or match.sink:
            raise No("the softmax has two sinks", exp)
        place = list(index)
        place[match.axis] = Index()
        return match.column, place
    sink = _term(match, list(index), at, space) if match.sink else None
    if extras:
        seen = [follow(*extra, space) for extra in extras]
        wanted = follow(*sink, space) if isinstance(sink, tuple) else sink
        if isinstance(wanted, float):
            matches = all(splat(extra[0]) == wanted for extra in extras)
        else:
            matches = all(place == wanted for place in seen)
        if not matches:
            raise No("what is subtracted before the exponential is not the row maximum", exp)
    return sink


def _term(match: Softmax, index: list[Index], at: list[Index], space: Space) -> Sink:
    """The logit `s` whose exponential is added to the denominator."""
    assert match.denominator is not None
    row = _row(_RECIPROCAL_SUM if match.inverted else _SUM, match.denominator, at, space)
    assert row is not None
    assert row.extra is not None
    value, place = follow(*row.extra, space)
    exp = defining_op(match.exponential)
    assert exp is not None
    number = splat(value)
    if number is not None:
        if match.maxima:
            raise No("a constant is added to the sum of the exponentials", exp)
        if not 0 < number < math.inf:
            raise No(f"{number} is added to the sum of the exponentials", exp)
        return math.log(number)
    op = defining_op(value)
    if op is None or op.name != "stablehlo.exponential" or match.factor != 1:
        raise No("what is added to the sum of the exponentials is no exponential", exp)
    if not match.maxima:
        return op.operands[0], place
    if len(match.maxima) > 1:
        raise No("the maximum is subtracted twice beside an attention sink", exp)
    inner, place = follow(op.operands[0], place, space)
    difference = defining_op(inner)
    if difference is not None and difference.name in ("stablehlo.negate", "stablehlo.subtract"):
        subtracted = difference.operands[len(difference.operands) - 1]
        if follow(subtracted, place, space) == follow(match.maxima[0], index, space):
            zero = difference.name == "stablehlo.negate"
            number = 0.0 if zero else splat(difference.operands[0])
            return float(number) if number is not None else (difference.operands[0], place)
    raise No("the attention sink is not shifted by the maximum that the logits are", op)


def without_column(match: Softmax) -> Softmax | Refusal:
    """The softmax over the other logits where one more column, a sink, is cut off behind it."""
    joined, _ = _through_converts(match.x)
    if joined is None or joined.name != "stablehlo.concatenate":
        return match
    if ir.IntegerAttr(joined.attributes["dimension"]).value != match.axis:
        return match
    sizes = [shape_of(operand)[match.axis] for operand in joined.operands]
    if len(sizes) != 2 or 1 not in sizes or match.factor != 1:
        return match
    result, cut = match.result, None
    while cut is None:
        uses = [use.owner.operation for use in result.uses]
        if len(uses) != 1 or not (is_float_convert(uses[0]) or uses[0].name == "stablehlo.slice"):
            if match.total is not None:
                cut = next((op for op in uses if op.name == "stablehlo.slice"), None)
            break
        cut = uses[0] if uses[0].name == "stablehlo.slice" else None
        result = uses[0].results[0]
    if cut is None:
        return match
    # Which of two columns of one the sink is, the cut tells.
    starts = list(ir.DenseI64ArrayAttr(cut.attributes["start_indices"]))
    steps = list(ir.DenseI64ArrayAttr(cut.attributes["strides"]))
    whole, kept = shape_of(cut.operands[0]), shape_of(cut.results[0])
    shift = starts[match.axis]
    starts[match.axis], whole[match.axis] = 0, whole[match.axis] - 1
    if any(starts) or any(step != 1 for step in steps) or kept != whole or shift not in (0, 1):
        return Refusal("the softmax is over more columns than the matmul uses", cut)
    sink = 1 - shift
    if sizes[sink] != 1:
        return Refusal("the column that is cut off behind the softmax is no sink", cut)
    return replace(
        match,
        x=joined.operands[1 - sink],
        result=cut.results[0],
        column=joined.operands[sink],
        shift=shift,
    )


def _through_converts(value: ir.Value) -> tuple[ir.Operation | None, ir.Value]:
    op = defining_op(value)
    while op is not None and is_float_convert(op):
        value = op.operands[0]
        op = defining_op(value)
    return op, value


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
