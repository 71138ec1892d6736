"""GPT-2 and its training step: learned positions, pre-layernorm blocks, causal attention, AdamW.

Parameters are a nested dict with the layers in a list, so the program is unrolled over depth. The
number of heads, the widths and whether the head is tied are read off the parameters; nothing but
arrays reaches `step`. `pretrain` is the step that people train with: bfloat16 products of float32
parameters, clipped gradients, a learning rate that warms up and decays.

    config = gpt2.config("demo")
    params = gpt2.init(config, jax.random.key(0))
    opt_state = gpt2.OPTIMIZER.init(params)
    params, opt_state, loss = gpt2.train_step(params, opt_state, gpt2.tokens(config, seed=0))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Dense = dict[str, jax.Array]
"""A kernel and its bias, or a norm's scale and bias."""
Block = dict[str, Dense]
Params = dict[str, Any]
Batch = dict[str, jax.Array]

OPTIMIZER = optax.adamw(learning_rate=1e-3, b1=0.9, b2=0.95, weight_decay=0.1)
"""AdamW: elementwise, so a shard of the parameters needs only the same shard of its state."""


def _decays(params: Any) -> Any:
    """Which parameters AdamW decays: all but biases and the scales of norms."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)


SCHEDULE = optax.warmup_cosine_decay_schedule(
    init_value=0.0, peak_value=6e-4, warmup_steps=700, decay_steps=19_000, end_value=6e-5
)
"""The learning rate over ten billion tokens in batches of half a million."""

PRETRAINING = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(SCHEDULE, b1=0.9, b2=0.95, weight_decay=0.1, mask=_decays),
)
"""The optimizer of `pretrain`: GPT-3's (Brown et al., 2020, appendix B) for 125 M parameters."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of one GPT-2: everything `init` and `tokens` need to know."""

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    batch: int
    tied: bool = True
    """The vocabulary head is the transposed token embedding; otherwise it has its own kernel."""
    dtype: str = "float32"

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads


PRESETS = {
    # Small enough to search exhaustively; every dim still divides over eight devices.
    "tiny": Config(layers=1, width=32, heads=8, sequence=16, vocabulary=64, batch=8),
    # One step over eight virtual devices takes a second or two on a two-core machine.
    "demo": Config(layers=4, width=512, heads=8, sequence=64, vocabulary=2048, batch=16),
    # The published 124 M parameters, vocabulary of 50257 padded to 128s: to be compiled, not run.
    "gpt2_small": Config(layers=12, width=768, heads=12, sequence=1024, vocabulary=50304, batch=16),
    # GPT-3 (Brown et al., 2020, table 2.1) at the batch of 3.2 million tokens of its paper.
    "gpt3": Config(layers=96, width=12288, heads=96, sequence=2048, vocabulary=50304, batch=1536),
}


def config(preset: str = "demo", **changes: Any) -> Config:
    """Return a preset (`tiny`, `demo`, `gpt2_small`, `gpt3`) with the given fields replaced."""
    return dataclasses.replace(PRESETS[preset], **changes)


def init(config: Config, key: jax.Array) -> Params:
    """Return fresh parameters, every leaf of `config.dtype`."""
    d, h, k = config.width, config.heads, config.head_width
    # One draw for all kernels, dealt out in order: many small draws take long to compile.
    heads = 1 if config.tied else 2
    total = d * (heads * config.vocabulary + config.sequence + config.layers * 12 * d)
    noise = jax.random.normal(key, (total,), config.dtype)
    dealt = 0

    def normal(*shape: int, scale: float = 0.02) -> jax.Array:
        nonlocal dealt
        start, dealt = dealt, dealt + math.prod(shape)
        return scale * noise[start:dealt].reshape(shape)

    def dense(shape: tuple[int, ...], outputs: tuple[int, ...], scale: float = 0.02) -> Dense:
        return {"kernel": normal(*shape, scale=scale), "bias": jnp.zeros(outputs, config.dtype)}

    def norm() -> Dense:
        return {"scale": jnp.ones(d, config.dtype), "bias": jnp.zeros(d, config.dtype)}

    residual = 0.02 / (2 * config.layers) ** 0.5
    params: Params = {
        "wte": normal(config.vocabulary, d),
        "wpe": normal(config.sequence, d),
        "layers": [
            {
                "ln1": norm(),
                "query": dense((d, h, k), (h, k)),
                "key": dense((d, h, k), (h, k)),
                "value": dense((d, h, k), (h, k)),
                "out": dense((h, k, d), (d,), residual),
                "ln2": norm(),
                "up": dense((d, 4 * d), (4 * d,)),
                "down": dense((4 * d, d), (d,), residual),
            }
            for _ in range(config.layers)
        ],
        "lnf": norm(),
    }
    if not config.tied:
        params["head"] = normal(d, config.vocabulary)
    assert dealt == total
    return params


def wide(x: jax.Array) -> jax.Array:
    """Return `x` in float32 if its dtype is narrower: norms, softmax and loss are never narrow."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def layernorm(p: Dense, x: jax.Array) -> jax.Array:
    """Normalise over the last dim, then scale and shift."""
    dtype, x = x.dtype, wide(x)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    return ((x - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]).astype(dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention; q, k, v and the result are `[batch, sequence, heads, head_width]`."""
    scores = wide(jnp.einsum("bqhk,bthk->bhqt", q, k)) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhqt,bthk->bqhk", weights, v)


def attention(p: Block, x: jax.Array) -> jax.Array:
    """Multi-head causal self-attention over `[batch, sequence, width]`."""
    q = jnp.einsum("bsd,dhk->bshk", x, p["query"]["kernel"]) + p["query"]["bias"]
    k = jnp.einsum("bsd,dhk->bshk", x, p["key"]["kernel"]) + p["key"]["bias"]
    v = jnp.einsum("bsd,dhk->bshk", x, p["value"]["kernel"]) + p["value"]["bias"]
    return jnp.einsum("bshk,hkd->bsd", attend(q, k, v), p["out"]["kernel"]) + p["out"]["bias"]


def mlp(p: Block, x: jax.Array) -> jax.Array:
    """The two-layer perceptron of a block, over the last dim."""
    x = jax.nn.gelu(x @ p["up"]["kernel"] + p["up"]["bias"])
    return x @ p["down"]["kernel"] + p["down"]["bias"]


def block(p: Block, x: jax.Array) -> jax.Array:
    """One pre-layernorm transformer block over the residual stream `[batch, sequence, width]`."""
    x = x + attention(p, layernorm(p["ln1"], x))
    return x + mlp(p, layernorm(p["ln2"], x))


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """Token plus position embeddings, `[batch, sequence, width]`."""
    wte: jax.Array = params["wte"]
    wpe: jax.Array = params["wpe"]
    return wte[tokens] + wpe[: tokens.shape[-1]]


def stream(params: Params, tokens: jax.Array) -> jax.Array:
    """The last residual stream, `[batch, sequence, width]`."""
    x = embed(params, tokens)
    for layer in params["layers"]:
        x = block(layer, x)
    return x


def head_logits(params: Params, x: jax.Array) -> jax.Array:
    """Logits of the last residual stream, `[batch, sequence, vocabulary]`."""
    head = params["head"] if "head" in params else params["wte"].T
    return layernorm(params["lnf"], x) @ head


def forward(params: Params, tokens: jax.Array) -> jax.Array:
    """Map tokens `[batch, sequence]` to logits `[batch, sequence, vocabulary]`."""
    return head_logits(params, stream(params, tokens))


def loss(params: Params, batch: Batch) -> jax.Array:
    """Mean cross-entropy, in nats per token, of predicting `targets` from `tokens`."""
    return head_loss(params, stream(params, batch["tokens"]), batch["targets"])


def head_loss(params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy of the last residual stream against `targets`, both per token."""
    logits = wide(head_logits(params, x))
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def step(
    params: Params, opt_state: optax.OptState, batch: Batch
) -> tuple[Params, optax.OptState, jax.Array]:
    """Take one AdamW step; return the new parameters and optimizer state, and the loss before."""
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def pretrain(
    params: Params, opt_state: optax.OptState, batch: Batch
) -> tuple[Params, optax.OptState, jax.Array]:
    """Take one step of `PRETRAINING`, with products in bfloat16; returns what `step` does."""

    def narrow_loss(params: Params) -> jax.Array:
        return loss(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), batch)

    value, grads = jax.value_and_grad(narrow_loss)(params)
    updates, opt_state = PRETRAINING.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


train_step = jax.jit(step, donate_argnums=(0, 1))
"""`step`, compiled; it takes over the buffers of the old parameters and state."""


def tokens(config: Config, seed: int = 0) -> Batch:
    """Return a batch of made-up text: int32 `tokens` and `targets`, each `[batch, sequence]`.

    Each row counts upwards from a random start by a random stride, so the next token can be learnt.
    """
    rng = np.random.default_rng(seed)
    start = rng.integers(0, config.vocabulary, (config.batch, 1))
    stride = rng.integers(1, 4, (config.batch, 1))
    text = (start + stride * np.arange(config.sequence + 1)) % config.vocabulary
    text = text.astype(np.int32)
    return {"tokens": jnp.asarray(text[:, :-1]), "targets": jnp.asarray(text[:, 1:])}


def arguments(
    config: Config, seed: int = 0, optimizer: optax.GradientTransformation = OPTIMIZER
) -> tuple[Params, optax.OptState, Batch]:
    """Return concrete arguments for the step of an optimizer."""
    params = jax.jit(init, static_argnums=0)(config, jax.random.key(seed))
    return params, jax.jit(optimizer.init)(params), tokens(config, seed)


def abstract(
    config: Config, optimizer: optax.GradientTransformation = OPTIMIZER
) -> tuple[Any, Any, Any]:
    """Return the arguments of a step as `jax.ShapeDtypeStruct`s: for tracing and compiling only."""
    rows = jax.ShapeDtypeStruct((config.batch, config.sequence), jnp.int32)
    params = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return params, jax.eval_shape(optimizer.init, params), {"tokens": rows, "targets": rows}


def example(preset: str = "tiny") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the donating train step and arguments of the named preset."""
    return train_step, arguments(config(preset))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters and `i32[batch, sequence]`."""
    params, _, batch = example()[1]
    return params, batch["tokens"]
