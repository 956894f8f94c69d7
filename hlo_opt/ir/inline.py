"""Inlining of private helper functions, callees first."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxlib.mlir import ir

from hlo_opt import compat
from hlo_opt.ir.walk import functions, symbol_name


@dataclass
class _Function:
    op: ir.Operation
    size: int = 0
    calls: list[ir.Operation] = field(default_factory=list)
    users: int = 0


def inline_calls(module: ir.Module, largest: int) -> None:
    """Inlines calls of private functions of at most `largest` ops, or called from one place.

    Recursive functions and functions of several blocks are left alone.
    """
    table = {symbol_name(op): _summary(op) for op in functions(module)}
    for function in table.values():
        for call in function.calls:
            if (name := _callee(call)) in table:
                table[name].users += 1
    done: set[str] = set()
    for name in table:
        _inline_into(name, table, largest, done, ())


def _summary(function: ir.Operation) -> _Function:
    found = _Function(function)

    def visit(op: ir.Operation) -> ir.WalkResult:
        found.size += 1
        if op.name == "func.call":
            found.calls.append(op.operation)
        return ir.WalkResult.ADVANCE

    function.walk(visit)
    return found


def _callee(call: ir.Operation) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def _inline_into(
    name: str, table: dict[str, _Function], largest: int, done: set[str], path: tuple[str, ...]
) -> None:
    """Inlines everything that may be inlined into function `name`."""
    if name in done or name not in table:
        return
    done.add(name)
    function = table[name]
    for call in function.calls:
        callee = _callee(call)
        if callee == name or callee in path:
            continue
        _inline_into(callee, table, largest, done, (*path, name))
        target = table.get(callee)
        if target is not None and _may_inline(target, largest):
            function.size += target.size
            compat.inline_call(call, target.op)


def _may_inline(function: _Function, largest: int) -> bool:
    private = "sym_visibility" in function.op.attributes and (
        ir.StringAttr(function.op.attributes["sym_visibility"]).value == "private"
    )
    body = function.op.regions[0].blocks
    small = function.size <= largest or function.users == 1
    return private and small and len(body) == 1 and "no_inline" not in function.op.attributes
