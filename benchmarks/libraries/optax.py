"""Optax: gradient transformations and losses."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def _regression(optimizer) -> Program:
    """Steps of an optimizer on a small network."""
    import optax

    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": 0.1 * jax.random.normal(k1, (64, 128)),
        "b1": jnp.zeros(128),
        "w2": 0.1 * jax.random.normal(k2, (128, 32)),
    }
    x = jax.random.normal(k3, (256, 64))

    def loss(params, x):
        h = jnp.tanh(x @ params["w1"] + params["b1"])
        return jnp.mean((h @ params["w2"] - x[:, :32]) ** 2)

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), x)


def chained() -> Program:
    """Clipping, AdamW and a schedule with warm-up."""
    import optax

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000)
    return _regression(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)))


def adafactor() -> Program:
    """Factored second moments."""
    import optax

    return _regression(optax.adafactor(1e-3, min_dim_size_to_factor=16))


def lion_accumulated() -> Program:
    """Lion, with gradients accumulated over steps."""
    import optax

    return _regression(optax.MultiSteps(optax.lion(1e-4), 4).gradient_transformation())


def lbfgs() -> Program:
    """A step of L-BFGS with a line search."""
    import optax

    optimizer = optax.lbfgs(memory_size=5)
    a = jax.random.normal(jax.random.key(0), (128, 64))
    b = jax.random.normal(jax.random.key(1), (128,))

    def loss(w):
        return jnp.mean(jnp.logaddexp(0.0, -b * (a @ w))) + 1e-3 * jnp.sum(w**2)

    def step(w, state):
        value, grad = optax.value_and_grad_from_state(loss)(w, state=state)
        updates, state = optimizer.update(grad, state, w, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(w, updates), state, value

    w = jnp.zeros(64)
    return step, (w, optimizer.init(w))


def ctc() -> Program:
    """Gradients of the CTC loss."""
    import optax

    logits = jax.random.normal(jax.random.key(0), (8, 40, 32))
    labels = jax.random.randint(jax.random.key(1), (8, 12), 1, 32)
    lengths = jnp.arange(8) % 5 + 7
    missing = (jnp.arange(12)[None] >= lengths[:, None]).astype(jnp.float32)

    def loss(logits, labels, missing):
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, missing).mean()

    return jax.value_and_grad(loss), (logits, labels, missing)
