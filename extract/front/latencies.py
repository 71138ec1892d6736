"""Latencies that merging may take away: the same problems, in which they are cheap.

A search prices every collective with its whole latency, and so finds plans of few collectives, not
those of many that can be one. Here latencies are paid along chains of units, where collectives wait
for each other (`extract/problem/mergeable.py`), and elsewhere but a part of them. What is found so
is merged with what was found before (`extract/front/merging.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from tapestry_egg.extract.problem.assemble import PlanProblem, Weights, assemble
from tapestry_egg.extract.problem.mergeable import Chains, may_merge, most_saved
from tapestry_egg.extract.problem.once import Once
from tapestry_egg.extract.search.archive import Archive, Candidate, shown
from tapestry_egg.extract.search.settling import SLIVER

from .latency_prices import LatencyPrices
from .merge import NetworkResult
from .merging import LEAST

# Which parts of its latency a collective off the chains pays, in one search after another: as if so
# many were one. 0 leads to so many collectives that most stay alone. Of 0, 0.1 and 0.2 the demo's
# fastest plan comes from 0.1, and takes 3.07 ms where it takes 3.51 and 3.69 of the others; of a
# decoder of width 256 it comes from 0.2, as from 0.4.
PARTS = (0.05, 0.1, 0.2)
# So many networks are searched so at most.
_NETWORKS = 4


@dataclass
class Latencies:
    """One network in which copies that may be merged are paid by their bytes, and by latencies
    along chains."""

    result: NetworkResult
    once: Once = field(default_factory=Once)

    @cached_property
    def prices(self) -> LatencyPrices:
        """The labellings that are known, and the prices of all."""
        return LatencyPrices(self.result.assembled, self.once)

    def bounding(self, by_lines: bool) -> PlanProblem:
        """The next problem in which nothing else is paid: no merging of any plan takes less."""
        return self._posed(self.prices.next() if by_lines else self.prices.along_chains())

    def likely(self, part: float, by_lines: bool) -> PlanProblem:
        """The problem in which a part of what merging may take away is paid all the same."""
        chains = self.prices.by_lines() if by_lines else self.prices.along_chains()
        return self._posed(replace(chains, others=part))

    def most_saved(self, plan: Candidate) -> float:
        """Seconds that merging the collectives of a plan saves at most."""
        return most_saved(self.result.assembled, plan.rows, self.once)

    def _posed(self, chains: Chains) -> PlanProblem:
        own = self.result.assembled
        return assemble(own.choices, Weights(chains=chains), self.once, own.shared)


def worth_merging(
    results: Sequence[NetworkResult],
) -> tuple[dict[int, Latencies], dict[int, Latencies], int]:
    """The networks, by their places, in which merging may make a plan faster than all that are
    known of no larger peak, by a share worth telling: those first where it may leave the least
    share of these. All others, if there are such; and how many of them are so, too, but too many.

    Asked are the fastest plan of each network, and what a front of all would show.
    """
    every = [(k, c) for k, r in enumerate(results) for c in r.archive.candidates]
    costs = np.array([c.costs for _, c in every]).reshape(-1, 3)
    asked = {id(every[i][1]) for i in shown(costs)} if every else set()
    asked |= {id(fastest(r.archive)) for r in results if r.archive.candidates}
    networks = {k: Latencies(r) for k, r in enumerate(results)}
    least: dict[int, float] = {}
    for k, c in every:
        if id(c) in asked and may_merge(networks[k].result.assembled.choices):
            known = costs[costs[:, 1] <= c.peak * (1.0 + SLIVER), 0].min()
            left = c.seconds - networks[k].most_saved(c)
            least[k] = min(least.get(k, 1.0), left / known if known else 1.0)
    worth = sorted((share, k) for k, share in least.items() if share <= 1.0 - LEAST)
    found = {k: networks[k] for _, k in worth[:_NETWORKS]}
    others = {k: own for k, own in networks.items() if k not in found} if found else {}
    for network in (*found.values(), *others.values()):
        if network.result.archive.candidates:
            network.prices.meet(fastest(network.result.archive).rows, False)
    return found, others, len(worth) - len(found)


def fastest(archive: Archive) -> Candidate:
    """The fastest of what a search has found."""
    return min(archive.candidates, key=lambda c: c.costs)
