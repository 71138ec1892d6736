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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym.choices.choices import ChoiceProblem

from .alignment import Aligned, Unanswerable, aligned
from .form import Form, Lift, Use
from .network import Flags, Floats, Ints, Network, Uses, offsets

#: All steps, as `reduce` takes them.
STEPS = ("consistency", "fixed", "decompose", "merge", "memory", "dominance", "series")

# Dominance compares rows pairwise for every row of a neighbour: at most so many entries at once.
_COMPARED = 1 << 23

# A variable is minimised away if the table over it and its neighbours has at most so many entries.
_SERIES = 1 << 17

_ROUNDS = 12


@dataclass(frozen=True)
class Infeasible:
    """Why there is no answer: at which time the limit is exceeded, and by how much at least."""

    reason: str
    time: int = -1
    least: int = -1


@dataclass(frozen=True)
class Reduced:
    """A network, the way back to the problem it came from, and what the steps did.

    The network's time t is the problem's `times[t]`. At some time every answer occupies `taken`.
    """

    network: Network
    lift: Callable[[Ints], Ints]
    log: tuple[str, ...]
    times: Ints
    infeasible: Infeasible | None = None
    taken: int = 0


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
    begun = begin(problem, steps, objective, limits)
    return begun if isinstance(begun, Reduced) else begun.reduced()


@dataclass(frozen=True)
class Begun:
    """What the first steps leave of a problem, which take a small part of the time."""

    problem: ChoiceProblem
    steps: tuple[str, ...]
    limit: Ints  # as it was given, at every time
    aligned: Aligned
    spread: int = 0

    @property
    def network(self) -> Network:
        return self.aligned.network

    def lift(self, x: Ints) -> Ints:
        """The row within its class for every class."""
        return self.aligned.lift(x)

    def reduced(self, over: Callable[[], bool] = lambda: False) -> Reduced:
        """The rest of the steps, or as many of them as there are until it is `over`."""
        problem, pairs, net = self.problem, self.problem.pairs, self.network
        graph = _Steps.of_network(net, np.ones(len(net.cost), dtype=bool), self._name)
        before = len(problem.classes), len(problem.nodes), len(pairs), len(pairs.legal)
        graph.begin(self.steps, self.limit, before, self.aligned.counts, over, self.spread)
        found = _reduced(graph)
        return replace(found, lift=lambda x: self.lift(found.lift(x)))

    def _name(self, variable: int) -> str:
        return self.problem.classes[self.aligned.first(variable)]


def begin(
    problem: ChoiceProblem,
    steps: Iterable[str] = STEPS,
    objective: int = 0,
    limits: Ints | None = None,
    spread: int = 0,
) -> Begun | Reduced:
    """Begin to `reduce`; the end of it where there is no answer.

    What is left then holds for all limits that are lower by at most `spread`, at all times alike,
    and not below what is `taken` in any case.
    """
    if not problem.all_active or problem.children.size or problem.provides.size:
        raise ExtractError(
            "not a cost function network: choices need others", where=problem.name or "problem"
        )
    limit, steps = _limit(problem, limits), tuple(steps)
    try:
        found = aligned(problem, steps, objective, limit, spread)
        return Begun(problem, steps, limit, found, spread)
    except Unanswerable as e:
        name = problem.classes[e.one]
        why = f"class {name} has no node to choose"
        if e.why:
            why = f"no choice is left for class {name}: {e.why}"
        return _nothing(Infeasible(why), ())


def narrow(net: Network, kept: Flags, steps: Iterable[str] = STEPS) -> Reduced:
    """Reduce a network of which only some rows are kept, at least one of each variable.

    The lift leads to one row per variable of the network, numbered as there.
    """
    graph = _Steps.of_network(net, kept)
    graph.begin(steps, net.uses.room, graph.size(), {})
    return _reduced(graph)


def _reduced(graph: _Steps) -> Reduced:
    try:
        graph.run()
    except _Empty as e:
        return _nothing(e.why, graph.report())
    times = graph.kept_times()
    taken = int((graph.given - graph.limit).max(initial=0))
    return Reduced(graph.network(times), graph.lift(), graph.report(), times, taken=taken)


_NONE = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _nothing(why: Infeasible, log: tuple[str, ...]) -> Reduced:
    empty = Uses(*(np.zeros(0, dtype=np.int64),) * 3, np.zeros(1, dtype=np.int64), *_NONE)
    network = Network(_NONE[0], np.zeros(0), *_NONE, np.zeros(0), empty)
    return Reduced(network, Lift(0, (), (), {}), log, _NONE[0], why)


def _limit(problem: ChoiceProblem, limits: Ints | None) -> Ints:
    """The limit at every time; empty where there is none."""
    usage = problem.usage
    times = problem.times() if usage else 0
    if not times:
        return np.zeros(0, dtype=np.int64)
    given = usage.limits if limits is None else np.asarray(limits, dtype=np.int64)
    return np.broadcast_to(given, (times,)).copy()


class _Steps(Form):
    def begin(
        self,
        steps: Iterable[str],
        given: Ints,
        before: tuple[int, ...],
        counts: dict[str, int],
        over: Callable[[], bool] = lambda: False,
        spread: int = 0,
    ) -> None:
        """Set the steps, the limits as they were given, what there was and was done before, what
        ends it early, and by how much limits may be lower."""
        self.over = over
        self.spread = spread
        self.steps = frozenset(steps)
        self.given = given
        self.before = before
        self.counts = dict(counts)

    def note(self, what: str, count: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + count

    def report(self) -> tuple[str, ...]:
        """Sizes before and after, and what each step did."""
        names = ("variables", "rows", "tables", "cells")
        sizes = zip(names, self.before, self.size(), strict=True)
        out = [f"{name} {a} -> {b}" for name, a, b in sizes]
        return (*out, *(f"{what}: {n}" for what, n in sorted(self.counts.items())))

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
                    if self.over():
                        return
                    self.simplify(i)
                if "consistency" in self.steps:
                    self.consistency({i for i in self.changed if self.alive[i]})
            if "memory" in self.steps:
                self.memory()
            if "dominance" in self.steps:
                for i in sorted(dirty | self.changed):
                    if self.over():
                        return
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
                name = self.name(i)
                raise _Empty(Infeasible(f"class {name} has no node to choose"))
        for i, cost in enumerate(self.cost):
            if not np.isfinite(cost).all():
                self._drop(i, np.isfinite(cost), "forbidden rows")

    def _drop(self, i: int, good: Flags, what: str) -> bool:
        """Keep the good rows of a variable; whether that changed anything."""
        if good.all():
            return False
        if not good.any():
            names = ", ".join(self.name(c) for c, _ in self.members[i][:3])
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
                self.merge(j, i, finite.argmax(axis=1))
                self.note("merged")
            elif by_j:
                self.merge(i, j, finite.argmax(axis=0))
                self.note("merged")

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
        binding = np.cumsum(most)[:-1] > self.limit - self.spread
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
        while waiting and not self.over():
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
            self.leave(i, others, np.asarray(total.argmin(axis=0)))
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
