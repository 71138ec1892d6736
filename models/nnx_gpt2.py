"""GPT-2 in Flax NNX, as its users write it: modules, dropout from a random stream, AdamW.

The state of the random stream is part of the model, so every step draws other masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

State = tuple["GPT", optax.OptState]

OPTIMIZER = optax.adamw(learning_rate=3e-3, weight_decay=0.01)


class Attention(nnx.Module):
    """Causal multi-head self-attention with dropout on what it adds to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key = nnx.Linear(width, width, rngs=rngs)
        self.value = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, sequence, width = x.shape
        shape = batch, sequence, self.heads, width // self.heads
        q, k, v = (f(x).reshape(shape) for f in (self.query, self.key, self.value))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.reshape(x.shape)))


class Block(nnx.Module):
    """A pre-layernorm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(width, heads, dropout, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class GPT(nnx.Module):
    """Tokens `[batch, sequence]` to logits `[batch, sequence, vocabulary]`; the head is tied."""

    def __init__(
        self,
        vocabulary: int = 64,
        sequence: int = 16,
        width: int = 32,
        heads: int = 8,
        layers: int = 2,
        dropout: float = 0.1,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Embed(sequence, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.List(Block(width, heads, dropout, rngs=rngs) for _ in range(layers))
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def forward(model: GPT, tokens: jax.Array) -> jax.Array:
    """Logits without dropout."""
    model.eval()
    return model(tokens)


def step(state: State, tokens: jax.Array, targets: jax.Array) -> tuple[State, jax.Array]:
    """Take one AdamW step; return the new model and optimizer state, and the loss before."""
    model, opt_state = state
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: nnx.State) -> tuple[jax.Array, nnx.State]:
        model = nnx.merge(graphdef, params, rest, copy=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets)
        return jnp.mean(losses), nnx.state(model, nnx.Not(nnx.Param))

    (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return (nnx.merge(graphdef, params, rest), opt_state), value


def text(batch: int, sequence: int, vocabulary: int) -> tuple[jax.Array, jax.Array]:
    """Return tokens and the tokens that follow them, each `i32[batch, sequence]`; rows count up."""
    start = np.random.default_rng(0).integers(0, vocabulary, (batch, 1))
    rows = ((start + np.arange(sequence + 1)) % vocabulary).astype(np.int32)
    return jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, 1:])


def example(
    batch: int = 8, sequence: int = 16, vocabulary: int = 64, **sizes: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: state and two `i32[batch, sequence]`."""
    model = GPT(vocabulary, sequence, rngs=nnx.Rngs(0), **sizes)
    state = model, OPTIMIZER.init(nnx.state(model, nnx.Param))
    return step, (state, *text(batch, sequence, vocabulary))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: the model and `i32[batch, sequence]`."""
    _, ((model, _), tokens, _) = example()
    return model, tokens
