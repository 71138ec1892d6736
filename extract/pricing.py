"""Pricing: what every row and every pair of labels costs at given prices, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import Floats, Ints, Pair, Variable


class Tables:
    """The costs of some variables or pairs end to end in one array, and a view of each.

    Parts with more uses of memory come first, so that the k-th uses of all parts that have so many
    are one stretch at the front.
    """

    def __init__(self, parts: Sequence[Variable | Pair]) -> None:
        order = sorted(range(len(parts)), key=lambda k: -len(parts[k].uses))
        ordered = [parts[k] for k in order]
        sizes = np.array([p.seconds.size for p in ordered], dtype=np.int64)
        ends = np.cumsum(sizes)
        self.flat = np.zeros(int(ends[-1]) if len(ends) else 0)
        self.start = np.zeros(len(parts), dtype=np.int64)
        self.start[order] = ends - sizes
        self.views: list[Floats] = [self.flat[:0]] * len(parts)
        for k, end, size in zip(order, ends, sizes, strict=True):
            self.views[k] = self.flat[end - size : end].reshape(parts[k].seconds.shape)
        self.seconds = _end_to_end([p.seconds for p in ordered])
        self.joules = _end_to_end([p.joules for p in ordered])
        self.never = np.flatnonzero(~np.isfinite(self.seconds))
        self.seconds[self.never] = self.joules[self.never] = 0.0
        # Per k: (sizes of the parts with a k-th use, when it starts and ends, its amounts).
        self.uses: list[tuple[Ints, Ints, Ints, Floats]] = []
        for k in range(max((len(p.uses) for p in parts), default=0)):
            use = [p.uses[k] for p in ordered if len(p.uses) > k]
            amounts = _end_to_end([u.amount for u in use])
            amounts[~np.isfinite(amounts)] = 0.0
            spans = np.array([(u.start, u.end) for u in use], dtype=np.int64)
            self.uses.append((sizes[: len(use)], spans[:, 0], spans[:, 1], amounts))

    def price(self, joule: float, until: Floats, forbidden: float) -> None:
        """Price all entries; `until[t]` is what a byte costs from the start up to before t."""
        np.multiply(self.joules, joule, out=self.flat)
        self.flat += self.seconds
        for sizes, start, end, amounts in self.uses:
            prices = until[end] - until[start]
            self.flat[: len(amounts)] += np.repeat(prices, sizes) * amounts
        self.flat[self.never] = forbidden


def _end_to_end(parts: Sequence[Floats]) -> Floats:
    return np.concatenate([p.ravel() for p in parts]) if parts else np.zeros(0)
