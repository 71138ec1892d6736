"""The front of two objectives of an AND-OR form, from built answers to a certificate.

The widest gap between what is known (`front_bounds.py`) is taken first. It is tried in turn by a
path between the answers at its ends, by the relaxation and then the program of the weighted sum for
which both ends are the same (Aneja and Nair, "Bicriteria transportation problem", 1979), which
bound the whole front, and by the program that bounds the second objective.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from tapestry_egg.extract.gym.dag.egraph.annealing import Annealing, anneals
from tapestry_egg.extract.gym.dag.egraph.cost_unit import Scaled
from tapestry_egg.extract.gym.dag.egraph.form import AndOr
from tapestry_egg.extract.gym.dag.egraph.greedy import Chosen, Improvement, acyclic, bottom_up
from tapestry_egg.extract.gym.dag.egraph.tree_elimination import (
    Entry,
    chosen_nodes,
    eliminate,
    non_dominated,
)

from .front_bounds import FrontBounds, Point, Region
from .lazy_milp import Picks, Record, Search, expressed, split, trivial_bound
from .weighted_sum import Relaxation, Relaxed, Weights, weighted

# Entries of tables in the elimination of a part.
_ENTRIES = 300_000

# Limits that are left to a region when its weighted sum is not worth a program.
_FEW = 2

# Programs after which a region is left alone: what is open there is a matter of tolerances.
_FUTILE = 12


class FrontSearch:
    """A search over one form, whose answers go to `take`: it returns (cost, count) of picks.

    `told` is called after every program. When time is up (`time.perf_counter`), `bounds` says what
    is known; so it does after an interruption.
    """

    def __init__(
        self,
        form: AndOr,
        bounds: FrontBounds,
        take: Callable[[Picks], Point],
        deadline: float,
        seed: int,
        widest: int,
        told: Callable[[], None],
    ) -> None:
        self.form = form
        self.bounds = bounds
        self.take = take
        self.deadline = deadline
        self.seed = seed
        self.widest = widest
        self.told = told
        self.picks: dict[Point, Picks] = {}
        self.relaxation: Relaxation | None = None
        self.relaxed: dict[Weights, Relaxed] = {}
        self.solved: set[Weights] = set()
        self.joined: set[tuple[Point, Point]] = set()
        self.tries = [0] * (bounds.most + 1)

    def left(self, share: float = 1.0) -> float:
        """A share of the time that is left, in seconds."""
        return share * max(0.0, self.deadline - time.perf_counter())

    def offer(self, picks: Picks) -> None:
        """Take an answer; what it needs not goes."""
        point = self.take(picks)
        if self.bounds.offer(point):
            self.picks[point] = picks
            if len(self.picks) > 2 * len(self.bounds.points):
                self.picks = {p: self.picks[p] for p in self.bounds.points if p in self.picks}

    def start(self) -> None:
        """Answers of little cost, of few nodes, and in between, by building up; trivial bounds."""
        form = self.form
        least = trivial_bound(weighted(form, (1, 0)))
        self.bounds.limited(self.bounds.most, least)
        self.bounds.line(0, 1, trivial_bound(weighted(form, (0, 1))))
        parents = form.parents()
        largest = [max((abs(v) for v in column.values()), default=1) or 1 for column in form.costs]
        for a, b in ((1.0, 1e-6), (1e-6, 1.0), (1.0, 1.0), (1.0, 0.1), (0.1, 1.0)):
            price = {
                n: a * max(v, 0) / largest[0] + b * form.costs[1][n] / largest[1]
                for n, v in form.cost.items()
            }
            chosen = bottom_up(form, price, parents)
            if chosen is None:  # cycles are allowed and needed
                return
            self.offer(form.picks(chosen.values()))

    def eliminated(self) -> bool:
        """The front by elimination; False where the form is too wide or takes too long."""
        form = self.form
        if not form.acyclic:
            return False
        parts = split(form)
        whole = parts == [form]
        begin = (0, 0) if whole else (form.constant[0], form.constant[1])
        total: list[Entry] = [(begin, None)]
        end = time.perf_counter() + max(1.0, self.left(0.3))
        for part in parts:
            found = eliminate(part, min(self.deadline, end), None, _ENTRIES, self.widest)
            if found is None:
                return False
            total = non_dominated(
                (tuple(x + y for x, y in zip(a, b, strict=True)), (way, nodes))
                for a, way in total
                for b, nodes in found.points
            )
        self.bounds.close((cost, count) for (cost, count), _ in total)
        # Both ends, then one in so many, ever more: where time is up, those had are spread.
        for i in sorted(range(len(total)), key=lambda i: -(i & -i) or -math.inf):
            self.bounds.offer(self.take(form.picks(chosen_nodes(total[i - 1][1]))))
        return True

    def run(self) -> None:
        """Close the widest gap again and again, until none is left or time is up."""
        if not self.picks:
            self.start()
        self.relaxation = Relaxation(self.form, time.perf_counter() + self.left(0.2))
        # The ends of the front come first: without them nothing bounds what lies beyond.
        for weights in ((1, 0), (0, 1)):
            self._relax(weights)
            if self._value(weights) > self.relaxed[weights].bound:
                self._sum(weights, self.left(0.25))
            self.told()
        while self.left() > 0.05:
            regions = [r for r in self.bounds.regions() if self.tries[r.last] < _FUTILE]
            if not regions:
                return
            region = min(
                regions,
                key=lambda r: (self.tries[r.last] - min(r.epsilon, 10.0) / 100.0, r.first),
            )
            self._close(region, len(regions))
            self.told()

    def _close(self, region: Region, regions: int) -> None:
        weights = region.weights
        ends = region.left, region.right
        if None not in ends and ends not in self.joined:
            self.joined.add(ends)  # type: ignore[arg-type]
            if self._join(region):
                return
        if weights not in self.relaxed:
            self._relax(weights)
            return
        seconds = max(0.5, self.left() / (3.0 + regions)) * 2.0 ** self.tries[region.last]
        whole = 0 in weights  # one objective by itself
        loose = self._value(weights) > self.relaxed[weights].bound
        many = region.last - region.first >= _FEW
        if not whole and loose and many and weights not in self.solved:
            self.solved.add(weights)
            self._sum(weights, seconds)
            return
        if whole:
            self._sum(weights, seconds)
        else:
            self._limited(region, seconds)
        for k in range(region.first, region.last + 1):
            self.tries[k] += 1

    def _value(self, weights: Weights) -> Scaled:
        """The least weighted sum of the known answers."""
        a, b = weights
        return min((a * v + b * k for v, k in self.bounds.points), default=math.inf)

    def _record(self, weights: Weights) -> Record:
        return Record(lambda value, picks: self.offer(picks), self._value(weights))

    def _relax(self, weights: Weights) -> None:
        """The relaxation of a weighted sum, and answers built around it."""
        if self.relaxation is None:
            return
        form = weighted(self.form, weights)
        built = Improvement(form, self.seed)
        record = self._record(weights)
        built.start(time.perf_counter() + self.left(0.05))
        if not form.negative():
            built.run(time.perf_counter() + min(1.0, self.left(0.02)), stale=6)
        record.offer(form, built.best)
        end = time.perf_counter() + self.left(0.2)
        found = self.relaxation.solve(built, record, end, self.seed)
        self.relaxed[weights] = found
        self.bounds.line(*weights, found.bound)

    def _sum(self, weights: Weights, seconds: float) -> None:
        """The program of a weighted sum."""
        record = self._record(weights)
        form = weighted(self.form, weights)
        self._lessen(form, weights, record.value)
        search = Search(self._end(seconds), self.seed, min(8, self.widest))
        self.bounds.line(*weights, search.solve(form, record, lambda bound: None))

    def _limited(self, region: Region, seconds: float) -> None:
        """The program that limits the second objective where a region's gap is widest."""
        limit = (region.widest + region.last + 1) // 2
        most: Scaled = math.inf if region.left is None else region.left[0]
        form = self.form.copy()
        a, b = region.weights
        if most < math.inf:
            self._lessen(form, (a, b), a * most + b * limit)
        record = Record(lambda value, picks: self.offer(picks), most)
        search = Search(self._end(seconds), self.seed, min(8, self.widest), limit)
        self.bounds.limited(limit, search.solve(form, record, lambda bound: None))

    def _end(self, seconds: float) -> float:
        return min(self.deadline, time.perf_counter() + max(0.05, seconds))

    def _lessen(self, form: AndOr, weights: Weights, value: Scaled) -> None:
        """Take out of a form the nodes that no answer of a weighted sum below a value has."""
        found = self.relaxed.get(weights)
        if found is not None and self.relaxation is not None:
            form.remove(self.relaxation.dear(found, value))

    def _join(self, region: Region) -> bool:
        """Answers on the way from one end of a region to the other; whether any was better."""
        form = self.form
        if region.left is None or region.right is None or not anneals(form):
            return False
        ends = []
        for point in (region.left, region.right):
            picks = self.picks.get(point)
            chosen = None if picks is None else expressed(form, dict(picks))
            if chosen is None:
                return False
            ends.append(chosen)
        before = list(self.bounds.points)
        until = time.perf_counter() + self.left(0.1)
        for one, other in (ends, ends[::-1]):
            self._path(one, other, until)
        return self.bounds.points != before

    def _path(self, one: Chosen, other: Chosen, until: float) -> None:
        """Give the classes of a choice the nodes of another, one by one."""
        form = self.form
        # Both objectives in one number, which the count is the last digits of.
        base = 2 * (self.bounds.most + 1)
        steps = Annealing(weighted(form, (base, 1)), one, self.seed)
        differ = [c for c, n in other.items() if steps.node[c] != n]
        random.Random(self.seed).shuffle(differ)
        for c in differ:
            if time.perf_counter() > until:
                return
            if not steps.users[c]:
                steps.node[c] = other[c]
                continue
            if steps.move(c, other[c], afresh=False) is None:
                continue
            cost, count = divmod(steps.value, base)
            point = (cost + form.constant[0], count + form.constant[1])
            if self.bounds.dominated(point):
                continue
            chosen = form.trimmed(steps.chosen())
            if not form.acyclic or acyclic(form, chosen):
                self.offer(form.picks(chosen.values()))
