"""Lifetimes and bytes, against numbers worked out by hand, another recount, and XLA for H100."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tapestry_egg as te
from models import gpt2
from tapestry_egg.extract.certify.certificate import certify
from tapestry_egg.extract.certify.cost_parts import cost_parts
from tapestry_egg.extract.choices.unit_choices import UnitChoices, unit_choices
from tapestry_egg.extract.engine.archive import Candidate
from tapestry_egg.extract.engine.race import Effort, race
from tapestry_egg.extract.front.plans import make_plan
from tapestry_egg.extract.problem.assemble import PlanProblem, assemble
from tapestry_egg.extract.problem.columns import Wanted
from tapestry_egg.extract.problem.memory import Memory
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import turning_seconds
from tapestry_egg.machine.target import load_target
from tapestry_egg.plans.plan import Plan
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.schedule.flatten import feedback_pairs, flatten
from tapestry_egg.schedule.lifetimes import Lifetimes, lifetimes, lives_of
from tapestry_egg.schedule.lying import turned_operands, turned_reads
from tapestry_egg.schedule.repeated import repeat_cheap
from tapestry_egg.schedule.schedules import Schedule, in_order, schedule
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.trace import trace

N = 512
X = jax.ShapeDtypeStruct((N, N), jnp.float32)
BYTES = 4 * N * N


def scheduled(f: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Schedule:
    graph = repeat_cheap(trace(f, *args, donate_argnums=donate).graph)
    pairs = feedback_pairs(graph)
    return schedule(flatten(in_order(graph, pairs), pairs))


def made_by(schedule: Schedule, kernel: str, which: int = 0) -> tuple[int, int]:
    """(unit, its first output) of the which-th unit whose root runs a kernel or is a port."""
    instances = schedule.program.instances
    found = [
        (u, unit.outputs[0])
        for u, unit in enumerate(schedule.units)
        if kernel in (instances[unit.root].signature.kernel, instances[unit.root].port)
    ]
    return found[which]


def held(schedule: Schedule, lives: Lifetimes) -> list[int]:
    """Bytes at every tick when nothing is cut and nothing copied."""
    profile = [0] * lives.times
    for v, type_ in enumerate(schedule.program.types):
        if schedule.producer[v] >= 0 and not lives.free[v]:
            for t in range(lives.made[v], min(lives.last[v] + 2, lives.times)):
                profile[t] += type_.nbytes
    return profile


def test_a_value_lives_from_its_unit_to_its_last_reader() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        a = x @ w
        return (a @ w) @ a

    plan = scheduled(f, X, X)
    lives = lifetimes(plan)
    (u, a), (s, b), (t, c) = (made_by(plan, "dot_general", k) for k in range(3))
    assert (lives.made[a], lives.last[a]) == (2 * u + 1, 2 * t)
    assert (lives.made[b], lives.last[b]) == (2 * s + 1, 2 * t)
    assert (lives.made[c], lives.last[c]) == (2 * t + 1, lives.times)
    assert lives.reads_at[s, a] == 2 * s and lives.reads_at[t, a] == 2 * t
    # x and w throughout; a, b and c together while the last product runs
    assert max(held(plan, lives)) == held(plan, lives)[2 * t + 1] == 5 * BYTES


def test_an_elementwise_result_takes_over_a_dying_operand() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return ((x @ w) * x) @ w

    plan = scheduled(f, X, X)
    lives = lifetimes(plan)
    (u, a), (s, b) = made_by(plan, "dot_general"), made_by(plan, "mul")
    assert lives.last[a] == 2 * s and lives.made[a] == 2 * u + 1
    assert lives.made[b] == 2 * s + 2  # there once a is gone
    assert max(held(plan, lives)) == 4 * BYTES


@pytest.mark.parametrize(("axis", "takes_over"), [(0, True), (1, False)])
def test_one_kernel_makes_a_result_and_reduces_its_rows(axis: int, takes_over: bool) -> None:
    """And then overwrites nothing; columns are reduced by another, as XLA for H100 has it."""

    def f(x: jax.Array, w: jax.Array) -> Any:
        y = (x @ w) * x
        return y.sum(axis), (y @ w).sum()

    plan = scheduled(f, X, X)
    s, y = made_by(plan, "mul")
    assert (lifetimes(plan).made[y] == 2 * s + 2) == takes_over


def test_a_result_of_another_type_does_not() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    plan = scheduled(f, X, X)
    lives = lifetimes(plan)
    s, b = made_by(plan, "convert_element_type")
    assert lives.made[b] == 2 * s + 1


def test_what_readers_compute_for_themselves_keeps_its_operands() -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        e = jnp.exp(x @ w)
        total = e.sum(0)
        return total, (w @ w) @ w, (e * total).max(1)

    plan = scheduled(f, X, X)
    lives = lifetimes(plan)
    (_, a), (s, e), (t, _) = (made_by(plan, k) for k in ("dot_general", "exp", "reduce_max"))
    assert lives.free[e]
    assert lives.last[a] == 2 * t == lives.reads_until[s, a]
    assert lives.reads_at[s, a] == 2 * s


def test_a_view_keeps_what_it_views() -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        a = (x @ w).reshape(N * N)
        return a, w @ w, a.reshape(N, N).T @ w

    plan = scheduled(f, X, X)
    lives = lifetimes(plan)
    _, a = made_by(plan, "dot_general")
    assert lives.last[a] == lives.times


def step(w: jax.Array, x: jax.Array) -> Any:
    return (w - 0.1 * (x @ w),)


def test_a_new_state_takes_the_place_of_the_old_one() -> None:
    plan = scheduled(step, X, X, donate=(0,))
    lives = lifetimes(plan)
    (_, old), (_, new) = made_by(plan, "state"), made_by(plan, "sub")
    assert (lives.made[old], lives.last[old]) == (0, lives.times)
    assert lives.free[new]
    assert max(held(plan, lives)) == 3 * BYTES  # w, x, the product


def test_unless_the_old_one_is_still_to_be_read() -> None:
    def f(w: jax.Array, x: jax.Array) -> Any:
        new = w - 0.1 * x
        return new, (new @ x) @ w

    plan = scheduled(f, X, X, donate=(0,))
    lives = lifetimes(plan)
    _, new = made_by(plan, "sub")
    t, _ = made_by(plan, "dot_general", 1)
    assert not lives.free[new] and lives.last[new] == 2 * t


def test_stacks_of_a_loop_exist_from_its_start() -> None:
    def f(x: jax.Array) -> Any:
        return jax.lax.scan(lambda c, _: (c @ c, jnp.exp(c)), x, None, length=3)

    plan = scheduled(f, X)
    lives = lifetimes(plan)
    u, stack = made_by(plan, "stack")
    first = min(
        k
        for (start, stop) in plan.program.spans.values()
        for k, unit in enumerate(plan.units)
        if start <= unit.root < stop
    )
    assert lives.made[stack] == 2 * first + 1 < 2 * u + 1


def test_what_a_loop_reads_from_outside_lives_until_its_last_round() -> None:
    """Stacks and invariants alike, though a round reads them first of all; a slice is taken where
    it is read."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        stack, fixed = w @ x, jnp.fft.fft(x).real

        def body(c: jax.Array, a: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sort(jnp.sort(jnp.sort(c @ fixed) @ a, axis=0)), None

        return jax.lax.scan(body, x, stack)[0]

    of = scheduled(f, X, jax.ShapeDtypeStruct((3, N, N), jnp.float32))
    lives = lifetimes(of)
    (first, stop), *_ = of.program.spans.values()
    over = 2 * max(u for u, unit in enumerate(of.units) if first <= unit.root < stop)
    slicing, sliced = made_by(of, "stream")
    into, inner = made_by(of, "invariant")
    for u in (slicing, into):
        (source,) = dict.fromkeys(v for _, _, v in of.units[u].reads)
        assert lives.last[source] == lives.reads_until[u, source] == over
        assert lives.reads_at[u, source] < over
    reader = next(u for u, unit in enumerate(of.units) if sliced in [v for *_, v in unit.reads])
    assert lives.made[sliced] == 2 * reader > 2 * slicing + 1
    assert lives.last[inner] < over


ROUNDS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "over the old one": jnp.tanh,
    "beside the old one": lambda c: c @ c,
    "after the old one": lambda c: jnp.sort(c @ c),
    "of the old one and another": lambda c: (c @ c) @ c,
    "by a loop in it": lambda c: jax.lax.fori_loop(0, 2, lambda _, x: jnp.sort(x @ x), c),
    "stacked by a loop in it": lambda c: jax.lax.scan(lambda s, r: (s, r - s), c[0], c)[1],
}


@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("name", ROUNDS)
def test_what_a_loop_carries_has_one_buffer_and_the_next_round_another_if_it_must(
    name: str, donated: bool, loops: int
) -> None:
    """Against XLA's own buffer assignment. What several loops hand on to each other is one buffer,
    and that of the argument if it is donated."""

    def f(x: jax.Array) -> Any:
        for _ in range(loops):
            x = jax.lax.scan(lambda c, _: (ROUNDS[name](c), None), x, None, length=3)[0]
        return (x,)

    holds_what_xla_assigns(f, (X,), donated)


Pair = tuple[jax.Array, jax.Array]

#: Rounds of a loop that carries two values, and how many arrays more XLA holds on CPUs, where no
#: two copies of carries share one.
PAIRS: dict[str, tuple[Callable[[jax.Array, jax.Array], Pair], int]] = {
    "change places": (lambda a, b: (b, a), 1),
    "one computed": (lambda a, b: (b, jnp.tanh(a)), 1),
    "one computed of both": (lambda a, b: (b, a @ b), 1),
    "one kept and read": (lambda a, b: (a @ b, a), 1),
    "one kept where nothing is read": (lambda a, b: (a @ a, a), 0),
    "both are one": (lambda a, b: ((x := a @ b), x), 0),
    "each of the other": (lambda a, b: (b @ b, a @ a), 1),
    "one turned": (lambda a, b: (b.T @ a, a.T), 0),
    "one turned in its place": (lambda a, b: (a.T, b @ a), 0),
    "one turned by a kernel": (lambda a, b: (jnp.tanh(a.T), b @ a), 0),
    "one upside down": (lambda a, b: (jnp.tanh(a[::-1]), b @ a), 0),
}


def rounds(body: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., Any]:
    """A loop that carries what it is given."""
    return lambda *xs: jax.lax.scan(lambda c, _: (body(*c), None), xs, None, length=3)[0]


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_what_one_carry_hands_to_another_is_copied(name: str, donated: bool) -> None:
    body, more = PAIRS[name]
    counted, assigned = counted_and_assigned(rounds(body), (X, X), donated)
    assert counted + more * BYTES == pytest.approx(assigned, rel=0.01)


def settled(a: jax.Array, b: jax.Array) -> Pair:
    """The last two of a series, when they are alike."""
    far = lambda c: jnp.sum(jnp.square(c[1] - c[0])) > 1.0  # noqa: E731 - a condition in one line
    return jax.lax.while_loop(far, lambda c: (c[1], c[1] @ c[1]), (a, b))


@pytest.mark.parametrize("donated", [False, True])
def test_what_a_condition_has_read_makes_room_for_what_is_handed_on(donated: bool) -> None:
    counted, assigned = counted_and_assigned(settled, (X, X), donated)
    assert counted == pytest.approx(assigned, rel=0.01)


def test_three_carries_change_places_through_one_array() -> None:
    for donated, arrays in (False, 7), (True, 4):
        counted, _ = counted_and_assigned(rounds(lambda a, b, c: (b, c, a)), (X, X, X), donated)
        assert counted == arrays * BYTES


#: New states that what makes them cannot write over the old one, and how many arrays there are.
STATES: dict[str, tuple[Callable[[jax.Array, jax.Array], Any], int]] = {
    "of its elements": (lambda w, x: (jnp.tanh(w),), 2),
    "a product": (lambda w, x: (w @ x,), 3),
    "sorted": (lambda w, x: (jnp.sort(w, axis=0),), 3),
    "turned by a kernel": (lambda w, x: (jnp.tanh(w.T),), 3),
    "upside down": (lambda w, x: (jnp.tanh(w[::-1]),), 3),
    "upside down when it is doubled": (lambda w, x: (jnp.tanh((w * 2)[::-1]),), 3),
    "a loop that reads the old one": (lambda w, x: (rounds(lambda c: (c @ w,))(jnp.sin(x))[0],), 4),
}


@pytest.mark.parametrize("name", STATES)
def test_a_new_state_takes_the_old_one_s_place_if_what_makes_it_can_write_there(name: str) -> None:
    step, arrays = STATES[name]
    of = scheduled(step, X, X, donate=(0,))
    counted = most_held(of)
    assert counted == pytest.approx(arrays * BYTES, rel=0.01)
    assert counted == pytest.approx(assigned_by_xla(step, (X, X), (0,)), rel=0.01)


#: Results that are arguments, or one another.
RESULTS: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    "an argument": lambda x, w: (x, x * w),
    "a view of one": lambda x, w: (x.reshape(-1), x * w),
    "one twice": lambda x, w: ((y := x * w), y),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_is_there_already_takes_an_array_of_its_own(name: str) -> None:
    f = RESULTS[name]
    (plan,) = te.optimize(te.trace(f, X, X), "h100:1", settings=te.Settings(forms=0, work=0.1))
    assert plan.costs.peak_bytes == pytest.approx(assigned_by_xla(f, (X, X)), rel=0.01)
    assert plan.costs.peak_bytes == 4 * BYTES


def holds_what_xla_assigns(
    f: Callable[..., Any], arguments: tuple[jax.Array, ...], donated: bool
) -> None:
    """A schedule holds what XLA's own buffer assignment does, and what the certificate counts."""
    counted, assigned = counted_and_assigned(f, arguments, donated)
    assert counted == pytest.approx(assigned, rel=0.01)


def counted_and_assigned(
    f: Callable[..., Any], arguments: tuple[jax.Array, ...], donated: bool
) -> tuple[float, float]:
    """Bytes that a schedule holds, and those of XLA."""
    donate = tuple(range(len(arguments))) if donated else ()
    of = scheduled(f, *arguments, donate=donate)
    return most_held(of), assigned_by_xla(f, arguments, donate)


def most_held(of: Schedule, epilogues: bool = False) -> int:
    """Bytes that a schedule holds at most."""
    return max(held(of, lifetimes(of, epilogues)))


def assigned_by_xla(
    f: Callable[..., Any], arguments: tuple[jax.Array, ...], donate: tuple[int, ...] = ()
) -> float:
    """Bytes of XLA's buffer assignment on one CPU device, arguments and results among them."""
    jitted = jax.jit(f, donate_argnums=donate, keep_unused=True)
    has = jitted.lower(*arguments).compile().memory_analysis()
    every = has.argument_size_in_bytes + has.output_size_in_bytes + has.temp_size_in_bytes
    return float(every - has.alias_size_in_bytes)


@cache
def problem(devices: int) -> PlanProblem:
    """A training step of two dense layers over a line of devices."""

    def train(params: list[jax.Array], x: jax.Array) -> Any:
        def loss(params: list[jax.Array]) -> jax.Array:
            y = x
            for w in params:
                y = jax.nn.gelu(y @ w)
            return jnp.square(y).sum()

        value, grads = jax.value_and_grad(loss)(params)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value

    wide = jax.ShapeDtypeStruct((N, 4 * N), jnp.float32)
    back = jax.ShapeDtypeStruct((4 * N, N), jnp.float32)
    rows = jax.ShapeDtypeStruct((8 * N, N), jnp.float32)
    plan = scheduled(train, [wide, back], rows, donate=(0,))
    mesh = MeshShape(("x",), (devices,))
    target = load_target(f"h100:{devices}")
    found = saturate(encode(plan.program, mesh), load_books(("sharding", "collectives")))
    return assemble(unit_choices(plan, found, mesh, target))


@cache
def labellings(devices: int) -> tuple[Candidate, ...]:
    """What a short search finds, from fast to small."""
    (archive,) = race([problem(devices).problem], Effort(work=2.0))
    return tuple(sorted(archive.candidates, key=lambda c: c.seconds))


@pytest.mark.slow
def test_every_tick_of_a_plan_adds_up_to_what_the_certificate_counts() -> None:
    assembled = problem(8)
    found = labellings(8)
    assert len(found) >= 3
    for k, candidate in enumerate(found):
        plan = make_plan(assembled, candidate, f"p{k}", 0.0)
        *_, profile = assembled.problem.evaluate(candidate.rows)
        counted = certify(plan, assembled.choices.schedule, assembled.choices.target).profile
        assert max(counted) == plan.costs.peak_bytes <= round(profile.max())
        if plan.costs.peak_bytes == round(profile.max()):
            np.testing.assert_allclose(profile, counted)


def h100s() -> Any:
    """Eight described GPUs."""
    from benchmarks.devices import devices_of
    from tapestry_egg.errors import TargetError

    try:
        return devices_of("h100:8")
    except TargetError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize(
    "name", ["change places", "one kept and read", "each of the other", "until they are alike"]
)
def test_xla_for_h100_holds_what_a_plan_of_two_carries_promises(name: str, donated: bool) -> None:
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    devices = h100s()[:1]
    fn = settled if name == "until they are alike" else rounds(PAIRS[name][0])
    program = te.trace(fn, X, X, donate_argnums=(0, 1) if donated else ())
    front = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    compiled = hlo_stats(te.compile(front[0], devices).compile())
    assert front[0].costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01)


#: Rows of a batch, places, heads and width of a cache of which one place is written at a time.
CACHE = (16, 256, 8, 64)
H100 = load_target("h100:8")
ROWS, HEADS = ("x", None, None, None), (None, None, "x", None)


@cache
def cached(cut: tuple[str | None, ...], queries: int, loops: bool, sets: bool) -> Plan:
    """A plan that decodes with so many queries for a head of its donated cache, which is cut so
    over eight devices, in a loop or one token. A scatter `sets` its row, or an update writes it."""

    def decode(cache: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(t: Any, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            cache, q = given
            if sets:
                cache = cache.at[:, t].set(q[:, :, 0])
            else:
                cache = lax.dynamic_update_slice_in_dim(cache, q[:, None, :, 0], t, axis=1)
            scores = jnp.einsum("bhqk,bthk->bhqt", q, cache)
            return cache, jnp.einsum("bhqt,bthk->bhqk", scores, cache)

        return lax.fori_loop(0, CACHE[1], step, (cache, q)) if loops else step(5, (cache, q))

    shapes = CACHE, (CACHE[0], CACHE[2], queries, CACHE[3])
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    program = te.trace(decode, *types, donate_argnums=(0, 1))
    pins = {"[0]": cut, "[1]": (cut[0], cut[2], None, None)}
    return te.optimize(program, "h100:8", pins=pins, settings=te.Settings(forms=0, work=0.2))[0]


@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize(
    ("cut", "queries", "blocks"), [(ROWS, 4, 2), (HEADS, 4, 1), (ROWS, 1, 1), (HEADS, 1, 1)]
)
def test_a_cache_is_turned_where_a_device_multiplies_several_heads_of_it(
    cut: tuple[str | None, ...], queries: int, blocks: int, loops: bool, sets: bool
) -> None:
    """One head is no batch, and what multiplies a vector reads any order: such a cache is renewed
    in place. Else it is turned before and after. XLA for H100 holds as much."""
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    plan = cached(cut, queries, loops, sets)
    block = int(np.prod(CACHE)) // 8 * 4
    assert plan.costs.peak_bytes == pytest.approx(blocks * block, rel=0.1)
    name, twice = "carry" if loops else "dynamic_update_slice", 2 * turning_seconds(block, H100)
    assert (sum(p.seconds for p in cost_parts(plan) if name in p.name) >= twice) == (blocks == 2)
    compiled = hlo_stats(te.compile(plan, h100s()).compile())
    assert plan.costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.05)


def scored(q: Any, c: Any) -> Any:
    return jnp.einsum("bhqk,bthk->bhqt", q, c)


def one_row(c: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(c, jnp.ones_like(c[:, :1]), 3, axis=1)


#: What reads a cache, before and after a row is written, and whether it is turned for that long.
RENEWED: dict[str, tuple[Callable[..., Any], bool]] = {
    "read when it is written": (lambda c, q: ((c := one_row(c)), scored(q, c)), True),
    "read before": (lambda c, q: (scored(q, c), one_row(c))[::-1], False),
    "the old one read behind": (
        lambda c, q: ((d := one_row(c)), scored(scored(q, d)[..., : CACHE[3]], c)),
        False,
    ),
    "a row of it written elsewhere": (
        lambda c, q: (
            (c := lax.dynamic_update_slice_in_dim(c, c[:, :1] + 1, 3, axis=1)),
            scored(q, c),
        ),
        False,
    ),
    "left as it is": (lambda c, q: (c, scored(q, c)), False),
}


@pytest.mark.parametrize("name", RENEWED)
def test_a_cache_is_turned_for_what_reads_it_after_it_is_renewed(name: str) -> None:
    """What products read of the old one alone is turned for them alone."""
    fn, turned = RENEWED[name]
    shapes = CACHE, (CACHE[0], CACHE[2], 4, CACHE[3])
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    graph = te.trace(fn, *types, donate_argnums=0).graph
    plan = schedule(flatten(graph, feedback_pairs(graph)))
    lives = lives_of(plan)
    renewed = [x for x, *_ in lifetimes(plan).turned.values() if x.renewed]
    assert bool(renewed) == bool(lives.turned_parts) == turned
    inside = [True] * len(plan.units)
    every = turned_operands(turned_reads(plan, inside))
    beside = turned_operands(turned_reads(plan, inside, lives.turned_parts))
    assert len(every) - len(beside) == turned


def weighed(c: Any, q: Any) -> Any:
    return jnp.einsum("bhqt,bthk->bhqk", jnp.tanh(scored(q, c)), c)


def looped(f: Callable[..., Any]) -> Callable[..., Any]:
    """Rounds that read what they do not change."""
    return lambda c, q: lax.fori_loop(0, 3, lambda _, q: f(c, q), q)


#: A stack of caches, too many for a loop over it to be written out.
MANY = (160, 2, 256, 8, 16)
SQUARE = np.ones((CACHE[2] * CACHE[3],) * 2, np.float32)

#: What products read in another order than it lies in: how many arrays as large there are at a
#: time, and whether it is turned before a loop.
READ_TURNED: dict[str, tuple[Callable[..., Any], float, bool]] = {
    "an argument": (weighed, 2, False),
    "an argument, by one product": (lambda c, q: scored(q, c), 2, False),
    "converted by the product": (lambda c, q: scored(q, c.astype(q.dtype)), 2, False),
    "in a loop": (looped(weighed), 2, True),
    "in a loop in a loop": (looped(looped(weighed)), 2, True),
    "computed in a loop": (looped(lambda c, q: weighed(jnp.tanh(c), q)), 2, True),
    "one of a stack": (lambda c, q: weighed(c[1], q), 1.5, False),
    "a stack, one in a round": (
        lambda c, q: lax.scan(lambda q, c: (weighed(c, q), None), q, c)[0],
        2,
        False,
    ),
    "computed in that order": (lambda c, q: looped(weighed)(jnp.tanh(c), q), 2, False),
    "projected": (
        lambda c, q: looped(weighed)((c.reshape(*CACHE[:2], -1) @ SQUARE).reshape(CACHE), q),
        3,
        True,
    ),
    "read otherwise, too": (
        lambda c, q: (looped(weighed)(d := jnp.cumsum(c, 1), q), d[:, :1]),
        3,
        True,
    ),
}


@pytest.mark.parametrize("name", READ_TURNED)
def test_a_copy_for_products_is_beside_what_it_is_of(name: str) -> None:
    """Made once before a loop, whatever the rounds compute of it. XLA for H100 holds as much."""
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    fn, arrays, before = READ_TURNED[name]
    dtype = jnp.bfloat16 if "converted" in name else jnp.float32
    shape = {"one of a stack": (2, *CACHE), "a stack, one in a round": MANY}.get(name, CACHE)
    cache = jax.ShapeDtypeStruct(shape, dtype)
    rows, _, heads, width = shape[-4:]
    q = jax.ShapeDtypeStruct((rows, heads, 4, width), jnp.float32)
    settings = te.Settings(forms=0, work=0.1, front=False)
    (plan, *_) = te.optimize(te.trace(fn, cache, q), "h100:1", settings=settings)
    compiled = hlo_stats(te.compile(plan, h100s()[:1]).compile())
    size = float(np.prod(shape)) * cache.dtype.itemsize
    assert plan.costs.peak_bytes == pytest.approx(arrays * size, rel=0.1)
    assert plan.costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.03)
    turned = sum(p.seconds for p in cost_parts(plan) if p.name == "invariant")
    assert turned == pytest.approx(before * turning_seconds(size, H100))


@cache
def gpt_block() -> UnitChoices:
    """A block whose values the backward pass reads again, some of them by way of others."""
    config = gpt2.config("tiny", layers=1)
    program = trace(gpt2.step, *gpt2.abstract(config), donate_argnums=(0, 1))
    pairs = feedback_pairs(program.graph)
    plan = schedule(flatten(in_order(repeat_cheap(program.graph), pairs), pairs))
    mesh = MeshShape(("x",), (4,))
    found = saturate(encode(plan.program, mesh), load_books(("sharding", "collectives")))
    return unit_choices(plan, found, mesh, load_target("h100:4"))


@pytest.mark.slow
@given(st.integers(0, 10**6))
@settings(max_examples=12)
def test_values_are_in_memory_while_anything_reads_them_as_they_are(seed: int) -> None:
    """Of any choice of rows: what a value and its readers are charged for covers the array."""
    choices, rng = gpt_block(), np.random.default_rng(seed)
    plan, memory = choices.schedule, Memory(choices)
    lives, chosen = memory.lives, [int(rng.integers(len(rows))) for rows in choices.rows]
    for u, unit in enumerate(plan.units):
        for v, have in zip(unit.outputs, choices.rows[u].gives[chosen[u]], strict=True):
            if lives.free[v]:
                continue
            charged, read = np.zeros(lives.times), np.zeros(lives.times)
            whole = memory.produced(v, np.array([chosen[u]]), np.zeros(1))
            uses = [(use, use.amount[0]) for use in whole]
            table = choices.copies[plan.program.types[v]]
            number, none = np.array([table.number[have]]), np.array([-1])
            for r in plan.readers[v]:
                if r == u:
                    continue
                ports = [k for k, (_, _, w) in enumerate(plan.units[r].reads) if w == v]
                needs = tuple(dict.fromkeys(choices.rows[r].needs[chosen[r]][k] for k in ports))
                wanted = Wanted(none, (tuple(table.number[n] for n in needs),), none == 0)
                kind, turns = memory.kind(r, v), memory.turns(r, v)
                held = memory.bytes_of(kind, turns, v, number, none, none * 0, wanted)
                found = memory.read(r, v, held)
                uses += [(use, use.amount[0, 0]) for use in found]
                if have in needs:
                    read[lives.made[v] : lives.reads_until[r, v] + 2] = 1.0
            for use, amount in uses:
                charged[use.start : use.end] += amount
            assert (charged >= read * table.local_bytes[number[0]]).all(), (u, v)
