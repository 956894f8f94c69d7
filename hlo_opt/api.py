"""The Python entry points: `jit` in place of `jax.jit`, `optimize` and `apply` on lowered modules.

JAX's own modules are never changed in place: they are cached and shared. `jit` gives the function
a name that one hook at JAX's compile step recognises; the hook rewrites a copy. Tracing, caching
and dispatch stay JAX's own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

from hlo_opt import compat
from hlo_opt.errors import HloOptError
from hlo_opt.ir.exported import check_platform, replace_module
from hlo_opt.ir.module import parse, read
from hlo_opt.ir.signature import function_types, main_function
from hlo_opt.pipeline import PassContext, resolve, run_pipeline
from hlo_opt.remarks import Remark
from hlo_opt.targets import (
    CompileReport,
    check_target,
    compile_module,
    get_target,
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
      source: a path, the content of a file (MLIR text or bytecode, a StableHLO portable artifact,
        a `jax.export` file), or a module (left as it is). A string with a line break is text, one
        without is a path.
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
    """Rewrites the module of a `jax.stages.Lowered` or a `jax.export.Exported`.

    Args:
      lowered: left as it is, with the module it shares with JAX's caches; or a
        `jax.export.Exported`.
      pipeline: a textual pipeline.
      target: name of the target; by default the device it was lowered for.

    Returns:
      an object of the same kind with the rewritten module, donation and shardings kept. For a TPU
      that a `Lowered` was not lowered for, `.compile()` runs XLA's TPU compiler in a worker process
      and returns what it says (`TargetCompiled`).

    Raises:
      HloOptError: the pipeline or the target is wrong, or a pass failed.
    """
    if hasattr(lowered, "mlir_module_serialized"):
        return _optimize_exported(lowered, pipeline, target)
    return _optimize(lowered, pipeline, target)[0]


def _optimize_exported(exported: Any, pipeline: str, target: str | None) -> Any:
    if target is None and len(exported.platforms) == 1 and exported.platforms != ("tpu",):
        target = target_of_device(exported.platforms[0], None)
    check_platform(exported, target)
    result = apply(exported.mlir_module_serialized, pipeline, target=target)
    return replace_module(exported, result.module)


def _optimize(lowered: Any, pipeline: str, target: str | None) -> tuple[Any, tuple[Remark, ...]]:
    platforms, kind = compat.lowered_for(lowered)
    if len(platforms) > 1:
        names = ", ".join(platforms)
        raise HloOptError(f"error: lowered for several platforms ({names}): lower for one of them")
    chosen = target or target_of_device(platforms[0], kind)
    result = _rewrite(compat.module_bytecode(lowered), pipeline, chosen)
    return for_target(compat.with_module(lowered, result.module), chosen), result.remarks


def for_target(lowered: Any, target: str | None) -> Any:
    """A `jax.stages.Lowered` whose `.compile()` is for a TPU target, here or elsewhere."""
    platforms, kind = compat.lowered_for(lowered)
    if target is None or not is_tpu(target) or target == target_of_device(platforms[0], kind):
        return lowered
    return compat.with_methods(lowered, compile=functools.partialmethod(_compile_elsewhere, target))


def _rewrite(bytecode: bytes, pipeline: str, target: str | None) -> Result:
    """`apply` for a module whose caller is JAX: it must fit in the old one's place."""
    module = parse(bytecode)
    result = apply(module, pipeline, target=target)
    if function_types(main_function(result.module)) != function_types(main_function(module)):
        raise HloOptError(f"error: pipeline '{pipeline}' changed the signature of 'main'")
    attributes = result.module.operation.attributes
    if "sym_name" in attributes:  # without our mark nothing rewrites it again
        name = re.sub(f"{_MARK}[0-9a-f]+", "", ir.StringAttr(attributes["sym_name"]).value)
        attributes["sym_name"] = ir.StringAttr.get(name, result.module.context)
    return result


def _compile_elsewhere(
    lowered: Any, target: str, compiler_options: Mapping[str, Any] | None = None
) -> TargetCompiled:
    """`Lowered.compile` for a TPU that is not there. Raises `HloOptError` on refusal."""
    options = {**compat.compiler_options(lowered), **(compiler_options or {})}
    module = lowered.compiler_ir("stablehlo")
    return TargetCompiled(compile_module(module, target, keep_hlo=True, compiler_options=options))


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


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    pipeline: str = DEFAULT_PIPELINE,
    target: str | None = None,
    parameters: str | None = None,
    **options: Any,
) -> Any:
    """`jax.jit`, with passes run on what it compiles.

    Args:
      fun: the function; leave it out to use `jit(pipeline=…)` as a decorator.
      pipeline: a textual pipeline.
      target: name of the target; by default the device the function runs on. Another target is
        what `.lower(…)` and its `.compile()` are for; calls still run on this host.
      parameters: the argument that holds the model's parameters. The function is then called with
        `f.prepare(parameters)` in its place, and what depends on them alone runs once.
      **options: `jax.jit`'s own (`static_argnames`, `donate_argnums`, `in_shardings`, …).

    Returns:
      a `Jitted` function.

    Raises:
      HloOptError: the pipeline, the target or the name of the parameters is wrong.
    """
    if fun is None:
        return functools.partial(
            jit, pipeline=pipeline, target=target, parameters=parameters, **options
        )
    if parameters is not None:
        from hlo_opt.prepare import PreparedJitted

        return PreparedJitted(fun, parameters, pipeline, target, options)
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
        self._key = _key(fun, pipeline, target)
        _PIPELINES[self._key] = pipeline

        @functools.wraps(fun)
        def marked(*args: Any, **kwargs: Any) -> Any:
            return fun(*args, **kwargs)

        marked.__name__ = marked.__qualname__ = f"{name_of(fun)}{_MARK}{self._key}"
        self._jitted = jax.jit(marked, **options)
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        # `eval_shape`, `clear_cache` and whatever else JAX's own object has.
        if name == "_jitted":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def prepare(self, parameters: Any) -> Any:
        """For functions with `parameters=…` only; see `hlo_opt.prepare`."""
        raise HloOptError("error: there is nothing to prepare: give hlo_opt.jit parameters='…'")

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What the passes said when this function was last lowered or compiled."""
        return REMARKS.get(self._key, ())

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's `Traced`; its `.lower()` gives the rewritten module (so does `jax.export`)."""
        elsewhere = is_tpu(self.target) and self.target != target_of_device(
            *compat.default_device()
        )
        with contextlib.ExitStack() as stack:
            if elsewhere:
                kind = get_target(str(self.target)).device_kind
                stack.enter_context(compat.device_of_kind(kind))
            traced = self._jitted.trace(*args, **kwargs)

        def lower(_: Any, **options: Any) -> Any:
            if elsewhere and options.get("lowering_platforms") is None:
                options["lowering_platforms"] = ("tpu",)
            return self._rewritten(traced.lower(**options))

        return compat.with_methods(traced, lower=lower)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers for the given arguments; `.as_text()` is the rewritten module. See `optimize`."""
        return self.trace(*args, **kwargs).lower()

    def _check_platforms(self, lowered: Any) -> None:
        platforms, _ = compat.lowered_for(lowered)
        if is_tpu(self.target) and platforms != ("tpu",):
            raise HloOptError(
                f"error: the target is '{self.target}', but the function was lowered for "
                f"{', '.join(platforms)}: lower for 'tpu' (jax.export: platforms=['tpu'])"
            )

    def _rewritten(self, lowered: Any) -> Any:
        self._check_platforms(lowered)
        rewritten, REMARKS[self._key] = _optimize(lowered, self.pipeline, self.target)
        return rewritten


_PIPELINES: dict[str, str] = {}
REMARKS: dict[str, tuple[Remark, ...]] = {}  # by a function's key, of its last rewrite


def name_of(fun: Callable[..., Any]) -> str:
    """What a function is called in messages and modules."""
    return str(getattr(fun, "__name__", None) or type(fun).__name__)


def _key(fun: Callable[..., Any], pipeline: str, target: str | None) -> str:
    """Tells functions and what is done to them apart; the same in every process."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    place = [getattr(fun, "__module__", ""), getattr(fun, "__qualname__", "")]
    parts = [pipeline, target, *place, code.co_firstlineno if code else 0]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _rewrite_for_jax(name: str, bytecode: Callable[[], bytes], device: Any) -> ir.Module | None:
    """What JAX compiles instead of a module of this name; None to leave it."""
    match = re.search(f"{_MARK}([0-9a-f]{{12}})", name)
    if match is None or match[1] not in _PIPELINES:
        return None
    target = target_of_device(device.platform, device.device_kind)
    result = _rewrite(bytecode(), _PIPELINES[match[1]], target)
    REMARKS[match[1]] = result.remarks
    return result.module
