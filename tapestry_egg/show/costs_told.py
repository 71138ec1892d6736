"""Where a plan's time and memory go, in a few lines: what bounds it, dearest lines, the peak."""

from __future__ import annotations

from tapestry_egg.columns import columns, percent, readers_width, shortened
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.plans.cost_table import CostPart, cost_table
from tapestry_egg.quantities import BYTES, OPERATIONS, TIME

from .account import Account

# Lines of the program, and arrays at the peak, that are told.
_LINES, _ARRAYS = 6, 5
# Columns that a line of the program has beside its costs, at least.
_CODE = 12


def where_costs_go(account: Account) -> list[str]:
    """Lines on where a plan's seconds and its peak come from."""
    parts = [p for p in (*account.kernels, *account.copies) if p.seconds > 0.0]
    return [*_time(account, parts), *account.peak.lines(account.near, _ARRAYS)]


def _time(account: Account, parts: list[CostPart]) -> list[str]:
    whole = sum(p.seconds for p in parts)
    if not whole:
        return ["time: none"]
    sums = {k: sum(p.seconds for p in parts if p.kind == k) for k in ("kernel", "collective")}
    hidden = sum(p.hidden for p in parts)
    overlap = f", {TIME.format(hidden)} of it beside kernels" if hidden else ""
    bounds: dict[str, float] = {}
    for p in parts:
        bounds[p.bound] = bounds.get(p.bound, 0.0) + p.seconds
    shares = sorted(bounds.items(), key=lambda x: -x[1])
    said = ", ".join(f"{name} {percent(x / whole)}" for name, x in shares)
    lines = [
        f"time: kernels {TIME.format(sums['kernel'])}, collectives and copies "
        f"{TIME.format(sums['collective'])}{overlap}; bound by {said}"
    ]
    texts = _texts(account.plan.graph)
    rows, code = [], []
    for r in list(cost_table(parts, "line"))[:_LINES]:
        work = OPERATIONS.format(r.flops) if r.flops else "-"
        sent = BYTES.format(r.wire_bytes) if r.wire_bytes else "-"
        took = (TIME.format(r.seconds), percent(r.share))
        rows.append([account.near(r.name) or "-", *took, r.bound, work, sent])
        code.append(texts.get(r.name, ""))
    heads = ["line", "seconds", "share", "bound", "flops", "sent"]
    table = columns([heads, *rows], "  ", right=(1, 2, 4, 5)).split("\n")
    wide = max(map(len, table))
    room = readers_width() - wide - 2
    if room >= _CODE and len(table) == 1 + len(rows):
        beside = ["", *(shortened(t, room) for t in code)]
        table = [f"{x:{wide}}  {t}".rstrip() for x, t in zip(table, beside, strict=True)]
    return [*lines, "\n".join(table)]


def _texts(graph: BlockGraph) -> dict[str, str]:
    """Lines of the source by `FILE:LINE`."""
    found: dict[str, str] = {}
    for op in graph.operations:
        found.setdefault(f"{op.source.file}:{op.source.line}", op.source.text)
        for region in op.regions:
            found |= {k: v for k, v in _texts(region).items() if k not in found}
    return found
