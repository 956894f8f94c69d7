"""`inline`: replaces calls of private helper functions by their bodies."""

from __future__ import annotations

from dataclasses import dataclass

from jaxlib.mlir import ir

from hlo_opt.ir.inline import inline_calls
from hlo_opt.pipeline import Pass, PassContext, register_pass


@register_pass("inline")
@dataclass(frozen=True)
class Inline(Pass):
    """Inlines calls of private functions.

    Options:
      max-ops: leave functions with more ops than this alone, unless called from one place only.
        The default is above the helpers of models (`_where`, `silu`, attention in pieces) and
        below their layers.
    """

    max_ops: int = 256

    def run(self, module: ir.Module, ctx: PassContext) -> None:
        inline_calls(module, self.max_ops)
