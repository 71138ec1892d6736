"""The search of one network: bounds and labellings at prices, for one pair of limits after another.

Limits on memory and joules are exchanged for prices. At given prices message passing bounds the
network and elimination finds what is very nearly the best labelling there. Every labelling met on
the way is kept if nothing dominates it; every bound is a cut that holds for all limits. Which
limits come one after the other, and in which of several networks, stands in `race.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.problem.problem import Floats, Ints, Pair, Problem, Variable
from tapestry_egg.work import Work

from . import branch, core, elimination, moves, sweeps
from .archive import SLIVER, Archive, Candidate, Cut, Limits, Prices
from .mixtures import Mixture, Mixtures
from .network import Network, State, network_of, state_of

# Rows of each variable that elimination looks at; the entries of each of its tables at least and at
# most, and of about all tables together in between.
_KEEP, _CELLS, _ALL_CELLS = 4, (1 << 11, 1 << 14), 5 << 20

# Passes of messages where the first bound is proven, where others are, at prices that follow
# others, and before the rows of a core are chosen.
_FIRST, _PROVING, _SWEEPS, _AGAIN = 60, 30, 8, 2

# Rows of each variable in a core, and of how many parts of a mixture besides; so many steps of
# prices are made on a core, and so many cores for one pair of limits.
_CORE, _PARTS, _STEPS, _ROUNDS = 8, 4, 8, 3

# Passes go on while they raise a bound by this share of the gap that is good enough.
_RISEN = 0.05

# So far from the best prices towards those at which known labellings balance is the first step, and
# the longest; how steps change in length where a bound rises, and where it does not.
_FAR, _FARTHEST, _LONGER, _SHORTER = 0.3, 0.6, 1.3, 0.6

# Where what known labellings balance at is within this share of the gap above a bound, no prices
# prove much more.
_MET = 0.1

# The price of all memory where only the peak counts, in the time of a plan per byte of its peak,
# and how fast prices follow what is used there, in so many steps.
_LEAN, _FOLLOW, _LEAN_STEPS = 64.0, 10.0, 8

# How often prices are raised where a plan exceeds its limit, and by how much.
_REPAIRS, _DEARER = 4, 1.5

# So many places keep their messages; from others they are passed anew.
_REMEMBERED = 24

# Nodes of branch and bound for plans whose collectives are all on their own.
_UNMERGED = 50

#: Networks of no more variables than this are closed by branch and bound.
SMALL = 200


@dataclass(frozen=True)
class Place:
    """Prices, what they prove, and the messages to go on from there, if they are still kept."""

    cut: Cut
    prices: Prices
    messages: Floats | None = None


@dataclass
class Part:
    """The whole network, or a core of it: where each of its rows is among all of its variable, and
    where its messages are among all."""

    net: Network
    state: State
    row_of: Ints | None = None
    message_of: Ints | None = None
    prices: Prices | None = None
    forbidden: float = 0.0

    def __post_init__(self) -> None:
        net = self.net
        rows, entries, links = int(net.row[-1]), len(self.state.tables), len(net.links)
        linked = int(np.diff(net.row)[net.ends].sum()) if len(net.ends) else 0
        self.pricing = (2 * (rows + entries) + 10 * len(net.begin)) * 1e-9
        self.sweeping = (3 * entries + 6 * (linked + rows) + 40 * links) * 1e-9

    def whole(self, rows: Ints) -> Ints:
        """A labelling of this part as one of the whole network."""
        return rows if self.row_of is None else self.row_of[self.net.row[:-1] + rows]


class Search:
    """Steps of the search of one problem; `archive` holds what came of them, `work` what they took.

    `gap` is what is good enough. Searches of one form on several meshes have the same `mixtures`,
    in which `number` tells whose a labelling is.
    """

    def __init__(
        self, problem: Problem, gap: float, mixtures: Mixtures | None = None, number: int = 0
    ) -> None:
        self.problem, self.gap, self.number = problem, gap, number
        self.mixtures = mixtures or Mixtures(problem.paths)
        self.work, self.archive = Work(), Archive()
        net = network_of(problem)
        self.all = Part(net, state_of(net))
        self.places: list[Place] = []
        self._order: elimination.Order | None = None
        self._turn = 1
        self._found: set[str] = set()  # the ends of the front
        parts = len(problem.variables) + len(problem.pairs)
        self._evaluating = (20 * parts + 4 * len(net.begin) + 2 * net.times) * 1e-9
        self._measure()

    @property
    def small(self) -> bool:
        """Whether branch and bound closes it."""
        return len(self.problem.variables) <= SMALL and self.problem.timeline is None

    def _measure(self) -> None:
        """What a labelling takes at most of everything: more than any legal one does."""
        known: dict[int, float] = {}

        def most(amounts: Floats) -> float:
            if id(amounts) not in known:
                known[id(amounts)] = float(amounts[np.isfinite(amounts)].max(initial=0.0))
            return known[id(amounts)]

        parts: list[Variable | Pair] = [*self.problem.variables, *self.problem.pairs]
        self.most_seconds = sum(most(x.seconds) for x in parts)
        self.most_joules = sum(most(x.joules) for x in parts)
        net = self.all.net
        pooled, which = np.unique(net.amount, return_inverse=True)
        most_of = np.maximum.reduceat(net.amounts, pooled) if len(pooled) else net.amounts
        used = np.maximum(most_of, 0.0)[which]
        change = np.zeros(net.times + 1)
        np.add.at(change, net.begin, used)
        np.subtract.at(change, net.end, used)
        self.most_axis = np.maximum(np.cumsum(change)[:-1], 0.0)

    # At fixed prices

    def settle(
        self, prices: Prices, passes: int, known: Sequence[Ints] = (), part: Part | None = None
    ) -> Candidate:
        """Bound and solve the problem, or a part of it, at fixed prices; the best labelling found
        for them. `known` labellings are of that part."""
        self.bound(prices, passes, part)
        return self.solved(known, part)

    def solved(self, known: Sequence[Ints] = (), part: Part | None = None) -> Candidate:
        """The best labelling found at the present prices."""
        part = part or self.all
        start = [sweeps.decode(part.net, part.state), *known]
        return self.consider(part.whole(self._eliminated(part, start)))

    def bound(
        self, prices: Prices, passes: int, part: Part | None = None, enough: float = np.inf
    ) -> Cut:
        """Bound the problem at fixed prices, until a bound is `enough`; what bounds a part bounds
        nothing else."""
        part = part or self.all
        self._price(prices, part)
        found = sweeps.sweep(part.net, part.state, passes, _RISEN * self.gap, enough)
        self.work.add_units(part.sweeping * len(found) / 2)
        value, total = float(found.max()), float(prices.bytes.sum())
        if prices.second:
            cut = Cut(value, total, prices.joule)
        elif prices.joule:
            cut = Cut(np.inf, 0.0, 0.0, np.inf, value / prices.joule * (1.0 - 0.1 * SLIVER))
        else:
            cut = Cut(np.inf, 0.0, 0.0, value / total * (1.0 - 0.1 * SLIVER))
        self._last = cut
        if part is self.all and (prices.second or value > 0.0):
            self.archive.cuts.append(cut)
        return cut

    def _price(self, prices: Prices, part: Part) -> None:
        if prices is part.prices:
            return
        part.prices = prices
        net = part.net
        axis = np.zeros(net.times + 1)
        axis[1 : net.moments + 1] = prices.bytes
        second = prices.second
        if self.problem.paths is not None and second:
            events = self.problem.paths.evenly() if prices.events is None else prices.events
            axis[net.moments + 1 :] = second * events[1:]
            second = float(second * events[0])
        most = prices.second * self.most_seconds + prices.joule * self.most_joules
        most += float(np.einsum("t,t->", np.abs(axis[1:]), self.most_axis))
        part.forbidden = 4.0 * most + 1e-6
        sweeps.price(net, part.state, second, prices.joule, np.cumsum(axis), part.forbidden)
        self.work.add_units(part.pricing)

    def _eliminated(
        self, part: Part, known: Sequence[Ints], keep: int = _KEEP, cells: int | None = None
    ) -> Ints:
        """The best labelling at the present prices of the rows of known ones and of those that
        messages exclude least."""
        if self._order is None:
            self._order = elimination.order_of(self.all.net)
        belief = sweeps.beliefs(part.net, part.state)
        rows, count = elimination.domains(part.net, belief, keep, np.array(known))
        if cells is None:
            cells = min(max(_ALL_CELLS // max(len(count), 1), _CELLS[0]), _CELLS[1])
        self._turn += 1
        used = elimination.fit(self._order, count, cells, self._turn)
        found = elimination.eliminate(part.net, part.state, self._order, rows, count)
        self.work.add_units(0.3 * part.sweeping + 13e-9 * used)
        return found

    def consider(self, rows: Ints) -> Candidate:
        """Evaluate a labelling and offer it to the archive."""
        seconds, joules, axis = sweeps.evaluate(self.all.net, rows)
        self.work.add_units(self._evaluating)
        moments = self.all.net.moments
        profile, lengths = axis[:moments], np.concatenate(([seconds], axis[moments:]))
        unmerged = np.inf
        if self.problem.paths is not None and np.isfinite(seconds):
            unmerged = seconds if self.problem.latencies is not None else np.inf
            seconds = self.problem.paths.seconds(lengths)
        peak = float(profile.max(initial=0.0))
        candidate = Candidate(rows, seconds, peak, joules, unmerged)
        if np.isfinite(seconds):
            self.mixtures.add(self.number, rows, lengths, profile, joules)
            self.archive.add(candidate)
        return candidate

    def _profile(self, rows: Ints) -> Floats:
        self.work.add_units(self._evaluating)
        return sweeps.evaluate(self.all.net, rows)[2][: self.all.net.moments]

    def _here(self) -> Place:
        assert self.all.prices is not None
        return Place(self.archive.cuts[-1], self.all.prices, self.all.state.messages.copy())

    def _remember(self, place: Place) -> None:
        self.mixtures.places.append((self.number, place.cut, place.prices))
        self.places.append(place)
        if len(self.places) > _REMEMBERED:
            old = self.places[-1 - _REMEMBERED]
            self.places[-1 - _REMEMBERED] = replace(old, messages=None)

    def _core(self, known: Sequence[Ints]) -> Part:
        """The rows that messages exclude least, at the present prices, and those of known
        labellings."""
        whole = self.all
        belief = sweeps.beliefs(whole.net, whole.state)
        some = np.array([*known], dtype=np.int64).reshape(len(known), len(whole.net.row) - 1)
        kept = core.promising(whole.net, belief, _CORE, some)
        self.work.add_units(whole.sweeping)
        return Part(*core.restrict(whole.net, whole.state, kept))

    def take_up(self, archive: Archive) -> None:
        """Know what earlier searches of the problem have found and proved, and at which prices."""
        self.archive.join(archive)
        self.places += [Place(cut, prices) for cut, prices in archive.places]
        for c in archive.candidates:
            self.consider(c.rows)

    def leave(self) -> None:
        """Note in the archive what was spent, and the places from which another may go on: those
        that prove most for one of the plans that a front shows."""
        best: dict[int, None] = {}
        for c in self.archive.corners() if self.places else ():
            for limits in (Limits(c.peak), Limits(c.peak, c.joules)):
                values = [_proven(x.cut, limits) for x in self.places]
                best[int(np.argmax(values))] = None
        self.archive.places = [(self.places[k].cut, self.places[k].prices) for k in best]
        self.archive.spent = self.work.units

    # The ends of the front

    def fastest(self, known: float = np.inf, most: float = np.inf) -> None:
        """Find and bound the fastest plan; less carefully where none is faster than `known`, the
        seconds of one that was found elsewhere, and after `most` units of work. Raises ExtractError
        when no legal one is found."""
        most += self.work.units
        free = Prices(np.zeros(self.all.net.moments))
        cut = self.bound(free, _FIRST, enough=known / (1.0 + self.gap))
        self._remember(self._here())
        found = self.solved()
        if not np.isfinite(found.seconds):
            found = self._legal()
        slower = share(known, cut.value) <= self.gap
        if self.problem.paths is not None and not slower and self.work.units < most:
            self.approach(Limits(), min(known, found.seconds), most - self.work.units)
            found = min(self.archive.candidates, key=lambda c: c.costs)
        self._descended(found, found.peak)

    def _legal(self) -> Candidate:
        """A legal labelling, where elimination over few rows has none."""
        start = sweeps.decode(self.all.net, self.all.state)
        for keep, cells in ((16, 1 << 17), (64, 1 << 20)):
            start = self._eliminated(self.all, [start], keep, cells)
            candidate = self.consider(start)
            if np.isfinite(candidate.seconds):
                return candidate
        if self.small:
            self.close(Limits(), np.inf, 1000)
        if not self.archive.candidates:
            raise ExtractError(
                "no legal combination of strategies was found",
                hint="Layouts that one operation gives cannot be changed to what others need; "
                "was a rule removed?",
            )
        return self.archive.candidates[0]

    def leanest(self) -> None:
        """Find a plan of a small peak, and prove that no peak is much smaller; once."""
        if "leanest" in self._found:
            return
        self._found.add("leanest")
        if not self.archive.candidates:
            self.fastest()
        fast = min(self.archive.candidates, key=lambda c: c.costs)
        if not fast.peak or not fast.seconds:
            return
        total = _LEAN * fast.seconds / fast.peak
        if self.mixtures.leanest is None:
            least, finding, proving = self._lean(fast, total)
            self.mixtures.leanest = finding, proving
            found = self.settle(Prices(total * proving), _SWEEPS, [least.rows])
        else:  # another network of the form has found them
            finding, proving = self.mixtures.leanest
            least = fast
            found = self.settle(Prices(total * finding), _SWEEPS, [fast.rows])
        self._remember(self._here())
        least = min(least, found, key=lambda c: c.peak)
        self._descended(least, least.peak)
        messages = self.all.state.messages.copy()
        self.all.state.messages[:] /= total
        enough = min(c.peak for c in self.archive.candidates) / (1.0 + self.gap)
        self.bound(Prices(proving, second=0.0), _SWEEPS, enough=enough)
        self.all.state.messages[:] = messages

    def _lean(self, fast: Candidate, total: float) -> tuple[Candidate, Floats, Floats]:
        """A plan of a small peak, the distribution of the `total` price of memory that led to it,
        and the distribution after the last step, which proves most."""
        used = self._profile(fast.rows)
        weights = _weights(np.ones_like(used), used)
        self.bound(Prices(total * weights), _SWEEPS)
        part, least, best = self._core([fast.rows]), fast, weights
        for _ in range(_LEAN_STEPS):
            found = self.settle(Prices(total * weights), _SWEEPS, (), part)
            if found.peak < least.peak:
                least, best = found, weights
            used = 0.5 * (used + self._profile(found.rows))
            weights = _weights(weights, used)
        return least, best, weights

    def frugal(self) -> None:
        """Find plans of few joules, and prove that none takes many fewer than the most frugal;
        once."""
        if "frugal" in self._found:
            return
        self._found.add("frugal")
        fast = min(self.archive.candidates, key=lambda c: c.costs)
        price = 4.0 * fast.seconds / max(fast.joules, 1e-12)
        self.settle(Prices(np.zeros(self.all.net.moments), price), _SWEEPS, [fast.rows])
        self._remember(self._here())
        least = min(c.joules for c in self.archive.candidates)
        enough = least / (1.0 + self.gap)
        self.bound(Prices(np.zeros(self.all.net.moments), 1.0, 0.0), _SWEEPS, enough=enough)

    # Within one pair of limits

    def approach(self, limits: Limits, known: float, most: float = np.inf) -> None:
        """Raise the bound within limits, and find plans there; `known` are the seconds of the
        fastest one, wherever it was found. It ends after one step where that takes `most` units.

        Prices begin at those that prove most of another network of the form, if there are any. They
        go part of the way from those that prove most to those at which known labellings balance, on
        a core; where they prove most there, the whole network is bounded.
        """
        place = max(self.places, key=lambda x: _proven(x.cut, limits))
        if place.messages is not None:
            self.all.state.messages[:] = place.messages
        mixture = self._mixture(limits)
        if mixture is None:
            return
        others = [(_proven(c, limits), p) for k, c, p in self.mixtures.places if k != self.number]
        if others:
            prices = max(others, key=lambda x: x[0])[1]
        else:
            prices = _toward(place.prices, mixture.prices, _FAR)
        most += self.work.units
        self.bound(prices, _AGAIN)
        part, hoped = None, np.inf
        for n in range(_ROUNDS + 1):
            value = _proven(self.archive.cuts[-1], limits)
            if risen := value > _proven(place.cut, limits):
                place = self._here()
                self._remember(place)
            gap = share(known, value)
            if gap <= self.gap or n == _ROUNDS:
                break
            # All rows of the network may prove as much as those of the core did.
            met = share(hoped, value) <= _MET * min(gap, 1.0)
            if part is not None and (met or not risen or self.work.units >= most):
                break
            mixture = self._mixture(limits) or mixture
            part = self._core(mixture.parts[:_PARTS])
            prices, hoped, found = self._balanced(part, limits, prices, known, most)
            if limits.hold(found):
                known = min(known, found.seconds)
            self.all.state.messages[part.message_of] = part.state.messages
            self.bound(prices, _PROVING)
        if part is None:
            return
        if (unmerged := self._unmerged()) is not None:
            self._descended(self.settle(replace(prices, events=unmerged), 1, (), part), limits.peak)
        self._repair(prices, found, limits.peak)

    def _unmerged(self) -> Floats | None:
        """The shares of a second where every collective is on its own; None where none is merged.
        Memory may be too short for collectives to wait for each other."""
        latencies = self.problem.latencies
        return None if latencies is None else np.append(1.0, np.zeros(len(latencies)))

    def _mixture(self, limits: Limits) -> Mixture | None:
        return self.mixtures.shortest(self.number, limits, self.work)

    def _balanced(
        self, part: Part, limits: Limits, prices: Prices, known: float, most: float
    ) -> tuple[Prices, float, Candidate]:
        """Prices that prove most for a part of the network within limits, what they prove there,
        and the last labelling found; until `most` units of work are spent."""
        best, reached, far = prices, -np.inf, _FAR
        for step in range(_STEPS):
            found = self.settle(prices, _SWEEPS, (), part)
            bound = _proven(self._last, limits)
            if limits.hold(found):
                known = min(known, found.seconds)
            if bound > reached:
                best, reached, far = prices, bound, min(_FARTHEST, _LONGER * far)
            else:
                far *= _SHORTER
            mixture = self._mixture(limits)
            gap = share(known, reached)
            ended = step == _STEPS - 1 or self.work.units >= most
            if mixture is None or gap <= self.gap or ended:
                break
            if share(mixture.seconds, reached) <= _MET * min(gap, 1.0):
                break  # no prices prove much more
            prices = _toward(best, mixture.prices, far)
        return best, reached, found

    def _repair(self, prices: Prices, found: Candidate, limit: float) -> None:
        """Look for a plan within a memory limit: bytes cost more wherever it is exceeded."""
        for _ in range(_REPAIRS):
            if found.peak <= limit:
                break
            # What is forbidden takes forever.
            total = prices.bytes.sum() or min(found.seconds, self.most_seconds) / found.peak
            weights = _weights(prices.bytes, self._profile(found.rows))
            prices = replace(prices, bytes=_DEARER * total * weights)
            found = self.settle(prices, 1, [found.rows])
        self._descended(found, limit)

    def _descended(self, found: Candidate, limit: float) -> Candidate:
        """What single moves make of a plan within a memory limit."""
        if not np.isfinite(found.seconds):
            return found
        self.work.add_units(0.1 * self.all.sweeping + 40 * self._evaluating)
        moved = self.consider(moves.descend(self.all.net, found.rows, limit, 2))
        # Moves are judged by the sum of seconds, which is not what a longest path takes.
        worse = self.problem.paths is not None and moved.seconds > found.seconds
        return found if worse and found.peak <= limit else moved

    def close(self, limits: Limits, known: float, nodes: int, most: float = np.inf) -> bool:
        """Find the fastest plan within limits, if it is faster than `known`, and prove it; whether
        that was done in so many nodes of branch and bound, and in `most` units of work."""
        gap, most = max(0.5 * self.gap, 1e-4), self.work.units + most
        bound, best, rows = self._branched(limits, known, gap, nodes, -1.0, most)
        settled = bound >= best * (1.0 - gap) * (1.0 - 1e-12)
        if settled and rows is None and best > self.most_seconds:
            bound = np.inf  # nothing at all is within the limits
        self.archive.cuts.append(Cut(bound, 0.0, 0.0, limits.peak, limits.joules))
        if rows is not None and self.problem.latencies is not None:
            fits = [c.unmerged for c in self.archive.candidates if limits.hold(c)]
            self._branched(limits, min(fits, default=np.inf), self.gap, _UNMERGED, 0.0, most)
        return settled

    def _branched(
        self, limits: Limits, known: float, gap: float, nodes: int, merging: float, most: float
    ) -> tuple[float, float, Ints | None]:
        """What branch and bound proves and finds: bound, seconds, rows; in so many nodes, and the
        first besides until `most` units of work are spent. `merging` is what a second of latency
        counts that is on no chain: -1, or 0 where nothing is merged."""
        upper = min(known, 2.0 * self.most_seconds + 1e-9)
        whole = self.all
        prices = np.zeros(whole.net.moments + 1)
        chains = np.zeros(len(whole.net.maker))
        mixture = self._mixture(limits)
        if mixture is not None:
            prices[:-1] = mixture.prices.bytes * _finite(limits.peak)
            prices[-1] = mixture.prices.joule * _finite(limits.joules)
            if mixture.prices.events is not None and merging:
                chains = mixture.prices.events[2:].copy()
        within = np.array([max(limits.peak, 1.0), max(limits.joules, 1e-12)])
        forbidden = 4.0 * self.most_seconds + 1e-6
        each = whole.pricing + 2 * whole.sweeping + self._evaluating
        root, other = branch.AT_ROOT * each, branch.PER_NODE * each
        left = (most - self.work.units - root) / other
        limit = max(1.0, min(float(nodes), 1.0 + left))
        bound, best, rows, visited = branch.branch(
            whole.net, whole.state, within, prices, chains, merging, upper, gap, limit, forbidden
        )
        whole.prices = None
        self.work.add_units(root + (visited - 1) * other)
        if rows is not None:
            self.consider(rows)
        return bound, best, rows


def _weights(before: Floats, used: Floats) -> Floats:
    """Shares of the price of memory, moved to where most of it is used."""
    # What has become the peak is taken seriously at once, not only after many steps up.
    least = np.where(used > 0.98 * used.max(), 0.05, 1e-9) * max(before.max(), 1e-300)
    logs = np.log(np.maximum(before, least) + 1e-300) + _FOLLOW * used / max(used.max(), 1.0)
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def _toward(prices: Prices, others: Prices, far: float) -> Prices:
    """Prices `far` of the way to others.

    Those alone jump from step to step; part of the way from the best that are known, bounds rise
    steadily (in-out separation: Ben-Ameur and Neto, 2007; Wentges, 1997).
    """
    events = others.events
    if events is not None and prices.events is not None:
        events = (1.0 - far) * prices.events + far * events
    return Prices(
        (1.0 - far) * prices.bytes + far * others.bytes,
        (1.0 - far) * prices.joule + far * others.joule,
        1.0,
        events,
    )


def _proven(cut: Cut, limits: Limits) -> float:
    """The least seconds within limits by one cut at prices; minus infinity where a price is paid
    for what has no limit."""
    value = cut.value
    for price, limit in ((cut.bytes_price, limits.peak), (cut.joule_price, limits.joules)):
        if price:
            value -= price * limit
    return value


def _finite(limit: float) -> float:
    """A limit that prices are paid for: none where it is infinite, as its price is nothing then."""
    return limit if limit < np.inf else 0.0


def share(seconds: float, bound: float) -> float:
    """By which share of a bound some plan may be slower than the best there is."""
    if seconds <= bound:
        return 0.0
    return seconds / bound - 1.0 if bound > 0 else np.inf
