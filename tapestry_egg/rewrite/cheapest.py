"""Cheapest: of the programs that the classes hold, the one that takes least on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.target import Target
from tapestry_egg.rewrite.terms.explore import BUDGET, Explored
from tapestry_egg.rewrite.terms.rebuild import Rebuilt, rebuild
from tapestry_egg.rewrite.terms.terms import as_written
from tapestry_egg.schedule.one_device import least_seconds, program_seconds
from tapestry_egg.work import Work

from .bypass import bypass
from .choose import choose
from .folded_program import Folded, class_weights

#: Calls that it takes, per operation, to build a program anew and to price it. No measurement of
#: the number is kept.
PER_OPERATION = 40


@dataclass(frozen=True)
class Cheapest:
    """A graph, its price, what it chooses among the terms, and whether there was time to try all
    that looked worth it."""

    built: Rebuilt
    seconds: float
    pick: list[int]
    finished: bool
    explored: Explored  # what `pick` chooses among
    untried: int = 0  # kinds of change that looked worth a trial and were given none


def cheapest(
    graph: BlockGraph,
    explored: Explored,
    target: Target,
    given: float,
    folded: Folded | None = None,
    passes: float = 0.0,
    first: Sequence[int] | None = None,
    work: Work | None = None,
    until: float = BUDGET.choice,
) -> Cheapest:
    """The cheapest of the graphs that compute what this one does, as far as tried, from the choice
    `first` on, or from this one.

    The price are seconds, and those of so many `passes` over all that is stored; `given` is that of
    this one. Where it is folded, the price is that of the program that it stands for. What is tried
    counts as `work`; nothing new is when that has come halfway to `until`.
    """
    work, late = work or Work(), False
    most = (work.units + until) / 2.0
    terms, catalogue = explored.terms, explored.catalogue
    least = [least_seconds(a.signature, target, passes) for a in catalogue]
    roots = terms.roots(graph)
    weights = folded.weights if folded else None
    picked = list(first or as_written(terms, least))
    best = rebuild(graph, terms, catalogue, picked) or Rebuilt(graph, ())
    same = best.graph.operations == graph.operations
    seconds = given if same else program_seconds(best.graph, target, weights, passes)

    def judge(pick: list[int]) -> bool:
        nonlocal best, seconds, picked, late
        if late := late or work.units >= most:
            return False
        work.add(PER_OPERATION * len(graph.operations), 0)
        built = rebuild(graph, terms, catalogue, pick)
        if built is None:
            return False
        found = program_seconds(built.graph, target, weights, passes)
        if found >= seconds:
            return False
        best, seconds, picked = built, found, list(pick)
        return True

    counts = class_weights(folded, terms) if folded else None
    chosen = choose(terms, least, roots, judge, counts, work, most, picked)
    if chosen.finished:
        without = bypass(terms, catalogue, least, roots, chosen.pick, judge)
        if without != chosen.pick:  # what only those read that are computed without it now
            chosen = choose(terms, least, roots, judge, counts, work, most, without)
    finished = chosen.finished and not late
    return Cheapest(best, seconds, picked, finished, explored, chosen.untried)
