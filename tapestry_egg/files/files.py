"""Saving and loading: programs, plans and fronts as versioned JSON, checked, never executed.

    {"tapestry_egg": "graph", "version": 1, "name": .., "values": [..], "operations": [..], ..}

A path that ends in `.gz` is compressed. What a file says is checked before it is believed: its
JSON, its records (`tracing/graph_documents.py`, `plan_documents.py`), its parameters
(`tracing/codec.py`) and the invariants of the graph. Files of plans hold the program as it was
given beside the forms that run, and are certified when they are loaded (`admission.py`). Their
digests, one for each section, only say where a file was damaged by accident. Loom graphs (`loom/`)
are read as well.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tapestry_egg.collector import rarely_collected
from tapestry_egg.errors import ExtractError, GraphError
from tapestry_egg.extract.front.front import Front, audit
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.packed import read_unpacked, write_packed
from tapestry_egg.plans.plan import CERTIFIED, Plan
from tapestry_egg.printable import brief
from tapestry_egg.rules.language.book import RuleBook
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.tracing.arguments import a
from tapestry_egg.tracing.graph_documents import (
    GraphRecord,
    SourceRecord,
    SourceTable,
    convert,
    graph_from_record,
    graph_record,
    program_of,
)
from tapestry_egg.tracing.trace import Program

from .admission import admit, admit_front, check_head
from .fingerprint import is_certified, keep
from .plan_documents import (
    FrontRecord,
    OriginRecord,
    PlanRecord,
    front_document,
    front_from_document,
    front_from_record,
    origin_from_record,
    origin_record,
    plan_from_record,
    plan_record,
)

if TYPE_CHECKING:
    from tapestry_egg.reference.executor import Covers

#: Versions by kind. Plans and fronts of version 1 held no program that they could be held against.
VERSIONS = {"graph": 1, "plan": 3, "front": 3}


#: Keys of documents of other tools -> the plugin whose `program_from_document` reads them.
_FOREIGN = {"nodes": "loom.read"}


class GraphFile(GraphRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a graph file holds beside the graph itself."""

    tapestry_egg: str
    version: int
    in_tree: Any
    out_tree: Any
    state: dict[str, str] = {}
    parameters: list[str] = []
    jax: str = ""
    sources: list[SourceRecord] = []


class PlanFile(PlanRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan file holds beside the plan itself."""

    tapestry_egg: str
    version: int
    digests: dict[str, str]
    origin: OriginRecord
    sources: list[SourceRecord] = []


class FrontFile(FrontRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a front file holds beside the front itself."""

    tapestry_egg: str
    version: int
    digests: dict[str, str]


class _Head(msgspec.Struct, frozen=True):
    """What a file says that it is."""

    tapestry_egg: str


@rarely_collected()
def save(obj: Program | BlockGraph | Plan | Front, path: str | Path) -> None:
    """Write a program, a graph, a plan or a front to `path`, whole or not at all.

    A plan is checked by the ledger first, those of a front when one is chosen. Raises PlanError
    where it refuses the plan, GraphError for a graph that holds objects of this process (callbacks,
    meshes), naming the operation and its source line, and TapestryError where the file cannot be
    written.
    """
    _check_path(path, "save")
    if isinstance(obj, Plan):
        audit(obj)
        document = sealed(_plan_document(obj))
    elif isinstance(obj, Front):
        document = sealed(_head("front", front_document(obj)))
    elif isinstance(obj, Program | BlockGraph):
        document = _graph_document(obj if isinstance(obj, Program) else Program.of(obj))
    else:
        raise GraphError(
            f"{a(obj)} cannot be saved",
            hint="Save what te.trace, te.optimize or te.load gave.",
        )
    try:
        data = (_pretty(document, 2) + "\n").encode()
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError, TypeError) as e:
        raise GraphError(f"cannot be written as JSON: {e}", where=str(path)) from e
    write_packed(path, data)
    plans = (obj,) if isinstance(obj, Plan) else obj.every if isinstance(obj, Front) else ()
    if plans and all(plan in CERTIFIED for plan in plans):
        if isinstance(obj, Front):
            check_head(obj, str(path))
        keep(data, plans)


def load(
    path: str | Path, *, rules: Sequence[str | Path | RuleBook] = (), certify: bool = True
) -> Program | Plan | Front:
    """The program, plan or front in a file that `save` wrote, or the program of a Loom graph.

    Shards that a Loom graph has are checked, and left aside; `load_sharded` gives them.
    Plans are certified: they compute what the program in the file does, are legal, and cost what
    they say. `rules` gives the user's rule books that plans were made with, where they are no
    longer at their place. `certify=False` reads plans without believing them; do not run those.

    Raises GraphError naming the file and the place in it, a JSON path such as
    `$.operations[3].inputs` or a line and column, when the file cannot be read, is malformed, or
    holds a graph that breaks an invariant; PlanError when a plan does not fit its graph, or what
    the file says of it is not so.
    """
    return _load(path, rules, certify, shards=False)[0]


def load_sharded(path: str | Path) -> tuple[Program | Plan | Front, Covers]:
    """What `load` gives, and the covers of those operations that a Loom graph has in shards.

    Raises GraphError, too, for shards of a kernel without a template.
    """
    return _load(path, (), True, shards=True)


@rarely_collected()
def _load(
    path: str | Path, rules: Sequence[str | Path | RuleBook], certify: bool, shards: bool
) -> tuple[Program | Plan | Front, Covers]:
    data, where = _read(path), f"{path}: $"
    if certify and is_certified(data):
        return _known(data, where), {}
    document = _decoded(data, path)
    try:
        for key, plugin in _FOREIGN.items():
            if "tapestry_egg" not in document and key in document:
                reader = import_module(f"tapestry_egg.{plugin}").program_from_document
                return reader(document, where, shards=shards)
        found = _loaded(document, where, rules, certify, Path(path).parent)
    except RecursionError:
        raise GraphError("nested too deeply", where=where) from None
    plans = found.every if isinstance(found, Front) else (found,) if isinstance(found, Plan) else ()
    if certify and plans:
        keep(data, plans)
    return found, {}


def _known(data: bytes, where: str) -> Plan | Front:
    """The plans in a file that was certified before, read as far as they are asked for."""
    if msgspec.json.decode(data, type=_Head).tapestry_egg == "front":
        file = msgspec.json.decode(data, type=FrontFile)
        found: Plan | Front = front_from_record(file, where, late=True)
    else:
        found = _plan(msgspec.json.decode(data, type=PlanFile), where, late=True)
    for plan in found.every if isinstance(found, Front) else (found,):
        CERTIFIED.add(plan)
    return found


def _loaded(
    document: dict[str, Any],
    where: str,
    rules: Sequence[str | Path | RuleBook],
    certify: bool,
    folder: Path,
) -> Program | Plan | Front:
    kind, version = document.get("tapestry_egg"), document.get("version")
    if not isinstance(kind, str) or kind not in VERSIONS:
        raise GraphError(
            "not a graph, plan or front of tapestry-egg",
            where=f"{where}.tapestry_egg",
            hint="Files are made by `tapestry-egg trace` and te.save; Loom graphs have `nodes`.",
        )
    if type(version) is not int or version != VERSIONS[kind]:
        old = type(version) is int and version < VERSIONS[kind]
        raise GraphError(
            f"file version {brief(version)}, this tapestry-egg reads {kind}s of {VERSIONS[kind]}",
            where=f"{where}.version",
            hint="Save it again with this version, or upgrade."
            if not old
            else "Trace the program again."
            if kind == "graph"
            else "Its plans cannot be checked against the program they were made of: optimize the "
            "graph again.",
        )
    if kind == "graph":
        return _program(document, where)
    if kind == "plan":
        found: Plan | Front = _plan(convert(document, PlanFile, where), where)
    else:
        known = {
            k: v for k, v in document.items() if k not in ("tapestry_egg", "version", "digests")
        }
        found = front_from_document(known, where)
    _check_digests(document, where)
    if certify:
        if isinstance(found, Front):
            admit_front(found, where, rules, folder)
        else:
            admit([found], [where], where, rules, folder)
    return found


# ---- kinds of files ----------------------------------------------------------------------------


def _graph_document(program: Program) -> dict[str, Any]:
    sources = SourceTable()
    record = msgspec.to_builtins(graph_record(program.graph, sources))
    return {
        "tapestry_egg": "graph",
        "version": VERSIONS["graph"],
        **({"jax": version} if (version := _jax_version()) else {}),
        "name": record.pop("name"),
        "in_tree": program.in_tree,
        "out_tree": program.out_tree,
        **({"state": dict(program.state)} if program.state else {}),
        "parameters": list(program.parameters),
        **record,
        "sources": [list(row) for row in sources.rows],
    }


def _program(document: dict[str, Any], where: str) -> Program:
    file: GraphFile = convert(document, GraphFile, where)
    graph = graph_from_record(file, file.sources, where)
    program = program_of(graph, file.in_tree, file.out_tree, where)
    try:
        feedback_pairs(graph, file.state)
    except ExtractError as e:
        raise GraphError(e.what, where=f"{where}.{e.where}", hint=e.hint) from None
    return replace(program, state=file.state, parameters=tuple(file.parameters))


def _plan_document(plan: Plan) -> dict[str, Any]:
    sources = SourceTable()
    origin = msgspec.to_builtins(origin_record(plan, sources))
    record = msgspec.to_builtins(plan_record(plan, sources))
    name = {"name": record.pop("name")}
    rows = [list(row) for row in sources.rows]
    return _head("plan", {**name, **record, "origin": origin, "sources": rows})


def _plan(file: PlanFile, where: str, late: bool = False) -> Plan:
    @cache
    def graph() -> BlockGraph:
        return graph_from_record(file.graph, file.sources, f"{where}.graph")

    if not late:
        graph()
    program, origin = origin_from_record(file.origin, file.sources, f"{where}.origin")
    return plan_from_record(file, graph, program, origin, where, late)


def _head(kind: str, document: dict[str, Any]) -> dict[str, Any]:
    return {"tapestry_egg": kind, "version": VERSIONS[kind], **document}


# ---- digests -----------------------------------------------------------------------------------


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """The document of a plan or front with the digests of its sections."""
    rest = {k: v for k, v in document.items() if k != "digests"}
    head = {k: rest.pop(k) for k in ("tapestry_egg", "version")}
    return {**head, "digests": _digests(rest), **rest}


def _digests(document: Mapping[str, Any]) -> dict[str, str]:
    """By JSON path, SHA-256 of each section as JSON with sorted keys; of `graphs` and `plans`, of
    each entry."""
    parts: dict[str, Any] = {}
    for name, value in document.items():
        if name in ("graphs", "plans") and isinstance(value, list):
            parts.update({f"{name}[{i}]": v for i, v in enumerate(value)})
        else:
            parts[name] = value
    encode = msgspec.json.Encoder(order="sorted").encode
    return {name: hashlib.sha256(encode(value)).hexdigest() for name, value in parts.items()}


def _check_digests(document: Mapping[str, Any], where: str) -> None:
    """Refuse what was damaged by accident; that what is there is true is checked apart."""
    rest = {k: v for k, v in document.items() if k not in ("tapestry_egg", "version", "digests")}
    said, found = document.get("digests"), _digests(rest)
    if not isinstance(said, dict):
        raise GraphError("there are no digests", where=f"{where}.digests")
    for name in dict.fromkeys([*found, *said]):
        if said.get(name) != found.get(name):
            raise GraphError(
                "is not as it was written: its digest differs",
                where=f"{where}.{name}",
                hint="The file was damaged or edited. Optimize the graph again.",
            )


def _jax_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jax")
    except PackageNotFoundError:
        return ""


# ---- JSON --------------------------------------------------------------------------------------


def _check_path(path: object, where: str) -> None:
    if not isinstance(path, str | Path):
        raise GraphError(
            f"expected the path of a file, given {path!r:.60}",
            where=where,
            hint="Write te.load('out/x.front.json'), te.save(front, 'out/x.front.json').",
        )


def _read(path: str | Path) -> bytes:
    _check_path(path, "load")
    return read_unpacked(path, GraphError)


def _decoded(data: bytes, path: str | Path) -> dict[str, Any]:
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
