"""Keras, Transformers, Penzai, FlowJAX, Dynamax, Objax: models of further libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from . import Program


def keras_cnn() -> Program:
    """A convolutional classifier, stateless, as JAX training loops call it."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )

    def forward(trainable, rest, x):
        return model.stateless_call(trainable, rest, x, training=True)

    trainable = [v.value for v in model.trainable_variables]
    rest = [v.value for v in model.non_trainable_variables]
    return forward, (trainable, rest, jax.random.normal(jax.random.key(0), (32, 28, 28, 1)))


def keras_transformer_step() -> Program:
    """A train step of a Keras attention model with a Keras optimizer."""
    import keras

    keras.utils.set_random_seed(0)
    x_in = keras.Input((32,), dtype="int32")
    h = keras.layers.Embedding(200, 64)(x_in)
    h = h + keras.layers.MultiHeadAttention(4, 16)(h, h)
    h = keras.layers.LayerNormalization()(h)
    h = keras.layers.Dense(64, activation="gelu")(h)
    model = keras.Model(x_in, keras.layers.Dense(200)(h))
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(trainable, rest, state, x, y):
        def loss(trainable):
            logits, updated = model.stateless_call(trainable, rest, x, training=True)
            return loss_fn(y, logits), updated

        (value, rest_new), grads = jax.value_and_grad(loss, has_aux=True)(trainable)
        trainable_new, state = optimizer.stateless_apply(state, grads, trainable)
        return value, trainable_new, rest_new, state

    x = jax.random.randint(jax.random.key(0), (16, 32), 0, 200)
    arrays = [
        [v.value for v in vs]
        for vs in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    return step, (*arrays, x, x)


def keras_lstm() -> Program:
    """A bidirectional recurrent network."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((24, 16)),
            keras.layers.Bidirectional(keras.layers.LSTM(32, return_sequences=True)),
            keras.layers.GRU(32),
            keras.layers.Dense(4),
        ]
    )

    def forward(trainable, rest, x):
        return model.stateless_call(trainable, rest, x)[0]

    trainable = [v.value for v in model.trainable_variables]
    rest = [v.value for v in model.non_trainable_variables]
    return forward, (trainable, rest, jax.random.normal(jax.random.key(0), (32, 24, 16)))


def transformers_gpt2() -> Program:
    """The logits of a small GPT-2."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    model = FlaxGPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4), seed=0
    )

    def forward(params, tokens):
        return model(tokens, params=params).logits

    return forward, (model.params, jnp.asarray(np.arange(4 * 48).reshape(4, 48) % 512))


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


def penzai_mlp() -> Program:
    """A network with named axes."""
    from penzai import pz

    model = pz.nn.Sequential(
        [
            pz.nn.Linear.from_config(
                name="first",
                init_base_rng=jax.random.key(0),
                input_axes={"features": 32},
                output_axes={"hidden": 64},
            ),
            pz.nn.Elementwise(jax.nn.gelu),
            pz.nn.LayerNorm.from_config(
                name="norm", init_base_rng=jax.random.key(1), across_axes={"hidden": 64}
            ),
            pz.nn.Linear.from_config(
                name="last",
                init_base_rng=jax.random.key(2),
                input_axes={"hidden": 64},
                output_axes={"features": 8},
            ),
        ]
    )
    model, params = pz.unbind_params(model, freeze=True)

    def forward(params, x):
        bound = pz.bind_variables(model, params)
        out = bound(pz.nx.wrap(x).tag("batch", "features"))
        return out.untag("batch", "features").unwrap()

    return forward, (params, jax.random.normal(jax.random.key(3), (64, 32)))


def penzai_transformer() -> Program:
    """A decoder of Penzai's own, on a batch of tokens."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as common

    config = common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=64,
        projection_dim=16,
        mlp_hidden_dim=128,
        num_decoder_blocks=2,
        vocab_size=256,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    model = common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))
    model, params = pz.unbind_params(model, freeze=True)

    def forward(params, tokens):
        bound = pz.bind_variables(model, params)
        named = pz.nx.wrap(tokens).tag("batch", "seq")
        positions = pz.nx.arange("seq", tokens.shape[1])
        out = bound(named, token_positions=positions)
        return out.untag("batch", "seq", "vocabulary").unwrap()

    return forward, (params, jnp.arange(4 * 32).reshape(4, 32) % 256)


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


def dynamax_hmm() -> Program:
    """A step of expectation maximization for a Gaussian hidden Markov model."""
    from dynamax.hidden_markov_model import GaussianHMM

    model = GaussianHMM(num_states=4, emission_dim=2)
    params, _ = model.initialize(jax.random.PRNGKey(0))

    def expectation(params, series):
        return jax.vmap(lambda y: model.e_step(params, y)[1])(series)

    return expectation, (params, jax.random.normal(jax.random.key(1), (8, 40, 2)))
