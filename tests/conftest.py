"""Tests run on CPU and never look for an accelerator."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))


@pytest.fixture
def library_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves attention to JAX's own kernels, which the general one comes before."""
    from hlo_opt.kernels import kernels_for
    from hlo_opt.kernels.general_attention import GeneralAttention
    from hlo_opt.passes import lower_composites

    monkeypatch.setattr(
        lower_composites,
        "kernels_for",
        lambda *args: [k for k in kernels_for(*args) if not isinstance(k, GeneralAttention)],
    )
