"""What the recount says of a plan: its costs, or why it is not legal."""

from __future__ import annotations

from dataclasses import dataclass, field

from tapestry_egg.errors import ExtractError
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
