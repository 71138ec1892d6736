"""Diffrax, Lineax and Optimistix: differential, linear and nonlinear equations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def diffrax_ode() -> Program:
    """An ensemble of Lotka-Volterra systems by an adaptive explicit solver."""
    import diffrax

    def field(t, y, args):
        a, b = args
        return jnp.stack([a * y[0] - b * y[0] * y[1], -a * y[1] + b * y[0] * y[1]])

    def solve(y0, args):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            0.0,
            10.0,
            0.1,
            y0,
            args=args,
            saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 10.0, 20)),
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
        ).ys

    y0 = 1.0 + jax.random.uniform(jax.random.key(0), (32, 2))
    args = (jnp.linspace(0.5, 1.5, 32), jnp.full(32, 0.7))
    return jax.vmap(solve), (y0, args)


def diffrax_neural_ode() -> Program:
    """Gradients of a neural differential equation, by a fixed step."""
    import diffrax
    import equinox as eqx

    model = eqx.nn.MLP(4, 4, 64, 2, jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)

    def loss(params, y0, y1):
        net = eqx.combine(params, static)

        def one(y):
            return diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: net(y)),
                diffrax.Heun(),
                0.0,
                1.0,
                0.1,
                y,
                max_steps=16,
            ).ys[-1]

        return jnp.mean((jax.vmap(one)(y0) - y1) ** 2)

    y0 = jax.random.normal(jax.random.key(1), (64, 4))
    return jax.value_and_grad(loss), (params, y0, -y0)


def diffrax_sde() -> Program:
    """A stochastic differential equation on a virtual Brownian tree."""
    import diffrax

    def solve(y0, key):
        noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-3, (), key)
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, y, args: -y),
            diffrax.ControlTerm(lambda t, y, args: 0.3, noise),
        )
        return diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, 0.05, y0).ys[-1]

    keys = jax.random.split(jax.random.key(0), 64)
    return jax.vmap(solve), (jnp.linspace(-1.0, 1.0, 64), keys)


def diffrax_implicit() -> Program:
    """A stiff system by an implicit solver."""
    import diffrax

    def field(t, y, args):
        x, y, z = y
        a = -0.04 * x + 1e4 * y * z
        c = 3e7 * y**2
        return jnp.stack([a, -a - c, c])

    def solve(y0):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Kvaerno3(),
            0.0,
            10.0,
            2e-4,
            y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            max_steps=4096,
        ).ys[-1]

    return solve, (jnp.array([1.0, 0.0, 0.0]),)


def lineax_solves() -> Program:
    """Batched linear systems, least squares and a conjugate gradient."""
    import lineax as lx

    def solve(a, b, c):
        general = lx.linear_solve(lx.MatrixLinearOperator(a), b).value
        least = lx.linear_solve(lx.MatrixLinearOperator(c), c[:, 0], lx.QR()).value
        positive = lx.MatrixLinearOperator(a @ a.T + jnp.eye(len(a)), lx.positive_semidefinite_tag)
        cg = lx.linear_solve(positive, b, lx.CG(rtol=1e-4, atol=1e-4)).value
        return general, least, cg

    a = jax.random.normal(jax.random.key(0), (16, 24, 24)) + 8.0 * jnp.eye(24)
    b = jax.random.normal(jax.random.key(1), (16, 24))
    c = jax.random.normal(jax.random.key(2), (16, 48, 12))
    return jax.vmap(solve), (a, b, c)


def lineax_jvp_operator() -> Program:
    """The gradient of a linear solve with a function's Jacobian."""
    import lineax as lx

    def loss(x, b):
        def f(y, args):
            return 3.0 * y + jnp.tanh(jnp.roll(y, 1)) * x

        operator = lx.JacobianLinearOperator(f, jnp.ones_like(b))
        return jnp.sum(lx.linear_solve(operator, b, lx.LU()).value ** 2)

    x = jax.random.normal(jax.random.key(0), (32,))
    return jax.grad(loss), (x, jnp.linspace(0.0, 1.0, 32))


def optimistix_least_squares() -> Program:
    """A nonlinear least-squares fit by Levenberg-Marquardt, for many data sets."""
    import optimistix as optx

    def residual(p, args):
        t, y = args
        return p[0] * jnp.exp(-p[1] * t) + p[2] - y

    def fit(y):
        solver = optx.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
        t = jnp.linspace(0.0, 2.0, 40)
        return optx.least_squares(residual, solver, jnp.ones(3), (t, y), max_steps=32).value

    t = jnp.linspace(0.0, 2.0, 40)
    scales = jnp.linspace(1.0, 2.0, 16)[:, None]
    return jax.vmap(fit), (scales * jnp.exp(-1.3 * t) + 0.1,)


def optimistix_root() -> Program:
    """A root by Newton's method, and its derivative by the implicit function theorem."""
    import optimistix as optx

    def root(a):
        def f(y, args):
            return y + 0.5 * jnp.sin(a * y) - args

        solver = optx.Newton(rtol=1e-5, atol=1e-5)
        return jnp.sum(optx.root_find(f, solver, jnp.zeros(16), jnp.linspace(0.0, 1.0, 16)).value)

    return jax.value_and_grad(root), (jnp.linspace(0.1, 0.9, 16),)
