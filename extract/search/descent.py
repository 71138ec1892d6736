"""Descent: single-variable moves judged by true seconds and true peak."""

from __future__ import annotations

import numpy as np

from tapestry_egg.extract.problem.problem import Floats, Ints, Problem
from tapestry_egg.work import Work

# So many of the cheapest rows of a variable are tried in a move that looks at the memory profile.
# No measurement of it is kept.
_OPTIONS = 40

# Calls per variable that is looked at and per pair of it, and per use of memory of one that moves.
_LOOKED, _PER_PAIR, _PER_USE = 12, 6, 12


class Descent:
    """Moves on the labellings of one problem; what they take is added to `work`."""

    def __init__(self, problem: Problem, work: Work | None = None) -> None:
        self.problem = problem
        self.work = work or Work()
        self.pairs: list[list[tuple[int, bool]]] = [[] for _ in problem.variables]
        for k, p in enumerate(problem.pairs):
            self.pairs[p.a].append((k, True))
            self.pairs[p.b].append((k, False))

        self.spans = [self._spans(i) for i in range(len(problem.variables))]

    def _spans(self, i: int) -> list[tuple[int, int]]:
        """When what variable i decides is in memory: from when and up to when."""
        uses = [*self.problem.variables[i].uses]
        for k, _ in self.pairs[i]:
            uses += self.problem.pairs[k].uses
        return list({(u.start, u.end): None for u in uses})

    def _touches(self, i: int, time: int) -> bool:
        return any(start <= time < end for start, end in self.spans[i])

    def into(self, rows: Ints, limit: float, sweeps: int = 2) -> Ints:
        """Improve seconds while the peak stays within the limit; above it, lower the peak."""
        rows = rows.copy()
        *_, profile = self.problem.evaluate(rows)
        most = int(profile.argmax()) if len(profile) else 0  # when most is in memory
        for _ in range(sweeps):
            changed = False
            for i in range(len(rows)):
                if len(self.problem.variables[i]) == 1:
                    continue
                self.work.add(_LOOKED + _PER_PAIR * len(self.pairs[i]), 0)
                peak = float(profile[most])
                tight = peak > limit
                if tight and not self._touches(i, most):
                    continue
                cost = self._seconds(i, rows)
                if not tight and cost[rows[i]] <= cost.min() * (1 + 1e-12):
                    continue
                promising = np.flatnonzero(np.isfinite(cost))
                if not tight:
                    promising = promising[cost[promising] < cost[rows[i]] - 1e-15]
                if not promising.size:
                    continue
                if promising.size > _OPTIONS:
                    order = np.argpartition(cost[promising], _OPTIONS)
                    promising = promising[order[:_OPTIONS]]
                starts, changes = self._changes(i, rows, promising)
                peaks = (np.maximum.reduceat(profile, starts) + changes).max(axis=1)
                if tight:
                    order = np.lexsort((cost[promising], np.round(peaks / max(peak, 1e-300), 9)))
                    take = order[0]
                    better = peaks[take] < peak * (1 - 1e-9) or (
                        peaks[take] <= peak * (1 + 1e-9)
                        and cost[promising[take]] < cost[rows[i]] - 1e-15
                    )
                else:
                    fits = np.flatnonzero(peaks <= limit * (1 + 1e-12))
                    if not fits.size:
                        continue
                    take = fits[cost[promising[fits]].argmin()]
                    better = True
                if better and promising[take] != rows[i]:
                    lengths = np.diff(starts, append=len(profile))
                    profile = profile + np.repeat(changes[take], lengths)
                    most = int(profile.argmax())
                    rows[i] = promising[take]
                    changed = True
            if not changed:
                break
        return rows

    def _seconds(self, i: int, rows: Ints) -> Floats:
        """Seconds of every row of variable i with all others fixed (constants left out)."""
        cost = self.problem.variables[i].seconds.copy()
        for k, is_a in self.pairs[i]:
            p = self.problem.pairs[k]
            if is_a:
                cost += p.seconds[:, p.label_b[rows[p.b]]][p.label_a]
            else:
                cost += p.seconds[p.label_a[rows[p.a]]][p.label_b]
        return cost

    def _changes(self, i: int, rows: Ints, options: Ints) -> tuple[Ints, Floats]:
        """Change of the memory profile for each option of variable i, [options, stretches], and
        where the stretches of time begin in which it is constant."""
        now = rows[i]
        deltas = [(u, u.amount[options] - u.amount[now]) for u in self.problem.variables[i].uses]
        for k, is_a in self.pairs[i]:
            p = self.problem.pairs[k]
            for use in p.uses:
                if is_a:
                    amount = use.amount[:, p.label_b[rows[p.b]]]
                    delta = amount[p.label_a[options]] - amount[p.label_a[now]]
                else:
                    amount = use.amount[p.label_a[rows[p.a]]]
                    delta = amount[p.label_b[options]] - amount[p.label_b[now]]
                deltas.append((use, delta))
        ends = {t for use, _ in deltas for t in (use.start, use.end)}
        starts = sorted({0} | {t for t in ends if t < self.problem.times})
        at = {t: k for k, t in enumerate(starts)}
        changes = np.zeros((len(options), len(starts)))
        self.work.add(_PER_USE * len(deltas), 2 * changes.size * len(deltas))
        for use, delta in deltas:
            changes[:, at[use.start] : at.get(use.end)] += delta[:, None]
        return np.array(starts, dtype=np.int64), changes
