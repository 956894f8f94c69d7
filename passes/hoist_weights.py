"""`hoist-weights`: moves what depends on parameters alone out of `@main`, into `@prepare`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxlib.mlir import ir

from hlo_opt.errors import HloOptError
from hlo_opt.ir.cut import cheapest_cut
from hlo_opt.ir.prepared import (
    PARAMETER,
    PLACES,
    PREPARE,
    PREPARED,
    Attributes,
    argument_attributes,
    erase_arguments,
    insert_arguments,
    prepare_function,
    set_argument_attributes,
)
from hlo_opt.ir.scalar import ELEMENTWISE_OPS
from hlo_opt.ir.signature import bytes_of, main_function
from hlo_opt.ir.walk import functions, reduction, symbol_name
from hlo_opt.pipeline import Pass, PassContext, register_pass

# What may move: no side effects, no random bits, no collectives, no calls, no loops.
_MOVABLE = ELEMENTWISE_OPS | {
    f"stablehlo.{name}"
    for name in (
        "bitcast_convert",
        "broadcast_in_dim",
        "concatenate",
        "constant",
        "dot_general",
        "dynamic_slice",
        "gather",
        "iota",
        "pad",
        "reduce",
        "reshape",
        "reverse",
        "slice",
        "transpose",
    )
}
_NAMED = 4
_DONATED = ("tf.aliasing_output", "jax.buffer_donor")
_SHARDED = ("sdy.sharding", "mhlo.sharding")


@register_pass("hoist-weights")
@dataclass(frozen=True)
class HoistWeights(Pass):
    """Moves what depends on parameters alone from `@main` to `@prepare`, to run once.

    `@main` then takes the results of `@prepare` where the parameters were. They are chosen so that
    together they have the fewest bytes.

    Options:
      parameters: the arguments of `main` that are parameters: places (`0-11`, `0,2,5-9`), or names
        where the module carries them (`params` is every argument called `params` or inside the
        tree of that name). By default those with the attribute `hlo_opt.parameter`.
    """

    structure: ClassVar[str] = "weights"
    parameters: str = ""

    def run(self, module: ir.Module, ctx: PassContext) -> None:
        if prepare_function(module) is not None:
            return
        if any(symbol_name(function) == PREPARE for function in functions(module)):
            raise HloOptError(f"error: the module already has a function '{PREPARE}'")
        main = main_function(module)
        chosen = self._chosen(main)
        arguments = list(main.regions[0].blocks[0].arguments)
        parameters = {arguments[number]: path for number, path in chosen.items()}
        if partitioned(module, main):
            self.remark(ctx, "missed", "the module is partitioned: they pass unchanged", op=main)
            cut = [value for value in parameters if any(True for _ in value.uses)]
        else:
            cut = _cut(main, list(parameters))
        before, after = (sum(bytes_of(v.type) for v in side) for side in (parameters, cut))
        _move(module, main, parameters, tuple(chosen), cut)
        self.remark(
            ctx,
            "applied",
            f"hoisted: @prepare turns {len(parameters)} parameters ({before:,} bytes) into the "
            f"{len(cut)} values ({after:,} bytes) that @main takes",
            op=main,
            before=before,
            after=after,
        )

    def _chosen(self, main: ir.Operation) -> dict[int, str]:
        """Places and paths of the parameters. Raises `HloOptError`."""
        attributes = argument_attributes(main)
        arguments = main.regions[0].blocks[0].arguments
        paths = [_path(n, a, attributes[n]) for n, a in enumerate(arguments)]
        if self.parameters:
            chosen = [
                n for item in self.parameters.split(",") for n in _places(item.strip(), paths)
            ]
        else:
            chosen = [n for n, one in enumerate(attributes) if PARAMETER in one]
        if not chosen:
            raise HloOptError(
                "error: no argument of 'main' is known to be a parameter: name them with "
                "parameters=… (hlo_opt.jit has an argument of that name)"
            )
        for number in chosen:
            if any(name in attributes[number] for name in _DONATED):
                raise HloOptError(
                    f"error: {paths[number]} is donated, so it cannot be a parameter: what is "
                    "prepared from it is used again"
                )
        return {number: paths[number] for number in sorted(set(chosen))}


def _path(number: int, argument: ir.Value, attributes: Attributes) -> str:
    """The tree path of an argument: what was said of it, or JAX's name for it."""
    if PARAMETER in attributes:
        return ir.StringAttr(attributes[PARAMETER]).value
    location = ir.BlockArgument(argument).location
    return location.name_str if isinstance(location, ir.NameLoc) else f"arg{number}"


def _places(item: str, paths: Sequence[str]) -> list[int]:
    """The arguments that one item of `parameters=` names. Raises `HloOptError` for none."""
    if match := re.fullmatch(r"(\d+)(?:-(\d+))?", item):
        first, last = int(match[1]), int(match[2] or match[1])
        if first <= last < len(paths):
            return list(range(first, last + 1))
        raise HloOptError(f"error: parameters={item}: 'main' has arguments 0 to {len(paths) - 1}")
    found = [n for n, path in enumerate(paths) if re.match(rf"{re.escape(item)}(\Z|[\[.])", path)]
    if not found:
        raise HloOptError(f"error: parameters={item}: no argument of 'main' has that name")
    return found


def partitioned(module: ir.Module, main: ir.Operation) -> bool:
    """Whether values of `main` are spread over several devices."""
    attributes = module.operation.attributes
    name = "mhlo.num_partitions"
    if name in attributes and ir.IntegerAttr(attributes[name]).value > 1:
        return True
    return any(name in one for one in argument_attributes(main) for name in _SHARDED)


def _cut(main: ir.Operation, parameters: Sequence[ir.Value]) -> list[ir.Value]:
    """The values to pass instead of the parameters, in program order."""
    block = main.regions[0].blocks[0]
    made: dict[ir.Value, list[ir.Value]] = {value: [] for value in parameters}
    constant: set[ir.Value] = set()
    sinks: set[ir.Value] = set()
    for op in (view.operation for view in block.operations):
        operands = list(op.operands)
        weights = [operand for operand in operands if operand in made]
        if _movable(op) and all(o in made or o in constant for o in operands):
            if not weights:
                constant.update(op.results)
                continue
            made.update((result, []) for result in op.results)
            for weight in weights:
                made[weight].extend(op.results)
        else:
            sinks.update(weights)
    # A region may use values from outside of it.
    sinks |= {v for v in made if any(_inside(use.owner.operation, block) for use in v.uses)}
    cost = {value: max(bytes_of(value.type), 1) for value in made}
    found = cheapest_cut(parameters, sinks, made, cost)
    return [value for value in made if value in found]


def _movable(op: ir.Operation) -> bool:
    return op.name in _MOVABLE and (op.name != "stablehlo.reduce" or reduction(op) is not None)


def _inside(op: ir.Operation, block: ir.Block) -> bool:
    return bool(op.block != block)


def _move(
    module: ir.Module,
    main: ir.Operation,
    parameters: dict[ir.Value, str],
    places: Sequence[int],
    cut: Sequence[ir.Value],
) -> None:
    """Makes `@prepare` and puts its results in the place of the parameters."""
    block = main.regions[0].blocks[0]
    attributes = argument_attributes(main)
    origins, needed = _origins(block, parameters, cut)
    order = {path: number for number, path in enumerate(parameters.values())}
    cut = sorted(cut, key=lambda value: order[origins[value][0]])
    prepare = _prepare(module, main, parameters, places, cut, needed)
    set_argument_attributes(
        prepare,
        [
            {**attributes[n], PARAMETER: ir.StringAttr.get(path, module.context)}
            for n, path in zip(places, parameters.values(), strict=True)
        ],
    )
    kept = {value: attributes[n] for n, value in zip(places, parameters, strict=True)}
    added: list[tuple[ir.Type, str, Attributes]] = []
    for value in cut:
        path = " + ".join(origins[value])
        one = {k: a for k, a in kept.get(value, {}).items() if k != PARAMETER}
        one[PREPARED] = ir.StringAttr.get(path, module.context)
        added.append((value.type, path, one))
    numbers = {value: number for number, value in enumerate(block.arguments)}
    were = [numbers.get(value) for value in cut]
    insert_arguments(main, places[0], added)
    moved = len(cut)
    new = list(block.arguments)[places[0] : places[0] + moved]
    for value, number, argument in zip(cut, were, new, strict=True):
        value = value if number is None else block.arguments[number + moved]
        value.replace_all_uses_with(argument)
    for op in reversed(needed):
        if not any(True for result in op.results for _ in result.uses):
            op.erase()
    erase_arguments(main, [place + moved for place in places])


def _origins(
    block: ir.Block, parameters: dict[ir.Value, str], cut: Sequence[ir.Value]
) -> tuple[dict[ir.Value, list[str]], list[ir.Operation]]:
    """The paths every value comes from, and the ops that compute the cut, in program order.

    A list, not a set: the hash of an op changes with its operands.
    """
    paths: dict[ir.Value, list[str]] = {value: [path] for value, path in parameters.items()}
    ops = [view.operation for view in block.operations]
    for op in ops:
        found = dict.fromkeys(path for o in op.operands for path in paths.get(o, ()))
        if found and _movable(op):
            # Few are kept: they are for people, and a product may have hundreds.
            paths.update((result, list(found)[:_NAMED]) for result in op.results)
    wanted, needed = set(cut), []
    for op in reversed(ops):
        if any(result in wanted for result in op.results):
            needed.append(op)
            wanted.update(op.operands)
    return paths, needed[::-1]


def _prepare(
    module: ir.Module,
    main: ir.Operation,
    parameters: dict[ir.Value, str],
    places: Sequence[int],
    cut: Sequence[ir.Value],
    needed: Sequence[ir.Operation],
) -> ir.Operation:
    """The function `@prepare`, with copies of the needed ops."""
    types = [value.type for value in parameters]
    with module.context, ir.Location.unknown(), ir.InsertionPoint(main):
        prepare = ir.Operation.create(
            "func.func",
            attributes={
                "sym_name": ir.StringAttr.get(PREPARE),
                "sym_visibility": ir.StringAttr.get("public"),
                "function_type": ir.TypeAttr.get(
                    ir.FunctionType.get(types, [value.type for value in cut])
                ),
                PLACES: ir.DenseI64ArrayAttr.get(list(places)),
            },
            regions=1,
        )
        locations = [ir.Location.name(path, ir.Location.unknown()) for path in parameters.values()]
        block = prepare.regions[0].blocks.append(*types, arg_locs=locations)
        values = dict(zip(parameters, block.arguments, strict=True))
        with ir.InsertionPoint(block):
            for op in needed:
                copy = op.clone()
                for number, operand in enumerate(op.operands):
                    copy.operands[number] = values[operand]
                values.update(zip(op.results, copy.results, strict=True))
            ir.Operation.create("func.return", operands=[values[value] for value in cut])
    return prepare
