"""The engine's compiled loops, each beside plain NumPy or an enumeration of all labellings."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.engine import branch, core, elimination, moves, sweeps
from tapestry_egg.extract.engine.network import Network, State, network_of, state_of
from tapestry_egg.extract.engine.trees import descend_trees
from tapestry_egg.extract.engine.within import Within
from tapestry_egg.extract.problem import chains
from tapestry_egg.extract.problem.problem import Problem
from tests.extract.random_problems import Shape, cost, labellings, optimum, random_problem, seeds

FORBIDDEN = 1e4


def priced(problem: Problem, seed: int) -> tuple[Network, State, np.ndarray, float]:
    """A problem's network at random prices, what a byte costs at each time, and a joule."""
    rng = np.random.default_rng(seed)
    net = network_of(problem)
    state = state_of(net)
    byte, joule = rng.random(problem.times) * (rng.random(problem.times) < 0.7), float(rng.random())
    until = np.concatenate(([0.0], np.cumsum(byte)))
    sweeps.price(net, state, 1.0, joule, until, FORBIDDEN)
    return net, state, byte, joule


def priced_cost(problem: Problem, rows: tuple[int, ...], byte: np.ndarray, joule: float) -> float:
    """What one labelling costs at prices, entry by entry."""
    seconds, joules, profile = cost(problem, rows)
    return seconds + joule * joules + float(np.dot(byte, profile))


@given(seeds)
@settings(max_examples=60)
def test_a_labelling_is_evaluated_as_entry_by_entry(seed: int) -> None:
    problem = random_problem(seed)
    net = network_of(problem)
    rng = np.random.default_rng(seed)
    rows = np.array([rng.integers(0, len(v)) for v in problem.variables], dtype=np.int64)
    seconds, joules, profile = sweeps.evaluate(net, rows)
    expected = cost(problem, tuple(rows.tolist()))
    assert (seconds, joules) == pytest.approx(expected[:2])
    assert profile == pytest.approx(expected[2])


@given(seeds)
@settings(max_examples=60)
def test_bounds_hold_at_any_prices_and_messages(seed: int) -> None:
    """Whatever earlier prices have left in the messages, no bound is above the optimum."""
    problem = random_problem(seed)
    found = labellings(problem)
    assume(found)
    for n in range(3):
        net, state, byte, joule = priced(problem, seed + n)
        state.messages[:] = np.random.default_rng(n).normal(scale=10.0**n, size=len(state.messages))
        bounds = sweeps.sweep(net, state, 10, -1.0, np.inf)
        least = min(priced_cost(problem, rows, byte, joule) for rows, *_ in found)
        assert len(bounds) == 20
        assert bounds.max() <= least + 1e-9 * (1.0 + abs(least))


@given(seeds)
@settings(max_examples=40)
def test_bounds_of_trees_are_exact_and_decoded(seed: int) -> None:
    problem = random_problem(seed, Shape(forbidden=0.0), tree=True)
    net, state, byte, joule = priced(problem, seed)
    least = min(priced_cost(problem, rows, byte, joule) for rows, *_ in labellings(problem))
    assert sweeps.sweep(net, state, 5, 0.0, np.inf).max() == pytest.approx(
        least, rel=1e-9, abs=1e-9
    )
    rows = tuple(sweeps.decode(net, state).tolist())
    assert priced_cost(problem, rows, byte, joule) == pytest.approx(least, rel=1e-9, abs=1e-9)


def test_constants_of_other_magnitudes_do_not_round_a_bound() -> None:
    """Messages keep constants; what bytes alone cost would leave ones of 1e10 beside seconds."""
    problem = random_problem(7)
    net, state, *_ = priced(problem, 7)
    expected = sweeps.sweep(net, state, 20, 0.0, np.inf).max()
    for p in range(len(net.ends)):  # a constant that one end has, and the other lacks
        for end, sign in enumerate((1e10, -1e10)):
            begin = state.message[p, end]
            state.messages[begin : begin + net.shape[p, end]] += sign
    until = np.zeros(problem.times + 1)
    sweeps.price(net, state, 1.0, 0.0, until, FORBIDDEN)
    assert np.abs(state.messages).max() < 1e6
    assert np.isfinite(expected)


@given(seeds, st.integers(1, 200), st.integers(1, 40))
@settings(max_examples=40)
def test_variables_are_eliminated_in_the_order_of_fewest_added_links(
    seed: int, variables: int, near: int
) -> None:
    """Of as many added links the one of fewest neighbours comes first, then the earliest."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, variables, 2 * variables)
    other = first + rng.integers(-near, near + 1, 2 * variables)
    ends = np.stack([first, other.clip(0, variables - 1)], axis=1)
    ends = ends[ends[:, 0] != ends[:, 1]]
    links: list[set[int]] = [set() for _ in range(variables)]
    for a, b in ends.tolist():
        links[a].add(b)
        links[b].add(a)
    order, begin, found = elimination._min_fill(variables, ends)
    left = set(range(variables))
    for k in range(variables):
        weights = {
            v: (sum(b not in links[a] for a, b in combinations(links[v], 2)), len(links[v]), v)
            for v in left
        }
        v = min(left, key=weights.__getitem__)
        assert order[k] == v
        assert sorted(found[begin[k] : begin[k + 1]].tolist()) == sorted(links[v])
        for a in links[v]:
            links[a] |= links[v] - {a}
            links[a].discard(v)
        left.remove(v)


@given(seeds)
@settings(max_examples=40)
def test_elimination_over_all_rows_is_exact(seed: int) -> None:
    problem = random_problem(seed, Shape(variables=6, rows=4, pairs=9))
    found = labellings(problem)
    assume(found)
    net, state, byte, joule = priced(problem, seed)
    known = np.zeros((1, len(problem.variables)), dtype=np.int64)
    rows, count = elimination.domains(net, sweeps.beliefs(net, state), 99, known)
    assert count.tolist() == [len(v) for v in problem.variables]
    order = elimination.order_of(net)
    elimination.fit(order, count, 1 << 20, 1)
    best = tuple(elimination.eliminate(net, state, order, rows, count).tolist())
    least = min(priced_cost(problem, x, byte, joule) for x, *_ in found)
    assert priced_cost(problem, best, byte, joule) == pytest.approx(least, rel=1e-9, abs=1e-9)


@given(seeds)
@settings(max_examples=30)
def test_elimination_in_little_room_is_no_worse_than_what_it_begins_with(seed: int) -> None:
    problem = random_problem(seed, Shape(variables=7, rows=5, pairs=14))
    found = labellings(problem)
    assume(found)
    net, state, byte, joule = priced(problem, seed)
    start = np.array([found[seed % len(found)][0]], dtype=np.int64)
    rows, count = elimination.domains(net, sweeps.beliefs(net, state), 4, start)
    order = elimination.order_of(net)
    assert elimination.fit(order, count, 8, seed) <= 8 * len(problem.variables)
    best = tuple(elimination.eliminate(net, state, order, rows, count).tolist())
    before = priced_cost(problem, found[seed % len(found)][0], byte, joule)
    assert priced_cost(problem, best, byte, joule) <= before + 1e-9


@given(seeds)
@settings(max_examples=40)
def test_a_core_costs_what_its_rows_cost_in_the_whole(seed: int) -> None:
    problem = random_problem(seed)
    net, state, byte, joule = priced(problem, seed)
    sweeps.sweep(net, state, 3, 0.0, np.inf)
    rng = np.random.default_rng(seed)
    known = np.array([[rng.integers(0, len(v)) for v in problem.variables]], dtype=np.int64)
    kept = core.promising(net, sweeps.beliefs(net, state), 2, known)
    small, own, row_of, message_of = core.restrict(net, state, kept)
    assert (np.diff(small.row) >= np.minimum(np.diff(net.row), 2)).all()
    assert own.messages == pytest.approx(state.messages[message_of])
    until = np.concatenate(([0.0], np.cumsum(byte)))
    sweeps.price(small, own, 1.0, joule, until, FORBIDDEN)
    for _ in range(5):
        rows = np.array([rng.integers(0, n) for n in np.diff(small.row)], dtype=np.int64)
        whole = row_of[small.row[:-1] + rows]
        one, other = sweeps.evaluate(small, rows), sweeps.evaluate(net, whole)
        assert one[:2] == pytest.approx(other[:2])
        assert one[2] == pytest.approx(other[2])
    there = set(map(tuple, _labellings_of(small, row_of)))
    bound = sweeps.sweep(small, own, 5, 0.0, np.inf).max()
    found = [rows for rows, *_ in labellings(problem) if rows in there]
    if found:
        least = min(priced_cost(problem, rows, byte, joule) for rows in found)
        assert bound <= least + 1e-9 * (1.0 + abs(least))
    assert tuple(known[0].tolist()) in there


def _labellings_of(net: Network, row_of: np.ndarray) -> list[list[int]]:
    each = [row_of[a:b].tolist() for a, b in zip(net.row[:-1], net.row[1:], strict=True)]
    return [list(rows) for rows in product(*each)]


@given(seeds)
@settings(max_examples=40)
def test_moves_make_a_labelling_no_worse(seed: int) -> None:
    problem = random_problem(seed, Shape(forbidden=0.0))
    net = network_of(problem)
    rng = np.random.default_rng(seed)
    start = np.array([rng.integers(0, len(v)) for v in problem.variables], dtype=np.int64)
    seconds, _, profile = sweeps.evaluate(net, start)
    peak = float(profile.max(initial=0.0))
    within = moves.descend(net, start, peak, 3)
    after = sweeps.evaluate(net, within)
    assert after[0] <= seconds + 1e-12
    assert after[2].max(initial=0.0) <= peak * (1 + 1e-9)
    lower = moves.descend(net, start, 0.0, 3)
    assert sweeps.evaluate(net, lower)[2].max(initial=0.0) <= peak * (1 + 1e-9)


@given(seeds)
@settings(max_examples=60)
def test_moves_are_those_that_whole_labellings_compare_best(seed: int) -> None:
    """Within limits that hold from the start, that moves come to, and that nothing keeps."""
    shape = Shape(variables=8, pairs=12, forbidden=0.0, times=(4, 300)[seed % 2])
    problem = random_problem(seed, shape)
    rng = np.random.default_rng(seed)
    start = np.array([rng.integers(0, len(v)) for v in problem.variables], dtype=np.int64)
    peak = max(cost(problem, tuple(start.tolist()))[2], default=0.0)
    for share in (0.0, 0.6, 0.9, 1.001, 2.0):  # at 1 rounding would decide
        found = moves.descend(network_of(problem), start, share * peak, 3)
        assert found.tolist() == _moved(problem, start.tolist(), share * peak, 3)


def _moved(problem: Problem, rows: list[int], limit: float, rounds: int) -> list[int]:
    """Every variable in turn on its fastest row within a limit, or on the one of the least peak."""
    for v in [*range(len(rows))] * rounds:
        every = [(*rows[:v], r, *rows[v + 1 :]) for r in range(len(problem.variables[v]))]
        costs = [cost(problem, x) for x in every]
        seconds = [round(c[0], 9) for c in costs]
        peaks = [round(max(c[2], default=0.0), 9) for c in costs]
        own = best = rows[v]
        for r in np.argsort(seconds, kind="stable").tolist():
            if r == own or not np.isfinite(seconds[r]):
                continue
            if peaks[own] <= limit:
                if best == own and seconds[r] < seconds[own] and peaks[r] <= limit:
                    best = r
            elif (peaks[r], seconds[r]) < (peaks[best], seconds[best]):
                best = r
        rows = [*rows[:v], best, *rows[v + 1 :]]
    return rows


@given(seeds)
@settings(max_examples=60)
def test_branch_and_bound_finds_the_fastest_within_limits(seed: int) -> None:
    problem = random_problem(seed, Shape(variables=5, rows=4, pairs=6))
    found = labellings(problem)
    assume(found)
    rng = np.random.default_rng(seed)
    peaks = sorted({max(p) for *_, p in found})
    joules = sorted({j for _, _, j, _ in found})
    peak = peaks[rng.integers(len(peaks))]
    most = joules[rng.integers(len(joules))] if seed % 2 else np.inf
    net = network_of(problem)
    upper = 2.0 * sum(s for _, s, _, _ in found) + 1.0
    bound, best, rows, _ = branch.branch(
        net,
        state_of(net),
        np.array([max(peak, 1e-9), max(most, 1e-9)]),
        np.zeros(net.moments + 1),
        np.zeros(0),
        0.0,
        upper,
        1e-6,
        5000,
        10.0 * upper,
    )
    fits = [s for _, s, j, p in found if max(p) <= peak and j <= most]
    least = min(fits, default=np.inf)
    if rows is None:
        assert not fits and bound >= upper * (1 - 1e-5)
        return
    own = cost(problem, tuple(rows.tolist()))
    assert own[0] == pytest.approx(best) == pytest.approx(least)
    assert max(own[2]) <= peak * (1 + 1e-9) and own[1] <= most * (1 + 1e-9)
    assert least * (1 - 1e-5) - 1e-9 <= bound <= least + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_chain_is_that_of_all_ways_through(seed: int) -> None:
    rng = np.random.default_rng(seed)
    units = int(rng.integers(2, 6))
    ends = sorted(
        (int(b), int(a))
        for a, b in (sorted(rng.choice(units + 1, 2, replace=False)) for _ in range(6))
    )
    reader, maker = (np.array(x, dtype=np.int64) for x in zip(*ends, strict=True))
    lengths = rng.integers(0, 5, len(ends)) * 1.0
    most, path = chains.longest(maker, reader, units, lengths)
    every = [0.0]
    for n in range(1, len(ends) + 1):
        for some in permutations(range(len(ends)), n):
            if all(reader[a] == maker[b] for a, b in pairwise(some)):
                every.append(float(lengths[list(some)].sum()))
    assert most == max(every)
    assert lengths @ path == most


@given(seeds)
@settings(max_examples=40)
def test_prices_set_anew_are_those_set_at_once(seed: int) -> None:
    """Where nothing but what a byte costs is other than before."""
    problem = random_problem(seed)
    net, state, _, joule = priced(problem, seed)
    other = np.concatenate(([0.0], np.cumsum(np.random.default_rng(seed + 1).random(net.times))))
    sweeps.reprice(net, state, 1.0, joule, other, FORBIDDEN)
    expected = state_of(net)
    sweeps.price(net, expected, 1.0, joule, other, FORBIDDEN)
    assert state.cost == pytest.approx(expected.cost)
    assert state.tables == pytest.approx(expected.tables)


@given(seeds)
@settings(max_examples=25)
def test_a_tree_is_solved_beside_all_else(seed: int) -> None:
    """Of a network that is a tree, one pass finds the best; of any other it makes none worse."""
    rng = np.random.default_rng(seed)
    for tree in (True, False):
        problem = random_problem(seed, Shape(forbidden=0.0), tree=tree)
        net, state, byte, joule = priced(problem, seed)
        start = np.array([rng.integers(0, len(v)) for v in problem.variables], dtype=np.int64)
        rows, random = start.copy(), np.array([1 + seed])
        largest = len(rows) if tree else 1 + int(rng.integers(len(rows)))
        descend_trees(net, state, rows, np.zeros(0), 0.0, largest, random)
        reached = priced_cost(problem, tuple(rows.tolist()), byte, joule)
        before = priced_cost(problem, tuple(start.tolist()), byte, joule)
        assert reached <= before + 1e-9
        if tree:
            least = min(priced_cost(problem, x, byte, joule) for x, *_ in labellings(problem))
            assert reached == pytest.approx(least, rel=1e-9, abs=1e-9)


@given(seeds)
@settings(max_examples=60)
def test_trees_stay_within_a_limit_and_take_no_more_seconds(seed: int) -> None:
    problem = random_problem(seed)
    found = labellings(problem)
    assume(found)
    rng = np.random.default_rng(seed)
    start, before, _, used = found[int(rng.integers(len(found)))]
    limit = max(used) + float(rng.integers(0, 3))
    net, state, *_ = priced(problem, seed)
    rows, profile = np.array(start, dtype=np.int64), np.array(used)
    descend_trees(net, state, rows, profile, limit, 3, np.array([1 + seed]))
    seconds, _, held = cost(problem, tuple(rows.tolist()))
    assert seconds <= before + 1e-9 and max(held) <= limit
    assert profile == pytest.approx(held)


@pytest.mark.slow
@given(seeds)
@settings(max_examples=25, deadline=None)
def test_a_search_within_a_limit_ends_with_the_best_and_its_proof(seed: int) -> None:
    problem = random_problem(seed)
    found = labellings(problem)
    assume(found)
    peaks = sorted(max(p) for *_, p in found)
    for at in (peaks[len(peaks) // 3], 0.5 * peaks[0]):
        asked = iter(range(10**9))
        search = Within(network_of(problem), at, lambda asked=asked: next(asked) / 1e4)  # type: ignore[misc]
        search.run()
        best = optimum(found, at, np.inf)
        assert search.proven and search.seconds == pytest.approx(best, rel=1e-6, abs=1e-9)
        assert search.bound <= best + 1e-9 and search.least_peak <= peaks[0] + 1e-9
