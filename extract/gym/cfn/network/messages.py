"""Lower bounds by sequential tree-reweighted message passing, many variables at a time.

Messages reparametrise a network; every sweep yields a lower bound on its least cost (Kolmogorov,
"Convergent Tree-Reweighted Message Passing for Energy Minimization", 2006) and a labelling by
sequential decoding. Variables are passed in an order whose levels (those whose earlier neighbours
have all been passed) are processed by a few array operations each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .network import Flags, Floats, Ints, Network, least_in, offsets, ranges

# Beyond so many variables the order is by colour: few levels, but more sweeps are needed.
_MANY = 1000


@dataclass(frozen=True)
class _Level:
    """Variables of one level, and their half-edges to later ones; see `_levels`. `sources` are rows
    of owners, once per half-edge; `sent` entries of messages."""

    rows: Ints  # [rows] of the variables
    starts: Ints  # [variables] where each one's begin among them
    sizes: Ints  # [variables]
    half: Ints  # [half-edges] owned by these variables
    cells: Floats  # [cells] their tables end to end
    source: Ints  # [sources] rows of the owners, once per half-edge
    share: Floats  # [sources] of the belief that goes along each
    back: Ints  # [sources] entries of the messages that come back along each
    lookup: Ints  # [cells] the entry of `source`
    cell_starts: Ints  # [sent] where stretches over the owner's rows begin
    message: Ints  # [sent] entries of the messages
    message_starts: Ints  # [half-edges] where each one's begin among them
    lengths: Ints  # [half-edges]
    target: Ints  # [sent] rows that the messages go to


class Messages:
    """Message state over one network; costs of rows may change between sweeps."""

    def __init__(self, net: Network) -> None:
        self.net = net
        half = net.half
        self.order = _by_colour(net) if len(net) > _MANY else np.arange(len(net))
        place = np.empty(len(net), dtype=np.int64)
        place[self.order] = np.arange(len(net))
        onward = place[half.owner] < place[half.other]
        ahead = np.bincount(half.owner[onward], minlength=len(net))
        behind = np.bincount(half.owner[~onward], minlength=len(net))
        self.share = 1.0 / np.maximum(np.maximum(ahead, behind), 1)
        self.lengths = net.sizes[half.other]
        self.start = offsets(self.lengths)[:-1]
        self.values = np.zeros(int(self.lengths.sum()))
        self.target = ranges(net.rows[half.other], self.lengths)
        self.onward = onward
        self.forward = self._levels(self.order, onward)
        self.backward = self._levels(self.order[::-1], ~onward)
        self.belief = net.cost.copy()

    def sweep(self, cost: Floats) -> float:
        """One pass forward and one back; the bound that the second proves, without constants."""
        belief = cost + np.bincount(self.target, self.values, len(cost))
        self._pass(belief, self.forward)
        bound = self._pass(belief, self.backward)
        self.belief = belief
        return bound

    def excess(self) -> Floats:
        """What each row adds to the bound of the last sweep, at least, where it is chosen."""
        least = np.minimum.reduceat(self.belief, self.net.rows[:-1])
        return self.belief - np.repeat(least, self.net.sizes)

    def _pass(self, belief: Floats, levels: list[_Level]) -> float:
        bound = 0.0
        values = self.values
        base = np.zeros(len(belief))
        for level in levels:
            least = np.minimum.reduceat(belief[level.rows], level.starts)
            bound += float(least.sum())
            if not len(level.half):
                continue
            base[level.rows] = np.repeat(least, level.sizes)
            out = level.share * (belief[level.source] - base[level.source]) - values[level.back]
            sent = np.minimum.reduceat(level.cells + out[level.lookup], level.cell_starts)
            low = np.minimum.reduceat(sent, level.message_starts)
            bound += float(low.sum())
            sent -= np.repeat(low, level.lengths)
            change = sent - values[level.message]
            values[level.message] = sent
            if 4 * len(change) > len(belief):
                belief += np.bincount(level.target, change, len(belief))
            else:
                np.add.at(belief, level.target, change)
        return bound

    def decode(self, cost: Floats) -> Ints:
        """A labelling: in order, the best rows by earlier choices and messages from later ones."""
        net, half = self.net, self.net.half
        x = np.zeros(len(net), dtype=np.int64)
        # Messages from later variables; those from earlier ones give way to their choices.
        later = np.repeat(~self.onward, self.lengths)
        score = cost + np.bincount(self.target[later], self.values[later], len(cost))
        for level in self.forward:
            v = level.rows
            row = least_in(score[v], level.starts, level.sizes)
            chosen = v[level.starts] if len(v) else v
            variable = np.searchsorted(net.rows, chosen, side="right") - 1
            x[variable] = row
            if len(level.half):
                h = level.half
                o, j = half.owner[h], half.other[h]
                # Seen from the other end: its rows, the owner's row being fixed.
                back = half.reverse[h]
                at = ranges(half.start[back] + x[o] * net.sizes[j], net.sizes[j])
                np.add.at(score, ranges(net.rows[j], net.sizes[j]), half.cells[at])
        return x

    def _levels(self, order: Ints, onward: Flags) -> list[_Level]:
        """Half-edges that lead onward, by the level of their owner."""
        net, half = self.net, self.net.half
        depth = [0] * len(net)
        other = half.other[half.by_owner].tolist()
        leads = onward[half.by_owner].tolist()
        owned = half.owned.tolist()
        for i in order.tolist():
            below = depth[i] + 1
            for q in range(owned[i], owned[i + 1]):
                if leads[q] and depth[other[q]] < below:
                    depth[other[q]] = below
        deep = np.array(depth, dtype=np.int64)
        h = np.flatnonzero(onward)
        h = h[np.argsort(deep[half.owner[h]], kind="stable")]
        cut = np.searchsorted(deep[half.owner[h]], np.arange(deep.max(initial=-1) + 2))
        by_depth = np.argsort(deep, kind="stable")
        cut_of = np.searchsorted(deep[by_depth], np.arange(len(cut)))
        return [
            self._level(by_depth[cut_of[d] : cut_of[d + 1]], h[cut[d] : cut[d + 1]])
            for d in range(len(cut) - 1)
        ]

    def _level(self, variables: Ints, h: Ints) -> _Level:
        net, half = self.net, self.net.half
        o, j = half.owner[h], half.other[h]
        size, other = net.sizes[o], net.sizes[j]
        stretch = np.repeat(np.arange(len(h)), other)
        return _Level(
            rows=ranges(net.rows[variables], net.sizes[variables]),
            starts=offsets(net.sizes[variables])[:-1],
            sizes=net.sizes[variables],
            half=h,
            cells=half.cells[ranges(half.start[h], size * other)],
            source=ranges(net.rows[o], size),
            share=np.repeat(self.share[o], size),
            back=ranges(self.start[half.reverse[h]], size),
            lookup=ranges(offsets(size)[:-1][stretch], size[stretch]),
            cell_starts=offsets(size[stretch])[:-1],
            message=ranges(self.start[h], other),
            message_starts=offsets(other)[:-1],
            lengths=other,
            target=ranges(net.rows[j], other),
        )


def _by_colour(net: Network) -> Ints:
    """Variables by colour, no two neighbours having the same (greedy, most neighbours first)."""
    half = net.half
    colour = [-1] * len(net)
    other = half.other[half.by_owner].tolist()
    owned = half.owned.tolist()
    for i in np.argsort(-half.degree(), kind="stable").tolist():
        taken = {colour[j] for j in other[owned[i] : owned[i + 1]]}
        k = 0
        while k in taken:
            k += 1
        colour[i] = k
    return np.argsort(np.array(colour), kind="stable")
