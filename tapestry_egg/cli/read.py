"""The commands that only read: show, front, rules, targets, verify."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapestry_egg.columns import WIDTH, columns, readers_width, wrapped
from tapestry_egg.errors import RuleError, TapestryError, TargetError
from tapestry_egg.quantities import BYTES
from tapestry_egg.show import text

from .console import (
    File,
    Json,
    Kernels,
    Limit,
    Minimize,
    PlanName,
    complain,
    load_any,
    load_front,
    load_sharded,
    plan_of,
    print_json,
    say,
)

if TYPE_CHECKING:
    from tapestry_egg.machine.tables.lookup import TableError
    from tapestry_egg.machine.target import Target
    from tapestry_egg.rules import Rule
    from tapestry_egg.rules.verify.trust import Finding
    from tapestry_egg.show.plot import FrontInfo, Scale


def show(
    file: File,
    svg: Annotated[
        str, typer.Option(metavar="PATH", help="Draw the graph into this file; .dot for DOT.")
    ] = "",
    operations: Annotated[
        str, typer.Option(metavar="A:B", help="Draw operations A to B-1 only.")
    ] = "",
    cover: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N:DIM=PARTS,...",
            help="Operation N in shards, drawn or in Loom; may be repeated. A plan brings its own.",
        ),
    ] = None,
    loom: Annotated[
        bool, typer.Option("--loom", help="Print a graph as Loom JSON, which other tools read.")
    ] = False,
    egraph: Annotated[
        bool,
        typer.Option("--egraph", help="Print what rules find out about a graph, as an e-graph."),
    ] = False,
    kernels: Kernels = None,
    as_json: Json = False,
) -> None:
    """Print a saved graph, plan or front, or draw a graph or plan.

    Loom graphs are read as well as our own files, here and wherever a graph is read.
    """
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.plans.plan import Plan

    if loom and (svg or operations or as_json):
        raise typer.BadParameter("--loom goes with --cover only")
    loaded, shards = load_sharded(file) if svg or loom else (load_any(file), {})
    if egraph:
        _print_egraph(loaded, file)
        return
    if svg:
        _draw(loaded, svg, operations, shards, cover or ())
        return
    if loom:
        _print_loom(loaded, shards, cover or (), file)
        return
    if operations or cover:
        raise typer.BadParameter("--operations needs --svg, --cover --svg or --loom")
    if isinstance(loaded, Front):
        print_json(loaded.table()) if as_json else print(loaded)
    elif isinstance(loaded, Plan):
        print_json(text.plan_data(loaded)) if as_json else print(text.plan_text(loaded))
    else:
        graph = loaded.graph
        print_json(text.graph_data(graph)) if as_json else print(text.graph_text(graph))


def _print_egraph(loaded: Any, file: str) -> None:
    """Print the e-graph of a graph as egraph-serialize JSON."""
    from tapestry_egg.interop.egraph_json import egraph_document
    from tapestry_egg.tracing.trace import Program

    if not isinstance(loaded, Program):
        raise TapestryError("holds plans, not a graph", where=file)
    print_json(egraph_document(loaded))


def _print_loom(
    loaded: Any, shards: Mapping[tuple[int, ...], Any], covers: Sequence[str], file: str
) -> None:
    """Print a graph as Loom JSON, in the shards that its file has and those asked for."""
    from tapestry_egg.loom import loom_text, to_loom
    from tapestry_egg.show.drawing import parse_cover
    from tapestry_egg.tracing.trace import Program

    if not isinstance(loaded, Program):
        raise TapestryError(
            "holds plans; Loom has graphs and shards, but no layouts",
            where=file,
            hint="Print the graph that they were made of.",
        )
    asked = dict(parse_cover(loaded.graph, text) for text in covers)
    print(loom_text(to_loom(loaded, {**shards, **asked})), end="")


def _draw(
    loaded: Any,
    path: str,
    operations: str,
    shards: Mapping[tuple[int, ...], Any],
    covers: Sequence[str],
) -> None:
    """Draw a graph in the shards that its file has; a plan from the program to the kernel, or some
    of its operations in the shards that it makes."""
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.plans.plan import Plan
    from tapestry_egg.show.drawing import MOST_OPERATIONS, draw, parse_cover, plan_covers
    from tapestry_egg.show.zoom.plan_svg import draw_plan

    if isinstance(loaded, Front):
        raise typer.BadParameter("a front is drawn by `tapestry-egg front --svg`; save a plan")
    if isinstance(loaded, Plan) and not operations and not covers:
        say(f"drawn: {draw_plan(loaded, path)}")
        return
    first, _, after = operations.partition(":")
    if operations and not (first.isdigit() and after.isdigit()):
        raise typer.BadParameter(f"{operations!r} is no range A:B of operations")
    graph = loaded.body.graph if isinstance(loaded, Plan) else loaded.graph
    chosen = range(int(first), int(after)) if operations else range(len(graph.operations))
    shards = {at: boxes for at, boxes in shards.items() if at[0] in chosen}
    if isinstance(loaded, Plan) and len(chosen) <= MOST_OPERATIONS:
        shards = {at: boxes for at, boxes in plan_covers(loaded).items() if at[0] in chosen}
    shards.update(parse_cover(graph, text) for text in covers)
    say(f"drawn: {draw(graph, path, shards, chosen if operations else None)}")


def front(
    file: File,
    svg: Annotated[str, typer.Option(metavar="PATH", help="Draw the front into this file.")] = "",
    x: Annotated[str, typer.Option(metavar="OBJECTIVE", help="Across.")] = "peak_bytes",
    y: Annotated[str, typer.Option(metavar="OBJECTIVE", help="Upwards.")] = "seconds",
    log: Annotated[bool, typer.Option("--log", help="Logarithmic axes.")] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE=AMOUNT",
            help="Count the plans again with links=2, hbm=1.5, flops=0.9, memory=141GB, price=2.5 "
            "or clock=1200; may be repeated.",
        ),
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="What the rules did, iteration by iteration.")
    ] = False,
    save: Annotated[
        str,
        typer.Option(metavar="PATH", help="Save one plan: --plan, or the best of --minimize."),
    ] = "",
    plan: PlanName = "",
    minimize: Minimize = "seconds",
    limit: Limit = None,
    kernels: Kernels = None,
    picture: Annotated[
        bool | None,
        typer.Option("--plot/--no-plot", help="A picture below the table; default: in a terminal."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    as_json: Json = False,
) -> None:
    """Print the table of a front or the timeline of its rules, draw it, or save a plan of it."""
    from tapestry_egg.egraphs.timeline import timeline_text
    from tapestry_egg.show.plot import front_info, plot_front

    loaded = load_front(file)
    if what_if:
        loaded = loaded.what_if(None, **_figures(what_if))
    if save:
        from tapestry_egg.files.files import save as save_to

        chosen = plan_of(loaded, file, plan, minimize, limit or ())
        save_to(chosen, save)
        say(f"saved: plan {chosen.name} -> {save}")
        return
    if timeline:
        ticks = [asdict(tick) for tick in loaded.timeline]
        print_json(ticks) if as_json else print(timeline_text(loaded.timeline))
        return
    if svg:
        drawn = plot_front(front_info(loaded, x=x, y=y), svg, scale="log" if log else "auto")
        say(f"drawn: {drawn}")
    if as_json:
        print_json(loaded.table())
    elif as_csv:
        print(loaded.csv(), end="")
    else:
        print(loaded)
        if sys.stdout.isatty() if picture is None else picture:
            print(_picture(front_info(loaded, x=x, y=y), "log" if log else "auto"), end="")


def _picture(info: FrontInfo, scale: Scale) -> str:
    """The front as text of the terminal's width, below an empty line; nothing where it is small, or
    where what reads has no such characters."""
    from tapestry_egg.show.terminal import front_terminal

    width, height = shutil.get_terminal_size((80, 24))
    text = front_terminal(info, min(width, WIDTH), max(12, min(height - 8, 20)), scale=scale)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return ""
    return f"\n{text}\n" if text else ""


def _figures(said: Sequence[str]) -> dict[str, float | str]:
    """FIGURE=AMOUNT, split."""
    parts = [one.partition("=") for one in said]
    if wrong := [one for one, (_, sign, _) in zip(said, parts, strict=True) if not sign]:
        raise typer.BadParameter(f"{wrong[0]!r} is not FIGURE=AMOUNT")
    return {name.strip(): amount.strip() for name, _, amount in parts}


def rules(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One rule, in full.")] = "",
    book: Annotated[
        list[str] | None,
        typer.Option("--rules", metavar="FILE", help="A rule file of yours; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the rewrite rules, or show one."""
    from tapestry_egg.rules import load_books
    from tapestry_egg.rules.language.book import book_names
    from tapestry_egg.rules.language.receipts import content, receipts

    found = [rule for one in load_books([*book_names(), *(book or ())]) for rule in one.rules]
    if name:
        matching = [rule for rule in found if rule.name == name]
        if not matching:
            raise RuleError(f"no rule {name!r}", hint="`tapestry-egg rules` lists them.")
        fields = {k: v for k, v in asdict(matching[0]).items() if v}
        if said := receipts().get(content(matching[0])):
            fields["verified"] = said
        print_json(fields) if as_json else _print_fields(fields)
    elif as_json:
        print_json([asdict(rule) for rule in found])
    else:
        rows = [["rule", "set", "numerics", "law"]]
        rows += [[r.name, r.ruleset, r.numerics, " ".join(r.law.split())] for r in found]
        print(columns(rows))


def targets(
    name: Annotated[str, typer.Argument(metavar="[NAME:SHAPE]", help="One target.")] = "",
    as_json: Json = False,
) -> None:
    """List the machines known, or show one."""
    from tapestry_egg.machine.tables.lookup import table_errors
    from tapestry_egg.machine.target import load_target

    if name:
        target = load_target(name)
        errors = table_errors(target.matmuls, target.collectives)
        fields = {
            **asdict(target),
            "devices": target.devices,
            "modelled_against_measured": [asdict(e) for e in errors],
        }
        if as_json:
            print_json(fields)
        else:
            _print_fields(
                {
                    "target": target.spec,
                    "title": target.title,
                    "devices": str(target.devices),
                    "mesh shapes": ", ".join(str(mesh) for mesh in target.mesh_shapes()),
                    "memory": BYTES.format(target.hbm_bytes),
                    "memory rate": _rate(target.hbm_bytes_per_second),
                    "links": ", ".join(
                        f"{level.name} {_rate(level.full_bytes_per_second)}"
                        for level in target.levels
                    ),
                    "power": _power(target),
                    "clock": _clock(target),
                    "price": _price(target),
                    "as of": target.retrieved,
                    "sources": "\n".join(target.sources),
                }
            )
            if errors:
                print("\nmodelled against measured, every row left out in turn:")
                print(columns(_error_rows(errors)))
        return
    rows = _target_rows()
    if as_json:
        print_json(rows)
    else:
        cells = [[row["name"], row["title"]] for row in rows]
        print(columns([["target", "machine"], *cells]))
        say("Write NAME:SHAPE, such as h100:8 (GPUs), h100:4x8 (hosts x GPUs) or v5e:4x4 (torus).")


def _error_rows(errors: Sequence[TableError]) -> list[list[str]]:
    """A table of errors, each with a bar up to its 90th percentile: `#` as far as the median."""
    rows = [["times of", "rows", "median", "90 %", "0 to 50 %"]]
    for e in errors:
        median, high = (min(25, round(50 * x)) for x in (e.median, e.high))
        bar = "#" * median + "-" * (high - median)
        rows.append([e.what, str(e.rows), f"{e.median:.1%}", f"{e.high:.1%}", bar])
    return rows


def _target_rows() -> list[dict[str, str]]:
    import yaml

    folder = Path(__file__).parents[1] / "machine" / "targets"
    rows = []
    for path in sorted(folder.glob("*.yaml")):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        rows.append({"name": path.stem, "title": str(data.get("title", ""))})
    if not rows:
        raise TargetError("no target files are installed", where=str(folder))
    return rows


def _power(target: Target) -> str:
    """Watts of a device by unit, and whether they were measured."""
    p = target.power
    hbm = p.joules_per_byte * target.hbm_bytes_per_second
    links = p.joules_per_wire_byte * target.levels[0].full_bytes_per_second
    return (
        f"{p.idle_watts:.3g} W idle; busy: kernels {p.kernel_watts:.3g}, arithmetic "
        f"{p.flops_watts:.3g}, memory {hbm:.3g}, links {links:.3g} W more; {p.max_watts:g} W at "
        f"most; {'measured' if p.measured else 'estimated'}"
    )


def _clock(target: Target) -> str:
    clock = target.clock
    if clock is None:
        return "fixed"
    chosen = target.mhz or clock.mhz
    return f"{chosen:g} MHz, of {clock.least_mhz:g} to {clock.most_mhz:g}"


def _price(target: Target) -> str:
    price = target.price
    if price is None:
        return "not known; give --price"
    said = ", ".join(filter(None, (price.source, price.as_of)))
    return f"{price.dollars_per_device_hour:g} USD for a device and hour ({said})"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:g} GB/s"


def verify(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE...]", help="Saved files, rule files; our own rules if none."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also rules that have passed before.")
    ] = False,
    receipts: Annotated[
        bool, typer.Option("--receipts", help="Note in the package that its own rules passed.")
    ] = False,
    kernels: Kernels = None,
    as_json: Json = False,
) -> None:
    """Check saved files, and rules by trying them.

    A rule file is checked rule by rule: both sides are computed on small programs of every kind,
    and a rule that is not true is refused with a counterexample. Laws of single elements are proven
    besides where a solver is installed (the extra `smt`). Without a file, the rules that ship with
    tapestry-egg are checked.
    """
    from tapestry_egg.rules.language.book import book_names
    from tapestry_egg.rules.verify.proofs import solver_installed

    verdicts: list[dict[str, Any]] = []
    said: list[tuple[Rule, str]] = []
    shown = 0
    for file, holds in _verified(files or book_names(), again, said):
        if isinstance(holds, TapestryError):
            verdict = {"file": file, "ok": False, "error": str(holds)}
        else:
            verdict = {"file": file, "ok": True, "holds": holds}
        verdicts.append(verdict)
        if as_json:
            print_json(verdict)
        elif verdict["ok"]:
            print(f"{file}: {verdict['holds']}: ok")
            rows = [[f"  {rule.name}", words] for rule, words in said[shown:] if words]
            if rows and file not in book_names():
                print(columns(rows))
        else:
            complain(str(verdict["error"]))
        shown = len(said)
    if said and not solver_installed() and not as_json:
        print("Nothing is proven: there is no solver (pip install 'tapestry-egg[smt]').")
    if not all(verdict["ok"] for verdict in verdicts):
        raise typer.Exit(1)
    if receipts and not files:
        from tapestry_egg.rules.language.receipts import write_receipts

        write_receipts([(rule, words) for rule, words in said if rule.book in book_names()])


def _verified(
    files: Sequence[str], again: bool, said: list[tuple[Rule, str]]
) -> Iterator[tuple[str, str | TapestryError]]:
    """What every file holds, in words, or what is wrong with it; what is said of each rule is added
    to `said`. Rules are tried all at once."""
    from tapestry_egg.rules import RuleBook, load_book
    from tapestry_egg.rules.language.book import book_names
    from tapestry_egg.rules.verify.trust import verified_all

    held: dict[str, str | RuleBook | TapestryError] = {}
    for file in files:
        try:
            rules = Path(file).suffix in (".yaml", ".yml") or file in book_names()
            held[file] = load_book(file) if rules else _verify(file)
        except TapestryError as error:
            held[file] = error
    books = {file: book for file, book in held.items() if isinstance(book, RuleBook)}
    found = iter(verified_all([rule for book in books.values() for rule in book.rules], again))
    for file, what in held.items():
        if isinstance(what, RuleBook):
            mine = [next(found) for _ in what.rules]
            said += [
                (r, "" if v is None else str(v)) for r, v in zip(what.rules, mine, strict=True)
            ]
            yield file, _words(mine)
        else:
            yield file, what


def _verify(file: str) -> str:
    """What a saved file holds, in words. Raises the TapestryError that is wrong with it."""
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.graph.blockgraph import verify_graph

    loaded = load_any(file)
    if isinstance(loaded, Front):
        for plan in loaded.plans:
            verify_graph(plan.graph, where=f"{file}: plan {plan.name}")
        return f"{len(loaded.plans)} plan{'' if len(loaded.plans) == 1 else 's'}"
    verify_graph(loaded.graph, where=file)
    return f"{len(loaded.graph.operations)} operations"


def _words(found: Sequence[Finding]) -> str | RuleError:
    """How many rules a file holds, and on how many programs they were tried; or an error that
    tells of every rule that fails."""
    refused = [error for error in found if isinstance(error, RuleError)]
    if refused:
        return RuleError("\n".join(map(str, refused)))
    tried = [v for v in found if v is not None and not isinstance(v, RuleError)]
    words = f"{len(found)} rule{'' if len(found) == 1 else 's'}"
    if not tried:
        return words
    programs, inputs = (sum(getattr(v, k) for v in tried) for k in ("instances", "cases"))
    proven = sum(bool(v.proven) for v in tried)
    besides = f", {proven} proven besides" if proven else ""
    return (
        f"{words}, {len(tried)} of them tried on {programs} programs with {inputs} inputs{besides}"
    )


def _print_fields(fields: dict[str, Any]) -> None:
    """Names and values, values of several lines indented below their name."""
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        lines = str(value).rstrip().splitlines() or [""]
        text = "\n    ".join([name, *lines])
        if len(lines) == 1:
            text = f"{name.ljust(width)}  {lines[0]}"
        print(wrapped(text, readers_width()))
