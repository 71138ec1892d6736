"""The picture of a front in other formats than SVG, drawn by matplotlib (the extra `plot`)."""

from __future__ import annotations

import io
from importlib import import_module
from pathlib import Path
from typing import Any

from tapestry_egg.atomic import write_atomic
from tapestry_egg.errors import TapestryError
from tapestry_egg.machine.objectives import named
from tapestry_egg.printable import printable

from .plot import FrontInfo, FrontPoint, Scale


def draw_front(info: FrontInfo, path: Path, scale: Scale = "auto") -> None:
    """Draw `info` into a file of the format that its name says: `.png`, `.pdf`, ...

    Raises TapestryError where matplotlib is not installed, or has no such format.
    """
    kind = path.suffix.removeprefix(".").lower()
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError:
        raise TapestryError(
            f"a picture of the format {kind!r} needs matplotlib, which is not installed",
            where=str(path),
            hint="pip install 'tapestry-egg[plot]', or call the file .svg.",
        ) from None
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise TapestryError(
            f"there is no format {kind!r} of pictures",
            where=str(path),
            hint=f"There are {', '.join(sorted(known))}.",
        )
    axes = figure.subplots()
    sizes = [_units([p.value(axis) for p in info.points], axis) for axis in (info.x, info.y)]

    def at(point: FrontPoint) -> tuple[float, float]:
        return point.value(info.x) / sizes[0][1], point.value(info.y) / sizes[1][1]

    for mesh in dict.fromkeys(p.mesh for p in info.points):
        mine = [at(p) for p in info.points if p.mesh == mesh]
        axes.scatter(*zip(*mine, strict=True), label=printable(mesh))
    stairs = [at(info.points[k]) for k in info.stairs]
    if stairs:
        axes.step(*zip(*stairs, strict=True), where="post", color="0.7", zorder=0)
    for p in info.points:
        axes.annotate(printable(p.name), at(p), xytext=(4, 4), textcoords="offset points", size=8)
    if info.original is not None:
        axes.scatter(*at(info.original), marker="s", facecolors="none", edgecolors="0.3")
    for k, name in enumerate((info.x, info.y)):
        title = f"{named(name).title}, {sizes[k][0]}"
        values = [at(p)[k] for p in info.points]
        wide = bool(values) and min(values) > 0 and max(values) > 8 * min(values)
        which = "log" if scale == "log" or (scale == "auto" and wide) else "linear"
        (axes.set_xlabel, axes.set_ylabel)[k](title)
        (axes.set_xscale, axes.set_yscale)[k](which)
    axes.set_title(printable(info.title))
    if info.points:
        axes.legend(title="mesh")
    data = io.BytesIO()
    figure.savefig(data, format=kind)
    write_atomic(path, data.getvalue())


def _units(values: list[float], objective: str) -> tuple[str, float]:
    """The unit (name, size in base units) in which the largest value reads well."""
    return named(objective).quantity.unit_for(max(values, default=0.0))
