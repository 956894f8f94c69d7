"""One file per pass. Importing this package registers them all; see `hlo_opt.pipeline`."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
