"""The split rule of the e-graph against the closed form, and declared passages against references.

The rule knows even cuts and no halos: where an operand has margins it gathers the operand. It must
derive nothing that the closed form refuses, and everything that it accepts without margins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
    Partial,
    Split,
    split,
)
from tapestry_egg.plans.plan import Strategy
from tapestry_egg.zspace import Projection, ZRange
from tests.extract.brute import all_cuts
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
            dims[access.dim] = cuts[d]
        elif isinstance(access, Partial):
            partial, monoid = (*partial, *cuts[d]), access.monoid
    return Layout(tuple(dims), tuple(sorted(partial)), monoid)


def as_strategy(s: OperationSignature, found: Split, cuts: Cuts) -> Strategy:
    needs = [
        layout(t.rank, dict(a), cuts) for t, a in zip(s.input_types, found.inputs, strict=True)
    ]
    gives = [
        layout(t.rank, dict(a), cuts) for t, a in zip(s.output_types, found.outputs, strict=True)
    ]
    return Strategy(cuts, tuple(needs), tuple(gives))


def as_the_rule_sees(s: OperationSignature, cuts: Cuts, mesh: MeshShape) -> Split | None:
    """What the rule should make of some cuts; None where it should make nothing of them.

    It sees one index dim at a time, and even parts only. Operands that do not fall into such parts,
    or only with margins, are gathered.
    """
    axes = {d: tuple(mesh.sizes[a] for a in own) for d, own in enumerate(cuts) if own}
    joint = split(s, axes)
    if not joint.legal or any(s.extents[d] % n for d, n in joint.parts.items()):
        return None
    if any(isinstance(a, Blocks) and a.above for port in joint.outputs for a in port.values()):
        return None  # two index dims never cut one tensor dim together (see test_saturate.py)
    ones = {d: split(s, {d: sizes}) for d, sizes in axes.items()}

    def plain(access: Access, shape: tuple[int, ...], parts: int) -> Access:
        if isinstance(access, Blocks) and (access.lo or access.hi or shape[access.dim] % parts):
            return Gathered()
        return access

    inputs = tuple(
        {d: plain(one.inputs[p][d], t.shape, one.parts[d]) for d, one in ones.items()}
        for p, t in enumerate(s.input_types)
    )
    outputs = tuple(
        {d: plain(one.outputs[q][d], t.shape, one.parts[d]) for d, one in ones.items()}
        for q, t in enumerate(s.output_types)
    )
    if any(Gathered() in port.values() for port in outputs):
        return None
    return replace(joint, inputs=inputs, outputs=outputs)


def expected(s: OperationSignature, mesh: MeshShape) -> Iterator[Strategy]:
    for cuts in all_cuts(len(s.index), len(mesh.sizes)):
        seen = as_the_rule_sees(s, cuts, mesh)
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
def test_the_rule_derives_the_even_splits_without_margins(
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


def test_a_shift_into_padding_is_no_block() -> None:
    """Boxes as large as the blocks, in order, and one element off: the operand is gathered."""
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
    assert {(x.cuts, x.needs) for x in derived} == {(((),), (whole,)), (((0,),), (whole,))}
