"""`raise-attention`: outlines softmax attention into `hlo_opt.attention` composites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import total_ordering
from typing import ClassVar

from jaxlib.mlir import ir

from hlo_opt.ir.index import LAYOUT_OPS
from hlo_opt.ir.outline import REPLACED, Outliner
from hlo_opt.ir.walk import closed_functions, defining_op, element_type, ops_named
from hlo_opt.patterns import score
from hlo_opt.patterns.attention import Attention, match_attention
from hlo_opt.patterns.captured import emit_captured
from hlo_opt.patterns.softmax import Refusal, cut_sink, match_partial, match_softmax
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
        for exp in ops_named("stablehlo.exponential", module, closed_functions(module)):
            if REPLACED in exp.attributes:
                continue
            softmax = match_softmax(exp) or match_partial(exp)
            if softmax is None:
                continue
            match: Attention | Refusal | None = (
                softmax if isinstance(softmax, Refusal) else match_attention(cut_sink(softmax))
            )
            if isinstance(match, Attention) and match.statistics:
                match = _before_users(match) or match
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
    _separate(match)
    return outliner.composite(
        "hlo_opt.attention",
        match.ops,
        [o.value for o in operands],
        match.results,
        attention_attributes(outliner, match),
        before=_first_user(match),
    )


def _layouts(match: Attention) -> list[ir.Operation]:
    """Ops inside that only lay out a statistic, operands before users."""
    values = {statistic.value for statistic in match.statistics}
    found = []
    for op in match.ops:
        laid_out = op.name in LAYOUT_OPS or op.name == "stablehlo.convert"
        if laid_out and op.operands[0] in values:
            values.add(op.results[0])
            found.append(op)
    return found


def _separate(match: Attention) -> None:
    """Copies what lays out a statistic for users outside, in front of the first of them."""
    inside = set(match.ops)
    for op in reversed(_layouts(match)):
        users = [use for use in op.results[0].uses if use.owner.operation not in inside]
        if users:
            owners = [_in_block(use.owner.operation, op.block) for use in users]
            with ir.InsertionPoint(min(owners, key=_Place)):
                copy = op.clone()
            for use in users:
                use.owner.operation.operands[use.operand_number] = copy.results[0]


def _in_block(op: ir.Operation, block: ir.Block) -> ir.Operation:
    """The op of a block that an op is, or is inside of."""
    while op.block != block:
        op = op.parent.operation
    return op


def _first_user(match: Attention) -> ir.Operation | None:
    """The first op outside that uses one of several results, if it stands before the last inside.

    Ops that lay out a statistic count with it.
    """
    if not match.statistics:
        return None
    inside = set(match.ops)
    block = match.second.block
    first = max((op for op in match.ops if op.block == block), key=_Place)
    found = None
    for result in (*match.results, *(op.results[0] for op in _layouts(match))):
        for use in result.uses:
            op = _in_block(use.owner.operation, block)
            if op not in inside and _Place(op) < _Place(first):
                found, first = op, op
    return found


def _before_users(match: Attention) -> Refusal | None:
    """A refusal where a result is used before all operands are there."""
    user = _first_user(match)
    if user is None:
        return None
    for operand in (match.q, match.k, match.v, *match.extras):
        op = defining_op(operand.value)
        if op is not None and op.block == user.block and not op.is_before_in_block(user):
            return Refusal("a row maximum or sum is used before the values are computed", user)
    return None


@total_ordering
@dataclass(frozen=True)
class _Place:
    """An op's place in its block."""

    op: ir.Operation

    def __lt__(self, other: _Place) -> bool:
        return bool(self.op.is_before_in_block(other.op))


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
        for kind, captured in (("probs", match.probs), ("sink", match.sink)):
            if captured is not None:
                symbol = emit_captured(outliner, kind, match, captured, match.extra_nodes)
                attributes[kind] = ir.FlatSymbolRefAttr.get(symbol)
        for kind, statistic in zip(("max_dims", "sum_dims"), match.statistics, strict=False):
            attributes[kind] = _strings(statistic.dims)
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
