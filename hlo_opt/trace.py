"""From JAX to StableHLO functions in our modules, and from scalar StableHLO functions to JAX.

`lower_function` lowers a JAX function for exact shapes to bytecode; `splice` puts such a function
into a module once. `evaluate` runs a function of rank-0 elementwise ops (a captured score) on
arrays with broadcasting, so that kernels can apply it to tiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir

from hlo_opt import compat
from hlo_opt.errors import HloOptError
from hlo_opt.ir.inline import inline_calls
from hlo_opt.ir.module import run_cxx_passes
from hlo_opt.ir.signature import ArrayType, numpy_dtype
from hlo_opt.ir.walk import direction, element_type, functions, scalar, splat_attribute, symbol_name


def lower_function(
    fn: Callable[..., Any],
    arguments: Sequence[ArrayType],
    *,
    platform: str,
    device_kind: str | None = None,
    precision: str = "default",
    interpret: bool = False,
) -> bytes:
    """Lowers a JAX function of arrays to a StableHLO module, as bytecode.

    Settings of the user's session (matmul precision, x64) do not enter.

    Args:
      platform: `"tpu"` or `"cpu"`.
      device_kind: what a TPU calls itself; kernels that ask for it need it.
      precision: JAX's default matmul precision while tracing.
      interpret: lower Pallas TPU kernels through the generic interpreter.
    """
    import jax

    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    with compat.tracing(device_kind, precision, interpret):
        # A fresh function object: JAX's trace cache must not answer for other settings.
        jitted = jax.jit(lambda *args: fn(*args), keep_unused=True)
        lowered = jitted.trace(*specs).lower(lowering_platforms=(platform,))
        return compat.module_bytecode(lowered)


def splice(module: ir.Module, bytecode: bytes, name: str) -> str:
    """Adds a lowered JAX function to a module, as one private function.

    Args:
      module: the module that is changed.
      bytecode: what `lower_function` returned.
      name: the wanted symbol name.

    Returns:
      the symbol name it got.
    """
    taken = {symbol_name(f) for f in functions(module)}
    with module.context, ir.Location.unknown():
        source = ir.Module.parse(bytecode)
        inline_calls(source, largest=sys.maxsize)
        run_cxx_passes(source.operation, "cse,symbol-dce")
        renamed = {
            old: _unique(name if old == "main" else f"{name}.{old}", taken)
            for old in map(symbol_name, functions(source))
        }
        for function in functions(source):
            _make_private(function, renamed)
            with ir.InsertionPoint(module.body):
                function.clone()
    return renamed["main"]


def _unique(name: str, taken: set[str]) -> str:
    unique, count = name, 0
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    taken.add(unique)
    return unique


def _make_private(function: ir.Operation, renamed: dict[str, str]) -> None:
    def visit(op: ir.Operation) -> ir.WalkResult:
        for attribute in op.attributes:
            value = op.attributes[attribute]
            if isinstance(value, ir.FlatSymbolRefAttr) and value.value in renamed:
                op.attributes[attribute] = ir.FlatSymbolRefAttr.get(renamed[value.value])
        return ir.WalkResult.ADVANCE

    function.walk(visit)
    function.attributes["sym_name"] = ir.StringAttr.get(renamed[symbol_name(function)])
    function.attributes["sym_visibility"] = ir.StringAttr.get("private")
    function.attributes["no_inline"] = ir.UnitAttr.get()  # one kernel for all its calls
    for attribute in ("arg_attrs", "res_attrs"):
        if attribute in function.attributes:
            del function.attributes[attribute]


def evaluate(
    function: ir.Operation, *arguments: Any, known: Mapping[ir.Value, bool] | None = None
) -> Any:
    """Evaluates a function of rank-0 elementwise ops on arrays that broadcast together.

    Args:
      function: a `func.func` with one block and one result, such as a captured score.
      arguments: one array (or scalar) for each argument of the function.
      known: values inside the function that are given, so that nothing is computed for them.

    Returns:
      the result, of the shape that the arguments used broadcast to.

    Raises:
      HloOptError: an op has no counterpart here.
    """
    block = function.regions[0].blocks[0]
    values = dict(zip(block.arguments, arguments, strict=True))
    values.update(known or {})
    needed = _needed(block, values)
    for op in block.operations:
        if op.operation.name == "func.return":
            return values[op.operands[0]]
        if op.results[0] in needed and op.results[0] not in values:
            operands = [values[operand] for operand in op.operands]
            values[op.results[0]] = _apply(op.operation, operands)
    raise HloOptError("error: a function without a return cannot be evaluated")


def _needed(block: ir.Block, given: Mapping[ir.Value, Any]) -> set[ir.Value]:
    """Values that the block's result depends on, given some."""
    needed: set[ir.Value] = set()
    for op in reversed(list(block.operations)):
        if op.operation.name == "func.return" or op.results[0] in needed:
            needed.update(operand for operand in op.operands if operand not in given)
    return needed


def _apply(op: ir.Operation, operands: list[Any]) -> Any:
    import jax.numpy as jnp
    from jax import dtypes

    if any(isinstance(operand, bool) for operand in operands):
        folded = _folded(op, operands)
        if folded is not None:
            return folded
    dtype = numpy_dtype(element_type(op.results[0]))
    if dtype is not None and dtypes.canonicalize_dtype(dtype) != dtype:
        raise HloOptError(f"error: {op.name} is computed in 64 bits, which kernels do not have")
    if op.name == "stablehlo.constant":
        attribute = splat_attribute(op)
        assert attribute is not None
        return jnp.asarray(scalar(attribute.get_splat_value()), dtype)
    if op.name == "stablehlo.convert":
        (value,) = operands
        # StableHLO truncates floats towards zero and takes any non-zero value for true.
        return (
            value != 0
            if dtype is not None and dtype.kind == "b"
            else jnp.asarray(value).astype(dtype)
        )
    if op.name == "stablehlo.compare":
        return _COMPARISONS[direction(op)](*operands)
    table = _functions()
    if op.name not in table:
        raise HloOptError(f"error: {op.name} cannot be evaluated on a tile")
    return table[op.name](*operands)


def _folded(op: ir.Operation, operands: list[Any]) -> Any:
    """The result where known conditions decide it without computing; None elsewhere."""
    if op.name == "stablehlo.select" and isinstance(operands[0], bool):
        return operands[1] if operands[0] else operands[2]
    if op.name in ("stablehlo.and", "stablehlo.or"):
        decided = op.name == "stablehlo.or"  # true decides a disjunction, false a conjunction
        for here, there in (operands, reversed(operands)):
            if isinstance(here, bool):
                return here if here is decided else there
    return not operands[0] if op.name == "stablehlo.not" else None


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "GE": lambda a, b: a >= b,
    "GT": lambda a, b: a > b,
    "LE": lambda a, b: a <= b,
    "LT": lambda a, b: a < b,
}


def _functions() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp
    from jax import lax

    def together(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: fn(*jnp.broadcast_arrays(*args))

    table: dict[str, Callable[..., Any]] = {
        "abs": jnp.abs,
        "add": jnp.add,
        "and": jnp.bitwise_and,
        "cbrt": jnp.cbrt,
        "ceil": jnp.ceil,
        "clamp": lambda low, x, high: jnp.minimum(jnp.maximum(x, low), high),
        "cosine": jnp.cos,
        "divide": together(lax.div),  # integers round towards zero in both
        "exponential": jnp.exp,
        "exponential_minus_one": jnp.expm1,
        "floor": jnp.floor,
        "is_finite": jnp.isfinite,
        "log": jnp.log,
        "log_plus_one": jnp.log1p,
        "logistic": lax.logistic,
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "multiply": jnp.multiply,
        "negate": jnp.negative,
        "not": jnp.bitwise_not,
        "or": jnp.bitwise_or,
        "power": together(lax.pow),
        "remainder": together(lax.rem),
        "round_nearest_even": jnp.round,
        "rsqrt": lax.rsqrt,
        "select": jnp.where,
        "shift_left": together(lax.shift_left),
        "shift_right_arithmetic": together(lax.shift_right_arithmetic),
        "shift_right_logical": together(lax.shift_right_logical),
        "sign": jnp.sign,
        "sine": jnp.sin,
        "sqrt": jnp.sqrt,
        "subtract": jnp.subtract,
        "tanh": jnp.tanh,
        "xor": jnp.bitwise_xor,
    }
    return {f"stablehlo.{name}": fn for name, fn in table.items()}
