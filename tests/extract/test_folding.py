"""Messages of a few layers stand for those of all: a start for bounds, which stay bounds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.problem.problem import Floats, Problem, Use
from tapestry_egg.extract.search.messages.dual import Dual, Prices

from .test_batches import TIMES, ladder, prices

DEEP = 80
seeds = st.integers(0, 10**6)


def priced(at: Prices, seconds: Floats, joules: Floats, uses: tuple[Use, ...]) -> Floats:
    total = seconds + at.joule * joules
    for u in uses:
        total = total + u.amount * at.bytes[u.start : u.end].sum()
    return total


def optimum(problem: Problem, at: Prices) -> float:
    """The least priced cost of a ladder, layer after layer: what each choice of a layer's three
    rows costs at least with all layers before."""
    choices = list(product(*(range(len(v)) for v in problem.variables[:3])))
    own = [priced(at, v.seconds, v.joules, v.uses) for v in problem.variables]
    shared = [priced(at, p.seconds, p.joules, p.uses) for p in problem.pairs]
    layers = len(problem.variables) // 3
    best = np.zeros(len(choices))
    for layer in range(layers):
        inside = np.array([sum(own[3 * layer + k][c[k]] for k in range(3)) for c in choices])
        across = np.zeros((len(choices), len(choices)))
        for p, table in zip(problem.pairs, shared, strict=True):
            if p.b // 3 != layer:
                continue
            for m, after in enumerate(choices):
                end = p.label_b[after[p.b % 3]]
                if p.a // 3 == layer:
                    inside[m] += table[p.label_a[after[p.a % 3]], end]
                    continue
                for n, before in enumerate(choices):
                    across[n, m] += table[p.label_a[before[p.a % 3]], end]
        best = (best[:, None] + across).min(axis=0) + inside
    return float(best.min())


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(seeds, seeds)
def test_bounds_after_rehearsal_are_bounds(seed: int, more: int) -> None:
    """Whatever the prices are, also such that equal layers pay differently."""
    problem, at = ladder(seed, DEEP), prices(more)
    least = optimum(problem, at)
    dual = Dual(problem)
    dual.price(at)
    for _ in range(3):
        dual.rehearse(5)
        assert dual.sweep().value <= least + 1e-9 * abs(least)


@pytest.mark.slow
def test_a_few_layers_do_most_of_the_work() -> None:
    """At equal costs in all layers, one pass after a rehearsal is nearly what many passes reach."""
    helped = 0
    for seed in range(6):
        problem = ladder(seed, DEEP)
        cold, rehearsed, settled = (Dual(problem) for _ in range(3))
        rehearsed.rehearse(40)
        first, warm = cold.sweep().value, rehearsed.sweep().value
        for _ in range(150):
            last = settled.sweep().value
        assert warm <= last + 1e-3 * abs(last)
        helped += last - warm <= 0.1 * (last - first)
    assert helped >= 4


def test_those_that_stand_for_others_are_few_and_alike() -> None:
    dual = Dual(ladder(1, DEEP))
    folding = dual.folding
    assert folding.worth
    kept = {int(i) for b in folding.batches for i in b.members}
    assert len(kept) <= 0.2 * len(dual.core)
    assert {0, 1, 2} | {int(dual.core[-1])} <= kept  # the ends stand for themselves
    middle = range(3 * 20, 3 * (DEEP - 20))
    assert {i % 3 for i in kept if i in middle} == {0, 1, 2}  # each for its own place in a layer
    for kind, stands in zip(dual.tables.kinds, folding.stands, strict=True):
        assert (stands[stands] == stands).all()
        # A pair in the middle has the labels of the one that stands for it at either end.
        for pair, other in zip(kind.members, kind.members[stands], strict=True):
            a, b = dual.problem.pairs[pair], dual.problem.pairs[other]
            assert (a.a - b.a) % 3 == 0 and (a.b - b.b) % 3 == 0


def test_shallow_problems_are_not_folded() -> None:
    dual = Dual(ladder(1, 5))
    assert not dual.folding.worth
    before = dual.messages()
    dual.rehearse(3)
    assert (before == dual.messages()).all()
    assert TIMES == dual.problem.times
