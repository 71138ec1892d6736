"""Language models: decoders with scanned or written-out layers, tied or routed, and an encoder."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import Program


def llama_scan_remat(
    *, layers=8, width=1024, heads=16, hidden=2816, vocabulary=8192, batch=16, sequence=1024
) -> Program:
    """A bfloat16 Llama of scanned, rematerialised layers under AdamW with float32 moments."""
    optimizer = optax.adamw(3e-4, mu_dtype=jnp.float32)

    def norm(scale, x):
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
        return (y * scale).astype(x.dtype)

    def rotate(x):
        half = x.shape[-1] // 2
        angle = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
        cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    @jax.checkpoint
    def layer(x, p):
        h = norm(p["norm1"], x)
        q, k, v = (jnp.einsum("bsd,dhk->bshk", h, p[n]) for n in ("q", "k", "v"))
        q, k = rotate(q), rotate(k)
        scores = jnp.einsum("bshk,bthk->bhst", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        causal = jnp.tril(jnp.ones((sequence, sequence), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(x.dtype)
        mixed = jnp.einsum("bhst,bthk->bshk", weights, v)
        x = x + jnp.einsum("bshk,hkd->bsd", mixed, p["o"])
        h = norm(p["norm2"], x)
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        x, _ = lax.scan(layer, x, params["layers"])
        logits = (norm(params["norm"], x) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    k = width // heads
    shapes = {
        "embed": (vocabulary, width),
        "head": (width, vocabulary),
        "norm": (width,),
        "layers": {
            "norm1": (layers, width),
            "norm2": (layers, width),
            **{n: (layers, width, heads, k) for n in ("q", "k", "v")},
            "o": (layers, heads, k, width),
            "gate": (layers, width, hidden),
            "up": (layers, width, hidden),
            "down": (layers, hidden, width),
        },
    }
    params = _described(shapes, jnp.bfloat16)
    moments = jax.eval_shape(optimizer.init, params)
    return step, ((params, moments), _tokens(batch, sequence + 1))


def gpt_tied(*, layers=4, width=768, heads=12, vocabulary=16384, batch=32, sequence=512) -> Program:
    """A GPT of four written-out layers whose head is its embedding, bfloat16 over float32 masters,
    with clipping and AdamW."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))

    def norm(p, x):
        y = x.astype(jnp.float32)
        y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
        return (y * p["scale"] + p["bias"]).astype(x.dtype)

    def attention(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return out.reshape(x.shape) @ p["out"]

    def loss(params, tokens):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        x = half["embed"][tokens[:, :-1]] + half["positions"]
        for p in half["layers"]:
            x = x + attention(p, norm(p["norm1"], x))
            x = x + jax.nn.gelu(norm(p["norm2"], x) @ p["up"]) @ p["down"]
        logits = (norm(half["norm"], x) @ half["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    affine = {"scale": (width,), "bias": (width,)}
    block = {
        "norm1": affine,
        "norm2": affine,
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    params = _described(
        {
            "embed": (vocabulary, width),
            "positions": (sequence, width),
            "norm": affine,
            "layers": [block] * layers,
        },
        jnp.float32,
    )
    moments = jax.eval_shape(optimizer.init, params)
    return step, ((params, moments), _tokens(batch, sequence + 1))


def switch_experts(
    *,
    layers=2,
    width=512,
    hidden=1024,
    experts=16,
    vocabulary=4096,
    batch=32,
    sequence=256,
    capacity=32,
) -> Program:
    """Two layers of routed experts with a capacity each (Switch), top one, dense dispatch."""

    def experts_of(p, x):
        scores = jax.nn.softmax(x.astype(jnp.float32) @ p["router"])
        gate, place = scores.max(-1), scores.argmax(-1)
        chosen = jax.nn.one_hot(place, experts)
        rank = jnp.cumsum(chosen, axis=1) * chosen - 1.0
        slots = jax.nn.one_hot(rank.astype(jnp.int32), capacity) * chosen[..., None]
        inside = jnp.einsum("gsec,gsd->egcd", slots.astype(x.dtype), x)
        h = jax.nn.relu(jnp.einsum("egcd,edf->egcf", inside, p["up"]))
        out = jnp.einsum("egcf,efd->egcd", h, p["down"])
        weights = (slots * gate[..., None, None]).astype(x.dtype)
        return jnp.einsum("gsec,egcd->gsd", weights, out)

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        for p in params["layers"]:
            x = x + jax.nn.tanh(x @ p["dense"])
            x = x + experts_of(p, x)
        logits = (x @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    block = {
        "dense": (width, width),
        "router": (width, experts),
        "up": (experts, width, hidden),
        "down": (experts, hidden, width),
    }
    shapes = {"embed": (vocabulary, width), "head": (width, vocabulary), "layers": [block] * layers}
    return step, (_described(shapes, jnp.float32), _tokens(batch, sequence + 1))


def bert_masked(
    *, layers=3, width=768, heads=12, vocabulary=8192, batch=32, sequence=512, masked=76
) -> Program:
    """An encoder of three layers that predicts masked tokens at chosen places, under Lion."""
    optimizer = optax.lion(1e-4)

    def norm(p, x):
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-12) * p[0] + p[1]

    def layer(p, x):
        q, k, v = (
            (x @ p[n]).reshape(batch, sequence, heads, -1).transpose(0, 2, 1, 3) for n in "qkv"
        )
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 8.0)
        mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = norm(p["norm1"], x + mixed @ p["o"])
        return norm(p["norm2"], x + jax.nn.gelu(x @ p["up"]) @ p["down"])

    def loss(params, tokens, places, targets):
        x = norm(params["norm"], params["embed"][tokens] + params["positions"])
        for p in params["layers"]:
            x = layer(p, x)
        picked = jnp.take_along_axis(x, places[..., None], axis=1)
        logits = picked @ params["head"]
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
        )

    def step(state, tokens, places, targets):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, tokens, places, targets)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    block = {
        **{n: (width, width) for n in "qkvo"},
        "norm1": (2, width),
        "norm2": (2, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    shapes = {
        "embed": (vocabulary, width),
        "positions": (sequence, width),
        "norm": (2, width),
        "head": (width, vocabulary),
        "layers": [block] * layers,
    }
    params = _described(shapes, jnp.float32)
    chosen = _tokens(batch, masked)
    state = (params, jax.eval_shape(optimizer.init, params))
    return step, (state, _tokens(batch, sequence), chosen, chosen)


def _described(shapes: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def _tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
