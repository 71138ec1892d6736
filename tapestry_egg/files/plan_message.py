"""A front as bytes, for another process or another day, that has traced the same program.

What the receiver has is left out and taken from its own program: large constants, objects of the
process (callbacks, meshes), the user's pytrees, and the lines of the source.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from tapestry_egg.errors import GraphError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.graph.arrays import encode_bytes
from tapestry_egg.graph.blockgraph import BlockGraph, Source
from tapestry_egg.plans.plan import BodyPlan, Plan
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.tracing.codec import HANDLES
from tapestry_egg.tracing.plain import handles_in

from .plan_documents import front_document, front_from_document

if TYPE_CHECKING:
    from tapestry_egg.tracing.trace import Program

#: Characters of a constant that stands in the message itself.
_SMALL = 4096
#: Bytes of a message: a few kilobytes can stand for gigabytes of nothing.
_MOST_BYTES = 4 << 30
#: In place of a handle: plain data, as no parameter of JAX has it.
_OBJECT = "tapestry_egg.object"


def packed(front: Front, program: Program) -> bytes:
    """The front as bytes.

    Raises GraphError where a plan holds an object of this process that the program does not.
    """
    numbers = {h: k for k, h in enumerate(_handles(program.graph))}

    def number(handle: int) -> Any:
        if handle not in numbers:
            raise GraphError(
                f"a plan holds {HANDLES.get(handle)!r}, which is not of the program",
                where=front.graph_name,
                hint="Such a plan cannot be given to another process.",
            )
        return {"$dict": [[_OBJECT, numbers[handle]]]}

    bare = _with_plans(front, lambda p: _with_handles(p, number))
    document = front_document(bare)
    known = {digest: k for k, (digest, _) in enumerate(_large(program.graph))}
    _exchange(document, lambda text: _constant_left_out(text, known))
    message = {
        "front": document,
        "lines": [_row(s) for s in _sources(program.graph)],
    }
    return zlib.compress(msgspec.json.encode(message), 3)


def unpacked(data: bytes, program: Program) -> Front:
    """The front in the bytes that `packed` made, over the program as this process has it.

    Nothing that it says of its plans is believed yet: see `admission.py`. Raises GraphError or
    PlanError for bytes that hold something else.
    """
    try:
        return _unpacked(data, program)
    except (
        *(zlib.error, msgspec.MsgspecError, RecursionError),
        *(ValueError, LookupError, TypeError, AttributeError),
    ) as error:
        raise GraphError(f"not a packed front: {type(error).__name__}: {error}") from None


def _unpacked(data: bytes, program: Program) -> Front:
    message = msgspec.json.decode(_decompressed(data))
    document, lines = message["front"], message["lines"]
    known = [text for _, text in _large(program.graph)]
    _exchange(document, lambda form: _constant_put_back(form, known))
    rows = dict(zip(map(tuple, lines), map(_row, _sources(program.graph)), strict=True))
    document["sources"] = [rows.get(tuple(row), row) for row in document["sources"]]
    front = front_from_document(document)
    handles = list(_handles(program.graph))
    return _with_plans(
        front, lambda p: _with_lines(replace(_with_objects(p, handles), program=program))
    )


def _decompressed(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    out = stream.decompress(data, _MOST_BYTES)
    if not stream.eof:
        raise GraphError(f"is cut off, or more than {_MOST_BYTES} bytes when decompressed")
    return out


def _with_plans(front: Front, changed: Callable[[Plan], Plan]) -> Front:
    """The front with every plan changed, that of the user's own shardings too."""
    return replace(
        front,
        plans=tuple(map(changed, front.plans)),
        original=front.original and changed(front.original),
    )


# ---- objects of a process ----------------------------------------------------------------------


def _handles(graph: BlockGraph) -> Iterator[int]:
    """The handles of a program, each once, in the order in which they occur."""
    return iter(dict.fromkeys(h for op in graph.walk() for h in handles_in(op.params)))


def _with_handles(plan: Plan, number: Callable[[int], Any]) -> Plan:
    def exchange(value: Mapping[str, Any]) -> Any:
        return number(value["$handle"]) if "$handle" in value else None

    return _with_params(plan, exchange, lambda params: bool(handles_in(params)))


def _with_objects(plan: Plan, handles: list[int]) -> Plan:
    def exchange(value: Mapping[str, Any]) -> Any:
        rows = value.get("$dict")
        if isinstance(rows, list) and len(rows) == 1 and rows[0][0] == _OBJECT:
            return {"$handle": handles[rows[0][1]]}
        return None

    return _with_params(plan, exchange, lambda _: True) if handles else plan


def _with_params(
    plan: Plan,
    exchange: Callable[[Mapping[str, Any]], Any],
    concerned: Callable[[Mapping[str, Any]], bool],
) -> Plan:
    """The plan with dicts in its operations' parameters exchanged (None: left as they are)."""
    done: dict[int, BlockGraph] = {}

    def of_value(value: Any) -> Any:
        if isinstance(value, Mapping):
            other = exchange(value)
            return {k: of_value(v) for k, v in value.items()} if other is None else other
        return [of_value(v) for v in value] if isinstance(value, list) else value

    def of_graph(graph: BlockGraph) -> BlockGraph:
        if id(graph) not in done:
            done[id(graph)] = replace(
                graph,
                operations=tuple(
                    replace(
                        op,
                        params=of_value(op.params) if concerned(op.params) else op.params,
                        regions=tuple(map(of_graph, op.regions)),
                    )
                    for op in graph.operations
                ),
            )
        return done[id(graph)]

    def of_body(body: BodyPlan) -> BodyPlan:
        return replace(
            body,
            graph=of_graph(body.graph),
            strategies=tuple(
                replace(s, bodies=tuple(map(of_body, s.bodies))) for s in body.strategies
            ),
        )

    known = plan.program
    given = None if known is None else replace(known, graph=of_graph(known.graph))
    return replace(plan, body=of_body(plan.body), program=given)


def _with_lines(plan: Plan) -> Plan:
    """The plan with its collectives told of at the lines where their readers stand here."""
    here = planned_collectives(plan)
    if len(here) != len(plan.collectives):
        return plan  # refused when it is certified
    told = zip(plan.collectives, here, strict=True)
    return replace(plan, collectives=tuple(replace(c, source=h.source) for c, h in told))


# ---- large constants and source lines ----------------------------------------------------------


def _large(graph: BlockGraph) -> list[tuple[str, str]]:
    """Large constants of a program: the digest of each one's base64, and that."""
    found: dict[str, str] = {}
    graphs = [graph, *(r for op in graph.walk() for r in op.regions)]
    for array in (a for g in graphs for a in g.constants.values()):
        if array.nbytes * 4 // 3 > _SMALL:
            text = encode_bytes(array)
            found.setdefault(_digest(text), text)
    return list(found.items())


def _constant_left_out(form: Any, known: Mapping[str, int]) -> Any:
    text = form.get("data") if isinstance(form, dict) else None
    if isinstance(text, str) and len(text) > _SMALL and (k := known.get(_digest(text))) is not None:
        return {"of": k}
    return form


def _constant_put_back(form: Any, known: list[str]) -> Any:
    return {"data": known[form["of"]]} if isinstance(form, dict) and "of" in form else form


def _exchange(value: Any, constant: Callable[[Any], Any]) -> None:
    """Exchange the constants of all graphs in a document, in place."""
    if isinstance(value, dict):
        constants = value.get("constants")
        if isinstance(constants, dict):
            for name, form in constants.items():
                constants[name] = constant(form)
        for inner in value.values():
            if isinstance(inner, dict | list):
                _exchange(inner, constant)
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        for inner in value:
            _exchange(inner, constant)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sources(graph: BlockGraph) -> list[Source]:
    return [s for op in graph.walk() for s in (op.source, *(op.places or ()))]


def _row(source: Source) -> list[Any]:
    return [source.file, source.line, source.column, source.function, source.text]
