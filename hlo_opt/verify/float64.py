"""The float64 form of a module: every float type becomes f64, so that rounding disappears."""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir

from hlo_opt.ir.signature import set_function_type
from hlo_opt.ir.walk import functions
from hlo_opt.pipeline import PassContext, run_pipeline

# These keep the types they have: their results are bits, or are made of bits.
_KEEPS_TYPES = frozenset(
    {
        "stablehlo.bitcast_convert",
        "stablehlo.constant",
        "stablehlo.custom_call",
        "stablehlo.rng",
        "stablehlo.rng_bit_generator",
    }
)
_INLINE = "func.func(stablehlo-legalize-composite-to-call),inline{max-ops=1000000}"


def to_float64(module: ir.Module) -> ir.Module:
    """A copy of a module with f64 for every float type, down-casts in between dropped.

    Constants keep their values, arguments and results become f64; bitcasts, random bits and custom
    calls keep their types, with conversions around them.
    """
    copy = run_pipeline(module, _INLINE, PassContext(), verify_each=False)
    ops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        ops.append(op.operation)
        return ir.WalkResult.ADVANCE

    copy.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    kept = [(op, [o.type for o in op.operands]) for op in ops if op.name in _KEEPS_TYPES]
    with copy.context, ir.Location.unknown():
        for op in ops:
            _widen_op(op)
        for op, types in kept:
            _convert_around(op, types)
        for function in functions(copy):
            set_function_type(function)
    copy.operation.verify()
    return copy


def _widen(type_: ir.Type) -> ir.Type:
    if not isinstance(type_, ir.RankedTensorType):
        return type_
    element = type_.element_type
    wide: ir.Type
    if isinstance(element, ir.ComplexType):
        wide = ir.ComplexType.get(ir.F64Type.get())
    elif isinstance(element, ir.FloatType):
        wide = ir.F64Type.get()
    else:
        return type_
    return ir.RankedTensorType.get(type_.shape, wide, type_.encoding)


def _widen_op(op: ir.Operation) -> None:
    for region in op.regions:
        for block in region.blocks:
            for argument in block.arguments:
                argument.set_type(_widen(argument.type))
    if op.name in _KEEPS_TYPES:
        return
    for result in op.results:
        result.set_type(_widen(result.type))
    if op.name == "stablehlo.dot_general" and "algorithm" in op.attributes:
        del op.attributes["algorithm"]
    if op.name == "stablehlo.reduce_precision":
        op.results[0].replace_all_uses_with(op.operands[0])


def _convert_around(op: ir.Operation, types: Sequence[ir.Type]) -> None:
    """Narrow operands for an op that keeps its types, and widened results behind it."""
    with ir.InsertionPoint(op):
        for number, type_ in enumerate(types):
            if op.operands[number].type != type_:
                op.operands[number] = _convert(op.operands[number], type_)
    for result in op.results:
        uses = [(use.owner.operation, use.operand_number) for use in result.uses]
        wide = _widen(result.type)
        if wide == result.type or not uses:
            continue
        with ir.InsertionPoint.after(op):
            converted = _convert(result, wide)
        for user, number in uses:
            user.operands[number] = converted


def _convert(value: ir.Value, type_: ir.Type) -> ir.Value:
    return ir.Operation.create("stablehlo.convert", [type_], [value]).results[0]
