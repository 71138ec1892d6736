"""Equal programs have equally fast plans, however they are written (`metamorphic.py`)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapestry_egg.rewrite.extractions import extractions
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
from tests.pipeline.metamorphic import (
    PIECES,
    Case,
    Step,
    Writing,
    agree,
    check,
    equal,
    microseconds,
    traced,
)

RULES = [r for book in load_books(DEFAULT_BOOKS) for r in book.rules]

#: Piece -> spellings that are known to differ from the first one, and why.
KNOWN: dict[str, tuple[tuple[int, ...], str]] = {
    "outer": ((2,), "the gradient of a product with a vector is a product with a vector"),
    "scaled": ((5,), "the gradient of a product with a vector is a product with a vector"),
    "argmax": (
        (2, 3),
        "few states are gathered quicker than scattered; two passes are not one",
    ),
    "largest": ((2,), "the gradient of a maximum is shared among equals, that of top_k is not"),
    "written": ((3,), "masks read both cases whole, parts are stored before they are padded"),
    "three": ((2,), "the gradient of what is padded around adds up what overlaps"),
    "cumulated": ((1,), "associative scans are not read as sums"),
    "fourier": ((1, 2), "one form has both dims of all transforms in one order"),
    "entropy": ((3,), "weights of a cut dim are divided by their sum, or are one exponential"),
    "diagonal": ((2, 3), "of a diagonal one dim is looked up, whichever is cut"),
}


def reads_of(piece: str) -> tuple[str | int, ...]:
    letters = {"x": "a", "y": "b", "v": "c", "u": "c", "i": "i"}
    return tuple([letters[o] for o in PIECES[piece].operands])


def spelled(piece: str) -> list[int]:
    """The spellings of a piece that are not known to differ."""
    count = len(PIECES[piece].spellings)
    return [k for k in range(count) if k not in KNOWN.get(piece, ((), ""))[0]]


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES)
def test_spellings_of_a_piece_give_equal_numbers(piece: str) -> None:
    case = Case((Step(piece, reads_of(piece)),), gradient=PIECES[piece].makes == "m")
    count = len(PIECES[piece].spellings)
    equal(case, *[Writing((k,), transposed=t) for k in range(count) for t in (False, True)])


def singles() -> list[Any]:
    out = []
    for piece, spec in PIECES.items():
        known, reason = KNOWN.get(piece, ((), ""))
        for k in range(1, len(spec.spellings)):
            marks: list[Any] = [pytest.mark.long]
            if k in known:
                marks.append(pytest.mark.xfail(reason=reason, strict=True))
            out.append(pytest.param(piece, k, id=f"{piece} {k}", marks=marks))
    return out


@pytest.mark.parametrize(("piece", "spelling"), singles())
def test_a_piece_takes_as_long_however_it_is_spelled(piece: str, spelling: int) -> None:
    for gradient in (False, True):
        for cut in (None, 0, 1):
            case = Case((Step(piece, reads_of(piece)),), gradient, cut)
            check(case, Writing((0,)), Writing((spelling,)))


QUICK: dict[str, tuple[Case, Writing, Writing]] = {
    "other spellings": (
        Case((Step("product", ("a", "b")), Step("softmax", (0,), 1)), cut=0),
        *(Writing((0, 0)), Writing((1, 2))),
    ),
    "written again": (
        Case((Step("sum", ("a",)), Step("distance", (0, 0))), cut=0),
        *(Writing((0, 0)), Writing((0, 0), frozenset([0]))),
    ),
    "another order": (
        Case((Step("sum", ("a",)), Step("square", ("b",)), Step("scaled", (1, 0))), True, 0),
        *(Writing((0,) * 3), Writing((0,) * 3, order=(1,))),
    ),
    "transposed": (
        Case((Step("shift", ("a",), 1), Step("product", (0, "b"))), cut=1),
        *(Writing((0, 0)), Writing((0, 0), transposed=True)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_few_pairs(name: str) -> None:
    check(*QUICK[name])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    known: dict[str, list[str | int]] = {"m": ["a", "b"], "v": ["c"], "i": ["i"]}
    steps = []
    for k in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(list(PIECES)))
        reads = [draw(st.sampled_from(known[o][::-1])) for o in PIECES[name].reads]
        steps.append(Step(name, tuple(reads), draw(st.integers(0, 1))))
        known[PIECES[name].makes].append(k)
    return Case(tuple(steps), draw(st.booleans()), draw(st.sampled_from([None, 0, 1])))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Case, Writing, Writing]:
    """A program in two writings: in the other one each step may have another spelling, values may
    be written again, steps stand in another order, or all matrices be transposed."""
    case = draw(cases())
    ways = [st.sampled_from(spelled(s.piece)) for s in case.steps]
    one, other = [tuple(draw(w) for w in ways) for _ in range(2)]
    which = st.integers(0, len(case.steps) - 1)
    again, order = draw(st.frozensets(which)), tuple(draw(st.lists(which)))
    return case, Writing(one), Writing(other, again, order, draw(st.booleans()))


@pytest.mark.long
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(pairs())
def test_equal_programs_have_equally_fast_plans(pair: tuple[Case, Writing, Writing]) -> None:
    check(*pair)


@pytest.mark.long
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(cases())
def test_what_rules_make_of_a_program_is_as_fast_as_it(case: Case) -> None:
    """Each program that the rules of the books hold, planned as if somebody had written it."""
    graph = traced(case, Writing((0,) * len(case.steps)))
    found = explore(graph, RULES)
    seconds = [1.0] * len(found.catalogue)
    plain = microseconds(graph, case.cut)
    for form in extractions(graph, found.terms, found.catalogue, seconds, most=3).found:
        made = microseconds(form.built.graph, case.cut)
        agree(plain, made, f"{case}\nby {', '.join(form.built.rules)}\n{form.built.graph}")
