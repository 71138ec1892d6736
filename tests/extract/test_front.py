"""The front of small real programs, against the enumeration of every plan and against a solver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.certify.certificate import certify, recompute
from tapestry_egg.extract.certify.legality import check_strategy
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.engine.race import Effort, race
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.problem.assemble import assemble
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.plans.plan import BodyPlan, Costs, Plan, Strategy
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.runtime import compare, compile
from tapestry_egg.schedule.flatten import feedback_pairs, flatten
from tapestry_egg.schedule.repeated import repeat_cheap
from tapestry_egg.schedule.schedules import Schedule, in_order, schedule
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import Program, trace
from tests.extract.brute import every_cost
from tests.reference.exact import exact

f32 = jnp.float32
RULES = ("sharding", "collectives")


def scheduled(program: Program) -> Schedule:
    graph = prepare(program.graph)
    pairs = feedback_pairs(graph)
    return schedule(flatten(in_order(repeat_cheap(graph), pairs), pairs))


# Tiny programs, all of whose plans can be listed


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def shared(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A value that a reduction and the caller both read."""
    y = x @ w
    return y, jnp.sum(jnp.tanh(y))


def update(w: jax.Array, g: jax.Array) -> jax.Array:
    """A state in the layout it came in."""
    return w - 0.1 * (g.T @ g)


def scanned(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A value that is cut along one dim where it is made, and along the other where two read it."""
    y = jax.lax.sort(x, 1)
    return jax.lax.sort(y, 0), jax.lax.sort(y, 0, is_stable=False)


TINY: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = [
    ("product", product, ((4096, 4096), (4096, 4096)), {}, (4,)),
    ("shared", shared, ((512, 2048), (1024, 512)), {}, (4,)),
    ("update", update, ((1024, 1024), (2048, 1024)), {"donate_argnums": (0,)}, (4,)),
    ("scanned", scanned, ((2048, 2048),), {}, (4,)),
    ("uneven", product, ((6, 512), (1024, 6)), {}, (4,)),
]


def traced(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]
) -> Program:
    return trace(function, *(jax.ShapeDtypeStruct(s, f32) for s in shapes), **options)


def apart(target: str | Target) -> Target:
    """A machine on which no collectives are merged."""
    return replace(load_target(target) if isinstance(target, str) else target, combiner=None)


def front_of(
    program: Program, target: str | Target, sizes: tuple[int, ...], **options: Any
) -> Front:
    """The front of a program as it is written: the oracles compute nothing twice, and merge no
    collectives."""
    names = ("x", "y", "z")[: len(sizes)]
    return optimize(
        program,
        apart(target),
        options.pop("objectives", ("seconds", "peak_bytes")),
        books=RULES,
        mesh_shapes=[MeshShape(names, sizes)],
        settings=Settings(work=options.pop("work", 4.0), recompute=0),
        **options,
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "function", "shapes", "options", "sizes"),
    [
        pytest.param(*t, marks=pytest.mark.slow if t[0] in ("update", "scanned", "shared") else ())
        for t in TINY
    ],
)
@pytest.mark.parametrize("reserves", [False, True])
def test_front_is_the_best_of_every_plan(
    reserves: bool,
    name: str,
    function: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    options: dict[str, Any],
    sizes: tuple[int, ...],
) -> None:
    program = traced(function, shapes, options)
    machine = replace(load_target("h100:4"), reserves=reserves)
    front = front_of(program, machine, sizes)
    mesh = front[0].mesh
    every = every_cost(scheduled(program), mesh, machine)
    assert len(every) > 20
    assert front.epsilon < 0.05
    for plan in front:
        least = min(c.seconds for c in every if c.peak_bytes <= plan.costs.peak_bytes)
        assert plan.costs.seconds >= least * (1 - 1e-9), "cheaper than any plan there is"
        assert plan.costs.seconds <= least * (1 + plan.gap) * (1 + 1e-9)
        assert plan.bound <= least * (1 + 1e-6)
        assert plan.gap <= 0.05
    for c in every:
        assert any(
            p.costs.seconds <= c.seconds * (1 + front.epsilon + 1e-9)
            and p.costs.peak_bytes <= c.peak_bytes * (1 + front.epsilon + 1e-9)
            for p in front
        ), "a plan that no point dominates within epsilon"


@pytest.mark.slow
def test_two_readers_of_an_all_to_all_pay_one() -> None:
    """The producer keeps its dim whole and so do both readers theirs: one exchange serves both."""
    program = traced(scanned, ((64, 64),), {})
    plan = front_of(program, "cpu:4", (4,))[-1]
    assert [(c.kind, c.count) for c in plan.collectives] == [("all_to_all", 1)]
    assert plan.costs.wire_bytes == 64 * 64 * 4 / 4 * 3 / 4
    (kept,) = plan.body.kept.values()
    assert kept.layout == Layout(((), (0,)))
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    run = compile(plan)
    for got, wanted in zip(run(x), jax.jit(scanned)(x), strict=True):
        np.testing.assert_allclose(np.asarray(got), wanted, 1e-4, 1e-3)
    assert compare(plan, run.compile()).equal


# One block, its exact front by a solver


def block_step(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> Any:
    """One multilayer-perceptron block, its loss, gradient and update."""
    x, y = batch

    def loss(p: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def block_program(rows: int = 1024, width: int = 512, hidden: int = 2048) -> Program:
    params = {"up": (width, hidden), "down": (hidden, width)}
    abstract = {k: jax.ShapeDtypeStruct(s, f32) for k, s in params.items()}
    batch = tuple(jax.ShapeDtypeStruct((rows, width), f32) for _ in range(2))
    return trace(block_step, abstract, batch, donate_argnums=(0,))


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_front_of_one_block_is_exact_within_its_gaps() -> None:
    program = block_program()
    target, mesh = load_target("h100:4"), MeshShape(("x", "y"), (2, 2))
    plan = scheduled(program)
    found = saturate(encode(plan.program, mesh), load_books(RULES))
    problem = assemble(unit_choices(plan, found, mesh, target)).problem
    front = front_of(program, "h100:4", (2, 2), work=20.0)
    assert len(front) >= 4
    peaks = sorted({p.costs.peak_bytes for p in front})
    for peak in (peaks[0], peaks[len(peaks) // 2], peaks[-1], (peaks[0] + peaks[1]) // 2):
        least = exact(problem, float(peak))
        for p in front:
            if p.costs.peak_bytes >= peak:
                assert p.bound <= least * (1 + 1e-5)
        best = front.best("seconds", {"peak_bytes": peak})
        assert best.costs.seconds >= least * (1 - 1e-5)
        if peak in peaks:
            assert best.costs.seconds <= least * (1 + best.gap + 1e-5)
        assert any(
            p.costs.seconds <= least * (1 + front.epsilon)
            and p.costs.peak_bytes <= peak * (1 + front.epsilon)
            for p in front
        )
    assert front[0].costs.seconds <= exact(problem, float("inf")) * (1 + front[0].gap + 1e-5)
    assert exact(problem, peaks[0] * 0.5) > front[-1].costs.seconds


# The certificate


@pytest.fixture(scope="module")
def certified() -> tuple[Front, Schedule]:
    program = block_program()
    return front_of(program, "h100:4", (2, 2), work=1.0), scheduled(program)


def refused(plan: Plan, plan_schedule: Schedule, **limits: float) -> str:
    with pytest.raises(ExtractError) as e:
        certify(plan, plan_schedule, load_target("h100:4"), limits)
    return str(e.value)


def changed(plan: Plan, **fields: Any) -> Plan:
    return replace(plan, body=replace(plan.body, **fields))


@pytest.mark.slow
def test_plans_of_the_front_are_certified(certified: tuple[Front, Schedule]) -> None:
    front, plan_schedule = certified
    for plan in front:
        found = certify(plan, plan_schedule, load_target("h100:4"))
        assert plan.costs.wire_bytes == pytest.approx(found.wire_bytes)
        assert plan.costs.wire_bytes == pytest.approx(
            sum(c.wire_bytes * c.count for c in plan.collectives)
        )
        assert plan.costs.peak_bytes == max(found.profile)
    assert any(p.costs.wire_bytes > 0 for p in front)


def test_strategies_are_checked_once_in_all_plans_and_schedules(
    certified: tuple[Front, Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, plan_schedule = certified
    seen: list[tuple[int, Strategy]] = []

    def check(signature: OperationSignature, strategy: Strategy, mesh: MeshShape) -> None:
        seen.append((id(signature), strategy))
        check_strategy(signature, strategy, mesh)

    monkeypatch.setattr("tapestry_egg.extract.certify.recount.check_strategy", check)
    for instance in plan_schedule.program.instances:
        instance.signature.__dict__.pop("_legal", None)
    plan = front.best("seconds")
    certify(plan, plan_schedule, load_target("h100:4"))
    assert seen and len(seen) == len(set(seen))
    count = len(seen)
    certify(plan, scheduled(block_program()), load_target("h100:4"))
    assert len(seen) == count


def recurrence(w: jax.Array, u: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A loop whose invariants, carry and slices are each read more than once."""

    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(h @ w + x @ u)
        return h + y, (y * h) @ w

    return jax.lax.scan(step, jnp.zeros_like(xs[0]), xs)


def branches(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x @ w
    y = jax.lax.cond(jnp.sum(y) > 0, lambda a: a @ w + a, lambda a: a.T @ a, y)
    return jax.lax.while_loop(lambda a: jnp.max(a) < 3.0, lambda a: jnp.sin(a) @ w + a, y)


def fan(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    """A product that many read, in kernels of several operations too."""
    y = x @ w
    z = jnp.exp(y) * jnp.sin(y) + y
    return y @ w, y.T @ z, z, jnp.sum(y * y, axis=0), y.reshape(-1)


def test_wrong_costs_are_refused(certified: tuple[Front, Schedule]) -> None:
    front, plan_schedule = certified
    plan = max(front, key=lambda p: p.costs.wire_bytes)
    for name in ("seconds", "joules", "flops", "wire_bytes", "peak_bytes"):
        wrong = replace(plan, costs=replace(plan.costs, **{name: getattr(plan.costs, name) * 1.01}))
        assert name in refused(wrong, plan_schedule)
    assert "bound" in refused(replace(plan, bound=plan.costs.seconds * 1.01), plan_schedule)
    assert "limit" in refused(plan, plan_schedule, peak_bytes=plan.costs.peak_bytes - 100)


def test_illegal_plans_are_refused(certified: tuple[Front, Schedule]) -> None:
    front, plan_schedule = certified
    plan = max(front, key=lambda p: p.costs.wire_bytes)
    body = plan.body
    operations = body.graph.operations

    def with_strategy(k: int, **fields: Any) -> Plan:
        strategies = list(body.strategies)
        strategies[k] = replace(strategies[k], **fields)
        return changed(plan, strategies=tuple(strategies))

    dot = next(
        k
        for k, op in enumerate(operations)
        if op.kernel == "dot_general" and any(body.strategies[k].cuts)
    )
    s = body.strategies[dot]
    assert "operation" in refused(with_strategy(dot, cuts=((),) * len(s.cuts)), plan_schedule)
    give = s.gives[0]
    for other in (Layout(((0,), (1,))), Layout(((1,), (0,))), Layout(((), ()), (0,), "sum")):
        if other != give:
            assert "certificate" in refused(with_strategy(dot, gives=(other,)), plan_schedule)
    if give.partial:
        wrong = Layout(give.dims, give.partial, "max")
        assert "partial" in refused(with_strategy(dot, gives=(wrong,)), plan_schedule)
    # Collectives that are missing, or that lead elsewhere.
    assert "no steps" in refused(changed(plan, copies={}), plan_schedule)
    key, steps = next((k, x) for k, x in body.copies.items() if x)
    wrong_steps = {**body.copies, key: (*steps, *steps)}
    assert "copy" in refused(changed(plan, copies=wrong_steps), plan_schedule)
    # The boundary.
    partial = Layout(body.inputs[0].dims, (), None)
    free = sorted(set(range(2)) - set(partial.axes))
    if free:
        leaving = replace(partial, partial=tuple(free[:1]), monoid="sum")
        text = refused(changed(plan, inputs=(leaving, *body.inputs[1:])), plan_schedule)
        assert "certificate" in text
    rank = body.graph.values[body.graph.inputs[0]].rank
    moved = next(
        x
        for x in (Layout.replicated(rank), Layout(((0,), ())), Layout(((), (1,))))
        if x != body.inputs[0]
    )
    assert "certificate" in refused(changed(plan, inputs=(moved, *body.inputs[1:])), plan_schedule)


def test_costs_of_a_plan_by_hand() -> None:
    """y = x @ w with the sum cut in two: half the flops, one all-reduce of the whole result."""
    program = traced(lambda w, x: x @ w, ((8, 16), (4, 8)), {})
    plan_schedule, target = scheduled(program), load_target("cpu:2")
    mesh = MeshShape(("x",), (2,))
    (op,) = plan_schedule.program.bodies[0].graph.operations
    (instance,) = [i for i in plan_schedule.program.instances if not i.port]
    names = [d.role for d in instance.signature.index]
    cuts = tuple((0,) if role == "reduce" else () for role in names)
    from tapestry_egg.plans.plan import Change, Strategy

    w, x, y = Layout(((0,), ())), Layout(((), (0,))), Layout(((), ()), (0,), "sum")
    graph = plan_schedule.program.bodies[0].graph
    layout = dict(zip(graph.inputs, (w, x), strict=True))
    needs = tuple(layout[v] for v in op.inputs)
    whole = Layout.replicated(2)
    body = BodyPlan(
        graph,
        (w, x),
        (whole,),
        (Strategy(cuts, needs, (y,)),),
        copies={(op.outputs[0], y, whole): (Change("all_reduce", (0,), monoid="sum"),)},
    )
    found = recompute(Plan("p", mesh, "cpu:2", body, Costs(0, 0, 0)), plan_schedule, target)
    assert found.flops == 2 * 4 * 4 * 16
    assert found.wire_bytes == 4 * 16 * 4
    half, out = (8 * 16 + 4 * 8) * 4 // 2, 4 * 16 * 4
    assert found.peak_bytes == half + out  # the all-reduce writes its result where it reads


# The front as users see it


@pytest.fixture(scope="module")
def small() -> Front:
    return front_of(traced(shared, ((512, 2048), (1024, 512)), {}), "h100:4", (4,), work=2.0)


def test_a_front_is_ordered_and_named(small: Front) -> None:
    seconds = [p.costs.seconds for p in small]
    peaks = [p.costs.peak_bytes for p in small]
    assert len(small) > 1
    assert seconds == sorted(seconds)
    assert peaks == sorted(peaks, reverse=True)
    assert [p.name for p in small] == [f"p{i}" for i in range(len(small))]
    assert small["p1"] is small[1] and small[-1] is small[len(small) - 1]
    with pytest.raises(KeyError):
        small["p99"]
    with pytest.raises(IndexError):
        small[99]


def test_limits_that_nothing_meets_say_what_can_be_reached(small: Front) -> None:
    least = min(p.costs.peak_bytes for p in small)
    with pytest.raises(ExtractError) as e:
        small.best("seconds", {"peak_bytes": least - 1})
    assert "peak_bytes" in str(e.value) and "least found" in str(e.value)
    with pytest.raises(ExtractError, match="no plan meets"):
        small.best("seconds", {"peak_bytes": least, "seconds": small[0].costs.seconds})
    with pytest.raises(ExtractError, match="unknown objective"):
        small.best("beauty")
    program = traced(product, ((512, 512), (512, 512)), {})
    with pytest.raises(ExtractError, match="no plan meets") as refused_:
        front_of(program, "h100:4", (4,), limits={"peak_bytes": "1KiB"}, work=1.0)
    assert "least found" in str(refused_.value)


def test_the_table_has_every_number(small: Front) -> None:
    rows = small.table()
    assert [r["plan"] for r in rows] == [p.name for p in small]
    for row, p in zip(rows, small, strict=True):
        assert row["gap"] == pytest.approx(p.costs.seconds / p.bound - 1)
        assert row["wire_bytes"] == p.costs.wire_bytes and row["flops"] == p.costs.flops
    text = str(small)
    assert all(p.name in text for p in small)


def test_no_point_of_a_front_dominates_another(small: Front) -> None:
    for p in small:
        for q in small:
            if p is not q:
                better = q.costs.seconds <= p.costs.seconds
                assert not (better and q.costs.peak_bytes <= p.costs.peak_bytes)


# Corners: programs with little in them


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: x, [(8, 8)]),
        (lambda x: (x, x), [(8, 8)]),
        (lambda: jnp.zeros(()) + 1.0, []),
        (lambda x: 3.0, [(4,)]),
        (lambda x: (), [(4,)]),
        (lambda x: x.reshape(4, 2), [(8,)]),
        (lambda x: (x.sum(), x.sum()), [(8, 8)]),
        (lambda x: jnp.sin(x), [(0, 4)]),
        (lambda x: x[2:5] + 1, [(7,)]),
    ],
)
def test_programs_with_little_in_them_have_a_front(
    function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    front = front_of(traced(function, tuple(shapes), {}), "cpu:4", (2, 2), work=1.0)
    assert len(front) >= 1


def test_search_effort_bounds_hold_midway() -> None:
    """A search that is cut short still proves true bounds."""
    program = block_program(256, 128, 512)
    target, mesh = apart("h100:4"), MeshShape(("x",), (4,))
    plan = scheduled(program)
    problem = assemble(
        unit_choices(plan, saturate(encode(plan.program, mesh), load_books(RULES)), mesh, target)
    ).problem
    (archive,) = race([problem], Effort(work=1e-9))
    assert archive.candidates
    for c in archive.candidates:
        assert archive.bound(c.peak, np.inf) <= exact(problem, c.peak) * (1 + 1e-5)
