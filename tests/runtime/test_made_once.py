"""What a compiler would compute twice, rounded in two ways, is computed once."""

from __future__ import annotations

import re

import jax
import numpy as np

import tapestry_egg as te
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tests.plans.plans import plan_by_hand, signature_of
from tests.runtime.lowered import MESH, X, Y, cut, numbers


def peaks(x: jax.Array, y: jax.Array) -> jax.Array:
    """Where a product and a sum, which one of two kernels may compute as one operation, is the
    greatest of its row."""
    v = x * y + x
    return v == v.max(1, keepdims=True)


def by_rows(signature: OperationSignature) -> dict[str, tuple[int, ...]]:
    """The cut of the dims of 64 over all devices."""
    return {d.name: (X, Y) for d in signature.index if d.size == 64}


def test_what_is_compared_with_its_greatest_is_computed_once() -> None:
    """Of which every device reads rows, which XLA for CPUs would compute in either kernel."""
    graph = te.trace(peaks, numbers(64, 128), numbers(64, 128, seed=1)).graph
    cuts = {
        k: by_rows(signature_of(graph, op))
        for k, op in enumerate(graph.operations)
        if op.kernel not in ("mul", "add")
    }
    whole, rows = cut((), ()), cut((X, Y), ())
    run = te.compile(plan_by_hand(graph, MESH, cuts, (whole, whole), (rows,)))
    x, y = numbers(64, 128), numbers(64, 128, seed=1)
    (found,) = run(x, y)
    np.testing.assert_array_equal(np.asarray(found).sum(1), 1)
    assert len(re.findall(r"= f32\[\S* add\(", run.compile().as_text())) == 1
