"""`raise-decode-attention`: outlines cache updates and attention into one composite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from jaxlib.mlir import ir

from hlo_opt.ir.outline import REPLACED, Outliner
from hlo_opt.ir.signature import array_type
from hlo_opt.ir.walk import closed_functions, functions, ops_named, symbol_name
from hlo_opt.passes.raise_attention import (
    attention_attributes,
    describe,
    describe_score,
    move_readers,
)
from hlo_opt.patterns.attention import Attention, match_attention
from hlo_opt.patterns.kv_cache import (
    DecodeAttention,
    match_decode_attention,
    match_update,
)
from hlo_opt.patterns.softmax import EXPONENTIALS, Refusal
from hlo_opt.pipeline import Pass, PassContext, register_pass


@register_pass("raise-decode-attention", stage="raise", rank=5)
@dataclass(frozen=True)
class RaiseDecodeAttention(Pass):
    """Outlines cache updates and the attention over them into `hlo_opt.decode_attention`."""

    structure: ClassVar[str] = "decode_attention"

    def run(self, module: ir.Module, ctx: PassContext) -> None:
        closed = closed_functions(module)
        if not any(map(match_update, ops_named("stablehlo.dynamic_update_slice", module, closed))):
            return  # a prefill: its attentions are not matched twice
        outliner = Outliner(module)
        donated = _Donated(module)
        refused: list[ir.Operation] = []
        for exp in ops_named(EXPONENTIALS, module, closed):
            if REPLACED in exp.attributes:
                continue
            attention = match_attention(exp)
            if not isinstance(attention, Attention):
                continue
            match = match_decode_attention(attention)
            if isinstance(match, Refusal):
                self.remark(ctx, "missed", match.reason, op=match.op)
                refused.extend(_updates(attention))
            elif match is not None:
                copied = donated.missing(match)
                composite = _outline(outliner, match)
                words = filter(None, (describe(attention), describe_score(outliner, composite)))
                self.remark(ctx, "applied", f"raised: {', '.join(words)}", op=composite)
                if copied and ctx.knows_donation:
                    self.remark(ctx, "analysis", _copy_cost(copied), op=composite)
        outliner.finish()
        closed |= set(outliner.functions)
        for op in ops_named("stablehlo.dynamic_update_slice", module, closed):
            if match_update(op) is not None and op not in refused:
                reason = "a cache is updated, but no attention over it is recognised"
                self.remark(ctx, "missed", reason, op=op)


def _copy_cost(copied: int) -> str:
    return (
        f"a cache is not donated: XLA copies {copied:,} bytes before the update; "
        "donate it (jax.jit's donate_argnums) to update it in place"
    )


def _updates(attention: Attention) -> list[ir.Operation]:
    owners = (operand.value.owner for operand in (attention.k, attention.v))
    return [owner.operation for owner in owners if not isinstance(owner, ir.Block)]


def _outline(outliner: Outliner, match: DecodeAttention) -> ir.Operation:
    attributes = attention_attributes(outliner, match.attention)
    results = [match.attention.result, match.keys.result, match.values.result]
    composite = outliner.composite(
        "hlo_opt.decode_attention", match.ops, match.operands, results, attributes
    )
    # Whoever reads the new caches (to return them, mostly) may stand before the attention.
    move_readers(composite, list(composite.results)[1:])
    return composite


class _Donated:
    """Which arguments of `main` the caller gives away."""

    def __init__(self, module: ir.Module) -> None:
        self._arguments: list[ir.Value] = []
        attributes: Iterable[ir.Attribute] = ()
        for main in functions(module):
            if symbol_name(main) == "main":
                self._arguments = list(main.regions[0].blocks[0].arguments)
                if "arg_attrs" in main.attributes:
                    attributes = ir.ArrayAttr(main.attributes["arg_attrs"])
        self._given = [
            {"tf.aliasing_output", "jax.buffer_donor"} & {a.name for a in ir.DictAttr(d)}
            for d in attributes
        ]

    def missing(self, match: DecodeAttention) -> int:
        """Bytes of the match's caches that are arguments of `main` and not donated."""
        total = 0
        for update in (match.keys, match.values):
            if update.cache in self._arguments:
                number = self._arguments.index(update.cache)
                if number >= len(self._given) or not self._given[number]:
                    cache = array_type(update.cache.type)
                    total += math.prod(cache.shape) * cache.dtype.itemsize
        return total
