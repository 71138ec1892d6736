"""Jraph: graph networks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def _graph(nodes: int, edges: int, width: int):
    import jraph

    keys = jax.random.split(jax.random.key(0), 4)
    return jraph.GraphsTuple(
        nodes=jax.random.normal(keys[0], (nodes, width)),
        edges=jax.random.normal(keys[1], (edges, width)),
        senders=jax.random.randint(keys[2], (edges,), 0, nodes),
        receivers=jax.random.randint(keys[3], (edges,), 0, nodes),
        n_node=jnp.array([nodes // 2, nodes - nodes // 2]),
        n_edge=jnp.array([edges // 2, edges - edges // 2]),
        globals=jnp.ones((2, width)),
    )


def message_passing() -> Program:
    """Two rounds of a graph network with updates of edges, nodes and globals."""
    import jraph

    def dense(key, width_in, width_out):
        return jax.random.normal(key, (width_in, width_out)) / width_in**0.5

    keys = jax.random.split(jax.random.key(1), 3)
    params = {"edge": dense(keys[0], 128, 32), "node": dense(keys[1], 128, 32)}
    params["globals"] = dense(keys[2], 96, 32)

    def forward(params, graph):
        net = jraph.GraphNetwork(
            lambda e, s, r, g: jax.nn.relu(jnp.concatenate([e, s, r, g], -1) @ params["edge"]),
            lambda n, s, r, g: jax.nn.relu(jnp.concatenate([n, s, r, g], -1) @ params["node"]),
            lambda n, e, g: jnp.tanh(jnp.concatenate([n, e, g], -1) @ params["globals"]),
        )
        return net(net(graph))

    return forward, (params, _graph(128, 512, 32))


def attention_step() -> Program:
    """Gradients of a graph attention network."""
    import jraph

    keys = jax.random.split(jax.random.key(1), 2)
    params = {
        "query": jax.random.normal(keys[0], (32, 32)) / 6.0,
        "logit": jax.random.normal(keys[1], (64, 1)) / 8.0,
    }

    def loss(params, graph):
        net = jraph.GAT(
            lambda n: n @ params["query"],
            lambda s, r, e: jax.nn.leaky_relu(jnp.concatenate([s, r], -1) @ params["logit"]),
        )
        out = net(graph._replace(edges=None, globals=None))
        return jnp.mean(out.nodes**2)

    return jax.value_and_grad(loss), (params, _graph(128, 512, 32))
