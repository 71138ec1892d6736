"""Transformers, FlowJAX, Dynamax: models of further libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from . import Program


def transformers_bert_step() -> Program:
    """Gradients of a small BERT classifier with dropout."""
    import optax
    from transformers import BertConfig, FlaxBertForSequenceClassification

    model = FlaxBertForSequenceClassification(
        BertConfig(
            vocab_size=512,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
        ),
        seed=0,
    )

    def loss(params, tokens, y, key):
        logits = model(tokens, params=params, dropout_rng=key, train=True).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    tokens = jnp.asarray(np.arange(8 * 32).reshape(8, 32) % 512)
    return jax.value_and_grad(loss), (model.params, tokens, jnp.arange(8) % 2, jax.random.key(0))


def flowjax_autoregressive() -> Program:
    """The log-density of a masked autoregressive flow, and its gradient."""
    import equinox as eqx
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    flow = masked_autoregressive_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(4)), flow_layers=2, nn_width=32
    )
    params, static = eqx.partition(flow, eqx.is_inexact_array)

    def loss(params, x):
        return -jnp.mean(eqx.combine(params, static).log_prob(x))

    return jax.value_and_grad(loss), (params, jax.random.normal(jax.random.key(1), (128, 4)))


def dynamax_kalman() -> Program:
    """The smoother of a linear Gaussian state-space model, for many series."""
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    model = LinearGaussianSSM(state_dim=4, emission_dim=2)
    params, _ = model.initialize(jax.random.PRNGKey(0))

    def smooth(params, series):
        found = jax.vmap(lambda y: model.smoother(params, y))(series)
        return found.smoothed_means, found.marginal_loglik

    return smooth, (params, jax.random.normal(jax.random.key(1), (16, 32, 2)))
