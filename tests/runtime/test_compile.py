"""Compiled plans as their users meet them: pytrees, donation, meshes, and what is refused."""

from __future__ import annotations

import gc
import importlib
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.errors import PlanError, TargetError, TraceError
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.pipeline.jit import optimized as optimized_module
from tapestry_egg.pipeline.jit.optimized import Optimized
from tapestry_egg.plans.plan import Plan
from tapestry_egg.plans.specs import partition_spec
from tapestry_egg.runtime import compile, hlo_stats
from tapestry_egg.runtime.compiled import CompiledPlan, jax_mesh
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import plan_by_hand

MESH = MeshShape(("x", "y"), (2, 4))
#: No other forms: what is tried here are calls.
QUICK = Settings(work=0.1, forms=0, recompute=0)
ONE = replace(QUICK, front=False)
ROWS = Layout(((0, 1), ()))
WHOLE = Layout(((), ()))


def step(state: dict[str, Any], batch: tuple[jax.Array, jax.Array], *, rate: float) -> Any:
    x, y = batch
    return {"w": state["w"] - rate * (x * y), "n": state["n"] + 1}, (x + y).sum()


def arguments() -> tuple[dict[str, Any], tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    x, y, w = (draw.normal(size=(16, 8)).astype(np.float32) for _ in range(3))
    return {"w": w, "n": np.int32(3)}, (x, y)


def step_plan() -> Plan:
    program = trace(step, *arguments(), rate=0.5, donate_argnums=0)
    graph = program.graph
    cuts: dict[int, Any] = {}
    for k, op in enumerate(graph.operations):
        if graph.values[op.outputs[0]].shape == (16, 8):
            cuts[k] = {"i0": (0, 1)}
        elif op.kernel == "reduce_sum":
            cuts[k] = {"r0": (0, 1)}
    layouts = tuple(ROWS if graph.values[v].rank else Layout(()) for v in graph.inputs)
    leave = tuple(ROWS if graph.values[v].rank else Layout(()) for v in graph.outputs)
    return replace(plan_by_hand(graph, MESH, cuts, layouts, leave), program=program)


def check(got: Any) -> None:
    wanted = step(*arguments(), rate=0.5)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_it_is_called_like_the_users_function() -> None:
    run = compile(step_plan())
    state, loss = run(*arguments(), rate=0.5)
    check((state, loss))
    assert state["w"].sharding.spec == P(("x", "y"))
    assert loss.sharding.is_fully_replicated
    check(run(*arguments(), rate=np.float32(0.5)))
    with pytest.raises(TraceError, match="do not fit"):
        run(*arguments())


def test_without_a_program_arguments_are_flat() -> None:
    plan = replace(step_plan(), program=None)
    state, batch = arguments()
    leaves = jax.tree.leaves(((state, batch), {"rate": 0.5}))
    outputs = compile(plan)(*leaves)
    assert isinstance(outputs, tuple) and len(outputs) == 3


def test_arguments_may_lie_anywhere() -> None:
    run = compile(step_plan())
    state, (x, y) = arguments()
    columns = NamedSharding(jax.make_mesh((8,), ("z",)), P(None, "z"))
    placed = {"w": jax.device_put(state["w"], columns), "n": jnp.int32(3)}
    check(run(placed, (jax.device_put(x, jax.devices()[3]), jnp.asarray(y)), rate=0.5))


def test_donated_arguments_are_given_up() -> None:
    run = compile(step_plan())
    state, batch = arguments()
    placed = jax.device_put(state, NamedSharding(run.mesh, P()))
    placed["w"] = jax.device_put(state["w"], run.in_shardings[1])
    first, _ = run(placed, batch, rate=0.5)
    assert placed["w"].is_deleted()
    second, _ = run(first, batch, rate=0.5)
    assert first["w"].is_deleted() and not second["w"].is_deleted()
    assert hlo_stats(run.compile()).alias_bytes == 16 * 8 * 4 // 8 + 4


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_gives_devices_and_may_be_active(axis: AxisType) -> None:
    backwards = np.array(jax.devices()[::-1])
    users = Mesh(backwards.reshape(8), ("z",), axis_types=(axis,))
    run = compile(step_plan(), users)
    assert run.mesh.shape == {"x": 2, "y": 4}
    assert run.mesh.devices.flat[0] == jax.devices()[7]
    with jax.set_mesh(users):
        state, (x, y) = arguments()
        spread = jax.device_put(x, NamedSharding(users, P("z")))
        check(run(state, (spread, y), rate=0.5))
        assert hlo_stats(run.compile()).argument_bytes > 0
    check(run(*arguments(), rate=0.5))


def test_without_a_mesh_the_one_that_is_set_gives_devices() -> None:
    users = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("x", "y"))
    with jax.set_mesh(users):
        run = compile(step_plan())
        check(run(*arguments(), rate=0.5))
    assert list(run.mesh.devices.flat) == jax.devices()[::-1]
    small = Mesh(np.array(jax.devices()[:4]), ("x",))
    with jax.set_mesh(small), pytest.raises(TargetError, match=r"8 devices .*, the mesh has 4"):
        compile(step_plan())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_older_way_to_activate_a_mesh() -> None:
    users = Mesh(np.array(jax.devices()).reshape(4, 2), ("p", "q"))
    with users:
        check(compile(step_plan(), users)(*arguments(), rate=0.5))


def test_it_can_be_called_inside_jit() -> None:
    run = compile(step_plan())

    @jax.jit
    def two(state: Any, batch: Any) -> Any:
        state, _ = run(state, batch, rate=0.5)
        return run(state, batch, rate=0.5)

    state, batch = arguments()
    wanted = step(step(state, batch, rate=0.5)[0], batch, rate=0.5)
    for a, b in zip(jax.tree.leaves(two(state, batch)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.slow
def test_it_is_a_function_to_jax() -> None:
    run = compile(step_plan())
    check(jax.jit(run)(*arguments(), rate=0.5))
    check(te.jit(run, settings=Settings(work=0.1))(*arguments(), rate=0.5))
    state, batch = arguments()

    def loss(x: jax.Array) -> jax.Array:
        return compile(step_plan())(state, (x, batch[1]), rate=0.5)[1]

    np.testing.assert_array_equal(jax.grad(loss)(batch[0]), np.ones((16, 8)))


def test_fronts_and_plans_are_sent_to_other_processes_and_kept_in_sets() -> None:
    front = optimize(trace(step, *arguments(), rate=0.5), "cpu:8", settings=QUICK)
    again = pickle.loads(pickle.dumps(front))
    assert again == front and hash(again) == hash(front)
    assert {*again} == {*front}
    check(compile(again.best())(*arguments(), rate=0.5))


def test_random_keys_pass_through() -> None:
    def noisy(key: jax.Array, x: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return x + jax.random.normal(first, x.shape), second

    key, x = jax.random.key(7), arguments()[1][0]
    program = trace(noisy, key, x)
    graph = program.graph
    adds = {k: {"i0": (0,)} for k, op in enumerate(graph.operations) if op.kernel == "add"}
    plan = plan_by_hand(
        graph, MESH, {max(adds): adds[max(adds)]}, (Layout(()), ROWS), (ROWS, Layout(()))
    )
    moved, second = compile(replace(plan, program=program))(key, x)
    np.testing.assert_allclose(moved, noisy(key, x)[0], rtol=1e-6)
    assert (jax.random.key_data(second) == jax.random.key_data(noisy(key, x)[1])).all()


def test_effects_happen_once(capfd: pytest.CaptureFixture[str]) -> None:
    def speak(x: jax.Array) -> jax.Array:
        total = x.sum()
        jax.debug.print("total {}", total)
        return x + total

    x = np.ones((8, 8), np.float32)
    program = trace(speak, x)
    plan = plan_by_hand(program.graph, MESH, {}, (ROWS,), (ROWS,))
    np.testing.assert_array_equal(compile(replace(plan, program=program))(x), x + 64)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("total 64.0") == 1


def test_other_shapes_and_dtypes_are_refused() -> None:
    run = compile(step_plan())
    state, (x, y) = arguments()
    with pytest.raises(PlanError, match=r"f32\[8, 8\], the plan was made for f32\[16, 8\]") as e:
        run(state, (x[:8], y), rate=0.5)
    assert "[1][0]" in e.value.where or "batch" in e.value.where
    with pytest.raises(PlanError, match=r"is s32"):
        run(state, (x.astype(np.int32), y), rate=0.5)


def test_what_cannot_cross_the_boundary_is_refused() -> None:
    plan = step_plan()
    partial = Layout(((), ()), (0,), "sum")
    first, *rest = plan.body.outputs
    with pytest.raises(PlanError, match="output 0"):
        compile(replace(plan, body=replace(plan.body, outputs=(Layout((), (0,), "sum"), *rest))))
    program = trace(lambda x: x + 1, np.ones((6, 8), np.float32))
    for layout in (partial, Layout(((1,), ()))):
        with pytest.raises(PlanError, match="input 0"):
            compile(plan_by_hand(program.graph, MESH, {}, (layout,), (WHOLE,)))
    assert first == plan.out_shardings[0]


def test_a_mesh_has_the_size_of_the_plan_and_gives_its_names() -> None:
    plan, devices = step_plan(), np.array(jax.devices())
    named = compile(plan, Mesh(devices.reshape(2, 4), ("data", "model")))
    assert {s.mesh.axis_names for s in named.in_shardings} == {("data", "model")}
    with pytest.raises(TargetError, match=r"for 8 devices .*, the mesh has 4"):
        compile(plan, Mesh(devices[:4], ("data",)))
    for wrong in ((2, 4), "2x4"):
        with pytest.raises(TargetError, match="mesh"):
            compile(plan, wrong)  # type: ignore[arg-type]


def test_too_few_devices() -> None:
    with pytest.raises(TargetError, match="needs 16 devices") as e:
        jax_mesh(MeshShape(("x",), (16,)))
    assert "--xla_force_host_platform_device_count=16" in e.value.hint
    with pytest.raises(TargetError, match="there are 4"):
        jax_mesh(MESH, jax.devices()[:4])


def test_partition_specs() -> None:
    cases = {
        ((), ()): P(),
        ((1,), ()): P("y"),
        ((), (1, 0)): P(None, ("y", "x")),
        ((), (0,), ()): P(None, "x"),
    }
    for dims, spec in cases.items():
        assert partition_spec(Layout(dims), MESH) == spec


def test_the_compiler_is_told_more_where_that_is_asked() -> None:
    """Beside what the plan counts on: XLA for CPU keeps barriers, and refuses what it has not."""
    run = compile(step_plan())
    told = {"xla_cpu_enable_fast_math": False}
    check(replace(run, more_options=told)(*arguments(), rate=0.5))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        replace(run, more_options={"xla_no_such_option": 1})(*arguments(), rate=0.5)


#: The dims that two operands have, of all dims, and the one that is summed.
BESIDE_ONE = {
    "the first dim": ((1, 3), (2, 3), (1, 8, 128, 4), 3),
    "in the middle": ((0, 3, 4), (0, 3), (2, 128, 1, 16, 16), 0),
    "more elements": ((1, 3), (2, 3), (1, 16, 256, 32), 3),
}


@pytest.mark.parametrize("case", BESIDE_ONE)
@pytest.mark.parametrize("inside", [False, True])
def test_sums_beside_a_dim_of_one_element(case: str, inside: bool) -> None:
    """XLA for CPU leaves such sums to a library that is wrong (jaxlib 0.10.2): plans do not."""
    dims_x, dims_w, full, axis = BESIDE_ONE[case]
    of_x, of_w = (tuple(full[i] for i in dims) for dims in (dims_x, dims_w))
    draw = np.random.default_rng(0)
    x, w = (draw.normal(size=shape).astype(np.float32) for shape in (of_x, of_w))

    def summed(x: jax.Array, w: jax.Array) -> jax.Array:
        spread = jax.lax.broadcast_in_dim(x, full, dims_x)
        return (spread * jax.lax.broadcast_in_dim(w, full, dims_w)).sum(axis)

    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.map(lambda part: summed(part, w), jnp.stack([x, 2 * x]))

    def stretched(a: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
        shape = [n if i in dims else 1 for i, n in enumerate(full)]
        return np.broadcast_to(a.astype(np.float64).reshape(shape), full)

    wanted = (stretched(x, dims_x) * stretched(w, dims_w)).sum(axis)
    function = looped if inside else summed
    for machine in ("cpu:1", "h100:1"):
        front = optimize(trace(function, x, w), machine, settings=ONE)
        got = compile(front.best())(x, w)
        for k, part in enumerate(got if inside else [got]):
            np.testing.assert_allclose(part, (k + 1) * wanted, rtol=1e-4, atol=1e-4)


def test_lowering_needs_no_arguments() -> None:
    lowered = compile(step_plan()).lower()
    assert "shard_map" in lowered.as_text() or "manual_computation" in lowered.as_text()
    compiled = lowered.compile()
    assert hlo_stats(compiled).by_kind() == {("all_reduce", 8): 4}


@pytest.mark.slow
def test_the_bare_name_is_refused_and_jax_is_not_imported() -> None:
    code = (
        "import sys, tapestry_egg.runtime as r; assert 'jax' not in sys.modules; "
        "assert callable(r.compile) and callable(r.compare)\n"
        "try:\n    import runtime\n"
        "except ImportError as e:\n    assert 'tapestry_egg.runtime' in str(e)\n"
        "else:\n    raise SystemExit('imported')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_small_loops_with_barriers_inside_run() -> None:
    def halves(x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def half(c: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            n = jnp.tanh(c * 0.5 + t)
            return n, n

        return jnp.sum(jnp.sin(jax.lax.scan(half, x[0], x)[1]))

    program = trace(jax.grad(halves), x := np.ones((3, 4), np.float32))
    plan = optimize(program, "cpu:2", settings=Settings(work=0.1, front=False, workers=1)).best()
    np.testing.assert_allclose(compile(plan)(x), jax.grad(halves)(x), rtol=1e-5)


@pytest.mark.parametrize("loaded", [False, True])
def test_arguments_come_by_position_or_by_name(loaded: bool, tmp_path: Path) -> None:
    def f(w: jax.Array, x: jax.Array, /, y: jax.Array, *, z: jax.Array) -> jax.Array:
        return w + 2 * x + 3 * y + 4 * z

    def g(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return w + 2 * x + 3 * y

    def compiled(program: te.Program) -> CompiledPlan:
        front = te.optimize(program, "cpu:8", settings=ONE)
        if not loaded:
            return te.compile(front.best())
        front.save(tmp_path / "front.json")
        return te.compile(te.load(tmp_path / "front.json").best())  # type: ignore[union-attr, operator]

    w, x, y, z = (jnp.full((8, 8), 10.0**k) for k in range(4))
    run = compiled(te.trace(f, w, x, y, z=z))
    for result in (run(w, x, y, z=z), run(w, x, y=y, z=z)):
        np.testing.assert_array_equal(result, f(w, x, y, z=z))
    for program in (te.trace(g, w, x, y), te.trace(g, w, x, y=y), te.trace(g, w=w, x=x, y=y)):
        run = compiled(program)
        for result in (run(w, x, y), run(w, x, y=y), run(w, y=y, x=x), run(y=y, x=x, w=w)):
            np.testing.assert_array_equal(result, g(w, x, y))
        for wrong in (lambda: run(w, x), lambda: run(w, x, y, z), lambda: run(w, x, y, y=y)):  # noqa: B023
            with pytest.raises(te.TapestryError, match="do not fit g"):
                wrong()


def test_static_arguments_come_by_position_or_by_name() -> None:
    def f(x: jax.Array, n: int, y: jax.Array) -> jax.Array:
        return x * n + y

    x, y = jnp.ones((8, 8)), jnp.full((8, 8), 3.0)
    program = te.trace(f, x, 2, y, static_argnums=1)
    run = te.compile(te.optimize(program, "cpu:8", settings=QUICK).best())
    for result in (run(x, 2, y), run(x, n=2, y=y), run(x, 2, y=y), run(y=y, n=2, x=x)):
        np.testing.assert_array_equal(result, f(x, 2, y))
    with pytest.raises(te.TapestryError, match="static argument"):
        run(x, n=3, y=y)


# Calls that go straight to their executable, those that come to Python; each runs once.


# The package's name of it is the function.
compiling = importlib.import_module("tapestry_egg.runtime.compiled")

X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every call that came to Python."""
    found: list[int] = []
    ask = Optimized._ask

    def counted(self: Optimized, args: Any, kwargs: Any) -> Any:
        found.append(1)
        return ask(self, args, kwargs)

    monkeypatch.setattr(Optimized, "_ask", counted)
    return found


def test_calls_like_one_before_do_not_come_to_python(asked: list[int]) -> None:
    step = te.jit(lambda state, batch, rate: state * rate + batch.sum(), cache=False, settings=ONE)
    state = jnp.asarray(X)
    for _ in range(3):  # the state comes back as planned
        state = step(state, X, 0.5)
    asked.clear()
    for k in range(3):
        state = step(state, X + k, 0.5 * k)
    assert not asked
    np.testing.assert_allclose(np.asarray(step(X, X, 2.0)), X * 2.0 + X.sum(), rtol=1e-6)
    assert asked


@pytest.mark.slow
def test_static_arguments_are_told_apart_by_type_and_value(asked: list[int]) -> None:
    @te.jit(static_argnums=1, cache=False, settings=ONE)
    def times(x: jax.Array, n: Any) -> jax.Array:
        return x * n if type(n) is int else x - n

    for n, wanted in ((2, X * 2), (1, X), (True, X - 1), (1.0, X - 1)):
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(times(X, n)), wanted)
    asked.clear()
    assert float(times(X, 1)[0, 1]) == 1.0 and float(times(X, True)[0, 1]) == 0.0
    assert not asked
    with pytest.raises(ValueError, match="hashable"):
        times(X, [1])


def test_settings_of_jax_lead_to_other_executables() -> None:
    step = te.jit(lambda x: x * 2.0 + 1, cache=False, settings=ONE)
    for _ in range(3):
        assert step(X).dtype == np.float32
    with jax.enable_x64(True):
        assert step(X.astype(np.float64)).dtype == np.float64
    with jax.disable_jit():
        np.testing.assert_array_equal(np.asarray(step(X)), X * 2 + 1)
    grad = jax.grad(lambda x: te.jit(lambda y: (y * y).sum(), cache=False, settings=ONE)(x))(X)
    np.testing.assert_array_equal(np.asarray(grad), 2 * X)


def test_where_jax_looks_for_nans_the_operation_is_told() -> None:
    step = te.jit(lambda x: jnp.log(x) * 2.0, cache=False, settings=ONE)
    giving_up = te.jit(lambda x: jnp.log(x) * 2.0, donate_argnums=0, cache=False, settings=ONE)
    step(X)
    step(X)  # known: no Python before the executable
    with jax.debug_nans(True):
        for new in (False, True):
            with pytest.raises(FloatingPointError, match="encountered in log"):
                step(-X[:4] if new else -X)
        with pytest.raises(FloatingPointError, match="in a result of"):
            giving_up(-X)
        with pytest.raises(FloatingPointError, match="in a result of"):
            step.compiled(X)(-X)


def test_other_layouts_are_moved_and_donated_arrays_given_up() -> None:
    step = te.jit(lambda x: x + 1.0, donate_argnums=0, cache=False, settings=ONE)
    for _ in range(4):
        given = jax.device_put(X, jax.devices()[-1])
        np.testing.assert_array_equal(np.asarray(step(given)), X + 1)
        assert given.is_deleted()
    held = step(X)
    again = step(held)
    assert held.is_deleted() and not again.is_deleted()


class Picky:
    """A node that cannot be put together while `failing`."""

    failing = False

    def __init__(self, x: Any) -> None:
        if Picky.failing:
            raise ValueError("not now")
        self.x = x


jax.tree_util.register_pytree_node(Picky, lambda p: ((p.x,), None), lambda _, xs: Picky(*xs))


@pytest.fixture
def failing() -> Iterator[None]:
    yield
    Picky.failing = False


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("effect", [True, False])
def test_a_call_that_fails_in_the_end_is_not_made_again(effect: bool) -> None:
    runs: list[int] = []

    def fn(x: jax.Array) -> Picky:
        if effect:
            io_callback(lambda: runs.append(1), None)
        return Picky(x * 2.0)

    step = te.jit(fn, donate_argnums=() if effect else 0, cache=False, settings=ONE)
    compiled = step.compiled(X)
    for call in (step, step, step, compiled):
        x = jax.device_put(X, compiled.in_shardings[0])
        call(x)
        jax.effects_barrier()
        before = len(runs)
        Picky.failing = True
        given = jax.device_put(X, compiled.in_shardings[0])
        with pytest.raises(ValueError, match="not now"):
            call(given)
        jax.effects_barrier()
        assert len(runs) - before == int(effect)
        Picky.failing = False


def test_a_version_of_jax_without_such_calls_makes_them_in_python(
    monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    monkeypatch.setattr(compiling, "_maker", lambda: None)
    step = te.jit(lambda x, n: x * n, static_argnames="n", cache=False, settings=ONE)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(step(X, n=3)), X * 3)
    assert len(asked) == 3


@pytest.mark.slow
def test_a_function_goes_when_nobody_has_it() -> None:
    step = te.jit(lambda x: x + 1.0, cache=False, settings=ONE)
    run = step.compiled(X)
    for _ in range(2):
        step(X), run(X)
    seen = weakref.ref(step), weakref.ref(run)
    gc.collect()
    gc.disable()
    try:
        del step, run
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def test_only_so_many_types_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized_module, "_MOST", 2)
    step = te.jit(lambda x, n: x * n, static_argnums=1, cache=False, settings=ONE)
    for n in (1, 2, 3, 1):
        np.testing.assert_array_equal(np.asarray(step(X, n)), X * n)
    assert len(step._known) == len(step._planned) == 2


def test_after_clear_cache_nothing_is_known(asked: list[int]) -> None:
    step = te.jit(lambda x: x + 2.0, cache=False, settings=ONE)
    for _ in range(3):
        step(X)
    asked.clear()
    step.clear_cache()
    np.testing.assert_array_equal(np.asarray(step(X)), X + 2)
    assert asked
