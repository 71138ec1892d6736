"""Whose update a value is, held against programs in which shapes alone tell it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.rewrite.streams.written_out import with_loops_written_out
from tapestry_egg.schedule.flatten import FlatProgram, feedback_pairs, flatten
from tapestry_egg.show.account import updates

Tree = Any
#: Every leaf has a shape of its own, and no value that is made of the data has one of them.
SHAPES = {"up": (16, 32), "down": (32, 8), "stack": (3, 8, 8), "bias": (24,)}


def loss(w: Tree, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w["up"]) @ w["down"]
    h = jax.lax.scan(lambda h, k: (jnp.tanh(h @ k), None), h, w["stack"])[0]
    return jnp.mean((jnp.tile(h, (1, 3)) + w["bias"]) ** 2)


def sgd(w: Tree, x: jax.Array) -> Tree:
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))


def adam(state: tuple[Tree, Tree, Tree], x: jax.Array) -> tuple[Tree, Tree, Tree]:
    """With gradients clipped by the norm of all of them, so that every weight depends on each."""
    w, mu, nu = state
    g = jax.grad(loss)(w, x)
    norm = jnp.sqrt(sum(jnp.sum(a**2) for a in jax.tree.leaves(g)))
    g = jax.tree.map(lambda a: a / jnp.maximum(norm, 1.0), g)
    mu = jax.tree.map(lambda m, a: 0.9 * m + 0.1 * a, mu, g)
    nu = jax.tree.map(lambda v, a: 0.9 * v + 0.1 * a**2, nu, g)
    new = jax.tree.map(lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-6), w, mu, nu)
    return new, mu, nu


def flat(fn: Any, *arguments: Any, donate: int | tuple[int, ...] = 0) -> tuple[Any, FlatProgram]:
    graph = te.trace(fn, *arguments, donate_argnums=donate).graph
    return graph, flatten(graph, feedback_pairs(graph))


def leaves() -> Tree:
    return {k: jax.ShapeDtypeStruct(shape, "float32") for k, shape in SHAPES.items()}


ROWS = jax.ShapeDtypeStruct((64, 16), "float32")


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_gradient_is_the_update_of_its_weight(optimizer: str, written_out: bool) -> None:
    w = leaves()
    graph, program = flat(*{"sgd": (sgd, w, ROWS), "adam": (adam, (w, w, w), ROWS)}[optimizer])
    if written_out:
        graph = with_loops_written_out(graph, shared=True)
        program = flatten(graph, feedback_pairs(graph))
    path = {"sgd": "[0]['{}']", "adam": "[0][0]['{}']"}[optimizer]
    found = updates(program)
    entering = {program.bodies[0].values[v] for v in graph.inputs}
    assert not entering & set(found)  # a weight that is gathered is no update
    seen = set()
    for instance in program.instances:
        if instance.signature.gemm is None or instance.port:
            continue
        (v,) = instance.outputs
        shape = program.types[v].shape
        of = [k for k in ("up", "down") if shape in (SHAPES[k], SHAPES[k][::-1])]
        inner = [k for k in ("stack",) if shape == SHAPES[k][1:]]
        named = [graph.input_names[found[v]]] if v in found else []
        assert named == [path.format(k) for k in of + inner], (instance, shape)
        seen |= {*of, *inner}
    assert seen == {"up", "down", "stack"}
    own = {graph.input_names[i] for i in found.values()}
    assert own == set(graph.input_names) - {"[1]"}


def test_what_is_summed_on_the_way_and_what_does_not_come_back_belong_to_nobody() -> None:
    w = leaves()
    _, program = flat(adam, (w, w, w), ROWS)
    scalars = [v for v in updates(program) if not program.types[v].shape]
    assert not scalars
    graph = te.trace(sgd, w, ROWS).graph
    assert not updates(flatten(graph, {}))
