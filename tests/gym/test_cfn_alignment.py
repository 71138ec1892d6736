"""Classes that determine each other's choices become one at once, and there is an answer then."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.__main__ import main
from tapestry_egg.extract.gym.cfn.network.reductions import STEPS, Begun, Reduced, begin
from tapestry_egg.extract.gym.cfn.opening import opening, plain_bound, plain_value
from tapestry_egg.extract.gym.formats import iopddl
from tests.gym import networks

NO = networks.INFINITE


def begun(document: dict[str, Any], steps: tuple[str, ...] = STEPS) -> Begun | Reduced:
    return begin(iopddl.read(document, ""), steps)


def permuted(permutation: list[int]) -> list[int]:
    """A table that allows row i only with row permutation[i]."""
    return [0 if j == p else NO for p in permutation for j in range(len(permutation))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps", [STEPS, ("merge",), ("consistency",), ("merge", "fixed", "memory")]
)
@example(document=networks.LATER[0])
@given(document=networks.problems())
@settings(max_examples=60)
def test_the_first_steps_are_exact(steps: tuple[str, ...], document: dict[str, Any]) -> None:
    start = begun(document, steps)
    least = networks.least(document)
    if isinstance(start, Reduced):
        assert start.infeasible is not None and least is None
        return
    assert np.isfinite(start.network.constant)
    value, rows = networks.best_rows(start.network)
    assert value == (float("inf") if least is None else least)
    if rows is not None and least is not None:
        x = tuple(start.lift(rows).tolist())
        assert networks.cost(document, x) == least
        assert x in set(networks.answers(document))


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_permutations_along_a_tree_leave_one_variable(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, size = 60, int(rng.integers(2, 6))
    hidden = [rng.permutation(size) for _ in range(count)]  # the row of each in answer 0, 1, ..
    edges = []
    for i in range(1, count):
        j = int(rng.integers(i))
        ends = (i, j) if rng.random() < 0.5 else (j, i)
        edges.append((*ends, permuted(hidden[ends[1]][np.argsort(hidden[ends[0]])].tolist())))
    costs = rng.integers(0, 100, (count, size))
    document = networks.document([[0, 1]] * count, costs.tolist(), [[0] * size] * count, edges, 0)
    start = begun(document, ("consistency", "merge"))
    assert isinstance(start, Begun)
    assert start.network.sizes.tolist() == [size]
    wanted = {tuple(int(h[r]) for h in hidden) for r in range(size)}
    got = [tuple(start.lift(np.array([r])).tolist()) for r in range(size)]
    assert set(got) == wanted
    for r, x in enumerate(got):
        assert start.network.cost[r] == networks.cost(document, x)


def test_a_ring_of_permutations_leaves_what_comes_back_to_itself() -> None:
    edges = [(0, 1, permuted([1, 0, 2])), (1, 2, permuted([0, 1, 2])), (2, 0, permuted([0, 1, 2]))]
    document = networks.document([[0, 1]] * 3, [[5, 4, 3]] * 3, [[0] * 3] * 3, edges, 0)
    start = begun(document, ("merge",))
    assert isinstance(start, Begun)
    assert start.lift(np.zeros(len(start.network), dtype=np.int64)).tolist() == [2, 2, 2]
    edges[0] = (0, 1, permuted([1, 2, 0]))
    document = networks.document([[0, 1]] * 3, [[5, 4, 3]] * 3, [[0] * 3] * 3, edges, 0)
    end = begun(document, ("merge",))
    assert isinstance(end, Reduced) and end.infeasible is not None


def test_a_row_without_support_takes_others_with_it_along_a_chain() -> None:
    # Each may take its row i only where the next takes more: 5 nodes leave the 2 extremes of 6.
    more = [0 if j > i else NO for i in range(6) for j in range(6)]
    edges = [(i, i + 1, more) for i in range(4)]
    document = networks.document([[0, 1]] * 5, [[0] * 6] * 5, [[0] * 6] * 5, edges, 0)
    start = begun(document, ("consistency",))
    assert isinstance(start, Begun)
    assert start.network.sizes.tolist() == [2] * 5
    assert start.aligned.counts["inconsistent rows"] == 20


def test_rows_that_fall_late_take_along_what_was_joined_early() -> None:
    more = [0 if j > i else NO for i in range(6) for j in range(6)]
    edges = [(i, i + 1, more) for i in range(4)] + [(2, 5, permuted([5, 4, 3, 2, 1, 0]))]
    document = networks.document([[0, 1]] * 6, [[0] * 6] * 6, [[0] * 6] * 6, edges, 0)
    start = begun(document, ("consistency", "merge"))
    assert isinstance(start, Begun)
    assert start.network.sizes.tolist() == [2] * 5
    rows = {tuple(start.lift(np.full(5, r)).tolist()) for r in range(2)}
    assert rows == {(0, 1, 2, 3, 4, 3), (1, 2, 3, 4, 5, 2)}


def test_what_all_rows_occupy_is_taken_off_and_stretches_that_never_bind_are_left_out() -> None:
    document = networks.document(
        [[0, 2], [0, 2], [4, 6], [1, 5]], [[0, 1]] * 3 + [[0]], [[3, 9], [2, 4], [0, 5], [2]], [], 9
    )
    start = begun(document)
    assert isinstance(start, Begun)
    uses = start.network.uses
    assert uses.room.tolist() == [4, 2, 7, 7, 7, 9]
    assert [(int(a), int(b)) for a, b in zip(uses.lower, uses.upper, strict=True)] == [(0, 2)] * 2
    assert uses.amount.tolist() == [0, 6, 0, 2]


@pytest.mark.slow
@given(networks.problems(), st.integers(0, 9))
@settings(max_examples=60)
def test_answers_before_reduction_are_within_the_limits(
    document: dict[str, Any], seed: int
) -> None:
    start = begun(document)
    if isinstance(start, Reduced):
        return
    net = start.network
    every = dict.fromkeys(networks.answers(document))
    least = networks.least(document)
    assert plain_bound(net) <= (float("inf") if least is None else least)
    before = float("inf")
    for x, value in itertools.islice(opening(net, 0.02, seed), 5):
        rows = tuple(start.lift(x).tolist())
        assert rows in every
        assert networks.cost(document, rows) == value == plain_value(net, x) < before
        before = value


def heavy(count: int) -> dict[str, Any]:
    """Nodes in a ring, whose cheap strategies do not fit all at once."""
    rng = np.random.default_rng(3)
    edges = [(i, (i + 1) % count, rng.integers(0, 50, 16).tolist()) for i in range(count)]
    costs = [[90, 40, 20, 0]] * count
    return networks.document([[0, 1]] * count, costs, [[0, 4, 6, 9]] * count, edges, 2 * count)


@pytest.mark.slow
def test_an_answer_is_there_at_once_and_trees_improve_it() -> None:
    document = heavy(300)
    start = begun(document)
    assert isinstance(start, Begun)
    first = list(opening(start.network, 0.0))
    assert len(first) == 1
    values = [value for _, value in opening(start.network, 0.5)]
    assert values[0] == first[0][1] and values[-1] < 0.8 * values[0]
    assert values == sorted(values, reverse=True)
    for x, _ in opening(start.network, 0.2):
        assert networks.peak(document, tuple(start.lift(x).tolist())) <= 600


@pytest.mark.parametrize("after", [0, 1, 7, 40])
def test_a_reduction_that_is_cut_short_is_exact(after: int) -> None:
    for seed in range(20):
        document = networks.connected(seed)
        start = begun(document)
        if isinstance(start, Reduced):
            continue
        calls = itertools.count()
        reduced = start.reduced(lambda calls=calls: next(calls) >= after)
        assert after or len(reduced.network) == len(start.network)
        least = networks.least(document)
        if reduced.infeasible is not None:
            assert least is None
            continue
        value, rows = networks.best_rows(reduced.network)
        assert value == (float("inf") if least is None else least)
        if rows is None or least is None:
            continue
        assert networks.cost(document, tuple(reduced.lift(rows).tolist())) == least


def test_the_command_gives_an_answer_whatever_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ring.json").write_text(json.dumps(heavy(2000)))
    assert main([str(tmp_path / "ring.json"), "--json", "--seconds", "0.001"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["feasible"] and row["bound"] is not None
