"""Collectives next to each other that are one, and copies that are made twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.merging import Key, kind_of, own_moves
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.front.merging import LEAST, _cuts, _halves
from tapestry_egg.extract.merged import members as front_members
from tapestry_egg.extract.merged.members import WHICH, Candidates
from tapestry_egg.graph.layout import Layout
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.plans.fetch import fetches
from tapestry_egg.plans.plan import Merged, Plan
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.runtime import compare
from tapestry_egg.schedule.of_plans import plan_schedule
from tests.extract.test_merging import (
    GRADIENT,
    LAYERS,
    MESH,
    QUICK,
    WIDTH,
    counted,
    feedback,
    front_of,
    step,
)
from tests.runtime.test_beside import COLLECTIVES, local_equations

pytestmark = pytest.mark.slow

H100 = load_target("h100:8")


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


def test_what_is_told_of_cuts_is_what_plans_have(plans: list[Plan]) -> None:
    cuts = 0
    for plan in plans:
        found = candidates_of(plan)
        alone = counted(plan, ())[1]
        for which in WHICH:
            groups, saved = found.groups(which, waits=False)
            cost = counted(plan, groups)[1]
            assert cost.seconds == pytest.approx(alone.seconds - saved, rel=1e-9)
            cuts += bool(groups)
    assert cuts > 5


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
