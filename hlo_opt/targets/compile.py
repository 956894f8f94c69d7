"""Ahead-of-time compiles for a TPU that is not there, in a worker process."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

from hlo_opt.errors import HloOptError
from hlo_opt.ir.module import Format, serialize
from hlo_opt.ir.prepared import without_prepare
from hlo_opt.ir.signature import check_static, main_function
from hlo_opt.targets.target import get_target

TIMEOUT_SECONDS = 600
WORKER = [sys.executable, "-m", "hlo_opt.targets.worker"]

# libtpu looks for a TPU at start-up unless it is told what to pretend.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


@dataclass(frozen=True)
class CompileReport:
    """What XLA's TPU compiler says of a module. Sizes are bytes of one device's HBM.

    Attributes:
      kernels: `tpu_custom_call`s in the optimised HLO.
      composites: composites that were still in the module (their decomposition was compiled).
      hlo: optimised HLO text, where it was asked for.
    """

    target: str
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int
    code_bytes: int
    kernels: int
    composites: int
    seconds: float
    hlo: str = ""

    def table(self) -> str:
        """The report as lines of text."""
        rows = [
            ("arguments", f"{self.argument_bytes:,} bytes"),
            ("outputs", f"{self.output_bytes:,} bytes"),
            ("temporaries", f"{self.temporary_bytes:,} bytes"),
            ("aliased", f"{self.alias_bytes:,} bytes"),
            ("code", f"{self.code_bytes:,} bytes"),
            ("Pallas kernels", f"{self.kernels}"),
            ("composites left", f"{self.composites}"),
        ]
        lines = [f"  {name:16} {value:>24}" for name, value in rows]
        return "\n".join([f"compiled for {self.target} in {self.seconds:.1f} s", *lines])


def compile_module(
    module: ir.Module,
    target: str,
    *,
    keep_hlo: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> CompileReport:
    """Compiles a module for one chip (or, where it is partitioned, several) of a TPU generation.

    Args:
      module: StableHLO with a `main` of static shapes; left as it is. `@prepare` is left out.
      target: name of the generation.
      keep_hlo: return the optimised HLO text too.
      compiler_options: XLA's, as in `jax.jit(compiler_options=…)`.
      timeout: seconds after which the compiler is stopped.

    Raises:
      HloOptError: no libtpu, a module that cannot be compiled at all, or the compiler's refusal.
    """
    chosen = get_target(target)
    module = without_prepare(module)
    check_static(main_function(module))
    if not has_libtpu():
        raise HloOptError(
            "error: compiling for a TPU needs the package libtpu: pip install 'hlo-opt[tpu]'"
        )
    with tempfile.TemporaryDirectory(prefix="hlo-opt-") as folder:
        request, answer = Path(folder, "module.mlir"), Path(folder, "answer.json")
        request.write_bytes(serialize(module, Format.BYTECODE))
        options = {"keep_hlo": keep_hlo, "compiler_options": dict(compiler_options or {})}
        command = [*WORKER, chosen.topology, str(request), str(answer), json.dumps(options)]
        try:
            run = subprocess.run(
                command,
                env={**os.environ, **_ENVIRONMENT},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise HloOptError(
                f"error: the compiler for {target} did not finish in {timeout:.0f} s"
            ) from None
        if not answer.exists():
            last = (run.stderr.strip().splitlines() or ["no output"])[-1][:300]
            raise HloOptError(
                f"error: the compiler for {target} died (exit status {run.returncode}): {last}"
            )
        result = json.loads(answer.read_text())
    if "error" in result:
        raise HloOptError(f"error: {target} refuses the module: {readable(result['error'])}")
    return CompileReport(target=target, **result)


def has_libtpu() -> bool:
    """Whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


def readable(message: str) -> str:
    """One line of what the compiler said, without its stack of statuses."""
    text = " ".join(message.split())
    oom = re.search(r"Scoped allocation with size (\S+) and limit (\S+)", text)
    if oom:
        return f"a kernel needs {oom[1]} of scoped VMEM, the limit is {oom[2].rstrip('.')}"
    vmem = re.search(r"in memory space vmem\. Used (\S+) of (\S+)", text)
    if vmem:
        return f"VMEM is exhausted: {vmem[1]} of {vmem[2].rstrip('.')}"
    hbm = re.search(r"\((\S+)\) exceeds available HBM \((\S+)\)", text)
    if hbm:
        return f"HBM is exhausted: {hbm[1]} needed, {hbm[2]} available"
    return text[:400]
