"""Scopes: what the `$name`s and `@group`s of an expression stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Scope = Mapping[str, Any]


class Names(dict[str, Any]):
    """The names of one operation: parameters, operands, and `let` names on first use.

    `let` maps `$name` to what computes it from this scope.
    """

    def __init__(self, let: Mapping[str, Callable[[Scope], Any]]) -> None:
        super().__init__()
        self.let = let
        self._open: list[str] = []

    def __missing__(self, name: str) -> Any:
        compute = self.let[name]
        if name in self._open:
            raise ValueError(
                f"{name} is defined by itself (a parameter is $params{'.' + name[1:]})"
            )
        self._open.append(name)
        try:
            value = self[name] = compute(self)
        finally:
            self._open.pop()
        return value


class Inner(dict[str, Any]):
    """A scope inside another: names that it lacks are those of the outer one."""

    def __init__(self, outer: Scope, names: Mapping[str, Any] | None = None) -> None:
        super().__init__(names or {})
        self.outer = outer

    def __missing__(self, name: str) -> Any:
        return self.outer[name]


def known(scope: Scope) -> list[str]:
    """Every name of a scope, those of outer scopes included."""
    found = list(scope)
    if isinstance(scope, Inner):
        found += known(scope.outer)
    if isinstance(scope, Names):
        found += list(scope.let)
    return found
