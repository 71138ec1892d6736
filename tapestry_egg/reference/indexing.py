"""NumPy implementations of reads and writes at places that are data.

Places are computed in global coordinates first; then every element that the local operand box does
not hold is left out. That one rule covers every way in which the operand may be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .call import Array, Call, Reference, wide


def _clamped(starts: Sequence[Array], sizes: Sequence[int], shape: Sequence[int]) -> list[int]:
    triples = zip(starts, sizes, shape, strict=True)
    return [int(min(max(int(s), 0), n - m)) for s, m, n in triples]


def _dynamic_slice(call: Call) -> Array:
    # Starts are clamped globally; the box of the slice lies at its own place behind them. Of a dim
    # that is cut another box may have the one element that is read.
    x, *starts = call.operands
    at = _clamped(starts, call.params["slice_sizes"], call.types[0].shape)
    read = call.outputs[0].translate(at)
    if read.clip(call.inputs[0]) != read:
        return np.zeros(call.shape(), x.dtype)
    return x[read.translate([-n for n in call.inputs[0].start]).slices]


def _dynamic_update_slice(call: Call) -> Array:
    x, update, *starts = call.operands
    at = _clamped(starts, call.types[1].shape, call.types[0].shape)
    here, given = call.inputs[0], call.inputs[1]
    target = given.translate(at)
    written = target.clip(here)
    out = x.copy()
    if not written.is_empty:
        to, of = ([-n for n in box.start] for box in (here, target))
        out[written.translate(to).slices] = update[written.translate(of).slices]
    return out


def _along(values: Array, dim: int, rank: int) -> Array:
    shape = [1] * rank
    shape[dim] = len(values)
    return values.reshape(shape)


def _spread(values: Array, dims: Sequence[int], rank: int) -> Array:
    """`values`, whose dims are the given dims of a rank-`rank` array, ready to broadcast."""
    shape = [1] * rank
    for n, d in zip(values.shape, dims, strict=True):
        shape[d] = n
    return values.reshape(shape)


def _legal(
    starts: list[Array], index_map: Sequence[int], sizes: Sequence[int], shape: Sequence[int]
) -> Array:
    inside: Any = True
    for start, d in zip(starts, index_map, strict=True):
        inside = inside & (start >= 0) & (start <= shape[d] - sizes[d])
    return np.asarray(inside)


def _fill(dtype: np.dtype[Any], value: Any) -> Any:
    if isinstance(value, dict):
        raise NotImplementedError(f"a fill value {value!r}")
    if value is not None:
        return value
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
    return True if dtype.kind == "b" else np.nan


def _gather(call: Call) -> Array:
    x, indices = call.operands
    dims, sizes, shape = call.params["dimension_numbers"], call.params["slice_sizes"], call.types[0]
    box, out = call.inputs[0], call.outputs[0]
    removed = (*dims["collapsed_slice_dims"], *dims["operand_batching_dims"])
    window = [d for d in range(x.ndim) if d not in removed]
    places = [d for d in range(out.rank) if d not in dims["offset_dims"]]
    starts = [
        _spread(indices[..., j].astype(np.int64), places, out.rank)
        for j in range(indices.shape[-1])
    ]
    inside = _legal(starts, dims["start_index_map"], sizes, shape.shape)
    coordinates: list[Array] = []
    for d in range(x.ndim):
        at: Any = np.zeros([1] * out.rank, np.int64)
        if d in dims["start_index_map"]:
            start = starts[dims["start_index_map"].index(d)]
            at = at + np.clip(start, 0, shape.shape[d] - sizes[d])
        if d in window:
            o = dims["offset_dims"][window.index(d)]
            at = at + _along(np.arange(out.start[o], out.end[o]), o, out.rank)
        if d in dims["operand_batching_dims"]:
            k = dims["operand_batching_dims"].index(d)
            b = dims["start_indices_batching_dims"][k]
            batch = np.arange(call.inputs[1].start[b], call.inputs[1].end[b])
            at = at + _along(batch, places[b], out.rank)
        coordinates.append(np.broadcast_to(at, out.shape))
    value, held = _read(x, coordinates, box.start)
    value = np.where(held, value, np.zeros((), x.dtype))
    if call.params["mode"] == "FILL_OR_DROP":
        # Every shard knows which reads are outside; one of them answers for all.
        fill = _fill(x.dtype, call.params.get("fill_value")) if call.first else 0
        value = np.where(np.broadcast_to(inside, out.shape), value, fill)
    return value


def _read(x: Array, coordinates: list[Array], start: Sequence[int]) -> tuple[Array, Array]:
    held: Any = True
    local = []
    for at, offset, n in zip(coordinates, start, x.shape, strict=True):
        held = held & (at >= offset) & (at < offset + n)
        local.append(np.clip(at - offset, 0, max(n - 1, 0)))
    return (x[tuple(local)] if local else x), np.asarray(held)


def scatter(combine: Callable[[Array, Any, Array], None] | None) -> Reference:
    """A scatter: `combine` changes an array at some places, an array of numbers per dim, by updates
    of its dtype. Without it they overwrite what is there."""

    def apply(call: Call) -> Array:
        x, indices, updates = call.operands
        dims, shape = call.params["dimension_numbers"], call.types[0].shape
        box, given = call.inputs[0], call.inputs[2]
        window, places, sizes = _windows(call)
        starts = [
            _spread(indices[..., j].astype(np.int64), places, updates.ndim)
            for j in range(indices.shape[-1])
        ]
        mapped = dims["scatter_dims_to_operand_dims"]
        inside = _legal(starts, mapped, sizes, shape)
        held: Any = inside if call.params["mode"] != "CLIP" else np.True_
        local: list[Array] = []
        for d in range(x.ndim):
            at: Any = np.zeros([1] * updates.ndim, np.int64)
            if d in mapped:
                at = at + np.clip(starts[mapped.index(d)], 0, shape[d] - sizes[d])
            if d in window:
                w = dims["update_window_dims"][window.index(d)]
                at = at + _along(np.arange(given.start[w], given.end[w]), w, updates.ndim)
            if d in dims["operand_batching_dims"]:
                k = dims["operand_batching_dims"].index(d)
                b = dims["scatter_indices_batching_dims"][k]
                batch = np.arange(call.inputs[1].start[b], call.inputs[1].end[b])
                at = at + _along(batch, places[b], updates.ndim)
            local.append(np.broadcast_to(at - box.start[d], updates.shape))
            held = held & (local[d] >= 0) & (local[d] < x.shape[d])
        chosen = np.broadcast_to(held, updates.shape)
        out, at = wide(x).copy(), tuple(places[chosen] for places in local)
        if combine is None:
            out[at] = updates[chosen]
        else:
            combine(out, at, updates[chosen].astype(out.dtype))
        return out

    return apply


def _windows(call: Call) -> tuple[list[int], list[int], list[int]]:
    """Of a scatter the dims of its operand that windows have, those of its updates that windows do
    not have, and how long a window is in every dim of the operand."""
    dims, rank = call.params["dimension_numbers"], len(call.types[0].shape)
    removed = (*dims["inserted_window_dims"], *dims["operand_batching_dims"])
    window = [d for d in range(rank) if d not in removed]
    updates = call.types[2].shape
    sizes = [1] * rank
    for d, u in zip(window, dims["update_window_dims"], strict=True):
        sizes[d] = updates[u]
    return window, [d for d in range(len(updates)) if d not in dims["update_window_dims"]], sizes


_COMBINE: dict[str, Callable[[Array, Any, Array], None]] = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}

INDEXING: dict[str, Reference] = {
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": scatter(None),
    **{f"scatter-{name}": scatter(f) for name, f in _COMBINE.items()},
    **{f"scatter_{name}": scatter(f) for name, f in _COMBINE.items()},
}
