"""Second reads: the same values, whichever readers take second instances; and which may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.recomputation.second_places import (
    Reader,
    SecondPlaces,
    SecondReads,
    count_twice,
    may_be_second,
    ordered,
    retake,
    second_places,
    with_second_reads,
)
from tests.rewrite.test_second_instances import N, programs

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
