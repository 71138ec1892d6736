"""Recomputation from end to end: lower peaks on the front and in the compiled program."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import RuleError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.front.front import Front
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.plans.plan import Plan
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.recompute import RULE, candidates, recomputing
from tapestry_egg.runtime.compiled import compile
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.tracing.trace import Program, trace
from tests.rewrite.replay import replay

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
