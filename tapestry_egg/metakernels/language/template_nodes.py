"""YAML nodes of template files as texts that know where they stand."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tapestry_egg.errors import TemplateError

from .expressions import Expression, Origin
from .projections import ListText


class TemplateNodes:
    """Reads nodes of one file; every error names the file, the line and the column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def origin(self, node: Any) -> Origin:
        """Where a node's text starts."""
        start, end = node.start_mark, node.end_mark
        style = getattr(node, "style", None)
        if style == "|":
            # The indentation of block scalars is not in the node; two spaces is ours.
            return Origin(self.name, start.line + 2, 1)
        quoted = int(style in ('"', "'"))
        folded = start.line != end.line and end.column > 0
        return Origin(self.name, start.line + 1, start.column + 1 + quoted, folded)

    def error(self, node: Any, what: str, hint: str = "") -> TemplateError:
        """An error at a node."""
        return TemplateError(what, where=str(self.origin(node)), hint=hint)

    def is_mapping(self, node: Any) -> bool:
        return isinstance(node, yaml.MappingNode)

    def is_list(self, node: Any) -> bool:
        return isinstance(node, yaml.SequenceNode)

    def is_null(self, node: Any) -> bool:
        """Whether nothing is written there."""
        return bool(getattr(node, "tag", "") == "tag:yaml.org,2002:null")

    def sequence(self, node: Any, what: str) -> list[Any]:
        """The nodes of a list."""
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, f"expected {what}")
        return list(node.value)

    def keyed(self, node: Any, what: str) -> dict[str, tuple[Any, Any]]:
        """The key and value nodes of a mapping, by name."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"expected {what}, a mapping")
        out: dict[str, tuple[Any, Any]] = {}
        for key, value in node.value:
            name = self.text(key, "a name")
            if name in out:
                raise self.error(key, f"{name!r} is given twice")
            out[name] = (key, value)
        return out

    def mapping(self, node: Any, what: str, fields: Sequence[str] = ()) -> dict[str, Any]:
        """The values of a mapping by name; where `fields` are given, it can have no others."""
        keyed = self.keyed(node, what)
        for name, (key, _) in keyed.items():
            if fields and name not in fields:
                raise self.error(key, f"unknown field {name!r}", suggestion(name, fields))
        return {name: value for name, (_, value) in keyed.items()}

    def text(self, node: Any, what: str) -> str:
        """A scalar as it is written."""
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(node, f"expected {what}", "Quote a text that starts with `[` or `{`.")
        return str(node.value)

    def expression(self, node: Any) -> Expression:
        return Expression(self.text(node, "an expression"), self.origin(node))

    def expressions(self, node: Any, what: str) -> dict[str, Expression]:
        return {k: self.expression(v) for k, v in self.mapping(node, what).items()}

    def words(self, node: Any, what: str) -> tuple[str, ...]:
        return tuple(self.text(n, "a name") for n in self.sequence(node, f"a list of {what}"))

    def list_text(self, node: Any) -> ListText:
        """A list of expressions, or one expression that gives it."""
        if not self.is_list(node):
            whole = self.expression(node)
            return ListText((whole,), whole, whole=True)
        entries = tuple(self.expression(n) for n in node.value)
        return ListText(entries, Expression("", self.origin(node)))


def suggestion(name: str, known: Sequence[str]) -> str:
    """The hint for a name that is not among those known."""
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"There are {', '.join(known)}." if known else "There are none."
