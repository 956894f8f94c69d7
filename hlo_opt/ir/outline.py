"""Moving ops into a private function and putting a `stablehlo.composite` in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxlib.mlir import ir

from hlo_opt.ir.walk import functions, symbol_name

# On ops that a composite replaced, until they are erased.
REPLACED = "hlo_opt.replaced"


class Outliner:
    """Adds private functions and composites to one module; equal functions are shared.

    Ops that composites replace stay until `finish`: a handle to an erased op is not recognised as
    such and crashes the process.

    Args:
      module: the module that is changed.
    """

    def __init__(self, module: ir.Module) -> None:
        self.module = module
        self._names = {symbol_name(f) for f in functions(module)}
        self._by_text: dict[str, str] = {}
        self._replaced: list[ir.Operation] = []
        self.functions: dict[str, ir.Operation] = {}  # those this outliner added, by name

    def function(
        self,
        name: str,
        arguments: Sequence[ir.Type],
        results: Sequence[ir.Type],
        build: Callable[[Sequence[ir.Value]], Sequence[ir.Value]],
    ) -> str:
        """Adds a private function, or finds an equal one this outliner added before.

        Args:
          name: the wanted symbol name; a number is added where it is taken.
          build: creates the body from the arguments, returns the results.

        Returns:
          the symbol name.
        """
        with self.module.context, ir.Location.unknown():
            with ir.InsertionPoint(self.module.body):
                function = ir.Operation.create(
                    "func.func",
                    attributes={
                        "sym_name": ir.StringAttr.get(name),
                        "sym_visibility": ir.StringAttr.get("private"),
                        "function_type": ir.TypeAttr.get(
                            ir.FunctionType.get(list(arguments), list(results))
                        ),
                    },
                    regions=1,
                )
            block = function.regions[0].blocks.append(*arguments)
            with ir.InsertionPoint(block):
                ir.Operation.create("func.return", operands=list(build(list(block.arguments))))
        # Two functions of one name do not verify; unverified ops would print in generic form.
        text = function.get_asm(assume_verified=True, use_local_scope=True)
        if text in self._by_text:
            function.erase()
            return self._by_text[text]
        unique = self._unique(name)
        function.attributes["sym_name"] = ir.StringAttr.get(unique, self.module.context)
        self._by_text[text] = unique
        self.functions[unique] = function
        return unique

    def _unique(self, name: str) -> str:
        unique, count = name, 0
        while unique in self._names:
            count += 1
            unique = f"{name}_{count}"
        self._names.add(unique)
        return unique

    def composite(
        self,
        name: str,
        ops: Sequence[ir.Operation],
        operands: Sequence[ir.Value],
        results: Sequence[ir.Value],
        attributes: dict[str, ir.Attribute],
    ) -> ir.Operation:
        """Replaces `results` by a composite of `ops`, which are marked as replaced.

        Args:
          name: the composite's name.
          ops: everything computed between `operands` and `results`, operands before users. The
            composite stands where the last of them stood.
          attributes: `composite_attributes`.
        """

        def build(arguments: Sequence[ir.Value]) -> Sequence[ir.Value]:
            values = dict(zip(operands, arguments, strict=True))
            for op in ops:
                copy = op.clone()
                if REPLACED in copy.attributes:
                    del copy.attributes[REPLACED]
                for number, operand in enumerate(op.operands):
                    copy.operands[number] = values[operand]
                values.update(zip(op.results, copy.results, strict=True))
            return [values[result] for result in results]

        types = [operand.type for operand in operands]
        made = [result.type for result in results]
        decomposition = self.function(f"{name}.impl", types, made, build)
        i32 = ir.IntegerType.get_signless(32, self.module.context)
        with self.module.context, _fused(ops), ir.InsertionPoint(ops[-1]):
            composite = ir.Operation.create(
                "stablehlo.composite",
                made,
                list(operands),
                {
                    "name": ir.StringAttr.get(name),
                    "composite_attributes": ir.DictAttr.get(attributes),
                    "decomposition": ir.FlatSymbolRefAttr.get(decomposition),
                    "version": ir.IntegerAttr.get(i32, 1),
                },
            )
        for old, new in zip(results, composite.results, strict=True):
            old.replace_all_uses_with(new)
        mark = ir.UnitAttr.get(self.module.context)
        for op in ops:
            if REPLACED not in op.attributes:
                op.attributes[REPLACED] = mark
                self._replaced.append(op)
        return composite

    def finish(self) -> None:
        """Erases the replaced ops that nothing uses any more."""
        for op in reversed(self._replaced):
            if any(True for r in op.results for _ in r.uses):
                del op.attributes[REPLACED]
            else:
                op.erase()
        self._replaced.clear()


def _fused(ops: Sequence[ir.Operation]) -> ir.Location:
    """The distinct locations of `ops`, last op's first: it names where the result is made."""
    distinct = dict.fromkeys(op.location.attr for op in reversed(ops))
    locations = [ir.Location.from_attr(attribute) for attribute in distinct]
    return locations[0] if len(locations) == 1 else ir.Location.fused(locations)
