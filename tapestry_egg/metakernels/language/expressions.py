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
from .faults import NOWHERE, Fault, Origin
from .parser import parse
from .scopes import Scope

__all__ = ["Expression", "Law", "Origin", "PassageText", "expressions"]


@dataclass(frozen=True, slots=True)
class Expression:
    """A text of the language with its origin; compiled on first use, once per distinct text."""

    text: str
    origin: Origin = NOWHERE

    @classmethod
    def of(cls, node: YamlNode) -> Expression:
        """The expression in a YAML scalar, not parsed yet."""
        return cls(node.text("an expression"), Origin.of(node))

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

    def fault(self, fault: Fault) -> TemplateError:
        """The error for a fault in this text, found while it or its value was evaluated."""
        return self.origin.error(self.text, fault.at, fault.what, fault.hint)

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
class PassageText:
    """The text of a passage with its origin."""

    text: str
    origin: Origin = NOWHERE

    def law(self) -> Law:
        """The passage, parsed. Raises TemplateError with the place."""
        try:
            return _passage(self.text)
        except Fault as fault:
            raise self.origin.error(self.text, fault.at, fault.what, fault.hint) from None

    def holds(self, scope: Scope) -> bool:
        """Whether the passage's condition, if it has one, is met in `scope`."""
        condition = self.law().condition
        try:
            return condition is None or bool(condition(scope))
        except Fault as fault:
            raise self.origin.error(self.text, fault.at, fault.what, fault.hint) from None


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
