"""JAXopt: optimization with differentiable solvers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def ridge_hypergradient() -> Program:
    """The gradient of a validation loss with respect to the regularization."""
    import jaxopt

    def inner(w, strength, x, y):
        return jnp.mean((x @ w - y) ** 2) + strength * jnp.sum(w**2)

    def outer(strength, x, y, x2, y2):
        solver = jaxopt.GradientDescent(fun=inner, maxiter=50, stepsize=0.05, acceleration=False)
        w = solver.run(jnp.zeros(x.shape[1]), strength, x, y).params
        return jnp.mean((x2 @ w - y2) ** 2)

    x, x2 = jax.random.normal(jax.random.key(0), (2, 128, 16))
    w = jnp.linspace(-1.0, 1.0, 16)
    return jax.value_and_grad(outer), (0.1, x, x @ w, x2, x2 @ w)
