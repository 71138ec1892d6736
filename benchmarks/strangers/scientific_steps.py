"""Solvers and distributions inside train steps: distrax, lineax, optimistix."""

from __future__ import annotations

import distrax
import jax
import jax.numpy as jnp
import lineax
import optax
import optimistix

from . import Step, by_optax


def spline_flow(small: bool = False) -> Step:
    """Masked couplings of rational-quadratic splines, as distrax composes them."""
    n, dims, width, bins, layers = (16, 4, 16, 4, 2) if small else (32_768, 32, 256, 8, 8)
    each = 3 * bins + 1

    def build():
        keys = jax.random.split(jax.random.key(0), 2 * layers)
        return [
            {
                "a": jax.random.normal(keys[2 * i], (dims, width)) / dims**0.5,
                "b": 1e-3 * jax.random.normal(keys[2 * i + 1], (width, dims * each)),
            }
            for i in range(layers)
        ]

    def loss(params, x):
        mask = jnp.arange(dims) % 2 == 0
        couplings = []
        for p in params:

            def conditioner(x, a=p["a"], b=p["b"]):
                return (jnp.tanh(x @ a) @ b).reshape(*x.shape, each)

            def bijector(knots):
                return distrax.RationalQuadraticSpline(knots, -4.0, 4.0, boundary_slopes="identity")

            couplings.append(distrax.MaskedCoupling(mask, conditioner, bijector))
            mask = ~mask
        flow = distrax.Inverse(distrax.Chain(couplings))
        base = distrax.MultivariateNormalDiag(jnp.zeros(dims), jnp.ones(dims))
        return -distrax.Transformed(base, flow).log_prob(x).mean()

    def data():
        return (jax.random.normal(jax.random.key(1), (n, dims)),)

    return by_optax(optax.adam(1e-3), build, data, loss)


def mixture_density(small: bool = False) -> Step:
    """A network whose outputs are mixtures of Gaussians with full covariances; Adan."""
    n, width, parts, dims = (16, 16, 3, 2) if small else (65_536, 1024, 16, 4)
    each = 1 + dims + dims * (dims + 1) // 2

    def build():
        a, b, c = jax.random.split(jax.random.key(0), 3)
        return {
            "a": jax.random.normal(a, (8, width)) / 3,
            "b": jax.random.normal(b, (width, width)) / width**0.5,
            "c": jax.random.normal(c, (width, parts * each)) / width**0.5,
        }

    def loss(params, x, y):
        h = jax.nn.relu(jax.nn.relu(x @ params["a"]) @ params["b"])
        out = (h @ params["c"]).reshape(n, parts, each)
        share, mean, rest = jnp.split(out, [1, 1 + dims], -1)
        rows, columns = jnp.tril_indices(dims)
        factor = jnp.zeros((n, parts, dims, dims)).at[..., rows, columns].set(rest)
        diagonal = jax.nn.softplus(jnp.diagonal(factor, axis1=-2, axis2=-1)) + 1e-3
        factor = jnp.tril(factor, -1) + diagonal[..., None] * jnp.eye(dims)
        mixed = distrax.MixtureSameFamily(
            distrax.Categorical(logits=share[..., 0]),
            distrax.MultivariateNormalTri(mean, factor),
        )
        return -mixed.log_prob(y).mean()

    def data():
        x, y = jax.random.split(jax.random.key(1))
        return jax.random.normal(x, (n, 8)), jax.random.normal(y, (n, dims))

    return by_optax(optax.adan(1e-3), build, data, loss)


def equilibrium(small: bool = False) -> Step:
    """A deep equilibrium network: a fixed point found by Newton, gradients by its own equation."""
    n, width = (8, 8) if small else (4096, 64)

    def build():
        a, b, c = jax.random.split(jax.random.key(0), 3)
        return {
            "u": 0.3 * jax.random.normal(a, (width, width)) / width**0.5,
            "v": jax.random.normal(b, (16, width)) / 4,
            "w": jax.random.normal(c, (width, 10)) / width**0.5,
        }

    def loss(params, x, labels):
        def one(x):
            def cell(z, args):
                return jnp.tanh(z @ args["u"] + x @ args["v"])

            solver = optimistix.FixedPointIteration(1e-4, 1e-4)
            found = optimistix.fixed_point(
                cell, solver, jnp.zeros(width), params, max_steps=32, throw=False
            )
            return found.value @ params["w"]

        logits = jax.vmap(one)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def data():
        x = jax.random.normal(jax.random.key(1), (n, 16))
        return x, jax.random.randint(jax.random.key(2), (n,), 0, 10)

    return by_optax(optax.adamw(1e-3), build, data, loss)


def gauss_newton(small: bool = False) -> Step:
    """A natural-gradient step: conjugate gradients on curvature products of a network."""
    n, sizes = (16, (8, 16, 4)) if small else (32_768, (256, 1024, 1024, 64))

    def build():
        keys = jax.random.split(jax.random.key(0), len(sizes))
        return [
            jax.random.normal(k, (a, b)) / a**0.5
            for k, a, b in zip(keys, sizes, sizes[1:], strict=False)
        ]

    def arguments():
        x, y = jax.random.split(jax.random.key(1))
        data = jax.random.normal(x, (n, sizes[0])), jax.random.normal(y, (n, sizes[-1]))
        return build(), *data

    def step(params, x, y):
        def run(params):
            h = x
            for w in params[:-1]:
                h = jnp.tanh(h @ w)
            return h @ params[-1]

        def loss(params):
            return ((run(params) - y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)

        def curved(v):
            _, along = jax.jvp(run, (params,), (v,))
            _, back = jax.vjp(run, params)
            (product,) = back(2 * along / y.size)
            return jax.tree.map(lambda p, v: p + 1e-3 * v, product, v)

        operator = lineax.FunctionLinearOperator(
            curved, jax.eval_shape(lambda: params), lineax.positive_semidefinite_tag
        )
        solved = lineax.linear_solve(
            operator, grads, lineax.CG(1e-4, 1e-4, max_steps=10), throw=False
        )
        return jax.tree.map(lambda p, d: p - d, params, solved.value), value

    return Step(step, arguments)


def gaussian_process(small: bool = False) -> Step:
    """Hyperparameters of a Gaussian process by its marginal likelihood: a Cholesky factor."""
    n, dims = (16, 3) if small else (8192, 16)

    def build():
        return {"scale": jnp.zeros(dims), "height": jnp.zeros(()), "noise": jnp.float32(-2.0)}

    def loss(params, x, y):
        z = x * jnp.exp(-params["scale"])
        apart = (z**2).sum(-1)[:, None] - 2 * z @ z.T + (z**2).sum(-1)
        covariance = jnp.exp(params["height"] - 0.5 * jnp.maximum(apart, 0.0))
        covariance = covariance + jnp.exp(params["noise"]) * jnp.eye(n)
        factor = jnp.linalg.cholesky(covariance)
        half = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return 0.5 * (half**2).sum() + jnp.log(jnp.diagonal(factor)).sum()

    def data():
        x = jax.random.normal(jax.random.key(1), (n, dims))
        return x, jnp.sin(x.sum(-1))

    return by_optax(optax.adam(1e-2), build, data, loss)
