"""`hlo_opt.jit` behaves as `jax.jit`, and what it compiles is rewritten."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

import hlo_opt
from hlo_opt import pipeline as pipelines
from hlo_opt.errors import HloOptError
from hlo_opt.pipeline import Pass, PassContext, register_pass
from hlo_opt.rewrite import apply_greedily

RUNS: list[str | None] = []


@pytest.fixture(autouse=True, scope="module")
def passes() -> Iterator[None]:
    """Wrong passes on purpose: where sines become cosines, a rewrite cannot go unseen."""

    def cosine(op: ir.Operation) -> ir.Value:
        return stablehlo.cosine(op.operands[0])

    @register_pass("test-sine-to-cosine")
    @dataclass(frozen=True)
    class SineToCosine(Pass):
        """For tests."""

        structure: ClassVar[str] = "sine"

        def run(self, module: ir.Module, ctx: PassContext) -> None:
            RUNS.append(ctx.target)
            apply_greedily(module.operation, [("stablehlo.sine", cosine)])
            self.remark(ctx, "applied", "became a cosine")

    @register_pass("test-failing")
    @dataclass(frozen=True)
    class Failing(Pass):
        """For tests."""

        def run(self, module: ir.Module, ctx: PassContext) -> None:
            raise HloOptError("error: planted")

    @register_pass("test-new-signature")
    @dataclass(frozen=True)
    class NewSignature(Pass):
        """For tests: `main` takes one more argument."""

        def run(self, module: ir.Module, ctx: PassContext) -> None:
            main = next(op for op in module.body.operations if op.name.value == "main")
            with module.context, ir.Location.unknown():
                extra = ir.RankedTensorType.get([], ir.F32Type.get())
                main.regions[0].blocks[0].add_argument(extra, ir.Location.unknown())
                new = ir.FunctionType.get([*main.type.inputs, extra], main.type.results)
                main.attributes["function_type"] = ir.TypeAttr.get(new)
                del main.attributes["arg_attrs"]

    yield
    for name in ("test-sine-to-cosine", "test-failing", "test-new-signature"):
        del pipelines.PASSES[name]


swapped = partial(hlo_opt.jit, pipeline="test-sine-to-cosine")
X = jnp.linspace(0.0, 1.0, 7)


def test_calls_run_the_rewritten_module() -> None:
    f = swapped(lambda x: jnp.sin(x))
    np.testing.assert_allclose(f(X), jnp.cos(X), rtol=1e-6)
    assert [r.message for r in f.remarks] == ["became a cosine"]


def test_plain_jit_is_not_touched() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    text = jax.jit(f).lower(X).as_text()
    ours = swapped(f)
    ours(X)
    ours.lower(X)
    assert jax.jit(f).lower(X).as_text() == text
    np.testing.assert_allclose(jax.jit(f)(X), jnp.sin(X), rtol=1e-6)


def test_lower_and_compile() -> None:
    f = swapped(jnp.sin)
    lowered = f.lower(X)
    assert "cosine" in lowered.as_text()
    assert "hlo_opt" not in lowered.as_text()
    runs = len(RUNS)
    np.testing.assert_allclose(lowered.compile()(X), jnp.cos(X), rtol=1e-6)
    assert len(RUNS) == runs  # what is rewritten once is not rewritten again


def test_decorator_keeps_name_and_help() -> None:
    @hlo_opt.jit(pipeline="test-sine-to-cosine", static_argnames=("n",))
    def repeated(x: jax.Array, *, n: int) -> jax.Array:
        """Help."""
        for _ in range(n):
            x = jnp.sin(x)
        return x

    assert (repeated.__name__, repeated.__doc__) == ("repeated", "Help.")
    np.testing.assert_allclose(repeated(X, n=1), jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(repeated(X, n=2), jnp.cos(jnp.cos(X)), rtol=1e-6)


def test_on_a_method() -> None:
    class Model:
        shift = 2.0

        @swapped
        def apply(self, x: jax.Array) -> jax.Array:
            return jnp.sin(x) + self.shift

    jax.tree_util.register_static(Model)
    np.testing.assert_allclose(Model().apply(X), jnp.cos(X) + 2, rtol=1e-6)


def test_pytrees_keywords_and_statics() -> None:
    def f(tree: dict[str, jax.Array], scale: float, *, power: int) -> dict[str, jax.Array]:
        return {k: jnp.sin(v) * scale**power for k, v in tree.items()}

    ours = swapped(f, static_argnums=(1,), static_argnames=("power",))
    for power in (1, 2):
        out = ours({"a": X, "b": 2 * X}, 3.0, power=power)
        np.testing.assert_allclose(out["b"], jnp.cos(2 * X) * 3.0**power, rtol=1e-6)


def test_donation() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    x = jnp.ones((64, 64))
    sizes = [
        one(f, donate_argnums=0).lower(x).compile().memory_analysis().alias_size_in_bytes
        for one in (jax.jit, swapped)
    ]
    assert sizes[0] == sizes[1] == x.nbytes
    y = jnp.ones((64, 64))
    swapped(f, donate_argnums=0)(y)
    assert y.is_deleted()


def test_transformations() -> None:
    f = swapped(lambda x: jnp.sin(x))
    xs = jnp.stack([X, 2 * X])
    np.testing.assert_allclose(jax.vmap(f)(xs), jnp.cos(xs), rtol=1e-6)
    # Inside an outer jit the function is plain code of that jit.
    np.testing.assert_allclose(jax.jit(lambda x: f(x))(X), jnp.sin(X), rtol=1e-6)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    x = jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x, axis=-1), v)


QKV = tuple(jax.random.normal(jax.random.key(i), (2, 32, 4, 16)) for i in range(3))


def test_gradients_are_right() -> None:
    ours, plain = (
        jax.grad(lambda *a, f=f: (f(*a) ** 2).sum(), argnums=(0, 1, 2))(*QKV)
        for f in (hlo_opt.jit(attention), jax.jit(attention))
    )
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_default_pipeline_keeps_results_on_cpu() -> None:
    f = hlo_opt.jit(attention)
    np.testing.assert_allclose(f(*QKV), jax.jit(attention)(*QKV), rtol=1e-6, atol=1e-6)
    assert [r.kind for r in f.remarks] == ["applied", "missed"]
    assert "test_jit.py" in f.remarks[0].location  # of the model's source


def test_target_of_another_machine() -> None:
    f = hlo_opt.jit(attention, target="v6e")
    q = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    assert f.lower(q, q, q).as_text().count("tpu_custom_call") == 1
    np.testing.assert_allclose(f(*QKV), jax.jit(attention)(*QKV), rtol=1e-6, atol=1e-6)


def test_contexts_are_jax_s() -> None:
    def f(x: jax.Array) -> jax.Array:
        return x @ x

    ours = hlo_opt.jit(f, pipeline="cse")
    x = jnp.eye(4)
    with jax.default_matmul_precision("highest"):
        assert ours.lower(x).as_text().count("HIGHEST") == 2
    assert "HIGHEST" not in ours.lower(x).as_text()


def test_weak_types() -> None:
    f = swapped(lambda x, s: jnp.sin(x) * s)
    half = X.astype(jnp.bfloat16)
    for scale, dtype in ((2, jnp.bfloat16), (2.0, jnp.bfloat16), (jnp.float32(2), jnp.float32)):
        assert f(half, scale).dtype == dtype


def test_optimize() -> None:
    lowered = jax.jit(jnp.sin).lower(X)
    text = lowered.as_text()
    ours = hlo_opt.optimize(lowered, "test-sine-to-cosine")
    assert "cosine" in ours.as_text()
    assert lowered.as_text() == text
    np.testing.assert_allclose(ours.compile()(X), jnp.cos(X), rtol=1e-6)


def test_apply() -> None:
    text = jax.jit(jnp.sin).lower(X).as_text()
    result = hlo_opt.apply(text, "test-sine-to-cosine")
    assert "stablehlo.cosine" in str(result.module)
    assert result.remarks[0].message == "became a cosine"


def test_trace_and_export() -> None:
    f = swapped(lambda x: jnp.sin(x))
    assert "cosine" in f.trace(X).lower().as_text()
    exported = export.export(f)(X)
    np.testing.assert_allclose(exported.call(X), jnp.cos(X), rtol=1e-6)
    with pytest.raises(HloOptError, match=r"several platforms \(cpu, tpu\)"):
        export.export(f, platforms=["cpu", "tpu"])(X)


def test_export_for_another_machine() -> None:
    f = hlo_opt.jit(attention, target="v6e")
    q = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    exported = export.export(f, platforms=["tpu"])(q, q, q)
    assert exported.mlir_module().count("@tpu_custom_call") == 1
    with pytest.raises(HloOptError, match="target is 'v6e', but the function was lowered for cpu"):
        export.export(f)(q, q, q)


def test_models_that_ask_for_the_tpu_find_the_target() -> None:
    def twice(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    def f(x: jax.Array) -> jax.Array:
        assert pltpu.get_tpu_info().chip_version.value == "v6e"
        return pl.pallas_call(twice, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    for x in (jnp.ones((8, 128)), jax.ShapeDtypeStruct((8, 128), jnp.float32)):
        text = hlo_opt.jit(f, target="v6e").lower(x).as_text()
        assert text.count("@tpu_custom_call") == 1


def test_inside_an_outer_jit_it_is_plain_code_also_when_wrapped_directly() -> None:
    f = swapped(lambda x: jnp.sin(x))
    np.testing.assert_allclose(jax.jit(f)(X), jnp.sin(X), rtol=1e-6)
    assert f.eval_shape(X).shape == X.shape


def test_remarks_belong_to_a_function() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    one = swapped(f)

    def f(x: jax.Array) -> jax.Array:  # type: ignore[no-redef]
        return jnp.sin(x)

    other = swapped(f)
    one(X)
    assert (len(one.remarks), len(other.remarks)) == (1, 0)


def test_a_failing_pass_is_an_error_and_harms_nothing_else() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    ours = hlo_opt.jit(f, pipeline="test-failing")
    for run in (ours, ours.lower):
        with pytest.raises(HloOptError, match="planted"):
            run(X)
    np.testing.assert_allclose(jax.jit(f)(X), jnp.sin(X), rtol=1e-6)


def test_a_changed_signature_never_reaches_the_runtime() -> None:
    ours = hlo_opt.jit(lambda x: jnp.sin(x), pipeline="test-new-signature")
    with pytest.raises(HloOptError, match="changed the signature of 'main'"):
        ours(X)


def test_threads_and_copies() -> None:
    functions = [swapped(lambda x, n=n: jnp.sin(x) + n) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda f: copy.copy(f)(X), functions))
    for n, result in enumerate(results):
        np.testing.assert_allclose(result, jnp.cos(X) + n, rtol=1e-6)


def run_script(script: str, **environment: str) -> str:
    """Output of a fresh process: some of JAX's settings are read once."""
    command = [sys.executable, "-c", script]
    run = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


DEVICES = """
import jax, jax.numpy as jnp, hlo_opt
from jax.sharding import NamedSharding, PartitionSpec as P
f = hlo_opt.jit(lambda x: x * 2 + 0, pipeline="canonicalize,cse")
x = jnp.ones((8, 4))
first, second = jax.devices()
assert f(x).devices() == {first}
with jax.default_device(second):
    assert f(jnp.ones((8, 4))).devices() == {second}
assert f(jax.device_put(x, second)).devices() == {second}
sharding = NamedSharding(jax.make_mesh((2,), ("a",)), P("a"))
y = f(jax.device_put(x, sharding))
assert y.sharding.is_equivalent_to(sharding, 2) and (y == 2).all()
g = hlo_opt.jit(lambda x: x * 2, in_shardings=sharding, pipeline="cse")
assert g.lower(x).compile()(jax.device_put(x, sharding)).sharding.is_equivalent_to(sharding, 2)
print("done")
"""


def test_devices_and_shardings_are_jax_s() -> None:
    flags = "--xla_force_host_platform_device_count=2"
    assert run_script(DEVICES, XLA_FLAGS=flags) == "done"


CACHE = """
import sys, jax, jax.numpy as jnp, hlo_opt
from jaxlib.mlir.dialects import stablehlo
from dataclasses import dataclass
from hlo_opt.pipeline import Pass, register_pass
from hlo_opt.rewrite import apply_greedily

for name, new in (("one", stablehlo.cosine), ("two", stablehlo.tan)):
    @register_pass(name)
    @dataclass(frozen=True)
    class Swap(Pass):
        def run(self, module, ctx, new=new):
            apply_greedily(module.operation, [("stablehlo.sine", lambda op: new(op.operands[0]))])

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
def f(x):
    return jnp.sin(x)
x = jnp.float32(0.5)
hits.clear()
functions = [jax.jit(f), hlo_opt.jit(f, pipeline="one"), hlo_opt.jit(f, pipeline="two")]
results = [g(x) for g in functions]
hit = hits.count("/jax/compilation_cache/cache_hits")
for result, expected in zip(results, (jnp.sin(x), jnp.cos(x), jnp.tan(x))):
    assert abs(result - expected) < 1e-6, results
print(hit)
"""


def test_persistent_cache_keeps_pipelines_apart(tmp_path: Path) -> None:
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    assert run_script(CACHE, **settings) == "0"
    assert run_script(CACHE, **settings) == "3"


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"pipeline": "no-such-pass"}, "unknown pass"), ({"target": "v99"}, "unknown target")],
)
def test_wrong_settings_are_refused_at_once(options: dict[str, str], problem: str) -> None:
    with pytest.raises(HloOptError, match=problem):
        hlo_opt.jit(jnp.sin, **options)
