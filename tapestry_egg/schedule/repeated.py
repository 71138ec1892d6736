"""Views and expansions of something small, repeated in front of every reader."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, without_unread
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature

from .units import EXPANSION


def repeat_cheap(graph: BlockGraph) -> BlockGraph:
    """Give every reader its own copy of views and of expansions of something small.

    Compilers repeat such operations inside each reading kernel instead of storing them; making
    the copies explicit lets each reader choose its own layout for them. Kernels that compute
    nothing of what they read, as products and scatters, read what is put together of several
    arrays (rows of a table, concatenations) from memory: all of them have one copy of that. So have
    all that take parts of what is computed, or move it elsewhere; these parts are not repeated: the
    steps of an `associative_scan` are parts of what the ones before computed, and compilers find
    what is computed alike, however often it is written.
    Values are unchanged.
    What holds one number everywhere and is constrained lies as asked where it leaves; every kernel
    writes the number for itself, as XLA does in place of a gather of it.
    """
    signatures = [_signature(graph, op) for op in graph.operations]
    cheap, computed = _cheap(graph, signatures)
    written = _fills(graph, signatures)
    joined = _joined(graph, signatures, cheap)
    stored: dict[int, int] = {}  # what kernels read from memory -> the copy that they share
    last_reader_is_output = set(graph.outputs)
    values = list(graph.values)
    pending: dict[int, list[Operation]] = defaultdict(list)  # operation -> copies placed before it
    operations = [
        replace(op, regions=tuple(repeat_cheap(r) for r in op.regions)) if op.regions else op
        for op in graph.operations
    ]
    producers = graph.producers()
    order: list[Operation] = []
    first_reader: dict[int, int] = {}
    for i, op in enumerate(operations):
        for v in op.inputs:
            first_reader.setdefault(v, i)

    def own_copy(v: int, reader: int, made: dict[int, int]) -> int:
        """The value that `reader` should read instead of v: a copy of v's cheap producer chain."""
        p = producers.get(v)
        if p is not None and registry.meaning(operations[p].kernel) == "layout":
            (source,) = operations[p].inputs
            if source in written and cheap[producers[source]]:
                v, p = source, producers[source]
        if p is None or not cheap[p]:
            return v
        signature = signatures[reader]
        if (v in joined and _reads_memory(signature)) or (v in computed and _moves(signature)):
            made = stored
        if v in made:
            return made[v]
        op = operations[p]
        inputs = tuple(own_copy(u, reader, made) for u in op.inputs)
        if first_reader.get(v) == reader and inputs == op.inputs and v not in last_reader_is_output:
            made[v] = v
            return v
        values.append(values[v])
        made[v] = len(values) - 1
        pending[reader].append(registry.on_values(op, inputs, (made[v],), op.remat))
        return made[v]

    rewritten: list[Operation] = []
    for i, op in enumerate(operations):
        if cheap[i]:
            rewritten.append(op)
            continue
        made: dict[int, int] = {}
        inputs = tuple([own_copy(v, i, made) for v in op.inputs])
        rewritten.append(registry.on_values(op, inputs, op.outputs, op.remat))
    for i, op in enumerate(rewritten):
        order.extend(pending.get(i, ()))
        order.append(op)
    return without_unread(replace(graph, values=tuple(values), operations=tuple(order)))


def _signature(graph: BlockGraph, op: Operation) -> OperationSignature | None:
    return None if op.regions else registry.signature_in(graph, op)


def _reads_memory(signature: OperationSignature | None) -> bool:
    return signature is not None and signature.fusion == "kernel"


def _moves(signature: OperationSignature | None) -> bool:
    return signature is not None and bool(signature.moved)


def _joined(
    graph: BlockGraph, signatures: Sequence[OperationSignature | None], cheap: Sequence[bool]
) -> frozenset[int]:
    """The values that cheap operations put together of elements of several arrays, and what is made
    of such."""
    found: set[int] = set()
    for op, signature, is_cheap in zip(graph.operations, signatures, cheap, strict=True):
        joins = signature is not None and signature.elements != "computed"
        joins &= len(set(op.inputs)) > 1
        if is_cheap and (joins or found.intersection(op.inputs)):
            found.update(op.outputs)
    return frozenset(found)


def _fills(graph: BlockGraph, signatures: Sequence[OperationSignature | None]) -> frozenset[int]:
    """The values that operations on elements make of single numbers alone."""
    single = {v for v, type_ in enumerate(graph.values) if type_.size == 1}
    found = set(single)
    for op, signature in zip(graph.operations, signatures, strict=True):
        if signature is not None and signature.fusion in ("view", "loop"):
            plain = signature.keeps_fills and signature.means != "layout"
            if plain and found.issuperset(op.inputs):
                found.update(op.outputs)
    return frozenset(found - single)


def _cheap(
    graph: BlockGraph, signatures: Sequence[OperationSignature | None]
) -> tuple[list[bool], frozenset[int]]:
    """The operations that are cheap to repeat; and of what they make, what is computed of other
    values, or a view of such."""
    source: dict[int, int] = {}  # value -> bytes it takes to make it again
    computed: set[int] = set()
    cheap = []
    for op, s in zip(graph.operations, signatures, strict=True):
        is_cheap = computes = False
        if s is not None and s.fusion in ("view", "loop") and not op.effectful:
            need = sum(
                [source[v] if v in source else graph.values[v].nbytes for v in set(op.inputs)]
            )
            is_cheap = s.fusion == "view" or need * EXPANSION <= s.output_bytes
            # What a constraint asks for exists once: a copy for each reader would move it for each.
            is_cheap = is_cheap and len(op.outputs) == 1 and registry.meaning(op.kernel) != "layout"
            # Parts of what is computed are, where that is in memory, as all of it is computed.
            is_cheap = is_cheap and not any(op.inputs[p] in computed for p in s.moved)
            computes = bool(op.inputs) and s.elements == "computed"
        cheap.append(is_cheap)
        if is_cheap:
            source[op.outputs[0]] = need
            if computes or not computed.isdisjoint(op.inputs):
                computed.update(op.outputs)
    return cheap, frozenset(computed)
