"""What the recount says of a plan: its costs, the arrays that it holds, or why it is not legal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tapestry_egg.errors import ExtractError
from tapestry_egg.graph.layout import Layout
from tapestry_egg.plans.plan import Costs

from .longest_path import Step


@dataclass(frozen=True)
class Certificate:
    """Costs of a plan, recomputed: per device and step, except `joules` (the whole mesh).

    `profile[t]` are the bytes alive while unit t of the schedule runs. `serial_seconds` are the sum
    of all kernels and copies, `step` says what runs when.
    """

    seconds: float
    joules: float
    flops: float
    wire_bytes: float
    peak_bytes: int
    profile: tuple[float, ...]
    serial_seconds: float
    dollars: float
    step: Step = field(compare=False, repr=False)

    @property
    def costs(self) -> Costs:
        """What a plan should say of itself."""
        return Costs(
            self.seconds,
            self.peak_bytes,
            self.joules,
            self.wire_bytes,
            self.flops,
            self.dollars,
            self.serial_seconds,
        )


class Refused(ExtractError):
    """A plan is not legal; `at` are the numbers of the body and of the operation, which is that of
    their end where the body's outputs are meant."""

    def __init__(self, what: str, at: tuple[int, int], *, where: str = "", hint: str = "") -> None:
        super().__init__(what, where=where, hint=hint)
        self.at = at


@dataclass(frozen=True, slots=True)
class Buffer:
    """`amount` bytes, alive from tick `begin` up to before `end`: the value as it was made, a copy
    of it that lies as `layout`, what making such a copy, or the value itself, takes beside, or the
    place of a `result`."""

    begin: int
    end: int
    amount: float
    layout: Layout
    role: Literal["made", "copy", "making", "scratch", "result"] = "made"


@dataclass(frozen=True, slots=True)
class Copied:
    """One copy of a value: `units` read it; `kept` says that it is shared.

    `wire` bytes are sent for it, `blocks` are the layouts on the way to `need`; it is on its way,
    and in memory, from tick `begin`, and made when tick `at` is over; `joined` with others, before
    its reader's turn, and then `apart` from what it is made of; some units read it `turned`,
    or what it is made of is `turned_before`.
    """

    need: Layout
    units: tuple[int, ...]
    kept: bool
    wire: float
    blocks: tuple[Layout, ...]
    begin: int
    at: int
    joined: bool = False
    apart: bool = False
    turned: tuple[int, ...] = ()
    turned_before: bool = False
