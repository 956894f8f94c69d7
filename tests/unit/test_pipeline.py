"""Textual pipelines, options, anchors and the runner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from jaxlib.mlir import ir

from hlo_opt import ir as hlo_ir
from hlo_opt import pipeline as pipelines
from hlo_opt.errors import HloOptError
from hlo_opt.pipeline import (
    CXX_PASSES,
    CxxPass,
    Pass,
    PassContext,
    print_pipeline,
    register_pass,
    resolve,
    run_pipeline,
)

MODULE = """module {
  func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
    %0 = stablehlo.add %a, %a : tensor<2xf32>
    %1 = stablehlo.add %a, %a : tensor<2xf32>
    %2 = stablehlo.multiply %0, %1 : tensor<2xf32>
    return %2 : tensor<2xf32>
  }
}"""


@pytest.fixture(autouse=True)
def passes() -> Iterator[None]:
    @register_pass("test-rename")
    @dataclass(frozen=True)
    class Rename(Pass):
        """Renames the module."""

        to: str = "renamed"
        times: int = 1
        loud: bool = False
        ratio: float = 0.5

        def run(self, module: ir.Module, ctx: PassContext) -> None:
            name = (self.to.upper() if self.loud else self.to) * self.times
            module.operation.attributes["sym_name"] = ir.StringAttr.get(name, module.context)

    @register_pass("test-fail")
    @dataclass(frozen=True)
    class Fail(Pass):
        """Changes the module, then fails."""

        def run(self, module: ir.Module, ctx: PassContext) -> None:
            Rename().run(module, ctx)
            raise HloOptError("error: failed on purpose")

    @register_pass("test-break")
    @dataclass(frozen=True)
    class Break(Pass):
        """Leaves an invalid module."""

        def run(self, module: ir.Module, ctx: PassContext) -> None:
            function = next(iter(module.body.operations)).operation
            function.regions[0].blocks[0].arguments[0].set_type(
                ir.Type.parse("tensor<3xf32>", module.context)
            )

    yield
    for name in ("test-rename", "test-fail", "test-break"):
        del pipelines.PASSES[name]


def run(text: str) -> str:
    return str(run_pipeline(hlo_ir.parse(MODULE), text, PassContext()))


@pytest.mark.parametrize(
    "text",
    [
        "builtin.module(test-rename{to=x times=2},cse)",
        "builtin.module(func.func(canonicalize{max-iterations=3},cse),symbol-dce)",
        "builtin.module(any(cse))",
        'builtin.module(test-rename{to="a b" loud=true ratio=0.25})',
        "builtin.module()",
    ],
)
def test_text_round_trips(text: str) -> None:
    assert print_pipeline(resolve(text)) == text
    assert resolve(print_pipeline(resolve(text))) == resolve(text)


def test_a_bare_list_is_a_module_pipeline() -> None:
    assert resolve("cse,symbol-dce") == resolve("builtin.module(cse,symbol-dce)")


def test_python_and_cxx_passes_in_one_pipeline() -> None:
    text = run("func.func(cse),test-rename{to=x times=2 loud},canonicalize")
    assert "module @XX" in text
    assert text.count("stablehlo.add") == 1


def test_named_pipelines_expand_in_order() -> None:
    names = [step.name for step in resolve("inference")]
    assert names == [
        "normalize",
        "raise-decode-attention",
        "raise-attention",
        "raise-softmax",
        "lower-composites",
        "symbol-dce",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("canonicalise", "unknown pass 'canonicalise'; did you mean 'canonicalize'?"),
        ("quux", "unknown pass 'quux'; see --list-passes"),
        ("test-rename{size=3}", "has no option 'size' (options: to, times, loud, ratio)"),
        ("test-rename{times=many}", "option 'times' of pass 'test-rename' takes int, got 'many'"),
        ("test-rename{loud=perhaps}", "takes bool"),
        ("test-rename{ratio=x}", "takes float"),
        ("canonicalize{foo=1}", "no such option foo"),
        ("func.func(symbol-dce)", "cannot run on 'func.func'"),
        ("chlo-legalize-to-stablehlo", "write it 'func.func(chlo-legalize-to-stablehlo)'"),
        ("func.func(test-rename)", "runs on 'builtin.module', not inside 'func.func'"),
        ("func.func(sdy-propagation-pipeline)", "cannot run on 'func.func'"),
        ("scf.for(cse)", "cannot nest a pipeline on 'scf.for'"),
        ("func.func(func.func(cse))", "cannot nest 'func.func' inside 'func.func'"),
        ("func.func(cse", "missing ')'"),
        ("cse)", "unexpected ')'"),
        ("cse,", "expected a pass name after ','"),
        ("cse{", "missing '}'"),
        ("cse cse", "expected ',' or ')'"),
    ],
)
def test_errors(text: str, problem: str) -> None:
    with pytest.raises(HloOptError) as error:
        run(text)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_failing_pass_leaves_the_module_alone() -> None:
    module = hlo_ir.parse(MODULE)
    before = str(module)
    with pytest.raises(HloOptError, match="on purpose"):
        run_pipeline(module, "cse,test-fail", PassContext())
    assert str(module) == before


def test_the_module_is_verified_after_every_pass() -> None:
    with pytest.raises(HloOptError, match=r"after pass 'test-break'"):
        run("test-break,cse")


def test_cxx_pass_failure_is_one_line() -> None:
    with pytest.raises(HloOptError, match="Invalid target version") as error:
        run("vhlo-to-version{target=1.2.x}")
    assert "\n" not in str(error.value)


SAFE = """
from hlo_opt import compat, ir as hlo_ir
from hlo_opt.pipeline import CXX_PASSES, PassContext, run_pipeline
from hlo_opt.errors import HloOptError
import sys
text = "func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> { return %a : tensor<2xf32> }"
module = hlo_ir.parse(text)
for name, anchor in CXX_PASSES.items():
    if name in ("view-op-graph", "print-ir", "print-op-stats"):  # these print
        continue
    text = f"func.func({name})" if anchor == "func.func" else name
    try:
        run_pipeline(module, text, PassContext())
    except HloOptError as error:
        print(name, error)
print("all ran")
"""


def test_every_listed_cxx_pass_runs_where_it_is_said_to() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAFE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == "all ran"
    # These want options or a module of their own form; none of them is a matter of the anchor.
    refused = {line.split()[0] for line in lines[:-1]}
    assert refused <= {"stablehlo-refine-arguments", "vhlo-to-version"}, lines


def test_wrong_anchors_never_reach_mlir() -> None:
    for name, anchor in CXX_PASSES.items():
        wrong = {"func.func": name, "builtin.module": f"func.func({name})"}.get(anchor)
        if wrong is not None:
            with pytest.raises(HloOptError, match="cannot run on"):
                resolve(wrong)


def test_cxx_runs_are_grouped() -> None:
    groups = list(pipelines._grouped(resolve("cse,canonicalize,test-rename,cse"), single=False))
    assert [len(group) for group in groups] == [2, 1, 1]
    assert isinstance(groups[0][0], CxxPass)
