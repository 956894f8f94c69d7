"""The signature of a module: its `main`, and argument and result types as NumPy knows them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxlib.mlir import ir

from hlo_opt.errors import HloOptError
from hlo_opt.ir.walk import functions, symbol_name


@dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of an argument or result."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def main_function(module: ir.Module) -> ir.Operation:
    """The module's `main`. Raises `HloOptError` where there is none."""
    for function in functions(module):
        if symbol_name(function) == "main":
            return function
    raise HloOptError("error: the module has no function 'main'")


def function_types(function: ir.Operation) -> tuple[list[ir.Type], list[ir.Type]]:
    """Argument and result types of a function."""
    type_ = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    return list(type_.inputs), list(type_.results)


def check_static(function: ir.Operation) -> None:
    """Raises `HloOptError` where an argument or result has a dynamic shape."""
    for types, kind in zip(function_types(function), ("argument", "result"), strict=True):
        for number, type_ in enumerate(types):
            if isinstance(type_, ir.RankedTensorType) and not type_.has_static_shape:
                raise HloOptError(
                    f"error: {kind} {number} of '{symbol_name(function)}' has a dynamic shape "
                    f"({type_}): lower the model with concrete shapes"
                )


def set_function_type(function: ir.Operation) -> None:
    """Makes a function's type that of its arguments and returned values."""
    block = function.regions[0].blocks[0]
    returned = list(block.operations)[-1].operation
    with function.context:
        type_ = ir.FunctionType.get(
            [argument.type for argument in block.arguments], [o.type for o in returned.operands]
        )
        function.attributes["function_type"] = ir.TypeAttr.get(type_)


def bytes_of(type_: ir.Type) -> int:
    """What a static tensor takes, in bytes; 0 for other types."""
    if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return 0
    element = type_.element_type
    bits = 64
    if isinstance(element, ir.ComplexType):
        bits = 128 if str(element) == "complex<f64>" else 64
    elif isinstance(element, ir.IntegerType):
        bits = 8 if element.width == 1 else element.width
    elif isinstance(element, ir.FloatType):
        bits = element.width
    return (math.prod(type_.shape) * bits + 7) // 8


def array_types(function: ir.Operation) -> tuple[list[ArrayType], list[ArrayType]]:
    """Argument and result types of a function of static tensors. Raises `HloOptError`."""
    check_static(function)
    inputs, results = function_types(function)
    return [array_type(t) for t in inputs], [array_type(t) for t in results]


def array_type(type_: ir.Type) -> ArrayType:
    """The NumPy shape and dtype of a ranked tensor type. Raises `HloOptError` for others."""
    if isinstance(type_, ir.RankedTensorType):
        dtype = numpy_dtype(type_.element_type)
        if dtype is not None:
            return ArrayType(tuple(type_.shape), dtype)
    raise HloOptError(f"error: values of type {type_} cannot be passed to or from a program here")


def numpy_dtype(element: ir.Type) -> np.dtype | None:
    """The NumPy dtype of an element type, or None."""
    return _dtypes().get(str(element))


@cache
def _dtypes() -> dict[str, np.dtype]:
    import ml_dtypes  # slow to load: the driver starts without it

    names = {
        "i1": "bool",
        "f16": "float16",
        "f32": "float32",
        "f64": "float64",
        "complex<f32>": "complex64",
        "complex<f64>": "complex128",
    }
    for bits in (8, 16, 32, 64):
        names[f"i{bits}"] = f"int{bits}"
        names[f"ui{bits}"] = f"uint{bits}"
    table = {mlir: np.dtype(name) for mlir, name in names.items()}
    table["bf16"] = np.dtype(ml_dtypes.bfloat16)
    for mlir, name in (
        ("i4", "int4"),
        ("ui4", "uint4"),
        ("f8E4M3FN", "float8_e4m3fn"),
        ("f8E5M2", "float8_e5m2"),
        ("f8E4M3B11FNUZ", "float8_e4m3b11fnuz"),
    ):
        table[mlir] = np.dtype(getattr(ml_dtypes, name))
    return table
