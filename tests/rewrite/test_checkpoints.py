"""What to keep past the peak and what to compute again, against every other choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tapestry_egg as te
from tapestry_egg.errors import RuleError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.front.front import Front
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.plans.plan import Plan
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite import recompute
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.recomputation.checkpoints import Checkpoints, Flow, peak_alone
from tapestry_egg.rewrite.recomputation.second_places import with_second_instances
from tapestry_egg.rewrite.recompute import RULE, Candidate, Looked, candidates, recomputing
from tapestry_egg.runtime.compiled import compile
from tapestry_egg.schedule import one_device
from tapestry_egg.schedule.flatten import feedback_pairs, flatten
from tapestry_egg.schedule.one_device import program_seconds
from tapestry_egg.schedule.repeated import repeat_cheap
from tapestry_egg.schedule.schedules import Schedule, in_order, schedule, scheduled
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import Program, trace
from tests.rewrite.replay import replay

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


# Recomputation from end to end: lower peaks on the front and in the compiled program.


TARGET = "h100:2"
MESH = MeshShape(("x",), (2,))
LAYERS, BATCH, WIDTH = 5, 1024, 32

Weights = list[tuple[jax.Array, jax.Array]]


def loss(ws: Weights, x: jax.Array) -> jax.Array:
    for up, down in ws:
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(x * x)


def step(ws: Weights, x: jax.Array) -> tuple[Weights, jax.Array]:
    value, grads = jax.value_and_grad(loss)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def arguments(seed: int = 0) -> tuple[Weights, jax.Array]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32)

    ws = [(normal(WIDTH, 4 * WIDTH), normal(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    return ws, normal(BATCH, WIDTH)


@cache
def program() -> Program:
    return trace(step, *arguments(), donate_argnums=(0,), name="deep")


@cache
def front(forms: int) -> Front:
    settings = Settings(work=0.5, recompute=forms, forms=0)
    return optimize(program(), TARGET, mesh_shapes=[MESH], settings=settings)


def plan_of(graph: BlockGraph) -> Schedule:
    return scheduled(graph, feedback_pairs(graph))


def smallest(found: Front) -> Plan:
    return min(found, key=lambda p: p.costs.peak_bytes)


def test_candidates_hold_less_and_take_longer() -> None:
    graph = program().graph
    given, *others = candidates(plan_of(graph), load_target(TARGET)).found
    assert others
    assert others[-1].peak < 0.7 * given.peak
    for a, b in zip([given, *others], others, strict=False):
        assert b.seconds > a.seconds
        assert b.peak < a.peak


def test_the_form_computes_what_the_program_computes() -> None:
    graph = program().graph
    ((form, _),) = recomputing(Form(graph), plan_of(graph), load_target(TARGET)).forms
    flat = [np.asarray(x) for x in jax.tree.leaves(arguments())]
    for a, b in zip(execute(graph, flat), execute(form.graph, flat), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_front_reaches_a_lower_peak() -> None:
    without, with_ = smallest(front(0)), smallest(front(1))
    assert RULE not in without.rules
    assert RULE in with_.rules
    assert with_.costs.peak_bytes < 0.85 * without.costs.peak_bytes
    fastest = front(1).best("seconds")
    assert fastest.costs.seconds <= front(0).best("seconds").costs.seconds * (1 + 1e-6)


@pytest.mark.slow
def test_the_compiled_peak_falls_and_the_numbers_are_the_same() -> None:
    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(step)(*arguments(1)))]
    temporaries = []
    for plan in (smallest(front(0)), smallest(front(1))):
        run = compile(plan)
        analysis = run.compile().memory_analysis()
        temporaries.append(analysis.temp_size_in_bytes)
        found = [np.asarray(x) for x in jax.tree.leaves(run(*arguments(1)))]
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6)
    before, after = temporaries
    assert after < 0.5 * before


@pytest.mark.slow
def test_the_certificate_counts_the_second_instances() -> None:
    """Seconds of the recount rise by what is computed again, and a plan whose second instances are
    taken out of its books is another plan."""
    plan = smallest(front(1))
    pairs = feedback_pairs(plan.graph)
    ground = Ground(scheduled(plan.graph, pairs), load_target(TARGET))
    found = Walk(plan, ground).certificate()
    assert found.peak_bytes == pytest.approx(plan.costs.peak_bytes)
    assert found.seconds == pytest.approx(plan.costs.seconds)
    assert found.flops > smallest(front(0)).costs.flops


@pytest.mark.slow
def test_a_plan_says_what_is_computed_again_and_the_step_can_be_taken_again(tmp_path: Path) -> None:
    plan = smallest(front(1))
    text = plan.explain()
    assert RULE in text
    assert "second instances" in text
    graph = program().graph
    te.save(plan, tmp_path / "plan.json")
    loaded = te.load(tmp_path / "plan.json")
    assert loaded.steps == plan.steps
    again = replay(graph, loaded.steps, {})[-1]
    assert digest(again) == plan.steps[-1].digest == digest(plan.graph)
    wrong = replace(plan.steps[-1], digest="0" * 32)
    with pytest.raises(RuleError, match="cannot be taken"):
        replay(graph, [wrong], {})


def attending(w: jax.Array, x: jax.Array) -> jax.Array:
    """Gradients of layers with cuDNN's attention."""

    def loss(w: jax.Array) -> jax.Array:
        y = x
        for _ in range(4):
            q = jnp.tanh(y @ w).reshape(2, 512, 4, 64)
            out = jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn")
            y = y + out.reshape(y.shape)
        return jnp.sum(y.astype(jnp.float32))

    return jax.grad(loss)(w)


@pytest.mark.parametrize(("target", "times"), [("h100:1", 4), ("v5e:1", 8)])
def test_what_a_library_computes_runs_once(target: str, times: int) -> None:
    """cuDNN's attention, that is; in blocks it is computed again. How often it was kept is told."""
    w = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((2, 512, 256), jnp.bfloat16)
    schedule = plan_of(trace(attending, w, x).graph)
    looked = candidates(schedule, load_target(target))
    assert len(looked.found) > 1
    kernels = [op.kernel for op in looked.found[-1].graph.operations]
    assert kernels.count("flash_attention") == times
    assert looked.library == (4 if times == 4 else 0)


def test_seconds_and_peak_alone_are_of_one_schedule_of_what_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is computed from constants alone is neither run nor held as what is."""
    table = np.arange(512.0 * 512.0, dtype=np.float32).reshape(512, 512)

    def looked_up(x: jax.Array) -> jax.Array:
        return jnp.tanh((jnp.asarray(table) @ table) @ x)

    graph = trace(looked_up, jax.ShapeDtypeStruct((512, 8), jnp.float32)).graph
    ready = prepare(graph)
    assert ready.size < graph.size
    made: list[Schedule] = []
    monkeypatch.setattr(
        one_device, "schedule", lambda program: made.append(schedule(program)) or made[-1]
    )
    assert program_seconds(graph, H100) == pytest.approx(program_seconds(ready, H100))
    assert len(made) == 2
    assert peak_alone(graph, H100) == peak_alone(ready, H100) < table.nbytes
    assert len(made) == 2
