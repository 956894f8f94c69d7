"""Contexts, reading and writing modules, and the helpers every pattern and pass uses.

What lives here knows MLIR and StableHLO but no pattern, pass or kernel.
"""

from hlo_opt.ir.module import (
    Format,
    clone,
    context,
    parse,
    read,
    serialize,
)

__all__ = ["Format", "clone", "context", "parse", "read", "serialize"]
