"""`hlo_opt.jit(f, parameters=…)`: prepared once, stepped often."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlo_opt
from hlo_opt.errors import HloOptError
from hlo_opt.prepare import Prepared

INT8 = "inference{weights=int8}"
jit = partial(hlo_opt.jit, parameters="params", pipeline=INT8)


def weights(seed: int = 0, size: int = 128, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 2)
    one, two = (jax.random.normal(key, (size, size), dtype) / size**0.5 for key in keys)
    return {"one": one, "two": two, "bias": jnp.arange(size, dtype=dtype) / size}


def model(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["one"]) @ params["two"] + params["bias"]


X = jax.random.normal(jax.random.key(9), (4, 128))


def close(ours: Any, exact: Any, bound: float = 0.02) -> None:
    """As close as int8 weights are."""
    ours, exact = (np.asarray(a, np.float64) for a in (ours, exact))
    error = np.sqrt(np.mean((ours - exact) ** 2)) / np.sqrt(np.mean(exact**2))
    assert 0 < error < bound


def test_a_step() -> None:
    step = jit(model)
    prepared = step.prepare(weights())
    close(step(prepared, X), model(weights(), X))
    close(step(params=prepared, x=X), model(weights(), X))
    quantized = [r.args["path"] for r in step.remarks if r.pass_name == "quantize"]
    assert quantized == ["params['one']", "params['two']"]
    assert step.__name__ == "model"


def test_what_is_passed_is_int8() -> None:
    step = jit(model)
    lowered = step.lower(step.prepare(weights()), X)
    types = [str(leaf.dtype) for leaf in jax.tree.leaves(lowered.in_avals)]
    assert sorted(types) == ["float32"] * 4 + ["int8"] * 2  # scales, bias and x
    assert step.eval_shape(step.prepare(weights()), X).shape == (4, 128)


def counting() -> tuple[Any, list[str]]:
    """A step that notes when its function is traced."""
    traces: list[str] = []

    def noted(params: Any, x: jax.Array) -> jax.Array:
        traces.append(str(x.shape))
        return model(params, x)

    return jit(noted), traces


def test_traced_once_for_a_signature_and_prepared_once_for_all() -> None:
    step, traces = counting()
    prepared = step.prepare(weights())
    for _ in range(3):
        step(prepared, X)
        step(prepared, X[:2])
    assert traces == ["(4, 128)", "(2, 128)"]
    assert len(prepared._values) == 1


def test_other_parameters_of_the_same_types_are_not_traced_again() -> None:
    step, traces = counting()
    close(step(step.prepare(weights(1)), X), model(weights(1), X))
    close(step(step.prepare(weights(2)), X), model(weights(2), X))
    assert len(traces) == 1


def two_ways(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Prepares differently for one row and for many: the sums run over different dimensions."""
    return x @ params["w"] if len(x) > 1 else x @ params["w"].T


def test_signatures_that_prepare_differently() -> None:
    traces: list[int] = []

    def noted(params: Any, x: jax.Array) -> jax.Array:
        traces.append(len(x))
        return two_ways(params, x)

    step = jit(noted)
    params = {"w": weights()["one"]}
    prepared = step.prepare(params)
    for _ in range(3):
        close(step(prepared, X), X @ params["w"])
        close(step(prepared, X[:1]), X[:1] @ params["w"].T)
    assert len(prepared._values) == 2
    # Once each: nothing is compiled again when the second way is added.
    assert sorted(traces) == [1, 4]
    close(step(prepared, X[:3]), X[:3] @ params["w"])  # a third signature of a known way
    assert len(prepared._values) == 2


def test_python_numbers_that_change_are_not_traced_again() -> None:
    traces: list[int] = []

    @partial(jit, static_argnames="config")
    def step(params: Any, x: jax.Array, position: int, *, config: Any) -> jax.Array:
        traces.append(len(x))
        return two_ways(params, x) + position

    class Config:  # as models are: no array, but it has a dtype
        dtype = jnp.float32

    prepared, config = step.prepare({"w": weights()["one"]}), Config()
    for position in range(4):
        step(prepared, X, position, config=config)
        step(prepared, X[:1], position, config=config)
    assert sorted(traces) == [1, 4]


def test_release() -> None:
    step = jit(two_ways)
    params = {"w": weights()["one"] + 0}
    alive = weakref.ref(params["w"])
    prepared = step.prepare(params)
    with pytest.raises(HloOptError, match="cannot be released before the first step"):
        prepared.release()
    step(prepared, X)
    expected = np.asarray(X[:2] @ params["w"])
    prepared.release()
    del params
    gc.collect()
    assert alive() is None
    close(step(prepared, X[:2]), expected)  # needs the same values
    with pytest.raises(HloOptError, match="prepared in another way, and the originals were"):
        step(prepared, X[:1])


def test_unchanged_values_are_the_original_arrays() -> None:
    step = hlo_opt.jit(model, parameters="params")  # hoists, does not quantize
    params = weights()
    prepared = step.prepare(params)
    np.testing.assert_allclose(step(prepared, X), model(params, X), rtol=1e-5, atol=1e-5)
    (values,) = prepared._values.values()
    pointers = {v.unsafe_buffer_pointer() for v in values}
    assert params["one"].unsafe_buffer_pointer() in pointers


def cached(
    params: dict[str, jax.Array], cache: dict[str, jax.Array], x: jax.Array, *, times: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    y = x @ params["one"] * times
    return y, {"k": jax.lax.dynamic_update_slice(cache["k"], y, (0, 0))}


def test_donation_and_statics() -> None:
    step = jit(cached, donate_argnums=1, static_argnames="times")
    prepared = step.prepare(weights())
    for times in (1, 2, 1):
        cache = {"k": jnp.zeros((64, 128))}
        y, new = step(prepared, cache, X, times=times)
        close(y, X @ weights()["one"] * times)
        assert cache["k"].is_deleted()
        np.testing.assert_array_equal(new["k"][:4], y)
    cache = {"k": jnp.zeros((64, 128))}
    memory = step.lower(prepared, cache, X, times=1).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 64 * 128 * 4


def test_static_positions_and_parameters_in_the_middle() -> None:
    @jit(static_argnums=(0, 3))
    def f(mode: str, x: jax.Array, params: Any, shape: tuple[int, int]) -> jax.Array:
        y = (x @ params["one"]).reshape(shape)
        return -y if mode == "negative" else y

    prepared = f.prepare(weights())
    y = X @ weights()["one"]
    close(f("negative", X, prepared, (2, 256)), -y.reshape(2, 256))
    close(f("positive", X, prepared, (4, 128)), y)


def test_keyword_only_and_numpy_parameters() -> None:
    @jit
    def f(x: jax.Array, *, params: Any) -> jax.Array:
        return x @ params[0] + params[1]

    params = (np.asarray(weights()["one"], np.float64), np.ones(128, np.float32))
    prepared = f.prepare(params)
    close(f(X, params=prepared), X @ weights()["one"] + 1)


def test_contexts_and_weak_types_are_jax_s() -> None:
    @jit
    def f(params: Any, x: jax.Array, scale: Any) -> Any:
        return (x @ params["one"]) * scale

    prepared = f.prepare(weights())
    half = X.astype(jnp.bfloat16)

    def dtype(x: Any, scale: Any) -> Any:
        return f(prepared, x, scale).dtype

    assert dtype(half, 2.0) == jnp.float32  # the weights are f32
    bf16 = f.prepare(jax.tree.map(lambda w: w, weights()))
    with jax.default_matmul_precision("highest"):
        assert f.lower(bf16, X, 2.0).as_text().count("HIGHEST") == 2
    assert "HIGHEST" not in f.lower(bf16, X, 2.0).as_text()


def test_plain_jit_is_not_touched() -> None:
    text = jax.jit(model).lower(weights(), X).as_text()
    step = jit(model)
    step(step.prepare(weights()), X)
    assert jax.jit(model).lower(weights(), X).as_text() == text


def test_inside_an_outer_jit() -> None:
    step = jit(model)
    prepared = step.prepare(weights())
    close(jax.jit(lambda x: step(prepared, x) * 2)(X), 2 * model(weights(), X))
    close(step(prepared, X), model(weights(), X))


def test_loops_over_steps() -> None:
    step = jit(model)
    prepared = step.prepare(weights())
    out = jax.lax.fori_loop(0, 2, lambda _, x: step(prepared, x), X)
    close(out, model(weights(), model(weights(), X)))


def test_threads_and_copies() -> None:
    step, traces = counting()
    prepared = step.prepare(weights())
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: copy.copy(step)(prepared, X), range(8)))
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    assert len(prepared._values) == 1
    assert len(traces) <= 8


def test_bad_weights_are_not_hidden() -> None:
    params = weights()
    params["one"] = params["one"].at[3, 5].set(jnp.nan)
    step = jit(lambda params, x: x @ params["one"])
    out = np.asarray(step(step.prepare(params), X))
    assert np.isnan(out[:, 5]).all()
    assert np.isfinite(np.delete(out, 5, axis=1)).all()


def test_target_of_another_machine() -> None:
    def f(params: Any, q: jax.Array) -> jax.Array:
        k = (q @ params["one"]).reshape(1, 256, 2, 64)
        x = jnp.einsum("bqhd,bkhd->bhqk", q.reshape(k.shape), k)
        p = jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(k.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", p, k)

    step = jit(f, target="v6e")
    shapes = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), {"one": weights()["one"]}
    )
    x = jax.ShapeDtypeStruct((1, 256, 128), jnp.bfloat16)
    text = step.lower(step.prepare(shapes), x).as_text()
    assert text.count("tpu_custom_call") == 1
    assert "tensor<128x128xi8>" in text
    # And calls run on this host, with arrays.
    arrays = {"one": weights(dtype=jnp.bfloat16)["one"]}
    q = jax.random.normal(jax.random.key(3), x.shape, x.dtype)
    close(step(step.prepare(arrays), q), f(arrays, q), bound=0.04)


def test_prepared_from_shapes_cannot_be_called() -> None:
    step = jit(model)
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), weights())
    with pytest.raises(HloOptError, match="from shapes: it can be lowered, not called"):
        step(step.prepare(shapes), X)


def test_nothing_to_hoist_is_the_identity() -> None:
    step = hlo_opt.jit(lambda params, x: x @ params, parameters="params", pipeline="cse")
    w = weights()["one"]
    np.testing.assert_allclose(step(step.prepare(w), X), X @ w, rtol=1e-6)
    assert [r.pass_name for r in step.remarks] == ["hoist-weights"]


# What is refused.


def test_wrong_trees() -> None:
    step = jit(model)
    step.prepare({"other": X})  # no step yet: nothing to compare with
    step(step.prepare(weights()), X)
    with pytest.raises(HloOptError, match="'params' has another tree than in an earlier step"):
        step.prepare({"one": X})
    wrong = {**weights(), "bias": jnp.zeros(7)}
    with pytest.raises(HloOptError, match=r"params\['bias'\] is float32\[7\], in an earlier step"):
        step.prepare(wrong)
    for leaf, kind in ((3.0, "float"), ("w", "str"), (jax.random.key(0), "key<fry>")):
        with pytest.raises(HloOptError, match=rf"params\['a'\]\[1\] is no array .* {kind}"):
            step.prepare({"a": [X, leaf]})


def test_wrong_calls() -> None:
    step, other = jit(model), jit(model)
    prepared = step.prepare(weights())
    with pytest.raises(HloOptError, match="'params' is prepared already"):
        step.prepare(prepared)
    for run in (step, step.lower, step.trace):
        with pytest.raises(HloOptError, match=r"not prepared \(dict\): pass what model.prepare"):
            run(weights(), X)
        with pytest.raises(HloOptError, match="stand for 'params' alone, once in a call"):
            run(prepared, prepared)
        with pytest.raises(HloOptError, match="prepared by another function's prepare"):
            run(other.prepare(weights()), X)
        with pytest.raises(HloOptError, match="the argument 'params' is missing"):
            run(x=X)
    with pytest.raises(TypeError):
        step(prepared)
    close(step(prepared, X), model(weights(), X))


def test_wrong_settings() -> None:
    def variadic(*params: Any) -> Any:
        return params

    for fun, name in ((model, "weights"), (variadic, "params"), (model, "")):
        with pytest.raises(HloOptError, match=f"parameters='{name}': .* has no such argument"):
            hlo_opt.jit(fun, parameters=name)
    for options, verb in (
        ({"donate_argnums": 0}, "donated"),
        ({"donate_argnames": ["params"]}, "donated"),
        ({"static_argnums": (0,)}, "static"),
        ({"static_argnames": "params"}, "static"),
    ):
        with pytest.raises(HloOptError, match=f"parameters='params' cannot be {verb}"):
            jit(model, **options)
    with pytest.raises(HloOptError, match=r"give hlo_opt\.jit parameters="):
        hlo_opt.jit(model).prepare(weights())
    with pytest.raises(HloOptError, match="no argument of 'main' is known to be a parameter"):
        hlo_opt.jit(model, pipeline=INT8)(weights(), X)


def test_a_failing_pipeline_is_an_error_each_time() -> None:
    step = jit(lambda params, x: x @ params["one"], pipeline="hoist-weights{parameters=99}")
    prepared = step.prepare(weights())
    for _ in range(2):
        with pytest.raises(HloOptError, match="'main' has arguments 0 to"):
            step(prepared, X)


def test_on_a_method() -> None:
    class Model:
        @jit(static_argnums=0)
        def apply(self, params: Any, x: jax.Array) -> jax.Array:
            return x @ params

    w, applied = weights()["one"], Model().apply
    close(applied(applied.prepare(w), X), X @ w)


def test_transformations_are_jax_s_errors() -> None:
    step = jit(model)
    prepared = step.prepare(weights())
    with pytest.raises(ValueError, match="No VJP is available"):
        jax.grad(lambda x: step(prepared, x).sum())(X)
    with pytest.raises(NotImplementedError, match="call_exported"):
        jax.vmap(lambda x: step(prepared, x[None]))(X)


@pytest.mark.parametrize("ordered", [False, True])
def test_host_callbacks_are_refused(ordered: bool) -> None:
    def f(params: Any, x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0, 0], ordered=ordered)
        return x @ params["one"]

    step = jit(f)
    with pytest.raises(HloOptError, match="host callbacks"):
        step(step.prepare(weights()), X)


SHARDED = """
import jax, jax.numpy as jnp, hlo_opt
from jax.sharding import NamedSharding, PartitionSpec as P
step = hlo_opt.jit(lambda params, x: x @ params, parameters="params",
                   pipeline="inference{weights=int8}")
w, x = jnp.ones((128, 128)), jnp.ones((4, 128))
first, second = jax.devices()
sharding = NamedSharding(jax.make_mesh((2,), ("a",)), P("a"))
try:
    step.prepare(jax.device_put(w, sharding))
except hlo_opt.HloOptError as error:
    assert "on 2 devices, not on one" in str(error), error
else:
    raise AssertionError
prepared = step.prepare(jax.device_put(w, second))
assert step(prepared, x).devices() == {second}
try:
    step(prepared, jax.device_put(x, sharding))
except ValueError as error:
    assert "incompatible devices" in str(error), error
else:
    raise AssertionError
print("done")
"""


def test_several_devices_are_refused() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip() == "done", run.stderr


def test_repr_is_short() -> None:
    prepared = jit(model).prepare(weights())
    assert isinstance(prepared, Prepared)
    assert len(repr(prepared)) < 100
