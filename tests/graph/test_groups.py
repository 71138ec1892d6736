"""Operations in groups that are called as the user's program calls them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tapestry_egg as te
from tapestry_egg.graph.groups import grouped

LAYERS = 6


def attend(x: jax.Array, w: Any) -> jax.Array:
    return jax.nn.softmax(x @ w["q"]) @ w["v"] + x


def mlp(x: jax.Array, w: Any) -> jax.Array:
    return jnp.tanh(x @ w["up"]) @ w["up"].T + x


def train(w: Any, x: jax.Array) -> Any:
    def loss(w: Any) -> jax.Array:
        h = x
        for one in w["layers"]:
            h = mlp(attend(h, one), one)
        return jnp.mean(h**2)

    def descended(p: jax.Array, g: jax.Array) -> jax.Array:
        return p - 0.1 * g / (jnp.sqrt(jnp.sum(g * g)) + 1.0)

    return jax.tree.map(descended, w, jax.grad(loss)(w))


def test_a_step_is_told_by_its_layers_forwards_and_backwards_and_its_optimizer() -> None:
    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    w = {"layers": [{"q": square, "v": square, "up": square}] * LAYERS}
    graph = te.trace(train, w, square).graph
    found = grouped(graph, range(len(graph.operations)), 16)
    names = [name for name, _ in found]
    forwards = [f"layers[{k}]" for k in range(LAYERS)]
    backwards = [f"layers[{k}] backward" for k in reversed(range(LAYERS))]
    assert [n for n in names if n in forwards] == forwards
    assert [n for n in names if n in backwards] == backwards
    assert names.index(forwards[-1]) < names.index(backwards[0]) and len(names) <= 16
    assert names[-1] == "train"  # the function that has the update in it
    assert [i for _, numbers in found for i in numbers] == list(range(len(graph.operations)))


def test_what_few_operations_interrupt_is_one_group() -> None:
    def mixed(x: jax.Array, y: jax.Array) -> jax.Array:
        for k in range(30):
            with jax.named_scope("long"):
                x = jnp.tanh(x) * 2.0 + x * 3.0 - x
            with jax.named_scope(f"short{k}"):
                x = x + y
        return x

    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    graph = te.trace(mixed, square, square).graph
    found = grouped(graph, range(len(graph.operations)), 4)
    assert len(found) <= 4 and {name for name, _ in found} == {"long"}
