"""The front of a train step on eight H100s, and why one of its weights lies as it does.

python examples/front.py [WORK]
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

import tapestry_egg as te

Weights = dict[str, jax.Array]


def loss(w: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - y) ** 2)


def train_step(w: Weights, x: jax.Array, y: jax.Array) -> Weights:
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x, y))


def main(work: float = 90.0) -> None:
    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    w = {"up": f32(1024, 4096), "down": f32(4096, 1024)}
    program = te.trace(train_step, w, f32(8192, 1024), f32(8192, 1024), donate_argnums=0)
    front = te.optimize(program, "h100:8", settings=te.Settings(work=work))
    print(front)
    print(front.best().tensor("[0]['up']"))
    answer = front.why_not({"[0]['up']": ("x", None)}, settings=te.Settings(work=1, front=False))
    print(answer)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
