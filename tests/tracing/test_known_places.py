"""Reads and writes at places that are known are slices, pads and joins, and hold what they held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Primitive

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.metakernels import registry
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.jaxprs import block_graph
from tapestry_egg.tracing.known_places import runs
from tapestry_egg.tracing.trace import trace
from tests.schedule.other_names import add_under_other_names

Array = Any
N, M = 16, 6
X = np.random.default_rng(0).normal(size=(N, M))
ROWS = np.arange(N)
PLACED = "unstack gather scatter scatter-add scatter_add dynamic_slice dynamic_update_slice".split()


def put(x: Array, at: Any, y: Array) -> Array:
    made = x.copy()
    made[at] = y
    return made


def summed(at: np.ndarray, y: Array) -> Array:
    made = np.zeros((N, M))
    np.add.at(made, at, y)
    return made


def added(at: np.ndarray) -> Callable[[Array], Array]:
    return lambda x: jnp.zeros((N, M)).at[at].add(x[: len(at)])


AROUND = np.r_[N - 1, ROWS, 0]
#: Name -> the program, and what NumPy makes of the same places.
PROGRAMS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "rolled": (lambda x: jnp.take(x, (jnp.arange(N) - 1) % N, 0), lambda x: np.roll(x, 1, 0)),
    "reversed": (lambda x: x[:, jnp.arange(M)[::-1]], lambda x: x[:, ::-1]),
    "every third": (lambda x: x[jnp.arange(1, N, 3)], lambda x: x[1::3]),
    "every other, from the end": (lambda x: x[jnp.arange(N - 1, 0, -2)], lambda x: x[:0:-2]),
    "one row again and again": (lambda x: x[jnp.full(5, 3)], lambda x: x[[3] * 5]),
    "all rows": (lambda x: x[jnp.arange(N)] * 2, lambda x: x * 2),
    "edges again": (
        lambda x: x[jnp.clip(jnp.arange(-2, N + 1), 0, N - 1)],
        lambda x: np.pad(x, ((2, 1), (0, 0)), "edge"),
    ),
    "around": (lambda x: x[AROUND], lambda x: np.pad(x, ((1, 1), (0, 0)), "wrap")),
    "reflected": (
        lambda x: x[jnp.r_[2, 1, 0:N]],
        lambda x: np.pad(x, ((2, 0), (0, 0)), "reflect"),
    ),
    "mapped": (lambda x: jax.vmap(lambda r: r[jnp.arange(M)[::-1]])(x), lambda x: x[:, ::-1]),
    "a window that moves inside": (
        lambda x: lax.dynamic_slice(x, (9, 5), (9, 2)),
        lambda x: x[7:, 4:],
    ),
    "most is set": (
        lambda x: x.at[1:-1, :].set(x[2:] * 2),
        lambda x: put(x, np.s_[1:-1], x[2:] * 2),
    ),
    "a window is set": (
        lambda x: jnp.zeros((64, 64)).at[1:-1, 2:-1].set(x[0, 0]),
        lambda x: np.pad(np.full((62, 61), x[0, 0]), ((1, 1), (2, 1))),
    ),
    "most is updated": (
        lambda x: lax.dynamic_update_slice(x, x[2:] * 2, (3, 0)),
        lambda x: put(x, np.s_[2:], x[2:] * 2),
    ),
    "most is added to": (
        lambda x: x.at[1:].add(x[:-1]),
        lambda x: x + np.pad(x, ((1, 0), (0, 0)))[:-1],
    ),
    "added around": (added(AROUND[:N]), lambda x: summed(AROUND[:N], x)),
    "added to every other": (added(ROWS[::2]), lambda x: summed(ROWS[::2], x[: N // 2])),
    "added in reverse": (added(ROWS[::-1]), lambda x: x[::-1]),
    "of a stack that is stretched": (
        jax.grad(lambda x: (jnp.sum(jnp.stack([x, x[::-1]]), 0) * X).sum()),
        lambda x: X + X[::-1],
    ),
    "added to one": (added(np.full(5, 3)), lambda x: summed(np.full(5, 3), x[:5])),
}


def places(graph: Any) -> list[str]:
    return [op.kernel for op in graph.operations if op.kernel in PLACED]


@pytest.mark.parametrize("name", PROGRAMS)
def test_known_places_are_affine_and_hold_the_same(name: str) -> None:
    program, expected = PROGRAMS[name]
    with jax.enable_x64(True):
        graph = trace(program, jax.ShapeDtypeStruct((N, M), jnp.float64)).graph
        assert not places(graph)
        made = np.asarray(jax.jit(emit(graph))(X)[0])
    np.testing.assert_allclose(made, expected(X), 1e-12)


STAY: dict[str, Callable[[Array], Array]] = {
    "places that are data": lambda x: x[jnp.int32(x[:, 0])],
    "many runs": lambda x: x[np.array([0, 5, 1, 9, 4, 7, 15, 2, 11, 3, 8])],
    "rows that there are not": lambda x: jnp.take(x, jnp.arange(N + 1), 0),
    "a few rows are set": lambda x: x.at[2:4].set(0.0),
    "a few rows are added to": lambda x: x.at[2:4].add(1.0),
}


@pytest.mark.parametrize("name", STAY)
def test_other_places_stay(name: str) -> None:
    assert places(trace(STAY[name], jax.ShapeDtypeStruct((N, M), jnp.float32)).graph)


def shaped(x: Any, *at: Any, slice_sizes: Any = (), how: Any = None) -> Any:
    return x.update(shape=slice_sizes or x.shape)


WINDOW, PUT = Primitive("my_dynamic_slice"), Primitive("my_put")
WINDOW.def_abstract_eval(shaped)
PUT.def_abstract_eval(shaped)


def test_templates_say_what_reads_a_window_and_how_kernels_are_spelled(tmp_path: Path) -> None:
    add_under_other_names(["dynamic_slice"], tmp_path)
    path = tmp_path / "applied.yaml"
    path.write_text(
        "- kernels: [my_applied]\n  inputs: {x: }\n  spelled: {my_applied: [my_put, how]}\n"
        "  out: {shape: $x.shape, dtype: $x.dtype}\n",
        "utf-8",
    )
    registry.add_templates(path)

    def kernels(function: Callable[[Array], Array]) -> list[str]:
        closed = jax.make_jaxpr(function)(X)
        return [op.kernel for op in block_graph(closed.jaxpr, closed.consts).operations]

    window = {"slice_sizes": (3, M)}
    assert kernels(lambda x: WINDOW.bind(x, 9, 0, **window)) == ["slice"]
    assert "my_dynamic_slice" in kernels(lambda x: WINDOW.bind(x, jnp.argmax(x), 0, **window))
    assert kernels(lambda x: PUT.bind(PUT.bind(x), how="squared")) == ["my_put", "my_applied"]


@given(st.lists(st.integers(-2, 2), max_size=12), st.integers(-5, 5))
def test_runs_are_the_numbers_in_their_order(steps: list[int], first: int) -> None:
    numbers = np.cumsum([first, *steps])
    found = runs(numbers)
    made = [r.first + r.step * k for r in found for k in range(r.count)]
    assert not found or (made == numbers.tolist() and found[0].at == 0)
    if len(set(steps)) <= 1:
        assert len(found) == 1


def loss(program: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return jax.grad(lambda x: jnp.sum(jnp.sin(program(x))))


def slope(expected: Callable[[Array], Array]) -> Array:
    """The gradient of the sum of sines of a linear function, by its matrix."""
    ones = np.eye(N * M).reshape(-1, N, M)
    matrix = np.stack([expected(one).ravel() for one in ones])
    return (matrix @ np.cos(expected(X).ravel())).reshape(N, M)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rolled", "reversed", "around", "most is set", "added around"])
def test_eight_devices_agree_with_numpy(name: str) -> None:
    program, expected = PROGRAMS[name]
    with jax.enable_x64(True):
        for function, wanted in ((program, expected(X)), (loss(program), slope(expected))):
            graph = trace(function, jax.ShapeDtypeStruct((N, M), jnp.float64)).graph
            chosen = {"pins": {"[0]": ("x", None)}, "settings": te.Settings(work=0.2)}
            mesh = MeshShape(("x",), (8,))
            plan = te.optimize(graph, "cpu:8", ("seconds",), mesh=mesh, **chosen).best("seconds")
            (made,) = te.compile(plan, jax.devices()[:8])(X)
            np.testing.assert_allclose(made, wanted, 1e-12, 1e-12)
