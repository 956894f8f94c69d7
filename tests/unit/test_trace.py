"""JAX functions in our modules, and scalar functions on arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo_opt import compat
from hlo_opt import ir as hlo_ir
from hlo_opt.errors import HloOptError
from hlo_opt.ir.signature import ArrayType
from hlo_opt.ir.walk import functions, symbol_name
from hlo_opt.trace import evaluate, lower_function, splice

F4 = ArrayType((4,), np.dtype("float32"))
CALLER = """func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  return %a : tensor<4xf32>
}
func.func private @kernel() { return }
"""


def test_splice_adds_one_private_function_under_a_free_name() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.nn.relu(x) + jax.jit(jnp.sin)(x)  # both become calls of helpers

    module = hlo_ir.parse(CALLER)
    name = splice(module, lower_function(fn, [F4], platform="cpu"), "kernel")
    assert name == "kernel_1"
    assert [symbol_name(f) for f in functions(module)] == ["main", "kernel", "kernel_1"]
    module.operation.verify()
    text = str(module)
    called = text.replace(
        "return %arg0 : tensor<4xf32>\n  }\n  func.func private @kernel()",
        "%r = call @kernel_1(%arg0) : (tensor<4xf32>) -> tensor<4xf32>\n"
        "    return %r : tensor<4xf32>\n  }\n  func.func private @kernel()",
    )
    assert called != text
    x = np.linspace(-1, 1, 4, dtype=np.float32)
    (out,) = compat.run_on_cpu(hlo_ir.parse(called), [x])
    np.testing.assert_allclose(out, np.maximum(x, 0) + np.sin(x), rtol=1e-6)


def test_the_session_s_settings_do_not_leak_in() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return (x[:, None] @ x[None, :])[0] + jnp.arange(4)

    def text(precision: str = "default") -> str:
        return str(hlo_ir.parse(lower_function(fn, [F4], platform="cpu", precision=precision)))

    plain = text()
    with jax.default_matmul_precision("highest"), jax.enable_x64(True):
        assert text() == plain
    assert "HIGHEST" not in plain
    assert text("highest").count("HIGHEST") == 2


UNARY = {
    "abs": np.abs,
    "cosine": np.cos,
    "exponential": np.exp,
    "floor": np.floor,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "negate": np.negative,
    "sign": np.sign,
    "tanh": np.tanh,
}


@pytest.mark.parametrize("name", UNARY)
def test_unary_ops(name: str) -> None:
    text = f"""func.func @f(%x: tensor<f32>) -> tensor<f32> {{
      %0 = stablehlo.{name} %x : tensor<f32>
      return %0 : tensor<f32>
    }}"""
    module = hlo_ir.parse(text)
    x = np.linspace(-3, 3, 13, dtype=np.float32)
    (function,) = functions(module)
    np.testing.assert_allclose(evaluate(function, x), UNARY[name](x), rtol=1e-5, atol=1e-6)


def test_arguments_broadcast_together() -> None:
    module = hlo_ir.parse("""
    func.func @f(%x: tensor<f32>, %q: tensor<i32>, %k: tensor<i32>) -> tensor<f32> {
      %low = stablehlo.constant dense<-1.0> : tensor<f32>
      %m = stablehlo.compare GE, %q, %k, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %r = stablehlo.select %m, %x, %low : tensor<i1>, tensor<f32>
      return %r : tensor<f32>
    }""")
    (function,) = functions(module)
    q, k = jnp.arange(3)[:, None], jnp.arange(4)[None, :]
    out = evaluate(function, jnp.ones((3, 4)), q, k)
    np.testing.assert_array_equal(out, np.where(np.arange(3)[:, None] >= np.arange(4), 1.0, -1.0))


def test_integer_division_rounds_towards_zero() -> None:
    module = hlo_ir.parse("""
    func.func @f(%a: tensor<i32>, %b: tensor<i32>) -> tensor<i32> {
      %0 = stablehlo.divide %a, %b : tensor<i32>
      %1 = stablehlo.remainder %a, %b : tensor<i32>
      %2 = stablehlo.multiply %0, %b : tensor<i32>
      %3 = stablehlo.subtract %2, %1 : tensor<i32>
      return %3 : tensor<i32>
    }""")
    (function,) = functions(module)
    a, b = np.array([-7, 7, -6], np.int32), np.int32(4)
    np.testing.assert_array_equal(evaluate(function, a, b), [-4 + 3, 4 - 3, -4 + 2])


def test_unknown_ops_are_named() -> None:
    module = hlo_ir.parse("""
    func.func @f(%a: tensor<f32>) -> tensor<f32> {
      %0 = stablehlo.tan %a : tensor<f32>
      return %0 : tensor<f32>
    }""")
    (function,) = functions(module)
    with pytest.raises(HloOptError, match=r"stablehlo.tan cannot be evaluated"):
        evaluate(function, jnp.float32(1))
