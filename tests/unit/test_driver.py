"""The `hlo-opt` command, in process unless the process itself is what is tested."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hlo_opt import ir as hlo_ir
from hlo_opt.driver import Driver

ADDS = """module {
  func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
    %0 = stablehlo.add %a, %a : tensor<2xf32>
    %1 = stablehlo.add %a, %a : tensor<2xf32>
    %2 = stablehlo.multiply %0, %1 : tensor<2xf32>
    return %2 : tensor<2xf32>
  }
}
"""
SOFTMAX = """func.func @main(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %exp = stablehlo.exponential %x : tensor<4x8xf32>
  %sum = stablehlo.reduce(%exp init: %zero) applies stablehlo.add across dimensions = [1]
    : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
  %sumb = stablehlo.broadcast_in_dim %sum, dims = [0] : (tensor<4xf32>) -> tensor<4x8xf32>
  %div = stablehlo.divide %exp, %sumb : tensor<4x8xf32>
  return %div : tensor<4x8xf32>
}
"""


def run(*argv: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    out, err = io.BytesIO(), io.StringIO()
    status = Driver(argv, stdin=io.BytesIO(stdin), stdout=out, stderr=err).run()
    return status, out.getvalue(), err.getvalue()


@pytest.fixture
def adds(tmp_path: Path) -> Path:
    path = tmp_path / "adds.mlir"
    path.write_text(ADDS)
    return path


def test_reads_stdin_and_writes_stdout() -> None:
    status, out, err = run("--cse", stdin=ADDS.encode())
    assert (status, err) == (0, "")
    assert out.count(b"stablehlo.add") == 1


def test_flags_and_input_in_any_order(adds: Path) -> None:
    assert run("--cse", str(adds))[1] == run(str(adds), "--cse")[1]


def test_passes_run_in_command_line_order(adds: Path) -> None:
    err = run(str(adds), "--symbol-dce", "--cse", "--mlir-timing", "-o", "/dev/null")[2]
    assert re.findall(r"%\)  (\S+)", err) == ["symbol-dce", "cse", "Total"]


def test_function_passes_as_flags_are_nested(adds: Path) -> None:
    assert run(str(adds), "--chlo-legalize-to-stablehlo")[0] == 0


def test_output_file_and_bytecode(adds: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.bc"
    status, out, _ = run(str(adds), "--emit=bytecode", "-o", str(target))
    assert (status, out) == (0, b"")
    assert target.read_bytes().startswith(b"ML\xefR")
    assert str(hlo_ir.read(target)) == str(hlo_ir.parse(ADDS))


def test_remarks(tmp_path: Path) -> None:
    path, lines = tmp_path / "model.mlir", tmp_path / "remarks.jsonl"
    path.write_text(SOFTMAX)
    _, _, err = run(str(path), "--raise-softmax", "--remarks", f"--remarks-output={lines}")
    expected = f"{path}:7: remark: softmax raised: 4x8, axis 1 [raise-softmax]\n"
    assert err == expected
    (line,) = lines.read_text().splitlines()
    remark = json.loads(line)
    assert remark["pass"] == "raise-softmax"
    assert (remark["kind"], remark["structure"]) == ("applied", "softmax")
    assert (remark["function"], remark["location"]) == ("main", f"{path}:7")


def test_statistics(tmp_path: Path) -> None:
    err = run("--raise-softmax", "--mlir-pass-statistics", stdin=SOFTMAX.encode())[2]
    assert re.search(r"raise-softmax\n\s+\(S\)\s+1 softmax applied", err)


def test_verify_diagnostics(tmp_path: Path) -> None:
    path = tmp_path / "model.mlir"
    expected = "  // expected-remark@+1 {{softmax raised: 4x8}}\n  %div"
    path.write_text(SOFTMAX.replace("  %div =", expected + " ="))
    assert run(str(path), "--raise-softmax", "--verify-diagnostics") == (0, b"", "")
    path.write_text(SOFTMAX)
    status, _, err = run(str(path), "--raise-softmax", "--verify-diagnostics")
    assert status == 1
    assert "unexpected remark" in err
    path.write_text(SOFTMAX.replace("  %div =", expected.replace("4x8", "9x9") + " ="))
    status, _, err = run(str(path), "--raise-softmax", "--verify-diagnostics")
    assert status == 1
    assert "was not made" in err


def test_print_ir_tree(adds: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    run(str(adds), "--cse", "--symbol-dce", f"--mlir-print-ir-tree-dir={folder}")
    assert sorted(p.name for p in folder.iterdir()) == ["0_cse.mlir", "1_symbol-dce.mlir"]


def test_reproducer(adds: Path, tmp_path: Path) -> None:
    path = tmp_path / "reproducer.mlir"
    argv = ["--cse", "--vhlo-to-version=target=1.2.x"]
    status, _, err = run(str(adds), *argv, f"--mlir-pass-pipeline-crash-reproducer={path}")
    assert status == 1
    again = run(str(path), "--run-reproducer")
    assert again[0] == 1
    assert again[2].split("error:")[1] == err.split("error:")[1]
    assert path.read_text().count("stablehlo.add") == 2  # the module as it went in


def test_information() -> None:
    assert run("--version")[1].startswith(b"hlo-opt ")
    listing = run("--list-passes")[1].decode()
    assert re.search(r"raise-attention +Outlines softmax attention", listing)
    assert re.search(r"chlo-legalize-to-stablehlo +\[func.func\]", listing)
    assert b"stablehlo" in run("--show-dialects")[1]


def test_unregistered_dialects() -> None:
    text = b'"foo.bar"() : () -> ()'
    assert run(stdin=text)[0] == 1
    assert run("--allow-unregistered-dialect", stdin=text)[0] == 0


BYTECODE = hlo_ir.serialize(hlo_ir.parse(ADDS), hlo_ir.Format.BYTECODE)
DYNAMIC = ADDS.replace("2xf32", "?xf32").encode()
NO_MAIN = ADDS.replace("@main", "@f").encode()


@pytest.mark.parametrize(
    ("argv", "stdin", "problem"),
    [
        ([], b"func.func @f( {", "-:1:14: error: expected non-function type"),
        ([], BYTECODE[:70], "error: attempting to parse"),
        ([], b"\x00\xff\xfe", "error: not MLIR text, MLIR bytecode, a StableHLO portable"),
        (["--pass-pipeline=builtin.module(quux)"], b"", "unknown pass 'quux'"),
        (["--quux"], b"", "unrecognized arguments: --quux"),
        (["--raise-attention=depth=3"], b"", "has no option 'depth' (options: min-seq)"),
        (["--raise-attention=min-seq=few"], b"", "takes int, got 'few'"),
        (["--canonicalize=foo=1"], ADDS.encode(), "no such option foo"),
        (["--pass-pipeline=func.func(inline)"], b"", "runs on 'builtin.module'"),
        (["--pass-pipeline=func.func(symbol-dce)"], b"", "cannot run on 'func.func'"),
        (["--pass-pipeline=cse", "--cse"], b"", "exclude each other"),
        (["no-such-file.mlir"], b"", "no-such-file.mlir: error: cannot open input file"),
        (["-o", "no/such/folder/x"], ADDS.encode(), "cannot write output file"),
        (["--remarks-output=no/such/folder/x"], ADDS.encode(), "cannot write output file"),
        (["--target=v99"], ADDS.encode(), "unknown target 'v99'"),
        (["--compile"], ADDS.encode(), "--compile needs --target"),
        (["--compile", "--target=cpu"], ADDS.encode(), "unknown TPU target 'cpu'"),
        (["--compile", "--target=v5e"], DYNAMIC, "has a dynamic shape"),
        (["--compile", "--target=v5e"], NO_MAIN, "no function 'main'"),
        (["--verify-numerics"], DYNAMIC, "has a dynamic shape"),
        (["--verify-numerics"], NO_MAIN, "no function 'main'"),
        (["--run-reproducer"], ADDS.encode(), "not a reproducer"),
        (["--emit=pdf"], b"", "invalid choice: 'pdf'"),
    ],
)
def test_errors_are_one_line(argv: list[str], stdin: bytes, problem: str) -> None:
    status, out, err = run(*argv, stdin=stdin)
    assert status == 1
    assert out == b""
    assert problem in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_dynamic_shapes_pass_through_where_nothing_needs_them_static() -> None:
    text = """func.func @main(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
      %exp = stablehlo.exponential %x : tensor<?x8xf32>
      %div = stablehlo.divide %exp, %x : tensor<?x8xf32>
      return %div : tensor<?x8xf32>
    }"""
    status, out, err = run("--inference", "--target=v5e", "--remarks", stdin=text.encode())
    assert status == 0
    assert b"stablehlo.divide" in out
    assert "softmax missed: a shape is dynamic" in err


def test_a_failing_run_leaves_the_old_output(adds: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.mlir"
    target.write_text("old")
    assert run(str(adds), "--vhlo-to-version=target=1.2.x", "-o", str(target))[0] == 1
    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adds.mlir", "out.mlir"]


def test_internal_errors_are_one_line(adds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug\nof ours")

    monkeypatch.setattr(Driver, "transform", broken)
    status, _, err = run(str(adds))
    assert status == 1
    assert err.startswith("hlo-opt: internal error: RuntimeError: a bug of ours")
    assert err.count("\n") == 1


COMMAND = [sys.executable, "-m", "hlo_opt.testing.tool"]


def test_start_up_is_quick_and_without_jax(adds: Path) -> None:
    code = (
        "import sys; from hlo_opt.driver import Driver; "
        f"status = Driver([{str(adds)!r}, '--cse']).run(); "
        "sys.exit(status or 'jax' in sys.modules)"
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
    assert min(seconds) <= 0.8


def test_a_closed_pipe_is_silent(adds: Path) -> None:
    more = "".join(f"    %x{n} = stablehlo.add %0, %0 : tensor<2xf32>\n" for n in range(5000))
    adds.write_text(ADDS.replace("    %2 =", more + "    %2 ="))  # more than a pipe holds
    process = subprocess.Popen(
        [*COMMAND, str(adds), "--mlir-print-debuginfo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait(timeout=30)
