"""A residual network in Flax NNX: strided and padded convolutions, batch norm, overlapping pooling.

Modules are pytrees, so the model is an argument and a result like any other; running statistics
leave a step with the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

State = tuple["ResNet", optax.OptState]

OPTIMIZER = optax.sgd(learning_rate=0.05, momentum=0.9, nesterov=True)


class Block(nnx.Module):
    """Two convolutions around a shortcut, which is a convolution too where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs) -> None:
        def conv(n: int, size: int, stride: int) -> nnx.Conv:
            window, strides = (size, size), (stride, stride)
            return nnx.Conv(n, outputs, window, strides, use_bias=False, rngs=rngs)

        self.conv1, self.norm1 = conv(inputs, 3, stride), nnx.BatchNorm(outputs, rngs=rngs)
        self.conv2, self.norm2 = conv(outputs, 3, 1), nnx.BatchNorm(outputs, rngs=rngs)
        changes = stride != 1 or inputs != outputs
        self.shortcut = conv(inputs, 1, stride) if changes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    """Images `[batch, height, width, 3]` to logits `[batch, classes]`."""

    def __init__(
        self, widths: tuple[int, ...] = (8, 16), classes: int = 10, *, rngs: nnx.Rngs
    ) -> None:
        self.stem = nnx.Conv(
            3, widths[0], (7, 7), (2, 2), padding=[(3, 3), (3, 3)], use_bias=False, rngs=rngs
        )
        self.norm = nnx.BatchNorm(widths[0], rngs=rngs)
        ins = (widths[0], *widths)
        self.blocks = nnx.List(
            Block(ins[i], width, 1 if i == 0 else 2, rngs=rngs) for i, width in enumerate(widths)
        )
        self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(images)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


def forward(model: ResNet, images: jax.Array) -> jax.Array:
    """Logits by the running statistics."""
    model.eval()
    return model(images)


def step(state: State, images: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
    """Take one step with momentum; return the new model and optimizer state, and the loss."""
    model, opt_state = state
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: nnx.State) -> tuple[jax.Array, nnx.State]:
        model = nnx.merge(graphdef, params, rest, copy=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return jnp.mean(losses), nnx.state(model, nnx.Not(nnx.Param))

    (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return (nnx.merge(graphdef, params, rest), opt_state), value


def example(batch: int = 16, size: int = 32) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: state, `f32[batch, size, size, 3]`, `i32[batch]`."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, batch).astype(np.int32)
    images = rng.normal(size=(batch, size, size, 3)) + labels[:, None, None, None] / 10
    model = ResNet(rngs=nnx.Rngs(0))
    state = model, OPTIMIZER.init(nnx.state(model, nnx.Param))
    return step, (state, jnp.asarray(images, jnp.float32), jnp.asarray(labels))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: the model and images."""
    _, ((model, _), images, _) = example()
    return model, images
