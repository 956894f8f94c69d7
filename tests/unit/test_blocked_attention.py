"""Blocked attention on CPU: numbers of every spelling, special values, and when it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

import hlo_opt
from hlo_opt import compat
from hlo_opt import ir as hlo_ir
from hlo_opt.kernels import blocked_attention, kernels_for
from hlo_opt.kernels.blocked_attention import _band, _block, _Program
from hlo_opt.patterns.score import AtLeast, Both, Data, Linear, Mask, NotLinear
from hlo_opt.pipeline import PassContext, run_pipeline
from hlo_opt.verify import verify_pipeline

D = 16
LOWERED = "lowered: blocked attention, blocks q={}, k={}"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that small inputs have several, and no least size."""
    monkeypatch.setattr(blocked_attention, "ROWS", 64)
    monkeypatch.setattr(blocked_attention, "KEYS", 32)
    monkeypatch.setattr(blocked_attention, "LOGITS_BYTES", 0)
    monkeypatch.setattr(blocked_attention, "SHORTEST", {})


def attention(
    *masks: Callable[..., Any],
    value: float = -1e30,
    score: Callable[[Any], Any] = lambda x: x * D**-0.5,
    probs: Callable[..., Any] = lambda p, *_: p,
    bias: Callable[..., Any] | None = None,
    additive: bool = False,
) -> Callable[..., jax.Array]:
    """Grouped-query attention, `[batch, sequence, head, depth]`, masks of positions and extras."""

    def fn(q: jax.Array, k: jax.Array, v: jax.Array, *extras: jax.Array) -> jax.Array:
        (b, s, h, d), (t, heads) = q.shape, k.shape[1:3]
        x = jnp.einsum("bqkgd,bskd->bkgqs", q.reshape(b, s, heads, h // heads, d), k)
        x = score(x.astype(jnp.float32))
        rows, columns = jnp.arange(s)[:, None], jnp.arange(t)[None, :]
        for mask in masks:
            open_ = mask(rows, columns, *extras)
            x = x + jnp.where(open_, 0.0, value) if additive else jnp.where(open_, x, value)
        if bias is not None:
            x = x + bias(rows, columns, *extras)
        p = probs(jax.nn.softmax(x, axis=-1), rows, columns).astype(v.dtype)
        out = jnp.einsum("bkgqs,bskd->bqkgd", p, v)
        return out.reshape(b, s, h, v.shape[-1])

    return fn


def arrays(
    q: Sequence[int], k: Sequence[int], v: Sequence[int] | None = None, dtype: Any = jnp.float32
) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (q, k, v or k)
    return [np.asarray(rng.standard_normal(s) * 1.5, np.float32).astype(dtype) for s in shapes]


def module_of(fn: Callable[..., Any], inputs: Sequence[Any]) -> ir.Module:
    return hlo_ir.parse(jax.jit(fn).lower(*inputs).as_text())


def lowered(module: ir.Module, pipeline: str = "inference") -> tuple[ir.Module, list[str]]:
    ctx = PassContext(target="cpu")
    result = run_pipeline(module, pipeline, ctx)
    return result, [r.message for r in ctx.remarks if r.pass_name == "lower-composites"]


def both(module: ir.Module, inputs: Sequence[Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Results before and after, of a module that must be lowered."""
    rewritten, remarks = lowered(module)
    assert [remark.split(",")[0] for remark in remarks] == ["lowered: blocked attention"]
    assert "composite" not in str(rewritten)
    before, after = (compat.run_on_cpu(m, inputs) for m in (module, rewritten))
    return list(zip(before, after, strict=True))


def holds(fn: Callable[..., Any], inputs: Sequence[Any]) -> None:
    report = verify_pipeline(module_of(fn, inputs), "inference", "cpu", inputs=inputs)
    assert report.kernels == 1
    assert report.ok, report.table()


def causal(q: Any, k: Any, *_: Any) -> Any:
    return q >= k


def window(q: Any, k: Any, *_: Any) -> Any:
    return (q >= k) & (q - k < 20)


SELF = ((2, 101, 4, D), (2, 101, 2, D))  # no divisor: the last blocks are padded


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        (SELF, jnp.float32),
        (SELF, jnp.bfloat16),
        (SELF, jnp.float16),
        (((1, 96, 2, D), (1, 96, 2, D)), jnp.float32),  # whole blocks
        (((1, 1, 2, D), (1, 77, 2, D)), jnp.float32),
        (((1, 131, 6, D), (1, 131, 1, D)), jnp.bfloat16),  # one key head; no divisor of 131
        (((1, 64, 2, D), (1, 200, 2, D), (1, 200, 2, 24)), jnp.float32),
        (((1, 200, 2, D), (1, 40, 2, D)), jnp.float32),
        (((3, 7, 1, D), (3, 5, 1, D)), jnp.float32),  # less than a block
    ],
)
def test_numbers_of_every_shape(shapes: Any, dtype: Any) -> None:
    inputs = arrays(*shapes, dtype=dtype)
    holds(attention(causal), inputs)
    holds(attention(), inputs)


SCORES = {
    "window": attention(window),
    "keys ahead": attention(lambda q, k: k >= q),
    "causal offset": attention(lambda q, k: q + 9 >= k),
    "first row sees nothing": attention(lambda q, k: q > k),
    "no row sees anything": attention(lambda q, k: q < 0),
    "last rows see nothing": attention(lambda q, k: q + k < 90),
    "two masks": attention(causal, lambda q, k: q - k < 11),
    "reopened": attention(causal, lambda q, k: k != 99, value=-3.0),
    "near value": attention(causal, value=-2.0),
    "added": attention(causal, additive=True),
    "added window": attention(window, additive=True, value=-1e9),
    "-inf": attention(causal, value=-np.inf),
    "-inf window": attention(window, value=-np.inf),
    "soft cap": attention(causal, score=lambda x: jnp.tanh(x / 5) * 5),
    "negative scale": attention(causal, score=lambda x: -x),
    "slopes": attention(causal, bias=lambda q, k: (k - q) * 0.1),
    "guard": attention(causal, probs=lambda p, q, k: jnp.where(q >= k, p, 0.0)),
    "guard of an empty row": attention(
        lambda q, k: q > k, probs=lambda p, q, k: jnp.where(q > k, p, 0.0)
    ),
    "factor": attention(causal, probs=lambda p, *_: p * 0.5),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [name for name in SCORES if name != "near value"])
def test_numbers_of_every_score(name: str) -> None:
    holds(SCORES[name], arrays(*SELF))


@pytest.mark.parametrize("name", ["near value", "soft cap"])
def test_numbers_of_scores_at_full_size(name: str) -> None:
    """Of tiles as small as above the rescaling shows where most scores are one exact constant."""
    holds(SCORES[name], arrays((1, 1024, 4, D), (1, 1024, 2, D)))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["window", "no row sees anything", "soft cap", "guard"])
def test_numbers_of_scores_in_bf16(name: str) -> None:
    holds(SCORES[name], arrays(*SELF, dtype=jnp.bfloat16))


RNG = np.random.default_rng(1)
OPEN = RNG.random((2, 101)) < 0.7
LATE = np.arange(101)[None, :] >= np.array([[60], [0]])  # padded in front: early rows see nothing
BIAS = RNG.standard_normal((101, 101)).astype(np.float32)
SLOPES = RNG.standard_normal(4).astype(np.float32)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("fn", "extra"),
    [
        (attention(lambda q, k, m: m[:, None, None, None, :]), OPEN),
        (attention(lambda q, k, m: m[:, None, None, None, :] & (q >= k)), OPEN),
        (attention(lambda q, k, m: m[:, None, None, None, :] & (q >= k)), LATE),
        (attention(causal, lambda q, k, m: m[:, None, None, None, :]), LATE),
        (attention(lambda q, k, m: m[:, None, None, :, None] & (q >= k)), OPEN),
        (attention(causal, bias=lambda q, k, b: b), BIAS),
        (attention(causal, bias=lambda q, k, b: b.astype(jnp.float32)), BIAS.astype(jnp.bfloat16)),
        (attention(bias=lambda q, k, b: b[:, :1]), BIAS),
        (attention(bias=lambda q, k, b: b.reshape(2, 2, 1, 1) * (k - q)), SLOPES),
        (attention(lambda q, k, n: k <= q + n), np.int32(7)),
        (attention(lambda q, k, n: k <= q + n), np.int32(-7)),
    ],
)
def test_numbers_of_extras(fn: Callable[..., Any], extra: Any) -> None:
    holds(fn, [*arrays(*SELF), extra])


@pytest.mark.usefixtures("small")
def test_numbers_of_other_layouts() -> None:
    def heads_first(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        x = jnp.where(jnp.tri(90, dtype=bool), jnp.einsum("abhqd,abhdk->abhqk", q, k), -1e9)
        return jnp.einsum("abhqk,abkhd->qabhd", jax.nn.softmax(x, axis=-1), v)

    def one_head(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.softmax(q @ k.T, axis=-1) @ v

    holds(heads_first, arrays((2, 3, 2, 90, D), (2, 3, 2, D, 90), (2, 3, 90, 2, 8)))
    holds(one_head, arrays((70, D), (50, D)))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("value", [-np.inf, -1e30, -1e9])
def test_rows_that_see_nothing(value: float) -> None:
    inputs = [*arrays(*SELF), LATE]
    fn = attention(lambda q, k, m: m[:, None, None, None, :] & (q >= k), value=value)
    ((before, after),) = both(module_of(fn, inputs), inputs)
    np.testing.assert_allclose(after, before, rtol=2e-5, atol=2e-6)  # and NaN in the same places
    assert np.isnan(before[0, :60]).all() == (value == -np.inf)
    assert not np.isnan(before[0, 60:]).any()
    if value != -np.inf:
        mean = np.repeat(inputs[2][0].mean(axis=0), 2, axis=0)
        np.testing.assert_allclose(after[0, :60], np.broadcast_to(mean, (60, 4, D)), atol=1e-5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["window", "-inf", "near value", "first row sees nothing"])
def test_special_values_leak_as_in_the_original(name: str, special: float) -> None:
    inputs = arrays((9, 101, 4, D), (9, 101, 2, D))
    for sequence in range(9):  # another operand and place in each
        inputs[sequence % 3][sequence, (0, 50, 99)[sequence // 3], 0, 3] = special
    ((before, after),) = both(module_of(SCORES[name], inputs), inputs)
    for values in range(2, 9, 3):  # a probability of zero does not hide a value
        assert not np.isfinite(before[values, :, 0, 3]).any()
    assert np.isfinite(before[:, :, 2:]).all()
    np.testing.assert_allclose(after, before, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("small")
def test_special_keys_that_are_masked_do_not_leak() -> None:
    inputs = [*arrays(*SELF), OPEN]
    inputs[1][~OPEN] = np.nan
    fn = attention(lambda q, k, m: m[:, None, None, None, :])
    ((before, after),) = both(module_of(fn, inputs), inputs)
    assert np.isfinite(before).all()
    np.testing.assert_allclose(after, before, rtol=2e-5, atol=2e-6)


# Composites by hand: [batch, query, head, depth] and [batch, key, head, depth], no groups.

HEADS, QUERIES, KEYS = 2, 70, 50
ATTRIBUTES = """
  roles = {{kv_head = {h}, query = {q}, key = {k}, depth = {d}, value_depth = {d}}},
  q_dims = ["query", "kv_head", "depth"], k_dims = ["key", "kv_head", "depth"],
  v_dims = ["key", "kv_head", "value_depth"], out_dims = ["query", "kv_head", "value_depth"],
  extra_dims = {extra_dims}, score = @score,
  qk_precision = ["DEFAULT", "DEFAULT"], pv_precision = ["DEFAULT", "DEFAULT"],
  qk_type = f32, logits_type = f32, softmax_type = f32, probs_type = f32"""
SCORE = """
func.func private @score(%x: tensor<f32>{extra}, %b: tensor<i32>, %h: tensor<i32>,
    %q: tensor<i32>, %k: tensor<i32>) -> tensor<f32> {{
  %low = stablehlo.constant dense<{low}> : tensor<f32>
  %open = stablehlo.compare GE, %q, %k : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %y = stablehlo.select %open, %x, %low : tensor<i1>, tensor<f32>
  return %y : tensor<f32>
}}"""
SINK = """
func.func private @sink(%x: tensor<f32>, %s: tensor<f32>, %b: tensor<i32>, %h: tensor<i32>,
    %q: tensor<i32>, %k: tensor<i32>) -> tensor<f32> { return %s : tensor<f32> }"""


def composite(
    decomposition: Callable[..., Any],
    inputs: Sequence[np.ndarray],
    attributes: str,
    low: str = "-1.0e+30",
    functions: str = "",
) -> ir.Module:
    """A module that is one attention composite."""
    text = jax.jit(decomposition).lower(*inputs).as_text(debug_info=False)
    module = hlo_ir.parse(text)
    main = next(iter(module.body.operations)).operation
    types = str(ir.TypeAttr(main.attributes["function_type"]).value)
    results = types.split(" -> ")[1].strip("()").split(", ")
    dims = '[["kv_head"]]' if len(inputs) > 3 else "[]"
    common = ATTRIBUTES.format(h=HEADS, q=QUERIES, k=KEYS, d=D, extra_dims=dims)
    names = [f"%arg{n}" for n in range(len(inputs))]
    given = types.split(" -> ")[0].strip("()").split(", ")
    arguments = ", ".join(f"{n}: {t}" for n, t in zip(names, given, strict=True))
    returned = [f"%0#{n}" for n in range(len(results))] if len(results) > 1 else ["%0"]
    bodies = text[text.index("func.func") : text.rindex("}")]
    bodies = bodies.replace("func.func public @main", "func.func private @decomposition")
    score = SCORE.format(extra=", %s: tensor<f32>" if len(inputs) > 3 else "", low=low)
    return hlo_ir.parse(f"""
func.func public @main({arguments}) -> ({", ".join(results)}) {{
  %0{f":{len(results)}" if len(results) > 1 else ""} = stablehlo.composite "hlo_opt.attention"
    {", ".join(names)} {{composite_attributes = {{{common}{attributes}}},
    decomposition = @decomposition, version = 1 : i32}} : {types}
  return {", ".join(returned)} : {", ".join(results)}
}}
{bodies}{score}{functions}""")


def masked(q: jax.Array, k: jax.Array, low: float) -> jax.Array:
    x = jnp.einsum("qhd,khd->hqk", q, k)
    return jnp.where(jnp.arange(QUERIES)[:, None] >= jnp.arange(KEYS)[None, :], x, low)


def with_sink(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    x = masked(q, k, -1e30)
    sink = jnp.broadcast_to(sinks[:, None, None], (HEADS, QUERIES, 1))
    p = jax.nn.softmax(jnp.concatenate([x, sink], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("hqk,khd->qhd", p, v)


def hand_made() -> list[np.ndarray]:
    return arrays((QUERIES, HEADS, D), (KEYS, HEADS, D))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("sinks", [[0.3, 9.0], [-np.inf, 2.0], [-1e30, np.nan], [np.inf, -3.0]])
def test_a_sink_is_one_more_logit(sinks: list[float]) -> None:
    inputs = [*hand_made(), np.array(sinks, np.float32)]
    module = composite(with_sink, inputs, ", sink = @sink", functions=SINK)
    ((before, after),) = both(module, inputs)
    np.testing.assert_allclose(after, before, rtol=2e-5, atol=2e-6)
    without, _ = lowered(composite(with_sink, inputs, ""))
    (other,) = compat.run_on_cpu(without, inputs)
    assert not np.allclose(other, before, equal_nan=True)


def statistics(low: float) -> Callable[..., Any]:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        x = masked(q, k, low)
        top = jnp.max(x, axis=-1)
        p = jnp.exp(x - top[..., None])
        return jnp.einsum("hqk,khd->qhd", p, v), top, p.sum(axis=-1).T[..., None]

    return fn


STATISTICS = ', max_dims = ["kv_head", "query"], sum_dims = ["query", "kv_head", "1"]'


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("low", ["-1.0e+30", "-2.0", "0xFF800000"])
def test_statistics_are_results(low: str) -> None:
    value = -np.inf if low.startswith("0x") else float(low)
    inputs = hand_made()
    results = both(composite(statistics(value), inputs, STATISTICS, low), inputs)
    assert [after.shape for _, after in results] == [(70, 2, D), (2, 70), (70, 2, 1)]
    for before, after in results:
        np.testing.assert_allclose(after, before, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("small")
def test_statistics_of_rows_of_minus_infinity() -> None:
    inputs = hand_made()
    inputs[1][0] = -np.inf  # the only key that row 0 sees
    inputs[0] = np.abs(inputs[0])
    results = both(composite(statistics(-np.inf), inputs, STATISTICS, "0xFF800000"), inputs)
    assert np.isnan(results[0][0][0]).all()
    assert (results[1][0][:, 0] == -np.inf).all()
    for before, after in results:
        np.testing.assert_allclose(after, before, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        (', max_dims = ["kv_head", "query"]', "or one of them only"),
        ("", "the composite has results of types"),
        (STATISTICS.replace("query", "key"), "max_dims or sum_dims do not describe"),
        (STATISTICS + ", probs = @score", "has statistics and also probs or a sink"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(attributes: str, reason: str) -> None:
    module, remarks = lowered(composite(statistics(-1e30), hand_made(), attributes))
    assert "composite" in str(module)
    assert reason in remarks[0]


# When it is chosen.


@pytest.mark.parametrize(
    ("q", "k", "reason"),
    [
        ((1, 1024, 8, D), (1, 1024, 8, D), ""),
        ((1, 1024, 2, D), (1, 1024, 2, D), "logits of 8 MB, less than 16 MB"),
        ((64, 256, 8, D), (64, 256, 8, D), "256 key positions, fewer than 512"),
        ((16, 64, 8, D), (16, 2048, 8, D), "64 query positions, fewer than 256"),
    ],
)
def test_small_attentions_keep_their_decomposition(q: Any, k: Any, reason: str) -> None:
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q, k, k)]
    module, remarks = lowered(module_of(attention(causal), inputs))
    expected = f"decomposition kept: blocked attention: {reason}"
    assert remarks == ([expected] if reason else [LOWERED.format(512, 512)])
    assert ("stablehlo.composite" in str(module)) == bool(reason)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (attention(probs=lambda p, *_: p + 0.5), "not a multiple of them"),
        (attention(probs=lambda p, *_: jnp.sqrt(p)), "not a multiple of them"),
        (
            attention(causal, value=-np.inf, probs=lambda p, q, k: jnp.where(q >= k, p, 0.0)),
            "probabilities that may be NaN",
        ),
    ],
)
def test_refusals(fn: Callable[..., Any], reason: str) -> None:
    module, remarks = lowered(module_of(fn, arrays(*SELF)))
    assert "stablehlo.composite" in str(module)
    assert reason in remarks[0]


@pytest.mark.usefixtures("small")
def test_64_bit_operands_are_refused() -> None:
    with jax.enable_x64(True):
        inputs = [*arrays(*SELF), np.ones((2, 101), np.int64)]
        fn = attention(lambda q, k, m: m[:, None, None, None, :] + q >= k)
        module, remarks = lowered(module_of(fn, inputs))
    assert "stablehlo.composite" in str(module)
    assert "an operand or result of 64 bits" in remarks[0]


@pytest.mark.parametrize(
    ("band", "visited"),
    [
        ((None, None), [(0, 4), (0, 4), (0, 4)]),
        ((None, 0), [(0, 1), (0, 2), (0, 3)]),
        ((None, -1), [(0, 1), (0, 2), (0, 2)]),  # row 80 sees key 79, the last of block 1
        ((5, 0), [(0, 1), (0, 2), (1, 3)]),
        ((None, -30), [(0, 0), (0, 1), (0, 2)]),
        ((-90, None), [(2, 4), (2, 4), (3, 4)]),
        ((None, 900), [(0, 4)] * 3),
        ((-900, None), [(4, 4)] * 3),
    ],
)
def test_blocks_that_are_visited(band: Any, visited: list[tuple[int, int]]) -> None:
    program = object.__new__(_Program)
    program.sizes, program.blocks, program.band = (27, 40), (3, 4), band
    for i, expected in enumerate(visited):
        low, high = program._visited(jnp.int32(i))
        assert (int(low), int(high)) == expected


def test_kernels_are_of_their_platform() -> None:
    names = [kernel.name for kernel in kernels_for("hlo_opt.attention", "cpu")]
    assert names == ["blocked attention"]
    assert not kernels_for("hlo_opt.attention", "gpu")
    tpu = [kernel.name for kernel in kernels_for("hlo_opt.attention", "tpu")]
    assert set(names).isdisjoint(tpu)


@pytest.mark.usefixtures("small")
def test_partitioned_modules_are_left_alone() -> None:
    text = str(module_of(attention(), arrays(*SELF)))
    several = text.replace("num_partitions = 1", "num_partitions = 8")
    assert several != text
    module, remarks = lowered(hlo_ir.parse(several))
    assert "stablehlo.composite" in str(module)
    assert "partitioned over several devices" in remarks[0]


@pytest.mark.usefixtures("small")
def test_lowering_twice_changes_nothing() -> None:
    module, _ = lowered(module_of(attention(causal), arrays(*SELF)))
    again, remarks = lowered(module)
    assert str(again) == str(module)
    assert remarks == []


def test_equal_layers_share_one_function() -> None:
    def layers(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(4):
            q = jnp.tanh(attention(causal)(q, k, v))
        return q

    inputs = [jax.ShapeDtypeStruct((1, 1024, 8, D), jnp.float32)] * 3
    module, remarks = lowered(module_of(layers, inputs))
    assert remarks == [LOWERED.format(512, 512)] * 4
    assert str(module).count("func.func") == 2


def test_blocks_cover_the_length_and_are_equal() -> None:
    assert _block(4096, 512) == 512
    assert _block(1000, 512) == 500
    assert _block(513, 512) == 272  # two blocks, of which the second is padded
    assert _block(5, 512) == 5


BEHIND = AtLeast((("key", -1), ("query", 1)), 0)
NEAR = AtLeast((("key", 1), ("query", -1)), 19)


@pytest.mark.parametrize(
    ("masks", "band"),
    [
        ([Mask(BEHIND, -1e30, False)], (None, 0)),
        ([Mask(BEHIND, -1e30, True)], (None, 0)),
        ([Mask(Both((BEHIND, NEAR, Data())), -1e30, False)], (19, 0)),
        ([Mask(NEAR, -1e9, False), Mask(BEHIND, -1e9, False)], (19, 0)),
        ([Mask(BEHIND, -10.0, False)], (None, None)),  # closed keys weigh something
        ([Mask(BEHIND, -1e30, False), Mask(Data(), -10.0, False)], (None, None)),  # reopened
        ([Mask(BEHIND, -1e30, False), Mask(Data(), 1e30, True)], (None, None)),
        ([Mask(BEHIND, -1e30, False), Mask(Data(), -10.0, True)], (None, 0)),
        ([Mask(Data(), -1e30, False)], (None, None)),
    ],
)
def test_only_keys_closed_for_good_are_skipped(masks: list[Mask], band: Any) -> None:
    assert _band(Linear(1.0, masks=tuple(masks))) == band
    assert _band(Linear(1.0, bias=True, masks=tuple(masks))) == (None, None)
    assert _band(NotLinear("a soft cap")) == (None, None)


def test_jit_needs_less_memory_at_4096() -> None:
    fn = attention(causal)
    inputs = arrays((1, 4096, 2, 32), (1, 4096, 2, 32))
    ours = hlo_opt.jit(fn)
    plain, better = (f.lower(*inputs).compile() for f in (jax.jit(fn), ours))
    logits = 2 * 4096 * 4096 * 4
    assert plain.memory_analysis().temp_size_in_bytes >= logits
    assert better.memory_analysis().temp_size_in_bytes < logits / 10
    np.testing.assert_allclose(ours(*inputs), jax.jit(fn)(*inputs), rtol=1e-4, atol=1e-5)
    assert [r.message for r in ours.remarks][-1] == LOWERED.format(512, 512)


def test_gradients_under_jit_hold() -> None:
    fn = attention(causal)
    inputs = arrays((1, 1024, 4, D), (1, 1024, 4, D))
    jitted = hlo_opt.jit(fn)
    gradients = [jax.grad(lambda q, f=f: f(q, *inputs[1:]).sum())(inputs[0]) for f in (jitted, fn)]
    np.testing.assert_allclose(*gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("length", [2048, 8192])
def test_numbers_of_long_sequences(length: int, dtype: Any) -> None:
    holds(attention(causal), arrays((1, length, 2, 64), (1, length, 1, 64), dtype=dtype))
