"""Seconds without the latencies that merging may take away, over all mergings of all plans of small
programs.

Every plan is listed (`brute.py`), every way to make collectives of it into fewer is tried, and the
certificate says what each takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

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
from tapestry_egg.extract.choices.unit_choices import UnitChoices, unit_choices
from tapestry_egg.extract.engine.archive import Archive, Candidate
from tapestry_egg.extract.engine.race import Effort, race
from tapestry_egg.extract.front.merging import merged_plans
from tapestry_egg.extract.front.plans import _settled, make_plan
from tapestry_egg.extract.problem.assemble import PlanProblem, assemble
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.plans.plan import Plan
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.of_plans import plan_schedule, with_merged
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import trace
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
    return jnp.sort(jnp.sort(x, 0), 1), jnp.sort(y, 0)


def after_each_other(x: jax.Array) -> Arrays:
    """A sum of what another is made into."""
    return jnp.sum(x), jnp.sum(x - jnp.sum(x, 0), 1)


def gathered_twice(x: jax.Array, y: jax.Array) -> Arrays:
    """Gathers of one value for two readers, each of which may have its own."""
    return jnp.sort(x, 0), jax.lax.sort(x, 0, is_stable=False), jnp.sort(y, 0)


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
    (archive,) = race([assembled.problem], Effort(work=5.0))
    return archive


def over(archive: Archive, every: Sequence[Costs]) -> float:
    """The largest share by which a bound is above what it bounds."""
    worst = -1.0
    for apart, one in every:
        peak = float(max(apart.peak_bytes, one.peak_bytes))
        worst = max(worst, archive.bound(peak, np.inf) / one.seconds - 1.0)
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [two_sums, read_twice]
    + [pytest.param(p, marks=pytest.mark.long) for p in (after_each_other, gathered_twice)],
)
def test_no_merging_of_any_plan_takes_less(program: Callable[..., Arrays]) -> None:
    """Than is proven, within any peak; and the fastest that there is is found."""
    plan = schedule_of(program)
    every, assembled = list(every_merged(plan)), assemble(choices_of(plan))
    assert any(apart is not one for apart, one in every) or program is read_twice
    archive = searched(assembled)
    assert over(archive, every) < 1e-9
    least = min(one.seconds for _, one in every)
    assert 0.95 < archive.bound(np.inf, np.inf) / least <= 1.0 + 1e-9
    seconds = [c.unmerged for c in archive.candidates]
    for c in archive.candidates:
        made = make_plan(assembled, c, "", 0.0)
        ground = Ground(plan_schedule(made.body, {}), TARGET)
        seconds += [p.costs.seconds for p in merged_plans(made, ground, {})]
    assert min(seconds) == pytest.approx(least, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_labelling_counts_no_more_than_any_merging_of_its_plan(
    program: Callable[..., Arrays],
) -> None:
    plan = schedule_of(program)
    assembled = assemble(choices_of(plan))
    problem, rng = assembled.problem, np.random.default_rng(0)
    for _ in range(40):
        drawn = np.array([rng.integers(len(v)) for v in problem.variables])
        one = Candidate.of(problem, _settled(assembled, drawn))  # keeps no copy that nobody reads
        if not np.isfinite(one.seconds):
            continue
        made = make_plan(assembled, one, "", 0.0)
        walk = Walk(made, Ground(plan_schedule(made.body, {}), TARGET))
        assert walk.certificate().seconds == pytest.approx(one.unmerged, rel=1e-9)
        assert one.seconds <= one.unmerged * (1 + 1e-9)
        for groups in groupings(walk):
            try:
                body, order = with_merged(made.body, {}, groups)
                own = Walk(replace(made, body=body), Ground(order, TARGET)).certificate()
            except (PlanError, ExtractError):
                continue
            assert one.seconds <= own.seconds * (1 + 1e-9)


@pytest.mark.slow
def test_latencies_off_chains_are_no_bound() -> None:
    """Two sums of which each pays its own: one collective of both takes less."""
    plan = schedule_of(two_sums)
    assembled = assemble(choices_of(plan))
    problem = assembled.problem
    parts = [
        tuple(replace(x, spans=()) for x in some) for some in (problem.variables, problem.pairs)
    ]
    all_ = replace(problem, variables=parts[0], pairs=parts[1], latencies=None)
    (archive,) = race([all_], Effort(work=5.0))
    assert over(archive, list(every_merged(plan))) > 0.01


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
def test_plans_of_many_collectives_that_can_be_one_are_found() -> None:
    """Where latency decides, the fastest plan has more collectives than the fastest of plans whose
    collectives are all apart."""
    shapes = {"up": (128, 512), "b": (512,), "down": (512, 128)}
    ws = [{k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}] * 5
    program = te.trace(
        residual, (ws, ws), jax.ShapeDtypeStruct((4096, 128), jnp.float32), donate_argnums=0
    )

    def fastest(machine: te.Target) -> Plan:
        return te.optimize(
            program,
            machine,
            settings=te.Settings(work=0.5, recompute=0),
            books=["sharding", "collectives"],
            mesh_shapes=[MeshShape(("x",), (8,))],
        ).best("seconds")

    found = fastest(load_target("h100:8"))
    apart = fastest(replace(load_target("h100:8"), combiner=None))
    assert found.body.merged
    assert found.costs.seconds < 0.95 * apart.costs.seconds
    assert len(found.collectives) > len(apart.collectives)


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
    plan = te.optimize(
        descended(layers, rows),
        "h100:8",
        settings=te.Settings(work=0.5, recompute=0, front=False),
        books=["sharding", "collectives"],
        mesh_shapes=[MeshShape(("x",), (8,))],
    ).best("seconds")
    (group,) = plan.body.merged
    assert len(group) == len(plan.collectives) == layers
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
