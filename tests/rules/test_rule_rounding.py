"""What a law that reorders may lose: as much as the pattern's own roundings move each element.

Errors beside the greatest number that occurs say little of small products and of differences.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapestry_egg.graph.arrays import kind
from tapestry_egg.rules import Rule, load_book, load_books
from tapestry_egg.rules.language.book import book_names
from tapestry_egg.rules.verify.facts import (
    combined,
    is_polynomial,
    is_rational,
    is_still,
    is_sum,
    linear_in,
)
from tapestry_egg.rules.verify.samples import Draw
from tapestry_egg.rules.verify.values import drawn, ends, named_dtypes, near
from tapestry_egg.rules.verify.verdicts import RuleRefused, verify_rule
from tests.metakernels.cases import CASES, Application, application


def halved(cases: list[tuple[str, str, str]]) -> list[Any]:
    """Every second case as it is, the others in the last tier."""
    return [
        pytest.param(*case, id=case[0], marks=pytest.mark.long if k % 2 else ())
        for k, case in enumerate(cases)
    ]


#: Equal over the reals, and with few digits left, or none, somewhere: where, pattern, replacement.
LOSES = [
    ("the product underflows", "mul(sqrt(x), sqrt(y))", "sqrt(mul(x, y))"),
    ("the quotient underflows", "div(sqrt(x), sqrt(y))", "sqrt(div(x, y))"),
    ("beyond 20", "logistic(mul(neg(x), o=1))", "sub(o, logistic(x))"),
    (
        "y near x",
        "m:mul(sub(x, y), sub(x, y))",
        "add(sub(m(x, x), m(x, y)), sub(m(y, y), m(x, y)))",
    ),
    (
        "y near x, in a sum",
        "r:reduce[sum](m:mul(sub(x, y), sub(x, y)))",
        "sub(add(r(m(x, x)), r(m(y, y))), add(r(m(x, y)), r(m(x, y))))",
    ),
    ("below 1e-8", "mul(expm1(x), y)", "sub(mul(exp(x), y), y)"),
]
#: Factors and terms in another order: no more is lost than inputs off by roundings explain.
KEEPS = [
    ("factors", "mul(mul(x, y), z)", "mul(x, mul(y, z))"),
    ("terms", "add(add(x, y), z)", "add(x, add(y, z))"),
    ("distributed", "mul(x, add(y, z))", "add(mul(x, y), mul(x, z))"),
    ("contracted", "m:matmul(sub(x, y), w)", "sub(m(x, w), m(y, w))"),
    ("joined", "add(r:reduce[sum](x), r:reduce[sum](y))", "r(add(x, y))"),
    ("the truth", "log1p(expm1(x))", "x"),
    ("nearer to the truth", "sub(o=1, logistic(x))", "logistic(neg(x))"),
]


def law(folder: Path, match: str, replace: str, numerics: str = "reorders", also: str = "") -> Rule:
    if not also:
        guard = "$x.shape == $y.shape" if re.search(r"\by\b", match) else "1 == 1"
        also = f"dtype: float\n    guard: {guard}"
    book = folder / "law.yaml"
    book.write_text(
        "ruleset: algebra\nrules:\n  - name: law\n    law: it\n    reason: it\n"
        f"    numerics: {numerics}\n    match: '{match}'\n    replace: '{replace}'\n    {also}\n"
    )
    return load_book(book).rules[0]


@pytest.mark.slow
@pytest.mark.parametrize("where, match, replace", halved(LOSES))
def test_lost_digits_are_told(where: str, match: str, replace: str, tmp_path: Path) -> None:
    with pytest.raises(RuleRefused, match="round differently"):
        verify_rule(law(tmp_path, match, replace))
    if "sum" not in where:  # which overflows in 8 bits
        real = law(tmp_path, match, replace, "changes_rounding")
        assert verify_rule(real) is not None, "it is true of the reals"


@pytest.mark.parametrize("what, match, replace", halved(KEEPS))
@pytest.mark.slow
def test_another_order_loses_nothing(what: str, match: str, replace: str, tmp_path: Path) -> None:
    assert verify_rule(law(tmp_path, match, replace)) is not None


def test_no_number_at_a_pole_is_a_difference(tmp_path: Path) -> None:
    """1/sqrt(0) is infinite, sqrt(0)/0 no number."""
    with pytest.raises(RuleRefused, match="differ"):
        verify_rule(law(tmp_path, "rsqrt(x)", "div(sqrt(x), x)", "changes_rounding"))


@pytest.mark.slow
def test_rounding_twice_is_not_rounding_once(tmp_path: Path) -> None:
    once = "convert{new_dtype=$t}(x)"
    twice = "convert{new_dtype=$t}(convert{new_dtype=$u}(x))"
    guard = "guard: $x.dtype == %s and $u == %s and $t == %s"
    with pytest.raises(RuleRefused, match="round differently"):
        verify_rule(law(tmp_path, twice, once, "exact", guard % ("float64", "float32", "float16")))
    widened = law(tmp_path, twice, once, "exact", guard % ("int8", "int16", "int32"))
    assert verify_rule(widened) is not None


def test_dtypes_that_a_rule_names_are_drawn_every_other_turn(tmp_path: Path) -> None:
    rule = law(tmp_path, "neg(neg(x))", "x", "exact", "guard: $x.dtype in [uint16, float16]")
    named = named_dtypes(rule)
    assert set(named) == {"uint16", "float16"}
    rng = random.Random(0)
    met = [Draw(rng, turn, (), named).dtype for turn in range(40)]
    assert set(met[1::2]) == {"uint16", "float16"} and len(set(met[::2])) > 10


def test_values_near_others_and_midway() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=100).astype(np.float32)
    for _ in range(20):
        y = near(rng, x)
        apart = np.minimum(np.abs(y - x), np.abs(y + x))
        assert (apart <= 0.5 * np.abs(x)).mean() > 0.9
    from tapestry_egg.graph.blockgraph import TensorType

    midway = drawn(TensorType((400,), "float64"), "midway", rng, (), "float64")
    once, twice = midway.astype(np.float16), midway.astype(np.float32).astype(np.float16)
    assert (once != twice).any()
    scales = np.abs(drawn(TensorType((400,), "float32"), "scales", rng, (), "float32"))
    assert scales.min() < 1e-30 and scales.max() > 1e6 and scales.max() ** 3 <= ends("float32").most


@pytest.mark.slow
def test_either_part_of_a_complex_number_is_rounded_by_itself(tmp_path: Path) -> None:
    guard = "guard: $x.shape == $y.shape and kind($x.dtype) == complex"
    parts = "sub(mul(real(x), real(y)), mul(imag(x), imag(y)))"
    verify_rule(law(tmp_path, "real(mul(x, y))", parts, also=guard), wanted=12)
    wrong = parts.replace("sub(", "add(", 1)
    with pytest.raises(RuleRefused):
        verify_rule(law(tmp_path, "real(mul(x, y))", wrong, also=guard))


@pytest.mark.slow
def test_an_infinity_is_not_outside_of_what_a_function_takes(tmp_path: Path) -> None:
    """The power is infinite at -inf, where the root has no value; where terms meet, infinities may
    cancel."""
    with pytest.raises(RuleRefused):
        verify_rule(law(tmp_path, "pow(x, 0.5)", "sqrt(x)"))
    verify_rule(law(tmp_path, "mul(x, add(y, z))", "add(mul(x, y), mul(x, z))"), wanted=12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a_transform_is_off_by_roundings_of_its_greatest_result(seed: int) -> None:
    """So a transform of two dims is two of one, however far apart numbers lie."""
    rules = {r.name: r for b in load_books(book_names()) for r in b.rules}
    assert verify_rule(rules["transform-last-dim-last"], seed) is not None


# What templates say of rounding, against what the references compute of numbers.


def of_floats(kernel: str) -> Iterator[Application]:
    """Small operations of a kernel that read and make float32, beside places and flags."""
    for seed in range(12):
        app = application(kernel, seed)
        types = (*app.input_types, *app.output_types)
        real = {t.dtype for t in types if kind(t.dtype) in ("float", "complex")}
        if real == {app.output_types[0].dtype} == {"float32"} and sum(t.size for t in types) < 300:
            yield app


@pytest.mark.parametrize("kernel", CASES)
def test_what_rounds_nothing_gives_elements_of_its_operands(kernel: str) -> None:
    for app in of_floats(kernel):
        own = app.signature
        if is_still(own) and own.means not in ("conversion", "count") and not own.scattered:
            given = [np.abs(x).ravel() for x in app.operands if x.dtype == np.float32]
            for made in [y for y in app.run() if given and y.dtype == np.float32]:
                assert np.isin(np.abs(made[np.isfinite(made)]), np.concatenate(given)).all(), app


@pytest.mark.parametrize("kernel", CASES)
def test_polynomials_of_whole_numbers_are_whole(kernel: str) -> None:
    rng = np.random.default_rng(0)
    for app in of_floats(kernel):
        own = app.signature
        if is_polynomial(own) and own.means not in ("quotient", "power"):
            whole = [
                rng.integers(-3, 4, x.shape).astype(x.dtype) if x.dtype == np.float32 else x
                for x in app.operands
            ]
            assert all((made == np.round(made)).all() for made in app.run(operands=whole)), app


@pytest.mark.parametrize("kernel", CASES)
def test_elements_of_what_is_no_sum_are_made_of_one_of_an_operand(kernel: str) -> None:
    """Of what is one they are made of several."""
    several, tried = False, False
    for app in of_floats(kernel):
        own = app.signature
        if own.elements != "computed" or combined(own) & {"max", "min"}:
            continue
        made = app.run()
        for p, x in enumerate(app.operands):
            if x.dtype != np.float32 or not 1 < x.size < 40 or app.params.get("accuracy"):
                continue
            touched = [np.zeros(y.shape, int) for y in made]
            for at in np.ndindex(x.shape):
                other = x.copy()
                other[at] += 0.125
                moved = [*app.operands[:p], other, *app.operands[p + 1 :]]
                for n, y, z in zip(touched, app.run(operands=moved), made, strict=True):
                    n += y != z
            most = max(n.max(initial=0) for n in touched)
            assert is_sum(own) or most <= 1, app
            several |= most > 1
            tried |= is_sum(own) and own.scattered is None and min(x.shape) > 2
    assert several or not tried


def test_kernels_that_are_neither() -> None:
    own = {k: application(k, 0).signature for k in ("exp", "floor", "max", "softmax", "exp_dot")}
    assert not any(is_polynomial(s) for s in own.values())
    assert [k for k, s in own.items() if is_still(s)] == ["max"]
    assert [k for k, s in own.items() if is_sum(s)] == ["softmax", "exp_dot"]
    assert [k for k, s in own.items() if is_rational(s)] == ["floor", "max"]
    assert not any(is_sum(application("argmin", seed).signature) for seed in range(9))
    assert (linear_in(own["exp_dot"]), linear_in(own["softmax"])) == ({3}, set())
