"""Second instances: the same values, computed again for late readers, whatever is chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.metakernels import registry
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.recomputation.second_places import (
    Recomputation,
    ordered,
    retake,
    with_second_instances,
)
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.tracing.trace import trace

N = 3
BINARY = ("add", "mul", "sub", "max", "dot_general")


@st.composite
def programs(draw: st.DrawFn) -> BlockGraph:
    """Random programs of two 3×3 inputs; every value that nothing reads is an output."""
    graph = trace(lambda a, b: a @ b, *[jax.ShapeDtypeStruct((N, N), jnp.float32)] * 2).graph
    (dot,) = graph.operations
    values = [TensorType((N, N), "float32")] * 2
    operations = []
    for k in range(draw(st.integers(2, 10))):
        kernel = draw(st.sampled_from(BINARY))
        inputs = tuple(draw(st.integers(0, k + 1)) for _ in range(2))
        params = dot.params if kernel == "dot_general" else {}
        operations.append(Operation(kernel, inputs, (len(values),), params))
        values.append(TensorType((N, N), "float32"))
    read = {v for op in operations for v in op.inputs}
    outputs = tuple(v for v in range(2, len(values)) if v not in read)
    return BlockGraph("random", tuple(values), tuple(operations), (0, 1), outputs)


@pytest.mark.slow
@given(programs(), st.data())
@settings(max_examples=150, deadline=None)
def test_second_instances_have_the_values_of_the_first(
    graph: BlockGraph, data: st.DataObject
) -> None:
    boundary = data.draw(st.integers(0, len(graph.operations) - 1))
    early = [v for op in graph.operations[: boundary + 1] for v in op.outputs]
    picked = data.draw(st.lists(st.sampled_from(early), unique=True))
    half = data.draw(st.integers(0, len(picked)))
    chosen = Recomputation(boundary, (tuple(picked[:half]), tuple(picked[half:])))

    again = with_second_instances(graph, chosen)

    verify_graph(again)
    rng = np.random.default_rng(0)
    # Small integers: floats hold every sum and product of them exactly.
    inputs = [rng.integers(-1, 2, (N, N)).astype(np.float32) for _ in range(2)]
    for x, y in zip(execute(graph, inputs), execute(again, inputs), strict=True):
        np.testing.assert_array_equal(x, y)
    given_, new = set(range(len(graph.values))), again.operations
    firsts = [op for op in new if set(op.outputs) <= given_]
    seconds = [op for op in new if not set(op.outputs) <= given_]
    # The first instances are all there, in order; the operations after the boundary, and the
    # second instances themselves, read no first instance of what was chosen.
    assert [op.outputs for op in firsts] == [op.outputs for op in graph.operations]
    assert firsts[: boundary + 1] == list(graph.operations[: boundary + 1])
    for op in (*firsts[boundary + 1 :], *seconds):
        assert not set(op.inputs) & set(picked)
    assert all(op.remat is not None for op in seconds)
    assert len(seconds) <= len(picked)


def test_a_second_instance_is_made_right_before_its_first_late_reader() -> None:
    square = TensorType((N, N), "float32")
    graph = BlockGraph(
        "late",
        (square,) * 5,
        (
            Operation("exp", (0,), (1,)),
            Operation("sin", (1,), (2,)),
            Operation("neg", (2,), (3,)),
            Operation("mul", (3, 1), (4,)),
        ),
        (0,),
        (4,),
    )
    again = with_second_instances(graph, Recomputation(1, ((1,),)))
    assert [op.kernel for op in again.operations] == ["exp", "sin", "neg", "exp", "mul"]
    assert [op.remat for op in again.operations] == [None, None, None, 0, None]
    assert again.operations[-1].inputs == (3, again.operations[3].outputs[0])


def test_numbers_of_checkpoints_that_are_there_are_not_used_again() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jax.checkpoint(jnp.sin)(jnp.exp(x))))(x)

    graph = trace(f, jax.ShapeDtypeStruct((N,), jnp.float32)).graph
    used = {op.remat for op in graph.operations} - {None}
    first = next(v for op in graph.operations if op.kernel == "exp" for v in op.outputs)
    again = with_second_instances(graph, Recomputation(0, ((first,),)))
    new = [op for op in again.operations if op.outputs[0] >= len(graph.values)]
    assert used
    assert new
    assert all(op.remat not in used for op in new)


@pytest.mark.parametrize("segments", [((99,),), ((0,),), ((4,),)])
def test_only_what_is_made_before_the_boundary_can_be_computed_again(
    segments: tuple[tuple[int, ...], ...],
) -> None:
    square = TensorType((N, N), "float32")
    operations = tuple(Operation("exp", (k,), (k + 1,)) for k in range(4))
    graph = BlockGraph("chain", (square,) * 5, operations, (0,), (4,))
    with pytest.raises(GraphError, match="cannot be computed again"):
        with_second_instances(graph, Recomputation(1, segments))


def test_the_numbers_of_a_recomputation_lead_to_the_same_program() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)))(w)

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = trace(step, shape, shape, donate_argnums=0).graph
    pairs = feedback_pairs(graph)
    inner = ordered(graph, pairs)
    value = next(v for op in inner.operations if op.kernel == "tanh" for v in op.outputs)
    chosen = Recomputation(4, ((value,),), tuple(pairs.items()))
    again = with_second_instances(inner, chosen)
    assert len(again.operations) > len(inner.operations)
    assert Recomputation.from_numbers(chosen.numbers()) == chosen
    assert retake(graph, chosen.numbers()) == again
    assert registry.signature_of(
        again.operations[-1],
        tuple(again.values[v] for v in again.operations[-1].inputs),
        tuple(again.values[v] for v in again.operations[-1].outputs),
    )
