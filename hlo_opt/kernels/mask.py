"""Mask analysis: what a captured score does to whole tiles of queries and keys.

The score function is evaluated on intervals: of query and key positions in a tile, of extras over
everything they vary over. A tile is *closed* where every logit of it surely ends far below all
others, and *open* where every condition on positions surely has its harmless value, so that the
score may be evaluated without it. Conditions and their alignment are read off the function
(comparisons of any affine or divided indices), nothing is assumed from a mask's presence.

Intervals are NumPy arrays where they depend on positions alone, JAX arrays where they depend on
extras; a tile array broadcasts to `[query blocks, key blocks]`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from hlo_opt.ir.walk import direction, element_type, is_bool, scalar, splat_attribute
from hlo_opt.patterns.score import FAR_BELOW, holds_indices

# More conditions than this are not tried in all combinations.
MAX_GATES = 5


@dataclass(frozen=True)
class Range:
    """A number between `low` and `high`, inclusive."""

    low: Any
    high: Any


@dataclass(frozen=True)
class Truth:
    """A condition: `yes` where it surely holds, `no` where it surely does not."""

    yes: Any
    no: Any


@dataclass(frozen=True)
class Logit:
    """Something that depends on the logit.

    Attributes:
      closed: where it surely is far below every logit.
      scale: what it is a multiple of the logit by; None where it is anything else.
    """

    closed: Any
    scale: float | None = None


Fact = Range | Truth | Logit | None


def facts(
    function: ir.Operation,
    arguments: Sequence[Fact],
    known: Mapping[ir.Value, bool] | None = None,
) -> tuple[dict[ir.Value, Fact], Fact]:
    """What is known of every value of a score function, and of its result.

    Args:
      arguments: of the function: the logit's is `Logit(False)`.
      known: conditions whose value is given.
    """
    block = function.regions[0].blocks[0]
    values: dict[ir.Value, Fact] = dict(zip(block.arguments, arguments, strict=True))
    for op in block.operations:
        if op.operation.name == "func.return":
            return values, values[op.operands[0]]
        result = op.results[0]
        if known is not None and result in known:
            values[result] = Truth(known[result], not known[result])
        else:
            values[result] = _fact(op.operation, [values[o] for o in op.operands])
    raise AssertionError("a function without a return")


def _fact(op: ir.Operation, operands: list[Fact]) -> Fact:
    if op.name == "stablehlo.constant":
        return _constant(op)
    rule = _RULES.get(op.name)
    result = rule(op, operands) if rule is not None else None
    if result is None and any(isinstance(operand, Logit) for operand in operands):
        return Logit(False)
    return result


def _constant(op: ir.Operation) -> Fact:
    attribute = splat_attribute(op)
    if attribute is None:
        return None
    number = scalar(attribute.get_splat_value())
    if number is None:
        return None
    if is_bool(op.results[0]):
        return Truth(bool(number), not number)
    return None if math.isnan(number) else Range(number, number)


def _exact(op: ir.Operation) -> bool:
    """Whether index arithmetic in the result's type is exact."""
    return holds_indices(element_type(op.results[0]))


def _least(*values: Any) -> Any:
    return _numpy(values).stack(_numpy(values).broadcast_arrays(*values)).min(0)


def _most(*values: Any) -> Any:
    return _numpy(values).stack(_numpy(values).broadcast_arrays(*values)).max(0)


def _numpy(values: Sequence[Any]) -> Any:
    """NumPy, or `jax.numpy` where a value is JAX's."""
    if all(isinstance(value, np.ndarray | np.generic | int | float) for value in values):
        return np
    import jax.numpy as jnp

    return jnp


def _both(x: Any, y: Any) -> Any:
    return _numpy((x, y)).logical_and(x, y)


def _either(x: Any, y: Any) -> Any:
    return _numpy((x, y)).logical_or(x, y)


def _add(op: ir.Operation, operands: list[Fact]) -> Fact:
    a, b = operands
    if isinstance(b, Logit):
        a, b = b, a
    if isinstance(a, Logit):
        if not isinstance(b, Range):  # it may lift a closed logit
            return None
        zero = isinstance(b.low, int | float) and b.low == b.high == 0
        closed = _either(b.high <= FAR_BELOW, _both(a.closed, b.high <= 0))
        return Logit(closed, a.scale if zero else None)
    if isinstance(a, Range) and isinstance(b, Range) and _exact(op):
        return Range(a.low + b.low, a.high + b.high)
    return None


def _subtract(op: ir.Operation, operands: list[Fact]) -> Fact:
    a, b = operands
    opposite = Range(-b.high, -b.low) if isinstance(b, Range) else None
    return _add(op, [a, opposite]) if opposite is not None else None


def _multiply(op: ir.Operation, operands: list[Fact]) -> Fact:
    a, b = operands
    if isinstance(b, Logit):
        a, b = b, a
    if isinstance(a, Logit):
        return _scaled(a, b)
    if isinstance(a, Range) and isinstance(b, Range) and _exact(op):
        products = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return Range(_least(*products), _most(*products))
    return None


def _scaled(logit: Logit, factor: Fact, inverse: bool = False) -> Fact:
    """A logit times (or divided by) a constant; whether it stays closed is not followed."""
    if logit.scale is None or not isinstance(factor, Range):
        return None
    low, high = factor.low, factor.high
    if not isinstance(low, int | float) or low != high or low == 0 or math.isinf(low):
        return None
    return Logit(False, logit.scale / low if inverse else logit.scale * low)


def _truncated(a: Any, divisor: int) -> Any:
    return _numpy((a,)).where(a >= 0, a // divisor, -((-a) // divisor))


def _divisor(op: ir.Operation, fact: Fact) -> int | None:
    """A positive integer constant to divide by; None for anything else."""
    if not isinstance(element_type(op.results[0]), ir.IntegerType) or not _exact(op):
        return None
    if not isinstance(fact, Range) or not isinstance(fact.low, int) or fact.low != fact.high:
        return None
    return fact.low if fact.low > 0 else None


def _divide(op: ir.Operation, operands: list[Fact]) -> Fact:
    if isinstance(operands[0], Logit):
        return _scaled(operands[0], operands[1], inverse=True)
    a, divisor = operands[0], _divisor(op, operands[1])
    if not isinstance(a, Range) or divisor is None:
        return None
    return Range(_truncated(a.low, divisor), _truncated(a.high, divisor))


def _remainder(op: ir.Operation, operands: list[Fact]) -> Fact:
    a, divisor = operands[0], _divisor(op, operands[1])
    if not isinstance(a, Range) or divisor is None:
        return None
    where = _numpy((a.low, a.high)).where
    same = _both(a.low >= 0, a.low // divisor == a.high // divisor)
    return Range(
        where(same, a.low % divisor, where(a.low < 0, 1 - divisor, 0)),
        where(same, a.high % divisor, divisor - 1),
    )


def _negate(op: ir.Operation, operands: list[Fact]) -> Fact:
    (a,) = operands
    return Range(-a.high, -a.low) if isinstance(a, Range) and _exact(op) else None


def _sign(op: ir.Operation, operands: list[Fact]) -> Fact:
    (a,) = operands
    if not isinstance(a, Range) or not _exact(op):
        return None
    sign = _numpy((a.low, a.high)).sign
    return Range(sign(a.low), sign(a.high))


def _extreme(choose: Callable[..., Any]) -> Callable[[ir.Operation, list[Fact]], Fact]:
    def rule(op: ir.Operation, operands: list[Fact]) -> Fact:
        if all(isinstance(o, Range) for o in operands) and _exact(op):
            ranges = [o for o in operands if isinstance(o, Range)]
            return Range(choose(*(r.low for r in ranges)), choose(*(r.high for r in ranges)))
        return None

    return rule


def _convert(op: ir.Operation, operands: list[Fact]) -> Fact:
    (a,) = operands
    before, after = element_type(op.operands[0]), element_type(op.results[0])
    if isinstance(a, Logit):
        return a if isinstance(after, ir.FloatType) else None
    if a is None and isinstance(before, ir.IntegerType) and before.width == 1:
        a = Truth(False, False)
    if isinstance(a, Truth):
        where = _numpy((a.yes, a.no)).where
        if isinstance(after, ir.IntegerType) and after.width == 1:
            return a
        return Range(where(a.yes, 1, 0), where(a.no, 0, 1))
    if not isinstance(a, Range):
        return None
    if isinstance(after, ir.IntegerType) and after.width == 1:
        zero = _both(a.low == 0, a.high == 0)
        return Truth(_either(a.low > 0, a.high < 0), zero)
    # Integers become exact floats or wider integers; floats that become integers are cut off.
    integers = isinstance(before, ir.IntegerType) or isinstance(after, ir.FloatType)
    return a if _exact(op) and integers else None


def _compare(op: ir.Operation, operands: list[Fact]) -> Fact:
    a, b = operands
    if not isinstance(a, Range) or not isinstance(b, Range):
        return None
    which = direction(op)
    if which in ("GT", "GE"):
        a, b = b, a
    if which in ("LT", "GT"):
        return Truth(a.high < b.low, a.low >= b.high)
    if which in ("LE", "GE"):
        return Truth(a.high <= b.low, a.low > b.high)
    apart = _either(a.high < b.low, b.high < a.low)
    same = _both(_both(a.low == a.high, b.low == b.high), a.low == b.low)
    return Truth(same, apart) if which == "EQ" else Truth(apart, same)


def _and(op: ir.Operation, operands: list[Fact]) -> Fact:
    a, b = (o if isinstance(o, Truth) else Truth(False, False) for o in operands)
    if not is_bool(op.results[0]):
        return None
    return Truth(_both(a.yes, b.yes), _either(a.no, b.no))


def _or(op: ir.Operation, operands: list[Fact]) -> Fact:
    a, b = (o if isinstance(o, Truth) else Truth(False, False) for o in operands)
    if not is_bool(op.results[0]):
        return None
    return Truth(_either(a.yes, b.yes), _both(a.no, b.no))


def _xor(op: ir.Operation, operands: list[Fact]) -> Fact:
    a, b = operands
    if not isinstance(a, Truth) or not isinstance(b, Truth):
        return None
    return Truth(
        _either(_both(a.yes, b.no), _both(a.no, b.yes)),
        _either(_both(a.yes, b.yes), _both(a.no, b.no)),
    )


def _not(op: ir.Operation, operands: list[Fact]) -> Fact:
    (a,) = operands
    return Truth(a.no, a.yes) if isinstance(a, Truth) else None


def _select(op: ir.Operation, operands: list[Fact]) -> Fact:
    predicate, yes, no = operands
    if not isinstance(predicate, Truth):
        predicate = Truth(False, False)
    if isinstance(predicate.yes, bool) and predicate.yes != predicate.no:
        return yes if predicate.yes else no
    if isinstance(yes, Logit) or isinstance(no, Logit):
        shut = [_shut(side) for side in (yes, no)]
        closed = _either(_both(predicate.yes, shut[0]), _both(predicate.no, shut[1]))
        return Logit(_either(closed, _both(shut[0], shut[1])))
    if isinstance(yes, Truth) and isinstance(no, Truth):
        return Truth(*(_chosen(predicate, y, n) for y, n in ((yes.yes, no.yes), (yes.no, no.no))))
    if isinstance(yes, Range) and isinstance(no, Range):
        where = _numpy((predicate.yes, predicate.no, yes.low, no.low, yes.high, no.high)).where
        return Range(
            where(predicate.yes, yes.low, where(predicate.no, no.low, _least(yes.low, no.low))),
            where(predicate.yes, yes.high, where(predicate.no, no.high, _most(yes.high, no.high))),
        )
    return None


def _chosen(predicate: Truth, yes: Any, no: Any) -> Any:
    """Whether something surely holds that `yes` and `no` say of the two sides."""
    one = _either(_both(predicate.yes, yes), _both(predicate.no, no))
    return _either(one, _both(yes, no))


def _shut(fact: Fact) -> Any:
    if isinstance(fact, Logit):
        return fact.closed
    return fact.high <= FAR_BELOW if isinstance(fact, Range) else False


_RULES: dict[str, Callable[[ir.Operation, list[Fact]], Fact]] = {
    "stablehlo.add": _add,
    "stablehlo.and": _and,
    "stablehlo.compare": _compare,
    "stablehlo.convert": _convert,
    "stablehlo.divide": _divide,
    "stablehlo.maximum": _extreme(_most),
    "stablehlo.minimum": _extreme(_least),
    "stablehlo.multiply": _multiply,
    "stablehlo.negate": _negate,
    "stablehlo.not": _not,
    "stablehlo.or": _or,
    "stablehlo.remainder": _remainder,
    "stablehlo.select": _select,
    "stablehlo.sign": _sign,
    "stablehlo.subtract": _subtract,
    "stablehlo.xor": _xor,
}


OPEN, MIXED, CLOSED = 2, 1, 0


@dataclass(frozen=True)
class Tiling:
    """How queries and keys are cut into tiles."""

    queries: int
    keys: int
    block_q: int
    block_k: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of query and key blocks."""
        return -(-self.queries // self.block_q), -(-self.keys // self.block_k)

    def ranges(self) -> tuple[Range, Range]:
        """Positions of queries `[blocks, 1]` and keys `[1, blocks]`."""
        found = []
        for size, block, axis in (
            (self.queries, self.block_q, 1),
            (self.keys, self.block_k, 0),
        ):
            first = np.arange(0, size, block, dtype=np.int64)
            last = np.minimum(first + block, size) - 1
            found.append(Range(np.expand_dims(first, axis), np.expand_dims(last, axis)))
        return found[0], found[1]


@dataclass(frozen=True)
class Analysis:
    """What a score does to tiles.

    Attributes:
      states: `OPEN`, `MIXED` or `CLOSED` for every tile.
      known: conditions and their value in every open tile.
      scale: in open tiles the score is the logit times this; None where it is anything else.
    """

    states: Any
    known: Mapping[ir.Value, bool]
    scale: float | None


def analyse_tiles(
    function: ir.Operation,
    tiling: Tiling,
    sizes: tuple[int, int],
    extras: Sequence[Fact],
) -> Analysis:
    """States of all tiles.

    Args:
      function: a captured score.
      sizes: numbers of batch and head indices.
      extras: what is known of each extra.
    """
    arguments = [
        Logit(False, 1.0),
        *extras,
        *(Range(0, size - 1) for size in sizes),
        *tiling.ranges(),
    ]
    values, result = facts(function, arguments)
    shape = tiling.shape
    closed = result.closed if isinstance(result, Logit) and _is_ungated(function) else False
    gates = _gates(function, [fact is not None for fact in arguments])
    plain = [Logit(False, 1.0), *[None] * len(extras), *arguments[-4:]]
    known, scale = _harmless(function, plain, gates)
    xp = _numpy((closed,))
    states = xp.where(xp.broadcast_to(closed, shape), CLOSED, MIXED)
    if known is None:
        return Analysis(states, {}, None)
    is_open: Any = True
    for gate, value in known.items():
        truth = values[gate]
        sure = (truth.yes if value else truth.no) if isinstance(truth, Truth) else False
        is_open = _both(is_open, sure)
    xp = _numpy((states, is_open))
    return Analysis(xp.where(xp.logical_and(states != CLOSED, is_open), OPEN, states), known, scale)


def _is_ungated(function: ir.Operation) -> bool:
    """Whether no condition depends on the logit: masks are the same whatever the logits are."""
    block = function.regions[0].blocks[0]
    dependent = {block.arguments[0]}
    for op in block.operations:
        if op.operation.name != "func.return" and any(o in dependent for o in op.operands):
            dependent.add(op.results[0])
            if not isinstance(element_type(op.results[0]), ir.FloatType):
                return False
    return True


def _gates(function: ir.Operation, followed: Sequence[bool]) -> list[ir.Value]:
    """Conditions that depend on followed arguments only, and that something else uses."""
    block = function.regions[0].blocks[0]
    pure = {a for a, yes in zip(list(block.arguments)[1:], list(followed)[1:], strict=True) if yes}
    made: list[ir.Operation] = []
    for op in block.operations:
        operands = list(op.operands)
        if op.operation.name != "func.return" and all(o in pure for o in operands):
            pure.add(op.results[0])
            if operands and is_bool(op.results[0]):
                made.append(op.operation)
    return [
        op.results[0]
        for op in made
        if any(
            user.name == "func.return"
            or user.results[0] not in pure
            or not is_bool(user.results[0])
            for use in op.results[0].uses
            for user in [use.owner.operation]
        )
    ]


def _harmless(
    function: ir.Operation, arguments: Sequence[Fact], gates: Sequence[ir.Value]
) -> tuple[dict[ir.Value, bool] | None, float | None]:
    """Values of all conditions with which the logit is not closed, and its scale then."""
    if len(gates) > MAX_GATES:
        return None, None
    for chosen in itertools.product((True, False), repeat=len(gates)):
        known = dict(zip(gates, chosen, strict=True))
        _, result = facts(function, arguments, known)
        if isinstance(result, Logit) and not np.any(result.closed):
            return known, result.scale
    return None, None
