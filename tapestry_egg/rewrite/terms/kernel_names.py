"""Kernel names: what the classes of a program compute under some choice, views left out.

A name says of a class which kernel makes it of which names, so that two choices with the same names
are programs of the same kernels. A kernel that takes some dims whole, as a transform does, is named
by them too: transforms of one dim and then of another are other kernels than in reverse. Names of
the program as it is written are known; of another choice only what it changes is named, as long as
nothing above that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature

from .requests import Applied
from .terms import Node, Terms


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
        return operands[0] if view else Name(_at(name_of(said, *sorted(keys)), place))
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
    return Name(_at(name_of(said, *sorted(keys)), place), made)


def given_name(key: bytes, rank: int, dims: bool) -> Name:
    """The name of what a program is given."""
    return Name(key, tuple([f"{key.hex()}.{d}" for d in range(rank)]) if dims else ())


def _joined(dims: Sequence[str]) -> str:
    """The name of a dim that some index dims make up."""
    return dims[0] if len(dims) == 1 else name_of(*[d.encode() for d in dims]).hex()


def _at(made: bytes, place: int) -> bytes:
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


class KernelNames:
    """The names of a program's classes; `order` are those that are computed as it is written, each
    after those that it reads, and `named` counts what was named beside them."""

    def __init__(
        self,
        graph: BlockGraph,
        terms: Terms,
        catalogue: Sequence[Applied],
        base: Sequence[int],
        roots: Sequence[int],
    ) -> None:
        self.graph, self.terms, self.catalogue, self.base = graph, terms, catalogue, base
        self._producers = graph.producers()
        self._inputs = {v: k for k, v in enumerate(graph.inputs)}
        self._said: dict[int, tuple[bytes, OperationSignature]] = {}
        self._of_operation: dict[int, tuple[bytes, OperationSignature]] = {}
        self._dims = any(takes_whole(a.signature) for a in catalogue)
        self.named = 0
        own: dict[int, Name] = {}
        self._walk(base, roots, own, lambda c: None)
        self.own = own
        self.order = {c: k for k, c in enumerate(own)}
        self._reader: dict[int, int] = {}  # class -> the only one that reads it
        several: set[int] = set(roots)
        for c in own:
            for d in set(terms.nodes[c][base[c]].operands):
                if self._reader.setdefault(d, c) != c:
                    several.add(d)
        self._reader = {d: c for d, c in self._reader.items() if d not in several}

    def moved(self, c: int, k: int) -> tuple[int, bytes] | None:
        """Where a class is computed by its node k, and the rest as it is written: where that shows,
        and how; by its own name where nothing but views is changed. None where the class would
        depend on itself."""
        self.named += 1
        pick = {c: k}
        own: dict[int, Name] = {}

        def known(d: int) -> Name | None:
            return self.own.get(d) if d != c else None

        def chosen(d: int) -> int:
            return pick.get(d, self.base[d])

        if not self._walk(_Picked(chosen), [c], own, known):
            return None
        read = [d for e in own for d in self.terms.nodes[e][chosen(e)].operands if d not in own]
        return None if self._reads(read, c) else (self.shows(c), own[c].key)

    def several(
        self, pick: Sequence[int], roots: Sequence[int], settled: Callable[[int], bool]
    ) -> frozenset[tuple[int, bytes]] | None:
        """The same where some classes are computed otherwise, of those `roots` below which they
        are; what is `settled` is as it is written. None where it depends on itself."""

        def known(c: int) -> Name | None:
            return self.own[c] if settled(c) else None

        self.named += 1
        own: dict[int, Name] = {}
        if not self._walk(pick, roots, own, known):
            return None
        changed = [
            c for c in roots if c in own and (c not in self.own or own[c].key != self.own[c].key)
        ]
        return frozenset((self.shows(c), own[c].key) for c in changed)

    def shows(self, c: int) -> int:
        """The last of the views that are all that reads a class, or itself."""
        while c in self._reader:
            reader = self._reader[c]
            if not self._is_view(reader, self.terms.nodes[reader][self.base[reader]]):
                return c
            c = reader
        return c

    def _reads(self, classes: Sequence[int], c: int) -> bool:
        """Whether some classes are computed from another one, as it is written."""
        stack, seen = list(classes), set()
        while stack:
            d = stack.pop()
            if d == c:
                return True
            if d not in seen and self.order[d] > self.order[c]:
                seen.add(d)
                stack.extend(self.terms.nodes[d][self.base[d]].operands)
        return False

    def _walk(
        self,
        pick: Sequence[int] | _Picked,
        roots: Sequence[int],
        own: dict[int, Name],
        known: Callable[[int], Name | None],
    ) -> bool:
        """Name what some classes are computed from, but what is `known`; whether that is no
        circle."""
        opened: set[int] = set()
        stack = [(c, False) for c in reversed(roots)]

        def name(d: int) -> Name:
            found = known(d)
            return own[d] if found is None else found

        while stack:
            c, ready = stack.pop()
            if c in own or known(c) is not None:
                continue
            node = self.terms.nodes[c][pick[c]]
            if ready:
                own[c] = self._name(c, node, [name(d) for d in node.operands])
                self.named += 1
            elif c in opened:
                return False
            else:
                opened.add(c)
                stack.append((c, True))
                stack += [(d, False) for d in reversed(node.operands)]
        return True

    def _name(self, c: int, node: Node, operands: Sequence[Name]) -> Name:
        if node.signature < 0 and node.value not in self._producers:
            given = self._inputs.get(node.value)
            # Equal constants are one class.
            key = b"constant %d" % c if given is None else b"input %d" % given
            return given_name(key, self.graph.values[node.value].rank, self._dims)
        said, signature = self._kernel(c, node)
        place = 0
        if node.signature < 0:
            place = self.graph.operations[self._producers[node.value]].outputs.index(node.value)
        return named(said, signature, operands, place, self._dims)

    def _is_view(self, c: int, node: Node) -> bool:
        if node.signature < 0 and node.value not in self._producers:
            return False
        return self._kernel(c, node)[1].fusion == "view" and len(node.operands) == 1

    def _kernel(self, c: int, node: Node) -> tuple[bytes, OperationSignature]:
        """What is said of a node's kernel, and its signature."""
        if node.signature >= 0:
            if node.signature not in self._said:
                entry = self.catalogue[node.signature]
                said = said_of(entry.kernel, entry.signature, [entry.output.dtype], 0)
                self._said[node.signature] = said, entry.signature
            return self._said[node.signature]
        number = self._producers[node.value]
        if number not in self._of_operation:
            op = self.graph.operations[number]
            types = tuple([self.graph.values[v] for v in op.inputs])
            made = tuple([self.graph.values[v] for v in op.outputs])
            signature = registry.signature_of(op, types, made)
            said = said_of(op.kernel, signature, [t.dtype for t in made], len(op.regions))
            # What has effects, or regions of its own, is no other operation's equal.
            more = b"%d" % number if op.effectful or op.regions else b""
            self._of_operation[number] = said + more, signature
        return self._of_operation[number]


class _Picked:
    """A choice by a function."""

    def __init__(self, of: Callable[[int], int]) -> None:
        self._of = of

    def __getitem__(self, c: int) -> int:
        return self._of(c)
