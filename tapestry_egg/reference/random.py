"""NumPy implementations of random keys and bits, keyed by the place of an element in the whole.

Threefry-2x32-20 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011: a hash of a counter under a key. A key is one element of the structured dtype `KEY`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tapestry_egg.zspace import ZRange

from .call import KEY, Array, Call, Reference

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """The two words u32[...] that a counter hashes to under a key; all of u32[...], broadcast."""
    schedule = (*key, key[0] ^ key[1] ^ _PARITY)
    with np.errstate(over="ignore"):
        x, y = counter[0] + schedule[0], counter[1] + schedule[1]
        for group in range(5):
            for r in _ROTATIONS[group % 2]:
                x = x + y
                y = ((y << np.uint32(r)) | (y >> np.uint32(32 - r))) ^ x
            x = x + schedule[(group + 1) % 3]
            y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def _words(keys: Array, more: int) -> tuple[Array, Array]:
    """The words of keys, with dims of size 1 appended."""
    words = keys["words"].reshape(*keys.shape, *(1,) * more, 2)
    return words[..., 0], words[..., 1]


def _keys(high: Array, low: Array) -> Array:
    out = np.zeros(np.broadcast_shapes(np.shape(high), np.shape(low)), KEY)
    out["words"][..., 0], out["words"][..., 1] = high, low
    return out


def _numbers(box: ZRange, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Row-major numbers of the elements of a box in an array of that shape, as two words."""
    number: Any = np.zeros((), np.uint64)
    for start, end, n in zip(box.start, box.end, shape, strict=True):
        along = np.arange(start, end, dtype=np.uint64)
        number = number[..., None] * np.uint64(n) + along
    return (number >> np.uint64(32)).astype(np.uint32), number.astype(np.uint32)


def _trailing(call: Call) -> tuple[ZRange, tuple[int, ...]]:
    """The part of the output's box below the keys' dims, and the whole shape there."""
    rank, box = call.operands[0].ndim, call.outputs[0]
    return ZRange(box.start[rank:], box.end[rank:]), tuple(call.params["shape"])


def _bits(call: Call) -> Array:
    box, shape = _trailing(call)
    high, low = threefry(_words(call.operands[0], box.rank), _numbers(box, shape))
    if call.params["bit_width"] == 64:
        return (high.astype(np.uint64) << np.uint64(32)) | low
    return np.asarray(high ^ low).astype(call.dtype())


def _split(call: Call) -> Array:
    box, shape = _trailing(call)
    return _keys(*threefry(_words(call.operands[0], box.rank), _numbers(box, shape)))


def _seed(call: Call) -> Array:
    seeds = call.operands[0]
    if seeds.dtype.itemsize < 8:
        return _keys(np.zeros(seeds.shape, np.uint32), seeds.astype(np.uint32))
    wide = seeds.astype(np.uint64)
    return _keys((wide >> np.uint64(32)).astype(np.uint32), wide.astype(np.uint32))


def _fold_in(call: Call) -> Array:
    keys, numbers = call.operands
    number = numbers.astype(np.uint32)
    return _keys(*threefry(_words(keys, 0), (np.zeros_like(number), number)))


def _wrap(call: Call) -> Array:
    words = call.operands[0]
    return _keys(words[..., 0], words[..., 1])


def _unary(function: Callable[[Array], Array]) -> Reference:
    return lambda call: function(call.operands[0])


RANDOM: dict[str, Reference] = {
    "iota_2x32_shape": lambda call: _numbers(call.outputs[0], tuple(call.params["shape"])),
    "random_bits": _bits,
    "random_clone": _unary(lambda keys: keys),
    "random_fold_in": _fold_in,
    "random_seed": _seed,
    "random_split": _split,
    "random_unwrap": _unary(lambda keys: keys["words"]),
    "random_wrap": _wrap,
    "threefry2x32": lambda call: threefry(
        (call.operands[0], call.operands[1]), (call.operands[2], call.operands[3])
    ),
}
