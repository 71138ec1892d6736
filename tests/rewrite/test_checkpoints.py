"""What to keep past the peak and what to compute again, against every other choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.machine.target import load_target
from tapestry_egg.rewrite import recompute
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.recomputation.checkpoints import Checkpoints, Flow
from tapestry_egg.rewrite.recomputation.second_places import with_second_instances
from tapestry_egg.rewrite.recompute import Candidate, Looked, candidates
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.one_device import program_seconds
from tapestry_egg.schedule.repeated import repeat_cheap
from tapestry_egg.schedule.schedules import in_order, schedule, scheduled
from tapestry_egg.tracing.trace import trace

H100 = load_target("h100:8")
DOT = trace(lambda a, b: a @ b, *[jax.ShapeDtypeStruct((2, 2), jnp.float32)] * 2).graph
WIDTHS = (64, 128, 192, 320)


def matmul(inputs: tuple[int, int], output: int) -> Operation:
    return Operation("dot_general", inputs, (output,), DOT.operations[0].params)


@st.composite
def trains(draw: st.DrawFn) -> BlockGraph:
    """A forward pass of products of squares (all kernels) and a backward pass that reads some of
    their results in reverse order.

    Inputs 0.. are a weight per width; `a @ b` needs equal widths, so every product is of two
    values of one width.
    """
    kinds = draw(st.lists(st.sampled_from(range(len(WIDTHS))), min_size=1, max_size=2, unique=True))
    values = [TensorType((WIDTHS[k],) * 2, "float32") for k in kinds]
    inputs = tuple(range(len(values)))
    operations: list[Operation] = []

    def product(a: int, b: int) -> int:
        values.append(values[a])
        operations.append(matmul((a, b), len(values) - 1))
        return len(values) - 1

    def alike(v: int) -> list[int]:
        return [u for u in range(len(values)) if values[u] == values[v]]

    for _ in range(draw(st.integers(1, 7))):
        a = draw(st.integers(0, len(values) - 1))
        product(a, draw(st.sampled_from(alike(a))))
    forward = range(len(inputs), len(values))
    wanted = draw(st.lists(st.sampled_from(forward), min_size=1, unique=True))
    outputs = [product(v, v) for v in sorted(wanted, reverse=True)]
    return BlockGraph("train", tuple(values), tuple(operations), inputs, tuple(outputs))


def subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


class Plain:
    """A program of kernels alone, read off its graph: what is made before the boundary (`early`),
    and which of it is read later (`late`). What leaves the program is there anyway."""

    def __init__(self, graph: BlockGraph, boundary: int) -> None:
        self.graph = graph
        self.early = graph.operations[: boundary + 1]
        self.made = {op.outputs[0]: op for op in self.early}
        read = {v for op in graph.operations[boundary + 1 :] for v in op.inputs}
        self.late = {v for v in read if v in self.made} - set(graph.outputs)

    def size(self, v: int) -> int:
        return self.graph.values[v].nbytes

    @cached_property
    def seconds(self) -> dict[int, float]:
        """Of the operation that makes each value before the boundary, alone."""
        values = self.graph.values
        alone = (BlockGraph("", values, (o,), tuple(set(o.inputs)), o.outputs) for o in self.early)
        return {a.outputs[0]: program_seconds(a, H100) for a in alone}

    def cost(self, again: set[int], price: float) -> float:
        """Seconds of what is computed again, and the price of what is kept for it or instead."""
        below = {v for u in again for v in self.made[u].inputs if v in self.made}
        kept = (self.late | below) - again - set(self.graph.outputs)
        return sum(self.seconds[v] for v in again) + price * sum(map(self.size, kept))


def checkpoints(graph: BlockGraph) -> tuple[Checkpoints, Plain]:
    pairs: dict[int, int] = {}
    inner = in_order(graph, pairs)
    flow = Flow(schedule(flatten(inner, pairs)))
    return Checkpoints(flow, H100), Plain(inner, flow.early)


@pytest.mark.slow
@given(trains(), st.sampled_from([1e-13, 1e-12, 3e-12, 1e-11, 3e-11, 1e-10, 1e-9]))
@settings(max_examples=25, deadline=None)
def test_what_is_kept_and_what_is_computed_again_cost_the_least_together(
    graph: BlockGraph, price: float
) -> None:
    points, plain = checkpoints(graph)
    assume(plain.late)
    chosen = points.recomputation(points.units((), price))
    again = {v for segment in chosen.segments for v in segment}
    assert again <= set(plain.made)
    best = min(plain.cost(set(s), price) for s in subsets(sorted(plain.made)))
    assert plain.cost(again, price) == pytest.approx(best, rel=1e-9)


@given(trains(), st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_checkpoints_pass_the_fewest_bytes(graph: BlockGraph, share: float) -> None:
    points, plain = checkpoints(graph)
    assume(len(plain.early) > 1)
    largest = share * points.crossing
    n = len(plain.early)
    number = {op.outputs[0]: k for k, op in enumerate(plain.early)}

    def passed(cut: int) -> int:
        """Bytes made before operation `cut` and read by it or later ones up to the boundary."""
        before = {v for v, k in number.items() if k < cut}
        before -= set(graph.outputs)
        return sum(plain.size(v) for v in before if any(v in o.inputs for o in plain.early[cut:]))

    def fits(cuts: tuple[int, ...]) -> bool:
        ends = (0, *cuts, n)
        for a, b in pairwise(ends):
            made = sum(plain.size(v) for v in plain.late if a <= number[v] < b)
            if made > largest + 0.5 and b - a > 1:  # bytes are whole
                return False
        return True

    legal = [cuts for cuts in subsets(list(range(1, n))) if fits(cuts)]
    best = min(sum(map(passed, cuts)) for cuts in legal)
    first = min(u for u, unit in enumerate(points.schedule.units) if points.flow.repeatable(u))
    found = points.cuts(largest)
    assert sum(points.passed[c] for c in found) == pytest.approx(best)
    ours = tuple(sorted({c - first for c in found} - {0}))
    assert sum(map(passed, ours)) == pytest.approx(best)
    assert fits(ours)


@given(trains())
@settings(max_examples=30, deadline=None)
def test_what_a_cut_passes_is_kept(graph: BlockGraph) -> None:
    """A segment is computed again from what was made in it, and from what is kept."""
    points, plain = checkpoints(graph)
    assume(len(plain.early) > 2)
    cuts = points.cuts(points.crossing / 2)
    chosen = points.recomputation(points.units(cuts, 1.0))
    segment = {v: s for s, values in enumerate(chosen.segments) for v in values}
    for v in segment:
        for u in plain.made[v].inputs:
            assert segment.get(u, segment[v]) == segment[v]


@pytest.mark.slow
@given(trains(), st.sets(st.integers(0, 6)))
@settings(max_examples=40, deadline=None)
def test_estimates_are_what_the_program_costs_where_nothing_fuses(
    graph: BlockGraph, which: set[int]
) -> None:
    """Against the program itself with any second instances, scheduled as it stands."""
    points, plain = checkpoints(repeat_cheap(graph))  # nothing in it is dead
    products = [u for u in range(points.flow.turn + 1) if points.flow.repeatable(u)]
    again = {u: 0 for k, u in enumerate(products) if k in which}
    chosen = points.recomputation(again)
    made = with_second_instances(plain.graph, chosen)
    flow = Flow(schedule(flatten(repeat_cheap(made), {})))
    seconds, peak = points.estimate(again)
    more = program_seconds(made, H100) - program_seconds(plain.graph, H100)
    assert seconds - points.seconds == pytest.approx(more)
    # What a second instance is made of may end before its reader runs, and is counted there.
    below = {u for s in chosen.segments for v in s for u in plain.made[v].inputs}
    assert flow.peak <= peak <= flow.peak + sum(map(plain.size, below & set(plain.made)))


def test_what_a_second_instance_is_made_of_stays_until_then() -> None:
    """The square of a square is read once more at the end: kept or made again there, one value is
    held while four others and their product are alive."""
    square = TensorType((64, 64), "float32")
    early = [(0, 0), (1, 1), *[(0, 0)] * 4, (3, 4), (7, 5), (8, 6)]  # values 1 ..; 9 is read late
    late = [(9, 0), (10, 2)]
    operations = [matmul(read, 1 + k) for k, read in enumerate([*early, *late])]
    graph = BlockGraph("", (square,) * 12, tuple(operations), (0,), (11,))
    points, plain = checkpoints(graph)
    (u,) = [u for u, unit in enumerate(points.schedule.units) if unit.outputs == (2,)]
    made = with_second_instances(plain.graph, points.recomputation({u: 0}))
    held = 7 * square.nbytes
    assert points.flow.peak == Flow(schedule(flatten(made, {}))).peak == held
    assert points.estimate({u: 0})[1] == held


def deep(layers: int) -> BlockGraph:
    """A train step of equal layers with a wide activation in each."""

    def loss(ws: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for up, down in ws:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.sum(x * x)

    def step(ws: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> list[tuple[jax.Array, ...]]:
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

    w = jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    return trace(step, [w] * layers, jax.ShapeDtypeStruct((2048, 64), jnp.float32)).graph


def test_layers_are_cut_at_the_residual_stream_and_choose_alike() -> None:
    layers = 6
    graph = deep(layers)
    points = Checkpoints(Flow(schedule(flatten(in_order(graph, {}), {}))), H100)
    stream = 2048 * 64 * 4
    cuts = points.cuts(points.crossing / layers)
    assert {points.passed[c] for c in cuts} == {stream}
    assert layers - 2 <= len(cuts) <= layers
    chosen = points.recomputation(points.units(cuts, 1.0))
    inner = [s for s in chosen.segments if s != chosen.segments[-1]]
    kernels = {
        tuple(op.kernel for op in graph.operations if op.outputs[0] in segment) for segment in inner
    }
    assert len(inner) >= layers - 3
    assert len(kernels) <= 2  # the first layer may differ: its input is there anyway


@pytest.mark.parametrize("layers", [3, 8])
@pytest.mark.parametrize("most", [1, 2])
def test_those_that_are_wanted_are_found_without_making_all(layers: int, most: int) -> None:
    plan = scheduled(deep(layers), {})

    def best(found: Sequence[Candidate]) -> list[Candidate]:
        return sorted(found[1:], key=lambda c: c.seconds * c.peak)[:most]

    every, some = candidates(plan, H100).found, candidates(plan, H100, most).found
    assert len(every) > 1
    assert [c.chosen for c in best(some)] == [c.chosen for c in best(every)]
    assert candidates(plan, H100, 9).found[1:] == every[1:]


def test_those_that_estimates_leave_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Candidate] = []
    make = recompute._candidate

    def counted(*arguments: Any) -> Candidate:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(recompute, "_candidate", counted)
    monkeypatch.setattr(recompute, "_UNSURE", 0.0)
    plan = scheduled(deep(8), {})
    every = candidates(plan, H100)
    assert every.unmade == 0
    promised = len(made)
    some = candidates(plan, H100, 1)
    unmade = promised - (len(made) - promised)
    assert some.unmade == unmade > 0
    found = recompute.recomputing(Form(deep(8)), plan, H100, 1)
    assert len(found.forms) == 1
    assert found.left == len(some.found) - 2 + unmade + some.alike


def test_the_grid_on_which_values_were_looked_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prices, the ways to cut that others beat by an estimate, and what saves too little."""
    plan = scheduled(deep(8), {})
    whole = candidates(plan, H100)
    points = Checkpoints(Flow(plan), H100)
    ways = {points.cuts(share * points.crossing) for share in recompute._LARGEST}
    assert whole.prices == len(recompute._PRICES)
    assert whole.cuts == len(ways) - 1 > 0
    assert not whole.slight
    monkeypatch.setattr(recompute, "LEAST_SAVED", 0.0)
    finer = candidates(plan, H100)
    assert finer.alike == 0
    least = finer.found[-1].peak / finer.found[0].peak
    monkeypatch.setattr(recompute, "LEAST_SAVED", 1.01 * (1.0 - least))
    coarse = candidates(plan, H100)
    assert len(coarse.found) == 1
    assert coarse.alike > 0
    monkeypatch.setattr(recompute, "LEAST_SAVED", 0.999)
    assert candidates(plan, H100) == Looked(coarse.found[:1], slight=True)


def test_where_nothing_can_be_saved_the_program_stays_alone() -> None:
    """Forward passes, and loops, whose steps are not computed again."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def forward(x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ x) @ x)

    def scanned(x: jax.Array) -> jax.Array:
        return jax.grad(
            lambda x: jnp.sum(jax.lax.scan(lambda c, _: (c @ x, None), x, length=3)[0])
        )(x)

    for f in (forward, scanned):
        assert len(candidates(scheduled(trace(f, x).graph, {}), H100).found) == 1


def test_the_profile_is_what_is_alive() -> None:
    """Two products are alive while the third is made of them; the input is there throughout."""
    side = 64
    x = jax.ShapeDtypeStruct((side, side), jnp.float32)
    graph = trace(lambda x: (x @ x) @ (x.T @ x), x).graph
    flow = Flow(schedule(flatten(graph, {})))
    assert flow.peak == 4 * side * side * 4
    assert np.isclose(flow.profile.min(), side * side * 4)
