"""Legality: whether the layouts of one operation follow from its cuts, checked device by device.

Nothing of the rules is used here. For every device of the mesh the block of the index space that
the cuts give it is projected into every tensor, and the boxes are held against the blocks that the
layouts give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.layout import Layout, MeshShape, permuted_axes, pieces_moved
from tapestry_egg.metakernels.signatures.signature import AROUND, OperationSignature
from tapestry_egg.plans.plan import Change, Strategy
from tapestry_egg.zspace import Projection

Ints = NDArray[np.int64]


class Illegal(Exception):
    """Why a strategy is not legal."""


def check_strategy(signature: OperationSignature, strategy: Strategy, mesh: MeshShape) -> None:
    """Raise `Illegal` unless the layouts of a strategy follow from its cuts.

    Every device must produce exactly its block of every output, read only what lies in its blocks
    of the operands or in those beside them along one dim (or outside of an operand whose template
    says what lies there; where the operand's ends meet, its first and last blocks are beside each
    other), and every axis that holds partial values must be accounted for: by a cut of a reduce
    dim, or by one law f(x•y) = f(x)•f(y) that the kernel declares.
    """
    _check_shapes(signature, strategy, mesh)
    _check_partials(signature, strategy, mesh)
    if 0 in signature.extents:
        return  # nothing is read and nothing made
    starts, ends = index_blocks(signature, strategy.cuts, mesh)
    operands = len(signature.inputs)
    ports = [*zip(signature.inputs, signature.input_types, strategy.needs, strict=True)]
    ports += [*zip(signature.outputs, signature.output_types, strategy.gives, strict=True)]
    for p, (projection, tensor, layout) in enumerate(ports):
        low, high = projection.images(starts, ends)
        around = p < operands and signature.beyond(p) == AROUND
        if p < operands and signature.beyond(p) is not None and not around:
            low, high = np.clip(low, 0, tensor.shape), np.clip(high, 0, tensor.shape)
        begin, stop = tensor_blocks(layout, tensor.shape, mesh)
        if p >= operands:
            if not ((low == begin).all() and (high == stop).all()):
                raise Illegal(f"output {p - operands}: devices do not make the blocks of {layout}")
            continue
        sizes = (stop - begin)[0]
        for k in range(len(tensor.shape)):
            lack = int((begin - low)[:, k].max()), int((high - stop)[:, k].max())
            before, after = max(0, lack[0]), max(0, lack[1])
            if not before and not after:
                continue
            if around and sizes[k] == tensor.shape[k]:
                continue
            inside = around or (low[:, k].min() >= 0 and high[:, k].max() <= tensor.shape[k])
            stands = any(
                a > 0 and axes == layout.dims[k] and mesh.parts(axes) > 1
                for a, axes in zip(projection.matrix[k], strategy.cuts, strict=True)
            )
            if max(before, after) > sizes[k] or not (inside and stands):
                raise Illegal(f"operand {p}: devices read outside their blocks of {layout}")
            if tensor.dtype.startswith("key<"):
                raise Illegal(f"operand {p}: random keys are in no margins")


def index_blocks(
    signature: OperationSignature, cuts: Sequence[tuple[int, ...]], mesh: MeshShape
) -> tuple[Ints, Ints]:
    """First and end of every device's block of the index space: s64[devices, index dims] each."""
    starts = np.zeros((mesh.devices, len(signature.index)), np.int64)
    ends = np.zeros_like(starts)
    for d, (n, axes) in enumerate(zip(signature.extents, cuts, strict=True)):
        size = n // mesh.parts(axes)
        starts[:, d] = _numbers(axes, mesh) * size
        ends[:, d] = starts[:, d] + size
    return starts, ends


@lru_cache(maxsize=1024)
def tensor_blocks(layout: Layout, shape: tuple[int, ...], mesh: MeshShape) -> tuple[Ints, Ints]:
    """First and end of every device's block of a tensor: s64[devices, tensor dims] each, not to be
    written to."""
    starts = np.zeros((mesh.devices, len(shape)), np.int64)
    ends = np.zeros_like(starts)
    for k, (n, axes) in enumerate(zip(shape, layout.dims, strict=True)):
        size = n // mesh.parts(axes)
        starts[:, k] = _numbers(axes, mesh) * size
        ends[:, k] = starts[:, k] + size
    starts.flags.writeable = ends.flags.writeable = False
    return starts, ends


def check_layout(layout: Layout, shape: tuple[int, ...], dtype: str, mesh: MeshShape) -> None:
    """Raise `Illegal` unless a tensor of this shape and dtype can lie in this layout."""
    used = layout.axes
    if len(layout.dims) != len(shape):
        raise Illegal(f"{layout} is not a layout of rank {len(shape)}")
    if len(set(used)) != len(used) or any(not 0 <= a < len(mesh.sizes) for a in used):
        raise Illegal(f"{layout} uses an axis twice, or one that {mesh} lacks")
    if not layout.divides(shape, mesh):
        raise Illegal(f"{layout} does not divide {list(shape)} on {mesh}")
    if bool(layout.partial) != (layout.monoid is not None):
        raise Illegal(f"{layout} has partial axes without a monoid, or a monoid without them")
    if layout.partial and dtype.startswith("key<"):
        raise Illegal(f"random keys are never partial, not {layout}")


def check_permute(step: Change, source: Layout, target: Layout, mesh: MeshShape) -> None:
    """Raise `Illegal` unless a permute leaves each device with the block that `target` gives it."""
    if step.kind != "permute":
        return
    if step.pieces is not None:
        dims = pieces_moved(source, target, mesh)
        parts = [mesh.parts(x.dims[step.dim or 0]) for x in (source, target)]
        fits = dims == (step.dim, step.to_dim) and parts[0] == parts[1] * step.pieces
        if not fits or step.axes != permuted_axes(source, target, mesh):
            raise Illegal(f"{step} does not lead from {source.show(mesh)} to {target.show(mesh)}")
        return
    rest = tuple(a for a in range(len(mesh.sizes)) if a not in step.axes)
    to = [a for d in target.dims for a in d if a in step.axes]
    to += [a for a in step.axes if a not in to]
    # Devices by their place along the axes of the permute: those that send, and those that get.
    senders, receivers = (np.argsort(_numbers((*rest, *x), mesh)) for x in (step.axes, to))
    blocks = zip(source.dims, target.dims, strict=True)
    alike = [
        mesh.parts(a) == mesh.parts(b)
        and (_numbers(a, mesh)[senders] == _numbers(b, mesh)[receivers]).all()
        for a, b in blocks
    ]
    if not all(alike) or set(step.axes) & {*source.partial, *target.partial}:
        words = f"from {source.show(mesh)} to {target.show(mesh)}"
        raise Illegal(f"no permute over {step.axes} leads {words}")


@lru_cache(maxsize=1024)
def _numbers(axes: tuple[int, ...], mesh: MeshShape) -> Ints:
    """Which block each device holds of something cut by `axes`, major to minor: s64[devices], not
    to be written to."""
    coordinates = np.unravel_index(np.arange(mesh.devices), mesh.sizes or (1,))
    number = np.zeros(mesh.devices, np.int64)
    for a in axes:
        number = number * mesh.sizes[a] + coordinates[a]
    number.flags.writeable = False
    return number


def _check_shapes(signature: OperationSignature, strategy: Strategy, mesh: MeshShape) -> None:
    if len(strategy.cuts) != len(signature.index):
        raise Illegal(f"{len(strategy.cuts)} cuts for {len(signature.index)} index dims")
    used = [a for axes in strategy.cuts for a in axes]
    if len(set(used)) != len(used) or any(not 0 <= a < len(mesh.sizes) for a in used):
        raise Illegal(f"the cuts {strategy.cuts} use an axis twice, or one that {mesh} lacks")
    types = (*signature.input_types, *signature.output_types)
    layouts = (*strategy.needs, *strategy.gives)
    if len(types) != len(layouts):
        raise Illegal(f"{len(layouts)} layouts for {len(types)} operands and outputs")
    for tensor, layout in zip(types, layouts, strict=True):
        check_layout(layout, tensor.shape, tensor.dtype, mesh)
    for d, (dim, axes) in enumerate(zip(signature.index, strategy.cuts, strict=True)):
        if mesh.parts(axes) == 1:
            continue
        if dim.role == "whole":
            raise Illegal(f"index dim {dim.name} has the role {dim.role} and is cut")
        if dim.size % mesh.parts(axes):
            raise Illegal(f"index dim {dim.name} of extent {dim.size} is cut unevenly")
        reached = [_reaches(d, p) for p in signature.outputs]
        if dim.role != "reduce" and any(r != (dim.role in ("map", "scan")) for r in reached):
            raise Illegal(f"index dim {dim.name} is cut as {dim.role} against the projections")


def _reaches(d: int, projection: Projection) -> bool:
    """Whether what a projection reads or makes depends on an index dim."""
    return any(row[d] for row in projection.matrix)


def _check_partials(signature: OperationSignature, strategy: Strategy, mesh: MeshShape) -> None:
    cut = {a: d for d, axes in enumerate(strategy.cuts) for a in axes if mesh.sizes[a] > 1}
    operands = range(len(signature.inputs))
    for a in range(len(mesh.sizes)):
        if mesh.sizes[a] == 1:
            continue
        given = [g.monoid if a in g.partial else None for g in strategy.gives]
        giving = set(given)
        pending = tuple(p for p in operands if a in strategy.needs[p].partial)
        name = f"axis {mesh.names[a]}"
        if a in cut:
            dim = signature.index[cut[a]]
            monoid = dim.monoid if dim.role == "reduce" else None
            wanted = [None if _reaches(cut[a], p) else monoid for p in signature.outputs]
            if strategy.gives and given != wanted:
                raise Illegal(f"{name} cuts {dim.name}, and outputs are partial under {giving}")
            expected = signature.initial if dim.role == "reduce" else ()
            if pending != tuple(sorted(expected)):
                raise Illegal(f"{name} cuts {dim.name}, and operands {pending} are partial over it")
            if any(strategy.needs[p].monoid != monoid for p in pending):
                raise Illegal(f"{name}: a starting value is partial under another monoid")
            continue
        if any(a in axes for layout in strategy.needs for axes in layout.dims):
            raise Illegal(f"{name} cuts an operand and no index dim")
        if not pending:
            if strategy.gives and giving != {None}:
                raise Illegal(f"{name}: outputs are partial and nothing makes them so")
            continue
        if not any(
            tuple(sorted(g.inputs)) == pending
            and all(strategy.needs[p].monoid == g.monoid_in for p in pending)
            and (giving == {g.monoid_out} or not strategy.gives)
            for g in signature.passages
        ):
            raise Illegal(f"{name}: no law lets partial operands {pending} through")
