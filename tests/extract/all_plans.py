"""Random programs in numbers: whether the network has the front of all their plans, and what the
order of operations costs, which plans take as the program's.

    python -m tests.extract.all_plans 0 300                    # seeds; one line for each
    python -m tests.extract.all_plans 0 300 --draw products --most 20000
    python -m tests.extract.all_plans 0 100 --orders           # against the plans of every order
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.schedules import Schedule, _arranged, operation_groups
from tapestry_egg.schedule.units import fuse
from tests.extract import test_random_programs as programs

DRAWS = {"drawn": programs.drawn, "products": programs.products}


def orders(plan: Schedule) -> Iterator[Schedule]:
    """The program's units in every order in which each runs after what it reads; the plan's own
    among them."""
    graph = plan.program.bodies[0].graph
    groups = operation_groups(plan.program, plan.units)
    for order in _topological(graph, groups):
        operations = tuple(graph.operations[k] for g in order for k in groups[g])
        program = flatten(replace(graph, operations=operations), plan.program.feedback)
        yield _arranged(program, fuse(program))


def _topological(graph: BlockGraph, groups: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    made = {v: g for g, own in enumerate(groups) for k in own for v in graph.operations[k].outputs}
    after = [
        {made[v] for k in own for v in graph.operations[k].inputs if v in made} - {g}
        for g, own in enumerate(groups)
    ]

    def grow(order: list[int]) -> Iterator[list[int]]:
        if len(order) == len(groups):
            yield order
        for g in range(len(groups)):
            if g not in order and after[g] <= set(order):
                yield from grow([*order, g])

    return grow([])


def loss(plan: Schedule) -> tuple[int, float, float]:
    """How many orders there are; by which share a plan of the order that is taken is slower than
    the best of any order within its peak, at most; and by which its least peak is above that."""
    own, _ = programs.fronts(plan)
    every = [programs.fronts(other)[0] for other in orders(plan)]
    slower = 0.0
    for peak, seconds in own:
        best = min(s for front in every for p, s in front if p <= peak)
        slower = max(slower, seconds / best - 1.0)
    least = min(p for front in every for p, _ in front)
    return len(every), slower, own[0][0] / least - 1.0


def main() -> None:
    said = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    said.add_argument("first", type=int)
    said.add_argument("end", type=int)
    said.add_argument("--draw", choices=sorted(DRAWS), default="drawn")
    said.add_argument("--most", type=int, default=programs.MOST, help="plans that are listed")
    said.add_argument("--orders", action="store_true")
    given = said.parse_args()
    programs.MOST = given.most
    for seed in range(given.first, given.end):
        plan = programs.schedule_of(seed, DRAWS[given.draw])
        if plan is None:
            print(seed, "has more plans", flush=True)
        elif given.orders:
            if sum(1 for _ in orders(plan)) > 1:
                count, slower, more = loss(plan)
                print(seed, f"{count} orders: {slower:.2%} slower, {more:.2%} more", flush=True)
        else:
            front, network = programs.fronts(plan)
            apart = np.abs(np.array(network) / np.array([s for _, s in front]) - 1.0).max()
            print(seed, "agrees" if apart < 1e-6 else f"DIFFERS by {apart:.2%}", flush=True)


if __name__ == "__main__":
    main()
