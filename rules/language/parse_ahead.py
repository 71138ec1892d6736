"""Writes `parsed.json`: the syntax trees of all templates and rule books that ship.

`python -m tapestry_egg.rules.language.parse_ahead`, after templates, books or the grammar changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.instantiate import ALIGNED
from tapestry_egg.metakernels.language.expressions import KEPT, Expression, PassageText, parsed
from tapestry_egg.metakernels.language.faults import Fault
from tapestry_egg.metakernels.language.patterns import Pattern

from .book import book_names, load_book


def shipped_texts() -> dict[str, list[str]]:
    """The texts of all templates and rule books that ship with tapestry-egg, by how they start."""

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

    def parse(text: str, start: str) -> Any:
        try:
            return parsed(text, start)
        except Fault:
            return None

    return KEPT.document(shipped_texts(), parse)


if __name__ == "__main__":
    KEPT.file.write_text(document(), "utf-8")
