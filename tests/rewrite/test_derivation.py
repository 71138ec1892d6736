"""Derivations: the chain of rules from a program to its form, taken again step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import RuleError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
from tapestry_egg.tracing.trace import trace
from tests.rewrite.replay import replay

BOOKS = load_books(DEFAULT_BOOKS)
RULES: dict[str, object] = {r.name: r for b in BOOKS for r in b.rules}
H100 = load_target("h100:8")


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def two(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return x @ w + x @ v


def qkv(x: jax.Array, *ws: jax.Array) -> list[jax.Array]:
    return [x @ w + 1.0 for w in ws]


def chain(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
    return (a @ b) @ c + (a @ b) @ d


def loop(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w + c @ v), None), x, length=2)[0]


CASES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (two, (struct(512, 64), struct(64, 32), struct(64, 32))),
    (qkv, (struct(256, 64), *[struct(64, 64)] * 3)),
    (chain, (struct(256, 16), struct(16, 256), struct(256, 16), struct(256, 16))),
    (loop, (struct(2048, 256), struct(256, 256), struct(256, 256))),
]


def run(graph: BlockGraph) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=graph.values[v].shape).astype(np.float32) / 16 for v in graph.inputs]
    return [np.asarray(x, np.float64) for x in execute(graph, inputs)]


@pytest.mark.parametrize(("fn", "arguments"), CASES, ids=lambda c: getattr(c, "__name__", ""))
def test_the_chain_leads_to_the_form_and_every_program_of_it_is_equal(
    fn: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    graph = trace(fn, *arguments).graph
    form = forms(graph, BOOKS, H100)[1]
    assert form.steps and {r for s in form.steps for r in s.rules} <= set(RULES)
    programs = replay(graph, form.steps, RULES)
    assert digest(programs[-1]) == digest(form.graph) != digest(graph)
    expected = run(graph)
    for program in programs:
        for a, b in zip(run(program), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_a_step_cannot_be_taken_by_other_rules() -> None:
    fn, arguments = CASES[0]
    graph = trace(fn, *arguments).graph
    (step, *_) = forms(graph, BOOKS, H100)[1].steps
    with pytest.raises(RuleError, match="step 1 cannot be taken"):
        replay(graph, [replace(step, rules=("twice-negated",))], RULES)


def test_a_digest_is_of_what_is_computed_not_of_its_numbering() -> None:
    fn, arguments = CASES[0]
    graph = trace(fn, *arguments).graph
    first, second, *rest = graph.operations
    swapped = replace(graph, operations=(second, first, *rest))
    assert digest(swapped) == digest(graph)
    assert digest(replace(graph, outputs=(first.outputs[0],))) != digest(graph)


def test_plans_tell_their_chain_also_when_they_come_from_a_file(tmp_path: Path) -> None:
    arguments = (struct(511, 65536), struct(65536, 5), struct(65536, 5))
    front = optimize(
        trace(two, *arguments),
        "h100:8",
        mesh_shapes=[MeshShape(("x",), (8,))],
        settings=Settings(work=1.0),
    )
    plan = front.best("seconds")
    assert plan.rules == ("sum-of-contractions-rhs",)
    assert "1. sum-of-contractions-rhs: %5 f32[511, 5] by dot_general" in plan.explain()
    te.save(plan, tmp_path / "plan.json")
    loaded = te.load(tmp_path / "plan.json")
    assert loaded.steps == plan.steps
    assert digest(replay(trace(two, *arguments).graph, loaded.steps, RULES)[-1]) == digest(
        plan.graph
    )
