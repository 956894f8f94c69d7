"""Cache update and decode attention: what is raised, what is left alone, the kernel's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

from hlo_opt import ir as hlo_ir
from hlo_opt.kernels import decode_attention
from hlo_opt.passes import lower_composites
from hlo_opt.pipeline import PassContext, run_pipeline
from hlo_opt.verify import FACTOR, Report, verify_pipeline

B, S = 2, 256
update = jax.lax.dynamic_update_slice


def attend(
    q: Any,
    k: Any,
    v: Any,
    open_: Any,
    *,
    value: float = -1e30,
    score: Callable[[Any], Any] = lambda x: x,
    probs: Callable[[Any], Any] = lambda p: p,
) -> Any:
    """Attention of q `[b, n, h, d]` over k and v `[b, s, kv, d]`; `open_` broadcasts to bkgqs."""
    b, n, h, d = q.shape
    kv = k.shape[2]
    x = jnp.einsum(
        "bqkgd,bskd->bkgqs",
        q.reshape(b, n, kv, h // kv, d),
        k,
        preferred_element_type=jnp.float32,
    )
    x = jnp.where(open_, score(x * d**-0.5), value)
    p = probs(jax.nn.softmax(x, axis=-1)).astype(v.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(q.shape)


def step(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
    """The plain decode step: returns the attention and both caches."""
    ks, vs = update(ks, k, (0, at, 0, 0)), update(vs, v, (0, at, 0, 0))
    return attend(q, ks, vs, jnp.arange(ks.shape[1]) <= at), ks, vs


def shapes(
    kv: int = 2, group: int = 2, d: int = 64, dtype: str = "bfloat16", s: int = S, n: int = 1
) -> list[tuple[tuple[int, ...], str]]:
    new, cache = (B, n, kv, d), (B, s, kv, d)
    return [(shape, dtype) for shape in ((B, n, kv * group, d), new, new, cache, cache)]


def arrays(of: list[tuple[tuple[int, ...], str]], seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(jnp.dtype(dtype)) for shape, dtype in of]


def lowered(fn: Callable[..., Any], *args: Any, **options: Any) -> ir.Module:
    return hlo_ir.parse(jax.jit(fn, **options).lower(*args).as_text())


def raised(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[list[str], list[str]]:
    """What was raised and what `raise-decode-attention` said, of a step with these arguments."""
    ctx = PassContext()
    module = run_pipeline(lowered(fn, *args, **options), "raise", ctx)
    found = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.composite":
            found.append(ir.StringAttr(op.attributes["name"]).value.removeprefix("hlo_opt."))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    said = [r for r in ctx.remarks if r.pass_name == "raise-decode-attention"]
    return found, [r.message for r in said]


def check_f32(report: Report, kernels: int = 1) -> None:
    """The rule for RMS errors; the largest of few errors of a unit in the last place is luck."""
    assert report.kernels == kernels
    for out in report.outputs:
        assert not out.problem
        assert out.after_rms <= FACTOR * out.before_rms + out.ulp
        assert out.after_max <= 32 * out.ulp, report.table()


INPUTS = [*arrays(shapes()), np.int32(7)]


def variant(mask: Callable[[Any, Any], Any], **options: Any) -> Callable[..., Any]:
    """The plain step with another mask of key positions and the position."""

    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any, *more: Any) -> Any:
        ks, vs = update(ks, k, (0, at, 0, 0)), update(vs, v, (0, at, 0, 0))
        keys = jnp.arange(ks.shape[1])
        return attend(q, ks, vs, mask(keys, at, *more), **options), ks, vs

    return fn


MASKS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "up to": (lambda k, at: k <= at, []),
    "below": (lambda k, at: k < at + 1, []),
    "turned": (lambda k, at: at >= k, []),
    "offset on keys": (lambda k, at: k - 1 < at, []),
    "not": (lambda k, at: ~(k > at), []),
    "window": (lambda k, at: (k <= at) & (k > at - 100), []),
    "padding": (
        lambda k, at, pad: (k <= at) & (pad != 0)[:, None, None, None],
        [np.ones((B, S), np.int32)],
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_end_where_writing_ends(name: str) -> None:
    mask, more = MASKS[name]
    found, said = raised(variant(mask), *INPUTS, *more)
    assert found == ["decode_attention"]
    assert said[0].startswith("raised: GQA 4/2, 1 x 256, depth 64")


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (lambda k, at: k < at, "does not end at the written position"),
        (lambda k, at: k <= at + 1, "does not end at the written position"),
        (lambda k, at: k != at, "no mask closes the keys behind the written ones"),
        (lambda k, at: k >= at, "no mask closes the keys behind the written ones"),
        (lambda k, at: k <= 7, "no mask closes the keys behind the written ones"),
    ],
)
def test_masks_that_do_not(mask: Callable[..., Any], reason: str) -> None:
    found, said = raised(variant(mask), *INPUTS)
    assert found == ["attention"]
    assert reason in said[0]


def test_another_position_in_the_mask() -> None:
    found, said = raised(variant(lambda k, at, other: k <= other), *INPUTS, np.int32(7))
    assert found == ["attention"]
    assert "does not end at the written position" in said[0]


def test_a_mask_from_data_proves_nothing() -> None:
    mask = np.arange(S) <= 7
    found, said = raised(variant(lambda k, at, data: data), *INPUTS, mask)
    assert found == ["attention"]
    assert "no mask closes the keys" in said[0]


def test_a_weak_mask_closes_nothing() -> None:
    found, _ = raised(variant(lambda k, at: k <= at, value=-1.0), *INPUTS)
    assert found == ["attention"]


def test_the_old_cache_is_read_again() -> None:
    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        return *step(q, k, v, ks, vs, at), ks.sum()

    found, said = raised(fn, *INPUTS)
    assert found == ["attention"]
    assert said[0] == "the old cache is also used elsewhere"


def test_two_updates_from_one_cache() -> None:
    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        return *step(q, k, v, ks, vs, at), update(ks, k, (0, at + 1, 0, 0))

    found, said = raised(fn, *INPUTS)
    assert found == ["attention"]
    assert said[0] == "the old cache is also used elsewhere"


def test_one_update_after_the_other() -> None:
    """The cache of the second update is what the first made: nobody else reads it."""

    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        return step(q, k, v, update(ks, k, (0, at - 1, 0, 0)), vs, at)

    found, said = raised(fn, *INPUTS)
    assert found == ["decode_attention"]
    assert "a cache is updated, but no attention over it is recognised" in said
    report = verify_pipeline(lowered(fn, *INPUTS), "inference", "v5e", inputs=INPUTS)
    assert report.ok, report.table()
    assert report.kernels == 1


def test_keys_and_values_at_different_positions() -> None:
    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        ks, vs = update(ks, k, (0, at, 0, 0)), update(vs, v, (0, at - 1, 0, 0))
        return attend(q, ks, vs, jnp.arange(S) <= at), ks, vs

    found, said = raised(fn, *INPUTS)
    assert found == ["attention"]
    assert said[0] == "keys and values are written at different positions"


def test_positions_that_differ_outside_the_cache() -> None:
    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        ks = update(ks, k, (0, at, 0, 0))
        vs = update(vs, v, (0, jnp.maximum(at, 0), 0, 0))
        return attend(q, ks, vs, jnp.arange(S) <= at), ks, vs

    found, said = raised(fn, *INPUTS)
    assert found == ["attention"]
    assert said[0] == "keys and values are written apart outside the cache"


def test_a_mask_that_opens_closed_keys_again() -> None:
    """What closes keys must come last, or behind what writes over them."""

    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        ks, vs = update(ks, k, (0, at, 0, 0)), update(vs, v, (0, at, 0, 0))
        keys = jnp.arange(S)
        reopened = lambda x: jnp.where(keys % 2 == 0, x, 0.0)  # noqa: E731
        return attend(q, ks, vs, True, score=lambda x: reopened(jnp.where(keys <= at, x, -1e30)))

    found, _ = raised(fn, *INPUTS)
    assert found == ["attention"]


@pytest.mark.parametrize("value", ["7 : i32", "[1 : i64]", "[]", '"x"', "@nope"])
@pytest.mark.parametrize("name", ["roles", "k_dims", "score", "qk_type", "extra_dims"])
def test_malformed_composites_keep_their_decomposition(name: str, value: str) -> None:
    module = run_pipeline(lowered(step, *INPUTS), "raise", PassContext())

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.composite":
            entries = {e.name: e.attr for e in ir.DictAttr(op.attributes["composite_attributes"])}
            assert name in entries
            entries[name] = ir.Attribute.parse(value, module.context)
            op.attributes["composite_attributes"] = ir.DictAttr.get(entries, module.context)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    ctx = PassContext(target="v5e")
    module = run_pipeline(module, "lower", ctx)
    (remark,) = ctx.remarks
    assert remark.kind == "missed"
    assert "composite" in str(module)


def test_only_keys_are_a_cache() -> None:
    def fn(q: Any, k: Any, ks: Any, vs: Any, at: Any) -> Any:
        ks = update(ks, k, (0, at, 0, 0))
        return attend(q, ks, vs, jnp.arange(S) <= at), ks

    q, k, _, ks, vs, at = INPUTS
    found, said = raised(fn, q, k, ks, vs, at)
    assert found == ["attention"]
    assert said[0] == "only one of keys and values is a cache that is updated"


def test_keys_and_values_are_one_cache() -> None:
    def fn(q: Any, k: Any, ks: Any, at: Any) -> Any:
        ks = update(ks, k, (0, at, 0, 0))
        return attend(q, ks, ks, jnp.arange(S) <= at), ks

    q, k, _, ks, _, at = INPUTS
    found, said = raised(fn, q, k, ks, at)
    assert found == ["attention"]
    assert said[0] == "keys and values are one cache"


def test_a_generate_loop() -> None:
    """The position is a sum of a loop's counter and a value from outside."""

    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        def body(i: Any, carried: Any) -> Any:
            q, ks, vs = carried
            out, ks, vs = step(q, k, v, ks, vs, at + i)
            return q + out, ks, vs

        return jax.lax.fori_loop(0, 3, body, (q, ks, vs))

    assert raised(fn, *INPUTS)[0] == ["decode_attention"]
    report = verify_pipeline(lowered(fn, *INPUTS), "inference", "v5e", inputs=INPUTS)
    assert report.ok, report.table()
    assert report.kernels == 1


def test_a_position_in_a_vector() -> None:
    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, ends: Any) -> Any:
        ks = update(ks, k, (0, ends[1] % S, 0, 0))
        vs = update(vs, v, (0, ends[1] % S, 0, 0))
        return attend(q, ks, vs, jnp.arange(S) <= ends[1]), ks, vs

    *rest, _ = INPUTS
    inputs = [*rest, np.array([1, 9], np.int32)]
    assert raised(fn, *inputs)[0] == ["decode_attention"]
    for end in (9, 255, 300):  # behind the end it starts anew, and everything is open
        inputs[-1] = np.array([1, end], np.int32)
        report = verify_pipeline(lowered(fn, *inputs), "inference", "v5e", inputs=inputs)
        assert report.ok, report.table()


def test_a_module_without_main_is_raised_like_any_other() -> None:
    text = str(lowered(step, *INPUTS)).replace("@main", "@another")
    ctx = PassContext()
    run_pipeline(hlo_ir.parse(text), "raise", ctx)
    assert [r.kind for r in ctx.remarks] == ["applied"]


def test_dynamic_shapes_are_left_alone() -> None:
    text = """func.func @main(%c: tensor<?x256x2x64xf32>, %n: tensor<?x1x2x64xf32>, %i: tensor<i32>)
        -> tensor<?x256x2x64xf32> {
      %z = stablehlo.constant dense<0> : tensor<i32>
      %0 = stablehlo.dynamic_update_slice %c, %n, %z, %i, %z, %z : (tensor<?x256x2x64xf32>,
        tensor<?x1x2x64xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>)
        -> tensor<?x256x2x64xf32>
      return %0 : tensor<?x256x2x64xf32>
    }"""
    assert "dynamic_update_slice" in str(run_pipeline(hlo_ir.parse(text), "raise", PassContext()))


def test_an_update_along_heads() -> None:
    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        ks, vs = update(ks, k, (0, 0, at, 0)), update(vs, v, (0, 0, at, 0))
        return attend(q, ks, vs, jnp.arange(S) <= at), ks, vs

    q, _, _, ks, vs, at = INPUTS
    found, said = raised(fn, q, ks[:, :, :1], vs[:, :, :1], ks, vs, at)
    assert found == ["attention"]
    assert said[0] == "the cache is updated along another dimension than keys"


def test_more_positions_written_than_queries() -> None:
    q, _, _, ks, vs, at = INPUTS
    found, said = raised(step, q, ks[:, :3], vs[:, :3], ks, vs, at)
    assert found == ["attention"]
    assert said[0] == "3 positions are written for 1 queries"


def test_few_queries_are_raised_but_have_no_kernel() -> None:
    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        ks, vs = update(ks, k, (0, at, 0, 0)), update(vs, v, (0, at, 0, 0))
        open_ = jnp.arange(S) <= at + jnp.arange(4)[:, None]
        return attend(q, ks, vs, open_), ks, vs

    inputs = [*arrays(shapes(n=4)), np.int32(7)]
    assert raised(fn, *inputs)[0] == ["decode_attention"]
    ctx = PassContext(target="v5e")
    run_pipeline(lowered(fn, *inputs), "inference", ctx)
    assert "4 queries, the kernel takes one" in [r.message for r in ctx.remarks][-1]


def test_queries_from_the_updated_cache() -> None:
    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        ks, vs = update(ks, k, (0, at, 0, 0)), update(vs, v, (0, at, 0, 0))
        return attend(q + ks[:, :1].sum(), ks, vs, jnp.arange(S) <= at), ks, vs

    found, said = raised(fn, *INPUTS)
    assert found == ["attention"]
    assert said[0] == "an operand is computed from the updated cache"


def test_readers_that_stand_before_the_attention_are_moved_behind() -> None:
    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        ks, vs = update(ks, k, (0, at, 0, 0)), update(vs, v, (0, at, 0, 0))
        both = jnp.stack([ks, vs]) * 2
        return attend(q, ks, vs, jnp.arange(S) <= at), both + 1

    assert raised(fn, *INPUTS)[0] == ["decode_attention"]
    report = verify_pipeline(lowered(fn, *INPUTS), "inference", "v5e", inputs=INPUTS)
    assert report.ok, report.table()
    assert report.kernels == 1


def test_two_attentions_over_one_update() -> None:
    def fn(q: Any, k: Any, v: Any, ks: Any, vs: Any, at: Any) -> Any:
        out, ks, vs = step(q, k, v, ks, vs, at)
        return out, attend(q * 2, ks, vs, jnp.arange(S) <= at), ks, vs

    inputs = [*arrays(shapes(dtype="float32")), np.int32(7)]
    found, _ = raised(fn, *inputs)
    assert sorted(found) == ["attention", "decode_attention"]
    report = verify_pipeline(lowered(fn, *inputs), "inference", "v5e", inputs=inputs)
    check_f32(report, kernels=2)


def test_a_cache_that_is_not_donated_costs_a_copy() -> None:
    size = 2 * INPUTS[3].nbytes
    assert f"XLA copies {size:,} bytes" in raised(step, *INPUTS)[1][1]
    assert f"XLA copies {size // 2:,} bytes" in raised(step, *INPUTS, donate_argnums=(3,))[1][1]
    assert len(raised(step, *INPUTS, donate_argnums=(3, 4))[1]) == 1


def test_raising_is_idempotent() -> None:
    once = run_pipeline(lowered(step, *INPUTS), "raise", PassContext())
    assert str(run_pipeline(once, "raise", PassContext())) == str(once)


# Layouts of the cache in HBM: lanes, rows, heads; one head of keys; several and one query a head.
KERNELS = [
    *(
        (kv, group, 64, dtype)
        for kv, group in ((2, 4), (1, 4))
        for dtype in ("float32", "bfloat16")
    ),
    *((kv, group, 128, "bfloat16") for kv, group in ((8, 1), (3, 2), (1, 4))),
    (2, 2, 128, "float32"),
    (2, 2, 80, "bfloat16"),
    (2, 2, 256, "bfloat16"),
]


@pytest.mark.parametrize(("kv", "group", "d", "dtype"), KERNELS)
def test_numbers(kv: int, group: int, d: int, dtype: str) -> None:
    inputs = arrays(shapes(kv, group, d, dtype, s=512))
    module = lowered(step, *inputs, np.int32(0))
    # Behind the cache JAX clamps the update, before it it wraps; the masks do neither.
    for at in (0, 300, 511, 5000, -3) if dtype == "bfloat16" else (300, 5000):
        report = verify_pipeline(module, "inference", "v5e", inputs=[*inputs, np.int32(at)])
        assert report.kernels == 1
        if dtype == "bfloat16":
            assert report.ok, (at, report.table())
        else:
            check_f32(report)


def test_layouts() -> None:
    usual = ("batch", "key", "kv_head", "depth")
    bf16, f32 = np.dtype(jnp.bfloat16), np.dtype("float32")
    layout = decode_attention.layout_of
    assert layout(usual, 8, 128, bf16).name == layout(usual, 1, 128, f32).name == "rows"
    assert layout(usual, 3, 128, bf16).name == layout(usual, 1, 128, bf16).name == "heads"
    assert layout(("batch", "kv_head", "key", "depth"), 8, 128, bf16).name == "heads"
    assert layout(usual, 8, 64, bf16).name == "lanes"


NUMBERS: dict[str, Callable[..., Any]] = {
    "window": variant(lambda k, at: (k <= at) & (k > at - 100)),
    "no key at all, finite": variant(lambda k, at: (k <= at) & (k < 0)),
    "no key at all, -inf": variant(lambda k, at: (k <= at) & (k < 0), value=-jnp.inf),
    "first block closed, -inf": variant(lambda k, at: (k <= at) & (k >= 300), value=-jnp.inf),
    "guard and -inf": variant(
        lambda k, at: (k <= at) & (k > at),
        value=-jnp.inf,
        probs=lambda p: jnp.where(jnp.isnan(p), 0.0, p),
    ),
    "guard": variant(
        lambda k, at: k <= at, probs=lambda p: jnp.where(jnp.arange(512) > 200, p, 0.0)
    ),
    "slopes": variant(
        lambda k, at: k <= at,
        score=lambda x: x + jnp.array([0.5, 0.1]).reshape(1, 2, 1, 1, 1) * jnp.arange(512),
    ),
    "soft cap in front of the mask": variant(
        lambda k, at: k <= at, score=lambda x: 5 * jnp.tanh(x / 5)
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_masks_and_scores(name: str) -> None:
    inputs = arrays(shapes(2, 2, 64, "bfloat16", s=512))
    module = lowered(NUMBERS[name], *inputs, np.int32(0))
    kernels = 0
    for at in (311, 511):
        report = verify_pipeline(module, "inference", "v5e", inputs=[*inputs, np.int32(at)])
        if name != "no key at all, -inf":  # nothing but NaN is no number to compare
            assert report.numerics_ok, (at, report.table())
        else:
            assert report.outputs[0].problem == "no finite value to compare"
        kernels = report.kernels
    # A soft cap hides the mask: it is no decode attention, but an attention.
    assert kernels == (0 if name == "guard and -inf" else 1)


def run(module: ir.Module, inputs: list[Any]) -> list[np.ndarray]:
    from hlo_opt.verify.compare import run

    ctx = PassContext(target="v5e", interpret=True)
    return run(run_pipeline(module, "inference", ctx), inputs)


def test_blocks_behind_the_length_are_not_read() -> None:
    inputs = arrays(shapes(s=2048))
    for cache in inputs[3:]:
        cache[:, 1024:] = np.nan
    module = lowered(step, *inputs, np.int32(0))
    out, *_ = run(module, [*inputs, np.int32(1023)])
    assert np.isfinite(out.astype(np.float32)).all()  # blocks of 1024 keys: one is read
    out, *_ = run(module, [*inputs, np.int32(1024)])
    assert np.isnan(out.astype(np.float32)).all()  # the second is read, as the original does


def test_what_is_overwritten_does_not_matter() -> None:
    inputs = arrays(shapes())
    for cache in inputs[3:]:
        cache[:, 9] = np.nan
    report = verify_pipeline(
        lowered(step, *inputs, np.int32(0)), "inference", "v5e", inputs=[*inputs, np.int32(9)]
    )
    assert report.ok, report.table()


def planted(error: str) -> tuple[str, Callable[..., Any]]:
    """A method of the kernel's program, and a wrong one."""
    program = decode_attention._Program
    load, tiles = program._load, program._tiles

    def misplaced(self: Any, side: int, ref: Any, new: Any, head: int, place: Any) -> Any:
        return load(self, side, ref, new, head, None if place is None else place + 1)

    def swapped(self: Any, side: int, ref: Any, new: Any, head: int, place: Any) -> Any:
        return load(self, side, ref, new, 1 - head, place)

    def shifted(self: Any, extras: Any) -> Any:
        return [tile - 1 for tile in tiles(self, extras)]

    return {
        "place": ("_load", misplaced),
        "heads": ("_load", swapped),
        "mask": ("_tiles", shifted),
    }[error]


@pytest.mark.parametrize("error", ["place", "heads", "mask"])
def test_planted_errors_are_caught(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    monkeypatch.setattr(decode_attention._Program, *planted(error))
    inputs = [*arrays(shapes()), np.int32(20)]
    lower_composites._lower.cache_clear()
    report = verify_pipeline(lowered(step, *inputs), "inference", "v5e", inputs=inputs)
    lower_composites._lower.cache_clear()
    assert report.kernels == 1
    assert not report.numerics_ok
