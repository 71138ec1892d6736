"""The lanes of a plan: what a device does when, and what it holds, as a picture and as a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tapestry_egg.atomic import write_atomic
from tapestry_egg.plans.plan import Lane, Plan
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES, TIME

from .chart import FONT, Axis, text_width, time_axis

_LEFT, _RIGHT, _ROW = 96.0, 1000.0, 34.0  # pixels; _ROW is the height of a lane
_MEMORY = 120.0  # height of the memory curve
_COLOURS: Mapping[str, str] = {"compute": "#3b82f6", "links": "#f59e0b"}
_STYLE = """
  text { fill: #4b5563; } .strong { fill: #111827; font-weight: 600; } .in { fill: #ffffff; }
  .grid { stroke: #9ca3af; stroke-opacity: 0.25; } .alive { fill: #10b981; fill-opacity: 0.25; }
  .edge { stroke: #10b981; fill: none; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) { text { fill: #9ca3af; } .strong { fill: #f3f4f6; } }
"""


def lanes_svg(lanes: Sequence[Lane], memory: Sequence[tuple[float, int]], title: str) -> str:
    """A picture of one step: a lane for each stream, and the bytes alive below, over one time."""
    streams = list(dict.fromkeys(["compute", *(x.stream for x in lanes)]))
    end = max([0.0, *(x.end for x in lanes)])
    x = time_axis(end, _LEFT, _RIGHT)
    top = 62.0
    floor = top + len(streams) * (_ROW + 10) + 18 + _MEMORY
    hidden = sum(one.hidden for one in lanes)
    words = f"{TIME.format(end)} a step"
    if hidden:
        words += f", {TIME.format(hidden)} of collectives beside kernels"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_RIGHT + 24:g}" height="{floor + 52:g}" '
        f'viewBox="0 0 {_RIGHT + 24:g} {floor + 52:g}" font-family="{FONT}" font-size="12">',
        f"<style>{_STYLE}</style>",
        f'<text class="strong" x="16" y="24" font-size="16">{_text(title)}</text>',
        f'<text x="16" y="44">{words}</text>',
        *_grid(x, top, floor),
    ]
    for row, stream in enumerate(streams):
        y = top + row * (_ROW + 10)
        parts.append(f'<text x="16" y="{y + _ROW / 2 + 4:.1f}">{_text(stream)}</text>')
        parts += [_bar(one, x, y) for one in lanes if one.stream == stream]
    parts += _curve(memory, end, x, floor)
    return "\n".join([*parts, "</svg>", ""])


def _grid(x: Axis, top: float, floor: float) -> list[str]:
    parts = []
    for value, text in x.ticks():
        at = x.at(value)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{floor}"/>'
            f'<text x="{at:.1f}" y="{floor + 18}" text-anchor="middle">{text}</text>'
        )
    label = f'<text x="{_RIGHT}" y="{floor + 38}" text-anchor="end">{_text(x.label)}</text>'
    return [*parts, label]


def _bar(one: Lane, x: Axis, y: float) -> str:
    left, right = x.at(one.start), x.at(one.end)
    width = max(right - left - 0.5, 0.5)
    said = [f"{one.name}: {TIME.format(one.start)} to {TIME.format(one.end)}"]
    said += [f"{one.count:g} times"] if one.count != 1 else []
    said += [f"{TIME.format(one.hidden)} hidden"] if one.hidden else []
    said += [one.source] if one.source else []
    inside = ""
    if text_width(one.name, 10) + 6 < width:
        at = f'x="{left + 3:.1f}" y="{y + _ROW / 2 + 4:.1f}"'
        inside = f'<text class="in" {at} font-size="10">{_text(one.name)}</text>'
    return (
        f"<g><title>{_text(', '.join(said))}</title>"
        f'<rect x="{left:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" rx="2" '
        f'fill="{_COLOURS.get(one.stream, "#8b5cf6")}"/>{inside}</g>'
    )


def _curve(memory: Sequence[tuple[float, int]], end: float, x: Axis, floor: float) -> list[str]:
    most = max((amount for _, amount in memory), default=0)
    if not most:
        return []
    path = ""
    for k, (at, amount) in enumerate(memory):
        y = floor - (_MEMORY - 14) * amount / most
        path += f"{'M' if k == 0 else 'H'}{x.at(at):.1f}{' ' if k == 0 else 'V'}{y:.1f}"
    path += f"H{x.at(end):.1f}"
    peak = floor - (_MEMORY - 14)
    return [
        f'<path class="alive" d="{path}V{floor}H{x.at(memory[0][0]):.1f}Z"/>',
        f'<path class="edge" d="{path}"/>',
        f'<text x="16" y="{floor - _MEMORY / 2:.1f}">memory</text>',
        f'<text x="{_LEFT - 6}" y="{peak + 4:.1f}" text-anchor="end">{BYTES.format(most)}</text>',
        f'<text x="{_LEFT - 6}" y="{floor + 4:.1f}" text-anchor="end">0</text>',
    ]


def trace_events(
    lanes: Sequence[Lane], memory: Sequence[tuple[float, int]], title: str
) -> dict[str, Any]:
    """One step in the Trace Event Format (JSON), which Perfetto and chrome://tracing open.

    Streams are threads of one process, the bytes alive a counter; times are in microseconds.
    """
    streams = list(dict.fromkeys(["compute", *(x.stream for x in lanes)]))
    events: list[dict[str, Any]] = [_named("process_name", 0, title)]
    events += [_named("thread_name", k, stream) for k, stream in enumerate(streams)]
    for one in lanes:
        told = {"source": one.source, "times": one.count, "hidden_us": one.hidden * 1e6}
        events.append(
            {
                "name": one.name,
                "ph": "X",
                "pid": 0,
                "tid": streams.index(one.stream),
                "ts": one.start * 1e6,
                "dur": (one.end - one.start) * 1e6,
                "args": told,
            }
        )
    for at, amount in memory:
        counted = {"name": "memory", "ph": "C", "pid": 0, "ts": at * 1e6, "args": {"bytes": amount}}
        events.append(counted)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}


def draw_lanes(plan: Plan, path: str | Path) -> Path:
    """Draw the lanes and the memory of a plan into an SVG file; returns its path."""
    path = Path(path)
    write_atomic(path, lanes_svg(plan.lanes(), plan.memory_curve(), _title(plan)))
    return path


def write_trace(plan: Plan, path: str | Path) -> Path:
    """Write a plan's lanes and memory as a trace that Perfetto opens; returns the file's path."""
    path = Path(path)
    events = trace_events(plan.lanes(), plan.memory_curve(), _title(plan))
    write_atomic(path, json.dumps(events) + "\n")
    return path


def _title(plan: Plan) -> str:
    return f"plan {plan.name} of {plan.graph.name} on {plan.target}, mesh {plan.mesh}"


def _text(words: str) -> str:
    return escape(printable(words))
