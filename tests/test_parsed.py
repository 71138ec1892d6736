"""The trees of shipped texts: what the parser makes of them, and used in its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tapestry_egg.metakernels import parsed, parsing


def _shape(node: Any) -> Any:
    if node is None:
        return None
    if hasattr(node, "children"):
        return [str(node.data), node.start_pos, *map(_shape, node.children)]
    return [node.start_pos, str(node)]


def test_trees_made_ahead_are_those_that_the_parser_makes() -> None:
    """Write them anew where this fails: `python -m tapestry_egg.metakernels.parsed`."""
    kept = json.loads(parsed._FILE.read_text("utf-8"))
    assert kept["grammar"] == parsed.grammar_digest()
    for start, trees in kept["texts"].items():
        for text, tree in trees.items():
            assert tree == parsed.written(parsing.parsed(text, start)), text
    shipped = [(start, t) for start, texts in parsed.shipped_texts().items() for t in texts]
    known = sum(text in kept["texts"][start] for start, text in shipped)
    assert known >= 0.9 * len(shipped)


def test_a_tree_that_was_made_ahead_needs_no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = json.loads(parsed._FILE.read_text("utf-8"))["texts"]
    text = max(kept["expression"], key=len)
    before = parsing.parsed(text, "expression")
    monkeypatch.setattr(parsing, "_parser", None)
    tree = parsing.parse(text, "expression")
    assert _shape(tree) == parsed.written(before)
    with pytest.raises(TypeError):
        parsing.parse(f"{text} + 1", "expression")


def test_trees_of_another_grammar_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsed, "grammar_digest", lambda: "another")
    assert parsed._kept.__wrapped__() == {}
