"""Steps: how prices of bytes, of joules and of events follow what labellings use at them."""

from __future__ import annotations

import numpy as np

from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.extract.seconds.merging import Merging
from tapestry_egg.extract.seconds.timeline import Timeline

from .dual import Prices
from .products import dot

# Of these numbers no measurement is kept: steps of any length lead to valid bounds, some sooner.

# How fast prices follow what is used: where memory is dear, how dear it is, and energy.
_WHERE, _TOTAL, _JOULES = 10.0, 2.0, 8.0

# No price of a byte is less than the first share of the largest, so that it can rise again; where
# memory is most, none is less than the second.
_FLOOR, _RAISED = 1e-9, 0.05

# The mean of critical paths forgets what was before so many.
_REMEMBERED = 20

# How much of the next labelling goes into the mean of what events take, and how far shares of
# events move at once towards the longest path of that mean.
_MEAN, _FAR = 0.3, 0.5

# How far shares of what may be merged move, as if after so many steps at first, and at least.
_BEFORE, _LEAST = 7, 0.03


class EventShares:
    """Shares of a second of every event, in which it is priced.

    `proving` ones are moved towards the longest path of the mean of what was found (the volume
    algorithm: Barahona and Anbil, 2000), so that bounds rise. `finding` ones are the mean of the
    critical paths of all that was found, so that what is found is fast.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.proving = self.finding = timeline.evenly()
        self._mean: Floats | None = None
        self._count = 0

    def follow(self, lengths: Floats, far: float = _FAR) -> None:
        """Move the proving shares after a labelling whose events take `lengths`."""
        first = self._mean is None
        self._mean = lengths if self._mean is None else _MEAN * lengths + (1 - _MEAN) * self._mean
        path = self.timeline.shares(self._mean)
        self.proving = self.proving + (1.0 if first else far) * (path - self.proving)

    def averaged(self, lengths: Floats) -> None:
        """Move the finding shares after a labelling whose events take `lengths`."""
        path = self.timeline.shares(lengths)
        self.finding = self.finding + 2.0 / (3 + self._count) * (path - self.finding)
        self._count = min(self._count + 1, _REMEMBERED)


class MergedShares:
    """Shares of collectives that may be merged, at which they are priced: moved so that what is
    found at some prices is priced higher at the next. What is found is found at the same ones."""

    def __init__(self, merging: Merging) -> None:
        self.merging = merging
        self.relations = merging.relations(None)
        self.mixture = merging.evenly(self.relations)
        self._bytes: Floats | None = None
        self._count = 0

    def at(self, bytes_: Floats) -> Floats:
        """The shares that are valid where bytes cost so much at each time."""
        if self._bytes is None or not np.array_equal(self._bytes, bytes_):
            self.relations = self.merging.relations(np.concatenate(([0.0], np.cumsum(bytes_))))
            self.mixture = self.merging.fitted(self.mixture, self.relations)
            self._bytes = bytes_
        return self.merging.shares(self.mixture)

    def follow(self, made: Floats, far: float | None = None) -> None:
        """Move the shares after a labelling that makes collectives so often."""
        if far is None:
            self._count += 1
            far = max(1.0 / (self._count + _BEFORE), _LEAST)
        self.mixture = self.merging.towards(self.mixture, made, self.relations, far)


def stepped(prices: Prices, used: Floats, peak: float, joule_limit: float, scale: float) -> Prices:
    """Prices after a step along what was used beyond the limits."""
    bytes_used, joules = used[:-1], float(used[-1])
    total = prices.bytes.sum()
    dearly = dot(prices.bytes, bytes_used) / max(total, 1e-300)  # bytes where they are priced
    rise = scale * _TOTAL * np.clip(dearly / max(peak, 1.0) - 1.0, -0.5, 0.5)
    joule = prices.joule
    if joule_limit < np.inf:
        joule *= np.exp(scale * _JOULES * np.clip(joules / joule_limit - 1.0, -0.1, 0.1))
    weights = weights_after(prices.bytes, bytes_used, scale)
    return Prices(float(joule), total * np.exp(rise) * weights)


def weights_after(before: Floats, used: Floats, scale: float) -> Floats:
    """Shares of the price of memory, moved to where most of it is used."""
    # What has become the peak is taken seriously at once, not only after many steps up.
    least = np.where(used > 0.98 * used.max(), _RAISED, _FLOOR) * before.max()
    logs = np.log(np.maximum(before, least) + 1e-300)
    logs = logs + scale * _WHERE * used / max(used.max(), 1.0)
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def mixed(before: Floats | None, now: Floats) -> Floats:
    """What is used, on average over the last steps."""
    return now if before is None else 0.5 * (before + now)
