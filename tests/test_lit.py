"""Runs the lit suite under pytest; `lit tests/lit` does the same by hand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "lit"
LIT = [sys.executable, "-c", "import lit.main; lit.main.main()", "-v"]


def lit(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LIT, str(folder)], capture_output=True, text=True, check=False)


def test_lit_suite() -> None:
    done = lit(FOLDER)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"Passed\s*:\s*(\d+)", done.stdout)
    assert passed is not None
    assert int(passed[1]) == len(list(FOLDER.glob("*.mlir")))


def test_a_wrong_expectation_fails(tmp_path: Path) -> None:
    (tmp_path / "lit.cfg.py").write_text((FOLDER / "lit.cfg.py").read_text())
    good = (FOLDER / "cxx-passes.mlir").read_text()
    (tmp_path / "wrong.mlir").write_text(
        good.replace("CHECK: stablehlo.add", "CHECK: stablehlo.sine")
    )
    done = lit(tmp_path)
    assert done.returncode != 0
    assert re.search(r"Failed\s*:\s*1", done.stdout)
