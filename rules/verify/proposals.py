"""Proposals: random small operations, kernel by kernel, to try rules on.

A proposal fills in what is open of an operation: operand types that nothing has fixed yet, and all
parameters. Odd cases are drawn on purpose and often: extents of 1, scalars that broadcast, identity
permutations, whole slices, repeated sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.rules.language.families import MAP, MAP2

from .contractions import conv, dot, ragged, weighted
from .samples import DTYPES, NOTHING, Draw, Known, Proposal, first, sampled

# Proposals of reads and writes at places that are data: gathers and scatters of every form.


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


def propose(
    kernel: str, known: Known, draw: Draw, said: Mapping[str, Any] = NOTHING
) -> Proposal | None:
    """An operation of this kernel whose operands have the types that are known, and some of whose
    parameters are `said`; None where that kernel has none, or none was found."""
    if kernel in _PROPOSALS:
        found = _PROPOSALS[kernel](kernel, known, draw)
        return found and ({**found[0], **said}, found[1])
    return sampled(kernel, known, draw, said)


def _convert(kernel: str, known: Known, draw: Draw) -> Proposal:
    new = draw.rng.choice(draw.named if draw.named and draw.chance(0.6) else [*DTYPES, draw.dtype])
    params = {"new_dtype": {"$dtype": new}, "weak_type": False, "sharding": None}
    return params, [known[0] or draw.tensor()]


def _integer_pow(kernel: str, known: Known, draw: Draw) -> Proposal:
    x = known[0] or draw.tensor()
    return {"y": _exponent(draw, x.dtype)}, [x]


def _exponent(draw: Draw, dtype: str) -> int:
    """Mostly those that programs have; else others, also at and beside the numbers of the rule."""
    if draw.chance(0.5):
        return draw.rng.choice((0, 1, 2, 2, 3))
    spoken = [m + d for m in draw.landmarks if 2 <= abs(m) <= 32 for d in (-1, 0, 1)]
    some = [*range(-4, 9), *spoken, *spoken]
    real = kind(dtype) in ("float", "complex")
    return draw.rng.choice([y for y in some if real or y >= 0])


def _binary(kernel: str, known: Known, draw: Draw) -> Proposal:
    params = {"out_dtype": None} if kernel == "mul" else {}
    types = list(known)
    free = [p for p, t in enumerate(types) if t is None]
    model = first(known, draw)
    if len(free) == 2:
        types[draw.rng.choice(free)] = model
        free = [p for p, t in enumerate(types) if t is None]
    for p in free:
        shape = model.shape
        if draw.chance(0.25):
            shape = ()
        elif draw.chance(0.12):
            shape = tuple(1 if draw.chance(0.5) else n for n in shape)
        elif not shape and draw.chance(0.5):
            shape = draw.shape()
        types[p] = TensorType(shape, model.dtype)
    return params, [t for t in types if t is not None]


def _select(kernel: str, known: Known, draw: Draw) -> Proposal:
    which, *cases = known
    case = first(cases, draw)
    if which is None:
        which = TensorType(() if draw.chance(0.2) else case.shape, "bool")
    if all(c is None for c in cases) and which.rank:
        case = TensorType(which.shape, case.dtype)
    return {}, [which, *(c or case for c in cases)]


def _clamp(kernel: str, known: Known, draw: Draw) -> Proposal:
    x = known[1] or draw.tensor()
    bound = TensorType(() if draw.chance(0.7) else x.shape, x.dtype)
    return {}, [known[0] or bound, x, known[2] or bound]


def _transpose(kernel: str, known: Known, draw: Draw) -> Proposal:
    x = known[0] or draw.tensor(draw.rank((1, 2, 2, 3, 3, 4)))
    order = list(range(x.rank))
    if draw.chance(0.3):
        order.reverse()
    elif draw.chance(0.3):  # nearly as it was: two neighbours, at the end as often as elsewhere
        k = len(order) - 2 if draw.chance(0.5) else draw.rng.randrange(max(1, len(order) - 1))
        order[k : k + 2] = reversed(order[k : k + 2])
    elif draw.chance(0.65):
        draw.rng.shuffle(order)
    return {"permutation": order}, [x]


def _reshape(kernel: str, known: Known, draw: Draw) -> Proposal:
    x = known[0] or draw.tensor()
    sizes = list(x.shape)
    for _ in range(draw.rng.choice((0, 1, 1, 2))):
        k = draw.rng.randrange(len(sizes)) if sizes else 0
        step = draw.rng.choice(("merge", "split", "one", "flat", "turn"))
        if step == "merge" and len(sizes) > 1:
            k = min(k, len(sizes) - 2)
            sizes[k : k + 2] = [sizes[k] * sizes[k + 1]]
        elif step == "split" and sizes:
            parts = [n for n in (2, 3) if sizes[k] % n == 0]
            if parts:
                n = draw.rng.choice(parts)
                sizes[k : k + 1] = [n, sizes[k] // n]
        elif step == "one" and len(sizes) < 4:
            sizes.insert(k, 1)
        elif step == "flat":
            sizes = [prod(sizes)]
        elif step == "turn":
            draw.rng.shuffle(sizes)
    return {"new_sizes": sizes, "dimensions": None, "sharding": None}, [x]


def _squeeze(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    x = known[0]
    if x is None:
        sizes = list(draw.shape(draw.rank((0, 1, 2, 3))))
        sizes.insert(draw.rng.randint(0, len(sizes)), 1)
        x = TensorType(tuple(sizes), draw.dtype)
    ones = [d for d, n in enumerate(x.shape) if n == 1]
    return ({"dimensions": draw.subset(ones, 1)}, [x]) if ones else None


def _broadcast(kernel: str, known: Known, draw: Draw) -> Proposal:
    x = known[0] or draw.tensor(draw.rank((0, 0, 1, 1, 2, 3)))
    rank = min(8, x.rank + draw.rng.choice((0, 1, 1, 2)))
    to = sorted(draw.rng.sample(range(rank), x.rank)) if rank >= x.rank else list(range(x.rank))
    shape = list(draw.shape(max(rank, x.rank)))
    for n, d in zip(x.shape, to, strict=True):
        if n != 1 or draw.chance(0.4):
            shape[d] = n
    return {"shape": shape, "broadcast_dimensions": to, "sharding": None}, [x]


def _slice(kernel: str, known: Known, draw: Draw) -> Proposal:
    x = known[0] or draw.tensor(draw.rank((1, 2, 2, 3)))
    start, limit, step = [], [], []
    cut = draw.rng.randrange(x.rank) if x.rank and draw.chance(0.5) else -1
    for d, n in enumerate(x.shape):
        if n and (d == cut or (cut < 0 and draw.chance(0.5))):
            a = draw.rng.choice((0, 0, n // 2, 1, draw.rng.randrange(n)))
            a = min(a, n - 1)
            b = draw.rng.choice((n, n, max(a + 1, n // 2), min(n, a + 1)))
        else:
            a, b = 0, n
        start.append(a)
        limit.append(b)
        step.append(draw.rng.choice((1, 1, 2)))
    strides = step if draw.chance(0.2) else None
    return {"start_indices": start, "limit_indices": limit, "strides": strides}, [x]


def slice_beside(params: Mapping[str, Any], x: TensorType, draw: Draw) -> dict[str, Any]:
    """A slice of a tensor of which there is another: in every dim at the same place, behind it, or
    as long elsewhere. Rules speak of such pairs, and chance alone seldom meets them."""
    places = list(zip(x.shape, params["start_indices"], params["limit_indices"], strict=True))
    ways = [draw.rng.choice(("same", "behind", "elsewhere", "elsewhere")) for _ in places]
    if draw.chance(0.6):
        ways = [draw.rng.choice(("same", "same", "behind", "behind", "elsewhere")) for _ in places]
    short = [d for d, (n, a, b) in enumerate(places) if b - a < n]
    if len(short) > 1 and draw.chance(0.4):  # one step aside in a dim, and behind in another
        behind = [d for d in short if places[d][2] < places[d][0]] or short
        ways[d := draw.rng.choice(behind)] = "behind"
        ways[draw.rng.choice([e for e in short if e != d])] = "aside"
    start, limit = [], []
    for (n, a, b), way in zip(places, ways, strict=True):
        length = b - a
        match way:
            case "behind" if b < n:
                a, b = b, (min(n, b + length) if draw.chance(0.5) else n)
            case "aside" if length < n:
                a = draw.rng.choice([k for k in (a - 1, a + 1) if 0 <= k <= n - length])
                b = a + length
            case "elsewhere" if length < n:
                a = draw.rng.randint(0, n - length)
                b = a + length
        start.append(a)
        limit.append(b)
    return {"start_indices": start, "limit_indices": limit, "strides": params["strides"]}


def _pad(kernel: str, known: Known, draw: Draw) -> Proposal:
    x = known[0] or draw.tensor(draw.rank((1, 2, 2, 3)))
    config = []
    for n in x.shape:
        low, high = draw.rng.choice((0, 0, 1, 2)), draw.rng.choice((0, 0, 1, 2))
        if n > 2 and draw.chance(0.3):  # less than nothing: what is cut off
            low, high = draw.rng.choice(((-1, high), (low, -1), (-1, -1)))
        config.append([low, high, draw.rng.choice((0, 0, 0, 1))])
    if x.rank and draw.chance(0.4):  # along one dim only
        d = draw.rng.randrange(x.rank)
        config = [c if e == d else [0, 0, 0] for e, c in enumerate(config)]
    return {"padding_config": config}, [x, known[1] or TensorType((), x.dtype)]


def _rev(kernel: str, known: Known, draw: Draw) -> Proposal:
    x = known[0] or draw.tensor(draw.rank((1, 2, 2, 3)))
    return {"dimensions": draw.subset(range(x.rank))}, [x]


def _concatenate(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    model = first(known, draw, draw.rank((1, 2, 2, 3)))
    if not model.rank:
        return None
    fits = [
        d
        for d in range(model.rank)
        if all(
            t is None
            or (
                t.rank == model.rank
                and all(t.shape[e] == model.shape[e] for e in range(t.rank) if e != d)
            )
            for t in known
        )
    ]
    if not fits:
        return None
    d = draw.rng.choice(fits)
    types = []
    for t in known:
        n = model.shape[d] if draw.chance(0.5) else draw.extent()
        types.append(t or TensorType((*model.shape[:d], n, *model.shape[d + 1 :]), model.dtype))
    return {"dimension": d}, types


def _tile(kernel: str, known: Known, draw: Draw) -> Proposal:
    x = known[0] or draw.tensor()
    return {"reps": [draw.rng.choice((1, 1, 2)) for _ in x.shape]}, [x]


def _reduce(kernel: str, known: Known, draw: Draw) -> Proposal:
    x = known[0] or draw.tensor(draw.rank((1, 2, 3, 3, 3, 4)))
    axes = draw.subset(range(x.rank), 0 if draw.chance(0.1) else 1)
    if axes and draw.chance(0.5):
        axes = [draw.rng.choice(range(x.rank))]
    if 0 in x.shape and draw.chance(0.5):  # of nothing there is something
        axes = [d for d, n in enumerate(x.shape) if not n]
    return {"axes": axes, **({"out_sharding": None} if kernel == "reduce_sum" else {})}, [x]


def _normalised(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    x = known[0] or draw.tensor(draw.rank((1, 2, 3, 3)))
    return ({"axes": draw.subset(range(x.rank), 1)}, [x]) if x.rank else None


def _window(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    x = known[0] or draw.tensor(draw.rank((1, 2, 3)))
    window = [draw.rng.choice((1, 1, 2, min(n, 3) or 1)) for n in x.shape]
    # Also windows that hold nothing but padding, or fall between the elements.
    padding = [[0, 0] if draw.chance(0.7) else [draw.rng.choice((0, 1)), 1] for _ in x.shape]
    holes, gaps = ([1] * x.rank, [1] * x.rank)
    if draw.chance(0.3):
        holes = [draw.rng.choice((1, 2)) for _ in x.shape]
    if draw.chance(0.3):
        gaps = [draw.rng.choice((1, 2)) for _ in x.shape]
    for d, n in enumerate(x.shape):
        size = max(0, (n - 1) * holes[d] + 1) + sum(padding[d])
        if size < (window[d] - 1) * gaps[d] + 1:
            return None
    return {
        "window_dimensions": window,
        "window_strides": [draw.rng.choice((1, 1, 2)) for _ in x.shape],
        "padding": padding,
        "base_dilation": holes,
        "window_dilation": gaps,
    }, [x]


def _chosen(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    """What is added where the greatest or least element of each window lies."""
    source, operand = known
    made = _window("reduce_window_max", [operand], draw)
    if made is None:
        return None
    params, (operand,) = made
    if any(n != 1 for name in ("base_dilation", "window_dilation") for n in params[name]):
        return None
    (out,) = registry.output_types("reduce_window_max", params, [operand])
    kept = {k: v for k, v in params.items() if not k.endswith("dilation")}
    prim = {"$primitive": draw.rng.choice(("ge", "le"))}
    return {"select_prim": prim, **kept}, [source or out, operand]


def _iota(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    shape = list(draw.shape(draw.rank((1, 2, 3))))
    dtype = draw.dtype if draw.dtype != "bool" else "int32"
    at = draw.rng.randrange(len(shape))
    return {"dtype": {"$dtype": dtype}, "shape": shape, "dimension": at, "sharding": None}, []


def _dynamic_slice(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    count = len(known) - 1 - (kernel == "dynamic_update_slice")
    x = known[0] or draw.tensor(count)
    if x.rank != count:
        return None
    sizes = [draw.rng.randint(1, n) if n else 0 for n in x.shape]
    own = draw.rng.choice(("int32", "int32", "int32", "int8", "uint8", "int64"))
    starts = [t or TensorType((), own) for t in known[len(known) - count :]]
    if kernel == "dynamic_update_slice":
        return {}, [x, known[1] or TensorType(tuple(sizes), x.dtype), *starts]
    return {"slice_sizes": sizes}, [x, *starts]


_PROPOSALS: Mapping[str, Callable[[str, Known, Draw], Proposal | None]] = {
    **dict.fromkeys(MAP2, _binary),
    **dict.fromkeys(
        "reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor".split(),
        _reduce,
    ),
    **dict.fromkeys(("softmax", "logsumexp"), _normalised),
    **dict.fromkeys("reduce_window_sum reduce_window_max reduce_window_min".split(), _window),
    **dict.fromkeys(SCATTERS, scatter),
    "attention": weighted,
    "broadcast_in_dim": _broadcast,
    "clamp": _clamp,
    "concatenate": _concatenate,
    "conv_general_dilated": conv,
    "convert_element_type": _convert,
    "dot_general": dot,
    "dot_logsumexp": weighted,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_slice,
    "exp_dot": weighted,
    "gather": gather,
    "integer_pow": _integer_pow,
    "iota": _iota,
    "pad": _pad,
    "ragged_dot_general": ragged,
    "reshape": _reshape,
    "rev": _rev,
    "select_and_scatter_add": _chosen,
    "select_n": _select,
    "slice": _slice,
    "squeeze": _squeeze,
    "tile": _tile,
    "transpose": _transpose,
}

#: Every kernel that can be drawn, by its number of operands (None: any).
BY_ARITY: Mapping[int | None, tuple[str, ...]] = {
    0: ("iota",),
    1: (
        *MAP,
        *"transpose reshape squeeze broadcast_in_dim slice rev tile reduce_sum reduce_prod "
        "reduce_max reduce_min reduce_and reduce_or reduce_xor argmax argmin cumsum cumprod cummax "
        "cummin sort reduce_window_sum reduce_window_max reduce_window_min".split(),
    ),
    2: (*MAP2, "dot_general", "conv_general_dilated", "pad", "concatenate", "stack"),
    3: ("select_n", "clamp", "concatenate", "stack", "dynamic_slice"),
    4: ("concatenate", "stack"),
}
