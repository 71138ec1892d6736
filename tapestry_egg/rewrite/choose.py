"""Choose: of every class of equal values, the operation to compute it by.

Starts from the program as it was written. A change lets one class, or all classes that share a
newly built operation, be computed in another way; changes of one kind (the same signatures in the
place of the same others: one per layer, say) are made together. An optimistic sum over the live
operations says which kinds are worth a trial, and a judge that sees the whole program decides.
Trees would not do: the cost of a residual network as a tree overflows any number, and sharing is
what merged contractions live on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tapestry_egg.rewrite.terms.terms import Terms, as_written, cost_of
from tapestry_egg.work import Work

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
        first; None where the work is done."""
        gains = []
        for number, moves in enumerate(kinds):
            if work.units >= most:
                return None
            before = state.total
            done = state.make(moves) if number not in refused else []
            gains.append((before - state.total, -number))
            state.undo(done, before)
        least = _WORTH * state.total
        return [-negated for gain, negated in sorted(gains, reverse=True) if gain > least]

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
        self.total = 0.0

    def make(self, moves: Sequence[Move]) -> list[Move]:
        """Make those changes that lower the total and leave no cycle; how to undo them."""
        done: list[Move] = []
        for move in moves:
            live = {c: k for c, k in move.items() if self.uses[c] and self.pick[c] != k}
            operands = [d for c, k in live.items() for d in self.nodes[c][k].operands]
            if not live or any(self.pick[d] < 0 for d in operands):
                continue
            before, old = self.total, {c: self.pick[c] for c in live}
            self._switch(live)
            if self.total < before - _LEAST * before and not self._cyclic(live):
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
