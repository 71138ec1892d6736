"""What is in memory at a plan's peak, array by array, as recounted."""

from __future__ import annotations

from tapestry_egg.plans.peak import Peak, PeakPart
from tapestry_egg.plans.plan import Plan

from .certificate import walked
from .longest_path import line
from .recount import Walk
from .verdict import Certificate


def peak(plan: Plan) -> Peak:
    """What is in memory when most is.

    Raises ExtractError for a plan of which it is not told what machine it was made for.
    """
    return peak_of(*walked(plan, "the peak"))


def peak_of(walk: Walk, found: Certificate) -> Peak:
    """The same of a plan that has been gone through; the first moment of several."""
    profile = found.profile
    tick = max(range(len(profile)), key=lambda t: profile[t]) if profile else 0
    begins = [begin for _, begin, _ in found.step.runs] or [0.0]
    (at,) = walk.ground.streams.at(found.step, [begins[min(tick // 2, len(begins) - 1)]])
    parts = []
    for v, x in walk.lying():
        if not (x.begin <= tick < x.end and x.amount):
            continue
        body, local = walk.body_of[v], walk.local[v]
        graph = walk.program.bodies[body].graph
        maker = graph.producers().get(local, -1) if body or local not in graph.inputs else -1
        op = graph.operations[maker] if maker >= 0 else None
        entering = body == 0 and local in graph.inputs
        name = f"%{local}"
        if entering and graph.input_names:
            name = graph.input_names[graph.inputs.index(local)] or name
        parts.append(
            PeakPart(
                name=name,
                type=str(walk.program.types[v]),
                layout=x.layout.show(walk.mesh),
                kind="argument" if entering and x.role == "made" else x.role,
                bytes=x.amount,
                made_by=op.kernel if op else "",
                source=line(walk.program, body, maker),
            )
        )
    root = walk.program.instances[walk.schedule.units[min(tick // 2, len(begins) - 1)].root]
    running = f"the {root.port} port" if root.port else root.signature.kernel
    source = line(walk.program, root.body, root.operation)
    order = sorted(parts, key=lambda p: (-p.bytes, p.name))
    return Peak(max(profile, default=0.0), at, running, source, tuple(order))
