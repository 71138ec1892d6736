"""Shortest: the cheapest ways between layouts, over steps that each lead from one to another.

Ways have two prices, seconds and, where these are equal, bytes sent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Matrix = NDArray[np.float64]
#: What in float32 is more than so many times another is more than it: sums of two are off by three
#: roundings of 2**-24, what they are compared with by two.
_ROUGHLY = np.float32(1 + 2**-20)
# By how much sums of the same steps in another order may differ, and far more.
_EVEN = 1 + 1e-9


def between(source: Ints, target: Ints, seconds: Matrix, ends: Ints, count: int) -> Ints:
    """Of so many places, in order, the `ends` and all that lie on a shortest way between two of
    them, or on one as short, over steps from `source` to `target` of so many seconds."""
    there = _from(source, target, seconds, ends, count)
    back = _from(target, source, seconds, ends, count)
    found = np.zeros(count, dtype=np.bool_)
    found[ends] = True
    for k, least in enumerate(there[ends].T):  # from one end to all of them
        known = np.where(np.isfinite(least), least * _EVEN, -1.0)
        found |= (there[:, k, None] + back <= known).any(axis=1)
    return np.flatnonzero(found)


def _from(source: Ints, target: Ints, seconds: Matrix, ends: Ints, count: int) -> Matrix:
    """[places, ends]: the least seconds in which each place is reached from each end."""
    least = np.full((count, len(ends)), np.inf)
    least[ends, np.arange(len(ends))] = 0.0
    order = np.argsort(target, kind="stable")
    source, target, seconds = source[order], target[order], seconds[order, None]
    begin = np.flatnonzero(np.diff(target, prepend=-1))
    into, changed = target[begin], len(begin) > 0
    while changed:
        now = np.minimum(np.minimum.reduceat(least[source] + seconds, begin), least[into])
        changed = bool((now < least[into]).any())
        least[into] = now
    return least


def shorten(
    seconds: Matrix,
    inside: Matrix,
    joules: Matrix,
    wire: Matrix,
    scratch: Matrix,
    following: Ints,
    held: Ints,
) -> None:
    """Make single steps into shortest paths, in place, by way of one layout after the other (Floyd
    and Warshall); ties in seconds go to fewer wire bytes.

    Most ways through a layout are longer than what is known, and only their seconds are looked at,
    in float32. Layouts of small blocks come first: most shortest paths lead through these, so that
    few ways are found that others beat later (of meshes of three axes in three quarters of the
    time).
    """
    n = len(seconds)
    # What is less than the first takes less, than the second no more, but for rounding.
    less, most = 1 - 1e-12, 1 + 1e-12
    # In half the bytes and time all ways are looked at that may be as short, and others as well.
    rough = seconds.astype(np.float32)
    limit = np.where(np.isfinite(rough), rough * _ROUGHLY, np.finfo(np.float32).max)
    through, near = np.empty_like(rough), np.empty((n, n), dtype=np.bool_)
    # By place, a * n + b; all are views.
    time, about, least, sent = (x.reshape(-1) for x in (seconds, rough, limit, wire))
    own, energy, block, first = (x.reshape(-1) for x in (inside, joules, scratch, following))
    for k in np.argsort(held, kind="stable").tolist():
        np.add(rough[:, k, None], rough[None, k, :], out=through)
        np.less_equal(through, limit, out=near)
        near[k, :] = near[:, k] = False
        here = np.flatnonzero(near)
        if not here.size:
            continue
        left = here // n
        to, onward = left * n + k, here + (k - left) * n
        now, more = time[to] + time[onward], sent[to] + sent[onward]
        known = time[here]
        better = (now < known * less) | ((now <= known * most) & (more < sent[here] * less))
        if not better.any():
            continue
        here, now, more, to, onward = (x[better] for x in (here, now, more, to, onward))
        time[here], sent[here] = now, more
        about[here] = now
        least[here] = about[here] * _ROUGHLY
        own[here] = own[to] + own[onward]
        energy[here] = energy[to] + energy[onward]
        block[here] = np.maximum(np.maximum(block[to], block[onward]), float(held[k]))
        first[here] = first[to]
