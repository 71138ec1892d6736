"""Every plan of a small program, and what each costs.

An oracle for the search: plans are the product of all strategies of operations and all copies
(`brute_ways.py`), costed by the certificate. Nothing here knows a rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.certify.verdict import Certificate, Refused
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import BodyPlan, Costs, Kept, Plan, Strategy
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


def every_plan(
    schedule: Schedule, mesh: MeshShape, target: Target, inside: bool = False
) -> Iterator[Plan]:
    """Every plan of a program without regions: all strategies, all copies kept or not; with
    `inside` also partial values inside kernels combined there or not (some of which no kernel can
    be cut for)."""
    program = schedule.program
    graph = program.bodies[0].graph
    outer = {v for unit in schedule.units for v in unit.outputs}
    order = [i for unit in schedule.units for i in unit.members]
    options = {i: choices(program.instances[i], mesh) for i in order}

    @cache
    def routes(tensor: TensorType, source: Layout) -> Paths:
        return paths(tensor, source, mesh, target)

    def grow(k: int, chosen: dict[int, Choice], given: dict[int, Layout]) -> Iterator[Plan]:
        if k == len(order):
            yield from finish(chosen, given)
            return
        i = order[k]
        instance = program.instances[i]
        for choice in options[i]:
            if any(
                v not in outer
                and given[v] != need
                and not (inside and given[v].partial and not need.partial)
                for v, need in zip(instance.inputs, choice.needs, strict=True)
            ):
                continue
            more = dict(zip(instance.outputs, choice.gives, strict=True))
            yield from grow(k + 1, {**chosen, i: choice}, {**given, **more})

    def finish(chosen: dict[int, Choice], given: dict[int, Layout]) -> Iterator[Plan]:
        values = {v: k for k, v in enumerate(program.bodies[0].values)}
        readers: dict[int, dict[int, list[Layout]]] = {}  # value -> operation -> layouts
        inputs: dict[int, Layout] = {}
        outputs: dict[int, list[Layout]] = {}
        strategies: dict[int, Strategy] = {}
        for i, choice in chosen.items():
            instance = program.instances[i]
            if choice.strategy is not None:
                strategies[instance.operation] = choice.strategy
            for v, need in zip(instance.inputs, choice.needs, strict=True):
                at = instance.operation if not instance.port else len(graph.operations)
                readers.setdefault(v, {}).setdefault(at, []).append(need)
                if instance.port in ("output", "state"):
                    outputs.setdefault(v, []).append(need)
            for v, give in zip(instance.outputs, choice.gives, strict=True):
                if instance.port in ("input", "state"):
                    inputs[v] = give
        if any(len(set(x)) > 1 for x in outputs.values()):
            return
        copies = {
            (values[v], given[v], need): routes(program.types[v], given[v]).steps[need]
            for v, found in readers.items()
            for needs in found.values()
            for need in needs
            if need != given[v]
        }
        keeping: list[list[tuple[int, Kept] | None]] = []
        for v, found in readers.items():
            if v not in outer:
                continue
            some: list[tuple[int, Kept] | None] = [None]
            for layout in {n for needs in found.values() for n in needs if n != given[v]}:
                at = sorted(k for k, needs in found.items() if layout in needs)
                # What the value's first reader alone takes is a copy of its own.
                some += [(values[v], Kept(layout, until)) for until in at if until > min(found)]
            keeping.append(some)
        body = program.bodies[0].values
        for kept in product(*keeping):
            yield Plan(
                "brute",
                mesh,
                target.spec,
                BodyPlan(
                    graph,
                    tuple(inputs[body[v]] for v in graph.inputs),
                    tuple(outputs[body[v]][0] for v in graph.outputs),
                    tuple(strategies[k] for k in range(len(graph.operations))),
                    dict(x for x in kept if x is not None),
                    copies,
                ),
                Costs(0.0, 0, 0.0),
            )

    yield from grow(0, {}, {})


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
