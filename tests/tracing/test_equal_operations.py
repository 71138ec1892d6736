"""What a function computes twice is one operation, as XLA makes it one, and is sent for once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import Operation, TensorType
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rules import load_book
from tapestry_egg.runtime import compare
from tapestry_egg.tracing.needless import made_once

Array = Any
F32 = {"exponent_bits": 8, "mantissa_bits": 23}
X = np.random.default_rng(0).normal(size=(2048, 16)).astype(np.float32)


def kernels(function: Any, *arguments: Any) -> list[str]:
    return [op.kernel for op in te.trace(function, *arguments).graph.operations]


def normalised(x: Array) -> Array:
    """The mean is computed, and computed again within the variance."""
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)


def test_what_is_computed_twice_is_one_operation() -> None:
    assert kernels(lambda x: jnp.tanh(x * 2.0) + jnp.tanh(x * 2.0), X) == ["mul", "tanh", "add"]
    assert kernels(lambda x: (jnp.sin(x), jnp.sin(x) + x), X) == ["sin", "add"]


def test_what_has_a_name_is_what_it_names() -> None:
    """Before what rounds, as a policy puts it, or after."""
    named, rounded = partial(checkpoint_name, name="h"), partial(lax.reduce_precision, **F32)

    def f(x: Array) -> Array:
        return jnp.tanh(rounded(named(x))) * jnp.tanh(named(rounded(x)))

    assert kernels(f, X).count("tanh") == 1
    compiled = jax.jit(f).lower(X).compile().as_text()
    assert compiled is not None and compiled.count(" tanh(") == 1


def test_what_gets_its_shape_back_is_what_it_was() -> None:
    def there_and_back(x: Array) -> Array:
        apart = jnp.tanh(x).reshape(1, -1)
        return apart.reshape(4, -1)[None].reshape(x.shape) + apart[0].reshape(x.shape)

    assert kernels(there_and_back, X) == ["tanh", "add"]
    assert kernels(lambda x: jnp.pad(jnp.tanh(x), 1, "edge"), X).count("broadcast_in_dim") == 0
    # What repeats elements or orders them anew is another array.
    assert kernels(lambda x: x.T.reshape(x.shape), X) == ["transpose", "reshape"]
    assert "transpose" in kernels(
        lambda x: x.reshape(4, 4, 16).swapaxes(0, 1).reshape(16, 16), X[:16]
    )
    assert "broadcast_in_dim" in kernels(lambda x: jnp.repeat(x[:1], 16, 0), X[:16])


def test_slices_are_one_however_they_are_spelled() -> None:
    """Rules about slices see all of them, too: the first columns are those of a concatenation."""
    parts = (
        lambda x: x[:, :8],
        lambda x: lax.slice_in_dim(x, 0, 8, axis=1),
        lambda x: lax.slice(x, (0, 0), (2048, 8), (1, 1)),
        lambda x: jnp.split(x, [8], axis=1)[0],
        lambda x: lax.split(x, (8, x.shape[1] - 8), axis=1)[0],
        lambda x: lax.dynamic_slice(x, (0, 0), (2048, 8)),
        lambda x: jnp.take(x, jnp.arange(8), axis=1),
    )
    assert kernels(lambda x: sum(jnp.tanh(part(x)) for part in parts), X).count("slice") == 1
    for part in parts:
        graph = te.trace(lambda x, part=part: jnp.tanh(part(jnp.concatenate([x, x], 1))), X).graph
        (rule,) = [r for r in load_book("structure").rules if r.name == "first-part-of-concat"]
        assert any("first-part-of-concat" in n for n in explore(graph, [rule]).terms.made.values())
    assert kernels(lambda x: x[:, :8] + x[:, ::2], X).count("slice") == 2


def test_what_differs_in_anything_stays_two() -> None:
    square = X[:16]
    assert kernels(lambda x: jnp.cumsum(x, 0) + jnp.cumsum(x, 1), square).count("cumsum") == 2
    assert kernels(lambda x: x.sum(0) + x.sum(1), square).count("reduce_sum") == 2
    assert kernels(lambda x: (x * 0.0, x * -0.0), X).count("mul") == 2


def test_numbers_that_are_drawn_are_drawn_as_often_as_written() -> None:
    def twice(x: Array) -> Array:
        one, two = (jax.lax.rng_uniform(x[0, 0], x[0, 0] + 5.0, X.shape) for _ in range(2))
        return one - two

    assert kernels(twice, X).count("rng_uniform") == 2


def test_equal_results_may_lie_in_different_ways() -> None:
    def pair(x: Array) -> tuple[Array, Array, Array]:
        return jnp.sin(x), jnp.sin(x), jnp.sin(x) * 2.0

    assert kernels(pair, X).count("sin") == 2
    pins = {"result[0]": ("x", None), "result[1]": (None, "x")}
    mesh, quick = MeshShape(("x",), (8,)), Settings(work=0.2, recompute=0, forms=0)
    front = te.optimize(te.trace(pair, X), "cpu:8", pins=pins, mesh_shapes=[mesh], settings=quick)
    cut = [x.dims for x in front.best("seconds").out_shardings]
    assert cut[:2] == [((0,), ()), ((), (0,))]


def test_constants_are_filled_where_they_are_read() -> None:
    assert kernels(lambda x: (x + jnp.arange(16.0)) * jnp.arange(16.0), X).count("iota") == 2


def test_readers_of_equal_constants_are_equal() -> None:
    def twice(x: Array) -> Array:
        return jnp.tanh(x + 2 * jnp.arange(16.0)) * jnp.tanh(x + 2 * jnp.arange(16.0))

    found = kernels(twice, X)
    assert [found.count(k) for k in ("iota", "add", "tanh")] == [1, 1, 1]


def test_calls_into_python_are_made_as_often_as_written() -> None:
    types = [TensorType((4,), "float32")] * 3
    calls = [Operation("io_callback", (0,), (v,), {"callback": 7}) for v in (1, 2)]
    assert made_once(calls, types, [0]) == (calls, [0])


def test_what_a_checkpoint_computes_again_stays_apart() -> None:
    def loss(x: Array) -> Array:
        return jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ x.T @ x)))(x).sum()

    def kept(x: Array) -> Array:
        return jnp.sin(jnp.tanh(x @ x.T @ x)).sum()

    again = kernels(jax.value_and_grad(loss), X).count("dot_general")
    assert again == kernels(jax.value_and_grad(kept), X).count("dot_general") + 2


@pytest.mark.slow
def test_sums_that_two_operations_share_are_sent_once() -> None:
    """XLA's module holds what is planned, of rows cut over eight devices."""
    program = te.trace(normalised, X)
    front = te.optimize(
        program,
        "cpu:8",
        mesh_shapes=[MeshShape(("x",), (8,))],
        pins={"[0]": ("x", None), "result": ("x", None)},
        settings=Settings(work=1.0, recompute=0, forms=0),
    )
    plan = front.best("seconds")
    run = te.compile(plan, jax.devices()[:8])
    assert [c.kind for c in plan.collectives] == ["all_reduce", "all_reduce"]
    assert compare(plan, run.lower().compile()).equal
    np.testing.assert_allclose(run(X), normalised(X), rtol=1e-5, atol=1e-5)
