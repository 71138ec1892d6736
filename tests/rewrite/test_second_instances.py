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
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.recomputation.second_places import (
    Reader,
    Recomputation,
    SecondPlaces,
    SecondReads,
    count_twice,
    may_be_second,
    ordered,
    retake,
    second_places,
    with_second_instances,
    with_second_reads,
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


# Second reads: the same values, whichever readers take second instances; and which may.


SQUARE = TensorType((N, N), "float32")


def chain(*kernels: str, outputs: tuple[int, ...], **more: Operation) -> BlockGraph:
    """A program of operations, each of the value before it, then `more`."""
    made = [Operation(kernel, (k,), (k + 1,)) for k, kernel in enumerate(kernels)]
    made += more.values()
    return BlockGraph("chain", (SQUARE,) * (len(made) + 1), tuple(made), (0,), outputs)


#: The exponential is read at once, and at the end.
LATE = chain("exp", "sin", "neg", outputs=(4,), last=Operation("mul", (3, 1), (4,)))


@pytest.mark.slow
@given(programs(), st.data())
@settings(max_examples=100, deadline=None)
def test_whoever_reads_second_instances_the_values_are_those_of_the_first(
    graph: BlockGraph, data: st.DataObject
) -> None:
    graph = ordered(graph, {})
    found = second_places(graph, {}, 200)
    ways = [data.draw(st.integers(0, len(place) - 1)) for place in found.places]
    chosen = found.chosen(ways)
    again = found.built(graph, chosen)
    assert again is not None
    verify_graph(again)
    rng = np.random.default_rng(0)
    inputs = [rng.integers(-1, 2, (N, N)).astype(np.float32) for _ in range(2)]
    for x, y in zip(execute(graph, inputs), execute(again, inputs), strict=True):
        np.testing.assert_array_equal(x, y)
    assert len(again.operations) == len(graph.operations) + chosen.count
    assert digest(retake(graph, chosen.numbers())) == digest(again)
    assert SecondReads.from_numbers(chosen.numbers()) == chosen


def test_a_second_instance_stands_before_its_reader_and_so_does_what_it_is_made_of() -> None:
    last: Reader = ("first", 4)
    alone = with_second_reads(LATE, SecondReads(((1, last),)))
    assert [op.kernel for op in alone.operations] == ["exp", "sin", "neg", "exp", "mul"]
    assert [op.remat for op in alone.operations] == [None, None, None, 0, None]
    assert alone.operations[-1].inputs == (3, alone.operations[3].outputs[0])
    graph = chain("exp", "sin", "neg", outputs=(4,), last=Operation("mul", (3, 2), (4,)))
    both = with_second_reads(graph, SecondReads(((2, last), (1, ("second", 2)))))
    assert [op.kernel for op in both.operations] == ["exp", "sin", "neg", "exp", "sin", "mul"]


def test_a_chain_has_one_number_and_what_others_read_one_of_its_own() -> None:
    graph = chain("exp", "sin", outputs=(3, 4), a=Operation("neg", (2,), (3,)),
                  b=Operation("mul", (2, 1), (4,)))  # fmt: skip
    through = with_second_reads(graph, SecondReads(((1, ("second", 2)), (2, ("first", 4)))))
    numbers = [op.remat for op in through.operations if op.remat is not None]
    assert len(numbers) == 2 and len(set(numbers)) == 1
    every = ((1, ("second", 2)), (1, ("first", 4)), (2, ("first", 4)))
    apart = with_second_reads(graph, SecondReads(every))
    numbers = [op.remat for op in apart.operations if op.remat is not None]
    assert len(numbers) == 2 and len(set(numbers)) == 2


def test_ways_are_all_sets_of_readers_but_the_first_and_what_they_are_made_of() -> None:
    graph = chain("exp", "sin", outputs=(3, 4, 5), a=Operation("neg", (2,), (3,)),
                  b=Operation("cos", (2,), (4,)), c=Operation("tan", (2,), (5,)))  # fmt: skip
    found = second_places(graph, {}, 100)
    readers = [{reader for v, reader in way if v == 2} for way in found.places[0][1:]]
    own: list[Reader] = [("first", 4), ("first", 5)]
    wanted = [{own[0]}, {own[1]}, set(own)]
    assert sorted(map(sorted, readers)) == sorted(sorted(x) for x in wanted for _ in range(2))
    deep = [way for way in found.places[0] if (1, ("second", 2)) in way]
    assert len(found.places) == 1 and len(deep) == 3 and not found.more


def test_all_ways_of_single_operations_are_searched_or_none_and_it_is_told() -> None:
    graph = chain("exp", "sin", outputs=(3, 4, 5), a=Operation("neg", (2,), (3,)),
                  b=Operation("cos", (2,), (4,)), c=Operation("tan", (2,), (5,)))  # fmt: skip
    some = second_places(graph, {}, 4)
    assert len(some.places[0]) == 1 + 4 and some.more and not some.left
    assert second_places(graph, {}, 2) == SecondPlaces(graph, {}, left=1)


def test_what_leaves_may_be_made_again_and_what_has_an_effect_may_not() -> None:
    graph = chain("exp", "sin", outputs=(1, 2))
    (place,) = second_places(graph, {}, 9).places
    assert place == ((), ((1, ("leaves", 1)),))
    again = with_second_reads(graph, SecondReads(place[1]))
    assert [op.kernel for op in again.operations] == ["exp", "sin", "exp"]
    assert again.outputs == (3, 2)
    first = Operation("exp", (0,), (1,), effectful=True)
    held = BlockGraph("held", graph.values, (first, *graph.operations[1:]), (0,), (1, 2))
    assert not second_places(held, {}, 9).places


def test_what_is_not_there_or_has_no_reader_is_refused() -> None:
    with pytest.raises(GraphError, match="value 9 cannot be computed again"):
        with_second_reads(LATE, SecondReads(((9, ("first", 4)),)))
    both: tuple[tuple[int, Reader], ...] = ((1, ("first", 2)), (1, ("first", 4)))
    with pytest.raises(GraphError, match="nothing reads"):
        with_second_reads(LATE, SecondReads(both))


def test_second_instances_of_a_changed_program_need_the_same_operations() -> None:
    """Where rules compute a place in another way."""
    found = second_places(LATE, {}, 9)
    chosen = found.chosen([1])
    one, *rest = LATE.operations
    other = BlockGraph("chain", LATE.values, (Operation("cos", (0,), (1,)), *rest), (0,), (4,))
    same = BlockGraph("chain", LATE.values, (one, *rest), (0,), (4,))
    assert found.built(other, chosen) is None
    made = found.built(same, chosen)
    assert made is not None and len(made.operations) == 5


def test_numbers_say_how_many_operations_are_computed_twice() -> None:
    chosen = SecondReads(((1, ("first", 4)), (3, ("first", 4))), ((0, 1),))
    assert count_twice(chosen.numbers()) == 2
    assert SecondReads.from_numbers(chosen.numbers()) == chosen


@pytest.mark.parametrize(
    ("kernel", "may"),
    [("sort", True), ("cholesky", True), ("flash_attention", False), ("exp", True)],
)
def test_kernels_that_were_measured_may_be_computed_again_but_for_attention(
    kernel: str, may: bool
) -> None:
    assert may_be_second(Operation(kernel, (0,), (1,))) == may
