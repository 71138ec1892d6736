"""Steps: how prices of bytes, of joules and of events follow what labellings use at them."""

from __future__ import annotations

import numpy as np

from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.extract.problem.timeline import Timeline
from tapestry_egg.extract.search.messages.dual import Prices
from tapestry_egg.products import dot

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


def toward(prices: Prices, per_byte: Floats, per_joule: float, far: float) -> Prices:
    """Prices `far` of the way to others, at which known labellings balance.

    Those alone jump from step to step; part of the way from the best that are known, bounds rise
    steadily (in-out separation: Ben-Ameur and Neto, 2007; Wentges, 1997).
    """
    return Prices(
        (1.0 - far) * prices.joule + far * per_joule, (1.0 - far) * prices.bytes + far * per_byte
    )


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
