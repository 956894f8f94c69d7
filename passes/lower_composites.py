"""`lower-composites`: replaces composites by the target's kernels."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from hlo_opt.errors import HloOptError
from hlo_opt.ir.module import run_cxx_passes
from hlo_opt.kernels import Candidate, Kernel, No, kernels_for
from hlo_opt.pipeline import Pass, PassContext, register_pass
from hlo_opt.targets import CPU, Target, check_target, get_target, is_tpu
from hlo_opt.trace import lower_function, splice

PREFIX = "hlo_opt."
KNOWN_VERSION = 1


@register_pass("lower-composites", stage="lower", rank=10)
@dataclass(frozen=True)
class LowerComposites(Pass):
    """Replaces `hlo_opt` composites by kernels where the target has one.

    Options:
      target: the target's name; the context's (`--target`) by default.
      interpret: emit kernels through Pallas's generic interpreter, to run them on any backend.
    """

    target: str = ""
    interpret: bool = False

    def run(self, module: ir.Module, ctx: PassContext) -> None:
        name = self.target or ctx.target
        if name is not None:
            check_target(name)
        devices = _Devices.of(module)
        lowering = None
        if name is not None and (name == CPU.name or is_tpu(name)):
            target = CPU if name == CPU.name else get_target(name)
            lowering = _Lowering(module, target, self.interpret or ctx.interpret)
        gone = False
        for op in list(_composites(module)):
            if lowering is None:
                result: str | No = No(f"no kernels for {name or 'a module without a target'}")
            elif not devices.run_alone(op):
                result = _PARTITIONED
            else:
                result = lowering.replace(op)
            structure = _name(op).removeprefix(PREFIX)
            if isinstance(result, No):
                message = f"decomposition kept: {result.reason}"
                ctx.remarks.add("missed", self.name, structure, message, op=op)
            else:
                ctx.remarks.add("applied", self.name, structure, f"lowered: {result}", op=op)
                op.erase()
                gone = True
        if gone:
            run_cxx_passes(module.operation, "symbol-dce")  # decompositions and scores


_PARTITIONED = No(
    "the module is partitioned over several devices and the composite is not in a manual "
    "computation over all of them, so that every device would run the whole kernel"
)


def _composites(module: ir.Module) -> Iterator[ir.Operation]:
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.composite" and _name(op).startswith(PREFIX):
            found.append(op.operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return iter(found)


def _name(op: ir.Operation) -> str:
    return ir.StringAttr(op.attributes["name"]).value


def _version(op: ir.Operation) -> int:
    return ir.IntegerAttr(op.attributes["version"]).value if "version" in op.attributes else 0


@dataclass(frozen=True)
class _Devices:
    """Over how many devices a module runs.

    Attributes:
      partitions: the number the module states.
      axes: names of all mesh axes with more than one device.
    """

    partitions: int
    axes: frozenset[str]

    @classmethod
    def of(cls, module: ir.Module) -> _Devices:
        attributes = module.operation.attributes
        axes = (
            sdy.MeshAxisAttr(axis)
            for op in module.body.operations
            if op.operation.name == "sdy.mesh"
            for axis in sdy.MeshAttr(op.operation.attributes["mesh"]).axes
        )
        return cls(
            partitions=ir.IntegerAttr(attributes["mhlo.num_partitions"]).value
            if "mhlo.num_partitions" in attributes
            else 1,
            axes=frozenset(axis.name for axis in axes if axis.size > 1),
        )

    def run_alone(self, op: ir.Operation) -> bool:
        """Whether every device runs `op` on its own shard, with nothing left to partition."""
        manual: set[str] = set()
        parent = op.parent
        while parent is not None:
            if parent.operation.name == "sdy.manual_computation":
                manual |= set(sdy.ManualAxesAttr(parent.operation.attributes["manual_axes"]))
            parent = parent.operation.parent
        return self.axes <= manual and (self.partitions <= 1 or bool(manual))


class _Lowering:
    """Replaces composites of one module; equal kernels become one function."""

    def __init__(self, module: ir.Module, target: Target, interpret: bool) -> None:
        self.module = module
        self.target = target
        self.interpret = interpret
        self._symbols: dict[Hashable, str | No] = {}

    def replace(self, op: ir.Operation) -> str | No:
        """Puts a call of a kernel beside `op` and moves its uses there; returns the label."""
        reasons = []
        if (version := _version(op)) != KNOWN_VERSION:
            return No(f"version {version} of it is not known here, only {KNOWN_VERSION}")
        for kernel in kernels_for(_name(op), self.target.platform):
            spec = kernel.spec(op, self.module)
            refusal = spec if isinstance(spec, No) else kernel.supports(spec, self.target)
            if refusal is None:
                candidate = kernel.candidates(spec, self.target)[0]
                symbol = self._function(kernel, spec, candidate)
                if isinstance(symbol, str):
                    self._call(op, symbol)
                    return candidate.label
                refusal = symbol
            reasons.append(f"{kernel.name}: {refusal.reason}")
        return No("; ".join(reasons) or "no kernel is known for it")

    def _function(self, kernel: Kernel, spec: Hashable, candidate: Candidate) -> str | No:
        key = (kernel.name, spec, candidate)
        if key not in self._symbols:
            self._symbols[key] = self._splice(kernel, spec, candidate)
        return self._symbols[key]

    def _splice(self, kernel: Kernel, spec: Hashable, candidate: Candidate) -> str | No:
        try:
            bytecode = _lower(kernel, spec, candidate, self.target, self.interpret)
        except HloOptError as error:
            return No(error.message.removeprefix("error: "))
        except Exception as error:
            # A library kernel raises what it likes on shapes it cannot do.
            reason = " ".join(str(error).split())[:200]
            return No(f"could not be lowered: {type(error).__name__}: {reason}")
        name = f"{kernel.composite}.{kernel.name.lower().replace(' ', '_')}"
        return splice(self.module, bytecode, name)

    def _call(self, op: ir.Operation, symbol: str) -> None:
        with self.module.context, op.location, ir.InsertionPoint(op):
            call = ir.Operation.create(
                "func.call",
                [result.type for result in op.results],
                list(op.operands),
                {"callee": ir.FlatSymbolRefAttr.get(symbol)},
            )
        for old, new in zip(op.results, call.results, strict=True):
            old.replace_all_uses_with(new)


@lru_cache(maxsize=256)
def _lower(
    kernel: Kernel, spec: Hashable, candidate: Candidate, target: Target, interpret: bool
) -> bytes:
    return lower_function(
        kernel.build(spec, candidate),
        kernel.arguments(spec),
        platform="cpu" if interpret else target.platform,
        device_kind=target.device_kind if target.platform == "tpu" else None,
        precision=kernel.precision(spec),
        interpret=interpret,
    )
