"""The split rules of the e-graph against the closed form, and declared passages against references.

The rules know even cuts: where an operand has margins, one gathers it, and the other leaves it in
blocks. They must derive nothing that the closed form refuses, and everything that it accepts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import prod
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.metakernels.signatures.signature import IndexDim, OperationSignature
from tapestry_egg.metakernels.signatures.splits import (
    Access,
    Blocks,
    Gathered,
    Near,
    Partial,
    Split,
    _Shards,
    split,
)
from tapestry_egg.plans.plan import Strategy
from tapestry_egg.zspace import Projection, ZRange
from tests.extract.brute_ways import all_cuts
from tests.metakernels.test_legality import random_signature
from tests.shard import test_saturate as saturation

#: Roles of dims that rules cut without leaving partial results.
Cuts = tuple[tuple[int, ...], ...]


def layout(rank: int, accesses: dict[int, Access], cuts: Cuts) -> Layout:
    """The layout that a port is accessed in: sharded by the cuts in blocks, partial by others."""
    dims: list[tuple[int, ...]] = [()] * rank
    partial: tuple[int, ...] = ()
    monoid = None
    for d, access in accesses.items():
        if isinstance(access, Blocks):
            own = tuple(a for e in (*access.above, d) for a in cuts[e])
            dims[access.dim] = max(dims[access.dim], own, key=len)
        elif isinstance(access, Partial):
            partial, monoid = (*partial, *cuts[d]), access.monoid
    return Layout(tuple(dims), tuple(sorted(partial)), monoid)


@cache
def split_so(s: OperationSignature, cuts: frozenset[tuple[int, tuple[int, ...]]]) -> Split:
    return split(s, dict(sorted(cuts)))


@cache
def access_alone(s: OperationSignature, d: int, parts: int, side: str, q: int) -> Access:
    """How a port is accessed if one dim is cut, be it that no other port may be so."""
    ports = ((s.inputs, s.input_types), (s.outputs, s.output_types))[side == "outputs"]
    return _Shards(s.extents, {d: parts}).access(ports[0][q], ports[1][q])[d]


class NotShared(Exception):
    """Two dims reach one dim of a tensor, and not as its digits."""


def as_strategy(s: OperationSignature, found: Split, cuts: Cuts) -> Strategy:
    needs = [
        layout(t.rank, dict(a), cuts) for t, a in zip(s.input_types, found.inputs, strict=True)
    ]
    gives = [
        layout(t.rank, dict(a), cuts) for t, a in zip(s.output_types, found.outputs, strict=True)
    ]
    return Strategy(cuts, tuple(needs), tuple(gives))


def as_the_rule_sees(
    s: OperationSignature,
    cuts: Cuts,
    mesh: MeshShape,
    beside: tuple[int, ...],
    digits: tuple[int, ...] = (),
) -> Split | None:
    """What the rules should make of some cuts; None where they should make nothing of them.

    They see one index dim at a time, or `digits`, and even parts only. Operands that do not
    fall into such parts are gathered, and those that do with margins, or lie near such, but for
    cuts of the dims `beside`.
    """
    axes = {d: tuple(mesh.sizes[a] for a in own) for d, own in enumerate(cuts) if own}
    joint = split_so(s, frozenset(axes.items()))
    if not joint.legal or any(s.extents[d] % n for d, n in joint.parts.items()):
        return None
    ones = {d: split_so(s, frozenset({(d, sizes)})) for d, sizes in axes.items()}
    both = split_so(s, frozenset((d, axes[d]) for d in digits)) if digits else None

    def as_digits(side: str, q: int, d: int, projection: Projection) -> Access | None:
        """How digits make blocks of a port together; None where they share none of its dims."""
        if both is None or d not in digits:
            return None
        found = getattr(both, side)[q]
        for e in reversed(digits):
            last = found.get(e)
            if isinstance(last, Blocks) and last.above and d in (*last.above, e):
                run = (*last.above, e)
                first = digits.index(run[0])
                if run != digits[first : first + len(run)] or last.lo or last.hi:
                    raise NotShared
                return Blocks(last.dim, 0, 0, run[: run.index(d)])
        if any(row[d] and any(row[e] for e in digits if e != d) for row in projection.matrix):
            raise NotShared
        return None

    def alone(side: str, q: int, d: int) -> Access:
        one = ones[d]
        if one.legal:
            found: Access = getattr(one, side)[q][d]
            return found
        return access_alone(s, d, one.parts[d], side, q)

    def in_order(side: str, q: int, d: int, type_: TensorType) -> Access:
        """The same, of a port of which nothing else is gathered for the digits."""
        found = plain(
            alone(side, q, d),
            type_.shape,
            ones[d].parts[d],
            side == "inputs" and d in beside,
        )
        if d in digits and found == Gathered():
            raise NotShared
        return found

    def plain(access: Access, shape: tuple[int, ...], parts: int, near: bool) -> Access:
        if isinstance(access, Near):
            return Blocks(access.dim, access.lo, access.hi) if near else Gathered()
        if isinstance(access, Blocks):
            block = shape[access.dim] // parts
            lacks = max(0, access.lo) + max(0, access.hi)
            far = 2 * lacks >= (parts - 1) * block
            margins = (access.lo or access.hi) and (far or not near)
            return Gathered() if margins or shape[access.dim] % parts else access
        return access

    try:
        inputs, outputs = (
            tuple(
                {d: as_digits(side, q, d, f) or in_order(side, q, d, t) for d in ones}
                for q, (f, t) in enumerate(zip(projections, types, strict=True))
            )
            for side, projections, types in (
                ("inputs", s.inputs, s.input_types),
                ("outputs", s.outputs, s.output_types),
            )
        )
    except NotShared:
        return None
    if any(Gathered() in port.values() for port in outputs):
        return None
    return replace(joint, inputs=inputs, outputs=outputs)


def chains(
    s: OperationSignature, cuts: Cuts, mesh: MeshShape, above: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """Dims of which each is the digit below the one before, and all but the last are cut into
    single points."""
    for e in (d for d, axes in enumerate(cuts) if axes and s.index[d].role != "whole"):
        if e in above or s.extents[e] % mesh.parts(cuts[e]):
            continue
        own = (*above, e)
        if above:
            joint = split_so(s, frozenset((f, tuple(mesh.sizes[a] for a in cuts[f])) for f in own))
            found = [p[e] for p in (*joint.inputs, *joint.outputs) if isinstance(p.get(e), Blocks)]
            runs = [a.above for a in found if isinstance(a, Blocks) and (a.lo, a.hi) == (0, 0)]
            if not any(run and run == above[-len(run) :] for run in runs):
                continue
            yield own
        if mesh.parts(cuts[e]) == s.extents[e]:
            yield from chains(s, cuts, mesh, own)


def expected(s: OperationSignature, mesh: MeshShape) -> Iterator[Strategy]:
    for cuts in all_cuts(len(s.index), len(mesh.sizes)):
        own = [d for d, axes in enumerate(cuts) if axes]
        for digits in [(), *chains(s, cuts, mesh)]:
            others = [d for d in own if d not in digits]
            for beside in (x for n in range(len(others) + 1) for x in combinations(others, n)):
                seen = as_the_rule_sees(s, cuts, mesh, beside, digits)
                if seen is not None:
                    yield as_strategy(s, seen, cuts)


def is_inside(s: OperationSignature) -> bool:
    whole = ZRange.from_shape(s.extents)
    return all(
        ZRange.from_shape(t.shape).contains(p.image(whole))
        for p, t in zip(s.inputs, s.input_types, strict=True)
    )


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 2**32), st.sampled_from([(2, 2), (4,), (2, 3)]))
def test_the_rules_derive_the_even_splits_with_and_without_margins(
    seed: int, sizes: tuple[int, ...]
) -> None:
    mesh = MeshShape(("x", "y")[: len(sizes)], sizes)
    rng, other = Random(seed), np.random.default_rng(seed)
    drawn = [random_signature(rng) for _ in range(30)]
    signatures = [s for s in drawn if is_inside(s) and not s.initial][:12]
    signatures += [replace(saturation.random_signature(other), passages=()) for _ in range(10)]
    found = saturation.saturated(
        [replace(s, reads=(None,) * len(s.inputs)) for s in signatures], mesh
    )
    assert found.saturated
    for number, s in enumerate(found.encoding.signatures):
        assert saturation.derived(found, number) == set(expected(s, mesh)), s


@pytest.mark.slow
def test_the_rules_derive_what_three_digits_of_a_dim_share() -> None:
    """Three digits together on one side, apart or in other order on the other."""
    mesh, sizes = MeshShape(("x", "y", "z"), (2, 2, 2)), (2, 2, 4)
    index = tuple(IndexDim(f"i{d}", n, "map") for d, n in enumerate(sizes))

    def put_together(dims: tuple[tuple[int, ...], ...]) -> tuple[Projection, TensorType]:
        """A tensor each of whose dims has some index dims as its digits, major to minor."""
        matrix = [[0] * 3 for _ in dims]
        for row, own in zip(matrix, dims, strict=True):
            for n, d in enumerate(own):
                row[d] = prod(sizes[e] for e in own[n + 1 :])
        form = Projection(tuple(map(tuple, matrix)), (0,) * len(dims), (1,) * len(dims))
        return form, TensorType(tuple(prod(sizes[d] for d in own) for own in dims), "float32")

    one, whole = put_together(((0, 1, 2),))
    signatures = [
        OperationSignature("reshape", index, (one,), (two,), (whole,), (type_,), reads=(None,))
        for two, type_ in map(put_together, [((0,), (1,), (2,)), ((2,), (0, 1))])
    ]
    found = saturation.saturated(signatures, mesh)
    for number, s in enumerate(found.encoding.signatures):
        derived = saturation.derived(found, number)
        assert derived == set(expected(s, mesh)), s
        assert any(len(x.needs[0].dims[0]) == 3 and all(x.cuts) for x in derived)


def test_a_shift_into_padding_is_off_its_blocks() -> None:
    """Boxes as large as the blocks, in order, and one element off: the operand is gathered, or
    its devices exchange rows."""
    shifted, plain = Projection(((1,),), (-1,), (1,)), Projection.identity(1)
    tensor = TensorType((8,), "float32")
    s = OperationSignature(
        "pad",
        (IndexDim("i", 8, "map"),),
        (shifted,),
        (plain,),
        (tensor,),
        (tensor,),
        outside=("sum",),
    )
    assert split(s, {0: (4,)}).inputs == ({0: Blocks(0, 1, -1)},)
    derived = saturation.derived(saturation.saturated([s], MeshShape(("x",), (4,))), 0)
    whole = Layout(((),))
    wanted = {(((),), (whole,)), (((0,),), (whole,)), (((0,),), (Layout(((0,),)),))}
    assert {(x.cuts, x.needs) for x in derived} == wanted
