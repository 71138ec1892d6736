"""Proposals of contractions: products and convolutions, in every spelling of their dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType

from .samples import Draw, Known, Proposal, first


def dot(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    """A product with its dims in any order, batched or not."""
    rng = draw.rng
    lhs, rhs = known
    dtype = first(known, draw, 1).dtype
    out: Any = {"$dtype": dtype}
    narrow = kind(dtype) in ("float", "int") and dtype not in ("float32", "int32")
    if draw.chance(0.5 if narrow else 0.1):
        out = {"$dtype": "float32" if kind(dtype) == "float" else "int32"} if narrow else None
    params = {"precision": _precision(draw), "preferred_element_type": out, "out_sharding": None}
    if lhs is None and rhs is None:
        lhs = draw.tensor(draw.rank((1, 2, 2, 2, 3, 3, 4)))
    own = lhs if lhs is not None else rhs
    assert own is not None
    batches = 1 if own.rank >= 2 and draw.chance(0.35) else 0
    if own.rank >= 3 and batches and draw.chance(0.2):
        batches = 2
    most = own.rank - batches
    # Of operands that are known, two pairs may be crossed; unknown ones come as they are wanted.
    both = lhs is not None and rhs is not None
    count = min(most, rng.choice((1, 1, 1, 2, 2, 0) if both else (1, 1, 1, 1, 1, 2, 0)))
    dims = list(range(own.rank))
    if draw.chance(0.5):
        batch = dims[:batches]
        rest = dims[batches:]
        contract = (rest[len(rest) - count :] if lhs is not None else rest[:count]) if count else []
    else:
        chosen = rng.sample(dims, batches + count)
        batch, contract = chosen[:batches], chosen[batches:]
    if lhs is not None and rhs is not None:
        other: list[int] = []
        for d in (*batch, *contract):
            fits = [e for e in range(rhs.rank) if e not in other and rhs.shape[e] == lhs.shape[d]]
            if not fits:
                return None
            other.append(fits[0] if draw.chance(0.4) else rng.choice(fits))
        paired = (other[:batches], other[batches:])
    else:
        spare = [draw.extent() for _ in range(rng.choice((0, 1, 1, 1, 1, 2)))]
        slots: list[tuple[int, int]] = [
            (own.shape[d], k) for k, d in enumerate((*batch, *contract))
        ]
        order = slots[:batches]
        tail = [*slots[batches:], *((n, -1) for n in spare)]
        if rhs is not None:  # the left operand is made: contracted dims last
            tail = [*((n, -1) for n in spare), *slots[batches:]]
        if draw.chance(0.4):
            tail = [*order, *tail]
            order = []
            rng.shuffle(tail)
        made = [*order, *tail]
        at = [next(i for i, (_, k) in enumerate(made) if k == j) for j in range(len(slots))]
        paired = (at[:batches], at[batches:])
        filled = TensorType(tuple(n for n, _ in made), dtype)
        if rhs is None:
            rhs = filled
        else:
            lhs = filled
            batch, contract, paired = paired[0], paired[1], (batch, contract)
    assert lhs is not None and rhs is not None
    if lhs.dtype != rhs.dtype:
        return None
    params["dimension_numbers"] = [[contract, paired[1]], [batch, paired[0]]]
    return params, [lhs, rhs]


def conv(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    """A convolution in one or two dims, padded, strided, dilated or grouped."""
    rng = draw.rng
    lhs, rhs = known
    rank = next((t.rank for t in known if t is not None), rng.choice((3, 3, 4)))
    if rank not in (3, 4) or (lhs and rhs and lhs.rank != rhs.rank):
        return None
    space = rank - 2
    if draw.chance(0.5):
        specs = [list(range(rank))] * 3
    else:
        specs = [[0, rank - 1, *range(1, rank - 1)], [rank - 1, rank - 2, *range(space)]]
        specs.append(specs[0])
    ls, rs, os = specs
    window = [rhs.shape[rs[2 + d]] if rhs else rng.choice((1, 2, 3, 3)) for d in range(space)]
    dilated = [rng.choice((1, 1, 1, 2, 3)) for _ in range(space)]
    padding = [[rng.choice((0, 0, 1, 2, -1)), rng.choice((0, 0, 1, -1))] for _ in range(space)]
    if draw.chance(0.4):
        padding = [[0, 0]] * space
    elif draw.chance(0.3):
        padding = [
            [((w - 1) * r) // 2, (w - 1) * r - ((w - 1) * r) // 2]
            for w, r in zip(window, dilated, strict=True)
        ]
    groups = rng.choice((1, 1, 1, 2))
    batches = rng.choice((1, 1, 1, 1, 2)) if groups == 1 else 1
    channels = lhs.shape[ls[1]] if lhs else 0
    inner = rhs.shape[rs[1]] if rhs else (channels // groups if lhs else rng.choice((1, 2, 3)))
    if rhs and lhs:
        groups = channels // inner if inner else 0
    if batches > 1 and (groups > 1 or (lhs and lhs.shape[ls[0]] % batches)):
        batches = 1
    if groups == 0 or inner == 0 or (lhs and inner * groups != channels):
        return None
    outer = rhs.shape[rs[0]] if rhs else groups * batches * rng.choice((1, 2))
    if outer % groups:
        return None
    if outer % batches:
        batches = 1
    dtype = first(known, draw, 1).dtype
    if lhs is None:
        sizes = [(w - 1) * r + rng.choice((1, 2, 3)) for w, r in zip(window, dilated, strict=True)]
        lhs = _placed(ls, [batches * rng.choice((1, 2)), inner * groups, *sizes], dtype)
    if rhs is None:
        rhs = _placed(rs, [outer, inner, *window], dtype)
    if lhs.dtype != rhs.dtype:
        return None
    holes = [1 if draw.chance(0.8) else rng.choice((2, 2, 3)) for _ in range(space)]
    for d in range(space):
        size = (lhs.shape[ls[2 + d]] - 1) * holes[d] + 1 + sum(padding[d])
        if size < (window[d] - 1) * dilated[d] + 1 or lhs.shape[ls[2 + d]] + min(padding[d]) < 1:
            return None
    return {
        "window_strides": [rng.choice((1, 1, 2)) for _ in range(space)],
        "padding": padding,
        "lhs_dilation": holes,
        "rhs_dilation": dilated,
        "dimension_numbers": {
            "$class": "ConvDimensionNumbers",
            "lhs_spec": ls,
            "rhs_spec": rs,
            "out_spec": os,
        },
        "feature_group_count": groups,
        "batch_group_count": batches,
        "precision": _precision(draw),
        "preferred_element_type": None,
        "out_sharding": None,
    }, [lhs, rhs]


def _precision(draw: Draw) -> Any:
    """What a product asks for, which most leave to the backend."""
    word = draw.rng.choice((None, None, None, "HIGHEST", "HIGH"))
    return word and {"$enum": ["Precision", word]}


def _placed(spec: Sequence[int], sizes: Sequence[int], dtype: str) -> TensorType:
    at = dict(zip(spec, sizes, strict=True))
    return TensorType(tuple(at[d] for d in range(len(at))), dtype)


def agrees(params: Mapping[str, Any], lhs: TensorType, rhs: TensorType) -> bool:
    """Whether the dims that a product pairs have equal extents; templates take that for granted."""
    contract, batch = params["dimension_numbers"]
    left, right = (*contract[0], *batch[0]), (*contract[1], *batch[1])
    return len(left) == len(right) and all(
        a < lhs.rank and b < rhs.rank and lhs.shape[a] == rhs.shape[b]
        for a, b in zip(left, right, strict=True)
    )


def convolves(params: Mapping[str, Any], lhs: TensorType, rhs: TensorType) -> bool:
    """Whether the channels of a convolution are those of its groups, as JAX asks."""
    dims = params["dimension_numbers"]
    ls, rs = dims["lhs_spec"], dims["rhs_spec"]
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    spatial = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    if not lhs.rank == len(ls) == rhs.rank == len(rs):
        return False
    if any(len(params[name]) != lhs.rank - 2 for name in spatial):
        return False
    channels, outer = lhs.shape[ls[1]], rhs.shape[rs[0]]
    whole = outer % groups == 0 and outer % batches == 0 and lhs.shape[ls[0]] % batches == 0
    return whole and channels == groups * rhs.shape[rs[1]]


def ragged(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    """A product whose rows belong to groups: each with a matrix of its own, or summed apart."""
    lhs, rhs, sizes = known
    if lhs is not None and lhs.rank != 2:
        return None
    if lhs is None:
        inner = rhs.shape[-2] if rhs is not None and rhs.rank == 3 else draw.extent()
        lhs = TensorType((draw.extent(), inner), first(known[:2], draw).dtype)
    summed = (rhs is not None and rhs.rank == 2) or (rhs is None and draw.chance(0.3))
    groups = sizes.shape[0] if sizes is not None and sizes.rank == 1 else draw.rng.choice((1, 2, 3))
    if rhs is None:
        shape = (lhs.shape[0], draw.extent()) if summed else (groups, lhs.shape[-1], draw.extent())
        rhs = TensorType(shape, lhs.dtype)
    elif rhs.rank == 3:
        groups = rhs.shape[0]
    sizes = sizes or TensorType((groups,), "int32")
    fits = lhs.shape[0] == rhs.shape[0] if summed else lhs.shape[1:] == rhs.shape[1:2]
    if lhs.rank != 2 or rhs.rank != 3 - summed or not fits or sizes.shape != (groups,):
        return None
    return {
        "ragged_dot_dimension_numbers": {
            "$class": "RaggedDotDimensionNumbers",
            "dot_dimension_numbers": [[[0 if summed else 1], [0 if summed else 1]], [[], []]],
            "lhs_ragged_dimensions": [0],
            "rhs_group_dimensions": [] if summed else [0],
        },
        "precision": _precision(draw),
        "preferred_element_type": None,
        "group_offset": None,
        "out_sharding": None,
    }, [lhs, rhs, sizes]


def weighted(kernel: str, known: Known, draw: Draw) -> Proposal | None:
    """Scores, summed as exponentials or as the weights of values."""
    made = dot("dot_general", known[:2], draw)
    if made is None:
        return None
    numbers = made[0]["dimension_numbers"]
    x, w = made[1]
    (xk, wk), (xb, wb) = numbers
    sizes = [x.shape[d] for d in xb]
    sizes += [x.shape[d] for d in range(x.rank) if d not in (*xk, *xb)]
    sizes += [w.shape[d] for d in range(w.rank) if d not in (*wk, *wb)]
    params: dict[str, Any] = {"scores": numbers, "dtype": {"$dtype": x.dtype}}
    if kernel == "dot_logsumexp":
        axes = draw.subset(range(len(sizes)), 1)
        return ({**params, "axes": axes}, [x, w]) if axes else None
    dims = draw.rng.sample(range(len(sizes)), len(sizes))
    if not dims:
        return None
    summed = dims[: draw.rng.randint(1, len(dims))]
    batch = draw.subset(sorted(dims[len(summed) :]))
    types = [x, w]
    if kernel == "exp_dot":
        params["shift"] = shift = draw.subset(range(len(sizes)))
        types.append(known[2] or TensorType(tuple(sizes[d] for d in shift), x.dtype))
        if types[-1].shape != tuple(sizes[d] for d in shift):
            return None
    extents = [(sizes[d], k) for k, d in enumerate((*batch, *summed))]
    extents += [(draw.extent(), -1)] * draw.rng.choice((0, 1, 1))
    draw.rng.shuffle(extents)
    at = [next(i for i, (_, k) in enumerate(extents) if k == j) for j in range(len(batch + summed))]
    values = TensorType(tuple(n for n, _ in extents), x.dtype)
    place = 3 if kernel == "exp_dot" else 2
    if known[place] not in (None, values):
        return None
    types.append(values)
    params["values"] = [[summed, at[len(batch) :]], [batch, at[: len(batch)]]]
    params["swapped"] = draw.rng.choice((0, 1))
    if len(known) == 5:
        params["mask_dims"] = masked = draw.subset(range(len(sizes)))
        shape = tuple(1 if draw.chance(0.3) else sizes[d] for d in masked)
        types.append(known[3] or TensorType(shape, "bool"))
        types.append(known[4] or TensorType((), x.dtype))
        fits = zip(types[3].shape, masked, strict=False)
        if types[3].rank != len(masked) or any(n not in (1, sizes[d]) for n, d in fits):
            return None
    return params, types
