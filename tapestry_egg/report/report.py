"""The report of a front: one page that opens from disk, with the picture, the table, every plan."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapestry_egg.atomic import write_atomic
from tapestry_egg.egraphs.timeline import timeline_text
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.notes import Note
from tapestry_egg.machine.objectives import COSTS, PEAK_BYTES
from tapestry_egg.plans.plan import Plan
from tapestry_egg.printable import printable
from tapestry_egg.show.chart import front_svg
from tapestry_egg.show.picture_svg import zoom_script
from tapestry_egg.show.plot import front_info

from .page_data import page_data
from .runs import Run


def _escape(text: str) -> str:
    """Text as HTML, control characters written out."""
    return html.escape(printable(text))


def write_report(
    front: Front,
    path: str | Path,
    runs: Mapping[str, Run] | None = None,
    baselines: Sequence[Plan] = (),
) -> Path:
    """Write the page and return its path: a file of that name if it ends in `.html`, else
    `index.html`, with `front.svg` beside it, in a folder of that name. Plans in `runs` have pages
    with what was planned and what was compiled; `baselines` stand beside the front.

    The page needs nothing but itself: no font, no address is loaded.
    """
    path = Path(path)
    picture = front_svg(front_info(front))
    if path.suffix.lower() not in (".html", ".htm"):
        write_atomic(path / "front.svg", picture)
        path = path / "index.html"
    write_atomic(path, _page(front, picture, runs or {}, baselines))
    return path


def _page(front: Front, picture: str, runs: Mapping[str, Run], baselines: Sequence[Plan]) -> str:
    title = f"{front.graph_name} on {front.target}"
    status = "" if front.saturated else " A rule budget was hit: bounds speak of what was reached."
    data = _json(page_data(front, runs, baselines))
    own = Path(__file__).parent
    script, style = ((own / name).read_text("utf-8") for name in ("page.js", "page.css"))
    choices = "".join(
        f'<label>{word} <select id="{name}"></select></label> '
        for word, name in (("across", "across"), ("up", "up"))
    )
    pair = "".join(
        f'<label>{word} <select id="{word}"></select></label> ' for word in ("from", "to")
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_escape(title)}</title><style>{style}</style></head><body>",
            f"<main><h1>{_escape(title)}</h1>",
            f"<noscript>{picture}<p>Without scripts this page has the picture and the table.</p>"
            "</noscript>",
            f'<p class="tools">{choices}</p><div id="chart"></div>'
            '<p id="said" role="status">Points are plans: arrow keys walk, Enter chooses. '
            "A line below a point leads to its bound.</p>",
            f"<p>Each plan runs and gives the program's own numbers. A plan's gap is how far its "
            f"time may be above the least possible at its other costs; with ~ that is no proof."
            f"{status}</p>",
            f'<div class="wide">{_table(front, baselines)}</div>',
            *([f"<p>! {_escape(front.over_memory())}</p>"] if front.over_memory() else []),
            *([f"<p>{_escape(front.left_unused())}</p>"] if front.left_unused() else []),
            *_notes(front),
            '<section id="plan" aria-live="polite"></section>',
            f'<h2>From one plan to another</h2><p class="tools">{pair}</p>',
            '<section id="difference"></section>',
            *([_timeline(front)] if front.timeline else []),
            "</main>",
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{zoom_script()}{script}</script>",
            "</body></html>",
            "",
        ]
    )


def _json(data: Any) -> str:
    """Data inside a page, where nothing in it can end the script."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _table(front: Front, baselines: Sequence[Plan]) -> str:
    heads = ["plan", "mesh", *(o.column for o in COSTS), "gap"]
    rows = [f"<tr>{''.join(f'<th>{word}</th>' for word in heads)}</tr>"]
    for row, plan in enumerate((*front.every, *baselines)):
        name = _escape(plan.name)
        marks = {PEAK_BYTES.name: "" if front.fits(plan) else " !"}
        cells = [
            f'<a href="#{name}">{name}</a>',
            _escape(str(plan.mesh)),
            *(o.format(o.value(plan)) + marks.get(o.name, "") for o in COSTS),
            plan.gap_shown,
        ]
        rows.append(f'<tr data-row="{row}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
    return f"<table>{''.join(rows)}</table>"


def _notes(front: Front) -> list[str]:
    """The front's notes, and below a heading what was not searched."""

    def item(note: Note) -> str:
        change = f" To change it: {note.setting}." if note.setting else ""
        return _escape(f"{note.text}.{change}" if note.effect == "space" else f"{note}{change}")

    lines = [f"<p>{item(note)}</p>" for note in front.notes if note.effect != "space"]
    if items := "".join(f"<li>{item(n)}</li>" for n in front.notes if n.effect == "space"):
        lines.append(f'<h2 id="not-searched">Not searched</h2><ul>{items}</ul>')
    return lines


def _timeline(front: Front) -> str:
    return (
        "<h2>Rules</h2><details><summary>What the rules did, iteration by iteration</summary>"
        f"<pre>{_escape(timeline_text(front.timeline))}</pre></details>"
    )
