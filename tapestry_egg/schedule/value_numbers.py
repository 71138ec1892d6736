"""Value numbers: values of one program or of several that are computed alike have one number.

A number stands for what computes a value: the kernel, its parameters and the numbers that it reads,
down to arguments, which are known by their place. Layouts, the order of operations, and whether a
value is computed a second time (`Operation.remat`) play no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.metakernels.signatures.parameters import hashable

from .flatten import FlatProgram, Instance

# Bytes of a constant that is known by what it holds itself.
_SMALL = 1024


class ValueNumbers:
    """Numbers of what computes values, shared by all programs that are given to it."""

    def __init__(self) -> None:
        self.sliced: dict[int, int] = {}  # the number of a stack -> that of its slice
        self._numbers: dict[object, int] = {}
        self._regions: dict[int, tuple[BlockGraph, int]] = {}
        self._alone = 0

    def of(self, program: FlatProgram) -> list[int]:
        """The number of every value of a flat program.

        A slice of a stack is what was stacked, so that a loop backwards knows what the one forwards
        has computed. What a loop carries is known by all that the loop reads, and its body. What
        has an effect is like nothing else.
        """
        return _Numbering(self, program).found

    def number(self, key: object) -> int:
        """The number of a key, a new one for one that was not seen."""
        return self._numbers.setdefault(key, len(self._numbers))

    def alone(self) -> object:
        """A key that is like no other."""
        self._alone += 1
        return "alone", self._alone

    def operation(self, op: Operation, read: Sequence[int]) -> object:
        """The key of an operation on values of such numbers."""
        if op.effectful:
            return self.alone()
        regions = tuple([self.region(r) for r in op.regions])
        return "operation", op.kernel, hashable(op.params), regions, tuple(read)

    def region(self, graph: BlockGraph) -> int:
        """A number that regions share that compute the same of their inputs."""
        if id(graph) not in self._regions:
            of = {v: self.number(("parameter", k)) for k, v in enumerate(graph.inputs)}
            of |= {v: self.number(_content(a)) for v, a in graph.constants.items()}
            for op in graph.operations:
                key = self.operation(op, [of[v] for v in op.inputs])
                of |= {v: self.number((key, place)) for place, v in enumerate(op.outputs)}
            made = self.number(("region", tuple([of[v] for v in graph.outputs])))
            self._regions[id(graph)] = graph, made  # the graph stays alive, so that its id does
        return self._regions[id(graph)][1]


class _Numbering:
    """The numbers of one program, instance by instance."""

    def __init__(self, shared: ValueNumbers, program: FlatProgram) -> None:
        self.shared, self.program = shared, program
        self.found = [-1] * len(program.types)
        self.known: dict[FlatId, int] = {}  # arguments and constants
        top = program.bodies[0]
        for k, v in enumerate(top.graph.inputs):
            self.known[top.values[v]] = shared.number(("argument", k))
        for body in program.bodies:
            for v, array in body.graph.constants.items():
                self.known[body.values[v]] = shared.number(_content(array))
        # What a port belongs to: (body, region operation), and its place among that one's ports.
        self.port_of: dict[int, tuple[tuple[int, int], int]] = {}
        for region, (begin, end) in program.spans.items():
            for i in range(begin, end):
                if program.instances[i].port and program.instances[i].body == region[0]:
                    self.port_of[i] = region, i - begin
        for i, instance in enumerate(program.instances):
            self._add(i, instance)

    def _add(self, i: int, instance: Instance) -> None:
        number, found = self.shared.number, self.found
        if instance.port in ("input", "state", "constant"):
            for v in instance.outputs:
                found[v] = self.known[v]
        elif instance.port == "invariant":
            for v in instance.outputs:
                found[v] = found[instance.inputs[0]]
        elif instance.port == "stream":
            (stack,), (v,) = instance.inputs, instance.outputs
            own = self.shared.sliced.get(found[stack])
            found[v] = number(("slice", found[stack])) if own is None else own
        elif instance.port == "stack":
            (inner,), (v,) = instance.inputs, instance.outputs
            found[v] = number(("stack", found[inner], self.program.types[v].shape[0]))
            self.shared.sliced[found[v]] = found[inner]
        else:
            key = self._key(i, instance)
            for place, v in enumerate(instance.outputs):
                found[v] = number((key, place))

    def _key(self, i: int, instance: Instance) -> object:
        bodies = self.program.bodies
        if not instance.port:
            op = bodies[instance.body].graph.operations[instance.operation]
            return self.shared.operation(op, [self.found[v] for v in instance.inputs])
        if i not in self.port_of:
            return self.shared.alone()
        # What a loop carries, or a branch gives: which one, of what loop on what.
        (body, operation), place = self.port_of[i]
        op = bodies[body].graph.operations[operation]
        read = [self.found[bodies[body].values[v]] for v in op.inputs]
        return self.shared.operation(op, read), instance.port, place


def _content(array: np.ndarray) -> object:
    """The key of a constant: what it holds, of larger ones a digest."""
    data = array.tobytes()
    what = data if len(data) <= _SMALL else blake2b(data).digest()
    return "constant", str(array.dtype), array.shape, what
