"""Budgets of the rules: however small, they give right plans, and say that they ended early."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.egraphs import process as egraph_module
from tapestry_egg.egraphs.process import Budget, EGraph, Exhausted
from tapestry_egg.graph.blockgraph import verify_graph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.rules.verify.examples import example_graph
from tapestry_egg.tracing.trace import trace

SMALL = [
    Budget(iterations=0),
    Budget(iterations=1),
    Budget(iterations=3),
    Budget(rows=0),
    Budget(seconds=0.0),
    Budget(0, 0, 0.0),
]


def program(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.sum(jax.nn.relu(x @ w + x @ v), axis=0)


ARGUMENTS = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (8, 4), (8, 4)))


@pytest.mark.parametrize("budget", SMALL, ids=str)
def test_no_budget_gives_a_wrong_plan_or_none(budget: Budget) -> None:
    front = optimize(
        trace(program, *ARGUMENTS),
        "cpu:4",
        mesh_shapes=[MeshShape(("x",), (4,))],
        settings=Settings(work=0.3, budget=budget, algebra=budget),
    )
    assert not front.saturated
    assert len(front.plans) >= 1
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=a.shape).astype(np.float32) for a in ARGUMENTS]
    plan = front.best("seconds")
    run = te.compile(plan, jax.devices()[:4])
    np.testing.assert_allclose(run(*inputs), program(*map(jnp.asarray, inputs)), rtol=2e-5)


EXPLODING = """
a: float32[4]
b: float32[4]
c: float32[4]
d: float32[4]
e: float32[4]
f: float32[4]
g: float32[4]
h: float32[4]
i: float32[4]
j: float32[4]
k: float32[4]
s1 = add(a, b)
s2 = add(s1, c)
s3 = add(s2, d)
s4 = add(s3, e)
s5 = add(s4, f)
s6 = add(s5, g)
s7 = add(s6, h)
s8 = add(s7, i)
s9 = add(s8, j)
s10 = add(s9, k)
"""


@pytest.mark.slow
def test_an_iteration_that_explodes_is_ended_and_what_was_there_stays() -> None:
    graph = example_graph(EXPLODING)
    rules = [r for b in load_books(("expansion",)) for r in b.rules if r.name.startswith("add-")]
    explored = explore(graph, rules, Budget(iterations=30, rows=10**9, seconds=0.4))
    assert not explored.terms.saturated
    assert len(explored.terms.nodes) >= len(graph.operations) + len(graph.inputs)
    verify_graph(graph)
    again = explore(graph, rules, Budget(iterations=1, rows=10**9, seconds=60.0))
    assert len(explored.terms.nodes) >= len(again.terms.nodes)


@pytest.mark.slow
def test_an_iteration_that_makes_far_too_many_rows_is_taken_back() -> None:
    graph = example_graph(EXPLODING)
    rules = [r for b in load_books(("expansion",)) for r in b.rules if r.name.startswith("add-")]
    free = explore(graph, rules, Budget(iterations=6, rows=10**9))
    rows = [tick.rows for tick in free.timeline if tick.ruleset == "algebra"]
    assert rows[-2] > 2 * rows[-3]
    for allowed, left in ((rows[-3], -2), ((rows[-2] + 1) // 2, -1)):
        kept = explore(graph, rules, Budget(iterations=6, rows=allowed))
        assert [t.rows for t in kept.timeline if t.ruleset == "algebra"] == rows[:left]
        assert not kept.terms.saturated and not kept.by_clock
        fewer = explore(graph, rules, Budget(iterations=len(rows) + left, rows=10**9))
        assert kept.terms == fewer.terms


def test_the_timeline_names_the_users_rules() -> None:
    graph = example_graph(EXPLODING)
    rules = [r for b in load_books(("expansion",)) for r in b.rules if r.name.startswith("add-")]
    explored = explore(graph, rules, Budget(iterations=4, rows=3000, seconds=60.0))
    named = {rule for tick in explored.timeline for rule in tick.matches}
    assert {"add-commutes", "add-associates", "add-associates-back"} <= named
    assert explored.timeline[0].ruleset == "load"
    rows = [tick.rows for tick in explored.timeline]
    assert rows == sorted(rows) and all(tick.seconds >= 0.0 for tick in explored.timeline)


@pytest.mark.slow
def test_a_process_that_died_is_replaced(tmp_path: Path) -> None:
    with EGraph(tmp_path) as one:
        one.declare("(relation r (i64)) (ruleset load)")
    (worker,) = egraph_module._idle[-1:]
    os.kill(worker.child.process.pid, signal.SIGKILL)
    worker.child.process.wait()
    with EGraph(tmp_path) as two:
        two.declare("(relation r (i64))")
        two.load("r", [(1,), (2,)])
        assert sorted(row[0] for row in two.tables(["r"])["r"]) == [1, 2]


def test_after_an_exhausted_step_the_graph_is_as_before(tmp_path: Path) -> None:
    with EGraph(tmp_path) as graph:
        graph.declare("(relation r (i64)) (ruleset grow)")
        graph.declare("(rule ((r x)) ((r (+ x 1))) :ruleset grow)")
        graph.load("r", [(0,)])
        assert graph.step("grow")
        os.kill(graph._worker.child.process.pid, signal.SIGKILL)
        with pytest.raises(Exhausted):
            graph.step("grow")
        assert sorted(row[0] for row in graph.tables(["r"])["r"]) == [0, 1]
        assert graph.step("grow")


def test_an_iteration_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with EGraph(tmp_path) as graph:
        graph.declare("(relation r (i64)) (ruleset grow)")
        graph.declare("(rule ((r x) (r y)) ((r (+ (* x 4000) y))) :ruleset grow)")
        graph.load("r", [(k,) for k in range(1, 2500)])
        with pytest.raises(Exhausted):
            graph.step("grow", 0.2)
        assert graph.rows() == 2499


def test_rows_are_told_once_where_only_new_ones_are_asked_for(tmp_path: Path) -> None:
    with EGraph(tmp_path) as graph:
        graph.declare("(relation r (i64 String)) (ruleset grow)")
        graph.declare('(rule ((r x "a")) ((r (+ x 1) "b")) :ruleset grow)')
        graph.load("r", [(0, "a"), (5, "a")])
        assert sorted(row[:2] for row in graph.unseen("r")) == [(0, "a"), (5, "a")]
        assert graph.unseen("r") == []
        assert graph.step("grow")
        assert sorted(row[:2] for row in graph.unseen("r")) == [(1, "b"), (6, "b")]
    with EGraph(tmp_path) as graph:  # another graph in the same process
        graph.declare("(relation r (i64 String))")
        graph.load("r", [(0, "a")])
        assert [row[:2] for row in graph.unseen("r")] == [(0, "a")]
