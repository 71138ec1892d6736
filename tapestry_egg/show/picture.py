"""What a drawing of a graph shows, before it is laid out: boxes, links between them, clusters.

A picture becomes DOT for Graphviz here, and SVG without it in `picture_svg.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tapestry_egg.errors import GraphError

if TYPE_CHECKING:
    from graphviz import Digraph

Kind = Literal["tensor", "constant", "operation", "kernel", "shard", "region", "group"]


@dataclass(frozen=True, slots=True)
class Item:
    """A box with lines of text; the first is its name. `title` is shown where a pointer rests,
    `fill` is a colour instead of its kind's, `bands` are colours at its lower edge with the shares
    that they take; a click `opens` the picture of that name."""

    id: str
    kind: Kind
    lines: tuple[str, ...]
    title: str = ""
    cluster: str = ""
    fill: str = ""
    bands: tuple[tuple[str, float], ...] = ()
    opens: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """An arrow from one item to another, with the range that moves along it; `sends` where devices
    send what moves."""

    source: str
    target: str
    label: str = ""
    title: str = ""
    dashed: bool = False
    sends: bool = False


@dataclass(frozen=True, slots=True)
class Cluster:
    """A frame around items: an operation in shards, or a nested graph; `parent` is around it."""

    id: str
    label: str
    parent: str = ""


@dataclass(frozen=True)
class Picture:
    """A drawing by content: no item, link or cluster refers to one that is not there. `legend` says
    what colours mean, as (colour, words)."""

    title: str
    items: tuple[Item, ...]
    links: tuple[Link, ...]
    clusters: tuple[Cluster, ...] = ()
    subtitle: str = ""
    legend: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        ids, frames = {i.id for i in self.items}, {c.id for c in self.clusters} | {""}
        missing = {i.cluster for i in self.items} | {c.parent for c in self.clusters}
        loose = {end for link in self.links for end in (link.source, link.target)} - ids
        if len(ids) != len(self.items) or loose or missing - frames:
            raise GraphError(
                f"a picture with loose ends: {sorted(loose | (missing - frames))[:5]}",
                where=self.title,
            )


#: Per kind: fill and outline. Pale enough for dark text in both, as the page behind may be dark.
COLOURS: Mapping[str, tuple[str, str]] = {
    "tensor": ("#e3edf9", "#3b72b4"),
    "constant": ("#eceff3", "#7b8794"),
    "operation": ("#fdebd3", "#c9781f"),
    "kernel": ("#fbd9b0", "#b4610f"),
    "shard": ("#fdf3e2", "#d09a4c"),
    "region": ("#ece4f7", "#7d5fb2"),
    "group": ("#e0f2e9", "#2f8f63"),
}
TEXT = "#1f2933"
#: What is sent between devices, in light and in dark.
SENT = ("#b45309", "#fbbf24")


def to_dot(picture: Picture) -> Digraph:
    """The picture as a Graphviz graph; its `source` is the DOT text."""
    from graphviz import Digraph, escape, nohtml

    dot = Digraph(
        "picture",
        graph_attr={
            "label": nohtml(escape(picture.title)),
            "labelloc": "t",
            "labeljust": "l",
            "fontname": "Helvetica",
            "compound": "true",
            "nodesep": "0.25",
            "ranksep": "0.35",
        },
        node_attr={"fontname": "Helvetica", "fontsize": "11", "style": "filled", "fontcolor": TEXT},
        edge_attr={"fontname": "Helvetica", "fontsize": "10", "color": "#7b8794"},
    )
    inside: dict[str, list[Item]] = {}
    frames: dict[str, list[Cluster]] = {}
    for item in picture.items:
        inside.setdefault(item.cluster, []).append(item)
    for cluster in picture.clusters:
        frames.setdefault(cluster.parent, []).append(cluster)

    def fill(graph: Digraph, cluster: str) -> None:
        for item in inside.get(cluster, ()):
            colour, outline = COLOURS[item.kind]
            rounded = item.kind not in ("tensor", "constant")
            graph.node(
                item.id,
                label=nohtml("\\n".join(escape(line) for line in item.lines)),
                tooltip=escape(item.title or item.lines[0]),
                shape="box",
                style="rounded,filled" if rounded else "filled",
                fillcolor=item.fill or colour,
                color=outline,
            )
        for frame in frames.get(cluster, ()):
            with graph.subgraph(name=f"cluster_{frame.id}") as inner:
                inner.attr(
                    label=nohtml(escape(frame.label)),
                    style="rounded",
                    color="#9aa5b1",
                    fontsize="11",
                )
                fill(inner, frame.id)

    fill(dot, "")
    for link in picture.links:
        dot.edge(
            link.source,
            link.target,
            label=nohtml(escape(link.label)),
            tooltip=escape(link.title or link.label),
            style="dashed" if link.dashed else "solid",
            **({"color": SENT[0], "fontcolor": SENT[0], "penwidth": "2"} if link.sends else {}),
        )
    return dot
