"""Scopes: what the `$name`s and `@group`s of an expression stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Scope = Mapping[str, Any]

#: Steps of comprehensions in one scope, those nested in it included: no template loops for long.
STEPS = 100_000


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
            what = "" if name.startswith("$.") else f" (a parameter is $params.{name[1:]})"
            raise ValueError(f"{name} is defined by itself{what}")
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
        self._steps: list[int] = outer._steps if isinstance(outer, Inner) else [STEPS]

    def step(self) -> bool:
        """Count one step of a comprehension; False when those of this scope are used up."""
        self._steps[0] -= 1
        return self._steps[0] >= 0

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
