"""A layered layout of directed graphs without cycles: layers, order inside them, coordinates.

The steps are those of Sugiyama, Tagawa and Toda (1981): layers by longest path, long edges cut by
waypoints, crossings lessened by sorting layers by the medians of their neighbours, and then places
as near to the neighbours as the order allows (least squares, solved by pooling).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

#: Sweeps down and up when ordering; the best order seen is kept.
_SWEEPS = 8
_GAP = 18.0  # between boxes of a layer


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge by node numbers, with the width of its label (0 without one)."""

    source: int
    target: int
    label: float = 0.0


@dataclass(frozen=True)
class Placed:
    """Centres of nodes, and per edge the points that it goes through with the centre of its label.

    The drawing is `width` wide and `height` high, from (0, 0) down.
    """

    centres: tuple[tuple[float, float], ...]
    routes: tuple[tuple[tuple[float, float], ...], ...]
    labels: tuple[tuple[float, float] | None, ...]
    width: float
    height: float


def layered(
    sizes: Sequence[tuple[float, float]],
    edges: Sequence[Edge],
    *,
    top: Collection[int] = (),
    bottom: Collection[int] = (),
    gap: float = 30.0,
    label_height: float = 16.0,
) -> Placed:
    """Places for nodes of the given (width, height), edges pointing down.

    Layers of nodes alternate with layers of labels, so that labels lie on nothing. `gap` is the
    free height between layers that no label needs. Nodes in `top` without predecessors are in the
    first layer, those in `bottom` without successors in the last, because arrows from outside end
    or begin there. Raises ValueError where the edges form a cycle.
    """
    count = len(sizes)
    if not count:
        return Placed((), (), (), 0.0, 0.0)
    rank = [2 * r for r in ranks(count, [(e.source, e.target) for e in edges], top, bottom)]
    widths = [w for w, _ in sizes]
    heights = [h for _, h in sizes]
    leave, enter = Counter(e.source for e in edges), Counter(e.target for e in edges)
    chains: list[list[int]] = []
    label_at: list[int | None] = []
    for e in edges:
        # The label stands where the edges of one node are furthest apart: at the other end.
        spots = range(rank[e.source] + 1, rank[e.target])
        spot = spots[-1] if leave[e.source] >= enter[e.target] else spots[0]
        chain = [e.source]
        at = None
        for r in spots:
            chain.append(len(rank))
            rank.append(r)
            here = e.label and r == spot
            widths.append(e.label + 4 if here else 6.0)
            heights.append(label_height if here else 0.0)
            at = chain[-1] if here else at
        chains.append([*chain, e.target])
        label_at.append(at)
    up: list[list[int]] = [[] for _ in rank]
    down: list[list[int]] = [[] for _ in rank]
    for chain in chains:
        for a, b in pairwise(chain):
            down[a].append(b)
            up[b].append(a)
    layers = _ordered(rank, up, down)
    x = _columns(layers, widths, up, down)
    y, begin = [0.0] * len(rank), 0.0
    for layer in layers:
        height = max((heights[v] for v in layer), default=0.0)
        for v in layer:
            y[v] = begin + height / 2
        begin += height + gap / 2
    left = min(xv - w / 2 for xv, w in zip(x, widths, strict=True))
    x = [xv - left for xv in x]
    return Placed(
        centres=tuple((x[v], y[v]) for v in range(count)),
        routes=tuple(tuple((x[v], y[v]) for v in chain) for chain in chains),
        labels=tuple(None if v is None else (x[v], y[v]) for v in label_at),
        width=max(xv + w / 2 for xv, w in zip(x, widths, strict=True)),
        height=begin - gap / 2,
    )


def ranks(
    count: int,
    edges: Sequence[tuple[int, int]],
    top: Collection[int] = (),
    bottom: Collection[int] = (),
) -> list[int]:
    """Layer of every node: below all that it depends on, and what has no predecessor right above
    the first that needs it."""
    below: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for a, b in edges:
        below[a].append(b)
        waiting[b] += 1
    has_above = [n > 0 for n in waiting]
    rank = [0] * count
    ready = [v for v in range(count) if not waiting[v]]
    for v in ready:
        for w in below[v]:
            rank[w] = max(rank[w], rank[v] + 1)
            waiting[w] -= 1
            if not waiting[w]:
                ready.append(w)
    if len(ready) < count:
        raise ValueError("the edges form a cycle")
    last = max(rank)
    for v in range(count):
        if not has_above[v] and below[v] and v not in top:
            rank[v] = min(rank[w] for w in below[v]) - 1
        elif v in bottom and not below[v]:
            rank[v] = last
    return rank


def _ordered(
    rank: Sequence[int], up: Sequence[Sequence[int]], down: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Nodes of every layer from left to right, with few crossings."""
    layers: list[list[int]] = [[] for _ in range(max(rank) + 1)]
    seen: set[int] = set()
    # Depth first from the top: what hangs together starts out together.
    for root in sorted(range(len(rank)), key=lambda v: rank[v]):
        stack = [root]
        while stack:
            v = stack.pop()
            if v not in seen:
                seen.add(v)
                layers[rank[v]].append(v)
                stack.extend(reversed(down[v]))
    best, fewest = [list(layer) for layer in layers], crossings(layers, down)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        inner = range(1, len(layers)) if downwards else range(len(layers) - 2, -1, -1)
        for k in inner:
            beside = layers[k - 1] if downwards else layers[k + 1]
            place = {v: float(i) for i, v in enumerate(beside)}
            near = up if downwards else down
            own = {v: float(i) for i, v in enumerate(layers[k])}
            scale = len(beside) / max(1, len(layers[k]))
            wish = {
                v: median(place[w] for w in near[v]) if near[v] else own[v] * scale
                for v in layers[k]
            }
            layers[k].sort(key=wish.__getitem__)
        now = crossings(layers, down)
        if now < fewest:
            best, fewest = [list(layer) for layer in layers], now
        if not fewest:
            break
    return best


def crossings(layers: Sequence[Sequence[int]], down: Sequence[Sequence[int]]) -> int:
    """How often edges between neighbouring layers cross."""
    total = 0
    for k in range(len(layers) - 1):
        place = {v: i for i, v in enumerate(layers[k + 1])}
        ends = [p for v in layers[k] for p in sorted(place[w] for w in down[v] if w in place)]
        count = [0] * (len(place) + 1)  # a Fenwick tree over the places below
        for seen, p in enumerate(ends):
            i, before = p + 1, 0
            while i:
                before += count[i]
                i -= i & -i
            total += seen - before
            i = p + 1
            while i <= len(place):
                count[i] += 1
                i += i & -i
    return total


def _columns(
    layers: Sequence[Sequence[int]],
    widths: Sequence[float],
    up: Sequence[Sequence[int]],
    down: Sequence[Sequence[int]],
) -> list[float]:
    """Horizontal centres: each layer in its order, near the means of its neighbours."""
    x = [0.0] * len(widths)
    for layer in layers:
        at = 0.0
        for v in layer:
            x[v] = at + widths[v] / 2
            at += widths[v] + _GAP
        for v in layer:
            x[v] -= (at - _GAP) / 2
    both = [[*a, *b] for a, b in zip(up, down, strict=True)]
    for sweep in range(24):
        near = both if sweep >= 18 else up if sweep % 2 == 0 else down
        order = layers if sweep % 2 == 0 else list(reversed(layers))
        for layer in order:
            wish = {v: fmean(x[w] for w in near[v]) if near[v] else x[v] for v in layer}
            x_new = spread([wish[v] for v in layer], [widths[v] for v in layer], _GAP)
            for v, place in zip(layer, x_new, strict=True):
                x[v] = place
    return x


def spread(wishes: Sequence[float], widths: Sequence[float], gap: float) -> list[float]:
    """Centres in the given order, `gap` apart, with the least sum of squared distances to wishes.

    Pooling adjacent violators: boxes that would overlap become one block at the mean of what its
    boxes wish.
    """
    offsets, at = [], 0.0
    for k, w in enumerate(widths):
        at += w / 2 if k == 0 else (widths[k - 1] + w) / 2 + gap
        offsets.append(at)
    blocks: list[tuple[float, int]] = []  # mean of wish - offset, number of boxes
    for wish, offset in zip(wishes, offsets, strict=True):
        mean, n = wish - offset, 1
        while blocks and blocks[-1][0] >= mean:
            other, m = blocks.pop()
            mean, n = (mean * n + other * m) / (n + m), n + m
        blocks.append((mean, n))
    means = [mean for mean, n in blocks for _ in range(n)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]
