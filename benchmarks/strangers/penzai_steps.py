"""Penzai: named axes, variables bound to models, rewritten models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

from . import Step


def _language_model(model: Any, tokens: jax.Array) -> jax.Array:
    named = pz.nx.wrap(tokens).tag("batch", "seq")
    inputs, labels = named[{"seq": pz.slice[:-1]}], named[{"seq": pz.slice[1:]}]
    chances = pz.nx.nmap(jax.nn.log_softmax)(model(inputs).untag("vocabulary"))
    taken = pz.nx.nmap(lambda c, i: c[i])(chances, labels)
    return -taken.unwrap("batch", "seq").mean()


def _step(build: Any, tx: optax.GradientTransformation, n: int, length: int, words: int) -> Step:
    static: list[Any] = []

    def arguments():
        model = build()
        free, variables = pz.unbind_variables(model, freeze=True)
        trained = [v for v in variables if v.metadata.get("trainable", True)]
        frozen = [v for v in variables if not v.metadata.get("trainable", True)]
        constants, static[:] = jax.tree.flatten(free)[0], [jax.tree.structure(free)]
        tokens = jax.random.randint(jax.random.key(8), (n, length + 1), 0, words)
        return (tuple(trained), tx.init(tuple(trained))), (constants, tuple(frozen)), tokens

    def step(state, fixed, tokens):
        params, moments = state
        free = jax.tree.unflatten(static[0], fixed[0])

        def loss(params):
            return _language_model(pz.bind_variables(free, params + fixed[1]), tokens)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return Step(step, arguments)


def gemma(small: bool = False) -> Step:
    """A small Gemma: grouped heads, sliding windows in turn, soft caps, tied logits; AdamW."""
    n, length, words = (8, 16, 64) if small else (32, 2048, 32_000)
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2 if small else 4,
        query_head_multiplier=2,
        embedding_dim=16 if small else 1024,
        projection_dim=8 if small else 128,
        mlp_hidden_dim=32 if small else 4096,
        num_decoder_blocks=2 if small else 8,
        vocab_size=words,
        mlp_variant="geglu_approx",
        tie_embedder_and_logits=True,
        attention_type=(
            llamalike_common.AttentionTypeSlidingWindowCausal(4 if small else 1024),
            llamalike_common.AttentionTypeGlobalCausal(),
        ),
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        activation_dtype=jnp.bfloat16,
    )

    def build():
        return llamalike_common.build_llamalike_transformer(config, jax.random.key(0))

    return _step(build, optax.adamw(1e-4), n, length, words)
