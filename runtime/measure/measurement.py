"""A measured run beside what was planned and compiled: seconds by kernel and by collective."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapestry_egg.atomic import write_atomic
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.plans.cost_table import CostPart
from tapestry_egg.plans.plan import Plan
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.quantities import TIME

from .profile import ALONE, FUSED, MeasuredInstruction


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """Kernels of one primitive, or collectives of one kind and group size, of one step and device.

    `least_seconds` sums what each took on the device where it took least: for collectives, without
    most of the waiting for others. Counts are those of runs; XLA fuses and merges, so they may
    differ.
    """

    kind: str
    name: str
    planned_seconds: float
    measured_seconds: float
    least_seconds: float
    planned_count: float
    measured_count: float


@dataclass(frozen=True)
class Measurement:
    """One plan as it ran: `step_seconds` by the clock, medians of `steps`, and by instruction.

    `data()` and `save()` give the whole record as JSON. `rates()` says how much faster than planned
    links, arithmetic and memory were, for `front.what_if(**measurement.rates())`.
    """

    plan: str
    graph: str
    target: str
    device: str
    steps: int
    step_seconds: float
    planned_seconds: float
    rows: tuple[MeasuredRow, ...]
    instructions: tuple[MeasuredInstruction, ...]

    def rates(self) -> dict[str, float | str]:
        """Planned over measured seconds, of collectives (`links`), products of matrices (`flops`)
        and what is fused (`hbm`), those without a counterpart left out: of kernels the mean over
        the devices, of collectives the least, since most wait for others."""
        found: dict[str, float | str] = {}
        for key, chosen in (
            ("links", [r for r in self.rows if r.kind == "collective"]),
            ("flops", [r for r in self.rows if r.name in ("dot_general", "conv_general_dilated")]),
            ("hbm", [r for r in self.rows if r.name == FUSED]),
        ):
            both = [r for r in chosen if r.planned_seconds > 0 and r.least_seconds > 0]
            if both:
                spent = sum(
                    r.least_seconds if r.kind == "collective" else r.measured_seconds for r in both
                )
                found[key] = sum(r.planned_seconds for r in both) / spent
        return found

    def data(self) -> dict[str, Any]:
        """The record as plain data."""
        return {"format": "tapestry-egg measurement 1", **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write the record as JSON."""
        write_atomic(Path(path), json.dumps(self.data(), indent=1) + "\n")

    def __str__(self) -> str:
        cells = [["kernel or collective", "planned", "measured", "least", "planned", "measured"]]
        for r in self.rows:
            cells.append(
                [
                    r.name,
                    *(
                        TIME.format(x) if x else "-"
                        for x in (r.planned_seconds, r.measured_seconds, r.least_seconds)
                    ),
                    *(f"{x:g}×" if x else "-" for x in (r.planned_count, r.measured_count)),
                ]
            )
        widths = [max(len(row[k]) for row in cells) for k in range(len(cells[0]))]
        lines = [
            "  ".join(
                cell.ljust(w) if k == 0 else cell.rjust(w)
                for k, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        head = (
            f"plan {self.plan} of {self.graph}, planned for {self.target}, run on {self.device}: "
            f"{TIME.format(self.step_seconds)} a step, planned {TIME.format(self.planned_seconds)}"
        )
        return "\n".join([head, *lines])


def rows_of(
    plan: Plan, parts: Sequence[CostPart], measured: Sequence[MeasuredInstruction]
) -> tuple[MeasuredRow, ...]:
    """Planned beside measured: kernels first, each by falling measured seconds."""
    sums: dict[tuple[str, str], list[float]] = {}

    def add(kind: str, name: str, *numbers: float) -> None:
        entry = sums.setdefault((kind, name), [0.0] * 5)
        for k, number in enumerate(numbers):
            entry[k] += number

    for p in parts:
        if p.kind == "kernel":
            name = next((n for n in p.name.split(" + ") if n in ALONE), FUSED)
            add("kernel", name, p.seconds, 0.0, 0.0, p.count, 0.0)
    assert plan.origin is not None, "its parts were told"
    for c in planned_collectives(plan):
        block = c.payload_bytes / c.group if c.kind == "all_gather" else float(c.payload_bytes)
        axes = tuple(plan.mesh.names.index(a) for a in c.axes)
        seconds = collective_seconds(c.kind, block, axes, plan.mesh, plan.origin.machine)
        add("collective", f"{c.kind} over {c.group}", c.count * seconds, 0.0, 0.0, c.count, 0.0)
    for m in measured:
        name = f"{m.what} over {m.group}" if m.kind == "collective" else m.what
        add(m.kind, name, 0.0, m.seconds, m.least_seconds, 0.0, m.count)
    order = sorted(sums, key=lambda k: (k[0] == "collective", -sums[k][1], k))
    return tuple(MeasuredRow(*key, *sums[key]) for key in order)
