"""The drawing of a front as SVG text: axes, staircase, dots, and labels beside the dots.

Colours are readable on a light and on a dark page; every dot carries its plan's numbers as a
title, which browsers show when the pointer rests on it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tapestry_egg.machine.objectives import SEARCHED, named
from tapestry_egg.printable import xml_text
from tapestry_egg.quantities import TIME, format_number

from .plot import FrontInfo, FrontPoint, Scale

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 66, 724, 92, 392
FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"

# Mid tones with enough contrast on white and on near black.
_PALETTE = (
    "#3b82c4",
    "#d97834",
    "#3a9d6e",
    "#a866b8",
    "#c75450",
    "#2d9aa8",
    "#94852f",
    "#7a7fd0",
)
_STYLE = """
  text { fill: #4b5563; } .strong { fill: #111827; font-weight: 600; }
  .line { stroke: #9ca3af; } .grid { stroke: #9ca3af; stroke-opacity: 0.2; }
  .stairs { stroke: #6b7280; fill: none; } .beaten { fill: #6b7280; fill-opacity: 0.06; }
  .hollow { stroke: #6b7280; fill: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #b4bcc8; } .strong { fill: #f3f4f6; }
  }
"""


def front_svg(info: FrontInfo, *, scale: Scale = "auto") -> str:
    """The SVG text of the picture of `info`."""
    shown = [*info.points, *([info.original] if info.original else [])]
    x = fit_axis(info.x, [p.value(info.x) for p in shown], LEFT, RIGHT, scale)
    y = fit_axis(info.y, [p.value(info.y) for p in shown], BOTTOM, TOP, scale)
    colours = _colours({p.mesh for p in info.points})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="{FONT}" font-size="12" role="img">',
        f"<title>{xml_text(info.title)}</title>",
        f"<style>{_STYLE}</style>",
        *_heading(info, colours),
        *_axes(x, y),
        *_footnote(info),
        *_stairs(info, x, y),
    ]
    if info.original:
        parts.append(_square(info.original, x.at(info.original.value(info.x)), y, info))
    # Dots off the stairs first, so that those on it lie on top.
    on_stairs = set(info.stairs)
    for i in sorted(range(len(info.points)), key=lambda i: (i in on_stairs, i)):
        point = info.points[i]
        at = (x.at(point.value(info.x)), y.at(point.value(info.y)))
        parts.append(_dot(point, at, colours[point.mesh], i in on_stairs))
    parts += _labels(info, x, y)
    return "\n".join([*parts, "</svg>", ""])


def _colours(meshes: set[str]) -> dict[str, str]:
    """A colour per mesh shape, the same in every figure unless two of one figure would share it."""
    taken: dict[str, str] = {}
    for mesh in sorted(meshes):
        start = int.from_bytes(hashlib.sha256(mesh.encode()).digest()[:2])
        turn = [_PALETTE[(start + k) % len(_PALETTE)] for k in range(len(_PALETTE))]
        taken[mesh] = next((c for c in turn if c not in taken.values()), turn[0])
    return taken


def _heading(info: FrontInfo, colours: dict[str, str]) -> list[str]:
    count = len(info.points)
    gaps, proven = [p.gap for p in info.points], all(p.proven for p in info.points)
    words = [f"{count} plan{'' if count == 1 else 's'}"]
    if gaps and all(math.isfinite(g) for g in gaps):
        words.append(f"each within {_gap(max(0.0, *gaps), proven)} of its bound")
    words.append("lower left is better")
    parts = [
        f'<text class="strong" x="{LEFT}" y="24" font-size="16">{xml_text(info.title)}</text>',
        f'<text x="{LEFT}" y="44">{"; ".join(words)}</text>',
    ]
    # The meshes by colour, right-aligned on the line of the y axis' own label.
    place = float(RIGHT)
    for mesh in sorted(colours, reverse=True):
        place -= text_width(mesh, 12)
        parts.append(f'<text x="{place:.1f}" y="{TOP - 16}">{xml_text(mesh)}</text>')
        place -= 10
        parts.append(f'<circle cx="{place:.1f}" cy="{TOP - 20}" r="4.5" fill="{colours[mesh]}"/>')
        place -= 22
    return parts


def _axes(x: Axis, y: Axis) -> list[str]:
    parts = []
    for value, text in x.ticks():
        at = x.at(value)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{BOTTOM}"/>'
            f'<text x="{at:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{text}</text>'
        )
    for value, text in y.ticks():
        at = y.at(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{RIGHT}" y2="{at:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
        )
    parts += [
        f'<path class="line" fill="none" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>',
        f'<text x="{LEFT}" y="{TOP - 16}">{xml_text(y.label)}</text>',
        f'<text x="{RIGHT}" y="{BOTTOM + 38}" text-anchor="end">{xml_text(x.label)}</text>',
    ]
    return parts


def _footnote(info: FrontInfo) -> list[str]:
    words = []
    if len(info.stairs) != len(info.points):
        third = next(o for o in SEARCHED if o.name not in (info.x, info.y))
        words.append(f"pale: on the front for its {third.title}")
    if info.over_memory:
        words.append(f"ring: {info.over_memory}")
    if not words:
        return []
    return [f'<text x="{LEFT}" y="{BOTTOM + 38}">{xml_text("; ".join(words))}</text>']


def _stairs(info: FrontInfo, x: Axis, y: Axis) -> list[str]:
    """The line below which no plan lies, and a shade over everything that some plan beats."""
    if not info.stairs:
        return []
    corners = [
        (x.at(info.points[i].value(info.x)), y.at(info.points[i].value(info.y)))
        for i in info.stairs
    ]
    steps = [f"M{corners[0][0]:.1f} {corners[0][1]:.1f}"]
    steps += [f"H{px:.1f}V{py:.1f}" for px, py in corners[1:]]
    line = "".join(steps)
    tail = f"M{corners[0][0]:.1f} {TOP}V{corners[0][1]:.1f}M{corners[-1][0]:.1f} "
    tail += f"{corners[-1][1]:.1f}H{RIGHT}"
    return [
        f'<path class="beaten" d="{line}H{RIGHT}V{TOP}H{corners[0][0]:.1f}Z"/>',
        f'<path class="stairs" stroke-width="1.4" d="{line}"/>',
        f'<path class="stairs" stroke-width="1.2" stroke-dasharray="3 4" d="{tail}"/>',
    ]


def _dot(point: FrontPoint, at: tuple[float, float], colour: str, on_stairs: bool) -> str:
    look = f'fill="{colour}"' if on_stairs else f'fill="{colour}" fill-opacity="0.35"'
    radius = 5.5 if on_stairs else 4.5
    if not point.fits:
        look = f'fill="none" stroke="{colour}" stroke-width="1.6" pointer-events="all"'
    return (
        f"<g><title>{xml_text(_details(point))}</title>"
        f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius}" {look}/></g>'
    )


def _square(point: FrontPoint, px: float, y: Axis, info: FrontInfo) -> str:
    py = y.at(point.value(info.y))
    return (
        f"<g><title>{xml_text('original: ' + _details(point))}</title>"
        f'<rect class="hollow" stroke-width="1.6" x="{px - 5:.1f}" y="{py - 5:.1f}" '
        f'width="10" height="10" pointer-events="all"/></g>'
    )


def _details(point: FrontPoint) -> str:
    known = math.isfinite(point.gap)
    gap = f"gap {_gap(point.gap, point.proven)}" if known else "no bound"
    numbers = (o.format(point.value(o.name)) for o in SEARCHED)
    mark = "" if point.fits else ", more than a device's memory"
    return f"{point.name} ({point.mesh}): {', '.join(numbers)}, {gap}{mark}"


def _gap(gap: float, proven: bool) -> str:
    """`2.3 %`, with `~` where that is no proof."""
    return f"{'' if proven else '~'}{100 * gap:.2g} %"


def _labels(info: FrontInfo, x: Axis, y: Axis) -> list[str]:
    """Names beside the dots. One that finds no room is left out; the dot shows it on hovering."""
    centres = [(x.at(p.value(info.x)), y.at(p.value(info.y))) for p in info.points]
    stairs = [centres[i] for i in info.stairs]
    wishes = [Wish(_rank(info, i), *centres[i], p.name) for i, p in enumerate(info.points)]
    if info.original:
        at = (x.at(info.original.value(info.x)), y.at(info.original.value(info.y)))
        centres.append(at)
        wishes.append(Wish(0, *at, "original"))
    dots = [Box(px - 7, py - 7, px + 7, py + 7) for px, py in centres]
    frame = Box(LEFT + 2, TOP - 8, WIDTH - 4, BOTTOM - 1)
    parts = []
    for label in place_labels(wishes, dots + _stair_boxes(stairs), frame):
        style = ' class="strong"' if label.bold else ""
        parts.append(
            f'<text{style} x="{label.x:.1f}" y="{label.y:.1f}" font-size="{SIZE}" '
            f'text-anchor="{label.anchor}">{xml_text(label.name)}</text>'
        )
    return parts


def _rank(info: FrontInfo, index: int) -> int:
    """0 for the knee and the ends of the stairs, 1 for the rest of the stairs, 2 for the others."""
    if index == info.knee or index in (info.stairs[0], info.stairs[-1]):
        return 0
    return 1 if index in info.stairs else 2


def _stair_boxes(corners: Sequence[tuple[float, float]]) -> list[Box]:
    """The staircase and its dashed ends as thin boxes."""
    if not corners:
        return []
    (first_x, first_y), (last_x, last_y) = corners[0], corners[-1]
    boxes = [
        Box(first_x - 1, TOP, first_x + 1, first_y),
        Box(last_x, last_y - 1, RIGHT, last_y + 1),
    ]
    for (x0, y0), (x1, y1) in pairwise(corners):
        boxes.append(Box(x0, y0 - 1, x1, y0 + 1))
        boxes.append(Box(x1 - 1, min(y0, y1), x1 + 1, max(y0, y1)))
    return boxes


# Where the names beside dots stand: near their dot, over nothing else, inside the frame.


Anchor = Literal["start", "middle", "end"]

#: Font size of labels, in pixels.
SIZE = 11.5


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of the page, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def within(self, frame: Box) -> bool:
        return (
            self.left >= frame.left
            and self.right <= frame.right
            and self.top >= frame.top
            and self.bottom <= frame.bottom
        )


@dataclass(frozen=True, order=True, slots=True)
class Wish:
    """A name for the dot at (x, y). Lower ranks choose first; rank 0 is set in bold."""

    rank: int
    x: float
    y: float
    name: str


@dataclass(frozen=True, slots=True)
class Label:
    """A name with its place."""

    name: str
    bold: bool
    x: float
    y: float
    anchor: Anchor


# Where a label may stand relative to its dot, best first: above right (away from the inner corners
# of descending stairs), then around.
_BESIDE: tuple[tuple[float, float, Anchor], ...] = (
    (9, -7, "start"),
    (-9, 14, "end"),
    (10, 4, "start"),
    (-10, 4, "end"),
    (0, -11, "middle"),
    (0, 20, "middle"),
    (9, 15, "start"),
    (-9, -7, "end"),
)


def place_labels(wishes: Iterable[Wish], obstacles: Sequence[Box], frame: Box) -> list[Label]:
    """Give every wish a place that covers no obstacle and no other label; some may find none."""
    taken = list(obstacles)
    labels = []
    for wish in sorted(wishes):
        if found := _place(wish, taken, frame):
            labels.append(found[0])
            taken.append(found[1])
    return labels


def _place(wish: Wish, taken: Sequence[Box], frame: Box) -> tuple[Label, Box] | None:
    width = text_width(wish.name) * (1.08 if wish.rank == 0 else 1.0)
    offset = {"start": 0.0, "middle": width / 2, "end": width}
    for dx, dy, anchor in _BESIDE:
        x, y = wish.x + dx, wish.y + dy
        left = x - offset[anchor]
        box = Box(left - 2, y - 10, left + width + 2, y + 3)
        if box.within(frame) and not any(box.overlaps(t) for t in taken):
            return Label(wish.name, wish.rank == 0, x, y, anchor), box
    return None


def text_width(text: str, size: float = SIZE) -> float:
    """Pixels that `text` takes, estimated generously: fonts differ from reader to reader."""
    narrow = sum(c in "iljt.,:;|!'()[] " for c in text)
    wide = sum(c in "mwMW@%×" for c in text)
    return size * (0.6 * len(text) - 0.27 * narrow + 0.28 * wide)


# One axis of a drawing: from values to pixels, and where the ticks stand.


#: A logarithmic axis is chosen where the largest value is more than this times the smallest.
LOG_FROM = 8.0

#: A linear axis starts at zero where the smallest value is less than this times the largest.
ZERO_BELOW = 0.3

#: What is not above this counts as zero.
_TINY = 1e-30

#: Steps within a decade, coarse to fine; the first that gives enough ticks is taken.
_DECADES: tuple[tuple[float, ...], ...] = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
)


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high` laid over the pixels from `start` to `end` (`end` may be less).

    `unit` is the (name, size) of the unit that the tick labels count.
    """

    title: str
    unit: tuple[str, float]
    low: float
    high: float
    log: bool
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value; values outside are put on the nearer end."""
        low, high, value = (self._scaled(v) for v in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return self.start + (self.end - self.start) * min(1.0, max(0.0, share))

    def _scaled(self, value: float) -> float:
        if not self.log:
            return value
        return math.log(value) if value > 0 else -math.inf

    @property
    def label(self) -> str:
        """What the axis measures, with its unit: `time per step (ms)`."""
        name = self.unit[0]
        return f"{self.title} ({name})" if name else self.title

    def ticks(self) -> list[tuple[float, str]]:
        """Values and texts of four to eight round ticks, in increasing order."""
        size = self.unit[1]
        low, high = self.low / size, self.high / size
        marks = _log_marks(low, high) if self.log else _linear_marks(low, high)
        return [(m * size, format_number(m, 6)) for m in marks]


def fit_axis(
    objective: str, values: Sequence[float], start: float, end: float, scale: str = "auto"
) -> Axis:
    """An axis for `values` of `objective`, with some air at both ends.

    A linear axis starts at zero where that costs little room. An axis with a value
    of zero is linear whatever `scale` asks.
    """
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    log = low > _TINY and (scale == "log" or (scale == "auto" and high > LOG_FROM * low))
    if log:
        air = (high / low) ** 0.08 if high > low else 1.25
        low, high = low / air, high * air
    else:
        air = 0.1 * (high - low) or 0.2 * abs(high) or 1.0
        low, high = (low - air if low > ZERO_BELOW * high else min(0.0, low)), high + air
    measured = named(objective)
    middle = math.sqrt(low * high) if log else 0.5 * (low + high)
    return Axis(measured.title, measured.quantity.unit_for(middle), low, high, log, start, end)


def time_axis(seconds: float, start: float, end: float) -> Axis:
    """An axis from the begin of a step to its end."""
    unit = TIME.unit_for(0.5 * seconds)
    return Axis("time", unit, 0.0, seconds or 1.0, False, start, end)


def _linear_marks(low: float, high: float) -> list[float]:
    raw = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1.0, 2.0, 2.5, 5.0, 10.0) if s * power >= raw * 0.85)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [float(f"{(first + i) * step:.12g}") for i in range(count)]


def _log_marks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in _DECADES:
        marks = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
        if len(marks) > 8:
            return marks[:: math.ceil(len(marks) / 8)]
        if len(marks) >= 4:
            return marks
    return _linear_marks(low, high)
