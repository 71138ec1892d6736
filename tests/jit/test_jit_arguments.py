"""Arguments of `te.jit` that lie otherwise than planned: which are given up, what is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.errors import PlanError
from tapestry_egg.pipeline import Settings

QUICK = Settings(work=0.1, recompute=0, forms=0, merge=False)
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = np.arange(64, dtype=np.float32).reshape(8, 8)
PLACES = {
    "the first device": None,
    "another device": jax.devices()[3],
    "rows": NamedSharding(MESH, P("data")),
    "columns": NamedSharding(MESH, P(None, "model")),
    "everywhere": NamedSharding(MESH, P()),
}
DONATING: dict[str, Callable[[Any, Any], Any]] = {
    "an output for one": lambda x, y: (x * 2 + y, y.sum()),
    "for both": lambda x, y: (x * 2, y + 1),
    "for none": lambda x, y: (x * 2).sum() + y.sum(),
}


def at(place: str) -> jax.Array:
    where = PLACES[place]
    return jnp.array(X) if where is None else jax.device_put(X, where)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("kind", DONATING)
def test_what_is_moved_is_given_up_where_jax_jit_takes_it(kind: str) -> None:
    fn = DONATING[kind]
    for place in PLACES:
        run = te.jit(fn, donate_argnums=(0, 1), settings=QUICK)
        if PLACES[place] is not None:  # else the plan would leave them there
            run.plan(X, X)
        results, gone = [], []
        for call in (jax.jit(fn, donate_argnums=(0, 1)), run):
            x, y = at(place), at(place)
            results.append(jax.tree.map(np.asarray, call(x, y)))
            gone.append((x.is_deleted(), y.is_deleted()))
        assert gone[0] == gone[1], place
        jax.tree.map(np.testing.assert_allclose, *results)


@pytest.mark.parametrize(
    ("kind", "donated", "shared"),
    [
        ("for both", (0, 1), True),
        ("for both", 1, True),
        ("an output for one", (0, 1), True),
        ("for none", (0, 1), False),
    ],
)
@pytest.mark.parametrize("place", ["the first device", "rows"])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_an_array_that_is_given_up_is_no_other_argument(
    kind: str, donated: Any, shared: bool, place: str
) -> None:
    fn = DONATING[kind]
    run = te.jit(fn, donate_argnums=donated, settings=QUICK)
    x = at(place)
    if shared:
        with pytest.raises(PlanError, match=r"the same array as \[\d\]: .* donated twice"):
            run(x, x)
    else:
        jax.tree.map(np.testing.assert_allclose, run(x, x), fn(X, X))
    assert not x.is_deleted()
    jax.tree.map(np.testing.assert_allclose, run(X, X), fn(X, X))  # each has a copy


def told(calls: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls()
    return [str(w.message) for w in caught]


@pytest.mark.slow
def test_what_is_moved_again_is_told_once() -> None:
    run = te.jit(lambda x, y: (x @ y).sum(), settings=QUICK)
    rows, columns = at("rows"), at("columns")
    assert not told(lambda: run(rows, X))
    assert not told(lambda: run(columns, X)), "once: a checkpoint is restored as it was saved"
    assert not told(lambda: [run(rows, X), run(at("the first device"), X), run(X, X)])
    (words,) = told(lambda: [run(columns, X) for _ in range(3)])
    assert words.startswith("[0]") and "are moved at every call" in words
    run.clear_cache()
    assert not told(lambda: [run(columns, X) for _ in range(3)]), "planned for where they lie"
    free = te.jit(lambda x: x.sum(), arguments="free", mesh=MESH, settings=QUICK)
    assert not told(lambda: [free(a) for a in (columns, rows, at("everywhere")) for _ in range(3)])


def scaled(x: Any, n: Any = 2, *, mode: str = "sum", y: Any = None) -> Any:
    assert isinstance(mode, str)
    return getattr(jnp, mode)(x) * n + (0 if y is None else y.sum())


WORDS: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = [
    ({"static_argnames": "mode"}, (X,), {}),
    ({"static_argnames": ("n", "mode")}, (X,), {"n": 3, "mode": "mean"}),
    ({"static_argnums": 1, "static_argnames": "mode"}, (X, 3), {"mode": "max", "y": X}),
    ({"static_argnums": -1, "static_argnames": "mode"}, (X, 3), {}),
    ({"static_argnums": -1, "static_argnames": "mode"}, (X,), {}),
    ({"static_argnums": 1, "static_argnames": "mode"}, (X, [3]), {}),
    ({"static_argnums": 5}, (X,), {}),
    ({"static_argnames": ("mode", "nobody")}, (X,), {}),
    ({"static_argnames": "mode", "donate_argnames": "y"}, (X,), {"y": X}),
    ({"static_argnums": 0, "donate_argnums": 0, "static_argnames": "mode"}, (X,), {}),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(("words", "args", "named"), WORDS)
def test_words_about_arguments_mean_what_they_mean_to_jax_jit(
    words: dict[str, Any], args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    def outcome(jit: Callable[..., Any]) -> tuple[str, Any]:
        try:
            return "result", np.asarray(jit(scaled, **words)(*args, **named))
        except (TypeError, ValueError) as e:
            return type(e).__name__, str(e)[:60]

    theirs = outcome(jax.jit)
    kind, said = outcome(lambda fn, **words: te.jit(fn, settings=QUICK, **words))
    assert kind == theirs[0]
    if kind == "result":
        np.testing.assert_allclose(said, theirs[1], rtol=1e-6)
    else:
        assert said == theirs[1]


EMPTY = np.zeros((64, 0), np.float32), np.zeros((0, 8), np.float32)
NONE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "contracted": (lambda a, b: a @ b, EMPTY),
    "beside an unused one": (lambda a, b, c: a @ b, (*EMPTY, X)),
    "returned": (lambda a, b: (a * 2, a @ b), EMPTY),
    "keys": (lambda k: jax.random.key_data(k), (jax.random.split(jax.random.key(0), 2)[:0],)),
}


@pytest.mark.parametrize("kind", NONE)
def test_arguments_may_be_without_elements(kind: str) -> None:
    fn, arguments = NONE[kind]
    got, wanted = (jit(fn)(*arguments) for jit in (te.jit, jax.jit))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("lies", [(P("data"), P()), (P("model"), P("data"))])
@pytest.mark.parametrize("donated", [(), 1, (0, 1)])
def test_what_only_changes_place_and_layout_is_planned(lies: Any, donated: Any) -> None:
    """Copies of arguments that leave as they are come one after another, in every count."""
    given = tuple(NamedSharding(MESH, s) for s in lies)
    wanted = NamedSharding(MESH, P(None, "model")), NamedSharding(MESH, P())
    run = te.jit(
        lambda x, y: (y, x),
        donate_argnums=donated,
        in_shardings=given,
        out_shardings=wanted,
        settings=QUICK,
    )
    y, x = run(jnp.array(X), jnp.array(X + 1))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, X + 1)
    assert (y.sharding, x.sharding) == wanted
