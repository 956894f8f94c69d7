"""Recognises decode attention: caches of keys and values that are updated, then attended.

New keys and values are written by `dynamic_update_slice` at a traced position; the queries then
attend under a mask that closes every key behind what has been written. Proved, not assumed: that
keys and values are written at one position, that the mask ends exactly there, that nobody reads
the old caches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxlib.mlir import ir

from hlo_opt.ir.index import Space, shape_of
from hlo_opt.ir.outline import Outliner
from hlo_opt.ir.scalar import Apply, Const, Element, Expr, Position, Scalarizer, nodes, number
from hlo_opt.ir.walk import (
    ORDERED_OPS,
    defining_op,
    direction,
    element_type,
    ops_between,
    readers,
    splat,
)
from hlo_opt.patterns.attention import PRODUCT, Attention, Operand
from hlo_opt.patterns.captured import emit_captured
from hlo_opt.patterns.score import Bound, Linear, NotLinear, analyse, key_bounds
from hlo_opt.patterns.softmax import Refusal

# A decode step has one query a sequence, or a few that were guessed ahead.
MOST_QUERIES = 16


@dataclass(frozen=True)
class CacheUpdate:
    """`cache` with `new` written at `position` along dimension `axis`.

    Attributes:
      op: the `dynamic_update_slice`.
      position: rank-0 start index, as the op has it (it clamps).
    """

    op: ir.Operation
    cache: ir.Value
    new: ir.Value
    position: ir.Value
    axis: int

    @property
    def result(self) -> ir.Value:
        return self.op.results[0]


@dataclass(frozen=True)
class DecodeAttention:
    """An attention over two caches and the updates of these.

    Attributes:
      ops: all ops computed inside, operands before users.
    """

    attention: Attention
    keys: CacheUpdate
    values: CacheUpdate
    ops: tuple[ir.Operation, ...]

    @property
    def operands(self) -> tuple[ir.Value, ...]:
        """The composite's operands, in `docs/composites.md`'s order."""
        match = self.attention
        return (
            match.q.value,
            self.keys.new,
            self.values.new,
            self.keys.cache,
            self.values.cache,
            self.keys.position,
            *(extra.value for extra in match.extras),
        )


def match_update(op: ir.Operation) -> CacheUpdate | None:
    """A `dynamic_update_slice` that writes at a traced position along one dimension."""
    if op.name != "stablehlo.dynamic_update_slice" or len(op.operands) < 5:
        return None  # of rank 3 at least: anything smaller is no cache of keys or values
    starts = list(op.operands)[2:]
    traced = [axis for axis, start in enumerate(starts) if splat(start) != 0]
    if len(traced) != 1 or splat(starts[traced[0]]) is not None:
        return None
    if not all(ir.RankedTensorType(v.type).has_static_shape for v in op.operands):
        return None
    (axis,) = traced
    whole, part = shape_of(op.operands[0]), shape_of(op.operands[1])
    if [s for d, s in enumerate(whole) if d != axis] != [
        s for d, s in enumerate(part) if d != axis
    ]:
        return None
    if not isinstance(element_type(op.results[0]), ir.FloatType):
        return None
    return CacheUpdate(op, op.operands[0], op.operands[1], starts[axis], axis)


def match_decode_attention(match: Attention) -> DecodeAttention | Refusal | None:
    """Recognises the cache updates in front of an attention.

    Returns:
      the match; a refusal where a cache is updated and attended, but not provably as a decode
      step does it; None where the keys and values come from no update.
    """
    updates = [_update_of(operand, match) for operand in (match.k, match.v)]
    keys, values = updates
    if keys is None and values is None:
        return None
    if match.statistics:
        return Refusal("the attention over the cache is a part of one only", match.second)
    if keys is None or values is None:
        return Refusal("only one of keys and values is a cache that is updated", match.second)
    if keys.op == values.op:
        return Refusal("keys and values are one cache", keys.op)
    match = _conventional(match, keys)
    if match.roles.get("query", 1) > MOST_QUERIES:
        return None  # a prefill that fills its cache: an attention like any other
    reason = _layout_reason(match, keys, values) or _use_reason(keys) or _use_reason(values)
    if reason is not None:
        return reason
    reason = _position_reason(match, keys, values)
    if reason is not None:
        return reason
    return _with_ops(match, keys, values)


def _conventional(match: Attention, keys: CacheUpdate) -> Attention:
    """The attention with its roles named as in a decode step; any naming computes the same.

    With one position written, several queries without a position are heads of one group. Heads
    that no batch stands beside, and that are outside the keys in the cache, are the batch; a batch
    that no heads stand beside, and that is inside the keys, is heads.
    """
    names: dict[str, str] = {}
    queries = set(match.atoms.get("query", ()))
    positions = (n for n in nodes(match.score.expr) if isinstance(n, Position))
    used = any(queries & set(n.index.atoms) for n in positions)
    if shape_of(keys.new)[keys.axis] == 1 and not used and "group" not in match.roles:
        names["query"] = "group"
    dims = match.k.dims
    if "kv_head" in dims and "batch" not in match.roles and dims.index("kv_head") < keys.axis:
        names["kv_head"] = "batch"
    batch = [name for name in match.roles if name.startswith("batch")]
    if batch == ["batch"] and "kv_head" not in match.roles and dims.index("batch") > keys.axis:
        names["batch"] = "kv_head"
    return _renamed(match, names)


def _renamed(match: Attention, names: Mapping[str, str]) -> Attention:
    def operand(old: Operand) -> Operand:
        return replace(old, dims=dims(old.dims))

    def dims(old: Iterable[str]) -> tuple[str, ...]:
        parts = ([names.get(name, name) for name in dim.split(PRODUCT)] for dim in old)
        return tuple(PRODUCT.join(part) for part in parts)

    return replace(
        match,
        roles={names.get(name, name): size for name, size in match.roles.items()},
        atoms={"batch": ()} | {names.get(n, n): a for n, a in match.atoms.items() if a},
        q=operand(match.q),
        k=operand(match.k),
        v=operand(match.v),
        extras=tuple(map(operand, match.extras)),
        out_dims=dims(match.out_dims),
    )


def _update_of(operand: Operand, match: Attention) -> CacheUpdate | None:
    op = defining_op(operand.value)
    if op is None or op.block != match.second.block:
        return None
    return match_update(op)


def _layout_reason(match: Attention, keys: CacheUpdate, values: CacheUpdate) -> Refusal | None:
    queries = match.roles.get("query", 1)
    for update, operand in ((keys, match.k), (values, match.v)):
        if operand.dims[update.axis] != "key":
            return Refusal("the cache is updated along another dimension than keys", update.op)
        count = shape_of(update.new)[update.axis]
        if count != queries:
            return Refusal(f"{count} positions are written for {queries} queries", update.op)
    return None


def _use_reason(update: CacheUpdate) -> Refusal | None:
    """The old cache must have no use beside the update, so that it can be updated in place."""
    others = [use.owner.operation for use in update.cache.uses]
    others = [op for op in others if op != update.op]
    if others:
        return Refusal("the old cache is also used elsewhere", others[0])
    return None


def _position_reason(match: Attention, keys: CacheUpdate, values: CacheUpdate) -> Refusal | None:
    """Keys and values are written at one position, and the mask ends behind what is written."""
    queries, length = match.roles.get("query", 1), match.roles["key"]
    resolver = _Resolver(match.second.block, length - queries)
    start = resolver.at(keys.position)
    if start != resolver.at(values.position):
        return Refusal("keys and values are written at different positions", values.op)
    if keys.position != values.position:
        # One wraps or clamps, the other does not; the composite has one position.
        return Refusal("keys and values are written apart outside the cache", values.op)
    form, leaves = _whole_score(match)
    if isinstance(form, NotLinear):
        return Refusal(f"no mask is seen in the score function: {form.reason}", match.second)
    ends = [_end(bound, leaves, resolver) for bound in key_bounds(form)]
    if not ends:
        return Refusal("no mask closes the keys behind the written ones", match.second)
    for end, by_query in ends:
        # Each query sees up to its own position, or all see up to the last one written.
        if end == start or (not by_query and end == _shifted(start, queries - 1)):
            return None
    return Refusal(
        "the mask is not the validity of what was written: it does not end at the written position",
        match.second,
    )


@dataclass(frozen=True)
class _Affine:
    """`base + offset`; a constant where there is no `base`.

    Attributes:
      base: values that are not looked into and how often each is added.
    """

    base: frozenset[tuple[object, int]] | None
    offset: int


def _opaque(leaf: object) -> _Affine:
    return _Affine(frozenset({(leaf, 1)}), 0)


def _shifted(value: _Affine, by: int) -> _Affine:
    return _Affine(value.base, value.offset + by)


def _whole_score(match: Attention) -> tuple[Linear | NotLinear, list[Element]]:
    """The score as a function of the smallest values it comes from, and these."""
    outliner = Outliner(ir.Module.create(match.second.location))
    inner = match.score.inner
    # Equal elements may be several nodes; all of them are passed.
    leaves = [n for n in nodes(match.score.expr) if isinstance(n, Element) and n != inner]
    name = emit_captured(outliner, "score", match, match.score, leaves)
    fixed = [not any(part.atoms for part in leaf.index) for leaf in leaves]
    scalars = [number for number, is_fixed in enumerate(fixed) if is_fixed]
    return analyse(outliner.functions[name], scalars), leaves


def _end(bound: Bound, leaves: Sequence[Element], resolver: _Resolver) -> tuple[_Affine, bool]:
    """The last open key of the first query, and whether later queries see one key more each."""
    end = _Affine(None, bound.offset)
    for extra in bound.extras:
        total = _sum(end, resolver.of(leaves[extra]), 1)
        assert total is not None  # sums of two are always affine
        end = total
    return end, bound.by_query


_Known = _Affine | bool | None


class _Resolver:
    """Follows rank-0 integers back to `base + offset`.

    Wrapping and clamping that does nothing to positions inside the cache is looked through: a base,
    sums included, is taken to be in `0 ... largest`. Where it is not, the composite is still the
    original ops; the kernel clamps as they do and takes the mask's own position for the mask.
    """

    def __init__(self, block: ir.Block, largest: int) -> None:
        self.largest = largest
        self._scalars = Scalarizer(Space(), block)

    def at(self, value: ir.Value) -> _Affine:
        """The affine form of a rank-0 value."""
        found = self._evaluate(self._scalars.at(value, ()))
        return found if isinstance(found, _Affine) else _opaque(value)

    def of(self, leaf: Element) -> _Affine:
        """The affine form of one element, at an index without atoms."""
        found = self._evaluate(self._scalars.at(leaf.value, leaf.index))
        return found if isinstance(found, _Affine) else _opaque(leaf)

    def _evaluate(self, expr: Expr) -> _Known:
        """An integer's affine form, a Boolean that is certain, or None."""
        if isinstance(expr, Const) and isinstance(expr.type, ir.IntegerType):
            value = int(number(expr.attribute))
            return bool(value) if expr.type.width == 1 else _Affine(None, value)
        if isinstance(expr, Apply):
            found = self._apply(expr, [self._evaluate(operand) for operand in expr.operands])
            if found is not None:
                return found
        if not isinstance(expr, Apply | Element) or not _is_position(expr.type):
            return None
        return _opaque((expr.value, expr.index))

    def _apply(self, expr: Apply, operands: list[_Known]) -> _Known:
        name = expr.op.name.removeprefix("stablehlo.")
        if name == "select":
            which = operands[0]
            return operands[1 if which else 2] if isinstance(which, bool) else None
        if name in ("and", "or", "not") and not _is_position(expr.type):
            return _logic(name, operands)
        if name == "convert":
            return operands[0] if _is_position(expr.type) else None
        numbers = [_Affine(None, int(o)) if isinstance(o, bool) else o for o in operands]
        known = [o for o in numbers if o is not None]
        if len(known) < len(operands):
            return None
        if name == "compare":
            return self._compare(direction(expr.op), *known)
        if name in ("add", "subtract"):
            return _sum(known[0], known[1], 1 if name == "add" else -1)
        if name == "remainder" and known[1].base is None:
            low, high = self._range(known[0])
            return known[0] if low >= 0 and high < known[1].offset else None
        if name in ("maximum", "minimum"):
            return self._extreme(name, *known)
        if name == "clamp":
            lower = self._extreme("maximum", known[0], known[1])
            return self._extreme("minimum", lower, known[2]) if lower is not None else None
        return None

    def _range(self, value: _Affine) -> tuple[int, int]:
        return value.offset, value.offset + (self.largest if value.base is not None else 0)

    def _compare(self, which: str, left: _Affine, right: _Affine) -> bool | None:
        """A comparison that comes out the same for every base in its range."""
        if left.base is None and right.base is not None:
            return self._compare(which.translate(_SWAPPED), right, left)
        difference = _sum(left, right, -1)
        if difference is None:
            return None
        low, high = self._range(difference)
        truths = {"LT": (high < 0, low >= 0), "LE": (high <= 0, low > 0)}
        truths["GE"], truths["GT"] = truths["LT"][::-1], truths["LE"][::-1]
        truths["EQ"] = (low == high == 0, low > 0 or high < 0)
        truths["NE"] = truths["EQ"][::-1]
        yes, no = truths[which]
        return True if yes else False if no else None

    def _extreme(self, name: str, left: _Affine, right: _Affine) -> _Affine | None:
        for which, smaller, larger in (("LE", left, right), ("GE", right, left)):
            if self._compare(which, left, right):
                return larger if name == "maximum" else smaller
        return None


_SWAPPED = str.maketrans("LG", "GL")  # LT, LE, GT, GE; EQ and NE have none of these letters


def _is_position(type_: ir.Type) -> bool:
    """Whether positions fit: integers of 32 bits and more."""
    return isinstance(type_, ir.IntegerType) and type_.width >= 32


def _logic(name: str, operands: list[_Known]) -> bool | None:
    known = [o for o in operands if isinstance(o, bool)]
    if name == "not":
        return not known[0] if known else None
    decisive = name == "or"
    if decisive in known:
        return decisive
    return not decisive if len(known) == len(operands) else None


def _sum(left: _Affine, right: _Affine, sign: int) -> _Affine | None:
    offset = left.offset + sign * right.offset
    if right.base is None:
        return _Affine(left.base, offset)
    if sign < 0:
        return _Affine(None, offset) if left.base == right.base else None
    counts = Counter(dict(left.base or ()))
    counts.update(dict(right.base))
    return _Affine(frozenset(counts.items()), offset)


def _with_ops(
    match: Attention, keys: CacheUpdate, values: CacheUpdate
) -> DecodeAttention | Refusal:
    boundary = DecodeAttention(match, keys, values, ()).operands
    inside: dict[ir.Operation, None] = {}
    for last in (keys.op, values.op, match.ops[-1]):
        inside.update(dict.fromkeys(ops_between(last, boundary)))
    makers = {defining_op(value) for value in boundary}
    for op in readers(match.ops[-1], (keys.result, values.result)):
        if op in makers:
            return Refusal("an operand is computed from the updated cache", op)
        if op not in inside and op.name in ORDERED_OPS:
            return Refusal(f"{op.name} uses the updated cache before the attention does", op)
    return DecodeAttention(match, keys, values, tuple(inside))
