"""The example in docs/writing-a-pass.md works as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def files(text: str) -> dict[str, str]:
    """The files a document shows: a name in backticks and a colon, then a code block."""
    return {
        name: body
        for name, body in re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)```", text, re.S | re.M)
    }


def test_the_worked_example(tmp_path: Path) -> None:
    shown = files((DOCS / "writing-a-pass.md").read_text())
    assert set(shown) == {"my_passes.py", "tests/lit.cfg.py", "tests/double-negate.mlir"}
    for name, body in shown.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(body)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    lit = [sys.executable, "-c", "import lit.main; lit.main.main()", "-v", "tests"]
    done = subprocess.run(
        lit, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"Passed\s*:\s*1", done.stdout)


def test_generated_checks_pass(tmp_path: Path) -> None:
    test = tmp_path / "new.mlir"
    test.write_text(
        "// RUN: hlo-opt %s --cse | FileCheck %s\n"
        "// CHECK: an old line\n"
        "func.func @main(%a: tensor<2xf32>, %b: tensor<2x3xf32>) -> tensor<2xf32> {\n"
        "  %0 = stablehlo.add %a, %a : tensor<2xf32>\n"
        "  %1 = stablehlo.add %a, %a : tensor<2xf32>\n"
        "  %2 = stablehlo.slice %b [0:2, 0:1] : (tensor<2x3xf32>) -> tensor<2x1xf32>\n"
        "  %3 = stablehlo.reshape %2 : (tensor<2x1xf32>) -> tensor<2xf32>\n"
        "  %4 = stablehlo.multiply %1, %3 : tensor<2xf32>\n"
        "  return %4 : tensor<2xf32>\n"
        "}\n"
    )
    command = [sys.executable, "-m", "hlo_opt.testing.generate_checks", str(test)]
    generated = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "an old line" not in generated
    assert generated.count("// CHECK-NEXT:") == 4
    test.write_text(generated)
    (tmp_path / "lit.cfg.py").write_text(
        "import hlo_opt.testing\nhlo_opt.testing.configure(config, lit_config)\n"
    )
    lit = [sys.executable, "-c", "import lit.main; lit.main.main()", "-v", str(tmp_path)]
    done = subprocess.run(lit, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + generated
    # And they check something: another program does not pass.
    test.write_text(generated.replace("stablehlo.multiply %1, %3", "stablehlo.add %1, %3"))
    assert subprocess.run(lit, capture_output=True, check=False).returncode != 0


def test_links_between_documents() -> None:
    root = DOCS.parent
    for page in [root / "README.md", *DOCS.glob("*.md")]:
        for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
