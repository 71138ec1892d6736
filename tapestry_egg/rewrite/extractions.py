"""Extractions: the programs that the classes of equal values hold, one after another.

None is left out for what it costs on one device: sharded over a mesh, the form with more arithmetic
may be the faster one. Forms that differ in views alone (where a transpose stands, which operand of
a product comes first) compute the same kernels on the same values; one of them stands for all, and
the others are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.rewrite.terms.rebuild import Node, Rebuilt, Terms, as_written, rebuild
from tapestry_egg.rewrite.terms.requests import Applied

# Of these numbers no measurement is kept; the front's notes tell what they leave out.

#: Operations of all forms together beyond which no further form is searched, and forms at most.
OPERATIONS, FORMS = 300, 6
#: Choices that are looked at, most of which differ in views alone, by their operations together.
LOOKED_AT = 30_000


@dataclass(frozen=True)
class Extraction:
    """A program that the classes hold, and what it chooses among their nodes."""

    built: Rebuilt
    pick: list[int]


@dataclass(frozen=True)
class Extracted:
    """Programs that the classes hold; how many more were found that differ from these, how many
    that differ from some program in views alone, and whether all choices were looked at."""

    found: tuple[Extraction, ...]
    more: int
    views: int
    complete: bool


def extractions(
    graph: BlockGraph,
    terms: Terms,
    catalogue: Sequence[Applied],
    seconds: Sequence[float],
    known: Sequence[BlockGraph] = (),
    operations: int = OPERATIONS,
    most: int = FORMS,
) -> Extracted:
    """The programs that differ from the given one, and from those `known`, in more than views.

    Those that replace least come first. As many are made as have `operations` together, and `most`
    in number; those that compute something that nothing reads only where all fit.
    """
    roots = [terms.class_of[v] for v in graph.outputs]
    roots += [terms.class_of[v] for op in graph.operations if op.effectful for v in op.inputs]
    base = as_written(terms, seconds)
    seen = {kernels_of(g) for g in (graph, *known)}
    room = min(most, operations // max(1, len(graph.operations)))
    found: list[Extraction] = []
    spare: list[Extraction] = []
    more = views = looked = 0

    def extracted(complete: bool) -> Extracted:
        if not complete or more or len(found) + len(spare) > room:
            return Extracted(tuple(found), more + len(spare), views, complete)
        return Extracted((*found, *spare), 0, views, True)

    for pick in choices(without_twins(terms, catalogue), base, roots):
        if looked > LOOKED_AT:
            return extracted(complete=False)
        looked += len(graph.operations)
        built = rebuild(graph, terms, catalogue, pick)
        if built is None or not built.rules:
            continue
        key = kernels_of(built.graph)
        if key in seen:
            views += 1
            continue
        seen.add(key)
        own = spare if wasteful(built) else found
        if len(own) < room:
            own.append(Extraction(built, pick))
        else:
            more += 1
    return extracted(complete=True)


def choices(
    nodes: Sequence[Sequence[tuple[int, Node]]], base: Sequence[int], roots: Sequence[int]
) -> Iterator[list[int]]:
    """Every choice of one node for each class that is needed, without circles: the node `base[c]`
    for class c wherever it is not needed. Those with few nodes other than `base` come first."""
    opened = Open(nodes, base)
    distance = 0
    while True:
        deeper = False
        for pick, spent, cut in _at(opened, roots, distance):
            deeper |= cut
            if not cut and spent == distance:
                yield pick
        if not deeper:
            return
        distance += 1


class Open:
    """The classes that leave a choice: all but those with the node `base[c]` alone."""

    def __init__(self, nodes: Sequence[Sequence[tuple[int, Node]]], base: Sequence[int]) -> None:
        self.nodes, self.base = nodes, list(base)
        self.open = [len(own) != 1 or own[0][0] != base[c] for c, own in enumerate(nodes)]
        self._below: dict[tuple[int, int], tuple[int, ...]] = {}

    def first(self, classes: Sequence[int]) -> tuple[int, ...]:
        """The first such classes below some, which a walk comes to from the last one on."""
        found: list[int] = []
        seen: set[int] = set()
        stack = list(classes)
        while stack:
            c = stack.pop()
            if c in seen:
                continue
            seen.add(c)
            if self.open[c]:
                found.append(c)
            else:
                stack.extend(self.nodes[c][0][1].operands)
        return tuple(reversed(found))

    def below(self, c: int, k: int, node: Node) -> tuple[int, ...]:
        """The same of what node k of a class reads."""
        found = self._below.get((c, k))
        if found is None:
            found = self._below[c, k] = self.first(node.operands)
        return found


def _at(opened: Open, roots: Sequence[int], distance: int) -> Iterator[tuple[list[int], int, bool]]:
    """Choices with at most so many nodes other than `base`, how many they have, and whether there
    would be others with more."""
    base = opened.base
    # A branch is what has been decided, what waits to be, and how many nodes are not `base`.
    stack: list[tuple[dict[int, int], tuple[int, ...], int]] = [({}, opened.first(roots), 0)]
    while stack:
        chosen, waiting, spent = stack.pop()
        while waiting and waiting[-1] in chosen:
            waiting = waiting[:-1]
        if not waiting:
            pick = list(base)
            for c, k in chosen.items():
                pick[c] = k
            yield pick, spent, False
            continue
        c = waiting[-1]
        cut = False
        for k, node in reversed(opened.nodes[c]):
            extra = spent + (k != base[c])
            if extra > distance:
                cut = True
                continue
            more = opened.below(c, k, node)
            stack.append(({**chosen, c: k}, (*waiting[:-1], *more), extra))
        if cut:
            yield base, spent, True


def without_twins(terms: Terms, catalogue: Sequence[Applied]) -> list[list[tuple[int, Node]]]:
    """The nodes of every class with their positions, without those that are an earlier one with
    its operands in another order: they run in the same ways at the same costs."""
    out = []
    for nodes in terms.nodes:
        kept: dict[object, tuple[int, Node]] = {}
        for k, node in enumerate(nodes):
            key: object = k
            if node.signature >= 0:
                entry = catalogue[node.signature]
                if entry.signature.commutes:
                    key = (entry.kernel, tuple(sorted(node.operands)))
            kept.setdefault(key, (k, node))
        out.append(list(kept.values()))
    return out


def kernels_of(graph: BlockGraph) -> frozenset[bytes]:
    """What a program's operations compute of its inputs, views left out: equal for programs that
    differ in views and in the order of operands alone, as far as equal programs are compared."""
    signatures = [registry.signature_in(graph, op) for op in graph.operations]
    dims = any(map(takes_whole, signatures))
    value = {
        v: given_name(b"input %d" % k, graph.values[v].rank, dims)
        for k, v in enumerate(graph.inputs)
    }
    for v, array in graph.constants.items():
        key = name_of(b"constant", str(array.dtype).encode(), np.asarray(array).tobytes())
        value[v] = given_name(key, graph.values[v].rank, dims)
    out = set()
    for op, signature in zip(graph.operations, signatures, strict=True):
        operands = [value[v] for v in op.inputs]
        made = [graph.values[v].dtype for v in op.outputs]
        said = said_of(op.kernel, signature, made, len(op.regions))
        for k, v in enumerate(op.outputs):
            value[v] = named(said, signature, operands, k, dims)
        if not op.outputs:
            out.add(name_of(said, *sorted([x.key for x in operands])))
        elif signature.fusion != "view" or len(operands) != 1:
            out.add(value[op.outputs[0]].key)
    return frozenset(out)


def wasteful(built: Rebuilt) -> bool:
    """Whether new operations compute something of which only slices are read, and not all of it: as
    where several products are made as one, and one of them is read."""
    graph = built.graph
    whole = set(graph.outputs)
    shares: dict[int, dict[str, int]] = {}
    for op in graph.operations:
        taken = any(t.takes for t in registry.templates().get(op.kernel, ()))
        if taken and graph.values[op.outputs[0]].size < graph.values[op.inputs[0]].size:
            nbytes = graph.values[op.outputs[0]].nbytes
            shares.setdefault(op.inputs[0], {})[repr(op.params)] = nbytes
            whole.update(op.inputs[1:])
        else:
            whole.update(op.inputs)
    return any(
        v in built.class_of and v not in whole and sum(parts.values()) < graph.values[v].nbytes
        for v, parts in shares.items()
    )


# Kernel names: what a program computes, views left out.
#
# A name says which kernel makes a value of which names, so that two programs with the same names
# have the same kernels. A kernel that takes some dims whole, as a transform does, is named by them
# too: transforms of one dim and then of another are other kernels than in reverse.


def name_of(*parts: bytes) -> bytes:
    """A short name for what some bytes say."""
    made = blake2b(digest_size=16)
    for part in parts:
        made.update(b"%d " % len(part))
        made.update(part)
    return made.digest()


def said_of(kernel: str, signature: OperationSignature, dtypes: Sequence[object], n: int) -> bytes:
    """What a name says of a kernel with `n` regions and results of some dtypes."""
    extents = sorted((d.role, d.size) for d in signature.index)
    return repr((kernel, extents, list(dtypes), n)).encode()


class Name(NamedTuple):
    """What makes a value of what, and what each of its dims is called, if that is asked for."""

    key: bytes
    dims: tuple[str, ...] = ()


class _Dims(NamedTuple):
    """How a signature's dims follow from those of its operands: per index dim the (operand, dim)
    pairs that it reaches, per dim of each output the index dims that reach it, and the (operand,
    dim) pairs that the kernel takes whole."""

    read: tuple[tuple[tuple[int, int], ...], ...]
    made: tuple[tuple[tuple[int, ...], ...], ...]
    whole: tuple[tuple[int, int], ...]


def takes_whole(signature: OperationSignature) -> bool:
    """Whether a kernel goes along some dims as a whole, each in its own way."""
    return any(d.role in ("whole", "scan") and d.size > 1 for d in signature.index)


def named(
    said: bytes, signature: OperationSignature, operands: Sequence[Name], place: int, dims: bool
) -> Name:
    """The name of an operation's result at `place`; a view has that of its operand. With `dims`,
    the dims have names too, and kernels are named by those that they take whole."""
    view = signature.fusion == "view" and len(operands) == 1
    if not dims:
        keys = [x.key for x in operands]
        return operands[0] if view else Name(_name_at(name_of(said, *sorted(keys)), place))
    own = _dims_of(signature)
    called = [
        min([operands[p].dims[d] for p, d in reads if operands[p].dims], default=f"i{e}")
        for e, reads in enumerate(own.read)
    ]
    made = tuple([_joined([called[e] for e in along]) for along in own.made[place]])
    if view:
        return Name(operands[0].key, made)
    keys = [x.key for x in operands]
    if takes_whole(signature):
        for p, x in enumerate(operands):
            whole = sorted([x.dims[d] for q, d in own.whole if q == p and x.dims])
            keys[p] = name_of(x.key, *[w.encode() for w in whole])
    return Name(_name_at(name_of(said, *sorted(keys)), place), made)


def given_name(key: bytes, rank: int, dims: bool) -> Name:
    """The name of what a program is given."""
    return Name(key, tuple([f"{key.hex()}.{d}" for d in range(rank)]) if dims else ())


def _joined(dims: Sequence[str]) -> str:
    """The name of a dim that some index dims make up."""
    return dims[0] if len(dims) == 1 else name_of(*[d.encode() for d in dims]).hex()


def _name_at(made: bytes, place: int) -> bytes:
    return name_of(made, b"%d" % place) if place else made


def _dims_of(signature: OperationSignature) -> _Dims:
    """The dims of a signature, which remembers them."""
    known: _Dims | None = signature.__dict__.get("_named_dims")
    if known is None:
        along = [
            [tuple([e for e, a in enumerate(row) if a]) for row in p.matrix]
            for p in (*signature.inputs, *signature.outputs)
        ]
        count = len(signature.inputs)
        read = tuple(
            tuple([(p, d) for p in range(count) for d, x in enumerate(along[p]) if e in x])
            for e in range(len(signature.index))
        )
        roles = [d.role for d in signature.index]
        whole = tuple(
            (p, d)
            for p in range(count)
            for d, x in enumerate(along[p])
            if signature.input_types[p].shape[d] > 1
            and all(roles[e] in ("whole", "scan") for e in x)
        )
        known = _Dims(read, tuple(map(tuple, along[count:])), whole)
        signature.__dict__["_named_dims"] = known
    return known
