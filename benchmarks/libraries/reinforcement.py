"""Gymnax, Pgx, Mctx, RLax, Evosax: environments, planning, evolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def gymnax_minatar() -> Program:
    """A step of many Breakout games."""
    import gymnax

    env, params = gymnax.make("Breakout-MinAtar")
    keys = jax.random.split(jax.random.key(0), 32)
    _, state = jax.vmap(env.reset, (0, None))(keys, params)

    def step(keys, state, actions):
        return jax.vmap(env.step, (0, 0, 0, None))(keys, state, actions, params)

    return step, (keys, state, jnp.arange(32) % 3)


def pgx_go() -> Program:
    """A move in many games of Go on a small board."""
    import pgx

    env = pgx.make("go_9x9")
    state = jax.jit(jax.vmap(env.init))(jax.random.split(jax.random.PRNGKey(0), 16))
    return jax.vmap(env.step), (state, jnp.arange(16) * 3)


def mctx_gumbel() -> Program:
    """Gumbel MuZero with a small network."""
    import mctx

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "policy": 0.1 * jax.random.normal(keys[0], (16, 4)),
        "value": 0.1 * jax.random.normal(keys[1], (16,)),
        "next": 0.3 * jax.random.normal(keys[2], (20, 16)),
    }

    def recurrent(params, key, action, embedding):
        h = jnp.concatenate([embedding, jax.nn.one_hot(action, 4)], -1) @ params["next"]
        h = jnp.tanh(h)
        out = mctx.RecurrentFnOutput(
            reward=h[:, 0],
            discount=jnp.full(h.shape[0], 0.99),
            prior_logits=h @ params["policy"],
            value=h @ params["value"],
        )
        return out, h

    def search(params, key, x):
        root = mctx.RootFnOutput(
            prior_logits=x @ params["policy"], value=x @ params["value"], embedding=x
        )
        found = mctx.gumbel_muzero_policy(params, key, root, recurrent, num_simulations=8)
        return found.action, found.action_weights

    x = jax.random.normal(jax.random.key(1), (32, 16))
    return search, (params, jax.random.PRNGKey(2), x)


def rlax_losses() -> Program:
    """V-trace, lambda returns and a distributional loss over a batch."""
    import rlax

    def loss(values, rewards, discounts, ratios, logits):
        trace = jax.vmap(rlax.vtrace_td_error_and_advantage)(
            values[:, :-1], values[:, 1:], rewards, discounts, ratios
        )
        returns = jax.vmap(rlax.lambda_returns, (0, 0, 0, None))(
            rewards, discounts, values[:, 1:], 0.9
        )
        entropy = jax.vmap(rlax.entropy_loss)(logits, jnp.ones(rewards.shape))
        errors = returns - values[:, :-1]
        return jnp.mean(trace.errors**2) + jnp.mean(rlax.huber_loss(errors)) + jnp.mean(entropy)

    keys = jax.random.split(jax.random.key(0), 4)
    values = jax.random.normal(keys[0], (32, 21))
    rewards = jax.random.normal(keys[1], (32, 20))
    ratios = jnp.exp(0.1 * jax.random.normal(keys[2], (32, 20)))
    logits = jax.random.normal(keys[3], (32, 20, 6))
    args = (values, rewards, jnp.full((32, 20), 0.99), ratios, logits)
    return jax.value_and_grad(loss), args


def evosax_cma() -> Program:
    """A generation of the covariance matrix adaptation strategy."""
    from evosax.algorithms import CMA_ES

    es = CMA_ES(population_size=32, solution=jnp.zeros(16))
    params = es.default_params
    state = es.init(jax.random.PRNGKey(0), jnp.zeros(16), params)

    def generation(key, state):
        population, state = es.ask(key, state, params)
        fitness = jnp.sum((population - 1.0) ** 2, -1)
        state, _ = es.tell(key, population, fitness, state, params)
        return state, fitness

    return generation, (jax.random.PRNGKey(1), state)
