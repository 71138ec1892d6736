"""Each reduction keeps a best answer, by itself and with the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings

from tapestry_egg.extract.gym.cfn.network.reductions import STEPS, reduce
from tapestry_egg.extract.gym.formats import iopddl
from tests.gym import networks


def check(document: dict[str, Any], steps: tuple[str, ...]) -> None:
    """The best of what is left is the best of all, and lifts to an answer of that cost."""
    least = networks.least(document)
    reduced = reduce(iopddl.read(document, ""), steps)
    if reduced.infeasible is not None:
        assert least is None
        return
    value, rows = networks.best_rows(reduced.network)
    if least is None:
        assert rows is None
        return
    assert rows is not None
    assert value == least
    x = tuple(reduced.lift(rows).tolist())
    assert networks.cost(document, x) == least
    assert x in set(networks.answers(document))


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@given(document=networks.problems())
@settings(max_examples=60)
def test_one_step_alone_is_exact(step: str, document: dict[str, Any]) -> None:
    check(document, (step,))


@pytest.mark.slow
@given(networks.problems())
@settings(max_examples=150)
def test_all_steps_together_are_exact(document: dict[str, Any]) -> None:
    check(document, STEPS)


@pytest.mark.slow
@example(networks.LATER[0])
@given(networks.problems(unit=10**17))
@settings(max_examples=100)
def test_amounts_near_the_largest_integers_are_exact(document: dict[str, Any]) -> None:
    check(document, STEPS)


@pytest.mark.parametrize("document", networks.LATER)
def test_what_was_minimised_away_follows_when_its_neighbour_loses_rows(
    document: dict[str, Any],
) -> None:
    check(document, STEPS)
    check(document, ("dominance", "series"))


@pytest.mark.parametrize(
    ("limit", "steps"),
    [(5, ("series", "merge")), (4, ("series", "merge")), (4, ("series", "merge", "memory"))],
)
def test_what_was_minimised_away_follows_when_its_neighbours_are_merged(
    limit: int, steps: tuple[str, ...]
) -> None:
    """Once the first is minimised away, the next two must be equal; each has a leaf besides.

    Both at their first rows take 5 units of memory, so that a limit of 4 then drops these rows.
    """
    no = networks.INFINITE
    same = [0, 1, 1, 0]
    document = networks.document(
        [[0, 1]] * 5,
        [[0, 3, 0, 0], [1, 1], [1, 1], [0, 0], [0, 0]],
        [[0] * 4, [3, 0], [2, 0], [0, 0], [0, 0]],
        [
            (0, 1, [0, no, no, 0, 0, 0, no, no]),
            (0, 2, [0, no, no, 0, no, no, 0, 0]),
            (1, 3, same),
            (2, 4, same),
        ],
        limit,
    )
    assert "merged: 1" in reduce(iopddl.read(document, ""), steps).log
    check(document, steps)


@pytest.mark.parametrize("seed", range(0, 120, 20))
def test_steps_after_others_are_exact(seed: int) -> None:
    for s in range(seed, seed + 20):
        rng = np.random.default_rng(s)
        check(networks.connected(s), STEPS)
        check(networks.connected(s), tuple(x for x in STEPS if rng.random() < 0.6))


def chain(length: int) -> dict[str, Any]:
    """Nodes that must all take the same of three strategies, in a row."""
    same = [0 if i == j else networks.INFINITE for i in range(3) for j in range(3)]
    return networks.document(
        [[0, 1]] * length,
        [[i % 5, (i * 3) % 7, 4] for i in range(length)],
        [[1, 1, 0]] * length,
        [(i, i + 1, same) for i in range(length - 1)],
        length,
    )


def test_what_must_be_equal_becomes_one_variable() -> None:
    document = chain(40)
    reduced = reduce(iopddl.read(document, ""), ("consistency", "merge"))
    assert len(reduced.network) == 1
    assert "merged: 39" in reduced.log
    value, rows = networks.best_rows(reduced.network)
    costs = [sum(c) for c in zip(*document["problem"]["nodes"]["costs"], strict=True)]
    assert rows is not None
    assert (value, int(rows[0])) == (min(costs), costs.index(min(costs)))


def test_limits_that_nothing_keeps_are_told_with_their_time() -> None:
    document = networks.document([[0, 2], [1, 4]], [[1, 2], [0]], [[5, 6], [7]], [], 11)
    why = reduce(iopddl.read(document, "")).infeasible
    assert why is not None
    assert (why.time, why.least) == (1, 12)
    assert "time 1" in why.reason and "12" in why.reason and "11" in why.reason


def test_the_least_that_is_told_is_of_all_and_at_the_worst_time() -> None:
    spans = [[0, 4], [1, 4], [2, 3], [2, 5]]
    document = networks.document(spans, [[0, 1]] * 4, [[9, 6], [5, 8], [4, 3], [2, 2]], [], 7)
    why = reduce(iopddl.read(document, "")).infeasible
    assert why is not None
    assert (why.time, why.least) == (2, 6 + 5 + 3 + 2)


def test_a_time_is_kept_though_more_is_there_next_if_less_is_free() -> None:
    # At time 1 all four may be there, at time 0 three; but there 5 more are always taken.
    spans = [[0, 2], [0, 2], [1, 2], [0, 1]]
    document = networks.document(
        spans, [[0, 9], [0, 9], [0, 9], [0]], [[4, 0], [4, 0], [1, 0], [5]], [], 9
    )
    net = reduce(iopddl.read(document, ""), ("memory",)).network
    assert net.uses.room.tolist() == [4]
    assert reduce(iopddl.read(document, ""), ("memory",)).log
    check(document, ("memory",))


def test_a_row_that_allows_two_is_not_merged_away() -> None:
    only = networks.INFINITE
    document = networks.document(
        [[0, 1]] * 2, [[0, 0], [0, 9]], [[9, 0], [0, 0]], [(0, 1, [0, only, 5, 3])], 5
    )
    assert networks.least(document) == 5
    check(document, ("merge",))


def test_only_the_times_that_can_exceed_the_limit_are_left() -> None:
    # Three at once only at time 2; elsewhere no two together reach the limit.
    spans = [[0, 3], [1, 4], [2, 5]]
    document = networks.document(
        spans, [[3, 0]] * 3, [[0, 4]] * 3, [(0, 1, [0, 1, 1, 5]), (1, 2, [0, 1, 1, 5])], 8
    )
    net = reduce(iopddl.read(document, ""), ("memory",)).network
    assert net.uses.room.tolist() == [8]
    assert len(net.uses) == 3
