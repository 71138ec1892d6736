"""Integer boxes, and how index space projects into tensors: the theory everything else stands on.

A `ZRange` is a half-open box of integer points, a `Projection` maps a point or box of an
operation's index space to the box of a tensor that it touches. `cover_fault` tells whether boxes
make up a whole. All are immutable and hashable. In: integers. Out: boxes and
projections; they print as they are written.
"""

from __future__ import annotations

from .cover import CoverFault as CoverFault
from .cover import cover_fault as cover_fault
from .projection import Projection as Projection
from .projection import has_gaps as has_gaps
from .zrange import ZRange as ZRange
from .zrange import ZSpaceError as ZSpaceError
