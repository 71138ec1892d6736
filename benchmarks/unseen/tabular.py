"""Clicks and series: a recommender with large tables (DLRM), recurrent networks over time."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import Program


def dlrm(
    *,
    batch=4096,
    dense=13,
    width=64,
    hidden=512,
    narrow=256,
    rows=(262144, 131072, 65536, 65536, 8192, 1024),
) -> Program:
    """Tables of categories, two multilayer perceptrons and pairwise products, under AdaGrad."""
    optimizer = optax.adagrad(0.05)

    def perceptron(weights, x):
        for w, b in weights[:-1]:
            x = jax.nn.relu(x @ w + b)
        w, b = weights[-1]
        return x @ w + b

    def loss(params, numbers, categories, clicks):
        bottom = perceptron(params["bottom"], numbers)
        looked = [t[categories[:, i]] for i, t in enumerate(params["tables"])]
        each = jnp.stack([bottom, *looked], axis=1)
        pairs = jnp.einsum("bie,bje->bij", each, each)
        i, j = jnp.triu_indices(each.shape[1], 1)
        x = jnp.concatenate([bottom, pairs[:, i, j]], axis=1)
        logits = perceptron(params["top"], x)[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()

    def step(state, numbers, categories, clicks):
        params, sums = state
        value, grads = jax.value_and_grad(loss)(params, numbers, categories, clicks)
        updates, sums = optimizer.update(grads, sums)
        return (optax.apply_updates(params, updates), sums), value

    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def layers(*widths: int) -> list:
        return [(f32(a, b), f32(b)) for a, b in itertools.pairwise(widths)]

    features = len(rows) + 1
    params = {
        "tables": [f32(n, width) for n in rows],
        "bottom": layers(dense, hidden, narrow, width),
        "top": layers(width + features * (features - 1) // 2, hidden, hidden, 1),
    }
    state = params, jax.eval_shape(optimizer.init, params)
    categories = jax.ShapeDtypeStruct((batch, len(rows)), jnp.int32)
    return step, (state, f32(batch, dense), categories, f32(batch))


def lstm_stack(*, batch=512, time=128, features=64, hidden=512) -> Program:
    """Two scanned LSTM layers over a series, the gradient through time, Adam."""
    optimizer = optax.adam(1e-3)

    def layer(p, xs):
        def cell(carry, x):
            h, c = carry
            z = jnp.concatenate([x, h], axis=-1) @ p["kernel"] + p["bias"]
            i, f, g, o = jnp.split(z, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((batch, hidden))
        return lax.scan(cell, (zero, zero), xs)[1]

    def loss(params, xs):
        series = jnp.swapaxes(xs, 0, 1)
        h = series[:-1]
        for p in params["layers"]:
            h = layer(p, h)
        return jnp.mean((h @ params["out"] - series[1:]) ** 2)

    return _step(loss, optimizer), (
        _state(
            {
                "layers": [
                    {"kernel": (features + hidden, 4 * hidden), "bias": (4 * hidden,)},
                    {"kernel": (2 * hidden, 4 * hidden), "bias": (4 * hidden,)},
                ],
                "out": (hidden, features),
            },
            optimizer,
        ),
        jax.ShapeDtypeStruct((batch, time, features), jnp.float32),
    )


def gru_tagger(*, batch=256, time=128, width=256, hidden=256, vocabulary=32768, tags=64) -> Program:
    """A GRU both ways over embedded tokens, a tag for each, under RMSprop."""
    optimizer = optax.rmsprop(1e-3)

    def gru(p, xs, reverse):
        entering = xs @ p["input"] + p["bias"]

        def cell(h, x):
            z = h @ p["recurrent"]
            r = jax.nn.sigmoid(x[:, :hidden] + z[:, :hidden])
            u = jax.nn.sigmoid(x[:, hidden : 2 * hidden] + z[:, hidden : 2 * hidden])
            n = jnp.tanh(x[:, 2 * hidden :] + r * z[:, 2 * hidden :])
            h = u * h + (1.0 - u) * n
            return h, h

        return lax.scan(cell, jnp.zeros((batch, hidden)), entering, reverse=reverse)[1]

    def loss(params, tokens, wanted):
        xs = params["embed"][tokens.T]
        both = [gru(params[n], xs, n == "back") for n in ("forth", "back")]
        logits = jnp.concatenate(both, axis=-1) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted.T).mean()

    cell = {
        "input": (width, 3 * hidden),
        "bias": (3 * hidden,),
        "recurrent": (hidden, 3 * hidden),
    }
    shapes = {
        "embed": (vocabulary, width),
        "forth": cell,
        "back": cell,
        "out": (2 * hidden, tags),
    }
    tokens = jax.ShapeDtypeStruct((batch, time), jnp.int32)
    return _step(loss, optimizer), (_state(shapes, optimizer), tokens, tokens)


def _step(loss, optimizer):
    def step(state, *data):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, *data)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def _state(shapes, optimizer):
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return params, jax.eval_shape(optimizer.init, params)
