"""NumPyro, BlackJAX, TensorFlow Probability: models and their samplers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def numpyro_potential() -> Program:
    """The potential energy of a hierarchical regression, and its gradient."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import initialize_model

    def model(x, group, y=None):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
        with numpyro.plate("groups", 16):
            a = numpyro.sample("a", dist.Normal(mu, tau))
        b = numpyro.sample("b", dist.Normal(jnp.zeros(x.shape[1]), 1.0).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a[group] + x @ b), obs=y)

    x = jax.random.normal(jax.random.key(0), (512, 8))
    group = jnp.arange(512) % 16
    y = (x[:, 0] > 0).astype(jnp.int32)
    info = initialize_model(
        jax.random.PRNGKey(1), model, model_args=(x, group, y), dynamic_args=True
    )

    def potential(z, x, group, y):
        return info.potential_fn(x, group, y)(z)

    return jax.value_and_grad(potential), (info.param_info.z, x, group, y)


def numpyro_nuts() -> Program:
    """A step of the no-U-turn sampler."""
    import numpyro.infer.hmc as hmc

    def potential(z):
        return 0.5 * jnp.sum(z**2 * jnp.linspace(0.5, 2.0, 16))

    init, kernel = hmc.hmc(potential, algo="NUTS")
    state = init(jnp.ones(16), num_warmup=0, step_size=0.1, rng_key=jax.random.PRNGKey(0))
    return kernel, (state,)


def blackjax_smc() -> Program:
    """A step of tempered sequential Monte Carlo."""
    import blackjax
    import blackjax.smc.resampling as resampling

    def prior(x):
        return -0.5 * jnp.sum(x**2)

    def likelihood(x):
        return -0.5 * jnp.sum((x - 1.0) ** 2) / 0.3

    smc = blackjax.tempered_smc(
        prior,
        likelihood,
        blackjax.hmc.build_kernel(),
        blackjax.hmc.init,
        {
            "step_size": jnp.array([0.1]),
            "inverse_mass_matrix": jnp.ones((1, 4)),
            "num_integration_steps": jnp.array([3]),
        },
        resampling.systematic,
        num_mcmc_steps=2,
    )
    particles = jax.random.normal(jax.random.key(0), (128, 4))

    def step(key, particles):
        state, _ = smc.step(key, smc.init(particles), 0.5)
        return state.particles

    return step, (jax.random.key(1), particles)


def tfp_mixture() -> Program:
    """The likelihood of a mixture of Gaussians, its gradient, and samples of a bijector."""
    import tensorflow_probability.substrates.jax as tfp

    tfd, tfb = tfp.distributions, tfp.bijectors

    def loss(logits, locs, scales, x):
        mixture = tfd.MixtureSameFamily(
            tfd.Categorical(logits=logits),
            tfd.MultivariateNormalDiag(locs, tfb.Softplus()(scales)),
        )
        return -jnp.mean(mixture.log_prob(x))

    locs = jax.random.normal(jax.random.key(0), (5, 4))
    x = jax.random.normal(jax.random.key(1), (256, 4))
    return jax.value_and_grad(loss, (0, 1, 2)), (jnp.zeros(5), locs, jnp.ones((5, 4)), x)
