"""Sheets: the problems of several programs on one axis, and what they have alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.problem import Floats, Pair, Span, Use, Variable

from .axis import Axis, Key


@dataclass(frozen=True, eq=False)
class Sheet:
    """The problem of one program, its variables by their keys, and where its moments are on the
    axis of all."""

    posed: PlanProblem
    keys: tuple[Key, ...]
    axis: Axis

    @cached_property
    def variable(self) -> Mapping[Key, Variable]:
        return dict(zip(self.keys, self.posed.problem.variables, strict=True))

    def own(self, v: Variable) -> Variable:
        """A variable with its moments and events on the axis of all."""
        return replace(v, uses=self._uses(v.uses), spans=self._spans(v.spans))

    @cached_property
    def pairs(self) -> Mapping[tuple[Key, Key], Pair]:
        """The pairs by the keys of their variables, with moments and events on the axis of all."""
        return {
            (self.keys[p.a], self.keys[p.b]): replace(
                p, uses=self._uses(p.uses), spans=self._spans(p.spans)
            )
            for p in self.posed.problem.pairs
        }

    def _uses(self, uses: Sequence[Use]) -> tuple[Use, ...]:
        made = [Use(self.axis.moment(u.start), self.axis.moment(u.end), u.amount) for u in uses]
        return tuple(sorted(made, key=lambda u: (u.start, u.end)))

    def _spans(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        timeline = self.posed.problem.timeline
        if timeline is None:
            return ()
        made = [Span(self.axis.event(s.event, timeline), s.amount) for s in spans]
        return tuple(sorted(made, key=lambda s: s.event))


def equal_variables(one: Variable, other: Variable) -> bool:
    return _equal_costs(one, other)


def equal_pairs(one: Pair | None, other: Pair | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        _equal(one.label_a, other.label_a)
        and _equal(one.label_b, other.label_b)
        and _equal_costs(one, other)
    )


def _equal_costs(one: Variable | Pair, other: Variable | Pair) -> bool:
    """Whether two say the same of seconds, joules, bytes and events."""
    return (
        _equal(one.seconds, other.seconds)
        and _equal(one.joules, other.joules)
        and _equal_parts(
            [((u.start, u.end), u.amount) for u in one.uses],
            [((u.start, u.end), u.amount) for u in other.uses],
        )
        and _equal_parts(
            [((s.event,), s.amount) for s in one.spans],
            [((s.event,), s.amount) for s in other.spans],
        )
    )


def _equal_parts(
    one: Sequence[tuple[tuple[int, ...], Floats]], other: Sequence[tuple[tuple[int, ...], Floats]]
) -> bool:
    return len(one) == len(other) and all(
        x == y and _equal(a, b) for (x, a), (y, b) in zip(one, other, strict=True)
    )


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Programs that were assembled together share most of their arrays."""
    return one is other or np.array_equal(one, other)
