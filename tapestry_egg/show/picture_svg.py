"""Pages of pictures as one SVG: a click on a box opens its page; nothing is loaded.

Every box is a group of class `item` with the id of its item, every arrow one of class `link` with
the ids of its ends in `data-source` and `data-target`, so that a picture can be read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from tapestry_egg.printable import printable, xml_text

from .chart import FONT, text_width
from .layout import Edge, Placed, placed
from .picture import COLOURS, SENT, TEXT, Item, Link, Page, Picture

#: The points of arrows, and of those along which something is sent.
_TIP = "<defs>{}</defs>".format(
    "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerUnits="userSpaceOnUse" '
        f'markerWidth="8" markerHeight="8" orient="auto"><path class="{name}" '
        f'd="M0 0.8L8 4L0 7.2Z"/></marker>'
        for name in ("tip", "sent")
    )
)
_LINE, _SMALL = 14.0, 10.5  # height of a line of text; size of labels on arrows
_MARGIN = 16.0
_WAY = 26.0  # height of the links back

_STYLE = f"""
  .item text {{ fill: {TEXT}; }} .head {{ fill: #374151; }} .note {{ fill: #6b7280; }}
  .link path {{ stroke: #7b8794; stroke-width: 1.1; fill: none; }} .link text {{ fill: #374151; }}
  .sends path {{ stroke: {SENT[0]}; stroke-width: 2; }} .sends text {{ fill: {SENT[0]}; }}
  .tip {{ fill: #7b8794; }} .sent {{ fill: {SENT[0]}; }}
  .link text {{ paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round; }}
  [data-opens] {{ cursor: pointer; }} .way {{ fill: #2563eb; font-size: 12px; }}
  [data-opens]:hover rect {{ stroke-width: 2.5; }} [data-opens]:hover .way,
  [data-opens]:focus {{ outline: none; }} [data-opens]:focus-visible rect {{ stroke-width: 3.5; }}
  :focus-visible > .way {{ text-decoration: underline; }}
  @media (prefers-color-scheme: dark) {{
    .head, .link text {{ fill: #e5e7eb; }} .note {{ fill: #9ca3af; }} .way {{ fill: #93c5fd; }}
    .link text {{ stroke: #14181d; }}
    .sends path {{ stroke: {SENT[1]}; }} .sends text, .sent {{ fill: {SENT[1]}; }}
  }}
"""


def zoom_script() -> str:
    """The function `zoomable(svg)` that makes boxes of such an SVG open."""
    return Path(__file__).with_name("zoom.js").read_text("utf-8")


@dataclass(frozen=True)
class DrawnPage:
    """A page as a group of an SVG that has others."""

    title: str
    width: float
    height: float
    text: str


def pages_svg(pages: Sequence[DrawnPage], *, alone: bool = False) -> str:
    """Pages as one SVG that shows the first. If it stands `alone`, it has the script that opens the
    others. A box does not open if its page is not among them."""
    first = pages[0]
    size = f"{first.width:.0f} {first.height:.0f}"
    scheme = "  :root { color-scheme: light dark; }" if alone else ""
    script = [f"<script>//<![CDATA[\n{zoom_script()}"] if alone else []
    script += ["zoomable(document.documentElement);\n//]]></script>"] if alone else []
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="zoom" viewBox="0 0 {size}" '
            f'width="{first.width:.0f}" height="{first.height:.0f}" font-family="{FONT}" '
            f'role="group" aria-label={quoteattr(printable(first.title))}>',
            f"<style>{_STYLE}{scheme}</style>",
            _TIP,
            *(page.text for page in pages),
            *script,
            "</svg>",
            "",
        ]
    )


def drawn_page(page: Page, by: Mapping[str, Page]) -> DrawnPage:
    """A page among those of its program by name, hidden but for the first."""
    way, x = [], _MARGIN
    for one in reversed(_around(page, by)):
        words = f"{one.picture.title} /"
        way.append(
            f'<g data-opens={quoteattr(one.id)} tabindex="0" role="button">'
            f'<text class="way" x="{x:.1f}" y="20">{xml_text(printable(words))}</text></g>'
        )
        x += text_width(words, 12) + 10
    width, height, elements = _drawn(page.picture, x)
    shift = _WAY if way else 0.0
    hidden = ' display="none"' if page.parent else ""
    parts = [
        f"<g data-page={quoteattr(page.id)} data-parent={quoteattr(page.parent)} "
        f'data-size="{width:.0f} {height + shift:.0f}"{hidden}>',
        *way,
        f'<g transform="translate(0 {shift:.0f})">',
        *elements,
        "</g></g>",
    ]
    return DrawnPage(page.picture.title, width, height + shift, "\n".join(parts))


def _around(page: Page, by: Mapping[str, Page]) -> list[Page]:
    """The pages that lead to one, innermost first."""
    found = []
    while page.parent:
        page = by[page.parent]
        found.append(page)
    return found


def _drawn(picture: Picture, least: float) -> tuple[float, float, list[str]]:
    """Width, height and elements of a picture."""
    number = {item.id: k for k, item in enumerate(picture.items)}
    sizes = [_size(item) for item in picture.items]
    edges = [
        Edge(number[k.source], number[k.target], text_width(k.label, _SMALL) if k.label else 0.0)
        for k in picture.links
    ]
    found = placed(sizes, edges)
    titles = [text_width(picture.title, 15), text_width(picture.subtitle, 11)]
    inner = max(found.width, *titles, 320.0 if picture.legend else 0.0, least - _MARGIN)
    legend, head = _legend(picture, inner, 44.0 if picture.subtitle else 26.0)
    left, top = _MARGIN + (inner - found.width) / 2, _MARGIN + head
    parts = [
        f'<text class="head" x="{_MARGIN}" y="{_MARGIN + 14}" font-size="15" font-weight="600">'
        f"{xml_text(picture.title)}</text>",
        f'<text class="note" x="{_MARGIN}" y="{_MARGIN + 32}" font-size="11">'
        f"{xml_text(picture.subtitle)}</text>",
        *legend,
        f'<g transform="translate({left:.1f} {top:.1f})">',
        *(_arrow(link, k, found) for k, link in enumerate(picture.links)),
        *map(_box, picture.items, found.centres, sizes),
        "</g>",
    ]
    return inner + 2 * _MARGIN, found.height + head + 2 * _MARGIN, parts


def _size(item: Item) -> tuple[float, float]:
    # The first line is bold, which is wider.
    widths = [text_width(line, 13.5 if k == 0 else 11) for k, line in enumerate(item.lines)]
    return max(widths) + 18, _LINE * len(item.lines) + (16 if item.bands else 10)


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


def _arrow(link: Link, k: int, found: Placed) -> str:
    first, *rest = (f"{x:.1f} {y:.1f}" for x, y in found.routes[k])
    label, text = found.labels[k], ""
    if label:
        text = (
            f'<text x="{label[0]:.1f}" y="{label[1] + 3.5:.1f}" font-size="{_SMALL}" '
            f'text-anchor="middle">{xml_text(link.label)}</text>'
        )
    kind, tip = ("link sends", "sent") if link.sends else ("link", "tip")
    words = link.title or link.label
    title = f"<title>{xml_text(words)}</title>" if words else ""
    return (
        f'<g class="{kind}" data-source={quoteattr(link.source)} '
        f"data-target={quoteattr(link.target)}>{title}"
        f'<path d="M{first}C{" ".join(rest)}" marker-end="url(#{tip})"/>{text}</g>'
    )


def _box(item: Item, centre: tuple[float, float], size: tuple[float, float]) -> str:
    (x, y), (w, h) = centre, size
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
        label = quoteattr(printable(f"open {item.lines[0]}"))
        opens = f' data-opens={quoteattr(item.opens)} tabindex="0" role="button" aria-label={label}'
    return (
        f'<g class="item {item.kind}" id={quoteattr(item.id)}{opens}>'
        f"<title>{xml_text(item.title or item.lines[0])}</title>"
        f'<rect x="{x - w / 2:.1f}" y="{y - h / 2:.1f}" width="{w:.1f}" height="{h:.1f}" '
        f'rx="{radius}" fill="{item.fill or fill}" stroke="{outline}"/>{bands}{"".join(lines)}</g>'
    )
