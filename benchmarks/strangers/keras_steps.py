"""Keras on JAX: stateless calls of models, optimizers and metrics."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
from keras import layers

from . import Step


def _stateless(
    build: Callable[[], Any],
    optimizer: Callable[[], Any],
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    data: Callable[[], tuple[jax.Array, jax.Array]],
) -> Step:
    """The train step that `fit` runs on JAX, over the variables' values."""
    made: list[Any] = []

    def fresh():
        model, tx = build(), optimizer()
        tx.build(model.trainable_variables)
        made[:] = [model, tx]

    def arguments():
        # Variables of Keras are arrays from the start: they are made once, outside any trace.
        with jax.ensure_compile_time_eval():
            if not made:
                fresh()
            model, tx = made
            groups = model.trainable_variables, model.non_trainable_variables, tx.variables
            state = tuple([jnp.asarray(v.value) for v in group] for group in groups)
        return state, *data()

    def step(state, x, y):
        params, others, moments = state
        model, tx = made

        def of(params):
            out, new = model.stateless_call(params, others, x, training=True)
            return loss(y, out).mean(), new

        (value, others), grads = jax.value_and_grad(of, has_aux=True)(params)
        params, moments = tx.stateless_apply(moments, grads, params)
        return (params, others, moments), value

    return Step(step, arguments)


def bidirectional_lstm(small: bool = False) -> Step:
    """Stacked bidirectional LSTMs over masked text; Adadelta."""
    n, length, vocabulary, width = (8, 8, 32, 8) if small else (512, 256, 20_000, 256)

    def build():
        tokens = keras.Input((length,), dtype="int32")
        x = layers.Embedding(vocabulary, width, mask_zero=True)(tokens)
        x = layers.Bidirectional(layers.LSTM(width, return_sequences=True))(x)
        x = layers.Bidirectional(layers.LSTM(width))(x)
        return keras.Model(tokens, layers.Dense(1, activation="sigmoid")(x))

    def data():
        x = jax.random.randint(jax.random.key(1), (n, length), 0, vocabulary)
        return x, jax.random.randint(jax.random.key(2), (n, 1), 0, 2)

    return _stateless(
        build, lambda: keras.optimizers.Adadelta(1.0), keras.losses.binary_crossentropy, data
    )


def video_convlstm(small: bool = False) -> Step:
    """The next frames of a video by ConvLSTMs and a three-dimensional convolution; Ftrl."""
    n, frames, size, width = (4, 3, 8, 4) if small else (64, 16, 64, 64)

    def build():
        given = keras.Input((frames, size, size, 1))
        x = layers.ConvLSTM2D(width, 3, padding="same", return_sequences=True)(given)
        x = layers.BatchNormalization()(x)
        x = layers.ConvLSTM2D(width, 3, padding="same", return_sequences=True)(x)
        return keras.Model(given, layers.Conv3D(1, 3, padding="same", activation="sigmoid")(x))

    def data():
        x = jax.random.uniform(jax.random.key(1), (n, frames + 1, size, size, 1))
        return x[:, :-1], x[:, 1:]

    return _stateless(
        build, lambda: keras.optimizers.Ftrl(1e-3), keras.losses.binary_crossentropy, data
    )
