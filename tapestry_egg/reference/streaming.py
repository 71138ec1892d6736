"""NumPy implementations of the streaming kernels, which here store all scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .algebra import dot
from .call import Array, Call, Reference, wide


def _softmax(call: Call) -> Array:
    return _normalised(wide(call.operands[0]), tuple(call.params["axes"]))


def _logsumexp(call: Call) -> Array:
    return _log_of_sum(wide(call.operands[0]), tuple(call.params["axes"]))


def _dot_logsumexp(call: Call) -> Array:
    return _log_of_sum(_scores(call), tuple(call.params["axes"]))


def _exp_dot(call: Call) -> Array:
    scores, shift = _scores(call), call.params["shift"]
    weights = np.exp(scores - _aligned(wide(call.operands[2]), shift, scores.ndim))
    return _values(call, weights, wide(call.operands[3]))


def _attention(call: Call) -> Array:
    scores = _scores(call)
    if len(call.operands) == 5:
        mask, fill = call.operands[3:]
        scores = np.where(_aligned(mask, call.params["mask_dims"], scores.ndim), scores, wide(fill))
    weights = _normalised(scores, tuple(call.params["values"][0][0]))
    return _values(call, weights, wide(call.operands[2]))


def _flash_attention(call: Call) -> tuple[Array, Array]:
    q, k, v, *mask = map(wide, call.operands)
    scores = _grouped_scores(call, q, k, mask)
    stats = _log_of_sum(scores, (4,))
    weights = _weights(scores)
    out = np.einsum("bgrts,bsgh->btgrh", weights, v)
    return out.reshape(q.shape), stats.reshape(q.shape[0], q.shape[2], q.shape[1])


def _flash_attention_backward(call: Call) -> tuple[Array, Array, Array]:
    q, k, v, stats, out, grad, *mask = map(wide, call.operands)
    scores = _grouped_scores(call, q, k, mask)
    shape = _grouped(q, k).shape
    weights = _weights(scores)
    given, query = grad.reshape(shape), q.reshape(shape)
    dv = np.einsum("bgrts,btgrh->bsgh", weights, given)
    by_weight = np.einsum("btgrh,bsgh->bgrts", given, v)
    delta = np.einsum("btgrh,btgrh->bgrt", given, out.reshape(shape))
    by_score = weights * (by_weight - delta[..., None]) * call.params["scale"]
    if mask and mask[0].dtype == np.bool_:
        full = np.broadcast_to(mask[0], (*stats.shape[:2], *scores.shape[3:]))
        by_score = np.where(full.reshape(scores.shape), by_score, 0)
    dq = np.einsum("bgrts,bsgh->btgrh", by_score, k).reshape(q.shape)
    return dq, np.einsum("bgrts,btgrh->bsgh", by_score, query), dv


def _weights(scores: Array) -> Array:
    """Weights over the last dim; none where no key is seen."""
    top = scores.max(axis=-1, keepdims=True)
    parts = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = parts.sum(axis=-1, keepdims=True)
    return np.asarray(parts / np.where(total > 0, total, 1.0))


def _grouped(q: Array, k: Array) -> Array:
    batch, rows, heads, width = q.shape
    return q.reshape(batch, rows, k.shape[2], heads // k.shape[2], width)


def _grouped_scores(call: Call, q: Array, k: Array, extra: list[Array]) -> Array:
    scores = call.params["scale"] * np.einsum("btgrh,bsgh->bgrts", _grouped(q, k), k)
    batch, groups, shared, rows, keys = scores.shape
    for x in extra:
        mask = np.broadcast_to(x, (batch, groups * shared, rows, keys)).reshape(scores.shape)
        flags = x.dtype == np.bool_
        scores = np.where(mask, scores, call.params["fill"]) if flags else scores + mask
    if call.params["causal"]:
        first = call.inputs[0].start[1]
        behind = np.arange(first, first + rows)[:, None] - np.arange(keys)[None, :]
        window = call.params["window"] or behind.max(initial=0) + 1
        scores = np.where((behind >= 0) & (behind < window), scores, -np.inf)
    return np.asarray(scores)


def _scores(call: Call) -> Array:
    return dot(wide(call.operands[0]), wide(call.operands[1]), *call.params["scores"])


def _values(call: Call, weights: Array, v: Array) -> Array:
    (pc, vc), (pb, vb) = call.params["values"]
    if call.params["swapped"]:
        return dot(v, weights, (vc, pc), (vb, pb))
    return dot(weights, v, (pc, vc), (pb, vb))


def _aligned(x: Array, dims: Any, rank: int) -> Array:
    """Dim k of x at place dims[k] of so many dims, extent 1 elsewhere."""
    order = np.argsort(dims, kind="stable")
    sizes = [1] * rank
    for k, d in enumerate(dims):
        sizes[d] = x.shape[k]
    return np.asarray(x).transpose(order).reshape(sizes)


def _normalised(x: Array, axes: tuple[int, ...]) -> Array:
    weights = np.exp(x - x.max(axes, keepdims=True, initial=-np.inf))
    return np.asarray(weights / weights.sum(axes, keepdims=True))


def _log_of_sum(x: Array, axes: tuple[int, ...]) -> Array:
    top = x.max(axes, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    return np.asarray(np.log(np.exp(x - top).sum(axes)) + top.squeeze(axes))


STREAMING: Mapping[str, Reference] = {
    "softmax": _softmax,
    "logsumexp": _logsumexp,
    "dot_logsumexp": _dot_logsumexp,
    "exp_dot": _exp_dot,
    "attention": _attention,
    "flash_attention": _flash_attention,
    "flash_attention_backward": _flash_attention_backward,
}
