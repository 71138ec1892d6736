"""Integer boxes, and how index space projects into tensors: the theory everything else stands on.

A `ZRange` is a half-open box of integer points, a `Projection` maps a point or box of an
operation's index space to the box of a tensor that it touches. Both are immutable and hashable.
"""

from __future__ import annotations

from .projection import Projection as Projection
from .zrange import ZRange as ZRange
from .zrange import ZSpaceError as ZSpaceError
