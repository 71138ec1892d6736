"""Pytrees of classes whose constructors refuse what is no array, as `jax.jit` takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.errors import TraceError
from tapestry_egg.extract.pins.shardings import input_shardings, output_shardings
from tapestry_egg.pipeline import Settings
from tapestry_egg.tracing.call_signature import argument_shardings, result_shardings

QUICK = Settings(work=0.1, recompute=0, forms=0, merge=False)
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Scale:
    """A scale of losses that looks at its leaves whenever it is made."""

    value: Any
    count: Any

    def __post_init__(self) -> None:
        for leaf in (self.value, self.count):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
                raise TypeError(f"{leaf!r} is no array")

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.value, self.count), None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> Scale:
        return cls(*leaves)


def step(w: dict[str, Any], scale: Scale, x: Any, *, power: int = 1) -> Any:
    y = (x @ w["up"]) * scale.value**power
    finite = jnp.isfinite(y).all()
    return {"up": w["up"] - 0.01 * (x.T @ y)}, Scale(scale.value * 0.5, scale.count + finite)


def arguments() -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 2)
    w = {"up": jax.random.normal(keys[0], (32, 16))}
    return w, Scale(jnp.float32(0.5), jnp.int32(3)), jax.random.normal(keys[1], (64, 32))


def same(given: Any, expected: Any) -> None:
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)


def test_tracing_asks_for_arrays_and_donation_alone() -> None:
    program = te.trace(
        step,
        *arguments(),
        power=2,
        donate_argnums=(0, 1),
        static_argnames="power",
    )
    leaves = ("[<flat index 0>]", "[<flat index 1>]")
    assert program.graph.input_names == ("[0]['up']", *(f"[1]{k}" for k in leaves), "[2]")
    assert program.graph.output_names == ("[0]['up']", *(f"[1]{k}" for k in leaves))
    assert program.graph.donated == (True, True, True, False)
    same(program(*arguments()), step(*arguments(), power=2))


@pytest.mark.slow
def test_functions_run_as_under_jax_jit(tmp_path: Any) -> None:
    run = te.jit(step, donate_argnums=(0, 1), static_argnames="power", settings=QUICK)
    plain = jax.jit(step, donate_argnums=(0, 1), static_argnames="power")
    first, second = arguments(), arguments()
    for _ in range(3):
        given, expected = run(*first, power=2), plain(*second, power=2)
        # JAX 0.11 does not delete what has been looked at on several devices, when it is donated.
        same(jax.tree.map(jnp.copy, given), expected)
        for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            assert one.is_deleted() == other.is_deleted()
        first, second = (*given, first[2]), (*expected, second[2])
    compiled = run.compiled(*first, power=2)
    expected = step(*first, power=2)
    same(jax.jit(lambda *args: compiled(*args))(*first), expected)
    for ask in ("input_shardings", "output_shardings"):
        with pytest.raises(TraceError, match="nothing but arrays"):
            getattr(compiled, ask)
    with pytest.raises(TraceError, match="nothing but arrays"):
        compiled.plan.input_specs  # noqa: B018
    assert len(compiled.in_shardings) == 4 and len(compiled.lower().args_info[0]) == 4
    te.save(compiled.plan, tmp_path / "plan.json")
    loaded = te.compile(te.load(tmp_path / "plan.json"))
    same(loaded(*first), expected)


@pytest.mark.slow
def test_layouts_of_the_users_are_read_by_structure() -> None:
    specs = ({"up": P(None, "model")}, None, P("data"))
    run = te.jit(step, mesh=MESH, in_shardings=specs, out_shardings=(P(), None), settings=QUICK)
    same(run(*arguments()), step(*arguments()))
    plan = run.compiled(*arguments())
    assert [s.spec for s in plan.in_shardings][::3] == [P(None, "model"), P("data")]
    assert plan.out_shardings[0].is_fully_replicated


def test_prefixes_reach_all_leaves_or_are_refused() -> None:
    args = arguments()
    spec = P("data")
    assert argument_shardings((None, spec, P()), args, {}) == (None, spec, spec, P())
    assert argument_shardings(spec, args, {}) == (spec,) * 4
    whole = jax.tree.structure(step(*args))
    assert result_shardings(spec, whole) == (spec,) * 3
    assert result_shardings(({"up": spec}, None), whole) == (spec, None, None)
    program = te.trace(step, *args)
    assert input_shardings(program, (spec, spec, spec)) == [(i, spec) for i in range(4)]
    assert output_shardings(program, (None, spec)) == [(0, None), (1, spec), (2, spec)]
    for prefix, words in [
        ((spec, spec), "tuple of 2 given for one of 3"),
        (({"down": spec}, spec, spec), r"at \[0\]: dict with \['down'\]"),
        (([spec], spec, spec), r"at \[0\]: list given for dict"),
        (({"up": (spec,)}, spec, spec), r"at \[0\]\[0\]: tuple given for an array"),
    ]:
        with pytest.raises(TraceError, match=words):
            argument_shardings(prefix, args, {})


@pytest.mark.slow
def test_types_of_explicit_meshes_are_left_out_where_jax_asks_for_more() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    w, scale, x = arguments()
    with jax.set_mesh(mesh):
        x = jax.device_put(x, P("data", "model"))
        w = {"up": jax.device_put(w["up"], P("model", None))}
        program = te.trace(step, w, scale, x, power=2, static_argnames="power")
    same(program(*arguments()), step(*arguments(), power=2))
    assert program.static == (("power", 2),)


@jax.tree_util.register_pytree_node_class
class Numbers:
    """A result that is made of concrete arrays alone."""

    def __init__(self, value: Any) -> None:
        self.value = np.asarray(value)

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> Numbers:
        return cls(*leaves)


def test_results_that_take_no_tracers_are_made_of_arrays() -> None:
    def doubled(x: Any) -> Any:
        made: Any = object.__new__(Numbers)
        made.value = x * 2
        return {"a": x + 1, "b": made}

    x = jnp.arange(4.0)
    program = te.trace(doubled, x)
    assert program.graph.output_names == ("[0]", "[1]")
    given, expected = program(x), jax.jit(doubled)(x)
    assert isinstance(given["b"], Numbers)
    same(given, expected)
    same(te.jit(doubled, settings=QUICK)(x), expected)
