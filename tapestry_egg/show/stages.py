"""What the passes of the pipeline make, in words: a few lines for each entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.merge import MeshResult
from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.unit_choices import UnitChoices
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.printable import printable
from tapestry_egg.quantities import TIME
from tapestry_egg.rewrite.forms import Form
from tapestry_egg.schedule.kernels import Schedule
from tapestry_egg.shard.encode import Encoding
from tapestry_egg.shard.strategies import Saturated

from .text import graph_text


def stage_text(name: str, value: Any) -> str:
    """The value of a stage, such as `forms` or `strategies`, as text."""
    return printable("\n".join(_LINES[name](value)))


def _shapes(shapes: Sequence[MeshShape]) -> Iterator[str]:
    yield f"{len(shapes)} mesh shapes: {', '.join(map(str, shapes))}"


def _forms(forms: Sequence[Form]) -> Iterator[str]:
    for k, form in enumerate(forms):
        made = ", ".join(form.rules) or "as given"
        yield f"form {k + 1} ({made}): {graph_text(form.graph)}"


def _schedules(schedules: Sequence[Schedule]) -> Iterator[str]:
    for k, schedule in enumerate(schedules):
        yield f"form {k + 1}: {len(schedule.units)} units"
        yield from map(unit_line, [schedule] * len(schedule.units), range(len(schedule.units)))


def unit_line(schedule: Schedule, u: int) -> str:
    """A unit in a line: `u7 dot_general + max: reads 3 7, makes 9`."""
    unit = schedule.units[u]
    instances = [schedule.program.instances[m] for m in unit.members]
    kernels = " + ".join(i.port or i.signature.kernel for i in instances)
    reads = " ".join(str(v) for _, _, v in unit.reads)
    makes = " ".join(f"{v} {schedule.program.types[v]}" for v in unit.outputs)
    ends = [f"reads {reads}" if reads else "", f"makes {makes}" if makes else ""]
    return f"  u{u} {kernels}: {', '.join(filter(None, ends))}"


def _encodings(encodings: Sequence[Encoding]) -> Iterator[str]:
    for e in encodings:
        count = sum(map(len, e.facts.values()))
        kernels = Counter(s.kernel for s in e.signatures)
        yield f"{e.algebra.mesh}: {len(e.program.instances)} operations and ports, " + (
            f"{len(e.signatures)} signatures, {len(e.algebra.layouts)} layouts, {count} facts"
        )
        yield "  " + ", ".join(f"{n}× {kernel}" for kernel, n in sorted(kernels.items()))


def _strategies(found: Sequence[Saturated]) -> Iterator[str]:
    for s in found:
        end = "to the fixpoint" if s.saturated else "to a budget"
        yield f"{s.encoding.algebra.mesh}: {s.rows} rows in {s.iterations} iterations, {end}"
        for signature, rows in zip(s.encoding.signatures, s.strategies, strict=True):
            types = ", ".join(str(t) for t in signature.input_types)
            yield f"  {signature.kernel}({types}): {len(rows)} strategies"


def _choices(every: Sequence[UnitChoices]) -> Iterator[str]:
    for c in every:
        rows = sum(map(len, c.rows))
        cut = f", rows left out of {sum(c.truncated)} units" if any(c.truncated) else ""
        yield f"{c.mesh}: {rows} rows for {len(c.rows)} units{cut}"


def _problems(problems: Sequence[PlanProblem]) -> Iterator[str]:
    for p in problems:
        rows = sum(map(len, p.problem.variables))
        yield f"{p.choices.mesh}: {len(p.problem.variables)} variables of {rows} rows, " + (
            f"{len(p.problem.pairs)} pairs, {p.problem.times} moments"
        )


def _results(results: Sequence[MeshResult]) -> Iterator[str]:
    for r in results:
        best = min(r.archive.candidates, key=lambda c: c.costs, default=None)
        words = "nothing" if best is None else f"from {TIME.format(best.seconds)}"
        yield f"{r.assembled.choices.mesh}: {len(r.archive.candidates)} labellings {words}, " + (
            f"{len(r.archive.cuts)} bounds"
        )


def _front(front: Front) -> Iterator[str]:
    yield str(front)


_LINES: dict[str, Callable[[Any], Iterator[str]]] = {
    "shapes": _shapes,
    "forms": _forms,
    "schedules": _schedules,
    "encodings": _encodings,
    "strategies": _strategies,
    "choices": _choices,
    "free": _choices,
    "problems": _problems,
    "results": _results,
    "front": _front,
}
