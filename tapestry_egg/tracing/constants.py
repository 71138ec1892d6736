"""Prepare: what a program computes from its constants alone is computed once, before it runs.

Weights that a function closes over are constants of its graph. Joining or transposing them then
costs nothing per call, which is what inference with fixed weights may assume.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, Prepared, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.parameters import exact

from .plain import handles_in

# What is this many times larger than what it is made of is made when it is read: a broadcast costs
# nothing there, and stored it would be read from memory.
_EXPANSION = 16
_WORD = 8
# What a file has prepared may hold so many times the bytes of the constants that it is made of, or
# as few bytes as this: a few operations could ask for more than any machine has.
_MOST, _FEW = 64, 1 << 30
# So many results are kept for who asks again, if they and what they are made of have no more bytes.
_KEPT, _SMALL = 64, 1 << 20


def may_prepare(kernel: str, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> bool:
    """Whether a kernel on constants of these types has a result that is worth keeping.

    What draws random numbers stays where it is, and so do types without bytes on the host; and of
    what reads nothing, all that no template describes.
    """
    if registry.draws(kernel) or not (inputs or kernel in registry.templates()):
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


def prepare(graph: BlockGraph, trusted: bool = True) -> BlockGraph:
    """The graph with the results of its prepared operations as constants; the same if there are
    none. They are computed by JAX on its default device, and `prepared` says how. Of a graph that
    is not `trusted`, only where that needs no more room than a file may ask for, else GraphError.
    """
    done = prepared_operations(graph)
    if not done:
        return graph
    gone = set(done)
    operations = tuple(graph.operations[i] for i in done)
    needed = _read({v for op in operations for v in op.outputs}, graph, gone)
    read = {v for op in operations for v in op.inputs}
    if not trusted:
        check_room(graph, operations, tuple(read & set(graph.constants)), needed, graph.name)
    found = compute(graph, operations, graph.constants, needed)
    before = graph.prepared or Prepared((), {})
    known = {v for op in before.operations for v in op.outputs}
    given = {v: graph.constants[v] for v in sorted(read & set(graph.constants) - known)}
    prepared = Prepared((*before.operations, *operations), {**before.constants, **given})
    return replace(_with_constants(graph, done, found), prepared=prepared)


def compute(
    graph: BlockGraph,
    operations: Sequence[Operation],
    constants: Mapping[int, np.ndarray],
    needed: Sequence[int],
) -> dict[int, np.ndarray]:
    """The values `needed`, computed by operations that read nothing but constants and results of
    each other, by JAX on its default device. Numbers are those of the graph's values."""
    made = {v for op in operations for v in op.outputs}
    read = dict.fromkeys(v for op in operations for v in op.inputs if v not in made)
    alone = BlockGraph(
        name=f"{graph.name} prepared",
        values=graph.values,
        operations=tuple(operations),
        inputs=tuple(read),
        outputs=tuple(needed),
    )
    asked = _Computation(alone, tuple([constants[v] for v in read]))
    results = _once(asked) if asked.is_small else asked.results()
    return dict(zip(needed, results, strict=True))


@dataclass(frozen=True, eq=False)
class _Computation:
    """A graph whose operations need nothing but what is `given`. Those that differ in the numbers
    of values alone are equal: all forms of a program compute the same."""

    graph: BlockGraph
    given: tuple[np.ndarray, ...]

    @property
    def is_small(self) -> bool:
        """Whether what is computed may stay in memory."""
        made = sum(self.graph.values[v].nbytes for v in self.graph.outputs)
        regions = any(op.regions for op in self.graph.operations)
        return made + sum(a.nbytes for a in self.given) <= _SMALL and not regions

    def results(self) -> tuple[np.ndarray, ...]:
        import jax

        from .emit import emit

        # Compiled ahead, as one program, it runs also where one that reads them is being traced.
        lowered = jax.jit(emit(self.graph)).lower(*self.given)
        return tuple([np.asarray(x) for x in lowered.compile()(*self.given)])

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What the results depend on; of JAX's settings those that a trace depends on."""
        import jax

        graph, operations = self.graph, self.graph.operations
        order = (*graph.inputs, *(v for op in operations for v in op.outputs))
        number = {v: i for i, v in enumerate(order)}

        def numbers(values: Sequence[int]) -> tuple[int, ...]:
            return tuple([number[v] for v in values])

        return (
            jax._src.config.trace_context(),  # type: ignore[attr-defined]
            tuple([graph.values[v] for v in order]),
            tuple([(o.kernel, exact(o.params), o.remat, numbers(o.inputs)) for o in operations]),
            numbers(graph.outputs),
            tuple([(a.dtype.str, a.shape, a.tobytes()) for a in self.given]),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Computation) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=_KEPT)
def _once(asked: _Computation) -> tuple[np.ndarray, ...]:
    """The results of a computation, which every form of a program asks for."""
    return asked.results()


def check_room(
    graph: BlockGraph,
    operations: Sequence[Operation],
    constants: Collection[int],
    needed: Collection[int],
    where: str = "",
) -> None:
    """Raises GraphError where operations that make the values `needed` of `constants` hold far more
    bytes than these have, one after another."""
    values, kept = graph.values, set(needed)
    last = {v: i for i, op in enumerate(operations) for v in (*op.outputs, *op.inputs)}
    held = most = 0
    for i, op in enumerate(operations):
        held += sum(values[v].nbytes for v in op.outputs)
        most = max(most, held)
        gone = {v for v in (*op.inputs, *op.outputs) if last[v] == i} - kept - set(constants)
        held -= sum(values[v].nbytes for v in gone)
    given = sum(values[v].nbytes for v in constants)
    if most > _MOST * given + _FEW:
        raise GraphError(f"constants of {given} bytes are made into {most}", where=where)


class Computed(Mapping[int, np.ndarray]):
    """The constants of a graph that was loaded: those that its prepared operations make are
    computed when one of them is first asked for."""

    def __init__(
        self,
        graph: BlockGraph,
        given: Mapping[int, np.ndarray],
        prepared: Prepared,
        pending: Sequence[int],
    ) -> None:
        self._graph, self._given, self._prepared = graph, given, prepared
        self.pending = tuple(pending)
        self._found: dict[int, np.ndarray] | None = None
        self._lock = threading.Lock()

    def __getitem__(self, v: int) -> np.ndarray:
        if v in self._given:
            return self._given[v]
        if v not in self.pending:
            raise KeyError(v)
        with self._lock:
            if self._found is None:
                prepared = self._prepared
                self._found = compute(
                    self._graph, prepared.operations, prepared.constants, self.pending
                )
        return self._found[v]

    def __contains__(self, v: object) -> bool:
        return v in self._given or v in self.pending

    def __iter__(self) -> Iterator[int]:
        return iter((*self._given, *self.pending))

    def __len__(self) -> int:
        return len(self._given) + len(self.pending)


def with_prepared(graph: BlockGraph, prepared: Prepared, where: str = "") -> BlockGraph:
    """The graph with the constants that prepared operations make; they are computed when they are
    needed. Raises GraphError for operations that cannot run before the program does, or need too
    much room, and where the graph has something else under the number of what they read or make."""
    known = set(prepared.constants)
    own = {*graph.inputs, *(v for op in graph.operations for v in op.outputs)}
    for v in known & (own | set(graph.constants)):  # two meanings of one number
        if v in own or not _is_same(prepared.constants[v], graph.constants[v]):
            raise GraphError("is not what the program has there", where=f"{where}.constants.{v}")
    own |= set(graph.constants)
    for i, op in enumerate(prepared.operations):
        at = f"{where}.operations[{i}]"
        missing = [v for v in op.inputs if v not in known]
        if missing or op.effectful or op.regions or handles_in(op.params):
            raise GraphError(
                f"value {missing[0]} is not computed before" if missing else "cannot run before",
                where=at,
            )
        if any(not 0 <= v < len(graph.values) or v in known | own for v in op.outputs):
            raise GraphError("makes a value that is there already, or none", where=at)
        known.update(op.outputs)
    made = {v for op in prepared.operations for v in op.outputs}
    pending = _read(made, graph, ())
    check_room(graph, prepared.operations, tuple(prepared.constants), pending, where)
    constants = Computed(graph, graph.constants, prepared, pending)
    return replace(graph, constants=constants, prepared=prepared)


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two constants of one type hold the same bits."""
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _read(made: Collection[int], graph: BlockGraph, gone: Collection[int]) -> list[int]:
    """Those of the values that operations which are left read, or that leave the program."""
    read = {v for i, op in enumerate(graph.operations) if i not in gone for v in op.inputs}
    return sorted(set(made) & (read | set(graph.outputs)))


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
