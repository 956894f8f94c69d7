"""What one element of a tensor is: an expression over scalars.

`Scalarizer.at(value, index)` follows an element through layout and elementwise ops to leaves. The
expression can then be emitted as a function of rank-0 ops. `choose_extras` decides which tensors
enter such a function from outside: the cut that moves the fewest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxlib.mlir import ir

from hlo_opt.ir.index import (
    LAYOUT_OPS,
    Index,
    Opaque,
    Space,
    pull_back,
    shape_of,
)
from hlo_opt.ir.walk import defining_op, element_type, splat_attribute

ELEMENTWISE_OPS = frozenset(
    {
        "stablehlo.abs",
        "stablehlo.add",
        "stablehlo.and",
        "stablehlo.cbrt",
        "stablehlo.ceil",
        "stablehlo.clamp",
        "stablehlo.compare",
        "stablehlo.convert",
        "stablehlo.cosine",
        "stablehlo.divide",
        "stablehlo.exponential",
        "stablehlo.exponential_minus_one",
        "stablehlo.floor",
        "stablehlo.is_finite",
        "stablehlo.log",
        "stablehlo.log_plus_one",
        "stablehlo.logistic",
        "stablehlo.maximum",
        "stablehlo.minimum",
        "stablehlo.multiply",
        "stablehlo.negate",
        "stablehlo.not",
        "stablehlo.or",
        "stablehlo.power",
        "stablehlo.reduce_precision",
        "stablehlo.remainder",
        "stablehlo.round_nearest_afz",
        "stablehlo.round_nearest_even",
        "stablehlo.rsqrt",
        "stablehlo.select",
        "stablehlo.shift_left",
        "stablehlo.shift_right_arithmetic",
        "stablehlo.shift_right_logical",
        "stablehlo.sign",
        "stablehlo.sine",
        "stablehlo.sqrt",
        "stablehlo.subtract",
        "stablehlo.tan",
        "stablehlo.tanh",
        "stablehlo.xor",
    }
)


@dataclass(frozen=True)
class Const:
    """A scalar constant; `attribute` is a FloatAttr, IntegerAttr or BoolAttr."""

    attribute: ir.Attribute
    type: ir.Type


@dataclass(frozen=True)
class Position:
    """The value of an index, as an `iota` gives it."""

    index: Index
    type: ir.Type


@dataclass(frozen=True)
class Element:
    """One element of a tensor that is not looked into: a leaf."""

    value: ir.Value
    index: tuple[Index, ...]

    @property
    def type(self) -> ir.Type:
        return element_type(self.value)


@dataclass(frozen=True, eq=False)
class Apply:
    """An elementwise op on scalars; `value` at `index` is the tensor element it stands for."""

    op: ir.Operation
    operands: tuple[Expr, ...]
    value: ir.Value
    index: tuple[Index, ...]

    @property
    def type(self) -> ir.Type:
        return element_type(self.value)


Expr: TypeAlias = Const | Position | Element | Apply


class Scalarizer:
    """Builds scalar expressions inside one block.

    Args:
      space: the atoms that indices are made of.
      block: ops outside it are leaves, constants and `iota` excepted.
      leaves: values that are leaves although they could be looked into.
      budget: how many elementwise ops to look through before the rest becomes leaves.
    """

    def __init__(
        self, space: Space, block: ir.Block, leaves: Sequence[ir.Value] = (), budget: int = 256
    ) -> None:
        self.space = space
        self.block = block
        self.leaves = set(leaves)
        self.budget = budget
        self._known: dict[tuple[ir.Value, tuple[Index, ...]], Expr] = {}

    def at(self, value: ir.Value, index: Sequence[Index]) -> Expr:
        """The expression for the element of `value` at `index`. Raises `Split` (see `index`)."""
        key = (value, tuple(index))
        if key not in self._known:
            self._known[key] = self._build(value, key[1])
        return self._known[key]

    def _build(self, value: ir.Value, index: tuple[Index, ...]) -> Expr:
        leaf = Element(value, index)
        op = defining_op(value)
        if op is None or value in self.leaves:
            return leaf
        if (constant := splat_attribute(op)) is not None:
            return Const(constant.get_splat_value(), element_type(value))
        if op.name == "stablehlo.iota":
            dim = ir.IntegerAttr(op.attributes["iota_dimension"]).value
            return Position(index[dim], element_type(value))
        if op.block != self.block:
            return leaf
        if op.name in LAYOUT_OPS:
            try:
                source = self.at(op.operands[0], pull_back(op, index, self.space))
            except Opaque:
                return leaf
            # A slice of something computed from indices is followed; a slice of data is data.
            whole = op.name != "stablehlo.slice" or all(
                is_whole(element, self.space) for element in elements(source)
            )
            return source if whole else leaf
        if op.name in ELEMENTWISE_OPS and self.budget > 0:
            self.budget -= 1
            # `select` and `clamp` take scalars beside tensors.
            operands = [self.at(o, index if shape_of(o) else ()) for o in op.operands]
            return Apply(op, tuple(operands), value, index)
        return leaf


def elements(expr: Expr) -> list[Element]:
    """The distinct leaves of an expression, in order of appearance."""
    found: dict[Element, None] = {}
    for node in nodes(expr):
        if isinstance(node, Element):
            found[node] = None
    return list(found)


def nodes(expr: Expr) -> Iterator[Expr]:
    """Every distinct node of an expression, operands before users."""
    seen: set[int] = set()

    def visit(node: Expr) -> Iterator[Expr]:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, Apply):
            for operand in node.operands:
                yield from visit(operand)
        yield node

    return visit(expr)


def is_whole(element: Element | Apply, space: Space) -> bool:
    """Whether the tensor's dimensions are distinct products of atoms, so that it can be passed."""
    atoms = [atom for part in element.index for atom in part.atoms]
    return len(set(atoms)) == len(atoms) and all(
        space.is_product(part) and space.size(part) == size
        for part, size in zip(element.index, shape_of(element.value), strict=True)
    )


def choose_extras(expr: Expr, inner: ir.Value, space: Space) -> list[Element | Apply] | None:
    """Chooses the tensors that enter a scalar function from outside.

    A sub-expression that does not depend on `inner` is either computed inside or passed as an
    extra, whichever needs fewer bytes; index arithmetic costs nothing.

    Returns:
      the nodes to pass, in order of appearance; None where a leaf cannot be passed whole.
    """
    cuts: dict[int, tuple[float, tuple[Element | Apply, ...], bool]] = {}
    for node in nodes(expr):
        cuts[id(node)] = _cut(node, inner, space, cuts)
    cost, chosen, _ = cuts[id(expr)]
    return None if math.isinf(cost) else list(chosen)


def _cut(
    node: Expr,
    inner: ir.Value,
    space: Space,
    cuts: dict[int, tuple[float, tuple[Element | Apply, ...], bool]],
) -> tuple[float, tuple[Element | Apply, ...], bool]:
    """Bytes passed, what is passed, and whether the node depends on `inner`."""
    if isinstance(node, Const | Position):
        return 0, (), False
    own = _bytes(node) if is_whole(node, space) else math.inf
    if isinstance(node, Element):
        if node.value == inner:
            return 0, (), True
        return own, (node,), False
    parts = [cuts[id(operand)] for operand in node.operands]
    chosen = tuple(dict.fromkeys(extra for part in parts for extra in part[1]))
    cost = math.inf if any(math.isinf(p[0]) for p in parts) else sum(map(_bytes, chosen))
    depends = any(part[2] for part in parts)
    if not depends and chosen and own <= cost and not math.isinf(own):
        return own, (node,), False
    return cost, chosen, depends


def _bytes(node: Element | Apply) -> float:
    type_ = node.type
    bits = type_.width if isinstance(type_, ir.IntegerType | ir.FloatType) else 64
    return math.prod(shape_of(node.value)) * max(bits, 8) / 8


class FunctionEmitter:
    """Emits an expression as rank-0 ops at the current insertion point.

    What depends on the inner element (the logit) is computed in f32 at least, whatever float type
    the original used; everything else keeps its types, since a mask or a bucket computed in a
    narrow type is a different function from one computed in a wide type.

    Args:
      values: what the passed-in nodes are inside the function, by `id`.
      inner: `id`s of the nodes that stand for the inner element.
      atoms: the i32 scalar that each atom's value is.
    """

    def __init__(
        self, values: dict[int, ir.Value], inner: set[int], atoms: dict[int, ir.Value]
    ) -> None:
        self.atoms = atoms
        self._done = dict(values)
        self._wide = set(inner)

    def emit(self, expr: Expr) -> ir.Value:
        """Emits ops for `expr` and returns its value."""
        for node in self._pending(expr):
            self._done[id(node)] = self._one(node)
        return self._done[id(expr)]

    def _pending(self, expr: Expr) -> Iterator[Expr]:
        if id(expr) in self._done:
            return
        if isinstance(expr, Apply):
            for operand in expr.operands:
                yield from self._pending(operand)
        if id(expr) not in self._done:
            yield expr

    def _one(self, node: Expr) -> ir.Value:
        if isinstance(node, Const):
            return constant(node.type, number(node.attribute))
        if isinstance(node, Position):
            return self._position(node)
        assert isinstance(node, Apply), "elements are passed in"
        operands = [self._done[id(operand)] for operand in node.operands]
        type_ = node.type
        if any(id(operand) in self._wide for operand in node.operands):
            self._wide.add(id(node))
            operands = [widen(operand) for operand in operands]
            type_ = widened(type_)
            if node.op.name in ("stablehlo.convert", "stablehlo.reduce_precision") and (
                operands[0].type == tensor0(type_)
            ):
                return operands[0]
        attributes = {a: node.op.attributes[a] for a in node.op.attributes if "." not in a}
        return ir.Operation.create(node.op.name, [tensor0(type_)], operands, attributes).results[0]

    def _position(self, node: Position) -> ir.Value:
        i32 = ir.IntegerType.get_signless(32)
        total: ir.Value | None = None
        for atom, stride in node.index.terms:
            term = self.atoms[atom]
            if stride != 1:
                term = binary("multiply", term, constant(i32, stride))
            total = term if total is None else binary("add", total, term)
        if total is None:
            total = constant(i32, node.index.offset)
        elif node.index.offset:
            total = binary("add", total, constant(i32, node.index.offset))
        return convert(total, node.type)


def number(attribute: ir.Attribute) -> float | int:
    """The Python number of a scalar attribute."""
    assert isinstance(attribute, ir.FloatAttr | ir.IntegerAttr | ir.BoolAttr)
    return attribute.value


def widened(type_: ir.Type) -> ir.Type:
    """f32 for every narrower float, the type itself otherwise."""
    if isinstance(type_, ir.FloatType) and type_.width < 32:
        return ir.F32Type.get(type_.context)
    return type_


def convert(value: ir.Value, type_: ir.Type) -> ir.Value:
    """`value`, rank 0, converted to an element type where it has another."""
    if value.type == tensor0(type_):
        return value
    return ir.Operation.create("stablehlo.convert", [tensor0(type_)], [value]).results[0]


def widen(value: ir.Value) -> ir.Value:
    """`value`, rank 0, converted to f32 where it is a narrower float."""
    return convert(value, widened(element_type(value)))


def tensor0(type_: ir.Type) -> ir.Type:
    """The rank-0 tensor type of an element type."""
    return ir.RankedTensorType.get([], type_)


def constant(type_: ir.Type, value: float | int) -> ir.Value:
    """A rank-0 constant at the current insertion point."""
    attribute = (
        ir.IntegerAttr.get(type_, int(value))
        if isinstance(type_, ir.IntegerType)
        else ir.FloatAttr.get(type_, float(value))
    )
    dense = ir.DenseElementsAttr.get_splat(tensor0(type_), attribute)
    return ir.Operation.create(
        "stablehlo.constant", [tensor0(type_)], [], {"value": dense}
    ).results[0]


def binary(name: str, left: ir.Value, right: ir.Value) -> ir.Value:
    """A binary StableHLO op on two values of one type, at the current insertion point."""
    return ir.Operation.create(f"stablehlo.{name}", [left.type], [left, right]).results[0]
