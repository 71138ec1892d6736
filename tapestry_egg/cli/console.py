"""What the commands of the command line share: files in, text or JSON out, options as numbers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapestry_egg.columns import wrapped
from tapestry_egg.errors import ExtractError, GraphError, TapestryError, TargetError
from tapestry_egg.machine.objectives import Objective, named, objective, share_of_least
from tapestry_egg.printable import printable
from tapestry_egg.scratch import scratch

if TYPE_CHECKING:
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.plans.plan import Plan


def _import_kernels(paths: list[str] | None) -> list[str] | None:
    """Import the files before anything is read that may use what they define."""
    from tapestry_egg.tracing.entry import import_file

    for path in paths or ():
        import_file(Path(path))
    return paths


Kernels = Annotated[
    list[str] | None,
    typer.Option(
        "--kernels",
        metavar="FILE.py",
        callback=_import_kernels,
        help="Kernels of yours; the file is imported, that is, run, first. May be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
File = Annotated[str, typer.Argument(metavar="FILE", help="A saved file, or - for standard input.")]
PlanName = Annotated[
    str, typer.Option("--plan", metavar="NAME", help="Which plan of the front; default: the best.")
]
Minimize = Annotated[
    str,
    typer.Option(
        metavar="OBJECTIVE",
        help="What the best plan is best in: a name, a formula such as 'seconds * joules', or "
        "FILE.yaml:NAME.",
    ),
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OBJECTIVE=AMOUNT",
        help="Such as peak_bytes=60GiB; of a front also seconds=110%, of the least that it has. "
        "May be repeated.",
    ),
]
Target = Annotated[
    str, typer.Option("--target", "-t", metavar="NAME:SHAPE", help="Such as h100:8 or v5e:4x4.")
]
Price = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="DOLLARS", help="Of a device and hour; default: the target's."),
]
Idle = Annotated[
    str | None,
    typer.Option(
        metavar="free|counted",
        help="What devices cost that a plan leaves unused: nothing, or idle power and their price.",
    ),
]
Rules = Annotated[
    list[str] | None,
    typer.Option("--rules", metavar="FILE", help="A rule file of yours; may be repeated."),
]
Pin = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="PATH=AXES",
        help="Layout of an input: the axes that shard each dim, such as [0]['w']=-,x or w=x+y, "
        "where no other path has a w; of a value %12, FILE:LINE or result[0]; may be repeated.",
    ),
]
State = Annotated[
    list[str] | None,
    typer.Option(
        "--state", metavar="OUTPUT=INPUT", help="What the next call takes in; may be repeated."
    ),
]
Mesh = Annotated[
    str,
    typer.Option(
        "--mesh", metavar="NAME=SIZE,...", help="Your mesh, such as data=4,model=2: a contract."
    ),
]
Out = Annotated[
    str, typer.Option("--out", "-o", metavar="FOLDER", help="Where the files are written.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", "-j", min=1, help="Processes at a time; default: all.")
]


def complain(message: str) -> None:
    """An error on standard error: `error: where: what`, the hint below."""
    print(f"error: {printable(message)}", file=sys.stderr)


def say(message: str) -> None:
    """Talk on standard error."""
    print(printable(message), file=sys.stderr)


def print_json(data: Any) -> None:
    """One line of JSON on standard output; what is not a finite number is null."""
    print(json.dumps(_strict(data), ensure_ascii=False, allow_nan=False))


def _strict(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, dict):
        return {str(key): _strict(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_strict(value) for value in data]
    return data


def parse_objective(text: str) -> str | Objective:
    """A name, a formula, or `FILE.yaml:NAME`, one of a file. Raises ExtractError for none."""
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith((".yaml", ".yml")):
        return text
    from tapestry_egg.machine.formulas import load_objectives

    known = load_objectives(file)
    if name not in known:
        hint = f"It has {', '.join(known) or 'none'}."
        raise ExtractError(f"no objective {name!r}", where=file, hint=hint)
    return known[name]


def objective_text(text: str) -> str:
    """An objective as `optimize` takes it: a name, a formula, or that of `FILE.yaml:NAME`.

    Raises BadParameter for what is none.
    """
    try:
        found = objective(parse_objective(text))
    except ExtractError as e:
        what = f"{e.where}: {e.what}" if e.where and e.where in text else e.what  # of a file
        raise typer.BadParameter(f"{what}. {e.hint}" if e.hint else what) from None
    return found.formula or found.name


def parse_limits(limits: Iterable[str], shares: bool = False) -> dict[str, Any]:
    """`["peak_bytes=60GiB"]` as amounts in base units; with `shares`, `110%` stays what it is.

    Raises ExtractError for a malformed one.
    """
    amounts: dict[str, Any] = {}
    for text in limits:
        name, equals, amount = text.partition("=")
        if not equals:
            raise ExtractError(
                f"{text!r} is not OBJECTIVE=AMOUNT", where="--limit", hint="peak_bytes=60GiB"
            )
        if shares and share_of_least(amount) is not None:
            amounts[named(name.strip(), "--limit").name] = amount
            continue
        amounts[name.strip()] = named(name.strip(), "--limit").parse(amount, "--limit")
    return amounts


def parse_pins(pins: Iterable[str]) -> dict[str, tuple[tuple[str, ...] | None, ...]]:
    """`["[0]['w']=-,x+y"]` as layouts by path: per dim the names of its axes, major to minor.

    Raises ExtractError for one that is malformed.
    """
    found: dict[str, tuple[tuple[str, ...] | None, ...]] = {}
    for text in pins:
        path, equals, layout = text.rpartition("=")
        dims = [d.strip() for d in layout.split(",")] if layout.strip() else []
        cut = [() if d in ("", "-", "None") else tuple(d.split("+")) for d in dims]
        if not equals or any(not a.isidentifier() for d in cut for a in d):
            raise ExtractError(
                f"{text!r} is not PATH=AXES",
                where="--pin",
                hint="[0]['w']=-,x shards the second dim over x; "
                "x+y shards over both, x outside; nothing after = replicates.",
            )
        found[path.strip()] = tuple(d or None for d in cut)
    return found


def parse_state(pairs: Iterable[str]) -> dict[str, str]:
    """`["[0]=[0]"]` as inputs by output. Raises ExtractError for one that is malformed."""
    found: dict[str, str] = {}
    for text in pairs:
        output, equals, source = (part.strip() for part in text.partition("="))
        if not equals:
            raise ExtractError(
                f"{text!r} is not OUTPUT=INPUT", where="--state", hint="[0]=[0], or a prefix."
            )
        found[output] = source
    return found


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """`data=4,model=2` as axes and sizes, major to minor. Raises TargetError for another form."""
    axes = [part.partition("=") for part in text.split(",")] if text else []
    sizes = [(name.strip(), size.strip()) for name, _, size in axes]
    names = [name for name, _ in sizes]
    if len({*names}) < len(names) or not all(
        name.isidentifier() and size.isdecimal() and int(size) > 0 for name, size in sizes
    ):
        raise TargetError(
            f"{text!r} is not NAME=SIZE,...", where="--mesh", hint="data=4,model=2, outermost first"
        )
    return tuple((name, int(size)) for name, size in sizes)


@contextmanager
def stdin_as_file(name: str) -> Iterator[Path]:
    """The path of a file argument; `-` is standard input, for the time of the block as a file."""
    if name != "-":
        yield Path(name)
        return
    with scratch() as folder:
        path = folder / "stdin.json"
        path.write_bytes(sys.stdin.buffer.read())
        try:
            yield path
        except TapestryError as error:
            error.where = error.where.replace(str(path), "standard input")
            raise


def load_any(name: str) -> Any:
    """Whatever a saved file holds: a program, a graph, a plan or a front."""
    from tapestry_egg.files.files import load

    with stdin_as_file(name) as path:
        return load(path)


def load_sharded(name: str) -> tuple[Any, dict[tuple[int, ...], Any]]:
    """The same, and the shards that a Loom graph has of its operations."""
    from tapestry_egg.files.files import load_sharded as load

    with stdin_as_file(name) as path:
        loaded, covers = load(path)
        return loaded, dict(covers)


def load_front(name: str) -> Front:
    """The front in a file. Raises GraphError where the file holds something else."""
    return as_front(load_any(name), name)


def as_front(loaded: Any, name: str) -> Front:
    """The front that a file held. Raises GraphError where it is something else."""
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.plans.plan import Plan

    if isinstance(loaded, Front):
        return loaded
    raise GraphError(
        f"holds a {'plan' if isinstance(loaded, Plan) else 'graph'}, not a front",
        where=name,
        hint="`tapestry-egg optimize` makes fronts of graphs.",
    )


def choose_plan(name: str, plan: str, minimize: str, limits: Iterable[str]) -> Plan:
    """The plan that the options ask for: by name, else the best; of a plan file, its only one."""
    return load_plan(name, plan, minimize, limits)[1]


def load_plan(
    name: str, plan: str, minimize: str, limits: Iterable[str]
) -> tuple[Front | None, Plan]:
    """The same with the front that it is of; None where the file holds a plan."""
    from tapestry_egg.plans.plan import Plan

    loaded = load_any(name)
    if isinstance(loaded, Plan):
        return None, loaded
    front = as_front(loaded, name)
    return front, plan_of(front, name, plan, minimize, limits)


def plan_of(front: Front, name: str, plan: str, minimize: str, limits: Iterable[str]) -> Plan:
    """The plan of the front in file `name` that the options ask for: by name, else the best."""
    if not plan:
        return front.best(parse_objective(minimize), limits=parse_limits(limits, shares=True))
    found = [p for p in front.plans if p.name == plan]
    if not found:
        names = ", ".join(p.name for p in front.plans) or "none"
        raise TapestryError(f"no plan {plan!r}", where=name, hint=f"It has {names}.")
    return found[0]


def print_fields(fields: dict[str, Any]) -> None:
    """Names and values, values of several lines indented below their name."""
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        lines = str(value).rstrip().splitlines() or [""]
        text = "\n    ".join([name, *lines])
        if len(lines) == 1:
            text = f"{name.ljust(width)}  {lines[0]}"
        print(wrapped(text))
