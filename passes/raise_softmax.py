"""`raise-softmax`: outlines softmax into `hlo_opt.softmax` composites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxlib.mlir import ir

from hlo_opt.ir.index import shape_of
from hlo_opt.ir.outline import Outliner
from hlo_opt.ir.walk import closed_functions, ops_named
from hlo_opt.patterns.softmax import Refusal, Softmax, match_softmax, softmax_ops
from hlo_opt.pipeline import Pass, PassContext, register_pass


@register_pass("raise-softmax", stage="raise", rank=20)
@dataclass(frozen=True)
class RaiseSoftmax(Pass):
    """Outlines softmax into `hlo_opt.softmax` composites."""

    structure: ClassVar[str] = "softmax"

    def run(self, module: ir.Module, ctx: PassContext) -> None:
        outliner = Outliner(module)
        for exp in ops_named("stablehlo.exponential", module, closed_functions(module)):
            match = match_softmax(exp)
            if match is None or (isinstance(match, Softmax) and not match.is_plain):
                continue
            inside = softmax_ops(match) if isinstance(match, Softmax) else match
            if isinstance(inside, Refusal):
                self.remark(ctx, "missed", inside.reason, op=inside.op)
                continue
            assert isinstance(match, Softmax)
            composite = _outline(outliner, match, inside)
            shape = "x".join(map(str, shape_of(match.x)))
            self.remark(ctx, "applied", f"raised: {shape}, axis {match.axis}", op=composite)
        outliner.finish()


def _outline(outliner: Outliner, match: Softmax, ops: tuple[ir.Operation, ...]) -> ir.Operation:
    with outliner.module.context:
        axis = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), match.axis)
    return outliner.composite("hlo_opt.softmax", ops, [match.x], [match.result], {"axis": axis})
