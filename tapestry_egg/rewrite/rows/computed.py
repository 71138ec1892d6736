"""What values of a program are that are made of nothing but numbers."""

from __future__ import annotations

import numpy as np

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry
from tapestry_egg.reference.kernels import prepared

# Values of more elements are not computed.
_MOST = 1 << 22


class Computed:
    """Computes such values, element by element, each once."""

    def __init__(self, graph: BlockGraph) -> None:
        self.graph, self.makers = graph, graph.producers()
        self.known: dict[int, np.ndarray | None] = {}

    def __call__(self, v: int) -> np.ndarray | None:
        """What a value is; None where it is made of anything else, or large."""
        graph = self.graph
        if v in graph.constants:
            return np.asarray(graph.constants[v])
        if v in self.known:
            return self.known[v]
        self.known[v] = None
        at = self.makers.get(v)
        op = None if at is None else graph.operations[at]
        if op is None or not registry.is_light(op, graph) or graph.values[v].size > _MOST:
            return None
        operands = [x for u in op.inputs if (x := self(u)) is not None]
        if len(operands) == len(op.inputs):
            try:
                run = prepared(op.kernel, op.params, registry.signature_in(graph, op))
            except TemplateError:  # NumPy has no word for it
                return None
            self.known[v] = run(operands)[0]
        return self.known[v]
