"""Recognises softmax attention by its algebra.

A softmax whose probabilities reach forward, elementwise, to one `dot_general` that contracts the
softmax axis, and whose logits reach back, elementwise, to one `dot_general`. Everything in between
is captured as a scalar `score` function of the logit, of extras and of index values. Layouts,
repeated heads and masks are immaterial: dimensions are tracked as symbolic indices.

The division by the sum may also stand behind the second matmul, or be left to others: then the row
maxima and sums are results as well.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from hlo_opt.ir.index import (
    LAYOUT_OPS,
    DynamicShape,
    Index,
    Opaque,
    Space,
    Split,
    pull_back,
    shape_of,
)
from hlo_opt.ir.scalar import (
    ELEMENTWISE_OPS,
    Apply,
    Const,
    Element,
    Expr,
    Position,
    Scalarizer,
    choose_extras,
    elements,
    is_whole,
    nodes,
    number,
)
from hlo_opt.ir.walk import (
    ORDERED_OPS,
    defining_op,
    element_type,
    in_block_order,
    is_float_convert,
    ops_between,
    readers,
)
from hlo_opt.patterns.softmax import (
    No,
    Refusal,
    Softmax,
    check_denominator,
    match_exponentials,
    match_softmax,
    maximum_row,
    sink_of,
    sum_row,
    without_column,
)

PRODUCT = "*"


@dataclass(frozen=True)
class Operand:
    """A tensor and the role of each of its dimensions (`"batch"`, `"kv_head*group"`, `"1"`)."""

    value: ir.Value
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Captured:
    """A scalar function of one inner element: `score` of a logit, `probs` of a probability.

    Attributes:
      expr: the expression; its leaves are `inner` and the extras.
      inner: the element it is a function of.
      factor: what the expression is multiplied by.
    """

    expr: Expr
    inner: Element
    factor: float = 1.0


@dataclass(frozen=True)
class Attention:
    """`softmax(score(q k)) v`; see `docs/composites.md` for roles and dimensions.

    Attributes:
      roles: sizes of the roles that occur.
      atoms: for each of `batch` (outer first), `kv_head`, `group`, `query`, `key`: its atoms in
        `space`.
      extras: operands of `score` and `probs` besides the logit, with the nodes they stand for.
      sink: one more logit of every row, a function like `score` that does not use the logit.
      probabilities: the second matmul's operand that the softmax reaches.
      first, second: the two `dot_general` ops.
      result: of the second matmul, or of the division behind it.
      statistics: row maxima and sums, if `result` is not normalised.
      ops: all ops computed inside, operands before users; the last one last in the block.
    """

    softmax: Softmax
    space: Space
    roles: dict[str, int]
    atoms: dict[str, tuple[int, ...]]
    q: Operand
    k: Operand
    v: Operand
    extras: tuple[Operand, ...]
    extra_nodes: tuple[Element | Apply, ...]
    score: Captured
    probs: Captured | None
    sink: Captured | None
    probabilities: ir.Value
    out_dims: tuple[str, ...]
    first: ir.Operation
    second: ir.Operation
    result: ir.Value
    statistics: tuple[Operand, ...]
    ops: tuple[ir.Operation, ...]

    @property
    def results(self) -> tuple[ir.Value, ...]:
        """What takes the place of the ops: the result, and the statistics if there are some."""
        return (self.result, *(statistic.value for statistic in self.statistics))


def match_attention(exp: ir.Operation) -> Attention | Refusal | None:
    """Recognises the attention around a softmax's exponential (one of `softmax.EXPONENTIALS`).

    Returns:
      the match; a refusal where the softmax feeds a matmul that contracts its axis but the whole
      is not provably an attention we can express; None where it feeds no such matmul.
    """
    softmax = match_softmax(exp)
    if softmax is None:
        softmax = match_exponentials(exp)
    if softmax is None:
        return None
    if isinstance(softmax, Refusal):
        return softmax if _reaches_matmul(exp) else None
    second = _second_matmul(softmax.result)
    if second is None:
        return None
    try:
        softmax = without_column(softmax)
        if isinstance(softmax, Refusal):
            return softmax
        if softmax.total is None:
            return _refined(_Matcher(softmax, *second))
        return _match_unnormalised(softmax, *second)
    except DynamicShape:
        return Refusal("a shape is dynamic", second[0])


def _reaches_matmul(exp: ir.Operation) -> bool:
    return _second_matmul(exp.results[0]) is not None


def _match_unnormalised(
    softmax: Softmax, second: ir.Operation, side: int
) -> Attention | Refusal | None:
    """The attention with the division behind the second matmul, else without a division."""
    division = _division(second.results[0])
    normalised = None
    if division is not None:
        softmax_and_division = replace(
            softmax, denominator=division.denominator, inverted=division.inverted
        )
        normalised = _refined(_Matcher(softmax_and_division, second, side, division))
        if isinstance(normalised, Attention):
            return normalised
    partial = _refined(_Matcher(softmax, second, side))
    if isinstance(partial, Refusal) and isinstance(normalised, Refusal):
        return normalised
    return partial


@dataclass(frozen=True)
class _Division:
    """A division behind the second matmul: its result, and what stands in front of it.

    Attributes:
      moves: layout ops and converts from the matmul to the division, in order.
    """

    result: ir.Value
    denominator: ir.Value
    inverted: bool
    moves: tuple[ir.Operation, ...]


def _division(value: ir.Value) -> _Division | None:
    moves: list[ir.Operation] = []
    while True:
        uses = list(value.uses)
        if len(uses) != 1:
            return None
        op, number = uses[0].owner.operation, uses[0].operand_number
        if is_float_convert(op) or op.name in LAYOUT_OPS - {"stablehlo.slice"}:
            moves.append(op)
            value = op.results[0]
            continue
        if op.name == "stablehlo.multiply" or (op.name == "stablehlo.divide" and number == 0):
            inverted = op.name == "stablehlo.multiply"
            return _Division(op.results[0], op.operands[1 - number], inverted, tuple(moves))
        return None


def _refined(matcher: _Matcher) -> Attention | Refusal:
    """Runs a matcher until no atom has to be split any more."""
    while True:
        try:
            return matcher.run()
        except Split as request:
            matcher.space.split(request)
        except No as no:
            return no.refusal


def _second_matmul(probabilities: ir.Value) -> tuple[ir.Operation, int] | None:
    """The `dot_general` the probabilities reach elementwise, and which of its operands they are."""
    pending = [probabilities]
    seen: set[ir.Value] = set()
    while pending and len(seen) < 32:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        for use in value.uses:
            op = use.owner.operation
            if op.name == "stablehlo.dot_general":
                return op, use.operand_number
            if op.name in LAYOUT_OPS or op.name in ELEMENTWISE_OPS:
                pending.append(op.results[0])
    return None


@dataclass(frozen=True)
class _Dot:
    """Dimension numbers of a `dot_general`, for its two operands."""

    batch: tuple[tuple[int, ...], tuple[int, ...]]
    contract: tuple[tuple[int, ...], tuple[int, ...]]
    free: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, op: ir.Operation) -> _Dot:
        numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        batch = (
            tuple(numbers.lhs_batching_dimensions),
            tuple(numbers.rhs_batching_dimensions),
        )
        contract = (
            tuple(numbers.lhs_contracting_dimensions),
            tuple(numbers.rhs_contracting_dimensions),
        )
        free = tuple(
            tuple(d for d in range(len(shape_of(op.operands[side]))) if d not in taken)
            for side in (0, 1)
            for taken in [batch[side] + contract[side]]
        )
        return cls(batch, contract, (free[0], free[1]))

    def index(
        self, side: int, batch: list[Index], free: list[Index], contract: list[Index]
    ) -> list[Index]:
        """The index into one operand, from those of its batch, free and contracted dimensions."""
        dims = (*self.batch[side], *self.free[side], *self.contract[side])
        placed = dict(zip(dims, (*batch, *free, *contract), strict=True))
        return [placed[dim] for dim in sorted(dims)]


class _Matcher:
    """One attempt: steps from the second matmul back to q, k and v. Restarted after a `Split`."""

    def __init__(
        self,
        softmax: Softmax,
        second: ir.Operation,
        side: int,
        division: _Division | None = None,
    ) -> None:
        self.softmax = softmax
        self.second = second
        self.side = side
        self.division = division
        self.result = division.result if division is not None else second.results[0]
        self.space = Space()
        self.dot = _Dot.of(second)
        self.block = second.block
        # Initial indices: made once, refined after splits.
        self.out_index = [self.space.new(s) for s in shape_of(self.result)]
        self.contract = [
            self.space.new(shape_of(second.operands[side])[d]) for d in self.dot.contract[side]
        ]
        self.depth: dict[ir.Operation, list[Index]] = {}
        self.v_free: list[Index] = []

    def run(self) -> Attention:
        out_index = [self.space.refine(i) for i in self.out_index]
        p_index, v_index = self._second_operands(out_index)
        key = self._key(p_index)
        scalarizer = Scalarizer(self.space, self.block, [self.softmax.result])
        probs, x_index = self._probabilities(scalarizer, p_index, key)
        score_expr = scalarizer.at(self.softmax.x, x_index)
        if probs is not None:
            self._refuse_dropout(probs, score_expr, key)
        logit = self._logit(score_expr, key)
        sink = self._sink(scalarizer, list(x_index), out_index, logit, key)
        statistics = self._statistics(list(x_index))
        q_index, k_index, first, k_side = self._first_matmul(logit, key)
        q = self._peel(first.operands[1 - k_side], q_index)
        k = self._peel(first.operands[k_side], k_index)
        v = self._peel(self.second.operands[1 - self.side], v_index)
        names = self._roles(q, k, v, key, first, score_expr, p_index)
        score = Captured(score_expr, logit, self.softmax.factor)
        extra_nodes = self._extras(score, probs, sink)
        extras, (q_operand, k_operand, v_operand), rows = (
            tuple(
                Operand(node.value, self._dims(node.index, names, self.second)) for node in chosen
            )
            for chosen in (extra_nodes, (q, k, v), statistics)
        )
        ops = self._inside([o.value for o in (q_operand, k_operand, v_operand, *extras)], rows)
        self._check_uses(ops, first, rows)
        self._check_types(first)
        return Attention(
            softmax=self.softmax,
            space=self.space,
            roles={name: self.space.sizes[atom] for name, atom in names.items()},
            atoms=self._atoms_by_role(names),
            q=q_operand,
            k=k_operand,
            v=v_operand,
            extras=extras,
            extra_nodes=extra_nodes,
            score=score,
            probs=probs,
            sink=sink,
            probabilities=self.second.operands[self.side],
            out_dims=self._dims(out_index, names, self.second),
            first=first,
            second=self.second,
            result=self.result,
            statistics=rows,
            ops=ops,
        )

    def _second_operands(self, out_index: list[Index]) -> tuple[list[Index], list[Index]]:
        """Indices of the probabilities and of v at the second matmul, from that of the result."""
        index = out_index
        for op in reversed(self.division.moves if self.division is not None else ()):
            if op.name in LAYOUT_OPS:
                try:
                    index = pull_back(op, index, self.space)
                except Opaque:
                    raise No("the result is divided in another layout", op) from None
        rest = list(index)
        batch = [rest.pop(0) for _ in self.dot.batch[0]]
        free = [rest[: len(self.dot.free[0])], rest[len(self.dot.free[0]) :]]
        contract = [self.space.refine(i) for i in self.contract]
        self.v_free = free[1 - self.side]
        p_index, v_index = (
            self.dot.index(side, batch, free[side], contract) for side in (self.side, 1 - self.side)
        )
        return p_index, v_index

    def _sink(
        self,
        scalarizer: Scalarizer,
        x_index: list[Index],
        out_index: list[Index],
        logit: Element,
        key: int,
    ) -> Captured | None:
        """The sink of a row; also checks that the denominator is the row's sum."""
        softmax = self.softmax
        at = out_index if self.division is not None else x_index
        if self.division is not None:
            softmax = self._checked_denominator(x_index, out_index)
        elif softmax.total is None and not softmax.sink and softmax.column is None:
            return None  # `match_softmax` has checked it
        sink = sink_of(softmax, x_index, at, self.space)
        if sink is None:
            return None
        if softmax.total is not None and self.division is None:
            raise No("a partial attention has a sink", self.second)
        if isinstance(sink, float):
            with self.second.context:
                f32 = ir.F32Type.get()
                constant = Const(ir.FloatAttr.get(f32, sink, ir.Location.unknown()), f32)
            return Captured(constant, logit)
        expr = scalarizer.at(*sink)
        leaves = (n for n in nodes(expr) if isinstance(n, Element | Position))
        indices = [i for n in leaves for i in (n.index if isinstance(n, Element) else (n.index,))]
        if any(key in i.atoms for i in indices):
            raise No(
                "what is added to the sum of the exponentials varies over the keys", self.second
            )
        return Captured(expr, logit)

    def _checked_denominator(self, x_index: list[Index], out_index: list[Index]) -> Softmax:
        """The softmax with what is known of the division behind the second matmul."""
        assert self.division is not None
        axis = self.softmax.axis
        place = list(x_index)
        place[axis] = Index(place[axis].terms, place[axis].offset + self.softmax.shift)
        found = sum_row(
            self.softmax,
            self.division.denominator,
            self.division.inverted,
            list(out_index),
            place,
            self.space,
        )
        if found is None:
            op = defining_op(self.division.result)
            raise No("what the result is divided by is not the sum of the exponentials", op)
        softmax = replace(self.softmax, sink=found[0])
        check_denominator(softmax, found[1])
        return softmax

    def _statistics(self, x_index: list[Index]) -> tuple[Element, ...]:
        """Row maximum and sum, where the result is not normalised."""
        softmax = self.softmax
        if softmax.total is None or self.division is not None:
            return ()
        if softmax.factor != 1:
            raise No("a partial attention in another base than e", self.second)
        reduce, row = maximum_row(softmax, list(x_index), self.space)
        total = [i for d, i in enumerate(x_index) if d != softmax.axis]
        statistics = (
            Element(reduce.results[0], tuple(row)),
            Element(softmax.total, tuple(total)),
        )
        for statistic in statistics:
            if not is_whole(statistic, self.space):
                raise No("a part of the row statistics belongs to the attention", reduce)
            if statistic.value.owner.operation.block != self.block:
                raise No("the row statistics are computed in another block", reduce)
        return statistics

    def _key(self, p_index: list[Index]) -> int:
        """The atom of the contracted dimension; it must be the softmax axis."""
        contracted = [i for d in self.dot.contract[self.side] for i in [p_index[d]] if i.terms]
        if len(contracted) != 1 or len(contracted[0].terms) != 1:
            raise No(
                "the second matmul contracts several dimensions of the probabilities", self.second
            )
        return contracted[0].atoms[0]

    def _probabilities(
        self, scalarizer: Scalarizer, p_index: list[Index], key: int
    ) -> tuple[Captured | None, tuple[Index, ...]]:
        """What happens to probabilities before the second matmul, and their index there."""
        expr = scalarizer.at(self.second.operands[self.side], p_index)
        inner = [e for e in elements(expr) if e.value == self.softmax.result]
        if len(inner) != 1:
            raise No("the probabilities do not reach the matmul elementwise", self.second)
        index = inner[0].index
        if not is_whole(inner[0], self.space):
            raise No("the matmul uses a part of the probabilities", self.second)
        if index[self.softmax.axis].terms != ((key, 1),):
            raise No("the softmax is over another axis than the matmul contracts", self.second)
        applied = [n for n in nodes(expr) if isinstance(n, Apply)]
        if all(is_float_convert(n.op) for n in applied):
            return None, index
        if self.softmax.total is not None and (
            self.division is None or not _is_multiple(expr, inner[0])
        ):
            raise No("the exponentials are changed before the second matmul", self.second)
        return Captured(expr, inner[0]), index

    def _refuse_dropout(self, probs: Captured, score: Expr, key: int) -> None:
        """A guard uses the mask again; anything else of full size is not a guard."""
        others = [e for e in elements(probs.expr) if e != probs.inner]
        for element in others:
            maker = defining_op(element.value)
            if maker is None or maker.name != "stablehlo.dot_general":
                continue
            if any(key in part.atoms for part in element.index):
                raise No(
                    "logits reach the probabilities beside the softmax, or two softmaxes meet "
                    "before the second matmul (differential attention)",
                    maker,
                )
        known = set(elements(score))
        for element in others:
            varies = {atom for part in element.index for atom in part.atoms}
            if element not in known and key in varies and len(varies) > 1:
                maker = defining_op(element.value)
                if maker is not None and maker.name != "stablehlo.constant":
                    raise No("a computed tensor is applied to the probabilities (dropout?)", maker)

    def _logit(self, expr: Expr, key: int) -> Element:
        """The one matmul the logits come from."""
        found = []
        for element in elements(expr):
            op = defining_op(element.value)
            if op is None or op.name != "stablehlo.dot_general" or op.block != self.block:
                continue
            if any(key in part.atoms for part in element.index):
                found.append((element, op))
        if not found:
            raise No("the logits do not come from a matmul elementwise", self.second)
        if len(found) > 1:
            raise No("the logits come from more than one matmul", found[1][1])
        if not is_whole(found[0][0], self.space):
            raise No("the logits are a part of the first matmul's result", found[0][1])
        return found[0][0]

    def _first_matmul(
        self, logit: Element, key: int
    ) -> tuple[list[Index], list[Index], ir.Operation, int]:
        """Indices of q and k at the first matmul, the op, and which operand k is."""
        op = defining_op(logit.value)
        assert op is not None
        dot = _Dot.of(op)
        contracted = [d for d in dot.contract[0] if shape_of(op.operands[0])[d] != 1]
        if len(contracted) != 1:
            raise No("the first matmul does not contract one dimension", op)
        if op not in self.depth:
            self.depth[op] = [self.space.new(shape_of(op.operands[0])[d]) for d in dot.contract[0]]
        depth = [self.space.refine(i) for i in self.depth[op]]
        result = list(logit.index)
        batch = [result.pop(0) for _ in dot.batch[0]]
        free = [result[: len(dot.free[0])], result[len(dot.free[0]) :]]
        sides = [dot.index(side, batch, free[side], depth) for side in (0, 1)]
        holders = [side for side in (0, 1) if any(key in i.atoms for i in free[side])]
        if len(holders) != 1:
            raise No("the softmax axis is a batch dimension of the first matmul", op)
        k_side = holders[0]
        return sides[1 - k_side], sides[k_side], op, k_side

    def _peel(self, value: ir.Value, index: list[Index]) -> Element:
        """Follows an operand back through layout ops and upcasts to where it is smallest.

        Depth keeps a dimension of its own: what is peeled off must not be a mere reshape of a
        projection's result.
        """
        kept = Element(value, tuple(index))
        depths = {
            a
            for part in itertools.chain(self.v_free, *self.depth.values())
            for a in self.space.refine(part).atoms
        }
        while (op := defining_op(value)) is not None and op.block == self.block:
            if op.name == "stablehlo.slice":
                break
            if not _is_upcast(op):
                try:
                    index = pull_back(op, index, self.space)
                except Opaque:
                    break
                except Split as request:
                    if request.atom in depths:
                        break
                    raise
            value = op.operands[0]
            element = Element(value, tuple(index))
            if any(set(part.atoms) & depths and len(part.atoms) > 1 for part in index):
                continue
            if is_whole(element, self.space):
                kept = element
        return kept

    def _roles(
        self,
        q: Element,
        k: Element,
        v: Element,
        key: int,
        first: ir.Operation,
        score: Expr,
        p_index: list[Index],
    ) -> dict[str, int]:
        """Names every atom."""
        in_q, in_k, in_v = ([a for part in e.index for a in part.atoms] for e in (q, k, v))
        depth = [a for i in self.depth[first] for a in self.space.refine(i).atoms]
        v_depth = [a for i in self.v_free for a in i.atoms]
        shared = [a for a in in_k if a not in (key, *depth)]
        if set(shared) != {a for a in in_v if a not in (key, *v_depth)}:
            raise No("keys and values are shared between heads in different ways", self.second)
        if len(depth) != 1 or len(v_depth) > 1:
            raise No("a depth is made of several dimensions", self.second)
        if not set(shared) <= set(in_q):
            raise No("the queries do not have all batch dimensions of the keys", first)
        rows = [a for a in in_q if a not in (*shared, *depth)]
        out_rows = {a for i in p_index for a in i.atoms}
        if set(rows) | set(shared) | {key} != out_rows:
            raise No("the probabilities have dimensions that the queries do not have", first)
        group, query = self._group_and_query(rows, shared, q, first, score, key)
        names = {"key": key, "depth": depth[0]}
        heads = self._head_atom(shared, group, q)
        batch = [a for a in shared if a != heads]
        for name, atom in (
            *((f"batch{n or ''}", a) for n, a in enumerate(batch)),
            ("kv_head", heads),
            ("group", group),
            ("query", query),
            ("value_depth", v_depth[0] if v_depth else None),
        ):
            if atom is not None:
                names[name] = atom
        return names

    def _group_and_query(
        self,
        rows: list[int],
        shared: list[int],
        q: Element,
        first: ir.Operation,
        score: Expr,
        key: int,
    ) -> tuple[int | None, int | None]:
        """Which of the query's own dimensions counts heads of one group, and which positions.

        Any choice computes the same; the conventional one makes remarks and kernels useful.
        """
        if len(rows) > 2:
            raise No(f"the queries have {len(rows)} dimensions of their own", first)
        merged = {
            a
            for part in q.index
            if len(part.atoms) > 1 and set(part.atoms) & set(shared)
            for a in part.atoms
        }
        positions = {a for n in nodes(score) if isinstance(n, Position) for a in n.index.atoms} - {
            key
        }
        order = sorted(rows, key=lambda a: (a in positions, a not in merged, rows.index(a)))
        if len(rows) == 2 and not positions & set(rows) and not merged & set(rows):
            # Neither is told apart by the graph: heads of a group follow their key-value head.
            order = self._by_neighbour(rows, shared, q)
        if len(rows) == 1 and rows[0] in merged and rows[0] not in positions:
            return rows[0], None
        if len(rows) == 1:
            return None, rows[0]
        return (order[0], order[1]) if rows else (None, None)

    def _by_neighbour(self, rows: list[int], shared: list[int], q: Element) -> list[int]:
        flat = [a for part in q.index for a in part.atoms]
        after = [a for a in rows if flat.index(a) and flat[flat.index(a) - 1] in shared]
        group = after[-1] if after else min(rows, key=lambda a: self.space.sizes[a])
        return [group, *(a for a in rows if a != group)]

    def _head_atom(self, shared: list[int], group: int | None, q: Element) -> int | None:
        """The batch dimension that counts key-value heads."""
        for part in q.index:
            if group in part.atoms:
                near = [a for a in part.atoms if a in shared]
                if near:
                    return near[-1]
        if len(shared) > 1:
            return shared[-1]
        return shared[0] if shared and len(q.index) > 3 else None

    def _dims(
        self, index: tuple[Index, ...] | list[Index], names: dict[str, int], op: ir.Operation
    ) -> tuple[str, ...]:
        by_atom = {atom: name for name, atom in names.items()}
        dims = []
        for part in index:
            if any(atom not in by_atom for atom in part.atoms):
                raise No("an operand has a dimension that plays no role in the attention", op)
            dims.append(PRODUCT.join(by_atom[atom] for atom in part.atoms) or "1")
        return tuple(dims)

    def _atoms_by_role(self, names: dict[str, int]) -> dict[str, tuple[int, ...]]:
        batch = tuple(names[n] for n in names if n.startswith("batch"))
        single = ("kv_head", "group", "query", "key")
        return {"batch": batch, **{n: (names[n],) for n in single if n in names}}

    def _extras(self, *functions: Captured | None) -> tuple[Element | Apply, ...]:
        found: dict[Element | Apply, None] = {}
        for captured in filter(None, functions):
            chosen = choose_extras(captured.expr, captured.inner.value, self.space)
            if chosen is None:
                raise No("a mask or bias is indexed in a way that is not understood", self.second)
            found.update(dict.fromkeys(chosen))
        return tuple(found)

    def _inside(
        self, boundary: list[ir.Value], statistics: tuple[Operand, ...]
    ) -> tuple[ir.Operation, ...]:
        """All ops between the operands and the results."""
        lasts = [defining_op(value) for value in (self.result, *(s.value for s in statistics))]
        found: dict[ir.Operation, None] = {}
        for last in in_block_order(filter(None, lasts)):
            found.update(dict.fromkeys(ops_between(last, boundary)))
        ops = tuple(found)
        known = {*boundary, *(result for op in ops for result in op.results)}
        for op in ops:
            here = op.block == self.block or op.name in ("stablehlo.constant", "stablehlo.iota")
            if not here or not (_may_be_inside(op) or self._joins_sink(op)):
                raise No(f"{op.name} between the two matmuls is not understood", op)
            if not known.issuperset(op.operands):
                raise No("a value enters in a way that is not understood", op)
        makers = {defining_op(value) for value in boundary}
        results = [self.result, *(s.value for s in statistics)] if statistics else []
        for op in readers(ops[-1], results):
            # These come to stand behind the composite.
            if op in makers or (op.name in ORDERED_OPS and op not in ops):
                raise No(f"{op.name} uses a row statistic before the attention ends", op)
        return ops

    def _joins_sink(self, op: ir.Operation) -> bool:
        operands = [self.softmax.x, self.softmax.column]
        return op.name == "stablehlo.concatenate" and all(o in operands for o in op.operands)

    def _check_uses(
        self, ops: tuple[ir.Operation, ...], first: ir.Operation, statistics: tuple[Operand, ...]
    ) -> None:
        """What depends on the logits must not be used outside, results excepted."""
        inside = set(ops)
        results = {defining_op(value) for value in (self.result, *(s.value for s in statistics))}
        dependent = {first}
        for op in ops:
            if op in results:
                continue
            if op in dependent or any(defining_op(o) in dependent for o in op.operands):
                dependent.add(op)
                for use in op.results[0].uses:
                    if use.owner.operation not in inside:
                        what = (
                            "probabilities are"
                            if op.results[0] == self.softmax.result and self.softmax.total is None
                            else "an intermediate result is"
                        )
                        raise No(f"{what} also used elsewhere", use.owner.operation)

    def _check_types(self, first: ir.Operation) -> None:
        values = (first.results[0], self.softmax.exponential, self.second.results[0], self.result)
        for value in values:
            type_ = element_type(value)
            if not isinstance(type_, ir.FloatType) or type_.width > 32:
                raise No(f"computed in {type_}", first)
        for op in (first, self.second):
            if "algorithm" in op.attributes and str(op.attributes["algorithm"]) != _PLAIN_BF16:
                raise No("a matmul asks for a particular algorithm", op)


# What XLA does with bf16 operands on TPU anyway: one pass, accumulated in f32.
_PLAIN_BF16 = (
    "#stablehlo.dot_algorithm<lhs_precision_type = bf16, rhs_precision_type = bf16, "
    "accumulation_type = f32, lhs_component_count = 1, rhs_component_count = 1, "
    "num_primitive_operations = 1, allow_imprecise_accumulation = false>"
)


def _is_multiple(expr: Expr, inner: Element) -> bool:
    """Whether an expression is proportional to its inner element."""
    if not isinstance(expr, Apply):
        return expr == inner

    def free(node: Expr) -> bool:
        return inner not in elements(node)

    def multiple(node: Expr) -> bool:
        zero = isinstance(node, Const) and number(node.attribute) == 0
        return zero or _is_multiple(node, inner)

    parts = expr.operands
    match expr.op.name:
        case "stablehlo.multiply":
            return any(multiple(a) and free(b) for a, b in (parts, parts[::-1]))
        case "stablehlo.divide":
            return multiple(parts[0]) and free(parts[1])
        case "stablehlo.select":
            return free(parts[0]) and multiple(parts[1]) and multiple(parts[2])
        case "stablehlo.convert":
            return isinstance(expr.type, ir.FloatType) and multiple(parts[0])
    return False


def _is_upcast(op: ir.Operation) -> bool:
    """Whether the op converts floats to wider floats, which changes no value."""
    if op.name != "stablehlo.convert":
        return False
    before, after = element_type(op.operands[0]), element_type(op.results[0])
    return (
        isinstance(before, ir.BF16Type | ir.F16Type)
        and isinstance(after, ir.FloatType)
        and before.width < after.width
    )


def _may_be_inside(op: ir.Operation) -> bool:
    return (
        op.name in LAYOUT_OPS
        or op.name in ELEMENTWISE_OPS
        or op.name
        in (
            "stablehlo.constant",
            "stablehlo.iota",
            "stablehlo.dot_general",
            "stablehlo.reduce",
        )
    )
