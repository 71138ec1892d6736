"""The front: the plans that no other plan dominates, with bounds and a table."""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry_egg import pareto
from tapestry_egg.columns import wrapped
from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.machine.objectives import (
    DEVICES,
    JOULES,
    OBJECTIVES,
    PEAK_BYTES,
    SECONDS,
    WIRE_BYTES,
    Objective,
    amounts,
    named,
    objective,
    share_of_least,
)
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import AUDITED, Plan, gap_text
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES
from tapestry_egg.tracing.arguments import check_mapping

from .notes import Note, happened

if TYPE_CHECKING:
    from tapestry_egg.extract.pins.pins import Pins
    from tapestry_egg.pipeline.settings import Settings
    from tapestry_egg.why.recipes import Recipes
    from tapestry_egg.why.why_not import WhyNot


class UnknownPlan(ExtractError, KeyError, IndexError):
    """A front has no plan of that name, or at that place."""

    __str__ = ExtractError.__str__


@dataclass(frozen=True, repr=False)
class Front:
    """Non-dominated plans by rising seconds. `epsilon`: every plan of what was searched is
    (1+epsilon)-dominated by one here. `saturated` is False when a rule budget was hit. `notes` say
    what happened on the way, what costs leave out, and what was not searched; `searched` counts the
    forms of the program and the mesh shapes that were. `timeline` tells what the rules did.
    `usable_bytes` is what a program may use of one device; plans of larger peaks are shown, marked,
    and taken only where a limit of the user's own allows it. None knows of no such limit.
    `original` is what the user's own shardings lead to, where some are given: within the
    limits some plan here is as good in everything, to a hundredth, and the fastest as fast.
    `stages` holds what each pass of the pipeline made, by name and printable, where it was asked
    for (`optimize(..., keep_stages=True)`)."""

    plans: tuple[Plan, ...]
    objectives: tuple[str | Objective, ...] = OBJECTIVES
    target: str = ""
    graph_name: str = ""
    epsilon: float = float("inf")
    saturated: bool = True
    notes: tuple[Note, ...] = ()
    timeline: tuple[Tick, ...] = ()
    usable_bytes: int | None = None
    original: Plan | None = None
    searched: tuple[int, int] | None = None
    stages: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __hash__(self) -> int:
        return hash(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def every(self) -> tuple[Plan, ...]:
        """Its plans, that of the user's own shardings among them."""
        return (*self.plans, *([self.original] if self.original else []))

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __getitem__(self, key: int | str) -> Plan:
        """A plan by its name or place. Raises UnknownPlan where there is none."""
        if isinstance(key, int) and -len(self.plans) <= key < len(self.plans):
            return self.plans[key]
        for plan in self.plans:
            if plan.name == key:
                return plan
        names = ", ".join(p.name for p in self.plans)
        raise UnknownPlan(f"there is no plan {key!r:.60}", hint=f"The front has {names or 'none'}.")

    def best(
        self,
        objective: str | Objective = SECONDS.name,
        limits: Mapping[str, float | str] | None = None,
    ) -> Plan:
        """The plan with the least `objective` within the limits (`{"peak_bytes": "40GiB"}`).

        `objective` may be a formula, `"seconds * joules"`; a limit of `"110%"` is that share of the
        least that a plan within the other limits has: the fewest joules within 110 % of the fastest
        are `best("joules", {"seconds": "110%"})`.
        For an objective of your own it is the one of this front's plans; plans that are better in
        it alone are here only where `optimize` was given it too.
        Without a limit on `peak_bytes` the usable memory of a device is one. A plan that the ledger
        refuses is a warning, and the next one is taken.
        Raises ExtractError that says which limit cannot be met and the least that is reachable.
        """
        return next(_audited(self.ranked(objective, limits)))

    def ranked(
        self,
        objective: str | Objective = SECONDS.name,
        limits: Mapping[str, float | str] | None = None,
    ) -> list[Plan]:
        """The plans within the limits by rising `objective`: `best`, and what comes after it.

        Raises ExtractError where there is none, as `best` does.
        """
        bounds = self.limits(limits)
        fitting = [p for p in self.plans if within(p, bounds)]
        if not fitting:
            raise unmet(self.plans, bounds, self.usable_bytes)
        return sorted(fitting, key=lambda p: (value(p, objective), p.costs.seconds, p.name))

    def limits(self, limits: Mapping[str, float | str] | None = None) -> dict[str, float]:
        """The limits in base units, with the usable memory of a device unless they speak of it."""
        check_mapping(limits, "limits", "amounts by objective", "{'peak_bytes': '60GiB'}")
        shares = {k: s for k, x in (limits or {}).items() if (s := share_of_least(x)) is not None}
        bounds = amounts({k: x for k, x in (limits or {}).items() if k not in shares})
        if self.usable_bytes is not None and PEAK_BYTES.name not in shares:
            bounds.setdefault(PEAK_BYTES.name, float(self.usable_bytes))
        fitting = [p for p in self.plans if within(p, bounds)]
        least = {k: min((value(p, named(k)) for p in fitting), default=0.0) for k in shares}
        return bounds | {k: shares[k] * x for k, x in least.items()}

    def fits(self, plan: Plan) -> bool:
        """Whether the usable memory of a device holds a plan."""
        return self.usable_bytes is None or plan.costs.peak_bytes <= self.usable_bytes

    def audited(self) -> Front:
        """The front without plans that the ledger refuses, each of which is a warning.

        Raises PlanError where it refuses all.
        """
        kept = tuple(_audited(self.plans))
        original = self.original
        if original is not None:
            try:
                audit(original)
            except PlanError:
                original = None
        if len(kept) == len(self.plans) and original is self.original:
            return self
        # What is left out may have been all that dominated some other plan.
        return replace(self, plans=kept, original=original, epsilon=math.inf)

    def knee(self) -> Plan:
        """The plan nearest to having the least of each objective, each scaled to its range, among
        those that a device's memory holds, where there are any.

        Raises ExtractError for a front without plans.
        """
        if not self.plans:
            raise unmet((), {})
        plans = [p for p in self.plans if self.fits(p)] or list(self.plans)
        return next(_audited(self._by_knee(plans)))

    def _by_knee(self, plans: list[Plan]) -> Iterator[Plan]:
        """The knee of some plans, that of the others, and so on."""
        while plans:
            yield plans.pop(
                pareto.knee([tuple(value(p, k) for k in self.objectives) for p in plans])
            )

    def hypervolume(self, reference: Mapping[str, float | str] | None = None) -> float:
        """The volume that the plans dominate below a reference, in the product of the objectives'
        units.

        `reference` gives an amount of every objective (default: 1.1 times the greatest of the
        front). Raises ExtractError where it lacks one.
        """
        values = self._values()
        if reference is None:
            most = tuple(1.1 * max(column) for column in zip(*values, strict=True))
        else:
            known = [objective(k) for k in self.objectives]
            missing = [o.name for o in known if o.name not in reference]
            if missing:
                raise ExtractError(
                    f"no amount of {missing[0]}",
                    where="reference",
                    hint=f"The front's objectives are {', '.join(o.name for o in known)}.",
                )
            most = tuple(o.parse(reference[o.name]) for o in known)
        return pareto.hypervolume(values, most) if values else 0.0

    def merge(self, other: Front) -> Front:
        """The plans of two fronts that no plan of either dominates, named anew.

        The fronts are of one program for one target in the same objectives, found for example from
        other rules or mesh shapes. Bounds and `epsilon` then hold for what both searched.
        Raises ExtractError for other fronts.
        """
        for what in ("graph_name", "target", "objectives"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise ExtractError(
                    f"the fronts differ in {what.replace('_', ' ')}: {mine!r} and {theirs!r}",
                    where="merge",
                )
        plans: list[Plan] = []
        for mine, front in ((self, other), (other, self)):
            for p in mine.plans:
                bound = min(p.bound, front.least_seconds(p))
                # What is less may be of plans of the other front whose collectives are apart.
                merged_too = p.merged_too and all(q.merged_too for q in front.plans)
                same = replace(p, name="", bound=0.0, merged_too=False)
                if all(same != replace(q, name="", bound=0.0, merged_too=False) for q in plans):
                    plans.append(replace(p, bound=bound, merged_too=merged_too))
        values = [tuple(value(p, k) for k in self.objectives) for p in plans]
        kept = [
            p
            for p, v in zip(plans, values, strict=True)
            if not any(pareto.dominates(w, v) for w in values)
        ]
        return replace(
            self,
            plans=in_order(kept),
            # What is dominated in these objectives may have been all that was so fast, or so small.
            epsilon=max(self.epsilon, other.epsilon)
            if {SECONDS.name, PEAK_BYTES.name} <= set(self.objectives)
            else math.inf,
            saturated=self.saturated and other.saturated,
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
            searched=None,
        )

    def least_seconds(self, plan: Plan) -> float:
        """A bound on the seconds of any plan that this search covered and that has no larger peak
        than the given one; 0 where nothing is proven."""
        if math.isinf(self.epsilon):
            return 0.0
        grown = 1.0 + self.epsilon
        fitting = [
            p.costs.seconds
            for p in self.plans
            if p.costs.peak_bytes <= grown * plan.costs.peak_bytes
        ]
        return min(fitting, default=math.inf) / grown

    def _values(self) -> list[tuple[float, ...]]:
        return [tuple(value(p, k) for k in self.objectives) for p in self.plans]

    def table(self) -> list[dict[str, str | float | bool]]:
        """One row per plan: name, mesh and its devices, the costs, wire bytes, bound and gap,
        whether these are proven, and whether the usable memory of a device holds it."""
        return [
            {
                "plan": p.name,
                "mesh": str(p.mesh),
                DEVICES.name: p.mesh.devices,
                **asdict(p.costs),
                "bound": p.bound,
                "gap": p.gap,
                "proven": p.is_proven,
                "fits": self.fits(p),
            }
            for p in self.plans
        ]

    @property
    def gap_shown(self) -> str:
        """The widest gap of its plans as tables have it: `2.34%`, with `~` where that of any plan
        is not proven, `-` where one has no bound, or there is none."""
        widest = max((p.gap for p in self.plans), default=math.inf)
        return gap_text(widest, all(p.is_proven for p in self.plans))

    def csv(self) -> str:
        """`table()` as comma-separated values below a line of names, in base units."""
        import csv
        import io

        out = io.StringIO()
        names = list(self.table()[0]) if self.plans else ["plan"]
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.table())
        return out.getvalue()

    def recommended(self) -> tuple[Plan, str] | None:
        """The plan to begin with and the reason: the fastest that fits a device's memory. Without
        seconds among the objectives, the one with the least of the first objective. None if no plan
        fits."""
        fitting = [p for p in self.plans if self.fits(p)]
        if not fitting:
            return None
        names = [objective(k).name for k in self.objectives]
        first = SECONDS if SECONDS.name in names or not names else objective(self.objectives[0])
        best = min(fitting, key=lambda p: (first.value(p), p.costs.seconds))
        reason = "fastest" if first is SECONDS else f"least {first.title}"
        if self.usable_bytes is not None:
            reason += f" within the {BYTES.format(self.usable_bytes)} of a device"
        return best, reason

    def scope(self) -> str:
        """What a gap of this front is measured against."""
        words = "to the best plan of the space searched"
        if self.searched is None:
            return words
        forms, meshes = (
            f"{n} {noun}{'' if n == 1 else each}"
            for n, noun, each in zip(self.searched, ("form", "mesh"), ("s", "es"), strict=True)
        )
        return f"{words}: {forms} on {meshes}, kernels fixed"

    def _rows(self) -> list[str]:
        """The table: a line of titles, and one per plan."""
        columns = (SECONDS, PEAK_BYTES, JOULES, WIRE_BYTES)
        counted = f" {DEVICES.column:>7}" if self._parts() else ""
        split = any(p.micro_batches > 1 for p in self.plans)
        batches = f" {'batches':>7}" if split else ""
        width = 10 if counted or split else 12
        titles = " ".join(f"{o.name.removesuffix('_bytes'):>{width}}" for o in columns)
        gap = "gap*" if any(p.bound > 0 for p in self.every) else "gap"
        lines = [f"{'plan':6} {'mesh':10}{counted}{batches} {titles} {gap:>7}"]
        for p in self.every:
            mark = {PEAK_BYTES: "" if self.fits(p) else " !"}
            cells = " ".join(f"{o.format(o.value(p)) + mark.get(o, ''):>{width}}" for o in columns)
            devices = f" {p.mesh.devices:>7}" if counted else ""
            steps = f" {p.micro_batches:>7}" if split else ""
            lines.append(f"{p.name:6} {p.mesh!s:10}{devices}{steps} {cells} {p.gap_shown:>7}")
        return lines

    def __str__(self) -> str:
        """The table, the recommended plan, what gaps mean, and how many notes there are."""
        count = f"{len(self)} plan{'' if len(self) == 1 else 's'}"
        lines = [f"front of {self.graph_name} on {self.target}: {count}", *self._rows()]
        if self.original:
            lines.append("given: the plan that the given shardings lead to")
        if words := self.over_memory():
            lines.append(f"! {words}")
        if words := self.left_unused():
            lines.append(words)
        if found := self.recommended():
            lines.append(f"recommended: {found[0].name} ({found[1]})")
        elif self.plans:
            least = min(self.plans, key=lambda p: p.costs.peak_bytes)
            lines.append(f"no plan fits a device; the least peak is that of {least.name}")
        if any(p.bound > 0 for p in self.every):
            lines.append(f"* {self.scope()}")
        if any(p.bound > 0 and not p.is_proven for p in self.every):
            lines.append("~ not proven: measured against the bound before collectives were merged")
        if any(p.micro_batches > 1 for p in self.plans):
            lines.append("batches: parts of the batch that run one after another")
        lines += map(str, happened(self.notes))
        if others := len(self.notes) - len(happened(self.notes)):
            what = f"{others} note{'' if others == 1 else 's'} on what was not searched"
            lines.append(f"{what}: --notes, front.notes")
        return printable(wrapped("\n".join(lines)))

    def __repr__(self) -> str:
        """One line; `print` shows the table."""
        spans = [
            o.format(min(v)) + (f" to {o.format(max(v))}" if min(v) < max(v) else "")
            for o in (SECONDS, PEAK_BYTES)
            if (v := [o.value(p) for p in self.plans])
        ]
        words = [f"{len(self)} plan{'' if len(self) == 1 else 's'}", *spans]
        return printable(f"Front({self.graph_name} on {self.target}: {', '.join(words)})")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """What notebooks show: the picture, and the table where they draw none."""
        from tapestry_egg.show.chart import front_svg
        from tapestry_egg.show.plot import front_info

        table = html.escape(str(self))
        picture = front_svg(front_info(self)) if self.plans else ""
        return {"text/plain": str(self), "text/html": f"<div>{picture}</div><pre>{table}</pre>"}

    def over_memory(self) -> str:
        """What the mark at a peak means; empty where no plan has one."""
        shown = (*self.plans, *([self.original] if self.original else []))
        if self.usable_bytes is None or all(self.fits(p) for p in shown):
            return ""
        return f"above the {BYTES.format(self.usable_bytes)} that a device has for programs"

    def _parts(self) -> list[Target]:
        """The machines of plans that leave some of their devices unused."""
        machines = [(p, p.origin.machine) for p in self.plans if p.origin is not None]
        return [m for p, m in machines if p.mesh.devices < m.devices]

    def left_unused(self) -> str:
        """What devices cost that plans leave unused; empty where all plans have all devices."""
        if not (parts := self._parts()):
            return ""
        words = "count in energy and price" if parts[0].idle_counted else "draw and cost nothing"
        return f"devices that a plan leaves unused {words}"

    def what_if(self, target: Target | None = None, **changes: float | str) -> Front:
        """The same plans on a machine of other figures, counted again without a search.

        `target` is another machine of the same shape; `links=2`, `hbm=1.5` and `flops=0.9` multiply
        its rates, `memory="141GB"`, `price=2.5` (dollars for a device and hour) and `clock=1200`
        (MHz) set what they name. Others may be better on that machine, and no bound is proven; the
        front's notes say so. Raises TargetError for figures that a machine has not.
        """
        from .what_if import what_if

        return what_if(self, target, changes)

    def why_not(
        self, pins: Pins, plan: str | int = "", *, settings: Settings | None = None
    ) -> WhyNot:
        """Why tensors do not lie so, in a plan of this front (default: the fastest that fits):
        `Plan.why_not`, which also tells of plans here that do. Raises what it and `best` raise."""
        from tapestry_egg.why.why_not import why_not

        chosen = self.best() if plan == "" else self[plan]
        return why_not(chosen, pins, settings=settings, front=self)

    def recipes(self, *, settings: Settings | None = None) -> Recipes:
        """What data parallelism and full sharding would take beside this front: the best plans in
        which arguments lie so (`why/recipes.py`). Each is a search (default: two units of work).
        Raises ExtractError for plans that do not know their program and machine."""
        from tapestry_egg.why.recipes import recipes

        return recipes(self, settings)

    def report(
        self,
        path: str | Path,
        *,
        baselines: Mapping[str, Plan | Front] | None = None,
        runs: Sequence[str | Path] = (),
    ) -> Path:
        """Write the front as one page that opens from disk, into a file `.html` or as `index.html`
        into a folder; returns the page's path.

        `baselines` are plans of other searches, by names of yours (of a front its fastest), that
        stand beside it; `runs` files of what `tapestry-egg run --json` printed. Raises PlanError
        for plans of another program or machine, and for files that hold no run of a plan here.
        """
        from tapestry_egg.report.report import write_report
        from tapestry_egg.report.runs import baselines as beside
        from tapestry_egg.report.runs import load_runs

        known = tuple(beside(self, (baselines or {}).items()))
        return write_report(self, Path(path), load_runs(self, runs), known)

    def save(self, path: str | Path) -> None:
        """Write the front and its plans to a file that `tapestry_egg.load` reads."""
        from tapestry_egg.files.files import save

        save(self, path)

    def plot(self, path: str | Path = "front.svg") -> Path:
        """Draw the front as an SVG file; returns its path."""
        from tapestry_egg.show.plot import front_info, plot_front

        plot_front(front_info(self), path)
        return Path(path)


def _audited(plans: Iterable[Plan]) -> Iterator[Plan]:
    """Those of some plans that the ledger passes; others are a warning. Raises the last refusal
    where it refuses all."""
    refused: PlanError | None = None
    passed = False
    for plan in plans:
        try:
            audit(plan)
        except PlanError as error:
            refused = error
            warnings.warn(f"a plan is left out: {error}", stacklevel=4)
            continue
        passed = True
        yield plan
    if refused and not passed:
        raise refused


def audit(plan: Plan) -> None:
    """Check a plan by the ledger, once in a process. Raises PlanError where its program does not do
    what it promises."""
    if plan.origin is not None and plan not in AUDITED:
        from tapestry_egg.runtime.emitted import audit

        audit(plan)


def in_order(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Plans by rising seconds, then peak, then their text, named p0, p1, ..."""
    known = sorted(plans, key=lambda p: (p.costs.seconds, p.costs.peak_bytes, str(p.mesh)))
    return tuple(replace(p, name=f"p{i}") for i, p in enumerate(known))


def within(plan: Plan, bounds: Mapping[str, float]) -> bool:
    """Whether a plan keeps limits in base units."""
    return all(value(plan, k) <= limit for k, limit in bounds.items())


def unmet(
    plans: Sequence[Plan],
    bounds: Mapping[str, float],
    usable_bytes: int | None = None,
    proven: float = 0.0,
) -> ExtractError:
    """The error that says which limits cannot be met, and the least that is reachable of each.

    Where each could be met alone, the least that is reachable within all others. `usable_bytes` is
    what a device has for programs, which a limit on the peak may be. No plan of those that were
    searched holds less than the bytes `proven`.
    """
    words = []
    advice = "Raise the limit, search longer (work) or use more devices."
    alone = [k for k, x in bounds.items() if not any(value(p, k) <= x for p in plans)]
    for k in alone or bounds:
        others = {} if alone else {n: x for n, x in bounds.items() if n != k}
        fitting = [value(p, k) for p in plans if within(p, others)]
        if fitting:
            show = named(k).format
            least = f"{show(min(fitting))}{' within the other limits' if others else ''}"
            own = k == PEAK_BYTES.name and usable_bytes == bounds[k]
            asked = f"{'a device has' if own else 'asked'} {show(bounds[k])}"
            limit = f"; nothing searched holds less than {show(proven)}"
            none = limit if k == PEAK_BYTES.name and proven else ""
            words.append(f"{k}: {asked}, least found {least}{none}")
    return ExtractError(
        "no plan meets the limits" if plans else "there is no plan",
        where="limits",
        hint="; ".join([*words[:-1], f"{words[-1]}. {advice}"]) if words else "",
    )


def value(plan: Plan, what: str | Objective) -> float:
    """A plan's predicted value of an objective. Raises ExtractError for an unknown one."""
    return objective(what).value(plan)
