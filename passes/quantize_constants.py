"""`quantize-constants`: weights that are constants as StableHLO's quantized types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from hlo_opt.ir.index import shape_of
from hlo_opt.ir.signature import array_type
from hlo_opt.ir.walk import closed_functions, defining_op, element_type, ops_named
from hlo_opt.pipeline import Pass, PassContext, register_pass

LARGEST = 127


@register_pass("quantize-constants")
@dataclass(frozen=True)
class QuantizeConstants(Pass):
    """Float constants that matmuls multiply with become int8 in StableHLO's quantized types.

    Symmetric, one scale for each output channel, or one for all where there are several output
    dimensions. `func.func(stablehlo-legalize-quant-to-math)` turns the result into plain ops.

    Options:
      min-elements: leave smaller constants alone.
    """

    structure: ClassVar[str] = "constant"
    min_elements: int = 1024

    def run(self, module: ir.Module, ctx: PassContext) -> None:
        made: dict[tuple[ir.Value, int | None], ir.Value | str] = {}
        for dot in ops_named("stablehlo.dot_general", module, closed_functions(module)):
            for side in (0, 1):
                weight = _weight(dot, side)
                if weight is None or math.prod(shape_of(weight.value)) < self.min_elements:
                    continue
                key = (weight.value, weight.axis)
                if key not in made:
                    made[key] = self._quantized(ctx, dot, weight)
                if isinstance(made[key], ir.Value):
                    weight.user.operands[weight.number] = made[key]

    def _quantized(self, ctx: PassContext, dot: ir.Operation, weight: _Weight) -> ir.Value | str:
        """The dequantized constant beside the float one, or why there is none."""
        constant = weight.value.owner.operation
        values = _array(ir.DenseElementsAttr(constant.attributes["value"]))
        if values is None:
            reason = f"the elements of {weight.value.type} cannot be read"
        elif not np.isfinite(values).all():
            reason = "a NaN or infinity among the weights"
        else:
            scales, integers = _quantize(values, weight.axis)
            result = _dequantized(constant, integers, scales, weight.axis)
            kind = "one scale" if weight.axis is None else f"{scales.size} scales"
            shape = "x".join(map(str, values.shape))
            before = math.prod(values.shape) * array_type(weight.value.type).dtype.itemsize
            after = integers.nbytes + scales.nbytes
            message = f"weights to int8: {shape}, {kind}, {before:,} -> {after:,} bytes"
            self.remark(ctx, "applied", message, op=dot, before=before, after=after)
            return result
        self.remark(ctx, "missed", reason, op=dot)
        return reason


@dataclass(frozen=True)
class _Weight:
    """A constant that a matmul multiplies with.

    Attributes:
      value: result of the constant.
      axis: its only output dimension; None where there are several.
      user, number: the operand the constant is: of the matmul, or of a transpose or conversion.
    """

    value: ir.Value
    axis: int | None
    user: ir.Operation
    number: int


def _weight(dot: ir.Operation, side: int) -> _Weight | None:
    numbers = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    taken = (
        {*numbers.lhs_batching_dimensions, *numbers.lhs_contracting_dimensions},
        {*numbers.rhs_batching_dimensions, *numbers.rhs_contracting_dimensions},
    )[side]
    batch = (numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions)[side]
    user, number, value = dot, side, dot.operands[side]
    type_ = ir.RankedTensorType(value.type)
    if not type_.has_static_shape:
        return None
    places = list(range(type_.rank))  # dimensions of the constant, as the matmul counts them
    while (op := defining_op(value)) is not None:
        if op.name == "stablehlo.constant":
            if not _is_float_constant(op):
                return None
            sizes = shape_of(value)
            free = [d for d, p in enumerate(places) if p not in taken and sizes[d] > 1]
            one = len(free) == 1 and all(sizes[places.index(b)] == 1 for b in batch)
            return _Weight(value, free[0] if one else None, user, number)
        if op.name == "stablehlo.transpose":
            order = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
            places = [places[order.index(d)] for d in range(len(order))]
        elif op.name != "stablehlo.convert":
            return None
        user, number, value = op, 0, op.operands[0]
    return None


def _is_float_constant(op: ir.Operation) -> bool:
    # The type first: the bindings cannot even look at complex or quantized constants.
    if not isinstance(element_type(op.results[0]), ir.F32Type | ir.BF16Type | ir.F16Type):
        return False
    value = op.attributes["value"]
    return isinstance(value, ir.DenseElementsAttr) and not value.is_splat


def _array(value: ir.DenseElementsAttr) -> np.ndarray | None:
    """The elements in f32; None where the bindings give no way to them."""
    import ml_dtypes

    type_ = ir.RankedTensorType(value.type)
    if not isinstance(type_.element_type, ir.BF16Type):
        return np.array(value).astype(np.float32)
    # No buffer holds bf16; the text does, in hexadecimal where there are many elements.
    _, quote, rest = str(value).partition('"0x')
    if not quote:
        return None
    data = np.frombuffer(bytes.fromhex(rest[: rest.index('"')]), ml_dtypes.bfloat16)
    return data.reshape(type_.shape).astype(np.float32)


def _quantize(values: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Scales `[channels]` in f32 and the values in int8. A channel of zeros has scale 1."""
    rest = tuple(d for d in range(values.ndim) if d != axis)
    largest = np.max(np.abs(values), axis=rest, keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1)).astype(np.float32)
    scales = np.maximum(scales, np.finfo(np.float32).tiny)
    integers = np.clip(np.rint(values / scales), -LARGEST, LARGEST).astype(np.int8)
    return scales.reshape(-1), integers


def _dequantized(
    constant: ir.Operation, integers: np.ndarray, scales: np.ndarray, axis: int | None
) -> ir.Value:
    """The quantized constant, dequantized to the type of a float constant and before it.

    Expressed in f32 and with the channels last, whatever the weights were: jaxlib's legalisation
    takes nothing else.
    """
    result = ir.RankedTensorType(constant.results[0].type)
    texts = [np.format_float_scientific(s, unique=True, min_digits=1) for s in scales]
    order = [d for d in range(integers.ndim) if d != axis] + ([] if axis is None else [axis])
    held = np.ascontiguousarray(integers.transpose(order))
    with constant.context, constant.location, ir.InsertionPoint(constant):
        element = ir.Type.parse(_quantized_type(texts, None if axis is None else held.ndim - 1))
        floats = ir.Operation.create(
            "stablehlo.constant",
            [ir.RankedTensorType.get(held.shape, element)],
            attributes={"value": ir.DenseElementsAttr.get(held)},
        )
        for name, shape, type_, attributes in (
            ("uniform_dequantize", held.shape, ir.F32Type.get(), {}),
            ("convert", held.shape, result.element_type, {}),
            ("transpose", result.shape, result.element_type, {"permutation": _inverse(order)}),
        ):
            made = ir.RankedTensorType.get(shape, type_)
            if made != floats.results[0].type or (order != sorted(order) and attributes):
                floats = ir.Operation.create(
                    f"stablehlo.{name}", [made], [floats.results[0]], attributes
                )
    return floats.results[0]


def _inverse(order: Sequence[int]) -> ir.Attribute:
    return ir.DenseI64ArrayAttr.get([int(place) for place in np.argsort(order)])


def _quantized_type(scales: Sequence[str], axis: int | None) -> str:
    channels = scales[0] if axis is None else f"{{{','.join(scales)}}}"
    place = "" if axis is None else f":{axis}"
    return f"!quant.uniform<i8<-{LARGEST}:{LARGEST}>:f32{place}, {channels}>"
