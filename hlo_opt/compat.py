"""Every use of a private JAX or jaxlib API, with the differences between versions.

Nothing else in the project may import `jax._src` or `jaxlib.mlir._mlir_libs`. Importing this
module imports neither `jax` nor any part of it: each function imports what it needs, so that the
driver starts without paying for `import jax`.
"""

from __future__ import annotations

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


def compile_for_topology(module: ir.Module, topology: str) -> Any:
    """Compiles a module with libtpu for a topology such as `v5e:1x1`; no device is needed.

    Returns:
      the compiler's executable (`get_compiled_memory_stats()`, `hlo_modules()`).
    """
    import jax
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import pxla
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    del jax  # its import sets up what the others need
    name, shape = topology.split(":")
    sizes = [int(size) for size in shape.split("x")]
    bounds = [*sizes, 1, 1][:3]
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, chips_per_host_bounds=bounds
    )
    count = int(np.prod(sizes))
    devices = description.devices[:count] if name == "tpu7x" else description.devices
    array = np.array(devices)
    options = pxla.create_compile_options(
        module, False, (False,), (False,), devices[0].client, array, {}
    )
    return compiler.compile_or_get_cached(
        devices[0].client, module, array, options, [], xla_client.DeviceList(tuple(devices)), None
    )
