"""Monoids: every law on random elements, every result against a formula written out in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.monoids import MonoidError, add_monoids, monoid, monoids
from tapestry_egg.monoids import definition as definition_module
from tapestry_egg.monoids.fold import (
    combine,
    fold,
    reduce,
    wrap,
    zero,
)
from tapestry_egg.monoids.laws import check_laws

NAMES = ("sum", "prod", "max", "min", "and", "or", "argmax", "argmin", "logaddexp")
TUPLES = ("moments", "logsumexp", "softmax_values")

#: The reduction over dim 0 written out, sharing nothing with the formulas of the data file.
DIRECT = {
    "sum": lambda x: np.sum(x, 0, dtype=x.dtype),
    "prod": lambda x: np.prod(x, 0, dtype=x.dtype),
    "max": lambda x: np.max(x, 0),
    "min": lambda x: np.min(x, 0),
    "and": lambda x: np.bitwise_and.reduce(x, 0),
    "or": lambda x: np.bitwise_or.reduce(x, 0),
    "logaddexp": lambda x: np.logaddexp.reduce(x, 0),
}


def kinds(name: str) -> list[str]:
    dtypes = {"bool": ["bool"], "int": ["int8", "int32"], "uint": ["uint8"], "float": ["float64"]}
    return [d for kind in monoid(name).kinds for d in dtypes.get(kind, [])]


@st.composite
def elements(draw: st.DrawFn, name: str, least: int = 1, special: bool = False) -> list[Any]:
    """The parts of up to nine elements: small numbers with ties, or with infinities and nans."""
    n = draw(st.integers(least, 9))
    dtype = draw(st.sampled_from(kinds(name)))
    if dtype == "bool":
        x = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    elif dtype.startswith("float"):
        numbers = st.integers(-8, 8).map(lambda v: v / 4)
        if special:
            numbers = st.one_of(numbers, st.sampled_from([np.inf, -np.inf, np.nan]))
        x = draw(st.lists(numbers, min_size=n, max_size=n))
    else:
        low = 0 if dtype[0] == "u" else -5
        x = draw(st.lists(st.integers(low, 5), min_size=n, max_size=n))
    parts: list[Any] = [np.array(x, dtype)]
    if name.startswith("arg"):
        parts.append(np.arange(n, dtype=np.int32))
    if name == "softmax_values":
        values = st.lists(st.integers(-4, 4), min_size=2 * n, max_size=2 * n)
        parts.append(np.array(draw(values), float).reshape(n, 2))
    return parts


def direct(name: str, parts: list[Any]) -> dict[str, Any]:
    """What the monoid must give for elements along dim 0."""
    x = parts[0]
    with np.errstate(all="ignore"):
        if name in DIRECT:
            return {next(p.name for p in monoid(name).result): DIRECT[name](x)}
        if name in ("argmax", "argmin"):
            return {"at": getattr(np, name)(x, 0)}
        if name == "moments":
            return {"mean": np.mean(x, 0), "variance": np.var(x, 0)}
        if name == "logsumexp":
            return {"value": np.log(np.sum(np.exp(x), 0))}
        weights = np.exp(x) / np.sum(np.exp(x), 0)
        return {"value": weights @ parts[1]}


def agree(left: Any, right: Any, tolerance: float = 1e-12) -> None:
    """Equal, or for floats within 1e-12: the reductions are of a few numbers below 10."""
    assert left.keys() == right.keys()
    for name in left:
        a, b = np.asarray(left[name]), np.asarray(right[name])
        if a.dtype.kind in "biu":
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def one_by_one(name: str, states: dict[str, Any], order: list[int]) -> dict[str, Any]:
    """The plain left fold, state by state."""
    of = monoid(name)
    picked = [{k: v[i] for k, v in states.items()} for i in order]
    out = picked[0]
    for state in picked[1:]:
        out = combine(of, out, state)
    return out


# ---- laws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, *TUPLES])
@settings(max_examples=25)
@given(data=st.data())
def test_brackets_do_not_matter_and_the_zero_is_neutral(name: str, data: st.DataObject) -> None:
    of = monoid(name)
    parts = data.draw(elements(name, least=3))
    states = wrap(of, *parts)
    n = len(parts[0])
    i, j = sorted(data.draw(st.lists(st.integers(1, n - 1), min_size=2, max_size=2)))
    whole = one_by_one(name, states, list(range(n)))
    pieces = [r for r in (range(i), range(i, j), range(j, n)) if r]
    folded = [one_by_one(name, states, list(r)) for r in pieces]
    right = folded[-1]
    for state in reversed(folded[:-1]):
        right = combine(of, state, right)
    agree(whole, right)
    dtypes = {p.name: x.dtype for p, x in zip(of.element, parts, strict=True)}
    nothing = zero(of, dtypes, (), {"e": 2})
    agree(combine(of, nothing, whole), whole)
    agree(combine(of, whole, nothing), whole)


@pytest.mark.parametrize("name", [*NAMES, *TUPLES])
@settings(max_examples=25)
@given(data=st.data())
def test_the_order_does_not_matter_where_that_is_claimed(name: str, data: st.DataObject) -> None:
    assert monoid(name).commutative
    states = wrap(monoid(name), *data.draw(elements(name, least=2)))
    n = len(next(iter(states.values())))
    order = data.draw(st.permutations(range(n)))
    agree(one_by_one(name, states, order), one_by_one(name, states, list(range(n))))


@pytest.mark.parametrize("name", [*NAMES, *TUPLES])
@settings(max_examples=25)
@given(data=st.data())
def test_a_fold_of_wrapped_elements_is_the_reduction(name: str, data: st.DataObject) -> None:
    parts = data.draw(elements(name))
    agree(reduce(monoid(name), *parts), direct(name, parts))


@pytest.mark.parametrize(
    "name", ["max", "min", "argmax", "argmin", "logaddexp", "logsumexp", "softmax_values"]
)
@settings(max_examples=40)
@given(data=st.data())
def test_infinities_and_nans_are_reduced_as_numpy_does(name: str, data: st.DataObject) -> None:
    parts = data.draw(elements(name, special=True))
    if name == "softmax_values" and np.isposinf(parts[0]).any():
        return  # ∞/∞ in the formula written out; the scaled one gives the value at ∞
    agree(reduce(monoid(name), *parts), direct(name, parts))


def test_softmax_and_logsumexp_do_not_overflow() -> None:
    x = np.array([1000.0, 999.0, -np.inf])
    v = np.array([[1.0], [2.0], [5.0]])
    p = 1 / (1 + np.exp(-1.0))
    agree(reduce(monoid("softmax_values"), x, v), {"value": np.array([p * 1 + (1 - p) * 2])})
    agree(reduce(monoid("logsumexp"), x), {"value": np.array(1000 + np.log1p(np.exp(-1)))})


@pytest.mark.parametrize("name", ["logsumexp", "softmax_values"])
def test_an_element_of_weight_nothing_is_the_zero(name: str) -> None:
    """A masked score, -inf, leaves a state as it is; all masked is 0/0 as in the formula."""
    of = monoid(name)
    masked = [np.array(-np.inf)] + ([np.array([3.0, 4.0])] if name == "softmax_values" else [])
    agree(wrap(of, *masked), zero(of, np.float64, (), {"e": 2}))


@pytest.mark.parametrize(
    ("name", "dtype", "wanted"),
    [
        ("sum", "int32", 0),
        ("prod", "float32", 1),
        ("max", "int8", -128),
        ("max", "float32", -np.inf),
        ("min", "uint8", 255),
        ("min", "bfloat16", np.inf),
        ("max", "float8_e4m3fn", -448),  # it has no infinities
        ("and", "bool", True),
        ("and", "uint8", 255),
        ("and", "int32", -1),
        ("or", "bool", False),
        ("logaddexp", "float32", -np.inf),
    ],
)
def test_nothing_folds_to_the_zero(name: str, dtype: str, wanted: float) -> None:
    import ml_dtypes

    of = monoid(name)
    empty = wrap(of, np.zeros((0, 3), getattr(ml_dtypes, dtype, dtype)))
    (folded,) = fold(of, empty).values()
    assert folded.shape == (3,) and folded.dtype.name == dtype
    assert [float(v) for v in folded] == [float(wanted)] * 3


def test_the_result_of_nothing_is_what_the_formula_gives() -> None:
    nothing = np.zeros((0,))
    assert reduce(monoid("logsumexp"), nothing)["value"] == -np.inf
    assert np.isnan(reduce(monoid("moments"), nothing)["mean"])


def test_states_keep_dtypes_and_trailing_dims() -> None:
    of = monoid("softmax_values")
    states = wrap(of, np.zeros((3, 4), np.float32), np.zeros((3, 4, 5), np.float16))
    assert {k: (v.shape, v.dtype.name) for k, v in states.items()} == {
        "top": ((3, 4), "float32"),
        "sum": ((3, 4), "float32"),
        "acc": ((3, 4, 5), "float16"),
    }
    count = wrap(monoid("moments"), np.zeros(3, np.float32))["n"]
    assert count.dtype == np.int32


@given(axis=st.integers(-3, 2), n=st.integers(1, 7))
def test_any_leading_dim_can_be_folded(axis: int, n: int) -> None:
    shape = [2, 3, 4]
    shape[axis] = n
    x = np.arange(np.prod(shape)).reshape(shape)
    agree(reduce(monoid("sum"), x, axis=axis), {"total": x.sum(axis)})
    with pytest.raises(MonoidError, match="no dim 3"):
        reduce(monoid("sum"), x, axis=3)


# ---- the file ----------------------------------------------------------------------------------

LAST = """
last:
  law: the last element that is not zero
  element: {x: {kinds: [int]}}
  state: {kept: {dtype: x}}
  wrap: {kept: x}
  combine: {kept: "where(b.kept == 0, a.kept, b.kept)"}
  zero: {kept: 0}
  unwrap: {value: kept}
  exact: [int]
  commutative: false
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Monoids added in a test are forgotten after it."""
    monkeypatch.setattr(definition_module, "_KNOWN", dict(monoids()))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.usefixtures("fresh")
def test_a_file_of_ones_own_adds_monoids(tmp_path: Path) -> None:
    (added,) = add_monoids(written(tmp_path, LAST))
    assert monoid("last") is added
    x = np.array([[3, 0, 4], [5, 0, 0]])
    assert reduce(added, x)["value"].tolist() == [5, 0, 4]
    with pytest.raises(MonoidError, match="a monoid 'last' already"):
        add_monoids(tmp_path / "mine.yaml")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("old", "new", "law"),
    [
        ("commutative: false", "commutative: true", r"a•b = b•a"),
        ("where(b.kept == 0, a.kept, b.kept)", "a.kept - b.kept", r"\(a•b\)•c"),
        ("zero: {kept: 0}", "zero: {kept: 1}", r"= a"),
        ("commutative: false", "commutative: false\n  mesh: {kept: psum(kept)}", "mesh"),
    ],
)
def test_a_monoid_that_breaks_a_law_is_not_added(
    tmp_path: Path, old: str, new: str, law: str
) -> None:
    with pytest.raises(MonoidError, match=rf"last breaks the law .*{law}"):
        add_monoids(written(tmp_path, LAST.replace(old, new)))
    assert "last" not in monoids()


@pytest.mark.usefixtures("fresh")
def test_sums_of_floats_are_not_exact(tmp_path: Path) -> None:
    """They keep the laws up to rounding, so only the claim is wrong."""
    floats = LAST.replace("[int]", "[float]").replace("commutative: false", "commutative: true")
    floats = floats.replace("where(b.kept == 0, a.kept, b.kept)", "a.kept + b.kept")
    with pytest.raises(MonoidError, match=r"last breaks the law \(a•b\)•c(.|\n)*`exact`"):
        add_monoids(written(tmp_path, floats))
    add_monoids(written(tmp_path, floats.replace("exact: [float]", "exact: []")))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("where(b.kept == 0", "where(b.kept = 0", "is not a formula: .*=="),
        ("a.kept, b.kept)", "a.kept", "is not a formula: .* never closed"),
        ("a.kept, b.kept)", "a.kept, c.kept)", "'c.kept' is not known here"),
        ("where(b", "median(b", "no function 'median'"),
        ("where(b.kept == 0, a.kept, b.kept)", "max(a.kept)", "max takes 2 arguments, not 1"),
        ("where(b.kept == 0, a.kept, b.kept)", "psum(a.kept)", "no function 'psum'"),
        (
            "commutative: false",
            "mesh: {kept: psum(kept) + 1}",
            "is one collective, of a state",
        ),
        ("[int]", "[number]", "'number' is none of"),
        ("  wrap: {kept: x}\n", "", "'wrap' is missing in monoid 'last'"),
        ("dtype: x", "dtype: y", "neither a part of the element nor a dtype"),
        ("wrap: {kept: x}", "wrap: {taken: x}", "no part 'taken'"),
        ("commutative: false", "commutative: maybe", "must be true or false"),
        ("commutative: false", "colour: red", "unknown key 'colour'"),
        ("{dtype: x}", '{dtype: x, shape: "[e]"}', "not a shape"),
        ("law: the", "law: [the", "not YAML"),
        ("kinds: [int]", "kinds: [int], shape: '[..., e]'", "beyond the value's"),
        ("wrap: {kept: x}", f"wrap: {{kept: {'x + ' * 2000}x}}", "nested too deeply"),
        ("zero: {kept: 0}", f"zero: {{kept: {'9' * 5000}}}", "at most 18 digits"),
        ("zero: {kept: 0}", "zero: {kept: '0 # 1'}", "'#' cannot stand in a formula"),
        ("where(b.kept == 0", "where(0 < b.kept < 2", "0 < b.kept < 2' cannot stand"),
        ("where(b.kept == 0", "where(b.kept.real == 0", "b.kept.real' cannot stand"),
    ],
)
def test_a_malformed_file_says_where(tmp_path: Path, old: str, new: str, what: str) -> None:
    path = written(tmp_path, LAST.replace(old, new, 1))
    with pytest.raises(MonoidError, match=rf"mine\.yaml:\d+:\d+(.|\n)*{what}"):
        add_monoids(path)


@pytest.mark.parametrize("name", [*NAMES, *TUPLES])
def test_what_ships_keeps_its_laws(name: str) -> None:
    check_laws(monoid(name), seed=1)


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ([np.zeros(3)], "takes score, value"),
        ([np.zeros(3, int), np.zeros((3, 1))], "does not take score of dtype int64"),
        ([np.zeros(3), np.zeros((4, 1))], "have shapes"),
        ([np.zeros(3), np.array(1.0)], "lacks dims"),
    ],
)
def test_elements_that_do_not_fit_are_refused(arrays: list[Any], what: str) -> None:
    with pytest.raises(MonoidError, match=what):
        wrap(monoid("softmax_values"), *arrays)


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(MonoidError, match=r"no monoid 'mean'(.|\n)*moments"):
        monoid("mean")
