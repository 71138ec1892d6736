"""Rebuild: a block graph again from the chosen operation of every class.

Operations of the program that are still chosen stay where they are, duplicates included: equal
operations are not merged, since a recomputation is one on purpose. New operations stand right
before the first that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.ids import ClassId

from .requests import Applied

# What a value is read from: value v of the given graph, or ~c, the new operation that computes
# class c. Operations are numbered alike: i of the given graph, or ~c.


@dataclass(frozen=True)
class Rebuilt:
    """A graph, the rules that made what is new in it, and of every new value its class."""

    graph: BlockGraph
    rules: tuple[str, ...]
    class_of: Mapping[int, int] = field(default_factory=dict)


def rebuild(
    graph: BlockGraph, terms: Terms, catalogue: Sequence[Applied], pick: Sequence[int]
) -> Rebuilt | None:
    """The graph that computes class c by `terms.nodes[c][pick[c]]`.

    Operations that rules do not see are kept with their outputs, as are the graph's inputs,
    outputs, constants and donation. None when the choice depends on itself.
    """
    builder = Builder(graph, terms, catalogue, pick)
    roots = [builder.source(v) for v in graph.outputs]
    needed = builder.needed(roots)
    order = sorted([i for i in needed if i >= 0])
    if not builder.place(order) or not builder.place(builder.makers(roots)):
        return None
    built = replace(
        graph,
        values=tuple(builder.values),
        operations=tuple(builder.operations),
        outputs=tuple(builder.read(s) for s in roots),
    )
    made = {v: c for c, v in builder.built.items()}
    return Rebuilt(built, tuple(sorted(builder.rules)), made)


class Builder:
    """Places operations: operation i of the given graph, or ~c, the new one of class c."""

    def __init__(
        self, graph: BlockGraph, terms: Terms, catalogue: Sequence[Applied], pick: Sequence[int]
    ) -> None:
        self.graph, self.terms, self.catalogue, self.pick = graph, terms, catalogue, pick
        self.values: list[TensorType] = list(graph.values)
        self.operations: list[Operation] = []
        self.rules: set[str] = set()
        self.producers = graph.producers()
        self.placed: set[int] = set()
        self.built: dict[int, int] = {}  # class -> value of its new operation
        self.instead: dict[int, int] = {}  # class -> operation that its new operation replaces
        # What was asked for before: of values of the given graph, and of operations. Most values
        # are computed as they are written.
        chosen = [
            nodes[k].value if k >= 0 else -1 for nodes, k in zip(terms.nodes, pick, strict=True)
        ]
        self._sources: dict[int, int] = {v: v for v, c in terms.class_of.items() if chosen[c] == v}
        self._read_by: dict[int, list[int]] = {}
        self._below: dict[int, list[int]] = {}

    def source(self, v: int) -> int:
        """What value v of the given graph is read from."""
        known = self._sources.get(v)
        if known is None:
            known = self._sources[v] = self._source(v)
        return known

    def _source(self, v: int) -> int:
        c = self.terms.class_of[v]
        node = self.terms.nodes[c][self.pick[c]]
        if self._is_own(v, node):
            return v
        if node.value >= 0:
            other = node.value if self.graph.values[node.value] == self.graph.values[v] else v
            if other != v:
                self._blame(c, *(n.signature for n in self.terms.nodes[c]), -1)
            return other
        if self.catalogue[node.signature].output != self.graph.values[v]:
            return v
        self.instead.setdefault(c, self.producers.get(v, -1))
        return ~c

    def needed(self, roots: Sequence[int]) -> set[int]:
        """All operations that the outputs and the operations with effects depend on."""
        stack = self.makers(roots)
        stack += [i for i, op in enumerate(self.graph.operations) if op.effectful]
        seen: set[int] = set()
        while stack:
            maker = stack.pop()
            if maker not in seen:
                seen.add(maker)
                stack += self._after(maker)
        return seen

    def place(self, makers: Iterable[int]) -> bool:
        """Append operations, each after all that it reads; False when they form a circle."""
        opened: set[int] = set()
        placed = self.placed
        for first in makers:
            stack = [first]
            while stack:
                maker = stack[-1]
                before = () if maker in placed else self._after(maker)
                if left := [m for m in before if m not in placed]:
                    if maker in opened:
                        return False
                    opened.add(maker)
                    stack += reversed(left)
                    continue
                stack.pop()
                if maker not in placed:
                    self._append(maker)
                    placed.add(maker)
        return True

    def makers(self, sources: Iterable[int]) -> list[int]:
        """The operations that compute what is read; inputs and constants have none."""
        producers = self.producers
        own = [s if s < 0 else producers.get(s) for s in sources]
        return list(dict.fromkeys([m for m in own if m is not None]))

    def read(self, source: int) -> int:
        """The value of what is read, once its operation is placed."""
        return self.built[~source] if source < 0 else source

    def _after(self, maker: int) -> list[int]:
        """The operations that compute what an operation reads."""
        known = self._below.get(maker)
        if known is None:
            known = self._below[maker] = self.makers(self._reads(maker))
        return known

    def _reads(self, maker: int) -> list[int]:
        known = self._read_by.get(maker)
        if known is None:
            known = self._read_by[maker] = self._find_reads(maker)
        return known

    def _find_reads(self, maker: int) -> list[int]:
        if maker >= 0:
            known, inputs = self._sources, self.graph.operations[maker].inputs
            return [known[u] if u in known else self.source(u) for u in inputs]
        out: list[int] = []
        for d in self.terms.nodes[~maker][self.pick[~maker]].operands:
            node = self.terms.nodes[d][self.pick[d]]
            if node.value >= 0:
                out.append(self.source(node.value))
            else:
                self.instead.setdefault(d, self.instead.get(~maker, -1))
                out.append(~d)
        return out

    def _append(self, maker: int) -> None:
        inputs = tuple([self.read(s) for s in self._reads(maker)])
        if maker >= 0:
            op = self.graph.operations[maker]
            self.operations.append(op if inputs == op.inputs else replace(op, inputs=inputs))
            return
        number = ~maker
        entry = self.catalogue[self.terms.nodes[number][self.pick[number]].signature]
        self.values.append(entry.output)
        self.built[number] = len(self.values) - 1
        out = (self.built[number],)
        made = Operation(entry.kernel, inputs, out, entry.params, remat=entry.remat)
        instead = self.instead.get(number, -1)
        if instead >= 0:
            model = self.graph.operations[instead]
            made = replace(made, source=model.source, scope=model.scope)
        self.operations.append(made)
        self._blame(number, self.terms.nodes[number][self.pick[number]].signature)

    def _is_own(self, v: int, node: Node) -> bool:
        """Whether a node is the very operation that makes v, or one equal to it."""
        if node.value == v:
            return True
        if node.signature < 0 or v not in self.producers or node.value < 0:
            return False
        op = self.graph.operations[self.producers[v]]
        like = self.graph.operations[self.producers[node.value]]
        return (
            node.operands == tuple(self.terms.class_of[u] for u in op.inputs)
            and (op.kernel, op.params, op.remat) == (like.kernel, like.params, like.remat)
            and self.graph.values[v] == self.graph.values[node.value]
        )

    def _blame(self, c: int, *signatures: int) -> None:
        """Note the rules that made nodes of a class (-1: that merged two classes)."""
        for s in signatures:
            self.rules |= self.terms.rules(c, s)


# Terms: a program as classes of equal values, with the ways to compute each.


# New views cost nothing by the model; this keeps them from being added for nothing.
_EPSILON = 1e-12


@dataclass(frozen=True)
class Node:
    """One way to compute a class: a signature applied to classes.

    `value` is the program's value that it stands for, -1 for nodes that rules made. `signature` is
    -1 for values that are given (inputs, constants) or made by operations that rules do not see;
    those read `operands`. A `free` node needs constants only and is computed before the program
    runs.
    """

    signature: int
    operands: tuple[ClassId, ...]
    value: int = -1
    free: bool = False


@dataclass(frozen=True)
class Terms:
    """Classes of equal values with the ways to compute each; classes are numbered from 0."""

    nodes: tuple[tuple[Node, ...], ...]
    class_of: Mapping[int, ClassId]  # value of the program -> class
    made: Mapping[tuple[ClassId, int], frozenset[str]]  # (class, signature or -1) -> rules
    saturated: bool
    place: Mapping[int, int] = field(default_factory=dict)  # value -> operation that makes it

    def rules(self, c: int, signature: int) -> frozenset[str]:
        """The rules that made the nodes of a signature in a class (-1: that merged two classes)."""
        return self.made.get((ClassId(c), signature), frozenset())

    def roots(self, graph: BlockGraph) -> list[ClassId]:
        """The classes that the program needs: of its outputs, and of what its effects read."""
        needed = [self.class_of[v] for v in graph.outputs]
        return needed + [
            self.class_of[v] for op in graph.operations if op.effectful for v in op.inputs
        ]


def cost_of(node: Node, seconds: Sequence[float]) -> float:
    """Seconds that a node adds, where `seconds[s]` is what signature s adds at least."""
    if node.signature < 0:
        return 0.0
    return (0.0 if node.free else seconds[node.signature]) + (_EPSILON if node.value < 0 else 0.0)


def as_written(terms: Terms, seconds: Sequence[float]) -> list[int]:
    """The earliest of the program's operations for each class, whatever the numbers of their
    values: they read what is made before them. For new classes the least sum of seconds over new
    classes below."""
    pick = [-1] * len(terms.nodes)
    best = [float("inf")] * len(terms.nodes)
    for c, nodes in enumerate(terms.nodes):
        own = [(terms.place.get(n.value, -1), n.value, k) for k, n in enumerate(nodes)]
        own = [x for x in own if x[1] >= 0]
        if own:
            pick[c], best[c] = min(own)[-1], 0.0
    changed = True
    while changed:
        changed = False
        for c, nodes in enumerate(terms.nodes):
            if pick[c] >= 0 and nodes[pick[c]].value >= 0:
                continue
            for k, n in enumerate(nodes):
                cost = cost_of(n, seconds) + sum(best[d] for d in set(n.operands)) + _EPSILON
                if cost < best[c]:
                    pick[c], best[c], changed = k, cost, True
    return pick
