"""Every plan of a small program, and what each costs.

An oracle for the search: plans are the product of all strategies of operations and all copies
(`brute_ways.py`), costed by the certificate. Nothing here knows a rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.certify.verdict import Certificate, Refused
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import BodyPlan, Change, Costs, Kept, Plan, Strategy
from tapestry_egg.schedule.flatten import Instance
from tapestry_egg.schedule.schedules import Schedule
from tests.extract.brute_ways import Paths, every_layout, every_strategy, paths


@dataclass(frozen=True)
class Choice:
    """One way to run one instance."""

    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    strategy: Strategy | None


def choices(instance: Instance, mesh: MeshShape) -> list[Choice]:
    """Every way to run an operation, or to place a value at the program's boundary."""
    if not instance.port:
        found = sorted(every_strategy(instance.signature, mesh), key=repr)
        return [Choice(s.needs, s.gives, s) for s in found]
    tensor = (*instance.signature.input_types, *instance.signature.output_types)[0]
    layouts = [Layout.replicated(tensor.rank)]
    if instance.port != "constant":
        layouts = [x for x in every_layout(tensor, mesh, ("sum",)) if not x.partial]
    return [
        Choice((x,) * len(instance.inputs), (x,) * len(instance.outputs), None) for x in layouts
    ]


class Plans:
    """The plans of a program without regions: options of every instance, ways to keep values."""

    def __init__(self, schedule: Schedule, mesh: MeshShape, target: Target) -> None:
        self.schedule, self.program = schedule, schedule.program
        self.mesh, self.target = mesh, target
        self.graph = self.program.bodies[0].graph
        self.outer = {v for unit in schedule.units for v in unit.outputs}
        self.order = [i for unit in schedule.units for i in unit.members]
        self.options = {i: choices(self.program.instances[i], mesh) for i in self.order}
        every = (x for own in self.options.values() for c in own for x in (*c.needs, *c.gives))
        self.monoids = tuple(sorted({x.monoid for x in every if x.monoid} | {"sum"}))
        self.routes = cache(self._routes)

    def _routes(self, tensor: TensorType, source: Layout) -> Paths:
        return paths(tensor, source, self.mesh, self.target, self.monoids)

    def chosen(self, order: Sequence[int], inside: bool) -> Iterator[dict[int, Choice]]:
        """Options of some instances, in order, that agree on what exists only inside a kernel; with
        `inside` also where one value there is read in another layout by all that read it: partial
        sums, and what is smaller than arrays before and after it. No kernel may be cut for some."""
        narrow = self.narrow(order) if inside else frozenset()

        def grow(
            k: int,
            chosen: dict[int, Choice],
            given: dict[int, Layout],
            other: tuple[int, Layout] | None,
        ) -> Iterator[Any]:
            if k == len(order):
                yield chosen
                return
            i = order[k]
            instance = self.program.instances[i]
            for choice in self.options[i]:
                copied = other
                for v, need in zip(instance.inputs, choice.needs, strict=True):
                    if v in self.outer or given[v] == need:
                        continue
                    copied = copied or (v, need)
                    summed = inside and given[v].partial
                    if not (summed or v in narrow) or need.partial or copied != (v, need):
                        break
                else:
                    more = dict(zip(instance.outputs, choice.gives, strict=True))
                    yield from grow(k + 1, {**chosen, i: choice}, {**given, **more}, copied)

        yield from grow(0, {}, {}, None)

    def narrow(self, order: Sequence[int]) -> frozenset[int]:
        """What operations of one kernel make on the way that is smaller than some array from
        outside that leads to it, and than some other that the rest of them read or make."""
        members = [self.program.instances[i] for i in order]
        size, found = self.program.sizes, set()
        for x in members:
            for v in x.outputs:
                led = {v}
                for y in reversed(members):
                    if led & {*y.outputs}:
                        led |= {*y.inputs}
                rest = [y for y in members if not led & {*y.outputs}]
                after = {w for y in rest for w in (*y.inputs, *y.outputs) if w in self.outer}
                before = [size[w] for w in led & self.outer]
                if v not in self.outer and before and after:
                    if size[v] < min(max(before), max(size[w] for w in after)):
                        found.add(v)
        return frozenset(found)

    def readers(self, chosen: Mapping[int, Choice], v: int) -> dict[int, list[Layout]]:
        """By operation, the layouts in which a value is read; at the end by what leaves."""
        found: dict[int, list[Layout]] = {}
        for i, choice in chosen.items():
            instance = self.program.instances[i]
            at = instance.operation if not instance.port else len(self.graph.operations)
            for w, need in zip(instance.inputs, choice.needs, strict=True):
                if w == v:
                    found.setdefault(at, []).append(need)
        return found

    def leaves_alike(self, chosen: Mapping[int, Choice]) -> bool:
        """Whether a value that leaves several times does so in one layout."""
        leaving: dict[int, set[Layout]] = {}
        for i, choice in chosen.items():
            instance = self.program.instances[i]
            if instance.port in ("output", "state"):
                for v, need in zip(instance.inputs, choice.needs, strict=True):
                    leaving.setdefault(v, set()).add(need)
        return all(len(x) == 1 for x in leaving.values())

    def keepings(self, chosen: Mapping[int, Choice], v: int) -> list[Kept | None]:
        """Ways to keep a copy of a value, or none."""
        found = self.readers(chosen, v)
        (given,) = (
            give
            for i, choice in chosen.items()
            for w, give in zip(self.program.instances[i].outputs, choice.gives, strict=True)
            if w == v
        )
        some: list[Kept | None] = [None]
        for layout in {n for needs in found.values() for n in needs if n != given}:
            at = sorted(k for k, needs in found.items() if layout in needs)
            # What the value's first reader alone takes is a copy of its own.
            some += [Kept(layout, until) for until in at if until > min(found)]
        return some

    def plan(self, chosen: Mapping[int, Choice], kept: Mapping[int, Kept]) -> Plan:
        """The plan of an option for each instance, with copies kept of some values."""
        program, body = self.program, self.program.bodies[0].values
        values = {v: k for k, v in enumerate(body)}
        given = {
            v: give
            for i, choice in chosen.items()
            for v, give in zip(program.instances[i].outputs, choice.gives, strict=True)
        }
        inputs: dict[int, Layout] = {}
        outputs: dict[int, Layout] = {}
        strategies: dict[int, Strategy] = {}
        copies: dict[tuple[int, Layout, Layout], tuple[Change, ...]] = {}
        for i, choice in chosen.items():
            instance = program.instances[i]
            if choice.strategy is not None:
                strategies[instance.operation] = choice.strategy
            for v, need in zip(instance.inputs, choice.needs, strict=True):
                if need != given[v]:
                    steps = self.routes(program.types[v], given[v]).steps[need]
                    copies[values[v], given[v], need] = steps
                if instance.port in ("output", "state"):
                    outputs[v] = need
            for v, give in zip(instance.outputs, choice.gives, strict=True):
                if instance.port in ("input", "state"):
                    inputs[v] = give
        return Plan(
            "brute",
            self.mesh,
            self.target.spec,
            BodyPlan(
                self.graph,
                tuple(inputs[body[v]] for v in self.graph.inputs),
                tuple(outputs[body[v]] for v in self.graph.outputs),
                tuple(strategies[k] for k in range(len(self.graph.operations))),
                {values[v]: k for v, k in kept.items()},
                copies,
            ),
            Costs(0.0, 0, 0.0),
        )


def every_plan(
    schedule: Schedule, mesh: MeshShape, target: Target, inside: bool = False
) -> Iterator[Plan]:
    """Every plan of a program without regions: all strategies, all copies kept or not; with
    `inside` also values inside kernels copied there or not (some of which no kernel can be cut
    for)."""
    plans = Plans(schedule, mesh, target)
    for chosen in plans.chosen(plans.order, inside):
        if not plans.leaves_alike(chosen):
            continue
        read = [v for v in sorted(plans.outer) if plans.readers(chosen, v)]
        for kept in product(*[plans.keepings(chosen, v) for v in read]):
            some = {v: k for v, k in zip(read, kept, strict=True) if k is not None}
            yield plans.plan(chosen, some)


def every_cost(
    schedule: Schedule, mesh: MeshShape, target: Target, inside: bool = False
) -> list[Certificate]:
    """The costs of every plan of a program, `inside` as in `every_plan`."""
    ground, found = Ground(schedule, target), []
    for plan in every_plan(schedule, mesh, target, inside):
        try:
            found.append(Walk(plan, ground).certificate())
        except Refused as e:
            assert "copied inside a kernel" in str(e), e
    return found
