"""Results: their places in memory from the first kernel on, and what they were copied from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError, TargetError
from tapestry_egg.extract.certify.buffers import buffers, in_places
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.certify.verdict import Buffer, Copied
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.engine.archive import Archive, Candidate, Cut, Prices
from tapestry_egg.extract.engine.race import Effort, race
from tapestry_egg.extract.engine.search import Search
from tapestry_egg.extract.front import plans
from tapestry_egg.extract.front.merge import NetworkResult, bounded_plan
from tapestry_egg.extract.front.notes import note
from tapestry_egg.extract.front.plans import _settled, make_plan
from tapestry_egg.extract.problem import memory
from tapestry_egg.extract.problem.assemble import PlanProblem, assemble
from tapestry_egg.extract.problem.kept import Keeping
from tapestry_egg.extract.problem.memory import Count
from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.schedule.lifetimes import lifetimes, lives_of
from tapestry_egg.schedule.lying import LEAST_PLACE
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tests.extract.brute import every_cost
from tests.extract.random_programs import Drawn, drawn, mixed, products, schedule_of
from tests.reference.exact import exact
from tests.schedule.test_lifetimes import scheduled

N, MIB = 2048, 1 << 20
X = jax.ShapeDtypeStruct((N, N), jnp.float32)
LAYOUT = Layout.replicated(1)


def buffer(begin: int, end: int, mib: float, **fields: Any) -> Buffer:
    return Buffer(begin, end, mib * MIB, LAYOUT, **fields)


def lying(*held: Buffer, end: int = 10, stay: tuple[int, ...] = ()) -> list[Buffer]:
    found = in_places([(FlatId(v), x) for v, x in enumerate(held)], stay, end)
    return [x for _, x in found]


def test_before_a_result_its_place_holds_what_is_no_larger_one_array_at_a_time() -> None:
    argument, result = buffer(0, 10, 4), buffer(6, 10, 4)
    place = buffer(0, 10, 4, role="result")
    early, late, small, large = [buffer(1, 3, 4), buffer(3, 6, 2), buffer(2, 5, 1), buffer(1, 3, 5)]
    assert lying(argument, early, late, result) == [argument, place]
    assert lying(argument, early, late, small, result) == [argument, small, place]
    assert lying(large, result) == [large, place]
    assert lying(buffer(5, 7, 2), result) == [buffer(5, 7, 2), place]  # it is there beside it
    # A copy lies there like what a kernel makes, and so does what is held while it is made.
    assert lying(buffer(2, 3, 4, role="making"), buffer(3, 6, 4, role="copy"), result) == [place]


def test_the_largest_array_takes_the_smallest_place_that_is_free() -> None:
    large, small = buffer(6, 10, 8), buffer(8, 10, 4)
    places = [buffer(0, 10, x, role="result") for x in (8, 4)]
    assert lying(large, small, buffer(1, 5, 4), buffer(2, 6, 6)) == places
    assert lying(large, small, buffer(1, 5, 3), buffer(2, 6, 4)) == places
    assert lying(small, buffer(1, 4, 2), buffer(2, 5, 4)) == [places[1], buffer(1, 4, 2)]
    assert lying(large, small, buffer(1, 5, 4), buffer(2, 6, 4), buffer(3, 5, 1)) == [
        *places,
        buffer(3, 5, 1),
    ]


def test_new_states_and_small_results_have_no_places_before_they_are_made() -> None:
    early, small = buffer(1, 3, 1), buffer(5, 10, (LEAST_PLACE - 1) / MIB)
    assert lying(early, buffer(6, 10, 4), stay=(1,)) == [early, buffer(6, 10, 4)]
    assert lying(early, small) == [early, small]


def whole(x: jax.Array) -> jax.Array:
    a = jnp.sin(x) @ x
    return x * (a @ x).sum()


def part(x: jax.Array) -> jax.Array:
    return whole(x)[: N // 2]


def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return whole(x)[: N // 2], 2 * whole(x)[N // 2 :]


FUNCTIONS: dict[str, tuple[Callable[..., Any], float]] = {
    "whole": (whole, 3),  # the argument, the result in whose place a product lies, and the other
    "part": (part, 3.5),  # no product fits into the place of the result
    "parts": (parts, 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_xla_for_h100_holds_what_is_promised_of_a_function_that_donates_nothing(name: str) -> None:
    from benchmarks.devices import devices_of
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    function, arrays = FUNCTIONS[name]
    settings = te.Settings(work=0.1, recompute=0, forms=0)
    plan = te.optimize(te.trace(function, X), "h100:1", settings=settings).best("seconds")
    assert plan.costs.peak_bytes == pytest.approx(arrays * 4 * N * N, rel=1e-3)
    assert sum(p.bytes for p in plan.peak().parts) == pytest.approx(plan.costs.peak_bytes)
    results = plan.peak().by_kind()["result"]
    assert results == pytest.approx((4 if name == "whole" else 2 * (arrays * 2 - 6)) * N * N)
    try:
        devices = devices_of("h100:1")
    except TargetError as missing:
        pytest.skip(str(missing))
    compiled = hlo_stats(te.compile(plan, devices).compile())
    assert plan.costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=1e-3)


def test_what_leaves_as_a_copy_is_in_memory_until_that_is_made() -> None:
    """By the lifetimes of problems and by those of certificates."""

    def straight(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        a = x @ x
        return a, jnp.sin(x)

    def viewed_and_read(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        a = x @ x
        return a.T, (a @ x) @ x

    def left_twice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        a = x @ x
        return a, a.T

    def an_argument(x: jax.Array) -> jax.Array:
        return x.T

    for function, count in ((straight, 2), (viewed_and_read, 2), (left_twice, 0), (an_argument, 0)):
        schedule = scheduled(function, X)
        lives = lives_of(schedule)
        found = lifetimes(schedule).leaving
        assert len({x.source for x in lives.leaving.values()}) == count
        for source, until in found.values():
            runs = [
                2 * r + 2
                for r in schedule.readers[source]
                if schedule.program.instances[schedule.units[r].root].signature.kernel
                == "dot_general"
            ]
            assert until == max([lives.made(source) + 2, *runs])


def test_what_a_result_is_summed_from_waits_for_the_others_of_its_collective() -> None:
    schedule = scheduled(lambda x: (x @ x, jnp.sin(jnp.sin(x) @ x) @ x), X)
    lives = lives_of(schedule)
    leaves = next(iter(lives.leaving.values()))
    have, need = Layout(((), ()), (0,), "sum"), Layout(((0,), ()))

    def bytes_of(role: str, **joined: Any) -> set[int]:
        """The ticks at which the value is in memory in a role."""
        at = joined.get("at", leaves.until - 1)
        copy = Copied(need, (leaves.unit,), False, 1.0, (), at, at, joined="at" in joined)
        sizes = (lambda _: 1.0, lambda _: 1.0)
        found = buffers(
            lives, leaves.read, have, {leaves.unit: [need]}, [], [copy], *sizes, left=leaves.until
        )
        return {t for x in found if x.role == role for t in range(x.begin, x.end)}

    made, until = lives.made(leaves.read), leaves.until
    assert bytes_of("made") == set(range(made, until))
    assert bytes_of("copy") == set(range(until, lives.end))
    assert bytes_of("made", at=until + 2) == set(range(made, until + 3))
    assert bytes_of("copy", at=until + 2) == set(range(until + 3, lives.end))


#: A program of which a plan holds more for the places of its results than its problem knows.
CROWDED = 20


def test_a_bound_is_of_what_a_plan_holds_with_the_places_of_its_results() -> None:
    """The problem counts less, so what is proven of less than the plan holds is no bound."""
    schedule, mesh = schedule_of(CROWDED, products), MeshShape(("x",), (4,))
    target = load_target("h100:4")
    found = saturate(encode(schedule.program, mesh), load_books(("sharding", "collectives")))
    assembled = assemble(unit_choices(schedule, found, mesh, target))
    (found_there,) = race([assembled.problem], Effort(work=1.0, front=False))
    candidate = min(found_there.candidates, key=lambda c: c.costs)
    for peak, share in ((candidate.peak, 0.0), (np.inf, 0.9)):
        archive = Archive([candidate], [Cut(0.9 * candidate.seconds, 0.0, 0.0, peak)])
        results = [NetworkResult(assembled, archive)]
        plan = bounded_plan(results, assembled, candidate, ("seconds",), {})
        assert plan.costs.peak_bytes > candidate.peak * 1.1
        assert plan.bound == pytest.approx(share * candidate.seconds)


def test_a_front_tells_of_plans_that_hold_more_for_places_than_was_known() -> None:
    settings = te.Settings(work=0.1, forms=0, recompute=0)

    def told(target: str, fn: Callable[..., Any], *args: Any) -> bool:
        found = te.optimize(te.trace(fn, *args), target, settings=settings)
        return note("results-memory") in found.notes

    program, shapes = products(CROWDED)
    arguments = [jax.ShapeDtypeStruct(s, "f4") for s in shapes]
    assert told("h100:4", program, *arguments)
    assert not told("cpu:4", program, *arguments)
    assert not told("h100:2", part, X)


@pytest.mark.slow
def test_a_small_result_that_fills_tiles_in_part_has_a_place_of_their_size() -> None:
    """8 KiB, of which a quarter on each device takes 16 KiB in tiles of 8 × 128 floats."""

    def products(q: jax.Array, k: jax.Array) -> Any:
        return jnp.einsum("bqhd,bqhd->bq", q, k), jnp.einsum("bqhd,ckhd->bchqk", q, k)

    x = jax.ShapeDtypeStruct((4, 8, 2, 8), jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of plans that are left out
        front = te.optimize(
            te.trace(products, x, x),
            "v5e:2x4",
            settings=te.Settings(work=0.1, forms=0, recompute=0),
        )
    assert len(front) > 1


# Places of results in a problem's memory: from below, and as much as plans hold of most programs.
# Every plan of small random programs that donate nothing is costed by the certificate, which puts
# arrays into the places one by one. The network knows none of that: it counts from below.


MESH, TARGET = MeshShape(("x",), (4,)), load_target("h100:4")
BOOKS = load_books(("sharding", "collectives"))
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
