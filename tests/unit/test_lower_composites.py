"""`lower-composites` with JAX's flash attention: when it lowers, when it must not, and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

from hlo_opt import ir as hlo_ir
from hlo_opt.ir.walk import functions
from hlo_opt.kernels import No
from hlo_opt.kernels.splash_attention import SplashAttention
from hlo_opt.passes import lower_composites
from hlo_opt.pipeline import PassContext, run_pipeline
from hlo_opt.targets import compile_module
from hlo_opt.verify import verify_pipeline

B, S, H, K, D = 1, 256, 4, 2, 64


@pytest.fixture(autouse=True)
def flash_only(monkeypatch: pytest.MonkeyPatch, library_kernels: None) -> None:
    monkeypatch.setattr(SplashAttention, "supports", lambda *_: No("not tested here"))


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def qkv(dtype: Any = jnp.float32, s: int = S, d: int = D) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (spec(B, s, H, d, dtype=dtype), *(spec(B, s, K, d, dtype=dtype),) * 2)


def attention(
    mask: Callable[[Any, Any], Any] = lambda q, k: q >= k,
    *,
    value: float = -1e30,
    score: Callable[[Any], Any] = lambda x: x * D**-0.5,
    probs: Callable[[Any], Any] = lambda p: p,
) -> Callable[..., jax.Array]:
    """Grouped-query attention with a mask of query and key positions."""

    def fn(q: jax.Array, k: jax.Array, v: jax.Array, *extra: jax.Array) -> jax.Array:
        b, s, h, d = q.shape
        x = jnp.einsum("bqkgd,bskd->bkgqs", q.reshape(b, s, K, h // K, d), k)
        rows, columns = jnp.arange(s)[:, None], jnp.arange(k.shape[1])[None, :]
        open_ = mask(rows, columns) if not extra else mask(rows, columns, *extra)
        x = jnp.where(open_, score(x.astype(jnp.float32)), value)
        p = probs(jax.nn.softmax(x, axis=-1)).astype(v.dtype)
        return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(q.shape)

    return fn


def module_of(fn: Callable[..., Any], *args: Any) -> ir.Module:
    return hlo_ir.parse(jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text())


def lowered(module: ir.Module, target: str | None = "v5e") -> tuple[ir.Module, list[str]]:
    ctx = PassContext(target=target)
    result = run_pipeline(module, "inference", ctx)
    return result, [r.message for r in ctx.remarks if r.pass_name == "lower-composites"]


def count(module: ir.Module, text: str) -> int:
    return str(module).count(text)


def test_causal_attention_becomes_one_kernel() -> None:
    module, remarks = lowered(module_of(attention(), *qkv()))
    assert remarks == ["lowered: Pallas flash attention, blocks q=256, k=256/256"]
    assert count(module, "@tpu_custom_call") == 1
    assert count(module, "stablehlo.composite") == 0
    assert count(module, "stablehlo.exponential") == 0  # the decomposition is gone


def test_the_pass_alone_leaves_no_decomposition_behind() -> None:
    raised = run_pipeline(module_of(attention(), *qkv()), "raise", PassContext())
    module = run_pipeline(raised, "builtin.module(lower-composites{target=v6e})", PassContext())
    assert len(list(functions(raised))) == 3  # main, the decomposition, the score
    assert len(list(functions(module))) == 2  # main and the kernel


def test_lowering_twice_changes_nothing() -> None:
    module, _ = lowered(module_of(attention(), *qkv()))
    again, remarks = lowered(module)
    assert str(again) == str(module)
    assert remarks == []


def test_32_layers_leave_one_kernel_function() -> None:
    one = attention()

    def layers(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(32):
            q = jnp.tanh(one(q, k, v))
        return q

    module, remarks = lowered(module_of(layers, *qkv()))
    assert len(remarks) == 32
    assert len(set(remarks)) == 1
    assert count(module, "@tpu_custom_call") == 1
    assert len(list(functions(module))) == 2


def test_keys_and_values_are_not_repeated() -> None:
    module, _ = lowered(module_of(attention(), *qkv()))
    kernel = next(line for line in str(module).splitlines() if "@tpu_custom_call" in line)
    operands, result = kernel.rsplit(": (", 1)[1].split(") -> ")
    query = f"tensor<{K}x{H // K}x{B}x1x{S}x{D}xf32>"
    key = f"tensor<{K}x{B}x1x{S}x{D}xf32>"
    assert operands == f"{query}, {key}, {key}"
    assert result == query


@pytest.mark.parametrize("target", ["gpu", None])
def test_hosts_keep_decompositions(target: str | None) -> None:
    module, remarks = lowered(module_of(attention(), *qkv()), target)
    assert count(module, "stablehlo.composite") == 1
    assert "decomposition kept: no kernels for" in remarks[0]


def test_partitioned_modules_are_left_alone() -> None:
    text = str(module_of(attention(), *qkv())).replace("num_partitions = 1", "num_partitions = 8")
    module, remarks = lowered(hlo_ir.parse(text))
    assert count(module, "stablehlo.composite") == 1
    assert count(module, "tpu_custom_call") == 0
    assert "partitioned over several devices" in remarks[0]


def test_a_mesh_is_enough_to_be_partitioned() -> None:
    text = str(module_of(attention(), *qkv()))
    meshed = text.replace(
        "  func.func public", '  sdy.mesh @mesh = <["x"=8]>\n  func.func public', 1
    )
    module, remarks = lowered(hlo_ir.parse(meshed))
    assert count(module, "tpu_custom_call") == 0
    assert "partitioned over several devices" in remarks[0]


def test_inside_a_manual_computation_of_a_partitioned_module_it_lowers() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec_ = jax.sharding.PartitionSpec()
    with jax.sharding.use_abstract_mesh(mesh):
        sharded = jax.shard_map(
            attention(), in_specs=(spec_, spec_, spec_), out_specs=spec_, check_vma=False
        )
        text = str(module_of(sharded, *qkv()))
    assert "sdy.manual_computation" in text
    text = text.replace("num_partitions = 1", "num_partitions = 2")
    partly = text.replace('@mesh = <["x"=2]>', '@mesh = <["x"=2, "y"=2]>')
    assert partly != text
    module, remarks = lowered(hlo_ir.parse(partly))
    assert count(module, "@tpu_custom_call") == 0
    assert "not in a manual computation over all of them" in remarks[0]
    module, remarks = lowered(hlo_ir.parse(text))
    assert remarks == ["lowered: Pallas flash attention, blocks q=256, k=256/256"]
    assert count(module, "@tpu_custom_call") == 1


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (attention(score=lambda x: jnp.tanh(x / 50) * 50), qkv(), "a soft cap (tanh)"),
        (attention(probs=lambda p: p * 0.5), qkv(), "a function is applied to the probabilities"),
        (attention(value=-10.0, mask=lambda q, k: q - k < 9), qkv(), "not far below"),
        (attention(value=-jnp.inf, mask=lambda q, k: q - k < 9), qkv(), "writes -inf"),
        (attention(score=lambda x: -x), qkv(), "is not positive"),
        (attention(), qkv(s=100), "100 query positions, not a multiple of 128"),
        (attention(), qkv(d=192), "depth 192 is larger than 128"),
        (attention(), qkv(jnp.float16), "matmuls in f16"),
    ],
)
def test_refusals(fn: Callable[..., Any], args: tuple[Any, ...], reason: str) -> None:
    module, remarks = lowered(module_of(fn, *args))
    assert count(module, "tpu_custom_call") == 0
    assert count(module, "stablehlo.composite") == 1
    assert reason in remarks[0]


def test_an_attention_mask_made_by_hand_is_lowered_too() -> None:
    """A composite somebody else emitted, without a needed attribute, is kept and said to be so."""
    raised = run_pipeline(module_of(attention(), *qkv()), "raise", PassContext())
    text = str(raised)
    assert lowered(hlo_ir.parse(text))[1] == [
        "lowered: Pallas flash attention, blocks q=256, k=256/256"
    ]
    broken = text.replace("qk_type = f32, ", "")
    assert broken != text
    assert "the composite has no attribute qk_type" in lowered(hlo_ir.parse(broken))[1][0]


VALID = spec(B, S, dtype=jnp.bool_)
NUMERICS = [
    (attention(), qkv()),
    (attention(), qkv(jnp.bfloat16)),
    (attention(value=-jnp.inf), qkv()),
    (attention(lambda q, k: q >= k - 1), qkv()),  # causal, but one off
    (attention(lambda q, k: q > k, value=-1e9), qkv()),  # the first row sees nothing
    (attention(lambda q, k: (q >= k) & (q - k < 50)), qkv()),
    (attention(lambda q, k: q < 0, value=-1e9), qkv()),  # no row sees anything
    (attention(lambda q, k, m: (q >= k) & m[:, None, None, None, :]), (*qkv(), VALID)),
    (attention(lambda q, k, m: m[:, None, None, :, None] & (k >= 0)), (*qkv(), VALID)),
    (attention(score=lambda x: x * 3.0), qkv()),
    (attention(score=lambda x: x), qkv(jnp.bfloat16)),
]


@pytest.mark.parametrize(("fn", "args"), NUMERICS)
def test_kernels_compute_the_same(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    report = verify_pipeline(module_of(fn, *args), "inference", "v5e")
    assert report.kernels == 1
    assert report.ok, report.table()


def test_rows_that_see_nothing_average_all_values() -> None:
    module = module_of(attention(lambda q, k: q < 0, value=-1e9), *qkv())
    result = run_pipeline(module, "inference", PassContext(target="v5e", interpret=True))
    from hlo_opt import compat

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(a.shape).astype(np.float32) for a in qkv()]
    (out,) = compat.run_on_cpu(result, arrays)
    mean = np.repeat(arrays[2].mean(axis=1, keepdims=True), H // K, axis=2)
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=1e-5)


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_matmul_precision_reaches_the_kernel(precision: str) -> None:
    with jax.default_matmul_precision(precision):
        module = module_of(attention(), *qkv())
    raised = run_pipeline(module, "raise", PassContext())
    assert f'qk_precision = ["{precision.upper()}", "{precision.upper()}"]' in str(raised)
    other = "highest" if precision == "default" else "default"
    with jax.default_matmul_precision(other):  # the session's setting must not matter
        result, remarks = lowered(module)
    assert remarks[0].startswith("lowered")
    with jax.default_matmul_precision(other):
        assert count(lowered(module_of(attention(), *qkv()))[0], "tpu_custom_call") == 1
    kernel = next(line for line in str(result).splitlines() if "@tpu_custom_call" in line)
    assert len(kernel) > 1000  # the kernel's body is inside


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_bf16_compiles_at_every_precision(precision: str) -> None:
    """Mosaic refuses bf16 matmuls that ask for more, though their products are exact."""
    with jax.default_matmul_precision(precision):
        module = module_of(attention(), *qkv(jnp.bfloat16))
    assert compile_module(lowered(module)[0], "v5e").kernels == 1


def positional(cast: Any) -> Callable[..., jax.Array]:
    """Attention to keys at or before the query by given positions, compared in another type."""

    def mask(q: Any, k: Any, p: jax.Array) -> jax.Array:
        row, column = p[:, None, None, :, None].astype(cast), p[:, None, None, None, :].astype(cast)
        return row * 2**20 >= column * 2**20

    return attention(mask)


@pytest.mark.parametrize("given", ["int32", "int64"])
def test_64_bit_masks_keep_the_decomposition(given: str) -> None:
    with jax.enable_x64(True):
        module = module_of(positional("int64"), *qkv(), spec(B, S, dtype=given))
    result, remarks = lowered(module)
    assert count(result, "tpu_custom_call") == 0
    assert "computed in 64 bits" in remarks[0]


def test_32_bit_positions_are_lowered_and_hold() -> None:
    module = module_of(positional("int32"), *qkv(), spec(B, S, dtype=jnp.int32))
    report = verify_pipeline(module, "inference", "v5e")
    assert report.kernels == 1
    assert report.ok, report.table()


def test_causal_masks_of_64_bit_indices_are_still_lowered() -> None:
    with jax.enable_x64(True):
        module = module_of(attention(), *qkv())
    assert lowered(module)[1][0].startswith("lowered")


def test_a_refusal_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def failing(*arguments: Any) -> bytes:
        tried.append(arguments)
        raise NotImplementedError("not on this shape")

    monkeypatch.setattr(lower_composites, "_lower", failing)
    one = attention()

    def layers(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(4):
            q = jnp.tanh(one(q, k, v))
        return q

    _, remarks = lowered(module_of(layers, *qkv()))
    assert len(remarks) == 4
    assert "could not be lowered: NotImplementedError: not on this shape" in remarks[0]
    assert len(tried) == 1


def test_composites_without_attributes_are_left_alone() -> None:
    fn = jax.lax.composite(jnp.sin, name="hlo_opt.attention", version=1)
    module = module_of(fn, spec(4))
    ctx = PassContext(target="v5e")
    assert "composite" in str(run_pipeline(module, "inference", ctx))
    assert [r.kind for r in ctx.remarks] == ["missed"]
