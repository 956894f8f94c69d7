"""`jax.export` files: the module inside, and putting a rewritten one in its place."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

from hlo_opt.errors import HloOptError
from hlo_opt.ir.module import Format, clone, parse, run_cxx_passes, serialize
from hlo_opt.ir.signature import function_types, main_function
from hlo_opt.ir.walk import functions


def read_exported(data: bytes, path: str | Path = "-") -> Any:
    """The `jax.export.Exported` in a file's bytes. Raises `HloOptError` where there is none."""
    from jax import export

    try:
        return export.deserialize(bytearray(data))
    except Exception:  # flatbuffers raises what it likes on other bytes
        raise HloOptError(
            "error: not MLIR text, MLIR bytecode, a StableHLO portable artifact or a jax.export "
            "file",
            location=str(path),
        ) from None


def replace_module(exported: Any, module: ir.Module) -> Any:
    """A `jax.export.Exported` that holds a rewritten module.

    Raises:
      HloOptError: the signature of `main` is another one, or it cannot be written.
    """
    original = parse(exported.mlir_module_serialized)
    before, after = (function_types(main_function(m)) for m in (original, module))
    if before != after:
        raise HloOptError(
            "error: the passes changed the signature of 'main', which a jax.export file describes"
        )
    flag = "jax.uses_shape_polymorphism"
    attributes = module.operation.attributes
    if flag in attributes and ir.BoolAttr(attributes[flag]).value:
        # Shape refinement, which JAX does when such a file is called, knows no composites.
        module = clone(module)
        for function in functions(module):
            run_cxx_passes(function, "stablehlo-legalize-composite-to-call")
    return dataclasses.replace(exported, mlir_module_serialized=serialize(module, Format.ARTIFACT))


def check_platform(exported: Any, target: str | None) -> None:
    """Raises `HloOptError` where kernels of `target` cannot stand in an exported module."""
    from hlo_opt.targets import is_tpu

    platforms = tuple(exported.platforms)
    if is_tpu(target) and platforms != ("tpu",):
        raise HloOptError(
            f"error: the jax.export file is for {', '.join(platforms)}, the target is '{target}': "
            "export with platforms=['tpu']"
        )
