"""A choice problem as a network, with classes that determine each other's choices made one.

Tables of programs mostly say that two neighbours choose alike: each row allows at most one of the
other's. Such rows stand or fall together; what is joined so (a component of the graph of rows) is
one row of one variable. Arc consistency goes on meanwhile over the other tables that forbid
something. All is done by operations on whole arrays, table shape by table shape, so that problems
of millions of entries take a fraction of the seconds that steps on single variables take.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from tapestry_egg.extract.gym.choices.choices import ChoiceProblem

from .network import Flags, Floats, Ints, Network, Uses, joined, offsets, ranges


class Unanswerable(Exception):
    """No row is left for a class, counted from 0; says of which and why."""

    def __init__(self, one: int, why: str) -> None:
        super().__init__(why)
        self.one, self.why = one, why


@dataclass(frozen=True)
class Aligned:
    """A network, and for every class of the problem the variable it follows, and how.

    Variables from `len(network)` on have one row and are no part of it.
    """

    network: Network
    variable: Ints  # [classes]
    start: Ints  # [classes + 1] where a class's entries of `row` begin
    row: Ints  # [rows of variables] the row within the class, for each row of its variable
    counts: dict[str, int]  # what was done how often

    def lift(self, x: Ints) -> Ints:
        """The row within its class for every class, from one row per variable."""
        more = int(self.variable.max(initial=-1)) + 1 - len(x)
        return self.row[self.start[:-1] + np.pad(x, (0, more))[self.variable]]

    def first(self, i: int) -> int:
        """The first class that follows a variable."""
        return int(np.flatnonzero(self.variable == i)[0])


def aligned(
    problem: ChoiceProblem,
    steps: Iterable[str],
    objective: int,
    limit: Ints,
    spread: int = 0,
) -> Aligned:
    """The network of one objective within a limit per time, or lower ones by up to `spread`.

    Of the `steps`, it takes consistency, merge and fixed; the last takes variables of one row out,
    what they occupy being taken off the limit (where `memory` is among the steps as well).
    Raises Unanswerable where a class has no row left.
    """
    rows = _Rows(problem)
    rows.settle(steps)
    start, row, variable = rows.followers()
    counts = {k: n for k, n in rows.counts.items() if n}
    ends = _Ends(problem, start, row, variable)
    cost, tables = ends.costs(objective, "fixed" in steps)
    network = Network(ends.sizes, cost, *tables, ends.uses(limit))
    if {"fixed", "memory"} <= set(steps) and not network.wide:
        network, variable = _without_single(
            replace(network, uses=_binding(network, spread)), variable
        )
    return Aligned(network, variable, start, row, counts)


@dataclass
class _Block:
    """Tables of one shape that forbid something: [tables, rows of first, rows of second]."""

    first: Ints  # [tables] variables
    second: Ints  # [tables] variables
    legal: Flags  # [tables, rows of first, rows of second]


class _Rows:
    """Which rows may be chosen, and which are chosen together."""

    def __init__(self, problem: ChoiceProblem) -> None:
        self.sizes = np.diff(problem.node_start)
        self.begin = problem.node_start
        empty = np.flatnonzero(self.sizes == 0)
        if len(empty):
            raise Unanswerable(int(empty[0]), "")
        self.owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        self.alive = problem.allowed.copy()
        self.counts = {"forbidden rows": int((~self.alive).sum())}
        # Rows that stand or fall together, by the number of their component; and so classes.
        self.component = np.arange(len(self.alive))
        self.together = np.arange(len(self.sizes))
        self.links: list[tuple[Ints, Ints]] = []
        self.touched = np.ones(len(self.sizes), dtype=bool)  # classes whose tables are to be seen
        self.blocks = _blocks(problem, self.sizes)
        self._complain("forbidden rows")

    def settle(self, steps: Iterable[str]) -> None:
        """Drop rows and join classes until nothing changes."""
        consistency, merge = "consistency" in steps, "merge" in steps
        while (consistency or merge) and self.touched.any():
            before, links = self.alive.copy(), len(self.links)
            visited = [self._visited(block, consistency, merge) for block in self.blocks]
            self.blocks = [block for block in visited if len(block.first)]
            joins = len(self.links) > links
            if joins:
                self._join()
            elif self.links:
                self._fell()
            self.touched[:] = False
            self.touched[self.owner[before & ~self.alive]] = True
            if joins:  # tables between classes that are one now say less
                for block in self.blocks:
                    one = self._one(block.first, block.second)
                    self.touched[block.first[one]] = True
            self._complain("inconsistent rows")
        dropped = len(self.alive) - int(self.alive.sum()) - self.counts["forbidden rows"]
        self.counts["inconsistent rows"] = dropped
        self.counts["merged"] = len(self.sizes) - int(self.together.max(initial=-1)) - 1

    def _visited(self, block: _Block, consistency: bool, merge: bool) -> _Block:
        """Drop rows without support and link the ends of matchings; what is left to visit."""
        seen = np.flatnonzero(self.touched[block.first] | self.touched[block.second])
        if not len(seen):
            return block
        a = self.begin[block.first[seen]][:, None] + np.arange(block.legal.shape[1])
        b = self.begin[block.second[seen]][:, None] + np.arange(block.legal.shape[2])
        legal = block.legal[seen] & self.alive[a][:, :, None] & self.alive[b][:, None, :]
        one = self._one(block.first[seen], block.second[seen])
        if one.any():  # of two classes that are one, rows meet only those that they are one with
            meets = self.component[a][:, :, None] == self.component[b][:, None, :]
            legal &= meets | ~one[:, None, None]
        by_first, by_second = legal.sum(axis=2), legal.sum(axis=1)
        if consistency:
            self.alive[a[by_first == 0]] = False
            self.alive[b[by_second == 0]] = False
        if not merge:
            return block
        match = (by_first.max(axis=1) <= 1) & (by_second.max(axis=1) <= 1)
        if not consistency:  # rows without support are there
            match &= ((by_first > 0) == self.alive[a]).all(axis=1)
            match &= ((by_second > 0) == self.alive[b]).all(axis=1)
        t, i, j = np.nonzero(legal[match])
        if not len(t):
            return block
        self.links.append((a[match][t, i], b[match][t, j]))
        rest = np.ones(len(block.first), dtype=bool)
        rest[seen[match]] = False
        return _Block(block.first[rest], block.second[rest], block.legal[rest])

    def _one(self, first: Ints, second: Ints) -> Flags:
        """Which of some pairs of classes have been joined, directly or by others."""
        return self.together[first] == self.together[second]

    def _join(self) -> None:
        """Rows that links lead between are one; if two of a class are, they are none."""
        a, b = (joined([link[k] for link in self.links], np.int64) for k in range(2))
        self.links = [(a, b)]
        self.component = _parts(len(self.alive), a, b)
        self.together = _parts(len(self.sizes), self.owner[a], self.owner[b])
        order = np.lexsort((self.component, self.owner))
        owner, component = self.owner[order], self.component[order]
        twice = (owner[1:] == owner[:-1]) & (component[1:] == component[:-1])
        self.alive[order[1:][twice]] = False
        self._fell()

    def _fell(self) -> None:
        """Rows fall with one that stands or falls with them."""
        dead = np.zeros(int(self.component.max(initial=-1)) + 1, dtype=bool)
        dead[self.component[~self.alive]] = True
        self.alive = ~dead[self.component]

    def _complain(self, why: str) -> None:
        """Raise Unanswerable where a class has no row."""
        if not len(self.sizes):
            return
        none = np.flatnonzero(~np.logical_or.reduceat(self.alive, self.begin[:-1]))
        if len(none):
            raise Unanswerable(int(none[0]), why)

    def followers(self) -> tuple[Ints, Ints, Ints]:
        """(start, row, variable) of `Aligned`; a component's first class gives the order."""
        kept = np.flatnonzero(self.alive)
        _, leader = np.unique(self.together, return_index=True)
        number = np.argsort(np.argsort(leader))  # variables in the order of their first classes
        variable = number[self.together]
        leads = np.zeros(len(self.sizes), dtype=bool)
        leads[leader] = True
        rank = np.zeros(len(self.alive), dtype=np.int64)
        first = kept[leads[self.owner[kept]]]
        rank[self.component[first]] = np.arange(len(first))
        order = kept[np.lexsort((rank[self.component[kept]], self.owner[kept]))]
        count = np.bincount(self.owner[kept], minlength=len(self.sizes))
        return offsets(count), order - self.begin[self.owner[order]], variable


def _parts(count: int, first: Ints, second: Ints) -> Ints:
    """The connected component of each of some points, by links between them."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    ones = np.ones(len(first), dtype=np.int8)
    graph = coo_matrix((ones, (first, second)), shape=(count, count))
    return connected_components(graph, directed=False)[1].astype(np.int64)


def _blocks(problem: ChoiceProblem, sizes: Ints) -> list[_Block]:
    """Tables that forbid something, by shape."""
    pairs = problem.pairs
    if not len(pairs):
        return []
    which = ~np.logical_and.reduceat(pairs.legal, pairs.start[:-1])
    n, m = sizes[pairs.first], sizes[pairs.second]
    out = []
    for group in _grouped(which, n, m):
        shape = int(n[group[0]]), int(m[group[0]])
        at = pairs.start[group][:, None] + np.arange(shape[0] * shape[1])
        legal = pairs.legal[at].reshape(-1, *shape)
        out.append(_Block(pairs.first[group], pairs.second[group], legal))
    return out


class _Ends:
    """A problem's costs, tables and uses, seen from the variables that its classes follow."""

    def __init__(self, problem: ChoiceProblem, start: Ints, row: Ints, variable: Ints) -> None:
        self.problem, self.start, self.row, self.variable = problem, start, row, variable
        self.lengths = np.diff(start)
        self.sizes = np.zeros(int(variable.max(initial=-1)) + 1, dtype=np.int64)
        self.sizes[variable] = self.lengths
        self.rows = offsets(self.sizes)
        #: For every entry of `row`, the node that it stands for.
        self.node = row + np.repeat(problem.node_start[:-1], self.lengths)

    def costs(self, objective: int, fixed: bool) -> tuple[Floats, tuple[Ints, Ints, Floats]]:
        """(costs of rows, tables as in `Network`); a table with an end of one row goes
        into the other end's costs, if that is asked."""
        problem, pairs = self.problem, self.problem.pairs
        own = problem.costs[objective].astype(np.float64)
        own[~problem.allowed] = np.inf
        at = ranges(self.rows[self.variable], self.lengths)
        cost = self._by_row(at, own[self.node])
        parts: list[tuple[Ints, Ints, Floats]] = []
        if len(pairs):
            values = pairs.costs[objective].astype(np.float64)
            values[~pairs.legal] = np.inf
            ends = np.sort((self.variable[pairs.first], self.variable[pairs.second]), axis=0)
            cost += self._inside(np.flatnonzero(ends[0] == ends[1]), values)
            for group in _grouped(ends[0] != ends[1], *self.sizes[ends]):
                a, b, tables = self._summed(group, values)
                if fixed and 1 in tables.shape[1:]:
                    end = a if tables.shape[2] == 1 else b
                    to = self.rows[end][:, None] + np.arange(max(tables.shape[1:]))
                    cost += self._by_row(to.ravel(), tables.ravel())
                else:
                    parts.append((a, b, tables.ravel()))
        first, second = (joined([part[k] for part in parts], np.int64) for k in range(2))
        return cost, (first, second, joined([part[2] for part in parts], np.float64))

    def _inside(self, pair: Ints, values: Floats) -> Floats:
        """Costs of rows by tables between two classes of one variable."""
        pairs = self.problem.pairs
        a, b = pairs.first[pair], pairs.second[pair]
        lengths = self.lengths[a]
        i = self.row[ranges(self.start[a], lengths)]
        j = self.row[ranges(self.start[b], lengths)]
        width = np.diff(self.problem.node_start)[b]
        cell = np.repeat(pairs.start[pair], lengths) + i * np.repeat(width, lengths) + j
        to = ranges(self.rows[self.variable[a]], lengths)
        return self._by_row(to, values[cell])

    def _by_row(self, row: Ints, values: Floats) -> Floats:
        """Sums of values over the rows that they belong to."""
        return np.bincount(row, values, int(self.rows[-1])).astype(np.float64)

    def _summed(self, pair: Ints, values: Floats) -> tuple[Ints, Ints, Floats]:
        """Tables of one shape between variables, the one of lower number first; those between the
        same two are added: (first, second, [tables, rows of first, rows of second])."""
        pairs = self.problem.pairs
        a, b = pairs.first[pair], pairs.second[pair]
        one, width = np.ones(len(pair), dtype=np.int64), np.diff(self.problem.node_start)[b]
        turned = self.variable[a] > self.variable[b]
        a, b = np.where(turned, b, a), np.where(turned, a, b)
        high, low = np.where(turned, one, width), np.where(turned, width, one)
        n, m = int(self.lengths[a[0]]), int(self.lengths[b[0]])
        i = self.row[self.start[a][:, None] + np.arange(n)] * high[:, None]
        j = self.row[self.start[b][:, None] + np.arange(m)] * low[:, None]
        cell = (pairs.start[pair][:, None] + i)[:, :, None] + j[:, None, :]
        tables = values[cell]
        key = self.variable[a] * len(self.sizes) + self.variable[b]
        order = np.argsort(key, kind="stable")
        fresh = np.flatnonzero(np.diff(key[order], prepend=-1))
        if len(fresh) < len(order):
            tables = np.add.reduceat(tables[order], fresh, axis=0)
            key = key[order][fresh]
        return key // len(self.sizes), key % len(self.sizes), tables

    def uses(self, limit: Ints) -> Uses:
        """What the rows of every variable occupy: one use per class, if its nodes are there at the
        same times."""
        usage = self.problem.usage
        none = np.zeros(0, dtype=np.int64)
        if not len(limit):
            return Uses(none, none, none, np.zeros(1, dtype=np.int64), none, limit)
        lower, upper = usage.lower[self.node], usage.upper[self.node]
        amount = np.where(upper > lower, usage.amount[self.node], 0)
        owner = np.repeat(np.arange(len(self.variable)), self.lengths)
        seen = np.flatnonzero(amount)
        spans = np.unique(np.stack((owner[seen], lower[seen], upper[seen])), axis=1)
        spans = spans[:, np.argsort(self.variable[spans[0]], kind="stable")]
        lengths = self.lengths[spans[0]]
        entry = ranges(self.start[spans[0]], lengths)
        same = lower[entry] == np.repeat(spans[1], lengths)
        same &= upper[entry] == np.repeat(spans[2], lengths)
        amounts = np.where(same, amount[entry], 0)
        return Uses(self.variable[spans[0]], spans[1], spans[2], offsets(lengths), amounts, limit)


def _grouped(which: Flags, n: Ints, m: Ints) -> list[Ints]:
    """Numbers of some tables, by shape."""
    at = np.flatnonzero(which)
    key = n[at] * (int(m.max(initial=0)) + 1) + m[at]
    order = np.argsort(key, kind="stable")
    cuts = np.flatnonzero(np.diff(key[order])) + 1
    return [at[group] for group in np.split(order, cuts) if len(group)]


def _binding(net: Network, spread: int) -> Uses:
    """Uses of variables at times that may bind, one for each stretch; what every row occupies is
    taken off the limits."""
    uses = net.uses
    if not len(uses):
        return uses
    order = np.lexsort((uses.upper, uses.lower, uses.variable))
    keys = np.stack((uses.variable, uses.lower, uses.upper))[:, order]
    fresh = np.append(True, (np.diff(keys) != 0).any(axis=0))
    keys, part = keys[:, fresh], np.cumsum(fresh) - 1
    lengths = net.sizes[keys[0]]
    start = offsets(lengths)
    entry = ranges(uses.start[:-1][order], net.sizes[uses.variable[order]])
    amount = np.zeros(int(start[-1]), dtype=np.int64)
    np.add.at(amount, ranges(start[part], lengths[part]), uses.amount[entry])
    least = np.minimum.reduceat(amount, start[:-1])
    amount -= np.repeat(least, lengths)
    most = np.maximum.reduceat(amount, start[:-1])
    room = uses.room - _sums(keys, least, len(uses.room))
    binds = offsets((_sums(keys, most, len(room)) > room - spread).astype(np.int64))
    kept = np.flatnonzero((most > 0) & (binds[keys[2]] > binds[keys[1]]))
    amount = amount[ranges(start[kept], lengths[kept])]
    variable, lower, upper = keys[:, kept]
    return Uses(variable, lower, upper, offsets(lengths[kept]), amount, room)


def _sums(keys: Ints, amount: Ints, times: int) -> Ints:
    """What stretches [variable, lower, upper] occupy at every time."""
    steps = np.zeros(times + 1, dtype=np.int64)
    np.add.at(steps, keys[1], amount)
    np.subtract.at(steps, keys[2], amount)
    return np.cumsum(steps[:-1])


def _without_single(net: Network, variable: Ints) -> tuple[Network, Ints]:
    """The network without its variables of one row, which have no tables and occupy nothing; they
    are numbered last."""
    single = (net.sizes == 1) & np.isfinite(net.cost[net.rows[:-1]])
    order = np.argsort(single, kind="stable")
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    kept = ~np.repeat(single, net.sizes)
    return (
        Network(
            net.sizes[~single],
            net.cost[kept],
            number[net.first],
            number[net.second],
            net.cells,
            replace(net.uses, variable=number[net.uses.variable]),
            float(net.cost[~kept].sum()),
        ),
        number[variable],
    )
