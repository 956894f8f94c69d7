"""What the analysis of score functions derives, and what it must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_opt import ir as hlo_ir
from hlo_opt.ir.walk import functions
from hlo_opt.patterns.score import (
    AtLeast,
    Both,
    Data,
    Linear,
    NotLinear,
    Predicate,
    analyse,
    causal_offset,
    describe,
    reach,
)
from hlo_opt.trace import evaluate

HEAD = (
    "func.func @f(%x: tensor<f32>, %e: tensor<i1>, %d: tensor<f32>, %b: tensor<i32>, "
    "%h: tensor<i32>, %q: tensor<i32>, %k: tensor<i32>) -> tensor<f32> {\n"
    "%low = stablehlo.constant dense<-1.0e9> : tensor<f32>\n"
    "%zero = stablehlo.constant dense<0.0> : tensor<f32>\n"
    "%three = stablehlo.constant dense<3> : tensor<i32>\n"
    "%true = stablehlo.constant dense<true> : tensor<i1>\n"
    "%false = stablehlo.constant dense<false> : tensor<i1>\n"
    "%half = stablehlo.constant dense<0.5> : tensor<f32>\n"
)
COMPARE = "stablehlo.compare {}, {}, {}, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>"
MASKED = "\n%r = stablehlo.select %m, %x, %low : tensor<i1>, tensor<f32>"


def form(body: str) -> Linear | NotLinear:
    module = hlo_ir.parse(f"{HEAD}{body}\nreturn %r : tensor<f32>\n}}")
    (function,) = functions(module)
    return analyse(function)


def mask_of(predicate: str) -> object:
    result = form(predicate + MASKED)
    assert isinstance(result, Linear)
    (mask,) = result.masks
    return mask.open


@pytest.mark.parametrize(
    ("predicate", "offset"),
    [
        ("%m = " + COMPARE.format("GE", "%q", "%k"), 0),
        ("%m = " + COMPARE.format("LE", "%k", "%q"), 0),
        ("%m = " + COMPARE.format("GT", "%q", "%k"), -1),
        ("%m = " + COMPARE.format("LT", "%k", "%q"), -1),
        ("%n = " + COMPARE.format("LT", "%q", "%k") + "\n%m = stablehlo.not %n : tensor<i1>", 0),
        (
            "%s = stablehlo.add %q, %three : tensor<i32>\n%m = " + COMPARE.format("GE", "%s", "%k"),
            3,
        ),
        (
            "%s = stablehlo.subtract %k, %three : tensor<i32>\n%m = "
            + COMPARE.format("GT", "%q", "%s"),
            2,
        ),
        (
            "%c = "
            + COMPARE.format("GE", "%q", "%k")
            + "\n%m = stablehlo.select %c, %true, %false : tensor<i1>, tensor<i1>",
            0,
        ),
    ],
)
def test_causality_is_derived_with_its_offset(predicate: str, offset: int) -> None:
    assert causal_offset(mask_of(predicate)) == offset


@pytest.mark.parametrize(
    "predicate",
    [
        "%m = " + COMPARE.format("GE", "%k", "%q"),  # the other way round
        "%m = " + COMPARE.format("EQ", "%q", "%k"),
        "%m = " + COMPARE.format("GE", "%q", "%h"),
        "%m = " + COMPARE.format("GE", "%q", "%three"),
        "%t = stablehlo.multiply %q, %three : tensor<i32>\n%m = "
        + COMPARE.format("GE", "%t", "%k"),
        "%c = " + COMPARE.format("GE", "%q", "%k") + "\n%m = stablehlo.and %c, %e : tensor<i1>",
        "%c = " + COMPARE.format("GE", "%q", "%k") + "\n%m = stablehlo.or %c, %e : tensor<i1>",
        # Unsigned differences wrap around below zero.
        "%qu = stablehlo.convert %q : (tensor<i32>) -> tensor<ui32>\n"
        "%ku = stablehlo.convert %k : (tensor<i32>) -> tensor<ui32>\n"
        "%d3 = stablehlo.subtract %qu, %ku : tensor<ui32>\n"
        "%zu = stablehlo.constant dense<0> : tensor<ui32>\n"
        "%m = stablehlo.compare GE, %d3, %zu, UNSIGNED : (tensor<ui32>, tensor<ui32>) -> "
        "tensor<i1>",
        # Indices that wrapped around at 8 bits are not indices any more.
        "%q8 = stablehlo.convert %q : (tensor<i32>) -> tensor<i8>\n"
        "%k8 = stablehlo.convert %k : (tensor<i32>) -> tensor<i8>\n"
        "%m = stablehlo.compare GE, %q8, %k8, SIGNED : (tensor<i8>, tensor<i8>) -> tensor<i1>",
    ],
)
def test_other_masks_are_not_causal(predicate: str) -> None:
    assert causal_offset(mask_of(predicate)) is None


QUERY_AFTER = AtLeast((("key", -1), ("query", 1)), 3)
KEY_AFTER = AtLeast((("key", 1), ("query", -1)), 7)


@pytest.mark.parametrize(
    ("predicate", "limits"),
    [
        (QUERY_AFTER, (None, 3)),
        (KEY_AFTER, (7, None)),
        (Both((QUERY_AFTER, KEY_AFTER)), (7, 3)),
        (Both((QUERY_AFTER, AtLeast(QUERY_AFTER.terms, -2))), (None, -2)),
        (Both(()), (None, None)),
        (Data(), None),
        (Both((QUERY_AFTER, Data())), None),
        (AtLeast((("query", 1),), 3), None),
        (AtLeast((("head", 1),), 3), None),
        (AtLeast((("key", -2), ("query", 2)), 3), None),
        (AtLeast((("key", 1), ("query", 1)), 3), None),
        (AtLeast((("head", 1), ("key", -1), ("query", 1)), 3), None),
    ],
)
def test_bands_of_positions(predicate: Predicate, limits: tuple[int, int] | None) -> None:
    assert reach(predicate) == limits


def test_conjunction_keeps_its_parts() -> None:
    open_ = mask_of(
        "%c = " + COMPARE.format("GE", "%q", "%k") + "\n%m = stablehlo.and %c, %e : tensor<i1>"
    )
    assert open_ == Both((AtLeast((("key", -1), ("query", 1)), 0), Data()))


def test_scale_is_collected_across_ops() -> None:
    body = """%0 = stablehlo.multiply %half, %x : tensor<f32>
    %1 = stablehlo.divide %0, %half : tensor<f32>
    %2 = stablehlo.multiply %1, %half : tensor<f32>
    %r = stablehlo.negate %2 : tensor<f32>"""
    assert form(body) == Linear(-0.5)


def test_scaling_after_a_mask_scales_the_mask_value() -> None:
    body = "%s = stablehlo.select %e, %x, %low : tensor<i1>, tensor<f32>\n"
    result = form(body + "%r = stablehlo.multiply %s, %half : tensor<f32>")
    assert isinstance(result, Linear)
    assert (result.scale, result.masks[0].value, result.masks[0].additive) == (0.5, -5e8, False)


def test_additive_mask_and_bias() -> None:
    added = "%r = stablehlo.add %x, %a : tensor<f32>"
    mask = form("%a = stablehlo.select %e, %zero, %low : tensor<i1>, tensor<f32>\n" + added)
    assert isinstance(mask, Linear)
    assert (mask.bias, mask.masks[0].additive, mask.masks[0].value) == (False, True, -1e9)
    bias = form("%a = stablehlo.multiply %d, %half : tensor<f32>\n" + added)
    assert bias == Linear(1.0, bias=True)


def test_masks_and_bias_that_are_summed_first() -> None:
    body = (
        "%a = stablehlo.select %e, %zero, %low : tensor<i1>, tensor<f32>\n"
        "%s1 = stablehlo.add %a, %d : tensor<f32>\n"
        f"%m = {COMPARE.format('GE', '%q', '%k')}\n"
        "%c = stablehlo.select %m, %zero, %low : tensor<i1>, tensor<f32>\n"
        "%s = stablehlo.add %c, %s1 : tensor<f32>\n"
    )
    result = form(body + "%r = stablehlo.add %s, %x : tensor<f32>")
    assert isinstance(result, Linear)
    assert result.bias
    assert [mask.value for mask in result.masks] == [-1e9, -1e9]
    assert describe(result) == "causal, mask from data, bias"
    # Something else is done with the sum: it is a bias of unknown values.
    other = "%t = stablehlo.tanh %s : tensor<f32>\n%r = stablehlo.add %x, %t : tensor<f32>"
    assert form(body + other) == Linear(1.0, bias=True)


def test_a_mask_that_is_open_where_false() -> None:
    body = "%a = stablehlo.select %e, %low, %zero : tensor<i1>, tensor<f32>\n"
    result = form(body + "%r = stablehlo.add %x, %a : tensor<f32>")
    assert isinstance(result, Linear)
    assert result.masks[0].value == -1e9  # closed where %e holds: the opposite predicate


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("%r = stablehlo.tanh %x : tensor<f32>", "a soft cap (tanh)"),
        ("%r = stablehlo.multiply %x, %x : tensor<f32>", "multiply of the logit"),
        ("%r = stablehlo.multiply %x, %d : tensor<f32>", "multiply of the logit"),
        ("%r = stablehlo.add %x, %x : tensor<f32>", "the logit used twice"),
        ("%r = stablehlo.select %e, %x, %d : tensor<i1>, tensor<f32>", "select of the logit"),
        ("%r = stablehlo.maximum %x, %zero : tensor<f32>", "maximum of the logit"),
        (
            "%i = stablehlo.convert %x : (tensor<f32>) -> tensor<i32>\n"
            "%r = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>",
            "convert of the logit",
        ),
    ],
)
def test_other_functions_of_the_logit(body: str, reason: str) -> None:
    assert form(body) == NotLinear(reason)


def test_descriptions() -> None:
    causal = "%m = " + COMPARE.format("GE", "%q", "%k")
    assert describe(form(causal + MASKED)) == "causal"
    scaled = "%y = stablehlo.multiply %x, %half : tensor<f32>\n"
    both = scaled + "%r = stablehlo.select %e, %y, %low : tensor<i1>, tensor<f32>"
    assert describe(form(both)) == "scale 0.5, mask from data"


class Programs:
    """Draws score functions as text: a few ops over the logit, extras, indices and constants."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.pools = {"f32": ["%x", "%d"], "i32": ["%b", "%h", "%q", "%k"], "i1": ["%e"]}
        self.lines: list[str] = []

    def pick(self, type_: str) -> str:
        # Later values are likelier, so that chains grow.
        pool = self.pools[type_]
        return self.draw(st.sampled_from([*pool, *pool[-2:] * 2]))

    def add(self, type_: str, text: str) -> None:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = stablehlo.{text}")
        self.pools[type_].append(name)

    def step(self) -> None:
        f, g = self.pick("f32"), self.pick("f32")
        i, j = self.pick("i32"), self.pick("i32")
        p, q = self.pick("i1"), self.pick("i1")
        binary = self.draw(st.sampled_from(["add", "subtract", "multiply"]))
        direction = self.draw(st.sampled_from(["GE", "GT", "LE", "LT", "EQ", "NE"]))
        number = self.draw(st.sampled_from([0, 1, -1, 2, -3]))
        type_, text = self.draw(
            st.sampled_from(
                [
                    ("f32", f"{binary} {f}, {g} : tensor<f32>"),
                    ("f32", f"negate {f} : tensor<f32>"),
                    ("f32", f"constant dense<{number}.0> : tensor<f32>"),
                    ("f32", f"select {p}, {f}, {g} : tensor<i1>, tensor<f32>"),
                    ("f32", f"convert {p} : (tensor<i1>) -> tensor<f32>"),
                    ("f32", f"convert {i} : (tensor<i32>) -> tensor<f32>"),
                    ("i32", f"{binary} {i}, {j} : tensor<i32>"),
                    ("i32", f"constant dense<{number}> : tensor<i32>"),
                    ("i32", f"convert {p} : (tensor<i1>) -> tensor<i32>"),
                    ("i1", f"not {p} : tensor<i1>"),
                    ("i1", f"and {p}, {q} : tensor<i1>"),
                    ("i1", f"or {p}, {q} : tensor<i1>"),
                    ("i1", COMPARE.removeprefix("stablehlo.").format(direction, i, j)),
                    ("i1", COMPARE.removeprefix("stablehlo.").format(direction, "%q", "%k")),
                    (
                        "i1",
                        f"compare {direction}, {f}, {g}, FLOAT : (tensor<f32>, tensor<f32>) -> "
                        "tensor<i1>",
                    ),
                ]
            )
        )
        self.add(type_, text)


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> str:
    builder = Programs(draw)
    for _ in range(draw(st.integers(2, 12))):
        builder.step()
    builder.add("f32", f"select {builder.pick('i1')}, %x, %low : tensor<i1>, tensor<f32>")
    for _ in range(draw(st.integers(0, 3))):
        builder.step()
    result = builder.pools["f32"][-1]
    return "\n".join([HEAD, *builder.lines, f"return {result} : tensor<f32>", "}"])


def holds(predicate: Predicate, indices: dict[str, int]) -> bool | None:
    """Whether a predicate holds; None where data decide."""
    if isinstance(predicate, Both):
        parts = [holds(part, indices) for part in predicate.parts]
        return False if False in parts else None if None in parts else True
    if isinstance(predicate, Data):
        return None
    return sum(c * indices[n] for n, c in predicate.terms) + predicate.offset >= 0


def outcomes(form: Linear, logit: float, indices: dict[str, int]) -> set[float]:
    """What the score may be, according to its analysis (bias apart)."""
    values = {np.float32(form.scale * logit)}
    for mask in form.masks:
        closed = {np.float32(v * mask.additive + mask.value) for v in values}
        open_ = holds(mask.open, indices)
        values = values if open_ else closed if open_ is False else values | closed
    return values


@settings(max_examples=150, deadline=None, derandomize=True)
@given(programs())
def test_whatever_is_derived_is_true(text: str) -> None:
    module = hlo_ir.parse(text)
    (function,) = functions(module)
    form = analyse(function)
    if not isinstance(form, Linear) or form.bias:
        return
    shape = np.indices((2, 2, 4, 4)).astype(np.int32)
    for logit, e, d in ((1.0, True, 0.5), (-2.0, False, 3.0)):
        found = evaluate(function, np.float32(logit), np.array(e), np.float32(d), *shape)
        found = np.broadcast_to(found, shape.shape[1:])
        for b, h, q, k in np.ndindex(*found.shape):
            indices = {"batch": b, "head": h, "query": q, "key": k}
            assert found[b, h, q, k] in outcomes(form, logit, indices), (form, indices)
