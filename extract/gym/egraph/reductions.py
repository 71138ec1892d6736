"""Exact reductions of an AND-OR form: what no best answer needs goes, what all need is fixed.

Structural reductions keep every legal answer; dominance keeps, for each answer, one that is no
worse. Only `too_dear` looks at a known value.
"""

from __future__ import annotations

import time

import numpy as np

from .closure import Closure, closure, cyclic_components, derivable
from .form import AndOr

# A class's alternatives beyond this number are not compared with one another.
_COMPARED = 600

# Forms of so many nodes are reduced until nothing changes.
_SMALL = 500

# Merging a class into its only user may add this many children in all.
_GROWTH = 64


def reduce(form: AndOr, deadline: float, most: int | None = None) -> bool:
    """Apply all reductions until none applies or time is up; False when no answer is left.

    `most` is the (scaled) cost of a known answer: nodes that cannot be in a better one go too, and
    False then says that there is none.
    """
    while time.perf_counter() < deadline:
        before = _size(form)
        keep_derivable(form)
        drop_dominated(form, None)
        keep_reachable(form)
        if not feasible(form):
            return False
        known = closure(form, deadline)
        if known is None:
            break
        drop_cyclic(form, known)
        drop_dominated(form, known)
        if most is not None:
            too_dear(form, known, most)
        require(form, known)
        fix_required(form)
        if not feasible(form):
            return False
        merge_series(form)
        if not _worthwhile(before, _size(form)):
            break
    keep_derivable(form)
    keep_reachable(form)
    return feasible(form)


def feasible(form: AndOr) -> bool:
    """Whether every root still has a node."""
    return all(form.members.get(r) for r in form.roots)


def _size(form: AndOr) -> tuple[int, int, int, int]:
    edges = sum(len(needs) for needs in form.needs.values())
    return len(form.home), len(form.members), edges, len(form.roots)


def _worthwhile(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a round took away enough for another: anything of a small form, a share of a large
    one, whose rounds take long."""
    if before[0] <= _SMALL:
        return before != after
    share = 100 if before[0] <= 8 * _SMALL else 25
    return any(b - a > b // share for b, a in zip(before[:3], after[:3], strict=True))


def keep_derivable(form: AndOr) -> None:
    """Drop nodes that need what cannot be derived, or themselves."""
    form.remove([n for n, needs in form.needs.items() if form.home[n] in needs])
    _, complete = derivable(form)
    form.remove([n for n in form.needs if n not in complete])
    for c in [c for c, m in form.members.items() if not m and c not in form.roots]:
        del form.members[c]


def keep_reachable(form: AndOr) -> None:
    """Drop classes that no root leads to."""
    seen = set(form.roots)
    todo = list(seen)
    while todo:
        for n in form.members.get(todo.pop(), ()):
            for d in form.needs[n]:
                if d not in seen:
                    seen.add(d)
                    todo.append(d)
    gone = [c for c in form.members if c not in seen]
    form.remove([n for c in gone for n in form.members[c]])
    for c in gone:
        del form.members[c]


def drop_cyclic(form: AndOr, known: Closure) -> None:
    """Drop nodes that are on a cycle in every answer that uses them.

    Either each derivation of a child contains the node's own class, or the child is above the
    class in every use.
    """
    gone = []
    for n, needs in form.needs.items():
        c = form.home[n]
        bit, above = known.bit[c], known.above[c]
        if any(known.required[d] >> bit & 1 or above >> known.bit[d] & 1 for d in needs):
            gone.append(n)
    form.remove(gone)


def drop_dominated(form: AndOr, known: Closure | None) -> None:
    """Drop nodes beside which another costs no more and needs only what this one brings anyway.

    What a node brings is what it needs and, with `known`, all that is required with that. With
    negative costs an answer may gain by needing more: then both must need the same.
    """
    negative = form.negative()
    gone: list[int] = []
    for c, members in form.members.items():
        if len(members) > 1:
            kept = _cheapest_of_same_needs(form, members, gone)
            if len(kept) > 1 and not negative:
                if known is None:
                    _drop_supersets(form, kept, gone)
                else:
                    _drop_brought(form, known, c, kept, gone)
    form.remove(gone)


def _cheapest_of_same_needs(form: AndOr, members: list[int], gone: list[int]) -> list[int]:
    """Of nodes that need the same, the cheapest."""
    kept: dict[frozenset[int], int] = {}
    for n in sorted(members, key=lambda n: (form.cost[n], n)):
        if kept.setdefault(form.needs[n], n) != n:
            gone.append(n)
    return list(kept.values())


def _drop_supersets(form: AndOr, members: list[int], gone: list[int]) -> None:
    """Drop nodes that need all that another does, and cost no less."""
    order = sorted(members, key=lambda n: (len(form.needs[n]), n))[:_COMPARED]
    kept: list[tuple[frozenset[int], int]] = []
    for n in order:
        needs, price = form.needs[n], form.cost[n]
        if any(less <= price and fewer <= needs for fewer, less in kept):
            gone.append(n)
        else:
            kept.append((needs, price))


def _drop_brought(form: AndOr, known: Closure, c: int, members: list[int], gone: list[int]) -> None:
    """The same with all that a node brings: of two that bring each other's needs, one stays."""
    order = sorted(members, key=lambda n: (len(form.needs[n]), n))[:_COMPARED]
    own = 1 << known.bit[c]
    kept: list[tuple[int, int, int, int]] = []  # needs, beyond what it brings, cost, node
    for n in order:
        mask, price = known.mask(form.needs[n]), form.cost[n]
        brought = known.needed(form.needs[n])
        if brought & own:  # on a cycle: another reduction's business
            continue
        beyond = ~brought
        if any(less <= price and not fewer & beyond for fewer, _, less, _ in kept):
            gone.append(n)
            continue
        # One that needs more, by its own list, may still be had for less.
        beaten = [m for _, others, more, m in kept if price <= more and not mask & others]
        if beaten:
            gone.extend(beaten)
            kept = [row for row in kept if row[3] not in beaten]
        kept.append((mask, beyond, price, n))


def too_dear(form: AndOr, known: Closure, most: int) -> None:
    """Drop nodes whose company alone costs `most` or more.

    Choosing a node makes everything above its class active, and all that these and its children
    require; each active class costs at least its cheapest node.
    """
    cost = form.cost
    if not cost or min(cost.values()) < 0:
        return
    # Classes that lost their last node just now, or are gone, count for nothing.
    cheapest = dict.fromkeys(known.classes, 0)
    for c, m in form.members.items():
        cheapest[c] = min((cost[n] for n in m), default=0)
    always = 0
    for r in form.roots:
        always |= known.required[r]
    base = form.constant + sum(cheapest[c] for c in known.members(always))
    if base >= most:
        form.remove(list(form.home))
        return
    width = (len(known.classes) + 7) // 8
    price = np.array([float(cheapest[c]) for c in known.classes])
    with_above: dict[int, int] = {}
    for c, above in known.above.items():
        found = 0
        for d in known.members(above & ~always):
            found |= known.required[d]
        with_above[c] = found | above
    nodes = list(form.home)
    gone = []
    for at in range(0, len(nodes), 1024):
        chunk = nodes[at : at + 1024]
        sets = [((with_above[form.home[n]] | known.needed(form.needs[n])) & ~always) for n in chunk]
        data = b"".join(s.to_bytes(width, "little") for s in sets)
        packed = np.frombuffer(data, dtype=np.uint8).reshape(len(chunk), width)
        bits = np.unpackbits(packed, axis=1, bitorder="little")[:, : len(price)]
        rough = bits @ price
        for n, extra, s in zip(chunk, rough.tolist(), sets, strict=True):
            own = cost[n] - cheapest[form.home[n]]
            if (base + own + extra) * (1 + 1e-9) >= most:
                exact = base + own + sum(cheapest[c] for c in known.members(s))
                if exact >= most:
                    gone.append(n)
    form.remove(gone)


def require(form: AndOr, known: Closure) -> None:
    """Classes that every answer contains become roots."""
    always = 0
    for r in form.roots:
        always |= known.required[r]
    fresh = set(known.members(always)) - form.roots
    users: dict[int, list[int]] = {d: [] for d in sorted(fresh)}
    for n, needs in form.needs.items():
        for d in needs & fresh:
            users[d].append(n)
    for nodes in users.values():
        form.cover(nodes)
    form.roots |= fresh


def fix_required(form: AndOr) -> None:
    """Cut what only says that a root is needed, and fix roots that have no choice.

    An edge to a root matters for cycles alone: it stays where both ends are on one. A root of one
    node on a cycle is bypassed: what needs it needs what it needs.
    """
    while True:
        cyclic = cyclic_components(form)
        for n, needs in form.needs.items():
            own = cyclic.get(form.home[n], -1)
            if not form.roots.isdisjoint(needs):
                form.needs[n] = frozenset(
                    d for d in needs if d not in form.roots or cyclic.get(d, -2) == own
                )
        single = sorted(r for r in form.roots if len(form.members.get(r, ())) == 1)
        if not single:
            return
        for c in single:
            if len(form.members[c]) != 1:  # a bypass took the last one
                return
            (n,) = form.members[c]
            if c in cyclic:
                if not _bypass(form, c, n):
                    return
                if not form.members[c]:
                    return
            form.fixed.extend(form.parts[n])
            form.constant += form.cost[n]
            form.roots |= form.needs[n]
            form.roots.discard(c)
            form.uncover(n)
            form.remove([n])
            del form.members[c]


def _bypass(form: AndOr, c: int, n: int) -> bool:
    """Let what needs class c, whose only node is n, need n's children; False where c is left
    without a node, because it is on a cycle whatever is chosen."""
    through = form.needs[n]
    if c in through:
        form.remove([n])
        return False
    loops = []
    for p, needs in form.needs.items():
        if c in needs:
            form.needs[p] = (needs - {c}) | through
            if form.home[p] in through:
                loops.append(p)
    form.remove(loops)
    return n in form.home


def merge_series(form: AndOr) -> None:
    """Merge classes into their users: free classes of one node into all, others into an only one.

    Where one node alone needs a class, the node and the class's alternatives become one node each.
    """
    parents = form.parents()
    for c in sorted(form.members):
        if c in form.roots or c not in form.members:
            continue
        members = form.members[c]
        # What merging gave a need that it had already stands there twice.
        there = dict.fromkeys(parents.get(c, ()))
        users = [p for p in there if p in form.home and c in form.needs[p]]
        free = len(members) == 1 and form.cost[members[0]] == 0
        edges = sum(len(form.needs[m]) for m in members)
        if len(users) == 1:
            (u,) = users
            rest = form.needs[u] - {c}
            if (len(members) - 1) * len(rest) > _GROWTH + edges:
                continue
            home = form.home[u]
            for m in members:
                if home in form.needs[m]:
                    continue
                needs = (rest | form.needs[m]) - {home}
                cost = form.cost[u] + form.cost[m]
                merged = form.add(home, needs, cost, form.parts[u] + form.parts[m])
                met = form.covers.get(u, set()) | form.covers.get(m, set())
                if met:
                    form.covers[merged] = met
                for d in needs:
                    parents.setdefault(d, []).append(merged)
            form.remove([u, *members])
            del form.members[c]
        elif free and users and (len(form.needs[members[0]]) - 1) * len(users) <= _GROWTH:
            (m,) = members
            # Kept apart from its users: whoever is chosen, the class's node is known.
            through = form.needs[m]
            gone = []
            for u in users:
                if form.home[u] in through:
                    gone.append(u)
                    continue
                form.needs[u] = ((form.needs[u] - {c}) | through) - {form.home[u]}
                if m in form.covers:
                    form.covers.setdefault(u, set()).update(form.covers[m])
                for d in through:
                    parents.setdefault(d, []).append(u)
            form.fixed.extend(form.parts[m])
            form.remove([*gone, m])
            del form.members[c]
