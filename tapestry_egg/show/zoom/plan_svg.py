"""The pictures of a plan in one SVG: a click on a box opens it; it loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from tapestry_egg.atomic import write_atomic
from tapestry_egg.plans.plan import Plan
from tapestry_egg.printable import printable
from tapestry_egg.show.chart import FONT
from tapestry_egg.show.drawing import is_dot
from tapestry_egg.show.labels import text_width
from tapestry_egg.show.picture import to_dot
from tapestry_egg.show.picture_svg import STYLE, TIP, drawn

from .pages import Page, plan_pages

_TOP = 26.0  # pixels, of the way back
_STYLE = """
  [data-opens] { cursor: pointer; } .way { fill: #2563eb; font-size: 12px; }
  [data-opens]:hover rect { stroke-width: 2.5; } [data-opens]:hover .way,
  [data-opens]:focus { outline: none; } [data-opens]:focus-visible rect { stroke-width: 3.5; }
  :focus-visible > .way { text-decoration: underline; }
  @media (prefers-color-scheme: dark) { .way { fill: #93c5fd; } }
"""


def draw_plan(plan: Plan, path: str | Path) -> Path:
    """Draw a plan into an SVG that opens from the program to the kernel, or its program into a
    `.dot` file; returns the path. Raises GraphError for endings of other formats."""
    path, dot = Path(path), is_dot(path)
    pages = plan_pages(plan)
    if dot:
        write_atomic(path, to_dot(pages[0].picture).source)
        return path
    by = {page.id: page for page in pages}
    write_atomic(path, pages_svg([drawn_page(page, by) for page in pages], alone=True))
    return path


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


def drawn_page(page: Page, by: Mapping[str, Page]) -> DrawnPage:
    """A page among those of its plan by name, hidden but for the first."""
    width, height, elements = drawn(page.picture)
    way = _way(page, by)
    shift = _TOP if way else 0.0
    width = max([width, *(x + w + 16 for x, w, _ in way)])
    hidden = ' display="none"' if page.parent else ""
    parts = [
        f"<g data-page={quoteattr(page.id)} data-parent={quoteattr(page.parent)} "
        f'data-size="{width:.0f} {height + shift:.0f}"{hidden}>',
        *(element for _, _, element in way),
        f'<g transform="translate(0 {shift:.0f})">',
        *elements,
        "</g></g>",
    ]
    return DrawnPage(page.picture.title, width, height + shift, "\n".join(parts))


def pages_svg(pages: Sequence[DrawnPage], *, alone: bool = False) -> str:
    """Pages as one SVG that shows the first; `alone` it has the script that opens others. A box of
    a page that is not among them does not open."""
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
            f"<style>{STYLE}{_STYLE}{scheme}</style>",
            TIP,
            *(page.text for page in pages),
            *script,
            "</svg>",
            "",
        ]
    )


def _way(page: Page, by: Mapping[str, Page]) -> list[tuple[float, float, str]]:
    """The pages around one, outermost first, each to go back to: (left, width, element)."""
    around: list[Page] = []
    while page.parent:
        page = by[page.parent]
        around.append(page)
    found, x = [], 16.0
    for one in reversed(around):
        words = f"{one.picture.title} /"
        width = text_width(words, 12)
        found.append(
            (
                x,
                width,
                f'<g data-opens={quoteattr(one.id)} tabindex="0" role="button">'
                f'<text class="way" x="{x:.1f}" y="20">{escape(printable(words))}</text></g>',
            )
        )
        x += width + 10
    return found
