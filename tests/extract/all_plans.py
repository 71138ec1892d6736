"""Random programs in numbers: whether the network has the front of all their plans, and what each
kind of choice that it makes is for.

    python -m tests.extract.all_plans 0 300                    # seeds; one line for each
    python -m tests.extract.all_plans 0 300 --draw mixed --most 1000000
    python -m tests.extract.all_plans 0 100 --frozen           # a column for each kind of choice
    python -m tests.extract.all_plans 0 100 --forms --draw algebra   # all forms, of which some go
    python -m tests.extract.all_plans 0 250 --second --draw products  # values computed twice, too
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence

from tests.extract import random_programs as programs
from tests.extract import test_random_forms as of_forms
from tests.extract import test_second_instances as of_second
from tests.extract.every_form import TooMany
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
    given.add_argument("--frozen", action="store_true")
    given.add_argument("--forms", action="store_true")
    given.add_argument("--second", action="store_true")
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
        schedule = programs.schedule_of(seed, DRAWS[asked.draw])
        plan = tables_of(schedule)
        if plan.rows > asked.most:
            total["more"] += 1
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
