"""Random attention programs and near misses: recognised or left alone, and never wrong."""

from __future__ import annotations

from typing import Any

import pytest
from attention_programs import CHOICES, NEAR_MISSES, Recipe
from fuzz_attention import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

RECIPES = st.fixed_dictionaries(
    {
        **{name: st.sampled_from(values) for name, values in CHOICES.items()},
        "miss": st.sampled_from(("", "", *NEAR_MISSES)),
    }
)
QUIET = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def recipe(chosen: dict[str, Any]) -> Recipe:
    return Recipe.draw(lambda name, _: chosen[name], near_misses=True)


@settings(max_examples=200, **QUIET)
@given(RECIPES, st.integers(0, 2**31))
def test_what_is_raised_means_the_same(chosen: dict[str, Any], seed: int) -> None:
    assert check(recipe(chosen), seed, kernels=False).problem == ""


@pytest.mark.slow
@settings(max_examples=15, **QUIET)
@given(RECIPES, st.integers(0, 2**31))
def test_kernels_compute_the_same(chosen: dict[str, Any], seed: int) -> None:
    assert check(recipe(chosen), seed, kernels=True).problem == ""


def test_the_oracle_sees_a_wrong_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score function that lost its mask is noticed."""
    from hlo_opt.passes import raise_attention

    plain = {name: values[0] for name, values in CHOICES.items()} | {"miss": "", "queries": 8}
    masked = recipe(plain | {"mask": "causal", "value": -1e9})
    assert check(masked, 0, kernels=False).problem == ""
    emit = raise_attention.emit_captured

    def broken(outliner: Any, kind: str, match: Any, captured: Any, extras: Any) -> str:
        name = emit(outliner, kind, match, captured, extras)
        for op in outliner.functions[name].regions[0].blocks[0].operations:
            if op.operation.name == "stablehlo.select":
                op.operation.operands[2] = op.operation.operands[1]
        return name

    monkeypatch.setattr(raise_attention, "emit_captured", broken)
    assert "differs" in check(masked, 0, kernels=False).problem
