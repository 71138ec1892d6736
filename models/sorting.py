"""A classifier of noisy signals from order statistics, spectra and running sums.

Small, but full of operations that look across a dim: sort, argsort, gather, cumulative sum, Fourier
transform, argmax, scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]
State = dict[str, Any]
QUANTILES = 8


def init(rng: np.random.Generator, length: int = 32, channels: int = 4, classes: int = 4) -> State:
    """Return `{"params": ..., "guesses": i32[classes]}`: weights, and a count of predictions."""
    width = QUANTILES + length // 2 + 1 + length

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(0.1 * rng.normal(size=shape), jnp.float32)

    params = {
        "gain": 1 + normal(channels, length),
        "channel": normal(channels, width),
        "head": normal(width, classes),
    }
    return {"params": params, "guesses": jnp.zeros(classes, jnp.int32)}


def features(params: Params, signals: jax.Array, channels: jax.Array) -> jax.Array:
    """Quantiles, spectrum and running energy of `[batch, length]`, scaled by each row's channel."""
    length = signals.shape[-1]
    x = signals * params["gain"][channels]
    at = np.linspace(0, length - 1, QUANTILES).astype(np.int32)
    quantiles = jnp.sort(x, axis=-1)[:, at]
    spectrum = jnp.log1p(jnp.square(jnp.abs(jnp.fft.rfft(x, axis=-1))) / length)
    energy = jnp.cumsum(jnp.square(x), axis=-1)
    parts = [quantiles, spectrum, energy / energy[:, -1:]]
    return jnp.concatenate(parts, axis=-1) + params["channel"][channels]


def forward(params: Params, signals: jax.Array, channels: jax.Array) -> jax.Array:
    """Map signals `[batch, length]` and their channels to logits `[batch, classes]`."""
    return features(params, signals, channels) @ params["head"]


def loss(
    params: Params, signals: jax.Array, channels: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the harder half of the batch, and the class guessed for each row."""
    logits = forward(params, signals, channels)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]
    hardest = jnp.argsort(picked)[: labels.shape[0] // 2]
    return -jnp.mean(picked[hardest]), jnp.argmax(logits, axis=-1)


def step(
    state: State,
    signals: jax.Array,
    channels: jax.Array,
    labels: jax.Array,
    learning_rate: float = 0.05,
) -> tuple[State, jax.Array]:
    """Take one step of gradient descent; return weights, counted guesses and the loss before."""
    (value, guess), grads = jax.value_and_grad(loss, has_aux=True)(
        state["params"], signals, channels, labels
    )
    params = jax.tree.map(lambda p, g: p - learning_rate * g, state["params"], grads)
    return {"params": params, "guesses": state["guesses"].at[guess].add(1)}, value


def example(
    batch: int = 16, length: int = 32, channels: int = 4, classes: int = 4
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: state, `f32[batch, length]`, two `i32[batch]`."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, batch).astype(np.int32)
    channel = rng.integers(0, channels, batch).astype(np.int32)
    time = np.arange(length) / length
    signals = np.sin(2 * np.pi * (2 + 3 * labels[:, None]) * time)
    signals = signals + 0.3 * rng.normal(size=(batch, length))
    state = init(rng, length, channels, classes)
    arrays = (jnp.asarray(signals, jnp.float32), jnp.asarray(channel), jnp.asarray(labels))
    return step, (state, *arrays)


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters, signals and channels."""
    _, (state, signals, channels, _) = example()
    return state["params"], signals, channels
