"""The order of rules and of books changes nothing once nothing is left to derive."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rules.language.book import (
    DEFAULT_BOOKS,
    PROGRAM_RULESETS,
    Rule,
    RuleBook,
    load_books,
)
from tapestry_egg.schedule.flatten import feedback_pairs, flatten
from tapestry_egg.schedule.one_device import program_seconds
from tapestry_egg.schedule.repeated import repeat_cheap
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import Saturated, saturate
from tests.rewrite.equal_forms import H100, graph_of, struct

BOOKS = load_books(DEFAULT_BOOKS)
MESH = MeshShape(("x", "y"), (2, 2))


def shuffled(books: Sequence[RuleBook], seed: int) -> list[RuleBook]:
    """The books in another order, and the rules in each."""
    rng = random.Random(seed)
    out = [replace(b, rules=tuple(rng.sample(b.rules, len(b.rules)))) for b in books]
    rng.shuffle(out)
    return out


def attention(x: jax.Array, *ws: jax.Array) -> jax.Array:
    q, k, v = (x @ w for w in ws)
    return jax.nn.softmax(q @ k.T * 0.125) @ v


def gradients(x: jax.Array, *ws: jax.Array) -> Any:
    return jax.grad(lambda ws: jnp.sum(attention(x, *ws)))(ws)


def ties(x: jax.Array, w: jax.Array, v: jax.Array, u: jax.Array) -> jax.Array:
    """Sums and products that may be taken together in several ways of equal cost."""
    return (x @ w + x @ v) + x @ u


CASES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (attention, (struct(256, 64), *[struct(64, 64)] * 3)),
    (gradients, (struct(256, 64), *[struct(64, 64)] * 3)),
    (ties, (struct(511, 4096), *[struct(4096, 5)] * 3)),
]


def described(found: Sequence[Form]) -> list[tuple[Any, ...]]:
    return [
        (digest(f.graph), program_seconds(f.graph, H100), f.rules, f.saturated, f.steps)
        for f in found
    ]


@pytest.mark.parametrize(
    ("fn", "arguments"),
    [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.slow), CASES[2]],
    ids=lambda c: getattr(c, "__name__", ""),
)
def test_forms_are_the_same_in_any_order(fn: Any, arguments: tuple[Any, ...]) -> None:
    graph = graph_of(fn, *arguments)
    expected = described(forms(graph, BOOKS, H100, least_gain=1e-4, lean=True))
    assert len(expected) > 1 and all(saturated for *_, saturated, _ in expected)
    for seed in (1, 2):
        found = forms(graph, shuffled(BOOKS, seed), H100, least_gain=1e-4, lean=True)
        assert described(found) == expected


def test_what_is_derived_of_a_program_is_the_same_in_any_order() -> None:
    graph = graph_of(gradients, *CASES[1][1])
    program: list[Rule] = [r for b in BOOKS for r in b.rules if r.ruleset in PROGRAM_RULESETS]
    one = explore(graph, program)
    assert one.terms.saturated
    for seed in (1, 2):
        other = explore(graph, random.Random(seed).sample(program, len(program)))
        assert other.terms.saturated
        assert other.catalogue == one.catalogue and other.terms == one.terms


def saturated(graph: BlockGraph, books: Sequence[RuleBook]) -> Saturated:
    program = flatten(repeat_cheap(graph), feedback_pairs(graph, None))
    return saturate(encode(program, MESH), books)


@pytest.mark.slow
def test_strategies_and_changes_are_the_same_in_any_order() -> None:
    graph = graph_of(attention, *CASES[0][1])
    one = saturated(graph, BOOKS)
    assert one.saturated
    for seed in (1, 2):
        other = saturated(graph, shuffled(BOOKS, seed))
        assert other.saturated
        assert (other.strategies, other.changes) == (one.strategies, one.changes)


@pytest.mark.slow
def test_the_front_is_the_same_in_any_order() -> None:
    def front(books: Sequence[RuleBook]) -> list[tuple[Any, ...]]:
        found = optimize(
            graph_of(ties, *CASES[2][1]),
            "h100:4",
            books=books,
            mesh_shapes=[MeshShape(("x",), (4,))],
            settings=Settings(work=2.0, workers=1),
        )
        assert found.saturated
        return [(p.costs, p.bound, p.rules, digest(p.graph)) for p in found]

    assert front(BOOKS) == front(shuffled(BOOKS, 3))


@pytest.mark.slow
def test_where_a_budget_ended_it_the_result_says_so_in_any_order() -> None:
    graph = graph_of(gradients, *CASES[1][1])
    for seed, budget in enumerate((Budget(iterations=1), Budget(choice=0.0))):
        found = forms(graph, shuffled(BOOKS, seed), H100, budget)
        assert not any(f.saturated for f in found)
