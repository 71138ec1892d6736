"""Saving and loading: programs, plans and fronts as versioned JSON, checked, never executed.

    {"tapestry_egg": "graph", "version": 1, "name": .., "values": [..], "operations": [..], ..}

A path that ends in `.gz` is compressed. What a file says is checked before it is believed: its
JSON, its records (`documents.py`, `plan_documents.py`), its parameters (`codec.py`) and the
invariants of the graph.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from pathlib import Path
from typing import Any

import msgspec

from .atomic import write_atomic
from .blockgraph import BlockGraph
from .documents import (
    GraphRecord,
    SourceRecord,
    SourceTable,
    convert,
    graph_from_record,
    graph_record,
    program_of,
)
from .errors import GraphError, PlanError
from .extract.front import Front
from .front_documents import front_document, front_from_document
from .plan import Plan
from .plan_documents import PlanRecord, plan_from_record, plan_record
from .trace import Program

VERSION = 1


class GraphFile(GraphRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a graph file holds beside the graph itself."""

    tapestry_egg: str
    version: int
    in_tree: Any
    out_tree: Any
    jax: str = ""
    sources: list[SourceRecord] = []


class PlanFile(PlanRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan file holds beside the plan itself."""

    tapestry_egg: str
    version: int
    in_tree: Any = None
    out_tree: Any = None
    sources: list[SourceRecord] = []


def save(obj: Program | BlockGraph | Plan | Front, path: str | Path) -> None:
    """Write a program, a graph, a plan or a front to `path`, whole or not at all.

    Raises GraphError for a graph that holds objects of this process (callbacks, meshes), naming
    the operation and its source line, and TapestryError where the file cannot be written.
    """
    if isinstance(obj, Plan):
        document = _plan_document(obj)
    elif isinstance(obj, Front):
        document = {"tapestry_egg": "front", "version": VERSION, **front_document(obj)}
    elif isinstance(obj, Program | BlockGraph):
        document = _graph_document(obj if isinstance(obj, Program) else Program.of(obj))
    else:
        raise GraphError(
            f"a {type(obj).__name__} cannot be saved",
            hint="Save what te.trace, te.optimize or te.load gave.",
        )
    try:
        data = (_pretty(document, 2) + "\n").encode()
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError, TypeError) as e:
        raise GraphError(f"cannot be written as JSON: {e}", where=str(path)) from e
    write_atomic(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def load(path: str | Path) -> Program | Plan | Front:
    """The program, plan or front in a file that `save` wrote.

    Raises GraphError naming the file and the place in it, a JSON path such as
    `$.operations[3].inputs` or a line and column, when the file cannot be read, is malformed, or
    holds a graph that breaks an invariant; PlanError when a plan does not fit its graph.
    """
    document = _read(path)
    where = f"{path}: $"
    kind, version = document.get("tapestry_egg"), document.get("version")
    if kind not in ("graph", "plan", "front"):
        raise GraphError(
            "not a graph, plan or front of tapestry-egg",
            where=f"{where}.tapestry_egg",
            hint="Files are made by `tapestry-egg trace` and te.save.",
        )
    if type(version) is not int or version != VERSION:
        raise GraphError(
            f"file version {version!r}, this tapestry-egg reads {VERSION}",
            where=f"{where}.version",
            hint="Save it again with this version, or upgrade.",
        )
    try:
        if kind == "graph":
            return _program(document, where)
        if kind == "plan":
            return _plan(document, where)
        known = {k: v for k, v in document.items() if k not in ("tapestry_egg", "version")}
        return front_from_document(known, where)
    except RecursionError:
        raise GraphError("nested too deeply", where=where) from None


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to `path`; see `save`."""
    save(plan, path)


def load_plan(path: str | Path) -> Plan:
    """The plan in a file; see `load`. Raises PlanError when the file holds something else."""
    found = load(path)
    if not isinstance(found, Plan):
        raise PlanError(
            f"holds a {'front' if isinstance(found, Front) else 'graph'}, not a plan",
            where=str(path),
            hint="Optimize a graph for its front; a front's plans are front.plans.",
        )
    return found


# ---- kinds of files ----------------------------------------------------------------------------


def _graph_document(program: Program) -> dict[str, Any]:
    sources = SourceTable()
    record = msgspec.to_builtins(graph_record(program.graph, sources))
    return {
        "tapestry_egg": "graph",
        "version": VERSION,
        **({"jax": version} if (version := _jax_version()) else {}),
        "name": record.pop("name"),
        "in_tree": program.in_tree,
        "out_tree": program.out_tree,
        **record,
        "sources": [list(row) for row in sources.rows],
    }


def _program(document: dict[str, Any], where: str) -> Program:
    file: GraphFile = convert(document, GraphFile, where)
    graph = graph_from_record(file, file.sources, where)
    return program_of(graph, file.in_tree, file.out_tree, where)


def _plan_document(plan: Plan) -> dict[str, Any]:
    sources = SourceTable()
    record = msgspec.to_builtins(plan_record(plan, sources))
    program = plan.program or Program.of(plan.graph)
    return {
        "tapestry_egg": "plan",
        "version": VERSION,
        "name": record.pop("name"),
        **record,
        "in_tree": program.in_tree,
        "out_tree": program.out_tree,
        "sources": [list(row) for row in sources.rows],
    }


def _plan(document: dict[str, Any], where: str) -> Plan:
    file: PlanFile = convert(document, PlanFile, where)
    return plan_from_record(file, file.sources, file.in_tree, file.out_tree, where)


def _jax_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jax")
    except PackageNotFoundError:
        return ""


# ---- JSON --------------------------------------------------------------------------------------


def _read(path: str | Path) -> dict[str, Any]:
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise GraphError(f"cannot be read: {e.strerror or e}", where=str(path)) from None
    if data[:2] == b"\x1f\x8b":
        try:
            data = _decompressed(data, path)
        except (OSError, EOFError, zlib.error) as e:
            raise GraphError(f"cannot be decompressed: {e}", where=str(path)) from None
    try:
        document = msgspec.json.decode(data)
    except RecursionError:
        raise GraphError("nested too deeply", where=str(path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as e:
        line, column = _place(data, str(e))
        raise GraphError(f"not JSON: {e}", where=f"{path}:{line}:{column}") from None
    if not isinstance(document, dict):
        raise GraphError("expected an object", where=f"{path}: $")
    return document


#: Bytes of a decompressed file: a few kilobytes of gzip can stand for gigabytes of nothing.
_MOST_BYTES = 4 << 30


def _decompressed(data: bytes, path: str | Path) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        out = file.read(_MOST_BYTES + 1)
    if len(out) > _MOST_BYTES:
        raise GraphError(f"more than {_MOST_BYTES} bytes when decompressed", where=str(path))
    return out


def _place(data: bytes, message: str) -> tuple[int, int]:
    """Line and column of a syntax error."""
    found = re.search(r"byte (\d+)", message)
    if found:
        before = data[: int(found[1])]
    else:
        before = data
        try:
            json.loads(data)
        except json.JSONDecodeError as e:
            return e.lineno, e.colno
        except (ValueError, RecursionError):
            pass
    return before.count(b"\n") + 1, len(before) - (before.rfind(b"\n") + 1) + 1


def _pretty(value: Any, depth: int) -> str:
    """JSON with one entry of the outer `depth` levels per line, so that files can be compared."""
    text = _compact(value)
    if depth <= 0 or len(text) <= 100 or not isinstance(value, dict | list):
        return text
    if isinstance(value, dict):
        lines = [f"{_compact(k)}: {_pretty(v, depth - 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + "\n}"
    items = [_compact(v) for v in value]
    if any(isinstance(v, dict | list) for v in value):
        return "[\n" + ",\n".join(items) + "\n]"
    lines, line = [], ""
    for item in items:
        if line and len(line) + len(item) > 98:
            lines.append(line)
            line = ""
        line = f"{line}, {item}" if line else item
    return "[\n" + ",\n".join([*lines, line]) + "\n]"


def _compact(value: Any) -> str:
    return msgspec.json.encode(value).decode()
