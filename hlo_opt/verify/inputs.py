"""Random inputs for a module: ranges follow from how each argument is used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from hlo_opt.errors import HloOptError
from hlo_opt.ir.index import shape_of
from hlo_opt.ir.signature import ArrayType, array_types, main_function
from hlo_opt.ir.walk import defining_op, direction, element_type, splat
from hlo_opt.pipeline import PassContext, run_pipeline

# Ops whose result is made of the same numbers, or of numbers of about the same range.
_PASSES_ON = frozenset(
    {
        f"stablehlo.{name}"
        for name in (
            "add",
            "broadcast_in_dim",
            "clamp",
            "concatenate",
            "convert",
            "maximum",
            "minimum",
            "reshape",
            "select",
            "slice",
            "subtract",
            "transpose",
        )
    }
)
_UNBOUNDED = 64


@dataclass
class _Use:
    """What is known of an argument from its uses."""

    bound: int | None = None
    is_mask: bool = False
    fan_in: int | None = None
    is_factor: bool = False


def infer_inputs(module: ir.Module, seed: int = 0) -> list[np.ndarray]:
    """Random arrays for the arguments of `main`, of their exact types.

    Indices stay inside what they index, masks leave something open in every row, weights of a
    matmul are scaled by their fan-in, factors of norms are near one.
    """
    inlined = run_pipeline(module, "inline{max-ops=1000000}", PassContext(), verify_each=False)
    function = main_function(inlined)
    types, _ = array_types(function)
    rng = np.random.default_rng(seed)
    arguments = list(function.regions[0].blocks[0].arguments)
    uses = [_use_of(argument) for argument in arguments]
    return [_draw(type_, use, rng) for type_, use in zip(types, uses, strict=True)]


def load_inputs(module: ir.Module, path: str | Path) -> list[np.ndarray]:
    """Inputs from an `.npz` file: `arg0`, `arg1`, … or arrays in order. Raises `HloOptError`."""
    types, _ = array_types(main_function(module))
    try:
        with np.load(path) as file:
            named = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise HloOptError(f"error: cannot read inputs: {error}", location=str(path)) from None
    arrays = []
    for number, type_ in enumerate(types):
        array = named.get(f"arg{number}", named.get(f"arr_{number}"))
        if array is None or array.shape != type_.shape:
            found = "nothing" if array is None else str(array.shape)
            raise HloOptError(
                f"error: argument {number} is {type_}, the file has {found}", location=str(path)
            )
        arrays.append(array.astype(type_.dtype))
    return arrays


def _draw(type_: ArrayType, use: _Use, rng: np.random.Generator) -> np.ndarray:
    shape, dtype = type_.shape, type_.dtype
    if dtype.kind == "b" or (use.is_mask and dtype.kind in "iu"):
        return _mask(shape, rng).astype(dtype)
    if dtype.kind in "iu":
        if use.bound is None:
            ramp = np.arange(shape[-1] if shape else 1) % _UNBOUNDED
            return np.broadcast_to(ramp if shape else ramp[0], shape).astype(dtype)
        return rng.integers(0, max(use.bound, 1), shape).astype(dtype)
    values = rng.standard_normal(shape)
    if dtype.kind == "c":
        return (values + 1j * rng.standard_normal(shape)).astype(dtype)
    if use.fan_in is not None:
        values *= use.fan_in**-0.5
    elif use.is_factor and len(shape) <= 1:
        values = 1 + 0.1 * values
    elif len(shape) <= 1:
        values *= 0.1
    return np.asarray(values).astype(dtype)


def _mask(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Mostly true; the first element and the diagonal of the last two dimensions always."""
    mask = rng.random(shape) < 0.8
    if not shape:
        return np.ones((), bool)
    mask[..., 0] = True
    if len(shape) >= 2:
        steps = np.arange(min(shape[-2:]))
        mask[..., steps, steps] = True
    return mask


def _use_of(argument: ir.Value) -> _Use:
    """Follows an argument through ops that pass its numbers on, into loops too."""
    found = _Use()
    pending: list[ir.Value] = [argument]
    seen: set[ir.Value] = set()
    while pending and len(seen) < 200:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        for use in value.uses:
            op, number = use.owner.operation, use.operand_number
            _look_at(found, op, number, value)
            pending.extend(_carriers(op, number, value))
    return found


def _carriers(op: ir.Operation, number: int, value: ir.Value) -> Iterator[ir.Value]:
    """Values that carry on what operand `number` of `op` holds."""
    if op.name in _PASSES_ON and element_kind(op.results[0]) == element_kind(value):
        yield op.results[0]
    elif op.name == "stablehlo.while":
        for region in op.regions:
            yield region.blocks[0].arguments[number]
    elif (
        op.name in ("stablehlo.dynamic_slice", "stablehlo.gather")
        and number == 0
        and element_kind(value) == "integer"
    ):
        yield op.results[0]


def element_kind(value: ir.Value) -> str:
    """`integer`, `float` or `other`."""
    element = element_type(value)
    if isinstance(element, ir.IntegerType):
        return "bool" if element.width == 1 else "integer"
    return "float" if isinstance(element, ir.FloatType) else "other"


def _look_at(found: _Use, op: ir.Operation, number: int, value: ir.Value) -> None:
    bound = _index_bound(op, number)
    if bound is not None:
        found.bound = bound if found.bound is None else min(bound, found.bound)
    if op.name == "stablehlo.compare" and element_kind(value) == "integer":
        against_zero = splat(op.operands[1 - number]) == 0
        found.is_mask |= against_zero and direction(op) in ("NE", "GT", "EQ")
    if op.name == "stablehlo.convert" and element_kind(op.results[0]) == "bool":
        found.is_mask = True
    if op.name == "stablehlo.multiply":
        found.is_factor = True
    if op.name == "stablehlo.dot_general" and found.fan_in is None:
        found.fan_in = _fan_in(op, number)


def _fan_in(op: ir.Operation, number: int) -> int | None:
    """How many products a weight's matmul sums; None where the other operand is an input too."""
    other: ir.Value | None = op.operands[1 - number]
    while (maker := defining_op(other)) is not None and maker.name in _PASSES_ON:
        if len(maker.operands) != 1:
            break
        other = maker.operands[0]
    if maker is None:
        return None
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    sides = (numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions)
    shape = shape_of(op.operands[number])
    return int(np.prod([shape[d] for d in sides[number]] or [1]))


def _index_bound(op: ir.Operation, number: int) -> int | None:
    """What values of an index operand must stay below, or None where it is no index."""
    if op.name == "stablehlo.gather" and number == 1:
        numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
        sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
        shape = shape_of(op.operands[0])
        dims = list(numbers.start_index_map)
        return min((shape[d] - sizes[d] + 1 for d in dims), default=None)
    if op.name == "stablehlo.dynamic_slice" and number >= 1:
        sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
        return int(shape_of(op.operands[0])[number - 1] - sizes[number - 1] + 1)
    if op.name == "stablehlo.dynamic_update_slice" and number >= 2:
        whole, part = shape_of(op.operands[0]), shape_of(op.operands[1])
        return int(whole[number - 2] - part[number - 2] + 1)
    if op.name == "stablehlo.scatter" and number == len(op.operands) // 2:
        numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
        dims = list(numbers.scattered_dims_to_operand_dims)
        shape = shape_of(op.operands[0])
        return min((shape[d] for d in dims), default=None)
    return None
