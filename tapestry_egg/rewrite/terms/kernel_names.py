"""Kernel names: what the classes of a program compute under some choice, views left out.

A name says of a class which kernel makes it of which names, so that two choices with the same names
are programs of the same kernels. Those of the program as it is written are known; of another choice
only what it changes is named, as long as nothing above that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

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
        self._said: dict[int, tuple[bytes, bool]] = {}
        self._of_operation: dict[int, tuple[bytes, bool]] = {}
        self.named = 0
        own: dict[int, bytes] = {}
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
        own: dict[int, bytes] = {}

        def known(d: int) -> bytes | None:
            return self.own.get(d) if d != c else None

        def chosen(d: int) -> int:
            return pick.get(d, self.base[d])

        if not self._walk(_Picked(chosen), [c], own, known):
            return None
        read = [d for e in own for d in self.terms.nodes[e][chosen(e)].operands if d not in own]
        return None if self._reads(read, c) else (self.shows(c), own[c])

    def several(
        self, pick: Sequence[int], roots: Sequence[int], settled: Callable[[int], bool]
    ) -> frozenset[tuple[int, bytes]] | None:
        """The same where some classes are computed otherwise, of those `roots` below which they
        are; what is `settled` is as it is written. None where it depends on itself."""

        def known(c: int) -> bytes | None:
            return self.own[c] if settled(c) else None

        self.named += 1
        own: dict[int, bytes] = {}
        if not self._walk(pick, roots, own, known):
            return None
        changed = [c for c in roots if c in own and own[c] != self.own.get(c)]
        return frozenset((self.shows(c), own[c]) for c in changed)

    def shows(self, c: int) -> int:
        """The last of the views that are all that reads a class, or itself."""
        while c in self._reader:
            reader = self._reader[c]
            if not self._kernel(reader, self.terms.nodes[reader][self.base[reader]])[1]:
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
        own: dict[int, bytes],
        known: Callable[[int], bytes | None],
    ) -> bool:
        """Name what some classes are computed from, but what is `known`; whether that is no
        circle."""
        opened: set[int] = set()
        stack = [(c, False) for c in reversed(roots)]

        def name(d: int) -> bytes:
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

    def _name(self, c: int, node: Node, operands: Sequence[bytes]) -> bytes:
        if node.signature < 0 and node.value not in self._producers:
            given = self._inputs.get(node.value)
            # Equal constants are one class.
            return b"constant %d" % c if given is None else b"input %d" % given
        said, view = self._kernel(c, node)
        if view and len(operands) == 1:
            return operands[0]
        made = name_of(said, *sorted(operands))
        if node.signature >= 0:
            return made
        place = self.graph.operations[self._producers[node.value]].outputs.index(node.value)
        return name_of(made, b"%d" % place) if place else made

    def _kernel(self, c: int, node: Node) -> tuple[bytes, bool]:
        """What is said of a node's kernel, and whether it is a view."""
        if node.signature >= 0:
            if node.signature not in self._said:
                entry = self.catalogue[node.signature]
                said = said_of(entry.kernel, entry.signature, [entry.output.dtype], 0)
                view = entry.signature.fusion == "view" and len(entry.inputs) == 1
                self._said[node.signature] = said, view
            return self._said[node.signature]
        number = self._producers.get(node.value, -1)
        if number < 0:
            return b"", False
        if number not in self._of_operation:
            op = self.graph.operations[number]
            types = tuple([self.graph.values[v] for v in op.inputs])
            made = tuple([self.graph.values[v] for v in op.outputs])
            signature = registry.signature_of(op, types, made)
            said = said_of(op.kernel, signature, [t.dtype for t in made], len(op.regions))
            view = signature.fusion == "view" and len(op.inputs) == 1
            # What has effects, or regions of its own, is no other operation's equal.
            more = b"%d" % number if op.effectful or op.regions else b""
            self._of_operation[number] = said + more, view
        return self._of_operation[number]


class _Picked:
    """A choice by a function."""

    def __init__(self, of: Callable[[int], int]) -> None:
        self._of = of

    def __getitem__(self, c: int) -> int:
        return self._of(c)
