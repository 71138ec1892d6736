"""What values of a program are that are made of nothing but numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.metakernels import registry

from .kernels import prepared

# Values of more elements are not computed.
_MOST = 1 << 22


class Computed:
    """Computes such values, element by element, each once."""

    def __init__(
        self,
        types: Sequence[TensorType],
        constants: Mapping[int, np.ndarray],
        makers: Mapping[int, Operation],
    ) -> None:
        self.types, self.constants, self.makers = types, constants, makers
        self.known: dict[int, np.ndarray | None] = {}

    @classmethod
    def of(cls, graph: BlockGraph) -> Computed:
        """Those of a graph."""
        makers = {v: op for op in graph.operations for v in op.outputs}
        return cls(graph.values, graph.constants, makers)

    def __call__(self, v: int) -> np.ndarray | None:
        """What a value is; None where it is made of anything else, or large."""
        if v in self.constants:
            return np.asarray(self.constants[v])
        if v not in self.known:
            self.known[v] = self._made(v)
        return self.known[v]

    def _made(self, v: int) -> np.ndarray | None:
        op = self.makers.get(v)
        if op is None or self.types[v].size > _MOST or not registry.is_light(op, self.types):
            return None
        operands = []
        for u in op.inputs:
            if (operand := self(u)) is None:
                return None
            operands.append(operand)
        read, made = (tuple([self.types[u] for u in us]) for us in (op.inputs, op.outputs))
        try:
            run = prepared(op.kernel, op.params, registry.signature_of(op, read, made))
        except TemplateError:  # NumPy has no word for it
            return None
        return run(operands)[0]
