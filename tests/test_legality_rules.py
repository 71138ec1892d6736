"""The split rule of the e-graph against the closed form, and declared passages against references.

The rule knows even cuts and no halos: where an operand has margins it gathers the operand. It must
derive nothing that the closed form refuses, and everything that it accepts without margins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.layout import Layout, MeshShape
from tapestry_egg.metakernels.signature import OperationSignature
from tapestry_egg.metakernels.splits import Access, Blocks, Gathered, Partial, Split, split
from tapestry_egg.plan import Strategy
from tapestry_egg.zspace import ZRange
from tests import test_saturate as saturation
from tests.brute import all_cuts
from tests.test_legality import random_signature

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


def as_the_rule_sees(s: OperationSignature, found: Split, mesh: MeshShape) -> Split | None:
    """A split without what the rule does not have: halos, parts of several sizes, and two index
    dims that cut one tensor dim together (see test_saturate.py). Operands so accessed are gathered;
    None where outputs are."""

    def plain(access: Access, shape: tuple[int, ...]) -> Access:
        if not isinstance(access, Blocks):
            return access
        even = all(shape[access.dim] % n == 0 for d, n in found.parts.items() if access is at[d])
        return access if even and access == Blocks(access.dim) else Gathered()

    if any(s.extents[d] % n for d, n in found.parts.items()):
        return None
    inputs, outputs = [], []
    for t, at in zip(s.input_types, found.inputs, strict=True):
        inputs.append({d: plain(access, t.shape) for d, access in at.items()})
    for t, at in zip(s.output_types, found.outputs, strict=True):
        outputs.append({d: plain(access, t.shape) for d, access in at.items()})
        if Gathered() in outputs[-1].values():
            return None
    return replace(found, inputs=tuple(inputs), outputs=tuple(outputs))


def is_gathered_alone(s: OperationSignature, found: Split) -> bool:
    """Whether every gathered operand is read along one dim, along which nothing else runs.

    The rule leaves other gathered operands to a copy before the operation.
    """
    for projection, port in zip(s.inputs, found.inputs, strict=True):
        for d in (d for d, a in port.items() if isinstance(a, Gathered)):
            rows = [row for row in projection.matrix if row[d]]
            others = [e for row in rows for e, a in enumerate(row) if a and e != d]
            if len(rows) != 1 or any(s.extents[e] > 1 for e in others):
                return False
    return True


def expected(s: OperationSignature, mesh: MeshShape) -> Iterator[tuple[Strategy, bool]]:
    """Every split as the rule sees it, and whether the rule should have it."""
    for cuts in all_cuts(len(s.index), len(mesh.sizes)):
        found = split(s, {d: tuple(mesh.sizes[a] for a in axes) for d, axes in enumerate(cuts)})
        seen = as_the_rule_sees(s, found, mesh) if found.legal else None
        if seen is not None:
            yield as_strategy(s, seen, cuts), is_gathered_alone(s, seen)


def is_inside(s: OperationSignature) -> bool:
    whole = ZRange.from_shape(s.extents)
    return all(
        ZRange.from_shape(t.shape).contains(p.image(whole))
        for p, t in zip(s.inputs, s.input_types, strict=True)
    )


@settings(max_examples=12)
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
        mine = saturation.derived(found, number)
        legal = dict(expected(s, mesh))
        assert mine <= set(legal), (s, mine - set(legal))
        assert {x for x, wanted in legal.items() if wanted} <= mine, s
