"""Proposals of reads and writes at places that are data: gathers and scatters of every form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType

from .draws import Draw, Known, Proposal

SCATTERS = tuple(
    f"scatter{sign}{name}" for sign in "-_" for name in ("add", "sub", "mul", "max", "min")
) + ("scatter",)
_MODES = ("CLIP", "FILL_OR_DROP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")
_INDICES = ("int32", "int32", "int32", "int8", "uint8", "uint32", "int64")


def gather(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    """Windows of an operand, each at a place of its own."""
    x, indices = known
    x = x or draw.tensor(draw.rank((1, 1, 2, 2, 3)))
    found = _placed(x, indices, draw)
    if found is None:
        return None
    indices, mapped, batching, at = found
    sizes, dropped = _windows(x, mapped, batching, draw)
    if any(m > n for m, n in zip(sizes, x.shape, strict=True)):
        return None
    own = x.rank - len(dropped) - len(batching)
    fill: Any = None
    mode = draw.rng.choice(_MODES)
    if mode == "FILL_OR_DROP" and kind(x.dtype) != "key" and draw.chance(0.6):
        fill = bool(draw.rng.choice((0, 1))) if x.dtype == "bool" else draw.rng.choice((0, 1, 5))
    return {
        "dimension_numbers": {
            "$class": "GatherDimensionNumbers",
            "offset_dims": _within(own, indices.rank - 1, draw),
            "collapsed_slice_dims": dropped,
            "start_index_map": mapped,
            "operand_batching_dims": batching,
            "start_indices_batching_dims": at,
        },
        "slice_sizes": sizes,
        **_said(mode, draw),
        "fill_value": fill,
    }, [x, indices]


def scatter(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    """Windows that are written into an operand, each at a place of its own."""
    x, indices, updates = known
    if updates is None:
        x = x or draw.tensor(draw.rank((1, 1, 2, 2, 3)))
        found = _placed(x, indices, draw)
        if found is None:
            return None
        indices, mapped, batching, at = found
        sizes, dropped = _windows(x, mapped, batching, draw)
        own = [d for d in range(x.rank) if d not in (*dropped, *batching)]
        window = _within(len(own), indices.rank - 1, draw)
        shape = _arranged(window, [sizes[d] for d in own], indices.shape[:-1])
        updates = TensorType(shape, x.dtype)
    else:
        made = _for_updates(x, indices, updates, draw)
        if made is None:
            return None
        x, indices, mapped, dropped, window = made
        batching, at = [], []
        own = [d for d in range(x.rank) if d not in dropped]
        sizes = [1] * x.rank
        for d, u in zip(own, window, strict=True):
            sizes[d] = updates.shape[u]
    if updates.dtype != x.dtype or any(m > n for m, n in zip(sizes, x.shape, strict=True)):
        return None
    return {
        "dimension_numbers": {
            "$class": "ScatterDimensionNumbers",
            "update_window_dims": window,
            "inserted_window_dims": dropped,
            "scatter_dims_to_operand_dims": mapped,
            "operand_batching_dims": batching,
            "scatter_indices_batching_dims": at,
        },
        **_said(draw.rng.choice(_MODES), draw),
        "update_jaxpr": None,
        "update_consts": [],
    }, [x, indices, updates]


def _said(mode: str, draw: Draw) -> dict[str, Any]:
    return {
        "indices_are_sorted": draw.chance(0.2),
        "unique_indices": draw.chance(0.2),
        "mode": {"$enum": ["GatherScatterMode", mode]},
    }


def _placed(
    x: TensorType, indices: TensorType | None, draw: Draw
) -> tuple[TensorType, list[int], list[int], list[int]] | None:
    """Indices, the dims of the operand that they are places of, and the dims of both that go
    together."""
    if not x.rank or (indices is not None and not indices.rank):
        return None
    if indices is None:
        depth = draw.rng.choice((1, 1, 1, min(2, x.rank)))
        batch = list(draw.shape(draw.rng.choice((0, 1, 1, 1, 2))))
    else:
        depth, batch = indices.shape[-1], list(indices.shape[:-1])
    dims = list(range(x.rank))
    batching: list[int] = []
    at: list[int] = []
    if batch and x.rank > depth and draw.chance(0.2):
        d, b = draw.rng.choice(dims), draw.rng.randrange(len(batch))
        if indices is None:
            batch[b] = x.shape[d]
        if batch[b] == x.shape[d]:
            batching, at = [d], [b]
            dims.remove(d)
    if depth > len(dims):
        return None
    mapped = draw.rng.sample(dims, depth)
    if draw.chance(0.8):
        mapped.sort()
    type_ = indices or TensorType((*batch, depth), draw.rng.choice(_INDICES))
    return type_, mapped, batching, at


def _windows(
    x: TensorType, mapped: Sequence[int], batching: Sequence[int], draw: Draw
) -> tuple[list[int], list[int]]:
    """How long windows are in every dim of an operand, and the dims that results do not have."""
    sizes = list(x.shape)
    dropped = []
    for d, n in enumerate(x.shape):
        if d in batching:
            sizes[d] = 1
        elif d in mapped and draw.chance(0.75):
            sizes[d] = 1
            dropped.append(d)
        elif n and draw.chance(0.5 if d in mapped else 0.2):
            sizes[d] = draw.rng.randint(1, n)
    return sizes, dropped


def _for_updates(
    x: TensorType | None, indices: TensorType | None, updates: TensorType, draw: Draw
) -> tuple[TensorType, TensorType, list[int], list[int], list[int]] | None:
    """An operand and indices for updates that are known: with the dims of the operand that indices
    are places of, those that updates do not have, and those of updates that make a window."""
    batch = len(indices.shape) - 1 if indices is not None else draw.rng.randint(0, updates.rank)
    if not 0 <= batch <= updates.rank or (indices is not None and not indices.rank):
        return None
    window = _within(updates.rank - batch, batch, draw)
    places = [d for d in range(updates.rank) if d not in window]
    shape = tuple(updates.shape[d] for d in places)
    if indices is not None and indices.shape[:-1] != shape:
        return None
    depth = indices.shape[-1] if indices is not None else draw.rng.choice((1, 1, 2))
    rank = x.rank if x is not None else len(window) + draw.rng.randint(0, depth)
    if not 0 < depth <= rank or rank < len(window):
        return None
    dropped = sorted(draw.rng.sample(range(rank), rank - len(window)))
    if x is None:
        extents = [draw.extent() for _ in range(rank)]
        own = [d for d in range(rank) if d not in dropped]
        for d, u in zip(own, window, strict=True):
            extents[d] = updates.shape[u] + (draw.extent() if draw.chance(0.3) else 0)
        x = TensorType(tuple(extents), updates.dtype)
    free = [d for d in range(rank) if d not in dropped]
    if len(dropped) > depth:
        return None
    mapped = sorted([*dropped, *draw.rng.sample(free, depth - len(dropped))])
    type_ = indices or TensorType((*shape, depth), draw.rng.choice(_INDICES))
    return x, type_, mapped, dropped, window


def _within(own: int, batch: int, draw: Draw) -> list[int]:
    """The places of a window's dims among those of the indices: behind them, or anywhere."""
    rank = own + batch
    return (
        list(range(batch, rank)) if draw.chance(0.6) else sorted(draw.rng.sample(range(rank), own))
    )


def _arranged(window: Sequence[int], sizes: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    of = dict(zip(window, sizes, strict=True))
    others = iter(batch)
    return tuple(of[d] if d in of else next(others) for d in range(len(sizes) + len(batch)))
