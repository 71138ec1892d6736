"""Encode: a flat program and a mesh as relations of integers for the e-graph.

The facts hold projections, roles, sizes, axes and the layout algebra. No fact says how an operation
may be sharded; that is for the rules to derive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.ids import SignatureId
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.graph.layout_algebra import LayoutAlgebra
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.schedule.flatten import FlatProgram

Row = tuple[int | str, ...]


@dataclass(frozen=True)
class Encoding:
    """The facts of one program on one mesh, and the tables that their numbers index."""

    program: FlatProgram
    algebra: LayoutAlgebra
    signatures: tuple[OperationSignature, ...]
    signature_of: tuple[SignatureId, ...]  # by instance
    facts: Mapping[str, list[Row]]


def encode(program: FlatProgram, mesh: MeshShape) -> Encoding:
    """Number the signatures of a flat program and write its facts for one mesh shape."""
    return encode_together((program,), mesh)[0]


def encode_together(programs: Sequence[FlatProgram], mesh: MeshShape) -> list[Encoding]:
    """The same for several programs: all have the facts and numbers of the signatures of all."""
    numbers: dict[OperationSignature, SignatureId] = {}
    by_identity: dict[int, SignatureId] = {}
    signature_of: list[list[SignatureId]] = []
    for program in programs:
        signature_of.append([])
        for instance in program.instances:
            key = id(instance.signature)
            if key not in by_identity:
                by_identity[key] = numbers.setdefault(instance.signature, SignatureId(len(numbers)))
            signature_of[-1].append(by_identity[key])
    signatures = tuple(numbers)
    ranks = sorted({t.rank for s in signatures for t in (*s.input_types, *s.output_types)} | {0})
    monoids = _reachable_monoids(signatures)
    algebra = LayoutAlgebra(mesh, tuple(ranks), tuple(sorted(monoids)))
    facts = all_facts(algebra, signatures)
    return [
        Encoding(program, algebra, signatures, tuple(own), facts)
        for program, own in zip(programs, signature_of, strict=True)
    ]


def all_facts(
    algebra: LayoutAlgebra, signatures: Sequence[OperationSignature]
) -> dict[str, list[Row]]:
    """The facts of a mesh, and of signatures by their places."""
    facts: dict[str, list[Row]] = {name: list(rows) for name, rows in algebra.facts().items()}
    for number, signature in enumerate(signatures):
        for name, rows in signature_facts(number, signature, algebra.monoid_number).items():
            facts.setdefault(name, []).extend(rows)
    return facts


def _reachable_monoids(signatures: tuple[OperationSignature, ...]) -> set[str]:
    """Monoids under which some value can be partial: those of reduce dims, and what becomes of
    them through passages."""
    found = {d.monoid for s in signatures for d in s.index if d.role == "reduce" and d.monoid}
    passages = {(p.monoid_in, p.monoid_out) for s in signatures for p in s.passages}
    while more := {b for a, b in passages if a in found} - found:
        found |= more
    return found | {"sum"}


def signature_facts(
    number: int, signature: OperationSignature, monoid_number: Mapping[str, int]
) -> dict[str, list[Row]]:
    """The facts of one signature: its index space, roles, projections and passages."""
    s = number
    facts: dict[str, list[Row]] = {
        "signature": [(s,)],
        "last-dim": [(s, len(signature.index))],
        "kernel": [(s, signature.kernel)],
    }

    def add(name: str, *row: int | str) -> None:
        facts.setdefault(name, []).append(row)

    empty = 0 in signature.extents  # no part of an index space without points gives a block
    for d, dim in enumerate(signature.index):
        add("extent", s, d, dim.size)
        if empty:
            continue
        if dim.role in ("map", "scan", "join"):  # results are whole, or in blocks; never partial
            add("map-dim", s, d)
            if dim.role == "join":
                add("join-dim", s, d)
        elif dim.role == "reduce" and dim.monoid is not None:
            add("reduce-dim", s, d, monoid_number[dim.monoid])
    operands = len(signature.inputs)
    ports = (*signature.inputs, *signature.outputs)
    types = (*signature.input_types, *signature.output_types)
    for p, (projection, tensor) in enumerate(zip(ports, types, strict=True)):
        add("port", s, p, tensor.rank)
        add("operand" if p < operands else "output", s, p)
        if p < operands:
            add("initial" if p in signature.initial else "reads-value", s, p)
            if signature.fusion != "view":
                add("picks", s, p)
        for k in range(tensor.rank):
            add("tensor", s, p, k, tensor.shape[k])
            add("corner", s, p, k, projection.offset[k], projection.shape[k])
            for d in range(len(signature.index)):
                add("coefficient", s, p, k, d, projection.matrix[k][d])
    for g, group in enumerate(signature.passages):
        if group.monoid_in not in monoid_number:
            continue  # no value of this program is ever partial so
        if any(_is_key(types[p]) for p in (*group.inputs, *range(operands, len(types)))):
            continue
        add("passage", s, g, monoid_number[group.monoid_out])
        for p in range(operands):
            if p in group.inputs:
                add("passing", s, g, p, monoid_number[group.monoid_in])
            else:
                add("standing", s, g, p)
    return facts


def _is_key(tensor: TensorType) -> bool:
    return tensor.dtype.startswith("key<")
