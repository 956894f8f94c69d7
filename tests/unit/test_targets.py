"""Targets' figures, and what compiling says when it cannot."""

from __future__ import annotations

import sys

import pytest

from hlo_opt import ir as hlo_ir
from hlo_opt.errors import HloOptError
from hlo_opt.targets import TPU_NAMES, check_target, compile, compile_module, get_target
from hlo_opt.targets.compile import readable
from hlo_opt.targets.target import target_of_device

IDENTITY = """func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
  return %a : tensor<2xf32>
}"""


def test_figures_come_from_pallas() -> None:
    assert TPU_NAMES == ("v4", "v5e", "v5p", "v6e", "tpu7x")
    peaks = [get_target(name).info.bf16_ops_per_second for name in TPU_NAMES]
    assert all(peak > 1e14 for peak in peaks)
    assert get_target("v6e").info.mem_bw_bytes_per_second > 1e12


def test_device_kinds() -> None:
    for name in TPU_NAMES:
        assert target_of_device("tpu", get_target(name).device_kind) == name
    assert target_of_device("tpu", "TPU v6e") == "v6e"
    assert target_of_device("cpu", "cpu") == "cpu"
    assert target_of_device("tpu", "TPU v99") is None


def test_unknown_targets() -> None:
    with pytest.raises(HloOptError, match="expected one of v4, v5e, v5p, v6e, tpu7x, cpu, gpu"):
        check_target("v99")
    with pytest.raises(HloOptError, match="unknown TPU target 'cpu'"):
        get_target("cpu")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out\nof memory. Scoped "
            "allocation with size 64.00M and limit 16.00M exceeded",
            "a kernel needs 64.00M of scoped VMEM, the limit is 16.00M",
        ),
        (
            "Ran out of memory in memory space vmem. Used 256.00M of 128.00M.",
            "VMEM is exhausted: 256.00M of 128.00M",
        ),
        (
            "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (298.12G) exceeds available HBM (15.75G). HLO module: module.",
            "HBM is exhausted: 298.12G needed, 15.75G available",
        ),
        ("something\n else", "something else"),
    ],
)
def test_refusals_are_readable(said: str, shown: str) -> None:
    assert readable(said) == shown


def test_a_crash_of_the_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "WORKER", [sys.executable, "-c", "import os; os.abort()"])
    with pytest.raises(HloOptError, match=r"compiler for v5e died \(exit status -6\)"):
        compile_module(hlo_ir.parse(IDENTITY), "v5e")


def test_a_hanging_compiler_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "WORKER", [sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(HloOptError, match="did not finish in 1 s"):
        compile_module(hlo_ir.parse(IDENTITY), "v5e", timeout=1)


def test_without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "has_libtpu", lambda: False)
    with pytest.raises(HloOptError, match=r"pip install 'hlo-opt\[tpu\]'"):
        compile_module(hlo_ir.parse(IDENTITY), "v5e")
