"""Omissions: what a search leaves out for another reason than that it is dominated, in words.

Every bound of a front holds for what was searched. What was not is counted, and told once; where
nothing was left out, nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import CALLS

if TYPE_CHECKING:
    from tapestry_egg.extract.problem.unit_choices import UnitChoices
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.rewrite.forms import Form

#: Axes of the largest meshes that are counted.
_MOST_AXES = 6


def of_meshes(machine: Target, most_axes: int) -> tuple[str, ...]:
    """What is said of meshes of more axes than are searched."""
    every = machine.mesh_shapes(_MOST_AXES)
    left = sum(len(shape.sizes) > most_axes for shape in every)
    what = f"of more than {_count(most_axes, 'axis', 'axes')}"
    return _told(left, f"mesh shape {what} was", f"mesh shapes {what} were", "not searched")


def of_forms(found: Sequence[Form], searched: int) -> tuple[str, ...]:
    """What is said of forms that the rules made of a program: of all `found`, so many are
    `searched`; and of its loops and branches that were left as they are written."""
    if not found:
        return ()
    left = found[0].others + len(found) - searched
    return (
        *_told(
            left, "more form of the program was", "more forms of the program were", "not searched"
        ),
        *_told(
            found[0].regions,
            "body of a loop or branch, which takes next to no time, was",
            "bodies of loops or branches, which take next to no time, were",
            "left as written",
        ),
    )


def of_recomputation(found: Sequence[Form]) -> tuple[str, ...]:
    """What is said of forms that compute values twice."""
    what = "that computes values twice was", "that compute values twice were"
    left = found[0].others if found else 0
    return _told(left, f"more form {what[0]}", f"more forms {what[1]}", "not searched")


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
        if not op.regions and op.kernel not in registry.templates() and op.kernel not in CALLS:
            yield op.kernel
        for region in op.regions:
            yield from _opaque(region)


def of_rows(snapshots: Sequence[UnitChoices]) -> tuple[str, ...]:
    """What is said of kernels that can be run in more ways than are searched."""
    from tapestry_egg.extract.problem.joiner import ROWS

    cut = [s for s in snapshots if s.truncated]
    if not cut:
        return ()
    meshes = ", ".join(dict.fromkeys(str(s.mesh) for s in cut))
    kernels = _count(sum(s.truncated for s in cut), "kernel", "kernels")
    return (f"of {kernels} on {meshes}, no more than {ROWS} ways to run each were searched",)


def _told(count: int, one: str, many: str, end: str) -> tuple[str, ...]:
    return (f"{_count(count, one, many)} {end}",) if count else ()


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
