"""Exact reductions: a choice problem becomes a smaller cost function network.

Each step keeps at least one best answer, or shows that there is none:

* consistency: a row that no row of some neighbour allows is dropped (arc consistency), and so is a
  row that does not fit even if all else takes its least memory;
* fixed: a variable of one row is added to its neighbours;
* decompose: a table that is a sum of a column and a row is added to the two variables;
* merge: where each row of one variable allows exactly one of another, the other follows from it;
* memory: what is occupied whatever is chosen is taken off the limits; times at which nothing can
  exceed the limit are left out, and so are those at which no more is there than at another;
* dominance: a row is dropped if another is nowhere worse, in cost with every neighbour's row, and
  in memory;
* series: a variable of at most two neighbours and no memory is minimised away.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import ExtractError
from ..choices import ChoiceProblem
from .network import Flags, Floats, Ints, Network, Uses, joined, offsets

#: All steps, as `reduce` takes them.
STEPS = ("consistency", "fixed", "decompose", "merge", "memory", "dominance", "series")

# Dominance compares rows pairwise for every row of a neighbour: at most so many entries at once.
_COMPARED = 1 << 23

# A variable is minimised away if the table over it and its neighbours has at most so many entries.
_SERIES = 1 << 17

_ROUNDS = 12

#: (lower, upper, amount of every row)
Use = tuple[int, int, Ints]


@dataclass(frozen=True)
class Infeasible:
    """Why there is no answer: at which time the limit is exceeded, and by how much at least."""

    reason: str
    time: int = -1
    least: int = -1


@dataclass(frozen=True)
class Reduced:
    """A network, the way back to the problem it came from, and what the steps did."""

    network: Network
    lift: Lift
    log: tuple[str, ...]
    infeasible: Infeasible | None = None


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


class _Empty(Exception):
    def __init__(self, why: Infeasible) -> None:
        super().__init__(why.reason)
        self.why = why


def reduce(
    problem: ChoiceProblem,
    steps: Iterable[str] = STEPS,
    objective: int = 0,
    limits: Ints | None = None,
) -> Reduced:
    """Reduce a problem by the named steps, for one objective and its limits (or other ones).

    Raises ExtractError for a problem in which choices need others.
    """
    if not problem.all_active or problem.children.size or problem.provides.size:
        raise ExtractError(
            "not a cost function network: choices need others", where=problem.name or "problem"
        )
    graph = _Graph(problem, objective, limits, frozenset(steps))
    try:
        graph.run()
    except _Empty as e:
        empty = Uses(*(np.zeros(0, dtype=np.int64),) * 3, np.zeros(1, dtype=np.int64), *_NONE)
        network = Network(_NONE[0], np.zeros(0), *_NONE, np.zeros(0), empty)
        return Reduced(network, Lift(0, (), (), {}), graph.report(), e.why)
    return Reduced(graph.network(), graph.lift(), graph.report())


_NONE = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


class _Graph:
    def __init__(
        self, problem: ChoiceProblem, objective: int, limits: Ints | None, steps: frozenset[str]
    ) -> None:
        self.problem = problem
        self.steps = steps
        start = problem.node_start
        self.count = len(problem.classes)
        costs = problem.costs[objective].astype(np.float64)
        costs[~problem.allowed] = np.inf
        cuts = start[1:-1]
        self.cost: list[Floats] = list(np.split(costs, cuts)) if self.count else []
        self.uses: list[list[Use]] = [[] for _ in range(self.count)]
        self._occupy(limits)
        self.alive = [True] * self.count
        self.members = {i: [(i, np.arange(len(c)))] for i, c in enumerate(self.cost)}
        # Minimised away: (others, row by theirs). The others may still lose rows or be merged, so
        # these arrays follow; `followed` says which of them look at a variable.
        self.removed: dict[int, tuple[tuple[int, ...], Ints]] = {}
        self.followed: list[set[int]] = [set() for _ in range(self.count)]
        self.constant = 0.0
        self.near: list[set[int]] = [set() for _ in range(self.count)]
        self.tables: dict[tuple[int, int], Floats] = {}
        pairs = problem.pairs
        if len(pairs):
            cells = pairs.costs[objective].astype(np.float64)
            cells[~pairs.legal] = np.inf
            tables = np.split(cells, pairs.start[1:-1])
            ends = zip(pairs.first.tolist(), pairs.second.tolist(), tables, strict=True)
            for a, b, table in ends:
                self.join(a, b, table.reshape(len(self.cost[a]), len(self.cost[b])))
        self.before = self._size()
        self.counts: dict[str, int] = {}
        self.changed: set[int] = set()

    def _occupy(self, limits: Ints | None) -> None:
        """The uses of every class: usually one, its nodes being there at the same times."""
        problem, usage = self.problem, self.problem.usage
        self.times = problem.times() if usage else 0
        self.limit = np.zeros(0, dtype=np.int64)
        if not self.times:
            self.times = 0
            return
        given = usage.limits if limits is None else np.asarray(limits, dtype=np.int64)
        self.limit = np.broadcast_to(given, (self.times,)).copy()
        self.given = self.limit.copy()
        there = usage.upper > usage.lower
        start = problem.node_start.tolist()
        lower, upper = usage.lower.tolist(), usage.upper.tolist()
        for i, (a, b) in enumerate(itertools.pairwise(start)):
            amount = np.where(there[a:b], usage.amount[a:b], 0)
            if not amount.any():
                continue
            spans = {(lower[n], upper[n]) for n in range(a, b) if there[n]}
            for low, high in sorted(spans):
                same = (usage.lower[a:b] == low) & (usage.upper[a:b] == high)
                self.uses[i].append((low, high, np.where(same, amount, 0)))

    # Tables

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

    def note(self, what: str, count: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + count

    def living(self) -> list[int]:
        return [i for i in range(self.count) if self.alive[i]]

    # The order of steps

    def run(self) -> None:
        self._check_domains()
        self.changed = set(range(self.count))
        dirty = set(self.changed)
        if "consistency" in self.steps:
            self.consistency(self.changed)
        for _ in range(_ROUNDS):
            while self.changed:
                todo, self.changed = self.changed, set()
                dirty |= todo
                for i in sorted(todo):
                    self.simplify(i)
                if "consistency" in self.steps:
                    self.consistency({i for i in self.changed if self.alive[i]})
            if "memory" in self.steps:
                self.memory()
            if "dominance" in self.steps:
                for i in sorted(dirty | self.changed):
                    if self.alive[i]:
                        self.dominance(i)
            dirty = set()
            if "series" in self.steps:
                self.series()
            if not self.changed:
                break

    def _check_domains(self) -> None:
        for i, cost in enumerate(self.cost):
            if not len(cost):
                name = self.problem.classes[i]
                raise _Empty(Infeasible(f"class {name} has no node to choose"))
        for i, cost in enumerate(self.cost):
            if not np.isfinite(cost).all():
                self._drop(i, np.isfinite(cost), "forbidden rows")

    def _drop(self, i: int, good: Flags, what: str) -> bool:
        """Keep the good rows of a variable; whether that changed anything."""
        if good.all():
            return False
        if not good.any():
            names = ", ".join(self.problem.classes[c] for c, _ in self.members[i][:3])
            raise _Empty(Infeasible(f"no choice is left for class {names}: {what}"))
        self.note(what, int((~good).sum()))
        self.keep(i, np.flatnonzero(good))
        return True

    def consistency(self, todo: Iterable[int]) -> None:
        """Arc consistency, starting from some variables."""
        waiting = set(todo)
        while waiting:
            i = waiting.pop()
            good = np.ones(len(self.cost[i]), dtype=bool)
            for j in self.near[i]:
                good &= np.isfinite(self.table(i, j)).any(axis=1)
            if self._drop(i, good, "inconsistent rows"):
                waiting |= self.near[i]

    def simplify(self, i: int) -> None:
        """What the tables of one variable allow: fixed, decompose, merge."""
        for j in sorted(self.near[i]):
            if not self.alive[i]:
                return
            if j not in self.near[i]:
                continue
            table = self.table(i, j)
            if 1 in table.shape:
                if "fixed" in self.steps:
                    self._fold(i, j, table)
                continue
            finite = np.isfinite(table)
            if finite.all():
                if "decompose" in self.steps:
                    self._decompose(i, j, table)
                continue
            if "merge" not in self.steps:
                continue
            by_i = bool((finite.sum(axis=1) == 1).all())
            by_j = bool((finite.sum(axis=0) == 1).all())
            if by_i and by_j:  # either way: into the larger, so that each class moves seldom
                by_i = self._weight(i) >= self._weight(j)
            if by_i:
                self._merge(j, i, finite.argmax(axis=1))
            elif by_j:
                self._merge(i, j, finite.argmax(axis=0))

    def _weight(self, i: int) -> int:
        return len(self.members[i]) + len(self.near[i])

    def _fold(self, i: int, j: int, table: Floats) -> None:
        if table.shape[0] == 1:
            self.cost[j] = self.cost[j] + table[0]
        else:
            self.cost[i] = self.cost[i] + table[:, 0]
        self.part(i, j)
        for k in (i, j):
            self._drop(k, np.isfinite(self.cost[k]), "inconsistent rows")
        self.changed |= {i, j}
        self.note("fixed neighbours")

    def _decompose(self, i: int, j: int, table: Floats) -> None:
        rise = table - table[:1]
        if not (rise == rise[:, :1]).all() or not (table == rise[:, :1] + table[:1]).all():
            return
        self.cost[i] = self.cost[i] + rise[:, 0]
        self.cost[j] = self.cost[j] + table[0]
        self.part(i, j)
        self.changed |= {i, j}
        self.note("tables decomposed")

    def _merge(self, gone: int, into: int, row: Ints) -> None:
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
        self.note("merged")

    def _follow(self, v: int, gone: int, into: int, row: Ints) -> None:
        """Let a variable minimised away look at `into` where it looked at `gone`."""
        others, best = self.removed[v]
        at = others.index(gone)
        best = best.take(row, axis=at)
        if into in others:
            self.removed[v] = (into,), best.diagonal().copy()
        else:
            self.removed[v] = (*others[:at], into, *others[at + 1 :]), best

    def memory(self) -> None:
        """Take what is always there off the limits; forget uses that cannot matter."""
        if not self.times:
            return
        living = self.living()
        self._reachable(living)
        for i in living:
            self._free(i)
        self._misfits(living)
        most = np.zeros(self.times + 1, dtype=object)
        for i in living:
            for a, b, amount in self.uses[i]:
                most[a] += int(amount.max())
                most[b] -= int(amount.max())
        binding = np.cumsum(most)[:-1] > self.limit
        before = offsets(binding.astype(np.int64))
        for i in living:
            self.uses[i] = [u for u in self.uses[i] if before[u[1]] > before[u[0]]]

    def _free(self, i: int) -> None:
        """Take what every row of a variable occupies off the limits, and add uses of one time."""
        sums: dict[tuple[int, int], Ints] = {}
        apart: list[Use] = []  # too large to add
        for a, b, amount in self.uses[i]:
            least = int(amount.min())
            if least:
                self.limit[a:b] -= least
                amount = amount - least
            if not amount.any():
                continue
            known = sums.get((a, b))
            if known is not None and int(known.max()) + int(amount.max()) >= 1 << 62:
                apart.append((a, b, amount))
            else:
                sums[a, b] = amount if known is None else known + amount
        self.uses[i] = [(a, b, amount) for (a, b), amount in sums.items()] + apart

    def _reachable(self, living: Sequence[int]) -> None:
        """Raise _Empty where even the least of all uses exceeds a limit, at the worst such time."""
        steps = np.zeros(self.times + 1, dtype=object)
        for i in living:
            for a, b, amount in self.uses[i]:
                steps[a] += int(amount.min())
                steps[b] -= int(amount.min())
        over = np.cumsum(steps)[:-1] - self.limit
        if not (over > 0).any():
            return
        time = int(over.argmax())
        limit = int(self.given[time])
        need = limit + int(over[time])
        reason = f"at time {time} no choice uses less than {need}; the limit is {limit}"
        raise _Empty(Infeasible(reason, time, need))

    def _misfits(self, living: Sequence[int]) -> None:
        """Drop rows that exceed a limit while all else takes its least."""
        spans = np.array([u[:2] for i in living for u in self.uses[i]], dtype=np.int64)
        if not len(spans):
            return
        padded = np.append(self.limit, 0)
        room = iter(np.minimum.reduceat(padded, spans.ravel())[::2].tolist())
        for i in living:
            good = np.ones(len(self.cost[i]), dtype=bool)
            for _, _, amount in self.uses[i]:
                good &= amount <= next(room)
            self._drop(i, good, "rows that exceed a limit")
        self._reachable(living)
        for i in living:
            self._free(i)

    def dominance(self, i: int) -> None:
        """Drop rows that another row replaces at no cost, whatever the neighbours take."""
        n = len(self.cost[i])
        tables = [self.table(i, j) for j in sorted(self.near[i])]
        if n == 1 or any(n * t.size > _COMPARED for t in tables):
            return
        # rise[x, y]: how much more y costs than x, at worst
        rise = self.cost[i][None, :] - self.cost[i][:, None]
        for table in tables:
            forbidden = ~np.isfinite(table)
            with np.errstate(invalid="ignore"):  # a row that is forbidden throughout is no worse
                more = table[None, :, :] - table[:, None, :]
                if forbidden.any():
                    more[np.broadcast_to(forbidden[:, None, :], more.shape)] = -np.inf
                rise += more.max(axis=2)
        better = rise <= 0
        for _, _, amount in self.uses[i]:
            better &= amount[None, :] <= amount[:, None]
        np.fill_diagonal(better, False)
        if not better.any():
            return
        good = np.ones(n, dtype=bool)
        for x in range(n):
            if (better[x] & good).any():
                good[x] = False
        self._drop(i, good, "dominated rows")

    def series(self) -> None:
        """Minimise away variables of at most two neighbours that no limit sees."""
        waiting = set(self.living())
        while waiting:
            i = waiting.pop()
            if not self.alive[i] or self.uses[i] or len(self.near[i]) > 2:
                continue
            others = tuple(sorted(self.near[i]))
            sizes = [len(self.cost[j]) for j in others]
            if len(others) == 2 and len(self.cost[i]) * sizes[0] * sizes[1] > _SERIES:
                continue
            total = self.cost[i].reshape(-1, *(1,) * len(others))
            for k, j in enumerate(others):
                shape = [len(self.cost[i]), *(1,) * len(others)]
                shape[k + 1] = sizes[k]
                total = total + self.table(i, j).reshape(shape)
            for j in others:
                self.part(i, j)
            self.alive[i] = False
            self.removed[i] = others, np.asarray(total.argmin(axis=0))
            for j in others:
                self.followed[j].add(i)
            least = total.min(axis=0)
            if not others:
                self.constant += float(least)
            elif len(others) == 1:
                self.cost[others[0]] = self.cost[others[0]] + least
                self._drop(others[0], np.isfinite(self.cost[others[0]]), "inconsistent rows")
            else:
                self.join(others[0], others[1], least)
            self.note("minimised away")
            self.changed |= set(others)
            waiting |= set(others)

    # What is left

    def _size(self) -> tuple[int, int, int, int]:
        living = self.living() if hasattr(self, "alive") else list(range(self.count))
        rows = sum(len(self.cost[i]) for i in living)
        return len(living), rows, len(self.tables), sum(t.size for t in self.tables.values())

    def report(self) -> tuple[str, ...]:
        """Sizes before and after, and what each step did."""
        names = ("variables", "rows", "tables", "cells")
        sizes = zip(names, self.before, self._size(), strict=True)
        out = [f"{name} {a} -> {b}" for name, a, b in sizes]
        return (*out, *(f"{what}: {n}" for what, n in sorted(self.counts.items())))

    def lift(self) -> Lift:
        removed = tuple((v, *of) for v, of in self.removed.items())
        return Lift(self.count, tuple(self.living()), removed, self.members)

    def network(self) -> Network:
        living = self.living()
        number = {i: k for k, i in enumerate(living)}
        keys = sorted(self.tables)
        uses = [(number[i], *u) for i in living for u in self.uses[i]]
        times = self._times()
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

    def _times(self) -> Ints:
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
