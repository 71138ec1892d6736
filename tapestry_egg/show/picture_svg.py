"""Pictures of graphs as SVG text, laid out here; what `dot` does where it is installed.

Every box is a group of class `item` with the id of its item, every arrow one of class `link` with
the ids of its ends in `data-source` and `data-target`, so that a picture can be read back.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from xml.sax.saxutils import quoteattr

from tapestry_egg.printable import xml_text

from .chart import FONT
from .labels import text_width
from .layered_drawing import Edge, layered
from .picture import COLOURS, SENT, TEXT, Cluster, Item, Link, Picture, to_dot

#: The points of arrows, and of those along which something is sent.
TIP = "<defs>{}</defs>".format(
    "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerUnits="userSpaceOnUse" '
        f'markerWidth="8" markerHeight="8" orient="auto"><path class="{name}" '
        f'd="M0 0.8L8 4L0 7.2Z"/></marker>'
        for name in ("tip", "sent")
    )
)

Renderer = Literal["auto", "dot", "own"]
Point = tuple[float, float]

_LINE, _SMALL = 14.0, 10.5  # height of a line of text; size of labels on arrows
_PAD, _CAPTION, _MARGIN = 12.0, 20.0, 16.0
_SLACK = 7.0  # less than half the gap between boxes, so that a straighter way crosses none

STYLE = f"""
  .item text {{ fill: {TEXT}; }} .head {{ fill: #374151; }} .note {{ fill: #6b7280; }}
  .link path {{ stroke: #7b8794; stroke-width: 1.1; fill: none; }} .link text {{ fill: #374151; }}
  .sends path {{ stroke: {SENT[0]}; stroke-width: 2; }} .sends text {{ fill: {SENT[0]}; }}
  .tip {{ fill: #7b8794; }} .sent {{ fill: {SENT[0]}; }}
  .frame {{ fill: #9aa5b1; fill-opacity: 0.08; stroke: #9aa5b1; }}
  .halo {{ paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round; }}
  @media (prefers-color-scheme: dark) {{
    .halo {{ stroke: #14181d; }}
    .head, .link text {{ fill: #e5e7eb; }} .note {{ fill: #9ca3af; }}
    .sends path {{ stroke: {SENT[1]}; }} .sends text, .sent {{ fill: {SENT[1]}; }}
  }}
"""


def picture_svg(picture: Picture, renderer: Renderer = "auto") -> str:
    """The picture as SVG text.

    `auto` takes Graphviz's `dot` where it is installed and the layout of our own elsewhere; `dot`
    and `own` insist. Raises graphviz.ExecutableNotFound for `dot` where it is missing.
    """
    if renderer == "dot" or (renderer == "auto" and shutil.which("dot")):
        return str(to_dot(picture).pipe(format="svg", encoding="utf-8"))
    return _own(picture)


# ---- layout ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Level:
    """What is inside one cluster, placed: centres of items and inner clusters, routes of links."""

    width: float
    height: float
    sizes: Mapping[str, tuple[float, float]]
    centres: Mapping[str, Point]
    routes: Mapping[int, tuple[Point, ...]]  # link number -> points
    labels: Mapping[int, Point]
    inner: Mapping[str, _Level]


def _level(picture: Picture, cluster: str, members: Mapping[str, list[str]]) -> _Level:
    """Lay out a cluster, inner ones first: they are boxes here."""
    items = {i.id: i for i in picture.items}
    inner, sizes = {}, {}
    for name in members.get(cluster, ()):
        if name in items:
            sizes[name] = _item_size(items[name])
        else:
            inner[name] = _level(picture, name, members)
            sizes[name] = _frame_size(picture, name, inner[name])
    names = list(sizes)
    number = {name: k for k, name in enumerate(names)}
    home = _homes(picture)
    edges, links = [], []
    top, bottom = set(), set()
    for k, link in enumerate(picture.links):
        ends = [_within(home, end, cluster) for end in (link.source, link.target)]
        if ends[0] is None and ends[1] is not None:
            top.add(number[ends[1]])
        elif ends[1] is None and ends[0] is not None:
            bottom.add(number[ends[0]])
        elif None not in ends and ends[0] != ends[1]:
            width = text_width(link.label, _SMALL) if link.label else 0.0
            edges.append(Edge(number[str(ends[0])], number[str(ends[1])], width))
            links.append(k)
    placed = layered([sizes[n] for n in names], edges, top=top, bottom=bottom)
    return _Level(
        placed.width,
        placed.height,
        sizes,
        dict(zip(names, placed.centres, strict=True)),
        dict(zip(links, placed.routes, strict=True)),
        {k: at for k, at in zip(links, placed.labels, strict=True) if at is not None},
        inner,
    )


def _homes(picture: Picture) -> dict[str, str]:
    """Item or cluster -> the cluster that it is in."""
    return {i.id: i.cluster for i in picture.items} | {c.id: c.parent for c in picture.clusters}


def _within(home: Mapping[str, str], name: str, cluster: str) -> str | None:
    """What stands for `name` directly inside `cluster`: itself, or the inner cluster it is in."""
    while home[name] != cluster:
        name = home[name]
        if not name:
            return None
    return name


def _item_size(item: Item) -> tuple[float, float]:
    # The first line is bold, which is wider.
    widths = [text_width(line, 13.5 if k == 0 else 11) for k, line in enumerate(item.lines)]
    return max(widths) + 18, _LINE * len(item.lines) + (16 if item.bands else 10)


def _frame_size(picture: Picture, name: str, level: _Level) -> tuple[float, float]:
    label = next(c.label for c in picture.clusters if c.id == name)
    width = max(level.width, text_width(label, 11)) + 2 * _PAD
    return width, level.height + _CAPTION + _PAD


# ---- SVG ---------------------------------------------------------------------------------------


@dataclass
class _Page:
    """Absolute places: boxes by item and cluster as (centre, size), routes and labels by link."""

    boxes: dict[str, tuple[Point, tuple[float, float]]]
    routes: dict[int, tuple[Point, ...]]
    labels: dict[int, Point]


def _settle(page: _Page, level: _Level, left: float, top: float) -> None:
    for name, (x, y) in level.centres.items():
        size = level.sizes[name]
        page.boxes[name] = (left + x, top + y), size
        if name in level.inner:
            inner = level.inner[name]
            spare = (size[0] - inner.width) / 2
            _settle(
                page,
                inner,
                left + x - size[0] / 2 + spare,
                top + y - size[1] / 2 + _PAD,
            )
    for k, points in level.routes.items():
        page.routes[k] = tuple((left + x, top + y) for x, y in points)
    for k, (x, y) in level.labels.items():
        page.labels[k] = left + x, top + y


def _own(picture: Picture) -> str:
    width, height, parts = drawn(picture)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" font-family="{FONT}" role="img">',
            f"<title>{xml_text(picture.title)}</title>",
            f"<style>{STYLE}</style>",
            TIP,
            *parts,
            "</svg>",
            "",
        ]
    )


def drawn(picture: Picture) -> tuple[float, float, list[str]]:
    """Width, height and elements of a picture, for an SVG that has `STYLE` and `TIP`."""
    members: dict[str, list[str]] = {}
    for name, home in _homes(picture).items():
        members.setdefault(home, []).append(name)
    level = _level(picture, "", members)
    titles = [text_width(picture.title, 15), text_width(picture.subtitle, 11)]
    inner = max(level.width, *titles, 320.0 if picture.legend else 0.0)
    head = 26.0 + (18.0 if picture.subtitle else 0.0)
    legend, head = _legend(picture, inner, head)
    width = inner + 2 * _MARGIN
    height = level.height + head + 2 * _MARGIN
    page = _Page({}, {}, {})
    _settle(page, level, (width - level.width) / 2, _MARGIN + head)
    ports = _ports(picture.links, page)
    parts = [
        f'<text class="head" x="{_MARGIN}" y="{_MARGIN + 14}" font-size="15" font-weight="600">'
        f"{xml_text(picture.title)}</text>",
    ]
    if picture.subtitle:
        parts.append(
            f'<text class="note" x="{_MARGIN}" y="{_MARGIN + 32}" font-size="11">'
            f"{xml_text(picture.subtitle)}</text>"
        )
    parts += legend
    depth = {c.id: _depth(c, picture.clusters) for c in picture.clusters}
    clusters = [c for c in picture.clusters if c.id in page.boxes]
    parts += [_frame(c, page) for c in sorted(clusters, key=lambda c: depth[c.id])]
    parts += [_arrow(link, k, page, ports) for k, link in enumerate(picture.links)]
    # At the lower edge, where fewer arrows cross it than above, and over those that do.
    parts += [_caption(c, page) for c in clusters]
    parts += [_box(item, page) for item in picture.items]
    return width, height, parts


def _legend(picture: Picture, width: float, top: float) -> tuple[list[str], float]:
    """What colours mean, in lines no wider than `width`, and where they end."""
    parts, x, y = [], 0.0, top
    for colour, words in picture.legend:
        size = 18 + text_width(words, 11) + 14
        if x and x + size > width:
            x, y = 0.0, y + 17
        at = _MARGIN + x
        parts.append(
            f'<rect x="{at:.1f}" y="{_MARGIN + y:.1f}" width="12" height="12" rx="2" '
            f'fill="{colour}" stroke="#7b8794"/><text class="note" x="{at + 18:.1f}" '
            f'y="{_MARGIN + y + 10:.1f}" font-size="11">{xml_text(words)}</text>'
        )
        x += size
    return parts, y + (26 if parts else 0)


def _depth(cluster: Cluster, clusters: Sequence[Cluster]) -> int:
    parents = {c.id: c.parent for c in clusters}
    n, name = 0, cluster.id
    while parents.get(name):
        n, name = n + 1, parents[name]
    return n


def _ports(links: Sequence[Link], page: _Page) -> dict[tuple[int, int], Point]:
    """(link, 0 for its start or 1 for its end) -> the point on the border of the item there.

    The arrows at one side of an item are spread over it, in the order of where they come from.
    """
    at: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for k, link in enumerate(links):
        points = page.routes[k]
        at.setdefault((link.source, 0), []).append((points[1][0], k))
        at.setdefault((link.target, 1), []).append((points[-2][0], k))
    out = {}
    for (name, side), arrows in at.items():
        (x, y), (w, h) = page.boxes[name]
        span = min(w - 12, 16.0 * (len(arrows) - 1))
        for n, (_, k) in enumerate(sorted(arrows)):
            share = n / (len(arrows) - 1) - 0.5 if len(arrows) > 1 else 0.0
            out[k, side] = x + span * share, y + (h / 2 if side == 0 else -h / 2)
    return out


def _arrow(link: Link, k: int, page: _Page, ports: Mapping[tuple[int, int], Point]) -> str:
    label = page.labels.get(k)
    points = _straightened([ports[k, 0], *page.routes[k][1:-1], ports[k, 1]], label)
    path, text = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"], ""
    for (x0, y0), (x1, y1) in pairwise(points):
        if (x0, y0) == label:
            y0 += 8
        if (x1, y1) == label:
            y1 -= 8
        middle = (y0 + y1) / 2
        path.append(f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}")
        if label and y1 == label[1] - 8 and x1 == label[0]:
            path.append(f"M{x1:.1f} {label[1] + 8:.1f}")
    if label:
        text = (
            f'<text x="{label[0]:.1f}" y="{label[1] + 3.5:.1f}" font-size="{_SMALL}" '
            f'text-anchor="middle">{xml_text(link.label)}</text>'
        )
    kind, tip = ("link sends", "sent") if link.sends else ("link", "tip")
    words = link.title or link.label
    title = f"<title>{xml_text(words)}</title>" if words else ""
    dashes = ' stroke-dasharray="4 3"' if link.dashed else ""
    return (
        f'<g class="{kind}" data-source={quoteattr(link.source)} '
        f"data-target={quoteattr(link.target)}>{title}"
        f'<path d="{"".join(path)}" marker-end="url(#{tip})"{dashes}/>{text}</g>'
    )


def _straightened(points: Sequence[Point], keep: Point | None) -> list[Point]:
    """The same way with fewer points: those within a few pixels of a straight line are dropped."""
    if len(points) < 3:
        return list(points)
    if keep in points[1:-1]:
        cut = points.index(keep, 1)
        return [*_straightened(points[: cut + 1], None), *_straightened(points[cut:], None)[1:]]
    (x0, y0), (x1, y1) = points[0], points[-1]
    off = [abs(x - x0 - (x1 - x0) * (y - y0) / ((y1 - y0) or 1.0)) for x, y in points]
    worst = max(range(len(points)), key=off.__getitem__)
    if off[worst] <= _SLACK:
        return [points[0], points[-1]]
    before, after = points[: worst + 1], points[worst:]
    return [*_straightened(before, None), *_straightened(after, None)[1:]]


def _box(item: Item, page: _Page) -> str:
    (x, y), (w, h) = page.boxes[item.id]
    fill, outline = COLOURS[item.kind]
    radius = 2 if item.kind in ("tensor", "constant") else 9
    lines = []
    for k, line in enumerate(item.lines):
        style = 'font-size="12" font-weight="600"' if k == 0 else 'font-size="11"'
        baseline = y - h / 2 + 5 + _LINE * (k + 0.78)
        lines.append(
            f'<text x="{x:.1f}" y="{baseline:.1f}" text-anchor="middle" {style}>'
            f"{xml_text(line)}</text>"
        )
    bands, left = "", x - w / 2
    for colour, share in item.bands:
        bands += (
            f'<rect x="{left:.1f}" y="{y + h / 2 - 6:.1f}" width="{w * share:.1f}" height="6" '
            f'fill="{colour}"/>'
        )
        left += w * share
    opens = ""
    if item.opens:
        label = quoteattr(f"open {item.lines[0]}")
        opens = f' data-opens={quoteattr(item.opens)} tabindex="0" role="button" aria-label={label}'
    return (
        f'<g class="item {item.kind}" id={quoteattr(item.id)}{opens}>'
        f"<title>{xml_text(item.title or item.lines[0])}</title>"
        f'<rect x="{x - w / 2:.1f}" y="{y - h / 2:.1f}" width="{w:.1f}" height="{h:.1f}" '
        f'rx="{radius}" fill="{item.fill or fill}" stroke="{outline}"/>{bands}{"".join(lines)}</g>'
    )


def _frame(cluster: Cluster, page: _Page) -> str:
    (x, y), (w, h) = page.boxes[cluster.id]
    return (
        f'<g class="cluster" id={quoteattr(cluster.id)}><rect class="frame" '
        f'x="{x - w / 2:.1f}" y="{y - h / 2:.1f}" width="{w:.1f}" height="{h:.1f}" rx="8"/></g>'
    )


def _caption(cluster: Cluster, page: _Page) -> str:
    (x, y), (w, h) = page.boxes[cluster.id]
    return (
        f'<text class="head halo" x="{x - w / 2 + 8:.1f}" y="{y + h / 2 - 6:.1f}" '
        f'font-size="11">{xml_text(cluster.label)}</text>'
    )
