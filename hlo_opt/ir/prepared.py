"""Modules of two functions: `@prepare` runs once on the parameters, `@main` on what it gave.

`@prepare` has the attribute `hlo_opt.parameters`: the places its arguments had in `@main`.
Arguments of `@main` that are results of `@prepare`, in order, have `hlo_opt.prepared`: the tree
path of the parameter they come from. Before, parameters may have `hlo_opt.parameter`, their path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxlib.mlir import ir

from hlo_opt.ir.module import clone, run_cxx_passes
from hlo_opt.ir.signature import main_function, set_function_type
from hlo_opt.ir.walk import functions, symbol_name

PREPARE = "prepare"
PARAMETER = "hlo_opt.parameter"
PREPARED = "hlo_opt.prepared"
PLACES = "hlo_opt.parameters"

Attributes = dict[str, ir.Attribute]
T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """A prepared module as two.

    Attributes:
      prepare: its `main` is `@prepare`.
      main: the module without `@prepare`.
      parameters: which arguments of the original `@main` are parameters, in the order in which
        `prepare` takes them. The others keep their order.
      first: where the prepared values begin among the arguments of `main`.
      count: how many they are.
    """

    prepare: ir.Module
    main: ir.Module
    parameters: tuple[int, ...]
    first: int
    count: int

    def main_inputs(self, prepared: Sequence[T], original: Sequence[T]) -> list[T]:
        """Arguments of `main` from what `prepare` gave and the original arguments."""
        rest = [value for n, value in enumerate(original) if n not in self.parameters]
        return [*rest[: self.first], *prepared, *rest[self.first :]]


def prepare_function(module: ir.Module) -> ir.Operation | None:
    """The module's `@prepare`, or None where `hoist-weights` has not made one."""
    for function in functions(module):
        if symbol_name(function) == PREPARE and PLACES in function.attributes:
            return function
    return None


def split(module: ir.Module) -> Split | None:
    """The two functions of a prepared module as modules of their own; None where it has one."""
    prepare = prepare_function(module)
    if prepare is None:
        return None
    places = tuple(ir.DenseI64ArrayAttr(prepare.attributes[PLACES]))
    paths = prepared_paths(main_function(module))
    first, runs = clone(module), clone(module)
    main_function(first).erase()
    only = prepare_function(first)
    assert only is not None
    with module.context:
        only.attributes["sym_name"] = ir.StringAttr.get("main")
        del only.attributes[PLACES]
        _drop(only, PARAMETER)
        _drop(main_function(runs), PREPARED)
    for one in (first, runs):
        run_cxx_passes(one.operation, "symbol-dce")
    return Split(first, without_prepare(runs), places, min(paths, default=0), len(paths))


def without_prepare(module: ir.Module) -> ir.Module:
    """What runs every time: the module, or a copy without `@prepare`."""
    if prepare_function(module) is None:
        return module
    copy = clone(module)
    prepare = prepare_function(copy)
    assert prepare is not None
    prepare.erase()
    run_cxx_passes(copy.operation, "symbol-dce")
    return copy


def keep_results(prepare: ir.Module) -> tuple[int | None, ...]:
    """Leaves only those results in `prepare` that it computes.

    Returns:
      for every former result the argument it was, or None where it is computed.
    """
    main = main_function(prepare)
    block = main.regions[0].blocks[0]
    returned = list(block.operations)[-1].operation
    values = list(returned.operands)
    sources = tuple(
        ir.BlockArgument(value).arg_number if isinstance(value.owner, ir.Block) else None
        for value in values
    )
    computed = [value for value, source in zip(values, sources, strict=True) if source is None]
    with prepare.context, returned.location, ir.InsertionPoint(returned):
        ir.Operation.create("func.return", operands=computed)
    returned.erase()
    if "res_attrs" in main.attributes:
        del main.attributes["res_attrs"]
    set_function_type(main)
    return sources


def _drop(function: ir.Operation, name: str) -> None:
    attributes = argument_attributes(function)
    for one in attributes:
        one.pop(name, None)
    set_argument_attributes(function, attributes)


def prepared_paths(main: ir.Operation) -> dict[int, str]:
    """The arguments of `@main` that `@prepare` gives, with the paths they come from."""
    return {
        number: ir.StringAttr(attributes[PREPARED]).value
        for number, attributes in enumerate(argument_attributes(main))
        if PREPARED in attributes
    }


def argument_attributes(function: ir.Operation) -> list[Attributes]:
    """The attributes of every argument of a function."""
    count = len(function.regions[0].blocks[0].arguments)
    if "arg_attrs" not in function.attributes:
        return [{} for _ in range(count)]
    return [
        {named.name: named.attr for named in ir.DictAttr(one)}
        for one in ir.ArrayAttr(function.attributes["arg_attrs"])
    ]


def set_argument_attributes(function: ir.Operation, attributes: Sequence[Attributes]) -> None:
    """Sets the attributes of every argument of a function."""
    with function.context:
        if any(attributes):
            function.attributes["arg_attrs"] = ir.ArrayAttr.get(
                [ir.DictAttr.get(one) for one in attributes]
            )
        elif "arg_attrs" in function.attributes:
            del function.attributes["arg_attrs"]


def insert_arguments(
    function: ir.Operation, place: int, added: Sequence[tuple[ir.Type, str, Attributes]]
) -> None:
    """Inserts arguments of the given types, names and attributes before argument `place`."""
    block = function.regions[0].blocks[0]
    attributes, old = argument_attributes(function), list(block.arguments)
    with function.context:
        for type_, name, _ in added:
            block.add_argument(type_, ir.Location.name(name, ir.Location.unknown()))
    # Arguments can only be added at the end: those behind the place move there too.
    for argument in old[place:]:
        location = ir.BlockArgument(argument).location
        argument.replace_all_uses_with(block.add_argument(argument.type, location))
    for _ in old[place:]:
        block.erase_argument(place)
    new = [one for _, _, one in added]
    set_argument_attributes(function, [*attributes[:place], *new, *attributes[place:]])
    set_function_type(function)


def erase_arguments(function: ir.Operation, places: Sequence[int]) -> None:
    """Erases arguments that have no use."""
    attributes = argument_attributes(function)
    for place in sorted(places, reverse=True):
        function.regions[0].blocks[0].erase_argument(place)
        del attributes[place]
    set_argument_attributes(function, attributes)
    set_function_type(function)
