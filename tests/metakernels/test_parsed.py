"""The trees of shipped texts: what the parsers make of them, and used in their place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapestry_egg.metakernels.language import expressions
from tapestry_egg.rules.language import parse_ahead
from tapestry_egg.syntax_trees import written


def _shape(node: Any) -> Any:
    if node is None:
        return None
    if hasattr(node, "children"):
        return [str(node.data), node.start_pos, *map(_shape, node.children)]
    return [node.start_pos, str(node)]


def test_trees_made_ahead_are_those_that_the_parser_makes() -> None:
    """Write them anew where this fails: `python -m tapestry_egg.rules.language.parse_ahead`."""
    kept = expressions.KEPT
    told = json.loads(kept.file.read_text("utf-8"))
    assert told["grammar"] == kept.digest()
    for start, trees in told["texts"].items():
        for text, tree in trees.items():
            assert tree == written(expressions.parsed(text, start)), text
    texts = [(start, t) for start, every in parse_ahead.shipped_texts().items() for t in every]
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


def test_trees_of_another_grammar_are_not_used(tmp_path: Path) -> None:
    kept = expressions.KEPT
    text = next(iter(parse_ahead.shipped_texts()["pattern"]))
    assert kept.tree_of(text, "pattern") is not None
    grammar = tmp_path / "template.lark"
    grammar.write_text(kept.grammar.read_text("utf-8") + "\n// another\n")
    assert replace(kept, grammar=grammar).tree_of(text, "pattern") is None
