"""JAXopt: optimization with differentiable solvers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def logistic_lbfgs() -> Program:
    """Logistic regression by L-BFGS."""
    import jaxopt

    def loss(w, x, y):
        return jnp.mean(jnp.logaddexp(0.0, -y * (x @ w))) + 0.01 * jnp.sum(w**2)

    def fit(w, x, y):
        return jaxopt.LBFGS(fun=loss, maxiter=10).run(w, x, y).params

    x = jax.random.normal(jax.random.key(0), (256, 32))
    return fit, (jnp.zeros(32), x, jnp.sign(x[:, 0] + 0.1))


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


def sparse_projected() -> Program:
    """Projected gradients on the simplex, and a lasso by proximal gradients."""
    import jaxopt

    def fun(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    def fit(x, y):
        start = jnp.full(x.shape[1], 1.0 / x.shape[1])
        simplex = jaxopt.ProjectedGradient(
            fun, jaxopt.projection.projection_simplex, maxiter=20, stepsize=0.05
        )
        lasso = jaxopt.ProximalGradient(fun, jaxopt.prox.prox_lasso, maxiter=20, stepsize=0.05)
        a = simplex.run(start, x=x, y=y).params
        return a, lasso.run(start, hyperparams_prox=0.01, x=x, y=y).params

    x = jax.random.normal(jax.random.key(0), (128, 32))
    return fit, (x, x[:, 0])
