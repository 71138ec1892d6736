"""Attention as people spell it, in the modes in which it occurs: the table that the tests go by.

Every spelling is a function of q [batch, rows, heads, width], k and v [batch, keys, groups, width],
and of what is done to the dtype of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any
Spelling = Callable[[Array, Array, Array, "Dtype"], Array]

BATCH, HEADS, WIDTH, WINDOW = 2, 4, 8, 5


class Dtype:
    """The dtype of operands, and in which the scores and their softmax are computed."""

    def __init__(self, operands: Any, how: str) -> None:
        self.operands, self.how = operands, how

    def scores(self, dims: str, q: Array, k: Array) -> Array:
        if self.how == "preferred":
            return jnp.einsum(dims, q, k, preferred_element_type=jnp.float32)
        s = jnp.einsum(dims, q, k)
        return s.astype(jnp.float32) if self.how == "cast" else s

    def weights(self, s: Array, axis: int = -1) -> Array:
        return jax.nn.softmax(s, axis=axis).astype(self.operands)


DTYPES: Mapping[str, Dtype] = {
    "float32": Dtype(jnp.float32, "same"),
    "bfloat16": Dtype(jnp.bfloat16, "same"),
    "bfloat16, softmax in float32": Dtype(jnp.bfloat16, "cast"),
    "bfloat16, preferred float32": Dtype(jnp.bfloat16, "preferred"),
}


def _einsum(mask: Callable[[int], Array | None], fill: float = -1e30) -> Spelling:
    def attention(q: Array, k: Array, v: Array, dtype: Dtype) -> Array:
        s = dtype.scores("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        m = mask(q.shape[1])
        s = s if m is None else jnp.where(m, s, fill)
        return jnp.einsum("bhqk,bkhd->bqhd", dtype.weights(s), v)

    return attention


def _tril(n: int) -> Array:
    return jnp.tril(jnp.ones((n, n), bool))


def _iota(n: int) -> Array:
    return jnp.arange(n)[:, None] >= jnp.arange(n)[None, :]


def _window(n: int) -> Array:
    behind = jnp.arange(n)[:, None] - jnp.arange(n)[None, :]
    return (behind >= 0) & (behind < WINDOW)


def grouped(q: Array, k: Array, v: Array, dtype: Dtype) -> Array:
    b, t, h, d = q.shape
    g = k.shape[2]
    s = dtype.scores("bqgrd,bkgd->bgrqk", q.reshape(b, t, g, h // g, d), k) * d**-0.5
    w = dtype.weights(jnp.where(_iota(t), s, jnp.finfo(s.dtype).min))
    return jnp.einsum("bgrqk,bkgd->bqgrd", w, v).reshape(b, t, h, d)


def repeated(q: Array, k: Array, v: Array, dtype: Dtype) -> Array:
    r = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, r, axis=2) for x in (k, v))
    return _einsum(_tril)(q, k, v, dtype)


def heads_first(q: Array, k: Array, v: Array, dtype: Dtype) -> Array:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * WIDTH**-0.5, k, v))
    s = dtype.scores("bhqd,bhkd->bhqk", q, k)
    w = dtype.weights(jnp.where(_tril(q.shape[2])[None, None], s, -jnp.inf))
    return (w @ v).transpose(0, 2, 1, 3)


def biased(q: Array, k: Array, v: Array, dtype: Dtype) -> Array:
    n = q.shape[1]
    slopes = 2.0 ** -jnp.arange(1, q.shape[2] + 1)
    distance = jnp.arange(n)[None, :] - jnp.arange(n)[:, None]
    s = dtype.scores("bqhd,bkhd->bhqk", q, k) * 0.5
    s = s + (slopes[:, None, None] * distance).astype(s.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", dtype.weights(s), v)


def added_mask(q: Array, k: Array, v: Array, dtype: Dtype) -> Array:
    s = dtype.scores("bqhd,bkhd->bhqk", q, k) * 0.5
    s = s + jnp.where(_tril(q.shape[1]), 0.0, -1e9).astype(s.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", dtype.weights(s), v)


def segments(q: Array, k: Array, v: Array, dtype: Dtype) -> Array:
    n = q.shape[1]
    ids = jnp.arange(BATCH * n).reshape(BATCH, n) // 7
    same = ids[:, None, :, None] == ids[:, None, None, :]
    s = dtype.scores("bqhd,bkhd->bhqk", q, k) * 0.5
    w = dtype.weights(jnp.where(same & _iota(n), s, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", w, v)


def by_hand(q: Array, k: Array, v: Array, dtype: Dtype) -> Array:
    s = dtype.scores("bqhd,bkhd->bhqk", q, k) * 0.5
    s = jnp.where(_tril(q.shape[1]), s, -1e30)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    w = (e / e.sum(-1, keepdims=True)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", w, v)


def _library(**given: Any) -> Spelling:
    def attention(q: Array, k: Array, v: Array, dtype: Dtype) -> Array:
        return jax.nn.dot_product_attention(q, k, v, implementation="xla", **given)

    return attention


def library_bias(q: Array, k: Array, v: Array, dtype: Dtype) -> Array:
    n = q.shape[1]
    distance = (jnp.arange(n)[None, :] - jnp.arange(n)[:, None]).astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, distance[None, None], implementation="xla")


def library_segments(q: Array, k: Array, v: Array, dtype: Dtype) -> Array:
    ids = jnp.arange(BATCH * q.shape[1]).reshape(BATCH, -1) // 7
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True, implementation="xla")


#: Name -> (spelling, groups of heads).
SPELLINGS: Mapping[str, tuple[Spelling, int]] = {
    "jax.nn": (_library(), HEADS),
    "jax.nn causal": (_library(is_causal=True), HEADS),
    "jax.nn causal, groups": (_library(is_causal=True), 2),
    "jax.nn window": (_library(is_causal=True, local_window_size=(WINDOW - 1, 0)), HEADS),
    "jax.nn bias": (library_bias, HEADS),
    "jax.nn segments": (library_segments, HEADS),
    "einsum": (_einsum(lambda n: None), HEADS),
    "einsum tril": (_einsum(_tril), HEADS),
    "einsum iota": (_einsum(_iota), HEADS),
    "einsum window": (_einsum(_window), HEADS),
    "einsum groups": (grouped, 2),
    "einsum one group": (grouped, 1),
    "einsum repeated groups": (repeated, 2),
    "heads first": (heads_first, HEADS),
    "bias": (biased, HEADS),
    "added mask": (added_mask, HEADS),
    "segments": (segments, HEADS),
    "softmax by hand": (by_hand, HEADS),
}


def operands(groups: int, rows: int, dtype: Dtype) -> list[jax.ShapeDtypeStruct]:
    shapes = [(BATCH, rows, n, WIDTH) for n in (HEADS, groups, groups)]
    return [jax.ShapeDtypeStruct(s, dtype.operands) for s in shapes]


def _layers(attention: Spelling, dtype: Dtype, remat: bool) -> Callable[..., Array]:
    """Two layers in a scan, each attention over products of the stream with its weights."""

    def layer(x: Array, weights: Array) -> tuple[Array, None]:
        q = jnp.tanh(x * weights[0])
        k, v = (jnp.tanh(x[:, :, : groups_of(attention)] * weights[n]) for n in (1, 2))
        return x + attention(q, k, v, dtype), None

    body = jax.checkpoint(layer) if remat else layer

    def loss(x: Array, weights: Array) -> Array:
        x, _ = lax.scan(body, x, weights)
        return jnp.sum(jnp.sin(x.astype(jnp.float32)))

    return loss


def groups_of(attention: Spelling) -> int:
    return next(g for a, g in SPELLINGS.values() if a is attention)


MODES = ("forward", "gradients", "remat", "scan", "scan remat")


def program(name: str, dtype_name: str, mode: str, rows: int) -> tuple[Callable[..., Any], list]:
    """A function and the types of its arguments."""
    (attention, groups), dtype = SPELLINGS[name], DTYPES[dtype_name]
    shapes = operands(groups, rows, dtype)
    if mode == "forward":
        return lambda q, k, v: attention(q, k, v, dtype), shapes
    if mode.startswith("scan"):
        weights = jax.ShapeDtypeStruct((2, 3), dtype.operands)
        loss = _layers(attention, dtype, mode == "scan remat")
        return jax.value_and_grad(loss, (0, 1)), [shapes[0], weights]

    def run(q: Array, k: Array, v: Array) -> Array:
        return attention(q, k, v, dtype)

    inner = jax.checkpoint(run) if mode == "remat" else run

    def plain(q: Array, k: Array, v: Array) -> Array:
        return jnp.sum(jnp.sin(inner(q, k, v).astype(jnp.float32)))

    return jax.value_and_grad(plain, (0, 1, 2)), shapes
