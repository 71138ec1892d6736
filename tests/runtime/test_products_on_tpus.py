"""What a TPU's compiler is told of products: what waits for their results, how operands lie."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.plans.lying import laid_in_order
from tapestry_egg.plans.plan import Plan
from tapestry_egg.runtime.lower.lower import lower
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import plan_by_hand
from tests.runtime.lowered import cut, numbers
from tests.runtime.test_laid_in_order import held

ONE = MeshShape(("x",), (1,))


def equations(plan: Plan, arguments: Any, platform: str) -> Any:
    """What one device runs, as lowered for a platform."""
    return jax.make_jaxpr(lower(plan, platform=platform))(*arguments).jaxpr.eqns


def needed(found: Any) -> list[set[int]]:
    """Of each product, the products before it without whose results it is not computed."""
    products = [k for k, e in enumerate(found) if e.primitive.name == "dot_general"]
    needs: list[set[int]] = []
    made: dict[Any, int] = {}
    for k, e in enumerate(found):
        below = [made[x] for x in e.invars if not isinstance(x, Literal) and x in made]
        needs.append(set(below).union(*(needs[b] for b in below)))
        made.update(dict.fromkeys(e.outvars, k))
    return [{products.index(b) for b in needs[k] & set(products)} for k in products]


def apart(x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of two that need nothing of each other."""
    return (x @ a) @ (y @ b)


def test_products_wait_for_what_is_rounded_of_those_before() -> None:
    arguments = tuple(numbers(256, 256, seed=k) / 16 for k in range(4))
    settings = te.Settings(work=0.1, recompute=0, forms=0)
    plan = te.optimize(te.trace(apart, *arguments), "v5e:1", settings=settings).best("seconds")
    assert any(op.kernel == "round_operand" for op in plan.graph.operations)
    assert needed(equations(plan, arguments, "tpu")) == [set(), {0}, {0, 1}]
    (got,) = lower(plan, platform="tpu")(*arguments)
    np.testing.assert_allclose(got, apart(*arguments), atol=0.02)  # of numbers around 1, rounded


def mixed(order: str, told: bool = False) -> Any:
    """Two products of what is computed of a third, one of them with what is made with dims in an
    order of its own."""

    def fn(x: jax.Array, w: jax.Array, v: jax.Array, c: jax.Array, z: jax.Array) -> Any:
        h = jnp.einsum("egcd,edh->egch", x, w)
        s = jnp.tanh(h)
        o = jnp.einsum("egch,ehd->egcd", s, v)
        y = jnp.einsum(f"gtec,gtd->{order}", c, z + jnp.einsum("gtec,egcd->gtd", c, o))
        y = jnp.einsum(f"{order}->egcd", y)
        y = laid_in_order(y) if told else y
        g = jnp.einsum("egch,egcd->ehd", s, y)
        # So `h` is there to compute `s` of.
        return jnp.einsum("egcd,egch->edh", x, jnp.einsum("egcd,ehd->egch", y, v) * h), g

    return fn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "groups", "platform", "times"),
    [("gdec", 4, "tpu", 1), ("egdc", 4, "tpu", 0), ("gdec", 1, "tpu", 0), ("gdec", 4, "cuda", 0)],
)
def test_operands_beside_computed_ones_are_laid_in_their_order(
    order: str, groups: int, platform: str, times: int
) -> None:
    sizes = {"e": 2, "g": groups, "c": 8, "d": 16, "h": 32, "t": 16}
    operands = ("egcd", "edh", "ehd", "gtec", "gtd")
    arguments = [numbers(*(sizes[d] for d in dims), seed=k) / 8 for k, dims in enumerate(operands)]
    fn = mixed(order)
    graph = trace(fn, *arguments).graph
    entering = tuple(cut(*[()] * a.ndim) for a in arguments)
    plan = plan_by_hand(graph, ONE, {}, entering, (cut((), (), ()), cut((), (), ())))
    found = equations(plan, arguments, platform)
    assert [e.primitive.name for e in found].count("laid_in_order") == times
    for got, wanted in zip(lower(plan, platform=platform)(*arguments), fn(*arguments), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)


def test_a_compiler_for_tpus_would_store_what_is_computed_beside_others() -> None:
    sizes = {"e": 2, "g": 16, "c": 128, "d": 256, "h": 1024, "t": 256}
    operands = ("egcd", "edh", "ehd", "gtec", "gtd")
    types = [(tuple(sizes[d] for d in dims), "float32") for dims in operands]
    rounded = 2 * 2 * 16 * 128 * 1024  # bytes of what two products read
    assert held(mixed("gdec"), *types) - held(mixed("gdec", told=True), *types) >= rounded / 2
