"""Why not otherwise: the plan in which some tensors lie as asked, held against one that is there.

It is searched for anew, in the same form of the program and on the same mesh, so that what it costs
more is what the layout costs when all else has adapted to it, not what moving one tensor would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tapestry_egg.columns import columns, wrapped
from tapestry_egg.errors import ExtractError, TargetError
from tapestry_egg.extract.pins.pins import Pin, Pins, fitting, read_pins
from tapestry_egg.extract.pins.value_pins import split_pins
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.objectives import JOULES, PEAK_BYTES, SECONDS
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.pipeline.pipeline import optimize
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.plans.plan import Plan
from tapestry_egg.printable import printable
from tapestry_egg.quantities import TIME
from tapestry_egg.tracing.arguments import check_settings

from .difference import Difference, difference, same_form

if TYPE_CHECKING:
    from tapestry_egg.extract.front.front import Front
from tapestry_egg.show.account import LEGEND, Account

#: Units of work of such a search, where nothing else is asked for.
WORK = 10.0
# Axes of the meshes that are tried where the plan's own lacks one that is asked for.
_AXES = 2
# Rules of layouts alone: the form of the program stays the plan's.
_BOOKS = ("sharding", "collectives")
# Meshes that are told by name where a search is told of.
_FEW = 2
# By which share a plan is better than another, not merely as good.
_BETTER = 1e-6


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a cut of one dim of a pinned tensor means to an operation that reads it."""

    tensor: str
    dim: int
    axes: tuple[str, ...]
    reader: str
    source: str
    means: str


@dataclass(frozen=True)
class WhyNot:
    """The answer: `found` is the fastest plan that was found with those layouts, `within` says that
    its peak is no larger than the plan's. `refused` says why there is none. `bound` are the least
    seconds that any such plan of this form on `meshes` can have within the peak and joules of the
    one found; `proven` where that is more than the plan takes. Where collectives run beside
    kernels, and those of the one found are `merged`, its bound is that of plans of which merging
    saves no more, and nothing is proven. `holders` are plans of the front that lie so already."""

    plan: str
    mesh: str
    asked: tuple[tuple[str, str], ...]
    lies: tuple[tuple[str, str], ...]
    refused: str
    means: tuple[Meaning, ...]
    searched: str
    meshes: tuple[str, ...] = ()
    within: bool = False
    better: bool = False
    proven: bool = False
    merged: bool = False
    bound: float = 0.0
    seconds: float = 0.0
    holders: tuple[str, ...] = ()
    covered: str = ""
    difference: Difference | None = None
    found: Plan | None = field(default=None, compare=False, repr=False)

    def data(self) -> dict[str, Any]:
        """All of it as plain data, for JSON, but the plan that was found."""
        return asdict(replace(self, found=None))

    def __str__(self) -> str:
        asked = ", ".join(f"{name} as {layout}" for name, layout in self.asked)
        parts = [f"plan {self.plan}, mesh {self.mesh}: why not {asked}?"]
        parts += [f"  {name} has layout {layout}" for name, layout in self.lies]
        if self.refused:
            parts.append(self.refused)
        else:
            parts += list(self._verdict())
        if self.means:
            parts.append("what this means to the operations that make and read them")
            rows = [
                [m.tensor, f"dim {m.dim} over {','.join(m.axes)}", m.reader, m.means, m.source]
                for m in self.means
            ]
            parts.append(columns(rows, "  "))
        if self.covered:
            parts.append(self.covered)
        if self.searched:
            parts.append(f"searched: {self.searched}")
        if self.difference:
            parts.append(str(self.difference))
        else:
            parts.append(LEGEND)
        return printable(wrapped("\n".join(parts)))

    def _verdict(self) -> Iterator[str]:
        assert self.difference is not None
        totals = {name: (x, y) for name, x, y in self.difference.totals}
        said = []
        for o in (SECONDS, PEAK_BYTES, JOULES):
            x, y = totals[o.name]
            said.append(f"{o.format(y)} ({y / x - 1:+.1%})" if x else o.format(y))
        where = f"on {' or '.join(self.meshes)}"
        if len(self.meshes) > _FEW:
            where = f"on {len(self.meshes)} mesh shapes"
        limit = PEAK_BYTES.format(totals[PEAK_BYTES.name][0])
        limits = f"within {limit}" if self.within else "whatever its peak"
        yield f"the fastest that was found with it {where}, {limits}: {', '.join(said)}"
        if not self.within:
            yield f"within {limit}, the peak of this plan, none was found"
        bound = TIME.format(self.bound)
        own = " and ".join(o.format(totals[o.name][1]) for o in (PEAK_BYTES, JOULES))
        if self.merged:
            yield (
                f"its collectives are merged and run beside kernels: {where} there is a bound only "
                f"of plans of which merging saves no more, {bound} within {own} (docs/bounds.md)"
            )
        elif self.proven:
            yield (
                f"of the plans searched with it {where}, within {own}, none takes less than {bound}"
            )
        elif not self.better:
            yield f"the bound of such plans {where}, within {own}, is {bound}: one may be faster"


def why_not(
    plan: Plan, pins: Pins, *, settings: Settings | None = None, front: Front | None = None
) -> WhyNot:
    """Why the tensors of a plan do not lie as `pins` say: arguments by path, results and values
    inside as `extract/pins/value_pins.py` names them.

    Raises ExtractError for a name that no tensor has, and for a plan of which it is not told what
    machine it was made for.
    """
    check_settings(settings)
    account = Account(plan, "why not")
    tensors = _tensors(account, pins)
    pinned = [t.pin for t in tensors]
    asked = tuple(sorted({t.name: str(t.pin) for t in tensors}.items()))
    lies = tuple((t.name, _lying(account, t)) for t in sorted(tensors, key=lambda t: t.name))
    means = tuple(_meanings(account, tensors))
    answer = WhyNot(plan.name, str(plan.mesh), asked, lies, "", means, "")
    if all(str(t.pin) == account.show(account.walk.given[t.value]) for t in tensors):
        return replace(answer, refused="it does")
    try:
        shapes = _shapes(plan, pinned)
    except (ExtractError, TargetError) as e:
        told = () if isinstance(e, TargetError) else means  # of an axis that there is not: nothing
        return replace(answer, refused=f"there is no such plan: {e.what}", means=told)
    holders = tuple(
        p.name for p in (front.plans if front else ()) if p.mesh in shapes and _lies(p, plan, pins)
    )
    found, within = _searched(plan, pins, shapes, settings or Settings(work=WORK, front=False))
    if found is None:
        return replace(answer, refused="no plan with it was found", holders=holders)
    kept = found = replace(found, name="asked")
    found = replace(found, rules=plan.rules, steps=plan.steps)  # whose form it is
    if not split_pins(plan.graph, pins).inside:  # else its program is the form that asks for them
        kept = found = replace(found, program=plan.program, origin=plan.origin)
    mine, theirs = plan.costs, found.costs
    better = (
        theirs.seconds < mine.seconds * (1 - _BETTER)
        and theirs.peak_bytes <= mine.peak_bytes
        and theirs.joules <= mine.joules * (1 + _BETTER)
    )
    return replace(
        answer,
        searched=f"the plan's own form of the program on {', '.join(map(str, shapes))}",
        meshes=tuple(map(str, shapes)),
        within=within,
        better=better,
        proven=found.bound > mine.seconds * (1 + _BETTER) and found.is_proven,
        merged=bool(found.body.merged) and not found.merged_too,
        bound=found.bound,
        seconds=theirs.seconds,
        holders=holders,
        covered=_covered(plan, found, better, holders, front),
        difference=difference(plan, found),
        found=kept,
    )


def _covered(
    plan: Plan, found: Plan, better: bool, holders: Sequence[str], front: Front | None
) -> str:
    """What the front's search has to do with the answer."""
    if better:
        return (
            "it is better in time, and no worse in memory and energy: the front's search did not "
            "reach it. Search longer, or pin it"
        )
    if found.mesh != plan.mesh:
        return f"the plan's mesh has no such axes: this is another, {found.mesh}"
    if holders:
        return f"plans of the front with these layouts: {', '.join(holders)}"
    return "" if front is None else "no plan of the front has these layouts"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A pinned tensor: its name, its number in the plan as a whole, and in its graph."""

    name: str
    pin: Pin
    value: int
    body: int
    local: int


def _tensors(account: Account, pins: Pins) -> list[_Tensor]:
    """The tensors that pins name: arguments, then what the program computes."""
    graph, bodies = account.plan.graph, account.program.bodies
    split = split_pins(graph, pins)
    found = []
    for pin in (*read_pins(graph, split.inputs), *split.results):
        local = (graph.outputs if pin.output else graph.inputs)[pin.position]
        found.append(_Tensor(pin.name, pin, bodies[0].values[local], 0, local))
    for one in split.inside:
        body = account.body_at(one.path)
        value = bodies[body].values[one.value]
        name = one.pin.name
        if name != account.value(value):
            name = f"{name} ({account.value(value)})"
        found.append(_Tensor(name, one.pin, value, body, one.value))
    return found


def _lying(account: Account, tensor: _Tensor) -> str:
    """How a tensor lies, and where it does not exist as such."""
    if tensor.pin.output:
        return account.show(account.plan.out_shardings[tensor.pin.position])
    lives = account.walk.ground.lives
    layout = account.show(account.walk.given[tensor.value])
    if tensor.value in lives.maker and lives.owns_memory(tensor.value):
        return layout
    return f"{layout}, inside a kernel or as a view: it is not materialised"


def _lies(other: Plan, plan: Plan, pins: Pins) -> bool:
    """Whether tensors of another plan lie as pinned. What is computed inside can be told only of
    plans of the same form."""
    split = split_pins(plan.graph, pins)
    if not all(
        (other.out_shardings if p.output else other.in_shardings)[p.position].show(other.mesh)
        == str(p)
        for p in (*read_pins(plan.graph, split.inputs), *split.results)
    ):
        return False
    if not split.inside:
        return True
    if not same_form(plan, other):
        return False
    account = Account(other, "why not")
    return all(
        account.show(account.walk.given[t.value]) == str(t.pin)
        for t in _tensors(account, pins)
        if not t.pin.output
    )


def _shapes(plan: Plan, pins: Sequence[Pin]) -> tuple[MeshShape, ...]:
    """The plan's own mesh, where it has all axes that are named; else others of the target.

    Raises TargetError where no mesh has them, and ExtractError where they do not divide a tensor.
    """
    assert plan.origin is not None
    axes = {a for p in pins for a in p.axes}
    if axes <= set(plan.mesh.names):
        return fitting(pins, (plan.mesh,))
    return fitting(pins, plan.origin.machine.mesh_shapes(_AXES, plan.mesh.devices))


def _searched(
    plan: Plan, pins: Pins, shapes: Sequence[MeshShape], settings: Settings
) -> tuple[Plan | None, bool]:
    """The fastest plan with those layouts, and whether its peak is no larger than the plan's; first
    within that peak, and where there is none, whatever its peak."""
    origin, graph = plan.origin, plan.graph
    assert origin is not None
    if split_pins(graph, pins).inside:  # a program of its own, whose constants are as they are
        graph = replace(graph, prepared=None)
    state: Mapping[str, str] = {
        graph.output_paths[j]: graph.input_paths[i] for j, i in origin.feedback
    }
    settings = replace(settings, recompute=0, overlap=origin.machine.overlaps)
    within: Mapping[str, float | str] = {PEAK_BYTES.name: float(plan.costs.peak_bytes)}
    for limits in (within, None):
        try:
            found = optimize(
                graph,
                origin.machine,
                limits=limits,
                books=_BOOKS,
                state=state,
                mesh_shapes=shapes,
                pins=pins,
                settings=settings,
            )
        except ExtractError as e:
            if e.where != "limits":
                raise
            continue
        best = min(found.plans, key=lambda p: (p.costs.seconds, p.costs.peak_bytes), default=None)
        if best is not None:
            return best, best.costs.peak_bytes <= plan.costs.peak_bytes
    return None, False


def _meanings(account: Account, tensors: Sequence[_Tensor]) -> Iterator[Meaning]:
    """What every cut that is asked for means to the operations that make the tensor, and to those
    that read it directly."""
    for tensor in tensors:
        graph = account.program.bodies[tensor.body].graph
        for dim, axes in enumerate(tensor.pin.dims):
            for k, op in enumerate(graph.operations) if axes else ():
                signature = account.signature(tensor.body, k)
                if signature is None:
                    continue
                if tensor.local in op.outputs:
                    means = _makes(signature, op.outputs.index(tensor.local), dim)
                elif tensor.local in op.inputs:
                    means = _means(signature, op.inputs.index(tensor.local), dim)
                else:
                    continue
                reader, source = account.called(tensor.body, k), account.line(tensor.body, k)
                yield Meaning(tensor.name, dim, axes or (), reader, source, means)


def _makes(signature: OperationSignature, result: int, dim: int) -> str:
    """What a cut of a dim of a result means to what makes it."""
    row = signature.outputs[result].matrix[dim]
    dims = [d for d, n in zip(signature.index, row, strict=True) if n]
    if len(dims) == 1 and dims[0].role in ("map", "scan"):
        read = [
            str(k)
            for k, operand in enumerate(signature.inputs)
            if any(r[signature.index.index(dims[0])] for r in operand.matrix)
        ]
        plural = "s" if len(read) > 1 else ""
        whole = f", and its operand{plural} {', '.join(read)} with it" if read else ""
        return f"makes it; its {dims[0].name} ({dims[0].size}) may be sharded{whole}"
    return "makes it, and cannot make a part of it along this dim: it is sharded afterwards"


def _means(signature: OperationSignature, operand: int, dim: int) -> str:
    """What a cut of a dim of an operand means: the index dim that it follows, and its role."""
    row = signature.inputs[operand].matrix[dim]
    dims = [(d, i) for i, (d, n) in enumerate(zip(signature.index, row, strict=True)) if n]
    if not dims:
        return "it reads all of this dim: an all-gather comes first"
    if len(dims) > 1:
        names = ", ".join(d.name for d, _ in dims)
        return f"it reads it along several index dims ({names}): the layout must fit all of them"
    one, i = dims[0]
    if one.role == "reduce":
        return f"its {one.name} ({one.size}) is summed over: partial {one.monoid}s, to be combined"
    if one.role == "join":
        return (
            f"its {one.name} ({one.size}) may be sharded: devices combine what their blocks come to"
        )
    if one.role == "whole":
        return (
            f"its {one.name} ({one.size}) cannot be sharded ({one.role}): an all-gather comes first"
        )
    cut = [k for out in signature.outputs for k, r in enumerate(out.matrix) if r[i]]
    along = f": what it makes is sharded along dim {cut[0]}" if cut else ""
    return f"its {one.name} ({one.size}) may be sharded{along}"
