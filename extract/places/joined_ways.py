"""Joined ways: the variables that one way of a place has, as one of undominated rows.

A row is beaten by another one that takes no more in anything, whatever the rest of the program
does: seconds (of every event, where there are such), joules and bytes at every moment, of its own
and in each pair for each row of the other end. Beaten rows go before variables are joined, and
after, among those of one way.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.problem.problem import Floats, Ints, Pair, Span, Use, Variable

from .axis import Key

# Joining stops where there are more rows than this, before or after those that are beaten are gone:
# then the variables stay apart. No measurement of these is kept.
_GROWN, _ROWS = 60_000, 4_000
# Features that are compared at once at least, and as many as make so many entries of all rows.
_AT_ONCE, _ENTRIES = 8, 20_000

K = TypeVar("K", bound=Hashable)
Pairs = Mapping[tuple[Key, Key], Pair]


@dataclass(frozen=True, eq=False)
class Joined:
    """Rows of several variables together: `rows[r, m]` is the row of variable `keys[m]`."""

    keys: tuple[Key, ...]
    rows: Ints  # [rows, variables]
    seconds: Floats  # [rows]
    joules: Floats  # [rows]
    uses: Mapping[tuple[int, int], Floats]  # (start, end) -> bytes [rows]
    spans: Mapping[int, Floats]  # event -> seconds [rows]

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, key: Key) -> Ints:
        """The row of one variable, per row."""
        return self.rows[:, self.keys.index(key)]

    def only(self, kept: Ints | NDArray[np.bool_]) -> Joined:
        """Some of the rows."""
        return Joined(
            self.keys,
            self.rows[kept],
            self.seconds[kept],
            self.joules[kept],
            {k: x[kept] for k, x in self.uses.items()},
            {k: x[kept] for k, x in self.spans.items()},
        )


def joined(variables: Mapping[Key, Variable], pairs: Pairs) -> Joined | None:
    """Some variables as one, with the pairs that they are in; None where it would have too many
    rows, or none."""
    found: Joined | None = None
    for key, v in variables.items():
        own = _single(key, v)
        own = own.only(unbeaten(_features(own, pairs)))
        if found is None:
            found = own
            continue
        if len(found) * len(own) > _GROWN:
            return None
        found = _product(found, own, pairs)
        found = found.only(_best_alike(found, pairs))
        if not 0 < len(found) <= _ROWS:
            return None
    return found if found is None else found.only(unbeaten(_features(found, pairs)))


def _single(key: Key, v: Variable) -> Joined:
    legal = np.flatnonzero(np.isfinite(v.seconds))
    uses: dict[tuple[int, int], Floats] = {}
    spans: dict[int, Floats] = {}
    for use in v.uses:
        _add(uses, (use.start, use.end), use.amount[legal])
    for span in v.spans:
        _add(spans, span.event, span.amount[legal])
    return Joined((key,), legal[:, None], v.seconds[legal], v.joules[legal], uses, spans)


def _add(into: dict[K, Floats], key: K, amount: Floats) -> None:
    into[key] = into[key] + amount if key in into else amount


def _product(a: Joined, b: Joined, pairs: Pairs) -> Joined:
    """All legal rows of both."""
    (key,) = b.keys
    between = [(e, p) for e, p in pairs.items() if key in e and set(e) & set(a.keys)]
    i, j = (x.ravel() for x in np.indices((len(a), len(b))))

    def labels(ends: tuple[Key, Key], p: Pair) -> tuple[Ints, Ints]:
        x, y = (
            label[b.rows[j, 0]] if end == key else label[a.of(end)[i]]
            for end, label in zip(ends, (p.label_a, p.label_b), strict=True)
        )
        return x, y

    seconds = a.seconds[i] + b.seconds[j]
    for ends, p in between:
        seconds = seconds + p.seconds[labels(ends, p)]
    legal = np.isfinite(seconds)
    i, j = i[legal], j[legal]
    joules = a.joules[i] + b.joules[j]
    uses = {k: x[i] for k, x in a.uses.items()}
    spans = {k: x[i] for k, x in a.spans.items()}
    for at, amount in b.uses.items():
        _add(uses, at, amount[j])
    for event, amount in b.spans.items():
        _add(spans, event, amount[j])
    for ends, p in between:
        both = labels(ends, p)
        joules = joules + p.joules[both]
        for use in p.uses:
            _add(uses, (use.start, use.end), use.amount[both])
        for span in p.spans:
            _add(spans, span.event, span.amount[both])
    rows = np.column_stack((a.rows[i], b.rows[j]))
    return Joined((*a.keys, key), rows, seconds[legal], joules, uses, spans)


def _outward(found: Joined, pairs: Pairs) -> list[tuple[Key, Key, Pair, bool]]:
    """The pairs with others: (own end, other end, pair, whether the own end is the first)."""
    out = []
    for (x, y), p in pairs.items():
        if (x in found.keys) != (y in found.keys):
            first = x in found.keys
            out.append((x, y, p, True) if first else (y, x, p, False))
    return out


def _best_alike(found: Joined, pairs: Pairs) -> Ints:
    """Of rows with equal labels in pairs with others, those that none beats."""
    labels = [
        (p.label_a if first else p.label_b)[found.of(own)]
        for own, _, p, first in _outward(found, pairs)
    ]
    group = np.zeros(len(found), dtype=np.int64)
    if labels:
        group = np.unique(np.column_stack(labels), axis=0, return_inverse=True)[1].ravel()
    return unbeaten(np.column_stack(list(_own_features(found).values())), group)


Feature = tuple[str, int, int]  # what it is of, the other end or -1, the moment or event or 0


def _own_features(found: Joined) -> dict[Feature, Floats]:
    """Seconds, joules, seconds of every event, and bytes from every moment on at which they
    change."""
    out: dict[Feature, Floats] = {
        ("seconds", -1, 0): found.seconds,
        ("joules", -1, 0): found.joules,
    }
    out |= {("event", -1, e): x for e, x in found.spans.items()}
    for t in _moments(found.uses):
        out["bytes", -1, t] = np.sum([x for (s, e), x in found.uses.items() if s <= t < e], axis=0)
    return out


def _moments(uses: Mapping[tuple[int, int], Floats]) -> list[int]:
    ends = {t for span in uses for t in span}
    return [t for t in sorted(ends) if any(s <= t < e for s, e in uses)]


def _features(found: Joined, pairs: Pairs) -> Floats:
    """All that rows may differ in: [rows, features]."""
    own = [x[:, None] for x in _own_features(found).values()]
    own += [x for _, x in _outer_features(found, pairs)]
    return np.unique(np.concatenate(own, axis=1), axis=1)


def _outer_features(found: Joined, pairs: Pairs) -> list[tuple[Feature, Floats]]:
    """What rows take in pairs with others: per feature [rows, labels of the other end]."""
    out: list[tuple[Feature, Floats]] = []
    for own, other, p, first in _outward(found, pairs):
        label = (p.label_a if first else p.label_b)[found.of(own)]

        def at(table: Floats, first: bool = first, label: Ints = label) -> Floats:
            return (table if first else table.T)[label]

        out += [(("seconds", other, 0), at(p.seconds)), (("joules", other, 0), at(p.joules))]
        out += [(("event", other, s.event), at(s.amount)) for s in p.spans]
        uses: dict[tuple[int, int], Floats] = {}
        for use in p.uses:
            _add(uses, (use.start, use.end), use.amount)
        for t in _moments(uses):
            held = np.sum([x for (s, e), x in uses.items() if s <= t < e], axis=0)
            out.append((("bytes", other, t), at(held)))
    return out


def unbeaten(features: Floats, group: Ints | None = None) -> Ints:
    """The rows that no other of their group is at most as large as in everything, of equal ones the
    first. Without groups all rows are one."""
    if group is None:
        group = np.zeros(len(features), dtype=np.int64)
    # What beats a row comes before it: it has no more that is forbidden, and no greater sum.
    legal = np.isfinite(features)
    finite = np.where(legal, features, 0.0)
    share = finite / np.maximum(np.abs(finite).max(axis=0, initial=0.0), 1e-300)
    left = np.lexsort((share.sum(axis=1), (~legal).sum(axis=1), group))  # not yet beaten
    kept: list[Ints] = []
    while len(left):
        # In every group the row of the least sum is beaten by none, and goes against the others.
        own = group[left]
        first = np.concatenate(([True], own[1:] != own[:-1]))
        best = left[first]
        kept.append(best)
        rest = left[~first]
        against = np.repeat(best, np.diff(np.append(np.flatnonzero(first), len(left))) - 1)
        left = rest[_any_less(features, rest, against)]
    return np.sort(np.concatenate(kept)) if kept else left


def _any_less(features: Floats, rows: Ints, others: Ints) -> NDArray[np.bool_]:
    """Which of some rows are less than others in some feature, one by one."""
    found = np.zeros(len(rows), dtype=np.bool_)
    open_ = np.arange(len(rows))
    k = 0
    while len(open_) and k < features.shape[1]:
        # Most rows differ in the first few features.
        more = max(_AT_ONCE, _ENTRIES // len(open_))
        some = features[:, k : k + more]
        less = (some[rows[open_]] < some[others[open_]]).any(axis=1)
        found[open_[less]] = True
        open_, k = open_[~less], k + more
    return found


def together(name: str, ways: Sequence[Joined]) -> tuple[Variable, Ints, Ints]:
    """One variable of the rows of all ways, the way of each row, and where those of each begin."""
    sizes = [len(w) for w in ways]
    start = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    total = int(start[-1])
    uses: dict[tuple[int, int], Floats] = {}
    spans: dict[int, Floats] = {}
    for w, begin in zip(ways, start.tolist(), strict=False):
        for at, amount in w.uses.items():
            uses.setdefault(at, np.zeros(total))[begin : begin + len(w)] += amount
        for event, amount in w.spans.items():
            spans.setdefault(event, np.zeros(total))[begin : begin + len(w)] += amount
    variable = Variable(
        name,
        np.concatenate([w.seconds for w in ways]),
        np.concatenate([w.joules for w in ways]),
        tuple(Use(s, e, x) for (s, e), x in sorted(uses.items())),
        tuple(Span(event, x) for event, x in sorted(spans.items())),
    )
    return variable, np.repeat(np.arange(len(ways)), sizes), start
