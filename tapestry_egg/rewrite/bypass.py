"""Bypass: choices that never make some large value, although every single change would add work.

`choose` changes one kind of operation at a time. A value that several others read (the logits of
a loss, which its derivative reads again) goes only when all of them are computed without it: each
change alone adds what it computes and saves nothing. Here all are made at once, for values that
are larger than what they are made of and whose operands other operations can read instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tapestry_egg.rewrite.terms.requests import Applied
from tapestry_egg.rewrite.terms.terms import Terms


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
