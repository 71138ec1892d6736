"""What every derivation of a class contains, and what every use of it comes through.

`required[c]` are the classes that are in every well-founded derivation of c (the dominators of an
AND-OR graph), `above[c]` those that every path from the roots to c passes. Both are greatest
fixpoints, kept as Python integers used as sets of bits.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .form import AndOr

# Sets over more classes than this would need more memory than they are worth.
MOST_CLASSES = 40_000


@dataclass(frozen=True)
class Closure:
    """Sets of classes as bits; bit i stands for `classes[i]`."""

    classes: tuple[int, ...]
    bit: dict[int, int]
    required: dict[int, int]
    above: dict[int, int]

    def mask(self, classes: Iterable[int]) -> int:
        """The bits of some classes."""
        found = 0
        for c in classes:
            found |= 1 << self.bit[c]
        return found

    def needed(self, needs: Iterable[int]) -> int:
        """The bits of everything that is required with some classes."""
        found = 0
        for c in needs:
            found |= self.required[c]
        return found

    def members(self, mask: int) -> list[int]:
        """The classes of a set of bits."""
        found = []
        while mask:
            low = mask & -mask
            found.append(self.classes[low.bit_length() - 1])
            mask ^= low
        return found


def derivable(form: AndOr) -> tuple[list[int], set[int]]:
    """Classes in an order in which they can be derived, and the nodes that can be completed."""
    waits = {n: len(needs) for n, needs in form.needs.items()}
    parents = form.parents()
    ready = deque(n for n, k in waits.items() if k == 0)
    order: list[int] = []
    seen: set[int] = set()
    complete: set[int] = set()
    while ready:
        n = ready.popleft()
        complete.add(n)
        c = form.home[n]
        if c in seen:
            continue
        seen.add(c)
        order.append(c)
        for p in parents[c]:
            waits[p] -= 1
            if waits[p] == 0:
                ready.append(p)
    return order, complete


def closure(form: AndOr, deadline: float) -> Closure | None:
    """The closure of a form whose classes can all be derived and reached.

    None when there are too many classes, or when time is up: an unfinished fixpoint proves nothing.
    """
    order, _ = derivable(form)
    if len(order) != len(form.members) or len(order) > MOST_CLASSES:
        return None
    bit = {c: i for i, c in enumerate(order)}
    every = (1 << len(order)) - 1
    parents = form.parents()
    required = _fixpoint(
        order,
        every,
        bit,
        {c: [form.needs[n] for n in form.members[c]] for c in order},
        {c: {form.home[p] for p in parents[c]} for c in order},
        deadline,
    )
    if required is None:
        return None
    below = {c: set().union(*(form.needs[n] for n in form.members[c])) for c in order}
    reach = _reached(form, below)
    above = _fixpoint(
        reach,
        every,
        bit,
        {c: [()] if c in form.roots else [(form.home[p],) for p in parents[c]] for c in reach},
        below,
        deadline,
    )
    if above is None:
        return None
    return Closure(tuple(order), bit, required, above)


def _reached(form: AndOr, below: dict[int, set[int]]) -> list[int]:
    order = sorted(form.roots)
    seen = set(order)
    for c in order:
        for d in sorted(below[c]):
            if d not in seen:
                seen.add(d)
                order.append(d)
    return order


def _fixpoint(
    order: list[int],
    every: int,
    bit: dict[int, int],
    ways: dict[int, list[Iterable[int]]],
    dependent: dict[int, set[int]],
    deadline: float,
) -> dict[int, int] | None:
    """Greatest solution of set(c) = {c} + intersection over ways of the union of their sets."""
    sets = dict.fromkeys(order, every)
    todo = deque(order)
    waiting = set(order)
    count = 0
    while todo:
        count += 1
        if count % 256 == 0 and time.perf_counter() > deadline:
            return None
        c = todo.popleft()
        waiting.discard(c)
        own = 1 << bit[c]
        met = every
        for way in ways[c]:
            union = 0
            for d in way:
                union |= sets[d]
            met &= union
            if not met:
                break
        met |= own
        if met != sets[c]:
            sets[c] = met
            for d in dependent[c]:
                if d not in waiting:
                    waiting.add(d)
                    todo.append(d)
    return sets


def components(edges: Mapping[int, Iterable[int]]) -> dict[int, int]:
    """Class -> number of its strongly connected component (Tarjan, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    found: dict[int, int] = {}
    stack: list[int] = []
    count = 0
    for start in edges:
        if start in index:
            continue
        work = [(start, iter(edges[start]))]
        index[start] = low[start] = len(index)
        stack.append(start)
        while work:
            v, rest = work[-1]
            for w in rest:
                if w not in index:
                    index[w] = low[w] = len(index)
                    stack.append(w)
                    work.append((w, iter(edges[w])))
                    break
                if w not in found:
                    low[v] = min(low[v], index[w])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[v])
                if low[v] == index[v]:
                    while True:
                        w = stack.pop()
                        found[w] = count
                        if w == v:
                            break
                    count += 1
    return found


def class_edges(form: AndOr) -> dict[int, set[int]]:
    """Class -> the classes that its nodes need."""
    return {c: set().union(*(form.needs[n] for n in m)) for c, m in form.members.items()}


def cyclic_components(form: AndOr) -> dict[int, int]:
    """Class -> its component, for classes in components of several classes only."""
    found = components(class_edges(form))
    size = Counter(found.values())
    return {c: k for c, k in found.items() if size[k] > 1}
