"""What a plan says it moves and holds, against what XLA compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tapestry_egg.plans.plan import Plan
from tapestry_egg.plans.planned import planned_collectives

if TYPE_CHECKING:
    from .hlo import Executable, HloStats


@dataclass(frozen=True)
class Row:
    """Collectives of one kind and group size: payload bytes per device, loops multiplied out."""

    kind: str
    group: int
    planned_bytes: int
    compiled_bytes: int
    planned_count: int = 0
    compiled_count: int = 0

    @property
    def equal(self) -> bool:
        return self.planned_bytes == self.compiled_bytes


@dataclass(frozen=True)
class Comparison:
    """A plan against its executable. Bytes decide; XLA merges more collectives than a plan has
    merged, so counts may differ.

    `promoted_bytes` of the compiled payload were left out of the rows: XLA's CPU compiler carries
    reductions of 16-bit values, and all collectives of bfloat16, out in 32 bits.
    """

    rows: tuple[Row, ...]
    planned_peak_bytes: int
    compiled_peak_bytes: int
    promoted_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether exactly the planned bytes are moved, kind by kind and group by group."""
        return all(row.equal for row in self.rows)

    @property
    def peak_ratio(self) -> float:
        """Compiled over planned peak bytes."""
        if not self.planned_peak_bytes:
            return float("inf")
        return self.compiled_peak_bytes / self.planned_peak_bytes

    def __str__(self) -> str:
        cells = [("collective", "group", "planned bytes", "compiled bytes", "planned", "compiled")]
        cells += [
            (
                row.kind,
                str(row.group),
                f"{row.planned_bytes:,}",
                f"{row.compiled_bytes:,}",
                f"{row.planned_count}×",
                f"{row.compiled_count}×",
            )
            for row in self.rows
        ]
        cells.append(
            ("peak", "", f"{self.planned_peak_bytes:,}", f"{self.compiled_peak_bytes:,}", "", "")
        )
        widths = [max(len(line[c]) for line in cells) for c in range(len(cells[0]))]
        verdicts = ["", *("equal" if row.equal else "unequal" for row in self.rows)]
        verdicts.append(f"{self.peak_ratio:.2f} of planned" if self.planned_peak_bytes else "")
        lines = [
            "  ".join(
                cell.ljust(w) if c == 0 else cell.rjust(w)
                for c, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            + (f"  {verdict}" if verdict else "")
            for line, verdict in zip(cells, verdicts, strict=True)
        ]
        if self.promoted_bytes:
            lines.append(
                f"XLA widened 16-bit values to 32 bits: {self.promoted_bytes:,} bytes more"
            )
        return "\n".join([*(line.rstrip() for line in lines), *self.warnings])


def compare(plan: Plan, compiled: Executable | HloStats) -> Comparison:
    """Planned against compiled bytes per (kind, group size), and peak bytes.

    Takes an executable, or the statistics that `hlo_stats` made of one.
    """
    from .hlo import HloStats, hlo_stats

    stats = compiled if isinstance(compiled, HloStats) else hlo_stats(compiled)
    table: dict[tuple[str, int], list[int]] = {}
    told: set[int] = set()  # merged collectives of which a member was counted
    for p in planned_collectives(plan, rounds=stats.tiled):
        entry = table.setdefault((p.kind, p.group), [0, 0, 0, 0])
        entry[0] += p.payload_bytes * p.count
        entry[2] += p.count if p.merged not in told else 0
        told |= {p.merged} - {0}
    promoted = 0
    for c in stats.collectives:
        if c.group <= 1:
            continue
        entry = table.setdefault((c.kind, c.group), [0, 0, 0, 0])
        payload = c.payload_bytes * c.count
        payload -= c.widened_bytes * c.count
        promoted += c.widened_bytes * c.count
        entry[1] += payload
        entry[3] += c.count
    return Comparison(
        rows=tuple(Row(*key, *table[key]) for key in sorted(table)),
        planned_peak_bytes=plan.costs.peak_bytes,
        compiled_peak_bytes=stats.peak_bytes,
        promoted_bytes=promoted,
        warnings=stats.warnings,
    )
