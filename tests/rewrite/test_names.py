"""No kernel's name decides what rewriting finds: under other names a program has the same forms."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.views import folded_views
from tapestry_egg.reference.kernels import REFERENCES, add_reference
from tapestry_egg.rewrite.rows.rows_by_number import with_batch_dims
from tapestry_egg.rewrite.rows.shifts import moves
from tapestry_egg.rewrite.streams.streamed import count_streams, with_streams
from tapestry_egg.tracing.control_flow import rounds

from .attention_spellings import SPELLINGS, program

OWN = "own_"


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A function that gives every kernel of a graph another name, with the same templates."""
    known = dict(registry.templates())
    monkeypatch.setattr(registry, "_TEMPLATES", known)

    def operation(op: Operation) -> Operation:
        regions = tuple(graph(r) for r in op.regions)
        if op.regions:
            return replace(op, regions=regions)
        own = OWN + op.kernel
        if own not in known:
            known[own] = tuple(replace(t, kernels=(own,)) for t in known[op.kernel])
            if op.kernel in REFERENCES:
                add_reference(own, REFERENCES[op.kernel])
        return replace(op, kernel=own)

    def graph(given: BlockGraph) -> BlockGraph:
        return replace(given, operations=tuple(map(operation, given.operations)))

    return graph


@pytest.mark.parametrize("mode", ["forward", "gradients", "scan"])
@pytest.mark.parametrize("name", ["jax.nn causal, groups", "added mask", *list(SPELLINGS)[-1:]])
def test_attention_under_other_names_is_fused(renamed, name: str, mode: str) -> None:  # type: ignore[no-untyped-def]
    function, types = program(name, "float32", mode, 12)
    given = te.trace(function, *types).graph
    found, expected = with_streams(renamed(given)), with_streams(given)
    assert count_streams(found) == count_streams(expected) > 0
    params = [op.params for op in expected.walk() if registry.in_blocks(op.kernel)]
    assert [op.params for op in found.walk() if registry.in_blocks(op.kernel)] == params


def test_views_and_moves_under_other_names(renamed) -> None:  # type: ignore[no-untyped-def]
    def function(x: jax.Array) -> jax.Array:
        y = jnp.concatenate([x[1:], x[:1]]).T[::-1].reshape(3, 2, 4)
        return jnp.broadcast_to(y[:, :, None], (3, 2, 5, 4))

    given = te.trace(function, jax.ShapeDtypeStruct((4, 6), jnp.float32)).graph
    other = renamed(given)
    assert folded_views(other) == folded_views(given) != {}
    assert moves(other) == moves(given) != {}


def test_rows_by_number_under_other_names(renamed) -> None:  # type: ignore[no-untyped-def]
    def function(x: jax.Array, labels: jax.Array) -> jax.Array:
        return x[jnp.arange(8), labels].sum()

    types = jax.ShapeDtypeStruct((8, 5), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    given = te.trace(jax.grad(function), *types).graph
    other = renamed(given)
    expected = [op.params.get("dimension_numbers") for op in with_batch_dims(given).operations]
    found = [op.params.get("dimension_numbers") for op in with_batch_dims(other).operations]
    assert with_batch_dims(given) is not given and found == expected


@pytest.mark.parametrize("end", [0, 7, 10, 11])
@pytest.mark.parametrize("step", [3, -3, 1])
@pytest.mark.parametrize("compare", [jnp.less, jnp.greater_equal, jnp.not_equal, jnp.equal])
def test_rounds_are_counted_by_what_a_comparison_says(end: int, step: int, compare) -> None:  # type: ignore[no-untyped-def]
    start = 1

    def function(x: jax.Array) -> jax.Array:
        state = lax.while_loop(
            lambda s: compare(s[0], end), lambda s: (s[0] + step, s[1] * 2.0), (start, x)
        )
        return state[1]

    graph = te.trace(function, jax.ShapeDtypeStruct((), jnp.float32)).graph
    counts = [n for n in range(40) if not compare(start + n * step, end)]
    loops = [op for op in graph.operations if op.regions]
    if counts:
        assert [op.rounds for op in loops if op.is_scan] == [counts[0]] or not loops
    else:
        assert loops[0].is_while and rounds(loops[0], graph.constants) is None
    assert np.ndim(counts) == 1
