"""Many graphs, one after another or side by side: a front file and a picture for each.

A folder of results remembers what each was made from (`batch.json`: a hash of the graph, the
settings and the version). A graph whose result is there and whose hash has not changed is skipped,
so an interrupted batch goes on where it stopped. One graph that fails stops no other.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .atomic import write_atomic
from .errors import GraphError, TapestryError
from .progress import Phase, Progress

if TYPE_CHECKING:
    from .trace import Program

MANIFEST = "batch.json"


@dataclass(frozen=True, slots=True)
class Settings:
    """What `optimize` is asked for, the same for every graph of a batch.

    `limits` pairs objectives with amounts in base units, `rules` are paths of the user's own rule
    files, `seconds` is the time to search for each graph (None: the pipeline's own default).
    """

    target: str
    objectives: tuple[str, ...]
    limits: tuple[tuple[str, float], ...] = ()
    rules: tuple[str, ...] = ()
    seconds: float | None = None

    def key(self, graph: bytes) -> str:
        """A hash that changes whenever the front of this graph could: same key, same result."""
        from . import __version__

        parts: dict[str, Any] = {**asdict(self), "version": __version__}
        parts["graph"] = hashlib.sha256(graph).hexdigest()
        for name in (self.target.rpartition(":")[0], *self.rules):
            if Path(name).is_file():
                parts[f"file {name}"] = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one graph. `error` is empty where all went well."""

    name: str
    plans: int = 0
    seconds_best: float = math.nan
    seconds_worst: float = math.nan
    peak_least: float = math.nan
    peak_most: float = math.nan
    gap: float = math.inf
    took: float = 0.0
    skipped: bool = False
    error: str = ""


def run_batch(
    graphs: Sequence[Path],
    settings: Settings,
    out: Path,
    *,
    jobs: int = 1,
    again: bool = False,
    on_progress: Progress,
) -> Iterator[Outcome]:
    """Optimize every graph file into `out`, yielding an outcome as each one ends.

    `jobs` graphs at a time, each in a process of its own when more than one. With `again` nothing
    is skipped. Two graphs of the same file name raise TapestryError before anything is done.
    """
    seen: dict[str, Path] = {}
    for path in graphs:
        if path.stem in seen:
            raise TapestryError(
                f"would be written over the results of {seen[path.stem]}",
                where=str(path),
                hint="Rename one, or write them into different folders (-o).",
            )
        seen[path.stem] = path
    done = _read_manifest(out)
    todo: list[tuple[Path, str]] = []
    for name, path in seen.items():
        try:
            key = settings.key(path.read_bytes())
        except OSError as error:
            yield Outcome(name, error=f"{path}: cannot be read: {error.strerror}")
            continue
        entry = done.get(name, {})
        if not again and entry.get("key") == key and (out / f"{name}.front.json").is_file():
            yield replace(_outcome(entry.get("outcome", {}), name), skipped=True)
        else:
            todo.append((path, key))
    keys = {path.stem: key for path, key in todo}
    work = _one_by_one if jobs <= 1 or len(todo) <= 1 else partial(_side_by_side, jobs=jobs)
    for outcome in work([path for path, _ in todo], settings, out, on_progress):
        if not outcome.error:
            done[outcome.name] = {"key": keys[outcome.name], "outcome": _fields(outcome)}
            write_atomic(out / MANIFEST, json.dumps(done, indent=1, sort_keys=True) + "\n")
        yield outcome


def optimize_file(path: Path, settings: Settings, out: Path, on_progress: Progress) -> Outcome:
    """Load one graph, compute its front, write `NAME.front.json` and `NAME.front.svg` into `out`.

    Errors come back in the outcome, so that one graph stops no other: those of tapestry-egg as they
    read, any other, which is a defect, with its traceback.
    """
    from .files import load, save
    from .pipeline import Settings as Effort
    from .pipeline import optimize
    from .plot import front_info, plot_front

    started = time.perf_counter()
    name = path.stem
    try:
        front = optimize(
            _graph(load(path), path),
            target=settings.target,
            objectives=settings.objectives,
            limits=dict(settings.limits),
            rules=settings.rules,
            settings=None if settings.seconds is None else Effort(seconds=settings.seconds),
            on_progress=lambda p: on_progress(replace(p, subject=f"{name} {p.subject}".rstrip())),
        )
        # The picture first: the front file is what marks a graph as done.
        plot_front(front_info(front), out / f"{name}.front.svg")
        save(front, out / f"{name}.front.json")
    except TapestryError as error:
        return Outcome(name, error=str(error), took=time.perf_counter() - started)
    except Exception as error:
        told = "".join(traceback.format_exception(error))
        return Outcome(name, error=f"{path}: internal error\n{told}")
    costs = [plan.costs for plan in front.plans]
    return Outcome(
        name,
        plans=len(costs),
        seconds_best=min(c.seconds for c in costs),
        seconds_worst=max(c.seconds for c in costs),
        peak_least=min(c.peak_bytes for c in costs),
        peak_most=max(c.peak_bytes for c in costs),
        gap=max(plan.gap for plan in front.plans),
        took=time.perf_counter() - started,
    )


def _graph(loaded: Any, path: Path) -> Program:
    from .trace import Program

    if isinstance(loaded, Program):
        return loaded
    raise GraphError(
        "holds plans, not a graph",
        where=str(path),
        hint="`tapestry-egg trace` makes graphs of programs.",
    )


Work = Callable[[Sequence[Path], Settings, Path, Progress], Iterator[Outcome]]


def _one_by_one(
    paths: Sequence[Path], settings: Settings, out: Path, on_progress: Progress
) -> Iterator[Outcome]:
    for path in paths:
        yield optimize_file(path, settings, out, on_progress)


def _side_by_side(
    paths: Sequence[Path], settings: Settings, out: Path, on_progress: Progress, *, jobs: int
) -> Iterator[Outcome]:
    """Several processes, started afresh: JAX does not survive a fork."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        said = manager.Queue()
        listener = threading.Thread(target=_listen, args=(said, on_progress), daemon=True)
        listener.start()
        running: dict[Future[Outcome], Path] = {
            pool.submit(optimize_file, path, settings, out, said.put): path for path in paths
        }
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    path = running.pop(future)
                    try:
                        yield future.result()
                    except BrokenProcessPool:
                        yield Outcome(
                            path.stem,
                            error=f"{path}: a worker process died, perhaps for lack of memory\n"
                            "  Try again with --jobs 1.",
                        )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            said.put(None)
            listener.join(timeout=5)


def _listen(said: Any, on_progress: Progress) -> None:
    while isinstance(phase := said.get(), Phase):
        on_progress(phase)


def _read_manifest(out: Path) -> dict[str, Mapping[str, Any]]:
    """What `out` already holds; a manifest that cannot be read counts as none."""
    try:
        entries = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}


def _fields(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON; what is not a number is left to the default."""
    fields = asdict(outcome)
    return {k: v for k, v in fields.items() if not isinstance(v, float) or math.isfinite(v)}


def _outcome(fields: Mapping[str, Any], name: str) -> Outcome:
    known = {k: v for k, v in fields.items() if k in Outcome.__dataclass_fields__}
    return Outcome(**{**known, "name": name})
