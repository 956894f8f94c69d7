"""The worker process of `hlo_opt.targets.compile_module`; not meant to be imported.

Usage: python -m hlo_opt.targets.worker TOPOLOGY MODULE ANSWER OPTIONS
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

from hlo_opt import compat
from hlo_opt.ir.module import read


def main(topology: str, path: str, answer: str, options: str) -> None:
    """Compiles the module and writes the answer as JSON."""
    try:
        result = _compile(topology, path, **json.loads(options))
    except Exception as error:
        result = {"error": str(error) or type(error).__name__}
    Path(answer + ".part").write_text(json.dumps(result))
    Path(answer + ".part").rename(answer)


def _compile(
    topology: str, path: str, keep_hlo: bool, compiler_options: dict[str, Any]
) -> dict[str, Any]:
    module = read(path)
    start = time.perf_counter()
    executable = compat.compile_for_topology(module, _sized(topology, module), compiler_options)
    stats = executable.get_compiled_memory_stats()
    hlo = executable.hlo_modules()[0].to_string()
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
        "kernels": len(re.findall(r'custom_call_target="tpu_custom_call"', hlo)),
        "composites": _count_composites(module),
        "seconds": time.perf_counter() - start,
        "hlo": hlo if keep_hlo else "",
    }


def _sized(topology: str, module: ir.Module) -> str:
    """The topology with as many chips as the module has partitions."""
    attributes = module.operation.attributes
    count = 1
    if "mhlo.num_partitions" in attributes:
        count = ir.IntegerAttr(attributes["mhlo.num_partitions"]).value
    name, shape = topology.split(":")
    if count == 1:
        return topology
    sizes = {2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
    if count not in sizes:
        raise ValueError(f"no topology with {count} devices is known")
    return f"{name}:{sizes[count]}" + ("x1" if shape.count("x") == 2 else "")


def _count_composites(module: ir.Module) -> int:
    count = 0

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal count
        count += op.name == "stablehlo.composite"
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return count


if __name__ == "__main__":
    main(*sys.argv[1:])
