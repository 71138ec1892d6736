"""The search of one form: reductions, elimination, built choices, and a mixed-integer program.

Parts that share nothing are solved by themselves. The program is in `program.py`; loop formulas
(`program.py`) tighten its relaxation. Between solutions of the relaxation, nodes whose reduced cost
exceeds the gap go, and what is left is reduced again. Then levels bar the cycles that are left, and
branch and bound decides. HiGHS may run in a process of its own, which can be ended at any moment.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from tapestry_egg.parallel.executors import Processes
from tapestry_egg.parallel.serving import tell

from .closure import class_edges, closure, components, cyclic_components
from .elimination import eliminate
from .form import AndOr, Scaled
from .greedy import Chosen, Improvement, bottom_up, cost_of
from .program import Floats, Model, Solved, Unit
from .reductions import reduce

#: (class, node) pairs of the problem that the first form was made of.
Picks = list[tuple[int, int]]

# Forms of more nodes are annealed before their first relaxation is solved.
_LARGE_FORM = 1500


class Record:
    """The best choice found for one form, in the numbering of the problem."""

    def __init__(self, better: Callable[[int, Picks], None], most: Scaled = math.inf) -> None:
        self.value: Scaled = most
        self.picks: Picks | None = None
        self.better = better

    def offer(self, form: AndOr, chosen: Chosen | None) -> bool:
        """Take a choice of a form if it is the best; says whether it was."""
        if chosen is None:
            return False
        value = cost_of(form, chosen)
        if value >= self.value:
            return False
        self.take(value, form.picks(chosen.values()))
        return True

    def take(self, value: int, picks: Picks) -> None:
        """Take what is known to be better."""
        self.value, self.picks = value, picks
        self.better(value, picks)

    @property
    def most(self) -> int | None:
        """The value to stay below, if there is one."""
        return None if self.value == math.inf else int(self.value)


def split(form: AndOr) -> list[AndOr]:
    """The parts of a form that share no class, each without constant; the form itself if one."""
    groups: dict[int, list[int]] = {}
    edges = class_edges(form)
    for c, below in list(edges.items()):
        for d in below:
            edges[d].add(c)
    for c, k in components(edges).items():
        groups.setdefault(k, []).append(c)
    if len(groups) <= 1:
        return [form]
    parts = []
    for classes in groups.values():
        part = AndOr(form.scale)
        part.next_node = form.next_node
        for c in classes:
            part.members[c] = list(form.members[c])
            for n in form.members[c]:
                part.needs[n], part.home[n], part.parts[n] = form.needs[n], c, form.parts[n]
                part.cost[n] = form.cost[n]
        part.roots = form.roots.intersection(classes)
        part.next_cover = form.next_cover
        parts.append(part)
    _share_covers(form, parts)
    return parts


def _share_covers(form: AndOr, parts: list[AndOr]) -> None:
    """Covers within one part stay; of one across parts, no part has to have a node."""
    where: dict[int, set[int]] = {}
    part_of = {n: i for i, part in enumerate(parts) for n in part.home}
    for n, numbers in form.covers.items():
        for k in numbers:
            where.setdefault(k, set()).add(part_of[n])
    for n, numbers in form.covers.items():
        kept = {k for k in numbers if len(where[k]) == 1}
        if kept:
            parts[part_of[n]].covers[n] = kept


def trivial_bound(form: AndOr) -> int:
    """A bound without search: roots at their cheapest, and everything below zero for nothing."""
    least = {c: min((form.cost[n] for n in m), default=0) for c, m in form.members.items()}
    rest = sum(min(0, v) for c, v in least.items() if c not in form.roots)
    return form.constant + rest + sum(least[r] for r in form.roots)


@dataclass(frozen=True)
class Search:
    """Settings of a search: when it ends (`time.perf_counter`), its seed, and how wide forms may be
    for elimination. With `apart`, programs are solved in another process."""

    deadline: float
    seed: int = 0
    widest: int = 8
    apart: bool = False

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def solve(self, form: AndOr, record: Record, bounded: Callable[[Scaled], None]) -> Scaled:
        """Improve a record of a form; returns a bound, the record's value when that is proven.

        `bounded` is told of every bound on the way. The form is used up. A value of inf, proven,
        says that there is no choice.
        """
        bound: Scaled = -math.inf
        for turn in range(10):
            until = min(self.deadline, time.perf_counter() + 10.0)
            if not reduce(form, until, record.most):
                return record.value
            if turn == 0:
                bound = trivial_bound(form)
                bounded(bound)
            parts = split(form)
            if len(parts) > 1:
                return self._parts(form, parts, record, bounded)
            end = min(self.deadline, time.perf_counter() + 1.0)
            found = eliminate(form, end, record.most, 20_000, widest=self.widest)
            if found is not None:
                if found.best is not None:
                    record.offer(form, {form.home[n]: n for n in found.best[1]})
                return record.value
            if self.left() <= 0:
                return bound
            improvement = Improvement(form, self.seed + turn)
            improvement.start(min(self.deadline, time.perf_counter() + 2.0))
            if not form.negative():
                improvement.run(min(self.deadline, time.perf_counter() + 2.0))
            if record.offer(form, improvement.best):
                continue
            if self.apart:
                return max(bound, self._apart(form, record, bounded))
            if turn == 0 and form.negative():  # bounds are far off where choosing more may gain
                self._anneal(form, record, improvement.best, 0.25, 4.0)
            elif turn == 0 and len(form.home) > _LARGE_FORM:  # its relaxation takes a while
                self._anneal(form, record, improvement.best, 0.08, 1.0)
            model = Model(form, closure(form, self.deadline))
            least, last = self._relax(model, record, improvement)
            bound = max(bound, least)
            bounded(bound)
            if bound >= record.value:
                return record.value
            if last is None or last.reduced is None:
                return bound
            # The relaxation says more about costs above zero than below: these get less time.
            share, longest, turns = (0.35, 8.0, 2) if form.negative() else (0.1, 1.0, 1)
            if turn < turns and self._anneal(form, record, improvement.best, share, longest):
                continue
            dear = too_dear(model.node_at, model.unit, last, record.value - form.constant)
            if len(dear) < max(1, len(form.home) // 10):
                model.program.fix([model.node_at[n] for n in dear])
                break
            form.remove(dear)
        return max(bound, self._branch(model, record, bound, bounded))

    def _parts(
        self,
        form: AndOr,
        parts: list[AndOr],
        record: Record,
        bounded: Callable[[Scaled], None],
    ) -> Scaled:
        """Solve parts that share nothing, the smallest first; bounds and values add."""
        bounds: list[Scaled] = [trivial_bound(p) for p in parts]
        records: list[Record] = []
        base = form.constant
        for k, i in enumerate(sorted(range(len(parts)), key=lambda i: (len(parts[i].home), i))):

            def tell(value: Scaled, i: int = i) -> None:
                bounds[i] = max(bounds[i], value)
                bounded(min(base + sum(bounds), record.value))

            own = Record(lambda value, picks: None)
            if record.picks is not None:
                own.offer(parts[i], expressed(parts[i], dict(record.picks)))
            share = max(0.0, self.left()) / (len(parts) - k)
            inner = replace(self, deadline=time.perf_counter() + share)
            bounds[i] = max(bounds[i], inner.solve(parts[i], own, tell))
            records.append(own)
            tell(bounds[i])
            if bounds[i] == math.inf:
                return record.value
        values = [own.value for own in records]
        if math.inf not in values and base + sum(values) < record.value:
            picks = [p for own in records for p in own.picks or ()]
            record.take(int(base + sum(values)), [*form.fixed, *picks])
        return min(base + sum(bounds), record.value)

    def _relax(
        self, model: Model, record: Record, improvement: Improvement
    ) -> tuple[Scaled, Solved | None]:
        """Rounds of cuts on the relaxation, choices built from its solutions: (bound, last)."""
        constant, unit = model.form.constant, model.unit
        bound: Scaled = -math.inf
        last: Solved | None = None
        before = -math.inf
        stalled = 0
        end = time.perf_counter() + max(0.0, self.left()) * 0.6
        for turn in range(400):
            solved = model.program.relaxed(max(0.05, self.left()))
            if solved.infeasible:
                return record.value, None
            if solved.x is None:
                break
            last = solved
            least = constant + unit.bound(solved.value)
            if least >= record.value:  # it decides: then it is checked
                least = constant + unit.bound(model.program.checked(solved))
            bound = max(bound, least)
            if bound >= record.value:
                return bound, last
            if turn < 4 or turn % 4 == 0:
                self._build(model, solved.x, record, improvement)
            rows = model.cuts.separate(solved.x, self.seed + turn)
            stalled = stalled + 1 if solved.value - before < 1e-5 * abs(solved.value) else 0
            before = solved.value
            if not rows or stalled >= 10 or time.perf_counter() > end:
                break
            model.program.rows += rows
        if last is not None:
            bound = min(bound, constant + unit.bound(model.program.checked(last)))
        return bound, last

    def _build(self, model: Model, x: Floats, record: Record, improvement: Improvement) -> None:
        """Choices under prices that the relaxation's solution lowers."""
        at = model.node_at
        for trust in (1.0, 0.9, 0.5):
            improvement.rebuild(lambda n, trust=trust: max(0.0, 1.0 - trust * x[at[n]]))  # type: ignore[misc]
        record.offer(model.form, improvement.best)

    def _anneal(
        self, form: AndOr, record: Record, built: Chosen | None, share: float, most: float
    ) -> bool:
        """Anneal the best choice of a form; whether a better one was found.

        Where the form no longer has the best choice, which only better ones may replace, what was
        built in it is the start.
        """
        if not anneals(form):
            return False
        chosen = None if record.picks is None else expressed(form, dict(record.picks))
        chosen = chosen or built
        if not chosen:
            return False
        _, found = Annealing(form, chosen, self.seed).run(min(share * self.left(), most))
        return record.offer(form, found)

    def _apart(self, form: AndOr, record: Record, bounded: Callable[[Scaled], None]) -> Scaled:
        """Go on in a process of its own, which ends with the deadline or with whoever asks."""
        news: SimpleQueue[str | None] = SimpleQueue()
        bound: Scaled = -math.inf
        asked = json.dumps(self._asked(form, record))
        with Processes(1) as pool:
            try:
                future = pool.submit_heard(news.put, solve_plainly, asked)
                future.add_done_callback(lambda _: news.put(None))
                while (said := news.get(timeout=max(0.0, self.left()))) is not None:
                    told = json.loads(said)
                    if "nodes" in told:
                        record.take(told["value"], form.picks(told["nodes"]))
                    else:
                        bound = max(bound, told["bound"])
                        bounded(min(bound, record.value))
            except Empty:
                pass
            finally:
                pool.kill()
        return min(bound, record.value)

    def _asked(self, form: AndOr, record: Record) -> dict[str, Any]:
        """A form, what is known of its answers, and these settings as plain data."""
        chosen = None if record.picks is None else expressed(form, dict(record.picks))
        return {
            "scale": form.scale,
            "constant": form.constant,
            "roots": sorted(form.roots),
            "nodes": [
                (n, c, form.cost[n], sorted(form.needs[n]), sorted(form.covers.get(n, ())))
                for n, c in form.home.items()
            ],
            "start": list((chosen or {}).items()),
            "most": record.value,
            "seconds": self.left(),
            "settings": {"seed": self.seed, "widest": self.widest},
        }

    def _branch(
        self, model: Model, record: Record, bound: Scaled, bounded: Callable[[Scaled], None]
    ) -> Scaled:
        """Branch and bound; where rounding leaves a cycle, it is cut off and the search goes on."""
        form = model.form
        model.add_levels()
        for turn in range(10_000):
            left = self.left()
            if left <= 0.05:
                return bound
            solved = model.program.integral(model.whole, left, model.unit.gap)
            if solved.infeasible:
                return record.value
            if solved.bound > -math.inf:
                bound = max(bound, form.constant + model.unit.bound(solved.bound))
                bounded(min(bound, record.value))
            if solved.x is None:
                return min(bound, record.value)
            better = record.offer(form, model.chosen(solved.x))
            if bound >= record.value:
                return record.value
            rows = model.cuts.separate(np.round(solved.x), self.seed + turn, whole=True)
            if not rows and (solved.optimal or not better):
                return min(bound, record.value)
            model.program.rows += rows
        return bound


def solve_plainly(asked: str) -> None:
    """Search a form that comes as JSON, and tell what is found, in JSON: nodes of better choices
    with their value, and bounds."""
    arrived, data = time.perf_counter(), json.loads(asked)
    form = AndOr(data["scale"])
    form.constant, form.roots = data["constant"], set(data["roots"])
    for number, home, cost, needs, covers in data["nodes"]:
        n = form.add(home, needs, cost, ((home, number),))
        if covers:
            form.covers[n] = set(covers)
            form.next_cover = max(form.next_cover, *(k + 1 for k in covers))

    def better(value: int, picks: Picks) -> None:
        tell(json.dumps({"nodes": [n for _, n in picks], "value": value}))

    record = Record(better, data["most"])
    if data["start"]:
        record.picks = [(c, n) for c, n in data["start"]]
    search = Search(arrived + data["seconds"], **data["settings"])

    def bounded(bound: Scaled) -> None:
        tell(json.dumps({"bound": bound}))

    bounded(search.solve(form, record, bounded))


def too_dear(node_at: Mapping[int, int], unit: Unit, solved: Solved, value: Scaled) -> list[int]:
    """Nodes that no answer below a scaled value, without the constant, has: a relaxation with one
    would cost as much.

    A column at zero makes the relaxation dearer by its reduced cost at least.
    """
    if value == math.inf or solved.reduced is None or solved.x is None:
        return []
    most = int(value) / Fraction(unit.step)
    # Of an integral program, what is below is so by one.
    room = (math.ceil(most - Fraction(1, 10**6)) - 1) if unit.integral else float(most)
    room += 1e-6 * max(1.0, abs(solved.value)) - solved.value
    reduced, x = solved.reduced, solved.x
    return [n for n, i in node_at.items() if x[i] < 1e-9 and reduced[i] > room]


def expressed(form: AndOr, picks: Mapping[int, int]) -> Chosen | None:
    """A choice of the problem in the nodes of a form made from it; None where they are gone."""
    chosen: Chosen = {}
    todo = list(form.roots)
    while todo:
        c = todo.pop()
        if c in chosen:
            continue
        for n in form.members[c]:
            if all(picks.get(a) == b for a, b in form.parts[n]):
                chosen[c] = n
                todo.extend(form.needs[n])
                break
        else:
            return None
    return chosen


# Simulated annealing over the nodes of active classes.
#
# One move gives one active class another node. What that activates or frees is followed through
# counts of users, so a move costs as much as what it changes. Where classes may form a cycle, those
# that become active take nodes that lead down an order of derivation: a cycle that a move closes
# then passes the class that was moved, where it is found. (Kirkpatrick, Gelatt and Vecchi,
# "Optimization by simulated annealing", 1983.)


# Rounds from warm to cold; the first tells whether there is something to gain.
_ROUNDS = 3

# Seconds for the square of the number of nodes: what is small is settled by exact methods at once.
_PATIENCE = 2.5e-6


def anneals(form: AndOr) -> bool:
    """Whether a form can be annealed: costs below zero leave no order of derivation."""
    return not (form.negative() and cyclic_components(form))


class Annealing:
    """A choice that changes move by move; `value` is its scaled cost without the constant."""

    def __init__(self, form: AndOr, chosen: Chosen, seed: int) -> None:
        self.form = form
        self.random = random.Random(seed)
        cost = form.cost
        # Classes that are not active keep a node for when they are.
        self.node = {
            c: chosen.get(c, min(m, key=lambda n: (cost[n], len(form.needs[n]), n)))
            for c, m in form.members.items()
        }
        self.alone: dict[int, float] = {}
        self.users = dict.fromkeys(form.members, 0)
        self.needs = {n: tuple(sorted(needs)) for n, needs in form.needs.items()}
        self.value = 0
        for r in sorted(form.roots):
            self.value += self._use((r,))
        # What a class costs by itself, for choosing its node when it becomes active; its keys stand
        # in an order of derivation.
        self.alone = {} if form.negative() else _alone(form)
        self.cyclic = cyclic_components(form)
        self.rank = {c: i for i, c in enumerate(self.alone)}
        self.options = {
            c: self._down(c) if c in self.cyclic else m for c, m in form.members.items()
        }
        self.open = [c for c in sorted(form.members) if len(form.members[c]) > 1]

    def _use(self, classes: tuple[int, ...], afresh: bool = False) -> int:
        """Add a user to classes; what becomes active with that costs this much.

        With `afresh`, classes that become active take the node that seems cheapest now.
        """
        users, node, needs, cost = self.users, self.node, self.needs, self.form.cost
        afresh = afresh and bool(self.alone)
        total = 0
        todo = list(classes)
        while todo:
            c = todo.pop()
            users[c] += 1
            if users[c] == 1:
                if afresh and len(self.form.members[c]) > 1:
                    node[c] = self._cheapest(c)
                n = node[c]
                total += cost[n]
                todo.extend(needs[n])
        return total

    def _down(self, c: int) -> list[int]:
        """The nodes of a class that need only what is derived before it, of its component."""
        rank, cyclic = self.rank, self.cyclic
        return [
            n
            for n in self.form.members[c]
            if all(rank[d] < rank[c] for d in self.needs[n] if cyclic.get(d) == cyclic[c])
        ]

    def _cheapest(self, c: int) -> int:
        users, needs, cost, alone = self.users, self.needs, self.form.cost, self.alone
        best, least = -1, math.inf
        for n in self.options[c]:
            price: float = cost[n]
            for d in needs[n]:
                if not users[d]:
                    price += alone[d]
            if price < least:
                best, least = n, price
        return best

    def _free(self, classes: tuple[int, ...]) -> int:
        """Take a user from classes; what stops being active with that cost this much."""
        users, node, needs, cost = self.users, self.node, self.needs, self.form.cost
        total = 0
        todo = list(classes)
        while todo:
            c = todo.pop()
            users[c] -= 1
            if not users[c]:
                n = node[c]
                total += cost[n]
                todo.extend(needs[n])
        return total

    def _loops(self, c: int) -> bool:
        """Whether an active class needs itself in the end."""
        component, cyclic, node = self.cyclic[c], self.cyclic, self.node
        seen: set[int] = set()
        todo = [c]
        while todo:
            for d in self.needs[node[todo.pop()]]:
                if d == c:
                    return True
                if cyclic.get(d) == component and d not in seen:
                    seen.add(d)
                    todo.append(d)
        return False

    def move(self, c: int, n: int, afresh: bool = True) -> int | None:
        """Give an active class another node; returns what that adds to the cost.

        The move back, not afresh, restores the choice: classes keep their node while inactive.
        None, with nothing changed, where the choice would have a cycle.
        """
        old = self.node[c]
        self.node[c] = n
        more = self.form.cost[n] - self.form.cost[old]
        more += self._use(self.needs[n], afresh)
        if c in self.cyclic and self._loops(c):
            self._free(self.needs[n])
            self.node[c] = old
            return None
        more -= self._free(self.needs[old])
        self.value += more
        return more

    def chosen(self) -> Chosen:
        """The nodes of the active classes."""
        return {c: n for c, n in self.node.items() if self.users[c]}

    def run(self, seconds: float) -> tuple[int, Chosen]:
        """Cool down over some time, or a third of it if that gains nothing.

        Returns the best value on the way (with the constant) and its choice.
        """
        start = best = self.value
        found = self.chosen()
        if not self.open:
            return best + self.form.constant, found
        seconds = min(seconds, _PATIENCE * len(self.form.home) ** 2)
        started = time.perf_counter()
        members, users = self.form.members, self.users
        draw, pick = self.random.random, self.random.choice
        steps = [abs(v) for v in self.form.cost.values() if v]
        high = 0.5 * sum(steps) / len(steps) if steps else 1.0
        temperature = high
        count = 0
        while True:
            if count % 256 == 0:
                share = (time.perf_counter() - started) / max(seconds, 1e-9)
                if share >= 1.0 or (share * _ROUNDS >= 1.0 and best == start):
                    break
                temperature = high * 0.02 ** ((share * _ROUNDS) % 1.0)
            count += 1
            c = pick(self.open)
            if not users[c]:
                continue
            old, n = self.node[c], pick(members[c])
            if n == old:
                continue
            more = self.move(c, n)
            if more is None:
                continue
            if more > 0 and draw() >= math.exp(-more / temperature):
                self.move(c, old, afresh=False)
            elif self.value < best:
                best, found = self.value, self.chosen()
        return best + self.form.constant, found


def _alone(form: AndOr) -> dict[int, float]:
    """The least tree cost of each class."""
    price = {n: float(v) for n, v in form.cost.items()}
    chosen = bottom_up(form, price, form.parents(), every=True) or {}
    found: dict[int, float] = {}
    for c in chosen:  # in the order of derivation
        n = chosen[c]
        found[c] = price[n] + sum(found[d] for d in form.needs[n])
    return found
