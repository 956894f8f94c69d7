"""`normalize`: inlines helpers and folds what hides structure from the patterns."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from hlo_opt.ir.inline import inline_calls
from hlo_opt.ir.module import run_cxx_passes
from hlo_opt.ir.walk import (
    closed_functions,
    defining_op,
    direction,
    element_type,
    functions,
    is_bool,
    splat,
    splat_attribute,
    symbol_name,
)
from hlo_opt.passes.inline import Inline
from hlo_opt.pipeline import Pass, PassContext, register_pass
from hlo_opt.rewrite import Rewrite, apply_greedily


@register_pass("normalize")
@dataclass(frozen=True)
class Normalize(Pass):
    """Inlines functions, folds constants and identities, removes duplicate and dead code."""

    def run(self, module: ir.Module, ctx: PassContext) -> None:
        limit = Inline().max_ops
        inline_calls(module, limit)
        _fold(module)
        # What folding made smaller may have become small enough to be inlined.
        while inline_calls(module, limit):
            _fold(module)
        run_cxx_passes(module.operation, "symbol-dce")


def _fold(module: ir.Module) -> None:
    closed = closed_functions(module)
    for function in functions(module):
        if symbol_name(function) not in closed:
            apply_greedily(function, REWRITES)
            run_cxx_passes(function, "cse")


def splat_of(type_: ir.Type, number: float | int) -> ir.Value:
    """A constant that repeats a number."""
    element = ir.RankedTensorType(type_).element_type
    if isinstance(element, ir.IntegerType):
        attribute: ir.Attribute = ir.IntegerAttr.get(element, int(number))
    else:
        attribute = ir.FloatAttr.get(element, float(number))
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(type_, attribute))


def _is_static(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType) and value.type.has_static_shape


def _is_float(value: ir.Value) -> bool:
    return isinstance(element_type(value), ir.FloatType)


def broadcast_of_splat(op: ir.Operation) -> ir.Value | None:
    """A broadcast (or reshape) of a constant is that constant, larger."""
    source = defining_op(op.operands[0])
    value = splat_attribute(source) if source is not None else None
    if value is None or not _is_static(op.results[0]):
        return None
    return stablehlo.constant(
        ir.DenseElementsAttr.get_splat(op.results[0].type, value.get_splat_value())
    )


def same_type(op: ir.Operation) -> ir.Value | None:
    """`convert`, `reshape`, `broadcast_in_dim` and `transpose` that change nothing."""
    operand = op.operands[0]
    if operand.type != op.results[0].type:
        return None
    order = {
        "stablehlo.transpose": "permutation",
        "stablehlo.broadcast_in_dim": "broadcast_dimensions",
    }
    if op.name in order:
        dims = list(ir.DenseI64ArrayAttr(op.attributes[order[op.name]]))
        if dims != list(range(len(dims))):
            return None
    return operand


def convert_of_splat(op: ir.Operation) -> ir.Value | None:
    """A converted constant, where every float and integer type involved holds it exactly."""
    number = splat(op.operands[0])
    if number is None or not _is_static(op.results[0]):
        return None
    if is_bool(op.results[0]):
        return splat_of(op.results[0].type, int(number != 0))
    infinite = number in (float("inf"), float("-inf"))
    if not isinstance(element_type(op.results[0]), ir.FloatType):
        exact = 0 <= number <= 127 and number == int(number)
    else:
        exact = infinite or (abs(number) <= 127 and number == int(number))
    if str(number) == "-0.0" or str(element_type(op.results[0])).startswith("f8"):
        return None
    return splat_of(op.results[0].type, number) if exact else None


def compare_of_converted_bool(op: ir.Operation) -> ir.Value | None:
    """A Boolean made a number and compared with zero is the Boolean again."""
    source = defining_op(op.operands[0])
    if (
        source is None
        or source.name != "stablehlo.convert"
        or not is_bool(source.operands[0])
        or splat(op.operands[1]) != 0
        or direction(op) not in ("NE", "GT")
    ):
        return None
    return source.operands[0]


_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "GE": operator.ge,
    "GT": operator.gt,
    "LE": operator.le,
    "LT": operator.lt,
}


def compare_of_splats(op: ir.Operation) -> ir.Value | None:
    """A comparison of two constants."""
    left, right = splat(op.operands[0]), splat(op.operands[1])
    if left is None or right is None or not _is_static(op.results[0]):
        return None
    return splat_of(op.results[0].type, int(_COMPARE[direction(op)](left, right)))


def _commuted(op: ir.Operation) -> list[tuple[ir.Value, float | int | None]]:
    left, right = op.operands[0], op.operands[1]
    return [(left, splat(right)), (right, splat(left))]


def and_or_with_splat(op: ir.Operation) -> ir.Value | None:
    """Boolean `and`/`or` with a constant, or of a value with itself."""
    if not is_bool(op.results[0]):
        return None
    neutral = op.name == "stablehlo.and"
    if op.operands[0] == op.operands[1]:
        return op.operands[0]
    for other, number in _commuted(op):
        if number is not None:
            return other if bool(number) == neutral else splat_of(op.results[0].type, not neutral)
    return None


def not_of_splat(op: ir.Operation) -> ir.Value | None:
    """Boolean `not` of a constant."""
    number = splat(op.operands[0])
    if number is None or not is_bool(op.results[0]) or not _is_static(op.results[0]):
        return None
    return splat_of(op.results[0].type, not number)


def select_of_splat(op: ir.Operation) -> ir.Value | None:
    """A select whose predicate is constant."""
    predicate = splat(op.operands[0])
    if predicate is None:
        return None
    return op.operands[1] if predicate else op.operands[2]


def times_one(op: ir.Operation) -> ir.Value | None:
    """`x * 1`, exact in every type."""
    return next((other for other, number in _commuted(op) if number == 1), None)


def maximum_with_lowest(op: ir.Operation) -> ir.Value | None:
    """`max(x, -inf)`, which also passes NaN through."""
    if not _is_float(op.results[0]):
        return None
    return next((other for other, number in _commuted(op) if number == float("-inf")), None)


def outer_product(op: ir.Operation) -> ir.Value | None:
    """A matmul that contracts nothing is a product of broadcasts: no sum, so no rounding of one.

    The factors are multiplied in the result's float type, which must hold those of both.
    """
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    wide = element_type(op.results[0])
    if (
        list(numbers.lhs_contracting_dimensions)
        or "algorithm" in op.attributes
        or not isinstance(wide, ir.FloatType)
        or not all(_is_static(value) for value in (*op.operands, *op.results))
        or not all(_fits_in(element_type(operand), wide) for operand in op.operands)
    ):
        return None
    batching = [list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions)]
    place = len(batching[0])
    factors = []
    for operand, batch in zip(op.operands, batching, strict=True):
        shape = ir.RankedTensorType(operand.type).shape
        dims = {dim: number for number, dim in enumerate(batch)}
        for dim in range(len(shape)):
            if dim not in dims:
                dims[dim] = place
                place += 1
        if element_type(operand) != wide:
            operand = stablehlo.convert(ir.RankedTensorType.get(shape, wide), operand)
        order = sorted(dims, key=dims.__getitem__)
        operand = stablehlo.transpose(operand, ir.DenseI64ArrayAttr.get(order))
        kept = ir.DenseI64ArrayAttr.get([dims[dim] for dim in order])
        factors.append(stablehlo.broadcast_in_dim(op.results[0].type, operand, kept))
    return stablehlo.multiply(*factors)


def _fits_in(type_: ir.Type | None, wide: ir.FloatType) -> bool:
    """Whether an operand of a matmul is converted to the type the matmul computes in."""
    if isinstance(type_, ir.IntegerType):
        return wide.width >= 32
    same = type_ == wide
    return same or (isinstance(type_, ir.FloatType) and 16 <= type_.width < wide.width)


REWRITES: list[tuple[str, Rewrite]] = [
    ("stablehlo.broadcast_in_dim", broadcast_of_splat),
    ("stablehlo.broadcast_in_dim", same_type),
    ("stablehlo.reshape", broadcast_of_splat),
    ("stablehlo.reshape", same_type),
    ("stablehlo.transpose", same_type),
    ("stablehlo.convert", same_type),
    ("stablehlo.convert", convert_of_splat),
    ("stablehlo.compare", compare_of_splats),
    ("stablehlo.compare", compare_of_converted_bool),
    ("stablehlo.and", and_or_with_splat),
    ("stablehlo.or", and_or_with_splat),
    ("stablehlo.not", not_of_splat),
    ("stablehlo.select", select_of_splat),
    ("stablehlo.multiply", times_one),
    ("stablehlo.maximum", maximum_with_lowest),
    ("stablehlo.dot_general", outer_product),
]
