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

    `effort.seconds` is what all of them may take together, by the clock.
    """
    tell = report or (lambda k, text: None)
    limit = workers or min(len(problems), os.cpu_count() or 1)
    rows = sum(len(v) for p in problems for v in p.variables)
    alone = limit <= 1 or len(problems) == 1 or rows < _SMALL
    efforts = [replace(effort, seconds=t) for t in shares(problems, 1 if alone else limit, effort)]
    if alone:  # one after another
        return [
            _here(p, e, peak, k, tell)
            for k, (p, e) in enumerate(zip(problems, efforts, strict=True))
        ]
    found: dict[int, Archive] = {}
    gate = threading.Semaphore(limit)

    def one(k: int) -> None:
        with gate:
            found[k] = _there(problems[k], efforts[k], peak, k, tell)

    largest_first = sorted(range(len(problems)), key=lambda k: -efforts[k].seconds)
    threads = [threading.Thread(target=one, args=(k,), daemon=True) for k in largest_first]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [
        found[k] if k in found else _here(p, efforts[k], peak, k, tell)
        for k, p in enumerate(problems)
    ]


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
    """A problem as named arrays without objects."""
    out: dict[str, np.ndarray] = {
        "counts": np.array([len(p.variables), len(p.pairs), p.times]),
        "constant": p.constant,
        "names": np.array([v.name for v in p.variables], dtype=np.str_),
    }
    for i, v in enumerate(p.variables):
        out[f"v{i}"] = np.stack([v.seconds, v.joules, *(u.amount for u in v.uses)])
        out[f"vt{i}"] = np.array([[u.start, u.end] for u in v.uses]).reshape(-1, 2)
    for i, q in enumerate(p.pairs):
        out[f"p{i}"] = np.stack([q.seconds, q.joules, *(u.amount for u in q.uses)])
        out[f"pt{i}"] = np.array([[q.a, q.b], *([u.start, u.end] for u in q.uses)])
        out[f"pa{i}"], out[f"pb{i}"] = q.label_a, q.label_b
    return out


def problem_from(data: dict[str, np.ndarray]) -> Problem:
    """The problem of `problem_arrays`."""
    variables, pairs, times = (int(n) for n in data["counts"])
    return Problem(
        tuple(
            Variable(
                str(data["names"][i]),
                data[f"v{i}"][0],
                data[f"v{i}"][1],
                _uses(data[f"v{i}"][2:], data[f"vt{i}"]),
            )
            for i in range(variables)
        ),
        tuple(
            Pair(
                int(data[f"pt{i}"][0, 0]),
                int(data[f"pt{i}"][0, 1]),
                data[f"pa{i}"],
                data[f"pb{i}"],
                data[f"p{i}"][0],
                data[f"p{i}"][1],
                _uses(data[f"p{i}"][2:], data[f"pt{i}"][1:]),
            )
            for i in range(pairs)
        ),
        times,
        data["constant"],
    )


def _uses(amounts: np.ndarray, spans: np.ndarray) -> tuple[Use, ...]:
    return tuple(Use(int(a), int(b), amount) for (a, b), amount in zip(spans, amounts, strict=True))


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
    prices, steps, moves, seconds, gap, seed, *peak = rest
    effort = Effort(int(prices), int(steps), int(moves), float(seconds), float(gap), int(seed))
    with np.load(source, allow_pickle=False) as data:
        problem = problem_from(dict(data))

    def report(archive: Archive, _: float) -> None:
        print(_words(archive), flush=True)

    archive = Search(problem, effort, report).run(float(peak[0]) if peak else None)
    _write(Path(sink), archive_arrays(archive))


if __name__ == "__main__":
    main(sys.argv[1:])
