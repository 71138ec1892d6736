"""Omissions: what a search leaves out for another reason than that it is dominated, as notes.

Every bound of a front holds for what was searched. What was not is counted and noted once; where
nothing was left out, there is no note. The texts are in `extract/front/notes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tapestry_egg.extract.front.notes import INTERRUPTED, Note, note
from tapestry_egg.machine.objectives import Objective, objective
from tapestry_egg.metakernels import registry

from .census import OPAQUE, census_of

if TYPE_CHECKING:
    from tapestry_egg.extract.choices.unit_choices import UnitChoices
    from tapestry_egg.extract.engine.race import Race
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.graph.blockgraph import BlockGraph, Operation
    from tapestry_egg.graph.layout import MeshShape
    from tapestry_egg.machine.target import Target
    from tapestry_egg.rewrite.form import Form, Left
    from tapestry_egg.rewrite.recompute import Recomputing
    from tapestry_egg.schedule.flatten import FlatProgram
    from tapestry_egg.shard.strategies import Saturated

    from .state import Network

Notes = tuple[Note, ...]


def _counted(kind: str, count: int, **words: Any) -> Notes:
    """A note of so many things; none if there are none."""
    return (note(kind, count, **words),) if count else ()


def _some(names: Sequence[object]) -> str:
    """The first three of some names."""
    return ", ".join(map(str, names[:3])) + (", ..." if len(names) > 3 else "")


def of_meshes(left: Sequence[MeshShape]) -> Notes:
    """Mesh shapes of more axes than are searched."""
    axes = min((len(shape.sizes) for shape in left), default=1) - 1
    return _counted("mesh-axes", len(left), axes=axes)


def of_other_sizes(left: int) -> Notes:
    """Mesh shapes beside that of a plan for other sizes."""
    return _counted("other-size-meshes", left)


def of_long_programs(size: int, left: int) -> Notes:
    """Mesh shapes, of no more axes than others, for which a program is too long."""
    return _counted("long-program", left, operations=size)


def of_layouts(left: Sequence[str]) -> Notes:
    """Mesh shapes on which tensors have too many layouts."""
    return _counted("layouts", len(left), some=_some(left))


def of_parts(left: Sequence[int]) -> Notes:
    """Numbers of devices that do not divide the machine's."""
    return _counted("devices", len(left), some=_some(left))


def of_forms(found: Sequence[Form], searched: int) -> Notes:
    """Forms that the rules made of a program: of all `found`, so many are `searched`; and loops and
    branches that were left as they are written."""
    if not found:
        return ()
    left = found[0].left
    return (
        *_counted("forms", left.forms + len(found) - searched),
        *_counted("forms-views", left.views),
        *_counted("forms-unseen", int(left.unseen)),
        *_counted("bodies", left.regions),
        *_counted("forms-slight", left.slight),
        *_counted("equal-layers", left.repeated),
        *_counted("untried", left.untried),
        *_counted("softmax", left.softmaxes),
        *_counted("stacks-all", left.stacked),
        *_counted("stacks-slower", left.slower),
        *_counted("stacks-small", left.unstacked),
        *_counted("loops-long", left.loops),
        *_of_batches(left),
        *_counted("many-operands", left.wide),
    )


def _of_batches(left: Left) -> Notes:
    """Micro-batches, of which none, or not all numbers, are searched."""
    if left.whole:
        return (note("batch-whole", operation=left.whole),)
    if left.unsplit:
        return (note("batch-fits"),)
    return (
        *_counted("batch-counts", left.counts),
        *_counted("batch-counts-recomputed", left.twice),
        *_counted("batch-forms", left.again),
        *_counted("batch-dims", left.states),
    )


def of_search(found: Race, interrupted: bool) -> Notes:
    """A search that did not come to its end."""
    notes: Notes = (INTERRUPTED,) if interrupted else ()
    if found.late:
        notes += of_clock("the search", found.effort.seconds)
        if found.effort.patience < float("inf"):
            notes += (note("patience", seconds=f"{found.effort.patience:.4g}"),)
    return notes


def of_finer(left: Sequence[Network]) -> Notes:
    """Networks on meshes of more axes, of forms that gave nothing on those of fewer."""
    return _counted("finer-meshes", len(left), some=_some(left))


def of_networks(left: Sequence[Network]) -> Notes:
    """Networks for which there was no work left."""
    return _counted("work", len(left), names=", ".join(map(str, left)))


def of_clock(what: str, seconds: float) -> Notes:
    """What a limit of time ended: the search, or rules on the program or on layouts."""
    return (note("time-limit", what=what, seconds=f"{seconds:.4g}"),) if what else ()


def of_rules(given: Form) -> Notes:
    """Rules on the program that a budget of theirs ended: one of iterations, rows, or choice. If
    time did, that is noted where the limit of time is known."""
    return () if given.saturated or given.by_clock else (note("rules-budget"),)


def of_searched(networks: Sequence[Network]) -> Notes:
    """All that the networks lack which were searched."""
    choices = [n.choices for n in networks if n.choices is not None]
    problems = [n.problem for n in networks if n.problem is not None]
    return (
        *of_budgets([n.strategies for n in networks if n.strategies is not None]),
        *of_rows(choices),
        *of_inner_copies(choices),
        *of_endings(problems),
        *of_copies(problems),
        *of_room(problems, ()),
    )


def of_budgets(strategies: Sequence[Saturated]) -> Notes:
    """The same of rules on layouts."""
    ended = sum(not s.saturated and not s.by_clock for s in strategies)
    return _counted("layout-rules", ended, networks=len(strategies))


def of_recomputation(made: Recomputing, others: int) -> Notes:
    """Forms that recompute values, made of one form; there are so many others of which none were
    made."""
    from tapestry_egg.rewrite.recompute import LEAST_SAVED

    where = [
        *([f"{made.prices} prices of memory"] if made.prices else []),
        *([f"1 of {made.cuts + 1} divisions into segments"] if made.cuts else []),
    ]
    if where and others:
        where.append(f"1 of {others + 1} forms")
    return (
        *_counted("recompute", made.left),
        *_counted("recompute-where", int(bool(where)), where=", ".join(where)),
        *_counted("recompute-slight", int(made.slight), share=f"{100 * LEAST_SAVED:.0f} %"),
        *_counted("recompute-library", made.library),
    )


def of_second_instances(left: int) -> Notes:
    """Values that several read, and of which some readers may have one recomputed."""
    return _counted("recompute-readers", left)


def of_objectives(objectives: Sequence[str | Objective]) -> Notes:
    """Objectives that nothing was searched for: functions of the user's own."""
    return tuple(
        note("own-objective", name=o.name) for o in map(objective, objectives) if o.finder == "plan"
    )


def of_overlap(machine: Target) -> Notes:
    """A machine whose collectives run beside kernels, from one place each."""
    return () if machine.slowdown is None else (note("overlap"),)


def of_opaque(graph: BlockGraph) -> Notes:
    """Operations that nothing is known of, such as kernels of the user's own."""
    found = list(_opaque(graph))
    names = dict.fromkeys(
        f"{op.kernel} at {op.source}" if op.source.file else op.kernel for op in found
    )
    return _counted("opaque", len(found), names=_some(list(names)))


def _opaque(graph: BlockGraph) -> Iterator[Operation]:
    for op in graph.operations:
        known = op.kernel in registry.templates() or registry.calls_python(op.kernel)
        if not (op.regions or known):
            yield op
        for region in op.regions:
            yield from _opaque(region)


#: Operations of a smaller share of a program's bytes are not worth a note.
_LEAST_BYTES = 0.01


def of_unsplit(program: FlatProgram) -> Notes:
    """Operations with a template of which no dim can be sharded, and that move a share of the bytes
    worth telling."""
    found = census_of(program)
    every = found.work().bytes
    large = [c for c in found.whole if c.role != OPAQUE and c.work.bytes > _LEAST_BYTES * every]
    names = [
        f"{c.operation.kernel} at {c.operation.source}: {c.reason}"
        if c.operation.source.file
        else f"{c.operation.kernel}: {c.reason}"
        for c in large
    ]
    share = sum(c.work.bytes for c in large) / every if every else 0.0
    count = sum(c.work.operations for c in large)
    return _counted("unsplit", count, names=_some(names), share=f"{100 * share:.0f} %")


def of_rows(choices: Sequence[UnitChoices]) -> Notes:
    """Kernels, and values at a boundary, that have more rows than are searched: strategies, or
    layouts."""
    from tapestry_egg.extract.choices.joiner import ROWS

    cut = [s for s in choices if any(s.truncated)]
    kernels, ports = (sum(s.truncated[k] for s in cut) for k in (0, 1))
    what = [
        *([f"{kernels} kernel{'s' * (kernels > 1)}"] if kernels else []),
        *([f"{ports} boundary value{'s' * (ports > 1)}"] if ports else []),
    ]
    meshes = ", ".join(dict.fromkeys(str(s.mesh) for s in cut))
    return _counted(
        "strategies", kernels + ports, what=" and ".join(what), meshes=meshes, most=ROWS
    )


def of_inner_copies(choices: Sequence[UnitChoices]) -> Notes:
    """Values inside kernels that are not combined or sent there: not together with another one, or
    not at all, if every reader computes the kernel again."""
    return _counted("kernel-collectives", max((s.uncombined for s in choices), default=0))


def of_endings(problems: Sequence[PlanProblem]) -> Notes:
    """Copies that several readers share, and that are dropped after one of them: of the problem in
    which most values have fewer such readers than could be."""
    return _counted("shared-until", max((p.fewer_endings for p in problems), default=0))


def of_copies(problems: Sequence[PlanProblem]) -> Notes:
    """Copies that no readers share: of the problem with most values that have some."""
    return _counted("shared-copies", max((p.fewer_copies for p in problems), default=0))


def of_room(problems: Sequence[PlanProblem], left: Sequence[str]) -> Notes:
    """Values of which no copies are shared, and networks that were `left` out, for what their
    tables would take of memory."""
    return (
        *_counted("shared-tables", max((p.spared for p in problems), default=0)),
        *_counted("tables", len(left), some=_some(left)),
    )
