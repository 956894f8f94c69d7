"""int8 weights as XLA's TPU compiler sees them."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import decoder
import hlo_opt
from hlo_opt.driver import Driver

pytestmark = [pytest.mark.slow, pytest.mark.tpu]

INT8 = "inference{weights=int8}"
# No activation has as many elements as a weight.
CONFIG = decoder.Config(layers=2, sequence=384, hidden=1024, vocabulary=1536)
# Matmul weights of a layer and how many numbers share a scale.
SUMMED = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}


def compiled(target: str, pipeline: str = INT8) -> Any:
    step = hlo_opt.jit(decoder.forward, parameters="params", pipeline=pipeline, target=target)
    tokens = jax.ShapeDtypeStruct((CONFIG.batch, CONFIG.sequence), jnp.int32)
    return step.lower(step.prepare(decoder.parameters(CONFIG)), tokens).compile()


def weight_shapes() -> list[tuple[int, ...]]:
    (layer, *_) = decoder.parameters(CONFIG)["layers"]
    return [layer[name].shape for name in SUMMED]


def expected_bytes() -> int:
    """Arguments of `@main`: int8 and f32 scales for matmul weights, bf16 for the rest."""
    params = decoder.parameters(CONFIG)
    total = 2 * (params["embedding"].size + params["norm"].size)
    for layer in params["layers"]:
        for name, weight in layer.items():
            if name not in SUMMED:
                total += 2 * weight.size
                continue
            channels = math.prod(weight.shape[SUMMED[name] :])
            total += weight.size + 4 * channels
    return total + 4 * CONFIG.batch * CONFIG.sequence


def wide_weights(hlo: str) -> list[str]:
    """Float buffers with as many elements as a weight, outside fusions (arguments included)."""
    sizes = {math.prod(shape) for shape in weight_shapes()}
    entry = hlo[hlo.index("\nENTRY ") :]
    found = []
    for line in entry.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = \(?(?:bf16|f32)\[([\d,]+)\]", line)
        if match and math.prod(map(int, match[1].split(","))) in sizes:
            found.append(line.strip())
    return found


@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_weights_halve_and_are_never_wide_in_memory(target: str) -> None:
    int8, plain = compiled(target), compiled(target, "inference")
    assert int8.report.kernels == CONFIG.layers
    memory = int8.memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(expected_bytes(), rel=0.01)
    assert memory.argument_size_in_bytes < 0.6 * plain.memory_analysis().argument_size_in_bytes
    smallest = min(map(math.prod, weight_shapes()))
    activations = plain.memory_analysis().temp_size_in_bytes
    assert memory.temp_size_in_bytes < activations + smallest
    assert wide_weights(int8.as_text()) == []
    # The search would find them: without int8 every weight is there.
    assert len(wide_weights(plain.as_text())) >= len(SUMMED) * CONFIG.layers


@pytest.mark.parametrize("rows", [1, 8, 512])
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_weights_of_real_size(target: str, rows: int) -> None:
    """4096 x 14336, as in an 8B model, in decode and prefill."""
    step = hlo_opt.jit(
        lambda params, x: x @ params, parameters="params", pipeline=INT8, target=target
    )
    w = jax.ShapeDtypeStruct((4096, 14336), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    memory = step.lower(step.prepare(w), x).compile().memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(
        w.size + 4 * 14336 + 2 * max(rows, 8) * 4096, rel=0.01
    )
    assert memory.temp_size_in_bytes < w.size / 100


def test_prepare_is_left_out_of_what_the_command_compiles(tmp_path: Path) -> None:
    shapes = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    path = tmp_path / "model.mlir"
    path.write_text(jax.jit(lambda w, x: x @ w).lower(shapes, shapes).as_text())
    error = io.StringIO()
    flags = ["--inference=weights=int8 parameters=0", "--target=v5e", "--compile"]
    assert Driver([str(path), *flags], stderr=error).run() == 0, error.getvalue()
    size = 256 * 256 + 4 * 256 + 2 * 256 * 256
    assert f"{size:,} bytes" in error.getvalue()


@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_a_donated_cache_is_aliased(target: str) -> None:
    def step(params: Any, cache: jax.Array, x: jax.Array) -> Any:
        y = x @ params
        return y, jax.lax.dynamic_update_slice(cache, y, (0, 0))

    f = hlo_opt.jit(
        step, parameters="params", pipeline=INT8, target=target, donate_argnames="cache"
    )
    w, cache, x = (jax.ShapeDtypeStruct((n, 128), jnp.bfloat16) for n in (128, 1024, 16))
    memory = f.lower(f.prepare(w), cache, x).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 1024 * 128 * 2
