"""Laid: the sheets of one program, and of it with one place computed another way, over each other.

What all ways of a place have alike stays one variable, or one pair; what differs is a variable for
every way, with one more row: that it is absent, or all rows of the way in one. A variable for each
place says which way it is computed, and ties those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.problem import (
    Floats,
    Ints,
    Pair,
    Problem,
    Span,
    Variable,
    merge_parallel,
)
from tapestry_egg.extract.problem.timeline import Timeline

from .axis import Key, Names, axis_of
from .joined_ways import joined, together
from .programs import Entangled, Patched, Place, Pose
from .sheets import Sheet, equal_pairs, equal_variables


class Laid:
    """The sheets of one program and of its ways, laid over each other."""

    def __init__(
        self, pose: Pose, groups: Sequence[tuple[int, ...]], counts: Sequence[int], names: Names
    ) -> None:
        self.pose, self.groups, self.names, self.places = pose, tuple(groups), names, len(counts)
        self.ways_of = tuple([tuple(product(*(range(counts[p]) for p in g))) for g in groups])
        posed: list[list[PlanProblem]] = []
        for g, ways in enumerate(self.ways_of):
            posed.append([])
            for own in ways:
                every = [0] * self.places
                for p, way in zip(groups[g], own, strict=True):
                    every[p] = way
                made = pose(tuple(every))
                if made is None:
                    raise Entangled(g)
                posed[g].append(made)
        base = posed[0][0]
        for g, programs in enumerate(posed):
            if any(_counted(p) != _counted(base) for p in programs):
                raise Entangled(g)
        units = [[names.of(p)[: len(p.choices.schedule.units)] for p in own] for own in posed]
        laid = axis_of(units[0][0], [own[1:] for own in units])
        if not isinstance(laid, list):
            raise Entangled(*laid)
        # Those as given first, then of every group its other ways.
        self.base = Sheet(base, names.of(base), laid[0][0])
        self.sheets = [
            [self.base, *(Sheet(p, names.of(p), a) for p, a in zip(own[1:], axes, strict=True))]
            for own, axes in zip(posed, laid[1:], strict=True)
        ]
        self.variables: list[Variable] = []
        self.made: list[Pair] = []
        self.common: dict[Key, int] = {}
        self._padded: dict[tuple[int, tuple[int, ...]], tuple[Floats, Floats]] = {}

    def build(self) -> Patched:
        alike = [self._alike(own) for own in self.sheets]
        self._check_apart(alike)
        common = set(self.base.keys).intersection(*(same for same, _ in alike))
        # What a place changes of variables that all its ways have.
        changed = {k: g for g, (_, own) in enumerate(alike) for k in own if k in common}
        first = {
            k: g
            for g, (same, _) in reversed([*enumerate(alike)])
            for k in self.base.keys
            if k not in same
        }
        groups: dict[int, Place] = {}
        # Messages are passed along variables in the order in which units run.
        for key, v in self.base.variable.items():
            if key in common:
                own = self.base.own(v)
                self.common[key] = self._add(_bare(own) if key in changed else own)
            elif first[key] not in groups:
                g = first[key]
                groups[g] = self._place(g, self.sheets[g], alike[g][0])
        for g in range(len(self.sheets)):
            if g not in groups:
                groups[g] = self._place(g, self.sheets[g], alike[g][0])
            self._tie_place(groups[g], self.sheets[g], alike[g][0])
            for key in [k for k, owner in changed.items() if owner == g]:
                self._vary(key, self.sheets[g], groups[g])
        for (a, b), pair in self.base.pairs.items():
            if a in common and b in common:
                self._tie(pair, self.common[a], self.common[b])
        times, timeline = self.base.axis.times * len(self.base.posed.counts), None
        variables: Sequence[Variable] = self.variables
        pairs: Sequence[Pair] = merge_parallel(self.made)
        if self.base.posed.problem.timeline is not None:
            timeline, variables, pairs = self._timeline(self.base.posed.problem.timeline, pairs)
        return Patched(
            Problem(tuple(variables), tuple(pairs), times, timeline),
            self.pose,
            tuple([groups[g] for g in range(len(self.sheets))]),
            self.common,
            self.names,
            self.places,
            self.places - sum(map(len, self.groups)),
        )

    def _alike(self, sheets: Sequence[Sheet]) -> tuple[set[Key], set[Key]]:
        """The variables that all ways of a place have, with the same rows and the same pairs among
        them; and those of them whose own costs differ."""
        base = sheets[0]
        known = [s.variable for s in sheets]
        same = {k for k, v in known[0].items() if all(len(o.get(k, ())) == len(v) for o in known)}
        pairs = [s.pairs for s in sheets]
        count: dict[Key, int] = {}
        for ends in pairs[0]:
            for k in ends:
                count[k] = count.get(k, 0) + 1
        for ends in sorted({e for own in pairs for e in own}):
            if same.issuperset(ends) and not all(
                equal_pairs(pairs[0].get(ends), o.get(ends)) for o in pairs
            ):
                # The one that fewer others read or make has fewer pairs to be repeated.
                same.discard(min(ends, key=lambda k: (count.get(k, 0), k)))
        own = [{k: s.own(v[k]) for k in same} for s, v in zip(sheets, known, strict=True)]
        assert base is self.base
        return same, {k for k in same if not all(equal_variables(own[0][k], o[k]) for o in own)}

    def _check_apart(self, alike: Sequence[tuple[set[Key], set[Key]]]) -> None:
        """Raise Entangled where two places change the same, or what one has and the other lacks
        has a pair."""
        every = set(self.base.keys)
        touched = [(every - same) | own for same, own in alike]
        mine = [every - same for same, _ in alike]
        for h in range(len(alike)):
            for g in range(h):
                if touched[g] & touched[h]:
                    raise Entangled(g, h)
        for g, sheets in enumerate(self.sheets):
            for sheet in sheets:
                for a, b in sheet.pairs:
                    if a in alike[g][0] and b in alike[g][0]:
                        continue
                    for h, others in enumerate(mine):
                        if h != g and (a in others or b in others):
                            raise Entangled(g, h)

    def _add(self, v: Variable) -> int:
        self.variables.append(v)
        return len(self.variables) - 1

    def _place(self, g: int, sheets: Sequence[Sheet], same: set[Key]) -> Place:
        """The variable that says by which way a place is computed: with all rows of what that way
        has, where those are few; else beside the variables of all ways, tied to them."""
        mine = [{key: s.own(v) for key, v in s.variable.items() if key not in same} for s in sheets]
        name = f"place {' '.join(map(str, self.groups[g]))}"
        every = [joined(own, s.pairs) if own else None for own, s in zip(mine, sheets, strict=True)]
        whole = [w for w in every if w is not None]
        if len(whole) == len(sheets):
            variable, way, start = together(name, whole)
            number = self._add(variable)
            members: list[Mapping[Key, tuple[int, Ints | None]]] = []
            for w, begin in zip(whole, start.tolist(), strict=False):
                rows = np.zeros((len(variable), len(w.keys)), dtype=np.int64)
                rows[begin : begin + len(w)] = w.rows
                members.append({key: (number, rows[:, m]) for m, key in enumerate(w.keys)})
            return Place(self.groups[g], self.ways_of[g], number, way, tuple(members))
        zero = np.zeros(len(sheets))
        number = self._add(Variable(name, zero, zero))
        apart: list[Mapping[Key, tuple[int, Ints | None]]] = []
        for a, own in enumerate(mine):
            apart.append({key: (self._add(self._optional(v)), None) for key, v in own.items()})
            for v, _ in apart[-1].values():
                present = np.zeros(len(self.variables[v]), dtype=np.int64)
                present[-1] = 1
                chosen = (np.arange(len(sheets)) != a).astype(np.int64)
                agree = np.array([[0.0, np.inf], [np.inf, 0.0]])
                self.made.append(Pair(number, v, chosen, present, agree, np.zeros_like(agree)))
        return Place(self.groups[g], self.ways_of[g], number, np.arange(len(sheets)), tuple(apart))

    def _tie_place(self, place: Place, sheets: Sequence[Sheet], same: set[Key]) -> None:
        """The pairs of what the ways of a place have."""
        for a, (sheet, members) in enumerate(zip(sheets, place.members, strict=True)):
            for (x, y), pair in sheet.pairs.items():
                if x in same and y in same:
                    continue
                inside = [members.get(k) for k in (x, y)]
                if all(m is not None and m[1] is not None for m in inside):
                    continue  # within rows
                ends = [
                    self.common[k] if m is None else m[0]
                    for k, m in zip((x, y), inside, strict=True)
                ]
                labels = [
                    self._labels(label, m, place, a, wide)
                    for label, m, wide in zip(
                        (pair.label_a, pair.label_b), inside, pair.seconds.shape, strict=True
                    )
                ]
                made = self._where(pair, labels[0], labels[1], *(m is not None for m in inside))
                self._tie(made, *ends)

    def _labels(
        self, labels: Ints, member: tuple[int, Ints | None] | None, place: Place, a: int, wide: int
    ) -> Ints:
        """The labels of a pair's rows, and `wide` for those rows that are of other ways."""
        if member is None:
            return labels
        if member[1] is None:
            return np.append(labels, wide)
        return np.where(place.way == a, labels[member[1]], wide)

    def _optional(self, v: Variable) -> Variable:
        """A variable with one more row, in which it is absent."""
        pad = self._pad
        return replace(
            v,
            name=f"{v.name}?",
            seconds=pad(v.seconds, 1),
            joules=pad(v.joules, 1),
            uses=tuple(replace(u, amount=pad(u.amount, 1)) for u in v.uses),
            spans=tuple(replace(s, amount=pad(s.amount, 1)) for s in v.spans),
        )

    def _where(self, p: Pair, label_a: Ints, label_b: Ints, first: bool, second: bool) -> Pair:
        """A pair that costs nothing where one of its variables that may be absent is."""

        def pad(table: Floats) -> Floats:
            return self._pad(table, 1 if first else 0, 1 if second else 0)

        return replace(
            p,
            label_a=label_a,
            label_b=label_b,
            seconds=pad(p.seconds),
            joules=pad(p.joules),
            uses=tuple(replace(u, amount=pad(u.amount)) for u in p.uses),
            spans=tuple(replace(s, amount=pad(s.amount)) for s in p.spans),
        )

    def _pad(self, table: Floats, *more: int) -> Floats:
        """A table with noughts behind; the same for the same table."""
        name = (id(table), more)
        if name not in self._padded:
            self._padded[name] = table, np.pad(table, [(0, m) for m in more])
        return self._padded[name][1]

    def _vary(self, key: Key, sheets: Sequence[Sheet], place: Place) -> None:
        """What a variable costs that all ways of a place have, by the way."""
        own = [s.own(s.variable[key]) for s in sheets]
        rows = len(own[0])
        shape = (len(own), rows)
        seconds, joules = np.stack([v.seconds for v in own]), np.stack([v.joules for v in own])

        def at(a: int, amount: Floats) -> Floats:
            table = np.zeros(shape)
            table[a] = amount
            return table

        self.made.append(
            Pair(
                place.variable,
                self.common[key],
                place.way,
                np.arange(rows),
                seconds,
                joules,
                tuple(
                    replace(u, amount=at(a, u.amount)) for a, v in enumerate(own) for u in v.uses
                ),
                tuple(
                    replace(s, amount=at(a, s.amount)) for a, v in enumerate(own) for s in v.spans
                ),
            )
        )

    def _tie(self, pair: Pair, a: int, b: int) -> None:
        self.made.append(replace(pair, a=a, b=b))

    def _timeline(
        self, given: Timeline, pairs: Sequence[Pair]
    ) -> tuple[Timeline, list[Variable], list[Pair]]:
        """The events of all ways, numbered in the order in which they are issued."""
        units = self.base.axis.units
        parts: list[Variable | Pair] = [*self.variables, *pairs]
        seen = {s.event for x in parts for s in x.spans}
        windows = sorted({divmod(e - units, units + 1) for e in seen if e >= units})
        number = {w: units + k for k, w in enumerate(windows)}

        def final(event: int) -> int:
            return event if event < units else number[divmod(event - units, units + 1)]

        def spans(x: Variable | Pair) -> tuple[Span, ...]:
            return tuple(replace(s, event=final(s.event)) for s in x.spans)

        issue = np.array([i for i, _ in windows], dtype=np.int64)
        arrive = np.array([a for _, a in windows], dtype=np.int64)
        return (
            Timeline(units, issue, arrive, given.slowdown),
            [replace(v, spans=spans(v)) for v in self.variables],
            [replace(p, spans=spans(p)) for p in pairs],
        )


def _bare(v: Variable) -> Variable:
    """A variable whose costs are told elsewhere."""
    zero = np.zeros(len(v))
    return Variable(v.name, zero, zero)


def _counted(posed: PlanProblem) -> list[float]:
    """The sizes with which memory is counted."""
    return [c.above for c in posed.counts]
