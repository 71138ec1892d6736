"""The trees of shipped texts: what the parsers make of them, and used in their place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapestry_egg import monoids
from tapestry_egg.metakernels.language import expressions
from tapestry_egg.monoids import formula
from tapestry_egg.monoids import parsed as formulas
from tapestry_egg.rules.language import parse_ahead
from tapestry_egg.syntax_trees import KeptTrees, written


def _shape(node: Any) -> Any:
    if node is None:
        return None
    if hasattr(node, "children"):
        return [str(node.data), node.start_pos, *map(_shape, node.children)]
    return [node.start_pos, str(node)]


@pytest.mark.parametrize(
    ("kept", "shipped", "parse"),
    [
        (expressions.KEPT, parse_ahead.shipped_texts, expressions.parsed),
        (formula.KEPT, formulas.shipped_texts, lambda text, _: formula.parsed(text)),
    ],
    ids=["templates", "monoids"],
)
def test_trees_made_ahead_are_those_that_the_parser_makes(
    kept: KeptTrees, shipped: Callable[[], Any], parse: Callable[[str, str], Any]
) -> None:
    """Write them anew where this fails: `python -m tapestry_egg.rules.language.parse_ahead`, or
    `python -m tapestry_egg.monoids.parsed`."""
    told = json.loads(kept.file.read_text("utf-8"))
    assert told["grammar"] == kept.digest()
    for start, trees in told["texts"].items():
        for text, tree in trees.items():
            assert tree == written(parse(text, start)), text
    texts = [(start, t) for start, every in shipped().items() for t in every]
    known = sum(text in told["texts"][start] for start, text in texts)
    assert texts and known >= 0.9 * len(texts)


def test_a_tree_that_was_made_ahead_needs_no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = json.loads(expressions.KEPT.file.read_text("utf-8"))["texts"]
    text = max(kept["expression"], key=len)
    before = expressions.parsed(text, "expression")
    monkeypatch.setattr(expressions, "parser_of", None)
    tree = expressions.parse(text, "expression")
    assert _shape(tree) == written(before)
    with pytest.raises(TypeError):
        expressions.parse(f"{text} + 1", "expression")


def test_the_shipped_monoids_need_no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formula, "parser_of", None)
    file = Path(monoids.__file__).with_name("monoids.yaml")
    read = {m.name: m for m in monoids.definition.read_monoids(file)}
    assert read.keys() == {m.name for m in monoids.monoids().values() if m.name in read}
    one = read["logsumexp"].combine
    assert {f.text for f in one.values()} and all(f.names for f in one.values())
    with pytest.raises(TypeError):
        formula.parse_formula("a + b + 12345")


def test_trees_of_another_grammar_are_not_used(tmp_path: Path) -> None:
    text = next(iter(formulas.shipped_texts()["start"]))
    assert formula.KEPT.tree_of(text, "start") is not None
    grammar = tmp_path / "formula.lark"
    grammar.write_text(formula.KEPT.grammar.read_text("utf-8") + "\n// another\n")
    assert replace(formula.KEPT, grammar=grammar).tree_of(text, "start") is None
