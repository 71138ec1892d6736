"""Rules of users: they add forms, and what is wrong with them is named with its place."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tapestry_egg.errors import RuleError
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rules.language.book import load_book, load_books, permitted
from tests.rewrite.equal_forms import BOOKS, H100, front_of, graph_of, kernels, struct

IDEMPOTENT = """
ruleset: algebra
rules:
  - name: sorting-twice
    law: "sort(sort(x)) = sort(x)"
    reason: What is sorted stays as it is.
    numerics: {numerics}
    given: [s]
    guard: $s.kernel == sort
    egg: |
      (rule ((= a (Op1 s x)) (= b (Op1 s a))) ((union b a)))
"""


def sorted_twice(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sort(jnp.sort(x)) @ w


def test_a_users_rule_adds_a_form(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(IDEMPOTENT.format(numerics="exact"))
    args = (struct(8192, 8192), struct(8192, 8))
    without = front_of(sorted_twice, args)
    assert all(p.rules == () for p in without)
    front = front_of(sorted_twice, args, rules=[path])
    best = front.best("seconds")
    assert best.rules == ("sorting-twice",)
    assert kernels(best.graph).count("sort") == 1
    assert best.costs.seconds < without.best("seconds").costs.seconds


def test_rules_that_change_rounding_are_off_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(IDEMPOTENT.format(numerics="changes_rounding"))
    books = load_books((*BOOKS, path))
    graph = graph_of(sorted_twice, struct(8192, 8192), struct(8192, 8))
    assert len(forms(graph, permitted(books, "reorders"), H100)) == 1
    assert len(forms(graph, permitted(books, "relaxed"), H100)) == 2
    with pytest.raises(RuleError, match="numerics"):
        permitted(books, "sloppy")


BAD = [
    ("guard: $s.kernel = sort", r"mine.yaml:9:\d+"),
    ("guard: $q.kernel == sort", r"\$q is not a name here"),
    ("guard: $s.kernal == sort", "not an attribute"),
    ("guard: true\n    wants: {t: {inputs: '[]'}}", "either `kernel` or `like`"),
    ("guard: true\n    wants: {t: {like: r, inputs: '[]'}}", "'r' is not one of `given`"),
    ("guard: true\n    wants: {t: {like: s, inputs: 3}}", "types of operands"),
]


@pytest.mark.parametrize(("text", "match"), BAD)
def test_faults_in_a_users_rule_are_named(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(IDEMPOTENT.format(numerics="exact").replace("guard: $s.kernel == sort", text))
    graph = graph_of(sorted_twice, struct(64, 64), struct(64, 8))
    with pytest.raises(RuleError, match=match) as caught:
        forms(graph, [load_book(path)], H100)
    assert "mine.yaml:" in str(caught.value)


def test_given_must_be_bound_by_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(IDEMPOTENT.format(numerics="exact").replace("given: [s]", "given: [s, r]"))
    graph = graph_of(sorted_twice, struct(64, 64), struct(64, 8))
    with pytest.raises(RuleError, match="does not bind 'r'"):
        forms(graph, [load_book(path)], H100)


def test_a_rule_that_equates_different_types_changes_no_type(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = IDEMPOTENT.format(numerics="exact")
    path.write_text(text.replace("(= b (Op1 s a))", "(= b (Op2 t a w))"))
    graph = graph_of(sorted_twice, struct(64, 64), struct(64, 8))
    for form in forms(graph, [load_book(path)], H100):
        assert [form.graph.values[v] for v in form.graph.outputs] == [
            graph.values[v] for v in graph.outputs
        ]
