"""A choice problem of costs in pairs as a problem of the engine, smaller where that is exact.

Classes that determine each other become one variable; rows that are of no use go; what has one row
alone becomes a constant, and the memory that it takes is off the limit. Of moments that others
cover, and of those at which any choice is within the limit, nothing is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.engine.network import starts
from tapestry_egg.extract.problem.problem import Floats, Ints, Pair, Problem, Use, Variable

from .choices import ChoiceProblem
from .joined import Flags, beyond, join, replaced, tables

# Sums of amounts up to here are exact in floating point; larger ones are rounded up.
_EXACT = 1 << 53

# So often rows are compared, and what has one row alone is taken out.
_ROUNDS = 3


class Unanswerable(Exception):
    """No choice is legal, or within the limits; says why."""


@dataclass(frozen=True)
class Reduced:
    """A problem of the engine, and how its labellings are choices.

    Its seconds are costs, and the last variable, of one row, is what is used in any case. An answer
    of `cost` c costs `constant` more; its peak is the memory at the worst moment that may be above
    the `limit`, in units that are 1 where it is `exact`.
    """

    problem: Problem
    constant: float
    limit: float
    moment: Ints  # [times], the moment of the choice problem that each time stands for
    node: Ints  # pooled: nodes by class and row
    begin: Ints  # [classes], where a class's nodes start in `node`
    variable: Ints  # [classes], the variable that a class follows
    fixed: Ints  # [variables before reduction], the row where it is fixed, or -1
    kept: Ints  # [variables of `problem` but the last], which of those before it is
    row: Ints  # pooled: rows of those before, by row
    exact: bool  # whether no amount was rounded up, so that bounds hold
    notes: tuple[str, ...]

    def nodes(self, rows: Ints) -> Ints:
        """The chosen node of every class [classes], from one row per variable."""
        every = self.fixed.copy()
        sizes = [len(v) for v in self.problem.variables[:-1]]
        every[self.kept] = self.row[starts(sizes)[:-1] + rows[:-1]]
        return self.node[self.begin + every[self.variable]]


@dataclass(frozen=True)
class _Arrays:
    """Variables of several rows, tables between two of them, and what rows occupy when."""

    size: Ints  # [variables]
    cost: Floats  # [rows]
    first: Ints  # [pairs], the variable of the smaller number
    second: Ints  # [pairs]
    cells: Floats  # tables, end to end
    owner: Ints  # [uses], variables, rising
    span: Ints  # [uses, 2], from and up to which moment
    amounts: Ints  # rows of each use's variable, end to end
    base: Ints  # [moments], what is used in any case
    constant: float

    @property
    def begin(self) -> Ints:
        """Where the rows of each variable begin [variables + 1]."""
        return starts(self.size)

    @property
    def rows_of(self) -> Ints:
        """The variable of each row [rows]."""
        return np.repeat(np.arange(len(self.size)), self.size)

    @property
    def entry(self) -> Ints:
        """Where each table begins [pairs + 1]."""
        return starts(self.size[self.first] * self.size[self.second])

    @property
    def amount(self) -> Ints:
        """Where the amounts of each use begin [uses + 1]."""
        return starts(self.size[self.owner])


def reduced(problem: ChoiceProblem, limit: int | None = None, least: int | None = None) -> Reduced:
    """The problem of a choice problem within its limit, or another.

    Moments are left out at which nothing can be above the limit, or above `least`.

    Raises ExtractError where choices need others, and Unanswerable where nothing is legal.
    """
    if not problem.network:
        raise ExtractError(
            "not a cost function network: choices need others", where=problem.name or "problem"
        )
    limit = problem.usage.limit or 0 if limit is None else limit
    start, pairs = problem.node_start, problem.pairs
    alive = problem.allowed.copy()
    _complain(problem, alive, "")
    group, one = join(start, alive, pairs.first, pairs.second, pairs.start, pairs.legal)
    _complain(problem, alive, ": every one is forbidden, or leaves a neighbour none")
    # Variables in the order of their first classes; rows in that of the first class's nodes.
    owner = problem.node_class()
    leads = group == np.arange(len(group))
    variable = (np.cumsum(leads) - 1)[group]
    rows = np.flatnonzero(alive & leads[owner])
    size = np.bincount(variable[owner[rows]], minlength=int(leads.sum()))
    row = np.full(len(alive), -1, dtype=np.int64)
    row[rows] = np.arange(len(rows)) - starts(size)[variable[owner[rows]]]
    row = np.where(alive, row[one], -1)
    begin = starts(size[variable])[:-1]
    node = np.zeros(int(size[variable].sum()), dtype=np.int64)
    at = np.flatnonzero(alive)
    node[begin[owner[at]] + row[at]] = at
    limit, amounts, exact = _rounded(problem, limit)
    arrays = _arrays(problem, variable, row, size, amounts)
    fixed = np.full(len(size), -1, dtype=np.int64)
    kept, left = np.arange(len(size)), ranges(np.zeros_like(size), size)
    for _ in range(_ROUNDS):
        before = len(arrays.cost)
        stays = ~(_replaced(arrays) | _beyond(arrays, limit))
        if (np.bincount(arrays.rows_of[stays], minlength=len(arrays.size)) == 0).any():
            raise Unanswerable("no choice keeps all limits")
        left, arrays = left[stays], _restricted(arrays, stays)
        single = arrays.size == 1
        fixed[kept[single]] = left[arrays.begin[:-1][single]]
        kept, left = kept[~single], left[np.repeat(~single, arrays.size)]
        arrays = _without(arrays, single)
        if len(arrays.cost) == before:
            break
    arrays, moment = _binding(_lowered(arrays), limit, least)
    sizes = (
        ("variables", len(problem.classes), len(arrays.size)),
        ("rows", len(problem.nodes), len(arrays.cost)),
        ("tables", len(pairs), len(arrays.first)),
        ("cells", len(pairs.legal), len(arrays.cells)),
    )
    notes = tuple(f"{name} {a} -> {b}" for name, a, b in sizes)
    made = _problem(arrays)
    most = float(limit) if len(moment) else math.inf
    return Reduced(
        made, arrays.constant, most, moment, node, begin, variable, fixed, kept, left, exact, notes
    )


def _rounded(problem: ChoiceProblem, limit: int) -> tuple[int, Ints, bool]:
    """The limit and what nodes occupy, in units in which sums are exact; whether these are 1."""
    amounts, unit = problem.usage.amount, 1
    while sum(amounts.tolist()) // unit + len(amounts) >= _EXACT:
        unit *= 2
    if unit == 1:
        return limit, amounts, True
    return limit // unit, -(-amounts // unit), False


def _complain(problem: ChoiceProblem, alive: Flags, why: str) -> None:
    """Raise Unanswerable where a class has no node."""
    there = np.bincount(problem.node_class()[alive], minlength=len(problem.classes))
    if not there.all():
        name = problem.classes[int(np.flatnonzero(there == 0)[0])]
        raise Unanswerable(f"class {name} has no node to choose{why}")


def ranges(begin: Ints, size: Ints) -> Ints:
    """`arange(begin, begin + size)` of every pair, end to end."""
    ends = np.cumsum(size)
    out = np.arange(int(size.sum()), dtype=np.int64)
    return out + np.repeat(begin - (ends - size), size)


def _arrays(problem: ChoiceProblem, variable: Ints, row: Ints, size: Ints, amount: Ints) -> _Arrays:
    pairs, begin = problem.pairs, starts(size)
    at = np.flatnonzero(row >= 0)
    owner = problem.node_class()
    to = begin[variable[owner[at]]] + row[at]
    own = problem.cost[at].astype(np.float64)
    cost = np.bincount(to, own, int(begin[-1])).astype(np.float64)
    first = second = np.zeros(0, dtype=np.int64)
    cells = np.zeros(0)
    if len(pairs):
        a, b = np.sort((variable[pairs.first], variable[pairs.second]), axis=0)
        apart = a != b
        keys, which = np.unique(a[apart] * len(size) + b[apart], return_inverse=True)
        first, second = np.divmod(keys, max(len(size), 1))
        place = starts(size[first] * size[second])
        entry = np.zeros(len(pairs), dtype=np.int64)
        entry[apart] = place[which]
        values = pairs.cost.astype(np.float64)
        cells = tables(
            problem.node_start,
            pairs.first,
            pairs.second,
            pairs.start,
            pairs.legal,
            values,
            variable,
            row,
            begin,
            cost,
            entry,
            int(place[-1]),
        )
    usage = problem.usage
    none = np.zeros((0, 2), dtype=np.int64)
    made = _Arrays(size, cost, first, second, cells, none[:, 0], none, none[:, 0], none[:, 0], 0.0)
    if usage.limit is None:
        return made
    seen = at[(usage.upper[at] > usage.lower[at]) & (amount[at] > 0)]
    v = variable[owner[seen]]
    spans, which = np.unique(
        np.stack((v, usage.lower[seen], usage.upper[seen])), axis=1, return_inverse=True
    )
    length = size[spans[0]]
    amounts = np.zeros(int(length.sum()), dtype=np.int64)
    np.add.at(amounts, starts(length)[:-1][which.ravel()] + row[seen], amount[seen])
    return replace(
        made,
        owner=spans[0],
        span=spans[1:].T.copy(),
        amounts=amounts,
        base=np.zeros(usage.times, dtype=np.int64),
    )


def _replaced(x: _Arrays) -> Flags:
    """Which rows another one replaces."""
    ends = np.stack((x.first, x.second), axis=1).ravel()
    links = np.argsort(ends, kind="stable")
    count = len(x.size)
    return replaced(
        x.begin,
        x.cost,
        x.first,
        x.second,
        x.entry[:-1],
        x.cells,
        starts(np.bincount(ends, minlength=count)),
        links,
        starts(np.bincount(x.owner, minlength=count)),
        x.amount[:-1],
        x.amounts,
    )


def _beyond(x: _Arrays, limit: int) -> Flags:
    """Which rows are above the limit where all else takes its least."""
    if not len(x.owner):
        return np.zeros(len(x.cost), dtype=bool)
    low, room = _room(x, limit)
    return beyond(
        x.begin,
        starts(np.bincount(x.owner, minlength=len(x.size))),
        x.span,
        x.amount[:-1],
        (x.amounts - np.repeat(low, np.diff(x.amount))).astype(np.float64),
        room.astype(np.float64),
    )


def _room(x: _Arrays, limit: int) -> tuple[Ints, Ints]:
    """What each use takes at least [uses], and what is then left at each moment [moments]. Raises
    Unanswerable where that is less than nothing."""
    low = x.amounts[:0]
    if len(x.owner):
        low = np.minimum.reduceat(x.amounts, x.amount[:-1])
    room = limit - _used(x, low)
    worst = int(room.argmin())
    if room[worst] < 0:
        least = limit - int(room[worst])
        raise Unanswerable(
            f"at time {worst} no choice uses less than {least}; the limit is {limit}"
        )
    return low, room


def _used(x: _Arrays, amounts: Ints) -> Ints:
    """What is used at each moment [moments] where each use takes so much [uses]."""
    return x.base + _profile(len(x.base), x.span, amounts)


def _profile(moments: int, span: Ints, amounts: Ints) -> Ints:
    """What uses of some spans [uses, 2] and amounts [uses] take at each moment [moments]."""
    steps = np.zeros(moments + 1, dtype=np.int64)
    np.add.at(steps, span[:, 0], amounts)
    np.subtract.at(steps, span[:, 1], amounts)
    return np.cumsum(steps[:-1])


def _restricted(x: _Arrays, stays: Flags) -> _Arrays:
    """With some of the rows."""
    if stays.all():
        return x
    begin = x.begin
    n, m = x.size[x.first], x.size[x.second]
    rows = ranges(begin[x.first], n)
    height = np.repeat(m, n)
    cell = np.repeat(stays[rows], height)
    cell &= stays[ranges(np.repeat(begin[x.second], n), height)]
    return replace(
        x,
        size=np.add.reduceat(stays.astype(np.int64), begin[:-1]) if len(x.size) else x.size,
        cost=x.cost[stays],
        cells=x.cells[cell],
        amounts=x.amounts[stays[ranges(begin[x.owner], x.size[x.owner])]],
    )


def _without(x: _Arrays, single: Flags) -> _Arrays:
    """Without variables of one row: what they cost and occupy is there in any case."""
    if not single.any():
        return x
    begin, entry = x.begin, x.entry[:-1]
    folded = single[x.first] | single[x.second]
    other = np.where(single[x.first], x.second, x.first)[folded]
    length = x.size[other]
    to, from_ = ranges(begin[other], length), ranges(entry[folded], length)
    cost = x.cost + np.bincount(to, x.cells[from_], len(x.cost))
    number = np.cumsum(~single) - 1
    inside = np.repeat(~folded, x.size[x.first] * x.size[x.second])
    gone = single[x.owner]
    taken = _profile(len(x.base), x.span[gone], x.amounts[x.amount[:-1][gone]])
    return _Arrays(
        x.size[~single],
        cost[np.repeat(~single, x.size)],
        number[x.first[~folded]],
        number[x.second[~folded]],
        x.cells[inside],
        number[x.owner[~gone]],
        x.span[~gone],
        x.amounts[np.repeat(~gone, x.size[x.owner])],
        x.base + taken,
        x.constant + float(cost[begin[:-1][single]].sum()),
    )


def _lowered(x: _Arrays) -> _Arrays:
    """With no cost below zero: the least of each variable and table is there in any case."""
    begin, entry, constant = x.begin, x.entry, x.constant
    cost, cells = x.cost, x.cells
    if len(x.size):
        least = np.minimum.reduceat(cost, begin[:-1])
        cost, constant = cost - np.repeat(least, x.size), constant + float(least.sum())
    if len(x.first):
        least = np.minimum.reduceat(cells, entry[:-1])
        cells, constant = cells - np.repeat(least, np.diff(entry)), constant + float(least.sum())
    return replace(x, cost=cost, cells=cells, constant=constant)


def _binding(x: _Arrays, limit: int, above: int | None) -> tuple[_Arrays, Ints]:
    """With the moments alone that may be above the limit, one for all that it covers; which they
    are. Raises Unanswerable where nothing is within the limit."""
    base = x.base
    if not len(base):
        return x, np.zeros(0, dtype=np.int64)
    _room(x, limit)
    high = x.amounts[:0]
    if len(x.owner):
        high = np.maximum.reduceat(x.amounts, x.amount[:-1])
    kept = _used(x, high) > (limit if above is None else min(above, limit))
    at = starts(kept.astype(np.int64))
    while True:  # a moment is covered by its neighbour where nothing that is there ends between
        span, some = at[x.span], np.flatnonzero(kept)
        ends, begins = np.zeros(len(some) + 1, dtype=bool), np.zeros(len(some) + 1, dtype=bool)
        there = span[:, 1] > span[:, 0]
        begins[span[there, 0]] = ends[span[there, 1]] = True
        height = base[some]
        after, before = np.zeros(len(some), dtype=bool), np.zeros(len(some), dtype=bool)
        after[:-1] = ~ends[1:-1] & (height[:-1] <= height[1:])
        before[1:] = ~begins[1:-1] & (height[1:] <= height[:-1]) & ~after[:-1]
        gone = after | before
        if not gone.any():
            break
        kept[some[gone]] = False
        at = starts(kept.astype(np.int64))
    # Uses of one variable at the same moments are one, and what all its rows use is in the base.
    base = base[kept]
    keys, which = np.unique(
        np.column_stack((x.owner[there], span[there])), axis=0, return_inverse=True
    )
    length = x.size[keys[:, 0]]
    begin = starts(length)
    amounts = np.zeros(int(begin[-1]), dtype=np.int64)
    to = ranges(begin[:-1][which.ravel()], x.size[x.owner[there]])
    np.add.at(amounts, to, x.amounts[np.repeat(there, x.size[x.owner])])
    if len(keys):
        low = np.minimum.reduceat(amounts, begin[:-1])
        amounts -= np.repeat(low, length)
        base = base + _profile(len(base), keys[:, 1:], low)
        used = np.maximum.reduceat(amounts, begin[:-1]) > 0
        amounts, keys = amounts[np.repeat(used, length)], keys[used]
    made = replace(x, owner=keys[:, 0], span=keys[:, 1:], amounts=amounts, base=base)
    return made, np.flatnonzero(kept)


def _problem(x: _Arrays) -> Problem:
    """As variables and pairs."""
    shared: dict[tuple[int, ...], Floats] = {}

    def nothing(*shape: int) -> Floats:
        return shared.setdefault(shape, np.zeros(shape))

    numbers = {int(n): np.arange(n) for n in np.unique(x.size)}
    uses: list[list[Use]] = [[] for _ in x.size]
    begin, entry, amount = x.begin.tolist(), x.entry.tolist(), x.amount.tolist()
    amounts = x.amounts.astype(np.float64)
    for u, (v, (a, b)) in enumerate(zip(x.owner.tolist(), x.span.tolist(), strict=True)):
        uses[v].append(Use(a, b, amounts[amount[u] : amount[u + 1]]))
    variables = [
        Variable(str(v), x.cost[begin[v] : begin[v + 1]], nothing(n), tuple(uses[v]))
        for v, n in enumerate(x.size.tolist())
    ]
    base = x.base.astype(np.float64)
    fixed = tuple(Use(t, t + 1, base[t : t + 1]) for t in np.flatnonzero(base).tolist())
    variables.append(Variable("fixed", nothing(1), nothing(1), fixed))
    pairs = []
    for p, (a, b) in enumerate(zip(x.first.tolist(), x.second.tolist(), strict=True)):
        n, m = int(x.size[a]), int(x.size[b])
        table = x.cells[entry[p] : entry[p + 1]].reshape(n, m)
        pairs.append(Pair(a, b, numbers[n], numbers[m], table, nothing(n, m)))
    return Problem(tuple(variables), tuple(pairs), len(base))
