"""`python -m tapestry_egg.extract`: answers to choice problems in files."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic import write_atomic
from ..errors import TapestryError
from . import formats
from .choice_front import ChoiceFront, choice_front
from .choices import ChoiceProblem, Extraction, Number
from .formats import snapshot
from .methods import METHODS, extract
from .standing import Standing

if TYPE_CHECKING:
    from .snapshot_front import SnapshotFront


def main(arguments: Sequence[str] | None = None) -> int:
    """Extract from each file in order; returns 0 when every file has an answer, else 1."""
    options = _parser().parse_args(arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: keep the best so far
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    failed = False
    if not options.json and not options.front:
        print(_HEAD)
    for path in options.paths:
        try:
            started = time.perf_counter()
            document = formats.read_document(path)
            if snapshot.recognises(document):
                failed = _snapshot(path, document, started, options) or failed
                continue
            problem, form = formats.recognised(document, path)
            left = options.seconds - (time.perf_counter() - started)
            if options.front:
                failed = _front(path, problem, left, options) or failed
                continue
            told = _tell if options.progress else None
            found = extract(problem, left, options.seed, options.method, told)
        except TapestryError as e:
            failed = True
            if options.json:
                print(json.dumps({"path": str(path), "error": str(e)}), flush=True)
            else:
                print(e, file=sys.stderr, flush=True)
            continue
        failed = failed or not found.feasible
        if options.output is not None and found.choice is not None:
            answer = formats.answer(problem, found.choice, form)
            target = options.output / f"{problem.name}.json"
            target.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
        row = record(path, problem, found)
        print(json.dumps(row) if options.json else _line(row), flush=True)
        if "interrupted" in found.notes:
            return 130
    return int(failed)


def _tell(standing: Standing) -> None:
    """One line of progress: seconds, best value, bound."""
    value = _short(number(standing.values[0])) if standing.values else "-"
    seconds = time.perf_counter() - standing.started
    bound = _short(number(standing.bound))
    print(f"{standing.problem.name}: {seconds:.1f} s, best {value}, bound {bound}", file=sys.stderr)


_HEAD = f"{'file':40} {'value':>16} {'bound':>16} {'gap':>8} {'seconds':>8} {'proven':6} method"


def _snapshot(path: Path, document: Any, started: float, options: argparse.Namespace) -> bool:
    """Answer a snapshot: its front, or its fastest rows; whether there are none."""
    from .snapshot_front import snapshot_front

    name = formats.name_of(path)
    problem = snapshot.read(document, str(path))
    left = options.seconds - (time.perf_counter() - started)
    tell = (lambda text: print(f"{name}: {text}", file=sys.stderr)) if options.progress else None
    front = snapshot_front(problem, name, left, options.seed, tell)
    if options.front:
        if options.output is not None:
            front.save(options.output / f"{name}.front.json")
        if options.json:
            print(json.dumps({"path": str(path), **front.document()}), flush=True)
        else:
            print("\n".join(_front_lines(front)), flush=True)
        return False
    best = front.points[0]
    if options.output is not None:
        answer = json.dumps(snapshot.answer(problem, best.rows), indent=1)
        write_atomic(options.output / f"{name}.json", answer + "\n")
    row = {
        "path": str(path),
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
        "notes": [],
    }
    print(json.dumps(row) if options.json else _line(row), flush=True)
    return False


def _front(path: Path, problem: ChoiceProblem, seconds: float, options: argparse.Namespace) -> bool:
    """Print the front of one file, and write it; whether there is none."""
    if problem.usage and problem.all_active:
        from .cfn.tradeoff import memory_front

        front = memory_front(problem, options.seconds, options.seed)
    else:
        front = choice_front(problem, seconds, options.seed)
    document = front.document()
    if options.output is not None and front.points:
        target = options.output / f"{problem.name}.front.json"
        front.save(target)
    if options.json:
        print(json.dumps({"path": str(path), **document, "reason": front.reason}), flush=True)
    else:
        print("\n".join(_front_lines(front)), flush=True)
    return not front.points


def _front_lines(front: ChoiceFront | SnapshotFront) -> list[str]:
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
        values = " ".join(f"{_short(number(v)):>16}" for v in p.values)
        mark = "  knee" if p is knee else ""
        lines.append(f"  {values} {p.gap:>16.3%}{mark}")
    return lines


def record(path: Path, problem: ChoiceProblem, found: Extraction) -> dict[str, Any]:
    """One file's result as JSON data; integers keep all their digits."""
    return {
        "path": str(path),
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


def _line(row: dict[str, Any]) -> str:
    name = row["name"] if len(row["name"]) <= 40 else f"{row['name'][:37]}..."
    if not row["feasible"]:
        return f"{name:40} no answer: {row['reason']}"
    values = ", ".join(_short(v) for v in row["values"].values())
    gap = "-" if row["gap"] is None else f"{row['gap']:.3%}"
    proven = "yes" if row["proven"] else "no"
    return (
        f"{name:40} {values:>16} {_short(row['bound']):>16} {gap:>8} "
        f"{row['seconds']:>8.2f} {proven:6} {row['method']}"
    )


def _short(value: int | float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tapestry_egg.extract",
        description="Choose nodes of e-graphs, strategies of IOPDDL problems, rows of snapshots.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=".json or .json.gz")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="per file, reading included (default 60)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    names = ["auto", *(m.name for m in METHODS)]
    parser.add_argument("--method", choices=names, default="auto", help="default auto")
    parser.add_argument(
        "--front", action="store_true", help="the front of cost and number of selected nodes"
    )
    parser.add_argument("--progress", action="store_true", help="tell of every gain on stderr")
    parser.add_argument("--json", action="store_true", help="one JSON object per file")
    parser.add_argument(
        "-o", dest="output", type=Path, metavar="DIR", help="write the chosen nodes there"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
