"""Reachable memory: answers within tight limits are found at once, and bounds hold without one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.gym.cfn.network.network import Network
from tapestry_egg.extract.gym.cfn.network.reach import lightest, reach
from tapestry_egg.extract.gym.cfn.network.reductions import reduce
from tapestry_egg.extract.gym.cfn.solver import Result, solve
from tapestry_egg.extract.gym.formats import iopddl
from tests.gym import networks


def network(document: dict[str, Any]) -> Network | None:
    reduced = reduce(iopddl.read(document, ""), ("consistency",))
    return None if reduced.infeasible is not None else reduced.network


def rows_in_order(document: dict[str, Any], x: np.ndarray) -> tuple[int, ...]:
    """The strategies of a network's rows, by what consistency alone leaves."""
    return tuple(reduce(iopddl.read(document, ""), ("consistency",)).lift(x).tolist())


def tight(seed: int, count: int = 40, share: float = 1.0) -> dict[str, Any]:
    """A ladder of nodes whose lightest strategies forbid each other, limited to what a hidden
    answer needs, times a share.

    Neighbours may not both take a strategy of the lighter half unless the hidden answer does.
    """
    rng = np.random.default_rng(seed)
    size = 5
    hidden = rng.integers(0, size, count)
    usages = np.sort(rng.integers(1, 1000, (count, size)), axis=1)
    edges = []
    for a, b in [(i, j) for i in range(count) for j in (i + 1, i + 3) if j < count]:
        table = rng.integers(0, 50, (size, size))
        table[:2, :2] = networks.INFINITE
        table[hidden[a], hidden[b]] = int(rng.integers(0, 50))
        edges.append((a, b, table.ravel().tolist()))
    starts = rng.integers(0, 12, count)
    document = networks.document(
        [[int(s), int(s) + int(d)] for s, d in zip(starts, rng.integers(1, 9, count), strict=True)],
        rng.integers(0, 50, (count, size)).tolist(),
        usages.tolist(),
        edges,
        0,
    )
    peak = networks.peak(document, tuple(hidden.tolist()))
    document["problem"]["usage_limit"] = int(share * peak)
    return document


def excess(document: dict[str, Any], x: tuple[int, ...]) -> int:
    return networks.peak(document, x) - document["problem"]["usage_limit"]


@pytest.mark.slow
@given(networks.problems(), st.integers(-6, 3))
@settings(max_examples=60)
def test_what_is_reached_is_told_truly_and_bounded(document: dict[str, Any], more: int) -> None:
    document["problem"]["usage_limit"] = max(0, document["problem"]["usage_limit"] + more)
    net = network(document)
    legal = list(networks.answers(document, 10**12))
    if net is None or not len(net) or not legal:
        return
    found = reach(net, 60.0, np.random.default_rng(0), rounds=40)
    least = min(excess(document, x) for x in legal)
    if len(net.uses.room) and np.isfinite(found.over):
        x = rows_in_order(document, found.x)
        assert x in legal
        assert excess(document, x) == found.over >= least >= found.bound
    if found.over <= 0:
        assert net.fits(found.x)


@pytest.mark.parametrize("seed", range(8))
def test_answers_within_tight_limits_are_found(seed: int) -> None:
    document = tight(seed, share=1.02)
    net = network(document)
    assert net is not None
    light = lightest(net)
    assert not (np.isfinite(net.value(light)) and net.fits(light))  # it is not as easy as that
    found = reach(net, 60.0, np.random.default_rng(seed))
    assert found.over <= 0
    x = rows_in_order(document, found.x)
    assert excess(document, x) <= 0 and not networks.forbidden(document, x)


def ticking(document: dict[str, Any], ticks: int) -> Result:
    """Solved in one process, by a clock that counts how often it is read."""
    count = itertools.count()
    problem = iopddl.read(document, "")
    return solve(problem, float(ticks), processes=1, clock=lambda: float(next(count)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_limits_that_nothing_was_found_for_say_what_is_near(seed: int) -> None:
    """Lower and lower, until no answer is found; it says which usage is, and at what time."""
    for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        document = tight(seed, 20, share)
        limit = document["problem"]["usage_limit"]
        found = ticking(document, 150)
        if found.choice is None:
            break
        rows = tuple(iopddl.answer(iopddl.read(document, ""), found.choice))
        assert excess(document, rows) <= 0
    assert found.infeasible is not None
    assert f"the limit is {limit}" in found.infeasible.reason
    assert "at time" in found.infeasible.reason
    assert found.infeasible.least > limit or not found.proven


def test_nothing_fits_though_each_node_alone_does() -> None:
    """Two nodes may each be light, but not both: the limit is between the two."""
    no = networks.INFINITE
    document = networks.document(
        [[3, 5], [3, 5]],
        [[0, 0, 1]] * 2,
        [[1, 8, 9]] * 2,
        [(0, 1, [no, 0, 0, 0, no, no, 0, no, 0])],
        8,
    )
    assert networks.least(document) is None and networks.least(document, 9) == 0
    net = network(document)
    assert net is not None
    found = reach(net, 60.0, np.random.default_rng(0))
    assert found.over == 1 and 0 < found.bound <= 1
