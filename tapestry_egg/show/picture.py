"""What pictures of graphs show: pages of boxes and arrows, before they are laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tapestry_egg.errors import GraphError

Kind = Literal["tensor", "constant", "operation", "kernel", "shard", "region", "group"]


@dataclass(frozen=True, slots=True)
class Item:
    """A box with lines of text, of which the first is its name.

    A pointer that rests on it shows `title`. `fill` replaces the colour of its kind. `bands` are
    colours at its lower edge, each with the share that it takes. A click opens the page `opens`.
    """

    id: str
    kind: Kind
    lines: tuple[str, ...]
    title: str = ""
    fill: str = ""
    bands: tuple[tuple[str, float], ...] = ()
    opens: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """An arrow between items; `sends` where devices send what moves along it."""

    source: str
    target: str
    label: str = ""
    title: str = ""
    sends: bool = False


@dataclass(frozen=True)
class Picture:
    """Boxes and arrows; `legend` says what colours mean, as (colour, words).

    Raises GraphError for a link that ends nowhere, or two items of one name.
    """

    title: str
    items: tuple[Item, ...]
    links: tuple[Link, ...]
    subtitle: str = ""
    legend: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        ids = {i.id for i in self.items}
        loose = {end for link in self.links for end in (link.source, link.target)} - ids
        if len(ids) != len(self.items) or loose:
            raise GraphError(f"a picture with loose ends: {sorted(loose)[:5]}", where=self.title)


@dataclass(frozen=True)
class Page:
    """A picture by name, and the page with the box that opens it; the first page has none."""

    id: str
    parent: str
    picture: Picture


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


def dot_text(pages: Sequence[Page]) -> str:
    """Pages as text for Graphviz: each one is a cluster."""
    head = "node [shape=box style=filled fontname=Helvetica fontsize=11]; compound=true;"
    lines = ["digraph picture {", head, "edge [fontname=Helvetica fontsize=10];"]
    for page in pages:
        lines += [f"subgraph {_quoted(f'cluster_{page.id}')} {{"]
        lines += [f"label={_quoted(page.picture.title)};"]
        for item in page.picture.items:
            fill, outline = COLOURS[item.kind]
            said = f"label={_quoted(*item.lines)} tooltip={_quoted(item.title or item.lines[0])}"
            lines.append(
                f'{_quoted(item.id)} [{said} fillcolor="{item.fill or fill}" color="{outline}"];'
            )
        for link in page.picture.links:
            colour = f' color="{SENT[0]}" penwidth=2' if link.sends else ""
            ends = f"{_quoted(link.source)} -> {_quoted(link.target)}"
            said = f"label={_quoted(link.label)} tooltip={_quoted(link.title or link.label)}"
            lines.append(f"{ends} [{said}{colour}];")
        lines.append("}")
    return "\n".join([*lines, "}", ""])


def _quoted(*lines: str) -> str:
    """Lines of text as one string of Graphviz."""
    plain = (line.replace("\\", "\\\\").replace('"', '\\"').replace("\0", "") for line in lines)
    return '"{}"'.format("\\n".join(plain))
