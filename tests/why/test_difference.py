"""What two plans of different programs say of each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te

pytestmark = pytest.mark.slow


def test_plans_of_two_forms_say_in_which_operations_they_differ() -> None:
    def planned(fn: Any) -> te.Plan:
        graph = te.trace(fn, jax.ShapeDtypeStruct((64, 64), "float32"))
        settings = te.Settings(work=0.2, workers=1, front=False)
        books = ("sharding", "collectives")
        return te.optimize(graph, "h100:2", books=books, settings=settings).best()

    def step(f: Any) -> Any:
        return lambda x: jnp.tanh(x @ x) + f(x @ x.T)

    one, other = planned(step(jnp.sin)), planned(step(jnp.cos))
    reordered = planned(lambda x: jnp.add(*[jnp.sin(x @ x.T), jnp.tanh(x @ x)][::-1]))
    same = one.difference(reordered)
    assert not same.same_form and same.same_values and not same.operations
    assert "the same operations, in another order" in str(same)
    found = one.difference(other)
    assert not found.same_values
    assert [(o.kernel, o.one, o.other) for o in found.operations] == [("sin", 1, 0), ("cos", 0, 1)]
    assert all(
        o.source.startswith("test_difference.py:") and "jnp." in o.text for o in found.operations
    )
    assert "operations that only one of them has" in str(found)
    assert max(map(len, str(found).splitlines())) <= 120
