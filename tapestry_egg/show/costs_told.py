"""Where a plan's time and memory go, in a few lines: what bounds it, dearest lines, the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapestry_egg.columns import columns, percent, readers_width, starred, told_once
from tapestry_egg.extract.certify.certificate import walked
from tapestry_egg.extract.certify.cost_parts import parts_of
from tapestry_egg.extract.certify.peak_parts import peak_of
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.certify.verdict import Certificate
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.plans.cost_table import CostPart, cost_table
from tapestry_egg.plans.peak import Peak
from tapestry_egg.plans.plan import Plan
from tapestry_egg.quantities import BYTES, OPERATIONS, TIME

#: How layouts are written, said below every answer that has some.
LEGEND = (
    "layouts: per dim the mesh axes that cut it, major to minor; . not cut; +sum(x): partial sums "
    "over x, not added up yet"
)
# Lines of the program, and arrays at the peak, that are told.
_LINES, _ARRAYS = 6, 5
# Columns that a line of the program has beside its costs, at least.
_CODE = 12


def where_costs_go(
    plan: Plan, names: Mapping[str, str], seen: tuple[Walk, Certificate] | None = None
) -> list[str]:
    """Lines on where a plan's seconds and its peak come from; files are called by `names`, and
    `seen` is the plan gone through, where that is at hand.

    Raises ExtractError for a plan of which it is not told what machine it was made for.
    """
    walk, found = seen or walked(plan, "costs")
    kernels, copies = parts_of(walk, found)
    parts = [p for p in (*kernels, *copies) if p.seconds > 0.0]
    return [*_time(plan, parts, names), *_peak(peak_of(walk, found), names)]


def near(source: str, names: Mapping[str, str]) -> str:
    """`FILE:LINE` with the file as it is called here."""
    file, _, line = source.rpartition(":")
    return f"{names.get(file, file)}:{line}" if source else ""


def _time(plan: Plan, parts: list[CostPart], names: Mapping[str, str]) -> list[str]:
    whole = sum(p.seconds for p in parts)
    if not whole:
        return ["time: none"]
    sums = {k: sum(p.seconds for p in parts if p.kind == k) for k in ("kernel", "collective")}
    hidden = sum(p.hidden for p in parts)
    beside = f", {TIME.format(hidden)} of it beside kernels" if hidden else ""
    bounds: dict[str, float] = {}
    for p in parts:
        bounds[p.bound] = bounds.get(p.bound, 0.0) + p.seconds
    shares = sorted(bounds.items(), key=lambda x: -x[1])
    said = ", ".join(f"{name} {percent(x / whole)}" for name, x in shares)
    lines = [
        f"time: kernels {TIME.format(sums['kernel'])}, collectives and copies "
        f"{TIME.format(sums['collective'])}{beside}; bound by {said}"
    ]
    texts = _texts(plan.graph)
    rows, code = [], []
    for r in list(cost_table(parts, "line"))[:_LINES]:
        work = OPERATIONS.format(r.flops) if r.flops else "-"
        sent = BYTES.format(r.wire_bytes) if r.wire_bytes else "-"
        took = (TIME.format(r.seconds), percent(r.share))
        rows.append([near(r.name, names) or "-", *took, r.bound, work, sent])
        code.append(texts.get(r.name, ""))
    heads = ["line", "seconds", "share", "bound", "flops", "sent"]
    table = columns([heads, *rows], "  ", right=(1, 2, 4, 5)).split("\n")
    wide = max(map(len, table))
    room = readers_width() - wide - 2
    if room >= _CODE and len(table) == 1 + len(rows):
        told = ["", *(t if len(t) <= room else f"{t[: room - 3]}..." for t in code)]
        table = [f"{x:{wide}}  {t}".rstrip() for x, t in zip(table, told, strict=True)]
    return [*lines, "\n".join(table)]


def _texts(graph: BlockGraph) -> dict[str, str]:
    """Lines of the source by `FILE:LINE`."""
    found: dict[str, str] = {}
    for op in graph.operations:
        found.setdefault(f"{op.source.file}:{op.source.line}", op.source.text)
        for region in op.regions:
            found |= {k: v for k, v in _texts(region).items() if k not in found}
    return found


def _peak(peak: Peak, names: Mapping[str, str]) -> list[str]:
    """When the peak is, and its arrays, those first that take most together."""
    rows: list[list[str]] = []
    totals: dict[tuple[str, ...], float] = {}
    for p in peak.parts:
        maker = f"{p.made_by} {near(p.source, names)}".strip()
        rows.append([p.name, p.type, p.layout, BYTES.format(p.bytes), p.kind, maker])
        totals[_kind(rows[-1])] = totals.get(_kind(rows[-1]), 0.0) + p.bytes
    rows.sort(key=lambda row: -totals[_kind(row)])
    at, _, kinds = peak.summary(near(peak.source, names)).rpartition(": ")
    told = told_once(rows, paths=True, right=(3,), most=_ARRAYS)
    return [f"peak: {at}", f"  {kinds}", told]


def _kind(row: Sequence[str]) -> tuple[str, ...]:
    name = row[0] if row[0][:1] != "%" else ""
    return (starred(name), *row[1:])
