"""Brax: rigid bodies and reinforcement learning."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def ant_step() -> Program:
    """A step of many ants."""
    from brax import envs

    env = envs.get_environment("ant", backend="positional")
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), 16))
    return jax.vmap(env.step), (state, jnp.zeros((16, env.action_size)))


def pendulum_step() -> Program:
    """A step of many inverted pendulums, in generalized coordinates."""
    from brax import envs

    env = envs.get_environment("inverted_pendulum", backend="generalized")
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), 64))
    return jax.vmap(env.step), (state, jnp.zeros((64, env.action_size)))


def spring_rollout() -> Program:
    """A short rollout of a hopper by the spring backend."""
    from brax import envs

    env = envs.get_environment("hopper", backend="spring")
    state = jax.jit(env.reset)(jax.random.PRNGKey(0))

    def rollout(state, actions):
        def one(state, action):
            state = env.step(state, action)
            return state, state.reward

        return jax.lax.scan(one, state, actions)

    return rollout, (state, 0.1 * jax.random.normal(jax.random.key(1), (8, env.action_size)))


def ppo_networks() -> Program:
    """Policy and value networks of PPO on a batch of observations."""
    from brax.training.agents.ppo import networks

    made = networks.make_ppo_networks(observation_size=27, action_size=8)
    policy = made.policy_network.init(jax.random.PRNGKey(0))
    value = made.value_network.init(jax.random.PRNGKey(1))

    def act(policy, value, obs, key):
        logits = made.policy_network.apply(None, policy, obs)
        raw = made.parametric_action_distribution.sample_no_postprocessing(logits, key)
        log_prob = made.parametric_action_distribution.log_prob(logits, raw)
        return raw, log_prob, made.value_network.apply(None, value, obs)

    obs = jax.random.normal(jax.random.key(2), (512, 27))
    return act, (policy, value, obs, jax.random.key(3))
