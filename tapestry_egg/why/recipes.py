"""What hand-made recipes would take beside a front: the batch cut over all devices, and the rest
whole (data parallel) or cut, too (fully sharded, as FSDP and ZeRO-3 lay it).

A recipe here is layouts of arguments alone, found from the projections: the batch is the dim whose
rows go through most of the program. What happens inside is planned within them, so each is the best
that anyone could make of the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tapestry_egg.columns import columns, wrapped
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline.pipeline import optimize
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.plans.plan import Origin, Plan
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES, ENERGY, TIME
from tapestry_egg.rewrite.rows.cuts import Rows
from tapestry_egg.rewrite.streams.micro_batches import batch
from tapestry_egg.tracing.arguments import check_settings

if TYPE_CHECKING:
    from tapestry_egg.tracing.trace import Program

DATA_PARALLEL, FULLY_SHARDED = "data parallel", "fully sharded"

#: Layouts of arguments by path: for each dim the axis that cuts it.
Layouts = Mapping[str, tuple[str | None, ...]]

# Plans of a front that differ by less are one point of it (`extract/engine/archive.py`).
_STEP = 1.01

_LEGEND = (
    "A recipe fixes the layouts of arguments only, and has the best plan that was found for them. "
    "Below it is the front's fastest plan that holds no more; the recipe takes so many times as "
    "long."
)

# Above any memory, so that what does not fit is told, too.
_NO_LIMIT = {"peak_bytes": 1e18}


@dataclass(frozen=True)
class Recipe:
    """A recipe, the layouts of arguments that it is, and the fastest plan with them; where there is
    none, `missing` says why."""

    name: str
    layouts: Layouts
    plan: Plan | None = None
    missing: str = ""


@dataclass(frozen=True)
class Recipes:
    """Recipes beside a front."""

    front: Front
    recipes: tuple[Recipe, ...]

    def data(self) -> list[dict[str, Any]]:
        """A record for each recipe, and for the front's plan beside it, for JSON."""
        return [
            {
                "recipe": r.name,
                "missing": r.missing,
                "plan": None if r.plan is None else _figures(r.plan),
                "front": None if (own := self.beside(r)) is None else _figures(own),
            }
            for r in self.recipes
        ]

    def beside(self, recipe: Recipe) -> Plan | None:
        """The fastest plan of the front that holds no more than a recipe's, by a hundredth: fronts
        show no smaller steps. None where there is no such plan."""
        if recipe.plan is None:
            return None
        most = recipe.plan.costs.peak_bytes * _STEP
        fitting = [p for p in self.front.plans if p.costs.peak_bytes <= most]
        return min(fitting, key=lambda p: p.costs.seconds, default=None)

    def __str__(self) -> str:
        head = ["recipe", "seconds", "peak", "joules", "wire", "times"]
        rows, said = [head], [f"recipes of {self.front.graph_name} on {self.front.target}"]
        missing, faster, over = [], [], False
        for r in self.recipes:
            if r.plan is None:
                missing.append(f"{r.name}: {r.missing}")
                continue
            own, mark = self.beside(r), _over(r.plan, self.front)
            seconds, peak, *rest = _short(r.plan)
            times = "-" if own is None else f"{r.plan.costs.seconds / own.costs.seconds:.2f}×"
            rows.append([r.name, seconds, f"{peak}{mark}", *rest, times])
            over |= bool(mark)
            if own is not None:
                rows.append([f"  front: {own.name}", *_short(own), ""])
                faster += [r.name] if r.plan.costs.seconds < own.costs.seconds / _STEP else []
        if len(rows) > 1:
            said.append(columns(rows, "  ", right=range(1, 6)))
            said.append(_LEGEND)
        if over:
            said.append("! more than a device's usable memory")
        if faster:
            names = " and ".join(faster)
            said.append(f"the front's search had not reached {names}: give it more work")
        return printable(wrapped("\n".join([*said, *missing])))


def recipes(front: Front, settings: Settings | None = None) -> Recipes:
    """What recipes take for the program of a front, on all its devices in one axis.

    Each is a search of its own, within its layouts (default: two units of work). Raises
    ExtractError where the front's plans do not know their program and machine.
    """
    check_settings(settings)
    known = next((p for p in front.plans if p.origin is not None and p.program is not None), None)
    if known is None or known.program is None or known.origin is None:
        raise ExtractError(
            "the plans do not say which program and machine they are for",
            where="recipes",
            hint="Plans of a front know it, and those that were loaded from a file.",
        )
    program, origin = known.program, known.origin
    graph = program.graph
    count = max(p.mesh.devices for p in front.plans)
    mesh = MeshShape(("x",), (count,))
    rows = _rows(graph)
    found: list[Recipe] = []
    for name in (DATA_PARALLEL, FULLY_SHARDED):
        layouts = _layouts(graph, rows, count, name == FULLY_SHARDED)
        missing = _missing(graph, rows, count)
        if not missing and name == FULLY_SHARDED and layouts == found[0].layouts:
            missing = f"no other argument has a dim that {count} divides"
        if missing:
            found.append(Recipe(name, layouts, missing=missing))
        else:
            found.append(_planned(Recipe(name, layouts), program, origin, mesh, settings))
    return Recipes(front, tuple(found))


def _rows(graph: BlockGraph) -> dict[int, int]:
    """Of each argument that has rows of the batch, by its place, the dim that they lie along: of
    the one from which rows go through the program, and of those that are read by rows beside it."""
    found = batch(graph)
    if found is None:
        return {}
    place = {v: p for p, v in enumerate(found.graph.inputs)}
    rows = {found.input: found.dim}
    for k, how in found.how.items():
        read = found.graph.operations[k].inputs if isinstance(how, Rows) else ()
        for v, cut in zip(read, how.inputs if isinstance(how, Rows) else (), strict=True):
            if v in place and cut is not None:
                rows.setdefault(place[v], cut.dim)
    return rows


def _missing(graph: BlockGraph, rows: Mapping[int, int], count: int) -> str:
    """Why a batch cannot be cut over so many devices; nothing where it can."""
    if not rows:
        return "no dim of an argument is a batch whose rows go through the program"
    for p, dim in rows.items():
        type_ = graph.values[graph.inputs[p]]
        if type_.shape[dim] % count:
            return f"{count} devices do not divide dim {dim} of {graph.input_paths[p]}, {type_}"
    return ""


def _layouts(graph: BlockGraph, rows: Mapping[int, int], count: int, sharded: bool) -> Layouts:
    """The layouts of arguments: the batch cut, and others whole or cut along their largest dim that
    the devices divide."""
    found: dict[str, tuple[str | None, ...]] = {}
    for p, (path, v) in enumerate(zip(graph.input_paths, graph.inputs, strict=True)):
        shape = graph.values[v].shape
        dims = [d for d, n in enumerate(shape) if n % count == 0 and n]
        dim = rows.get(p, max(dims, key=lambda d: shape[d]) if sharded and dims else None)
        found[path] = tuple(["x" if d == dim else None for d in range(len(shape))])
    return found


def _planned(
    recipe: Recipe, program: Program, origin: Origin, mesh: MeshShape, settings: Settings | None
) -> Recipe:
    """The recipe with the fastest plan that fits, or else with the fastest."""
    graph = program.graph
    inputs, outputs = graph.input_paths, graph.output_paths
    asked = settings or Settings(work=2.0, front=False)
    asked = replace(asked, recompute=0, overlap=origin.machine.overlaps)
    error: ExtractError | None = None
    for limits in (None, _NO_LIMIT):
        try:
            front = optimize(
                program,
                origin.machine,
                limits=limits,
                state={outputs[j]: inputs[i] for j, i in origin.feedback},
                mesh_shapes=[mesh],
                pins=recipe.layouts,
                settings=asked,
            )
            plan = front.best("seconds", limits=limits)
        except ExtractError as e:
            error = e
        else:
            return replace(recipe, plan=replace(plan, name=recipe.name, bound=0.0))
    return replace(recipe, missing=error.what if error else "")


def _short(plan: Plan) -> list[str]:
    costs = plan.costs
    return [
        TIME.format(costs.seconds),
        BYTES.format(costs.peak_bytes),
        ENERGY.format(costs.joules),
        BYTES.format(costs.wire_bytes),
    ]


def _figures(plan: Plan) -> dict[str, Any]:
    costs = plan.costs
    return {
        "plan": plan.name,
        "seconds": costs.seconds,
        "peak_bytes": costs.peak_bytes,
        "joules": costs.joules,
        "wire_bytes": costs.wire_bytes,
    }


def _over(plan: Plan, front: Front) -> str:
    usable = front.usable_bytes
    return "!" if usable is not None and plan.costs.peak_bytes > usable else ""
