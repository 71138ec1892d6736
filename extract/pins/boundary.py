"""The program's boundary: inputs and outputs lie as the user fixes them.

Of the rows of an input or an output those stay that give a pinned layout, and layouts that the axes
of a named mesh express.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.choices.joiner import UnitRows
from tapestry_egg.extract.choices.unit_choices import UnitChoices
from tapestry_egg.graph.layout import Layout
from tapestry_egg.machine.mesh_contract import MeshContract
from tapestry_egg.schedule.schedules import Schedule

from .pins import Pin

Allows = Callable[[Layout], bool]


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the user fixes: layouts of inputs and outputs, and the mesh whose axes all that crosses
    the boundary is laid out by (None: any mesh), unless that is not `bounded`."""

    pins: tuple[Pin, ...] = ()
    contract: MeshContract | None = None
    bounded: bool = True


def restrict(choices: UnitChoices, fixed: Fixed) -> UnitChoices:
    """The choices with only those rows of the inputs and outputs that give pinned layouts, and
    layouts that the axes of a named mesh express.

    An input that an output feeds back into pins the output too: one identity makes both.
    Raises ExtractError where the rules derive no such row.
    """
    rows = list(choices.rows)
    if fixed.contract is not None and fixed.bounded:
        contract, mesh = fixed.contract, choices.mesh

        def expressible(layout: Layout) -> bool:
            return contract.express(layout, mesh) is not None

        for u, port in _ports(choices.schedule):
            rows[u] = _allowed(rows[u], port, expressible)
    for p in fixed.pins:
        if 0 in p.shape:  # what has no elements lies nowhere: it is whole on every device
            continue
        u = (_output_unit if p.output else _input_unit)(choices.schedule, p.position)
        wanted = p.wanted(choices.mesh, fixed.contract)
        port = choices.schedule.program.instances[choices.schedule.units[u].root].port
        if wanted is not None:
            rows[u] = _allowed(rows[u], port, wanted.holds)
        if wanted is None or not len(rows[u]):
            raise ExtractError(
                f"the rules derive no way for {p.name or 'the output'} to "
                f"{'leave' if p.output else 'enter'} as {p} on {choices.mesh}",
                where=p.where,
                hint="Pin another layout, or bring back the rule that was removed.",
            )
    return replace(choices, rows=tuple(rows))


def _ports(schedule: Schedule) -> list[tuple[int, str]]:
    """The units at the program's boundary: unit, its port."""
    roots = [schedule.program.instances[u.root] for u in schedule.units]
    return [(u, i.port) for u, i in enumerate(roots) if i.port in ("input", "output", "state")]


def _input_unit(schedule: Schedule, position: int) -> int:
    body = schedule.program.bodies[0]
    return schedule.producer[body.values[body.graph.inputs[position]]]


def _output_unit(schedule: Schedule, position: int) -> int:
    """The unit by which an output leaves: the state port where it feeds back."""
    program = schedule.program
    if position in program.feedback:
        return _input_unit(schedule, program.feedback[position])
    leaving = [j for j in range(len(program.bodies[0].graph.outputs)) if j not in program.feedback]
    ports = sorted((schedule.units[u].root, u) for u, port in _ports(schedule) if port == "output")
    return ports[leaving.index(position)][1]


def _allowed(rows: UnitRows, port: str, allows: Allows) -> UnitRows:
    """The rows of a port whose layout is allowed; a state's enters and leaves in one layout."""
    layouts: Sequence[tuple[Layout, ...]] = rows.needs if port == "output" else rows.gives
    which = np.array([r for r, own in enumerate(layouts) if allows(own[0])], dtype=np.int64)
    return UnitRows(
        rows.choice[which],
        tuple(rows.needs[r] for r in which),
        tuple(rows.gives[r] for r in which),
        rows.seconds[which],
        rows.joules[which],
        rows.flops[which],
        rows.scratch[which],
        rows.parts[which],
        rows.wire[which],
    )
