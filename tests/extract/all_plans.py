"""Random programs in numbers: whether the network has the front of all their plans, what each kind
of choice that it makes is for, and what the order of operations costs, which plans take as the
program's.

    python -m tests.extract.all_plans 0 300                    # seeds; one line for each
    python -m tests.extract.all_plans 0 300 --draw mixed --most 1000000
    python -m tests.extract.all_plans 0 100 --frozen           # a column for each kind of choice
    python -m tests.extract.all_plans 0 100 --forms --draw algebra   # all forms, of which some go
    python -m tests.extract.all_plans 0 250 --second --draw products  # values computed twice, too
    python -m tests.extract.all_plans 0 300 --kernels --draw narrow  # other kernels, too
    python -m tests.extract.all_plans 0 100 --orders           # against the plans of every order
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.schedules import Schedule, _arranged, operation_groups, scheduled
from tapestry_egg.schedule.units import fuse
from tests.extract import random_programs as programs
from tests.extract import test_random_forms as of_forms
from tests.extract import test_second_instances as of_second
from tests.extract.every_form import TooMany
from tests.extract.every_store import every_store
from tests.extract.tables import Point, Tables
from tests.extract.test_random_programs import (
    FROZEN,
    apart_of,
    compared,
    frozen,
    network,
    tables_of,
)

DRAWS = {
    "drawn": programs.drawn,
    "products": programs.products,
    "mixed": programs.mixed,
    "narrow": programs.narrow,
    "algebra": programs.algebra,
}
#: Fronts that are no farther apart than this are the same.
_SAME = 1e-6
#: Programs with stored values that are listed of one.
STORED = 63


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
    own = tables_of(plan).front()
    every = [tables_of(other).front() for other in orders(plan)]
    slower = 0.0
    for point in own:
        best = min(f.seconds for front in every for f in front if f.peak <= point.peak)
        slower = max(slower, point.seconds / best - 1.0)
    least = min(f.peak for front in every for f in front)
    return len(every), slower, own[0].peak / least - 1.0


def said(apart: float) -> str:
    """How far two fronts are apart."""
    return "agrees" if apart < _SAME else f"DIFFERS by {apart:.2%}"


def without_each(plan: Tables) -> dict[str, bool]:
    """Of every kind of choice whether the network without it has another front."""
    found = {}
    for kind in FROZEN:
        with frozen(kind):
            found[kind] = compared(plan, network(plan.schedule)[0]).apart >= _SAME
    return found


def of_all_forms(seed: int, draw: Callable[[int], programs.Drawn], total: Counter[str]) -> None:
    """Whether what is searched of the forms of a program has the front of all plans of all, and
    what it has where forms are no choice."""
    graph = programs.graph_of(seed, draw)
    front = of_forms.every_front(graph)
    if front is None:
        total["more"] += 1
        return
    found = of_forms.every_one(graph)
    apart = apart_of(front, of_forms.searched(found))
    print(
        seed, f"{said(apart)} ({len(found)} forms, {found[0].left.forms} others told)", flush=True
    )
    total["agree" if apart < _SAME else "DIFFER"] += 1
    for kind, which in of_forms.FROZEN.items():
        total[kind] += apart_of(front, of_forms.searched(which(graph))) >= _SAME


def of_second_instances(
    seed: int, draw: Callable[[int], programs.Drawn], total: Counter[str], losses: list[float]
) -> None:
    """Whether what is searched of a program and of all that compute values of it a second time has
    the front of all plans of these; and by how much it is slower where nothing is."""
    plan = programs.schedule_of(seed, draw)
    try:
        front = of_second.every_front(plan)
    except TooMany:
        front = None
    if front is None:
        total["more"] += 1
        return
    own = tables_of(plan).front()
    apart = apart_of(front, of_second.searched(plan))
    total["agree" if apart < _SAME else "DIFFER"] += 1
    lost = lost_without("second instances", own, front, total, losses)
    if lost:
        print(seed, f"{said(apart)}; {lost}", flush=True)
    elif apart >= _SAME:
        print(seed, said(apart), flush=True)


def of_kernels(
    seed: int,
    draw: Callable[[int], programs.Drawn],
    most: int,
    total: Counter[str],
    losses: list[float],
) -> None:
    """By how much what is searched of a program is slower than the best of all programs that store
    some of what its kernels compute on the way, or again for each reader."""
    plan = programs.schedule_of(seed, draw)
    try:
        every = [scheduled(g, plan.program.feedback) for g in every_store(plan, STORED)]
    except TooMany:
        total["more"] += 1
        return
    tables = [tables_of(s) for s in (plan, *every)]
    if any(t.rows > most for t in tables):
        total["more"] += 1
        return
    own, *others = [t.front() for t in tables]
    total["agree"] += 1
    front = of_forms.best_of([*own, *(p for other in others for p in other)])
    lost = lost_without("stored values", own, front, total, losses)
    if lost:
        print(seed, lost, flush=True)


def lost_without(
    what: str,
    own: Sequence[Point],
    front: Sequence[Point],
    total: Counter[str],
    losses: list[float],
) -> str:
    """By how much a program's own plans are behind a front; nothing where they are not."""
    within = [p for p in front if p.peak >= own[0].peak]
    slower = max(min(f.seconds for f in own if f.peak <= p.peak) / p.seconds for p in within) - 1.0
    fastest = own[-1].seconds / front[-1].seconds - 1.0
    more = own[0].peak / front[0].peak - 1.0
    if max(slower, more) <= _SAME:
        return ""
    total[f"without {what}: other fronts"] += 1
    total[f"without {what}: slower at some limit"] += slower > _SAME
    total[f"without {what}: slower at all"] += fastest > _SAME
    total[f"without {what}: least peak is greater"] += more > _SAME
    losses.append(slower)
    return f"without {what} {slower:.2%} slower at a limit, {fastest:.2%} at all, {more:.2%} more"


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("first", type=int)
    given.add_argument("end", type=int)
    given.add_argument("--draw", choices=sorted(DRAWS), default="drawn")
    given.add_argument("--most", type=int, default=1_000_000, help="combinations, without copies")
    given.add_argument("--orders", action="store_true")
    given.add_argument("--frozen", action="store_true")
    given.add_argument("--forms", action="store_true")
    given.add_argument("--second", action="store_true")
    given.add_argument("--kernels", action="store_true")
    asked = given.parse_args()
    total: Counter[str] = Counter()
    losses: list[float] = []
    for seed in range(asked.first, asked.end):
        if asked.forms:
            of_all_forms(seed, DRAWS[asked.draw], total)
            continue
        if asked.second:
            of_second_instances(seed, DRAWS[asked.draw], total, losses)
            continue
        if asked.kernels:
            of_kernels(seed, DRAWS[asked.draw], asked.most, total, losses)
            continue
        schedule = programs.schedule_of(seed, DRAWS[asked.draw])
        plan = tables_of(schedule)
        if plan.rows > asked.most:
            total["more"] += 1
            continue
        if asked.orders:
            if sum(1 for _ in orders(schedule)) > 1:
                count, slower, more = loss(schedule)
                print(seed, f"{count} orders: {slower:.2%} slower, {more:.2%} more", flush=True)
            continue
        found = compared(plan, network(schedule)[0])
        size = f"{found.combinations} combinations, {found.points} in the front"
        print(seed, f"{said(found.apart)} ({size})", flush=True)
        total["agree" if found.apart < _SAME else "DIFFER"] += 1
        own, told = network(schedule, every=False)
        if told:
            print(seed, f"  leaves copies out and counts them: {said(compared(plan, own).apart)}")
        if asked.frozen:
            total.update(kind for kind, other in without_each(plan).items() if other)
    for what, count in total.items():
        print(f"{count:6d}  {what}")
    if losses:
        mean = sum(losses) / (total["agree"] + total["DIFFER"])
        print(f"slower at a limit without them: {mean:.2%} in the mean of all programs")


if __name__ == "__main__":
    main()
