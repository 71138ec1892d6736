"""Syntax trees made ahead: those of the texts that ship with tapestry-egg.

To build a parser and to parse what one program needs takes longer than to plan a small program. A
file holds the trees of all shipped texts by the texts themselves, under a digest of the grammar;
what is not in it is parsed.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lark import Lark

# Lark reads a grammar's literals by `ast.literal_eval`, which fails when several threads are in it
# at once ("AST constructor recursion depth mismatch", until CPython 3.11.8 and 3.12.2).
_BUILDING = threading.Lock()


class Token(str):
    """A word of a text, and the offset of its first character."""

    __slots__ = ("start_pos",)
    start_pos: int


class Tree:
    """A node of a syntax tree: what it is, its parts, and the offset of its first character."""

    __slots__ = ("children", "data", "start_pos")

    def __init__(self, data: str, children: list[Any], start_pos: int) -> None:
        self.data, self.children, self.start_pos = data, children, start_pos


@dataclass(frozen=True)
class KeptTrees:
    """The trees that a `file` holds of texts in the language of a `grammar`."""

    grammar: Path
    file: Path

    def tree_of(self, text: str, start: str) -> Tree | Token | None:
        """The tree of a shipped text, read from the symbol `start`; None for any other text."""
        found = _kept(self).get(start, {}).get(text)
        return None if found is None else _read(found)

    def digest(self) -> str:
        """A hash of the grammar."""
        return _digest(self.grammar)

    def document(self, texts: Mapping[str, Iterable[str]], parse: Callable[[str, str], Any]) -> str:
        """What the file should hold: the trees that `parse` makes of the texts, by their starts;
        texts of which it makes None are left out."""

        def line(value: Any) -> str:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

        parts = []
        for start, every in texts.items():
            trees = {text: written(parse(text, start)) for text in every}
            lines = ",\n".join(f"{line(t)}:{line(tree)}" for t, tree in trees.items() if tree)
            parts.append(f"{line(start)}:{{\n{lines}\n}}")
        return f'{{"grammar":{line(self.digest())},"texts":{{\n{",".join(parts)}\n}}}}\n'


def parser_of(grammar: Path, starts: tuple[str, ...]) -> Lark:
    """The parser of the language of a grammar, from these symbols; one for all threads."""
    with _BUILDING:
        return _built(grammar, starts)


@cache
def _built(grammar: Path, starts: tuple[str, ...]) -> Lark:
    from lark import Lark

    text = grammar.read_text("utf-8")
    return Lark(text, parser="lalr", start=list(starts), propagate_positions=True)


def written(node: Any) -> Any:
    """A tree as JSON has it: a list of what it is, its offset and its parts; a token as a list of
    its offset and its characters."""
    if node is None:
        return None
    if hasattr(node, "children"):
        at = getattr(node.meta, "start_pos", None) or 0
        return [str(node.data), at, *map(written, node.children)]
    return [node.start_pos or 0, str(node)]


def _read(found: Any) -> Any:
    if found is None:
        return None
    if isinstance(found[0], str):
        return Tree(found[0], [_read(part) for part in found[2:]], found[1])
    token = Token(found[1])
    token.start_pos = found[0]
    return token


@cache
def _kept(trees: KeptTrees) -> dict[str, dict[str, Any]]:
    try:
        told = json.loads(trees.file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return told["texts"] if told.get("grammar") == trees.digest() else {}


@cache
def _digest(grammar: Path) -> str:
    return hashlib.sha256(grammar.read_bytes()).hexdigest()[:16]
