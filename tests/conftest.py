"""Tests run on CPU and never look for an accelerator."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))
