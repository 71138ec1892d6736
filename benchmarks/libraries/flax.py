"""Flax: linen and nnx."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def linen_cnn_step() -> Program:
    """A train step of a convolutional network with batch norm and SGD with momentum."""
    import optax
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            for width in (32, 64):
                x = nn.Conv(width, (3, 3), use_bias=False)(x)
                x = nn.BatchNorm(use_running_average=not train)(x)
                x = nn.avg_pool(nn.relu(x), (2, 2), strides=(2, 2))
            x = x.reshape((x.shape[0], -1))
            return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))

    net = Net()
    x = jax.random.normal(jax.random.key(0), (64, 28, 28, 1))
    y = jax.random.randint(jax.random.key(1), (64,), 0, 10)
    variables = net.init(jax.random.key(2), x, train=True)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params, stats, state, x, y):
        def loss(params):
            logits, changed = net.apply(
                {"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"]
            )
            value = optax.softmax_cross_entropy(logits, jax.nn.one_hot(y, 10)).mean()
            return value, changed["batch_stats"]

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), changed, state, value

    params = variables["params"]
    return step, (params, variables["batch_stats"], optimizer.init(params), x, y)


def linen_transformer() -> Program:
    """The forward pass of two transformer layers with dropout."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask, deterministic):
            h = nn.LayerNorm()(x)
            h = nn.MultiHeadDotProductAttention(
                num_heads=4, dropout_rate=0.1, deterministic=deterministic
            )(h, h, mask=mask)
            x = x + nn.Dropout(0.1, deterministic=deterministic)(h)
            h = nn.Dense(512)(nn.LayerNorm()(x))
            return x + nn.Dense(128)(nn.gelu(h))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens, deterministic=False):
            x = nn.Embed(1000, 128)(tokens)
            mask = nn.make_causal_mask(tokens)
            for _ in range(2):
                x = Block()(x, mask, deterministic)
            return nn.Dense(1000)(x)

    net = Net()
    tokens = jax.random.randint(jax.random.key(0), (8, 64), 0, 1000)
    variables = net.init(jax.random.key(1), tokens, deterministic=True)

    def forward(variables, tokens, key):
        return net.apply(variables, tokens, rngs={"dropout": key})

    return forward, (variables, tokens, jax.random.key(2))


def linen_lstm() -> Program:
    """A bidirectional LSTM over a batch of sequences, and its gradients."""
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            forward = nn.RNN(nn.LSTMCell(64), return_carry=False)
            backward = nn.RNN(nn.LSTMCell(64), reverse=True, keep_order=True)
            h = nn.Bidirectional(forward, backward)(x)
            return nn.Dense(5)(h)

    net = Net()
    x = jax.random.normal(jax.random.key(0), (32, 20, 16))
    variables = net.init(jax.random.key(1), x)

    def loss(variables, x):
        return jnp.mean(net.apply(variables, x) ** 2)

    return jax.value_and_grad(loss), (variables, x)


def nnx_mlp_step() -> Program:
    """A train step of an nnx model, split into graph and state."""
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(64, 256, rngs=rngs)
            self.norm = nnx.LayerNorm(256, rngs=rngs)
            self.last = nnx.Linear(256, 8, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.gelu(self.norm(self.first(x))))

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    optimizer = optax.adamw(1e-3)

    def step(params, state, x, y):
        def loss(params):
            return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    x = jax.random.normal(jax.random.key(0), (128, 64))
    y = jax.random.normal(jax.random.key(1), (128, 8))
    return step, (params, optimizer.init(params), x, y)
