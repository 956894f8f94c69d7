"""What `hoist-weights` moves to `@prepare`, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

import hlo_opt
from hlo_opt import compat
from hlo_opt import ir as hlo_ir
from hlo_opt.errors import HloOptError
from hlo_opt.ir.cut import cheapest_cut
from hlo_opt.ir.prepared import prepare_function, prepared_paths, split
from hlo_opt.ir.signature import bytes_of, function_types, main_function
from hlo_opt.verify import compare, infer_inputs, verify_pipeline

F32, BF16 = jnp.float32, jnp.bfloat16
PIPELINE = "normalize,hoist-weights{parameters=params}"


def spec(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def module_of(fn: Callable[..., Any], *args: Any, **options: Any) -> ir.Module:
    return hlo_ir.parse(jax.jit(fn, **options).lower(*args).as_text(debug_info=True))


def hoisted(fn: Callable[..., Any], *args: Any, pipeline: str = PIPELINE) -> ir.Module:
    """Hoists; checks that the result computes the same and that nothing is left to hoist."""
    module = module_of(fn, *args)
    report = verify_pipeline(module, pipeline, None)
    assert report.ok, report.table()
    result = hlo_opt.apply(module, pipeline).module
    again = hlo_opt.apply(result, "hoist-weights").module
    assert str(again) == str(result)
    return result


def ops(function: ir.Operation | None) -> list[str]:
    assert function is not None
    names = (op.operation.name for op in function.regions[0].blocks[0].operations)
    return [name.removeprefix("stablehlo.") for name in names if name != "stablehlo.constant"]


def prepare_ops(module: ir.Module) -> list[str]:
    return ops(prepare_function(module))[:-1]


def main_types(module: ir.Module) -> list[str]:
    return [str(type_) for type_ in function_types(main_function(module))[0]]


X = spec(8, 64)


def test_layout_and_down_casts_move() -> None:
    def f(params: dict[str, Any], x: jax.Array) -> jax.Array:
        w = jnp.concatenate([params["q"], params["k"]], axis=1).T.astype(BF16)
        return x.astype(BF16) @ w.T

    module = hoisted(f, {"q": spec(64, 32), "k": spec(64, 16)}, X)
    assert set(prepare_ops(module)) == {"concatenate", "transpose", "convert"}
    assert main_types(module) == ["tensor<64x48xbf16>", "tensor<8x64xf32>"]
    assert prepared_paths(main_function(module)) == {0: "params['q'] + params['k']"}


def test_folded_products_move_and_broadcasts_stay() -> None:
    def f(params: dict[str, Any], x: jax.Array) -> jax.Array:
        return x * (1 + params["scale"]) + params["bias"]

    module = hoisted(f, {"scale": spec(64), "bias": spec(64)}, X)
    assert prepare_ops(module).count("add") == 1
    assert "add" in ops(main_function(module))  # the bias, to the activations
    sizes = [bytes_of(type_) for type_ in function_types(main_function(module))[0]]
    assert sizes == [256, 256, 8 * 64 * 4]


def test_up_casts_stay_and_round_trips_move() -> None:
    def f(params: dict[str, Any], x: jax.Array) -> Any:
        wide = x @ params["up"].astype(F32)
        return wide, x.astype(BF16) @ (params["round"].astype(F32) * 2).astype(BF16)

    module = hoisted(f, {"up": spec(64, 32, dtype=BF16), "round": spec(64, 32, dtype=BF16)}, X)
    assert prepare_ops(module) == ["convert", "multiply", "convert"]
    assert main_types(module)[:2] == ["tensor<64x32xbf16>"] * 2
    assert "convert" in ops(main_function(module))


def test_raw_and_transposed_is_one_argument() -> None:
    def f(params: dict[str, Any], x: jax.Array) -> jax.Array:
        return (x @ params["w"]) @ params["w"].T

    module = hoisted(f, {"w": spec(64, 64)}, X)
    assert len(main_types(module)) == 2
    assert prepare_ops(module) == []


def test_stacked_layers_become_their_slices() -> None:
    def f(params: dict[str, Any], x: jax.Array) -> jax.Array:
        for layer in range(3):
            x = jnp.tanh(x @ params["w"][layer])
        return x

    module = hoisted(f, {"w": spec(3, 64, 64)}, X)
    assert main_types(module)[:3] == ["tensor<64x64xf32>"] * 3


def test_loops_get_their_weights_unchanged() -> None:
    def f(params: dict[str, Any], x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w + params["b"]), None

        return jax.lax.scan(layer, x, params["w"])[0]

    module = hoisted(f, {"w": spec(3, 64, 64), "b": spec(64)}, X)
    assert {"tensor<3x64x64xf32>", "tensor<64xf32>"} <= set(main_types(module))


def test_places_around_other_arguments() -> None:
    def f(x: jax.Array, a: jax.Array, y: jax.Array, b: jax.Array, z: jax.Array) -> jax.Array:
        return x @ a.T + y @ b.T.astype(BF16).astype(F32) - z

    args = (X, spec(32, 64), X, spec(32, 64), spec(8, 32))
    module = hoisted(f, *args, pipeline="normalize,hoist-weights{parameters=1,3}")
    assert main_types(module) == [
        "tensor<8x64xf32>",
        "tensor<64x32xf32>",
        "tensor<64x32xbf16>",
        "tensor<8x64xf32>",
        "tensor<8x32xf32>",
    ]
    parts = split(module)
    assert parts is not None
    assert (parts.parameters, parts.first, parts.count) == ((1, 3), 1, 2)
    assert "hlo_opt" not in str(parts.prepare) + str(parts.main)


def test_unused_and_returned_parameters() -> None:
    def f(params: dict[str, Any], x: jax.Array) -> Any:
        return x + 1, params["returned"]

    module = module_of(f, {"unused": X, "returned": X}, X, keep_unused=True)
    result = hlo_opt.apply(module, PIPELINE).module
    assert prepared_paths(main_function(result)) == {0: "params['returned']"}
    assert len(function_types(prepare_function(result))[0]) == 2  # type: ignore[arg-type]


def test_random_bits_and_custom_calls_stay() -> None:
    text = """func.func @main(%w: tensor<4xf32>, %k: tensor<2xui64>)
        -> (tensor<4xf32>, tensor<4xui32>) {
      %0 = stablehlo.custom_call @f(%w) : (tensor<4xf32>) -> tensor<4xf32>
      %s, %r = stablehlo.rng_bit_generator %k, algorithm = DEFAULT
        : (tensor<2xui64>) -> (tensor<2xui64>, tensor<4xui32>)
      return %0, %r : tensor<4xf32>, tensor<4xui32>
    }
    """
    module = hlo_opt.apply(text, "hoist-weights{parameters=0-1}").module
    assert prepare_ops(module) == []
    assert ops(main_function(module)) == ["custom_call", "rng_bit_generator", "func.return"]


def test_attributes_name_parameters() -> None:
    text = """func.func @main(%x: tensor<4xf32> {tf.aliasing_output = 0 : i32},
        %w: tensor<4xf64> {hlo_opt.parameter = "tree.w"}) -> tensor<4xf32> {
      %0 = stablehlo.convert %w : (tensor<4xf64>) -> tensor<4xf32>
      %1 = stablehlo.add %x, %0 : tensor<4xf32>
      return %1 : tensor<4xf32>
    }
    """
    result = hlo_opt.apply(text, "hoist-weights")
    main = main_function(result.module)
    assert prepared_paths(main) == {1: "tree.w"}
    assert str(result.module).count("tf.aliasing_output = 0") == 1
    assert result.remarks[0].args == {"before": 32, "after": 16}


def test_partitioned_modules_pass_them_unchanged() -> None:
    module = module_of(lambda params, x: x @ params.T, spec(32, 64), X)
    text = str(module).replace("num_partitions = 1", "num_partitions = 8")
    result = hlo_opt.apply(text, "hoist-weights{parameters=0}")
    assert prepare_ops(result.module) == []
    assert [r.kind for r in result.remarks] == ["missed", "applied"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("", "no argument of 'main' is known to be a parameter"),
        ("{parameters=2}", "'main' has arguments 0 to 1"),
        ("{parameters=1-0}", "'main' has arguments 0 to 1"),
        ("{parameters=param}", "parameters=param: no argument of 'main' has that name"),
    ],
)
def test_wrong_parameters(options: str, problem: str) -> None:
    module = module_of(lambda params, x: x @ params, spec(64, 64), X)
    with pytest.raises(HloOptError, match=problem):
        hlo_opt.apply(module, f"hoist-weights{options}")


def test_donated_parameters_are_refused() -> None:
    module = module_of(lambda params, x: params + x, X, X, donate_argnums=0)
    with pytest.raises(HloOptError, match=r"params is donated"):
        hlo_opt.apply(module, "hoist-weights{parameters=0}")


def test_a_function_of_that_name_is_refused() -> None:
    text = """func.func @main(%w: tensor<4xf32>) -> tensor<4xf32> {
      return %w : tensor<4xf32>
    }
    func.func @prepare(%w: tensor<4xf32>) -> tensor<4xf32> {
      return %w : tensor<4xf32>
    }
    """
    with pytest.raises(HloOptError, match="already has a function 'prepare'"):
        hlo_opt.apply(text, "hoist-weights{parameters=0}")


def test_the_check_runs_prepare() -> None:
    """A wrong `@prepare` does not go unseen."""
    module = module_of(lambda params, x: x @ params.T, spec(32, 64), X)
    result = hlo_opt.apply(module, PIPELINE).module
    inputs = infer_inputs(module)
    assert all(output.ok for output in compare(module, result, inputs))
    prepare = prepare_function(result)
    assert prepare is not None
    last = list(prepare.regions[0].blocks[0].operations)[-1].operation
    with result.context, ir.Location.unknown(), ir.InsertionPoint(last):
        value = last.operands[0]
        last.operands[0] = ir.Operation.create("stablehlo.negate", [value.type], [value]).results[0]
    assert not all(output.ok for output in compare(module, result, inputs))


def brute_force(
    edges: dict[int, list[int]], cost: dict[int, int], sources: set[int], sinks: set[int]
) -> int:
    def separated(cut: int) -> bool:
        pending = [n for n in sources if not cut >> n & 1]
        seen = set(pending)
        while pending:
            here = pending.pop()
            if here in sinks:
                return False
            for there in edges[here]:
                if not cut >> there & 1 and there not in seen:
                    seen.add(there)
                    pending.append(there)
        return True

    cuts = (c for c in range(1 << len(cost)) if separated(c))
    return min(sum(cost[n] for n in cost if c >> n & 1) for c in cuts)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_cheapest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = 8
    edges = {a: [b for b in range(a + 1, size) if rng.random() < 0.35] for a in range(size)}
    cost = {n: int(rng.integers(1, 9)) for n in range(size)}
    sources, sinks = {0, 1, 2}, {5, 7, int(rng.integers(0, size))}
    cut = cheapest_cut(sources, sinks, edges, cost)
    assert sum(cost[n] for n in cut) == brute_force(edges, cost, sources, sinks)


def test_the_cut_is_the_one_nearest_to_the_sinks() -> None:
    edges: dict[str, list[str]] = {"a": ["b"], "b": ["c"], "c": []}
    assert cheapest_cut("a", "c", edges, {"a": 3, "b": 5, "c": 3}) == {"c"}
    assert cheapest_cut("a", "c", edges, {"a": 2, "b": 5, "c": 3}) == {"a"}


def test_prepare_runs_alone() -> None:
    module = hoisted(lambda params, x: x @ params.T, spec(32, 64), X)
    parts = split(module)
    assert parts is not None
    w = np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    np.testing.assert_array_equal(compat.run_on_cpu(parts.prepare, [w])[0], w.T)
