"""Inlining of private helper functions, callees first."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxlib.mlir import ir

from hlo_opt import compat
from hlo_opt.ir.module import run_cxx_passes
from hlo_opt.ir.walk import functions, symbol_name


@dataclass
class _Function:
    op: ir.Operation
    size: int = 0
    calls: list[ir.Operation] = field(default_factory=list)
    users: int = 0


def inline_calls(module: ir.Module, largest: int) -> bool:
    """Inlines calls of private functions of at most `largest` ops, or called from one place.

    Functions that nothing uses any more are removed. Recursive functions, functions of several
    blocks and those marked `no_inline` are left alone. Says whether anything was inlined.
    """
    changed = False
    while _inline_once(module, largest):
        # A function may be called from one place only once its dead callers are gone.
        run_cxx_passes(module.operation, "symbol-dce")
        changed = True
    return changed


def _inline_once(module: ir.Module, largest: int) -> int:
    table = {symbol_name(op): _summary(op) for op in functions(module)}
    for function in table.values():
        for call in function.calls:
            if (name := _callee(call)) in table:
                table[name].users += 1
    done: set[str] = set()
    return sum(_inline_into(name, table, largest, done, ()) for name in table)


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
) -> int:
    """Inlines everything that may be inlined into function `name`; returns how many calls."""
    if name in done or name not in table:
        return 0
    done.add(name)
    function, count = table[name], 0
    for call in function.calls:
        callee = _callee(call)
        if callee == name or callee in path:
            continue
        count += _inline_into(callee, table, largest, done, (*path, name))
        target = table.get(callee)
        if target is not None and _may_inline(target, largest):
            function.size += target.size
            compat.inline_call(call, target.op)
            count += 1
    return count


def _may_inline(function: _Function, largest: int) -> bool:
    private = "sym_visibility" in function.op.attributes and (
        ir.StringAttr(function.op.attributes["sym_visibility"]).value == "private"
    )
    body = function.op.regions[0].blocks
    small = function.size <= largest or function.users == 1
    return private and small and len(body) == 1 and "no_inline" not in function.op.attributes
