"""The picture of a front: seconds against peak bytes, one dot per plan, drawn as plain SVG.

Two steps, so that tests and other drawings can use the first alone: `front_info` reads a front
into plain data, `plot_front` draws that data. Nothing but the standard library is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from tapestry_egg.atomic import write_atomic
from tapestry_egg.errors import ExtractError, TapestryError
from tapestry_egg.machine.objectives import OBJECTIVES
from tapestry_egg.plans.plan import Plan

Scale = Literal["auto", "linear", "log"]


class FrontLike(Protocol):
    """What a picture needs of a front."""

    @property
    def plans(self) -> Sequence[Plan]: ...


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One plan of a front as numbers. `gap` is a share (0.05 for 5 %), infinite where unknown."""

    name: str
    seconds: float
    peak_bytes: float
    joules: float
    gap: float
    mesh: str
    fits: bool = True  # whether the usable memory of a device holds it
    proven: bool = True  # the gap

    def value(self, objective: str) -> float:
        """The named cost. Raises ExtractError for a cost that a point does not have."""
        if objective not in OBJECTIVES:
            raise ExtractError(
                f"a front cannot be drawn over {objective!r}",
                where="axis",
                hint=f"Axes are {', '.join(OBJECTIVES)}.",
            )
        return float(getattr(self, objective))


@dataclass(frozen=True, slots=True)
class FrontInfo:
    """A front as plain data, ready to draw.

    `x` and `y` name the costs on the axes; smaller is better on both. `points` are sorted by x.
    `stairs` lists the indices of the points that no other point beats on both axes at once: a point
    that is on the front only for its third cost stands above the stairs. `knee` is the index of the
    point furthest below the straight line (in ratios) between the two ends of the stairs, None
    where there is none. `original` is the program as it came, where it was costed. `over_memory`
    says what it means that a point does not fit.
    """

    title: str
    x: str
    y: str
    points: tuple[FrontPoint, ...]
    stairs: tuple[int, ...]
    knee: int | None
    original: FrontPoint | None = None
    over_memory: str = ""


def front_point(plan: Plan, fits: bool = True) -> FrontPoint:
    """The numbers of one plan."""
    return FrontPoint(
        name=plan.name,
        seconds=plan.costs.seconds,
        peak_bytes=float(plan.costs.peak_bytes),
        joules=plan.costs.joules,
        gap=plan.gap,
        mesh=str(plan.mesh),
        fits=fits,
        proven=plan.is_proven,
    )


def front_info(
    front: FrontLike,
    *,
    x: str = "peak_bytes",
    y: str = "seconds",
) -> FrontInfo:
    """Read `front` into plain data, over the costs `x` and `y`; the front's `original`, where it
    has one, is shown as the starting point."""
    plans = tuple(front.plans)
    title = f"{plans[0].graph.name} on {plans[0].target}" if plans else "empty front"
    start = getattr(front, "original", None)
    fits: Callable[[Plan], bool] = getattr(front, "fits", lambda plan: True)
    over_memory: Callable[[], str] = getattr(front, "over_memory", lambda: "")
    return replace(
        info_of_points(
            (front_point(plan, fits(plan)) for plan in plans),
            x=x,
            y=y,
            title=title,
            original=front_point(start) if isinstance(start, Plan) else None,
        ),
        over_memory=over_memory(),
    )


def info_of_points(
    points: Iterable[FrontPoint],
    *,
    x: str = "peak_bytes",
    y: str = "seconds",
    title: str = "",
    original: FrontPoint | None = None,
) -> FrontInfo:
    """As `front_info`, from the numbers alone."""
    ordered = tuple(sorted(points, key=lambda p: (p.value(x), p.value(y), p.name)))
    stairs: list[int] = []
    for i, point in enumerate(ordered):
        if not stairs or point.value(y) < ordered[stairs[-1]].value(y):
            stairs.append(i)
    return FrontInfo(
        title=title,
        x=x,
        y=y,
        points=ordered,
        stairs=tuple(stairs),
        knee=_knee([(ordered[i].value(x), ordered[i].value(y)) for i in stairs], stairs),
        original=original,
    )


def _knee(corners: Sequence[tuple[float, float]], index: Sequence[int]) -> int | None:
    """The corner furthest below the chord between the ends, in ratios where all are positive."""
    if len(corners) < 3:
        return None
    if all(x > 0 and y > 0 for x, y in corners):
        corners = [(math.log(x), math.log(y)) for x, y in corners]
    (x0, y0), (x1, y1) = corners[0], corners[-1]
    if not (x1 > x0 and y0 > y1):
        return None
    depth = [1.0 - (x - x0) / (x1 - x0) - (y - y1) / (y0 - y1) for x, y in corners]
    best = max(range(len(corners)), key=lambda i: depth[i])
    return index[best] if depth[best] > 0 else None


def plot_front(info: FrontInfo, path: str | Path, *, scale: Scale = "auto") -> Path:
    """Draw `info` into the file `path` and return it. The file appears whole or not at all.

    `scale` is that of both axes; `auto` takes a logarithmic one where an axis spans more than a
    factor of eight. Raises TapestryError for a name with another ending than `.svg`.
    """
    from .chart import front_svg

    path = Path(path)
    if path.suffix.lower() not in ("", ".svg"):
        raise TapestryError(
            f"a front cannot be drawn as {path.suffix}",
            where=str(path),
            hint="Call the file .svg; browsers and Inkscape turn SVG into other formats.",
        )
    write_atomic(path, front_svg(info, scale=scale))
    return path
