"""Low-rank adapters on a frozen GPT-2 in Flax NNX: only the adapters get gradients and AdamW state.

LoRA (Hu et al., 2021): beside the frozen kernels of queries and values stand products of two
narrow matrices, the second zero at first, so that finetuning starts from the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .nnx_gpt2 import GPT, forward, text

State = tuple[GPT, optax.OptState]

OPTIMIZER = optax.adamw(learning_rate=1e-2)

__all__ = ["adapt", "example", "forward", "forward_args", "step"]


def adapt(model: GPT, rank: int, *, rngs: nnx.Rngs) -> GPT:
    """Put adapters of the given rank beside the query and value kernels of every block."""

    def adapted(linear: nnx.Linear) -> nnx.LoRA:
        n, m = linear.in_features, linear.out_features
        return nnx.LoRA(n, rank, m, base_module=linear, rngs=rngs)

    for block in model.blocks:
        block.attention.query = adapted(block.attention.query)
        block.attention.value = adapted(block.attention.value)
    return model


def step(state: State, tokens: jax.Array, targets: jax.Array) -> tuple[State, jax.Array]:
    """Take one AdamW step of the adapters; return model and optimizer state, and the loss."""
    model, opt_state = state
    graphdef, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)

    def loss(adapters: nnx.State) -> jax.Array:
        model = nnx.merge(graphdef, adapters, frozen, copy=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(forward(model, tokens), targets)
        return jnp.mean(losses)

    value, grads = jax.value_and_grad(loss)(adapters)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, adapters)
    adapters = optax.apply_updates(adapters, updates)
    return (nnx.merge(graphdef, adapters, frozen), opt_state), value


def example(
    batch: int = 8, sequence: int = 16, vocabulary: int = 64, rank: int = 4, **sizes: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: state and two `i32[batch, sequence]`."""
    rngs = nnx.Rngs(0)
    model = adapt(GPT(vocabulary, sequence, rngs=rngs, **sizes), rank, rngs=rngs)
    state = model, OPTIMIZER.init(nnx.state(model, nnx.LoRAParam))
    return step, (state, *text(batch, sequence, vocabulary))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: the adapted model and `i32[batch, sequence]`."""
    _, ((model, _), tokens, _) = example()
    return model, tokens
