"""A program that is written anew: operations as they are, and what JAX functions are traced to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.tracing.spelled import Spelled

#: What an operation reads: a value, and whether that has one for each of many; or a constant.
Read = tuple[int, bool] | np.ndarray


@dataclass
class Written(Spelled):
    """The program that is written, and which of its values stand for those of the one given."""

    stands: dict[int, int] = field(default_factory=dict)

    def read(self, values: Sequence[int]) -> tuple[int, ...]:
        """What is read for some values."""
        return tuple([self.stands.get(v, v) for v in values])

    def program(self, graph: BlockGraph) -> BlockGraph:
        """What is written, in the place of the program given."""
        return replace(
            graph,
            values=tuple(self.values),
            operations=tuple(self.operations),
            outputs=self.read(graph.outputs),
            constants=self.constants,
        )

    def takes(self, write: Callable[[], None]) -> bool:
        """Write something; whether JAX can make that. If not, nothing is written."""
        values, operations = len(self.values), len(self.operations)
        stands, known = dict(self.stands), dict(self.known)
        try:
            write()
        except GraphError:  # a kernel has no rule for it, as a user's own need not
            del self.values[values:], self.operations[operations:]
            self.constants = {v: x for v, x in self.constants.items() if v < values}
            self.stands, self.known = stands, known
            return False
        return True

    def apply(
        self, fn: Callable[..., Any], inputs: Sequence[int], like: Operation
    ) -> tuple[int, ...]:
        """The results of a JAX function of values, its operations from where `like` is written."""
        from tapestry_egg.tracing.emit import struct
        from tapestry_egg.tracing.trace import trace

        made = trace(fn, *[struct(self.values[v]) for v in inputs]).graph
        new = dict(zip(made.inputs, inputs, strict=True))
        for v, array in made.constants.items():
            new[v] = self.value(made.values[v])
            self.constants[new[v]] = array
        for op in made.operations:
            new.update((v, self.value(made.values[v])) for v in op.outputs)
            ins, outs = (tuple([new[v] for v in vs]) for vs in (op.inputs, op.outputs))
            op = replace(op, inputs=ins, outputs=outs, source=like.source, scope=like.scope)
            self.operations.append(op)
        return tuple([new[v] for v in made.outputs])

    def at_once(
        self, graph: BlockGraph, op: Operation, reads: Sequence[Read]
    ) -> tuple[tuple[int, ...], bool]:
        """The results of an operation of a graph, of many at once; and whether they are one for
        each, as some of what it `reads` is. What is computed again stays so."""
        from tapestry_egg.tracing.emit import emit

        ports = range(len(reads))
        given = [p for p in ports if not isinstance(reads[p], np.ndarray)]
        made = tuple(range(len(reads), len(reads) + len(op.outputs)))
        run = emit(
            replace(
                graph,
                values=tuple([graph.values[v] for v in (*op.inputs, *op.outputs)]),
                operations=(replace(op, inputs=tuple(ports), outputs=made, remat=None),),
                inputs=tuple(given),
                outputs=made,
                constants={p: x for p, x in enumerate(reads) if isinstance(x, np.ndarray)},
                input_names=(),
                output_names=(),
                donated=(),
            )
        )
        read = [x for x in reads if not isinstance(x, np.ndarray)]
        each = any(batched for _, batched in read)
        if each:
            import jax

            run = jax.vmap(run, in_axes=tuple([0 if batched else None for _, batched in read]))
        first = len(self.operations)
        results = self.apply(run, [v for v, _ in read], op)
        again = [replace(own, remat=op.remat) for own in self.operations[first:]]
        self.operations[first:] = again
        return results, each
