"""What a compiler would compute twice, rounded in two ways or held in two, is computed once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.runtime.lower.lower import lower
from tests.plans.plans import plan_by_hand, signature_of
from tests.runtime.lowered import MESH, X, Y, cut, numbers, same


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


def behind(x: Any, w: Any) -> Any:
    """Of which a product, and what needs that product, read products of elements."""
    t = x * w
    return (t @ w) * t


def beside(x: Any, w: Any) -> Any:
    """Of which the kernel that makes products of elements computes the other result, too."""
    t = x * w
    return t @ w, jnp.sin(t)


def behind_order(x: Any, w: Any) -> Any:
    """Of which what puts rows in order, and what needs that, read products of elements."""
    t = x * w
    return jnp.sort(t, axis=-1) * t


def behind_sums(x: Any, w: Any) -> Any:
    """Of which something beside that kernel needs sums, and no order."""
    t = x * w
    return jnp.sort(t, axis=-1), t * t.sum(-1, keepdims=True)


def in_parts(x: Any, w: Any) -> Any:
    """A product of few tiles and many terms, read before and after the next product."""
    y = x @ w
    return jnp.cos(jnp.sin(y) @ w[:64]) * y


def in_parts_for_one(x: Any, w: Any) -> Any:
    """Such a product that the very next kernel alone reads."""
    return jnp.sin(x @ w)


def in_parts_for_products(x: Any, w: Any) -> Any:
    """Such a product that a product reads."""
    return (x @ w) @ w[:64]


@pytest.mark.parametrize(
    ("fn", "terms", "whole"),
    [
        (behind, 64, [(64, 64)]),
        (beside, 64, []),
        (behind_order, 64, [(64, 64)]),
        (behind_sums, 64, [(64, 64)]),
        (in_parts, 64, []),
        (in_parts, 4096, [(64, 64)]),
        (in_parts_for_one, 4096, []),
        (in_parts_for_products, 4096, []),
    ],
)
def test_what_would_be_made_again_for_a_later_kernel_is_made_whole(
    fn: Callable[..., Any], terms: int, whole: list[tuple[int, ...]]
) -> None:
    """XLA for GPUs makes it again in what goes element by element and waits for a product, and
    holds what it is made of until then: of a product that it makes in parts, all of these."""
    arguments = numbers(64, terms) / 8, numbers(terms, 64, seed=1) / 8
    settings = te.Settings(work=0.1, recompute=0, forms=0)
    plan = te.optimize(te.trace(fn, *arguments), "h100:1", settings=settings).best("seconds")
    found = jax.make_jaxpr(lower(plan, platform="cuda"))(*arguments).jaxpr
    equations = [e for e in found.eqns if e.primitive.name == "optimization_barrier"]
    alone = [e.outvars[0].aval for e in equations if len(e.outvars) == 1]
    assert [getattr(x, "shape", ()) for x in alone] == whole
    plain = jax.make_jaxpr(lower(plan, platform="cpu"))(*arguments).jaxpr
    assert len(plain.eqns) == len(found.eqns) - len(whole)
    got, wanted = lower(plan, platform="cuda")(*arguments), jax.tree.leaves(fn(*arguments))
    for a, b in zip(got, wanted, strict=True):
        same(a, b, 1e-2)
