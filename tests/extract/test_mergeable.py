"""Prices without the latencies that merging may take away, over all mergings of all plans of small
programs.

Every plan is listed (`brute.py`), every way to make collectives of it into fewer is tried, and the
certificate says what each takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.merging import Key, Kind, kind_of, own_moves
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.certify.verdict import Certificate
from tapestry_egg.extract.choices.once import Once
from tapestry_egg.extract.choices.unit_choices import UnitChoices, unit_choices
from tapestry_egg.extract.front import latencies
from tapestry_egg.extract.front.latencies import PARTS, Latencies, fastest
from tapestry_egg.extract.front.merge import NetworkResult
from tapestry_egg.extract.front.merging import merged_plans
from tapestry_egg.extract.front.plans import make_plan
from tapestry_egg.extract.problem.assemble import PlanProblem, Weights, assemble
from tapestry_egg.extract.problem.mergeable import Chains, most_saved
from tapestry_egg.extract.engine.archive import Archive, Candidate
from tapestry_egg.extract.search.search import Search
from tapestry_egg.extract.search.settling import Effort
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import fronts
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.of_plans import plan_schedule, with_merged
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import trace
from tests.extract import test_merging
from tests.extract.brute import every_plan
from tests.extract.test_merging import partitions

BOOKS = load_books(("sharding", "collectives"))
MESH, TARGET = MeshShape(("x",), (4,)), load_target("h100:4")
# A kernel takes longer than the latencies of some collectives.
SIZE = 16384

Arrays = tuple[jax.Array, ...]
Costs = tuple[Certificate, Certificate]  # with every collective apart, and with some merged


def two_sums(x: jax.Array, y: jax.Array) -> Arrays:
    """Two sums that need not wait for each other."""
    return jnp.sum(x), jnp.sum(y)


def read_twice(x: jax.Array, y: jax.Array) -> Arrays:
    """Gathers that are read one after another."""
    return jnp.cumsum(jnp.cumsum(x, 0), 1), jnp.cumsum(y, 0)


def after_each_other(x: jax.Array) -> Arrays:
    """A sum of what another is made into."""
    return jnp.sum(x), jnp.sum(x - jnp.sum(x, 0), 1)


def gathered_twice(x: jax.Array, y: jax.Array) -> Arrays:
    """Gathers of one value for two readers, each of which may have its own."""
    return jnp.cumsum(x, 0), jnp.cumprod(x, 0), jnp.cumsum(y, 0)


#: How many arrays a program has, and of how many rows and columns.
PROGRAMS = {
    two_sums: (2, SIZE),
    read_twice: (2, SIZE),
    after_each_other: (1, SIZE),
    gathered_twice: (2, 512),
}


def schedule_of(program: Callable[..., Arrays]) -> Schedule:
    count, size = PROGRAMS[program]
    shapes = [jax.ShapeDtypeStruct((size, size), jnp.float32)] * count
    graph = prepare(trace(program, *shapes).graph)
    return scheduled(graph, feedback_pairs(graph))


def groupings(walk: Walk) -> Iterator[tuple[tuple[Key, ...], ...]]:
    """Every way to make copies of one kind into fewer, but for that none is."""
    kinds: dict[Kind, list[Key]] = {}
    for key, move in own_moves(walk).items():
        kind = kind_of(walk, move)
        if kind is not None:
            kinds.setdefault(kind, []).append(key)
    every: list[list[list[Key]]] = [[]]
    for members in kinds.values():
        some = [[g for g in p if len(g) > 1] for p in partitions(tuple(members))]
        every = [[*a, *b] for a in every for b in some]
    yield from (tuple(map(tuple, groups)) for groups in every if groups)


def every_merged(plan: Schedule) -> Iterator[Costs]:
    """What every plan takes, and every merging of it."""
    ground = Ground(plan, TARGET)
    for one in every_plan(plan, MESH, TARGET, inside=True):
        walk = Walk(one, ground)
        try:
            apart = walk.certificate()
        except ExtractError:
            continue
        yield apart, apart
        for groups in groupings(walk):
            try:
                body, order = with_merged(one.body, {}, groups)
                other = replace(one, body=body)
                yield apart, Walk(other, Ground(order, TARGET)).certificate()
            except (PlanError, ExtractError):
                continue


def choices_of(plan: Schedule) -> UnitChoices:
    found = saturate(encode(plan.program, MESH), BOOKS)
    return unit_choices(plan, found, MESH, TARGET)


def searched(assembled: PlanProblem) -> Archive:
    return Search(assembled.problem, Effort(work=2.0)).run()


def over(archive: Archive, every: Sequence[Costs]) -> float:
    """The largest share by which a bound is above what it bounds."""
    worst = -1.0
    for apart, one in every:
        peak = float(max(apart.peak_bytes, one.peak_bytes))
        worst = max(worst, archive.bound(peak, np.inf) / one.seconds - 1.0)
    return worst


def priced(choices: UnitChoices, chains: Chains) -> PlanProblem:
    return assemble(choices, Weights(chains=chains))


def outcome(plan: Schedule) -> tuple[int, float, float]:
    """How many plans merge something, and what is proven of the fastest, and what it is that is
    found, as shares of the fastest that there is."""
    every, choices = list(every_merged(plan)), choices_of(plan)
    result = NetworkResult(assemble(choices), searched(assemble(choices)))
    own = Latencies(result)
    saved = max(apart.seconds - one.seconds for apart, one in every)
    assert saved <= own.most_of_any() * (1.0 + 1e-9)
    bound = 0.0
    for by_lines in (False, True):
        for _ in range(2):
            archive = searched(own.bounding(by_lines))
            assert over(archive, every) < 1e-9
            bound = max(bound, archive.bound(np.inf, np.inf))
            own.prices.meet(fastest(archive).rows, by_lines)
            own.prices.proven(archive.bound(np.inf, np.inf))
        for part in PARTS:
            found = searched(own.likely(part, by_lines)).candidates
            result = result.with_mergeable(by_lines, found)
    # Any prices will do.
    assert over(searched(priced(choices, Chains())), every) < 1e-9
    for one in own.prices.every[::3]:
        assert over(searched(priced(choices, Chains(((1.0, one),)))), every) < 1e-9
    least = min(one.seconds for _, one in every)
    some = [*result.archive.candidates, *(c for _, own in result.mergeable for c in own)]
    seconds = [c.seconds for c in some]
    for c in some:
        made = make_plan(result.assembled, c, "", 0.0)
        ground = Ground(plan_schedule(made.body, {}), TARGET)
        seconds += [p.costs.seconds for p in merged_plans(made, ground, {})]
    return sum(a is not b for a, b in every), bound / least, min(seconds) / least


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_merging_of_any_plan_takes_less(program: Callable[..., Arrays]) -> None:
    merged, proven, found = outcome(schedule_of(program))
    assert merged or program is read_twice
    assert 0.95 < proven <= 1.0 + 1e-9
    assert found == pytest.approx(1.0, rel=1e-9)


@pytest.mark.slow
def test_latencies_off_chains_are_no_bound() -> None:
    """Two sums of which each pays its own: one collective of both takes less."""
    plan = schedule_of(two_sums)
    every, choices = list(every_merged(plan)), choices_of(plan)
    assert over(searched(priced(choices, Chains(others=1.0))), every) > 0.01


def residual(
    state: tuple[list[dict[str, jax.Array]], list[dict[str, jax.Array]]], x: jax.Array
) -> tuple[list[dict[str, jax.Array]], list[dict[str, jax.Array]]]:
    """A step with momentum of some residual layers."""

    def loss(ws: list[dict[str, jax.Array]]) -> jax.Array:
        h = x
        for w in ws:
            h = h + jnp.tanh(h @ w["up"] + w["b"]) @ w["down"]
        return jnp.mean(h**2)

    ws, before = state
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, before, jax.grad(loss)(ws))
    return jax.tree.map(lambda w, m: w - 0.1 * m, ws, momentum), momentum


@pytest.mark.slow
def test_plans_of_many_collectives_that_can_be_one_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where latency decides, the fastest plan has more collectives than the fastest of plans whose
    collectives are all apart."""
    shapes = {"up": (128, 512), "b": (512,), "down": (512, 128)}
    ws = [{k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}] * 5
    program = te.trace(
        residual, (ws, ws), jax.ShapeDtypeStruct((4096, 128), jnp.float32), donate_argnums=0
    )

    def front() -> te.Front:
        return te.optimize(
            program,
            "h100:8",
            settings=te.Settings(work=1, recompute=0, workers=1),
            books=["sharding", "collectives"],
            mesh_shapes=[MeshShape(("x",), (8,))],
        )

    found = front().best("seconds")
    monkeypatch.setattr(fronts, "worth_merging", lambda *_: ({}, {}, ()))
    apart = front().best("seconds")
    assert found.body.merged
    assert found.costs.seconds < 0.95 * apart.costs.seconds
    assert len(found.collectives) > len(apart.collectives)


@pytest.mark.slow
def test_networks_that_are_too_many_to_be_searched_so_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = re.compile(
        "1 more network was not searched for plans that merging makes faster, though it may"
        ": by up to [1-9][0-9]?% of what is known"
    )
    assert not any(map(said.fullmatch, test_merging.searched(512, 4096, monkeypatch)[0].notes))
    monkeypatch.setattr(latencies, "_NETWORKS", 1)
    assert any(map(said.fullmatch, test_merging.searched(512, 4096, monkeypatch)[0].notes))


@pytest.mark.parametrize(
    ("merge", "interrupted", "late"),
    [(False, False, False), (True, True, False), (True, False, True)],
)
def test_nothing_is_searched_for_merging_where_it_is_unwanted_or_time_is_over(
    merge: bool, interrupted: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("which networks are worth it was asked")

    monkeypatch.setattr(fronts, "open_to_merging", asked)
    state: Any = SimpleNamespace(
        question=SimpleNamespace(settings=SimpleNamespace(merge=merge)),
        every_result=(SimpleNamespace(archive=SimpleNamespace(by_clock=late)),),
        interrupted=interrupted,
    )
    assert fronts.search_merged(state) is state


def test_plans_are_worth_merging_beside_those_that_hold_no_more() -> None:
    """The fastest of a network also where a front shows none of it, and what was found where
    latencies are cheap, which no front shows."""
    saved: dict[float, float] = {}

    def plan(seconds: float, peak: float) -> Candidate:
        return Candidate(np.zeros(1, np.int64), seconds, peak, 1.0)

    def network(*plans: Candidate, cheap: tuple[Candidate, ...] = ()) -> Any:
        choices = SimpleNamespace(target=TARGET, mesh=MESH)
        return SimpleNamespace(
            archive=SimpleNamespace(candidates=list(plans)),
            assembled=SimpleNamespace(choices=choices),
            mergeable=((False, cheap),) if cheap else (),
        )

    results = [
        network(plan(10.0, 1.0), plan(5.0, 8.0)),
        network(plan(11.0, 1.0), plan(12.0, 1.0), cheap=(plan(14.0, 2.0),)),
    ]
    own: Any = SimpleNamespace(most_saved=lambda c: saved.get(c.seconds, 0.0))
    for seconds, less, which in (
        (10.0, 1.0, 0),
        (10.0, 0.09, None),
        (11.0, 3.0, 1),
        (14.0, 4.2, 1),  # 10 seconds are known in as much memory
        (14.0, 4.0, None),
    ):
        saved.clear()
        saved[seconds] = less
        worth, others, left = latencies.worth_merging(results, {0: own, 1: own})
        assert [*worth] == ([] if which is None else [which]) and not left
        assert [*others] == ([] if which is None else [1 - which])


def test_only_where_latencies_are_a_share_is_it_looked_for_plans_that_are_not_known() -> None:
    """In the networks of the least bounds; not where a plan that was found shows it anyway."""

    def result(seconds: float) -> Any:
        plan = Candidate(np.zeros(1, np.int64), seconds, 1.0, 1.0)
        archive = SimpleNamespace(candidates=[plan], bound=lambda *_: seconds)
        choices = SimpleNamespace(target=TARGET, mesh=MESH)
        return SimpleNamespace(
            archive=archive, assembled=SimpleNamespace(choices=choices), mergeable=()
        )

    def own(most: float, saved: float) -> Any:
        return SimpleNamespace(most_of_any=lambda: most, most_saved=lambda _: saved)

    results = [result(100.0 + k) for k in (0, 6, 5, 4, 3, 2, 1)]
    for most, saved, which, more in (
        (0.9, 0.0, [], 0),
        (1.1, 0.0, [0, 6, 5, 4], 3),
        (9.0, 5.9, [2, 1], 0),  # in the others it would save a hundredth of 100 seconds
    ):
        networks = {k: own(most, saved) for k in range(len(results))}
        some, others = latencies.open_to_merging(results, networks)
        assert ([*some], others) == (which, more)


def test_a_network_without_a_plan_is_bounded_all_the_same() -> None:
    """As one is that the first bounds of others have beaten: merging may make it the fastest."""
    choices = choices_of(schedule_of(two_sums))
    posed, plans = assemble(choices), searched(assemble(choices))
    least = fastest(plans).seconds - most_saved(posed, fastest(plans).rows, Once())
    archive = searched(Latencies(NetworkResult(posed, Archive())).bounding(False))
    assert 0.5 * least < archive.bound(np.inf, np.inf) <= least * (1.0 + 1e-9)


def descended(layers: int, rows: int) -> te.Program:
    """A step of small layers, one after the other."""

    def step(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(ws: list[jax.Array]) -> jax.Array:
            h = x
            for w in ws:
                h = h @ w
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))

    ws = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * layers
    return te.trace(step, ws, jax.ShapeDtypeStruct((rows, 64), jnp.float32), donate_argnums=0)


@pytest.mark.parametrize(
    ("layers", "rows"), [(8, 32768), pytest.param(12, 24576, marks=pytest.mark.slow)]
)
def test_many_small_sums_are_one_though_the_fastest_plan_known_sends_nothing(
    layers: int, rows: int
) -> None:
    """One sum for each layer takes longer than to compute all on every device; one of all does
    not."""
    (plan,) = te.optimize(
        descended(layers, rows),
        "h100:8",
        settings=te.Settings(work=0.5, recompute=0, workers=1, front=False),
        books=["sharding", "collectives"],
        mesh_shapes=[MeshShape(("x",), (8,))],
    )
    (group,) = plan.body.merged
    assert len(group) == len(plan.collectives) == layers
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
