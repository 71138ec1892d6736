"""The front: the plans that no other plan dominates, with bounds and a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ExtractError
from ..plan import Plan
from ..units import format_quantity as show
from ..units import parse_quantity as parse


@dataclass(frozen=True)
class Front:
    """Non-dominated plans by rising seconds. `epsilon`: every plan of the snapshots searched is
    (1+epsilon)-dominated by one here. `saturated` is False when a rule budget was hit."""

    plans: tuple[Plan, ...]
    objectives: tuple[str, ...] = ("seconds", "peak_bytes", "joules")
    target: str = ""
    graph_name: str = ""
    epsilon: float = float("inf")
    saturated: bool = True

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __getitem__(self, key: int | str) -> Plan:
        if isinstance(key, int):
            return self.plans[key]
        for plan in self.plans:
            if plan.name == key:
                return plan
        raise KeyError(key)

    def best(
        self, objective: str = "seconds", limits: Mapping[str, float | str] | None = None
    ) -> Plan:
        """The plan with the least `objective` within the limits (`{"peak_bytes": "40GiB"}`).

        Raises ExtractError that says which limit cannot be met and the least that is reachable.
        """
        bounds = {k: parse(v, k) for k, v in (limits or {}).items()}
        fitting = [
            p for p in self.plans if all(value(p, k) <= limit for k, limit in bounds.items())
        ]
        if not fitting:
            words = []
            for k, limit in bounds.items():
                least = min(value(p, k) for p in self.plans)
                others = "" if least > limit else " (together with the other limits, none)"
                words.append(
                    f"{k}: asked {show(limit, k)}, least reachable {show(least, k)}{others}"
                )
            raise ExtractError(
                "no plan meets the limits",
                where="limits",
                hint="; ".join(words) + ". Raise the limit or use more devices.",
            )
        return min(fitting, key=lambda p: (value(p, objective), p.costs.seconds, p.name))

    def table(self) -> list[dict[str, str | float]]:
        """One row per plan: name, mesh, the costs, wire bytes, bound and gap."""
        return [
            {
                "plan": p.name,
                "mesh": str(p.mesh),
                "seconds": p.costs.seconds,
                "peak_bytes": p.costs.peak_bytes,
                "joules": p.costs.joules,
                "wire_bytes": p.costs.wire_bytes,
                "flops": p.costs.flops,
                "bound": p.bound,
                "gap": p.gap,
            }
            for p in self.plans
        ]

    def __str__(self) -> str:
        titles = ("seconds", "peak", "joules", "wire")
        head = f"{'plan':6} {'mesh':10} " + " ".join(f"{t:>12}" for t in titles) + f" {'gap':>7}"
        lines = [f"front of {self.graph_name} on {self.target}: {len(self.plans)} plans", head]
        for p in self.plans:
            c = p.costs
            lines.append(
                f"{p.name:6} {p.mesh!s:10} {show(c.seconds, 'seconds'):>12}"
                f" {show(c.peak_bytes, 'peak_bytes'):>12} {show(c.joules, 'joules'):>12}"
                f" {show(c.wire_bytes, 'wire_bytes'):>12} {p.gap:>7.2%}"
            )
        if not self.saturated:
            lines.append("saturated: false; the bounds speak of the snapshot reached")
        return "\n".join(lines)

    def report(self, folder: str | Path) -> Path:
        """Write the front as a folder of static pages; returns the first page's path."""
        from ..report import write_report

        return write_report(self, Path(folder))

    def save(self, path: str | Path) -> None:
        """Write the front and its plans to a file that `tapestry_egg.load` reads."""
        from ..files import save

        save(self, path)

    def plot(self, path: str | Path = "front.svg") -> Path:
        """Draw the front as an SVG file; returns its path."""
        from ..plot import front_info, plot_front

        plot_front(front_info(self), path)
        return Path(path)


def value(plan: Plan, objective: str) -> float:
    """A plan's predicted value of an objective, by name.

    Raises ExtractError for an unknown objective.
    """
    if objective == "devices":
        return float(plan.mesh.devices)
    if not hasattr(plan.costs, objective):
        raise ExtractError(
            f"unknown objective {objective!r}",
            hint="Objectives are seconds, peak_bytes, joules, wire_bytes, flops, devices.",
        )
    return float(getattr(plan.costs, objective))
