"""Minimum vertex cuts: which values of a graph carry all it needs in the fewest bytes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)

_SOURCE, _SINK = -1, -2
_Residual = dict[int, dict[int, int]]


def cheapest_cut(
    sources: Iterable[Node],
    sinks: Iterable[Node],
    edges: Mapping[Node, Sequence[Node]],
    cost: Mapping[Node, int],
) -> set[Node]:
    """Nodes of least total cost that every path from a source to a sink goes through.

    Of several such sets it is the one nearest to the sinks. Ends count as part of their paths.

    Args:
      edges: the successors of every node.
      cost: a positive cost for every node.
    """
    numbers = {node: number for number, node in enumerate(cost)}
    unlimited = sum(cost.values()) + 1
    residual: _Residual = defaultdict(lambda: defaultdict(int))
    for node, number in numbers.items():  # a node is an edge from its inside to its outside
        residual[2 * number][2 * number + 1] = cost[node]
        for successor in edges.get(node, ()):
            residual[2 * number + 1][2 * numbers[successor]] = unlimited
    for node in sources:
        residual[_SOURCE][2 * numbers[node]] = unlimited
    for node in sinks:
        residual[2 * numbers[node] + 1][_SINK] = unlimited
    while path := _augmenting_path(residual):
        flow = min(residual[a][b] for a, b in path)
        for a, b in path:
            residual[a][b] -= flow
            residual[b][a] += flow
    reaching = _reaching_sink(residual)
    return {
        node
        for node, number in numbers.items()
        if 2 * number not in reaching and 2 * number + 1 in reaching
    }


def _augmenting_path(residual: _Residual) -> list[tuple[int, int]]:
    before: dict[int, int] = {_SOURCE: _SOURCE}
    pending = deque([_SOURCE])
    while pending and _SINK not in before:
        here = pending.popleft()
        for there, room in residual[here].items():
            if room > 0 and there not in before:
                before[there] = here
                pending.append(there)
    if _SINK not in before:
        return []
    path, here = [], _SINK
    while here != _SOURCE:
        path.append((before[here], here))
        here = before[here]
    return path


def _reaching_sink(residual: _Residual) -> set[int]:
    entering: dict[int, list[int]] = defaultdict(list)
    for a, room_to in residual.items():
        for b, room in room_to.items():
            if room > 0:
                entering[b].append(a)
    found, pending = {_SINK}, [_SINK]
    while pending:
        for node in entering[pending.pop()]:
            if node not in found:
                found.add(node)
                pending.append(node)
    return found
