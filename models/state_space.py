"""A selective state-space network in Equinox: a linear recurrence by `lax.associative_scan`.

As in Mamba (Gu and Dao, 2023): step sizes, input and output maps depend on the token, a short
causal convolution goes before, and h[t] = a[t]·h[t-1] + b[t] is computed for all t at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

State = tuple["Network", optax.OptState]

OPTIMIZER = optax.adam(3e-3)


class Selective(eqx.Module):
    """One layer over a sequence `[time, width]`, with a state of `[width, states]`."""

    norm: eqx.nn.LayerNorm
    inwards: eqx.nn.Linear
    convolution: eqx.nn.Conv1d
    select: eqx.nn.Linear
    step: eqx.nn.Linear
    decay: jax.Array
    skip: jax.Array
    outwards: eqx.nn.Linear
    states: int = eqx.field(static=True)

    def __init__(self, width: int, states: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 5)
        self.norm = eqx.nn.LayerNorm(width)
        self.inwards = eqx.nn.Linear(width, 2 * width, use_bias=False, key=keys[0])
        self.convolution = eqx.nn.Conv1d(
            width, width, 4, padding=[(3, 0)], groups=width, key=keys[1]
        )
        self.select = eqx.nn.Linear(width, 2 * states, use_bias=False, key=keys[2])
        self.step = eqx.nn.Linear(width, width, key=keys[3])
        self.decay = jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (width, 1)))
        self.skip = jnp.ones(width)
        self.outwards = eqx.nn.Linear(width, width, use_bias=False, key=keys[4])
        self.states = states

    def __call__(self, x: jax.Array) -> jax.Array:
        y, gate = jnp.split(jax.vmap(self.inwards)(jax.vmap(self.norm)(x)), 2, axis=-1)
        y = jax.nn.silu(self.convolution(y.T).T)
        return x + jax.vmap(self.outwards)(self.recur(y) * jax.nn.silu(gate))

    def recur(self, x: jax.Array) -> jax.Array:
        """The recurrence, `[time, width]` to the same."""
        into, out = jnp.split(jax.vmap(self.select)(x), 2, axis=-1)
        size = jax.nn.softplus(jax.vmap(self.step)(x))
        a = jnp.exp(-size[:, :, None] * jnp.exp(self.decay))
        b = (size * x)[:, :, None] * into[:, None, :]

        def join(
            first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            return first[0] * second[0], second[0] * first[1] + second[1]

        _, h = lax.associative_scan(join, (a, b))
        return jnp.einsum("tws,ts->tw", h, out) + self.skip * x


class Network(eqx.Module):
    """A sequence of values `[time, inputs]` to a prediction of the next of each."""

    embed: eqx.nn.Linear
    layers: list[Selective]
    head: eqx.nn.Linear

    def __init__(self, inputs: int, width: int, states: int, layers: int, key: jax.Array) -> None:
        first, last, *keys = jax.random.split(key, layers + 2)
        self.embed = eqx.nn.Linear(inputs, width, key=first)
        self.layers = [Selective(width, states, k) for k in keys]
        self.head = eqx.nn.Linear(width, inputs, key=last)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(x)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.head)(x)


def forward(model: Network, xs: jax.Array) -> jax.Array:
    """Predictions for a batch, `[batch, time, inputs]` to the same."""
    return jax.vmap(model)(xs)


def loss(model: Network, xs: jax.Array) -> jax.Array:
    """Mean squared error of predicting every next value."""
    return jnp.mean(jnp.square(forward(model, xs[:, :-1]) - xs[:, 1:]))


def step(state: State, xs: jax.Array) -> tuple[State, jax.Array]:
    """Take one Adam step; return the new model and optimizer state, and the loss before."""
    model, opt_state = state
    value, grads = eqx.filter_value_and_grad(loss)(model, xs)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, model)
    return (eqx.apply_updates(model, updates), opt_state), value


def example(
    batch: int = 8,
    time: int = 17,
    inputs: int = 4,
    width: int = 16,
    states: int = 8,
    layers: int = 2,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: state and `f32[batch, time, inputs]`."""
    phase = np.random.default_rng(0).uniform(0, 2 * np.pi, (batch, 1, inputs))
    xs = jnp.sin(phase + 0.4 * np.arange(time)[:, None])
    model = Network(inputs, width, states, layers, jax.random.key(0))
    return step, ((model, OPTIMIZER.init(model)), jnp.asarray(xs, jnp.float32))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: the model and `f32[batch, time, inputs]`."""
    _, ((model, _), xs) = example()
    return model, xs
