"""Brax: rigid bodies inside train steps, and its own agents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from . import Step


def analytic_policy(small: bool = False) -> Step:
    """A policy by gradients through a rollout of the physics, checkpointed step by step."""
    from brax import envs

    n, length, width = (4, 3, 16) if small else (1024, 32, 512)
    env = envs.get_environment("inverted_pendulum", backend="spring")
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    sizes = (env.observation_size, width, width, env.action_size)

    def arguments():
        keys = jax.random.split(jax.random.key(0), 4)
        params = [
            {"w": jax.random.normal(k, (a, b)) / jnp.sqrt(a), "b": jnp.zeros(b)}
            for k, a, b in zip(keys, sizes, sizes[1:], strict=False)
        ]
        started = jax.vmap(env.reset)(jax.random.split(jax.random.PRNGKey(1), n))
        return (params, tx.init(params)), started

    def step(state, started):
        params, moments = state

        def loss(params):
            @jax.checkpoint
            def one(world, _):
                h = world.obs
                for p in params[:-1]:
                    h = jax.nn.elu(h @ p["w"] + p["b"])
                action = jnp.tanh(h @ params[-1]["w"] + params[-1]["b"])
                world = jax.vmap(env.step)(world, action)
                return world, world.reward.mean() - (world.obs**2).mean()

            _, rewards = jax.lax.scan(one, started, None, length)
            return -rewards.mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = tx.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    return Step(step, arguments)


def ppo_ant(small: bool = False) -> Step:
    """Ants walk for some steps, then Brax's own PPO loss on what was seen, statistics kept."""
    from brax import envs
    from brax.training import acting, types
    from brax.training.acme import running_statistics
    from brax.training.agents.ppo import losses, networks

    n, length = (4, 3) if small else (2048, 16)
    env = envs.training.wrap(envs.get_environment("ant", backend="positional"), 1000)
    made = networks.make_ppo_networks(
        env.observation_size, env.action_size, running_statistics.normalize
    )
    policy_of = networks.make_inference_fn(made)
    tx = optax.adam(3e-4)

    def arguments():
        keys = jax.random.split(jax.random.PRNGKey(0), 2)
        params = losses.PPONetworkParams(
            policy=made.policy_network.init(keys[0]), value=made.value_network.init(keys[1])
        )
        size = jax.ShapeDtypeStruct((env.observation_size,), jnp.float32)
        normal = running_statistics.init_state(size)
        world = env.reset(jax.random.split(jax.random.PRNGKey(1), n))
        return (params, normal, tx.init(params), world), jax.random.PRNGKey(2)

    def step(state, key):
        params, normal, moments, world = state
        walk, learn = jax.random.split(key)
        policy = policy_of((normal, params.policy, params.value))
        world, data = acting.generate_unroll(
            env, world, policy, walk, length, extra_fields=("truncation",)
        )
        data: types.Transition = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), data)
        normal = running_statistics.update(normal, data.observation)

        def loss(params):
            return losses.compute_ppo_loss(params, normal, data, learn, made, discounting=0.97)

        (value, told), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = tx.update(grads, moments)
        return (optax.apply_updates(params, updates), normal, moments, world), (value, told)

    return Step(step, arguments)


def evolution(small: bool = False) -> Step:
    """Evolution strategies: mirrored noise on a policy, rollouts of all, ranked rewards."""
    from brax import envs

    n, length, width = (8, 3, 8) if small else (4096, 64, 64)
    env = envs.get_environment("hopper", backend="spring")
    tx = optax.adam(1e-2)
    seen, acts = env.observation_size, env.action_size

    def arguments():
        a, b = jax.random.split(jax.random.key(0))
        params = {
            "a": jax.random.normal(a, (seen, width)) / seen**0.5,
            "b": jax.random.normal(b, (width, acts)) / width**0.5,
        }
        return (params, tx.init(params)), jax.random.key(1)

    def step(state, key):
        params, moments = state
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        noise = [
            jax.random.normal(k, (n // 2, *p.shape)) for k, p in zip(keys, leaves, strict=True)
        ]
        both = [jnp.concatenate([e, -e]) for e in noise]
        tried = tree.unflatten([p + 0.02 * e for p, e in zip(leaves, both, strict=True)])
        started = env.reset(jax.random.PRNGKey(0))

        def reward(p):
            def one(world, _):
                action = jnp.tanh(jnp.tanh(world.obs @ p["a"]) @ p["b"])
                world = env.step(world, action)
                return world, world.reward

            return jax.lax.scan(one, started, None, length)[1].sum()

        rewards = jax.vmap(reward)(tried)
        ranks = jnp.argsort(jnp.argsort(rewards)) / (n - 1.0) - 0.5
        grads = tree.unflatten([-jnp.tensordot(ranks, e, 1) / (0.02 * n) for e in both])
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), rewards.mean()

    return Step(step, arguments)
