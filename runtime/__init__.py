"""Running a plan: lower it to one `shard_map`, compile, and compare with what XLA made of it."""

from __future__ import annotations

if __name__ != "tapestry_egg.runtime":
    raise ImportError("runtime/ is the package tapestry_egg.runtime; import it by that name")

from .compare import Comparison as Comparison
from .compare import compare as compare
from .compare import planned_collectives as planned_collectives
from .compile import CompiledPlan as CompiledPlan
from .compile import compile as compile
from .hlo import HloStats as HloStats
from .hlo import hlo_stats as hlo_stats
from .lower import lower as lower
