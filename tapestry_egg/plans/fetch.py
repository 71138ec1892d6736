"""Which copy of a value every reader takes: the one reading of a `BodyPlan` that all share.

Lowering and the list of planned collectives both walk what `fetches` returns, so they cannot
disagree about what is copied when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import Operation
from tapestry_egg.graph.layout import Layout

from .collectives import after
from .plan import BodyPlan, Change


@dataclass(frozen=True, slots=True)
class Fetch:
    """How one reader obtains one operand.

    origin      the local array is
    `produced`  the value as it was produced
    `kept`      the copy that an earlier reader made and kept
    `own`       the copy that this reader, or another operation of its kernel, already made
    `copy`      made here from the produced value, through `steps`

    `keep` says that the copy made here serves later readers. `again` says that an earlier copy
    already moved the same bytes, so that a compiler must be kept from merging the two. `time` says
    the how manieth copy of the value to this layout the reader takes, from 0 on. `merged` numbers
    the collective, from 1 on, that makes the copy with others (`BodyPlan.merged`).
    """

    value: int
    have: Layout
    need: Layout
    origin: Literal["produced", "kept", "own", "copy"]
    steps: tuple[Change, ...] = ()
    keep: bool = False
    again: bool = False
    time: int = 0
    merged: int = 0

    @property
    def key(self) -> tuple[int, Layout, int]:
        """What tells the copy that the reader takes from all others of the body."""
        return self.value, self.need, self.time

    @property
    def moves(self) -> bool:
        """Whether making the copy here takes communication."""
        return any(_moves(step) for step in self.steps)


def produced_layouts(body: BodyPlan) -> dict[int, Layout]:
    """The layout in which every value of the body's graph enters or is produced.

    Raises PlanError where the plan does not fit its graph.
    """
    graph = body.graph
    for what, given, wanted in (
        ("input layouts", body.inputs, graph.inputs),
        ("output layouts", body.outputs, graph.outputs),
        ("strategies", body.strategies, graph.operations),
    ):
        if len(given) != len(wanted):
            raise PlanError(f"{len(given)} {what} for {len(wanted)}", where=graph.name)
    layouts = dict(zip(graph.inputs, body.inputs, strict=True))
    for v in graph.constants:
        layouts[v] = Layout.replicated(graph.values[v].rank)
    for k, (op, strategy) in enumerate(zip(graph.operations, body.strategies, strict=True)):
        if len(strategy.gives) != len(op.outputs) or len(strategy.needs) != len(op.inputs):
            raise PlanError("the strategy does not fit the operation", where=place(body, k))
        layouts.update(zip(op.outputs, strategy.gives, strict=True))
    return layouts


def fetches(body: BodyPlan) -> tuple[tuple[Fetch, ...], ...]:
    """Per operation of the body, how each operand is obtained; last, the body's outputs.

    Raises PlanError where a copy is needed that the plan has no steps for, or whose steps do not
    lead where they should.
    """
    have = produced_layouts(body)
    operations = body.graph.operations
    made: dict[int, int] = {}  # values whose kept copy exists, the how manieth it is
    times: dict[tuple[int, Layout], int] = {}  # copies of values to layouts so far
    moved: set[tuple[int, tuple[Change, ...]]] = set()
    merged = {key: n for n, members in enumerate(body.merged, 1) for key in members}
    produced: dict[int, Fetch] = {}  # values that are read as they were produced
    shared: dict[int, dict[tuple[int, Layout], int]] = {}  # kernel -> copies it made, and which
    readers: list[tuple[Fetch, ...]] = []
    for k in range(len(operations) + 1):
        if k < len(operations):
            wanted = list(zip(operations[k].inputs, body.strategies[k].needs, strict=True))
        else:
            wanted = list(zip(body.graph.outputs, body.outputs, strict=True))
        found: list[Fetch] = []
        group = group_of(body, k)
        own: dict[tuple[int, Layout], int] = {} if group < 0 else shared.setdefault(group, {})
        for v, need in wanted:
            if need == have[v]:
                if v not in produced:
                    produced[v] = Fetch(v, need, need, "produced")
                found.append(produced[v])
                continue
            kept = body.kept.get(v)
            keep = kept is not None and kept.layout == need and k <= kept.until
            if keep and v in made:
                found.append(Fetch(v, have[v], need, "kept", time=made[v]))
            elif (v, need) in own:
                found.append(Fetch(v, have[v], need, "own", time=own[v, need]))
            else:
                steps = _steps(body, v, have[v], need, k)
                moves = [(v, steps[:n]) for n, s in enumerate(steps, 1) if _moves(s)]
                again = bool(moves) and moves[0] in moved
                time = times[v, need] = times.get((v, need), -1) + 1
                number = merged.get((v, need, time), 0)
                found.append(Fetch(v, have[v], need, "copy", steps, keep, again, time, number))
                own[v, need] = time
                moved.update(moves)
                if keep:
                    made[v] = time
        readers.append(tuple(found))
    return tuple(readers)


def group_of(body: BodyPlan, k: int) -> int:
    """The unit that reader k of a body runs in; -1 where it is on its own."""
    return body.groups[k] if k < len(body.groups) else -1


def place(body: BodyPlan, k: int) -> str:
    """Where reader k of a body is, for messages: the operation and its line, or the outputs."""
    if k >= len(body.graph.operations):
        return f"the outputs of {body.graph.name}"
    op: Operation = body.graph.operations[k]
    return f"operation {k} ({op.kernel}, {op.source}) of {body.graph.name}"


def _moves(step: Change) -> bool:
    return step.kind not in ("slice", "to_partial")


def _steps(body: BodyPlan, v: int, have: Layout, need: Layout, k: int) -> tuple[Change, ...]:
    steps = body.copies.get((v, have, need))
    if steps is None:
        raise PlanError(
            f"value {v} ({body.graph.values[v]}) is in {have} and needed in {need}, "
            "and the plan has no steps between them",
            where=place(body, k),
        )
    layout = have
    for step in steps:
        layout = after(step, layout, place(body, k))
    if layout != need:
        raise PlanError(
            f"the steps for value {v} lead from {have} to {layout}, not to {need}",
            where=place(body, k),
        )
    return steps
