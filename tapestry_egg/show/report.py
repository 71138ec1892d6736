"""The report of a front: one page that opens from disk, with the picture, the table, every plan."""

from __future__ import annotations

import html
from pathlib import Path

from tapestry_egg.atomic import write_atomic
from tapestry_egg.columns import percent
from tapestry_egg.egraphs.timeline import timeline_text
from tapestry_egg.extract.front.front import Front
from tapestry_egg.machine.objectives import COSTS, PEAK_BYTES
from tapestry_egg.plans.plan import Plan
from tapestry_egg.printable import printable

from .chart import front_svg
from .plot import front_info
from .text import plan_text

_STYLE = """
body { font: 15px/1.5 Helvetica, Arial, sans-serif; color: #1f2937; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid #e5e7eb; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
summary { cursor: pointer; padding: .3rem 0; }
pre { overflow-x: auto; font-size: 12px; line-height: 1.4; }
@media (prefers-color-scheme: dark) {
  body { color: #d1d5db; background: #111827; } a { color: #93c5fd; }
  th, td { border-color: #374151; }
}
"""


def _escape(text: str) -> str:
    """Text as HTML, control characters written out."""
    return html.escape(printable(text))


def write_report(front: Front, folder: str | Path) -> Path:
    """Write `index.html` and `front.svg` into `folder` and return the page's path.

    The page needs nothing but itself: no script, no font, no address is loaded.
    """
    folder = Path(folder)
    picture = front_svg(front_info(front))
    write_atomic(folder / "front.svg", picture)
    write_atomic(folder / "index.html", _page(front, picture))
    return folder / "index.html"


def _page(front: Front, picture: str) -> str:
    title = f"{front.graph_name} on {front.target}"
    status = "" if front.saturated else " A rule budget was hit: bounds speak of what was reached."
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{_escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{_escape(title)}</h1>",
            picture,
            f"<p>Each plan runs and gives the program's own numbers. A plan's gap is how far its "
            f"time may be above the least possible at its other costs.{status}</p>",
            _table(front),
            *([f"<p>! {_escape(front.over_memory())}</p>"] if front.over_memory() else []),
            *(f"<p>{_escape(note)}</p>" for note in front.notes),
            "<h2>Plans</h2>",
            *(_plan(plan) for plan in _all(front)),
            *([_timeline(front)] if front.timeline else []),
            "</body></html>",
            "",
        ]
    )


def _all(front: Front) -> tuple[Plan, ...]:
    """The plans of the front, and what the user's own shardings lead to."""
    return (*front.plans, *([front.original] if front.original else []))


def _table(front: Front) -> str:
    heads = ["plan", "mesh", *(o.column for o in COSTS), "gap"]
    rows = [f"<tr>{''.join(f'<th>{word}</th>' for word in heads)}</tr>"]
    for plan in _all(front):
        name = _escape(plan.name)
        marks = {PEAK_BYTES.name: "" if front.fits(plan) else " !"}
        cells = [
            f'<a href="#{name}">{name}</a>',
            _escape(str(plan.mesh)),
            *(o.format(o.value(plan)) + marks.get(o.name, "") for o in COSTS),
            percent(plan.gap),
        ]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _timeline(front: Front) -> str:
    return (
        "<h2>Rules</h2><details><summary>What the rules did, iteration by iteration</summary>"
        f"<pre>{_escape(timeline_text(front.timeline))}</pre></details>"
    )


def _plan(plan: Plan) -> str:
    name = _escape(plan.name)
    return (
        f'<details id="{name}"><summary>{name}, mesh {_escape(str(plan.mesh))}</summary>'
        f"<pre>{_escape(plan_text(plan))}</pre></details>"
    )
