"""Where the costs of a step come from: its kernels and collectives, and tables over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tapestry_egg.columns import columns, percent, short_places
from tapestry_egg.errors import ExtractError
from tapestry_egg.quantities import BYTES, ENERGY, OPERATIONS, TIME

#: What parts have amounts of.
AMOUNTS = ("count", "flops", "hbm_bytes", "wire_bytes", "seconds", "hidden", "joules")
#: What tables can be by.
KEYS = ("kernel", "collective", "layer", "line")


@dataclass(frozen=True, slots=True)
class CostPart:
    """One kernel, or one change of layout, in all `count` runs of it in a step.

    Amounts are those of one device, but joules, which are those of all. `hidden` are the seconds of
    a collective during which kernels run. `bound` says what takes the most of its time: `compute`,
    `memory`, `launch` (the floor of a kernel, the delays of a collective) or `link`.
    """

    kind: str  # kernel, collective
    name: str
    count: float
    flops: float
    hbm_bytes: float
    wire_bytes: float
    seconds: float
    hidden: float
    joules: float
    bound: str
    layer: str = ""
    source: str = ""  # file:line of the user's program
    value: str = ""


@dataclass(frozen=True, slots=True)
class CostRow:
    """All parts that a table counts together. `share` is that of `seconds` in the sum of all parts;
    `bound` is what bounds most of these seconds."""

    name: str
    count: float
    flops: float
    hbm_bytes: float
    wire_bytes: float
    seconds: float
    exposed: float
    hidden: float
    joules: float
    share: float
    bound: str


@dataclass(frozen=True)
class CostTable:
    """Rows by falling seconds. `parts` are what they were made of, in the program's order."""

    by: str
    rows: tuple[CostRow, ...]
    parts: tuple[CostPart, ...]

    def __iter__(self) -> Iterator[CostRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def data(self) -> list[dict[str, Any]]:
        """The rows as plain data, for JSON."""
        return [
            {self.by: r.name, **{k: v for k, v in asdict(r).items() if k != "name"}} for r in self
        ]

    def __str__(self) -> str:
        heads = (self.by, "times", "flops", "memory", "sent", "seconds", "share", "hidden", "bound")
        cells = [list(heads)]
        names = short_places(r.name for r in self.rows) if self.by == "line" else {}
        for r in self.rows:
            cells.append(
                [
                    names.get(r.name, r.name) or "-",
                    f"{r.count:g}",
                    OPERATIONS.format(r.flops) if r.flops else "-",
                    BYTES.format(r.hbm_bytes) if r.hbm_bytes else "-",
                    BYTES.format(r.wire_bytes) if r.wire_bytes else "-",
                    TIME.format(r.seconds),
                    percent(r.share),
                    TIME.format(r.hidden) if r.hidden else "-",
                    r.bound,
                ]
            )
        energy = ENERGY.format(sum(p.joules for p in self.parts))
        total = TIME.format(sum(p.seconds for p in self.parts))
        said = f"{total} one after another, {energy}"
        # What no row has is left out: a collective has no flops, and few run beside kernels.
        full = [k for k in range(len(heads)) if k == 0 or any(row[k] != "-" for row in cells[1:])]
        table = [[row[k] for k in full] for row in cells]
        return columns(table, right=range(1, len(full) - 1)) + f"\n{said}"


def cost_table(parts: Sequence[CostPart], by: str, where: str = "") -> CostTable:
    """Parts counted together by a key. Raises ExtractError for a key that is none."""
    if by not in KEYS:
        raise ExtractError(
            f"there is no table of costs by {by!r:.40}",
            where=where,
            hint=f"Keys are {', '.join(KEYS)}.",
        )
    whole = sum(p.seconds for p in parts)
    groups: dict[str, list[CostPart]] = {}
    for p in parts:
        if by not in ("kernel", "collective") or p.kind == by:
            name = {"layer": p.layer, "line": p.source}.get(by, p.name)
            groups.setdefault(name, []).append(p)
    rows = [_row(name, group, whole) for name, group in groups.items()]
    return CostTable(by, tuple(sorted(rows, key=lambda r: (-r.seconds, r.name))), tuple(parts))


def totals(parts: Iterable[CostPart]) -> dict[str, float]:
    """The sums of all amounts of some parts, by their names."""
    some = list(parts)
    return {name: float(sum(getattr(p, name) for p in some)) for name in AMOUNTS}


def _row(name: str, group: Sequence[CostPart], whole: float) -> CostRow:
    bounds: dict[str, float] = {}
    for p in group:
        bounds[p.bound] = bounds.get(p.bound, 0.0) + p.seconds
    sums = totals(group)
    return CostRow(
        name=name,
        exposed=sums["seconds"] - sums["hidden"],
        share=sums["seconds"] / whole if whole else 0.0,
        **sums,
        bound=max(bounds, key=lambda k: (bounds[k], k)),
    )
