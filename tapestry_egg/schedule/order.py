"""Where in a program a unit reads a value: the order in which kept copies serve readers."""

from __future__ import annotations

from .schedules import Schedule


def read_position(schedule: Schedule, unit: int, value: int) -> int:
    """Index, in the graph of the value's body, of the last operation of a unit that reads it.

    What a region reads, its operation reads; what leaves the body is read after all operations.
    """
    program, body = schedule.program, schedule.program.body_of[value]
    position = -1
    for i, _, v in schedule.units[unit].reads:
        if v != value:
            continue
        instance = program.instances[i]
        if instance.operation >= 0 and instance.body == body:
            position = max(position, instance.operation)
            continue
        position = max(
            position,
            next(
                (
                    operation
                    for (b, operation), (start, stop) in program.spans.items()
                    if b == body and start <= i < stop
                ),
                len(program.bodies[body].graph.operations),
            ),
        )
    return position
