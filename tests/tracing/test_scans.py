"""Scans are read and emitted alike, whether JAX counts their values or holds them as trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.tracing import emit as emission
from tapestry_egg.tracing.control_flow import with_counts
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace


@dataclass
class Tree:
    """What a newer JAX keeps: constants, carries and slices, each a tree of its own."""

    vals: tuple[Any, ...]

    def unpack(self) -> tuple[Tree, Tree, Tree]:
        consts, carry, slices = self.vals
        return Tree(consts), Tree(carry), Tree(slices)


def running(w: Any, start: Any, xs: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        carry = jnp.tanh(carry @ w + x)
        return carry, (carry.sum(), x * 2)

    return jax.lax.scan(step, start, xs, reverse=True)


def test_trees_of_a_scan_are_counted() -> None:
    trees = Tree((("w",), ("a", "b"), ("x", "y", "z")))
    given = {"length": 3, "reverse": False, "ft_in": trees, "ft_out": object()}
    assert with_counts(given) == {"length": 3, "reverse": False, "num_consts": 1, "num_carry": 2}
    assert with_counts({"num_consts": 1, "num_carry": 2}) == {"num_consts": 1, "num_carry": 2}


def test_a_scan_is_emitted_where_jax_does_not_take_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    w, start, xs = (rng.normal(size=s).astype("float32") for s in ((4, 4), (2, 4), (5, 2, 4)))
    program = trace(running, w, start, xs)
    wanted = jax.tree.leaves(jax.jit(running)(w, start, xs))
    monkeypatch.setattr(emission, "binds_counts", lambda: False)
    found = jax.jit(emit(program))(w, start, xs)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
