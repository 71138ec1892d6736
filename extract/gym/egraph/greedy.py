"""Upper bounds: choices built class by class, and improved by building them again.

`bottom_up` is optimal for the sum over the tree that a choice unfolds to (Knuth, "A generalization
of Dijkstra's algorithm", 1977); `greedy_dag` counts shared classes once when it compares the nodes
of a class, as extraction-gym's extractor of that name does; `improve` builds choices under prices
that make classes in use cheaper, with seeded noise.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Mapping

from .closure import components
from .form import AndOr

Chosen = dict[int, int]  # class -> node


def bottom_up(
    form: AndOr,
    price: Mapping[int, float],
    parents: Mapping[int, list[int]],
    every: bool = False,
) -> Chosen | None:
    """The choice of least price summed over its tree; acyclic. None where a root cannot be had.

    Prices of nodes must not be negative. With `every`, classes that no root needs have their nodes
    too, and all stand in an order of derivation.
    """
    waits = {n: len(needs) for n, needs in form.needs.items()}
    below = dict.fromkeys(form.needs, 0.0)
    heap = [(price[n], n) for n, k in waits.items() if k == 0]
    heapq.heapify(heap)
    chosen: Chosen = {}
    home = form.home
    while heap:
        value, n = heapq.heappop(heap)
        c = home[n]
        if c in chosen:
            continue
        chosen[c] = n
        for p in parents[c]:
            waits[p] -= 1
            below[p] += value
            if waits[p] == 0 and home[p] not in chosen:
                heapq.heappush(heap, (price[p] + below[p], p))
    if any(r not in chosen for r in form.roots):
        return None
    return chosen if every else form.trimmed(chosen)


def greedy_dag(form: AndOr, deadline: float) -> Chosen | None:
    """Per class the node whose whole DAG is cheapest, given what its children hold already.

    None where a root cannot be had, or time is up before one was.
    """
    parents = form.parents()
    cost = form.cost
    held: dict[int, tuple[dict[int, int], int, int]] = {}  # class -> (costs of classes, sum, node)
    todo = deque(n for n, needs in form.needs.items() if not needs)
    waiting = set(todo)
    count = 0
    while todo:
        count += 1
        if count % 64 == 0 and time.perf_counter() > deadline:
            break
        n = todo.popleft()
        waiting.discard(n)
        c, needs = form.home[n], form.needs[n]
        if any(d not in held or c in held[d][0] for d in needs):
            continue
        best = held[c][1] if c in held else None
        if len(needs) == 1 and best is not None:
            (d,) = needs
            if held[d][1] + cost[n] >= best:
                continue
        found: dict[int, int] = {}
        for d in sorted(needs, key=lambda d: -len(held[d][0])):
            found = {**held[d][0], **found} if found else dict(held[d][0])
        found[c] = cost[n]
        total = sum(found.values())
        if best is None or total < best:
            held[c] = (found, total, n)
            for p in parents[c]:
                if p not in waiting:
                    waiting.add(p)
                    todo.append(p)
    if any(r not in held for r in form.roots):
        return None
    chosen = {c: n for c, (_, _, n) in held.items()}
    return form.trimmed(chosen) if acyclic(form, chosen) else None


def acyclic(form: AndOr, chosen: Chosen) -> bool:
    """Whether a choice, as far as the roots need it, has no cycle."""
    edges = {c: form.needs[n] for c, n in form.trimmed(chosen).items()}
    return len(set(components(edges).values())) == len(edges)


def cost_of(form: AndOr, chosen: Chosen) -> int:
    """The scaled cost of a choice, with the constant."""
    cost = form.cost
    return form.constant + sum(cost[n] for n in chosen.values())


class Improvement:
    """Rebuilds choices under changing prices, and keeps the best."""

    def __init__(self, form: AndOr, seed: int) -> None:
        self.form = form
        self.random = random.Random(seed)
        self.parents = form.parents()
        self.best: Chosen | None = None
        self.value = 0
        unit = max((abs(v) for v in form.cost.values()), default=1) or 1
        # Negative costs cannot be prices; their nodes are then as good as free.
        self.price = {n: max(v, 0) / unit for n, v in form.cost.items()}

    def consider(self, chosen: Chosen | None) -> bool:
        """Take a choice if it is the best so far."""
        if chosen is None:
            return False
        value = cost_of(self.form, chosen)
        if self.best is not None and value >= self.value:
            return False
        self.best, self.value = chosen, value
        return True

    def start(self, deadline: float) -> None:
        """The first choices: for the tree, and for the DAG."""
        self.consider(bottom_up(self.form, self.price, self.parents))
        if not self.form.negative():
            self.consider(greedy_dag(self.form, deadline))

    def rebuild(self, weight: Callable[[int], float]) -> bool:
        """A choice for prices multiplied by a weight per node; whether it was better."""
        price = {n: v * weight(n) + 1e-9 for n, v in self.price.items()}
        return self.consider(bottom_up(self.form, price, self.parents))

    def run(self, deadline: float, stale: int = 12) -> None:
        """Rebuild around the best choice until nothing was gained `stale` times, or time is up."""
        misses = 0
        while self.best is not None and misses < stale and time.perf_counter() < deadline:
            used = self.best
            noise = 0.0 if misses < 3 else 0.6
            discount = (0.0, 0.3, 0.6)[misses % 3]
            weight = self._around(used, discount, noise)
            misses = 0 if self.rebuild(weight) else misses + 1

    def _around(self, used: Chosen, discount: float, noise: float) -> Callable[[int], float]:
        """Weights that make the classes of a choice cheaper, with seeded noise."""
        home, draw = self.form.home, self.random.uniform

        def weight(n: int) -> float:
            return (discount if home[n] in used else 1.0) * draw(1.0 - noise, 1.0 + noise)

        return weight
