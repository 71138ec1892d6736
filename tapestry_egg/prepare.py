"""Prepare: what a program computes from its constants alone is computed once, before it runs.

Weights that a function closes over are constants of its graph. Joining or transposing them then
costs nothing per call, which is what inference with fixed weights may assume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .blockgraph import BlockGraph, Operation, TensorType
from .codec import handles_in

# What is this many times larger than what it is made of is made when it is read: a broadcast costs
# nothing there, and stored it would be read from memory.
_EXPANSION = 16
_WORD = 8


def may_prepare(kernel: str, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> bool:
    """Whether a kernel on constants of these types has a result that is worth keeping.

    What draws random numbers stays where it is, and so do types without bytes on the host.
    """
    if kernel == "rng_uniform" or not (inputs or kernel == "iota"):
        return False
    if any(t.dtype.startswith(("key<", "float0")) for t in (*inputs, *outputs)):
        return False
    read, made = sum(t.nbytes for t in inputs), sum(t.nbytes for t in outputs)
    return made <= _EXPANSION * max(read, _WORD)


def prepared_operations(graph: BlockGraph) -> list[int]:
    """Indices of the operations that need nothing but constants and results of each other."""
    known = set(graph.constants)
    found = []
    for i, op in enumerate(graph.operations):
        if op.effectful or op.regions or not known.issuperset(op.inputs):
            continue
        types = [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs]
        if may_prepare(op.kernel, *types) and not handles_in(op.params):
            known.update(op.outputs)
            found.append(i)
    return found


def without_prepared(graph: BlockGraph) -> BlockGraph:
    """The graph as it runs, with zeros in the place of what would be prepared."""
    done = prepared_operations(graph)
    if not done:
        return graph
    made = {v: _zeros(graph.values[v]) for i in done for v in graph.operations[i].outputs}
    return _with_constants(graph, done, made)


def prepare(graph: BlockGraph) -> BlockGraph:
    """The graph with the results of its prepared operations as constants; the same if there are
    none. They are computed by JAX on its default device."""
    done = prepared_operations(graph)
    if not done:
        return graph
    import jax

    from .runtime.emit import emit

    operations = [graph.operations[i] for i in done]
    rest = [op for i, op in enumerate(graph.operations) if i not in set(done)]
    made = [v for op in operations for v in op.outputs]
    read = {v for op in rest for v in op.inputs} | set(graph.outputs)
    needed = [v for v in made if v in read]
    behind = {v for op in operations for v in op.inputs} - set(made)
    alone = BlockGraph(
        name=f"{graph.name} prepared",
        values=graph.values,
        operations=tuple(operations),
        inputs=tuple(sorted(behind)),
        outputs=tuple(needed),
    )
    arrays = [graph.constants[v] for v in alone.inputs]
    results = jax.jit(emit(alone))(*arrays)
    found = {v: np.asarray(x) for v, x in zip(needed, results, strict=True)}
    return _with_constants(graph, done, found)


def _with_constants(
    graph: BlockGraph, done: Sequence[int], made: dict[int, np.ndarray]
) -> BlockGraph:
    gone = set(done)
    rest: list[Operation] = [op for i, op in enumerate(graph.operations) if i not in gone]
    read = {v for op in rest for v in op.inputs} | set(graph.outputs)
    constants = {v: a for v, a in {**graph.constants, **made}.items() if v in read}
    return replace(graph, operations=tuple(rest), constants=constants)


def _zeros(type_: TensorType) -> np.ndarray:
    """Zeros that take no memory."""
    dtype = np.dtype(f"V{type_.itemsize}") if type_.itemsize else np.dtype("V1")
    return np.broadcast_to(np.zeros((), dtype), type_.shape)
