"""Omissions: what a search leaves out for another reason than that it is dominated, in words.

Every bound of a front holds for what was searched. What was not is counted, and told once; where
nothing was left out, nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tapestry_egg.machine.objectives import Objective, objective
from tapestry_egg.metakernels import registry

if TYPE_CHECKING:
    from tapestry_egg.extract.choices.unit_choices import UnitChoices
    from tapestry_egg.extract.engine.race import Race
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.graph.layout import MeshShape
    from tapestry_egg.machine.target import Target
    from tapestry_egg.rewrite.form import Form, Left
    from tapestry_egg.rewrite.recompute import Recomputing
    from tapestry_egg.shard.strategies import Saturated

    from .state import Network


def of_meshes(left: Sequence[MeshShape]) -> tuple[str, ...]:
    """What is said of mesh shapes of more axes than are searched."""
    if not left:
        return ()
    most = min(len(shape.sizes) for shape in left) - 1
    what = f"of more than {_count(most, 'axis', 'axes')}"
    return _told(len(left), f"mesh shape {what} was", f"mesh shapes {what} were", "not searched")


def of_long_programs(size: int, left: int) -> tuple[str, ...]:
    """What is said of mesh shapes, no more than others in axes, for which a program is too long."""
    if not left:
        return ()
    return (
        f"{size} operations: {_count(left, 'mesh shape', 'mesh shapes')} of as few axes as others "
        f"{'was' if left == 1 else 'were'} not searched",
    )


def of_layouts(left: Sequence[str]) -> tuple[str, ...]:
    """What is said of mesh shapes on which tensors have too many layouts."""
    if not left:
        return ()
    some = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
    was = "was" if len(left) == 1 else "were"
    return (
        f"{_count(len(left), 'mesh shape', 'mesh shapes')} ({some}) {was} not searched: tables of "
        "copies between all layouts there would be too large",
    )


def of_parts(left: Sequence[int]) -> tuple[str, ...]:
    """What is said of numbers of devices that do not divide the machine's."""
    if not left:
        return ()
    some = ", ".join(map(str, left[:3])) + (", ..." if len(left) > 3 else "")
    what = "of devices that the machine's is no multiple of"
    return (
        f"{_count(len(left), 'number', 'numbers')} {what} ({some}) "
        f"{'was' if len(left) == 1 else 'were'} not searched",
    )


def of_forms(found: Sequence[Form], searched: int) -> tuple[str, ...]:
    """What is said of forms that the rules made of a program: of all `found`, so many are
    `searched`; and of its loops and branches that were left as they are written."""
    if not found:
        return ()
    left = found[0].left
    return (
        *_told(
            left.forms + len(found) - searched,
            "more form of the program was",
            "more forms of the program were",
            "not searched",
        ),
        *_told(
            left.views,
            "form of the program that differs only in views, or in which operand is first, was",
            "forms of the program that differ only in views, or in which operand is first, were",
            "not searched",
        ),
        *(("of the forms that the rules hold, not all were looked at",) if left.unseen else ()),
        *_told(
            left.regions,
            "body of a loop or branch, which takes next to no time, was",
            "bodies of loops or branches, which take next to no time, were",
            "left as written",
        ),
        *_told(
            left.slight,
            "form of the program that saves next to nothing on one device was",
            "forms of the program that save next to nothing on one device were",
            "not searched",
        ),
        *_told(
            left.repeated,
            "operation of equal layers was",
            "operations of equal layers were",
            "rewritten like that of one layer, and nothing across the layers' edges",
        ),
        *_told(
            left.untried,
            "kind of change to the program that looked worth a trial was",
            "kinds of change to the program that looked worth a trial were",
            "not tried",
        ),
        *_of_softmaxes(left.softmaxes),
        *_of_batches(left),
        *_told(
            left.wide,
            "operation of more operands than rules see was",
            "operations of more operands than rules see were",
            "left as written",
        ),
    )


def _of_softmaxes(ended: int) -> tuple[str, ...]:
    """What is said of softmaxes of which not all was read: attention may be among them."""
    what = f"of {_count(ended, 'softmax', 'softmaxes')} not all was read that goes into and out of"
    these = (
        "it: it was left as written, or has its"
        if ended == 1
        else ("them: they were left as written, or have their")
    )
    return (f"{what} {these} mask in memory",) if ended else ()


def _of_batches(left: Left) -> tuple[str, ...]:
    """What is said of micro-batches, of which none, or not all numbers, are searched."""
    if left.whole:
        return (f"no micro-batches were searched: {left.whole} needs the whole batch",)
    if left.unsplit:
        return (
            "micro-batches were not looked for: the devices together have room for the whole batch "
            "(a lower limit on peak_bytes, or Settings(micro_batches=...), asks for them)",
        )
    one, many = "other number of micro-batches was", "other numbers of micro-batches were"
    dim, dims = "dim of the program's state was", "dims of the program's state were"
    return (
        *_told(left.counts, one, many, "not searched"),
        *_told(
            left.twice,
            f"{one[:-4]} of a program that computes values twice was",
            f"{many[:-5]} of programs that compute values twice were",
            "not searched",
        ),
        *_told(
            left.again,
            "more form that computes values twice was",
            "more forms that compute values twice were",
            "not searched in micro-batches",
        ),
        *_told(left.states, dim, dims, "not tried as its batch"),
    )


def of_search(found: Race, interrupted: bool) -> tuple[str, ...]:
    """What is said of a search that did not come to its end."""
    from tapestry_egg.parallel.executors import INTERRUPTED

    notes: tuple[str, ...] = (INTERRUPTED,) if interrupted else ()
    if found.late:
        effort = found.effort
        ends = f"the time limit of {effort.seconds:.4g} s"
        if effort.patience < float("inf"):
            ends += f", or {effort.patience:.4g} s without gain,"
        notes += (f"{ends} ended the search; another run may give another front",)
    return notes


def of_networks(left: Sequence[Network]) -> tuple[str, ...]:
    """What is said of networks for which there was no work left."""
    names = [str(n) for n in left]
    return (f"there was no work left for {', '.join(names)}",) if names else ()


def of_clock(what: str, seconds: float) -> tuple[str, ...]:
    """What is said of rules that a limit of time ended, on the program or on layouts."""
    if not what:
        return ()
    end = "another run may give another front"
    return (f"the time limit of {seconds:.4g} s ended the rules on {what}; {end}",)


def of_rules(given: Form) -> tuple[str, ...]:
    """What is said of rules on the program that a budget of theirs ended before they had nothing
    more to say: one of iterations, rows, or choice. That time did is told where the limit of time
    is known."""
    if given.saturated or given.by_clock:
        return ()
    return ("a budget ended the rules on the program before they had nothing more to say",)


def of_searched(networks: Sequence[Network]) -> tuple[str, ...]:
    """What is said of all that the networks lack which were searched."""
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


def of_budgets(strategies: Sequence[Saturated]) -> tuple[str, ...]:
    """The same of rules on layouts."""
    ended = sum(not s.saturated and not s.by_clock for s in strategies)
    if not ended:
        return ()
    problems = "problem" if len(strategies) == 1 else "problems"
    return (f"a budget ended the rules on layouts of {ended} of {len(strategies)} {problems}",)


def of_recomputation(made: Recomputing, others: int) -> tuple[str, ...]:
    """What is said of forms that compute values twice, made of one form; there are so many others
    of which none were made."""
    from tapestry_egg.rewrite.recompute import LEAST_SAVED

    what = "that computes values twice was", "that compute values twice were"
    where = [
        *([f"at {made.prices} prices of memory"] if made.prices else []),
        *([f"in 1 of {made.cuts + 1} divisions into segments"] if made.cuts else []),
    ]
    if where and others:
        where.append(f"for 1 of {others + 1} forms")
    return (
        *_told(made.left, f"more form {what[0]}", f"more forms {what[1]}", "not searched"),
        *((f"values to compute twice were looked for {', '.join(where)}",) if where else ()),
        *(
            (
                "values to compute twice were not looked for: on one device all that are kept past "
                f"the peak are no more than {LEAST_SAVED:.0%} of it",
            )
            if made.slight
            else ()
        ),
        *_told(
            made.library,
            "kernel that a library has was",
            "kernels that a library has were",
            "not tried as computed twice",
        ),
    )


def of_second_instances(left: int) -> tuple[str, ...]:
    """What is said of values that several read, and of which readers may have one made again."""
    return _told(
        left,
        "value that several read was",
        "values that several read were",
        "not tried as made again for some of their readers alone",
    )


def of_objectives(objectives: Sequence[str | Objective]) -> tuple[str, ...]:
    """What is said of objectives that nothing was searched for: functions of the user's own."""
    return tuple(
        f"{o.name} is compared among the plans that were found for their seconds, peak and joules; "
        "none was searched for on its behalf, and no bound speaks of it"
        for o in map(objective, objectives)
        if o.finder == "plan"
    )


def of_overlap(machine: Target) -> tuple[str, ...]:
    """What is said of a machine whose collectives run beside kernels, of ways to do so that plans
    do not choose among."""
    if machine.slowdown is None:
        return ()
    return (
        "collectives run beside kernels from one place each (sums from where they are made, others "
        "one large kernel before their reader): other places were not searched",
    )


def of_opaque(graph: BlockGraph) -> tuple[str, ...]:
    """What is said of operations that nothing is known of, such as kernels of the user's own."""
    found = list(_opaque(graph))
    if not found:
        return ()
    names = ", ".join(sorted(set(found)))
    many = "runs" if len(found) == 1 else "run"
    return (
        f"{_count(len(found), 'operation', 'operations')} without a template ({names}) {many} "
        f"whole on every device, priced by the bytes of operands and results alone",
    )


def _opaque(graph: BlockGraph) -> Iterator[str]:
    for op in graph.operations:
        known = op.kernel in registry.templates() or registry.calls_python(op.kernel)
        if not (op.regions or known):
            yield op.kernel
        for region in op.regions:
            yield from _opaque(region)


def of_rows(choices: Sequence[UnitChoices]) -> tuple[str, ...]:
    """What is said of kernels, and of values at a boundary, that have more rows than are searched:
    ways to run them, or layouts."""
    from tapestry_egg.extract.choices.joiner import ROWS

    cut = [s for s in choices if any(s.truncated)]
    if not cut:
        return ()
    meshes = ", ".join(dict.fromkeys(str(s.mesh) for s in cut))
    kernels, ports = (sum(s.truncated[k] for s in cut) for k in (0, 1))
    what = [
        *([_count(kernels, "kernel", "kernels")] if kernels else []),
        *([_count(ports, "value at a boundary", "values at boundaries")] if ports else []),
    ]
    return (f"of {' and '.join(what)} on {meshes}, no more than {ROWS} ways each were searched",)


def of_inner_copies(choices: Sequence[UnitChoices]) -> tuple[str, ...]:
    """What is said of values inside kernels that are not combined or sent there: not together with
    another one, or not at all, as every reader computes the kernel again."""
    most = max((s.uncombined for s in choices), default=0)
    return _told(
        most,
        "value inside a kernel, together with another or in one that its readers make again, was",
        "values inside kernels, together with others or in some that readers make again, were",
        "not tried as what one collective combines or sends there",
    )


def of_endings(problems: Sequence[PlanProblem]) -> tuple[str, ...]:
    """What is said of copies that several readers share, and that are dropped after one of them: of
    the problem in which most values have fewer such readers than could be."""
    most = max((p.fewer_endings for p in problems), default=0)
    if not most:
        return ()
    return (
        f"of {_count(most, 'value', 'values')}, small or of many readers, not every reader was "
        f"tried as the last of a copy that they share",
    )


def of_copies(problems: Sequence[PlanProblem]) -> tuple[str, ...]:
    """What is said of copies that no readers share: of the problem with most values that have
    some."""
    most = max((p.fewer_copies for p in problems), default=0)
    if not most:
        return ()
    return (
        f"of {_count(most, 'value', 'values')} no copies were tried as shared ones but those "
        "that gathers and sums make, or one collective of what a kernel made; none was made early "
        "for one reader",
    )


def of_room(problems: Sequence[PlanProblem], left: Sequence[str]) -> tuple[str, ...]:
    """What is said of values of which no copies are shared, and of networks that were `left` out,
    for what their tables would take of memory."""
    most = max((p.spared for p in problems), default=0)
    some = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
    entries = "tables of more entries than there is room for (Settings.entries)"
    return (
        *(
            (
                f"of {_count(most, 'value', 'values')} no copies were tried as shared ones: they "
                f"make {entries}",
            )
            if most
            else ()
        ),
        *(
            (f"{_count(len(left), 'network', 'networks')} ({some}) not searched: {entries}",)
            if left
            else ()
        ),
    )


def _told(count: int, one: str, many: str, end: str) -> tuple[str, ...]:
    return (f"{_count(count, one, many)} {end}",) if count else ()


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
