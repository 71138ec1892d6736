"""Recurrent networks over a sequence by `lax.scan`, LSTM or GRU, and the gradient through time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Params = dict[str, jax.Array]


def init(rng: np.random.Generator, gates: int, inputs: int = 8, hidden: int = 16) -> Params:
    """Return kernels for `gates` gates (4 make an LSTM, 3 a GRU) and a linear readout."""

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32)

    return {
        "input": normal(inputs, gates * hidden),
        "recurrent": normal(hidden, gates * hidden),
        "bias": jnp.zeros(gates * hidden),
        "readout": normal(hidden, inputs),
    }


def lstm(params: Params, xs: jax.Array) -> jax.Array:
    """Map `[time, batch, inputs]` to hidden states `[time, batch, hidden]`."""
    hidden = params["recurrent"].shape[0]

    def cell(
        carry: tuple[jax.Array, jax.Array], x: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        c, h = carry
        z = x @ params["input"] + h @ params["recurrent"] + params["bias"]
        i, f, g, o = jnp.split(z, 4, axis=-1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    zero = jnp.zeros((xs.shape[1], hidden), xs.dtype)
    return lax.scan(cell, (zero, zero), xs)[1]


def gru(params: Params, xs: jax.Array) -> jax.Array:
    """Map `[time, batch, inputs]` to hidden states `[time, batch, hidden]`."""
    hidden = params["recurrent"].shape[0]
    # The inputs' share of every gate needs no recurrence: one product for all times.
    projected = xs @ params["input"] + params["bias"]

    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = h @ params["recurrent"]
        reset = jax.nn.sigmoid(x[:, :hidden] + z[:, :hidden])
        update = jax.nn.sigmoid(x[:, hidden : 2 * hidden] + z[:, hidden : 2 * hidden])
        new = jnp.tanh(x[:, 2 * hidden :] + reset * z[:, 2 * hidden :])
        h = update * h + (1 - update) * new
        return h, h

    return lax.scan(cell, jnp.zeros((xs.shape[1], hidden), xs.dtype), projected)[1]


def forward(params: Params, xs: jax.Array) -> jax.Array:
    """Predict every next value of `[batch, time, inputs]` with an LSTM."""
    return lstm(params, jnp.swapaxes(xs, 0, 1)) @ params["readout"]


CELLS = {"lstm": (lstm, 4), "gru": (gru, 3)}


def train_step(cell: str) -> Callable[[Params, jax.Array], tuple[Params, jax.Array]]:
    """Return the gradient descent step that teaches `cell` to predict a sequence's next value."""
    network, _ = CELLS[cell]

    def loss(params: Params, xs: jax.Array) -> jax.Array:
        series = jnp.swapaxes(xs, 0, 1)
        predicted = network(params, series[:-1]) @ params["readout"]
        return jnp.mean(jnp.square(predicted - series[1:]))

    def step(params: Params, xs: jax.Array) -> tuple[Params, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, xs)
        return jax.tree.map(lambda p, g: p - 0.2 * g, params, grads), value

    return step


def example(
    cell: str = "lstm", batch: int = 8, time: int = 12, inputs: int = 8, hidden: int = 16
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step of `cell` and arguments: parameters, `f32[batch, time, inputs]`."""
    rng = np.random.default_rng(0)
    phase = rng.uniform(0, 2 * np.pi, (batch, 1, inputs))
    xs = np.sin(phase + 0.4 * np.arange(time)[:, None])
    params = init(rng, CELLS[cell][1], inputs, hidden)
    return train_step(cell), (params, jnp.asarray(xs, jnp.float32))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters and `f32[batch, time, inputs]`."""
    return example()[1]
