"""What is in memory when most is: the arrays of one device at a plan's peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tapestry_egg.columns import short_places, told_once, wrapped
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

    def summary(self, place: str = "") -> str:
        """In a line: when, in which kernel, and how much is what; `place` in place of its line."""
        kinds = ", ".join(f"{BYTES.format(n)} {_WORDS[k]}" for k, n in self.by_kind().items())
        kernel = " at ".join(filter(None, (self.running, place or self.source)))
        return f"{TIME.format(self.seconds)} into the step, in {kernel}: {kinds}"

    def __str__(self) -> str:
        at = short_places([self.source, *(p.source for p in self.parts)])
        rows = [
            [p.name, p.type, p.layout, BYTES.format(p.bytes), p.kind, p.made_by, at[p.source]]
            for p in self.parts
        ]
        head = f"{BYTES.format(self.bytes)}, {self.summary(at[self.source])}"
        return printable(wrapped(f"{head}\n{told_once(rows, paths=True, right=(3,))}"))
