"""A graph network in Equinox: messages along edges, gathered from nodes and summed into nodes.

Several graphs make one batch as one large graph: `graphs` says which graph a node belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

State = tuple["Network", optax.OptState]

OPTIMIZER = optax.adam(1e-2)
GRAPHS = 8


class Batch(NamedTuple):
    """Nodes `f32[node, features]`; of every edge its two nodes; of every node its graph."""

    nodes: jax.Array
    senders: jax.Array
    receivers: jax.Array
    graphs: jax.Array


class Layer(eqx.Module):
    """Messages from both ends of an edge, summed where they arrive, and an update of every node."""

    message: eqx.nn.Linear
    update: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, width: int, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.message = eqx.nn.Linear(2 * width, width, key=first)
        self.update = eqx.nn.Linear(2 * width, width, key=second)
        self.norm = eqx.nn.LayerNorm(width)

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        ends = jnp.concatenate([x[batch.senders], x[batch.receivers]], axis=-1)
        messages = jax.nn.relu(jax.vmap(self.message)(ends))
        arrived = jax.ops.segment_sum(messages, batch.receivers, num_segments=x.shape[0])
        y = jax.vmap(self.update)(jnp.concatenate([x, arrived], axis=-1))
        return jax.vmap(self.norm)(x + jax.nn.relu(y))


class Network(eqx.Module):
    """A number for every graph, from the mean of its nodes."""

    embed: eqx.nn.Linear
    layers: list[Layer]
    head: eqx.nn.Linear

    def __init__(self, features: int, width: int, layers: int, key: jax.Array) -> None:
        first, last, *keys = jax.random.split(key, layers + 2)
        self.embed = eqx.nn.Linear(features, width, key=first)
        self.layers = [Layer(width, k) for k in keys]
        self.head = eqx.nn.Linear(width, 1, key=last)

    def __call__(self, batch: Batch) -> jax.Array:
        x = jax.vmap(self.embed)(batch.nodes)
        for layer in self.layers:
            x = layer(x, batch)
        total = jax.ops.segment_sum(x, batch.graphs, num_segments=GRAPHS)
        count = jax.ops.segment_sum(jnp.ones(x.shape[0]), batch.graphs, num_segments=GRAPHS)
        return jax.vmap(self.head)(total / count[:, None])[:, 0]


def forward(model: Network, batch: Batch) -> jax.Array:
    """A number for every graph, `[graph]`."""
    return model(batch)


def loss(model: Network, batch: Batch, targets: jax.Array) -> jax.Array:
    """Mean squared error over graphs."""
    return jnp.mean(jnp.square(forward(model, batch) - targets))


def step(state: State, *batch: jax.Array) -> tuple[State, jax.Array]:
    """Take one Adam step on the fields of a `Batch` and targets; return new state and the loss."""
    model, opt_state = state
    *fields, targets = batch
    value, grads = eqx.filter_value_and_grad(loss)(model, Batch(*fields), targets)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, model)
    return (eqx.apply_updates(model, updates), opt_state), value


def graphs(nodes: int, edges: int, features: int) -> Batch:
    """Return random graphs of `nodes` nodes and `edges` edges each."""
    rng = np.random.default_rng(0)
    first = np.repeat(np.arange(GRAPHS) * nodes, edges)
    senders, receivers = (
        jnp.asarray(first + rng.integers(0, nodes, GRAPHS * edges), jnp.int32) for _ in range(2)
    )
    x = jnp.asarray(rng.normal(size=(GRAPHS * nodes, features)), jnp.float32)
    return Batch(x, senders, receivers, jnp.repeat(jnp.arange(GRAPHS), nodes))


def example(
    nodes: int = 8, edges: int = 16, features: int = 4, width: int = 16, layers: int = 2
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: state, the fields of a `Batch`, and `f32[graph]`."""
    batch = graphs(nodes, edges, features)
    # The mean product of the first feature at both ends of an edge: messages must know it.
    x = batch.nodes[:, 0]
    along = (x[batch.senders] * x[batch.receivers]).reshape(GRAPHS, edges)
    model = Network(features, width, layers, jax.random.key(0))
    return step, ((model, OPTIMIZER.init(model)), *batch, jnp.mean(along, axis=1))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: the model and a `Batch`."""
    _, ((model, _), *fields, _) = example()
    return model, Batch(*fields)
