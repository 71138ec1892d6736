"""Losses over a vocabulary as people write them: of x[b, t, d], w[d, v] and labels s32[b, t]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tapestry_egg.graph.blockgraph import BlockGraph

Array = Any
Loss = Callable[[Array, Array, Array], Array]


def wide(x: Array, w: Array) -> Array:
    """Logits made in the operands' dtype, and read in float32."""
    return (x @ w).astype(jnp.float32)


def of_label(scores: Array, labels: Array) -> Array:
    return jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]


def integers(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def one_hot(logits: Array, labels: Array) -> Array:
    return jax.nn.one_hot(labels, logits.shape[-1])


def normalised(x: Array, w: Array, labels: Array) -> Array:
    return -of_label(jax.nn.log_softmax(wide(x, w)), labels).mean()


def summed(x: Array, w: Array, labels: Array) -> Array:
    logits = wide(x, w)
    return -(jax.nn.log_softmax(logits) * one_hot(logits, labels)).sum(-1).mean()


def accumulated(x: Array, w: Array, labels: Array) -> Array:
    """Products whose sums leave them in float32."""
    logits = jnp.einsum("btd,dv->btv", x, w, preferred_element_type=jnp.float32)
    return integers(logits, labels).mean()


def smoothed(x: Array, w: Array, labels: Array) -> Array:
    logits = wide(x, w)
    targets = optax.smooth_labels(one_hot(logits, labels), 0.1)
    return optax.softmax_cross_entropy(logits, targets).mean()


def smoothed_by_hand(x: Array, w: Array, labels: Array) -> Array:
    scores = jax.nn.log_softmax(wide(x, w))
    return -(0.9 * of_label(scores, labels) + 0.1 * scores.mean(-1)).mean()


def with_z_loss(x: Array, w: Array, labels: Array) -> Array:
    logits = wide(x, w)
    total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.mean(total - of_label(logits, labels)) + 1e-4 * jnp.mean(total**2)


def mean_of_some(x: Array, w: Array, labels: Array) -> Array:
    counts = labels > 2
    each = integers(wide(x, w), jnp.where(counts, labels, 0))
    return (each * counts).sum() / counts.sum()


def biased(x: Array, w: Array, labels: Array) -> Array:
    return integers((x @ w + jnp.sin(w[0])).astype(jnp.float32), labels).mean()


def capped(x: Array, w: Array, labels: Array) -> Array:
    return integers(30.0 * jnp.tanh(wide(x, w) / 30.0), labels).mean()


def capped_before(x: Array, w: Array, labels: Array) -> Array:
    return integers((30.0 * jnp.tanh((x @ w) / 30.0)).astype(jnp.float32), labels).mean()


def next_tokens(x: Array, w: Array, labels: Array) -> Array:
    """Each token predicts the next one."""
    return integers(wide(x, w)[:, :-1], labels[:, 1:]).mean()


def narrow(x: Array, w: Array, labels: Array) -> Array:
    return integers(x @ w, labels).mean()


def of_float32_weights(x: Array, w: Array, labels: Array) -> Array:
    return integers(wide(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)), labels).mean()


def tied(x: Array, w: Array, labels: Array) -> Array:
    """The table of embeddings, [v, d], transposed."""
    return integers(wide(x, w.T), labels).mean()


LOSSES: Mapping[str, Loss] = {
    f.__name__: f
    for f in (
        normalised,
        summed,
        accumulated,
        smoothed,
        smoothed_by_hand,
        with_z_loss,
        mean_of_some,
        biased,
        capped,
        capped_before,
        next_tokens,
        narrow,
        of_float32_weights,
        tied,
    )
}


def step(loss: Loss) -> Any:
    """The loss and its gradients."""
    return jax.value_and_grad(loss, (0, 1))


def largest(graph: BlockGraph) -> int:
    """Elements of the largest value that is made, in bodies too."""
    mine = [graph.values[v].size for op in graph.operations for v in op.outputs]
    return max([0, *mine, *(largest(r) for op in graph.operations for r in op.regions)])


def arguments(
    loss: Loss, dtype: Any, tokens: int, width: int, words: int, batch: int = 4
) -> list[jax.ShapeDtypeStruct]:
    """Types of what the loss is of: `tokens` in each of `batch` rows."""
    of_weights = (words, width) if loss is tied else (width, words)
    dtype = jnp.float32 if loss is of_float32_weights else dtype
    return [
        jax.ShapeDtypeStruct((batch, tokens, width), dtype),
        jax.ShapeDtypeStruct(of_weights, dtype),
        jax.ShapeDtypeStruct((batch, tokens), jnp.int32),
    ]
