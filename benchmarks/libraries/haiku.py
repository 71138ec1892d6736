"""Haiku: transformed functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def mlp_mixer() -> Program:
    """The forward pass of a small mixer over image patches."""
    import haiku as hk

    def net(x):
        h = hk.Conv2D(64, 4, 4)(x)
        h = h.reshape(h.shape[0], -1, 64)
        for _ in range(2):
            y = hk.LayerNorm(-1, True, True)(h).swapaxes(1, 2)
            h = h + hk.nets.MLP([128, 64], activation=jax.nn.gelu)(y).swapaxes(1, 2)
            y = hk.LayerNorm(-1, True, True)(h)
            h = h + hk.nets.MLP([256, 64], activation=jax.nn.gelu)(y)
        return hk.Linear(10)(h.mean(1))

    made = hk.without_apply_rng(hk.transform(net))
    x = jax.random.normal(jax.random.key(0), (16, 32, 32, 3))
    return made.apply, (made.init(jax.random.PRNGKey(1), x), x)


def resnet_step() -> Program:
    """Gradients of a ResNet-18 with batch norm in training mode."""
    import haiku as hk

    def net(x):
        return hk.nets.ResNet18(10)(x, is_training=True)

    made = hk.transform_with_state(net)
    x = jax.random.normal(jax.random.key(0), (8, 32, 32, 3))
    y = jax.nn.one_hot(jnp.arange(8), 10)
    params, state = made.init(jax.random.PRNGKey(1), x)

    def loss(params, state, x, y):
        logits, state = made.apply(params, state, None, x)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * y, -1)), state

    return jax.value_and_grad(loss, has_aux=True), (params, state, x, y)


def lstm_language_model() -> Program:
    """A language model of an unrolled LSTM, and its loss."""
    import haiku as hk

    def net(tokens):
        h = hk.Embed(256, 64)(tokens)
        core = hk.LSTM(128)
        h, _ = hk.dynamic_unroll(core, h.swapaxes(0, 1), core.initial_state(h.shape[0]))
        return hk.Linear(256)(h.swapaxes(0, 1))

    made = hk.without_apply_rng(hk.transform(net))
    tokens = jax.random.randint(jax.random.key(0), (16, 33), 0, 256)
    params = made.init(jax.random.PRNGKey(1), tokens[:, :-1])

    def loss(params, tokens):
        logits = jax.nn.log_softmax(made.apply(params, tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

    return jax.value_and_grad(loss), (params, tokens)
