"""The elementary changes of layout: what each does to a layout, to a local array, and to the wire.

A `Change` over several axes treats them as one, ordered major to minor: block j of the cut is that
of the device whose coordinates along `axes`, in this order, ravel to j. JAX's collectives order the
devices of a group by the axis names in the order given, so the order is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.arrays import kind as kind_of
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape, permuted_to
from tapestry_egg.machine.costs import carried_as
from tapestry_egg.machine.tiles import Tiles
from tapestry_egg.monoids import Monoid, monoids, single_monoids
from tapestry_egg.monoids.fold import combine
from tapestry_egg.monoids.fold import zero as neutral_state

from .lying import laid_in_order
from .plan import Change

if TYPE_CHECKING:
    import jax

#: The changes that random keys take part in.
_OF_KEYS = ("all_gather", "all_to_all", "permute", "slice")


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one step puts on the wire: a collective over `axes`, and its payload in bytes.

    The payload is the larger side on one device: what leaves an all-gather, what enters any other.
    """

    kind: str
    axes: tuple[int, ...]
    payload_bytes: int
    group: int  # devices that take part together; of a permute the largest cycle
    count: int = 1


def turns(
    step: Change,
    shape: Sequence[int],
    kind: str = "all_gather",
    block: int = 0,
    tiles: Tiles | None = None,
) -> bool:
    """Whether a change of this kind does not give, or take, a tensor of this shape as its dims are
    written: it works along another dim than the first, and what devices get, or have, comes one
    after another in memory. Whole tiles it takes where they lie, in blocks of `block` of the dim
    (compiled for v5e by libtpu 0.0.52)."""
    if step.kind != kind or prod(shape[: step.dim]) <= 1:
        return False
    if tiles is None:
        return True
    from_end = len(shape) - (step.dim or 0)
    return block % {1: tiles.lanes, 2: tiles.rows}.get(from_end, 1) != 0


def after(step: Change, layout: Layout, where: str = "") -> Layout:
    """The layout that `step` leads to. Raises PlanError where it does not apply to `layout`."""
    dims, axes = list(layout.dims), step.axes
    partial = layout.partial

    def refuse(why: str) -> PlanError:
        return PlanError(f"{step.kind} over axes {axes} {why}, {layout}", where=where)

    def cut(dim: int | None) -> int:
        if dim is None or not 0 <= dim < len(dims):
            raise refuse(f"has no dim {dim} to work on")
        return dim

    if step.kind in ("all_gather", "all_to_all"):
        k = cut(step.dim)
        if not axes or dims[k][-len(axes) :] != axes:
            raise refuse(f"needs them as the minor-most cut of dim {k}")
        dims[k] = dims[k][: -len(axes)]
        if step.kind == "all_to_all":
            to = cut(step.to_dim)
            if to == k:
                raise refuse("has the same dim on both sides")
            dims[to] += axes
    elif step.kind in ("all_reduce", "reduce_scatter"):
        if not set(axes) <= set(partial) or step.monoid != layout.monoid:
            raise refuse(f"under {step.monoid} needs partial values")
        partial = tuple(a for a in partial if a not in axes)
        if step.kind == "reduce_scatter":
            dims[cut(step.dim)] += axes
    elif step.kind == "permute":
        used = tuple(a for d in dims for a in d if a in axes)
        if step.dims is None or len(step.dims) != len(dims) or used != axes[: len(used)]:
            raise refuse(f"to {step.dims} needs another layout")
        dims = list(step.dims)
    elif step.kind in ("slice", "to_partial"):
        if set(axes) & set(layout.axes):
            raise refuse("needs a tensor that is replicated over them")
        if step.kind == "slice" and step.dims is not None:
            added = [tuple(a for a in d if a in axes) for d in step.dims]
            longer = tuple(x + y for x, y in zip(dims, added, strict=False))
            if longer != step.dims or tuple(chain(*added)) != axes:
                raise refuse(f"to {step.dims} needs another layout")
            dims = list(longer)
        elif step.kind == "slice":
            dims[cut(step.dim)] += axes
        else:
            if layout.monoid not in (None, step.monoid):
                raise refuse(f"would mix the monoids {layout.monoid} and {step.monoid}")
            partial = tuple(sorted(partial + axes))
    else:
        raise refuse("is no step that exists")
    monoid = (layout.monoid or step.monoid) if partial else None
    return Layout(tuple(dims), partial, monoid)


def traffic(step: Change, layout: Layout, type_: TensorType, mesh: MeshShape) -> Traffic | None:
    """What `step`, applied to a tensor in `layout`, puts on the wire; None when nothing moves."""
    axes = tuple(a for a in step.axes if mesh.sizes[a] > 1)
    if not axes or step.kind in ("slice", "to_partial"):
        return None
    before = layout.block(type_, mesh).nbytes
    parts = mesh.parts(axes)
    if step.kind == "permute":
        first, *others = pairs(step, mesh)
        count = 1 + len(others)
        return Traffic(step.kind, axes, before // count, _largest_cycle(first), count)
    if step.kind in ("all_gather", "all_to_all"):
        whole = before * (parts if step.kind == "all_gather" else 1)
        return Traffic(step.kind, axes, whole, parts)
    if _native(step, type_.dtype):
        return Traffic(step.kind, axes, before, parts)
    if step.kind == "reduce_scatter":
        return Traffic("all_to_all", axes, before, parts)
    return Traffic("all_gather", axes, before * parts, parts)


def apply(x: jax.Array, step: Change, mesh: MeshShape, platform: str = "") -> jax.Array:
    """The local block after `step`, from the local block before; inside `shard_map` over `mesh`.

    Compiled for `platform` (JAX's name): reductions are spelled such that its compiler keeps them.

    Raises PlanError for a monoid whose partial values are not single tensors, and for PRNG keys
    under a step of partial values, which they never are.
    """
    import jax
    from jax import lax

    axes = tuple(a for a in step.axes if mesh.sizes[a] > 1)
    if not axes:
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        if step.monoid is not None or step.kind not in _OF_KEYS:
            raise PlanError(
                f"{step.kind} of {x.dtype}[{', '.join(map(str, x.shape))}]: PRNG keys do not add up"
            )
        words = apply(jax.random.key_data(x), step, mesh, platform)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    names = tuple(mesh.names[a] for a in axes)
    parts = mesh.parts(axes)
    kind, dim, to = step.kind, step.dim or 0, step.to_dim or 0
    out: jax.Array
    if platform == "cpu" and kind in ("all_gather", "all_to_all", "permute") and _is_narrow(x):
        bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        out = lax.bitcast_convert_type(apply(bits, step, mesh), x.dtype)
    elif kind == "all_gather":
        out = lax.all_gather(x, names, axis=dim, tiled=True)
    elif kind == "all_to_all":
        _block(x.shape[to], parts, step)
        if platform == "tpu" and to == x.ndim - 1:
            return _exchange_on_tpu(x, names, to, dim, parts)
        out = lax.all_to_all(x, names, split_axis=to, concat_axis=dim, tiled=True)
    elif kind == "permute":
        rounds, group = pairs(step, mesh), tuple(mesh.names[a] for a in sorted(axes))
        one = step.pieces is None
        out = lax.ppermute(x, group, rounds[0]) if one else _in_pieces(x, step, mesh, group, rounds)
    elif kind == "slice" and step.dims is not None:
        out = x
        for k, cut in enumerate(step.dims):
            if own := tuple(a for a in cut if a in axes):
                out = apply(out, Change("slice", own, k), mesh, platform)
    elif kind == "slice":
        size = _block(x.shape[dim], parts, step)
        out = lax.dynamic_slice_in_dim(x, block_number(axes, mesh) * size, size, dim)
    elif kind == "to_partial":
        first = block_number(axes, mesh) == 0
        out = jax.numpy.where(first, x, zero(step.monoid, x.dtype))
    elif kind == "all_reduce" and _native(step, x.dtype.name):
        out = _reduced(x, _single(step.monoid).native(kind_of(x.dtype.name)), names, platform)
    elif kind == "all_reduce":
        out = _combine(lax.all_gather(x, names, axis=0), step.monoid, 0)
    elif kind == "reduce_scatter" and _native(step, x.dtype.name):
        _block(x.shape[dim], parts, step)
        out = (_scatter_on_tpu if platform == "tpu" else _scatter)(x, names, dim, parts)
    elif kind == "reduce_scatter":
        size = _block(x.shape[dim], parts, step)
        blocks = x.reshape(*x.shape[:dim], parts, size, *x.shape[dim + 1 :])
        blocks = lax.all_to_all(blocks, names, split_axis=dim, concat_axis=dim, tiled=True)
        out = _combine(blocks, step.monoid, dim)
    else:
        raise PlanError(f"{kind!r} is no step that exists")
    return out


def _is_narrow(x: jax.Array) -> bool:
    """Whether XLA for CPU would send an array in a wider type: floats of 8 or 16 bits."""
    import jax.numpy as jnp

    return bool(jnp.issubdtype(x.dtype, jnp.floating)) and jnp.finfo(x.dtype).bits in (8, 16)


def _place_of_nan(dtype: np.dtype[Any]) -> str:
    """Where a float has NaN among its bits, taken as an integer with its sign: "ends", beyond all
    numbers, "zero", alone, where a zero of negative sign would stand, or "" elsewhere."""
    signed = np.iinfo(f"int{8 * dtype.itemsize}")
    greatest, least = np.array([signed.max, signed.min], signed.dtype).view(dtype)
    return "ends" if greatest != greatest else "zero" if least != least else ""


def _reduced(x: jax.Array, native: str, names: tuple[str, ...], platform: str) -> jax.Array:
    """A sum, greatest or least element over devices.

    Collectives of floats lose a NaN that meets a number. So the greatest of floats is found as that
    of integers in their order, of which NaN is the last, in as many bits; not of 16 bits and fewer
    but on CPUs, as others have no such reductions of such integers, nor where floats have no sign.
    """
    import jax.numpy as jnp
    from jax import lax

    native_of: dict[str, Any] = {"psum": lax.psum, "pmax": lax.pmax, "pmin": lax.pmin}
    reduce, bits = native_of[native], 8 * x.dtype.itemsize
    as_it_is = native == "psum" or not jnp.issubdtype(x.dtype, jnp.floating)
    nan = "" if as_it_is else _place_of_nan(x.dtype)
    out: jax.Array
    if not nan or (bits < 32 and platform not in ("", "cpu")):
        out = reduce(x, names)
        return out
    ends = jnp.iinfo(f"int{bits}")
    last = ends.max if native == "pmax" else ends.min

    def turned(i: jax.Array) -> jax.Array:
        """Bits of floats as integers in the same order, and back."""
        return jnp.where(i < 0, i ^ ends.max, i)

    order = turned(lax.bitcast_convert_type(x, ends.dtype))
    if nan == "zero":  # NaN is -1; numbers between it and the end make room for it there
        nearer = (order >= 0) if native == "pmax" else (order < 0)
        order = order - jnp.where(nearer, jnp.sign(last), 0).astype(ends.dtype)
    order = reduce(jnp.where(jnp.isnan(x), last, order), names)
    if nan == "zero":
        nearer = (order >= -1) if native == "pmax" else (order < 0)
        back = order + jnp.where(nearer, jnp.sign(last), 0).astype(ends.dtype)
        order = jnp.where(order == last, -1, back)
    out = lax.bitcast_convert_type(turned(order), x.dtype)
    return out


#: A TPU's tiles: rows of lanes.
_LANES, _ROWS = 128, 8


def _scatter(x: jax.Array, names: tuple[str, ...], dim: int, parts: int) -> jax.Array:
    from jax import lax

    out: jax.Array = lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
    return out


def _scatter_on_tpu(x: jax.Array, names: tuple[str, ...], dim: int, parts: int) -> jax.Array:
    """A sum scattered along a dim that XLA's TPU compiler scatters along: the first of three or
    more, or one of the last two where blocks are whole tiles, but of a few matrices, which it may
    lay in tiles side by side, or narrow ones, whose rows it lays along lanes. Along any other, and
    of vectors, it reduces everything everywhere and slices, twice the bytes and the whole result on
    every device, in one all-reduce with whatever else is reduced. There the blocks come first, as a
    dim of their own, those of a few rows as lines of lanes. Sums of 32 KiB and less it reduces
    everywhere however they are spelled.

    Fewer columns than lanes would be padded to all of these. So another dim is laid along lanes, if
    one fills them, or columns that are whole rows of a tile are made rows; the compiler, which may
    lay the dims out as it likes, is told to have them so. Vectors, and other columns, pass as rows
    of lanes.
    """
    import jax.numpy as jnp

    from_end, block = x.ndim - dim, x.shape[dim] // parts
    lanes = from_end == 1 or (from_end == 2 and x.shape[-1] < _LANES)
    whole = block % (_LANES if lanes else _ROWS if from_end == 2 else block) == 0
    apart = x.ndim == 2 or prod(x.shape[:-2]) % _ROWS == 0
    if (from_end < 3 and whole and apart) or (from_end > 2 and dim == 0):
        return _scatter(x, names, dim, parts)
    rows = x.size // x.shape[-1]
    if from_end == 1 and block < _LANES and rows % _LANES == 0:
        wide = [d for d, n in enumerate(x.shape[:-1]) if n % _LANES == 0]
        if x.shape[-1] < _LANES and wide and rows // x.shape[wide[-1]] % _ROWS == 0:
            return _scatter_columns(x, names, parts, wide[-1])
        if block % _ROWS == 0:
            turned = laid_in_order(x.reshape(rows, -1).T)
            return _scatter(turned, names, 0, parts).T.reshape(*x.shape[:-1], block)
    blocks = _blocks_first(x, dim, parts)
    if from_end == 1 and (x.ndim == 1 or block % _ROWS):
        if x.size % (parts * _ROWS * _LANES) == 0:
            turned = jnp.moveaxis(blocks, -1, 1)
            lines = turned.reshape(-1, _LANES)
            got = _scatter(lines, names, 0, parts).reshape(turned.shape[1:])
            return jnp.moveaxis(got, 0, -1)
        if x.ndim == 1:
            return _scatter(x, names, dim, parts)
    if not whole and from_end == 2:
        return _scatter_lines(blocks, names)
    # The reshape keeps the compiler from taking the exchange of dims back.
    flat = blocks.reshape(parts, -1, blocks.shape[-1])
    return _scatter(flat, names, 0, parts).reshape(blocks.shape[1:])


def _scatter_lines(blocks: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """A sum scattered in these blocks, each as whole tiles of lines of lanes, the last of them
    filled up with zeros where that adds no more than a third."""
    import jax.numpy as jnp

    parts, tile = blocks.shape[0], _ROWS * _LANES
    elements = blocks.size // parts
    padding = -elements % tile
    flat = blocks.reshape(parts, elements)
    if 3 * padding > elements:
        return _scatter(flat, names, 0, parts).reshape(blocks.shape[1:])
    lines = jnp.pad(flat, ((0, 0), (0, padding))).reshape(-1, _LANES)
    got = _scatter(lines, names, 0, parts).reshape(-1)
    return got[:elements].reshape(blocks.shape[1:])


def _scatter_columns(x: jax.Array, names: tuple[str, ...], parts: int, wide: int) -> jax.Array:
    """A sum scattered along the last dim, with dim `wide` along a TPU's lanes in its place."""

    last = x.ndim - 1
    order = [last, *(d for d in range(last) if d != wide), wide]
    turned = x.transpose(order)
    flat = turned.reshape(x.shape[-1], -1, x.shape[wide])
    got = _scatter(laid_in_order(flat), names, 0, parts)
    back = [order.index(d) for d in range(x.ndim)]
    return got.reshape(-1, *turned.shape[1:]).transpose(back)


def _exchange_on_tpu(
    x: jax.Array, names: tuple[str, ...], split: int, concat: int, parts: int
) -> jax.Array:
    """An all-to-all that splits lanes, with the blocks as a dim of their own that comes first.

    XLA's TPU compiler would lay the array out with lanes outermost, and pad the dims that take
    their place in the tiles, up to eight times the array. The dims between become one, of rows,
    where the last of them fills tiles; else what is left of lanes comes before them, as XLA would
    pad it to all lanes, up to sixteen times, to make rows of them.
    """
    import jax.numpy as jnp
    from jax import lax

    blocks = _blocks_first(x, split, parts)
    whole = x.shape[-2] % _ROWS == 0
    turned = blocks if whole else jnp.moveaxis(blocks, -1, 1)
    flat = turned.reshape(parts, -1, turned.shape[-1])
    got = lax.all_to_all(flat, names, split_axis=0, concat_axis=0, tiled=True)
    got = got.reshape(turned.shape)
    out = jnp.moveaxis(got if whole else jnp.moveaxis(got, 1, -1), 0, concat)
    shape = [n * parts if d == concat else n for d, n in enumerate(blocks.shape[1:])]
    return out.reshape(shape)


def _blocks_first(x: jax.Array, dim: int, parts: int) -> jax.Array:
    """[parts, *block]: the blocks of one dim, one after the other."""
    import jax.numpy as jnp

    cut = x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
    return jnp.moveaxis(cut, dim, 0)


def block_number(axes: tuple[int, ...], mesh: MeshShape) -> jax.Array | int:
    """Which block this device holds of a dim cut by `axes`, major to minor: a traced s32[]."""
    from jax import lax

    number: jax.Array | int = 0
    for a in axes:
        if mesh.sizes[a] > 1:
            number = number * mesh.sizes[a] + lax.axis_index(mesh.names[a])
    return number


def places_of(axes: Sequence[int], mesh: MeshShape) -> list[int]:
    """Where in its group the device of block 0 is, of block 1, ...: permutes number the devices of
    a group as the mesh does, whatever the order of the axes."""
    sizes = [mesh.sizes[a] for a in sorted(axes)]
    numbers = np.arange(prod(sizes)).reshape(sizes)
    found: list[int] = numbers.transpose([sorted(axes).index(a) for a in axes]).ravel().tolist()
    return found


def pairs(step: Change, mesh: MeshShape) -> list[list[tuple[int, int]]]:
    """Which device of its group sends to which, numbered as JAX's permutes have it, in every round.

    In round c a device sends the piece of its block whose number along `to_dim`, and that of the
    piece in the block that gets it along `dim`, come to c modulo the number of pieces: so each
    device sends one piece and gets one.
    """
    axes = [a for a in step.axes if mesh.sizes[a] > 1]
    send, get = (np.array(places_of(x, mesh)) for x in (axes, permuted_to(axes, step.dims or ())))
    if step.pieces is None:
        return [list(zip(send.tolist(), get.tolist(), strict=True))]
    n, k, to = step.pieces, step.dim or 0, step.to_dim or 0
    before, after = _blocks(step, mesh)
    found = []
    for c in range(n):
        at = [*np.unravel_index(np.arange(len(send)), before)]
        number = (c - at[k]) % n
        at[k], at[to] = at[k] // n, at[to] * n + number
        device = get[np.ravel_multi_index(at, after)]
        found.append(list(zip(send.tolist(), device.tolist(), strict=True)))
    return found


def _blocks(step: Change, mesh: MeshShape) -> tuple[list[int], list[int]]:
    """How many blocks every dim is cut into before and after a permute of pieces, and last how many
    devices of the group hold each."""
    n, k, to = step.pieces or 1, step.dim or 0, step.to_dim or 0
    after = [mesh.parts(d) for d in step.dims or ()]
    before = [*after]
    before[k], before[to] = after[k] * n, after[to] // n
    held = mesh.parts(step.axes) // prod(after)
    return [*before, held], [*after, held]


def _in_pieces(
    x: jax.Array,
    step: Change,
    mesh: MeshShape,
    group: tuple[str, ...],
    rounds: Sequence[Sequence[tuple[int, int]]],
) -> jax.Array:
    import jax.numpy as jnp
    from jax import lax

    n, k, to = len(rounds), step.dim or 0, step.to_dim or 0
    size = _block(x.shape[to], n, step)
    before, after = _blocks(step, mesh)
    devices = np.arange(prod(before))
    sent, got = (
        jnp.asarray(np.unravel_index(devices, shape)[dim] % n)[block_number(axes, mesh)]
        for shape, dim, axes in (
            (before, k, step.axes),
            (after, to, permuted_to(step.axes, step.dims or ())),
        )
    )
    pieces = [
        lax.ppermute(lax.dynamic_slice_in_dim(x, (c - sent) % n * size, size, to), group, each)
        for c, each in enumerate(rounds)
    ]
    every = jnp.stack(pieces)
    return jnp.concatenate([every[(p + got) % n] for p in range(n)], axis=k)


def _largest_cycle(sent: Sequence[tuple[int, int]]) -> int:
    to, longest = dict(sent), 1
    while to:
        first, at = to.popitem()
        length = 1
        while at != first:
            at, length = to.pop(at), length + 1
        longest = max(longest, length)
    return longest


def zero(monoid: str | None, dtype: jax.numpy.dtype) -> jax.Array:
    """The neutral element of a monoid, a scalar of the given dtype.

    Raises PlanError for a monoid whose partial values are not single tensors.
    """
    import jax.numpy as jnp

    (neutral,) = neutral_state(_single(monoid), dtype, xp=jnp).values()
    return neutral


def _native(step: Change, dtype: str) -> bool:
    """Whether one collective does the whole step, as XLA has it."""
    return carried_as(step.kind, step.monoid, dtype) == step.kind


def _combine(x: jax.Array, monoid: str | None, dim: int) -> jax.Array:
    """Combine along `dim` on this device."""
    import jax.numpy as jnp
    from jax import lax

    of = _single(monoid)
    part = of.state[0].name

    def both(a: jax.Array, b: jax.Array) -> jax.Array:
        return combine(of, {part: a}, {part: b}, xp=jnp)[part]

    out: jax.Array = lax.reduce(x, zero(monoid, x.dtype), both, (dim,))
    return out


def _block(n: int, parts: int, step: Change) -> int:
    """Size of one of `parts` equal blocks."""
    if n % parts:
        raise PlanError(f"{step.kind} cannot cut {n} elements into {parts} equal blocks")
    return n // parts


def _single(monoid: str | None) -> Monoid:
    """The monoid of that name, whose partial values are single tensors."""
    if monoid not in single_monoids():
        raise PlanError(
            f"partial values under {monoid!r} cannot be combined over the mesh",
            hint=f"The monoids that can are {', '.join(single_monoids())}.",
        )
    return monoids()[str(monoid)]


def wire_bytes(kind: str, payload: float, group: int) -> float:
    """Bytes that one device sends, by the bandwidth-optimal algorithm, for a payload in bytes.

    The payload is the larger side of the collective on one device: what leaves an all-gather, what
    enters any other.
    """
    if group <= 1:
        return 0.0
    share = (group - 1) / group
    if kind == "all_reduce":
        return 2 * payload * share
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return payload * share
    return float(payload)
