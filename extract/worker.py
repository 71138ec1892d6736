"""Searching several problems at once, each in a process of its own.

A problem travels as plain arrays in an `.npz` file (nothing in it can execute), candidates and cuts
come back the same way, progress as lines of text. The workers import neither JAX nor the user's
program, so scripts need no `__main__` guard; a worker that dies loses only its own search, which is
then done here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np

from .archive import Archive, Candidate
from .dual import Cut
from .problem import Pair, Problem, Use, Variable
from .search import Effort, Search

# Problems with fewer rows than this are searched sooner than a process has started.
_SMALL = 4000

Report = Callable[[int, str], None]


def search_all(
    problems: Sequence[Problem],
    effort: Effort,
    peak: float | None,
    report: Report | None = None,
    workers: int | None = None,
) -> list[Archive]:
    """The archives of all problems, searched side by side on `workers` processors.

    Where there are more processors than problems, each problem is searched in parts.
    `effort.seconds` is what all of them may take together, by the clock.
    """
    tell = report or (lambda k, text: None)
    limit = workers or os.cpu_count() or 1
    rows = sum(len(v) for p in problems for v in p.variables)
    alone = limit <= 1 or rows < _SMALL
    parts = 1 if alone else max(1, limit // max(len(problems), 1))
    jobs = [(k, part) for k in range(len(problems)) for part in range(parts)]
    seconds = shares([problems[k] for k, _ in jobs], 1 if alone else limit, effort)
    efforts = [
        replace(effort, seconds=t, part=part, parts=parts)
        for t, (_, part) in zip(seconds, jobs, strict=True)
    ]
    if alone:  # one after another
        return [
            _here(p, e, peak, k, tell)
            for k, (p, e) in enumerate(zip(problems, efforts, strict=True))
        ]
    found: dict[int, Archive] = {}
    gate = threading.Semaphore(limit)

    def one(j: int) -> None:
        with gate:
            k = jobs[j][0]
            found[j] = _there(problems[k], efforts[j], peak, k, tell)

    largest_first = sorted(range(len(jobs)), key=lambda j: -efforts[j].seconds)
    threads = [threading.Thread(target=one, args=(j,), daemon=True) for j in largest_first]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for j, (k, _) in enumerate(jobs):
        if j not in found:
            found[j] = _here(problems[k], efforts[j], peak, k, tell)
    archives = [Archive() for _ in problems]
    for j, (k, _) in enumerate(jobs):
        archives[k].join(found[j])
    return archives


def shares(problems: Sequence[Problem], workers: int, effort: Effort) -> list[float]:
    """Seconds for each problem, in proportion to the root of its size, so that all of them, the
    largest first on `workers` processors, take `effort.seconds`."""
    weights = [sum(q.seconds.size for q in p.pairs) ** 0.5 + 1.0 for p in problems]
    busy = [0.0] * max(workers, 1)
    for weight in sorted(weights, reverse=True):
        first = busy.index(min(busy))
        busy[first] += weight
    return [effort.seconds * weight / max(busy) for weight in weights]


def _here(p: Problem, effort: Effort, peak: float | None, k: int, tell: Report) -> Archive:
    return Search(p, effort, lambda archive, _: tell(k, _words(archive))).run(peak)


def _there(p: Problem, effort: Effort, peak: float | None, k: int, tell: Report) -> Archive:
    with tempfile.TemporaryDirectory(prefix="tapestry-egg-") as folder:
        source, sink = Path(folder) / "problem.npz", Path(folder) / "archive.npz"
        _write(source, problem_arrays(p))
        command = [sys.executable, "-m", "tapestry_egg.extract.worker", str(source), str(sink)]
        command += [repr(x) for x in astuple(effort)] + ([repr(float(peak))] if peak else [])
        root = str(Path(__file__).resolve().parents[1])
        package = str(Path(sys.modules["tapestry_egg"].__file__ or root).resolve().parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    tell(k, line.strip())
                child.wait()
            finally:
                if child.poll() is None:
                    child.kill()
        if child.returncode != 0 or not sink.exists():
            return _here(p, effort, peak, k, tell)
        with np.load(sink, allow_pickle=False) as data:
            return archive_from(dict(data))


def _write(path: Path, arrays: dict[str, Any]) -> None:
    with path.open("wb") as f:
        np.savez(f, **arrays)


def _words(archive: Archive) -> str:
    best = min(archive.candidates, key=lambda c: c.seconds)
    return f"{len(archive.candidates)} plans, fastest {best.seconds * 1e3:.3g} ms"


def problem_arrays(p: Problem) -> dict[str, np.ndarray]:
    """A problem as named arrays without objects; what its parts have in common is there once."""
    tables: list[np.ndarray] = []
    shapes: list[tuple[int, int]] = []
    labels: list[np.ndarray] = []
    number: dict[int, int] = {}

    def table(x: np.ndarray) -> int:
        if id(x) not in number:
            number[id(x)] = len(tables)
            tables.append(x.ravel())
            shapes.append((x.shape[0], x.shape[1] if x.ndim > 1 else -1))
        return number[id(x)]

    def line(x: np.ndarray) -> int:
        if id(x) not in number:
            number[id(x)] = len(labels)
            labels.append(x)
        return number[id(x)]

    parts: list[tuple[int, ...]] = []
    uses: list[tuple[int, int, int]] = []
    every: list[Variable | Pair] = [*p.variables, *p.pairs]
    for part in every:
        ends = (-1, -1, -1, -1)
        if isinstance(part, Pair):
            ends = (part.a, part.b, line(part.label_a), line(part.label_b))
        parts.append((*ends, table(part.seconds), table(part.joules), len(part.uses)))
        uses += [(u.start, u.end, table(u.amount)) for u in part.uses]
    return {
        "counts": np.array([len(p.variables), p.times]),
        "constant": p.constant,
        "names": np.array([v.name for v in p.variables], dtype=np.str_),
        "parts": np.array(parts, dtype=np.int64).reshape(-1, 7),
        "uses": np.array(uses, dtype=np.int64).reshape(-1, 3),
        "shapes": np.array(shapes, dtype=np.int64).reshape(-1, 2),
        "tables": np.concatenate(tables).astype(np.float64) if tables else np.zeros(0),
        "sizes": np.array([len(x) for x in labels], dtype=np.int64),
        "labels": np.concatenate(labels).astype(np.int64) if labels else np.zeros(0, np.int64),
    }


def problem_from(data: dict[str, np.ndarray]) -> Problem:
    """The problem of `problem_arrays`."""
    variables, times = (int(n) for n in data["counts"])
    shapes = [(n,) if m < 0 else (n, m) for n, m in data["shapes"].tolist()]
    ends = np.cumsum([int(np.prod(s)) for s in shapes])
    tables = [
        x.reshape(s) for x, s in zip(np.split(data["tables"], ends[:-1]), shapes, strict=True)
    ]
    labels = np.split(data["labels"], np.cumsum(data["sizes"])[:-1])
    last = np.cumsum(data["parts"][:, 6])
    made: list[Variable | Pair] = []
    for k, (a, b, label_a, label_b, seconds, joules, count) in enumerate(data["parts"].tolist()):
        uses = tuple(
            Use(start, end, tables[amount])
            for start, end, amount in data["uses"][last[k] - count : last[k]].tolist()
        )
        if a < 0:
            made.append(Variable(str(data["names"][k]), tables[seconds], tables[joules], uses))
        else:
            line = labels[label_a], labels[label_b]
            made.append(Pair(a, b, *line, tables[seconds], tables[joules], uses))
    found = [x for x in made if isinstance(x, Variable)]
    assert len(found) == variables
    pairs = tuple(x for x in made if isinstance(x, Pair))
    return Problem(tuple(found), pairs, times, data["constant"])


def archive_arrays(archive: Archive) -> dict[str, Any]:
    """An archive as named arrays."""
    return {
        "rows": np.stack([c.rows for c in archive.candidates]),
        "costs": np.array([c.costs for c in archive.candidates]),
        "cuts": np.array([[c.value, c.bytes_price, c.joule_price, c.peak] for c in archive.cuts]),
    }


def archive_from(data: dict[str, np.ndarray]) -> Archive:
    """The archive of `archive_arrays`."""
    candidates = [
        Candidate(rows, float(s), float(p), float(j))
        for rows, (s, p, j) in zip(data["rows"], data["costs"], strict=True)
    ]
    cuts = [Cut(*(float(x) for x in cut)) for cut in data["cuts"].reshape(-1, 4)]
    return Archive(candidates, cuts)


def main(arguments: Sequence[str]) -> None:
    """Search one problem: PROBLEM ARCHIVE, the fields of `Effort` in order, then a peak if any."""
    source, sink, *rest = arguments
    prices, steps, moves, seconds, gap, seed, part, parts, *peak = rest
    whole = (int(prices), int(steps), int(moves)), (int(seed), int(part), int(parts))
    effort = Effort(*whole[0], float(seconds), float(gap), *whole[1])
    with np.load(source, allow_pickle=False) as data:
        problem = problem_from(dict(data))

    def report(archive: Archive, _: float) -> None:
        print(_words(archive), flush=True)

    archive = Search(problem, effort, report).run(float(peak[0]) if peak else None)
    _write(Path(sink), archive_arrays(archive))


if __name__ == "__main__":
    main(sys.argv[1:])
