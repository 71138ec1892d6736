"""Expressions of the template language: parsed with their positions, evaluated without `eval`.

An expression's text becomes a tree of small closures over a scope (a mapping from `$name`s and
`@group`s to values). Bare words stand for themselves: `map` is the string "map". Lists are tuples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from tapestry_egg.errors import TemplateError
from tapestry_egg.yaml_nodes import YamlNode

from .closures import Compiled, compile_text
from .faults import Fault, Origin, Text
from .parser import parse
from .scopes import Scope

__all__ = ["Expression", "Law", "Origin", "PassageText", "expressions"]


@dataclass(frozen=True, slots=True)
class Expression(Text):
    """A text with a value in every scope; compiled on first use, once per distinct text."""

    WHAT = "an expression"

    def __call__(self, scope: Scope) -> Any:
        """Evaluate in `scope` (keys `$name` and `@group`). Raises TemplateError with the place."""
        try:
            return _expression(self.text)(scope)
        except Fault as fault:
            raise self.fault(fault) from None
        except RecursionError:
            raise self.error("nested too deeply") from None

    def check(self) -> None:
        """Parse without evaluating. Raises TemplateError with the place of a syntax error."""
        try:
            _expression(self.text)
        except Fault as fault:
            raise self.fault(fault) from None

    def texts(self) -> Iterator[Expression]:
        """The expression itself: of the forms that a shape can have, the plain one."""
        yield self

    def error(self, what: str, hint: str = "") -> TemplateError:
        """An error about this expression as a whole."""
        return self.origin.error(self.text, 0, what, hint)


def expressions(node: YamlNode) -> dict[str, Expression]:
    """The expressions of a YAML mapping by name, not parsed yet."""
    return {name: Expression.of(value) for name, value in node.mapping().items()}


@dataclass(frozen=True, slots=True)
class Law:
    """A passage `sum(x, ys...) -> sum if ...` as written."""

    monoid_in: str
    ports: tuple[str, ...]
    monoid_out: str
    condition: Compiled | None


@dataclass(frozen=True, slots=True)
class PassageText(Text):
    """The text of a passage."""

    WHAT = "a passage"

    def law(self) -> Law:
        """The passage, parsed. Raises TemplateError with the place."""
        try:
            return _passage(self.text)
        except Fault as fault:
            raise self.fault(fault) from None

    def holds(self, scope: Scope) -> bool:
        """Whether the passage's condition, if it has one, is met in `scope`."""
        condition = self.law().condition
        try:
            return condition is None or bool(condition(scope))
        except Fault as fault:
            raise self.fault(fault) from None


# Parsing


@cache
def _expression(text: str) -> Compiled:
    return compile_text(parse(text, "expression"))


@cache
def _passage(text: str) -> Law:
    children: list[Any] = parse(text, "passage").children
    monoid_in, *ports, monoid_out, condition = children
    names = tuple(f"{p.children[0]}{p.children[1] or ''}" for p in ports)
    test = None if condition is None else compile_text(condition)
    return Law(str(monoid_in), names, str(monoid_out), test)
