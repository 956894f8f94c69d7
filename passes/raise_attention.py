"""`raise-attention`: outlines softmax attention into `hlo_opt.attention` composites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxlib.mlir import ir

from hlo_opt.ir.outline import REPLACED, Outliner
from hlo_opt.ir.walk import (
    closed_functions,
    element_type,
    in_block_order,
    ops_named,
    readers,
)
from hlo_opt.patterns import score
from hlo_opt.patterns.attention import Attention, match_attention
from hlo_opt.patterns.captured import emit_captured
from hlo_opt.patterns.softmax import EXPONENTIALS, Refusal
from hlo_opt.pipeline import Pass, PassContext, register_pass


@register_pass("raise-attention", stage="raise", rank=10)
@dataclass(frozen=True)
class RaiseAttention(Pass):
    """Outlines softmax attention into `hlo_opt.attention` composites.

    Options:
      min-seq: leave attentions with fewer keys than this alone.
    """

    structure: ClassVar[str] = "attention"
    min_seq: int = 0

    def run(self, module: ir.Module, ctx: PassContext) -> None:
        outliner = Outliner(module)
        for exp in ops_named(EXPONENTIALS, module, closed_functions(module)):
            if REPLACED in exp.attributes:
                continue
            match = match_attention(exp)
            if isinstance(match, Refusal):
                self.remark(ctx, "missed", match.reason, op=match.op)
            elif match is not None and match.roles["key"] < self.min_seq:
                reason = f"{match.roles['key']} keys, fewer than min-seq={self.min_seq}"
                self.remark(ctx, "missed", reason, op=match.second)
            elif match is not None:
                composite = _outline(outliner, match)
                words = ", ".join(
                    filter(None, (describe(match), describe_score(outliner, composite)))
                )
                self.remark(ctx, "applied", f"raised: {words}", op=composite)
        outliner.finish()


def describe(match: Attention) -> str:
    """The attention's shape in a few words."""
    heads = match.roles.get("kv_head", 1)
    group = match.roles.get("group", 1)
    kind = f"GQA {heads * group}/{heads}" if group > 1 else f"{heads} heads"
    queries = match.roles.get("query", 1)
    return f"{kind}, {queries} x {match.roles['key']}, depth {match.roles['depth']}"


def describe_score(outliner: Outliner, composite: ir.Operation) -> str:
    """The score function of a composite this outliner made, in a few words."""
    attributes = ir.DictAttr(composite.attributes["composite_attributes"])
    name = ir.FlatSymbolRefAttr(attributes["score"]).value
    return score.describe(score.analyse(outliner.functions[name]))


def _outline(outliner: Outliner, match: Attention) -> ir.Operation:
    operands = [match.q, match.k, match.v, *match.extras]
    composite = outliner.composite(
        "hlo_opt.attention",
        match.ops,
        [o.value for o in operands],
        match.results,
        attention_attributes(outliner, match),
    )
    if match.statistics:  # else the result's op is the last
        move_readers(composite, list(composite.results))
    return composite


def move_readers(composite: ir.Operation, results: Sequence[ir.Value]) -> None:
    """Moves what reads some results of a composite, but stands before it, behind it."""
    place = composite
    for op in in_block_order(readers(composite, results)):
        op.move_after(place)
        place = op


def attention_attributes(outliner: Outliner, match: Attention) -> dict[str, ir.Attribute]:
    """The `composite_attributes` of an attention; adds its captured functions to the module."""
    score = emit_captured(outliner, "score", match, match.score, match.extra_nodes)
    with outliner.module.context, ir.Location.unknown():
        attributes: dict[str, ir.Attribute] = {
            "roles": ir.DictAttr.get(
                {
                    name: ir.IntegerAttr.get(ir.IntegerType.get_signless(64), size)
                    for name, size in match.roles.items()
                }
            ),
            "q_dims": _strings(match.q.dims),
            "k_dims": _strings(match.k.dims),
            "v_dims": _strings(match.v.dims),
            "out_dims": _strings(match.out_dims),
            "extra_dims": ir.ArrayAttr.get([_strings(e.dims) for e in match.extras]),
            "qk_precision": _precision(match.first),
            "pv_precision": _precision(match.second),
            "qk_type": _type(match.first.operands[0]),
            "logits_type": _type(match.first.results[0]),
            "softmax_type": _type(match.softmax.exponential),
            "probs_type": _type(match.probabilities),
            "score": ir.FlatSymbolRefAttr.get(score),
        }
        if match.probs is not None:
            probs = emit_captured(outliner, "probs", match, match.probs, match.extra_nodes)
            attributes["probs"] = ir.FlatSymbolRefAttr.get(probs)
        if match.sink is not None:
            sink = emit_captured(outliner, "sink", match, match.sink, match.extra_nodes)
            attributes["sink"] = ir.FlatSymbolRefAttr.get(sink)
        for name, statistic in zip(("max_dims", "sum_dims"), match.statistics, strict=False):
            attributes[name] = _strings(statistic.dims)
    return attributes


def _strings(names: Sequence[str]) -> ir.ArrayAttr:
    return ir.ArrayAttr.get([ir.StringAttr.get(name) for name in names])


def _type(value: ir.Value) -> ir.TypeAttr:
    return ir.TypeAttr.get(element_type(value))


def _precision(dot: ir.Operation) -> ir.ArrayAttr:
    if "precision_config" not in dot.attributes:
        return _strings(["DEFAULT", "DEFAULT"])
    config = ir.ArrayAttr(dot.attributes["precision_config"])
    return _strings([str(p).removeprefix("#stablehlo<precision ").rstrip(">") for p in config])
