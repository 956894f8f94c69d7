"""The Python entry points: `jit` in place of `jax.jit`, `optimize` and `apply` on lowered modules.

JAX's own modules are never changed in place: they are cached and shared. `jit` gives the function
a name that one hook at JAX's compile step recognises; the hook rewrites a copy. Tracing, caching
and dispatch stay JAX's own.
"""

from __future__ import annotations

import functools
import hashlib
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

from hlo_opt import compat
from hlo_opt.errors import HloOptError
from hlo_opt.ir.module import parse, read
from hlo_opt.pipeline import PassContext, resolve, run_pipeline
from hlo_opt.remarks import Remark
from hlo_opt.targets import (
    CompileReport,
    check_target,
    compile_module,
    is_tpu,
    target_of_device,
)

DEFAULT_PIPELINE = "inference"
_MARK = "__hlo_opt_"


@dataclass(frozen=True)
class Result:
    """A rewritten module and what the passes said about it."""

    module: ir.Module
    remarks: tuple[Remark, ...]


def apply(
    source: str | bytes | Path | ir.Module,
    pipeline: str = DEFAULT_PIPELINE,
    *,
    target: str | None = None,
    interpret: bool = False,
) -> Result:
    """Runs a pipeline on a module and returns the rewritten copy.

    Args:
      source: a path, MLIR text or bytecode, or a module (left as it is). A string with a line
        break is text, one without is a path.
      pipeline: a textual pipeline, for instance `"builtin.module(raise)"`.
      target: name of the target kernels are for; none by default.
      interpret: emit kernels so that they run on any backend, slowly.

    Raises:
      HloOptError: the source, the pipeline or the target is wrong, or a pass failed.
    """
    if target is not None:
        check_target(target)
    ctx = PassContext(target=target, interpret=interpret)
    module = run_pipeline(_module_of(source), pipeline, ctx)
    return Result(module, tuple(ctx.remarks))


def _module_of(source: str | bytes | Path | ir.Module) -> ir.Module:
    if isinstance(source, Path) or (isinstance(source, str) and "\n" not in source):
        return read(source)
    return parse(source) if isinstance(source, str | bytes) else source


def optimize(lowered: Any, pipeline: str = DEFAULT_PIPELINE, *, target: str | None = None) -> Any:
    """Rewrites the module of a `jax.stages.Lowered`.

    Args:
      lowered: left as it is, with the module it shares with JAX's caches.
      pipeline: a textual pipeline.
      target: name of the target; by default the platform it was lowered for, where that is the
        platform JAX runs on.

    Returns:
      a `jax.stages.Lowered` with the rewritten module, donation and shardings kept. For a TPU that
      is not there, `.compile()` runs XLA's TPU compiler in a worker process and returns what it
      says (`TargetCompiled`).

    Raises:
      HloOptError: the pipeline or the target is wrong, or a pass failed.
    """
    return _optimize(lowered, pipeline, target)[0]


def _optimize(lowered: Any, pipeline: str, target: str | None) -> tuple[Any, tuple[Remark, ...]]:
    host = compat.default_platform()
    chosen = target or target_of_device(*compat.default_device())
    result = apply(compat.module_bytecode(lowered), pipeline, target=chosen)
    rewritten = compat.with_module(lowered, _renamed(result.module))
    if chosen is not None and is_tpu(chosen) and host != "tpu":
        return TargetLowered(rewritten, result.module, chosen), result.remarks
    return rewritten, result.remarks


def _renamed(module: ir.Module) -> ir.Module:
    """Takes our mark out of a module's name, so that it is not rewritten again."""
    attributes = module.operation.attributes
    if "sym_name" in attributes:
        name = ir.StringAttr(attributes["sym_name"]).value
        plain = re.sub(f"{_MARK}[0-9a-f]+", "", name)
        attributes["sym_name"] = ir.StringAttr.get(plain, module.context)
    return module


class TargetCompiled:
    """What XLA's compiler made of a module for a target that is not there; it cannot run."""

    def __init__(self, report: CompileReport) -> None:
        self.report = report

    def memory_analysis(self) -> Any:
        """Sizes under the names of JAX's `CompiledMemoryStats`, in bytes."""
        return types.SimpleNamespace(
            argument_size_in_bytes=self.report.argument_bytes,
            output_size_in_bytes=self.report.output_bytes,
            temp_size_in_bytes=self.report.temporary_bytes,
            alias_size_in_bytes=self.report.alias_bytes,
            generated_code_size_in_bytes=self.report.code_bytes,
        )

    def as_text(self) -> str:
        """The optimised HLO."""
        return self.report.hlo

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise HloOptError(f"error: compiled for {self.report.target}, which is not attached here")


class TargetLowered:
    """A `jax.stages.Lowered` for a target that is not there; other attributes are JAX's."""

    def __init__(self, lowered: Any, module: ir.Module, target: str) -> None:
        self._lowered = lowered
        self._module = module
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered, name)

    def compile(self) -> TargetCompiled:
        """Compiles for the target in a worker process. Raises `HloOptError` on refusal."""
        return TargetCompiled(compile_module(self._module, self.target, keep_hlo=True))


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    pipeline: str = DEFAULT_PIPELINE,
    target: str | None = None,
    **options: Any,
) -> Any:
    """`jax.jit`, with passes run on what it compiles.

    Args:
      fun: the function; leave it out to use `jit(pipeline=…)` as a decorator.
      pipeline: a textual pipeline.
      target: name of the target; by default the device the function runs on. Another target is
        what `.lower(…)` and its `.compile()` are for; calls still run on this host.
      **options: `jax.jit`'s own (`static_argnames`, `donate_argnums`, `in_shardings`, …).

    Returns:
      a `Jitted` function.

    Raises:
      HloOptError: the pipeline or the target is wrong.
    """
    if fun is None:
        return functools.partial(jit, pipeline=pipeline, target=target, **options)
    return Jitted(fun, pipeline, target, options)


class Jitted:
    """A function compiled by JAX after our passes; made by `jit`."""

    def __init__(
        self, fun: Callable[..., Any], pipeline: str, target: str | None, options: dict[str, Any]
    ) -> None:
        import jax

        resolve(pipeline)
        if target is not None:
            check_target(target)
        compat.install_compile_hook(_rewrite_for_jax)
        self.pipeline = pipeline
        self.target = target
        key = hashlib.sha256(f"{pipeline}\n{target}".encode()).hexdigest()[:12]
        _PIPELINES[key] = pipeline
        self._module_name = _module_name(fun, key)

        @functools.wraps(fun)
        def marked(*args: Any, **kwargs: Any) -> Any:
            return fun(*args, **kwargs)

        marked.__name__ = marked.__qualname__ = f"{_name_of(fun)}{_MARK}{key}"
        self._jitted = jax.jit(marked, **options)
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        # `trace`, `eval_shape`, `clear_cache` and whatever else JAX's own object has.
        return getattr(self.__dict__["_jitted"], name)

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What the passes said when a function of this name was last lowered or compiled."""
        return _REMARKS.get(self._module_name, ())

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers for the given arguments; `.as_text()` is the rewritten module. See `optimize`."""
        foreign = is_tpu(self.target) and compat.default_platform() != "tpu"
        traced = self._jitted.trace(*args, **kwargs)
        lowered = traced.lower(lowering_platforms=("tpu",)) if foreign else traced.lower()
        rewritten, _REMARKS[self._module_name] = _optimize(lowered, self.pipeline, self.target)
        return rewritten


_PIPELINES: dict[str, str] = {}
_REMARKS: dict[str, tuple[Remark, ...]] = {}


def _name_of(fun: Callable[..., Any]) -> str:
    return str(getattr(fun, "__name__", None) or type(fun).__name__)


def _module_name(fun: Callable[..., Any], key: str) -> str:
    return re.sub(r"[^\w.-]", "_", f"jit_{_name_of(fun)}{_MARK}{key}")


def _rewrite_for_jax(name: str, bytecode: Callable[[], bytes], device: Any) -> ir.Module | None:
    """What JAX compiles instead of a module of this name; None to leave it."""
    match = re.search(f"{_MARK}([0-9a-f]{{12}})", name)
    if match is None or match[1] not in _PIPELINES:
        return None
    target = target_of_device(device.platform, device.device_kind)
    result = apply(bytecode(), _PIPELINES[match[1]], target=target)
    _REMARKS[name] = result.remarks
    return _renamed(result.module)
