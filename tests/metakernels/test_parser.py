"""The grammar of the template language: which trees texts are, and which texts are refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.language.faults import Fault
from tapestry_egg.metakernels.language.parser import Start, Tree, parse
from tapestry_egg.metakernels.language.patterns import Pattern
from tapestry_egg.rules.language.book import book_names, load_book


def shown(node: Any) -> Any:
    """A tree as tuples, without its places."""
    if isinstance(node, Tree):
        return (node.data, *map(shown, node.children)) if node.children else node.data
    return node if node is None else str(node)


def number(n: int) -> tuple[str, str]:
    return "integer", str(n)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("1 + 2 * 3", ("binary", number(1), "+", ("binary", number(2), "*", number(3)))),
        ("1 - 2 - 3", ("binary", ("binary", number(1), "-", number(2)), "-", number(3))),
        ("-2 ^ 3 ^ 4", ("negate", "-", ("binary", number(2), "^",
                                        ("binary", number(3), "^", number(4))))),
        ("2 ^ -1", ("binary", number(2), "^", ("negate", "-", number(1)))),
        ("not a == b", ("inverse", ("compare", ("word", "a"), "==", ("word", "b")))),
        ("a not in b or c", ("either", ("stranger", ("word", "a"), ("word", "b")), ("word", "c"))),
        ("1 if a else 2 if b else 3", ("choice", number(1), ("word", "a"), (
            "choice", number(2), ("word", "b"), number(3)))),
        ("1 :+ 2 if a else 3", ("choice", ("extent", number(1), number(2)), ("word", "a"),
                                number(3))),
        ("[..., 1] :> [0...]", ("box", ("list", ("standard", "..."), number(1)),
                                ("list", ("spread", number(0), "...")))),
        ("[1...[:2]..., 3]", ("list", ("filling", number(1), "...", None, ("upper", number(2)),
                                       "..."), number(3))),
        ("[1, 0... | 4 | 2]", ("augmented", ("entries", number(1), ("spread", number(0), "...")),
                               number(4), number(2))),
        ("[$i for $i, $n in a if b]", ("comprehension", ("variable", "$i"),
                                       ("targets", "$i", "$n"), ("word", "a"), ("word", "b"))),
        ("$x.in[1:]", ("slice", ("attribute", ("variable", "$x"), "in"), ("lower", number(1)),
                       None)),
        ("D [1]", ("diagonal", "D", number(1))),
        ("D(D, true)", ("call", "D", ("word", "D"), "yes")),
        ("else + for", ("binary", ("word", "else"), "+", ("word", "for"))),
    ],
)  # fmt: skip
def test_expressions_are_these_trees(text: str, tree: Any) -> None:
    assert shown(parse(text, "expression")) == tree


@pytest.mark.parametrize(
    ("text", "start", "at", "expected"),
    [
        ("a < b < c", "expression", 6, "`and`"),
        ("1 :+ 2 :+ 3", "expression", 7, "`if`"),
        ("[0] :> [1] :> [2]", "expression", 11, "the end"),
        ("a == not b", "expression", 9, "`(`"),
        ("1 ifx else 2", "expression", 2, "`if`"),
        ("[$a for b in c]", "expression", 8, "`$name`"),
        ("[[0] >: [1]]", "expression", 6, "is `:>`"),
        ("f(1", "expression", 3, "`)`"),
        ("[$n...[2]]", "pattern", 7, "`:`"),
        ("[$n=$m]", "pattern", 4, "`(`"),
        ("sum(x) -> ", "passage", 9, "a word"),
        ("-" * 4000 + "1", "expression", 0, ""),
    ],
)
def test_other_texts_are_refused_where_they_end_to_be_texts(
    text: str, start: Start, at: int, expected: str
) -> None:
    with pytest.raises(Fault) as caught:
        parse(text, start)
    assert (caught.value.at, expected in caught.value.hint) == (at, True)


def shipped_texts() -> list[str]:
    found = {
        e.text for entries in registry.templates().values() for t in entries for e in t.texts()
    }
    for name in book_names():
        for rule in load_book(name).rules:
            if rule.recipe is not None:
                found |= {e.text for e in (*rule.recipe.guards, *rule.recipe.let.values())}
    return sorted(found)


def test_places_are_those_of_the_words_and_damage_never_ends_otherwise_than_in_a_fault() -> None:
    rng = random.Random(0)
    for text in shipped_texts():
        stack: list[Any] = [parse(text, "expression")]
        while stack:
            node = stack.pop()
            if isinstance(node, Tree):
                stack += node.children
            elif node is not None:
                assert text.startswith(str(node), node.start_pos)
        at = rng.randrange(len(text) + 1)
        damaged = text[:at] + rng.choice("[](),.:|?$@ ") + text[at + rng.randrange(2) :]
        try:
            parse(damaged, "expression")
        except Fault as fault:
            assert 0 <= fault.at <= len(damaged)


def test_patterns_of_shipped_templates_are_read() -> None:
    operands = {o for entries in registry.templates().values() for t in entries for o in t.inputs}
    patterns: list[Pattern] = [o.pattern for o in operands if o.pattern is not None]
    assert len(patterns) > 20 and all(p.axes() is not None for p in patterns)
