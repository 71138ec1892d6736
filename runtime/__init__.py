"""Running a plan: lower it to one `shard_map`, compile, and compare with what XLA made of it.

In: a plan and a mesh. Out: `CompiledPlan`, called as the user's function was, and a `Comparison`.
To print them: `te.compile(plan, mesh).lower().as_text()`, `tapestry-egg run FILE`. The public names
below are loaded on first use: to run a plan takes none of what compares it.
"""

from __future__ import annotations

if __name__ != "tapestry_egg.runtime":
    raise ImportError("runtime/ is the package tapestry_egg.runtime; import it by that name")

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tapestry_egg.plans.planned import planned_collectives as planned_collectives
    from tapestry_egg.runtime.measure.compare import Comparison as Comparison
    from tapestry_egg.runtime.measure.compare import compare as compare
    from tapestry_egg.runtime.measure.hlo import HloStats as HloStats
    from tapestry_egg.runtime.measure.hlo import hlo_stats as hlo_stats

    from .compiled import CompiledPlan as CompiledPlan
    from .compiled import compile as compile

#: Public name -> the module of this package that holds it.
_HOMES = {
    "Comparison": "measure.compare",
    "CompiledPlan": "compiled",
    "HloStats": "measure.hlo",
    "compare": "measure.compare",
    "compile": "compiled",
    "hlo_stats": "measure.hlo",
    "planned_collectives": "measure.compare",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
