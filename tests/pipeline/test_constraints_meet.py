"""Constraints beside constraints, views and reductions: each value exists as it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tests.pipeline.test_words import QUICK, arguments, same_numbers, user_mesh
from tests.pipeline.test_words_constraints import constrained, holds

Asked = Callable[..., jax.Array]
MEETING: dict[str, Callable[[Asked, jax.Array], jax.Array]] = {
    "one after another": lambda c, x: c(c(x * 2, "data", "model"), "data") + 1,
    "with a loop between": lambda c, x: c(c(x * 2, "model", "data") + 1, "data", "model") * 3,
    "with a view between": lambda c, x: c(c(x * 2, "data").T, "data") * 3,
    "before a reduction": lambda c, x: c(c(x * 2, "data", "model").sum(1), "model") * 3,
    "before what joins its dims": lambda c, x: c(x * 2, "data", "model").reshape(-1) * 3,
    "after what splits a dim": lambda c, x: c((x * 2).reshape(16, 4, 16), "model")[0] * 3,
}


@pytest.mark.parametrize("kind", MEETING)
def test_constraints_hold_whatever_is_beside_them(kind: str) -> None:
    mesh, x = user_mesh(), arguments()[1]

    def asked(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def step(x: jax.Array) -> jax.Array:
        return MEETING[kind](asked, x)

    plan = te.optimize(te.trace(step, x), "cpu:8", mesh=mesh, settings=QUICK).best()
    assert constrained(plan) and all(holds(*one) for one in constrained(plan))
    same_numbers(te.compile(plan, mesh)(x), jax.jit(step)(x))
