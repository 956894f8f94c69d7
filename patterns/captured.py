"""Captured scalar functions (`score`, `probs`, `sink`) as StableHLO functions of rank-0 ops."""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir

from hlo_opt.ir.outline import Outliner
from hlo_opt.ir.scalar import (
    Apply,
    Element,
    FunctionEmitter,
    Position,
    binary,
    constant,
    convert,
    elements,
    nodes,
    tensor0,
    widen,
)
from hlo_opt.patterns.attention import Attention, Captured


def emit_captured(
    outliner: Outliner,
    kind: str,
    match: Attention,
    captured: Captured,
    extras: Sequence[Element | Apply],
) -> str:
    """Adds `score`, `probs` or `sink` to a module; see `docs/composites.md` for its type.

    Args:
      outliner: of the module it is added to, which may be another than the match's.
      kind: `"score"`, `"probs"` or `"sink"`.
      extras: the nodes that are passed in, as arguments in this order.

    Returns:
      the symbol name.
    """
    with outliner.module.context, ir.Location.unknown():
        f32 = ir.F32Type.get()
        i32 = ir.IntegerType.get_signless(32)
        types = [
            tensor0(f32),
            *(tensor0(extra.type) for extra in extras),
            *[tensor0(i32)] * 4,
        ]

        def build(arguments: Sequence[ir.Value]) -> Sequence[ir.Value]:
            indices = arguments[-4:]
            passed = zip(extras, arguments[1:-4], strict=True)
            values = {id(node): value for node, value in passed}
            inner = {id(e) for e in elements(captured.expr) if e == captured.inner}
            values.update(dict.fromkeys(inner, arguments[0]))
            positions = (n for n in nodes(captured.expr) if isinstance(n, Position))
            used = {atom for node in positions for atom in node.index.atoms}
            emitter = FunctionEmitter(values, inner, _atom_values(match, indices, used))
            result = convert(widen(emitter.emit(captured.expr)), f32)
            if captured.factor != 1:
                result = binary("multiply", result, constant(f32, captured.factor))
            return [result]

        return outliner.function(f"hlo_opt.attention.{kind}", types, [tensor0(f32)], build)


def _atom_values(
    match: Attention, indices: Sequence[ir.Value], used: set[int]
) -> dict[int, ir.Value]:
    """The value of every used atom, from a score function's batch, head, query and key indices."""
    heads = (*match.atoms.get("kv_head", ()), *match.atoms.get("group", ()))
    rows = (match.atoms["batch"], heads, match.atoms.get("query", ()), match.atoms["key"])
    values: dict[int, ir.Value] = {}
    for index, atoms in zip(indices, rows, strict=True):
        if not used & set(atoms):
            continue
        rest = index
        for place, atom in enumerate(reversed(atoms)):
            if place == len(atoms) - 1:
                values[atom] = rest
                break
            size = constant(ir.IntegerType.get_signless(32), match.space.sizes[atom])
            values[atom] = binary("remainder", rest, size)
            rest = binary("divide", rest, size)
    return values
