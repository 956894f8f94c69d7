"""hlo-opt: compiler passes for StableHLO modules of language models.

The public names are imported on first use, so that `import hlo_opt` does not import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hlo_opt.api import apply, jit, optimize
    from hlo_opt.errors import HloOptError

__version__ = "0.1.0.dev0"

__all__ = ["HloOptError", "__version__", "apply", "jit", "optimize"]

_HOMES = {
    "HloOptError": "hlo_opt.errors",
    "apply": "hlo_opt.api",
    "jit": "hlo_opt.api",
    "optimize": "hlo_opt.api",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hlo_opt' has no attribute {name!r}")
