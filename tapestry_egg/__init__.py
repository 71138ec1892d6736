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

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tapestry_egg.files.files import load as load
    from tapestry_egg.files.files import save as save
    from tapestry_egg.graph.blockgraph import BlockGraph as BlockGraph
    from tapestry_egg.graph.blockgraph import TensorType as TensorType
    from tapestry_egg.graph.layout import Layout as Layout
    from tapestry_egg.graph.layout import MeshShape as MeshShape
    from tapestry_egg.interop.foreign import from_export as from_export
    from tapestry_egg.interop.foreign import from_stablehlo as from_stablehlo
    from tapestry_egg.machine.formulas import load_objectives as load_objectives
    from tapestry_egg.machine.objectives import Objective as Objective
    from tapestry_egg.machine.target import Target as Target
    from tapestry_egg.machine.target import load_target as load_target
    from tapestry_egg.pipeline.batch import optimize_all as optimize_all
    from tapestry_egg.pipeline.jit.jit import jit as jit
    from tapestry_egg.pipeline.settings import Settings as Settings
    from tapestry_egg.plans.plan import Costs as Costs
    from tapestry_egg.plans.plan import Plan as Plan
    from tapestry_egg.plans.plan import PlannedCollective as PlannedCollective
    from tapestry_egg.runtime.compiled import compile as compile
    from tapestry_egg.runtime.measured import measure as measure
    from tapestry_egg.symbolic.kernels import kernel as kernel
    from tapestry_egg.symbolic.tensors import program as program
    from tapestry_egg.symbolic.tensors import tensor as tensor
    from tapestry_egg.tracing.trace import Program as Program
    from tapestry_egg.tracing.trace import trace as trace

    from .errors import TapestryError as TapestryError
    from .pipeline import Front as Front
    from .pipeline import optimize as optimize
    from .progress import Phase as Phase

#: Public name -> the module of this package that holds it.
_HOMES = {
    "BlockGraph": "graph.blockgraph",
    "Costs": "plans.plan",
    "Front": "pipeline.pipeline",
    "Layout": "graph.layout",
    "MeshShape": "graph.layout",
    "Objective": "machine.objectives",
    "Phase": "progress",
    "Plan": "plans.plan",
    "PlannedCollective": "plans.plan",
    "Program": "tracing.trace",
    "Settings": "pipeline.settings",
    "TapestryError": "errors",
    "Target": "machine.target",
    "TensorType": "graph.blockgraph",
    "compile": "runtime.compiled",
    "from_export": "interop.foreign",
    "from_stablehlo": "interop.foreign",
    "jit": "pipeline.jit.jit",
    "kernel": "symbolic.kernels",
    "load": "files.files",
    "load_objectives": "machine.formulas",
    "load_target": "machine.target",
    "measure": "runtime.measured",
    "optimize": "pipeline.pipeline",
    "optimize_all": "pipeline.batch",
    "program": "symbolic.tensors",
    "save": "files.files",
    "tensor": "symbolic.tensors",
    "trace": "tracing.trace",
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
