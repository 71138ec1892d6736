"""Answers to the files of the extractor's command: what is printed of each, and what is written."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tapestry_egg.errors import TapestryError
from tapestry_egg.extract.gym import formats
from tapestry_egg.extract.gym.choices import Choice
from tapestry_egg.extract.gym.extraction import Extraction, extract
from tapestry_egg.extract.gym.fronts import Front, plain
from tapestry_egg.files import problem_file
from tapestry_egg.parallel.executors import INTERRUPTED

# A file that takes long to read still gets so many seconds, if as many are asked for.
_LEAST = 1.0


@dataclass(frozen=True)
class Asked:
    """What the command asks of every file: how hard to work, and what to give."""

    seconds: float = 60.0
    seed: int = 0
    front: bool = False
    json: bool = False
    progress: bool = False
    gap: float = 0.0
    patience: float = float("inf")


@dataclass(frozen=True)
class Answer:
    """What to print of a file, the texts to write by file name, and what went wrong: an error, no
    answer, an interruption."""

    text: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    failed: bool = False
    interrupted: bool = False


def answer_file(path: str, data: bytes, asked: Asked) -> Answer:
    """Answer the problem in a file, whose bytes are given. Errors are part of the answer."""
    started = time.perf_counter()
    try:
        document = formats.document_of(data, path)
        answered = _saved if problem_file.recognises(document) else _answered
        return answered(path, document, started, asked)
    except TapestryError as error:
        return no_answer(path, str(error), asked)


def no_answer(path: str, error: str, asked: Asked) -> Answer:
    """The answer of a file that has none."""
    said = json.dumps({"path": path, "error": error}) if asked.json else ""
    return Answer(said, error=error, failed=True)


def _answered(path: str, document: Any, started: float, asked: Asked) -> Answer:
    """Answer a problem of others: its front, or its cheapest choice."""
    problem, form = formats.recognised(document, path)
    left = _left(asked, started)

    def written(choice: Choice) -> Any:
        return formats.answer(problem, choice, form)

    if not asked.front:
        told = _tell if asked.progress else None
        found = extract(problem, left, asked.seed, told, asked.gap, asked.patience)
        row = {
            "path": path,
            "name": problem.name,
            "nodes": len(problem.nodes),
            "classes": len(problem.classes),
            "values": {"cost": plain(found.value)} if found.feasible else {},
            "bound": plain(found.bound),
            "gap": plain(found.gap),
            "seconds": round(found.seconds, 3),
            "feasible": found.feasible,
            "proven": found.proven,
            "method": found.method,
            "reason": "" if found.feasible else found.reason,
            "notes": list(found.notes),
        }
        files = {}
        if found.choice is not None:
            files[f"{problem.name}.json"] = json.dumps(written(found.choice), indent=1) + "\n"
        interrupted = "interrupted" in found.notes
        return Answer(_text(row, asked), files, "", not found.feasible, interrupted)
    from tapestry_egg.extract.gym.memory_front import memory_front

    tell = _teller(problem.name) if asked.progress else None
    front = memory_front(problem, left, asked.seed, told=tell)
    return _front(path, front, lambda choice: {"choices": written(choice)}, asked)


def _saved(path: str, document: Any, started: float, asked: Asked) -> Answer:
    """Answer a saved problem: its front, or its fastest rows."""
    from tapestry_egg.extract.gym.problem_front import problem_front

    name = formats.name_of(path)
    problem = problem_file.read(document, path)
    left = _left(asked, started)
    tell = _teller(name) if asked.progress else None
    front = problem_front(problem, name, left, tell, asked.gap, asked.patience)
    if asked.front:
        return _front(path, front, lambda rows: {"rows": problem_file.answer(problem, rows)}, asked)
    best = front.points[0]
    rows = json.dumps(problem_file.answer(problem, best.answer), indent=1) + "\n"
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
        "proven": best.gap == 0.0,
        "method": front.method,
        "reason": "",
        "notes": list(front.notes),
    }
    interrupted = INTERRUPTED in front.notes
    return Answer(_text(row, asked), {f"{name}.json": rows}, interrupted=interrupted)


def _front(
    path: str, front: Front, chosen: Callable[[Any], dict[str, Any]], asked: Asked
) -> Answer:
    """A front as an answer."""
    document = front.document(chosen)
    files = {f"{front.name}.front.json": json.dumps(document) + "\n"} if front.points else {}
    text = "\n".join(front_lines(front))
    if asked.json:
        text = json.dumps({"path": path, **document, "reason": front.reason})
    interrupted = INTERRUPTED in front.notes
    return Answer(text, files, failed=not front.points, interrupted=interrupted)


def _left(asked: Asked, started: float) -> float:
    """The seconds that are left after reading, and at least a second of those asked for."""
    return max(asked.seconds - (time.perf_counter() - started), min(asked.seconds, _LEAST))


def _text(row: Mapping[str, Any], asked: Asked) -> str:
    return json.dumps(row) if asked.json else line(row)


def _tell(found: Extraction) -> None:
    """One line of progress: seconds, best value, bound, gap."""
    gap = plain(found.gap)
    _teller(found.problem.name)(
        f"{found.seconds:.1f} s, best {short(plain(found.value))}, "
        f"bound {short(plain(found.bound))}, gap {'-' if gap is None else f'{gap:.2%}'}"
    )


def _teller(name: str) -> Callable[[str], None]:
    return lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True)


def front_lines(front: Front) -> list[str]:
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
        values = " ".join(f"{short(plain(v)):>16}" for v in p.values)
        mark = "  knee" if p is knee else ""
        lines.append(f"  {values} {p.gap:>16.3%}{mark}")
    return lines


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
