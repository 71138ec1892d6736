"""Equinox: models that are pytrees."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def mlp_step() -> Program:
    """A train step of a multi-layer perceptron."""
    import equinox as eqx
    import optax

    model = eqx.nn.MLP(64, 10, 256, 3, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    optimizer = optax.adam(1e-3)

    def loss(params, x, y):
        logits = jax.vmap(eqx.combine(params, static))(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, value

    x = jax.random.normal(jax.random.key(1), (256, 64))
    y = jax.random.randint(jax.random.key(2), (256,), 0, 10)
    return step, (params, optimizer.init(params), x, y)


def convolutional() -> Program:
    """The forward pass of a small convolutional classifier."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 4)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 32, 3, padding=1, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(32, 64, 3, padding=1, key=keys[1]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.AdaptiveAvgPool2d(4),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(1024, 10, key=keys[2]),
            eqx.nn.Lambda(jax.nn.log_softmax),
        ]
    )
    params, static = eqx.partition(model, eqx.is_array)

    def forward(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    return forward, (params, jax.random.normal(jax.random.key(1), (32, 3, 32, 32)))


def attention() -> Program:
    """Self-attention with rotary embeddings, layer norm and dropout."""
    import equinox as eqx

    k1, k2 = jax.random.split(jax.random.key(0))
    attend = eqx.nn.MultiheadAttention(8, 128, dropout_p=0.1, key=k1)
    norm = eqx.nn.LayerNorm(128)
    rope = eqx.nn.RotaryPositionalEmbedding(16)
    params, static = eqx.partition((attend, norm), eqx.is_array)

    def one(params, x, key):
        attend, norm = eqx.combine(params, static)
        h = jax.vmap(norm)(x)
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), dtype=bool))

        def heads(q, k, v):
            return jax.vmap(rope, 1, 1)(q), jax.vmap(rope, 1, 1)(k), v

        return x + attend(h, h, h, mask=mask, key=key, process_heads=heads)

    def forward(params, x, key):
        return jax.vmap(one, (None, 0, 0))(params, x, jax.random.split(key, x.shape[0]))

    return forward, (params, jax.random.normal(k2, (16, 64, 128)), jax.random.key(2))


def gru_scan() -> Program:
    """Gradients of a recurrent network over a sequence."""
    import equinox as eqx

    cell = eqx.nn.GRUCell(16, 64, key=jax.random.key(0))
    head = eqx.nn.Linear(64, 1, key=jax.random.key(1))
    params, static = eqx.partition((cell, head), eqx.is_array)

    def loss(params, xs, y):
        cell, head = eqx.combine(params, static)

        def run(seq):
            h, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(64), seq)
            return head(h)[0]

        return jnp.mean((jax.vmap(run)(xs) - y) ** 2)

    xs = jax.random.normal(jax.random.key(2), (64, 32, 16))
    return jax.value_and_grad(loss), (params, xs, jnp.sum(xs, (1, 2)))
