"""Simulated annealing over the nodes of active classes.

One move gives one active class another node. What that activates or frees is followed through
counts of users, so a move costs as much as what it changes. Where classes may form a cycle, those
that become active take nodes that lead down an order of derivation: a cycle that a move closes
then passes the class that was moved, where it is found. (Kirkpatrick, Gelatt and Vecchi,
"Optimization by simulated annealing", 1983.)
"""

from __future__ import annotations

import math
import random
import time

from .closure import cyclic_components
from .form import AndOr
from .greedy import Chosen, bottom_up

# Rounds from warm to cold; the first tells whether there is something to gain.
_ROUNDS = 3

# Seconds for the square of the number of nodes: what is small is settled by exact methods at once.
_PATIENCE = 2.5e-6


def anneals(form: AndOr) -> bool:
    """Whether a form can be annealed: costs below zero leave no order of derivation."""
    return not (form.negative() and cyclic_components(form))


class Annealing:
    """A choice that changes move by move; `value` is its scaled cost without the constant."""

    def __init__(self, form: AndOr, chosen: Chosen, seed: int) -> None:
        self.form = form
        self.random = random.Random(seed)
        cost = form.cost
        # Classes that are not active keep a node for when they are.
        self.node = {
            c: chosen.get(c, min(m, key=lambda n: (cost[n], len(form.needs[n]), n)))
            for c, m in form.members.items()
        }
        self.alone: dict[int, float] = {}
        self.users = dict.fromkeys(form.members, 0)
        self.needs = {n: tuple(sorted(needs)) for n, needs in form.needs.items()}
        self.value = 0
        for r in sorted(form.roots):
            self.value += self._use((r,))
        # What a class costs by itself, for choosing its node when it becomes active; its keys stand
        # in an order of derivation.
        self.alone = {} if form.negative() else _alone(form)
        self.cyclic = cyclic_components(form)
        self.rank = {c: i for i, c in enumerate(self.alone)}
        self.options = {
            c: self._down(c) if c in self.cyclic else m for c, m in form.members.items()
        }
        self.open = [c for c in sorted(form.members) if len(form.members[c]) > 1]

    def _use(self, classes: tuple[int, ...], afresh: bool = False) -> int:
        """Add a user to classes; what becomes active with that costs this much.

        With `afresh`, classes that become active take the node that seems cheapest now.
        """
        users, node, needs, cost = self.users, self.node, self.needs, self.form.cost
        afresh = afresh and bool(self.alone)
        total = 0
        todo = list(classes)
        while todo:
            c = todo.pop()
            users[c] += 1
            if users[c] == 1:
                if afresh and len(self.form.members[c]) > 1:
                    node[c] = self._cheapest(c)
                n = node[c]
                total += cost[n]
                todo.extend(needs[n])
        return total

    def _down(self, c: int) -> list[int]:
        """The nodes of a class that need only what is derived before it, of its component."""
        rank, cyclic = self.rank, self.cyclic
        return [
            n
            for n in self.form.members[c]
            if all(rank[d] < rank[c] for d in self.needs[n] if cyclic.get(d) == cyclic[c])
        ]

    def _cheapest(self, c: int) -> int:
        users, needs, cost, alone = self.users, self.needs, self.form.cost, self.alone
        best, least = -1, math.inf
        for n in self.options[c]:
            price: float = cost[n]
            for d in needs[n]:
                if not users[d]:
                    price += alone[d]
            if price < least:
                best, least = n, price
        return best

    def _free(self, classes: tuple[int, ...]) -> int:
        """Take a user from classes; what stops being active with that cost this much."""
        users, node, needs, cost = self.users, self.node, self.needs, self.form.cost
        total = 0
        todo = list(classes)
        while todo:
            c = todo.pop()
            users[c] -= 1
            if not users[c]:
                n = node[c]
                total += cost[n]
                todo.extend(needs[n])
        return total

    def _loops(self, c: int) -> bool:
        """Whether an active class needs itself in the end."""
        component, cyclic, node = self.cyclic[c], self.cyclic, self.node
        seen: set[int] = set()
        todo = [c]
        while todo:
            for d in self.needs[node[todo.pop()]]:
                if d == c:
                    return True
                if cyclic.get(d) == component and d not in seen:
                    seen.add(d)
                    todo.append(d)
        return False

    def move(self, c: int, n: int, afresh: bool = True) -> int | None:
        """Give an active class another node; returns what that adds to the cost.

        The move back, not afresh, restores the choice: classes keep their node while inactive.
        None, with nothing changed, where the choice would have a cycle.
        """
        old = self.node[c]
        self.node[c] = n
        more = self.form.cost[n] - self.form.cost[old]
        more += self._use(self.needs[n], afresh)
        if c in self.cyclic and self._loops(c):
            self._free(self.needs[n])
            self.node[c] = old
            return None
        more -= self._free(self.needs[old])
        self.value += more
        return more

    def chosen(self) -> Chosen:
        """The nodes of the active classes."""
        return {c: n for c, n in self.node.items() if self.users[c]}

    def run(self, seconds: float) -> tuple[int, Chosen]:
        """Cool down over some time, or a third of it if that gains nothing.

        Returns the best value on the way (with the constant) and its choice.
        """
        start = best = self.value
        found = self.chosen()
        if not self.open:
            return best + self.form.constant[0], found
        seconds = min(seconds, _PATIENCE * len(self.form.home) ** 2)
        started = time.perf_counter()
        members, users = self.form.members, self.users
        draw, pick = self.random.random, self.random.choice
        steps = [abs(v) for v in self.form.cost.values() if v]
        high = 0.5 * sum(steps) / len(steps) if steps else 1.0
        temperature = high
        count = 0
        while True:
            if count % 256 == 0:
                share = (time.perf_counter() - started) / max(seconds, 1e-9)
                if share >= 1.0 or (share * _ROUNDS >= 1.0 and best == start):
                    break
                temperature = high * 0.02 ** ((share * _ROUNDS) % 1.0)
            count += 1
            c = pick(self.open)
            if not users[c]:
                continue
            old, n = self.node[c], pick(members[c])
            if n == old:
                continue
            more = self.move(c, n)
            if more is None:
                continue
            if more > 0 and draw() >= math.exp(-more / temperature):
                self.move(c, old, afresh=False)
            elif self.value < best:
                best, found = self.value, self.chosen()
        return best + self.form.constant[0], found


def _alone(form: AndOr) -> dict[int, float]:
    """The least tree cost of each class."""
    price = {n: float(v) for n, v in form.cost.items()}
    chosen = bottom_up(form, price, form.parents(), every=True) or {}
    found: dict[int, float] = {}
    for c in chosen:  # in the order of derivation
        n = chosen[c]
        found[c] = price[n] + sum(found[d] for d in form.needs[n])
    return found
