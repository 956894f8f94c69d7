"""Symbolic element indices, and pulling them back through layout ops.

To know what a tensor computes, ask for its element at a symbolic index and follow that element to
where it comes from. An index is a sum of strided *atoms* (independent loop variables); broadcast,
transpose, reshape and slice only change which atoms stand where. A reshape that cuts an atom in
two raises `Split`; the caller refines its atoms with `Space.split` and starts again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxlib.mlir import ir


class Split(Exception):
    """An atom has to be replaced by `high * low_size + low` before the pull-back can go on."""

    def __init__(self, atom: int, low_size: int) -> None:
        super().__init__(f"atom {atom} must be split at {low_size}")
        self.atom = atom
        self.low_size = low_size


class Opaque(Exception):
    """The element does not come from one element of the operand in an affine way."""


class DynamicShape(Opaque):
    """A shape is not known, so elements cannot be followed."""


@dataclass(frozen=True)
class Index:
    """`offset + sum(stride * atom)`, terms ordered by falling stride."""

    terms: tuple[tuple[int, int], ...] = ()  # (atom, stride)
    offset: int = 0

    @property
    def atoms(self) -> tuple[int, ...]:
        return tuple(atom for atom, _ in self.terms)


ZERO = Index()


@dataclass
class Space:
    """The sizes of all atoms, and what became of those that were split."""

    sizes: list[int] = field(default_factory=list)
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def new(self, size: int) -> Index:
        """A fresh atom as an index; dimensions of size 1 have no atom."""
        if size == 1:
            return ZERO
        self.sizes.append(size)
        return Index(((len(self.sizes) - 1, 1),))

    def split(self, request: Split) -> None:
        """Replaces an atom by two; indices made before must go through `refine`."""
        high = self.new(self.sizes[request.atom] // request.low_size)
        low = self.new(request.low_size)
        self.parts[request.atom] = (high.atoms[0], low.atoms[0])

    def refine(self, index: Index) -> Index:
        """Rewrites an index over split atoms."""
        terms: list[tuple[int, int]] = []
        for atom, stride in index.terms:
            if atom in self.parts:
                high, low = self.parts[atom]
                pair = Index(((high, stride * self.sizes[low]), (low, stride)))
                terms.extend(self.refine(pair).terms)
            else:
                terms.append((atom, stride))
        return Index(tuple(terms), index.offset)

    def is_product(self, index: Index) -> bool:
        """Whether the index runs through 0, 1, 2, … in row-major order of its atoms."""
        expected = 1
        for atom, stride in reversed(index.terms):
            if stride != expected:
                return False
            expected *= self.sizes[atom]
        return index.offset == 0

    def size(self, index: Index) -> int:
        """How many values the atoms of the index take together."""
        return math.prod(self.sizes[atom] for atom in index.atoms)

    def delinearize(self, linear: Index, shape: Sequence[int]) -> list[Index]:
        """Splits a row-major position into one index for each dimension of `shape`."""
        result: list[Index] = []
        stride = math.prod(shape)
        for size in shape:
            stride //= size
            quotient, linear = self._divmod(linear, stride)
            result.append(ZERO if size == 1 else quotient)
        return result

    def _divmod(self, index: Index, divisor: int) -> tuple[Index, Index]:
        if divisor == 1:
            return index, ZERO
        high: list[tuple[int, int]] = []
        low: list[tuple[int, int]] = []
        reach = index.offset % divisor
        for atom, stride in index.terms:
            if stride % divisor == 0:
                high.append((atom, stride // divisor))
                continue
            low.append((atom, stride))
            reach += stride * (self.sizes[atom] - 1)
            if stride < divisor <= stride * (self.sizes[atom] - 1):
                ratio, rest = divmod(divisor, stride)
                if rest or self.sizes[atom] % ratio:
                    raise Opaque
                raise Split(atom, ratio)
        if reach >= divisor:
            raise Opaque
        return (
            Index(tuple(high), index.offset // divisor),
            Index(tuple(low), index.offset % divisor),
        )


def shape_of(value: ir.Value) -> list[int]:
    """The static shape of a ranked tensor value. Raises `DynamicShape` where it has none."""
    type_ = ir.RankedTensorType(value.type)
    if not type_.has_static_shape:
        raise DynamicShape(str(type_))
    return list(type_.shape)


def linearize(index: Sequence[Index], shape: Sequence[int]) -> Index:
    """The row-major position of an element."""
    terms: list[tuple[int, int]] = []
    offset, stride = 0, 1
    for part, size in zip(reversed(index), reversed(shape), strict=True):
        terms.extend((atom, s * stride) for atom, s in part.terms)
        offset += part.offset * stride
        stride *= size
    return Index(tuple(sorted(terms, key=lambda term: -term[1])), offset)


LAYOUT_OPS = frozenset(
    {
        "stablehlo.broadcast_in_dim",
        "stablehlo.reshape",
        "stablehlo.slice",
        "stablehlo.transpose",
    }
)


def pull_back(op: ir.Operation, index: Sequence[Index], space: Space) -> list[Index]:
    """The index into the operand of a layout op that gives the result's element at `index`.

    Raises:
      Split: an atom must be split first.
      Opaque: there is no such affine index.
    """
    operand_shape = shape_of(op.operands[0])
    match op.name:
        case "stablehlo.broadcast_in_dim":
            dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
            return [
                ZERO if size == 1 else index[dim]
                for dim, size in zip(dims, operand_shape, strict=True)
            ]
        case "stablehlo.transpose":
            result = [ZERO] * len(operand_shape)
            for here, there in enumerate(ir.DenseI64ArrayAttr(op.attributes["permutation"])):
                result[there] = index[here]
            return result
        case "stablehlo.reshape":
            linear = linearize(index, shape_of(op.results[0]))
            return space.delinearize(linear, operand_shape)
        case "stablehlo.slice":
            starts = ir.DenseI64ArrayAttr(op.attributes["start_indices"])
            strides = ir.DenseI64ArrayAttr(op.attributes["strides"])
            return [
                Index(tuple((a, s * step) for a, s in part.terms), part.offset * step + start)
                for part, start, step in zip(index, starts, strides, strict=True)
            ]
    raise Opaque
