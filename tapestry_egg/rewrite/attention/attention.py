"""Softmaxes of scores as fused attention: `flash_attention` and its backward pass in their place.

Of the dims of the scores, those that keys or values have beside the keys' own are batch and groups
of heads; the others are rows, and heads that share a group. The kernels of
`metakernels/templates/streaming.yaml` take them in the order [batch, rows, heads, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, without_unread
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.call import numpy_dtype
from tapestry_egg.reference.kernels import reference
from tapestry_egg.rewrite.rows.ordered import in_order
from tapestry_egg.tracing.codec import encode_params
from tapestry_egg.tracing.spelled import Spelled, at

from .sites import Scores, Site, Use, read_site, sites
from .sums import Foreign, TooLarge
from .views import Atom, Dims, Views, atoms_of, extent, renamed, unified

# Of these numbers no measurement is kept.

#: What stands where a mask fails is at most this: its exponential is zero beside any score.
_NOTHING = -1e4
#: What a mask puts in place of scores can be added to them instead: scores vanish beside it.
_ABSORBS = -1e9
#: Forward and backward factor are taken for one where rounding may tell them apart.
_SAME = 1e-5


@dataclass(frozen=True)
class _Axes:
    """The atoms of a site by what they are to the kernel."""

    batch: tuple[Atom, ...]
    groups: tuple[Atom, ...]
    shared: tuple[Atom, ...]
    rows: tuple[Atom, ...]
    keys: tuple[Atom, ...]
    width: tuple[Atom, ...]
    features: tuple[Atom, ...]

    @property
    def of_rows(self) -> list[tuple[Atom, ...]]:
        return [self.batch, self.rows, (*self.groups, *self.shared), self.width]

    @property
    def of_out(self) -> list[tuple[Atom, ...]]:
        return [*self.of_rows[:3], self.features]

    @property
    def of_keys(self) -> list[tuple[Atom, ...]]:
        return [self.batch, self.keys, self.groups, self.width]

    @property
    def of_values(self) -> list[tuple[Atom, ...]]:
        return [*self.of_keys[:3], self.features]

    @property
    def of_mask(self) -> list[tuple[Atom, ...]]:
        return [self.batch, (*self.groups, *self.shared), self.rows, self.keys]


@dataclass(frozen=True)
class _Call:
    """The kernel's operands as they are stored, with their dims, its axes and parameters."""

    axes: _Axes
    q: tuple[int, Dims]
    k: tuple[int, Dims]
    v: tuple[int, Dims]
    params: dict[str, Any]
    mask: tuple[int, Dims, bool] | None = None
    bias: tuple[int, Dims, float] | None = None


def with_fused_attention(graph: BlockGraph) -> tuple[BlockGraph, int]:
    """The graph with fused attention in the place of every softmax of scores that is recognised;
    the same graph where there is none. Regions stay as they are. And of how many softmaxes not all
    was read that they are made of, as there is a limit."""
    if not any(registry.meaning(op.kernel) == "exponential" for op in graph.operations):
        return graph, 0
    views = Views(graph)
    rewrite = _Rewrite(graph, views)
    ended = 0
    for op in sites(views):
        ended += _at_site(views, op, rewrite)
    return rewrite.graph_made(), ended


def _at_site(views: Views, op: Operation, rewrite: _Rewrite) -> bool:
    """Rewrite one softmax if it is recognised; whether reading it ended at a limit."""

    def read() -> None:
        views.ended = False
        site = read_site(views, op)
        if site is not None:
            rewrite.site(site)

    try:
        views.settled(read)
    except TooLarge:
        return True
    except (Foreign, ValueError):
        pass
    return views.ended


class _Rewrite:
    """Collects what takes the place of products, and puts the program together again."""

    def __init__(self, graph: BlockGraph, views: Views) -> None:
        self.graph, self.views = graph, views
        self.values = list(graph.values)
        self.constants = dict(graph.constants)
        self.order = {op.outputs[0]: k for k, op in enumerate(graph.operations) if op.outputs}
        #: number of an operation -> what stands before it; operations that are gone
        self.before: dict[int, list[Operation]] = {}
        self.replaced: dict[int, int] = {}  # value of the program -> value that stands for it

    def site(self, site: Site) -> None:
        """Replace the products of one softmax. Nothing is changed where it is not understood."""
        call = self._called(site)
        if call is None:
            return
        known: dict[str, list[int]] = {}
        for use in site.forward:
            agreed = self._agrees(use, call.v, call.axes.features, call)
            if agreed is None:
                continue
            builder = self._builder(use.product)
            results = self._forward(builder, call, known)
            out = builder.put_back(
                results[0], call.axes.of_out, renamed(use.dims, agreed), self._type(use)
            )
            self._put(use, builder, out)
            known.setdefault("results", results)
        self._backward(site, call, known)

    # What the kernel is called with

    def _called(self, site: Site) -> _Call | None:
        views, scores, keys = self.views, site.scores, set(site.keys)
        every = set(atoms_of(scores.dims))
        sides = (scores.left, scores.right)
        with_keys = [bool(keys & set(atoms_of(d))) for _, d in sides]
        if with_keys == [True, False]:
            k, q = sides
        elif with_keys == [False, True]:
            q, k = sides
        else:
            return None
        if not keys <= set(atoms_of(k[1])):
            return None
        if site.forward:
            v = site.forward[0].other, site.forward[0].other_dims
        elif site.derivative:
            v = site.derivative[0]
        else:
            return None
        q, k, v = (views.see(*x, casts=False) for x in (q, k, v))
        if len({views.graph.values[x[0]].dtype for x in (q, k, v)}) != 1:
            return None
        width = [a for a in atoms_of(q[1]) if a not in every]
        features = [a for a in atoms_of(v[1]) if a not in every]
        if extent(width) != extent(features) or not width:
            return None
        mine = [a for a in atoms_of(q[1]) if a in every]
        mine += [a for a in atoms_of(scores.dims) if a not in mine and a not in keys]
        gone = self._summed_for_keys(site)
        had = set(atoms_of(k[1])) | set(atoms_of(v[1]))
        batch = [a for a in mine if (a in had if gone is None else a not in gone)]
        if gone is not None and (set(mine) - set(batch) != gone or gone & had):
            return None
        free = [a for a in mine if a not in batch]
        axes = self._axes(scores, batch, free, site.keys, width, features, q[1])
        return self._with_masks(site, scores, axes, q, k, v)

    def _summed_for_keys(self, site: Site) -> set[Atom] | None:
        """The atoms over which the gradients of keys and values sum, if there are any."""
        found = [
            set(atoms_of(u.other_dims)) - set(atoms_of(u.dims))
            for u in (*site.by_values, *site.by_keys)
        ]
        if not found:
            return None
        return found[0]

    def _axes(
        self,
        scores: Scores,
        batch: Sequence[Atom],
        free: Sequence[Atom],
        keys: Sequence[Atom],
        width: Sequence[Atom],
        features: Sequence[Atom],
        stored: Dims,
    ) -> _Axes:
        counted = [atoms_of(x[1]) for x in scores.masks]
        counted += [atoms_of(x[1]) for x in scores.additions]
        rows = [a for a in free if any(a in c for c in counted)]
        if not rows and free:
            rows = [max(free, key=lambda a: a[1])]
        at = {a: n for n, a in enumerate(atoms_of(stored))}
        last = max((at.get(a, 0) for a in rows), default=0)
        groups = [a for a in batch if rows and at.get(a, -1) > last]
        if not groups and len(batch) > 1:
            groups = [batch[-1]]
        return _Axes(
            tuple(a for a in batch if a not in groups),
            tuple(groups),
            tuple(a for a in free if a not in rows),
            tuple(rows),
            tuple(keys),
            tuple(width),
            tuple(features),
        )

    def _with_masks(
        self, site: Site, scores: Scores, axes: _Axes, q: Any, k: Any, v: Any
    ) -> _Call | None:
        params = {"scale": scores.scale, "causal": False, "window": 0, "fill": 0.0}
        masks, additions = list(scores.masks), []
        for value, dims, factor in scores.additions:
            flags = self._as_mask(value, dims, factor)
            if flags is None:
                additions.append((value, dims, factor))
            else:
                masks.append(flags)
        if masks and all(m[3] <= _NOTHING for m in masks):
            band = Bands(self.views, axes.rows, axes.keys).band([m[:3] for m in masks])
            if band is not None:
                window = 0 if band.back is None else band.back + 1
                params.update(causal=True, window=window)
                masks = []
        if len(masks) != len(scores.masks) and masks:  # what is added is no mask after all
            masks, additions = list(scores.masks), list(scores.additions)
        if len(masks) > 1 or len(additions) > 1 or (masks and additions):
            return None
        mask = None
        if masks:
            mask = masks[0][:3]
            params |= encode_params({"fill": float(masks[0][3])})  # files know no infinity
        return _Call(axes, q, k, v, params, mask, additions[0] if additions else None)

    def _as_mask(self, v: int, dims: Dims, factor: float) -> tuple[int, Dims, bool, float] | None:
        """What is added to scores as a mask: 0 where it holds, next to minus infinity elsewhere."""
        op = self.views.maker.get(v)
        if op is None or registry.meaning(op.kernel) != "choice" or len(op.inputs) != 3:
            return None
        mask, otherwise, chosen = op.inputs
        which = self.views.see(mask, self.views.operand(mask, dims))
        for holds, here, there in ((True, chosen, otherwise), (False, otherwise, chosen)):
            put = self.views.splat(there)
            if self.views.splat(here) == 0.0 and put is not None and put * factor <= _ABSORBS:
                return (*which, holds, put * factor)
        return None

    # What takes the place of products

    def _builder(self, like: Operation) -> Builder:
        return Builder(self.values, self.constants, like=replace(at(like), remat=like.remat))

    def _type(self, use: Use) -> TensorType:
        return self.graph.values[use.product.outputs[0]]

    def _agrees(
        self, use: Use, stored: tuple[int, Dims], own: Sequence[Atom], call: _Call
    ) -> dict[Atom, Atom] | None:
        """Under which names for what is new the use reads `stored` as its other operand; None where
        it reads something else."""
        other = self.views.see(use.other, use.other_dims, casts=False)
        if other == stored:
            return {}
        wide = self.views.see(use.other, use.other_dims)
        for found, ours in ((other, stored), (wide, self.views.see(*stored))):
            if found[0] != ours[0]:
                continue
            known = set(atoms_of(ours[1]))
            new = [a for a in atoms_of(found[1]) if a not in known]
            names = unified(ours[1], found[1], new)
            if names is not None and set(names.values()) <= set(own):
                return names
        return None

    def _operands(self, builder: Builder, call: _Call) -> tuple[list[int], list[int]]:
        """q, k and v as the kernel takes them, and what masks them or is added, if anything is."""
        axes = call.axes
        three = [
            builder.arranged(*call.q, axes.of_rows),
            builder.arranged(*call.k, axes.of_keys),
            builder.arranged(*call.v, axes.of_values),
        ]
        three = [
            self._widened(builder, x, groups)
            for x, groups in zip(three, (axes.of_rows, axes.of_keys, axes.of_values), strict=True)
        ]
        if call.mask is not None:
            value, dims, holds = call.mask
            made = builder.arranged(value, dims, axes.of_mask)
            if not holds:
                made = builder.new("not", (made,), builder.values[made], {})
            return three, [made]
        if call.bias is not None:
            value, dims, factor = call.bias
            made = builder.arranged(value, dims, axes.of_mask)
            if factor != 1.0:
                made = builder.scaled(made, factor)
            return three, [made]
        return three, []

    def _widened(self, builder: Builder, v: int, groups: Sequence[Sequence[Atom]]) -> int:
        """The value repeated along whole groups that it has not."""
        return builder.spread(v, [extent(g) for g in groups], range(len(groups)))

    def _forward(self, builder: Builder, call: _Call, known: dict[str, list[int]]) -> list[int]:
        """Output and logarithms of sums, by a call that exists or a new one."""
        if "results" in known:
            return known["results"]
        three, extra = self._operands(builder, call)
        batch, rows, heads, _ = (extent(g) for g in call.axes.of_rows)
        out = TensorType((batch, rows, heads, extent(call.axes.features)), self._dtype(call))
        stats = TensorType((batch, heads, rows), "float64" if out.dtype == "float64" else "float32")
        return builder.several("flash_attention", (*three, *extra), [out, stats], call.params)

    def _dtype(self, call: _Call) -> str:
        return self.graph.values[call.q[0]].dtype

    def _backward(self, site: Site, call: _Call, known: dict[str, list[int]]) -> None:
        uses = [*site.by_rows, *site.by_keys, *site.by_values]
        if site.derivative is None or not (site.by_rows or site.by_keys):
            return
        axes = call.axes
        values, given = site.derivative
        # The product g·vᵀ contracts the features under names of its own.
        v = self.views.see(*values)
        stored = self.views.see(*call.v)
        new = [a for a in atoms_of(v[1]) if a not in set(atoms_of(stored[1]))]
        names = unified(stored[1], v[1], new) if v[0] == stored[0] else None
        if names is None:
            return
        grad = self.views.see(given[0], renamed(given[1], names), casts=False)
        if set(atoms_of(grad[1])) - {a for g in axes.of_out for a in g}:
            return
        checked: list[tuple[Use, dict[Atom, Atom], int, list[tuple[Atom, ...]], float]] = []
        scale = call.params["scale"]
        for use in site.by_rows:
            agreed = self._agrees(use, call.k, axes.width, call)
            if agreed is not None:
                checked.append((use, agreed, 0, axes.of_rows, use.factor / scale))
        for use in site.by_keys:
            agreed = self._agrees(use, call.q, axes.width, call)
            if agreed is not None:
                checked.append((use, agreed, 1, axes.of_keys, use.factor / scale))
        for use in site.by_values:
            agreed = self._agrees(use, grad, axes.features, call)
            if agreed is not None:
                checked.append((use, agreed, 2, axes.of_values, 1.0))
        if len(checked) != len(uses):
            return
        first = min(uses, key=lambda u: self.order[u.product.outputs[0]])
        free = {*axes.rows, *axes.shared}
        for use in (*site.by_keys, *site.by_values):
            if set(atoms_of(use.other_dims)) - set(atoms_of(use.dims)) != free:
                return
        builder = self._builder(first.product)
        out, stats = self._forward(builder, call, known)
        three, extra = self._operands(builder, call)
        g = self._widened(builder, builder.arranged(*grad, axes.of_out), axes.of_out)
        g = builder.cast(g, self._dtype(call))
        types = [builder.values[x] for x in three]
        made = builder.several(
            "flash_attention_backward",
            (*three, stats, out, g, *extra),
            [TensorType(t.shape, t.dtype) for t in types],
            call.params,
        )
        self.before.setdefault(self.order[first.product.outputs[0]], []).extend(builder.operations)
        for use, agreed, which, groups, factor in checked:
            builder = self._builder(use.product)
            type_ = self._type(use)
            done = builder.put_back(made[which], groups, renamed(use.dims, agreed), type_)
            if abs(factor - 1.0) > _SAME:
                done = builder.scaled(done, factor)
            self._put(use, builder, done)

    def _put(self, use: Use, builder: Builder, made: int) -> None:
        at = self.order[use.product.outputs[0]]
        self.before.setdefault(at, []).extend(builder.operations)
        self.replaced[use.product.outputs[0]] = made

    def graph_made(self) -> BlockGraph:
        """The program with what was replaced, without what nothing reads any more."""
        if not self.replaced:
            return self.graph
        operations: list[Operation] = []
        for k, op in enumerate(self.graph.operations):
            operations += self.before.get(k, ())
            if not (op.outputs and op.outputs[0] in self.replaced):
                operations.append(op)
        written = Spelled(self.values, self.constants)
        made = written.anew(self.graph, operations, self.replaced)
        return without_unread(in_order(made))


# New operations between values: dims brought into another order, grouped, or repeated.


class Builder(Spelled):
    """Operations that are made for one place of a program."""

    def scaled(self, v: int, factor: float) -> int:
        """The value times a number."""
        type_ = self.values[v]
        number = self.constant(np.asarray(factor, numpy_dtype(type_.dtype)), type_.dtype)
        return self.new("mul", (v, number), type_.strong, {"out_dtype": None})

    def arranged(self, v: int, dims: Dims, groups: Sequence[Sequence[Atom]]) -> int:
        """The value `v` of these dims with one dim for each group of atoms, in that order. It is
        repeated along atoms that it has not, where it has others of the group; groups of which it
        has none get extent 1."""
        have = atoms_of(dims)
        wanted = [tuple(g) if {*have} & set(g) else () for g in groups]
        order = [a for g in wanted for a in g]
        own = [a for a in order if a in have]
        v = self._ordered(v, have, own)
        if own != order:
            v = self.reshaped(v, [n for _, n in own])
            v = self.spread(v, [n for _, n in order], [order.index(a) for a in own])
        return self.reshaped(v, [extent(g) for g in wanted])

    def put_back(self, v: int, groups: Sequence[Sequence[Atom]], dims: Dims, type_: Any) -> int:
        """The value whose dims are the groups as one with `dims` of that type."""
        v = self._ordered(v, [a for g in groups for a in g], atoms_of(dims))
        return self.cast(self.reshaped(v, [extent(d) for d in dims]), type_.dtype)

    def _ordered(self, v: int, have: Sequence[Atom], wanted: Sequence[Atom]) -> int:
        """The value of some atoms with these in another order, each as a dim if it differs."""
        if list(have) == list(wanted):
            return v
        v = self.reshaped(v, [n for _, n in have])
        return self.transposed(v, [have.index(a) for a in wanted])


# Masks that depend on how far a key is from its row alone: read from iotas and comparisons.
#
# Such a mask is a function of row - key. It is evaluated once for every distance, so that a causal
# mask and a window are found whatever comparisons, triangles or constants spell them.


# Operations one behind the other that are read; told where a mask has more.
_MOST_DEPTH = 24


@dataclass(frozen=True)
class Band:
    """Row t sees the keys t - `back` to t; all of them from the first one where `back` is None."""

    back: int | None


@dataclass(frozen=True)
class _Place:
    """rows·t + keys·s + offset: an integer that is affine in row and key."""

    rows: int
    keys: int
    offset: int

    def plus(self, other: _Place, times: int) -> _Place:
        """Another one added so many times."""
        return _Place(
            self.rows + times * other.rows,
            self.keys + times * other.keys,
            self.offset + times * other.offset,
        )


class Bands:
    """Reads masks over given rows and keys."""

    def __init__(self, views: Views, rows: Sequence[Atom], keys: Sequence[Atom]) -> None:
        self.views = views
        self.rows, self.keys = tuple(rows), tuple(keys)
        self.distances = np.arange(1 - extent(keys), extent(rows))

    def band(self, masks: Sequence[tuple[int, Dims, bool]]) -> Band | None:
        """The band that masks (value, dims, whether it holds where keys are seen) leave together,
        None where they are not one."""
        seen = np.ones(len(self.distances), np.bool_)
        for v, dims, holds in masks:
            one = self._flags(v, dims)
            if one is None:
                return None
            seen &= one if holds else ~one
        past = self.distances >= 0
        if (seen & ~past).any() or not seen[past].any():
            return None
        back = int(self.distances[seen].max())
        if not (seen == (past & (self.distances <= back))).all():
            return None
        if extent(self.rows) - extent(self.keys) > back:
            return None  # The last rows see no key: a program has its own mean or NaN there.
        return Band(None if back == self.distances[-1] else back)

    def _flags(self, v: int, dims: Dims, depth: int = 0) -> NDArray[np.bool_] | None:
        """A flag for every distance."""
        made = self._read(v, dims, depth)
        return made if isinstance(made, np.ndarray) and made.dtype == np.bool_ else None

    def _read(self, v: int, dims: Dims, depth: int = 0) -> _Place | NDArray[Any] | None:
        """A value: an element for every distance, or an integer that is affine in row and key."""
        views = self.views
        v, dims = views.see(v, dims)
        array = views.graph.constants.get(v)
        if array is not None:
            return self._constant(np.asarray(array), dims)
        op = views.maker.get(v)
        if op is None or not registry.is_light(op, views.graph.values):
            return None
        if depth > _MOST_DEPTH:
            views.ended = True
            return None
        sig = views.signature(op)
        if sig.means == "count":
            return self._iota(dims[sig.placed[0]])
        read = [self._read(u, views.operand(u, dims), depth + 1) for u in op.inputs]
        known = [x for x in read if x is not None]
        return self._made(op, sig, known) if known and len(known) == len(read) else None

    def _made(
        self, op: Operation, sig: OperationSignature, read: list[_Place | NDArray[Any]]
    ) -> _Place | NDArray[Any] | None:
        places = [x for x in read if isinstance(x, _Place)]
        if len(places) == len(read):
            if sig.means in ("sum", "difference"):
                return places[0].plus(places[1], 1 if sig.means == "sum" else -1)
            if sig.means == "conversion":
                return places[0]
            if sig.means != "comparison":
                return None
            less = places[0].plus(places[1], -1)
            if less.rows != -less.keys:
                return None
            distance = less.rows * self.distances + less.offset
            return self._computed(op, sig, [distance, np.zeros_like(distance)])
        if any(x.rows or x.keys for x in places):
            return None
        return self._computed(op, sig, [x.offset if isinstance(x, _Place) else x for x in read])

    def _computed(
        self, op: Operation, sig: OperationSignature, operands: Sequence[Any]
    ) -> NDArray[Any] | None:
        """What an operation makes, element by element, of elements for every distance."""
        own, n = sig.outputs[0].matrix, len(self.distances)
        rows = [(a, b) for p in sig.inputs for a, b in zip(p.matrix, own, strict=False)]
        if any(a != b and any(a) for a, b in rows) or sig.placed or sig.reduces:
            return None
        dtypes = [t.dtype for t in sig.input_types]
        arrays = [
            np.broadcast_to(np.asarray(x).astype(numpy_dtype(d)), (n,))
            for x, d in zip(operands, dtypes, strict=True)
        ]
        try:
            here = registry.signature(op.kernel, op.params, [TensorType((n,), d) for d in dtypes])
            return reference(op.kernel, op.params, here, arrays)[0]
        except TemplateError:  # it has no reference
            return None

    def _iota(self, atoms: tuple[Atom, ...]) -> _Place | None:
        if atoms == self.rows:
            return _Place(1, 0, 0)
        if atoms == self.keys:
            return _Place(0, 1, 0)
        return _Place(0, 0, 0) if not atoms else None

    def _constant(self, array: NDArray[Any], dims: Dims) -> Any:
        if array.size == 1:
            x = array.reshape(())
            whole = x.dtype.kind in "iu"
            return _Place(0, 0, int(x)) if whole else np.full(len(self.distances), x)
        if atoms_of(dims) not in ((*self.rows, *self.keys), (*self.keys, *self.rows)):
            return self._line(array, dims)
        if array.dtype != np.bool_:
            return None
        table = array.reshape(extent(self.rows), -1)
        if atoms_of(dims)[: len(self.rows)] != self.rows:
            table = array.reshape(extent(self.keys), -1).T
        out = np.zeros(len(self.distances), np.bool_)
        for k, distance in enumerate(self.distances):
            line = np.diagonal(table, -distance)
            if (line != line[0]).any():
                return None
            out[k] = line[0]
        return out

    def _line(self, array: NDArray[Any], dims: Dims) -> _Place | None:
        """A constant 0, 1, 2, … along rows or keys, as `np.arange` leaves it."""
        flat = array.reshape(-1)
        if flat.dtype.kind not in "iu" or not (flat == flat[0] + np.arange(flat.size)).all():
            return None
        place = self._iota(atoms_of(dims))
        return None if place is None else _Place(place.rows, place.keys, int(flat[0]))
