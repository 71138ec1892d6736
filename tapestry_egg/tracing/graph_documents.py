"""Graphs and programs as documents: the plain records that graph files hold, checked both ways."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import numpy as np

from tapestry_egg.errors import GraphError, TargetError
from tapestry_egg.graph.arrays import decode_bytes, encode_bytes, is_dtype
from tapestry_egg.graph.blockgraph import (
    REGION_KERNELS,
    BlockGraph,
    Operation,
    Prepared,
    Source,
    TensorType,
    region_fault,
    verify_graph,
)
from tapestry_egg.graph.pytrees import check_tree, is_transparent, leaf_count, leaf_paths

from .constants import with_prepared
from .plain import check_params, finite, handles_in
from .trace import Program

#: file, line, column, function, text of the line
SourceRecord = tuple[str, int, int, str, str]


class Blob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of a constant: little-endian, C order, base64; its type is in the value table."""

    data: str


class OperationRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One operation; `source` is a row of the file's source table."""

    kernel: str
    inputs: list[int]
    outputs: list[int]
    params: dict[str, Any] = {}
    regions: list[GraphRecord] = []
    source: int | None = None
    scope: str = ""
    remat: int | None = None
    effectful: bool = False
    places: list[int] | None = None


class PreparedRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What is computed before a graph runs: constants of it, from `constants` that it may not
    have itself."""

    operations: list[OperationRecord]
    constants: dict[str, bool | int | float | Blob] = {}


class GraphRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One graph. `values` is the table of types, `float32[8,64]`, with a `~` where weak.

    A constant is a number where its type is a scalar that the number gives exactly, else bytes.
    """

    name: str
    values: list[str]
    inputs: list[int]
    outputs: list[int]
    constants: dict[str, bool | int | float | Blob] = {}
    operations: list[OperationRecord] = []
    input_names: list[str] = []
    output_names: list[str] = []
    donated: list[bool] = []
    prepared: PreparedRecord | None = None


@dataclass
class SourceTable:
    """Source lines by number, so that a line is written once; and the records of operations, which
    several forms of a program have in common."""

    rows: list[SourceRecord] = field(default_factory=list)
    _numbers: dict[Source, int] = field(default_factory=dict)
    _operations: dict[int, tuple[Operation, OperationRecord]] = field(default_factory=dict)

    def put(self, source: Source) -> int | None:
        return None if source == Source() else self.row(source)

    def row(self, source: Source) -> int:
        """The number of a source, new or not."""
        if source not in self._numbers:
            self._numbers[source] = len(self.rows)
            row = (source.file, source.line, source.column, source.function, source.text)
            self.rows.append(row)
        return self._numbers[source]

    def operation(self, op: Operation, place: str) -> OperationRecord:
        """The record of an operation, made once. Raises as `graph_record` does."""
        if id(op) not in self._operations:
            self._operations[id(op)] = op, _operation_record(op, place, self)
        return self._operations[id(op)][1]


# ---- to documents ------------------------------------------------------------------------------


def graph_record(graph: BlockGraph, sources: SourceTable) -> GraphRecord:
    """The record of a graph. Raises GraphError for an operation that holds a process's object."""

    def constants(of: Mapping[int, np.ndarray], but: Collection[int]) -> dict[str, Any]:
        return {str(v): constant_form(of[v], graph.values[v]) for v in of if v not in but}

    def operations(of: Sequence[Operation]) -> list[OperationRecord]:
        return [sources.operation(op, f"{graph.name}, operation {i}") for i, op in enumerate(of)]

    before = graph.prepared
    computed = {v for op in before.operations for v in op.outputs} if before else set()
    return GraphRecord(
        name=graph.name,
        values=[type_text(t) for t in graph.values],
        inputs=list(graph.inputs),
        outputs=list(graph.outputs),
        constants=constants(graph.constants, computed),
        operations=operations(graph.operations),
        input_names=list(graph.input_names),
        output_names=list(graph.output_names),
        donated=list(graph.donated),
        prepared=PreparedRecord(
            operations=operations(before.operations), constants=constants(before.constants, ())
        )
        if before
        else None,
    )


def graph_document(graph: BlockGraph) -> dict[str, Any]:
    """The graph as plain data, without its sources; for graphs inside parameters."""
    return msgspec.to_builtins(graph_record(graph, SourceTable()))  # type: ignore[no-any-return]


def _operation_record(op: Operation, place: str, sources: SourceTable) -> OperationRecord:
    held = [name for name, value in op.params.items() if handles_in(value)]
    if held:
        raise GraphError(
            f"holds an object of this process ({', '.join(held)})",
            where=f"{place} ({op.kernel}, {op.source})",
            hint="Such a graph can be optimized and run here, but not stored. To store it, take "
            "the callback, mesh or hand-written kernel out of the function.",
        )
    return OperationRecord(
        kernel=op.kernel,
        inputs=list(op.inputs),
        outputs=list(op.outputs),
        params={name: finite(value) for name, value in op.params.items()},
        regions=[graph_record(region, sources) for region in op.regions],
        source=sources.put(op.source),
        scope=op.scope,
        remat=op.remat,
        effectful=op.effectful,
        places=None if op.places is None else [sources.row(place) for place in op.places],
    )


def type_text(type_: TensorType) -> str:
    """`float32[8,64]`, with a `~` where the type is weak."""
    return f"{type_.dtype}[{','.join(map(str, type_.shape))}]{'~' if type_.weak else ''}"


def constant_form(array: np.ndarray, type_: TensorType) -> bool | int | float | Blob:
    """A constant as files have it: a number where that is exact, else its bytes."""
    array = np.asarray(array)
    if type_.rank == 0 and array.dtype.kind in "biuf":
        number = array.item()
        if np.asarray(number, array.dtype).tobytes() == array.tobytes() and np.isfinite(number):
            return number  # type: ignore[no-any-return]
    return Blob(encode_bytes(array))


# ---- from documents ----------------------------------------------------------------------------


def graph_from_record(
    record: GraphRecord, sources: Sequence[SourceRecord] = (), where: str = "$"
) -> BlockGraph:
    """The graph of a record, with every invariant checked.

    Raises GraphError whose `where` is `where` extended by the JSON path of the fault.
    """
    rows = [Source(*row) for row in sources]
    graph = _graph(record, rows, where)
    verify_graph(graph, where=where)
    return graph


def graph_from_document(document: object, where: str = "$") -> BlockGraph:
    """The graph of a plain document, see `graph_document`."""
    return graph_from_record(convert(document, GraphRecord, where), (), where)


def convert(document: object, record: Any, where: str = "$") -> Any:
    """A document as the record class it must be. Raises GraphError with the JSON path."""
    try:
        return msgspec.convert(document, record)
    except msgspec.ValidationError as e:
        what, _, path = str(e).partition(" - at ")
        raise GraphError(what, where=where + path.strip("`").removeprefix("$")) from None
    except TargetError as e:
        raise GraphError(e.what, where=where, hint=e.hint) from None
    except RecursionError:
        raise GraphError("nested too deeply", where=where) from None


#: Graphs within graphs: loops in loops, conditionals in loops.
_MOST_LEVELS = 50


def _graph(record: GraphRecord, rows: Sequence[Source], where: str, level: int = 0) -> BlockGraph:
    if level > _MOST_LEVELS:
        raise GraphError(f"more than {_MOST_LEVELS} graphs within graphs", where=where)
    values = tuple(
        type_of_text(text, f"{where}.values[{i}]") for i, text in enumerate(record.values)
    )

    def constants(forms: Mapping[str, Any], where: str) -> dict[int, np.ndarray]:
        found = {}
        for key, form in forms.items():
            at = f"{where}.constants.{key}"
            # One spelling of each number, so that none is there twice.
            if not re.fullmatch(r"0|[1-9][0-9]{0,8}", key) or int(key) >= len(values):
                raise GraphError(f"{key!r} is not a value of this graph", where=at)
            found[int(key)] = constant_of(form, values[int(key)], at)
        return found

    def operations(records: Sequence[OperationRecord], where: str) -> tuple[Operation, ...]:
        return tuple(
            _operation(op, values, rows, f"{where}.operations[{i}]", level)
            for i, op in enumerate(records)
        )

    graph = BlockGraph(
        name=record.name,
        values=values,
        operations=operations(record.operations, where),
        inputs=tuple(record.inputs),
        outputs=tuple(record.outputs),
        constants=constants(record.constants, where),
        input_names=tuple(record.input_names),
        output_names=tuple(record.output_names),
        donated=tuple(record.donated),
    )
    if record.prepared is None:
        return graph
    before = Prepared(
        operations(record.prepared.operations, f"{where}.prepared"),
        constants(record.prepared.constants, f"{where}.prepared"),
    )
    return with_prepared(graph, before, f"{where}.prepared")


def _operation(
    record: OperationRecord,
    values: Sequence[TensorType],
    rows: Sequence[Source],
    where: str,
    level: int,
) -> Operation:
    if record.source is not None and not 0 <= record.source < len(rows):
        raise GraphError(f"there is no source {record.source}", where=f"{where}.source")
    if any(not 0 <= k < len(rows) for k in record.places or ()):
        raise GraphError(f"there are {len(rows)} sources", where=f"{where}.places")
    check_params(record.params, f"{where}.params")
    regions = tuple(
        _graph(region, rows, f"{where}.regions[{r}]", level + 1)
        for r, region in enumerate(record.regions)
    )
    op = Operation(
        kernel=record.kernel,
        inputs=tuple(record.inputs),
        outputs=tuple(record.outputs),
        params=record.params,
        regions=regions,
        source=Source() if record.source is None else rows[record.source],
        scope=record.scope,
        remat=record.remat,
        effectful=record.effectful,
        places=None if record.places is None else tuple(rows[k] for k in record.places),
    )
    known = all(0 <= v < len(values) for v in (*op.inputs, *op.outputs))
    if known and (op.regions or op.kernel in REGION_KERNELS):
        types = [values[v] for v in op.inputs], [values[v] for v in op.outputs]
        if fault := region_fault(op, *types):
            raise GraphError(f"{op.kernel}: {fault}", where=f"{where}.regions")
    return op


@cache
def _parsed_type(text: str) -> TensorType | None:
    found = re.fullmatch(r"([A-Za-z0-9_<>]+)\[((?:[0-9]{1,15}(?:,[0-9]{1,15})*)?)\](~?)", text)
    if found is None or not is_dtype(found[1]):
        return None
    shape = tuple(int(d) for d in found[2].split(",") if d)
    return TensorType(shape, found[1], bool(found[3]))


def type_of_text(text: str, where: str) -> TensorType:
    """The type that `type_text` wrote."""
    type_ = _parsed_type(text)
    if type_ is None:
        raise GraphError(f"{text!r} is not a type such as float32[8,64]", where=where)
    if max(type_.nbytes, type_.size) >= _MOST_BYTES:
        raise GraphError(f"{text} has more bytes than can be counted in 63 bits", where=where)
    return type_


# Compilers count bytes in 64 bits with a sign, and end the process where that does not do.
_MOST_BYTES = 1 << 63


def constant_of(form: bool | int | float | Blob, type_: TensorType, where: str) -> np.ndarray:
    """The constant that `constant_form` wrote. Raises GraphError where it is not of the type."""
    try:
        if isinstance(form, Blob):
            return decode_bytes(form.data, type_.dtype, type_.shape)
        kinds = {"bool": (bool,), "float": (int, float)}
        kind = "float" if type_.dtype in ("float16", "float32", "float64") else type_.dtype
        if type_.rank != 0 or type(form) not in kinds.get(kind, (int,)):
            raise GraphError(f"{form!r} is not a constant of type {type_text(type_)}")
        with np.errstate(over="raise"):
            return np.asarray(form, np.dtype(type_.dtype))
    except GraphError as e:
        raise GraphError(e.what, where=where, hint=e.hint) from None
    except (TypeError, ValueError, ArithmeticError, MemoryError) as e:
        raise GraphError(f"not a constant of type {type_text(type_)}: {e}", where=where) from None


def program_of(graph: BlockGraph, in_tree: Any, out_tree: Any, where: str = "$") -> Program:
    """The program of a loaded graph, with its trees checked against the graph."""
    for name, tree, count in (
        ("in_tree", in_tree, len(graph.inputs)),
        ("out_tree", out_tree, len(graph.outputs)),
    ):
        at = f"{where}.{name}"
        check_tree(tree, at)
        if leaf_count(tree) != count:
            raise GraphError(f"{leaf_count(tree)} leaves for {count} values", where=at)
    halves = in_tree.get("tuple") if isinstance(in_tree, dict) else None
    kinds = [next(iter(h), "") if isinstance(h, dict) else "" for h in halves or ()]
    if kinds != ["tuple", "dict"]:
        raise GraphError("expected the arguments, a tuple and a dict", where=f"{where}.in_tree")
    return Program(graph, in_tree, out_tree)


def check_names(program: Program, where: str = "$") -> None:
    """Check that a program's trees have the leaves that the graph's inputs and outputs are named
    after: what is called `['w']` in one is so in the other.

    Raises GraphError. What lies within classes of the user's is not looked into.
    """
    graph = program.graph
    args, kwargs = (half for half in program.in_tree["tuple"])
    paths = [
        *(f"[{i}]{p}" for i, a in enumerate(args["tuple"]) for p in leaf_paths(a)),
        *leaf_paths(kwargs),
    ]
    for name, tree, given, names in (
        ("in_tree", program.in_tree, paths, graph.input_names),
        ("out_tree", program.out_tree, leaf_paths(program.out_tree), graph.output_names),
    ):
        bare = Program.of(graph)  # takes and gives flat tuples, whatever the values are called
        if not names or not is_transparent(tree) or tree == getattr(bare, name):
            continue
        place: dict[str, str] = {}  # arguments have the numbers that the user's function gives them
        for path, said in zip(given, names, strict=True):
            if name == "in_tree" and (found := re.match(r"\[[0-9]+\]", path)):
                first = re.match(r"\[[0-9]+\]", said)
                moved = place.setdefault(found[0], first[0] if first else "")
                path = moved + path[found.end() :]
            if path != said:
                raise GraphError(f"has {path} where the graph has {said}", where=f"{where}.{name}")
        if len(set(place.values())) != len(place):
            raise GraphError("two arguments have one number", where=f"{where}.{name}")
