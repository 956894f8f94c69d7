"""Small questions about ops and values that patterns and passes ask all the time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from jaxlib.mlir import ir


def defining_op(value: ir.Value) -> ir.Operation | None:
    """The op that produces `value`, or None for a block argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def functions(module: ir.Module) -> Iterator[ir.Operation]:
    """The module's functions in order."""
    for op in module.body.operations:
        if op.operation.name == "func.func":
            yield op.operation


def symbol_name(function: ir.Operation) -> str:
    """The name of a function."""
    return ir.StringAttr(function.attributes["sym_name"]).value


def splat(value: ir.Value) -> float | int | None:
    """The scalar a constant (or a broadcast of one) repeats, or None."""
    op = defining_op(value)
    while op is not None and op.name in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
        op = defining_op(op.operands[0])
    attribute = splat_attribute(op) if op is not None else None
    return scalar(attribute.get_splat_value()) if attribute is not None else None


def splat_attribute(op: ir.Operation) -> ir.DenseElementsAttr | None:
    """The value of a `stablehlo.constant` that repeats one float or integer, or None."""
    # The bindings cannot even look at complex or quantized constants.
    if op.name != "stablehlo.constant" or not isinstance(
        element_type(op.results[0]), ir.FloatType | ir.IntegerType
    ):
        return None
    attribute = op.attributes["value"]
    if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
        return attribute
    return None


def element_type(value: ir.Value) -> ir.Type | None:
    """The element type of a ranked tensor value; None for tokens, tuples and the like."""
    type_ = value.type
    return type_.element_type if isinstance(type_, ir.RankedTensorType) else None


def scalar(attribute: ir.Attribute) -> float | int | None:
    """The Python number in a float or integer attribute, or None."""
    if isinstance(attribute, ir.FloatAttr | ir.IntegerAttr | ir.BoolAttr):
        return attribute.value
    return None


def direction(op: ir.Operation) -> str:
    """The direction of a `stablehlo.compare`: `EQ`, `NE`, `GE`, `GT`, `LE` or `LT`."""
    return str(op.attributes["comparison_direction"]).split()[-1].rstrip(">")


def is_bool(value: ir.Value) -> bool:
    """Whether a tensor holds `i1`."""
    element = element_type(value)
    return isinstance(element, ir.IntegerType) and element.width == 1


def reduction(op: ir.Operation) -> tuple[str, list[int]] | None:
    """The combining op's name and the dimensions of a one-input `stablehlo.reduce`, or None."""
    if op.name != "stablehlo.reduce" or len(op.operands) != 2:
        return None
    body = list(op.regions[0].blocks[0].operations)
    if len(body) != 2:
        return None
    combine, arguments = body[0].operation, op.regions[0].blocks[0].arguments
    operands = list(combine.operands)
    if operands not in ([arguments[0], arguments[1]], [arguments[1], arguments[0]]):
        return None
    if list(body[1].operation.operands) != list(combine.results):
        return None
    return combine.name, list(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))


def closed_functions(module: ir.Module) -> set[str]:
    """Names of functions that passes leave alone: what composites refer to, and kernels."""
    names = {symbol_name(f) for f in functions(module) if "no_inline" in f.attributes}

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.composite":
            names.add(ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value)
            if "composite_attributes" in op.attributes:  # `jax.lax.composite` may give none
                for attribute in ir.DictAttr(op.attributes["composite_attributes"]):
                    if isinstance(attribute.attr, ir.FlatSymbolRefAttr):
                        names.add(attribute.attr.value)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return names


def ops_named(name: str | tuple[str, ...], module: ir.Module, skip: set[str]) -> list[ir.Operation]:
    """Every op of a name, or of several, outside the functions named in `skip`, in order."""
    found: list[ir.Operation] = []
    names = (name,) if isinstance(name, str) else name

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "func.func" and symbol_name(op) in skip:
            return ir.WalkResult.SKIP
        if op.name in names:
            found.append(op.operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def in_block_order(ops: Iterable[ir.Operation]) -> list[ir.Operation]:
    """Ops of one block, sorted by their place in it."""

    def compare(left: ir.Operation, right: ir.Operation) -> int:
        return -1 if left.is_before_in_block(right) else int(left != right)

    return sorted(ops, key=functools.cmp_to_key(compare))


def is_float_convert(op: ir.Operation) -> bool:
    """Whether the op converts floats to floats, which rounds at most."""
    return op.name == "stablehlo.convert" and all(
        isinstance(element_type(value), ir.FloatType) for value in (op.operands[0], op.results[0])
    )


def ops_between(last: ir.Operation, boundary: Iterable[ir.Value]) -> tuple[ir.Operation, ...]:
    """What `last` is computed by from the `boundary` values, operands before users, `last` last."""
    stop = set(boundary)
    done: set[ir.Operation] = set()

    def visit(op: ir.Operation) -> Iterator[ir.Operation]:
        done.add(op)
        for operand in op.operands:
            source = defining_op(operand)
            if operand not in stop and source is not None and source not in done:
                yield from visit(source)
        yield op

    return tuple(visit(last))


# Ops that must keep their place among others of their kind.
ORDERED_OPS = frozenset(
    {
        "func.call",
        "stablehlo.all_gather",
        "stablehlo.all_reduce",
        "stablehlo.all_to_all",
        "stablehlo.collective_permute",
        "stablehlo.custom_call",
        "stablehlo.infeed",
        "stablehlo.outfeed",
        "stablehlo.recv",
        "stablehlo.reduce_scatter",
        "stablehlo.send",
    }
)


def readers(last: ir.Operation, values: Iterable[ir.Value]) -> Iterator[ir.Operation]:
    """Ops of `last`'s block, before it, that depend on `values`, in no particular order."""
    seen: set[ir.Operation] = set()
    pending = list(values)
    while pending:
        for use in pending.pop().uses:
            op = _in_block(use.owner.operation, last.block)
            if op is None or op in seen or op == last or not op.is_before_in_block(last):
                continue
            seen.add(op)
            pending.extend(op.results)
            yield op


def _in_block(op: ir.Operation, block: ir.Block) -> ir.Operation | None:
    """The op of `block` that is or holds `op`."""
    while op is not None and op.block != block:
        op = op.parent.operation if op.parent is not None else None
    return op
