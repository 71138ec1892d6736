"""Syntax trees made ahead: those of the texts that ship with tapestry-egg.

To build the parser and to parse what one program needs takes longer than to plan a small program.
`parsed.json` holds the trees of all shipped texts by the texts themselves, under a digest of the
grammar; what is not in it is parsed. `python -m tapestry_egg.metakernels.parsed` writes it anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_FILE = _HERE / "parsed.json"


class Token(str):
    """A word of a text, and the offset of its first character."""

    __slots__ = ("start_pos",)
    start_pos: int


class Tree:
    """A node of a syntax tree: what it is, its parts, and the offset of its first character."""

    __slots__ = ("children", "data", "start_pos")

    def __init__(self, data: str, children: list[Any], start_pos: int) -> None:
        self.data, self.children, self.start_pos = data, children, start_pos


def tree_of(text: str, start: str) -> Tree | Token | None:
    """The tree of a shipped text; None for any other text."""
    found = _kept().get(start, {}).get(text)
    return None if found is None else _read(found)


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
def _kept() -> dict[str, dict[str, Any]]:
    try:
        told = json.loads(_FILE.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return told["texts"] if told.get("grammar") == grammar_digest() else {}


@cache
def grammar_digest() -> str:
    """A hash of the grammar."""
    return hashlib.sha256((_HERE / "template.lark").read_bytes()).hexdigest()[:16]


def shipped_texts() -> dict[str, list[str]]:
    """The texts of all templates and rule books that ship with tapestry-egg, by how they start."""
    from ..rules.book import book_names, load_book
    from . import registry
    from .instantiate import ALIGNED
    from .language import Expression, PassageText
    from .patterns import Pattern

    starts = {Expression: "expression", Pattern: "pattern", PassageText: "passage"}
    found: dict[str, dict[str, None]] = {start: {} for start in starts.values()}
    found["expression"][ALIGNED] = None
    seen: set[int] = set()
    stack: list[Any] = [registry.templates(), [load_book(name) for name in book_names()]]
    while stack:
        x = stack.pop()
        if id(x) in seen or isinstance(x, str | int | float):
            continue
        seen.add(id(x))
        if type(x) in starts:
            found[starts[type(x)]][x.text] = None
        if isinstance(x, Mapping):
            stack += [*x, *x.values()]
        elif isinstance(x, tuple | list | set | frozenset):
            stack += x
        elif is_dataclass(x):
            stack += [getattr(x, f.name) for f in fields(x)]
    return {start: sorted(texts) for start, texts in found.items()}


def document() -> str:
    """What `parsed.json` should hold."""
    from .faults import Fault
    from .parsing import parsed

    texts: dict[str, dict[str, Any]] = {}
    for start, every in shipped_texts().items():
        for text in every:
            with suppress(Fault):
                texts.setdefault(start, {})[text] = written(parsed(text, start))

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    parts = []
    for start, trees in texts.items():
        lines = ",\n".join(f"{line(text)}:{line(tree)}" for text, tree in trees.items())
        parts.append(f"{line(start)}:{{\n{lines}\n}}")
    return f'{{"grammar":{line(grammar_digest())},"texts":{{\n{",".join(parts)}\n}}}}\n'


if __name__ == "__main__":
    _FILE.write_text(document(), "utf-8")
