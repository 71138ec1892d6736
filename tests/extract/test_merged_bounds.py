"""Bounds of plans whose collectives are merged, over all plans of small programs and all mergings.

Every plan is listed (`brute.py`), every way to make collectives of it into fewer is tried, and the
certificate says what each takes. No bound that a search proves is above any of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.merging import Key, Kind, kind_of, single_moves
from tapestry_egg.extract.certify.recount import Certificate, Walk
from tapestry_egg.extract.problem import mergeable
from tapestry_egg.extract.problem.assemble import PlanProblem, assemble
from tapestry_egg.extract.problem.unit_choices import unit_choices
from tapestry_egg.extract.search.archive import Archive
from tapestry_egg.extract.search.search import Search
from tapestry_egg.extract.search.settling import Effort
from tapestry_egg.extract.search.transport import packed, problem_arrays, problem_from, unpacked
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.plans.plan import Plan
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.of_plans import with_merged
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import trace
from tests.extract.brute import every_plan
from tests.extract.test_merging_prices import partitions

BOOKS = load_books(("sharding", "collectives"))
MESH, TARGET = MeshShape(("x",), (4,)), load_target("h100:4")
SIZE = 256

Arrays = tuple[jax.Array, ...]


def two_sums(x: jax.Array, y: jax.Array) -> Arrays:
    """Two sums that need not wait for each other."""
    return jnp.sum(x), jnp.sum(y)


def read_twice(x: jax.Array, y: jax.Array) -> Arrays:
    """Gathers that are read one after another."""
    return jnp.cumsum(jnp.cumsum(x, 0), 1), jnp.cumsum(y, 0)


def after_each_other(x: jax.Array) -> Arrays:
    """A sum of what another is made into."""
    return jnp.sum(x), jnp.sum(x - jnp.sum(x, 0), 1)


PROGRAMS = (two_sums, read_twice, after_each_other)


def schedule_of(program: Callable[..., Arrays]) -> Schedule:
    count = len(inspect.signature(program).parameters)
    shapes = [jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)] * count
    graph = prepare(trace(program, *shapes).graph)
    return scheduled(graph, feedback_pairs(graph))


def groupings(walk: Walk) -> Iterator[tuple[tuple[Key, ...], ...]]:
    """Every way to make copies of one kind into fewer, but for that none is."""
    kinds: dict[Kind, list[Key]] = {}
    for key, move in single_moves(walk).items():
        kind = kind_of(walk, move)
        if kind is not None:
            kinds.setdefault(kind, []).append(key)
    every: list[list[list[list[Key]]]] = [[[]]]
    for members in kinds.values():
        parts = partitions(list(range(len(members))))
        some = [[[members[k] for k in g] for g in p if len(g) > 1] for p in parts]
        every = [[*a, b] for a in every for b in some]
    for found in every:
        groups = tuple(tuple(group) for one in found for group in one)
        if groups:
            yield groups


def every_merged(plan: Schedule) -> Iterator[tuple[Certificate, Certificate]]:
    """(what it takes with all apart, what it takes) of every plan and every grouping of it."""
    ground = Ground(plan, TARGET)
    for one in every_plan(plan, MESH, TARGET, inside=True):
        walk = Walk(one, ground)
        try:
            apart = walk.certificate()
        except ExtractError:
            continue
        yield apart, apart
        for groups in groupings(walk):
            if (found := merged(one, groups)) is not None:
                yield apart, found


def merged(plan: Plan, groups: tuple[tuple[Key, ...], ...]) -> Certificate | None:
    """What a plan takes with copies merged so; None if they cannot be."""
    try:
        body, order = with_merged(plan.body, {}, groups)
        return Walk(replace(plan, body=body), Ground(order, TARGET)).certificate()
    except (PlanError, ExtractError):
        return None


def network(plan: Schedule) -> PlanProblem:
    found = saturate(encode(plan.program, MESH), BOOKS)
    return assemble(unit_choices(plan, found, MESH, TARGET))


def searched(assembled: PlanProblem) -> Archive:
    assert assembled.merging is not None
    return Search(assembled.merging, Effort(work=8.0)).run()


def over(archive: Archive, every: Sequence[tuple[Certificate, Certificate]]) -> float:
    """The largest share by which a bound is above what it bounds."""
    worst = 0.0
    for apart, one in every:
        peak = float(max(apart.peak_bytes, one.peak_bytes))
        for joules in (one.joules, np.inf):
            worst = max(worst, archive.bound(peak, joules) / one.seconds - 1.0)
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_merged_plan_is_below_a_bound(program: Callable[..., Arrays]) -> None:
    plan = schedule_of(program)
    every = list(every_merged(plan))
    fewer = [b for a, b in every if a is not b]
    assert len(fewer) > 10
    archive = searched(network(plan))
    assert over(archive, every) < 1e-9
    # And bounds are near what the fastest takes, within any peak.
    peaks = sorted({max(a.peak_bytes, b.peak_bytes) for a, b in every})
    near = [
        archive.bound(p, np.inf)
        / min(b.seconds for a, b in every if max(a.peak_bytes, b.peak_bytes) <= p)
        for p in peaks
    ]
    print(
        program.__name__,
        len(every),
        len(fewer),
        near[:6],
        min(near),
        "strict",
        over(archive, [(b, b) for a, b in every]),
    )
    assert min(near) > 0.85


@pytest.mark.slow
def test_with_collectives_wrongly_kept_apart_bounds_are_too_high(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if each waited for all that are made before it."""

    def all_wait(self: mergeable.MergingBuilder) -> np.ndarray:
        made = np.array([x.maker for x in self.slots])
        return made[:, None] < made[None, :]

    monkeypatch.setattr(mergeable.MergingBuilder, "_before", all_wait)
    plan = schedule_of(two_sums)
    assert over(searched(network(plan)), list(every_merged(plan))) > 0.01


@pytest.mark.slow
def test_what_may_be_merged_travels() -> None:
    problem = network(schedule_of(two_sums)).merging
    assert problem is not None
    there = problem_from(unpacked(packed(problem_arrays(problem))))
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows = np.array([rng.integers(len(v)) for v in problem.variables])
        assert there.made(rows).tolist() == problem.made(rows).tolist()
        assert there.evaluate(rows)[:2] == problem.evaluate(rows)[:2]
