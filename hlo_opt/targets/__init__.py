"""Targets: the TPU generations we know, and compiling for them without having one.

`get_target` gives a generation's figures; `compile_module` runs XLA's TPU compiler from `libtpu`
in a worker process, because libtpu reads its flags once and may crash.
"""

from hlo_opt.targets.compile import CompileReport, compile_module
from hlo_opt.targets.target import (
    CPU,
    HOST_PLATFORMS,
    TPU_NAMES,
    Target,
    check_target,
    get_target,
    is_tpu,
    target_of_device,
)

__all__ = [
    "CPU",
    "HOST_PLATFORMS",
    "TPU_NAMES",
    "CompileReport",
    "Target",
    "check_target",
    "compile_module",
    "get_target",
    "is_tpu",
    "target_of_device",
]
