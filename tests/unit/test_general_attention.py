"""Our own attention kernel: its numbers for every shape, score and mask, and what it skips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from meaning import by_attributes, composites

from hlo_opt import compat
from hlo_opt import ir as hlo_ir
from hlo_opt.ir.signature import ArrayType
from hlo_opt.kernels import No
from hlo_opt.kernels.attention import AttentionSpec, arrange
from hlo_opt.kernels.general_attention import FIRST, GeneralAttention, Program
from hlo_opt.kernels.mask import CLOSED, MIXED, OPEN
from hlo_opt.passes import lower_composites
from hlo_opt.pipeline import PassContext, run_pipeline
from hlo_opt.targets import get_target
from hlo_opt.verify import FACTOR, Report, verify_pipeline

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
Array = jax.Array


def shapes(
    *,
    b: int = 1,
    q: int = 256,
    k: int | None = None,
    heads: int = 4,
    kv: int = 2,
    d: int = 64,
    dv: int | None = None,
    dtype: Any = F32,
) -> tuple[jax.ShapeDtypeStruct, ...]:
    sizes = ((b, q, heads, d), (b, k or q, kv, d), (b, k or q, kv, dv or d))
    return tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes)


def attention(
    mask: Callable[..., Any] | None = None,
    *,
    value: Any = -1e30,
    score: Callable[..., Any] = lambda x, *_: x,
    probs: Callable[..., Any] = lambda p, *_: p,
) -> Callable[..., Array]:
    """`[batch, position, head, depth]`; functions get `query, key, *extras` behind the value."""

    def fn(q: Array, k: Array, v: Array, *extras: Array) -> Array:
        b, s, h, d = q.shape
        kv = k.shape[2]
        x = jnp.einsum("bqkgd,bskd->bkgqs", q.reshape(b, s, kv, h // kv, d), k)
        positions = (jnp.arange(s)[:, None], jnp.arange(k.shape[1])[None])
        x = score(x.astype(F32) * d**-0.5, *positions, *extras)
        if mask is not None:
            x = jnp.where(mask(*positions, *extras), x, value)
        p = probs(jax.nn.softmax(x, axis=-1), *positions, *extras).astype(v.dtype)
        return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(b, s, h, v.shape[-1])

    return fn


def causal(q: Any, k: Any, *_: Any) -> Any:
    return q >= k


def window(q: Any, k: Any, *_: Any) -> Any:
    return (q >= k) & (q - k < 300)


def module_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> ir.Module:
    return hlo_ir.parse(jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text())


def spec_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> AttentionSpec:
    module = run_pipeline(module_of(fn, args), "raise", PassContext())
    (op,) = composites(module, "hlo_opt.attention")
    spec = GeneralAttention().spec(op, module)
    assert isinstance(spec, AttentionSpec)
    return spec


def verify(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    target: str = "v5e",
    ending: str = "",
    **options: Any,
) -> Report:
    """Checks the rule; our kernel must have run, with a label of that ending."""
    module = module_of(fn, args)
    ctx = PassContext(target=target, interpret=True)
    run_pipeline(module, "inference", ctx)
    said = [r.message for r in ctx.remarks if r.pass_name == "lower-composites"]
    assert all(m.startswith("lowered: Pallas general attention") for m in said), said
    assert all(m.endswith(ending) for m in said), said
    report = verify_pipeline(module, "inference", target, **options)
    assert not report.failures
    for out in report.outputs:  # the largest error is luck: CPUs sum in another order
        assert not out.problem
        assert out.after_rms <= FACTOR * out.before_rms + out.ulp, report.table()
        assert out.after_max <= 3 * out.before_max + out.ulp, report.table()
    return report


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"q": 77, "k": 130, "d": 80},
        {"q": 1, "k": 300, "heads": 8},
        {"q": 1300, "heads": 8, "kv": 2},
        {"q": 1025, "kv": 4, "d": 96},
        {"q": 384, "d": 192, "dv": 128},
        {"q": 200, "d": 256, "b": 2, "heads": 6, "kv": 1},
    ],
    ids=str,
)
def test_numbers_of_every_shape(sizes: dict[str, int], dtype: Any) -> None:
    verify(attention(lambda q, k: q + 3 >= k), shapes(**sizes, dtype=dtype))


LONG = {"q": 2100, "heads": 2, "kv": 2}
MASKS: dict[str, Callable[..., Any]] = {
    "full": lambda q, k: q >= -k,
    "causal": causal,
    "window": window,
    "near": lambda q, k: (q - k < 40) & (k - q < 40),
    "chunks": lambda q, k: (q >= k) & (q // 1024 == k // 1024),
    "prefix": lambda q, k: (q >= k) | (k < 200),
    "every other": lambda q, k: (q >= k) & ((q - k) % 2 == 0),
    "reversed": lambda q, k: q <= k,
    "nothing in the end": lambda q, k: (q >= k) & (q < 1500),
    "bidirectional window": lambda q, k: jnp.abs(q - k) < 100,
}


@pytest.mark.slow
@pytest.mark.parametrize("value", [-1e30, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("name", MASKS)
def test_numbers_of_every_mask(name: str, value: float) -> None:
    verify(attention(MASKS[name], value=value), shapes(**LONG))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MASKS) - {"nothing in the end"}))
def test_masks_of_minus_infinity(name: str) -> None:
    verify(attention(MASKS[name], value=-jnp.inf), shapes(**LONG))


def test_rows_without_a_key_are_nan_where_they_were() -> None:
    fn = attention(MASKS["nothing in the end"], value=-jnp.inf)
    args = [jnp.asarray(x, F32) for x in _arrays(shapes(**LONG))]
    out = _kernel(fn, args)
    assert np.isfinite(out[:, :1500]).all()
    assert np.isnan(out[:, 1500:]).all()


def test_skipped_tiles() -> None:
    args = shapes(q=4096, heads=1, kv=1)

    def states(name: str) -> list[list[int]]:
        program = Program(spec_of(attention(MASKS[name]), args), 1024, 1024, 16)
        steps = program._steps([])
        table = np.full((4, 4), CLOSED)
        table[steps.query, steps.key[0]] = steps.state[0] % FIRST
        return table.tolist()

    o, m, c = OPEN, MIXED, CLOSED
    assert states("causal") == [[m, c, c, c], [o, m, c, c], [o, o, m, c], [o, o, o, m]]
    assert states("window") == [[m, c, c, c], [m, m, c, c], [c, m, m, c], [c, c, m, m]]
    assert states("chunks") == [[m, c, c, c], [c, m, c, c], [c, c, m, c], [c, c, c, m]]
    assert states("prefix") == [[m, c, c, c], [o, m, c, c], [o, o, m, c], [o, o, o, m]]
    assert states("full") == [[o] * 4] * 4
    # Rows that see nothing average all values, so nothing may be skipped.
    assert c not in np.ravel(states("nothing in the end"))


def _arrays(args: tuple[Any, ...], seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(a.shape).astype(a.dtype) for a in args]


def _kernel(fn: Callable[..., Any], args: list[Any]) -> np.ndarray:
    """Runs the rewritten function, interpreted."""
    from hlo_opt.verify.compare import run

    specs = tuple(jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for a in args)
    ctx = PassContext(target="v5e", interpret=True)
    module = run_pipeline(module_of(fn, specs), "inference", ctx)
    assert any("general attention" in r.message for r in ctx.remarks)
    return run(module, [np.asarray(a) for a in args])[0].astype(np.float32)


SCORES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "soft cap": (attention(causal, score=lambda x, *_: 20 * jnp.tanh(x / 20)), ()),
    "soft cap and window": (attention(window, score=lambda x, *_: 5 * jnp.tanh(x / 5)), ()),
    "bias": (
        attention(score=lambda x, q, k, b: x + b),
        (jax.ShapeDtypeStruct((2, 1, 1100, 1100), F32),),
    ),
    "slopes": (
        attention(causal, score=lambda x, q, k, s: x + s[:, :, None, None] * (k - q)),
        (jax.ShapeDtypeStruct((2, 2), F32),),
    ),
    "padding": (
        attention(lambda q, k, m: (q >= k) & m[:, None, None, None]),
        (jax.ShapeDtypeStruct((1, 1100), jnp.bool_),),
    ),
    "segments": (
        attention(lambda q, k, s: (q >= k) & (s[:, None, None, :, None] == s[:, None, None, None])),
        (jax.ShapeDtypeStruct((1, 1100), jnp.int32),),
    ),
    "mask": (
        attention(lambda q, k, m: m[:, None, None]),
        (jax.ShapeDtypeStruct((1, 1100, 1100), jnp.bool_),),
    ),
    "negative scale": (attention(causal, score=lambda x, *_: -x), ()),
    "0 and 1 multiplied": (attention(score=lambda x, q, k: x * (q >= k)), ()),
    "guards": (attention(causal, probs=lambda p, q, k: jnp.where(k < 700, p, 0)), ()),
    "factors": (
        attention(causal, probs=lambda p, q, k, f: p * f[:, :, None, None]),
        (jax.ShapeDtypeStruct((2, 2), F32),),
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_numbers_of_every_score(name: str) -> None:
    fn, extras = SCORES[name]
    verify(fn, (*shapes(q=1100), *extras))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", SCORES)
def test_numbers_of_every_score_in_rows(name: str, dtype: Any) -> None:
    """Arguments `[batch, position, head, depth]` whose heads fill sublanes are not transposed."""
    fn, extras = SCORES[name]
    verify(fn, (*shapes(q=1100, d=128, dtype=dtype), *extras), ending=" 2 heads")


@pytest.mark.parametrize("target", ["v5e", "v5p"])
@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        ({"q": 700, "heads": 16, "kv": 16}, 8),
        ({"q": 640, "heads": 32, "kv": 8, "b": 2}, 8),
        ({"q": 3, "k": 1500, "heads": 8, "kv": 8, "b": 2}, 8),
        ({"q": 1100, "k": 1300, "heads": 4, "kv": 4, "d": 64, "dv": 128}, 4),
        ({"q": 1500, "heads": 8, "kv": 2}, 2),
    ],
    ids=str,
)
def test_numbers_of_shapes_in_rows(sizes: dict[str, int], held: int, target: str) -> None:
    args = shapes(**{"d": 128, **sizes}, dtype=BF16)
    verify(attention(causal), args, target=target, ending=f" {held} heads")


def test_rows_are_taken_as_they_lie_in_memory_only() -> None:
    """Not where XLA has them in another order, or can transpose while it converts or computes."""

    def in_rows(fn: Callable[..., Any], **sizes: Any) -> set[str]:
        spec = spec_of(fn, shapes(**{"q": 1500, "d": 128, "dtype": BF16, **sizes}))
        (candidate,) = GeneralAttention().candidates(spec, get_target("v6e"))
        return {*dict(candidate.config).get("in_rows", ())}

    plain = attention(causal)
    everything = {"q", "k", "v", "out"}
    assert in_rows(plain) == everything
    assert in_rows(plain, heads=6, kv=3) == set()
    assert in_rows(plain, d=64) == set()
    assert in_rows(plain, d=64, dv=128) == {"v", "out"}
    assert in_rows(plain, dtype=F16) == set()
    assert in_rows(lambda q, k, v: plain(q, 2 * k, v)) == everything - {"k"}
    assert in_rows(lambda q, k, v: 2 * plain(q, k, v)) == everything - {"out"}
    assert in_rows(lambda q, k, v: plain(q, k[:, ::-1], v)) == everything - {"k"}

    def moved(q: Array, k: Array, v: Array) -> Array:
        return jnp.swapaxes(plain(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v))), 1, 2)

    assert not spec_of(moved, shapes(q=2, heads=1500, kv=1500, d=128, dtype=BF16)).in_rows


@pytest.mark.parametrize("length", [0, 1, 700, 1024, 3000])
def test_tiles_behind_a_traced_length_are_skipped(length: int) -> None:
    """NaN in the values shows what is read; with no key at all everything must be."""
    fn = attention(lambda q, k, n: k < n)
    args = _arrays(shapes(q=300, k=3072))
    for at in range(3):
        extra = [*args, np.int32(length)]
        extra[2] = extra[2].copy()
        extra[2][:, at * 1024 : (at + 1) * 1024] = np.nan
        read = length == 0 or at * 1024 < length
        assert np.isnan(_kernel(fn, extra)).all() == read, at


def test_a_mask_from_data_that_closes_rows_keeps_every_tile() -> None:
    fn = attention(lambda q, k, m: (q >= k) & m[:, None, None, None], value=-1e9)
    *args, _ = (*_arrays(shapes(q=2048, b=2)), None)
    mask = np.ones((2, 2048), bool)
    mask[1, :100] = False  # padding on the left: those rows see nothing
    verify(fn, (*shapes(q=2048, b=2), jax.ShapeDtypeStruct(mask.shape, bool)), inputs=[*args, mask])


def test_a_mask_that_depends_on_the_logit_skips_nothing() -> None:
    def fn(q: Array, k: Array, v: Array) -> Array:
        x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        open_ = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
        x = jnp.where(open_ & (x > 0), x, -1e30)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x, axis=-1), v)

    args = shapes(q=2048, heads=1, kv=1)
    assert not (
        np.asarray(Program(spec_of(fn, args), 1024, 1024, 16)._steps([]).state) % FIRST == 0
    ).any()
    verify(fn, args)


SINK = """func.func private @f(%l: tensor<f32>, %s: tensor<f32>, %b: tensor<i32>, %h: tensor<i32>,
    %q: tensor<i32>, %k: tensor<i32>) -> tensor<f32> { return %s : tensor<f32> }"""


def _ran(program: Program, args: list[Any]) -> Any:
    with compat.tracing("TPU v5 lite", "highest", True):
        return jax.jit(program.run)(*args)


@pytest.mark.parametrize("blocks", [(256, 1100), (1100, 512)])
@pytest.mark.parametrize("level", [0.0, 3.0, -1e30, -np.inf])
def test_sinks(level: float, blocks: tuple[int, int]) -> None:
    fn = attention(causal, score=lambda x, q, k, s: x + 0 * s[:, :, None, None])
    args = (*shapes(q=1100), jax.ShapeDtypeStruct((2, 2), F32))
    spec = replace(spec_of(fn, args), sink=SINK)
    arrays = _arrays(args)
    arrays[3] = np.full_like(arrays[3], level) + np.arange(4, dtype=np.float32).reshape(2, 2)
    keep = [a for a in arrays]
    # The score adds zero times the sink, which is NaN for an infinite one.
    spec = replace(spec, score=SINK.replace("return %s", "return %l"))
    arranged = _composite_order(spec, keep)
    got = _ran(Program(spec, *blocks, 16), arranged)
    (wanted,) = by_attributes(spec, arranged)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=3e-5)


def _composite_order(spec: AttentionSpec, arrays: list[Any]) -> list[Any]:
    """Operands of the function reshaped to those of the composite."""
    return [
        jnp.asarray(a).reshape(t.shape) if a.size == np.prod(t.shape) else jnp.asarray(a)
        for a, t in zip(arrays, spec.arguments, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_statistics_fit_each_other(dtype: str) -> None:
    """Two halves of the keys merged by their maxima and sums give the whole."""
    args = shapes(q=300)
    whole = spec_of(attention(), args)
    dims = ("batch", "kv_head", "group", "query")
    dims = tuple(d for d in dims if d in dict(whole.roles))
    sizes = tuple(whole.size(d) for d in dims)
    kind = ArrayType(sizes, np.dtype(dtype))
    half = replace(
        whole,
        roles=tuple((n, 150 if n == "key" else s) for n, s in whole.roles),
        arguments=(
            whole.arguments[0],
            *(replace(a, shape=(1, 150, 2, 64)) for a in whole.arguments[1:]),
        ),
        statistics=((dims, kind), (dims, ArrayType(sizes, np.dtype("float32")))),
    )
    q, k, v = _composite_order(whole, _arrays(args))
    program = Program(half, 300, 150, 16)
    parts = [_ran(program, [q, k[:, at : at + 150], v[:, at : at + 150]]) for at in (0, 150)]
    tops = [np.float64(top) for _, top, _ in parts]
    best = np.maximum(*tops)
    factors = [np.exp(top - best) for top in tops]
    order = ("batch", "kv_head", "group", "query", "value_depth")

    def plain(x: Any) -> Any:
        return np.float64(arrange(jnp.asarray(x), whole.out_dims, whole, order))

    shape = (*plain(parts[0][0]).shape[:-1], 1)
    merged = sum(
        plain(out) * f.reshape(shape) for (out, _, _), f in zip(parts, factors, strict=True)
    )
    total = sum(np.float64(t) * f for (_, _, t), f in zip(parts, factors, strict=True))
    wanted = plain(by_attributes(whole, [q, k, v])[0])
    loose = 100 if dtype == "bfloat16" else 1  # scores are rounded to the maximum's type
    np.testing.assert_allclose(
        merged / total.reshape(shape), wanted, rtol=2e-5 * loose, atol=1e-4 * loose
    )


REFUSED = [
    (attention(probs=lambda p, *_: p + 1e-3), (), "not a multiple of them"),
    (
        attention(score=lambda x, q, k, b: x + b),
        (jax.ShapeDtypeStruct((256, 256), jnp.float16),),
        "computed in float16",
    ),
]


@pytest.mark.parametrize(("fn", "extras", "reason"), REFUSED)
def test_refusals(fn: Callable[..., Any], extras: tuple[Any, ...], reason: str) -> None:
    refusal = GeneralAttention().supports(spec_of(fn, (*shapes(), *extras)), get_target("v5e"))
    assert isinstance(refusal, No)
    assert reason in refusal.reason


@pytest.mark.parametrize(
    ("target", "depth", "ours"), [("tpu7x", 256, 0), ("tpu7x", 128, 1), ("v6e", 256, 1)]
)
def test_deep_rows_are_left_to_a_faster_kernel(target: str, depth: int, ours: int) -> None:
    spec = spec_of(attention(causal), shapes(q=512, d=depth, dtype=BF16))
    assert (GeneralAttention().supports(spec, get_target(target)) is None) == bool(ours)


def _plant(spec: AttentionSpec, error: str) -> AttentionSpec:
    changed = {
        "scale": replace(spec, score=spec.score.replace("1.250000e-01", "1.270000e-01")),
        "mask": replace(spec, score=spec.score.replace("compare GE", "compare GT")),
        "heads": replace(
            spec, q_dims=tuple(d.replace("kv_head*group", "group*kv_head") for d in spec.q_dims)
        ),
    }[error]
    assert changed != spec
    return changed


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("error", ["scale", "mask", "heads", "tiles"])
def test_errors_planted_in_the_kernel_are_caught(
    error: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def heads_merged(q: Array, k: Array, v: Array) -> Array:
        b, s, h, d = q.shape
        q = q.reshape(b, s, 2, h // 2, d)
        x = jnp.einsum("bqkgd,bskd->bkgqs", q, k).astype(F32) * 0.125
        x = jnp.where(causal(jnp.arange(s)[:, None], jnp.arange(s)), x, -1e30)
        p = jax.nn.softmax(x, axis=-1).astype(v.dtype)
        return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(b, s, h, d)

    build = GeneralAttention.build
    compress = Program._steps

    def fewer(self: Program, extras: Any) -> Any:
        steps = compress(self, extras)
        state = steps.state - steps.state % FIRST + OPEN
        return replace(steps, state=state, kinds=frozenset({OPEN}))

    if error == "tiles":
        monkeypatch.setattr(Program, "_steps", fewer)
    else:
        monkeypatch.setattr(
            GeneralAttention, "build", lambda self, s, c: build(self, _plant(s, error), c)
        )
    lower_composites._lower.cache_clear()
    report = verify_pipeline(module_of(heads_merged, shapes(dtype=dtype)), "inference", "v5e")
    lower_composites._lower.cache_clear()
    assert report.kernels == 1
    assert not report.numerics_ok
