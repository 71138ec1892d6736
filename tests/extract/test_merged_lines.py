"""Lines below what collectives take: none is above any, however many copies are one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.choices.once import Once
from tapestry_egg.extract.front.latency_prices import LatencyPrices, _solved
from tapestry_egg.extract.front.plans import make_plan
from tapestry_egg.extract.merged.members import Candidates
from tapestry_egg.extract.problem.assemble import Weights, assemble
from tapestry_egg.extract.problem.columns import Columns
from tapestry_egg.extract.problem.mergeable import (
    Chains,
    Copy,
    Mergeable,
    Paid,
    Prices,
    Read,
    _longest,
    best_prices,
    chain_of,
    copies_of,
    may_merge,
    paid_for,
)
from tapestry_egg.extract.engine.archive import Candidate
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine import collective_lines
from tapestry_egg.machine.collective_lines import lines_below
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.machine.target import load_target
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.schedules import scheduled
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import trace
from tests.extract.test_mergeable import (
    MESH,
    TARGET,
    after_each_other,
    choices_of,
    read_twice,
    schedule_of,
    two_sums,
)

KINDS = ("all_reduce", "reduce_scatter", "all_gather")


@pytest.fixture(scope="module")
def mergeable() -> Mergeable:
    return Mergeable(Columns(choices_of(schedule_of(two_sums))))


def seconds(name: str, size: float) -> float:
    return float(collective_seconds(name, size, (0,), MESH, TARGET))


@pytest.mark.parametrize("name", KINDS)
def test_collectives_take_no_less_than_lines(name: str, mergeable: Mergeable) -> None:
    kind, rng = (name, (0,), "sum", None), np.random.default_rng(0)
    assert TARGET.combiner is not None
    whole = TARGET.combiner.bytes / (MESH.devices if name == "all_gather" else 1)
    nearest = np.inf
    for _ in range(2000):
        parts = rng.random(rng.integers(1, 6)) ** 4
        sizes = parts / max(1.0, parts.sum()) * whole * rng.random() ** 0.25
        took = seconds(name, sizes.sum())
        if len(sizes) > 1 and name in TARGET.combiner.contiguous:
            took += 4.0 * sizes.sum() / TARGET.hbm_bytes_per_second
        for line in mergeable.hull(kind):
            each = [min(line.per_byte * s, seconds(name, s) - line.latency) for s in sizes]
            over = took - line.latency - sum(each)
            assert over > -1e-12
            nearest = min(nearest, over / took)
    assert nearest < 0.02


@pytest.mark.parametrize("name", KINDS)
def test_bytes_add_what_is_said_to_the_collective_that_takes_least_of_them(
    name: str, mergeable: Mergeable
) -> None:
    assert TARGET.combiner is not None
    kind, copied = (name, (0,), "sum", None), name in TARGET.combiner.contiguous
    most = mergeable.most(kind)

    def took(x: np.ndarray) -> np.ndarray:
        sent = np.asarray(collective_seconds(name, x, (0,), MESH, TARGET))
        return sent + copied * 4.0 * x / TARGET.hbm_bytes_per_second

    for share in (0.03, 0.3, 0.7):
        joined = np.linspace(0.0, (1.0 - share) * most, 5000)
        adds = float((took(joined + share * most) - took(joined)).min())
        assert 0.98 * adds < mergeable.least(kind, share * most) < adds + 1e-12


@pytest.mark.parametrize("name", KINDS)
def test_copies_pay_no_more_than_alone_however_large(name: str, mergeable: Mergeable) -> None:
    """Those of as many bytes as one collective may have join no other."""
    kind, read = (name, (0,), "sum", None), (0, 1)
    for share in (0.01, 0.5, 0.99, 1.0):
        size = share * mergeable.most(kind)
        alone = seconds(name, size)
        own = {kind: [Copy(size, alone, {read})]}
        off, on = (
            paid_for(own, Prices(chain=chain), mergeable)
            for chain in (frozenset(), frozenset({read}))
        )
        assert 0.0 <= off <= alone and on == pytest.approx(alone, rel=1e-12)
    assert off == alone


@pytest.mark.parametrize("name", KINDS)
def test_the_line_is_the_highest_where_it_is_asked_for(name: str, mergeable: Mergeable) -> None:
    kind = name, (0,), "sum", None
    most = mergeable.most(kind)
    for share in (0.01, 0.2, 0.9):
        at = share * most
        line = mergeable.line(kind, at)
        best = max(x.latency + x.per_byte * at for x in mergeable.hull(kind))
        assert line.latency + line.per_byte * at == best
        assert line.latency > 0.0
    assert mergeable.line(kind, 1.5 * most).latency == 0.0


def large_sums(x: jax.Array) -> jax.Array:
    """Sums nearly as large as one collective may be."""
    return jnp.sum(x, 0)


@pytest.mark.parametrize("others", [0.0, 0.2, 1.0])
def test_no_line_makes_a_copy_dearer_than_it_is_alone(others: float) -> None:
    """Nor cheaper than the others' part of what merging takes away."""
    graph = prepare(trace(large_sums, jax.ShapeDtypeStruct((64, 7_000_000), jnp.float32)).graph)
    columns = Columns(choices_of(scheduled(graph, feedback_pairs(graph))))
    alone, tried = Mergeable(columns), 0
    for v in range(len(columns.program.types)):
        for (kind, at), reader in product(alone.moves(v).items(), columns.others(v)):
            for line in alone.hull(kind):
                paid = Paid(line, frozenset({(v, reader)}))
                own = Mergeable(columns, Chains(((1.0, Prices({kind: paid})),), others))
                less, more, saved = own.less(v), own.more(v, reader), own.saved(v)
                assert less is not None and saved is not None
                left = less[at] - (0.0 if more is None else more[at])
                assert left.min() > -1e-15
                assert (left - (1.0 - others) * saved[at]).max() < 1e-15
                tried += kind[0] == "all_reduce" and float(left.min()) < 1e-15
    assert tried


@pytest.mark.parametrize("dear", [False, True])
def test_prices_that_are_mixed_take_away_their_mean(
    dear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what bytes add to any collective is more than a copy takes alone."""
    if dear:
        monkeypatch.setattr(Mergeable, "added", lambda self, table, _, at: 2.0 * table.seconds[at])
    columns = Columns(choices_of(schedule_of(two_sums)))
    alone = Mergeable(columns)
    program = columns.program
    v = next(v for v in range(len(program.types)) if alone.moves(v) and columns.others(v))
    (reader, *_) = columns.others(v)
    some = [
        Prices(
            {
                k: Paid(alone.line(k, 0.9 * alone.most(k)), frozenset({(v, reader)}))
                for k in alone.moves(v)
            }
        ),
        Prices(),
        Prices(chain=frozenset({(v, reader)})),
    ]

    def left(chains: Chains) -> np.ndarray:
        own = Mergeable(columns, chains)
        less, more = own.less(v), own.more(v, reader)
        assert less is not None
        return less - (0.0 if more is None else more)

    each = [left(Chains(((1.0, x),))) for x in some]
    mixed = left(Chains(((0.5, some[0]), (0.25, some[1]), (0.25, some[2]))))
    np.testing.assert_allclose(mixed, 0.5 * each[0] + 0.25 * each[1] + 0.25 * each[2], atol=1e-15)
    assert 0.0 < each[0].max() < each[1].max()
    assert not each[2].any()


def test_lines_have_no_latency_below_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where seconds grow faster than bytes the highest line may cross zero beyond it: at such a
    latency a chain would take away from what others pay."""
    monkeypatch.setattr(
        collective_lines, "collective_seconds", lambda _, x, *others: 1e-6 + (x / 2.0**20) ** 2
    )
    other = replace(load_target("h100:4"), name="curved")  # what is known of it is kept
    lines = lines_below("all_gather", (0,), MeshShape(("x",), (4,)), other, 2.0**20)
    assert len(lines) > 2
    assert all(line.latency >= 0.0 and line.per_byte >= 0.0 for line in lines)


def test_collectives_beside_kernels_have_no_prices_of_merging() -> None:
    choices = choices_of(schedule_of(two_sums))
    assert may_merge(choices)
    assert not may_merge(replace(choices, target=replace(choices.target, overlaps=True)))


def test_a_game_is_solved_by_both_players() -> None:
    value, rows, columns = _solved(np.array([[3.0, 1.0, 9.0], [0.0, 2.0, 9.0]]) * 1e-3)
    assert value == pytest.approx(1.5e-3)
    np.testing.assert_allclose(rows, [0.5, 0.5])
    np.testing.assert_allclose(columns, [0.25, 0.75, 0.0], atol=1e-12)


def test_prices_go_on_from_what_has_proven_most_of_the_labellings_met() -> None:
    assembled = assemble(choices_of(schedule_of(two_sums)))
    problem, rng = assembled.problem, np.random.default_rng(0)
    drawn = [np.array([rng.integers(len(v)) for v in problem.variables]) for _ in range(200)]
    rows = min(drawn, key=lambda x: problem.evaluate(x)[0])
    own = LatencyPrices(assembled, Once())
    copies = copies_of(assembled, rows, own.mergeable)
    alone = sum(c.seconds for some in copies.values() for c in some)
    rest = problem.evaluate(rows)[0] - alone
    best = best_prices(assembled, [(1.0, copies)], own.mergeable)
    assert copies and paid_for(copies, best, own.mergeable) < alone
    own.meet(rows, False)
    first = own.next()
    # Of one labelling no prices prove more than those that are best for it, or its chain's.
    chained = paid_for(copies, chain_of(assembled, copies, own.mergeable), own.mergeable)
    most = max(paid_for(copies, best, own.mergeable), chained)
    assert own.value == pytest.approx(rest + most, rel=1e-4)
    assert sum(w for w, _ in first.prices) == pytest.approx(1.0)
    own.proven(2e-3)
    kept = own.by_lines()
    assert all(p.chain is None for _, p in kept.prices)
    assert sum(w for w, _ in kept.prices) == pytest.approx(1.0)
    own.meet(drawn[0], True)
    own.next()
    own.proven(1e-3)  # less than before: what comes next is near to what was best
    assert own.least == 2e-3 and own.by_lines() == kept


def test_the_best_prices_of_a_labelling_are_no_more_than_it_takes() -> None:
    assembled = assemble(choices_of(schedule_of(two_sums)))
    mergeable = Mergeable(Columns(assembled.choices))
    rng, several = np.random.default_rng(0), 0
    for _ in range(300):
        rows = np.array([rng.integers(len(v)) for v in assembled.problem.variables])
        copies = copies_of(assembled, rows, mergeable)
        best = paid_for(copies, best_prices(assembled, [(1.0, copies)], mergeable), mergeable)
        alone = sum(c.seconds for own in copies.values() for c in own)
        assert best <= alone * (1.0 + 1e-9)
        assert paid_for(copies, Prices(), mergeable) <= best * (1.0 + 1e-6)
        chained = chain_of(assembled, copies, mergeable)
        assert paid_for(copies, chained, mergeable) <= alone * (1.0 + 1e-9)
        several += any(len(own) > 1 for own in copies.values())
    assert several > 10


def large_and_small(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """Copies that lines make no cheaper, and a value that one unit reads in two layouts."""
    return jnp.sum(x, 0), jnp.cumsum(y @ y, 0)


@pytest.mark.parametrize("program", [two_sums, after_each_other, read_twice, large_and_small])
def test_a_labelling_is_paid_for_as_its_problem_says(program: Callable[..., Any]) -> None:
    """Where each value has one reader: two of them may share a copy."""
    if program is large_and_small:
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 7_800_000), (4096, 4096))]
        graph = prepare(trace(program, *shapes).graph)
        choices = choices_of(scheduled(graph, feedback_pairs(graph)))
    else:
        choices = choices_of(schedule_of(program))
    assembled = assemble(choices)
    mergeable, rng, dear = Mergeable(Columns(choices)), np.random.default_rng(0), 0
    for _ in range(12):
        rows = np.array([rng.integers(len(v)) for v in assembled.problem.variables])
        copies = copies_of(assembled, rows, mergeable)
        alone = sum(c.seconds for own in copies.values() for c in own)
        rest = assembled.problem.evaluate(rows)[0] - alone
        best = best_prices(assembled, [(1.0, copies)], mergeable)
        for prices in (Prices(), best, chain_of(assembled, copies, mergeable)):
            priced = assemble(choices, Weights(chains=Chains(((1.0, prices),)))).problem
            paid = paid_for(copies, prices, mergeable)
            assert priced.evaluate(rows)[0] == pytest.approx(rest + paid, rel=1e-9)
        for kind, own in copies.items():
            line = best.kinds[kind].line
            dear += any(line.per_byte * c.bytes > c.seconds - line.latency for c in own)
    assert dear or program is not large_and_small


def test_a_unit_that_reads_two_copies_waits_once(mergeable: Mergeable) -> None:
    """For both: they can be one."""
    kind, read = ("reduce_scatter", (0,), "sum", "float32"), (0, 1)
    line = mergeable.line(kind, 0.5 * mergeable.most(kind))
    sizes = [share * mergeable.most(kind) for share in (0.3, 0.1)]
    own = {kind: [Copy(size, seconds("reduce_scatter", size), {read}) for size in sizes]}
    paid = paid_for(own, Prices({kind: Paid(line, frozenset({read}))}), mergeable)
    assert paid == pytest.approx(line.latency + line.per_byte * sum(sizes), rel=1e-12)
    on, off = (paid_for(own, Prices(chain=frozenset(x)), mergeable) for x in ({read}, ()))
    most = max(seconds("reduce_scatter", x) - mergeable.least(kind, x) for x in sizes)
    assert on - off == pytest.approx(most, rel=1e-12) and most > 0.0


def in_a_loop(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """Units of which the first reads what the last makes, and some beside."""
    h, _ = jax.lax.scan(lambda c, _: (jnp.cumsum(jnp.tanh(c @ y), 0), None), x, None, length=3)
    return jnp.cumsum(h, 1), jnp.cumsum(jnp.cumsum(x, 0), 1), jnp.sum(h @ y)


def test_the_chain_is_the_one_on_which_reads_count_most() -> None:
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    graph = prepare(trace(in_a_loop, square, square).graph)
    schedule = scheduled(graph, feedback_pairs(graph))
    assembled = assemble(choices_of(schedule))
    reads = [{(v, u) for _, _, v in unit.reads} for u, unit in enumerate(schedule.units)]

    def chains(u: int) -> Iterator[tuple[Read, ...]]:
        """Every chain that ends in what a unit reads."""
        for v, _ in reads[u]:
            if 0 <= schedule.producer[v] < u:
                yield ((v, u),)
                yield from ((*before, (v, u)) for before in chains(schedule.producer[v]))

    every = [chain for u in range(len(reads)) for chain in chains(u)]
    rng = np.random.default_rng(0)
    for _ in range(20):
        counted = {read: float(rng.random()) for own in reads for read in own}
        most, chain = _longest(assembled, counted)
        assert most == pytest.approx(max(sum(counted[r] for r in c) for c in every))
        assert most == pytest.approx(sum(counted[r] for r in chain))
        assert chain in {frozenset(c) for c in every}
    assert any(schedule.producer[v] >= u for own in reads for v, u in own)  # round the loop


def test_copies_of_labellings_are_those_of_their_plans() -> None:
    """Also of what is kept for one reader after another, or made for each."""

    def gathered(x: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.cumsum(x, 0), jnp.cumprod(x, 0), jax.lax.cummax(x, 0)

    graph = prepare(trace(gathered, jax.ShapeDtypeStruct((512, 512), jnp.float32)).graph)
    plan = scheduled(graph, feedback_pairs(graph))
    assembled = assemble(choices_of(plan))
    mergeable, ground = Mergeable(Columns(assembled.choices)), Ground(plan, TARGET)
    rng, seen = np.random.default_rng(0), Counter[str]()
    for _ in range(200):
        rows = np.array([rng.integers(len(v)) for v in assembled.problem.variables])
        one = make_plan(assembled, Candidate(rows, 0.0, 0.0, 0.0), "", 0.0)
        walk = Walk(one, ground)
        walk.find_moves()
        members = Candidates(walk).members
        copies = copies_of(assembled, rows, mergeable)
        assert copies.keys() == members.keys()
        for kind, own in copies.items():
            known = sorted((m.bytes, m.seconds) for m in members[kind])
            assert np.allclose(sorted((c.bytes, c.seconds) for c in own), known, rtol=1e-12)
            seen[str(sorted(len(c.reads) for c in own))] += 1
    assert seen.keys() >= {"[1, 1, 1]", "[1, 2]", "[3]"}
