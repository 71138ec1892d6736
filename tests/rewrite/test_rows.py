"""Rows of an operation: what is remembered of one question is no answer to another."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from tapestry_egg.metakernels.registry import signature_of
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.rewrite.rows.cuts import Cut, Rows
from tapestry_egg.rewrite.rows.rows_by_number import with_batch_dims
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


@pytest.mark.parametrize(
    ("numbers", "counts"),
    [
        (lambda: jnp.arange(8), True),
        (lambda: jnp.arange(1, 9) - 1, True),  # computed, and count for all that
        (lambda: jnp.arange(16) // 2 * 2 - jnp.arange(16), False),
        (lambda: (jnp.arange(8) + 1) % 8, False),
    ],
    ids=["count", "computed", "far from it", "from another row on"],
)
def test_rows_that_are_read_by_their_own_numbers_need_not_be_together(
    numbers: Callable[[], jax.Array], counts: bool
) -> None:
    columns = jax.ShapeDtypeStruct(numbers().shape, jnp.int32)
    graph = trace(lambda x, c: x[numbers(), c], X, columns).graph
    (gather,) = (op for op in with_batch_dims(graph).operations if op.kernel == "gather")
    dims = gather.params["dimension_numbers"]
    assert dims["operand_batching_dims"] == ([0] if counts else [])
    assert dims["start_index_map"] == ([1] if counts else [0, 1])
