"""The split rules of the e-graph against the closed form, and declared passages against references.

The rules know even cuts: where an operand has margins, one gathers it, and the other leaves it in
blocks. They must derive nothing that the closed form refuses, and everything that it accepts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations
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

    They see one index dim at a time, or two `digits`, and even parts only. Operands that do not
    fall into such parts are gathered, and those that do with margins, or lie near such, but for
    cuts of the dims `beside`.
    """
    axes = {d: tuple(mesh.sizes[a] for a in own) for d, own in enumerate(cuts) if own}
    joint = split(s, axes)
    if not joint.legal or any(s.extents[d] % n for d, n in joint.parts.items()):
        return None
    ones = {d: split(s, {d: sizes}) for d, sizes in axes.items()}
    both = split(s, {d: axes[d] for d in digits}) if digits else None

    def as_digits(side: str, q: int, d: int, projection: Projection) -> Access | None:
        """How both digits make blocks of a port; None where they share none of its dims."""
        if both is None or d not in digits:
            return None
        minor = getattr(both, side)[q].get(digits[1])
        if isinstance(minor, Blocks) and minor.above == digits[:1] and not (minor.lo or minor.hi):
            return Blocks(minor.dim, 0, 0, minor.above if d == digits[1] else ())
        if any(row[digits[0]] and row[digits[1]] for row in projection.matrix):
            raise NotShared
        return None

    def alone(side: str, q: int, d: int, projection: Projection, type_: TensorType) -> Access:
        """How a port is accessed if one dim is cut, be it that no other port may be so."""
        one = ones[d]
        if one.legal:
            found: Access = getattr(one, side)[q][d]
            return found
        return _Shards(s.extents, one.parts).access(projection, type_)[d]

    def in_order(side: str, q: int, d: int, projection: Projection, type_: TensorType) -> Access:
        """The same, of a port of which nothing else is gathered for the digits."""
        found = plain(
            alone(side, q, d, projection, type_),
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
                {d: as_digits(side, q, d, f) or in_order(side, q, d, f, t) for d in ones}
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


def pairs(s: OperationSignature, cuts: Cuts, mesh: MeshShape) -> Iterator[tuple[int, int]]:
    """Dims of which the second is the digit below the first, which is cut into single points."""
    maps = [d for d, axes in enumerate(cuts) if axes and s.index[d].role == "map"]
    for d, e in permutations(maps, 2):
        if mesh.parts(cuts[d]) != s.extents[d] or s.extents[e] % mesh.parts(cuts[e]):
            continue
        both = split(s, {f: tuple(mesh.sizes[a] for a in cuts[f]) for f in (d, e)})
        if any(
            isinstance(a := port.get(e), Blocks) and (a.above, a.lo, a.hi) == ((d,), 0, 0)
            for port in (*both.inputs, *both.outputs)
        ):
            yield d, e


def expected(s: OperationSignature, mesh: MeshShape) -> Iterator[Strategy]:
    for cuts in all_cuts(len(s.index), len(mesh.sizes)):
        own = [d for d, axes in enumerate(cuts) if axes]
        for digits in [(), *pairs(s, cuts, mesh)]:
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
