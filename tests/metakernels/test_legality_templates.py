"""Which cuts of JAX's operations are legal by their templates: by brute force, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.metakernels.signatures.splits import (
    Access,
    Blocks,
    Gathered,
    Partial,
    Replicated,
    legal_dims,
    split,
)
from tapestry_egg.tracing.trace import trace
from tests.metakernels.brute_splits import brute
from tests.metakernels.covers import operations

Array = Any


def conv(stride: int, low: int, high: int, dilation: int = 1) -> Callable[..., Array]:
    def run(x: Array, f: Array) -> Array:
        return lax.conv_general_dilated(x, f, (stride,), [(low, high)], rhs_dilation=(dilation,))

    return run


def pool(x: Array) -> Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")


#: Kernel, a function with one such operation, and the shapes of its arguments.
CASES: list[tuple[str, Callable[..., Array], tuple[tuple[int, ...], ...]]] = [
    ("dot_general", lambda x, w: jnp.einsum("bik,bkj->bij", x, w), ((4, 3, 6), (4, 6, 2))),
    ("conv_general_dilated", conv(1, 1, 1), ((2, 3, 8), (4, 3, 3))),
    ("conv_general_dilated", conv(2, 0, 0), ((2, 2, 9), (2, 2, 3))),
    ("conv_general_dilated", conv(1, 0, 0, 2), ((1, 1, 10), (2, 1, 3))),
    ("reduce_window_max", pool, ((3, 8),)),
    ("reshape", lambda x: x.reshape(4, 3, 2), ((12, 2),)),
    ("reshape", lambda x: x.reshape(12, 4), ((3, 4, 4),)),
    ("reshape", lambda x: x.reshape(6, 4), ((4, 6),)),
    ("transpose", lambda x: x.transpose(2, 0, 1), ((2, 4, 6),)),
    ("rev", lambda x: lax.rev(x, (0,)), ((6, 4),)),
    ("slice", lambda x: x[1:], ((8, 3),)),
    ("slice", lambda x: x[:, ::2], ((3, 8),)),
    ("pad", lambda x: jnp.pad(x, ((1, 1), (0, 0))), ((6, 4),)),
    ("concatenate", lambda x, y: jnp.concatenate([x, y]), ((4, 4), (2, 4))),
    ("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (4, 6)), ((1, 6),)),
    ("reduce_sum", lambda x: x.sum(1), ((4, 6, 2),)),
    ("cumsum", lambda x: lax.cumsum(x, 1), ((4, 6),)),
    ("sort", lambda x: jnp.sort(x, 1), ((4, 6),)),
    ("argmax", lambda x: lax.argmax(x, 1, np.int32), ((4, 6),)),
    ("top_k", lambda x: lax.top_k(x, 2), ((4, 6),)),
    ("gather", lambda x: x[jnp.array([[0], [3], [1], [1]]), jnp.arange(2)], ((6, 2),)),
    ("add", lambda x, y: x + y, ((4, 6), (4, 6))),
]


def signature(
    kernel: str, fn: Callable[..., Array], *shapes: tuple[int, ...]
) -> OperationSignature:
    graph = trace(fn, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).graph
    return next(
        registry.signature(
            op.kernel,
            op.params,
            tuple(g.values[v] for v in op.inputs),
            tuple(g.values[v] for v in op.outputs),
        )
        for _, op, g in operations(graph)
        if op.kernel == kernel
    )


@pytest.mark.parametrize("case", CASES, ids=[f"{k}-{i}" for i, (k, _, _) in enumerate(CASES)])
def test_operations_are_cut_as_brute_force_says(case: Any) -> None:
    kernel, fn, shapes = case
    s = signature(kernel, fn, *shapes)
    dims = range(len(s.index))
    cuts = [{d: (n,)} for d in dims for n in (2, 3, 4)]
    cuts += [{d: (2,), e: (n,)} for d, e in combinations(dims, 2) for n in (2, 3)]
    for axes in cuts:
        mine, theirs = split(s, axes), brute(s, {d: prod(n) for d, n in axes.items()})
        assert mine.legal == (theirs is not None), (axes, mine.refusal)
        if theirs is not None:
            assert (list(mine.inputs), list(mine.outputs)) == theirs, axes


def accesses(s: OperationSignature, name: str, n: int) -> tuple[list[Access], list[Access]]:
    """How operands and outputs are accessed when the index dim called `name` is cut in n."""
    d = [x.name for x in s.index].index(name)
    found = split(s, {d: (n,)})
    assert found.legal, found.refusal
    return [a[d] for a in found.inputs], [a[d] for a in found.outputs]


def test_a_padded_convolution_exchanges_halos() -> None:
    s = signature("conv_general_dilated", conv(1, 1, 1), (2, 3, 8), (4, 3, 3))
    assert accesses(s, "y", 4) == ([Blocks(2, 1, 1), Replicated()], [Blocks(2)])
    assert accesses(s, "n", 2) == ([Blocks(0), Replicated()], [Blocks(0)])
    assert accesses(s, "o", 4) == ([Replicated(), Blocks(0)], [Blocks(1)])
    assert accesses(s, "k", 3) == ([Blocks(1), Blocks(1)], [Partial("sum")])


def test_windows_that_tile_need_no_halo() -> None:
    s = signature("reduce_window_max", pool, (3, 8))
    assert accesses(s, "i1", 4)[0][0] == Blocks(1)


def test_reshapes_are_cut_by_their_digits() -> None:
    merged = signature("reshape", lambda x: x.reshape(12, 4), (3, 4, 4))
    assert [d.size for d in merged.index] == [3, 4, 4]
    assert legal_dims(merged, 3) == (0, 2)
    assert split(merged, {0: (3,)}).outputs == ({0: Blocks(0)},)
    assert not split(merged, {1: (2,)}).legal
    both = split(merged, {0: (3,), 1: (2,)})
    assert both.inputs == ({0: Blocks(0), 1: Blocks(1)},)
    assert both.outputs == ({0: Blocks(0), 1: Blocks(0, above=(0,))},)


def test_shifts_strides_and_reversals() -> None:
    shifted = signature("slice", lambda x: x[1:], (8, 3))
    assert accesses(shifted, "i0", 4) == ([Blocks(0, -1, 1)], [Blocks(0)])
    strided = signature("slice", lambda x: x[:, ::2], (3, 8))
    assert accesses(strided, "i1", 2) == ([Blocks(1, 0, -1)], [Blocks(1)])
    backwards = signature("rev", lambda x: lax.rev(x, (0,)), (6, 4))
    assert accesses(backwards, "i0", 3)[0] == [Gathered()]


@pytest.mark.parametrize(
    ("kernel", "dims"), [("cumsum", (0, 1)), ("argmax", (0, 1)), ("top_k", (0, 1)), ("sort", (0,))]
)
def test_what_runs_along_a_dim_leaves_the_others_free(kernel: str, dims: tuple[int, ...]) -> None:
    """The dim itself is cut where devices combine states of what they have of it."""
    fn, shapes = next((fn, shapes) for k, fn, shapes in CASES if k == kernel)
    s = signature(kernel, fn, *shapes)
    assert legal_dims(s, 2) == dims
    if 1 not in dims:
        assert split(s, {1: (2,)}).refusal.startswith("index dim i1 is a ")
