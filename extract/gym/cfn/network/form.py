"""The working form of a cost function network: what reductions change, and the ways out of it.

Rows are dropped, variables merged and taken out; the form keeps what is needed to `lift` an answer
of the network that is left to one of the problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from .network import Flags, Floats, Ints, Network, Uses, joined, offsets

#: (lower, upper, amount of every row)
Use = tuple[int, int, Ints]


@dataclass(frozen=True)
class Lift:
    """From one row per variable of a network to one row per class of the problem."""

    classes: int
    variables: tuple[int, ...]  # of the network -> of the graph
    # (variable, others, its row by theirs), each before any of its others that is here too
    removed: tuple[tuple[int, tuple[int, ...], Ints], ...]
    members: dict[int, list[tuple[int, Ints]]]  # variable -> (class, its row by the variable's)

    def __call__(self, x: Ints) -> Ints:
        """The row within its class for every class."""
        rows = dict(zip(self.variables, x.tolist(), strict=True))
        for variable, others, best in reversed(self.removed):
            rows[variable] = int(best[tuple(rows[j] for j in others)])
        out = np.zeros(self.classes, dtype=np.int64)
        for variable, followers in self.members.items():
            for c, row in followers:
                out[c] = row[rows[variable]]
        return out


class Form:
    """Costs, uses and tables of one objective, as lists that steps change in place.

    `changed` collects the variables that a change may have opened to further steps.
    """

    def __init__(
        self, cost: list[Floats], uses: list[list[Use]], limit: Ints, name: Callable[[int], str]
    ) -> None:
        """Costs of rows and uses of every variable, and the limit at every time; without tables."""
        self.cost = cost
        self.uses = uses
        self.limit = limit.copy()
        self.given = limit
        self.times = len(limit)
        self.name = name
        self.count = len(cost)
        self.alive = [True] * self.count
        self.members = {i: [(i, np.arange(len(c)))] for i, c in enumerate(self.cost)}
        # Minimised away: (others, row by theirs). The others may still lose rows or be merged, so
        # these arrays follow; `followed` says which of them look at a variable.
        self.removed: dict[int, tuple[tuple[int, ...], Ints]] = {}
        self.followed: list[set[int]] = [set() for _ in range(self.count)]
        self.constant = 0.0
        self.near: list[set[int]] = [set() for _ in range(self.count)]
        self.tables: dict[tuple[int, int], Floats] = {}
        self.changed: set[int] = set()

    @classmethod
    def of_network(cls, net: Network, kept: Flags, name: Callable[[int], str] = str) -> Self:
        """A network with only some of its rows, at least one of each variable."""
        cuts = net.rows[1:-1]
        of = [np.flatnonzero(part) for part in np.split(kept, cuts)] if len(net) else []
        all_of = (np.add.reduceat(kept, net.rows[:-1]) == net.sizes).tolist() if of else []
        cost = np.split(net.cost, cuts) if len(net) else []
        cost = [c if a else c[r] for c, r, a in zip(cost, of, all_of, strict=True)]
        uses: list[list[Use]] = [[] for _ in of]
        u = net.uses
        amounts = np.split(u.amount, u.start[1:-1]) if len(u) else []
        spans = zip(u.variable.tolist(), u.lower.tolist(), u.upper.tolist(), strict=True)
        for (i, a, b), amount in zip(spans, amounts, strict=True):
            uses[i].append((a, b, amount if all_of[i] else amount[of[i]]))
        form = cls(cost, uses, u.room, name)
        form.members = {i: [(i, r)] for i, r in enumerate(of)}
        form.constant = net.constant
        start = offsets(net.sizes[net.first] * net.sizes[net.second])
        cells = np.split(net.cells, start[1:-1]) if len(net.first) else []
        wide = net.sizes[net.second].tolist()
        ends = zip(net.first.tolist(), net.second.tolist(), wide, cells, strict=True)
        for a, b, width, flat in ends:
            table = flat.reshape(-1, width)
            if not (all_of[a] and all_of[b]):
                table = table[of[a]][:, of[b]]
            form.join(a, b, table)
        return form

    def table(self, a: int, b: int) -> Floats:
        """Costs [rows of a, rows of b]."""
        return self.tables[a, b] if a < b else self.tables[b, a].T

    def put(self, a: int, b: int, table: Floats) -> None:
        if a < b:
            self.tables[a, b] = table
        else:
            self.tables[b, a] = table.T

    def join(self, a: int, b: int, table: Floats) -> None:
        """Add a table to what there is between two variables."""
        if b in self.near[a]:
            self.put(a, b, self.table(a, b) + table)
        else:
            self.put(a, b, table)
            self.near[a].add(b)
            self.near[b].add(a)

    def part(self, a: int, b: int) -> None:
        del self.tables[min(a, b), max(a, b)]
        self.near[a].discard(b)
        self.near[b].discard(a)

    def keep(self, i: int, rows: Ints) -> None:
        """Keep only some rows of a variable."""
        self.cost[i] = self.cost[i][rows]
        self.uses[i] = [(a, b, amount[rows]) for a, b, amount in self.uses[i]]
        self.members[i] = [(c, row[rows]) for c, row in self.members[i]]
        for v in self.followed[i]:
            others, best = self.removed[v]
            self.removed[v] = others, best.take(rows, axis=others.index(i))
        for j in self.near[i]:
            self.put(i, j, self.table(i, j)[rows])
        self.changed.add(i)
        self.changed |= self.near[i]

    def merge(self, gone: int, into: int, row: Ints) -> None:
        """Variable `gone` takes row `row[r]` whenever `into` takes r."""
        table = self.table(into, gone)
        cost = self.cost[into] + self.cost[gone][row] + table[np.arange(len(row)), row]
        self.cost[into] = cost
        self.part(into, gone)
        self.uses[into].extend((a, b, amount[row]) for a, b, amount in self.uses[gone])
        self.members[into].extend((c, own[row]) for c, own in self.members.pop(gone))
        for v in self.followed[gone]:
            self._follow(v, gone, into, row)
        self.followed[into] |= self.followed[gone]
        self.followed[gone] = set()
        for j in sorted(self.near[gone]):
            rest = self.table(gone, j)[row]
            self.part(gone, j)
            self.join(into, j, rest)
            self.changed.add(j)
        self.alive[gone] = False
        self.uses[gone] = []
        self.changed.add(into)

    def _follow(self, v: int, gone: int, into: int, row: Ints) -> None:
        """Let a variable minimised away look at `into` where it looked at `gone`."""
        others, best = self.removed[v]
        at = others.index(gone)
        best = best.take(row, axis=at)
        if into in others:
            self.removed[v] = (into,), best.diagonal().copy()
        else:
            self.removed[v] = (*others[:at], into, *others[at + 1 :]), best

    def leave(self, i: int, others: tuple[int, ...], best: Ints) -> None:
        """Take a variable out: it takes row `best[rows of its neighbours]`."""
        for j in others:
            self.part(i, j)
            self.followed[j].add(i)
        self.alive[i] = False
        self.removed[i] = others, best

    def living(self) -> list[int]:
        return [i for i in range(self.count) if self.alive[i]]

    # What is left

    def size(self) -> tuple[int, int, int, int]:
        """Variables, rows, tables, cells of tables."""
        living = self.living()
        rows = sum(len(self.cost[i]) for i in living)
        return len(living), rows, len(self.tables), sum(t.size for t in self.tables.values())

    def lift(self) -> Lift:
        """The way back from rows of the network."""
        removed = tuple((v, *of) for v, of in self.removed.items())
        return Lift(self.count, tuple(self.living()), removed, self.members)

    def network(self, times: Ints) -> Network:
        """What is left, as arrays, with some times only; see `kept_times`."""
        living = self.living()
        number = {i: k for k, i in enumerate(living)}
        keys = sorted(self.tables)
        uses = [(number[i], *u) for i in living for u in self.uses[i]]
        spans = np.array([(a, b) for _, a, b, _ in uses], dtype=np.int64).reshape(-1, 2)
        spans = np.searchsorted(times, spans)
        seen = (spans[:, 1] > spans[:, 0]).tolist()
        uses = [u for u, s in zip(uses, seen, strict=True) if s]
        spans = spans[seen]
        return Network(
            sizes=np.array([len(self.cost[i]) for i in living], dtype=np.int64),
            cost=joined([self.cost[i] for i in living], np.float64),
            first=np.array([number[a] for a, _ in keys], dtype=np.int64),
            second=np.array([number[b] for _, b in keys], dtype=np.int64),
            cells=joined([self.tables[k].ravel() for k in keys], np.float64),
            uses=Uses(
                np.array([u[0] for u in uses], dtype=np.int64),
                spans[:, 0],
                spans[:, 1],
                offsets([len(u[3]) for u in uses]),
                joined([u[3] for u in uses], np.int64),
                self.limit[times],
            ),
            constant=self.constant,
        )

    def kept_times(self) -> Ints:
        """Times that matter: of those between which nothing begins or nothing ends, only the one
        with more present matters, unless less is free at the other."""
        begins = np.zeros(self.times + 1, dtype=bool)
        ends = np.zeros(self.times + 1, dtype=bool)
        for i in self.living():
            for a, b, _ in self.uses[i]:
                begins[a] = ends[b] = True
        room = self.limit.tolist()
        kept: list[tuple[int, bool, bool]] = []  # (time, begun, ended since the one before)
        begun = ended = False
        for t, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            if t == self.times:
                break
            begun, ended = begun or begin, ended or end
            while kept and not ended and room[kept[-1][0]] >= room[t]:
                _, before_begun, ended = kept.pop()
                begun = begun or before_begun
            if (kept and not begun and room[t] >= room[kept[-1][0]]) or (not kept and not begun):
                continue
            kept.append((t, begun, ended))
            begun = ended = False
        return np.array([t for t, _, _ in kept], dtype=np.int64)
