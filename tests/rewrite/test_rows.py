"""Rows of an operation: what is remembered of one question is no answer to another."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tapestry_egg.metakernels.registry import signature_of
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.rewrite.rows.cuts import Cut, Rows
from tapestry_egg.tracing.trace import trace

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def signature(kernel: str) -> OperationSignature:
    graph = trace(lambda x: jnp.max(jnp.exp(x), axis=0), X).graph
    op = next(op for op in graph.operations if op.kernel == kernel)
    types = [tuple([graph.values[v] for v in side]) for side in (op.inputs, op.outputs)]
    return signature_of(op, *types)


def test_rows_of_one_index_and_of_several() -> None:
    sig = signature("exp")
    for dim, inner in ((0, 1), (0, 2), (1, 1), (1, 2), (0, 2)):
        rows = Rows.along(sig, dim, inner)
        assert rows is not None and rows.outputs == (Cut(dim, inner),)


def test_rows_that_a_maximum_takes_in() -> None:
    sig = signature("reduce_max")
    along = next(d for d, x in enumerate(sig.index) if x.role == "reduce")
    for _ in range(2):
        assert Rows.along(sig, along) is None, "its results are no sums"
        rows = Rows.along(sig, along, any_monoid=True)
        assert rows is not None and rows.summed and rows.monoid == "max"
