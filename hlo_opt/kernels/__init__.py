"""Kernels that composites are lowered to, one file per kernel.

A kernel is a JAX function (for TPU with a `pallas_call` inside), built for a composite's exact
shapes. Modules of this package register theirs with `register_kernel`; `kernels_for` finds them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

from jaxlib.mlir import ir

from hlo_opt.ir.signature import ArrayType
from hlo_opt.targets import Target


@dataclass(frozen=True)
class No:
    """Why a kernel cannot stand for a composite, in words."""

    reason: str


@dataclass(frozen=True)
class Candidate:
    """One way to run a kernel.

    Attributes:
      label: kernel and block sizes in words, for remarks.
      config: what `Kernel.build` makes it from.
    """

    label: str
    config: tuple[tuple[str, Any], ...] = ()


class Kernel(Hashable, Protocol):
    """What a kernel tells about itself. `spec` is a hashable description of a composite.

    Attributes:
      rank: its place among the kernels for its composite, lower first.
      platforms: what it runs on, of `Target.platform`.
    """

    composite: str
    name: str
    rank: int
    platforms: frozenset[str]

    def spec(self, op: ir.Operation, module: ir.Module) -> Any | No:
        """Describes a composite op, or says why it is malformed."""

    def supports(self, spec: Any, target: Target) -> No | None:
        """None where the kernel computes the same function; a reason otherwise."""

    def candidates(self, spec: Any, target: Target) -> Sequence[Candidate]:
        """Ways to run it, the best guess first."""

    def arguments(self, spec: Any) -> Sequence[ArrayType]:
        """Types of the composite's operands."""

    def precision(self, spec: Any) -> str:
        """JAX's matmul precision the kernel must be traced with."""

    def build(self, spec: Any, candidate: Candidate) -> Callable[..., Any]:
        """A JAX function from the composite's operands to its result."""


_KERNELS: list[Kernel] = []
K = TypeVar("K", bound=type[Any])


def register_kernel(cls: K) -> K:
    """Class decorator: registers an instance of a kernel."""
    _KERNELS.append(cls())
    return cls


@cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def kernels_for(composite: str, platform: str) -> list[Kernel]:
    """The kernels registered for a composite's name on a platform, in the order to try them."""
    _load()
    known = [k for k in _KERNELS if k.composite == composite and platform in k.platforms]
    return sorted(known, key=lambda kernel: (kernel.rank, kernel.name))
