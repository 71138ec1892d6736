"""Forms of regions: bodies of loops and branches, each in its best form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import RuleStep
from tapestry_egg.schedule.one_device import region_shares

from .derivation import digest
from .form import LEAST_GAIN, Form, Left

# Regions that take less than this share of a program's seconds are left as they are.
_NEGLIGIBLE = 0.25 * LEAST_GAIN


def with_regions(
    graph: BlockGraph,
    target: Target,
    forms_of: Callable[[BlockGraph], tuple[Form, ...]],
) -> Form:
    """The graph with the best form of every region in its place.

    Regions stay as they are that all together take too little of the program's time for any form of
    them to matter: the predicates of loops, say.
    """
    worth = _worth_a_form(graph, target)
    names: set[str] = set()
    saturated = True
    operations: list[Operation] = []
    steps: list[RuleStep] = []
    known: dict[object, tuple[Form, ...]] = {}
    timeline: list[Tick] = []
    seen: list[tuple[Form, ...]] = []  # of every region that the rules saw, its forms

    def best(region: BlockGraph) -> Form:
        """The best form of a region; equal regions, as equal layers have, share one."""
        key = digest(region), tuple(region.values[v] for v in region.inputs)
        if key not in known:
            found = forms_of(region)
            known[key] = found
            timeline.extend(found[0].timeline)
            seen.append(found)
        return known[key][:2][-1]

    for number, op in enumerate(graph.operations):
        bodies = [
            best(region) if (number, k) in worth else Form(region)
            for k, region in enumerate(op.regions)
        ]
        operations.append(replace(op, regions=tuple(b.graph for b in bodies)) if bodies else op)
        names.update(name for b in bodies for name in b.rules)
        saturated &= all(b.saturated for b in bodies)
        for which, b in enumerate(bodies):
            steps += [replace(s, region=(number, which, *s.region)) for s in b.steps]
    inner = replace(graph, operations=tuple(operations)) if names else graph
    unworthy = sum(len(op.regions) for op in graph.operations) - len(worth)
    own = [found[0] for found in seen]  # the regions as given, with what is told of them
    told = sum((f.left for f in own), Left())
    return Form(
        inner,
        tuple(sorted(names)),
        saturated,
        tuple(steps),
        tuple(timeline),
        by_clock=any(f.by_clock for f in own),
        left=replace(
            told,
            regions=told.regions + unworthy,
            forms=told.forms + sum(len(f[2:]) for f in seen),
        ),
    )


def _worth_a_form(graph: BlockGraph, target: Target) -> set[tuple[int, int]]:
    """The regions, by the numbers of operation and region, without those that take least and
    together no more than the share `_NEGLIGIBLE` of the program's seconds."""
    if not any(op.regions for op in graph.operations):
        return set()
    shares = region_shares(graph, target)
    left = _NEGLIGIBLE
    worth = set()
    for key, share in sorted(shares.items(), key=lambda item: (item[1], item[0])):
        left -= share
        if left < 0.0:
            worth.add(key)
    return worth
