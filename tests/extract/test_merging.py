"""Collectives that are merged: one latency instead of several, only where that pays."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.errors import ExtractError, GraphError, PlanError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.merging import Key, kind_of, own_moves
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.certify.verdict import Certificate
from tapestry_egg.extract.front import merging
from tapestry_egg.extract.front.merge import NetworkResult
from tapestry_egg.extract.front.merging import LEAST, _cuts, _halves, merged_plans
from tapestry_egg.extract.front.plans import make_plan
from tapestry_egg.extract.merged import members as front_members
from tapestry_egg.extract.merged.members import WHICH, Candidates
from tapestry_egg.files.files import sealed
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.compiler_choices import Combiner, type_together
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.plans.fetch import fetches
from tapestry_egg.plans.plan import Merged, Plan
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.runtime import compare
from tapestry_egg.schedule.of_plans import plan_schedule, with_merged
from tests.runtime.test_beside import COLLECTIVES, local_equations

pytestmark = pytest.mark.slow

H100 = load_target("h100:8")
MESH = MeshShape(("x",), (8,))
WIDTH, LAYERS = 256, 3
GRADIENT = 4 * WIDTH * WIDTH  # bytes
QUICK = te.Settings(work=0.2, recompute=0)


def step(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    """A data-parallel train step."""

    def loss(ws: list[jax.Array]) -> jax.Array:
        h = x
        for w in ws:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))


def searched(width: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> tuple[te.Front, list[Plan]]:
    """A front over all meshes, and every plan that the searches kept on the way to it."""
    from tapestry_egg.pipeline import fronts

    kept: list[Plan] = []
    merge = fronts.merge_collectives

    def seen(front: te.Front, results: Sequence[NetworkResult], *rest: Any, **of: Any) -> Any:
        kept.extend(
            make_plan(r.assembled, c, "", 0.0) for r in results for c in r.archive.candidates
        )
        return merge(front, results, *rest, **of)

    monkeypatch.setattr(fronts, "merge_collectives", seen)
    ws = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * LAYERS
    program = te.trace(step, ws, jax.ShapeDtypeStruct((rows, width), jnp.float32))
    settings = te.Settings(work=0.3, recompute=0, seconds=1e9, workers=1)
    books = ["sharding", "collectives"]
    return te.optimize(program, "h100:8", settings=settings, state={"": "[0]"}, books=books), kept


@cache
def every_searched() -> tuple[te.Front, list[Plan]]:
    """What is searched of larger layers, for all tests that ask for it."""
    with pytest.MonkeyPatch.context() as patch:
        return searched(512, 4096, patch)


def front_of(
    rows: int,
    settings: te.Settings = QUICK,
    weights: tuple[str | None, str | None] = (None, None),
) -> te.Front:
    ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    program = te.trace(step, ws, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32))
    return te.optimize(
        program,
        "h100:8",
        settings=settings,
        state={"": "[0]"},
        books=["sharding", "collectives"],
        mesh_shapes=[MESH],
        pins={"[0]": weights, "[1]": ("x", None)},
    )


@pytest.fixture(scope="module")
def front() -> te.Front:
    return front_of(2048)


@pytest.fixture(scope="module")
def plan(front: te.Front) -> Plan:
    """The fastest."""
    return front.plans[0]


def feedback(plan: Plan) -> dict[int, int]:
    assert plan.origin is not None
    return dict(plan.origin.feedback)


def counted(
    plan: Plan, merged: Sequence[Merged], target: Target = H100
) -> tuple[Plan, Certificate]:
    """The plan with these copies merged and no others, and what it costs."""
    body, schedule = with_merged(plan.body, feedback(plan), tuple(merged))
    other = replace(plan, body=body)
    return other, Walk(other, Ground(schedule, target)).certificate()


def updates_at_end(plan: Plan) -> int:
    """How many new weights are made after the last product."""
    operations = plan.graph.operations
    last = max(k for k, op in enumerate(operations) if op.kernel == "dot_general")
    return sum(not set(plan.graph.outputs).isdisjoint(op.outputs) for op in operations[last:])


def partitions(members: tuple[Key, ...]) -> Iterator[list[list[Key]]]:
    """Every way to put things into sets."""
    if not members:
        yield []
        return
    first, *rest = members
    for others in partitions(tuple(rest)):
        yield [[first], *others]
        for k, group in enumerate(others):
            yield [*others[:k], [first, *group], *others[k + 1 :]]


def test_gradients_go_in_one_collective_planned_and_compiled(front: te.Front, plan: Plan) -> None:
    assert [(c.kind, c.payload_bytes, c.merged) for c in plan.collectives] == [
        ("all_reduce", GRADIENT, 1)
    ] * LAYERS
    run = te.compile(plan)
    compared = compare(plan, run.compile())
    assert compared.equal
    (row,) = compared.rows
    assert (row.kind, row.planned_count, row.compiled_count) == ("all_reduce", 1, 1)
    assert row.planned_bytes == LAYERS * GRADIENT
    rng = np.random.default_rng(0)
    ws = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16 for _ in range(LAYERS)]
    x = rng.normal(size=(2048, WIDTH)).astype(np.float32)
    for a, b in zip(run(ws, x), jax.jit(step)(ws, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_plans_behind_the_front_are_merged_too() -> None:
    """What is slower than a plan of the front for its many latencies may be faster without them."""
    front, kept = every_searched()
    pairs = feedback(front.plans[0])
    points = np.array([(p.costs.seconds, p.costs.peak_bytes, p.costs.joules) for p in front])
    made = [
        one
        for plan in kept
        for one in merged_plans(plan, Ground(plan_schedule(plan.body, pairs), H100), pairs)
    ]
    assert len(made) > 5
    moved = 0
    for one in made:
        # A file with the plan has no schedule: made from its operations anew, it is the same.
        alone = replace(one.body, merged=())
        body, order = with_merged(alone, pairs, one.body.merged)
        again = plan_schedule(body, pairs)
        assert (again.units, again.readers) == (order.units, order.readers)
        moved += plan_schedule(alone, pairs).units != order.units
        own = np.array([one.costs.seconds, one.costs.peak_bytes, one.costs.joules])
        if own[1] < points[:, 1].min():
            continue  # what holds less than all others once it is merged is not looked for
        # A front leaves out what is a hundredth better in one thing and worse on the whole.
        assert (points / own).max(axis=1).min() <= 1.011, one.mesh
    assert moved


def test_what_is_not_merged_for_want_of_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan is looked at in any case."""
    every, _ = every_searched()
    assert not any(n.kind == "unmerged" for n in every.notes)
    with monkeypatch.context() as patch:
        patch.setattr(merging, "_MOST_SEEN", 0)
        some, _ = searched(512, 4096, patch)
    assert any(n.kind == "unmerged" for n in some.notes)
    assert any(p.body.merged for p in some)


def test_labellings_that_may_gain_most_within_their_peaks_are_merged_first() -> None:
    known = np.array([(4.0, 8.0, 1.0), (6.0, 2.0, 1.0)])
    labellings = np.array([(3.0, 9.0, 1.0), (3.0, 4.0, 1.0), (7.0, 2.0, 1.0), (1.0, 1.0, 1.0)])
    assert merging._gains(known, labellings).tolist() == pytest.approx([1 / 4, 1 / 2, -1 / 6, 1.0])
    assert merging._gains(0 * known, 0 * labellings).tolist() == [0.0] * 4


def test_the_fastest_labelling_of_each_number_of_devices_is_merged_before_others() -> None:
    def result(devices: int, *costs: tuple[float, float, float]) -> Any:
        mesh = SimpleNamespace(mesh=SimpleNamespace(devices=devices))
        candidates = [SimpleNamespace(costs=c, peak=c[1]) for c in costs]
        return SimpleNamespace(
            assembled=SimpleNamespace(choices=mesh), archive=SimpleNamespace(candidates=candidates)
        )

    fast, lean, worse, of_two = (1.0, 8.0, 1.0), (2.0, 4.0, 1.0), (3.0, 8.0, 1.0), (1.5, 9.0, 1.0)
    results = [result(8, lean, worse, fast), result(2, of_two), result(1, (1.0, 1.0, 1.0))]
    of: Any = SimpleNamespace(results=results)
    groups = [[c.costs for _, c in some] for some in merging._Merging._likely(of, np.inf)]
    assert groups == [[fast, of_two], [lean, worse]]


def test_labellings_that_are_not_faster_once_they_are_merged_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What latencies merging leaves in a labelling it leaves in others of the mesh: those that are
    faster by less need not be looked at, which is told, and the fastest plan is the same."""
    looked: list[Plan] = []
    candidates = merging._candidates

    def looking(plan: Plan, ground: Ground) -> Candidates | None:
        looked.append(plan)
        return candidates(plan, ground)

    monkeypatch.setattr(merging, "_candidates", looking)
    front, _ = searched(512, 4096, monkeypatch)
    some = len(looked)
    looked.clear()
    monkeypatch.setattr(Candidates, "most_saved", lambda self: 1e9)  # nothing is left, it says
    every, _ = searched(512, 4096, monkeypatch)
    assert some < len(looked)
    assert front.best("seconds").costs == every.best("seconds").costs
    told = [any(n.kind == "unmerged-unlikely" for n in x.notes) for x in (front, every)]
    assert told == [True, False]


def test_a_merged_plan_saves_the_latencies_of_all_but_one(plan: Plan) -> None:
    alone, cost = counted(plan, ())
    each = [collective_seconds("all_reduce", n * float(GRADIENT), (0,), MESH, H100) for n in (1, 3)]
    # Into one array and out of it, each time all is read and written.
    copied = 2 * (2 * LAYERS * GRADIENT / H100.hbm_bytes_per_second + H100.launch_seconds)
    saved = LAYERS * each[0] - each[1] - copied
    assert cost.seconds - plan.costs.seconds == pytest.approx(saved, rel=1e-9)
    assert cost.wire_bytes == plan.costs.wire_bytes
    assert plan.costs.seconds < 0.8 * cost.seconds
    # A bound of merged plans is no higher than what such a plan takes.
    assert plan.bound <= plan.costs.seconds * (1 + 1e-9)
    # On their own the updates run one by one, each as soon as its gradient is there.
    assert (updates_at_end(alone), updates_at_end(plan)) == (1, LAYERS)


@pytest.mark.parametrize("most", [3, 2, 1])
def test_of_all_ways_to_merge_the_fastest_is_found(plan: Plan, most: int) -> None:
    """Against every partition of the copies, each counted on its own."""
    target = replace(H100, combiner=Combiner(most * GRADIENT, ("all_reduce",)))
    (members,) = plan.body.merged
    alone, cost = counted(plan, (), target)
    seconds = [cost.seconds]
    for sets in partitions(members):
        merged = tuple(tuple(group) for group in sets if len(group) > 1)
        if max(map(len, sets)) > most:
            with pytest.raises(ExtractError, match="no one collective of so much"):
                counted(plan, merged, target)
            continue
        seconds.append(counted(plan, merged, target)[1].seconds)
    alone = replace(alone, costs=cost.costs)
    ground = Ground(plan_schedule(alone.body, feedback(plan)), target)
    found = merged_plans(alone, ground, feedback(plan))
    best = min([cost.seconds, *(p.costs.seconds for p in found)])
    assert best == pytest.approx(min(seconds), rel=1e-12)
    assert (best < cost.seconds) == (most > 1)


def test_without_latency_nothing_is_merged(plan: Plan) -> None:
    """Bytes alone take as long in one as in several, where nothing is copied for it."""
    combiner = replace(H100.combiner, contiguous=())
    levels = tuple(replace(level, latency_seconds=0.0) for level in H100.levels)
    target = replace(H100, levels=levels, launch_seconds=0.0, collectives=None, combiner=combiner)
    alone, cost = counted(plan, (), target)
    ground = Ground(plan_schedule(alone.body, feedback(plan)), target)
    assert merged_plans(replace(alone, costs=cost.costs), ground, feedback(plan)) == []
    assert counted(plan, plan.body.merged, target)[1].seconds == pytest.approx(cost.seconds)


def test_what_is_merged_waits_in_memory_for_the_last() -> None:
    """Where gradients are most of what there is, all but one are held longer; where they are copied
    into one array, all stand there once more, and not only the one that an update turns."""
    target = replace(H100, combiner=replace(H100.combiner, contiguous=()))
    each = ["all_reduce"] * LAYERS  # sums every gradient on its own
    apart = front_of(64, replace(QUICK, merge=False))
    (alone,) = [p for p in apart.plans if [c.kind for c in p.collectives] == each]
    cost = counted(alone, ())[1]
    one, *_ = merged_plans(
        alone, Ground(plan_schedule(alone.body, feedback(alone)), target), feedback(alone)
    )
    copied = counted(one, one.body.merged)[1].peak_bytes - one.costs.peak_bytes
    assert copied == pytest.approx((LAYERS - 1) * GRADIENT, rel=0.05)
    more = one.costs.peak_bytes - cost.peak_bytes
    assert more == pytest.approx((LAYERS - 1) * GRADIENT, rel=0.05)
    compiled = [compare(p, te.compile(p).compile()) for p in (one, alone)]
    counts = [[r.compiled_count for r in c.rows] for c in compiled]
    assert counts == [[1], [LAYERS]]
    measured = [c.compiled_peak_bytes for c in compiled]
    assert measured[0] - measured[1] == pytest.approx(more, rel=0.05)


def over_rows(function: Callable[[jax.Array], jax.Array]) -> te.Front:
    """Its front on one mesh, the rows of its argument being divided."""
    return te.optimize(
        te.trace(function, jax.ShapeDtypeStruct((1 << 20, 16), jnp.float32)),
        "h100:8",
        settings=QUICK,
        books=["sharding", "collectives"],
        mesh_shapes=[MESH],
        pins={"": ("x", None)},
    )


def total(x: jax.Array) -> jax.Array:
    """Sums that wait for each other."""
    y = jnp.sum(x, 0)
    return jnp.sum(jnp.tanh(x * y))


def test_collectives_that_wait_for_each_other_are_not_merged() -> None:
    front = over_rows(total)
    plan = front.plans[0]
    assert [c.kind for c in plan.collectives] == ["all_reduce"] * 2
    assert not plan.body.merged
    (members,) = [tuple((v, need, 0) for v, _, need in plan.body.copies)]
    with pytest.raises(PlanError, match="made from what reads others"):
        with_merged(plan.body, {}, (members,))


def of_types(x: jax.Array) -> tuple[jax.Array, ...]:
    """Sums of two types."""
    return tuple(
        y.T @ jnp.sin(y) for y in (x, jnp.tanh(x), jnp.bfloat16(x), jnp.bfloat16(jnp.tanh(x)))
    )


def test_sums_of_several_types_are_several_collectives() -> None:
    """As the compiler has it (`AllReduceKey`); gathers of several types are one."""
    plan = over_rows(of_types).plans[0]
    types = {(c.merged, c.value.split()[1].split("[")[0]) for c in plan.collectives}
    assert types == {(1, "f32"), (2, "bf16")} or types == {(2, "f32"), (1, "bf16")}
    every = tuple(key for members in plan.body.merged for key in members)
    with pytest.raises(ExtractError, match="of several kinds"):
        counted(plan, [every])
    assert type_together("all_gather", "bfloat16") is type_together("all_gather", "float32")


def told(x: jax.Array) -> jax.Array:
    """Two sums, of which the first is told before something else is, and before the second."""
    a = jnp.sum(x, 0)
    jax.debug.print("tanh of sum {}", jnp.tanh(a)[0])
    jax.debug.print("pi {}", jnp.float32(3.14))
    return a + jnp.tanh(jnp.sum(jnp.tanh(x), 0))


def test_what_is_told_keeps_its_order() -> None:
    """Who reads the first sum would wait for the second, and what is told next would not."""
    front = over_rows(told)
    plan = front.plans[0]
    graph = plan.graph
    assert sum(op.effectful for op in graph.operations) == 2
    sums = [op.outputs[0] for op in graph.operations if op.kernel == "reduce_sum"]
    members = tuple((v, need, 0) for v, _, need in plan.body.copies if v in sums)
    assert {v for v, *_ in members} == set(sums) and len(sums) == 2
    with pytest.raises(PlanError, match="in another order"):
        with_merged(plan.body, {}, (members,))
    assert all(with_merged(p.body, {}, p.body.merged) for p in front)


def test_files_keep_what_is_merged_and_nothing_else_is_believed(
    front: te.Front, tmp_path: Path
) -> None:
    path = tmp_path / "front.json"
    front.save(path)
    loaded = te.load(path)
    assert [p.body.merged for p in loaded] == [p.body.merged for p in front]
    assert [p.costs for p in loaded] == [p.costs for p in front]
    document = json.loads(path.read_text())
    body = document["plans"][0]["body"]
    (members,) = body["merged"]
    others = [[members[:2]], [members, members], [[*members, members[0]]], [members[:1]]]
    others += [[[key[:2] for key in members]], [[[*key, 0] for key in members]]]
    others += [[[[v, layout, time] for v, layout, _ in members]] for time in (-1, 1)]
    for changed in ([], *others):
        body["merged"] = changed
        path.write_text(json.dumps(sealed(document)))
        with pytest.raises((PlanError, GraphError), match="merged"):
            te.load(path)


# Collectives next to each other that are one, and copies that are made twice.


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Plans of several peaks, all collectives of which are apart: of whole weights, and divided."""
    apart = replace(QUICK, merge=False)
    found = [p for rows in (64, 512) for p in front_of(rows, apart).plans]
    found += front_of(2048, apart, weights=("x", None)).plans
    assert len(found) > 6
    return found


@pytest.fixture(scope="module")
def later() -> list[Plan]:
    """Plans in which a gathered copy is read before another could be gathered."""
    found = front_over(one_by_one, ("x", None), *[(512, 512)] * 2)
    return [p for p in found.plans if sum(c.kind == "all_gather" for c in p.collectives) > 1]


def one_by_one(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """Three sums along columns, of which one is read before what the others add up is made."""
    first = jnp.sort(jnp.sort(jnp.tanh(x), 0), 1)
    b, c = jnp.tanh(y), jnp.sin(y)
    return first, jnp.sort(jnp.sort(b, 0), 1), jnp.sort(jnp.sort(c, 0), 1)


def front_over(
    function: Callable[..., Any], pin: tuple[str | None, ...], *shapes: tuple[int, ...]
) -> te.Front:
    """Of a function whose arguments are cut alike, or, with each other, along what is summed."""
    pins = {f"[{k}]": pin if k % 2 == 0 else ("x", None) for k in range(len(shapes))}
    return te.optimize(
        te.trace(function, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)),
        "h100:8",
        settings=replace(QUICK, merge=False, forms=0),
        books=["sharding", "collectives"],
        mesh_shapes=[MESH],
        pins=pins,
    )


def candidates_of(plan: Plan, target: Target = H100) -> Candidates:
    walk = Walk(plan, Ground(plan_schedule(plan.body, feedback(plan)), target))
    walk.find_moves()
    return Candidates(walk)


def test_who_reads_gathered_copies_comes_later_only_where_that_is_asked_for(
    plans: list[Plan], later: list[Plan]
) -> None:
    moved = 0
    for plan in (*plans, *later):
        found = candidates_of(plan)
        gathers = {m.key for kind, own in found.members.items() for m in own if "gather" in kind[0]}
        for which in WHICH:
            for waits in (False, True):
                groups, _ = found.groups(which, waits)
                some = [group for group in groups if gathers.issuperset(group)]
                comes_later = counted(plan, some)[0].graph is not plan.graph
                assert waits or not comes_later
                moved += comes_later
    assert moved


def test_all_cuts_that_are_worth_it_are_tried(plans: list[Plan], later: list[Plan]) -> None:
    """By levels, and in runs, whether kernels that read gathered copies come later or not; each
    with what a plan so merged holds, and smaller groups where that holds more."""
    seen: Counter[str] = Counter()
    for plan in (*plans, *later):
        found = candidates_of(plan)
        ways = {
            "stays": [found.groups("next", waits=False)],
            "waits": [found.groups("next")],
            "levels": [found.groups(which) for which in WHICH[1:]],
        }
        least = LEAST * plan.costs.seconds
        worth = {
            k: {frozenset(groups) for groups, saved in own if saved >= least}
            for k, own in ways.items()
        }
        tried = _cuts(plan, found)
        for cut in tried:
            _, cost = counted(plan, cut.groups)
            assert cut.peak == pytest.approx(max(cost.profile), rel=1e-9)
            assert cost.seconds == pytest.approx(plan.costs.seconds - cut.saved, rel=1e-9)
        known = {frozenset(c.groups) for c in tried}
        for groups in {*worth["stays"], *worth["waits"], *worth["levels"]} - known:
            # Some copies wait for others of their own, or another way saves more and holds no more.
            saved = sum(found.saved_by(group) for group in groups)
            held = plan.costs.peak_bytes * (1 + 1e-9)
            if not any(cut.saved >= saved and cut.peak <= held for cut in tried):
                with pytest.raises(PlanError):
                    counted(plan, tuple(groups))
        seen["stays"] += len((worth["stays"] & known) - worth["waits"])
        seen["waits"] += len((worth["waits"] & known) - worth["stays"])
        seen["levels"] += len((worth["levels"] & known) - worth["stays"] - worth["waits"])
        most = max(tried, key=lambda c: c.saved, default=None)
        if most is not None and most.peak > plan.costs.peak_bytes:
            seen["smaller"] += len(known - worth["stays"] - worth["waits"] - worth["levels"])
    assert len(+seen) == 4, seen


def test_smaller_groups_save_what_the_peak_allows(plans: list[Plan], later: list[Plan]) -> None:
    """No less than the best of all sets of whole groups that do not raise the peak."""
    allowed = 0
    for plan in (*plans, *later):
        found, held = candidates_of(plan), plan.costs.peak_bytes * (1 + 1e-9)
        tried = _cuts(plan, found)
        most = max(tried, key=lambda c: c.saved, default=None)
        if most is None or most.peak <= held or len(most.groups) > 6:
            continue
        best = 0.0
        for bits in range(1 << len(most.groups)):
            some = tuple(group for k, group in enumerate(most.groups) if bits >> k & 1)
            if counted(plan, some)[1].peak_bytes <= held:
                best = max(best, sum(found.saved_by(group) for group in some))
        saved = max((c.saved for c in tried if c.peak <= held), default=0.0)
        assert saved >= best * (1 - 1e-9) or best < LEAST * plan.costs.seconds
        allowed += best > 0.0
    assert allowed


def test_no_run_is_larger_than_what_the_compiler_makes_one(plans: list[Plan]) -> None:
    assert H100.combiner is not None
    smaller = 0
    for plan in plans:
        every = candidates_of(plan).groups("next")[0]
        for most in (1, 2, 3):
            combiner = replace(H100.combiner, bytes=most * GRADIENT)
            target = replace(H100, combiner=combiner)
            groups = candidates_of(plan, target).groups("next")[0]
            counted(plan, groups, target)  # which refuses what is larger
            smaller += 0 < len(groups) and groups != every
    assert smaller


def test_sums_of_one_run_do_not_wait_for_each_other() -> None:
    def in_turn(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        one = jnp.sum(x)
        return one, jnp.sum(jnp.tanh(x * one)), jnp.sum(y)

    plan = front_over(in_turn, ("x", None), (1 << 20, 16), (1 << 20, 16)).plans[0]
    (members,) = candidates_of(plan).members.values()
    assert len(members) == 3
    groups, _ = candidates_of(plan).groups("next")
    assert [len(group) for group in groups] == [2]
    counted(plan, groups)  # which refuses what waits for itself


def test_what_one_reader_takes_twice_is_not_merged() -> None:
    """But where the first of the two is kept for the other; lowered is one, the certificate has
    two."""

    def told_twice(x: jax.Array) -> tuple[jax.Array, ...]:
        one, other = jnp.sum(x, 0), jnp.sum(jnp.tanh(x), 0)
        return one, one, other

    plan = front_over(told_twice, ("x", None), (1 << 20, 16)).plans[0]
    members = tuple(own_moves(candidates_of(plan).walk))
    assert len(members) == 2 and counted(plan, [members])
    plan = replace(plan, body=replace(plan.body, kept={}))
    assert len(own_moves(candidates_of(plan).walk)) == 1
    with pytest.raises(ExtractError, match="is no two copies"):
        counted(plan, [members])


def test_sums_within_kernels_are_not_merged() -> None:
    """Two kernels in each of which two products are added up before one sum combines them."""

    def waves(*x: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.sin(x[0] @ x[1] + x[2] @ x[3]), jnp.cos(x[0] @ x[5] + x[2] @ x[7])

    wide, deep, half = (1024, 2048), (2048, 1024), (2048, 512)
    shapes = (wide, deep, wide, deep, (16, 16), half, (16, 16), half)
    plan = front_over(waves, (None, "x"), *shapes).plans[0]
    found = candidates_of(plan)
    inner = [move for move in found.walk.moves if move.inner]
    assert len({kind_of(found.walk, move) for move in inner} - {None}) == 1 < len(inner)
    assert not found.members


def in_runs(members: list[Key]) -> Iterator[tuple[Merged, ...]]:
    """Every way to cut a list into runs; of these the ones of two or more."""
    for bits in range(1 << (len(members) - 1)):
        runs: list[list[Key]] = [[members[0]]]
        for k, key in enumerate(members[1:]):
            if bits >> k & 1:
                runs[-1].append(key)
            else:
                runs.append([key])
        yield tuple(tuple(run) for run in runs if len(run) > 1)


def test_of_all_cuts_of_one_kind_the_best_is_found(plans: list[Plan]) -> None:
    tried = 0
    for plan in plans:
        found = candidates_of(plan)
        if len(found.members) != 1 or len(next(iter(found.members.values()))) > 6:
            continue
        (members,) = found.members.values()
        every = []
        for groups in in_runs([m.key for m in members]):
            try:
                every.append(counted(plan, groups)[1].seconds)
            except (PlanError, ExtractError):
                continue
        tried += len(every) > 1
        cost = counted(plan, found.groups("next")[0])[1]
        assert cost.seconds == pytest.approx(min(every), rel=1e-9)
    assert tried > 2


def crossed(
    x: jax.Array, u: jax.Array, y: jax.Array, z: jax.Array, *others: jax.Array
) -> tuple[jax.Array, ...]:
    """Two sums and two gathered arrays: a sum before one of these, and one behind the other; and
    more gathered arrays."""
    one = jnp.sum(y)
    other = jnp.sum(jnp.tanh(z * lax.sort(x, 0)[-1, 0]))
    last = lax.sort(jnp.sort(u * one, 1), 0)
    return one, other, last, *(lax.sort(o, 0) for o in others)


@pytest.mark.parametrize(("others", "stays"), [(0, "all_reduce"), (2, "all_gather")])
def test_of_runs_that_wait_for_each_other_those_that_save_most_stay(
    others: int, stays: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (2048, 15), (1 << 18, 64)
    tried = 0
    for plan in front_over(
        crossed, ("x", None), small, small, large, large, *[small] * others
    ).plans:
        found = candidates_of(plan)
        groups, saved = found.groups("next")
        one, cost = counted(plan, groups)  # which refuses what waits in a circle
        assert cost.seconds == pytest.approx(plan.costs.seconds - saved, rel=1e-9)
        with monkeypatch.context() as patch:
            patch.setattr(front_members, "untangled", lambda groups, saved: list(groups))
            tangled, more = candidates_of(plan).groups("next")
        if tangled == groups:
            continue
        with pytest.raises(PlanError, match="made from what reads others"):
            counted(plan, tangled)
        assert 0.0 < saved < more
        kinds = {kind[0] for kind, own in found.members.items() for m in own if m.key in groups[0]}
        assert len(groups) == 1 and kinds == {stays}
        assert one.graph is plan.graph or stays == "all_gather"
        tried += 1
    assert tried


def passing_by(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """Sums along rows, and both ways along columns: these go through a copy that is kept."""
    v = jnp.sort(x, 1)
    early = jnp.sort(v, 1)
    w = jnp.sort(jnp.sort(y, 1), 1)
    return early, lax.sort(v, 0), lax.sort(v, 0, is_stable=False), lax.sort(w, 0)


def test_who_goes_past_a_kept_copy_waits_for_what_it_is_made_with() -> None:
    """A kept copy is counted from the first reader of its value on, though it may take another."""
    past = 0
    for plan in front_over(passing_by, ("x", None), (2048, 15), (2048, 15)).plans:
        operations, strategies = plan.graph.operations, plan.body.strategies
        for a, b in (
            ab for own in candidates_of(plan).members.values() for ab in permutations(own, 2)
        ):
            v, need, _ = a.key
            if v not in plan.body.kept or plan.body.kept[v].layout != need or b.key[0] == v:
                continue
            first = next(k for k, op in enumerate(operations) if v in op.inputs)
            made = next(k for k, op in enumerate(operations) if b.key[0] in op.outputs)
            counted(plan, [(a.key, b.key)])  # which refuses what is read before it is made
            past += strategies[first].needs != (need,) and first < made
    assert past


def test_what_is_gathered_again_stays_while_only_the_first_copy_is_merged(
    plans: list[Plan],
) -> None:
    tried = 0
    for plan in plans:
        plan = replace(plan, body=replace(plan.body, kept={}))
        found = candidates_of(plan)
        again = {key[:2] for key in own_moves(found.walk) if key[2]}
        for a, b in (ab for own in found.members.values() for ab in permutations(own, 2)):
            if a.key[:2] not in again or a.key[2] or b.key[0] == a.key[0]:
                continue
            try:
                one, _ = counted(plan, [(a.key, b.key)])
            except (PlanError, ExtractError):
                continue
            mine = [x for v, x in candidates_of(one).walk.held() if v == a.move.value]
            (made,) = [x for x in mine if x.role == "made"]
            assert made.end >= max(x.end for x in mine if x.role == "making")
            tried += a.key[0] not in plan.graph.inputs
    assert tried


def twice(plan: Plan) -> tuple[Plan, set[Key]]:
    """The plan with all merged that may be, and which of that is made for the second time."""
    groups, _ = candidates_of(plan).groups("next")
    one = replace(counted(plan, groups)[0], costs=counted(plan, groups)[1].costs)
    return one, {key for members in one.body.merged for key in members if key[2]}


def test_copies_are_numbered_alike_by_the_certificate_and_by_what_is_lowered(
    plans: list[Plan],
) -> None:
    second = 0
    for plan in plans:
        walk = Walk(plan, Ground(plan_schedule(plan.body, feedback(plan)), H100))
        walk.find_moves()
        for kind, own in Candidates(walk).members.items():
            at = [walk.read_at(m.move) if kind[0] == "all_gather" else m.maker for m in own]
            assert at == sorted(at)
        made = {
            f.key: k
            for k, reads in enumerate(fetches(plan.body))
            for f in reads
            if f.origin == "copy"
        }
        assert {key: move.reader[1] for key, move in own_moves(walk).items()} == made
        second += any(n for *_, n in made)
    assert second


def test_weights_that_are_gathered_twice_are_sent_together_each_time(
    plans: list[Plan], tmp_path: Path
) -> None:
    """Planned, compiled, run, and read from a file."""
    every = [x for p in plans if (x := twice(p))[1]]
    assert every
    plan, second = min(every, key=lambda x: x[0].costs.peak_bytes)
    weights = set(plan.graph.inputs)
    assert second and {v for v, *_ in second} & weights
    plan = replace(plan, collectives=planned_collectives(plan), bound=0.0)
    run = te.compile(plan)
    compared = compare(plan, run.compile())
    assert compared.equal
    rng = np.random.default_rng(0)
    ws = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16 for _ in range(LAYERS)]
    x = rng.normal(size=plan.graph.values[plan.graph.inputs[-1]].shape).astype(np.float32)
    for a, b in zip(run(ws, x), jax.jit(step)(ws, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    # Each is made once, those of one collective with nothing between them.
    sent = [k for k, e in enumerate(local_equations(plan)) if e.primitive.name in COLLECTIVES]
    places = np.split(sent, np.flatnonzero(np.diff(sent) > 1) + 1)
    together = Counter(c.merged for c in plan.collectives)
    assert 0 not in together and sorted(map(len, places)) == sorted(together.values())
    te.save(plan, tmp_path / "plan.json")
    assert te.load(tmp_path / "plan.json").body.merged == plan.body.merged


def test_halves_of_a_group_have_all_of_its_members_but_one_that_is_alone() -> None:
    keys = [(v, Layout((("x",),)), 0) for v in range(5)]
    assert _halves(tuple(keys)) == [tuple(keys[:2]), tuple(keys[2:])]
    assert _halves(tuple(keys[:3])) == [tuple(keys[1:3])]
    assert _halves(tuple(keys[:2])) == []
