"""The pictures of a plan in one SVG: a click on a box opens it; it loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
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
    write_atomic(path, to_dot(pages[0].picture).source if dot else pages_svg(pages, alone=True))
    return path


def zoom_script() -> str:
    """The function `zoomable(svg)` that makes boxes of such an SVG open."""
    return Path(__file__).with_name("zoom.js").read_text("utf-8")


def pages_svg(pages: Sequence[Page], *, alone: bool = False) -> str:
    """Pages as one SVG that shows the first; `alone` it has the script that opens others."""
    by = {page.id: page for page in pages}
    sizes, parts = [], []
    for page in pages:
        width, height, elements = drawn(page.picture)
        way = _way(page, by)
        shift = _TOP if way else 0.0
        width = max(width, *(x + w for x, w, _ in way)) + 16 if way else width
        sizes.append((width, height + shift))
        hidden = "" if page is pages[0] else ' display="none"'
        parts.append(
            f"<g data-page={quoteattr(page.id)} data-parent={quoteattr(page.parent)} "
            f'data-size="{width:.0f} {height + shift:.0f}"{hidden}>'
        )
        parts += [element for _, _, element in way]
        parts.append(f'<g transform="translate(0 {shift:.0f})">' if way else "<g>")
        parts += [*elements, "</g></g>"]
    width, height = sizes[0]
    scheme = "  :root { color-scheme: light dark; }" if alone else ""
    script = [f"<script>//<![CDATA[\n{zoom_script()}"] if alone else []
    script += ["zoomable(document.documentElement);\n//]]></script>"] if alone else []
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" font-family="{FONT}" role="group" '
            f"aria-label={quoteattr(printable(pages[0].picture.title))}>",
            f"<style>{STYLE}{_STYLE}{scheme}</style>",
            TIP,
            *parts,
            *script,
            "</svg>",
            "",
        ]
    )


def _way(page: Page, by: dict[str, Page]) -> list[tuple[float, float, str]]:
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
