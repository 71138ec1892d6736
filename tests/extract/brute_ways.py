"""Everything that can be enumerated about one operation and one tensor: strategies, layouts, paths.

Oracles for the e-graph. Strategies come from the images of index blocks, device by device; paths
between layouts from Dijkstra's algorithm over all elementary steps. Nothing here knows a rule.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product

import numpy as np

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import carried_as, collective_seconds
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.plans.collectives import after
from tapestry_egg.plans.plan import Change, Strategy
from tapestry_egg.zspace import Projection, ZRange

Boxes = list[ZRange]

#: Roles of dims whose cuts leave results in blocks, which of dims of the role `join` they are not.
_MAPPED = ("map", "scan")


# Strategies


def devices(mesh: MeshShape) -> list[tuple[int, ...]]:
    """Coordinates of every device."""
    return list(product(*(range(s) for s in mesh.sizes)))


def block(axes: tuple[int, ...], at: tuple[int, ...], mesh: MeshShape) -> int:
    """Which of the blocks that `axes` make is on the device at these coordinates."""
    number = 0
    for a in axes:
        number = number * mesh.sizes[a] + at[a]
    return number


def index_boxes(
    extents: tuple[int, ...], cuts: tuple[tuple[int, ...], ...], mesh: MeshShape
) -> Boxes:
    """Every device's box of an index space."""
    out = []
    for at in devices(mesh):
        sizes = [n // mesh.parts(axes) for n, axes in zip(extents, cuts, strict=True)]
        starts = [block(axes, at, mesh) * s for s, axes in zip(sizes, cuts, strict=True)]
        ends = [b + s for b, s in zip(starts, sizes, strict=True)]
        out.append(ZRange(tuple(starts), tuple(ends)))
    return out


def tensor_boxes(shape: tuple[int, ...], layout: Layout, mesh: MeshShape) -> Boxes:
    """Every device's box of a tensor."""
    return index_boxes(shape, layout.dims, mesh)


def read_boxes(
    projection: Projection,
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    cuts: tuple[tuple[int, ...], ...],
    mesh: MeshShape,
) -> Boxes:
    """What every device reads or makes of a tensor: nothing is sharded outside of it."""
    whole = ZRange.from_shape(shape)
    return [projection.image(b).clip(whole) for b in index_boxes(extents, cuts, mesh)]


def all_cuts(dims: int, axes: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to put some of the mesh axes, in some order, onto index dims."""
    for count in range(axes + 1):
        for order in permutations(range(axes), count):
            for where in product(range(dims), repeat=count):
                cuts: list[tuple[int, ...]] = [()] * dims
                for a, d in zip(order, where, strict=True):
                    cuts[d] = (*cuts[d], a)
                yield tuple(cuts)


def cut_layout(
    projection: Projection,
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    cuts: tuple[tuple[int, ...], ...],
    mesh: MeshShape,
    roles: tuple[str, ...],
    *,
    is_output: bool,
    beside: frozenset[int] = frozenset(),
    digits: tuple[int, ...] = (),
) -> Layout | None:
    """The layout in which a tensor is read or made when index dims are cut so.

    Per cut, the tensor dim that falls into blocks is sharded; a cut of which the image does not
    depend, or of which it is neither blocks nor constant (gathered; operands only), shards nothing.
    By cuts in `beside` an operand is sharded, too, whose images are near its blocks; by those of
    `digits`, major to minor, a dim whose blocks are the images of some that follow one another.
    None where the devices' boxes are then not their blocks (outputs), or not inside (operands), and
    where an output does not follow a map dim, or follows a joined one.
    """
    near, together = False, set()
    if not any(cuts):  # also of what is a sum of no elements
        return Layout(((),) * len(shape))
    dims: list[tuple[int, ...]] = [()] * len(shape)
    for k, row in enumerate(projection.matrix):
        own = tuple(d for d in digits if row[d])
        if len(own) < 2:
            continue
        first = digits.index(own[0])
        follow = digits[first : first + len(own)] == own
        if not follow or block_digits(projection, shape, extents, cuts, mesh, own) != k:
            return None
        dims[k] = sum((cuts[d] for d in own), ())
        together |= set(own)
    for d, axes in enumerate(cuts):
        if not axes or d in together:
            continue
        one = tuple(axes if e == d else () for e in range(len(cuts)))
        images = read_boxes(projection, shape, extents, one, mesh)
        fits = [
            k
            for k, n in enumerate(shape)
            if n % mesh.parts(axes) == 0
            and falls_into_blocks(
                images,
                tensor_boxes(
                    shape, Layout(tuple(axes if e == k else () for e in range(len(shape)))), mesh
                ),
                k,
            )
        ]
        constant = all(i == images[0] for i in images)
        if d in beside and not is_output and not fits and not constant:
            fits = [k for k in range(len(shape)) if stands_beside(images, shape, axes, mesh, k)]
            near = near or bool(fits)
        if d in digits and not fits and not constant:
            return None
        if is_output and mesh.parts(axes) > 1 and roles[d] != "reduce":
            if constant == (roles[d] in _MAPPED):
                return None
        if fits and not constant:
            if dims[fits[0]]:
                return None  # two cuts of one tensor dim: the blocks are not one box each
            dims[fits[0]] = axes
        elif is_output and not constant:
            return None
    layout = Layout(tuple(dims))
    joint = read_boxes(projection, shape, extents, cuts, mesh)
    blocks = tensor_boxes(shape, layout, mesh)
    good = (
        joint == blocks
        if is_output
        else near or all(i in b or i.is_empty for i, b in zip(joint, blocks, strict=True))
    )
    return layout if good else None


def block_digits(
    projection: Projection,
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    cuts: tuple[tuple[int, ...], ...],
    mesh: MeshShape,
    digits: tuple[int, ...],
) -> int | None:
    """The tensor dim whose blocks, by the axes of one index dim and then of the others, are the
    images of the blocks of all."""
    one = tuple(axes if d in digits else () for d, axes in enumerate(cuts))
    images = [projection.image(b) for b in index_boxes(extents, one, mesh)]
    axes: tuple[int, ...] = sum((cuts[d] for d in digits), ())
    for k, n in enumerate(shape):
        layout = Layout(tuple(axes if e == k else () for e in range(len(shape))))
        if n % mesh.parts(axes) == 0 and falls_into_blocks(
            images, tensor_boxes(shape, layout, mesh), k
        ):
            return k
    return None


def chains_of_digits(
    signature: OperationSignature, cuts: tuple[tuple[int, ...], ...], mesh: MeshShape
) -> list[tuple[int, ...]]:
    """Dims of which each is somewhere the next digit after those before it, and all but the
    last are cut into single points."""
    dims = [d for d, axes in enumerate(cuts) if axes and signature.index[d].role != "whole"]
    ports = [*zip(signature.inputs, signature.input_types, strict=True)]
    ports += [*zip(signature.outputs, signature.output_types, strict=True)]

    def follows(above: tuple[int, ...], d: int) -> bool:
        return any(
            block_digits(f, t.shape, signature.extents, cuts, mesh, (*above[-n:], d)) is not None
            for f, t in ports
            for n in range(1, len(above) + 1)
        )

    return [
        chain
        for count in range(2, len(dims) + 1)
        for chain in permutations(dims, count)
        if all(mesh.parts(cuts[d]) == signature.extents[d] for d in chain[:-1])
        and all(follows(chain[:n], chain[n]) for n in range(1, count))
    ]


def stands_beside(
    images: Boxes, shape: tuple[int, ...], axes: tuple[int, ...], mesh: MeshShape, k: int
) -> bool:
    """Whether images are inside the blocks of dim k and those beside them, each in its place, and
    devices then get, from both sides, less than half of what they lack of the whole dim."""
    parts = mesh.parts(axes)
    if shape[k] % parts or parts == 1:
        return False
    size = shape[k] // parts
    cut = Layout(tuple(axes if e == k else () for e in range(len(shape))))
    blocks = tensor_boxes(shape, cut, mesh)
    elsewhere = {
        tuple(x for e, x in enumerate(zip(i.start, i.end, strict=True)) if e != k) for i in images
    }
    order = sorted(zip(blocks, images, strict=True), key=lambda x: x[0].start[k])
    steps = {b.start[k] - a.start[k] for (_, a), (_, b) in pairwise(order) if a != b}
    inside = [(b, *(min(max(x, 0), shape[k]) for x in (i.start[k], i.end[k]))) for b, i in order]
    before = max(0, *(b.start[k] - first for b, first, _ in inside))
    after = max(0, *(end - b.end[k] for b, _, end in inside))
    small = max(before, after) <= size and 2 * (before + after) < (parts - 1) * size
    return len(elsewhere) == 1 and min(steps, default=-1) >= 0 and small


def falls_into_blocks(images: Boxes, blocks: Boxes, k: int) -> bool:
    """Whether images are exactly the blocks along tensor dim k, and constant along all others."""
    others = {
        tuple(x for e, x in enumerate(zip(i.start, i.end, strict=True)) if e != k) for i in images
    }
    return len(others) == 1 and all(
        (i.start[k], i.end[k]) == (b.start[k], b.end[k])
        for i, b in zip(images, blocks, strict=True)
    )


def every_strategy(signature: OperationSignature, mesh: MeshShape) -> set[Strategy]:
    """Every legal strategy of an operation, passages included."""
    out = set()
    extents, inputs = signature.extents, len(signature.inputs)
    ports = [*zip(signature.inputs, signature.input_types, strict=True)]
    ports += [*zip(signature.outputs, signature.output_types, strict=True)]
    everyone = set(range(len(mesh.sizes)))
    dims = tuple(d.role for d in signature.index)
    for cuts in all_cuts(len(extents), len(mesh.sizes)):
        used = {a for axes in cuts for a in axes}
        roles = {signature.index[d].role for d, axes in enumerate(cuts) if axes}
        if "whole" in roles:
            continue
        if any(n % mesh.parts(axes) for n, axes in zip(extents, cuts, strict=True)):
            continue
        own = [d for d, axes in enumerate(cuts) if axes]
        near = [frozenset(x) for n in range(len(own) + 1) for x in combinations(own, n)]
        for beside, digits in product(near, [(), *chains_of_digits(signature, cuts, mesh)]):
            if not beside.isdisjoint(digits):
                continue
            plain = [
                cut_layout(
                    *(f, t.shape, extents, cuts, mesh, dims),
                    is_output=p >= inputs,
                    beside=beside,
                    digits=digits,
                )
                for p, (f, t) in enumerate(ports)
            ]
            if any(layout is None for layout in plain):
                continue
            for passing in all_passings(signature, everyone - used):
                layouts = with_partials(signature, cuts, plain, passing)
                if layouts is not None:
                    out.add(Strategy(cuts, tuple(layouts[:inputs]), tuple(layouts[inputs:])))
    return out


def all_passings(
    signature: OperationSignature, free: set[int]
) -> Iterator[dict[int, tuple[int, ...]]]:
    """Every way to let partial values over some free axes pass, by passage."""
    states = [-1, *range(len(signature.passages))]
    for choice in product(states, repeat=len(free)):
        found: dict[int, tuple[int, ...]] = {}
        for a, g in zip(sorted(free), choice, strict=True):
            if g >= 0:
                found[g] = (*found.get(g, ()), a)
        yield found


def with_partials(
    signature: OperationSignature,
    cuts: tuple[tuple[int, ...], ...],
    plain: list[Layout | None],
    passing: dict[int, tuple[int, ...]],
) -> list[Layout] | None:
    """The layouts with the axes over which they are partial; None where monoids would mix."""
    inputs = len(signature.inputs)
    out = []
    for p, layout in enumerate(plain):
        assert layout is not None
        pending: dict[str, tuple[int, ...]] = {}

        def add(monoid: str | None, axes: tuple[int, ...], pending=pending) -> None:  # type: ignore[no-untyped-def]
            pending[str(monoid)] = (*pending.get(str(monoid), ()), *axes)

        for d, axes in enumerate(cuts):
            if axes and signature.index[d].role == "reduce":
                follows = any(row[d] for row in (*signature.inputs, *signature.outputs)[p].matrix)
                if (p >= inputs and not follows) or p in signature.initial:
                    add(signature.index[d].monoid, axes)
        for g, axes in passing.items():
            law = signature.passages[g]
            if p >= inputs:
                add(law.monoid_out, axes)
            elif p in law.inputs:
                add(law.monoid_in, axes)
        if len(pending) > 1:
            return None
        for monoid, axes in pending.items():
            layout = Layout(layout.dims, tuple(sorted(axes)), monoid)
        out.append(layout)
    return out


# Paths


def every_layout(tensor: TensorType, mesh: MeshShape, monoids: tuple[str, ...]) -> list[Layout]:
    """Every layout that divides a tensor evenly."""
    out: dict[Layout, None] = {}
    for cuts in all_cuts(tensor.rank, len(mesh.sizes)):
        free = sorted(set(range(len(mesh.sizes))) - {a for axes in cuts for a in axes})
        for count in range(len(free) + 1):
            for pending in combinations(free, count):
                for monoid in monoids if pending else (None,):
                    layout = Layout(cuts, pending, monoid)
                    if layout.divides(tensor.shape, mesh):
                        out[layout] = None
    return list(out)


def every_step(rank: int, mesh: MeshShape, monoids: tuple[str, ...]) -> Iterator[Change]:
    """Every elementary change of layout that could be written down."""
    axes = range(len(mesh.sizes))
    for count in range(1, len(mesh.sizes) + 1):
        for order in permutations(axes, count):
            for k in range(rank):
                yield Change("all_gather", order, k)
                yield Change("slice", order, k)
                for other in range(rank):
                    if other != k:
                        yield Change("all_to_all", order, k, other)
                for monoid in monoids:
                    yield Change("reduce_scatter", order, k, monoid=monoid)
            for monoid in monoids:
                yield Change("all_reduce", order, monoid=monoid)
                yield Change("to_partial", order, monoid=monoid)


@dataclass(frozen=True)
class Paths:
    """Cheapest copies of one tensor from one layout: seconds and steps by target layout."""

    seconds: dict[Layout, float]
    steps: dict[Layout, tuple[Change, ...]]


def paths(
    tensor: TensorType,
    source: Layout,
    mesh: MeshShape,
    target: Target,
    monoids: tuple[str, ...] = ("sum",),
) -> Paths:
    """Dijkstra's algorithm over every step."""
    steps = list(every_step(tensor.rank, mesh, monoids))
    found, best = {}, {source: 0.0}
    how: dict[Layout, tuple[Change, ...]] = {source: ()}
    queue = [(0.0, 0, source)]
    count = 0
    while queue:
        cost, _, layout = heapq.heappop(queue)
        if layout in found:
            continue
        found[layout] = cost
        local = float(np.prod(layout.local_shape(tensor.shape, mesh))) * tensor.itemsize
        for step in steps:
            try:
                to = after(step, layout)
            except PlanError:
                continue
            if not to.divides(tensor.shape, mesh):
                continue
            kind = carried_as(step.kind, step.monoid, tensor.dtype)
            now = cost + collective_seconds(kind, local, step.axes, mesh, target)
            if now < best.get(to, np.inf) * (1 - 1e-12):
                best[to], how[to] = now, (*how[layout], step)
                count += 1
                heapq.heappush(queue, (now, count, to))
    return Paths(found, how)
