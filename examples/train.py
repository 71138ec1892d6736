"""A training loop under a plan, on eight simulated devices (or on those that there are).

python examples/train.py
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import tapestry_egg as te

Weights = dict[str, jax.Array]


def init(key: jax.Array) -> Weights:
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (64, 256)) / 8,
        "down": jax.random.normal(down, (256, 64)) / 16,
    }


def loss(w: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - y) ** 2)


def train_step(w: Weights, x: jax.Array, y: jax.Array) -> tuple[Weights, jax.Array]:
    value, grads = jax.value_and_grad(loss)(w, x, y)
    return jax.tree.map(lambda p, g: p - 0.5 * g, w, grads), value


def main() -> None:
    mesh = jax.make_mesh((len(jax.devices()) // 2, 2), ("data", "model"))
    step = te.jit(train_step, mesh=mesh, donate_argnums=0)
    x = jax.random.normal(jax.random.key(1), (128, 64))
    shapes = jax.eval_shape(init, jax.random.key(0))
    # Parameters are born where the plan has them: no device ever holds all of them.
    (where, *_), _ = step.compiled(shapes, x, x).input_shardings
    w = jax.jit(init, out_shardings=where)(jax.random.key(0))
    for number in range(20):
        w, value = step(w, x, x)
        print(number, float(value))
    print(step.plan(w, x, x).explain())


if __name__ == "__main__":
    main()
