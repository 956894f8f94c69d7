"""Every use of a private JAX or jaxlib API, with the differences between versions.

Nothing else in the project may import `jax._src` or `jaxlib.mlir._mlir_libs`. Importing this
module imports neither `jax` nor any part of it: each function imports what it needs, so that the
driver starts without paying for `import jax`.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

_ONE_ADD = """func.func @f(%a: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.add %a, %a : tensor<f32>
  return %0 : tensor<f32>
}"""

_passes_registered = False


def register_passes() -> None:
    """Registers StableHLO's C++ passes beside the ones jaxlib registers by itself; idempotent."""
    global _passes_registered
    if not _passes_registered:
        stablehlo.register_stablehlo_passes()
        _passes_registered = True


def new_context() -> ir.Context:
    """Returns a fresh MLIR context with every dialect we read loaded, `quant` included."""
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext

    register_passes()
    context = ir.Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    for register in (
        chlo.register_dialect,
        stablehlo.register_dialect,
        sdy.register_dialect,
        mhlo.register_mhlo_dialect,
    ):
        register(context)
    context.load_all_available_dialects()
    # No binding loads `quant`; a pass that depends on it does, once it has a function to run on.
    with context, ir.Location.unknown():
        module = ir.Module.parse(_ONE_ADD)
        passmanager.PassManager.parse("builtin.module(vhlo-legalize-to-stablehlo)").run(
            module.operation
        )
    return context


def rewrite() -> ModuleType:
    """MLIR's greedy rewrite driver (`RewritePatternSet` and friends); it has no public name."""
    from jaxlib.mlir._mlir_libs import _mlir

    return _mlir.rewrite


def inline_call(call: ir.Operation, callee: ir.Operation) -> None:
    """Replaces a `func.call` by the body of its one-block callee (MLIR's `inline` pass does not:
    jaxlib registers no inliner interface for these dialects)."""
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext

    # Without an active context this function crashes the process.
    with callee.context, ir.Location.unknown(), ir.InsertionPoint(call):
        results = _jax_mlir_ext.inlined_func_call(callee, list(call.operands), call.location)
    for old, new in zip(call.results, results, strict=True):
        old.replace_all_uses_with(new)
    call.erase()


def _compile(
    module: ir.Module, devices: Sequence[Any], settings: Mapping[str, Any] | None = None
) -> Any:
    """Compiles a module for devices (or a topology's) with JAX's compile step."""
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import pxla
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    if "sym_name" not in module.operation.attributes:  # JAX's cache key wants one
        module.operation.attributes["sym_name"] = ir.StringAttr.get("module", module.context)
    array, client = np.array(devices), devices[0].client
    options = pxla.create_compile_options(
        module, False, (False,), (False,), client, array, dict(settings or {})
    )
    return compiler.compile_or_get_cached(
        client, module, array, options, [], xla_client.DeviceList(tuple(devices)), None
    )


def compile_for_topology(
    module: ir.Module, topology: str, settings: Mapping[str, Any] | None = None
) -> Any:
    """Compiles a module with libtpu for a topology such as `v5e:1x1`; no device is needed.

    Args:
      settings: XLA's compiler options, as in `jax.jit(compiler_options=…)`.

    Returns:
      the compiler's executable (`get_compiled_memory_stats()`, `hlo_modules()`).
    """
    from jax.experimental import topologies

    name, shape = topology.split(":")
    sizes = [int(size) for size in shape.split("x")]
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, chips_per_host_bounds=[*sizes, 1, 1][:3]
    )
    devices = description.devices
    if name == "tpu7x":  # two cores a chip are two devices
        devices = devices[: math.prod(sizes)]
    return _compile(module, devices, settings)


def run_on_cpu(module: ir.Module, arguments: Sequence[Any]) -> list[Any]:
    """Compiles a module for one CPU device, runs it and returns its results as NumPy arrays.

    Args:
      module: all arguments of its `main` are taken; it may be given a name.
      arguments: NumPy arrays of the exact argument types, 64-bit ones included.
    """
    import jax
    import numpy as np

    device = jax.devices("cpu")[0]
    executable = _compile(module, [device])
    with jax.enable_x64(True):
        placed = [jax.device_put(argument, device) for argument in arguments]
        results = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
        return [np.asarray(shards[0]) for shards in results]


_INTERPRETING: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


def interpreting() -> bool:
    """Whether `tracing` traces for Pallas's interpreter."""
    return _INTERPRETING.get()


def interpreter_stores_in_views() -> bool:
    """Whether Pallas's interpreter can store to a bitcast or reshaped view.

    JAX 0.10.2's cannot and 0.12's can. Versions between have not been tried, and are taken not to.
    """
    import jax

    return jax.__version_info__ >= (0, 12)


@contextlib.contextmanager
def tracing(device_kind: str | None, precision: str, interpret: bool) -> Iterator[None]:
    """Settings for tracing a kernel, whatever the user's session has set.

    Args:
      device_kind: the TPU that kernels find when they ask what they run on.
      precision: default matmul precision.
      interpret: Pallas TPU kernels become plain StableHLO (the generic interpreter).
    """
    import jax
    from jax.experimental.pallas import tpu as pltpu

    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(False))
        stack.enter_context(jax.default_matmul_precision(precision))
        if device_kind is not None:
            stack.enter_context(_on_device_of_kind(device_kind))
        if interpret:
            stack.enter_context(pltpu.force_tpu_interpret_mode(True))  # type: ignore[arg-type]
            stack.callback(_INTERPRETING.reset, _INTERPRETING.set(True))
        yield


def bytecode(module: ir.Module) -> bytes:
    """A module as bytecode."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def module_bytecode(lowered: Any) -> bytes:
    """The StableHLO of a `jax.stages.Lowered`, as bytecode; JAX's own module is left as it is."""
    return bytecode(lowered.compiler_ir("stablehlo"))


def default_device() -> tuple[str, str]:
    """Platform and kind of the device JAX runs on by default."""
    device = default_device_object()
    return device.platform, device.device_kind


def default_device_object() -> Any:
    """The device JAX runs on by default."""
    import jax

    device = jax.config.jax_default_device
    return jax.devices(device)[0] if device is None or isinstance(device, str) else device


def exported_as(
    exported: Any,
    module: ir.Module,
    inputs: Sequence[Any],
    in_args: tuple[Any, ...],
    outputs: Sequence[Any] | None = None,
) -> Any:
    """A `jax.export.Exported` that calls another module, for the same platforms.

    Args:
      exported: the template.
      module: its `main` takes the inputs and returns the outputs.
      inputs: shape and dtype of every argument.
      in_args: a tree like the positional arguments of `call`.
      outputs: shape and dtype of every result, returned as a list; the template's by default.
    """
    from jax import core, tree_util
    from jax._src.export import _export

    def abstract(value: Any) -> Any:
        if isinstance(value, core.ShapedArray):
            return value
        return core.ShapedArray(value.shape, value.dtype)

    changes: dict[str, Any] = {
        "in_tree": tree_util.tree_structure((tuple(map(list, in_args)), {})),
        "in_avals": tuple(map(abstract, inputs)),
        "module_kept_var_idx": tuple(range(len(inputs))),
        "mlir_module_serialized": _export._module_to_bytecode(module),
        "_get_vjp": None,
    }
    sides = [("in", len(inputs))]
    if outputs is not None:
        changes["out_tree"] = tree_util.tree_structure([0] * len(outputs))
        changes["out_avals"] = tuple(map(abstract, outputs))
        sides.append(("out", len(outputs)))
    for side, count in sides:
        changes[f"{side}_shardings_hlo"] = changes[f"_{side}_named_shardings"] = (None,) * count
    return dataclasses.replace(exported, **changes)


def lowered_for(lowered: Any) -> tuple[tuple[str, ...], str | None]:
    """Platforms a `jax.stages.Lowered` is for, and the kind of its devices where they are of them
    (`lowering_platforms=("tpu",)` on a CPU host leaves the host's devices in it)."""
    lowering = lowered._lowering
    platforms = tuple("gpu" if p in ("cuda", "rocm") else p for p in lowering._platforms)
    devices = lowering._device_list
    if devices is not None and devices[0].platform in platforms:
        return platforms, devices[0].device_kind
    return platforms, None


def compiler_options(lowered: Any) -> dict[str, Any]:
    """The `compiler_options` that `jax.jit` was given."""
    return dict(lowered._lowering._compiler_options_kvs)


def with_module(lowered: Any, module: ir.Module) -> Any:
    """A copy of a `jax.stages.Lowered` that holds another module; donation is kept."""
    lowering = copy.copy(lowered._lowering)
    lowering._hlo = module
    lowering._executable = None
    replaced = copy.copy(lowered)
    replaced._lowering = lowering
    return replaced


def with_methods(stage: Any, **methods: Any) -> Any:
    """A copy of a `jax.stages` object, of a subclass that has other methods."""
    replaced = copy.copy(stage)
    cls = type(stage)
    replaced.__class__ = type(cls.__name__, (cls,), {"__slots__": (), **methods})
    return replaced


@contextlib.contextmanager
def device_of_kind(device_kind: str) -> Iterator[None]:
    """Lets code that asks what TPU it is traced for find one, unless the user has set a mesh."""
    import jax

    if not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with _on_device_of_kind(device_kind):
        yield


def _on_device_of_kind(device_kind: str) -> contextlib.AbstractContextManager[Any]:
    """Tracing as for one TPU of a kind."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice(device_kind=device_kind, num_cores=1, platform="tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


Rewriter = Callable[[str, Callable[[], bytes], Any], ir.Module | None]


def install_compile_hook(rewrite: Rewriter) -> None:
    """Lets `rewrite` replace the modules that JAX compiles, once for the process.

    Args:
      rewrite: gets a module's name, its bytecode on demand and the first device it is for; returns
        the module to compile instead, or None. JAX's module is left as it is.
    """
    from jax._src import compiler

    original = compiler.compile_or_get_cached
    if getattr(original, "hlo_opt_hook", False):
        return

    @functools.wraps(original)
    def hooked(
        backend: Any, computation: ir.Module, devices: Any, *args: Any, **kwargs: Any
    ) -> Any:
        name = ir.StringAttr(computation.operation.attributes["sym_name"]).value
        replacement = rewrite(name, lambda: bytecode(computation), devices.flat[0])
        module = computation if replacement is None else replacement
        return original(backend, module, devices, *args, **kwargs)

    hooked.hlo_opt_hook = True  # type: ignore[attr-defined]
    compiler.compile_or_get_cached = hooked
