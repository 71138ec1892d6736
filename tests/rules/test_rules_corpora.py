"""A corpus of rules: what fails somewhere is refused, what holds everywhere is accepted.

The verdict is the same whatever the seed and whatever the rule is called.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tapestry_egg.errors import RuleError
from tapestry_egg.rules import Rule
from tapestry_egg.rules.verify.verdicts import RuleRefused, verify_rule
from tests.rules.corpus import SOME_FALSE, SOME_TRUE, every_false, every_true, named
from tests.tiers import tiers


def refused(rule: Rule, seed: int = 0) -> bool:
    try:
        verify_rule(rule, seed)
    except RuleRefused as error:
        assert error.counterexample is not None, f"{rule.name} was not tried: {error}"
        return True
    return False


@pytest.mark.parametrize("rule", tiers(SOME_FALSE, fast=2), ids=lambda r: r.name)
def test_what_fails_somewhere_is_refused_with_a_counterexample(rule: Rule) -> None:
    with pytest.raises(RuleRefused, match=re.escape(rule.name)) as caught:
        verify_rule(rule)
    found = caught.value.counterexample
    assert found is not None, f"{rule.name} was not tried: {caught.value}"
    assert caught.value.where == rule.where
    assert found.pattern != found.replacement or "..." in found.pattern
    if found.numbers not in ("type", "none", "loss", "promise"):
        assert found.inputs or found.program.startswith("left:")  # values of every input
    assert found.pattern in str(caught.value) and found.replacement in str(caught.value)
    assert "becomes" in found.program


@pytest.mark.parametrize("rule", tiers(SOME_TRUE, fast=4), ids=lambda r: r.name)
def test_what_holds_everywhere_is_accepted(rule: Rule) -> None:
    verdict = verify_rule(rule, wanted=16)
    assert verdict is not None and verdict.instances >= 3


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 7])
def test_all_that_fails_somewhere_is_refused_under_any_seed(seed: int) -> None:
    assert [r.name for r in every_false() if not refused(r, seed)] == []


@pytest.mark.long
@pytest.mark.slow
def test_all_that_holds_everywhere_is_accepted() -> None:
    assert [r.name for r in every_true() if refused(r)] == []


@pytest.mark.parametrize("name", ["relu6-is-relu", "gather-sorted", "barrier"])
def test_a_name_changes_nothing(name: str) -> None:
    rule, told = named(name), []
    for other in (rule.name, "another", "x" * 40):
        try:
            told.append(replace(verify_rule(replace(rule, name=other)), rule="", seconds=0.0))
        except RuleError as error:
            told.append(str(error).replace(repr(other), "it"))
    assert told[0] == told[1] == told[2]


@pytest.mark.slow
def test_bits_of_wider_numbers_are_no_law_of_narrow_ones() -> None:
    assert not any(refused(named("bits-of-float32-and-back"), seed) for seed in range(3))


@pytest.mark.slow
def test_no_rule_is_refused_for_a_broadcast_that_jax_does_not_know() -> None:
    """Its dims are the rule's own: rows of 2 do not stretch to 1."""
    assert not refused(named("shift-of-rows"))


def test_no_rule_is_refused_for_a_slice_beyond_the_end() -> None:
    """JAX has none, so that of nothing the first element is not asked."""
    assert not refused(named("least-integer-by-sorting"))


@pytest.mark.parametrize("seed", [2, 7])
@pytest.mark.parametrize(
    "name",
    [
        "slice-with-strides-of-slice",
        "not-transpose-idle-first-four",
        pytest.param("not-neighbours-joined", marks=pytest.mark.slow),
        "not-halves-of-odd",
        "convolution-mirrored-with-strides",
    ],
)
def test_what_chance_seldom_draws_is_drawn_under_any_seed(name: str, seed: int) -> None:
    """Strides, dims that are nearly in order, slices elsewhere in one dim and beside each other in
    another, extents beside the numbers of a guard, convolutions that leave a rest."""
    assert refused(named(name), seed)


@pytest.mark.parametrize("seed", [0, 4])
def test_a_product_that_leaves_the_range_on_its_way_tells_nothing(seed: int) -> None:
    """With seed 4 one of 32 factors is 0 in float64, and its sum of logarithms is not."""
    assert not refused(named("is-product-of-exponentials"), seed)
    assert refused(named("not-exponential-of-sum"), seed)
