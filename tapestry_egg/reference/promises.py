"""Promises: what an operation takes for granted of its operands, checked on their values.

A template names them (`promises:`). Where one is broken, XLA may give anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.signatures.parameters import readable

from .call import Array
from .indexing import window_sizes

Types = Sequence[TensorType]
_MOST_PLACES = 4096


def breaks(
    promise: str, params: Mapping[str, Any], types: Types, operands: Sequence[Array]
) -> bool:
    """Whether the operands of a kernel break a promise.

    Raises KeyError for a promise that nothing here can check.
    """
    plain = {k: readable(v) for k, v in params.items()}
    with np.errstate(all="ignore"):
        return not _CHECKS[promise](plain, types, operands)


def can_check(promise: str) -> bool:
    """Whether a promise can be checked on values."""
    return promise in _CHECKS


def keeping(
    promises: Sequence[str], params: Mapping[str, Any], types: Types, rng: np.random.Generator
) -> tuple[int, Array] | None:
    """An operand, by its place, with values that keep some promises; None where there are none."""
    plain = {k: readable(v) for k, v in params.items()}
    if "pivots" in promises:
        t, size = types[0], plain["permutation_size"]
        first = np.minimum(np.arange(t.shape[-1]), size - 1)
        return (0, rng.integers(first, size, t.shape, t.dtype)) if size else None
    if "group_sizes" in promises:
        rows, t = int(rng.integers(types[0].shape[0] + 1)), types[2]
        sums = np.sort(rng.integers(0, rows + 1, t.size))
        return 2, np.diff(sums, prepend=0).astype(t.dtype).reshape(t.shape)
    _, mapped, sizes = _form(plain, types)
    shape, t = types[0].shape, types[1]
    if not mapped:
        return None
    count = t.size // max(1, t.shape[-1])
    alone = "unique_indices" in promises
    most = np.iinfo(t.dtype).max
    steps = [max(1, sizes[d]) if alone else 1 for d in mapped]
    ends = [min(shape[d] - sizes[d], most) + 1 for d in mapped]
    spans = [range(0, end, step) for end, step in zip(ends, steps, strict=True)]
    if not all(spans) or prod(len(s) for s in spans) > _MOST_PLACES:
        return None
    places = np.asarray(list(product(*spans)), t.dtype).reshape(-1, t.shape[-1])
    if len(places) < (count if alone else 1):
        return None
    chosen = rng.choice(len(places), count, replace=not alone)
    if "indices_are_sorted" in promises:
        chosen.sort()
    return 1, places[chosen].reshape(t.shape)


def _form(params: Mapping[str, Any], types: Types) -> tuple[list[int], list[int], list[int]]:
    """Of a gather or scatter, dims of the indices that go with dims of the operand, the dims of the
    operand that indices are places of, and how long windows are in every dim of it."""
    dims = params["dimension_numbers"]
    if "slice_sizes" in params:
        batch = dims["start_indices_batching_dims"]
        return list(batch), list(dims["start_index_map"]), list(params["slice_sizes"])
    batch = dims["scatter_indices_batching_dims"]
    return list(batch), list(dims["scatter_dims_to_operand_dims"]), window_sizes(dims, types)


def _starts(params: Mapping[str, Any], types: Types, operands: Sequence[Array]) -> Array:
    indices = operands[1]
    *batch, depth = indices.shape
    return indices.reshape(prod(batch), depth).astype(np.int64)


def _are_sorted(params: Mapping[str, Any], types: Types, operands: Sequence[Array]) -> bool:
    rows = _starts(params, types, operands).tolist()
    return rows == sorted(rows)


def _are_inside(params: Mapping[str, Any], types: Types, operands: Sequence[Array]) -> bool:
    return bool(_inside(params, types, operands).all())


def _inside(params: Mapping[str, Any], types: Types, operands: Sequence[Array]) -> Array:
    _, mapped, sizes = _form(params, types)
    starts = _starts(params, types, operands)
    last = np.asarray([types[0].shape[d] - sizes[d] for d in mapped], np.int64)
    return np.asarray(((starts >= 0) & (starts <= last)).all(axis=-1))


def _are_apart(params: Mapping[str, Any], types: Types, operands: Sequence[Array]) -> bool:
    """Whether no element of the operand lies in two windows."""
    batching, mapped, sizes = _form(params, types)
    starts = _starts(params, types, operands)
    lengths = np.asarray([sizes[d] for d in mapped], np.int64)
    last = np.asarray([types[0].shape[d] for d in mapped], np.int64) - lengths
    if params["mode"] == "CLIP":
        starts = np.clip(starts, 0, last)
        held = np.ones(len(starts), bool)
    else:
        held = _inside(params, types, operands)
    batch = operands[1].shape[:-1]
    own = np.stack(np.unravel_index(np.arange(len(starts)), batch), -1) if batch else starts[:, :0]
    # Windows of other elements of dims that go together lie apart.
    rows = np.concatenate([own[:, batching], starts], -1)[held]
    lengths = np.concatenate([np.ones(len(batching), np.int64), lengths])
    near = (np.abs(rows[:, None] - rows[None]) < lengths).all(axis=-1)
    return bool(near.sum() == len(rows))


def _are_sizes(params: Mapping[str, Any], types: Types, operands: Sequence[Array]) -> bool:
    sizes = operands[2].astype(np.int64)
    return bool((sizes >= 0).all() and sizes.sum() <= types[0].shape[0])


def _are_exchanges(params: Mapping[str, Any], types: Types, operands: Sequence[Array]) -> bool:
    size = params["permutation_size"]
    return bool(((operands[0] >= 0) & (operands[0] < size)).all()) and operands[0].shape[-1] <= size


_CHECKS: Mapping[str, Callable[[Mapping[str, Any], Types, Sequence[Array]], bool]] = {
    "group_sizes": _are_sizes,
    "indices_are_sorted": _are_sorted,
    "mode": _are_inside,
    "pivots": _are_exchanges,
    "unique_indices": _are_apart,
}
