"""Equinox: modules as pytrees, one example at a time under `vmap`, filtered transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from . import Step, cross_entropy, random_tokens


def _trained(
    build: Callable[[jax.Array], Any],
    data: Callable[[], tuple[Any, ...]],
    loss: Callable[..., jax.Array],
    tx: optax.GradientTransformation,
) -> Step:
    """A filtered train step of a model; `loss(model, *data)`."""
    static: list[Any] = []

    def arguments():
        params, rest = eqx.partition(build(jax.random.key(0)), eqx.is_array)
        static[:] = [rest]
        return (params, tx.init(eqx.filter(params, eqx.is_inexact_array))), *data()

    def step(state, *batch):
        params, moments = state
        model = eqx.combine(params, static[0])
        value, grads = eqx.filter_value_and_grad(loss)(model, *batch)
        updates, moments = tx.update(grads, moments, eqx.filter(model, eqx.is_inexact_array))
        params, _ = eqx.partition(eqx.apply_updates(model, updates), eqx.is_array)
        return (params, moments), value

    return Step(step, arguments)


class _Mamba(eqx.Module):
    norm: eqx.nn.RMSNorm
    enter: eqx.nn.Linear
    conv: eqx.nn.Conv1d
    choose: eqx.nn.Linear
    speed: eqx.nn.Linear
    leave: eqx.nn.Linear
    decay: jax.Array
    skip: jax.Array

    def __init__(self, width, states, key):
        a, b, c, d, e = jax.random.split(key, 5)
        inner = 2 * width
        self.norm = eqx.nn.RMSNorm(width)
        self.enter = eqx.nn.Linear(width, 2 * inner, use_bias=False, key=a)
        self.conv = eqx.nn.Conv1d(inner, inner, 4, padding=((3, 0),), groups=inner, key=b)
        self.choose = eqx.nn.Linear(inner, 2 * states + 1, use_bias=False, key=c)
        self.speed = eqx.nn.Linear(1, inner, key=d)
        self.leave = eqx.nn.Linear(inner, width, use_bias=False, key=e)
        self.decay = jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (inner, 1)))
        self.skip = jnp.ones(inner)

    def __call__(self, x):
        u, gate = jnp.split(jax.vmap(self.enter)(jax.vmap(self.norm)(x)), 2, -1)
        u = jax.nn.silu(self.conv(u.T).T)
        slow, b, c = jnp.split(jax.vmap(self.choose)(u), [1, 1 + self.decay.shape[1]], -1)
        slow = jax.nn.softplus(jax.vmap(self.speed)(slow))
        factor = jnp.exp(-slow[..., None] * jnp.exp(self.decay))
        added = (slow * u)[..., None] * b[:, None, :]

        def join(p, q):
            return p[0] * q[0], q[0] * p[1] + q[1]

        _, states = jax.lax.associative_scan(join, (factor, added))
        y = jnp.einsum("tds,ts->td", states, c) + self.skip * u
        return x + jax.vmap(self.leave)(y * jax.nn.silu(gate))


def mamba(small: bool = False) -> Step:
    """Selective state spaces by associative scans, checkpointed blocks, AdamW."""
    n, length, vocabulary, width, layers = (
        (8, 16, 64, 16, 2) if small else (64, 1024, 50_280, 768, 8)
    )

    def build(key):
        keys = jax.random.split(key, layers + 1)
        return {
            "embed": eqx.nn.Embedding(vocabulary, width, key=keys[0]),
            "blocks": [_Mamba(width, 16, k) for k in keys[1:]],
            "norm": eqx.nn.RMSNorm(width),
        }

    def loss(model, tokens):
        def one(tokens):
            x = jax.vmap(model["embed"])(tokens[:-1])
            for block in model["blocks"]:
                x = eqx.filter_checkpoint(block)(x)
            return jax.vmap(model["norm"])(x) @ model["embed"].weight.T

        return cross_entropy(jax.vmap(one)(tokens), tokens[:, 1:])

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return _trained(build, lambda: (random_tokens(n, length + 1, vocabulary),), loss, tx)


def nerf(small: bool = False) -> Step:
    """A radiance field: encoded points, a skip in the network, volume rendering along rays."""
    rays, samples, width, depth = (8, 8, 16, 3) if small else (16_384, 192, 256, 8)
    encoded = 3 + 3 * 2 * 6

    def build(key):
        keys = jax.random.split(key, depth + 2)
        sizes = [encoded] + [width + (encoded if i == depth // 2 else 0) for i in range(1, depth)]
        layers = [eqx.nn.Linear(s, width, key=k) for s, k in zip(sizes, keys, strict=False)]
        return layers, eqx.nn.Linear(width, 1, key=keys[-2]), eqx.nn.Linear(width, 3, key=keys[-1])

    def encode(x):
        parts = [f(2.0**i * x) for i in range(6) for f in (jnp.sin, jnp.cos)]
        return jnp.concatenate([x, *parts], -1)

    def loss(model, origins, directions, colours, key):
        layers, dense, colour = model

        def point(x):
            e = encode(x)
            h = e
            for i, layer in enumerate(layers):
                h = jax.nn.relu(layer(jnp.concatenate([h, e]) if i and i == depth // 2 else h))
            return jax.nn.softplus(dense(h)[0]), jax.nn.sigmoid(colour(h))

        def render(origin, direction, key):
            bins = jnp.linspace(2.0, 6.0, samples + 1)
            t = bins[:-1] + jnp.diff(bins) * jax.random.uniform(key, (samples,))
            density, colours = jax.vmap(point)(origin + t[:, None] * direction)
            opaque = 1 - jnp.exp(-density * jnp.append(jnp.diff(t), 1e10))
            clear = jnp.cumprod(1 - opaque + 1e-10)
            weight = opaque * jnp.concatenate([jnp.ones(1), clear[:-1]])
            return weight @ colours

        made = jax.vmap(render)(origins, directions, jax.random.split(key, rays))
        return jnp.mean((made - colours) ** 2)

    def data():
        keys = jax.random.split(jax.random.key(1), 4)
        return (*(jax.random.normal(k, (rays, 3)) for k in keys[:3]), keys[3])

    return _trained(build, data, loss, optax.adam(optax.exponential_decay(5e-4, 1000, 0.9)))


class _Residual(eqx.Module):
    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]

    def __init__(self, width, key):
        keys = jax.random.split(key)
        self.convs = [eqx.nn.Conv2d(width, width, 3, padding=1, key=k) for k in keys]
        self.norms = [eqx.nn.BatchNorm(width, "batch", mode="batch") for _ in keys]

    def __call__(self, x, state):
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y, state = norm(conv(y), state)
            y = jax.nn.relu(y)
        return x + y, state


def stateful_batchnorm(small: bool = False) -> Step:
    """Residual convolutions whose batch norms have state and a named axis; Lookahead over RAdam."""
    n, size, width, blocks = (8, 8, 8, 2) if small else (1024, 32, 128, 9)
    tx = optax.radam(1e-3)
    static: list[Any] = []

    def build():
        keys = jax.random.split(jax.random.key(0), blocks + 2)
        return {
            "enter": eqx.nn.Conv2d(3, width, 3, padding=1, key=keys[0]),
            "blocks": [_Residual(width, k) for k in keys[1:-1]],
            "leave": eqx.nn.Linear(width, 10, key=keys[-1]),
        }

    def arguments():
        model, state = eqx.nn.make_with_state(build)()
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        static[:] = [rest, jax.tree.structure(state)]
        images = jax.random.normal(jax.random.key(1), (n, 3, size, size))
        labels = jax.random.randint(jax.random.key(2), (n,), 0, 10)
        return (params, jax.tree.leaves(state), tx.init(params)), images, labels

    def step(carried, images, labels):
        params, leaves, moments = carried
        state = jax.tree.unflatten(static[1], leaves)

        def loss(params):
            model = eqx.combine(params, static[0])

            def one(x, state):
                x = model["enter"](x)
                for block in model["blocks"]:
                    x, state = block(x, state)
                return model["leave"](x.mean((1, 2))), state

            logits, new = jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
                images, state
            )
            return cross_entropy(logits, labels), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = tx.update(grads, moments, params)
        return (eqx.apply_updates(params, updates), jax.tree.leaves(new), moments), value

    return Step(step, arguments)


def fourier_operator(small: bool = False) -> Step:
    """A Fourier neural operator in two dims: products of the lowest modes, complex weights."""
    n, size, width, modes = (4, 16, 8, 4) if small else (256, 128, 64, 16)

    def build(key):
        keys = jax.random.split(key, 10)
        spectra = [
            jax.random.normal(k, (2, 2, width, width, modes, modes)) / width for k in keys[:4]
        ]
        mixes = [eqx.nn.Conv2d(width, width, 1, key=k) for k in keys[4:8]]
        enter = eqx.nn.Conv2d(3, width, 1, key=keys[8])
        return spectra, mixes, enter, eqx.nn.MLP(width, 1, 128, 1, key=keys[9])

    def loss(model, x, y):
        spectra, mixes, enter, leave = model

        def one(x):
            h = enter(x)
            for weight, mix in zip(spectra, mixes, strict=True):
                low, high = jax.lax.complex(weight[0], weight[1])
                f = jnp.fft.rfft2(h)
                kept = jnp.zeros_like(f)
                for place, w in ((slice(None, modes), low), (slice(-modes, None), high)):
                    part = jnp.einsum("cxy,cdxy->dxy", f[:, place, :modes], w)
                    kept = kept.at[:, place, :modes].set(part)
                h = jax.nn.gelu(jnp.fft.irfft2(kept, s=h.shape[1:]) + mix(h))
            return jax.vmap(jax.vmap(leave, 1, 1), 2, 2)(h)[0]

        made = jax.vmap(one)(x)
        apart = jnp.sqrt(((made - y) ** 2).sum((1, 2))) / jnp.sqrt((y**2).sum((1, 2)))
        return apart.mean()

    def data():
        x = jax.random.normal(jax.random.key(1), (n, 3, size, size))
        return x, x.sum(1)

    return _trained(build, data, loss, optax.adamw(1e-3))


def set_transformer(small: bool = False) -> Step:
    """Attention over sets of points with inducing points and a Chamfer loss; SM3."""
    n, points, width, heads = (8, 12, 16, 4) if small else (256, 1024, 256, 8)

    def build(key):
        keys = jax.random.split(key, 6)
        return {
            "enter": eqx.nn.Linear(3, width, key=keys[0]),
            "first": eqx.nn.MultiheadAttention(heads, width, key=keys[1]),
            "second": eqx.nn.MultiheadAttention(heads, width, key=keys[2]),
            "inducing": jax.random.normal(keys[3], (16, width)),
            "mlp": eqx.nn.MLP(width, width, 2 * width, 1, key=keys[4]),
            "leave": eqx.nn.Linear(width, 3, key=keys[5]),
        }

    def loss(model, x, y):
        def one(x, y):
            h = jax.vmap(model["enter"])(x)
            kept = model["first"](model["inducing"], h, h)
            h = h + model["second"](h, kept, kept)
            made = jax.vmap(model["leave"])(h + jax.vmap(model["mlp"])(h))
            apart = ((made[:, None] - y[None]) ** 2).sum(-1)
            return apart.min(0).mean() + apart.min(1).mean()

        return jax.vmap(one)(x, y).mean()

    def data():
        return tuple(
            jax.random.normal(k, (n, points, 3)) for k in jax.random.split(jax.random.key(1))
        )

    return _trained(build, data, loss, optax.sm3(1e-2))
