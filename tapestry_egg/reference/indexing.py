"""NumPy implementations of reads and writes at places that are data.

Places are computed in global coordinates first; then every element that the local operand box does
not hold is left out. That one rule covers every way in which the operand may be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.zspace import ZRange

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


#: Names of dims: those of the operand that indices number, those of the indices that batch dims of
#: the operand follow, those of the result or the updates that windows have, and those of the
#: operand that windows have one element of.
_READS = "start_index_map start_indices_batching_dims offset_dims collapsed_slice_dims".split()
_WRITES = (
    "scatter_dims_to_operand_dims scatter_indices_batching_dims update_window_dims "
    "inserted_window_dims"
).split()


def _places(
    call: Call, names: Sequence[str], sizes: Sequence[int], box: ZRange
) -> tuple[list[Array], Array]:
    """Per dim of the operand, in global coordinates, where windows of these sizes have the elements
    of a box of the result or the updates; and whether each window is inside."""
    indices, shape = call.operands[1], call.types[0].shape
    dims = call.params["dimension_numbers"]
    numbered, batch, inside_windows, single = (dims[name] for name in names)
    batched = dims["operand_batching_dims"]
    window = [d for d in range(len(shape)) if d not in (*single, *batched)]
    apart = [d for d in range(box.rank) if d not in inside_windows]
    starts = [
        _spread(indices[..., j].astype(np.int64), apart, box.rank) for j in range(indices.shape[-1])
    ]
    coordinates = []
    for d in range(len(shape)):
        at: Any = np.zeros([1] * box.rank, np.int64)
        if d in numbered:
            at = at + np.clip(starts[numbered.index(d)], 0, shape[d] - sizes[d])
        if d in window:
            w = inside_windows[window.index(d)]
            at = at + _along(np.arange(box.start[w], box.end[w]), w, box.rank)
        if d in batched:
            b = batch[batched.index(d)]
            rows = np.arange(call.inputs[1].start[b], call.inputs[1].end[b])
            at = at + _along(rows, apart[b], box.rank)
        coordinates.append(np.broadcast_to(at, box.shape))
    return coordinates, np.broadcast_to(_legal(starts, numbered, sizes, shape), box.shape)


def _gather(call: Call) -> Array:
    x = call.operands[0]
    coordinates, inside = _places(call, _READS, call.params["slice_sizes"], call.outputs[0])
    value, held = _read(x, coordinates, call.inputs[0].start)
    value = np.where(held, value, np.zeros((), x.dtype))
    if call.params["mode"] == "FILL_OR_DROP":
        # Every shard knows which reads are outside; one of them answers for all.
        fill = _fill(x.dtype, call.params.get("fill_value")) if call.first else 0
        value = np.where(inside, value, fill)
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
        x, _, updates = call.operands
        sizes = window_sizes(call.params["dimension_numbers"], call.types)
        coordinates, inside = _places(call, _WRITES, sizes, call.inputs[2])
        local = [at - first for at, first in zip(coordinates, call.inputs[0].start, strict=True)]
        chosen = inside if call.params["mode"] != "CLIP" else np.ones(updates.shape, bool)
        for at, n in zip(local, x.shape, strict=True):
            chosen = chosen & (at >= 0) & (at < n)
        out, written = wide(x).copy(), tuple(at[chosen] for at in local)
        if combine is None:
            out[written] = updates[chosen]
        else:
            combine(out, written, updates[chosen].astype(out.dtype))
        return out

    return apply


def window_sizes(dims: Mapping[str, Any], types: Sequence[TensorType]) -> list[int]:
    """How long the windows of a scatter are in every dim of its operand."""
    sizes = [1] * types[0].rank
    removed = (*dims["inserted_window_dims"], *dims["operand_batching_dims"])
    window = [d for d in range(len(sizes)) if d not in removed]
    for d, u in zip(window, dims["update_window_dims"], strict=True):
        sizes[d] = types[2].shape[u]
    return sizes


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
