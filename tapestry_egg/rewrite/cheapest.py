"""Cheapest: of the programs that the classes hold, the one that takes least on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.target import Target
from tapestry_egg.rewrite.terms.explore import BUDGET, Explored
from tapestry_egg.rewrite.terms.rebuild import Rebuilt, Terms, as_written, cost_of, rebuild
from tapestry_egg.rewrite.terms.requests import Applied
from tapestry_egg.schedule.one_device import least_seconds
from tapestry_egg.work import Work

from .folded_program import Folded, class_weights

#: Calls that it takes, per operation, to build a program anew and to price it. No measurement of
#: the number is kept.
PER_OPERATION = 40


@dataclass(frozen=True)
class Cheapest:
    """A graph, its price, what it chooses among the terms, and whether there was time to try all
    that looked worth it."""

    built: Rebuilt
    seconds: float
    pick: list[int]
    finished: bool
    explored: Explored  # what `pick` chooses among
    untried: int = 0  # kinds of change that looked worth a trial and were given none


def cheapest(
    graph: BlockGraph,
    explored: Explored,
    target: Target,
    price: Callable[[BlockGraph], float],
    folded: Folded | None = None,
    passes: float = 0.0,
    first: Sequence[int] | None = None,
    work: Work | None = None,
    until: float = BUDGET.choice,
) -> Cheapest:
    """The cheapest of the graphs that compute what this one does, as far as tried, from the choice
    `first` on, or from this one.

    `price` gives the seconds of a graph, and those of so many `passes` over all that is stored;
    where the graph is folded, those of the program that it stands for. What is tried counts as
    `work`; nothing new is when that has come halfway to `until`.
    """
    work, late = work or Work(), False
    most = (work.units + until) / 2.0
    terms, catalogue = explored.terms, explored.catalogue
    least = [least_seconds(a.signature, target, passes) for a in catalogue]
    roots = terms.roots(graph)
    picked = list(first or as_written(terms, least))
    best = rebuild(graph, terms, catalogue, picked) or Rebuilt(graph, ())
    seconds = price(best.graph)

    def judge(pick: list[int]) -> bool:
        nonlocal best, seconds, picked, late
        if late := late or work.units >= most:
            return False
        work.add(PER_OPERATION * len(graph.operations), 0)
        built = rebuild(graph, terms, catalogue, pick)
        if built is None:
            return False
        found = price(built.graph)
        if found >= seconds:
            return False
        best, seconds, picked = built, found, list(pick)
        return True

    counts = class_weights(folded, terms) if folded else None
    chosen = choose(terms, least, roots, judge, counts, work, most, picked)
    if chosen.finished:
        without = bypass(terms, catalogue, least, roots, chosen.pick, judge)
        if without != chosen.pick:  # what only those read that are computed without it now
            chosen = choose(terms, least, roots, judge, counts, work, most, without)
    finished = chosen.finished and not late
    return Cheapest(best, seconds, picked, finished, explored, chosen.untried)


# Choose: of every class of equal values, the operation to compute it by.
#
# Starts from the program as it was written. A change lets one class, or all classes that share a
# newly built operation, be computed in another way; changes of one kind (the same signatures in the
# place of the same others: one per layer, say) are made together. An optimistic sum over the live
# operations says which kinds are worth a trial, and a judge that sees the whole program decides.
# Trees would not do: the cost of a residual network as a tree overflows any number, and sharing is
# what merged contractions live on.


# Of these numbers no measurement is kept.

# A change must save this share of the total; below it is the noise of adding floats.
_LEAST = 1e-9
# Rounds of such changes: each begins from what the last one chose.
_ROUNDS = 3
# Kinds of change that are put before the judge in one round. Those that are left in the end are
# counted (`Choice.untried`), and the front's notes say so.
_TRIALS = 12
# A kind is put before the judge, who prices the whole program, if it saves this share by the sum:
# a hundredth of what a form must save to be searched (`form.LEAST_GAIN`).
_WORTH = 2e-4


# A sum counts nothing for what may be computed in its reader, be it stored: of programs of so many
# operations, kinds of change are put before the judge as well that only leave some out.
_FEW = 64


#: class -> position of a node: a change to make
Move = Mapping[int, int]


@dataclass(frozen=True)
class Choice:
    """For every class the position of the chosen node among its nodes."""

    pick: list[int]
    finished: bool = True  # whether `most` units of work were enough
    untried: int = 0  # kinds of change that looked worth a trial in the end and were given none


def choose(
    terms: Terms,
    seconds: Sequence[float],
    roots: Sequence[int],
    judge: Callable[[list[int]], bool],
    weights: Sequence[float] | None = None,
    work: Work | None = None,
    most: float = float("inf"),
    first: Sequence[int] | None = None,
) -> Choice:
    """The choice that no trial has bettered, from `first` on; without it from the program as it is
    written.

    `seconds[s]` is the least time that signature s can add, `roots` are the classes that must be
    computed; `judge` is shown a choice and says whether it betters the last one it accepted. What
    is live never depends on itself. `weights[c]` says how often class c is computed in the program
    that this one stands for; those that are not stay as they are written. Nothing new is tried
    when `work`, to which the changes made are added, has come to `most` units.
    """
    first = list(first or as_written(terms, seconds))
    work = work or Work()
    state = _State(terms, seconds, first, weights or [1.0] * len(terms.nodes), work)
    for c in roots:
        state.add(c)
    kinds = _kinds(terms, first, state.weights)
    refused: set[int] = set()

    def promising() -> list[int] | None:
        """Kinds that the judge has not refused and whose sum says that they save enough, the best
        first, or, of small programs, that less is computed for the same; None where the work is
        done."""
        gains = []
        for number, moves in enumerate(kinds):
            if work.units >= most:
                return None
            before, live = state.total, state.live
            done = state.make(moves) if number not in refused else []
            gains.append((before - state.total, live - state.live, -number))
            state.undo(done, before)
        least, few = _WORTH * state.total, state.live <= _FEW
        gains.sort(reverse=True)
        return [-negated for gain, less, negated in gains if gain > least or (few and less > 0)]

    rounds = 0
    while True:
        found = promising()
        if found is None:
            return Choice(state.pick, finished=False)
        if rounds == _ROUNDS:
            return Choice(state.pick, untried=len(found))
        rounds, accepted = rounds + 1, False
        for number in found[:_TRIALS]:
            if work.units >= most:
                return Choice(state.pick, finished=False)
            before = state.total
            done = state.make(kinds[number])
            if not done:
                continue
            if judge(state.pick):
                accepted = True
            else:
                refused.add(number)
                state.undo(done, before)
        if not accepted:
            return Choice(state.pick, untried=len(found[_TRIALS:]))


def _kinds(terms: Terms, pick: list[int], weights: Sequence[float]) -> list[list[Move]]:
    """Changes to try, those of one kind together: of one class, and of all users of a new class."""
    new = [pick[c] < 0 or terms.nodes[c][pick[c]].value < 0 for c in range(len(terms.nodes))]
    below: dict[int, frozenset[int]] = {}

    def reaches(c: int) -> frozenset[int]:
        """New classes that a new class is built on, itself included."""
        if c not in below:
            below[c] = frozenset((c,))  # for a class that depends on itself
            if pick[c] >= 0:
                down = [reaches(d) for d in terms.nodes[c][pick[c]].operands if new[d]]
                below[c] = frozenset((c,)).union(*down)
        return below[c]

    single: list[dict[int, int]] = []
    shared: dict[int, dict[int, int]] = {}
    for c, nodes in enumerate(terms.nodes):
        if len(nodes) < 2 or not weights[c]:
            continue
        for k, n in enumerate(nodes):
            single.append({c: k})
            if n.value < 0 and not new[c]:
                for d in {e for o in n.operands if new[o] for e in reaches(o)}:
                    shared.setdefault(d, {}).setdefault(c, k)
    together = [move for _, move in sorted(shared.items()) if len(move) > 1]
    kinds: dict[tuple[tuple[int, int], ...], dict[tuple[tuple[int, int], ...], None]] = {}
    for move in together + single:
        kind = sorted(
            (terms.nodes[c][k].signature, terms.nodes[c][pick[c]].signature if pick[c] >= 0 else -1)
            for c, k in move.items()
        )
        kinds.setdefault(tuple(kind), {})[tuple(sorted(move.items()))] = None
    return [[dict(move) for move in moves] for moves in kinds.values()]


class _State:
    """The current choice, how many live operations read each class, and the total seconds."""

    def __init__(
        self,
        terms: Terms,
        seconds: Sequence[float],
        pick: list[int],
        weights: Sequence[float],
        work: Work,
    ) -> None:
        self.work = work
        self.nodes, self.weights = terms.nodes, weights
        self.costs = [[cost_of(n, seconds) for n in nodes] for nodes in terms.nodes]
        self.pick = list(pick)
        self.uses = [0] * len(terms.nodes)
        self.total, self.live = 0.0, 0

    def make(self, moves: Sequence[Move]) -> list[Move]:
        """Make those changes that lower the total, or compute less for the same, and leave no
        cycle; how to undo them."""
        done: list[Move] = []
        for move in moves:
            live = {c: k for c, k in move.items() if self.uses[c] and self.pick[c] != k}
            operands = [d for c, k in live.items() for d in self.nodes[c][k].operands]
            if not live or any(self.pick[d] < 0 for d in operands):
                continue
            before, old = self.total, {c: self.pick[c] for c in live}
            least, several = _LEAST * before, self.live
            self._switch(live)
            as_much = self.total <= (1.0 + _WORTH) * before and self.live < several
            if (self.total < before - least or as_much) and not self._cyclic(live):
                done.append(old)
            else:
                self._switch(old)
                self.total = before
        return done

    def undo(self, done: Sequence[Move], total: float) -> None:
        """Take changes back; `total` is what the total was before them."""
        for old in reversed(done):
            self._switch(old)
        if done:
            self.total = total

    def add(self, c: int) -> None:
        """Count one more reader of a class."""
        uses, stack, steps = self.uses, [c], 0
        while stack:
            d = stack.pop()
            steps += 1
            uses[d] += 1
            if uses[d] == 1:
                k = self.pick[d]
                self.live += 1
                self.total += self.weights[d] * self.costs[d][k]
                stack.extend(self.nodes[d][k].operands)
        self.work.add(steps, 0)

    def _drop(self, c: int) -> None:
        uses, stack, steps = self.uses, [c], 0
        while stack:
            d = stack.pop()
            steps += 1
            uses[d] -= 1
            if uses[d] == 0:
                k = self.pick[d]
                self.live -= 1
                self.total -= self.weights[d] * self.costs[d][k]
                stack.extend(self.nodes[d][k].operands)
        self.work.add(steps, 0)

    def _switch(self, move: Move) -> None:
        old = {c: self.pick[c] for c in move}
        live = [c for c in move if self.uses[c]]
        for c, k in move.items():
            self.pick[c] = k
        self.work.add(4 * len(move), 0)
        for c in live:
            k = self.pick[c]
            saved = self.costs[c][old[c]] - self.costs[c][k]
            self.total -= self.weights[c] * saved
            for d in self.nodes[c][k].operands:
                self.add(d)
        for c in live:
            for d in self.nodes[c][old[c]].operands:
                self._drop(d)

    def _cyclic(self, start: Move) -> bool:
        """Whether a changed class depends on itself."""
        nodes, pick = self.nodes, self.pick
        done: dict[int, bool] = {}  # False: open
        stack = list(start)  # ~c: all below c is done
        while stack:
            c = stack.pop()
            if c < 0:
                done[~c] = True
            elif c not in done:
                operands = nodes[c][pick[c]].operands
                done[c] = not operands
                if operands:
                    stack.append(~c)
                for d in operands:
                    known = done.get(d)
                    if known is None:
                        stack.append(d)
                    elif not known:
                        return True
        return False


# Bypass: choices that never make some large value, although every single change would add work.
#
# `choose` changes one kind of operation at a time. A value that several others read (the logits of
# a loss, which its derivative reads again) goes only when all of them are computed without it: each
# change alone adds what it computes and saves nothing. Here all are made at once, for values that
# are larger than what they are made of and whose operands other operations can read instead.


def bypass(
    terms: Terms,
    catalogue: Sequence[Applied],
    seconds: Sequence[float],
    roots: Sequence[int],
    pick: Sequence[int],
    judge: Callable[[list[int]], bool],
) -> list[int]:
    """The choice `pick`, without the large values that the judge would rather not have made.

    `seconds[s]` is the least time that signature s can add; `roots` are the classes that must be
    computed; the judge says whether a choice betters the last one that it accepted.
    """
    current = list(pick)
    for classes in _candidates(terms, catalogue):
        trial = _without(terms, seconds, roots, current, classes)
        if trial is not None and trial != current and judge(trial):
            current = trial
    return current


def _candidates(terms: Terms, catalogue: Sequence[Applied]) -> list[list[int]]:
    """Values larger than their operands, made by kernels that do not fuse, those of one signature
    together; and only where a rule has made another kernel that reads one of their operands."""
    instead: dict[int, set[str]] = {}
    for nodes in terms.nodes:
        for n in nodes:
            if n.value < 0 <= n.signature and catalogue[n.signature].signature.fusion == "kernel":
                for d in n.operands:
                    instead.setdefault(d, set()).add(catalogue[n.signature].kernel)
    found: dict[int, list[int]] = {}
    for c, nodes in enumerate(terms.nodes):
        for n in nodes:
            if n.value < 0 or n.signature < 0:
                continue
            entry = catalogue[n.signature]
            large = entry.output.nbytes > sum(t.nbytes for t in entry.inputs)
            others = set().union(*(instead.get(d, ()) for d in n.operands)) - {entry.kernel}
            if large and others and entry.signature.fusion == "kernel":
                found.setdefault(n.signature, []).append(c)
    order = sorted(found, key=lambda s: (-catalogue[s].output.nbytes * len(found[s]), s))
    return [found[s] for s in order]


def _without(
    terms: Terms,
    seconds: Sequence[float],
    roots: Sequence[int],
    pick: Sequence[int],
    banned: Iterable[int],
) -> list[int] | None:
    """The choice in which all that is needed is computed without some classes; None if it cannot.

    What is not affected stays as it is. An affected class takes the cheapest of the first nodes
    found whose operands do without; what exists already costs nothing.
    """
    forbidden = set(banned)
    readers: list[set[int]] = [set() for _ in terms.nodes]
    picking: list[set[int]] = [set() for _ in terms.nodes]
    for c, nodes in enumerate(terms.nodes):
        for k, n in enumerate(nodes):
            for d in n.operands:
                readers[d].add(c)
                if k == pick[c]:
                    picking[d].add(c)
    affected = set(forbidden)
    stack = list(forbidden)
    while stack:
        for c in picking[stack.pop()] - affected:
            affected.add(c)
            stack.append(c)
    # A class for which nothing has been chosen has no way to be computed yet.
    affected |= {c for c, k in enumerate(pick) if k < 0}
    made = list(pick)
    extra: dict[int, float] = {}  # affected class -> seconds that it adds to what reads it
    waiting = sorted(affected - forbidden)
    while waiting:
        changed: set[int] = set()
        for c in waiting:
            ways = [
                (sum(extra.get(d, 0.0) for d in n.operands) + seconds[n.signature], k)
                for k, n in enumerate(terms.nodes[c])
                if n.signature >= 0 and affected.isdisjoint(n.operands)
            ]
            if ways:
                own = any(n.value >= 0 for n in terms.nodes[c])
                cost, made[c] = min(ways)
                extra[c] = 0.0 if own else cost
                changed.add(c)
        affected -= changed
        waiting = sorted({r for c in changed for r in readers[c]} & (affected - forbidden))
    needed, stack = set(roots), list(roots)
    while stack:
        c = stack.pop()
        if c in affected:
            return None
        for d in terms.nodes[c][made[c]].operands:
            if d not in needed:
                needed.add(d)
                stack.append(d)
    return made
