"""The extraction problem: choose one row per variable; costs on variables and on pairs.

A weighted pairwise model (a cost function network) with several additive objectives and a memory
profile over time. Rows of a variable are grouped by *label* per pair, so that a pair's table is as
small as what the pair can tell apart. A finite `seconds` table entry is a legal combination.

Where collectives run beside kernels, seconds are not additive but a longest path over events; the
`spans` of variables and pairs then say to which events their seconds belong.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.choices.once import Once

from .latencies import Latencies
from .timeline import Timeline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Use:
    """Bytes that each row (or pair of labels) occupies from time `start` up to before `end`."""

    start: int
    end: int
    amount: Floats  # [rows] or [labels of a, labels of b], bytes on one device


@dataclass(frozen=True)
class Span:
    """Seconds that each row (or pair of labels) adds to one event of the timeline, or of latencies;
    nothing where it is forbidden."""

    event: int
    amount: Floats  # [rows] or [labels of a, labels of b]


@dataclass(frozen=True)
class Variable:
    """One choice to make; all arrays have one entry per row."""

    name: str
    seconds: Floats  # [rows], in one run of the program; inf forbids
    joules: Floats  # [rows], of all devices
    uses: tuple[Use, ...] = ()
    spans: tuple[Span, ...] = ()  # what `seconds` are made of, where there is a timeline

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Pair:
    """Costs between two variables: tables over (label of a's row, label of b's row)."""

    a: int
    b: int
    label_a: Ints  # [rows of a], each one's label
    label_b: Ints  # [rows of b]
    seconds: Floats  # [labels of a, labels of b]; inf forbids
    joules: Floats  # [labels of a, labels of b], of all devices
    uses: tuple[Use, ...] = ()  # amounts shaped like `seconds`
    spans: tuple[Span, ...] = ()  # shaped like `seconds`, and what they are made of


@dataclass(frozen=True)
class Problem:
    """Variables and pairs, and at how many times memory is counted; without a `timeline` seconds
    are additive. Where collectives may be merged, `latencies` say what of them that may save."""

    variables: tuple[Variable, ...]
    pairs: tuple[Pair, ...]
    times: int
    timeline: Timeline | None = None
    latencies: Latencies | None = None

    @property
    def paths(self) -> Timeline | Latencies | None:
        """What makes seconds other than a sum, if anything does."""
        return self.timeline or self.latencies

    def evaluate(self, rows: Ints) -> tuple[float, float, Floats]:
        """(seconds, joules, bytes at each time) of one row per variable."""
        found, (begin, stop) = self._entries(rows), self._moments
        seconds = found.seconds.sum()
        seconds += found.pair_seconds.sum()
        if self.timeline is not None and np.isfinite(seconds):
            seconds = self.timeline.seconds(self._lengths(found))
        joules = found.joules.sum()
        joules += found.pair_joules.sum()
        steps = np.bincount(begin, found.bytes, self.times + 1)
        steps -= np.bincount(stop, found.bytes, self.times + 1)
        profile = np.cumsum(steps, dtype=np.float64)[: self.times]
        return float(seconds), float(joules), profile

    def lengths(self, rows: Ints) -> Floats:
        """The sum of all seconds, then those of every event, for one row per variable."""
        return self._lengths(self._entries(rows))

    def serial(self, rows: Ints) -> float:
        """The sum of all seconds of one row per variable, as if nothing ran beside anything."""
        found = self._entries(rows)
        return float(found.seconds.sum() + found.pair_seconds.sum())

    @cached_property
    def _last(self) -> list[tuple[bytes, _Entries]]:
        return []

    @cached_property
    def _moments(self) -> tuple[Ints, Ints]:
        """Where the uses begin and end, of all variables and then of all pairs."""
        every = [(u.start, u.end) for x in self._parts for u in x.uses]
        begin, stop = np.array(every, dtype=np.int64).reshape(-1, 2).T.copy()
        return begin, stop

    @cached_property
    def _events(self) -> Ints:
        """Of which events the spans are, in the same order."""
        return np.array([x.event for part in self._parts for x in part.spans], dtype=np.int64)

    @property
    def _parts(self) -> list[Variable | Pair]:
        return [*self.variables, *self.pairs]

    def _lengths(self, found: _Entries) -> Floats:
        assert self.paths is not None
        lengths = np.bincount(self._events, found.spans, len(self.paths)).astype(float)
        seconds = found.seconds.sum() + found.pair_seconds.sum()
        return np.concatenate(([seconds], lengths))

    def _entries(self, rows: Ints) -> _Entries:
        """What one row per variable has of all tables; the last answer is remembered, since several
        figures are asked of one labelling."""
        key = rows.tobytes()
        if self._last and self._last[0][0] == key:
            return self._last[0][1]
        taken = rows.tolist()
        own: list[tuple[Variable | Pair, Any]] = [*zip(self.variables, taken, strict=True)]
        pairs: list[tuple[Variable | Pair, Any]] = [
            (p, (p.label_a[taken[p.a]], p.label_b[taken[p.b]])) for p in self.pairs
        ]
        every = [*own, *pairs]
        found = _Entries(
            seconds=_numbers(x.seconds[at] for x, at in own),
            joules=_numbers(x.joules[at] for x, at in own),
            pair_seconds=_numbers(x.seconds[at] for x, at in pairs),
            pair_joules=_numbers(x.joules[at] for x, at in pairs),
            bytes=_numbers(u.amount[at] for x, at in every for u in x.uses),
            spans=_numbers(s.amount[at] for x, at in every for s in x.spans),
        )
        self._last[:] = [(key, found)]
        return found


def _numbers(amounts: Iterable[Any]) -> Floats:
    return np.fromiter(amounts, dtype=np.float64)


@dataclass(frozen=True)
class _Entries:
    """What a labelling has of the tables of a problem: of every variable, of every pair, and of
    their uses and spans, those of variables first."""

    seconds: Floats
    joules: Floats
    pair_seconds: Floats
    pair_joules: Floats
    bytes: Floats
    spans: Floats


def label(keys: Sequence[K]) -> tuple[Ints, list[K]]:
    """Number equal keys: (number per key, the distinct keys in order)."""
    numbers: dict[K, int] = {}
    out = np.array([numbers.setdefault(k, len(numbers)) for k in keys], dtype=np.int64)
    return out, list(numbers)


def merge_parallel(pairs: Sequence[Pair], once: Once | None = None) -> tuple[Pair, ...]:
    """One pair per two variables: parallel pairs become a table over combinations of labels.

    Pairs made of the same arrays share what is made of them.
    """
    once = once or Once()
    groups: dict[tuple[int, int], list[Pair]] = {}
    for p in pairs:
        groups.setdefault((min(p.a, p.b), max(p.a, p.b)), []).append(p)
    return tuple(
        group[0] if len(group) == 1 else _merged(a, b, group, once)
        for (a, b), group in groups.items()
    )


def _merged(a: int, b: int, group: Sequence[Pair], once: Once) -> Pair:
    """One pair for several between variables a and b."""
    turned = [p if p.a == a else _transposed(p, once) for p in group]

    def combine(columns: Sequence[Ints]) -> tuple[Ints, list[Ints]]:
        number, keys = label(list(zip(*(c.tolist() for c in columns), strict=True)))
        return number, [np.array(k, dtype=np.int64) for k in zip(*keys, strict=True)]

    labels_a = tuple(p.label_a for p in turned)
    labels_b = tuple(p.label_b for p in turned)
    label_a, rows_a = once(lambda: combine(labels_a), "combined", labels_a)
    label_b, rows_b = once(lambda: combine(labels_b), "combined", labels_b)

    def spread(k: int, table: Floats) -> Floats:
        return once(lambda: table[np.ix_(rows_a[k], rows_b[k])], "at", table, rows_a[k], rows_b[k])

    def total(tables: tuple[Floats, ...]) -> Floats:
        parts = tuple(spread(k, t) for k, t in enumerate(tables))
        return once(lambda: np.sum(parts, axis=0), "sum", parts)

    uses = [
        Use(use.start, use.end, spread(k, use.amount))
        for k, p in enumerate(turned)
        for use in p.uses
    ]
    spans = [Span(x.event, spread(k, x.amount)) for k, p in enumerate(turned) for x in p.spans]
    seconds = total(tuple(p.seconds for p in turned))
    energy = total(tuple(p.joules for p in turned))
    return Pair(a, b, label_a, label_b, seconds, energy, tuple(uses), tuple(spans))


def _transposed(p: Pair, once: Once) -> Pair:
    def turn(table: Floats) -> Floats:
        return once(lambda: np.ascontiguousarray(table.T), "turned", table)

    uses = tuple(Use(u.start, u.end, turn(u.amount)) for u in p.uses)
    spans = tuple(Span(x.event, turn(x.amount)) for x in p.spans)
    return Pair(p.b, p.a, p.label_b, p.label_a, turn(p.seconds), turn(p.joules), uses, spans)
