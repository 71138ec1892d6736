"""The command `census`: the shares of a program's work that can be split, as tables or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapestry_egg.columns import columns
from tapestry_egg.errors import TapestryError
from tapestry_egg.parallel.executors import host_only
from tapestry_egg.quantities import BYTES, OPERATIONS

from .console import Json, complain, load_any, print_json

if TYPE_CHECKING:
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.pipeline.census import Census, Work

#: What is not split and less than this share of flops and of bytes is summed up in one line.
_SMALL = 1e-4


def census(
    context: typer.Context,
    graphs: Annotated[
        list[str] | None,
        typer.Argument(metavar="GRAPH", help="Graph files, or programs FILE.py[:NAME]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Count how much of a program can be split.

    Per role, the shares of flops and bytes in operations that have a legal split of some index dim;
    bodies of scans count as often as they run. Below are the operations that have none, and why.
    """
    from tapestry_egg.pipeline.census import census as count

    if not graphs:
        print(context.get_help())
        return
    host_only()
    counted: list[Census] = []
    failed = False
    for name in graphs:
        try:
            one = count(_graph(name))
        except TapestryError as error:
            complain(str(error))
            failed = True
            continue
        counted.append(one)
        print_json(census_data(one)) if as_json else print(census_text(one) + "\n", flush=True)
    if len(counted) > 1 and not as_json:
        print(_programs(counted))
    if failed:
        raise typer.Exit(1)


def _graph(name: str) -> BlockGraph:
    from tapestry_egg.tracing.entry import is_entry, load_entry

    if is_entry(name):
        from tapestry_egg.tracing.trace import trace

        entry = load_entry(name)
        return trace(entry.function, *entry.arguments, name=entry.name).graph
    loaded = load_any(name)
    if not hasattr(loaded, "graph"):
        raise TapestryError("holds no graph", where=name, hint="`tapestry-egg trace` makes graphs.")
    return loaded.graph


# Text


def census_text(census: Census) -> str:
    """A census as tables: per role, per kind of index dim, and what cannot be split."""
    total = census.work()
    flops, moved = OPERATIONS.format(total.flops), BYTES.format(total.bytes)
    title = f"{census.name}: {flops}, {moved}"
    rows = [["role", "operations", "flops", "with a split", "bytes", "with a split"]]
    for role, whole, part in [
        *((r, census.work(r), census.work(r, split="any")) for r in census.roles),
        ("total", total, census.work(split="any")),
    ]:
        (flops, moved), (cut_flops, cut_bytes) = _shares(whole, total), _shares(part, whole)
        rows.append([role, str(whole.operations), flops, cut_flops, moved, cut_bytes])
    along = [["split along", "operations", "flops", "bytes"]]
    for role in ("map", "reduce", "scan", "join"):
        part = census.work(split=role)
        if part.operations:
            along.append([f"{role} dims", str(part.operations), *_shares(part, total)])
    inside = census.work(looped=True)
    if inside.operations:
        along.append(["(in scan bodies)", str(inside.operations), *_shares(inside, total)])
    parts = [
        title,
        columns(rows, "  ", right=range(1, 6)),
        columns(along, "  ", right=range(1, 4)),
    ]
    if census.whole:
        parts.append(columns(_whole(census), "  ", right=(1, 2, 3)))
    return "\n".join(parts)


def _whole(census: Census) -> list[list[str]]:
    """The table of what cannot be split."""
    from tapestry_egg.pipeline.census import Work, share

    total, rest = census.work(), Work()
    rows = [["no split", "operations", "flops", "bytes", "why", "at"]]
    for c in census.whole:
        if max(share(c.work.flops, total.flops), share(c.work.bytes, total.bytes)) < _SMALL:
            rest = rest + c.work
            continue
        source = str(c.operation.source) if c.operation.source.file else ""
        shares = _shares(c.work, total)
        rows.append([c.operation.kernel, str(c.work.operations), *shares, c.reason, source])
    if rest.operations:
        small = f"each below {_SMALL:.2%}"
        rows.append(["others", str(rest.operations), *_shares(rest, total), small, ""])
    return rows


def _programs(counted: list[Census]) -> str:
    """One line per program: its shares with a legal split."""
    rows = [["program", "operations", "flops with a split", "bytes with a split"]]
    for one in counted:
        whole, part = one.work(), one.work(split="any")
        rows.append([one.name, str(whole.operations), *_shares(part, whole)])
    return columns(rows, right=range(1, 4))


def _shares(part: Work, whole: Work) -> tuple[str, str]:
    """Shares of flops and bytes as text, `-` of nothing; never rounded up to the whole."""
    return _percent(part.flops, whole.flops), _percent(part.bytes, whole.bytes)


def _percent(part: float, whole: float) -> str:
    if not whole:
        return "-"
    text = f"{100 * part / whole:.2f} %"
    return "99.99 %" if text.startswith("100") and part < whole else text


# JSON


def census_data(census: Census) -> dict[str, Any]:
    """A census as plain data; shares of nothing are 1."""
    from tapestry_egg.pipeline.census import share

    total = census.work()

    def row(whole: Work, part: Work) -> dict[str, Any]:
        return {
            "operations": whole.operations,
            "flops": whole.flops,
            "bytes": whole.bytes,
            "flops_share": share(part.flops, whole.flops),
            "bytes_share": share(part.bytes, whole.bytes),
        }

    return {
        "name": census.name,
        **row(total, census.work(split="any")),
        "roles": {r: row(census.work(r), census.work(r, split="any")) for r in census.roles},
        "dims": {r: row(total, census.work(split=r)) for r in ("map", "reduce", "scan", "join")},
        "in_scan_bodies": row(census.work(looped=True), census.work(looped=True, split="any")),
        "no_split": [
            {
                "kernel": c.operation.kernel,
                "operations": c.work.operations,
                "flops": c.work.flops,
                "bytes": c.work.bytes,
                "reason": c.reason,
                "source": str(c.operation.source),
            }
            for c in census.whole
        ],
    }
