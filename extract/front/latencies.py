"""Latencies that merging may take away: the same problems, in which they are cheap.

A search prices every collective with its whole latency, and so finds plans of few collectives, not
those of many that can be one. Here latencies are paid along chains of units, where collectives wait
for each other (`extract/problem/mergeable.py`), and elsewhere but a part of them. What is found so
is merged with what was found before (`extract/front/merging.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from tapestry_egg.extract.choices.once import Once
from tapestry_egg.extract.problem.assemble import PlanProblem, Weights, assemble
from tapestry_egg.extract.problem.columns import Columns
from tapestry_egg.extract.problem.mergeable import Chains, Mergeable, may_merge, most_saved
from tapestry_egg.extract.search.archive import Archive, Candidate, shown
from tapestry_egg.extract.search.settling import SLIVER

from .latency_prices import LatencyPrices
from .merge import NetworkResult
from .merging import LEAST

# Which parts of its latency a collective off the chains pays, in one search after another: as if so
# many were one. 0 leads to so many collectives that most stay alone. Of 0, 0.1 and 0.2 the demo's
# fastest plan comes from 0.1, and takes 3.07 ms where it takes 3.51 and 3.69 of the others; of a
# decoder of width 256 it comes from 0.2, as from 0.4. At 0.1 it is looked first whether there are
# such plans at all: twelve sums that can be one are not found at 0.2.
PARTS = (0.05, 0.1, 0.2)
LOOKED = 0.1
# So many networks are searched so at most.
_NETWORKS = 4


@dataclass
class Latencies:
    """One network in which copies that may be merged are paid by their bytes, and by latencies
    along chains."""

    result: NetworkResult
    once: Once = field(default_factory=Once)
    spent: float = 0.0  # units of work, by a first look for what merging may make fast

    @cached_property
    def prices(self) -> LatencyPrices:
        """The labellings that are known, the fastest plan's from the start, and the prices of
        all."""
        found = LatencyPrices(self.result.assembled, self.once)
        if self.result.archive.candidates:
            found.meet(fastest(self.result.archive).rows, False)
        return found

    def knowing(self, result: NetworkResult) -> Latencies:
        """The same of the same network, of which other plans may be known now."""
        return self if result.archive is self.result.archive else replace(self, result=result)

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

    def most_of_any(self) -> float:
        """Seconds that merging the collectives of any plan saves at most, and likely far more than
        it does: at each read the copy of which most may be saved."""
        choices = self.result.assembled.choices
        if not may_merge(choices):
            return 0.0
        mergeable = Mergeable(Columns(choices, self.once))
        read = [v for u in choices.schedule.units for v in {v for _, _, v in u.reads}]
        saved = {v: mergeable.saved(v) for v in dict.fromkeys(read)}
        most = {v: float(own.max(initial=0.0)) for v, own in saved.items() if own is not None}
        return sum(most.get(v, 0.0) for v in read)

    def _posed(self, chains: Chains) -> PlanProblem:
        own = self.result.assembled
        return assemble(own.choices, Weights(chains=chains), self.once, own.keeping)


def open_to_merging(
    results: Sequence[NetworkResult], networks: Mapping[int, Latencies]
) -> tuple[dict[int, Latencies], int]:
    """The networks, by their places, in which merging may save a share worth telling of the fastest
    plan that is known, but of no plan that was found there: those first of whose plans the least is
    proven. And how many of these are too many to be looked at.

    Where latencies are no share of anything there are none.
    """
    known = min((c.seconds for r in results for c in r.archive.candidates), default=0.0)
    shares = _shares(results, networks)
    some = [k for k in networks if k not in shares]
    some = [k for k in some if networks[k].most_of_any() > LEAST * known]
    some.sort(key=lambda k: results[k].archive.bound(np.inf, np.inf))
    return {k: networks[k] for k in some[:_NETWORKS]}, max(0, len(some) - _NETWORKS)


def worth_merging(
    results: Sequence[NetworkResult], networks: Mapping[int, Latencies]
) -> tuple[dict[int, Latencies], dict[int, Latencies], tuple[float, ...]]:
    """The networks, by their places, in which merging may make a plan faster than all that are
    known of no larger peak, by a share worth telling: those first where it may leave the least
    share of these. All others, if there are such; and of those that are so, too, but too many, the
    shares that it may save."""
    worth = sorted((share, k) for k, share in _shares(results, networks).items())
    found = {k: networks[k] for _, k in worth[:_NETWORKS]}
    others = {k: own for k, own in networks.items() if k not in found} if found else {}
    return found, others, tuple(1.0 - share for share, _ in worth[_NETWORKS:])


def _shares(
    results: Sequence[NetworkResult], networks: Mapping[int, Latencies]
) -> dict[int, float]:
    """The networks that are worth merging, and the share that it may leave of the seconds known.

    Asked are the fastest plan of each network, what a front of all would show, and what was found
    where latencies are cheap.
    """
    every = [(k, c) for k, r in enumerate(results) for c in r.archive.candidates]
    costs = np.array([c.costs for _, c in every]).reshape(-1, 3)
    shows = {id(every[i][1]) for i in shown(costs)} if every else set()
    shows |= {id(fastest(r.archive)) for r in results if r.archive.candidates}
    asked = [(k, c) for k, c in every if id(c) in shows]
    asked += [(k, c) for k, r in enumerate(results) for _, own in r.mergeable for c in own]
    least: dict[int, float] = {}
    for k, c in asked:
        if may_merge(results[k].assembled.choices):
            within = costs[costs[:, 1] <= c.peak * (1.0 + SLIVER), 0]
            known = float(within.min(initial=c.seconds))
            left = c.seconds - networks[k].most_saved(c)
            least[k] = min(least.get(k, 1.0), left / known if known else 1.0)
    return {k: share for k, share in least.items() if share <= 1.0 - LEAST}


def fastest(archive: Archive) -> Candidate:
    """The fastest of what a search has found."""
    return min(archive.candidates, key=lambda c: c.costs)
