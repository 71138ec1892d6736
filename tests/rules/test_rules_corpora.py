"""Corpora of rules: what fails somewhere is refused, what holds everywhere is accepted.

The verdict is the same whatever the seed and whatever the rule is called.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tapestry_egg.errors import RuleError
from tapestry_egg.rules import Rule, load_book
from tapestry_egg.rules.verify.verdicts import RuleRefused, verify_rule

HERE = Path(__file__).parent
FALSE, TRUE = (
    [r for kind in kinds for r in load_book(HERE / f"{kind}.yaml").rules]
    for kinds in (("rules_false", "strangers_false"), ("rules_true", "strangers_sound"))
)


def refused(rule: Rule, seed: int = 0) -> bool:
    try:
        verify_rule(rule, seed)
    except RuleRefused as error:
        assert error.counterexample is not None, f"{rule.name} was not tried: {error}"
        return True
    return False


def test_the_corpora_are_long_enough_to_mean_something() -> None:
    assert len(FALSE) >= 540 and len(TRUE) >= 330


@pytest.mark.parametrize("rule", FALSE[::10], ids=lambda r: r.name)
def test_some_of_what_fails_somewhere_is_refused(rule: Rule) -> None:
    assert refused(rule)


# Some of what is true, and of that a sixth in the first tier.
SOME = [pytest.param(r, marks=pytest.mark.slow if k % 6 else ()) for k, r in enumerate(TRUE[::67])]


@pytest.mark.parametrize("rule", SOME, ids=lambda r: r.name)
def test_some_of_what_holds_everywhere_is_accepted(rule: Rule) -> None:
    assert not refused(rule)


@pytest.mark.long
def test_all_that_fails_somewhere_is_refused_under_any_seed() -> None:
    for seed in (0, 7):
        assert [r.name for r in FALSE if not refused(r, seed)] == []


@pytest.mark.long
@pytest.mark.slow
def test_all_that_holds_everywhere_is_accepted() -> None:
    assert [r.name for r in TRUE if refused(r)] == []


@pytest.mark.parametrize("rule", [FALSE[0], FALSE[20], TRUE[0]], ids=lambda r: r.name)
def test_a_name_changes_nothing(rule: Rule) -> None:
    told = []
    for name in (rule.name, "another", "x" * 40):
        try:
            told.append(replace(verify_rule(replace(rule, name=name)), rule="", seconds=0.0))
        except RuleError as error:
            told.append(str(error).replace(repr(name), "it"))
    assert told[0] == told[1] == told[2]


@pytest.mark.slow
def test_bits_of_wider_numbers_are_no_law_of_narrow_ones() -> None:
    rule = next(r for r in TRUE if r.name == "bits-of-float32-and-back")
    assert not any(refused(rule, seed) for seed in range(5))


@pytest.mark.slow
def test_no_rule_is_refused_for_a_broadcast_that_jax_does_not_know() -> None:
    """Its dims are the rule's own: rows of 2 do not stretch to 1."""
    rule = next(r for r in TRUE if r.name == "shift-of-rows")
    assert not refused(rule)


def test_no_rule_is_refused_for_a_slice_beyond_the_end() -> None:
    """JAX has none, so that of nothing the first element is not asked."""
    rule = next(r for r in TRUE if r.name == "least-integer-by-sorting")
    assert not refused(rule)


@pytest.mark.parametrize("seed", [2, 3, 11])
def test_slices_with_strides_are_drawn_under_any_seed(seed: int) -> None:
    rule = next(r for r in FALSE if r.name == "slice-with-strides-of-slice")
    assert refused(rule, seed)


@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize(
    "name",
    [
        "transpose-idle-first-four",
        pytest.param("neighbours-joined", marks=pytest.mark.slow),
        "halves-of-odd",
    ],
)
def test_what_chance_seldom_draws_is_drawn_under_any_seed(name: str, seed: int) -> None:
    """Dims that are nearly in order, slices elsewhere in one dim and beside each other in another,
    extents beside the numbers of a guard."""
    rule = next(r for r in FALSE if r.name == f"not-{name}")
    assert refused(rule, seed)


@pytest.mark.parametrize("seed", [0, 4])
def test_a_product_that_leaves_the_range_on_its_way_tells_nothing(seed: int) -> None:
    """With seed 4 one of 32 factors is 0 in float64, and its sum of logarithms is not."""
    sound = next(r for r in TRUE if r.name == "is-product-of-exponentials")
    false = next(r for r in FALSE if r.name == "not-exponential-of-sum")
    assert not refused(sound, seed)
    assert refused(false, seed)


def test_convolutions_that_leave_a_rest_are_drawn_under_any_seed() -> None:
    """With this seed none came up by itself."""
    rule = next(r for r in FALSE if r.name == "convolution-mirrored-with-strides")
    assert refused(rule, 7)
