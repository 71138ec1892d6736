"""Equal layers in extraction: priced in one product, passed over in one step, bounded truly."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.problem.problem import Floats, Pair, Problem, Use, Variable
from tapestry_egg.extract.search.elimination import Elimination
from tapestry_egg.extract.search.messages import sweeps
from tapestry_egg.extract.search.messages.batches import batches
from tapestry_egg.extract.search.messages.dual import Dual, Prices
from tapestry_egg.extract.search.messages.pricing import Tables
from tapestry_egg.extract.engine.transport import problem_arrays, problem_from

TIMES = 12


def ladder(seed: int, layers: int) -> Problem:
    """Layers of three variables in a ring, each linked to the next layer by two pairs: the arrays
    are the same in all layers, the times at which they use memory are not."""
    rng = np.random.default_rng(seed)
    rows = [2, 3, 2]

    def span() -> tuple[int, int]:
        start = int(rng.integers(0, TIMES - 1))
        return start, int(rng.integers(start + 1, TIMES))

    own = [(rng.random(n), rng.random(n), rng.random(n)) for n in rows]
    ends = [(0, 1, 0), (1, 2, 0), (0, 2, 0), (2, 0, 1), (1, 1, 1)]  # from, to, layers onward
    tables = []
    for a, b, _ in ends:
        label_a, label_b = np.arange(rows[a]), np.minimum(np.arange(rows[b]), 1)
        shape = (rows[a], 2)
        seconds = np.where(rng.random(shape) < 0.15, np.inf, rng.random(shape))
        tables.append((label_a, label_b, seconds, rng.random(shape), rng.random(shape) - 0.3))
    variables, pairs = [], []
    for layer in range(layers):
        for k, (seconds, joules, amount) in enumerate(own):
            variables.append(Variable(f"{layer}.{k}", seconds, joules, (Use(*span(), amount),)))
        for (a, b, on), (label_a, label_b, seconds, joules, amount) in zip(
            ends, tables, strict=True
        ):
            if layer + on < layers:
                i, j = 3 * layer + a, 3 * (layer + on) + b
                uses = (Use(*span(), amount),)
                pairs.append(Pair(i, j, label_a, label_b, seconds, joules, uses))
    return Problem(tuple(variables), tuple(pairs), TIMES)


def prices(seed: int) -> Prices:
    rng = np.random.default_rng(seed)
    return Prices(float(rng.random()), rng.random(TIMES) * (rng.random(TIMES) < 0.4))


def best(problem: Problem, at: Prices) -> float:
    """The least priced cost of all labellings, one by one."""
    costs = [np.inf]
    for rows in product(*(range(len(v)) for v in problem.variables)):
        seconds, joules, profile = problem.evaluate(np.array(rows))
        costs.append(seconds + at.joule * joules + float(at.bytes @ profile))
    return min(costs)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_kinds_are_priced_as_each_part_by_itself(seed: int, more: int) -> None:
    problem, at = ladder(seed, 4), prices(more)
    tables = Tables(problem.pairs)
    assert len(tables.kinds) == 5
    tables.price(1.0, at.joule, np.concatenate(([0.0], np.cumsum(at.bytes))), 1e6)
    for k, p in enumerate(problem.pairs):
        cost = p.seconds + at.joule * p.joules
        for u in p.uses:
            cost = cost + at.bytes[u.start : u.end].sum() * u.amount
        legal = np.isfinite(cost)
        assert np.allclose(tables.of(k)[legal], cost[legal], rtol=1e-12)
        assert (tables.of(k)[~legal] > 1e5).all()
        entry = tables.flat[tables.start[k] : tables.start[k] + cost.size]
        assert (entry.reshape(cost.shape) == tables.of(k)).all()


@pytest.mark.slow
@given(st.integers(0, 10**6))
def test_batches_hold_every_pair_twice_and_no_two_neighbours(seed: int) -> None:
    problem = ladder(seed, 6)
    tables = Tables(problem.pairs)
    found = batches(problem, range(18), range(len(problem.pairs)), tables)
    order = {int(i): n for n, b in enumerate(found) for i in b.members}
    assert sorted(order) == list(range(18))
    deeper = ladder(seed, 12)
    more = batches(deeper, range(36), range(len(deeper.pairs)), Tables(deeper.pairs))
    assert len(more) == len(found)
    met: list[tuple[int, int, bool]] = []
    for n, b in enumerate(found):
        for s in b.slots:
            places = np.arange(len(tables.kinds[s.kind].members))[s.at]
            for i, j, place in zip(b.members, s.others, places, strict=True):
                k = int(tables.kinds[s.kind].members[place])
                p = problem.pairs[k]
                assert (p.a, p.b) == ((i, j) if s.is_a else (j, i))
                assert order[int(j)] != n
                assert s.later == (order[int(j)] > n)
                met.append((k, int(i), s.is_a))
    assert len(met) == len(set(met)) == 2 * len(problem.pairs)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_bounds_of_equal_layers_are_bounds_and_rise(seed: int, more: int) -> None:
    problem, at = ladder(seed, 3), prices(more)
    dual = Dual(problem)
    dual.price(at)
    cuts = [dual.sweep() for _ in range(30)]
    values = [c.value for c in cuts]
    assert all(a <= b + 1e-9 for a, b in pairwise(values))
    least = best(problem, at)
    assert values[-1] <= least + 1e-9
    # So small a problem: elimination over all rows finds the optimum.
    if np.isfinite(least):
        rows = Elimination(dual).improve([dual.decode()], 3, np.random.default_rng(0))
        seconds, joules, profile = problem.evaluate(rows)
        assert np.isclose(seconds + at.joule * joules + at.bytes @ profile, least)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_messages_come_back_as_they_were(seed: int, more: int) -> None:
    problem = ladder(seed, 4)
    dual = Dual(problem)
    dual.price(prices(more))
    dual.sweep()
    state = dual.messages()
    after = dual.sweep().value
    dual.price(prices(more + 1))
    dual.sweep()
    dual.price(prices(more))
    dual.resume(state)
    assert np.isclose(dual.sweep().value, after, rtol=1e-12)


def plain(dual: Dual, messages: dict[tuple[int, int], Floats], forward: bool) -> float:
    """The bound of one pass, variable after variable, each message brought to a least of zero:
    `messages` by pair and the variable that gets it."""
    problem, bound = dual.problem, dual.constant
    order = [int(i) for b in dual.batches for i in b.members]
    rank = {i: n for n, i in enumerate(order)}
    for i in order if forward else reversed(order):
        start, size = int(dual.row_start[i]), len(problem.variables[i])
        belief = dual.costs[start : start + size].copy()
        mine = [(k, p) for k in dual.edges if i in ((p := problem.pairs[k]).a, p.b)]
        for k, p in mine:
            labels = p.label_a if p.a == i else p.label_b
            belief += messages.setdefault((k, i), np.zeros(labels.max() + 1))[labels]
        bound += belief.min()
        belief -= belief.min()
        ends = {k: p.b if p.a == i else p.a for k, p in mine}
        ahead = sum(rank[j] > rank[i] for j in ends.values())
        for k, p in mine:
            if (rank[ends[k]] > rank[i]) != forward:
                continue
            table = dual.tables.of(k) if p.a == i else dual.tables.of(k).T
            labels = p.label_a if p.a == i else p.label_b
            shared = belief / max(ahead, len(mine) - ahead, 1)
            own = np.array([shared[labels == x].min() for x in range(labels.max() + 1)])
            sent = (table + (own - messages[k, i])[:, None]).min(axis=0)
            bound += sent.min()
            messages[k, ends[k]] = sent - sent.min()
    return float(bound)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 20))
@settings(max_examples=10, deadline=None)
def test_passes_prove_what_plain_ones_prove(seed: int, more: int, together: int) -> None:
    """Whatever number of sums is made at once, and though messages keep their constants."""
    problem, at = ladder(seed, 5), prices(more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "_TOGETHER", together)
        dual = Dual(problem)
    dual.price(at)
    messages: dict[tuple[int, int], Floats] = {}
    for _ in range(4):
        plain(dual, messages, True)
        expected = plain(dual, messages, False)
        assert dual.sweep().value == pytest.approx(expected, rel=1e-9)


def with_leaves(seed: int) -> Problem:
    """Two rungs of a ladder; from each variable hang two equal leaves, each with one of its own,
    and all share a neighbour of one row."""
    rng, core = np.random.default_rng(seed), ladder(seed, 2)
    leaf, tip, one = (rng.random(n) for n in (2, 2, 1))
    variables, pairs = [*core.variables], [*core.pairs]
    variables.append(Variable("single", one, np.zeros(1)))
    single = len(variables) - 1
    labels = {n: np.arange(n) for n in (1, 2, 3)}
    tables = {(n, m): rng.random((n, m)) for n in labels for m in labels}
    free = {shape: np.zeros(shape) for shape in tables}

    def link(a: int, b: int) -> None:
        n, m = len(variables[a]), len(variables[b])
        pairs.append(Pair(a, b, labels[n], labels[m], tables[n, m], free[n, m]))

    for i in range(len(core.variables)):
        link(single, i)
        for _ in range(2):
            at = len(variables)
            variables += [Variable("leaf", leaf, leaf), Variable("tip", tip, tip)]
            link(i, at) if rng.random() < 0.5 else link(at, i)
            link(at, at + 1)
    variables += [Variable("apart", leaf, leaf), Variable("single too", one, one)]
    link(single, len(variables) - 1)
    return Problem(tuple(variables), tuple(pairs), TIMES)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_leaves_add_their_least_and_are_chosen_so(seed: int, more: int) -> None:
    problem, at = with_leaves(seed), prices(more)
    dual = Dual(problem)
    dual.price(at)
    assert set(dual.core) == set(range(6))
    rows = Elimination(dual).improve([dual.decode()], 3, np.random.default_rng(0))

    def cost(rows: np.ndarray) -> float:
        seconds, joules, profile = problem.evaluate(rows)
        return seconds + at.joule * joules + float(at.bytes @ profile)

    # Given the core, each leaf with its tip is by itself.
    least = np.inf
    for core in product(*(range(len(v)) for v in problem.variables[:6])):
        whole = np.zeros(len(problem.variables), dtype=np.int64)
        whole[:6] = core
        for leaf in range(7, 7 + 24, 2):
            trials = []
            for pair in product(range(2), range(2)):
                whole[leaf : leaf + 2] = pair
                trials.append((cost(whole), pair))
            whole[leaf : leaf + 2] = min(trials)[1]
        whole[31] = int(problem.variables[31].seconds.argmin())  # joules are the same
        least = min(least, cost(whole))
    if np.isfinite(least):
        assert np.isclose(cost(rows), least)
        assert dual.sweep().value <= least + 1e-9


@given(st.integers(0, 10**6))
def test_what_is_shared_stays_shared_on_the_way_to_another_process(seed: int) -> None:
    problem = ladder(seed, 5)
    there = problem_from(problem_arrays(problem))
    assert len(Tables(there.pairs).kinds) == len(Tables(problem.pairs).kinds) == 5
    assert len(Tables(there.variables).kinds) == 3
