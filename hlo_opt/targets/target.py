"""TPU generations, one chip each, and the host. Figures come from Pallas's own hardware table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from hlo_opt.errors import HloOptError

HOST_PLATFORMS = ("cpu", "gpu")


@dataclass(frozen=True)
class Target:
    """A TPU generation, or the host's CPU.

    Attributes:
      name: what `--target` calls it.
      chip: name of the chip in Pallas's table (`ChipVersion`).
      device_kind: what a device of it says it is.
      topology: libtpu's name of one chip; empty for the host.
      cores: TensorCores that work on one program as one device.
    """

    name: str
    chip: str
    device_kind: str
    topology: str
    cores: int

    @property
    def platform(self) -> str:
        """JAX's name of what it is: `"tpu"` or `"cpu"`."""
        return "tpu" if self.topology else "cpu"

    @property
    def info(self) -> Any:
        """`TpuInfo`: peak rates per second, HBM and VMEM bytes, bandwidth in bytes/s."""
        return _info(self.chip, self.cores)


@cache
def _info(chip: str, cores: int) -> Any:
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(chip), cores)


_TARGETS = {
    target.name: target
    for target in (
        Target("v4", "v4", "TPU v4", "v4:1x1x1", 2),
        Target("v5e", "v5e", "TPU v5 lite", "v5e:1x1", 1),
        Target("v5p", "v5p", "TPU v5", "v5p:1x1x1", 2),
        Target("v6e", "v6e", "TPU v6 lite", "v6e:1x1", 1),
        Target("tpu7x", "7x", "TPU7x", "tpu7x:1x1x1", 1),
    )
}
TPU_NAMES = tuple(_TARGETS)
CPU = Target("cpu", "", "cpu", "", 1)


def is_tpu(name: str | None) -> bool:
    """Whether a target's name is that of a TPU."""
    return name in _TARGETS


def get_target(name: str) -> Target:
    """The TPU generation called `name`. Raises `HloOptError` for any other name."""
    if name not in _TARGETS:
        raise HloOptError(
            f"error: unknown TPU target '{name}': expected one of {', '.join(_TARGETS)}"
        )
    return _TARGETS[name]


def check_target(name: str) -> None:
    """Raises `HloOptError` unless `name` is a TPU generation, `cpu` or `gpu`."""
    if name not in _TARGETS and name not in HOST_PLATFORMS:
        names = ", ".join((*_TARGETS, *HOST_PLATFORMS))
        raise HloOptError(f"error: unknown target '{name}': expected one of {names}")


# What newer runtimes call the same chips.
_ALIASES = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite"}


def target_of_device(platform: str, device_kind: str | None) -> str | None:
    """The target's name for a JAX device's platform and kind; None where we know none."""
    if platform == "tpu":
        kind = _ALIASES.get(device_kind or "", device_kind)
        return next((t.name for t in _TARGETS.values() if t.device_kind == kind), None)
    return platform if platform in HOST_PLATFORMS else None
