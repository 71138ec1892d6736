"""Places of results in a problem's memory: from below, and as much as plans hold of most programs.

Every plan of small random programs that donate nothing is costed by the certificate, which puts
arrays into the places one by one. The network knows none of that: it counts from below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.engine.archive import Candidate, Prices
from tapestry_egg.extract.engine.search import Search
from tapestry_egg.extract.front import plans
from tapestry_egg.extract.front.plans import _settled, make_plan
from tapestry_egg.extract.problem import memory
from tapestry_egg.extract.problem.assemble import PlanProblem, assemble
from tapestry_egg.extract.problem.kept import Keeping
from tapestry_egg.extract.problem.memory import Count
from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.schedule.lying import LEAST_PLACE
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tests.extract.brute import every_cost
from tests.extract.random_programs import Drawn, drawn, mixed, products, schedule_of
from tests.reference.exact import exact
from tests.schedule.test_lifetimes import scheduled

MESH, TARGET = MeshShape(("x",), (4,)), load_target("h100:4")
BOOKS = load_books(("sharding", "collectives"))
MIB = 1 << 20
SQUARE = jax.ShapeDtypeStruct((1024, 1024), "f4")


def posed(plan: Schedule) -> PlanProblem:
    found = saturate(encode(plan.program, MESH), BOOKS)
    return assemble(unit_choices(plan, found, MESH, TARGET), keeping=Keeping(0))


def best(plan: Schedule) -> list[tuple[float, float]]:
    """Peaks and seconds of the plans that no other beats, of all that there are."""
    found: list[tuple[float, float]] = []
    for c in sorted(every_cost(plan, MESH, TARGET, True), key=lambda c: (c.peak_bytes, c.seconds)):
        if not found or c.seconds < found[-1][1] * (1 - 1e-9):
            found.append((c.peak_bytes, c.seconds))
    return found


def apart(plan: Schedule) -> float:
    """By which share at most the network takes less than the best plan, within every peak of the
    front of all plans and just below; infinite where only the network has one."""
    front, problem, most = best(plan), posed(plan).problem, 0.0
    for limit in [p * k for p, _ in front for k in (1 + 1e-9, 1 - 1e-5)]:
        least = min((s for p, s in front if p <= limit), default=np.inf)
        found = exact(problem, limit)
        assert found <= least * (1 + 1e-6), "a plan that the network does not have"
        if found < np.inf:
            most = max(most, least / found - 1.0)
    return most


def without_places(patch: pytest.MonkeyPatch) -> None:
    """Networks that count results from when they are made, and no more."""
    patch.setattr(memory, "counts", lambda *_: (Count(),))


#: Programs whose results' places change the front.
CHANGED: tuple[tuple[Callable[[int], Drawn], int], ...] = (
    (products, 1),
    (products, 23),
    (products, 10),
    (products, 8),
    (drawn, 13),
)


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "seed"), CHANGED[:3])
def test_with_places_of_results_the_network_has_the_front_of_all_plans(
    draw: Callable[[int], Drawn], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = schedule_of(seed, draw)
    assert apart(plan) < 1e-6
    without_places(monkeypatch)
    assert apart(plan) > 0.1


@pytest.mark.long
def test_no_plan_holds_less_than_its_network_counts() -> None:
    """Of two of these programs a plan holds more: which places are free at other times matters,
    too."""
    few = [(drawn, k) for k in (0, 2, 9, 13, 14, 15, 16, 21)]
    few += [(products, k) for k in (1, 2, 3, 4, 6, 7, 8, 9, 10, 14, 15, 19, 20, 22, 23)]
    wide = [(draw, k) for draw, k in few if apart(schedule_of(k, draw)) >= 1e-6]
    assert wide == [(products, 7), (products, 20)]


def labellings(problem: PlanProblem, times: int) -> Sequence[Candidate]:
    """Labellings that are best, or nearly, at prices drawn at random, whose costs do not matter."""
    rng, search = np.random.default_rng(0), Search(problem.problem, 0.0)
    for _ in range(times):
        bytes_ = rng.choice((0.0, 1e-12, 1e-10)) * rng.random(problem.problem.times) ** 8
        search.settle(Prices(bytes_), 2)
    return search.archive.candidates


def counted(walk: Walk, count: Count) -> Floats:
    """Bytes at each tick: the arrays of a plan that are larger, and those that stay to the end; and
    before they are made the results that are not."""
    lives, change = walk.ground.lives, np.zeros(walk.ground.lives.end + 1)
    for v, x in walk.held():
        stays = x.end >= lives.end
        if stays or x.amount > count.above:
            change[x.begin] += x.amount
            change[x.end] -= x.amount
        made = x.role in ("made", "copy") and x.begin > 0 and v not in lives.staying
        if stays and made and LEAST_PLACE <= x.amount <= count.above:
            change[0] += x.amount
            change[x.begin] -= x.amount
    return np.cumsum(change)[:-1]


def leaves_much(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """An argument, a view, a value twice, sums, and what is read once more behind."""
    a = jnp.sin(x) @ y
    b = a @ x
    return x, b.T, b, (b * x).sum(0), jnp.tanh(a) @ b, (a @ b)[:64]


def updates(w: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
    """A new state that is not where the old one was, which is read behind, and two results."""
    g = x.T @ jnp.tanh(x @ w)
    return g @ w, g.T, g @ (w + 1)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(lambda: scheduled(updates, SQUARE, SQUARE, donate=(0,))),
        pytest.param(lambda: scheduled(leaves_much, SQUARE, SQUARE)),
        *(
            pytest.param(lambda s=seed, d=draw: schedule_of(s, d), marks=pytest.mark.slow)
            for draw, seed in (*CHANGED, (mixed, 0), (mixed, 2), (products, 20))
        ),
    ],
)
def test_every_count_is_of_the_arrays_that_the_certificate_finds(
    plan: Callable[[], Schedule],
) -> None:
    problem, ground = posed(plan()), None
    assert len(problem.counts) > 1
    found = labellings(problem, 10)
    assert found
    for c in found:
        made = make_plan(problem, c, "", 0.0)
        ground = ground or Ground(problem.choices.schedule, TARGET)
        walk = Walk(made, ground)
        walk.find_moves()
        _, _, profile = problem.problem.evaluate(_settled(problem, c.rows))
        most = np.array(walk.profile())
        for one, count in zip(np.split(profile, len(problem.counts)), problem.counts, strict=True):
            np.testing.assert_allclose(one, counted(walk, count), rtol=1e-9, atol=1e-3)
            assert (one <= most + 1e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True])
def test_what_is_counted_below_what_was_proven_is_left_out(
    every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a warning; an error only where no plan is left."""

    class Less(Walk):
        def profile(self) -> list[float]:
            counted.append(1)
            return [x / 4 if every or len(counted) == 1 else x for x in super().profile()]

    def found() -> list[te.Plan]:
        settings = te.Settings(work=0.1, recompute=0, merge=False, forms=0, micro_batches=())
        return list(te.optimize(program, "h100:4", mesh_shapes=[MESH], settings=settings))

    program = te.trace(lambda x: (x @ x, x.sum(0)), SQUARE)
    counted: list[int] = []
    known = [p.costs for p in found()]
    monkeypatch.setattr(plans, "Walk", Less)
    if every:
        with pytest.raises(ExtractError, match="the search proved at least"):
            found()
    else:
        with pytest.warns(UserWarning, match="left out.*the search proved at least"):
            left = [p.costs for p in found()]
        assert left and set(left) < set(known)


def test_sizes_are_those_of_results_that_hold_most() -> None:
    def many(x: jax.Array) -> tuple[jax.Array, ...]:
        return (x @ x, x.sum(0), jnp.float32(1) + x[0, 0])

    problem = posed(scheduled(many, SQUARE))
    assert [c.above for c in problem.counts] == [0.0, MIB, 4 * MIB]
    begins = [c.begin for c in problem.counts]
    assert begins == [k * problem.problem.times // 3 for k in range(3)]


def test_new_states_need_no_counts() -> None:
    plan = scheduled(lambda x: x + 1, SQUARE, donate=(0,))
    assert posed(plan).counts == (Count(),)
