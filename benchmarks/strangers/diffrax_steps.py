"""Diffrax: differential equations inside train steps, with and without adjoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import optax

from . import Step


def _step(
    build: Callable[[jax.Array], Any], data: Callable[[], tuple[Any, ...]], loss: Any, tx: Any
) -> Step:
    static: list[Any] = []

    def arguments():
        params, rest = eqx.partition(build(jax.random.key(0)), eqx.is_inexact_array)
        static[:] = [rest]
        return (params, tx.init(params)), *data()

    def step(state, *batch):
        params, moments = state
        value, grads = jax.value_and_grad(lambda p: loss(eqx.combine(p, static[0]), *batch))(params)
        updates, moments = tx.update(grads, moments, params)
        return (eqx.apply_updates(params, updates), moments), value

    return Step(step, arguments)


def _mlp(dims: int, after: int, width: int, key: jax.Array) -> eqx.nn.MLP:
    return eqx.nn.MLP(dims, after, width, 2, jax.nn.softplus, jnp.tanh, key=key)


def neural_ode(small: bool = False) -> Step:
    """Trajectories of a learned field by an adaptive solver with recursive checkpoints."""
    n, times, dims, width = (8, 6, 3, 16) if small else (8192, 100, 8, 256)
    steps = 8 if small else 64

    def loss(field, ts, ys):
        def one(y):
            solved = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: field(y)),
                diffrax.Tsit5(),
                ts[0],
                ts[-1],
                ts[1] - ts[0],
                y[0],
                saveat=diffrax.SaveAt(ts=ts),
                stepsize_controller=diffrax.PIDController(1e-2, 1e-3),
                max_steps=steps,
                throw=False,
            )
            return ((solved.ys - y) ** 2).mean()

        return jax.vmap(one)(ys).mean()

    def data():
        return jnp.linspace(0.0, 1.0, times), jax.random.normal(jax.random.key(1), (n, times, dims))

    return _step(lambda key: _mlp(dims, dims, width, key), data, loss, optax.adabelief(3e-3))


def neural_sde(small: bool = False) -> Step:
    """A latent SDE: Brownian paths by reversible Heun steps, a GRU that encodes backwards."""
    n, times, dims, width = (8, 6, 2, 8) if small else (4096, 64, 16, 128)

    def build(key):
        keys = jax.random.split(key, 4)
        return {
            "encode": eqx.nn.GRUCell(dims, width, key=keys[0]),
            "drift": _mlp(width, width, width, keys[1]),
            "noise": _mlp(width, width, width, keys[2]),
            "leave": eqx.nn.Linear(width, dims, key=keys[3]),
        }

    def loss(model, ts, ys, key):
        def one(y, key):
            def back(h, x):
                return model["encode"](x, h), None

            start, _ = jax.lax.scan(back, jnp.zeros(width), y, reverse=True)
            path = diffrax.VirtualBrownianTree(0.0, 1.0, 0.02, (width,), key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, z, args: model["drift"](z)),
                diffrax.ControlTerm(
                    lambda t, z, args: lineax.DiagonalLinearOperator(model["noise"](z)), path
                ),
            )
            solved = diffrax.diffeqsolve(
                terms,
                diffrax.ReversibleHeun(),
                0.0,
                1.0,
                0.25 if small else 0.02,
                start,
                saveat=diffrax.SaveAt(ts=ts),
                adjoint=diffrax.RecursiveCheckpointAdjoint(),
                throw=False,
            )
            return ((jax.vmap(model["leave"])(solved.ys) - y) ** 2).mean()

        return jax.vmap(one)(ys, jax.random.split(key, n)).mean()

    def data():
        ys = jax.random.normal(jax.random.key(1), (n, times, dims))
        return jnp.linspace(0.0, 1.0, times), ys, jax.random.key(2)

    return _step(build, data, loss, optax.adam(1e-3))


def score_matching(small: bool = False) -> Step:
    """A score network and, in the same step, the likelihood of a batch by its flow."""
    n, dims, width = (8, 2, 16) if small else (16_384, 32, 512)

    def loss(net, x, key):
        times, noises = jax.random.split(key)

        def score(t, y):
            return net(jnp.append(y, t))

        def one(x, t, noise):
            keep, scale = jnp.exp(-0.5 * t), jnp.sqrt(1 - jnp.exp(-t))
            return ((score(t, keep * x + scale * noise) * scale + noise) ** 2).mean()

        def chance(x):
            def flow(t, y, args):
                drift = lambda y: -0.5 * (y[0] + score(t, y[0]))  # noqa: E731
                value, back = jax.vjp(lambda v: drift((v, 0.0)), y[0])
                (trace,) = back(jnp.ones(dims))
                return value, trace.sum()

            solved = diffrax.diffeqsolve(
                diffrax.ODETerm(flow),
                diffrax.Euler(),
                1e-3,
                1.0,
                0.25 if small else 0.05,
                (x, jnp.zeros(())),
                throw=False,
            )
            y, change = solved.ys[0][-1], solved.ys[1][-1]
            return change - 0.5 * (y**2).sum()

        t = jax.random.uniform(times, (n,), minval=1e-3)
        wrong = jax.vmap(one)(x, t, jax.random.normal(noises, x.shape)).mean()
        return wrong - 1e-3 * jax.vmap(chance)(x).mean()

    def data():
        return jax.random.normal(jax.random.key(1), (n, dims)), jax.random.key(2)

    return _step(lambda key: _mlp(dims + 1, dims, width, key), data, loss, optax.adam(3e-4))
