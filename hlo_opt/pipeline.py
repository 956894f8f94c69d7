"""Pass registry, options, textual pipelines and the runner.

A pass is a frozen dataclass: its fields are its options, its docstring is its help, `run` does the
work. C++ passes of MLIR and StableHLO and our own run in one pipeline; see `run_pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from jaxlib.mlir import ir

from hlo_opt.remarks import Kind, Remarks


@dataclass
class PassContext:
    """What a pass may know and say beyond the module: target, remarks, statistics."""

    target: str | None = None
    interpret: bool = False  # kernels as plain StableHLO (Pallas's generic interpreter), for checks
    remarks: Remarks = field(default_factory=Remarks)
    statistics: dict[str, dict[str, int]] = field(default_factory=dict)


class Pass:
    """Base of our passes. Subclasses are frozen dataclasses registered by `register_pass`."""

    name: ClassVar[str]
    structure: ClassVar[str] = ""

    def run(self, module: ir.Module, ctx: PassContext) -> None:
        """Rewrites `module` in place. Must be idempotent and leave it verified."""
        raise NotImplementedError

    def remark(
        self,
        ctx: PassContext,
        kind: Kind,
        message: str,
        *,
        op: ir.Operation | ir.OpView | None = None,
        **args: object,
    ) -> None:
        """Records a remark in this pass's name."""
        ctx.remarks.add(kind, self.name, self.structure, message, op=op, **args)


P = TypeVar("P", bound=type[Pass])

PASSES: dict[str, type[Pass]] = {}
# Passes that belong to a stage of the named pipelines, by rank (lower runs first).
STAGES: dict[str, list[tuple[int, str]]] = {}


def register_pass(name: str, *, stage: str = "", rank: int = 0) -> Callable[[P], P]:
    """Class decorator: registers a pass under its pipeline name.

    Args:
      name: as written in a pipeline and, with two dashes, on the command line.
      stage: the named pipeline this pass joins (`"raise"`, `"lower"`), if any.
      rank: its place in the stage; larger structures raise first.
    """

    def register(cls: P) -> P:
        cls.name = name
        PASSES[name] = cls
        if stage:
            STAGES.setdefault(stage, []).append((rank, name))
            STAGES[stage].sort()
        return cls

    return register


def run_pipeline(module: ir.Module, pipeline: str, ctx: PassContext) -> ir.Module:
    """Runs a textual pipeline on a copy of `module` and returns the copy."""
    raise NotImplementedError
