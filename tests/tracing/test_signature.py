"""Which arguments are static and donated: as `jax.jit` reads it, through all its wrappers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tapestry_egg.tracing.call_signature import read_signature
from tapestry_egg.tracing.trace import trace


def f(state: Any, n: int, x: Any, *, mode: str = "sum") -> Any:
    return jax.tree.map(lambda s: s * n + getattr(x, mode)(), state)


STATE, X = {"a": jnp.ones(3)}, jnp.arange(4.0)


class Model:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @functools.partial(jax.jit, static_argnums=(0, 2), donate_argnames="state")
    def step(self, state: Any, n: int) -> Any:
        return jax.tree.map(lambda s: s * n * self.scale, state)

    def plain(self, state: Any, n: int) -> Any:
        return jax.tree.map(lambda s: s * n * self.scale, state)


@pytest.mark.parametrize(
    ("words", "numbers", "names"),
    [
        ({"static_argnums": 1, "static_argnames": "mode"}, (1,), ("mode",)),
        ({"static_argnums": (1,)}, (1,), ("n",)),
        ({"static_argnames": ("n", "mode")}, (1,), ("n", "mode")),
        ({}, (), ()),
        ({"static_argnums": (), "static_argnames": ()}, (), ()),
    ],
)
def test_numbers_and_names_follow_from_each_other(
    words: Any, numbers: tuple[int, ...], names: tuple[str, ...]
) -> None:
    found = read_signature(f, **words)
    assert (found.static_argnums, found.static_argnames) == (numbers, names)


def test_calls_are_split_by_number_and_by_name() -> None:
    signature = read_signature(f, static_argnames=("n", "mode"))
    by_number = signature.split((STATE, 2, X), {"mode": "sum"})
    assert (by_number.args, by_number.static) == ((STATE, X), ((1, 2), ("mode", "sum")))
    by_name = signature.split((STATE,), {"x": X, "n": 2})
    assert (by_name.kwargs, by_name.static) == ({"x": X}, (("n", 2),))
    from_the_end = read_signature(f, static_argnums=-2)  # numbers count those with a place
    assert from_the_end.split((STATE, 2, X), {"mode": "sum"}).static == ((1, 2),)
    last = read_signature(lambda *xs: xs[0] * xs[-1], static_argnums=-1)
    assert last.split((X, X, 3), {}).static == ((2, 3),)


def test_the_words_of_an_inner_jit_are_kept() -> None:
    inner = jax.jit(f, static_argnames=("n", "mode"), donate_argnums=0)
    found = read_signature(inner)
    assert found.jitted is inner
    assert (found.static_argnums, found.donate_argnums) == ((1,), (0,))
    more = read_signature(jax.jit(f, static_argnums=1), static_argnames="mode", donate_argnums=2)
    assert (more.static_argnums, more.static_argnames) == ((1,), ("n", "mode"))
    assert more.donate_argnums == (2,)
    assert trace(more.fn, STATE, 2, X, static_argnames="mode", mode="sum").graph.inputs


@pytest.mark.slow
def test_bound_methods_and_partial_applications_of_jitted_functions() -> None:
    model = Model(2.0)
    bound = read_signature(model.step)
    assert (bound.static_argnums, bound.donate_argnums) == ((1,), (0,))
    assert trace(model.step, STATE, 3).graph.donated == (True,)
    assert trace(model.plain, STATE, 3.0).input_types[1].shape == ()
    half = functools.partial(jax.jit(f, static_argnames=("n", "mode")), STATE, mode="sum")
    assert read_signature(half).static_argnums == (0,)
    assert read_signature(half).static_argnames == ("n",)
    assert len(trace(half, 2, X).graph.inputs) == 1
    named = functools.partial(jax.jit(f, static_argnames=("n", "mode")), n=2)
    assert "n" not in read_signature(named).static_argnames
    assert len(trace(named, STATE, x=X).graph.inputs) == 2


def test_shardings_of_an_inner_jit() -> None:
    spec = jax.sharding.PartitionSpec("x")
    inner = jax.jit(f, static_argnums=1, in_shardings=({"a": spec}, None), out_shardings=spec)
    found = read_signature(inner)
    assert (found.in_shardings, found.out_shardings) == (({"a": spec}, None), spec)
    assert read_signature(inner, in_shardings=(None, spec)).in_shardings == (None, spec)
    assert read_signature(jax.jit(f)).in_shardings is None


def test_what_jax_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="static_argnums"):
        read_signature(lambda x: x, static_argnums=3)
    with pytest.raises(ValueError, match="donate_argnames"):
        read_signature(lambda x: x, donate_argnames="y")


@pytest.mark.parametrize("numbers", [0, -1, -3, (-1, 0), 2])
@pytest.mark.parametrize("named", [False, True])
def test_what_jax_donates_is_donated(numbers: Any, named: bool) -> None:
    def g(a: Any, b: Any, c: Any) -> Any:
        return a + 1, b - 1, c * 2

    args, kwargs = ((X, X), {"c": X}) if named else ((X, X, X), {})
    info = jax.jit(g, donate_argnums=numbers).trace(*args, **kwargs).args_info
    expected = tuple(leaf.donated for leaf in jax.tree.leaves(info))
    assert read_signature(g, donate_argnums=numbers).donated(args, kwargs) == expected
