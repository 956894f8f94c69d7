"""`quantize`: weights of matmuls as int8 with one scale for each output channel."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from hlo_opt.errors import HloOptError
from hlo_opt.ir.prepared import (
    PREPARED,
    insert_arguments,
    prepare_function,
    prepared_paths,
)
from hlo_opt.ir.signature import bytes_of, main_function, set_function_type
from hlo_opt.ir.walk import defining_op, element_type
from hlo_opt.passes.hoist_weights import partitioned
from hlo_opt.passes.normalize import splat_of
from hlo_opt.pipeline import Pass, PassContext, register_pass

LARGEST = 127  # symmetric: -128 is not used
_FLOATS = ("bf16", "f16", "f32")
_LAYOUT = ("stablehlo.convert", "stablehlo.reshape", "stablehlo.transpose")
# Users of weights that a reader may expect to be quantized as well.
_MAY_MULTIPLY = (
    "chlo.ragged_dot",
    "func.call",
    "stablehlo.case",
    "stablehlo.convolution",
    "stablehlo.custom_call",
    "stablehlo.while",
)


@dataclass(frozen=True)
class _Use:
    """A matmul that reads a weight: through `chain`, layout ops in order, as operand `number`.

    `type` is the operand's: it is what int8 is converted to.
    """

    dot: ir.Operation
    number: int
    chain: tuple[ir.Operation, ...]
    type: ir.Type


@dataclass(frozen=True)
class _Weight:
    """A weight that can be quantized: argument `number` of `@main`, summed over `contracted`."""

    number: int
    path: str
    contracted: frozenset[int]
    uses: tuple[_Use, ...]


@dataclass(frozen=True)
class _Refusal:
    reason: str


@register_pass("quantize")
@dataclass(frozen=True)
class Quantize(Pass):
    """Stores weights of matmuls as int8 with an f32 scale for each output channel.

    Works on what `hoist-weights` gave: `@prepare` rounds, `@main` multiplies a matmul's result by
    the scales.

    Options:
      weights: what they become; `int8`.
      exclude: tree paths to leave alone, comma-separated; `*` stands for any text.
      min-elements: leave smaller weights alone.
    """

    structure: ClassVar[str] = "weight"
    weights: str = "int8"
    exclude: str = ""
    min_elements: int = 4096

    def __post_init__(self) -> None:
        check_weights(self.weights)

    def run(self, module: ir.Module, ctx: PassContext) -> None:
        prepare = prepare_function(module)
        if prepare is None:
            raise HloOptError(
                "error: there is no @prepare to quantize weights in: run hoist-weights"
            )
        main = main_function(module)
        paths = prepared_paths(main)
        for pattern in filter(None, self.exclude.split(",")):
            if not any(_matches(pattern, path) for path in paths.values()):
                self.remark(ctx, "missed", f"exclude={pattern} matches no parameter", op=main)
        if partitioned(module, main):
            self.remark(ctx, "missed", "the module is partitioned", op=main)
            return
        found = list(self._weights(main, paths, ctx))
        first = min(paths, default=0)
        returned = list(prepare.regions[0].blocks[0].operations)[-1].operation
        scales = [_round(returned, weight.number - first, weight) for weight in found]
        _return_more(prepare, returned, scales)
        arguments = list(main.regions[0].blocks[0].arguments)
        types = [arguments[weight.number].type for weight in found]
        with module.context:
            added = [
                (scale.type, f"{weight.path} scale", {PREPARED: ir.StringAttr.get(weight.path)})
                for scale, weight in zip(scales, found, strict=True)
            ]
        insert_arguments(main, first + len(paths), added)
        arguments = list(main.regions[0].blocks[0].arguments)
        for number, (weight, old) in enumerate(zip(found, types, strict=True)):
            after = math.prod(old.shape) + bytes_of(scales[number].type)
            shape = "x".join(map(str, old.shape))
            self.remark(
                ctx,
                "applied",
                f"{weight.path} to int8: {shape}, {bytes_of(old):,} -> {after:,} bytes",
                op=weight.uses[0].dot,
                path=weight.path,
                before=bytes_of(old),
                after=after,
            )
            _apply(weight, arguments[weight.number], arguments[first + len(paths) + number])
        set_function_type(main)

    def _weights(
        self, main: ir.Operation, paths: dict[int, str], ctx: PassContext
    ) -> Iterator[_Weight]:
        """What can be quantized; says what cannot."""
        arguments = list(main.regions[0].blocks[0].arguments)
        weights = {arguments[number] for number in paths}
        for number, path in paths.items():
            match = self._match(arguments[number], number, path)
            if isinstance(match, _Weight) and any(_other(use) in weights for use in match.uses):
                match = _Refusal("both operands of a matmul are parameters")
            if isinstance(match, _Refusal):
                user = next(iter(arguments[number].uses)).owner
                self.remark(ctx, "missed", f"{path}: {match.reason}", op=user, path=path)
            elif match is not None:
                yield match

    def _match(self, weight: ir.Value, number: int, path: str) -> _Weight | _Refusal | None:
        """A weight, why it is left alone, or None for what is not a matmul's weight."""
        type_ = weight.type
        if str(element_type(weight)) not in _FLOATS or not type_.has_static_shape:
            return None
        uses, others = _uses(weight)
        size = math.prod(type_.shape)
        if not size:
            return None
        if not uses:
            named = [name for name in others if name in _MAY_MULTIPLY]
            large = size >= self.min_elements and len(type_.shape) > 1
            return _Refusal(f"used by {named[0]}") if named and large else None
        if others:
            return _Refusal(f"also used by {others[0]}")
        if any(_matches(pattern, path) for pattern in self.exclude.split(",")):
            return _Refusal("excluded")
        if size < self.min_elements:
            return _Refusal(f"{size} elements, fewer than min-elements={self.min_elements}")
        contracted: set[frozenset[int]] = set()
        for use in uses:
            dims = _contracted(use)
            if isinstance(dims, _Refusal):
                return dims
            contracted.add(dims)
        if len(contracted) > 1:
            return _Refusal("several matmuls sum over different dimensions of it")
        return _Weight(number, path, contracted.pop(), tuple(uses))


def check_weights(weights: str) -> None:
    """Raises `HloOptError` for a type weights cannot be quantized to."""
    if weights != "int8":
        raise HloOptError(f"error: weights can be quantized to 'int8', not to '{weights}'")


def _matches(pattern: str, path: str) -> bool:
    # Not fnmatch: paths are full of brackets.
    return re.fullmatch(re.escape(pattern.strip()).replace(r"\*", ".*"), path) is not None


def _uses(value: ir.Value, chain: tuple[ir.Operation, ...] = ()) -> tuple[list[_Use], list[str]]:
    """The matmuls that read a value through layout ops, and the names of other users."""
    dots: list[_Use] = []
    others: list[str] = []
    for use in value.uses:
        op = use.owner.operation
        if op.name in _LAYOUT and any(True for _ in op.results[0].uses):
            more, names = _uses(op.results[0], (*chain, op))
            dots += more
            others += names
        elif op.name == "stablehlo.dot_general":
            dots.append(_Use(op, use.operand_number, chain, value.type))
        elif op.name == "stablehlo.composite":
            others.append(ir.StringAttr(op.attributes["name"]).value)
        else:
            others.append(op.name)
    return dots, others


def _other(use: _Use) -> ir.Value:
    """What the other operand of a matmul is laid out from."""
    value = use.dot.operands[1 - use.number]
    while (op := defining_op(value)) is not None and op.name in _LAYOUT:
        value = op.operands[0]
    return value


def _sides(dot: ir.Operation, number: int) -> tuple[list[int], list[int]]:
    """The batch and the contracted dimensions of an operand of a matmul."""
    numbers = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    if number == 0:
        return list(numbers.lhs_batching_dimensions), list(numbers.lhs_contracting_dimensions)
    return list(numbers.rhs_batching_dimensions), list(numbers.rhs_contracting_dimensions)


def _contracted(use: _Use) -> frozenset[int] | _Refusal:
    """The dimensions of the weight that a matmul sums over."""
    types = [use.dot.operands[use.number], use.dot.results[0], *(op.results[0] for op in use.chain)]
    for value in types:
        if str(element_type(value)) not in _FLOATS:
            return _Refusal(f"a matmul works in {element_type(value)}")
    if "algorithm" in use.dot.attributes:
        return _Refusal("a matmul asks for a particular algorithm")
    return _levels(use)[0] or _Refusal("a reshape mixes summed and kept dimensions")


def _levels(use: _Use) -> list[frozenset[int]]:
    """The summed dimensions before every op of the chain, and at the matmul; empty: unknown."""
    dims = frozenset(_sides(use.dot, use.number)[1])
    levels = [dims]
    for op in reversed(use.chain):
        if op.name == "stablehlo.transpose":
            permutation = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
            dims = frozenset(permutation[dim] for dim in dims)
        elif op.name == "stablehlo.reshape":
            dims = _before_reshape(op.operands[0].type.shape, op.results[0].type.shape, dims)
        levels.append(dims)
    return levels[::-1]


def _before_reshape(old: Sequence[int], new: Sequence[int], dims: frozenset[int]) -> frozenset[int]:
    """The dimensions of `old` that `dims` of `new` are made of; empty where they are mixed."""
    result: set[int] = set()
    i = j = 0
    while i < len(old) and j < len(new):
        group, size = [i], [j]
        left, right = old[i], new[j]
        while left != right:
            if left < right:
                i += 1
                left *= old[i]
                group.append(i)
            else:
                j += 1
                right *= new[j]
                size.append(j)
        summed = {dim in dims for dim in size if new[dim] != 1}
        if len(summed) > 1:
            return frozenset()
        if summed == {True}:
            result.update(group)
        i, j = i + 1, j + 1
    return frozenset(result)


def _tensor(shape: Sequence[int], element: ir.Type) -> ir.Type:
    return ir.RankedTensorType.get(list(shape), element)


def _make(name: str, type_: ir.Type, *operands: ir.Value, **attributes: ir.Attribute) -> ir.Value:
    op = ir.Operation.create(f"stablehlo.{name}", [type_], list(operands), attributes)
    return op.results[0]


def _constant(number: float, shape: Sequence[int] = ()) -> ir.Value:
    return splat_of(_tensor(shape, ir.F32Type.get()), number)


def _round(returned: ir.Operation, place: int, weight: _Weight) -> ir.Value:
    """Makes a value that `@prepare` returns int8; returns its scales, one for each kept element."""
    value = returned.operands[place]
    shape = value.type.shape
    kept = [dim for dim in range(len(shape)) if dim not in weight.contracted]
    with returned.context, returned.location, ir.InsertionPoint(returned):
        f32, i8 = ir.F32Type.get(), ir.IntegerType.get_signless(8)
        wide = value
        if str(element_type(value)) != "f32":
            wide = _make("convert", _tensor(shape, f32), value)
        dims = sorted(weight.contracted)
        largest = _reduce("maximum", _make("abs", wide.type, wide), 0, dims)
        scale_type = largest.type
        scale = _make("divide", scale_type, largest, _constant(LARGEST, scale_type.shape))
        empty = stablehlo.compare(
            scale,
            _constant(0, scale_type.shape),
            stablehlo.ComparisonDirectionAttr.get("EQ"),
            compare_type=stablehlo.ComparisonTypeAttr.get("FLOAT"),
        )
        scale = _make("select", scale_type, empty, _constant(1, scale_type.shape), scale)
        # A channel with NaN or infinity becomes NaN. The maximum does not say: XLA's on CPU may
        # drop NaN.
        finite = _reduce("and", stablehlo.is_finite(wide), 1, dims)
        nan = _constant(math.nan, scale_type.shape)
        scale = _make("select", scale_type, finite, scale, nan)
        spread = _make(
            "broadcast_in_dim",
            wide.type,
            scale,
            broadcast_dimensions=ir.DenseI64ArrayAttr.get(kept),
        )
        steps = _make("round_nearest_even", wide.type, _make("divide", wide.type, wide, spread))
        steps = _make("clamp", wide.type, _constant(-LARGEST), steps, _constant(LARGEST))
        returned.operands[place] = _make("convert", _tensor(shape, i8), steps)
    return scale


def _reduce(name: str, value: ir.Value, start: int, dims: Sequence[int]) -> ir.Value:
    """A reduction over dimensions by the op `name`."""
    shape = [size for dim, size in enumerate(value.type.shape) if dim not in dims]
    scalar = _tensor([], element_type(value))
    op = ir.Operation.create(
        "stablehlo.reduce",
        [_tensor(shape, element_type(value))],
        [value, splat_of(scalar, start)],
        {"dimensions": ir.DenseI64ArrayAttr.get(list(dims))},
        regions=1,
    )
    block = op.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        combined = _make(name, scalar, *block.arguments)
        ir.Operation.create("stablehlo.return", operands=[combined])
    return op.results[0]


def _return_more(
    function: ir.Operation, returned: ir.Operation, values: Sequence[ir.Value]
) -> None:
    with function.context, returned.location, ir.InsertionPoint(returned):
        ir.Operation.create("func.return", operands=[*returned.operands, *values])
    returned.erase()
    set_function_type(function)


def _apply(weight: _Weight, argument: ir.Value, scale: ir.Value) -> None:
    """Makes the matmuls of a weight read int8 and scale their results."""
    shape = argument.type.shape
    with argument.context, ir.Location.unknown():
        argument.set_type(_tensor(shape, ir.IntegerType.get_signless(8)))
    places = {op: place for use in weight.uses for place, op in enumerate(use.chain)}
    last_first = sorted(places, key=lambda op: -places[op])
    for use in weight.uses:
        _rewrite(use, argument, scale)
    for op in last_first:
        op.erase()


def _rewrite(use: _Use, weight: ir.Value, scale: ir.Value) -> None:
    """Replaces one matmul by `(x @ convert(weight)) * scale`."""
    dot, number = use.dot, use.number
    result = dot.results[0]
    with dot.context, dot.location, ir.InsertionPoint(dot):
        f32 = ir.F32Type.get()
        factor = _spread(use, scale)
        for op in use.chain:
            if op.name != "stablehlo.convert":
                shape = op.results[0].type.shape
                weight = _same_layout(op, weight, _tensor(shape, element_type(weight)))
        operands = list(dot.operands)
        operands[number] = _make("convert", use.type, weight)
        attributes = {name: dot.attributes[name] for name in dot.attributes}
        product = _make("dot_general", _tensor(result.type.shape, f32), *operands, **attributes)
        product = _make("multiply", product.type, product, factor)
        if product.type != result.type:
            product = _make("convert", result.type, product)
    result.replace_all_uses_with(product)
    dot.erase()


def _same_layout(op: ir.Operation, value: ir.Value, type_: ir.Type) -> ir.Value:
    attributes = {name: op.attributes[name] for name in op.attributes}
    return _make(op.name.removeprefix("stablehlo."), type_, value, **attributes)


def _spread(use: _Use, scale: ir.Value) -> ir.Value:
    """The scales, laid out as the result of a matmul."""
    f32 = ir.F32Type.get()
    result = _tensor(use.dot.results[0].type.shape, f32)
    levels = _levels(use)
    for op, before, after in zip(use.chain, levels, levels[1:], strict=False):
        if op.name == "stablehlo.convert":
            continue
        # With size 1 for the summed dimensions the op means the same for the scales.
        old, new = op.operands[0].type.shape, op.results[0].type.shape
        scale = _reshape(scale, _ones(old, before))
        scale = _same_layout(op, scale, _tensor(_ones(new, after), f32))
    shape = use.type.shape
    batch, summed = _sides(use.dot, use.number)
    kept = [dim for dim in range(len(shape)) if dim not in summed]
    scale = _reshape(scale, [shape[dim] for dim in kept])
    free = [dim for dim in kept if dim not in batch]
    start = len(result.shape) - len(free) if use.number == 1 else len(batch)
    places = [batch.index(d) if d in batch else start + free.index(d) for d in kept]
    return _make(
        "broadcast_in_dim",
        result,
        scale,
        broadcast_dimensions=ir.DenseI64ArrayAttr.get(places),
    )


def _reshape(value: ir.Value, shape: list[int]) -> ir.Value:
    if list(value.type.shape) == shape:
        return value
    return _make("reshape", _tensor(shape, element_type(value)), value)


def _ones(shape: Sequence[int], dims: frozenset[int]) -> list[int]:
    return [1 if dim in dims else size for dim, size in enumerate(shape)]
