"""Small random programs of which rules make others: what is searched of all these, as networks,
against every plan of every program that the classes of equal values hold.

The programs are listed node by node (`every_form.py`), their plans by tables (`tables.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.rewrite.extractions import OPERATIONS
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, load_books
from tapestry_egg.schedule.schedules import scheduled
from tapestry_egg.tracing.constants import prepare
from tests.extract.every_form import TooMany, every_form
from tests.extract.random_programs import Drawn, algebra, graph_of
from tests.extract.tables import Point
from tests.extract.test_random_programs import TARGET, apart_of, network, tables_of

BOOKS = load_books(("algebra", "fusion", "sharding", "collectives"))
RULES = [r for b in BOOKS for r in b.rules if r.ruleset in PROGRAM_RULESETS]
#: Choices among the nodes that are listed, and combinations of each of their programs.
CHOICES, MOST = 400, 200_000


def every_front(graph: BlockGraph) -> list[Point] | None:
    """The front of all plans of all programs; None where there are too many."""
    front: list[Point] = []
    try:
        every = every_form(graph, RULES, CHOICES)
    except TooMany:
        return None
    for one in every:
        plan = tables_of(scheduled(prepare(one), {}))
        if plan.rows > MOST:
            return None
        front += plan.front()
    return best_of(front)


def best_of(front: Sequence[Point]) -> list[Point]:
    """Those of some plans that no other beats."""
    best: list[Point] = []
    for point in sorted(front, key=lambda f: (f.peak, f.seconds)):
        if not best or point.seconds < best[-1].seconds * (1 - 1e-9):
            best.append(point)
    return best


def searched(found: Sequence[Form]) -> list[Problem]:
    """The networks of forms."""
    return [network(scheduled(prepare(form.graph), {})) for form in found]


def as_given(graph: BlockGraph) -> list[Form]:
    """The program alone."""
    return [Form(graph)]


def by_one_device(graph: BlockGraph) -> Sequence[Form]:
    """It, and what saves most on one device."""
    return forms(graph, BOOKS, TARGET, room=0)


def every_one(graph: BlockGraph) -> Sequence[Form]:
    """What is searched."""
    return forms(graph, BOOKS, TARGET, room=OPERATIONS)


#: What is searched where forms are no choice, or one of one device.
FROZEN: dict[str, Callable[[BlockGraph], Sequence[Form]]] = {
    "forms": as_given,
    "forms, but by one device": by_one_device,
}


def apart(
    seed: int, draw: Callable[[int], Drawn], which: Callable[[BlockGraph], Sequence[Form]]
) -> float:
    """How far the front of the networks of some forms is from that of all plans of all forms."""
    graph = graph_of(seed, draw)
    front = every_front(graph)
    assert front is not None, f"seed {seed} has more plans"
    return apart_of(front, searched(which(graph)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 4, 6, 7, 16, 21, 25, 31, 280])
def test_what_is_searched_has_the_front_of_all_plans_of_all_forms(seed: int) -> None:
    assert apart(seed, algebra, every_one) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "frozen"), [(2, "forms"), (6, "forms, but by one device"), (20, "forms")]
)
def test_without_a_choice_among_forms_the_fronts_differ(seed: int, frozen: str) -> None:
    assert apart(seed, algebra, FROZEN[frozen]) > 1e-6


@pytest.mark.long
def test_many_more_of_them_have_it() -> None:
    tried = 0
    for seed in range(100):
        graph = graph_of(seed, algebra)
        front = every_front(graph)
        if front is not None:
            tried += 1
            assert apart_of(front, searched(every_one(graph))) < 1e-6, f"seed {seed}"
    assert tried > 70
