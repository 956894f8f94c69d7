"""What the analysis of score functions derives, and what it must not."""

from __future__ import annotations

import pytest

from hlo_opt import ir as hlo_ir
from hlo_opt.ir.walk import functions
from hlo_opt.patterns.score import (
    AtLeast,
    Both,
    Data,
    Linear,
    NotLinear,
    analyse,
    causal_offset,
    describe,
)

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
        # Indices that wrapped around at 8 bits are not indices any more.
        "%q8 = stablehlo.convert %q : (tensor<i32>) -> tensor<i8>\n"
        "%k8 = stablehlo.convert %k : (tensor<i32>) -> tensor<i8>\n"
        "%m = stablehlo.compare GE, %q8, %k8, SIGNED : (tensor<i8>, tensor<i8>) -> tensor<i1>",
    ],
)
def test_other_masks_are_not_causal(predicate: str) -> None:
    assert causal_offset(mask_of(predicate)) is None


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
