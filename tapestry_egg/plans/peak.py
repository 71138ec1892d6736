"""What is in memory when most is: the arrays of one device at a plan's peak."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tapestry_egg.columns import short_places, starred, told_once, wrapped
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES, TIME

#: What an array at the peak is: an argument (and what takes its place), what the program makes, a
#: copy in another layout, what making such a copy takes, what a kernel takes while it runs, and the
#: place of a result, which is held from the first (and what may lie there before it is made).
Kind = Literal["argument", "made", "copy", "making", "scratch", "result"]

KINDS: tuple[Kind, ...] = ("argument", "result", "made", "copy", "making", "scratch")

_WORDS: Mapping[Kind, str] = {
    "argument": "arguments and state",
    "result": "places of results",
    "made": "made by the program",
    "copy": "copies",
    "making": "making these",
    "scratch": "scratch of kernels",
}


@dataclass(frozen=True, slots=True)
class PeakPart:
    """One array of one device that is in memory at the peak."""

    name: str
    type: str
    layout: str
    kind: Kind
    bytes: float
    made_by: str
    source: str  # file:line of the user's program


@dataclass(frozen=True)
class Peak:
    """The peak: bytes of one device, `seconds` into the step, while the kernel `running` of a line
    runs; its arrays by falling bytes."""

    bytes: float
    seconds: float
    running: str
    source: str  # file:line of the user's program
    parts: tuple[PeakPart, ...]

    def by_kind(self) -> dict[Kind, float]:
        """Bytes by what they are; what there is none of is left out."""
        found: dict[Kind, float] = {}
        for kind in KINDS:
            if amount := sum(p.bytes for p in self.parts if p.kind == kind):
                found[kind] = amount
        return found

    def data(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {**asdict(self), "by_kind": self.by_kind()}

    def lines(self, named: Callable[[str], str] = str, most: int | None = None) -> list[str]:
        """When and where the peak is, how much is what, and the `most` kinds of arrays that take
        most together; a line of the program is called what `named` says."""
        totals: dict[tuple[str, ...], float] = {}
        rows: list[list[str]] = []
        for p in self.parts:
            maker = " ".join(filter(None, (p.made_by, named(p.source))))
            rows.append([p.name, p.type, p.layout, BYTES.format(p.bytes), p.kind, maker])
            totals[_alike(rows[-1])] = totals.get(_alike(rows[-1]), 0.0) + p.bytes
        rows.sort(key=lambda row: -totals[_alike(row)])
        kinds = ", ".join(f"{BYTES.format(n)} {_WORDS[k]}" for k, n in self.by_kind().items())
        kernel = " at ".join(filter(None, (self.running, named(self.source))))
        return [
            f"peak: {BYTES.format(self.bytes)}, {TIME.format(self.seconds)} into the step, in "
            f"{kernel}",
            f"  {kinds}",
            told_once(rows, paths=True, right=(3,), most=most),
        ]

    def __str__(self) -> str:
        at = short_places([self.source, *(p.source for p in self.parts)])
        return printable(wrapped("\n".join(self.lines(lambda place: at[place]))))


def _alike(row: Sequence[str]) -> tuple[str, ...]:
    """What rows have in common that `told_once` makes one of."""
    return (starred(row[0]) if row[0][:1] != "%" else "", *row[1:])
