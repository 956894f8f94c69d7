"""Running two modules on the same inputs and comparing both with float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from hlo_opt import compat
from hlo_opt.errors import HloOptError
from hlo_opt.ir.module import clone
from hlo_opt.ir.prepared import split
from hlo_opt.ir.signature import array_types, main_function
from hlo_opt.passes.lower_composites import LowerComposites
from hlo_opt.passes.quantize import Quantize
from hlo_opt.pipeline import CxxPass, Pass, PassContext, resolve, run_pipeline
from hlo_opt.targets import is_tpu
from hlo_opt.verify.float64 import to_float64
from hlo_opt.verify.inputs import infer_inputs

# How much larger than the original's an error may be.
FACTOR = 1.5
# What a pipeline that quantizes weights may add, as a part of the output's RMS and of its largest
# value: rounding to int8 by channel moves a matmul of normal weights by some 1 % of its RMS.
QUANTIZED = 0.05


@dataclass(frozen=True)
class OutputErrors:
    """Errors of one output against float64, before and after.

    `slack` is the part of `rms` and `peak` (the largest value) that is allowed beyond the rule.
    """

    name: str
    rms: float
    before_rms: float
    after_rms: float
    before_max: float
    after_max: float
    ulp: float
    problem: str = ""
    peak: float = 0.0
    slack: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the rule holds."""
        return (
            not self.problem
            and self.after_rms <= FACTOR * self.before_rms + self.ulp + self.slack * self.rms
            and self.after_max <= FACTOR * self.before_max + self.ulp + self.slack * self.peak
        )


@dataclass(frozen=True)
class Report:
    """The outcome of a check.

    Attributes:
      outputs: errors of every output.
      kernels: composites that became kernels and ran, interpreted.
      failures: reasons besides the outputs' errors.
      quantized: the pipeline quantizes weights, so that the bound is a looser one.
    """

    outputs: tuple[OutputErrors, ...]
    kernels: int = 0
    failures: tuple[str, ...] = field(default=())
    quantized: bool = False

    @property
    def numerics_ok(self) -> bool:
        """Whether the rule holds for every output."""
        return all(output.ok for output in self.outputs)

    @property
    def ok(self) -> bool:
        """Whether the rule holds and the check was not empty."""
        return self.numerics_ok and not self.failures

    def table(self) -> str:
        """The errors as lines of text, with the verdict last."""
        head = f"{'output':24} {'RMS':>10} {'RMS error':>23} {'maximum error':>23}"
        lines = [head, f"{'':35} {'before':>11} {'after':>11} {'before':>11} {'after':>11}"]
        for o in self.outputs:
            verdict = "" if o.ok else f"  FAILED {o.problem}".rstrip()
            lines.append(
                f"{o.name:24} {o.rms:10.3g} {o.before_rms:11.3g} {o.after_rms:11.3g} "
                f"{o.before_max:11.3g} {o.after_max:11.3g}{verdict}"
            )
        lines += [f"error: {failure}" for failure in self.failures]
        if self.quantized:
            lines.append(
                f"weights were quantized: {QUANTIZED:.0%} of the RMS and of the largest value are "
                "allowed on top"
            )
        verdict = "holds" if self.ok else "FAILED"
        lines.append(f"numerical check {verdict}; kernels run: {self.kernels}")
        return "\n".join(lines)


def compare(
    original: ir.Module, rewritten: ir.Module, inputs: Sequence[np.ndarray], slack: float = 0.0
) -> tuple[OutputErrors, ...]:
    """Runs both modules on CPU and compares their outputs with the original's in float64.

    Args:
      rewritten: where it has a `@prepare`, that runs first.
      slack: what is allowed beyond the rule, as a part of an output's RMS and largest value.

    Raises:
      HloOptError: a module that cannot be run here.
    """
    before = run(original, inputs)
    after = run_prepared(rewritten, inputs)
    wide = [_widened(array) for array in inputs]
    exact = run(to_float64(original), wide)
    if not len(before) == len(after) == len(exact):
        raise HloOptError("error: the modules have different numbers of results")
    return tuple(
        replace(
            _errors(f"output {number} {b.dtype}[{','.join(map(str, b.shape))}]", b, a, e),
            slack=slack,
        )
        for number, (b, a, e) in enumerate(zip(before, after, exact, strict=True))
    )


def run_prepared(module: ir.Module, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Runs a module, `@prepare` first where it has one, on the original's inputs."""
    parts = split(module)
    if parts is None:
        return run(module, inputs)
    prepared = run(parts.prepare, [inputs[place] for place in parts.parameters])
    return run(parts.main, parts.main_inputs(prepared, inputs))


def run(module: ir.Module, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Runs a module on one CPU device. Raises `HloOptError` where that is not possible."""
    array_types(main_function(module))
    single = clone(module)
    _for_one_device(single)
    try:
        return compat.run_on_cpu(single, inputs)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise HloOptError(f"error: the module cannot be run on CPU: {reason}") from None


def _for_one_device(module: ir.Module) -> None:
    """Drops donation, layouts and shardings: they change where values live, not which."""
    if "mhlo.num_partitions" in module.operation.attributes:
        count = ir.IntegerAttr(module.operation.attributes["mhlo.num_partitions"]).value
        if count > 1:
            raise HloOptError("error: a partitioned module cannot be run on one device")
    main = main_function(module)
    for attribute in ("arg_attrs", "res_attrs"):
        if attribute in main.attributes:
            del main.attributes[attribute]


def _widened(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return array.astype(np.float64) if _is_float(array.dtype) else array


def _is_float(dtype: np.dtype) -> bool:
    # The kind of ml_dtypes' types is V; their integers have no finfo.
    if dtype.kind == "f":
        return True
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return dtype.kind == "V"


def _errors(name: str, before: np.ndarray, after: np.ndarray, exact: np.ndarray) -> OutputErrors:
    if before.shape != after.shape or before.dtype != after.dtype:
        problem = f"became {after.dtype}[{','.join(map(str, after.shape))}]"
        return OutputErrors(name, 0, 0, 0, 0, 0, 0, problem)
    if not _is_float(before.dtype) and before.dtype.kind != "c":
        differ = int(np.sum(before != after))
        problem = f"{differ} of {before.size} values differ" if differ else ""
        return OutputErrors(name, 0, 0, differ, 0, differ, 0, problem)
    kind = np.complex128 if before.dtype.kind == "c" else np.float64
    b, a = before.astype(kind), after.astype(kind)
    for what, special in (("NaN", np.isnan), ("inf", _is_inf), ("-inf", _is_negative_inf)):
        if not np.array_equal(special(b), special(a)):
            return OutputErrors(name, 0, 0, 0, 0, 0, 0, f"{what} in other places")
    finite = np.isfinite(b) & np.isfinite(exact)
    if before.size and not finite.any():
        return OutputErrors(name, 0, 0, 0, 0, 0, 0, "no finite value to compare")
    rms = _rms(exact[finite])
    return OutputErrors(
        name,
        rms,
        _rms((b - exact)[finite]),
        _rms((a - exact)[finite]),
        float(np.max(np.abs(b - exact), where=finite, initial=0)),
        float(np.max(np.abs(a - exact), where=finite, initial=0)),
        _ulp(before.dtype, rms),
        peak=float(np.max(np.abs(exact), where=finite, initial=0)),
    )


def _is_inf(values: np.ndarray) -> np.ndarray:
    return np.asarray(values.real == np.inf)


def _is_negative_inf(values: np.ndarray) -> np.ndarray:
    return np.asarray(values.real == -np.inf)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.abs(values) ** 2))) if values.size else 0.0


def _ulp(dtype: np.dtype, at: float) -> float:
    """The unit in the last place of a float type at a magnitude."""
    info = ml_dtypes.finfo(np.float32 if dtype == np.complex64 else dtype)
    return float(info.eps) * 2.0 ** math.floor(math.log2(at)) if at > 0 else float(info.tiny)


def verify_pipeline(
    module: ir.Module,
    pipeline: str | Sequence[Pass | CxxPass],
    target: str | None,
    *,
    inputs: Sequence[np.ndarray] | None = None,
    seed: int = 0,
) -> Report:
    """Runs a pipeline with kernels interpreted and compares the result with the module.

    Args:
      inputs: arrays for `main`; drawn by `infer_inputs` by default.

    Raises:
      HloOptError: the pipeline fails, or a module cannot be run here.
    """
    steps = resolve(pipeline) if isinstance(pipeline, str) else list(pipeline)
    ctx = PassContext(target=target, interpret=True)
    rewritten = run_pipeline(module, steps, ctx)
    drawn = infer_inputs(module, seed) if inputs is None else inputs
    lowering = LowerComposites.name
    kernels = sum(r.kind == "applied" and r.pass_name == lowering for r in ctx.remarks)
    failures = []
    lowers = [step for step in steps if isinstance(step, LowerComposites)]
    if any(is_tpu(step.target or target) for step in lowers) and not kernels:
        failures.append("no composite became a kernel, so nothing was checked but the raising")
    quantized = any(isinstance(step, Quantize) for step in steps)
    errors = compare(module, rewritten, drawn, QUANTIZED if quantized else 0.0)
    return Report(errors, kernels, tuple(failures), quantized)
