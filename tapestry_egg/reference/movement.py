"""NumPy implementations of the kernels that move elements, and of region boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .call import Array, Call, Reference


def _broadcast_in_dim(call: Call) -> Array:
    shape = [1] * len(call.shape())
    for n, d in zip(call.operands[0].shape, call.params["broadcast_dimensions"], strict=True):
        shape[d] = n
    return np.broadcast_to(call.operands[0].reshape(shape), call.shape())


def _reshape(call: Call) -> Array:
    order = call.params.get("dimensions")
    x = call.operands[0]
    return (x if order is None else np.transpose(x, order)).reshape(call.shape())


def _concatenate(call: Call) -> Array:
    d = call.params["dimension"]
    lengths = [t.shape[d] for t in call.types]
    if call.shape()[d] == sum(lengths):
        return np.concatenate(call.operands, d)
    # A part of the joined dim: every operand has been filled up to it, and owns a stretch of it.
    out = np.empty(call.shape(), call.dtype())
    begin = -call.outputs[0].start[d]
    for x, n in zip(call.operands, lengths, strict=True):
        own = (*(slice(None),) * d, slice(max(begin, 0), max(begin + n, 0)))
        out[own] = x[own]
        begin += n
    return out


def _rev(call: Call) -> Array:
    return np.flip(call.operands[0], call.params["dimensions"])


def _split(call: Call) -> list[Array]:
    ends = np.cumsum(call.params["sizes"])[:-1]
    return np.split(call.operands[0], ends, call.params["axis"])


def _tile(call: Call) -> Array:
    x = call.operands[0]
    reps = [m // n if n else 0 for n, m in zip(x.shape, call.shape(), strict=True)]
    return np.tile(x, reps)


def _slice(call: Call) -> Array:
    # The operand box starts at the first element that is read.
    steps = call.params.get("strides") or (1,) * call.operands[0].ndim
    return call.operands[0][tuple(slice(None, None, s) for s in steps)]


def _pad(call: Call) -> Array:
    x, value = call.operands
    config = call.local["padding_config"]
    return pad(x, [hole + 1 for _, _, hole in config], [c[:2] for c in config], value)


def pad(x: Array, dilation: Sequence[int], padding: Sequence[Any], value: Any) -> Array:
    """`x` with holes between its elements and margins around, filled with `value`.

    Negative margins crop, the margin on the other side included.
    """
    spread = np.full(
        [max(0, (n - 1) * h + 1) for n, h in zip(x.shape, dilation, strict=True)], value, x.dtype
    )
    spread[tuple(slice(None, None, h) for h in dilation)] = x
    wide = np.pad(spread, [(max(0, a), max(0, b)) for a, b in padding], constant_values=value)
    ends = zip(wide.shape, padding, strict=True)
    return wide[tuple(slice(max(0, -a), n - max(0, -b)) for n, (a, b) in ends)]


def _ring_shift(call: Call) -> Array:
    shifts = call.local["shifts"]
    (x,) = call.operands
    return np.roll(x, tuple(shifts), tuple(range(len(shifts)))) if shifts else x


def _iota(call: Call) -> Array:
    d = call.params["dimension"]
    box = call.outputs[0]
    shape = [1] * box.rank
    shape[d] = -1
    return np.broadcast_to(np.arange(box.start[d], box.end[d]).reshape(shape), box.shape)


def _unstack(call: Call) -> list[Array]:
    x = np.moveaxis(call.operands[0], call.params["axis"], 0)
    return [x[k] for k in range(len(x))]


MOVEMENT: dict[str, Reference] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "ring_shift": _ring_shift,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "squeeze": lambda call: np.squeeze(call.operands[0], call.params["dimensions"]),
    "stack": lambda call: np.stack(call.operands, call.params["axis"]),
    "tile": _tile,
    "transpose": lambda call: np.transpose(call.operands[0], call.params["permutation"]),
    "unstack": _unstack,
}
