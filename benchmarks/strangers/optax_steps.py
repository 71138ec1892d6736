"""Optax: optimizers of every kind around plain functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import Step, by_optax

_Loss = Callable[..., jax.Array]


def _network(sizes: tuple[int, ...], key: jax.Array) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(sizes))
    return [
        {"w": jax.random.normal(k, (a, b)) / jnp.sqrt(a), "b": jnp.zeros(b)}
        for a, b, k in zip(sizes, sizes[1:], keys, strict=False)
    ]


def _run(params: list[dict[str, jax.Array]], x: jax.Array, act: Any = jax.nn.gelu) -> jax.Array:
    for p in params[:-1]:
        x = act(x @ p["w"] + p["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def _classes(n: int, width: int, classes: int) -> tuple[jax.Array, jax.Array]:
    x, y = jax.random.split(jax.random.key(1))
    return jax.random.normal(x, (n, width)), jax.random.randint(y, (n,), 0, classes)


def _cross_entropy(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(_run(params, x), y).mean()


def _mlp(small: bool, tx: Any) -> Step:
    n, sizes = (8, (16, 32, 32, 10)) if small else (16_384, (1024, 4096, 4096, 4096, 1000))
    return by_optax(
        tx,
        partial(_network, sizes, jax.random.key(0)),
        partial(_classes, n, sizes[0], sizes[-1]),
        _cross_entropy,
    )


def shampoo(small: bool = False) -> Step:
    """Preconditioners of both sides of every matrix, by roots of eigenvalues every few steps."""
    every = 10

    def init(params):
        sides = jax.tree.map(lambda p: [jnp.eye(s) for s in p.shape] if p.ndim == 2 else [], params)
        return {"sums": sides, "roots": sides, "count": jnp.int32(0)}

    def update(grads, state, params=None):
        def gathered(g, sides):
            return [s + h for s, h in zip(sides, (g @ g.T, g.T @ g), strict=True)] if sides else []

        def rooted(s):
            values, vectors = jnp.linalg.eigh(s + 1e-6 * jnp.eye(len(s)))
            return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

        leaves, tree = jax.tree.flatten(grads)
        sums = [
            gathered(g, s) for g, s in zip(leaves, tree.flatten_up_to(state["sums"]), strict=True)
        ]
        roots = tree.flatten_up_to(state["roots"])
        fresh = partial(jax.tree.map, rooted)
        roots = jax.lax.cond(state["count"] % every == 0, fresh, lambda _: roots, sums)
        made = [r[0] @ g @ r[1] if r else g for g, r in zip(leaves, roots, strict=True)]
        new = {
            "sums": tree.unflatten(sums),
            "roots": tree.unflatten(roots),
            "count": state["count"] + 1,
        }
        return tree.unflatten(made), new

    preconditioned = optax.GradientTransformation(init, update)
    return _mlp(small, optax.chain(preconditioned, optax.trace(0.9), optax.scale(-1e-2)))


def multi_optimizers(small: bool = False) -> Step:
    """An optimizer for each group of parameters, one group frozen, hyperparameters as state."""
    groups = {
        "first": optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(1e-3, 1000)),
        "middle": optax.novograd(1e-3),
        "last": optax.chain(optax.centralize(), optax.fromage(1e-2)),
        "frozen": optax.set_to_zero(),
    }

    def labels(params):
        names = ["first"] + ["middle"] * (len(params) - 2) + ["last"]
        return [{"w": name, "b": "frozen"} for name in names]

    return _mlp(small, optax.multi_transform(groups, labels))


def schedule_free(small: bool = False) -> Step:
    """AdamW without a schedule, and steps that are not finite left out."""
    tx = optax.contrib.schedule_free_adamw(2.5e-3, warmup_steps=10)
    return _mlp(small, optax.apply_if_finite(tx, 5))


def prodigy(small: bool = False) -> Step:
    """Prodigy's own step size, with hidden noise on gradients."""
    return _mlp(small, optax.chain(optax.add_noise(0.01, 0.55, 0), optax.contrib.prodigy(1.0)))


def sharpness_aware(small: bool = False) -> Step:
    """SAM: the gradient where the loss is worst nearby, in one step, over momentum."""
    tx = optax.contrib.sam(
        optax.sgd(0.1, 0.9),
        optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
        sync_period=2,
        opaque_mode=True,
    )
    n, sizes = (8, (16, 32, 32, 10)) if small else (16_384, (1024, 4096, 4096, 1000))

    def arguments():
        params = _network(sizes, jax.random.key(0))
        return (params, tx.init(params)), *_classes(n, sizes[0], sizes[-1])

    def step(state, x, y):
        params, moments = state
        slope = jax.grad(_cross_entropy)
        updates, moments = tx.update(
            slope(params, x, y), moments, params, grad_fn=lambda p, _: slope(p, x, y)
        )
        return (optax.apply_updates(params, updates), moments), optax.global_norm(updates)

    return Step(step, arguments)


def private_sgd(small: bool = False) -> Step:
    """Gradients of every example, clipped, summed and with noise, for privacy."""
    tx = optax.contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, seed=0)
    n, sizes = (8, (16, 16, 10)) if small else (1024, (784, 1024, 10))

    def arguments():
        params = _network(sizes, jax.random.key(0))
        return (params, tx.init(params)), *_classes(n, sizes[0], sizes[-1])

    def step(state, x, y):
        params, moments = state
        one = jax.value_and_grad(lambda p, x, y: _cross_entropy(p, x[None], y[None]))
        values, grads = jax.vmap(one, (None, 0, 0))(params, x, y)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), values.mean()

    return Step(step, arguments)


def physics_lbfgs(small: bool = False) -> Step:
    """Burgers' equation by a network: second derivatives, L-BFGS with a zoom line search."""
    n, sizes = (16, (2, 16, 16, 1)) if small else (65_536, (2, 256, 256, 256, 256, 1))
    tx = optax.lbfgs(memory_size=5, linesearch=optax.scale_by_zoom_linesearch(8))

    def solution(params, x):
        return _run(params, x, jnp.tanh)[0]

    def loss(params, inside, border):
        def residual(x):
            u, (along, after) = jax.value_and_grad(partial(solution, params))(x)
            bent = jax.grad(lambda x: jax.grad(partial(solution, params))(x)[0])(x)[0]
            return after + u * along - 0.01 / jnp.pi * bent

        first = jax.vmap(partial(solution, params))(border) + jnp.sin(jnp.pi * border[:, 0])
        return (jax.vmap(residual)(inside) ** 2).mean() + (first**2).mean()

    def arguments():
        params = _network(sizes, jax.random.key(0))
        inside = jax.random.uniform(jax.random.key(1), (n, 2), minval=-1)
        border = inside[: n // 4] * jnp.array([1.0, 0.0])
        return (params, tx.init(params)), inside, border

    def step(state, inside, border):
        params, moments = state
        of = partial(loss, inside=inside, border=border)
        value, grads = optax.value_and_grad_from_state(of)(params, state=moments)
        updates, moments = tx.update(grads, moments, params, value=value, grad=grads, value_fn=of)
        return (optax.apply_updates(params, updates), moments), value

    return Step(step, arguments)


def contrastive(small: bool = False) -> Step:
    """Two towers, a learned temperature and all pairs of a batch; Adafactor, averaged."""
    n, sizes = (8, (16, 32, 8)) if small else (32_768, (1024, 4096, 4096, 512))

    def build():
        a, b = jax.random.split(jax.random.key(0))
        return {"a": _network(sizes, a), "b": _network(sizes, b), "heat": jnp.float32(2.6)}

    def data():
        return tuple(
            jax.random.normal(k, (n, sizes[0])) for k in jax.random.split(jax.random.key(1))
        )

    def loss(params, x, y):
        a, b = (jax.nn.standardize(_run(params[k], v)) for k, v in (("a", x), ("b", y)))
        logits = jnp.exp(params["heat"]) * (a @ b.T) / sizes[-1]
        same = jnp.arange(n)
        rows = optax.softmax_cross_entropy_with_integer_labels(logits, same)
        columns = optax.softmax_cross_entropy_with_integer_labels(logits.T, same)
        return (rows + columns).mean() / 2

    tx = optax.chain(
        optax.clip_by_block_rms(1.0), optax.adafactor(1e-3, momentum=0.9), optax.ema(0.9)
    )
    return by_optax(tx, build, data, loss)


def speech_ctc(small: bool = False) -> Step:
    """Convolutions over time, a CTC loss, masked spectra; Yogi with one cycle."""
    n, frames, bands, width, words, length = (
        (4, 16, 8, 16, 12, 4) if small else (256, 1600, 80, 512, 128, 96)
    )

    def build():
        keys = jax.random.split(jax.random.key(0), 6)
        sizes = [bands, width, width, width, width]
        convs = [
            jax.random.normal(k, (5, a, b)) / jnp.sqrt(5 * a)
            for k, a, b in zip(keys, sizes, sizes[1:], strict=False)
        ]
        return {"convs": convs, "leave": _network((width, words), keys[5])}

    def data():
        keys = jax.random.split(jax.random.key(1), 3)
        return (
            jax.random.normal(keys[0], (n, frames, bands)),
            frames - jnp.arange(n) % 4,
            jax.random.randint(keys[1], (n, length), 1, words),
            length - jnp.arange(n) % 2,
            keys[2],
        )

    def loss(params, x, frames_of, labels, length_of, key):
        start = jax.random.randint(key, (n, 1, 1), 0, bands)
        band = jnp.arange(bands)
        x = jnp.where((band >= start) & (band < start + bands // 8), 0.0, x)
        for i, kernel in enumerate(params["convs"]):
            y = jax.lax.conv_general_dilated(
                x, kernel, (2 if i < 2 else 1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC")
            )
            y = jax.nn.relu(y)
            x = x + y if x.shape == y.shape else y
        logits = _run(params["leave"], x)
        padded = jnp.arange(logits.shape[1]) >= frames_of[:, None] // 4
        missing = jnp.arange(length) >= length_of[:, None]
        return optax.ctc_loss(logits, padded.astype(float), labels, missing.astype(float)).mean()

    return by_optax(optax.yogi(optax.cosine_onecycle_schedule(1000, 1e-3)), build, data, loss)


def ademamix_micro(small: bool = False) -> Step:
    """Gradients summed over micro-batches by a loop inside the step; AdEMAMix, clipped."""
    n, parts, sizes = (16, 4, (16, 32, 10)) if small else (65_536, 8, (1024, 8192, 8192, 1000))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.ademamix(1e-3))

    def arguments():
        params = _network(sizes, jax.random.key(0))
        return (params, tx.init(params)), *_classes(n, sizes[0], sizes[-1])

    def step(state, x, y):
        params, moments = state

        def one(sums, batch):
            value, grads = jax.value_and_grad(_cross_entropy)(params, *batch)
            return jax.tree.map(jnp.add, sums, (value, grads)), None

        batches = jax.tree.map(lambda a: a.reshape(parts, n // parts, *a.shape[1:]), (x, y))
        zero = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        (value, grads), _ = jax.lax.scan(one, zero, batches)
        grads = jax.tree.map(lambda g: g / parts, grads)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value / parts

    return Step(step, arguments)
