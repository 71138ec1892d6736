"""The table of passes: what progress says of it, and how what the passes made is printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError, GraphError
from tapestry_egg.extract.front.notes import INTERRUPTED
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import pipeline
from tapestry_egg.pipeline.pipeline import PASSES, Pass, run_passes
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.pipeline.state import State, read_question
from tapestry_egg.progress import VERBS, Phase
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.schedule import schedules

X, W = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (64, 128)))
HEARD: list[Phase] = []


@pytest.fixture(scope="module")
def front() -> te.Front:
    def step(w: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return {"y": jnp.tanh(x @ w["up"]) @ w["down"].T + 1.0}

    return te.optimize(
        te.trace(step, {"up": W, "down": W}, X),
        "h100:4",
        mesh_shapes=[MeshShape(("x",), (4,)), MeshShape(("x", "y"), (2, 2))],
        settings=Settings(work=0.2),
        on_progress=HEARD.append,
        keep_stages=True,
    )


def test_what_a_pass_changes_is_checked_and_what_it_leaves_only_if_nothing_was() -> None:
    graph = te.trace(jnp.tanh, X)
    question = read_question(
        graph, "h100:2", books=(), objectives=("seconds",), settings=Settings()
    )
    heard: list[str] = []

    def table(*changes: dict[str, object]) -> list[Pass]:
        def one(k: int, change: dict[str, object]) -> Pass:
            def run(state: State) -> State:
                return replace(state, **change)  # type: ignore[arg-type]

            return Pass("extract", ("notes",), run, lambda _: heard.append(str(k)))

        return [one(k, change) for k, change in enumerate(changes)]

    # The first makes what it should not have left unmade; the third changes something else.
    run_passes(State(question), table({}, {}, {"timeline": ("tick",)}, {"notes": ("new",)}, {}))
    assert heard == ["0", "2", "3"]


def test_an_interruption_ends_all_that_a_front_can_do_without() -> None:
    question = read_question(
        te.trace(jnp.tanh, X), "h100:2", books=(), objectives=("seconds",), settings=Settings()
    )

    def ended(_: State) -> State:
        raise KeyboardInterrupt

    def after(state: State) -> State:
        return state.saying("after")

    def check(_: State) -> None:
        return None

    spared, needed = (Pass("extract", (), after, check, spare) for spare in (True, False))
    table = [Pass("extract", (), ended, check, spare=True), spared, needed]
    state, _ = run_passes(State(question), table)
    assert state.interrupted and state.notes == (INTERRUPTED, "after")
    with pytest.raises(KeyboardInterrupt):
        run_passes(State(question), [Pass("extract", (), ended, check)])


FIRST = [p.name for p in PASSES].index("search_first") + 1


@pytest.mark.parametrize("at", [p.name for p in PASSES[FIRST:]])
def test_whenever_it_is_interrupted_a_search_leaves_a_front(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first plan on, that of the program as given. A second interruption ends what a front
    needs."""
    (own,) = (p for p in PASSES if p.name == at)
    left = 1

    def ended(state: State) -> State:
        nonlocal left
        left -= 1
        if left >= 0:
            raise KeyboardInterrupt
        return own.run(state)

    table = tuple(replace(p, run=ended) if p is own else p for p in PASSES)
    monkeypatch.setattr(pipeline, "PASSES", table)
    program = te.trace(lambda x, w: jnp.tanh(x @ w), X, W)
    front = te.optimize(program, "h100:2", settings=Settings(work=0.1))
    assert len(front) and INTERRUPTED in front.notes
    left = 2
    if not own.spare:
        with pytest.raises(KeyboardInterrupt):
            te.optimize(program, "h100:2", settings=Settings(work=0.1))


def test_an_interruption_before_a_plan_is_within_the_limits_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is said of limits that a longer search may have met."""

    def ended(_: State) -> State:
        raise KeyboardInterrupt

    def optimized() -> te.Front:
        limits = {"peak_bytes": 16}
        program = te.trace(lambda x, w: jnp.tanh(x @ w), X, W)
        return te.optimize(program, "h100:2", limits=limits, settings=Settings(work=0.1))

    with pytest.raises(ExtractError, match="no plan meets the limits"):
        optimized()
    table = tuple(replace(p, run=ended) if p.name == "search_networks" else p for p in PASSES)
    monkeypatch.setattr(pipeline, "PASSES", table)
    with pytest.raises(KeyboardInterrupt):
        optimized()


def test_progress_tells_every_pass_by_its_name(front: te.Front) -> None:
    told = [list(phases) for _, phases in groupby(HEARD, key=lambda p: p.step)]
    assert [phases[0].step for phases in told] == [each.name for each in PASSES]
    for each, phases in zip(PASSES, told, strict=True):
        assert {p.phase for p in phases} == {each.verb}
        assert not phases[0].done and phases[-1].done
        assert len({p.key for p in phases}) == 1
    verbs = [verb for verb, _ in groupby(p.phase for p in HEARD)]
    assert set(verbs) <= set(VERBS)
    assert str(HEARD[-1]) == "extract audit_front"


def test_every_stage_tells_of_every_tensor_that_it_has(front: te.Front) -> None:
    graph = front[0].graph
    made = {name for each in PASSES for name in each.makes}
    assert made == set(front.stages)
    inside = {v for op in graph.operations if op.kernel == "transpose" for v in op.outputs}
    assert len(inside) == 1
    for name, stage in front.stages.items():
        assert stage.of("['up']") == stage.of("[0]['up']")
        for value in {v for op in graph.operations for v in (*op.inputs, *op.outputs)}:
            if value in inside and name in ("problems", "results"):
                with pytest.raises(GraphError, match="fused"):
                    stage.of(f"%{value}")
            else:
                assert stage.of(f"%{value}")


def reader(front: te.Front) -> int:
    """The instance that reads `up`: the first product."""
    instances = front.stages["schedules"].value[0].program.instances
    return next(k for k, i in enumerate(instances) if i.signature.kernel == "dot_general")


def test_a_tensor_is_followed_from_its_signature_to_the_plan(front: te.Front) -> None:
    plan = front.best("seconds")
    stages = front.stages
    (value,) = (
        v
        for v, path in zip(plan.graph.inputs, plan.graph.input_names, strict=True)
        if path == "[0]['up']"
    )
    layout = plan.in_shardings[plan.graph.inputs.index(value)].show(plan.mesh)
    shapes = stages["shapes"].value
    entry = shapes.index(plan.mesh)
    assert f"%{value} f32[64, 128] = input" in stages["forms"].of("['up']")
    rows = stages["strategies"].of("['up']", entry, most=100).splitlines()
    found = stages["strategies"].value[entry]
    count, whole = map(int, re.findall(r"\d+", rows[0].replace(str(plan.mesh), ""))[:2])
    assert rows[0].startswith(f"{count} strategies of dot_general on {plan.mesh}")
    every = found.strategies[stages["encodings"].value[entry].signature_of[reader(front)]]
    assert count == len(every)
    assert whole == len(rows) - 1 == sum(not any(x.partial for x in r.layouts[:2]) for r in every)
    assert len(set(rows)) == len(rows)
    corners = stages["results"].of("['up']", entry, most=100).splitlines()
    assert f": {layout}, proven" in corners[0]
    (line,) = [x for x in stages["front"].of("['up']").splitlines() if x.startswith(plan.name)]
    assert f" {layout}" in line


def test_other_readers_and_longer_lists_are_told_where_asked(front: te.Front) -> None:
    strategies, problems = front.stages["strategies"], front.stages["problems"]
    assert "of transpose on" in strategies.of("['down']")
    with pytest.raises(GraphError, match="1 operations read it"):
        strategies.of("['down']", reader=1)
    short, long = problems.of("['up']", most=1), problems.of("['up']", most=1000)
    count = len(long.splitlines()) - 3
    assert f"... and {count - 1} more rows" in short and "more rows" not in long
    other = strategies.of("['up']", 1)
    assert other != strategies.of("['up']") and "2x×2y" in other.splitlines()[0]


@pytest.mark.parametrize("name", ["", "up", "']", "%99", "[3]"])
def test_names_that_no_tensor_or_several_have_are_refused(name: str, front: te.Front) -> None:
    with pytest.raises(GraphError, match="this name") as error:
        front.stages["strategies"].of(name)
    assert "[0]['up']" in str(error.value)
    with pytest.raises(GraphError, match="entries"):
        front.stages["problems"].of("['up']", 7)


def test_no_form_is_scheduled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one whose loops were looked at to see whether they run two rounds at a time."""
    seen: list[str] = []
    make = schedules._scheduled

    def counted(graph: BlockGraph, feedback: Mapping[int, int]) -> schedules.Schedule:
        seen.append(digest(graph))
        return make(graph, feedback)

    monkeypatch.setattr(schedules, "_scheduled", counted)

    def smoothed(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 7, lambda _, y: jnp.tanh(y @ w), x) @ w

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    te.optimize(te.trace(smoothed, square, square), "h100:2", settings=Settings(work=0.2))
    assert seen
    assert len(seen) == len(set(seen))
