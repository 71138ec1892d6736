"""Images: a U-Net, a diffusion network, a vision transformer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import Program


def unet(*, batch=32, size=128, widths=(32, 64, 128, 256)) -> Program:
    """A U-Net for segmentation, NHWC, with strided convolutions down and resizing up."""
    optimizer = optax.sgd(0.01, momentum=0.9)

    def double(p, x):
        return jax.nn.relu(_conv(jax.nn.relu(_conv(x, p["a"])), p["b"]))

    def network(params, x):
        kept = []
        for p in params["down"]:
            x = double(p, x)
            kept.append(x)
            x = _conv(x, p["pool"], stride=2)
        x = double(params["middle"], x)
        for p, skip in zip(params["up"], reversed(kept), strict=True):
            n, h, w, c = x.shape
            x = jax.image.resize(x, (n, 2 * h, 2 * w, c), "nearest")
            x = double(p, jnp.concatenate([skip, _conv(x, p["narrow"])], axis=-1))
        return _conv(x, params["out"])

    def loss(params, images, masks):
        logits = network(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, masks).mean()

    def step(state, images, masks):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, images, masks)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    down, up, before = [], [], 3
    for c in widths[:-1]:
        down.append({"a": (3, 3, before, c), "b": (3, 3, c, c), "pool": (3, 3, c, c)})
        before = c
    c = widths[-1]
    middle = {"a": (3, 3, before, c), "b": (3, 3, c, c)}
    before = c
    for c in widths[-2::-1]:
        up.append({"narrow": (3, 3, before, c), "a": (3, 3, 2 * c, c), "b": (3, 3, c, c)})
        before = c
    params = _described({"down": down, "middle": middle, "up": up, "out": (1, 1, before, 4)})
    state = params, jax.eval_shape(optimizer.init, params)
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    return step, (state, images, jax.ShapeDtypeStruct((batch, size, size), jnp.int32))


def diffusion(*, batch=64, size=64, width=128, blocks=3, groups=8) -> Program:
    """A denoiser of residual convolutions, NCHW as from a port, with group norms and the time in
    every block, under Adam."""
    optimizer = optax.adam(1e-4)

    def conv(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )

    def norm(p, x):
        n, c, h, w = x.shape
        y = x.reshape(n, groups, c // groups, h, w)
        y = y - y.mean((2, 3, 4), keepdims=True)
        y = y * lax.rsqrt((y * y).mean((2, 3, 4), keepdims=True) + 1e-5)
        return y.reshape(x.shape) * p[0][:, None, None] + p[1][:, None, None]

    def network(params, x, time):
        angle = time[:, None] * jnp.exp(-jnp.arange(width // 2) * 8.0 / width)
        t = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        x = conv(x, params["enter"])
        for p in params["blocks"]:
            h = conv(jax.nn.silu(norm(p["norm1"], x)), p["a"])
            h = h + (t @ p["time"])[:, :, None, None]
            x = x + conv(jax.nn.silu(norm(p["norm2"], h)), p["b"])
        return conv(jax.nn.silu(x), params["leave"])

    def loss(params, images, noise, time):
        level = jnp.cos(time)[:, None, None, None]
        noisy = images * level + noise * jnp.sqrt(1.0 - level**2)
        return jnp.mean((network(params, noisy, time) - noise) ** 2)

    def step(state, images, noise, time):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, images, noise, time)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    block = {
        "norm1": (2, width),
        "norm2": (2, width),
        "a": (width, width, 3, 3),
        "b": (width, width, 3, 3),
        "time": (width, width),
    }
    shapes = {"enter": (width, 3, 3, 3), "leave": (3, width, 3, 3), "blocks": [block] * blocks}
    params = _described(shapes)
    state = params, jax.eval_shape(optimizer.init, params)
    images = jax.ShapeDtypeStruct((batch, 3, size, size), jnp.float32)
    return step, (state, images, images, jax.ShapeDtypeStruct((batch,), jnp.float32))


def vit_scan(
    *, batch=128, size=224, patch=16, layers=6, width=384, heads=6, classes=1000
) -> Program:
    """A bfloat16 vision transformer of scanned layers with a class token, without remat."""
    tokens = (size // patch) ** 2
    optimizer = optax.adamw(1e-3)

    def norm(p, x):
        y = x.astype(jnp.float32)
        y = jax.nn.standardize(y, axis=-1) * p[0] + p[1]
        return y.astype(x.dtype)

    def layer(x, p):
        h = norm(p["norm1"], x)
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", h, p["qkv"]), 2, 0)
        weights = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k) / 8.0)
        x = x + jnp.einsum("bhqt,bthk,hkd->bqd", weights, v, p["out"])
        return x + jax.nn.gelu(norm(p["norm2"], x) @ p["up"]) @ p["down"], None

    def loss(params, images, labels):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        x = images.astype(jnp.bfloat16).reshape(
            batch, size // patch, patch, size // patch, patch, 3
        )
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, tokens, -1) @ half["embed"]
        first = jnp.broadcast_to(half["class"], (batch, 1, width))
        x = jnp.concatenate([first, x], axis=1) + half["positions"]
        x, _ = lax.scan(layer, x, half["layers"])
        logits = (norm(half["norm"], x[:, 0]) @ half["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(state, images, labels):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, images, labels)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    shapes = {
        "embed": (patch * patch * 3, width),
        "class": (width,),
        "positions": (tokens + 1, width),
        "norm": (2, width),
        "head": (width, classes),
        "layers": {
            "norm1": (layers, 2, width),
            "norm2": (layers, 2, width),
            "qkv": (layers, width, 3, heads, width // heads),
            "out": (layers, heads, width // heads, width),
            "up": (layers, width, 4 * width),
            "down": (layers, 4 * width, width),
        },
    }
    params = _described(shapes)
    state = params, jax.eval_shape(optimizer.init, params)
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    return step, (state, images, jax.ShapeDtypeStruct((batch,), jnp.int32))


def _conv(x, kernel, stride=1):
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _described(shapes: Any) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
