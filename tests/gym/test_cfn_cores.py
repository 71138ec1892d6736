"""Cores: a network with fewer rows, whose answers are answers of the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.gym.cfn import cores, search
from tapestry_egg.extract.gym.cfn.cores import Core, CoreSearch, rows_of, threshold
from tapestry_egg.extract.gym.cfn.network.messages import Messages
from tapestry_egg.extract.gym.cfn.network.network import Network
from tapestry_egg.extract.gym.cfn.network.reductions import narrow, reduce
from tapestry_egg.extract.gym.formats import iopddl
from tests.gym import networks


def network(document: dict[str, Any]) -> Network | None:
    reduced = reduce(iopddl.read(document, ""), ("consistency",))
    return None if reduced.infeasible is not None else reduced.network


def restricted(net: Network, document: dict[str, Any], kept: np.ndarray) -> int | None:
    """The least cost of answers whose rows are all kept, by enumeration."""
    lift = reduce(iopddl.read(document, ""), ("consistency",)).lift
    choices = [np.flatnonzero(kept[a:b]) for a, b in zip(net.rows[:-1], net.rows[1:], strict=True)]
    fitting = set(networks.answers(document))
    grid = np.stack(np.meshgrid(*choices, indexing="ij"), axis=-1).reshape(-1, len(net))
    costs = []
    for x in grid:
        rows = tuple(lift(x).tolist())
        if rows in fitting:
            costs.append(networks.cost(document, rows))
    return min(costs, default=None)


@pytest.mark.slow
@given(networks.problems(), st.integers(0, 2**32 - 1))
@settings(max_examples=80)
def test_the_best_of_a_core_is_the_best_of_the_rows_kept(
    document: dict[str, Any], seed: int
) -> None:
    net = network(document)
    if net is None or not len(net):
        return
    if np.prod(net.sizes) > 300:
        return
    rng = np.random.default_rng(seed)
    kept = rows_of(net, rng.integers(0, net.sizes)) | (rng.random(len(net.cost)) < 0.5)
    least = restricted(net, document, kept)
    reduced = narrow(net, kept)
    if reduced.infeasible is not None:
        assert least is None
        return
    value, rows = networks.best_rows(reduced.network)
    assert (None if rows is None else value) == least
    if rows is not None:
        x = reduced.lift(rows)
        assert kept[net.rows[:-1] + x].all()
        assert net.value(x) == least and net.fits(x)


@pytest.mark.slow
@given(networks.problems(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_on_a_tree_excess_is_what_a_row_costs_more_than_the_best(
    document: dict[str, Any], seed: int
) -> None:
    """Where message passing is exact, at no prices, the excess of a row of the last variable is."""
    inside = document["problem"]
    seen = {
        tuple(ends): e for e, ends in enumerate(inside["edges"]["nodes"]) if ends[1] == ends[0] + 1
    }
    inside["edges"]["nodes"] = [list(ends) for ends in seen]
    inside["edges"]["costs"] = [inside["edges"]["costs"][e] for e in seen.values()]
    inside["usage_limit"] = 10**9
    net, least = network(document), networks.least(document)
    if net is None or not len(net) or least is None:
        return
    messages = Messages(net)
    for _ in range(8):
        messages.sweep(net.cost)
    lift = reduce(iopddl.read(document, ""), ("consistency",)).lift
    best = [np.inf] * len(net.cost)
    for x in np.ndindex(*net.sizes.tolist()):
        rows = tuple(lift(np.array(x, dtype=np.int64)).tolist())
        value = np.inf if networks.forbidden(document, rows) else networks.cost(document, rows)
        for i, r in enumerate(x):
            at = int(net.rows[i]) + r
            best[at] = min(best[at], value)
    excess = messages.excess()
    assert (excess <= np.array(best) - least + 1e-9).all()
    first = slice(0, int(net.sizes[0]))  # the end of the second pass: all of it is known there
    assert excess[first] == pytest.approx(np.array(best[first]) - least)


def test_a_threshold_fills_tables_up_to_a_size() -> None:
    document = networks.document([[0, 1]] * 2, [[0] * 4] * 2, [[0] * 4] * 2, [(0, 1, [1] * 16)], 1)
    net = network(document)
    assert net is not None
    excess = np.array([0.0, 1.0, 2.0, 3.0, 0.0, 1.5, 2.5, 3.5])
    none = np.zeros(8, dtype=bool)
    for cells, expected in ((1, 0.0), (2, 1.0), (4, 1.5), (6, 2.0), (16, 3.5)):
        assert threshold(net, excess, none, cells) == expected
    last = rows_of(net, np.array([3, 3]))
    assert threshold(net, excess, last, 4) == 0.0


def test_prices_move_to_the_times_of_a_core_and_back() -> None:
    spans = [[0, 2], [1, 3], [2, 5], [4, 6]]
    document = networks.document(spans, [[5, 0]] * 4, [[1, 9]] * 4, [(0, 1, [1, 2, 3, 5])], 12)
    net = network(document)
    assert net is not None and len(net.uses.room) > 2
    reduced = narrow(net, np.ones(len(net.cost), dtype=bool))
    found = Core(net, replace(reduced, times=np.array([1, 2])))
    assert found.outside(np.array([3.0, 4.0]))[:3].tolist() == [0.0, 3.0, 4.0]
    price = np.zeros(len(net.uses.room))
    price[:3] = 5.0, 1.0, 2.0
    assert found.inside(price).tolist() == [6.0, 2.0]


def meshed(seed: int, count: int = 36, sizes: int = 6) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    ends = [(i, (i + k) % count) for i in range(count) for k in (1, 5)]
    tables = rng.integers(0, 1000, (len(ends), sizes * sizes)).tolist()
    usages = rng.integers(1, 100, (count, sizes))
    document = networks.document(
        [[i, i + 9] for i in range(count)],
        rng.integers(0, 300, (count, sizes)).tolist(),
        usages.tolist(),
        [(a, b, t) for (a, b), t in zip(ends, tables, strict=True)],
        0,
    )
    middle = tuple(np.argsort(usages, axis=1)[:, 2].tolist())
    document["problem"]["usage_limit"] = networks.peak(document, middle)
    return document


@pytest.mark.slow
def test_a_search_in_cores_is_repeatable_and_true(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores, "_CELLS", 600)  # of 2592
    monkeypatch.setattr(cores, "_SHORTEST", 20.0)
    document = meshed(1)
    net = network(document)
    assert net is not None
    made: list[int] = []
    whole = cores.core

    def counted(net: Network, *rest: Any) -> Any:
        found = whole(net, *rest)
        made.append(0 if found is None else len(found.network.cells))
        return found

    monkeypatch.setattr(cores, "core", counted)
    values = []
    for _ in range(2):
        ticks = iter(range(10**9))
        search = CoreSearch(net, 400, 3, clock=lambda ticks=ticks: float(next(ticks)))  # type: ignore[misc]
        found = search.run()
        assert found.x is not None
        lift = reduce(iopddl.read(document, ""), ("consistency",)).lift
        rows = tuple(lift(found.x).tolist())
        assert networks.peak(document, rows) <= document["problem"]["usage_limit"]
        assert networks.cost(document, rows) == found.value >= found.bound
        values.append((found.value, found.bound, found.steps))
    assert values[0] == values[1]
    assert made and max(made) < len(net.cells)


def test_wide_moves_wait_while_prices_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they have taken more than their share; a small network's never do."""
    document = networks.document(
        [[0, 1]] * 3, [[5, 0]] * 3, [[0, 1]] * 3, [(0, 1, [0, 9, 9, 0]), (1, 2, [0, 9, 9, 0])], 9
    )
    net = reduce(iopddl.read(document, ""), ("consistency",)).network
    made = search.Search(net, 60.0)
    x = np.zeros(3, dtype=np.int64)
    made.afar = 1e9
    assert net.value(made._afforded(x, net.cost, 1)) == 0.0
    monkeypatch.setattr(search, "_SMALL", 2)
    assert made._afforded(x, net.cost, 1) is x
    made.settled = True
    assert net.value(made._afforded(x, net.cost, 1)) == 0.0
