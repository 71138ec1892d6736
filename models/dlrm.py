"""A recommender as in DLRM (Naumov et al., 2019): rows of tables, multiplied pair by pair.

Dense features pass a small network; with one row of every table they are multiplied pair by pair,
and a second network makes a click's probability of it. Tables are most of the bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]


def init(
    rng: np.random.Generator, rows: int, tables: int, width: int, dense: int, hidden: int
) -> Params:
    """Return fresh parameters: `tables` tables of `rows` rows, stacked, and two networks."""
    pairs = (tables + 1) * tables // 2

    def network(widths: Sequence[int]) -> list[dict[str, jax.Array]]:
        return [
            {
                "kernel": jnp.asarray(rng.normal(size=(n, m)) / n**0.5, jnp.float32),
                "bias": jnp.zeros(m),
            }
            for n, m in itertools.pairwise(widths)
        ]

    return {
        "tables": jnp.asarray(rng.normal(size=(tables, rows, width)) * 0.3, jnp.float32),
        "bottom": network((dense, hidden, width)),
        "top": network((width + pairs, hidden, 1)),
    }


def forward(params: Params, dense: jax.Array, categories: jax.Array) -> jax.Array:
    """Logits `[batch]` of `f32[batch, dense]` and `i32[batch, tables]`."""
    x = dense
    for layer in params["bottom"]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    found = jax.vmap(lambda table, rows: table[rows], (0, 1), 1)(params["tables"], categories)
    features = jnp.concatenate([x[:, None], found], axis=1)
    products = jnp.einsum("bik,bjk->bij", features, features)
    low = np.tril_indices(features.shape[1], -1)
    y = jnp.concatenate([x, products[:, low[0], low[1]]], axis=1)
    *hidden, last = params["top"]
    for layer in hidden:
        y = jax.nn.relu(y @ layer["kernel"] + layer["bias"])
    return (y @ last["kernel"] + last["bias"])[:, 0]


def loss(params: Params, dense: jax.Array, categories: jax.Array, clicks: jax.Array) -> jax.Array:
    """Mean cross-entropy of clicks, in nats."""
    logits = forward(params, dense, categories)
    return jnp.mean(jax.nn.softplus(logits) - clicks * logits)


def step(params: Params, *batch: jax.Array) -> tuple[Params, jax.Array]:
    """Take one step of gradient descent; return the new parameters and the loss before."""
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value


def example(
    batch: int = 64,
    rows: int = 32,
    tables: int = 6,
    width: int = 8,
    dense: int = 5,
    hidden: int = 16,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: parameters, dense features, categories, clicks."""
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(batch, dense)), jnp.float32)
    categories = jnp.asarray(rng.integers(0, rows, (batch, tables)), jnp.int32)
    clicks = jnp.asarray(features[:, 0] > 0, jnp.float32)
    return step, (init(rng, rows, tables, width, dense, hidden), features, categories, clicks)


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters, dense features and categories."""
    return example()[1][:3]
