"""Where the boxes and arrows of a picture stand: by Graphviz where `dot` is installed, else here.

The layout here has the steps of Sugiyama, Tagawa and Toda (1981): layers by longest path, points on
long arrows, fewer crossings by sorting layers by the means of their neighbours, and places near the
neighbours (least squares).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

Point = tuple[float, float]

_GAP, _LAYERS = 18.0, 15.0  # pixels between boxes of a layer, and between layers
_LABEL = 16.0  # height of a label
_SWEEPS = 12
_SECONDS = 20.0  # for one picture, by Graphviz


@dataclass(frozen=True, slots=True)
class Edge:
    """An arrow by numbers of boxes, with the width of its label in pixels (0 without one)."""

    source: int
    target: int
    label: float = 0.0


@dataclass(frozen=True)
class Placed:
    """Centres of boxes and labels, and per arrow the control points of its Bézier curves.

    The drawing is `width` wide and `height` high in pixels, from (0, 0) down.
    """

    centres: tuple[Point, ...]
    routes: tuple[tuple[Point, ...], ...]
    labels: tuple[Point | None, ...]
    width: float
    height: float


def placed(sizes: Sequence[tuple[float, float]], edges: Sequence[Edge]) -> Placed:
    """Places for boxes of the given (width, height) in pixels; arrows lead down.

    Raises ValueError if the arrows form a cycle.
    """
    if not sizes:
        return Placed((), (), (), 0.0, 0.0)
    dot = shutil.which("dot")
    return (by_dot(dot, sizes, edges) if dot else None) or layered(sizes, edges)


def by_dot(dot: str, sizes: Sequence[tuple[float, float]], edges: Sequence[Edge]) -> Placed | None:
    """The layout of the program `dot`; None if it fails or takes too long."""
    lines = ['digraph { node [shape=box fixedsize=true label=""]; edge [arrowhead=none];']
    lines += [f"{k} [width={w / 72} height={h / 72}];" for k, (w, h) in enumerate(sizes)]
    for k, e in enumerate(edges):
        size = f'FIXEDSIZE="TRUE" WIDTH="{e.label:.0f}" HEIGHT="{_LABEL:.0f}"'
        table = f'<<TABLE BORDER="0" {size}><TR><TD></TD></TR></TABLE>>' if e.label else '""'
        lines.append(f"{e.source} -> {e.target} [id={k} label={table}];")
    try:
        done = subprocess.run(
            [dot, "-Tjson0"],
            input="\n".join([*lines, "}"]),
            capture_output=True,
            text=True,
            check=True,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = json.loads(done.stdout)
    width, height = (float(n) for n in found["bb"].split(",")[2:])

    def points(text: str) -> tuple[Point, ...]:
        pairs = (pair.split(",") for pair in text.split())
        return tuple((float(x), height - float(y)) for x, y in pairs)

    boxes = sorted(found["objects"], key=lambda box: int(box["name"]))
    drawn = sorted(found.get("edges", ()), key=lambda e: int(e["id"]))
    return Placed(
        tuple(points(node["pos"])[0] for node in boxes),
        tuple(points(e["pos"]) for e in drawn),
        tuple(points(e["lp"])[0] if "lp" in e else None for e in drawn),
        width,
        height,
    )


def layered(sizes: Sequence[tuple[float, float]], edges: Sequence[Edge]) -> Placed:
    """The layout where there is no `dot`. Raises ValueError if the arrows form a cycle."""
    rank = [2 * r for r in ranks(len(sizes), [(e.source, e.target) for e in edges])]
    boxes = list(sizes)
    leave, enter = Counter(e.source for e in edges), Counter(e.target for e in edges)
    chains: list[list[int]] = []
    label_at: list[int | None] = []
    for e in edges:
        # Between two layers of boxes is one of labels. A label stands where the arrows of one box
        # are furthest apart: at the other end.
        spots = range(rank[e.source] + 1, rank[e.target])
        spot = spots[-1] if leave[e.source] >= enter[e.target] else spots[0]
        label_at.append(len(boxes) + spots.index(spot) if e.label else None)
        chains.append([e.source, *range(len(boxes), len(boxes) + len(spots)), e.target])
        rank += spots
        boxes += [(e.label + 4, _LABEL) if e.label and r == spot else (6.0, 0.0) for r in spots]
    near: list[tuple[list[int], list[int]]] = [([], []) for _ in boxes]  # above, below
    for a, b in (pair for chain in chains for pair in pairwise(chain)):
        near[a][1].append(b)
        near[b][0].append(a)
    layers: list[list[int]] = [[] for _ in range(max(rank) + 1)]
    for v in _depth_first(sorted(range(len(boxes)), key=rank.__getitem__), near):
        layers[rank[v]].append(v)
    x = [0.0] * len(boxes)
    for layer in layers:
        _spread(layer, [0.0] * len(layer), boxes, x)
    for sweep in range(_SWEEPS):
        side = sweep % 2
        for layer in layers[:: -1 if side else 1]:
            wish = {v: fmean(x[w] for w in near[v][side]) if near[v][side] else x[v] for v in layer}
            if sweep < _SWEEPS // 2:
                layer.sort(key=wish.__getitem__)
            _spread(layer, [wish[v] for v in layer], boxes, x)
    y, top = [0.0] * len(boxes), 0.0
    for layer in layers:
        height = max((boxes[v][1] for v in layer), default=0.0)
        for v in layer:
            y[v] = top + height / 2
        top += height + _LAYERS
    left = min(at - w / 2 for at, (w, _) in zip(x, boxes, strict=True))
    x = [at - left for at in x]
    return Placed(
        tuple((x[v], y[v]) for v in range(len(sizes))),
        _curves(chains, sizes, x, y),
        tuple(None if v is None else (x[v], y[v]) for v in label_at),
        max(at + w / 2 for at, (w, _) in zip(x, boxes, strict=True)),
        top - _LAYERS,
    )


def ranks(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The layer of every box: below all that it depends on, and what depends on nothing right above
    the first that needs it. Raises ValueError if the edges form a cycle."""
    import networkx as nx

    graph = nx.DiGraph(edges)
    graph.add_nodes_from(range(count))
    try:
        generations = list(nx.topological_generations(graph))
    except nx.NetworkXUnfeasible:
        raise ValueError("the edges form a cycle") from None
    rank = {v: r for r, some in enumerate(generations) for v in some}
    for v in generations[0] if count else ():
        rank[v] = min((rank[w] for w in graph.successors(v)), default=1) - 1
    return [rank[v] for v in range(count)]


def _depth_first(
    roots: Sequence[int], near: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> dict[int, None]:
    """Boxes such that what hangs together starts out together."""
    seen: dict[int, None] = {}
    for root in roots:
        stack = [root]
        while stack:
            v = stack.pop()
            if v not in seen:
                seen[v] = None
                stack += reversed(near[v][1])
    return seen


def _spread(
    layer: Sequence[int],
    wishes: Sequence[float],
    boxes: Sequence[tuple[float, float]],
    x: list[float],
) -> None:
    """Put the boxes of a layer in their order, a gap apart, where the sum of squared distances to
    wishes is least: an isotonic regression."""
    from scipy.optimize import isotonic_regression

    if not layer:
        return
    offsets, at = [], 0.0
    for v in layer:
        offsets.append(at + boxes[v][0] / 2)
        at += boxes[v][0] + _GAP
    found = isotonic_regression([w - o for w, o in zip(wishes, offsets, strict=True)]).x
    for v, base, offset in zip(layer, found.tolist(), offsets, strict=True):
        x[v] = base + offset


def _curves(
    chains: Sequence[Sequence[int]],
    sizes: Sequence[tuple[float, float]],
    x: Sequence[float],
    y: Sequence[float],
) -> tuple[tuple[Point, ...], ...]:
    """Curves through the points of chains. The arrows at one side of a box are spread over it, in
    the order of where they come from."""
    at: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for k, chain in enumerate(chains):
        at.setdefault((chain[0], 0), []).append((x[chain[1]], k))
        at.setdefault((chain[-1], 1), []).append((x[chain[-2]], k))
    ports: dict[tuple[int, int], Point] = {}
    for (v, side), arrows in at.items():
        width, height = sizes[v]
        span = min(width - 12, 16.0 * (len(arrows) - 1))
        for n, (_, k) in enumerate(sorted(arrows)):
            share = n / (len(arrows) - 1) - 0.5 if len(arrows) > 1 else 0.0
            ports[k, side] = x[v] + span * share, y[v] + (height / 2 if side == 0 else -height / 2)
    curves = []
    for k, chain in enumerate(chains):
        points = [ports[k, 0], *((x[v], y[v]) for v in chain[1:-1]), ports[k, 1]]
        curve = [points[0]]
        for (x0, y0), (x1, y1) in pairwise(points):
            curve += [(x0, (y0 + y1) / 2), (x1, (y0 + y1) / 2), (x1, y1)]
        curves.append(tuple(curve))
    return tuple(curves)
