"""`te.jit` where `jax.jit` stood: how functions are wrapped, called, staged, and when planned."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.pipeline import Settings
from tapestry_egg.pipeline.jit import optimized, planning

QUICK = Settings(work=0.1, recompute=0, forms=0, merge=False)
X, W = jnp.arange(128.0).reshape(16, 8) / 64, jnp.ones((8, 4)) / 4


def forward(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w).sum()


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the programs that are planned."""
    names: list[str] = []

    def counted(program: Any, *request: Any) -> Any:
        names.append(program.name)
        return planning.plan_program(program, *request)

    monkeypatch.setattr(optimized, "plan_program", counted)
    return names


@pytest.mark.slow
def test_a_decorator_with_and_without_arguments() -> None:
    @te.jit(settings=QUICK, minimize="peak_bytes")
    def named(w: jax.Array, x: jax.Array) -> jax.Array:
        """What it does."""
        return forward(w, x)

    assert (named.__name__, named.__doc__) == ("named", "What it does.")
    assert named.__wrapped__(W, X) == forward(W, X)
    assert isinstance(te.jit(forward), type(named)) and callable(te.jit())
    np.testing.assert_allclose(named(W, X), forward(W, X), rtol=1e-6)


@pytest.mark.slow
def test_a_front_that_a_call_has_planned_is_not_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, planned = planning._whole, []

    def counted(program: Any, request: Any) -> Any:
        planned.append(program.name)
        return whole(program, request)

    monkeypatch.setattr(planning, "_whole", counted)
    f = te.jit(forward, settings=QUICK)
    f(W, X)
    assert len(f.front(W, X)) >= 1
    assert planned == ["forward"]


@pytest.mark.slow
def test_one_plan_serves_arguments_of_one_type(plans: list[str]) -> None:
    f = te.jit(forward, settings=QUICK)
    expected = forward(W, X)
    host = (np.asarray(W), np.asarray(X))
    for w, x in ((W, X), host, (W, X), (W, host[1].astype(np.float64))):
        np.testing.assert_allclose(f(w, x), expected, rtol=1e-6)
    f.front(jax.ShapeDtypeStruct(W.shape, W.dtype), X)
    placed = jax.device_put((W, X), f.compiled(W, X).input_shardings[0])
    np.testing.assert_allclose(f(*placed), expected, rtol=1e-6)
    x, elsewhere = placed[1], jax.device_put(W, jax.devices()[3])
    f(jax.device_put(W, NamedSharding(x.sharding.mesh, P())), x)
    with pytest.raises(ValueError, match="incompatible devices"):
        f(elsewhere, x)
    assert plans == ["forward"]
    f(W, X[:8])
    assert plans == ["forward", "forward"]
    f.clear_cache()
    f(W, X)
    assert len(plans) == 3


@pytest.mark.slow
def test_numbers_weak_types_and_other_configurations_have_plans_of_their_own(
    plans: list[str],
) -> None:
    def scale(x: Any, s: Any) -> Any:
        return x * s

    f, g = te.jit(scale, settings=QUICK), jax.jit(scale)
    half = jnp.ones((8, 8), jnp.bfloat16)
    for x, s in [(half, 2.0), (half, np.float32(2)), (half, 2), (3, 4), (True, 2.0), (half, 3.0)]:
        got, wanted = f(x, s), g(x, s)
        assert (got.dtype, got.weak_type) == (wanted.dtype, wanted.weak_type), (x, s)
        np.testing.assert_array_equal(got, wanted)
    assert len(plans) == 5
    with jax.enable_x64(True):
        wide = np.ones((8, 8))
        assert f(wide, 2.0).dtype == np.float64
    assert f(wide, 2.0).dtype == np.float32
    with jax.default_matmul_precision("float32"):
        f(half, 2.0)
    assert len(plans) == 8


@pytest.mark.slow
def test_trees_names_and_nothing(plans: list[str]) -> None:
    def f(state: Any, **named: Any) -> Any:
        return {"out": state["w"] * named["a"] - named["b"], "none": state["none"]}

    g = te.jit(f, settings=QUICK)
    state = {"w": W, "none": None}
    first, second = g(state, a=W, b=2 * W), g(state, b=2 * W, a=W)
    np.testing.assert_array_equal(first["out"], f(state, a=W, b=2 * W)["out"])
    np.testing.assert_array_equal(second["out"], first["out"])
    assert first["none"] is None and len(plans) == 1


def test_a_function_of_nothing() -> None:
    """Nothing is read, computed or returned, as of a step whose every part is switched off."""
    assert te.jit(lambda: {}, settings=QUICK)() == {}
    front = te.optimize(te.trace(lambda: ()), "h100:8", settings=QUICK)
    assert [p.costs.seconds for p in front] == [0.0]
    assert not any("-" in note.text for note in front.notes)


class Model:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @te.jit(static_argnums=0, settings=QUICK)
    def step(self, x: jax.Array) -> jax.Array:
        """One step."""
        return x * self.scale

    @functools.partial(te.jit, static_argnames=("self", "times"), settings=QUICK)
    def often(self, x: jax.Array, times: int = 2) -> jax.Array:
        return x * self.scale * times

    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, x: jax.Array) -> jax.Array:
        return x * self.scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.scale


@pytest.mark.slow
def test_methods_and_callable_objects() -> None:
    model = Model(3.0)
    three = np.asarray(W * 3)
    np.testing.assert_allclose(model.step(W), three)
    np.testing.assert_allclose(Model(5.0).step(W), W * 5)
    assert model.step.__doc__ == "One step." and model.step.plan(W).graph.name == "step"
    for twice in (model.often(W), model.often(W, 2), model.often(W, times=2)):
        np.testing.assert_allclose(twice, three * 2)
    np.testing.assert_allclose(te.jit(model.jitted, settings=QUICK)(W), three)
    np.testing.assert_allclose(te.jit(model, settings=QUICK)(W), W + 3)
    half = functools.partial(jax.jit(lambda a, b, n: (a + b) * n, static_argnums=2), W)
    np.testing.assert_allclose(te.jit(half, settings=QUICK)(W, 3), W * 6)
    np.testing.assert_allclose(te.jit(model.step, settings=QUICK)(W), three)


@pytest.mark.slow
def test_static_arguments_by_position_keyword_and_default(plans: list[str]) -> None:
    def f(x: jax.Array, n: int = 2, mode: str = "sum") -> Any:
        assert isinstance(n, int) and isinstance(mode, str)
        return getattr(x, mode)() * n

    by_number = te.jit(f, static_argnums=(1, 2), settings=QUICK)
    by_name = te.jit(f, static_argnames=("n", "mode"), settings=QUICK)
    inferred = te.jit(jax.jit(f, static_argnames=("n", "mode")), settings=QUICK)
    for _ in range(2):
        np.testing.assert_allclose(by_number(W, 3, mode="mean"), f(W, 3, "mean"))
        np.testing.assert_allclose(by_name(W, True), f(W, True))
        np.testing.assert_allclose(by_name(W, 1), f(W, 1))
        np.testing.assert_allclose(inferred(W, n=3), f(W, 3))
        np.testing.assert_allclose(inferred(W), f(W))
    assert len(plans) == 5
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        te.jit(f, static_argnums=1, settings=QUICK)(W, [1])
    with pytest.raises(TypeError, match="at path mode"):
        te.jit(f, settings=QUICK)(W, mode="sum")
    with pytest.raises(te.TapestryError, match="str 'sum' is not an array\n"):
        te.jit(f, mesh=jax.devices(), settings=QUICK)(W, mode="sum")


def test_donated_by_name() -> None:
    f = te.jit(lambda state, x: state + x, donate_argnames="state", settings=QUICK)
    state = f(jnp.copy(W), W)
    again = f(state, W)
    assert state.is_deleted() and not again.is_deleted()


@pytest.mark.slow
def test_staging_gives_objects_of_jax() -> None:
    @te.jit(static_argnames="power", settings=QUICK)
    def f(state: Any, x: jax.Array, *, power: int) -> Any:
        return {"w": state["w"] * x**power}, x.sum()

    state, x = {"w": X}, X + 1
    shapes = f.eval_shape(state, x, power=2)
    assert shapes[0]["w"].shape == X.shape
    traced = f.trace(state, x, power=2)
    assert isinstance(traced, jax.stages.Traced) and "shard_map" in str(traced.jaxpr)
    compiled = f.lower(state, x, power=2).compile()
    assert isinstance(compiled, jax.stages.Compiled)
    assert compiled.as_text() and compiled.cost_analysis() and compiled.memory_analysis()
    run = f.compiled(state, x, power=2)
    (placed, y), _ = jax.device_put((((state, x)), {}), run.input_shardings)
    for got in (compiled(placed, y), run(state, x, power=2), f(state, x, power=2)):
        np.testing.assert_allclose(got[0]["w"], X * x**2, rtol=1e-5)
        np.testing.assert_allclose(got[1], x.sum(), rtol=1e-5)
    assert jax.tree.map(lambda a: a.sharding, run(state, x, power=2)) == run.output_shardings
    assert run.input_shardings == (({"w": run.in_shardings[0]}, run.in_shardings[1]), {})


@pytest.mark.slow
def test_a_plan_is_exported() -> None:
    f = te.jit(forward, settings=QUICK)
    exported = jax.export.export(f)(W, X)
    args, _ = f.compiled(W, X).input_shardings
    assert exported.nr_devices == f.compiled(W, X).mesh.size
    got = jax.jit(exported.call)(*jax.device_put((W, X), args))
    np.testing.assert_allclose(got, forward(W, X), rtol=1e-6)


TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: jax.grad(f)(W, X),
    "vmap": lambda f: jax.vmap(f, (None, 0))(W, X[:, None]),
    "jit": lambda f: jax.jit(f)(W, X),
    "closed over": lambda f: jax.jit(lambda y: f(W, X) * y)(2.0),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(W, x[None]), None), 0.0, X)[0],
}


@pytest.mark.parametrize("kind", TRANSFORMED)
def test_under_a_transformation_the_original_runs_with_one_warning(
    kind: str, plans: list[str]
) -> None:
    f = te.jit(forward, settings=QUICK)
    with pytest.warns(UserWarning, match="forward of te.jit is called under") as seen:
        got = TRANSFORMED[kind](f)
        TRANSFORMED[kind](f)
    assert len(seen) == 1 and not plans
    np.testing.assert_allclose(got, TRANSFORMED[kind](forward), rtol=1e-6)


@pytest.mark.slow
def test_inside_another_te_jit_there_is_nothing_to_warn_of(plans: list[str]) -> None:
    inner = te.jit(forward, settings=QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer = te.jit(lambda w, x: jax.grad(inner)(w, x), settings=QUICK)
        np.testing.assert_allclose(outer(W, X), jax.grad(forward)(W, X), rtol=1e-5)
        np.testing.assert_allclose(te.jit(inner, settings=QUICK)(W, X), forward(W, X), rtol=1e-6)
        with jax.disable_jit():
            te.jit(forward)(W, X)
    assert len(plans) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"abstracted_axes": ()}, "takes no abstracted_axes"),
        ({"backend": "cpu", "mesh": jax.devices()}, "mesh and device or backend"),
    ],
)
def test_what_has_no_meaning_here_is_refused_with_the_remedy(
    words: dict[str, Any], says: str
) -> None:
    with pytest.raises(te.TapestryError, match=says) as e:
        te.jit(forward, **words)
    assert e.value.hint


def test_placed_arguments_meet_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on, arrays in their places go to the executable and nowhere else."""
    from tapestry_egg.runtime.compiled import CompiledPlan

    f = te.jit(lambda state, x: (state * 2 + x, x), donate_argnums=0, settings=QUICK)
    state, x = f(jnp.copy(W), W)
    state, x = f(state, x)
    monkeypatch.setattr(CompiledPlan, "ask", None)
    monkeypatch.setattr(optimized, "_as_it_comes", None)
    for _ in range(3):
        state, x = f(state, x)
    np.testing.assert_allclose(state, W * (2**5 + 2**5 - 1), rtol=1e-6)
