"""The axis: the moments of several programs that are alike but for some places, as those of one.

Every unit of the program as given has a place on the axis, and so has what other programs have in
the stead of some units. A program lacks the units of others: at those places it holds what it held
at the moment before, so that the most that it holds anywhere is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.timeline import Timeline
from tapestry_egg.metakernels.signatures.parameters import hashable
from tapestry_egg.schedule.flatten import FlatProgram
from tapestry_egg.schedule.schedules import Schedule

Key = int


BodyName = tuple[tuple[int, ...], ...]


class Names:
    """Numbers for the units and values of programs that share those values of each body that are
    numbered below `counts`, or all where it has no count: equal ones are the same in all. `stands`
    says for which of those values new ones of a program stand. Bodies are named by what the
    operations give that they are regions of, from the program inwards, and their place there."""

    def __init__(
        self,
        counts: Mapping[BodyName, int],
        stands: Callable[[Schedule], Mapping[BodyName, Mapping[int, int]]],
    ) -> None:
        self.counts, self.stands = counts, stands
        self._number: dict[object, int] = {}
        self._known: dict[int, tuple[PlanProblem, tuple[Key, ...]]] = {}

    def of(self, posed: PlanProblem) -> tuple[Key, ...]:
        """The number of every variable of a program's problem."""
        if id(posed) not in self._known:
            bodies = _bodies(posed.choices.schedule.program)
            value = self._values(posed.choices.schedule, bodies)
            own = self._units(posed.choices.schedule, value, bodies)
            beside = {s.variable: s.value for s in posed.sharing if s.variable >= len(own)}
            more = range(len(own), len(posed.problem.variables))
            own += [self._name("value", value[beside[v]]) for v in more]
            self._known[id(posed)] = posed, tuple(own)
        return self._known[id(posed)][1]

    def _name(self, *parts: object) -> Key:
        return self._number.setdefault(parts, len(self._number))

    def _values(self, schedule: Schedule, bodies: Sequence[BodyName]) -> list[Key]:
        """Of every value: itself, if all programs have it, else what it is made of."""
        program = schedule.program
        stands = self.stands(schedule)
        named = [-1] * len(program.types)
        times: dict[Key, int] = {}
        for name, body in zip(bodies, program.bodies, strict=True):
            count = self.counts.get(name, len(body.values))
            for local, v in enumerate(body.values):
                if local < count:
                    named[v] = self._name("given", name, local)
            for local, other in stands.get(name, {}).items():
                named[body.values[local]] = self._name("given", name, other)
            for op in body.graph.operations:
                reads = tuple(named[body.values[u]] for u in op.inputs)
                for q, local in enumerate(op.outputs):
                    if named[body.values[local]] < 0:
                        kind = op.kernel, hashable(op.params), op.remat
                        made = self._name(name, *kind, reads, q)
                        times[made] = times.get(made, 0) + 1
                        named[body.values[local]] = self._name("made", made, times[made])
            for local in body.graph.constants:
                if local >= count:
                    named[body.values[local]] = self._name("constant", name, local)
        return named

    def _units(
        self, schedule: Schedule, value: Sequence[Key], bodies: Sequence[BodyName]
    ) -> list[Key]:
        program = schedule.program
        times: dict[Key, int] = {}
        found = []
        for unit in schedule.units:
            said = tuple(
                (
                    program.instances[i].signature.kernel,
                    program.instances[i].port,
                    bodies[program.instances[i].body],
                    tuple(value[v] for v in program.instances[i].inputs),
                    tuple(value[v] for v in program.instances[i].outputs),
                )
                for i in unit.members
            )
            made = self._name("unit", said)
            times[made] = times.get(made, 0) + 1
            found.append(self._name("one of", made, times[made]))
        return found


def _bodies(program: FlatProgram) -> list[BodyName]:
    """The name of every body."""
    named: list[BodyName] = []
    for body in program.bodies:
        if body.parent < 0:
            named.append(())
            continue
        own = program.bodies[body.parent].graph.operations[body.operation].outputs
        named.append((*named[body.parent], own, (body.region,)))
    return named


@dataclass(frozen=True)
class Axis:
    """Where the units of one program are among the `units` places of all."""

    places: tuple[int, ...]
    units: int

    @property
    def times(self) -> int:
        return 2 * self.units + 2

    def place(self, unit: int) -> int:
        """The place of a unit; of the end, the end."""
        return self.places[unit] if unit < len(self.places) else self.units

    def moment(self, tick: int) -> int:
        """The first moment at which a program is at a tick of its own, or past it. Where memory is
        counted several times (`extract/problem/memory.py`), moments of each follow on another."""
        count, tick = divmod(tick, 2 * len(self.places) + 2)
        unit, half = divmod(tick, 2)
        if tick == 0:
            at = 0
        elif unit >= len(self.places):
            at = 2 * self.units + tick - 2 * len(self.places)
        else:
            at = 2 * self.places[unit] + half
        return count * self.times + at

    def event(self, event: int, timeline: Timeline) -> int:
        """The number of an event of a program's own timeline: that of its unit's place, or one of
        the places where a collective is issued, and where it is waited for."""
        if event < timeline.units:
            return self.place(event)
        k = event - timeline.units
        issue, arrive = self.place(int(timeline.issue[k])), self.place(int(timeline.arrive[k]))
        return self.units + issue * (self.units + 1) + arrive


def axis_of(
    base: Sequence[Key], others: Sequence[Sequence[Sequence[Key]]]
) -> list[list[Axis]] | tuple[int, ...]:
    """The axis of a program as given, of units `base`, then of every group those of its programs;
    where no axis can be, the groups that are in each other's way.

    What a program has in the stead of units of the base ends where those end. Where it has more of
    them, there are places before; those of two groups must not be the same.
    """
    at = {key: k for k, key in enumerate(base)}
    removed: dict[int, int] = {}  # unit of the base -> group that lacks it
    more: dict[int, tuple[int, int]] = {}  # unit of the base, or the end -> (group, places before)
    plans: list[list[list[tuple[int, int]]]] = []  # per unit: (unit of the base, places before)
    for g, group in enumerate(others):
        plans.append([])
        for units in group:
            kept = [at[k] for k in units if k in at]
            if kept != sorted(kept):
                return (g,)
            plan: list[tuple[int, int]] = []
            start, fresh = 0, 0
            for key in (*units, None):
                if key is not None and key not in at:
                    fresh += 1
                    continue
                stop = at[key] if key is not None else len(base)
                lacks = range(start, stop)
                for r in lacks:
                    if removed.setdefault(r, g) != g:
                        return removed[r], g
                extra = max(0, fresh - len(lacks))
                first = lacks[0] if lacks else stop
                if extra:
                    owner, known = more.get(first, (g, 0))
                    if owner != g:
                        return owner, g
                    more[first] = g, max(known, extra)
                plan += [(first, extra - k) for k in range(extra)]
                plan += [(r, 0) for r in lacks[len(lacks) - (fresh - extra) :]]
                if key is not None:
                    plan.append((stop, 0))
                start, fresh = stop + 1, 0
            plans[g].append(plan)
    shift, place = 0, []
    for k in range(len(base) + 1):
        shift += more.get(k, (0, 0))[1]
        place.append(k + shift)
    total = place[-1]
    own = Axis(tuple(place[:-1]), total)
    return [
        [own],
        *([Axis(tuple(place[k] - b for k, b in plan), total) for plan in group] for group in plans),
    ]
