"""Parts of parts are taken at once, and hold what they held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.tracing.trace import trace

X = np.arange(16.0 * 8.0, dtype=np.float32).reshape(16, 8)


def spread(x: jax.Array) -> jax.Array:
    return lax.pad(x, 0.0, ((1, 2, 1), (0, 0, 0)))


@jax.checkpoint
def again(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(x[::2]))


#: Programs, and the slices that each takes.
TAKEN: dict[str, tuple[Callable[[jax.Array], Any], int]] = {
    "a part of a part": (lambda x: x[1:][::2], 1),
    "of several steps": (lambda x: x[2:13:3][1:, 2:][::2, ::3], 1),
    "with both read": (lambda x: ((y := x[1:])[::2], y), 2),
    "the gradient of holes": (jax.grad(lambda x: jnp.sum(jnp.sin(spread(x)))), 1),
    "edges that are cut off": (lambda x: lax.pad(x, 0.0, ((-1, -2, 0), (0, -1, 0)))[::4], 1),
    "not of what is padded": (lambda x: lax.pad(x, 0.0, ((-1, 2, 0), (0, 0, 0)))[::2], 1),
    "not of another region": (jax.grad(lambda x: again(x[1:])), 2),
}


def evaluated(graph: BlockGraph, x: Any) -> list[Any]:
    """What a graph of slices, pads and operations of `jax.lax` by the same name gives."""
    known = {graph.inputs[0]: x, **graph.constants}
    for op in graph.operations:
        inputs = [known[v] for v in op.inputs]
        if op.kernel == "slice":
            rows = zip(*(op.params[k] or [1, 1] for k in SLICED), strict=True)
            made = inputs[0][tuple(slice(a, b, s) for a, b, s in rows)]
        elif op.kernel == "pad":
            made = lax.pad(*inputs, tuple(map(tuple, op.params["padding_config"])))
        elif op.kernel == "broadcast_in_dim":
            made = np.full(op.params["shape"], inputs[0])
        else:
            made = getattr(lax, op.kernel)(*inputs)
        known[op.outputs[0]] = made
    return [known[v] for v in graph.outputs]


SLICED = ("start_indices", "limit_indices", "strides")


@pytest.mark.parametrize("name", TAKEN)
def test_parts_of_parts_are_taken_at_once(name: str) -> None:
    fn, count = TAKEN[name]
    graph = trace(fn, X).graph
    assert sum(op.kernel == "slice" for op in graph.operations) == count
    for made, wanted in zip(evaluated(graph, X), jax.tree.leaves(fn(jnp.asarray(X))), strict=True):
        assert np.array_equal(made, wanted)
