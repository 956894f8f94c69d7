"""XLA's TPU compiler takes what we emit, for every generation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

import decoder
import hlo_opt
from hlo_opt import ir as hlo_ir
from hlo_opt.errors import HloOptError
from hlo_opt.kernels import No
from hlo_opt.kernels.splash_attention import SplashAttention
from hlo_opt.targets import TPU_NAMES, CompileReport, compile_module

pytestmark = [pytest.mark.slow, pytest.mark.tpu]

CONFIG = decoder.Config(layers=2, sequence=2048, hidden=1024, heads=16, kv_heads=4, depth=64)


@pytest.fixture(scope="module")
def model() -> ir.Module:
    return hlo_ir.parse(decoder.lower(CONFIG).as_text())


@pytest.mark.parametrize("target", TPU_NAMES)
def test_decoder(model: ir.Module, target: str) -> None:
    result = hlo_opt.apply(model, target=target)
    assert str(result.module).count("@tpu_custom_call") == 1
    report = compile_module(result.module, target, keep_hlo=True)
    assert report.kernels == CONFIG.layers
    assert report.composites == 0
    # Grouped queries: no repeated keys or values are materialised.
    repeated = f"bf16[{CONFIG.sequence},{CONFIG.heads},{CONFIG.depth}]"
    assert f"broadcast({repeated}" not in report.hlo


def test_no_logits_in_hbm(model: ir.Module) -> None:
    before = compile_module(model, "v5e")
    after = compile_module(hlo_opt.apply(model, target="v5e").module, "v5e")
    logits = CONFIG.heads * CONFIG.sequence**2 * 2  # bf16
    assert before.kernels == 0
    assert before.temporary_bytes >= logits
    assert after.temporary_bytes < logits / 4


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    b, s, _, d = q.shape
    x = jnp.einsum("bqkgd,bskd->bkgqs", q.reshape(b, s, k.shape[2], -1, d), k) * d**-0.5
    open_ = jnp.tril(jnp.ones((s, s), bool)) if mask is None else mask[:, None, None]
    p = jax.nn.softmax(jnp.where(open_, x.astype(jnp.float32), -1e30), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(q.shape)


def operands(s: int, d: int, dtype: Any, masked: bool) -> list[jax.ShapeDtypeStruct]:
    kv = jax.ShapeDtypeStruct((1, s, 2, d), dtype)
    mask = [jax.ShapeDtypeStruct((1, s, s), jnp.bool_)] if masked else []
    return [jax.ShapeDtypeStruct((1, s, 8, d), dtype), kv, kv, *mask]


@pytest.mark.parametrize("target", ["v5e", "v5p"])
@pytest.mark.parametrize(
    ("kernel", "masked"), [("splash", False), ("flash", False), ("flash", True)]
)
@pytest.mark.usefixtures("library_kernels")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("s", "d"), [(1024, 64), (8192, 128), (1024, 256)])
def test_kernels_fit(
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    kernel: str,
    masked: bool,
    dtype: Any,
    s: int,
    d: int,
) -> None:
    if kernel == "flash":
        monkeypatch.setattr(SplashAttention, "supports", lambda *_: No("not tested here"))
    lowered = hlo_opt.jit(attention, target=target).lower(*operands(s, d, dtype, masked))
    assert f"pallas_{kernel}_attention" in lowered.as_text()
    assert lowered.compile().report.kernels == 1


def banded(window: int | None, scale: float) -> Callable[..., jax.Array]:
    """Grouped-query attention to the `window` keys up to the query's own, or to all keys."""

    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        b, s, _, d = q.shape
        x = jnp.einsum("bqkgd,bskd->bkgqs", q.reshape(b, s, k.shape[2], -1, d), k) * scale
        if window is not None:
            rows, columns = jnp.arange(s)[:, None], jnp.arange(s)[None]
            x = jnp.where((rows >= columns) & (rows - columns < window), x, -1e30)
        p = jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(v.dtype)
        return jnp.einsum("bkgqs,bskd->bqkgd", p, v)

    return fn


@pytest.mark.usefixtures("library_kernels")
@pytest.mark.parametrize("target", ["v4", "v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize(
    ("s", "d", "value_d", "dtype", "window", "precision"),
    [
        (2048, 192, 128, jnp.bfloat16, None, "default"),
        (8192, 128, 128, jnp.float32, 2048, "highest"),
    ],
)
def test_splash_attention_fits(
    target: str, s: int, d: int, value_d: int, dtype: Any, window: int | None, precision: str
) -> None:
    shapes = [jax.ShapeDtypeStruct((2, s, *n), dtype) for n in ((8, d), (2, d), (2, value_d))]
    with jax.default_matmul_precision(precision):
        traced = jax.jit(banded(window, 0.1)).trace(*shapes)
    module = hlo_ir.parse(traced.lower(lowering_platforms=("tpu",)).as_text())
    lowered = hlo_opt.apply(module, target=target)
    assert any("Pallas splash attention" in r.message for r in lowered.remarks)
    assert compile_module(lowered.module, target).kernels == 1


@pytest.mark.usefixtures("library_kernels")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_deepest_splash_attention_fits(dtype: Any) -> None:
    shapes = [jax.ShapeDtypeStruct((1, 2048, heads, 512), dtype) for heads in (4, 2, 2)]
    traced = jax.jit(banded(2048, 0.1)).trace(*shapes)
    module = hlo_ir.parse(traced.lower(lowering_platforms=("tpu",)).as_text())
    lowered = hlo_opt.apply(module, target="v5e")
    assert any("Pallas splash attention" in r.message for r in lowered.remarks)
    assert compile_module(lowered.module, "v5e").kernels == 1


def test_donation_reaches_the_compiler() -> None:
    def step(cache: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cache, new, (0, 0))

    cache, new = (jax.ShapeDtypeStruct((n, 128), jnp.float32) for n in (1024, 8))
    for donated, alias in (((), 0), ((0,), 1024 * 128 * 4)):
        f = hlo_opt.jit(step, target="v5e", donate_argnums=donated)
        memory = f.lower(cache, new).compile().memory_analysis()
        assert memory.alias_size_in_bytes == alias


TOPOLOGY = """
import jax, jax.numpy as jnp, hlo_opt
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from test_compile_targets import attention

chip = topologies.get_topology_desc("v6e:1x1", "tpu", chips_per_host_bounds=[1, 1, 1]).devices[0]
q = jax.ShapeDtypeStruct((1, 1024, 8, 64), jnp.bfloat16, sharding=SingleDeviceSharding(chip))
for lowered in (
    hlo_opt.jit(attention).lower(q, q, q),
    hlo_opt.optimize(jax.jit(attention).lower(q, q, q)),
):
    compiled = lowered.compile()
    assert isinstance(compiled, jax.stages.Compiled)
    assert compiled.as_text().count("tpu_custom_call") == 1
"""


def test_jax_s_own_topologies_decide_the_target() -> None:
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-c", TOPOLOGY]
    run = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_compiler_options_reach_the_compiler() -> None:
    x = jax.ShapeDtypeStruct((1024, 128), jnp.float32)
    good, bad = {"xla_tpu_scoped_vmem_limit_kib": "32768"}, {"no_such_option": "1"}

    def compile(of_jit: dict[str, str], of_compile: dict[str, str]) -> CompileReport:
        f = hlo_opt.jit(jnp.sin, target="v5e", compiler_options=of_jit)
        return f.lower(x).compile(of_compile).report

    assert compile(good, good).argument_bytes == 1024 * 128 * 4
    for pair in ((good, bad), (bad, good)):
        with pytest.raises(HloOptError, match=r"v5e refuses the module: .*no_such_option"):
            compile(*pair)


def test_a_refusal_is_one_readable_line() -> None:
    text = """func.func @main(%a: tensor<200000x200000xf32>) -> tensor<200000x200000xf32> {
      %0 = stablehlo.add %a, %a : tensor<200000x200000xf32>
      return %0 : tensor<200000x200000xf32>
    }"""
    with pytest.raises(HloOptError, match="v5e refuses the module: HBM is exhausted") as error:
        compile_module(hlo_ir.parse(text), "v5e")
    assert "\n" not in str(error.value)


def test_partitioned_modules_compile_with_their_number_of_devices() -> None:
    lowered = jax.jit(lambda x: x * 2).trace(jax.ShapeDtypeStruct((8, 128), jnp.float32))
    text = lowered.lower(lowering_platforms=("tpu",)).as_text()
    module = hlo_ir.parse(text.replace("num_partitions = 1", "num_partitions = 8"))
    assert compile_module(module, "v5e").argument_bytes > 0
    odd = hlo_ir.parse(text.replace("num_partitions = 1", "num_partitions = 7"))
    with pytest.raises(HloOptError, match="no topology with 7 devices"):
        compile_module(odd, "v5e")


def general(
    mask: Callable[..., Any], score: Callable[..., Any] = lambda x, *_: x
) -> Callable[..., jax.Array]:
    """Attention `[batch, head, position, depth]`; functions get `query, key, *extras`."""

    def fn(q: jax.Array, k: jax.Array, v: jax.Array, *extras: jax.Array) -> jax.Array:
        b, h, s, d = q.shape
        rows, columns = jnp.arange(s)[:, None], jnp.arange(k.shape[2])[None]
        q = q.reshape(b, k.shape[1], -1, s, d)
        x = jnp.einsum("bkgqd,bksd->bkgqs", q, k, preferred_element_type=jnp.float32) * d**-0.5
        x = jnp.where(mask(rows, columns, *extras), score(x, rows, columns, *extras), -1e30)
        p = jax.nn.softmax(x, axis=-1).astype(v.dtype)
        return jnp.einsum("bkgqs,bksd->bkgqd", p, v).reshape(b, h, s, v.shape[-1])

    return fn


def operands_of(
    q: tuple[int, ...],
    k: int,
    heads: int,
    dv: int,
    dtype: Any,
    *extras: tuple[tuple[int, ...], Any],
) -> list[jax.ShapeDtypeStruct]:
    b, _, _, d = q
    sizes = [(q, dtype), ((b, heads, k, d), dtype), ((b, heads, k, dv), dtype), *extras]
    return [jax.ShapeDtypeStruct(shape, type_) for shape, type_ in sizes]


BF16, F32 = jnp.bfloat16, jnp.float32
GENERAL: dict[str, tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]] = {
    "f32 of any size": (
        general(lambda q, k: q + 7 >= k),
        operands_of((2, 4, 1500, 80), 1507, 2, 96, F32),
    ),
    "deep f32": (general(lambda q, k: q >= k), operands_of((1, 8, 2048, 256), 2048, 2, 256, F32)),
    "latent": (general(lambda q, k: q >= k), operands_of((1, 8, 2048, 192), 2048, 8, 128, BF16)),
    "f16": (general(lambda q, k: q >= k), operands_of((1, 4, 512, 64), 512, 4, 64, jnp.float16)),
    "many queries a head": (
        general(lambda q, k: q >= k),
        operands_of((1, 71, 2048, 64), 2048, 1, 64, BF16),
    ),
    "few queries": (general(lambda q, k: q >= k), operands_of((2, 8, 5, 128), 3000, 2, 128, BF16)),
    "one query": (general(lambda q, k: k >= 0), operands_of((2, 8, 1, 64), 300, 2, 64, F32)),
    "soft cap, window, bias": (
        general(
            lambda q, k, _: (q >= k) & (q - k < 700),
            lambda x, q, k, b: 30 * jnp.tanh(x / 30) + b[:, :, None, None] * (k - q),
        ),
        operands_of((1, 8, 3072, 128), 3072, 2, 128, BF16, ((2, 4), F32)),
    ),
    "mask and segments": (
        general(
            lambda q, k, m, s: (
                m[:, None, None] & (s[:, None, None, :, None] == s[:, None, None, None])
            )
        ),
        operands_of(
            (2, 4, 1280, 64),
            1280,
            4,
            64,
            BF16,
            ((2, 1280, 1280), jnp.bool_),
            ((2, 1280), jnp.int32),
        ),
    ),
    "masks of bytes": (
        general(lambda q, k, m, n: (m[:, None, None] != 0) & (n[:, None, None, None] > 0)),
        operands_of(
            (2, 4, 1280, 64),
            1280,
            4,
            64,
            BF16,
            ((2, 1280, 1280), jnp.int8),
            ((2, 1280), jnp.uint8),
        ),
    ),
    "table": (
        general(lambda q, k, _: q >= k, lambda x, q, k, b: x + b),
        operands_of((1, 4, 2100, 64), 2100, 4, 64, F32, ((4, 1, 2100, 2100), F32)),
    ),
    "traced length": (
        general(lambda q, k, n: k <= q + n),
        operands_of((1, 4, 512, 128), 4096, 4, 128, BF16, ((), jnp.int32)),
    ),
}


@pytest.mark.parametrize("target", TPU_NAMES)
@pytest.mark.parametrize("name", GENERAL)
def test_general_attention_fits(name: str, target: str) -> None:
    fn, args = GENERAL[name]
    lowered = hlo_opt.jit(fn, target=target).lower(*args)
    assert "pallas_general_attention" in lowered.as_text()
    assert lowered.compile().report.kernels == 1


@pytest.mark.parametrize("target", ["v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("s", [1024, 8192, 32768])
def test_arguments_with_heads_inside_are_not_copied(s: int, target: str) -> None:
    """`[batch, position, head, depth]`, as `jax.nn.dot_product_attention` takes it."""
    args = [jax.ShapeDtypeStruct((1, s, heads, 128), BF16) for heads in (32, 8, 8)]

    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    module = hlo_opt.apply(hlo_ir.parse(text), target=target).module
    after = compile_module(module, target, keep_hlo=True)
    assert after.kernels == 1
    assert after.temporary_bytes < 1 << 20
    moved = [
        line
        for line in after.hlo.splitlines()
        if re.search(r"= bf16\[[\d,]*128\]\S* (copy|transpose|fusion)\(", line)
    ]
    assert not moved


@pytest.mark.parametrize("target", ["v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("s", [1024, 8192, 32768])
def test_long_sequences_need_no_logits_in_hbm(s: int, target: str) -> None:
    """Nor is q, k or v transposed or copied around the kernel."""
    args = operands_of((1, 32, s, 128), s, 8, 128, BF16)
    module = hlo_ir.parse(
        jax.jit(general(lambda q, k: q >= k))
        .trace(*args)
        .lower(lowering_platforms=("tpu",))
        .as_text()
    )
    after = compile_module(hlo_opt.apply(module, target=target).module, target, keep_hlo=True)
    assert after.kernels == 1
    assert after.temporary_bytes < s * s
    moved = [
        line
        for line in after.hlo.splitlines()
        if re.search(rf"= bf16\[[\d,]*{s},128\]\S* (copy|transpose|fusion)\(", line)
    ]
    assert not moved
