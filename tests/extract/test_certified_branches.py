"""What a conditional is certified to send: what the dearest of its branches does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape

X, W = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
PREDICATE = jax.ShapeDtypeStruct((), bool)
PINS = {"[1]": (None, "x"), "[2]": ("x", None), "result": (None, None)}
MESH = MeshShape(("x",), (8,))


def product(x: Any, w: Any) -> Any:
    return x @ w  # sums over devices of a whole matrix


def total(x: Any, w: Any) -> Any:
    return jnp.zeros_like(x) + jnp.sum(x, 1, keepdims=True)  # and of one number for each row


def sent(f: Callable[[Any, Any, Any], Any]) -> float:
    settings = te.Settings(work=0.1, recompute=0, forms=0)
    program = te.trace(f, PREDICATE, X, W)
    front = te.optimize(program, "cpu:8", mesh_shapes=[MESH], pins=PINS, settings=settings)
    plan = front.best("wire_bytes")
    assert sum(c.wire_bytes * c.count for c in plan.collectives) == plan.costs.wire_bytes
    return plan.costs.wire_bytes


@pytest.mark.slow
def test_a_conditional_sends_what_its_dearest_branch_does() -> None:
    """Whichever of them is written first."""
    alone = [sent(lambda p, x, w, of=of: of(x, w)) for of in (product, total)]
    assert alone[0] > alone[1] > 0
    for first, second in ((product, total), (total, product)):
        either = sent(lambda p, x, w, a=first, b=second: jax.lax.cond(p, a, b, x, w))
        assert either == pytest.approx(alone[0])
