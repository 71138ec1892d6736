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
    metric: Callable[[], Any] | None = None,
) -> Step:
    """The train step that `fit` runs on JAX, over the variables' values."""
    made: list[Any] = []

    def fresh():
        model, tx, told = build(), optimizer(), metric() if metric else None
        tx.build(model.trainable_variables)
        made[:] = [model, tx, told]

    def arguments():
        # Variables of Keras are arrays from the start: they are made once, outside any trace.
        with jax.ensure_compile_time_eval():
            if not made:
                fresh()
            model, tx, told = made
            seen = told.variables if told else []
            groups = (model.trainable_variables, model.non_trainable_variables, tx.variables, seen)
            state = tuple([jnp.asarray(v.value) for v in group] for group in groups)
        return state, *data()

    def step(state, x, y):
        params, others, moments, seen = state
        model, tx, told = made

        def of(params):
            out, new = model.stateless_call(params, others, x, training=True)
            return loss(y, out).mean(), (out, new)

        (value, (out, others)), grads = jax.value_and_grad(of, has_aux=True)(params)
        params, moments = tx.stateless_apply(moments, grads, params)
        if told:
            seen = told.stateless_update_state(seen, y, out)
        return (params, others, moments, seen), value

    return Step(step, arguments)


def _labelled(shape: tuple[int, ...], classes: int) -> Callable[[], tuple[jax.Array, jax.Array]]:
    def data():
        x = jax.random.normal(jax.random.key(1), shape)
        return x, jax.random.randint(jax.random.key(2), shape[:1], 0, classes)

    return data


def xception(small: bool = False) -> Step:
    """Separable convolutions with batch norms and dropout, an accuracy as a metric; Nadam."""
    n, size, widths = (8, 16, (8, 16)) if small else (256, 299, (128, 256, 512, 728))

    def build():
        x = given = keras.Input((size, size, 3))
        x = layers.Conv2D(32, 3, strides=2, padding="same", activation="relu")(x)
        for w in widths:
            y = x
            for _ in range(2):
                y = layers.SeparableConv2D(w, 3, padding="same")(layers.Activation("relu")(y))
                y = layers.BatchNormalization()(y)
            y = layers.MaxPooling2D(3, strides=2, padding="same")(y)
            x = layers.add([y, layers.Conv2D(w, 1, strides=2, padding="same")(x)])
        x = layers.Dropout(0.5)(layers.GlobalAveragePooling2D()(x))
        return keras.Model(given, layers.Dense(10, activation="softmax")(x))

    return _stateless(
        build,
        lambda: keras.optimizers.Nadam(1e-3, clipnorm=1.0),
        keras.losses.sparse_categorical_crossentropy,
        _labelled((n, size, size, 3), 10),
        keras.metrics.SparseCategoricalAccuracy,
    )


def text_transformer(small: bool = False) -> Step:
    """A classifier of text by attention, averaged weights within AdamW."""
    n, length, vocabulary, width, heads, count = (
        (8, 16, 64, 16, 2, 2) if small else (512, 512, 30_000, 512, 8, 6)
    )

    def build():
        tokens = keras.Input((length,), dtype="int32")
        x = layers.Embedding(vocabulary, width)(tokens)
        x = x + layers.Embedding(length, width)(keras.ops.arange(length))
        for _ in range(count):
            y = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(x, x)
            x = layers.LayerNormalization()(x + layers.Dropout(0.1)(y))
            y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x))
            x = layers.LayerNormalization()(x + layers.Dropout(0.1)(y))
        return keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))

    def data():
        x = jax.random.randint(jax.random.key(1), (n, length), 0, vocabulary)
        return x, jax.random.randint(jax.random.key(2), (n,), 0, 2)

    def loss(y, logits):
        return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)

    schedule = keras.optimizers.schedules.CosineDecay
    return _stateless(
        build,
        lambda: keras.optimizers.AdamW(
            schedule(0.0, 1000, warmup_target=1e-3, warmup_steps=10), use_ema=True
        ),
        loss,
        data,
    )


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
