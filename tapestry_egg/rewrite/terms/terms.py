"""Terms: a program as classes of equal values, with the ways to compute each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.ids import ClassId

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
