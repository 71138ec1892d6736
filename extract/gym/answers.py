"""Answers to the files of the extractor's command: what is printed of each, and what is written.

A file's answer is plain data, so that files and seeds can be answered by workers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tapestry_egg.errors import TapestryError
from tapestry_egg.extract.gym.choices.choices import Choice, ChoiceProblem, Extraction, Number
from tapestry_egg.extract.gym.choices.front import ChoiceFront
from tapestry_egg.extract.gym.choices.standing import Standing
from tapestry_egg.files import problem_file
from tapestry_egg.parallel.executors import INTERRUPTED

from . import formats
from .choice_front import choice_front
from .methods import extract

if TYPE_CHECKING:
    from .problem_front import ProblemFront


# A file that takes long to read still gets so many seconds, if as many are asked for.
_LEAST = 1.0


@dataclass(frozen=True)
class Asked:
    """What the command asks of every file: how hard to work, and what to give; `files`: texts to
    write are wanted."""

    seconds: float = 60.0
    seed: int = 0
    method: str = "auto"
    front: bool = False
    json: bool = False
    progress: bool = False
    gap: float = 0.0
    patience: float = float("inf")
    files: bool = True


@dataclass(frozen=True)
class Answer:
    """What to print of a file, the texts to write by file name, the row of its single answer, and
    what went wrong: an error, no answer, an interruption."""

    text: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    row: Mapping[str, Any] | None = None
    error: str = ""
    failed: bool = False
    interrupted: bool = False


def answer_plainly(path: str, data: bytes, asked: dict[str, Any]) -> dict[str, Any]:
    """`answer_file` on plain data, for workers."""
    found = answer_file(path, data, msgspec.convert(asked, Asked))
    plain: dict[str, Any] = msgspec.to_builtins(replace(found, row=None))
    # Numbers of any size travel as text.
    return {**plain, "row": None if found.row is None else json.dumps(found.row)}


def answer_from(plain: dict[str, Any]) -> Answer:
    """The answer of `answer_plainly`."""
    row = plain["row"]
    return Answer(**{**plain, "row": None if row is None else json.loads(row)})


def best_of(answers: Sequence[Answer], asked: Asked) -> Answer:
    """The best of one file's answers from several seeds, with the best bound of all."""
    rows = [a.row for a in answers if a.row is not None]
    good = [a for a in answers if a.row is not None and a.row["feasible"]]
    if not good:
        return answers[0]
    least = min(good, key=lambda a: next(iter(a.row["values"].values())))  # type: ignore[index]
    bounds = [row["bound"] for row in rows if row["bound"] is not None]
    best = dict(least.row or {})
    value = next(iter(best["values"].values()))
    if bounds:
        best["bound"] = bound = max(bounds)
        best["gap"] = max(0.0, value - bound) / max(abs(value), 1e-300)
    best["proven"] = any(row["proven"] for row in rows)
    best["seconds"] = max(row["seconds"] for row in rows)
    return replace(
        least, row=best, text=_text(best, asked), interrupted=any(a.interrupted for a in answers)
    )


def answer_file(path: str, data: bytes, asked: Asked) -> Answer:
    """Answer the problem in a file, whose bytes are given. Errors are part of the answer."""
    started = time.perf_counter()
    try:
        document = formats.document_of(data, path)
        if problem_file.recognises(document):
            return _snapshot(path, document, started, asked)
        problem, form = formats.recognised(document, path)
        left = _left(asked, started)
        if asked.front:
            return _front(path, problem, form, left, asked)
        told = _tell if asked.progress else None
        found = extract(problem, left, asked.seed, asked.method, told, asked.gap, asked.patience)
    except TapestryError as error:
        said = json.dumps({"path": path, "error": str(error)}) if asked.json else ""
        return Answer(said, error=str(error), failed=True)
    files = {}
    if found.choice is not None:
        chosen = formats.answer(problem, found.choice, form)
        files[f"{problem.name}.json"] = json.dumps(chosen, indent=1) + "\n"
    row = record(path, problem, found)
    interrupted = "interrupted" in found.notes
    return Answer(_text(row, asked), files, row, "", not found.feasible, interrupted)


def _left(asked: Asked, started: float) -> float:
    """The seconds that are left after reading, and at least a second of those asked for."""
    return max(asked.seconds - (time.perf_counter() - started), min(asked.seconds, _LEAST))


def _text(row: Mapping[str, Any], asked: Asked) -> str:
    return json.dumps(row) if asked.json else line(row)


def _tell(standing: Standing) -> None:
    """One line of progress: seconds, best value, bound, gap."""
    found = standing.extraction()
    value = short(number(found.values[0])) if found.values else "-"
    gap = number(found.gap)
    print(
        f"{standing.problem.name}: {found.seconds:.1f} s, best {value}, "
        f"bound {short(number(standing.bound))}, gap {'-' if gap is None else f'{gap:.2%}'}",
        file=sys.stderr,
        flush=True,
    )


def _teller(name: str) -> Callable[[str], None]:
    return lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True)


def _snapshot(path: str, document: Any, started: float, asked: Asked) -> Answer:
    """Answer a snapshot: its front, or its fastest rows."""
    from .problem_front import problem_front

    name = formats.name_of(path)
    problem = problem_file.read(document, path)
    left = _left(asked, started)
    tell = _teller(name) if asked.progress else None
    front = problem_front(problem, name, left, tell, asked.gap, asked.patience)
    interrupted = INTERRUPTED in front.notes
    if asked.front:
        files = {f"{name}.front.json": json.dumps(front.document(), indent=1) + "\n"}
        told = json.dumps({"path": path, **front.document()})
        text = told if asked.json else "\n".join(front_lines(front))
        return Answer(text, files, interrupted=interrupted)
    best = front.points[0]
    rows = json.dumps(problem_file.answer(problem, best.rows), indent=1) + "\n"
    row = {
        "path": path,
        "name": name,
        "nodes": sum(len(v) for v in problem.variables),
        "classes": len(problem.variables),
        "values": dict(zip(front.objectives, best.values, strict=True)),
        "bound": best.bound,
        "gap": best.gap,
        "seconds": round(time.perf_counter() - started, 3),
        "feasible": True,
        "proven": best.proven,
        "method": front.method,
        "reason": "",
        "notes": list(front.notes),
    }
    return Answer(_text(row, asked), {f"{name}.json": rows}, row, interrupted=interrupted)


def _front(path: str, problem: ChoiceProblem, form: str, seconds: float, asked: Asked) -> Answer:
    """The front of one problem."""
    tell = _teller(problem.name) if asked.progress else None
    chosen: Callable[[Choice], Any] | None = None
    if problem.usage and problem.all_active:
        from .memory_front import memory_front

        front = memory_front(problem, seconds, asked.seed, told=tell)
        chosen = partial(formats.answer, problem, form=form)
    else:
        front = choice_front(problem, seconds, asked.seed, told=tell)
    files = {}
    if asked.files and front.points:
        files[f"{problem.name}.front.json"] = json.dumps(front.document(chosen)) + "\n"
    # Chosen nodes of e-graphs, of which long fronts have millions, are written or else printed.
    both = chosen is not None or not asked.files
    document = front.document(chosen, choices=both) if asked.json else {}
    told = json.dumps({"path": path, **document, "reason": front.reason}) if asked.json else ""
    text = told if asked.json else "\n".join(front_lines(front))
    return Answer(text, files, failed=not front.points, interrupted=INTERRUPTED in front.notes)


def front_lines(front: ChoiceFront | ProblemFront) -> list[str]:
    name = front.name
    if not front.points:
        return [f"{name}: no front: {front.reason}"]
    kind = "exact" if front.exact else f"epsilon {front.epsilon:.3%}"
    knee = front.knee()
    lines = [
        f"{name}: front of {len(front)} answers, {kind}, {front.method}, "
        f"{front.seconds:.2f} s, hypervolume {front.hypervolume():.6g}",
        "  " + " ".join(f"{k:>16}" for k in (*front.objectives, "gap")),
    ]
    for p in front:
        values = " ".join(f"{short(number(v)):>16}" for v in p.values)
        mark = "  knee" if p is knee else ""
        lines.append(f"  {values} {p.gap:>16.3%}{mark}")
    return lines


def record(path: str, problem: ChoiceProblem, found: Extraction) -> dict[str, Any]:
    """One file's result as JSON data; integers keep all their digits."""
    return {
        "path": path,
        "name": problem.name,
        "nodes": len(problem.nodes),
        "classes": len(problem.classes),
        "values": {k: number(v) for k, v in zip(problem.objectives, found.values, strict=False)},
        "bound": number(found.bound),
        "gap": number(found.gap),
        "seconds": round(found.seconds, 3),
        "feasible": found.feasible,
        "proven": found.proven,
        "method": found.method,
        "reason": found.reason,
        "notes": list(found.notes),
    }


def number(value: Number) -> int | float | None:
    """A value for JSON: integers whole, fractions as the nearest float, infinities as null."""
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    return value


def line(row: Mapping[str, Any]) -> str:
    name = row["name"] if len(row["name"]) <= 40 else f"{row['name'][:37]}..."
    if not row["feasible"]:
        return f"{name:40} no answer: {row['reason']}"
    values = ", ".join(short(v) for v in row["values"].values())
    gap = "-" if row["gap"] is None else f"{row['gap']:.3%}"
    proven = "yes" if row["proven"] else "no"
    return (
        f"{name:40} {values:>16} {short(row['bound']):>16} {gap:>8} "
        f"{row['seconds']:>8.2f} {proven:6} {row['method']}"
    )


def short(value: int | float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.10g}"
