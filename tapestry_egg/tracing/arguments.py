"""What is given to the public functions: the likely mistakes, told with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapestry_egg.errors import (
    ExtractError,
    GraphError,
    PlanError,
    TapestryError,
    TargetError,
    TraceError,
)
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.objectives import KNOWN, Objective, amounts, named, objective
from tapestry_egg.machine.target import Target

from .trace import Program


def a(value: object) -> str:
    """What a value is, with its article: `a front`, `a function`."""
    for name in ("Program", "BlockGraph", "Plan", "Front"):
        if _is(value, name):
            return {"BlockGraph": "a graph"}.get(name, f"a {name.lower()}")
    if value is None or isinstance(value, type):
        return "nothing" if value is None else f"the class {value.__name__}"
    if callable(value):
        return "a function"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


def _is(value: object, name: str) -> bool:
    """Whether a value is of a class of this package, by its name: plans and fronts are made by
    later stages, which this one does not import."""
    return any(
        c.__name__ == name and c.__module__.startswith("tapestry_egg.") for c in type(value).__mro__
    )


def check_graph(value: object, where: str) -> Program | BlockGraph:
    """A traced program. Raises GraphError for anything else."""
    if isinstance(value, Program | BlockGraph):
        return value
    if isinstance(value, str):
        hint = "te.load reads graph files."
    elif _is(value, "Front") or _is(value, "Plan"):
        hint = "It is optimized already: give the graph that te.trace made."
    else:
        hint = "te.trace(function, *arguments) makes a graph of a function."
    raise GraphError(f"expected a traced program, given {a(value)}", where=where, hint=hint)


def check_plan(value: object, where: str) -> Any:
    """A plan. Raises PlanError for anything else."""
    if _is(value, "Plan"):
        return value
    if _is(value, "Front"):
        hint = "Choose one of its plans: front.best('seconds') or front['p0']."
    elif isinstance(value, Program | BlockGraph):
        hint = "te.optimize(graph, target) makes a front of it; front.best() is a plan."
    else:
        hint = "te.jit(function) plans and compiles at once; te.load reads plan files."
    raise PlanError(f"expected a plan, given {a(value)}", where=where, hint=hint)


def check_function(value: object, where: str) -> None:
    """Something that can be called. Raises TraceError for anything else."""
    if callable(value):
        return
    hint = "te.optimize(graph, target) takes graphs." if isinstance(value, BlockGraph) else ""
    raise TraceError(f"expected a function, given {a(value)}", where=where, hint=hint)


def check_devices(mesh: object) -> None:
    """What supplies devices: None, a `jax.sharding.Mesh`, or a sequence of devices.

    Raises TargetError for anything else.
    """
    if mesh is None:
        return
    kind = type(mesh).__name__
    hint = "Give a jax.sharding.Mesh, or devices such as jax.devices()[:8]."
    if kind == "AbstractMesh":
        raise TargetError(
            "an AbstractMesh has no devices",
            where="mesh",
            hint=f"{hint} Ahead of time, jax.experimental.topologies describes devices.",
        )
    if isinstance(mesh, str):
        raise TargetError(
            f"{mesh!r} is no mesh",
            where="mesh",
            hint=f"{hint} The name of a machine is a target: target={mesh!r}.",
        )
    if hasattr(mesh, "devices"):
        found = list(getattr(mesh.devices, "flat", mesh.devices))
    else:
        try:
            found = list(getattr(mesh, "flat", mesh))  # type: ignore[call-overload]
        except TypeError:
            found = [mesh]
    wrong = [x for x in found if not hasattr(x, "platform")]
    if wrong or not found:
        what = "it holds no devices" if not found else f"{wrong[0]!r:.60} is no device"
        if isinstance(mesh, tuple | list) and all(isinstance(x, int) for x in found[:4] or [""]):
            sizes = tuple(found)
            what = "a mesh needs devices and names for its axes"
            hint = f"Give jax.make_mesh({sizes}, {tuple('xyzw'[: len(sizes)])})."
        raise TargetError(what, where="mesh", hint=hint)


def check_target(target: object) -> None:
    """A target or its name. Raises TargetError for anything else."""
    if not isinstance(target, str | Path | Target):
        raise TargetError(
            f"expected the name of a machine, given {target!r:.60}",
            where="target",
            hint="Write 'h100:8', or give what te.load_target returns. A jax.sharding.Mesh goes "
            "beside it, as mesh=.",
        )


def check_limits(limits: object) -> None:
    """Amounts by objective. Raises ExtractError for anything else."""
    check_mapping(limits, "limits", "amounts by objective", "{'peak_bytes': '60GiB'}")
    amounts(limits)  # type: ignore[arg-type]  # it is a mapping


def check_pins(pins: object) -> None:
    """Layouts by path. Raises ExtractError for anything else."""
    check_mapping(pins, "pins", "layouts by path", """{"[0]['w']": (None, 'x')}""")


def check_state(state: object) -> None:
    """Inputs by output. Raises ExtractError for anything else."""
    check_mapping(state, "state", "inputs by the outputs that become them", "{'[0]': '[0]'}")


def check_mapping(value: object, where: str, expected: str, example: str) -> None:
    """Raise ExtractError for what is no mapping, nor None."""
    if value is not None and not isinstance(value, Mapping):
        raise ExtractError(
            f"expected {expected}, given {a(value)}",
            where=where,
            hint=f"Write {where}={example}.",
        )


def check_objectives(objectives: object) -> None:
    """Objectives or their names, one at least. Raises ExtractError for anything else."""
    if isinstance(objectives, str | Objective) or not hasattr(objectives, "__iter__"):
        raise ExtractError(
            f"expected names of objectives, given {objectives!r:.60}",
            where="objectives",
            hint=f"Write them as ('seconds', 'peak_bytes'). {KNOWN}",
        )
    names = list(objectives)
    if not names:
        raise ExtractError("there is none", where="objectives", hint=KNOWN)
    for each in names:
        objective(each, "objectives")


def check_meshes(shapes: object) -> None:
    """Mesh shapes. Raises TargetError for anything else."""
    if shapes is None:
        return
    wrong = [shapes] if isinstance(shapes, MeshShape) else []
    wrong += [] if wrong else [x for x in shapes if not isinstance(x, MeshShape)]  # type: ignore[attr-defined]
    if wrong:
        raise TargetError(
            f"expected mesh shapes, given {wrong[0]!r:.60}",
            where="mesh_shapes",
            hint="Write mesh_shapes=[te.MeshShape(('x', 'y'), (2, 4))].",
        )


def check_books(rules: object) -> None:
    """A sequence of rule books. Raises TapestryError for a single one: it would be read letter by
    letter."""
    if isinstance(rules, str):
        raise TapestryError(
            f"expected rule books, given the text {rules!r:.60}",
            where="rules",
            hint=f"Write rules=[{rules!r:.60}].",
        )


def check_settings(settings: object) -> None:
    """Settings, or None for the default. Raises ExtractError for anything else."""
    if settings is not None and not _is(settings, "Settings"):
        raise ExtractError(
            f"expected settings, given {a(settings)}",
            where="settings",
            hint="Write settings=te.Settings(work=10).",
        )


def check_jit(
    fn: object,
    mesh: object,
    minimize: object,
    *,
    target: object,
    limits: object,
    rules: object,
    state: object,
    pins: object,
    settings: object,
) -> None:
    """The arguments of `jit`. Raises what the checks of each raise."""
    check_function(fn, "jit")
    check_devices(mesh)
    if target is not None:
        check_target(target)
    named(minimize, "minimize")
    check_limits(limits)
    check_state(state)
    check_pins(pins)
    check_books(rules)
    check_settings(settings)
