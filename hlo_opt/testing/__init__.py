"""A lit and FileCheck kit for passes: hlo-opt's own tests use it, and so can anyone's.

In `lit.cfg.py`:

    import hlo_opt.testing
    hlo_opt.testing.configure(config, lit_config, modules=["my_passes"])

Tests then use `hlo-opt` and `FileCheck` in RUN lines, and `not` for commands that must fail.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

SUFFIXES = [".mlir"]


def configure(
    config: Any, lit_config: Any, *, name: str = "hlo-opt", modules: Sequence[str] = ()
) -> None:
    """Sets up a lit suite whose tests run `hlo-opt`.

    Args:
      config: lit's `config` of a `lit.cfg.py`.
      lit_config: lit's `lit_config`.
      name: the suite's name.
      modules: Python modules to import first; their decorators register your passes.
    """
    import lit.formats

    config.name = name
    config.test_format = lit.formats.ShTest()
    config.suffixes = SUFFIXES
    config.excludes = ["lit.cfg.py", "Output"]
    imports = " ".join(f"--load={module}" for module in modules)
    config.substitutions.append((r"\bhlo-opt\b", f"{_python('hlo_opt.testing.tool')} {imports}"))
    config.substitutions.append((r"\bFileCheck\b", file_check()))
    config.substitutions.append((r"\bnot\b", _python("hlo_opt.testing.expect_failure")))
    for variable in ("PYTHONPATH", "PYENV_ROOT", "HLO_OPT_CORPUS"):
        if variable in os.environ:
            config.environment[variable] = os.environ[variable]
    config.environment["JAX_PLATFORMS"] = "cpu"


def _python(module: str) -> str:
    return f'"{sys.executable}" -m {module}'


def file_check() -> str:
    """The command that checks output: LLVM's `FileCheck` where there is one, PyPI's otherwise."""
    return shutil.which("FileCheck") or _python("filecheck")
