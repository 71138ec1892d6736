"""The Pareto front of ways to run a JAX program on a mesh of devices.

    import tapestry_egg as te

    step = te.jit(train_step, mesh=mesh, minimize="seconds", limits={"peak_bytes": "60GiB"})

    graph = te.trace(train_step, params, batch)
    front = te.optimize(graph, target="h100:8")
    plan = front.best("seconds", limits={"peak_bytes": "40GiB"})
    run = te.compile(plan, mesh)

The public names below are loaded on first use: importing the package imports neither JAX nor the
e-graph, and touches no device.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from .lazy import LazyPackage

if TYPE_CHECKING:
    from .batch import optimize_all as optimize_all
    from .blockgraph import BlockGraph as BlockGraph
    from .blockgraph import TensorType as TensorType
    from .errors import TapestryError as TapestryError
    from .files import load as load
    from .files import save as save
    from .layout import Layout as Layout
    from .layout import MeshShape as MeshShape
    from .pipeline import Front as Front
    from .pipeline import optimize as optimize
    from .plan import Costs as Costs
    from .plan import Plan as Plan
    from .plan import PlannedCollective as PlannedCollective
    from .progress import Phase as Phase
    from .runtime.compile import compile as compile
    from .stage import jit as jit
    from .target import Target as Target
    from .target import load_target as load_target
    from .trace import Program as Program
    from .trace import trace as trace

#: Public name -> the module of this package that holds it.
_HOMES = {
    "BlockGraph": "blockgraph",
    "Costs": "plan",
    "Front": "pipeline",
    "Layout": "layout",
    "MeshShape": "layout",
    "Phase": "progress",
    "Plan": "plan",
    "PlannedCollective": "plan",
    "Program": "trace",
    "TapestryError": "errors",
    "Target": "target",
    "TensorType": "blockgraph",
    "compile": "runtime.compile",
    "jit": "stage",
    "load": "files",
    "load_target": "target",
    "optimize": "pipeline",
    "optimize_all": "batch",
    "save": "files",
    "trace": "trace",
}

__version__ = "0.1.0"
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(
            f"tapestry_egg has no {name!r}; it has {', '.join(__all__)}, "
            f"and modules such as tapestry_egg.runtime"
        )
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = LazyPackage
