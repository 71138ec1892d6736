"""Many graphs, one after another or side by side: a front, or a front file and a picture, for each.

A folder of results remembers what each was made from (`batch.json`: a hash of the graph, the
settings and the version) and a hash of the front. A graph whose result is there as it was written,
and whose hash has not changed, is skipped, so an interrupted batch goes on where it stopped.
Several batches may write into one folder. One graph that fails stops no other; a worker that is
lost loses its own graph, which is then done again.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tapestry_egg.atomic import check_writable, write_atomic
from tapestry_egg.errors import GraphError, TapestryError
from tapestry_egg.extract.front.notes import INTERRUPTED, Note, as_note
from tapestry_egg.machine.objectives import OBJECTIVES, amounts, named
from tapestry_egg.parallel.executors import Lost, Processes, completed, host_only
from tapestry_egg.parallel.serving import tell
from tapestry_egg.progress import Phase, Progress
from tapestry_egg.scratch import locked, scratch

if TYPE_CHECKING:
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.tracing.trace import Program

    from .settings import Settings

MANIFEST = "batch.json"
#: How the file of a search ends.
SEARCH = ".search.npz"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What `optimize` is asked for, the same for every graph of a batch.

    `limits` pairs objectives with amounts in base units, `rules` are paths of the user's own rule
    files, `kernels` of Python files that define kernels of theirs, which are imported first. `pins`
    pairs inputs with the axis names that cut each of their dims, `state` outputs with inputs, and
    `mesh` names with sizes, as `optimize` has them. The others say how hard to search each graph,
    as the pipeline's `Settings` do (None: its own default). With `resume` the search of a graph is
    kept in `NAME.search.npz`, and goes on from there.
    """

    target: str
    objectives: tuple[str, ...]
    limits: tuple[tuple[str, float], ...] = ()
    rules: tuple[str, ...] = ()
    seconds: float | None = None
    gap: float | None = None
    patience: float | None = None
    work: float | None = None
    max_axes: int | None = None
    numerics: str = "reorders"
    pins: tuple[tuple[str, tuple[tuple[str, ...] | None, ...]], ...] = ()
    state: tuple[tuple[str, str], ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()
    kernels: tuple[str, ...] = ()
    price: float | None = None  # dollars of a device and hour
    overlap: bool | None = None
    idle: str | None = None  # `free` or `counted`: devices that plans leave unused
    resume: bool = False

    def effort(self, workers: int | None) -> Settings:
        """The settings of the pipeline, for a search on so many processors."""
        from .settings import Settings

        fields = ("seconds", "gap", "patience", "work", "max_axes", "overlap")
        asked = {k: getattr(self, k) for k in fields}
        return Settings(workers=workers, **{k: v for k, v in asked.items() if v is not None})

    def key(self, graph: bytes) -> str:
        """A hash that changes whenever the front of this graph could: same key, same result."""
        from tapestry_egg import __version__

        parts: dict[str, Any] = {**asdict(replace(self, resume=False)), "version": __version__}
        parts["graph"] = hashlib.sha256(graph).hexdigest()
        for name in (self.target.rpartition(":")[0], *self.rules, *self.kernels):
            if Path(name).is_file():
                parts[f"file {name}"] = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one graph. `error` is empty where all went well; `notes` say what happened on
    the way."""

    name: str
    plans: int = 0
    seconds_best: float = math.nan
    seconds_worst: float = math.nan
    peak_least: float = math.nan
    peak_most: float = math.nan
    gap: float = math.inf
    proven: bool = False  # the gaps of all plans
    took: float = 0.0
    skipped: bool = False
    error: str = ""
    notes: tuple[Note, ...] = ()


def run_batch(
    graphs: Sequence[Path],
    settings: BatchRequest,
    out: Path,
    *,
    executor: Executor | None = None,
    workers: int | None = None,
    again: bool = False,
    on_progress: Progress,
) -> Iterator[Outcome]:
    """Optimize every graph file into `out`, yielding an outcome as each one ends.

    Several graphs are given to `executor`, each as one call; one graph, or each in turn where there
    is no executor, is searched on `workers` processors (None: all). With `again`, or to resume
    searches, nothing is skipped. An interruption (Ctrl-C) leaves the fronts that were found until
    then, and ends the batch with KeyboardInterrupt. Two graphs of the same file name, and a folder
    that cannot be written, raise TapestryError before anything is done.
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
    check_writable(out / MANIFEST)
    done = _read_manifest(out)
    todo: list[tuple[Path, str]] = []
    for name, path in seen.items():
        try:
            key = settings.key(path.read_bytes())
        except OSError as error:
            yield Outcome(name, error=f"{path}: cannot be read: {error.strerror}")
            continue
        entry = done.get(name, {})
        whole = entry.get("front") is not None and entry["front"] == _hash_of(out, name)
        if not (again or settings.resume) and entry.get("key") == key and whole:
            yield replace(_outcome(entry.get("outcome", {}), name), skipped=True)
        else:
            todo.append((path, key))
    keys = {path.stem: key for path, key in todo}
    files = [path for path, _ in todo]
    if executor is None or len(todo) <= 1:
        work = _one_by_one(files, settings, out, workers, on_progress)
    else:
        work = _side_by_side(files, settings, out, executor, on_progress)
    for outcome in work:
        if not outcome.error and INTERRUPTED not in outcome.notes:
            _remember(out, outcome, keys[outcome.name])
        yield outcome


def optimize_all(
    graphs: Mapping[str, Program | BlockGraph],
    target: str,
    objectives: Sequence[str] = OBJECTIVES,
    *,
    limits: Mapping[str, float | str] | None = None,
    rules: Sequence[str] = (),
    seconds: float | None = None,
    gap: float | None = None,
    work: float | None = None,
    executor: Executor | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Front | TapestryError]:
    """The front of every program, by name, or the error that says why there is none.

    The programs are given to `executor` (default: processes of this machine, as many as it has
    processors), each as one call; the other arguments are those of `optimize`, and `rules` and
    `target` may be files, which workers must be able to read. Raises GraphError for a graph that
    holds objects of this process.
    """
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.files.files import load, save

    bounds = amounts(limits)
    settings = BatchRequest(
        target,
        tuple(named(k, "objectives").name for k in objectives),
        tuple(sorted(bounds.items())),
        tuple(rules),
        seconds,
        gap,
        work=work,
    )
    found: dict[str, Front | TapestryError] = {}
    with scratch() as folder, ExitStack() as stack:
        names = {f"{k}": name for k, name in enumerate(graphs)}
        for k, name in names.items():
            save(graphs[name], folder / f"{k}.json")
        pool = executor or stack.enter_context(Processes())
        for outcome in run_batch(
            [folder / f"{k}.json" for k in names],
            settings,
            folder / "out",
            executor=pool,
            on_progress=on_progress or (lambda _: None),
        ):
            if outcome.error:
                found[names[outcome.name]] = TapestryError(outcome.error)
                continue
            loaded = load(folder / "out" / f"{outcome.name}.front.json")
            assert isinstance(loaded, Front)
            found[names[outcome.name]] = loaded
    return {name: found[name] for name in graphs if name in found}


def optimize_file(
    path: Path,
    settings: BatchRequest,
    out: Path,
    on_progress: Progress,
    workers: int | None = None,
) -> Outcome:
    """Load one graph, compute its front, write `NAME.front.json` and `NAME.front.svg` into `out`.

    Errors come back in the outcome, so that one graph stops no other: those of tapestry-egg as they
    read, any other, which is a defect, with its traceback.
    """
    from tapestry_egg.files.files import load, save
    from tapestry_egg.graph.layout import MeshShape
    from tapestry_egg.show.plot import front_info, plot_front
    from tapestry_egg.tracing.entry import import_file

    from .pipeline import optimize

    started = time.perf_counter()
    name = path.stem
    try:
        for module in settings.kernels:
            import_file(Path(module))
        front = optimize(
            _graph(load(path), path),
            target=settings.target,
            objectives=settings.objectives,
            limits=dict(settings.limits),
            rules=settings.rules,
            state=dict(settings.state) or None,
            numerics=settings.numerics,
            mesh=MeshShape(*zip(*settings.mesh, strict=True)) if settings.mesh else None,
            pins=dict(settings.pins) or None,
            price=settings.price,
            idle=settings.idle,
            settings=settings.effort(workers),
            on_progress=lambda p: on_progress(replace(p, subject=f"{name} {p.subject}".rstrip())),
            resume=out / f"{name}{SEARCH}" if settings.resume else None,
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
        proven=all(plan.is_proven for plan in front.plans),
        took=time.perf_counter() - started,
        notes=front.notes,
    )


def _graph(loaded: Any, path: Path) -> Program:
    from tapestry_egg.tracing.trace import Program

    if isinstance(loaded, Program):
        return loaded
    raise GraphError(
        "holds plans, not a graph",
        where=str(path),
        hint="`tapestry-egg trace` makes graphs of programs.",
    )


def _one_by_one(
    paths: Sequence[Path],
    settings: BatchRequest,
    out: Path,
    workers: int | None,
    on_progress: Progress,
) -> Iterator[Outcome]:
    for path in paths:
        outcome = optimize_file(path, settings, out, on_progress, workers)
        yield outcome
        if INTERRUPTED in outcome.notes:
            raise KeyboardInterrupt


def _side_by_side(
    paths: Sequence[Path],
    settings: BatchRequest,
    out: Path,
    executor: Executor,
    on_progress: Progress,
) -> Iterator[Outcome]:
    """Every graph a call of `front_files`, which is made again where its worker is lost."""
    plain = msgspec.to_builtins(settings)
    searches = [out / f"{path.stem}{SEARCH}" for path in paths]
    known = [x.read_bytes() if settings.resume and x.exists() else b"" for x in searches]
    calls = [
        (str(path), path.read_bytes(), plain, search)
        for path, search in zip(paths, known, strict=True)
    ]

    def heard(_: int, said: Any) -> None:
        on_progress(Phase(*said))

    for k, told in completed(executor, front_files, calls, heard):
        name = paths[k].stem
        if not isinstance(told, Lost):
            try:
                for file, data in told["files"].items():
                    write_atomic(out / file, data)
            except TapestryError as error:
                yield Outcome(name, error=str(error))
            else:
                yield _outcome(told["outcome"], name)
        elif told.again:
            on_progress(Phase("extract", f"begun again: {told.reason}", None, name))
        else:
            hint = "Perhaps for lack of memory: try again with fewer --workers."
            yield Outcome(name, error=f"{paths[k]}: {told.reason}, twice\n  {hint}")


def front_files(
    path: str, graph: bytes, settings: dict[str, Any], search: bytes = b""
) -> dict[str, Any]:
    """The outcome of a graph file and the files that it gives, as plain data: of a worker.

    The graph comes as the bytes of its file, so that a worker need not see the same disks, and so
    does an earlier search to resume, if there is one.
    """
    host_only()
    with scratch() as folder:
        file = folder / Path(path).name
        file.write_bytes(graph)
        if search:
            write_atomic(folder / "out" / f"{file.stem}{SEARCH}", search)
        outcome = optimize_file(
            file,
            msgspec.convert(settings, BatchRequest),
            folder / "out",
            lambda p: tell([p.phase, p.text, p.fraction, p.subject, p.step]),
            workers=1,
        )
        made = (folder / "out").glob("*") if (folder / "out").is_dir() else ()
        return {
            "outcome": _fields(replace(outcome, error=outcome.error.replace(str(file), path))),
            "files": {p.name: p.read_bytes() for p in made},
        }


def _remember(out: Path, outcome: Outcome, key: str) -> None:
    """Enter an outcome into the manifest, beside what other batches have entered meanwhile."""
    with locked(out):
        front = _hash_of(out, outcome.name)
        entry = {"key": key, "outcome": _fields(outcome), "front": front}
        done = {**_read_manifest(out), outcome.name: entry}
        write_atomic(out / MANIFEST, json.dumps(done, indent=1, sort_keys=True) + "\n")


def _hash_of(out: Path, name: str) -> str | None:
    """A hash of the front file of a graph; None where there is none."""
    try:
        return hashlib.sha256((out / f"{name}.front.json").read_bytes()).hexdigest()
    except OSError:
        return None


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
    notes = tuple(map(as_note, known.get("notes", ())))
    return Outcome(**{**known, "name": name, "notes": notes})
