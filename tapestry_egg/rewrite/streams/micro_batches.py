"""Micro-batches: the part of a train step that runs row by row, one part of its batch at a time.

The batch is the dim of an input whose rows go through most of the program (`batches.py`). Loss,
forward and backward pass become the body of a scan (`temporal.py`): gradients are carried, in
float32 at least, and summed over devices once, after the loop; clipping and the optimizer, which
need whole gradients, run after it. So only the activations of one micro-batch are ever there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.rewrite.rows.cuts import Cut
from tapestry_egg.rewrite.rows.rows_by_number import with_batch_dims

from .batches import Batch, How, Inner, Linear, Whole
from .temporal import Split, with_loop

#: Inputs that the program also makes, as parameters are, are tried as batches only where no other
#: is one, and no more dims of them than these. No measurement of it is kept.
_MOST_STATES = 32


@dataclass(frozen=True)
class Found:
    """The part of a program that runs row by row; `rows` is how many there are.

    `input` is the position of the input that has them, along `dim`. `size` are the bytes of what
    it makes with rows, and `late` an operation with rows that needs what is known only after all of
    them, if there is one.
    """

    graph: BlockGraph
    rows: int
    input: int
    dim: int
    how: dict[int, How]
    cut: dict[int, Cut]
    stacked: tuple[int, ...]
    summed: tuple[int, ...]
    same: tuple[int, ...]
    outside: frozenset[int]
    size: int
    late: Operation | None

    @property
    def name(self) -> str:
        """The path of the input that has the rows."""
        names = self.graph.input_names
        return names[self.input] if names else f"[{self.input}]"

    def split(self, steps: int) -> BlockGraph | None:
        """The program with so many micro-batches; None where a kernel cannot run on them, or they
        are not equal parts."""
        if self.rows % steps or not self.how:
            return None
        try:
            return with_loop(
                Split(
                    graph=self.graph,
                    how=self.how,
                    cut=self.cut,
                    stacked=self.stacked,
                    summed=self.summed,
                    steps=steps,
                    source=self.graph.operations[min(self.how)].source,
                    name="micro-batches",
                    same=self.same,
                    outside=self.outside,
                )
            )
        except TemplateError:
            return None


def with_micro_batches(graph: BlockGraph, steps: int) -> BlockGraph:
    """The program with its batch in so many parts, one after another; the same graph where no batch
    is found that can be."""
    found = batch(graph)
    made = found.split(steps) if found else None
    return graph if made is None else made


def batch(graph: BlockGraph) -> Found | None:
    """The batch of a program: the dim of an input whose rows make most of what it holds."""
    return batch_of(graph)[0]


def batch_of(graph: BlockGraph) -> tuple[Found | None, int]:
    """`batch`; and how many dims of inputs that the program also makes were not tried as one."""
    graph = with_batch_dims(graph)
    others, states = map(partial(_dims, graph), _data_and_state(graph))
    best = _best(graph, others)
    if best is not None:
        return best, 0
    return _best(graph, states[:_MOST_STATES]), len(states[_MOST_STATES:])


def may_hold_a_batch(graph: BlockGraph) -> bool:
    """Whether some input has a dim and is not of a type that the program also makes."""
    return bool(_dims(graph, _data_and_state(graph)[0]))


def _data_and_state(graph: BlockGraph) -> tuple[list[int], list[int]]:
    """The places of inputs of types that the program does not make, and of the others."""
    made = {(graph.values[v].shape, graph.values[v].dtype) for v in graph.outputs}
    data: list[int] = []
    state: list[int] = []
    for p, v in enumerate(graph.inputs):
        type_ = graph.values[v]
        (state if (type_.shape, type_.dtype) in made else data).append(p)
    return data, state


def _dims(graph: BlockGraph, places: list[int]) -> list[tuple[int, int]]:
    """Input and dim of all that may be a batch."""
    shapes = [(p, graph.values[graph.inputs[p]].shape) for p in places]
    return [(p, d) for p, shape in shapes for d, n in enumerate(shape) if n > 1]


def _best(graph: BlockGraph, dims: list[tuple[int, int]]) -> Found | None:
    best: Found | None = None
    for p, d in dims:
        found = batch_along(graph, p, d)
        if found is not None and (best is None or found.size > best.size):
            best = found
    return best


def batch_along(graph: BlockGraph, place: int, dim: int) -> Found | None:
    """What of a program runs row by row where a dim of the input at `place` has the rows."""
    v = graph.inputs[place]
    rows = graph.values[v].shape[dim]
    if rows < 2:
        return None
    try:
        return _found(Batch(graph, rows, {v: Cut(dim)}).labelled(), place, dim)
    except Whole:
        return None


def _found(of: Batch, place: int, dim: int) -> Found | None:
    """What leaves the loop, and what it needs for that."""
    graph, outside = of.graph, frozenset(of.outside)
    ops = graph.operations
    inside = set(of.how)
    inside -= _useless(of, inside)
    readers = graph.readers()
    leaving = set(graph.outputs)
    ready = {v for k in outside for v in ops[k].outputs}

    def left() -> list[int]:
        made = (v for k in sorted(inside) for v in ops[k].outputs)
        return [
            v
            for v in made
            if v not in ready and (v in leaving or any(k not in inside for k in readers[v]))
        ]

    out = left()
    needed = set(out)
    for k in sorted(inside, reverse=True):
        if needed.isdisjoint(ops[k].outputs):
            inside.discard(k)
        else:
            needed.update(ops[k].inputs)
    if not inside or not out:
        return None
    late = [ops[k] for k in sorted(of.late) if k not in outside]
    cut = {v: x for v, x in of.label.items() if isinstance(x, Cut)}
    return Found(
        graph=graph,
        rows=of.extent,
        input=place,
        dim=dim,
        how={k: of.how[k] for k in sorted(inside)},
        cut=cut,
        stacked=tuple([v for v in out if v in cut]),
        summed=tuple([v for v in out if of.label[v] == "sum"]),
        same=tuple([v for v in out if of.label[v] == "same"]),
        outside=outside,
        size=_size(of, inside),
        late=late[0] if late else None,
    )


def _useless(of: Batch, inside: set[int]) -> set[int]:
    """Operations on sums that may as well run after the loop: they make as many values to carry as
    they read."""
    ops = of.graph.operations
    readers = of.graph.readers()
    useful: set[int] = set()
    linear = [k for k in sorted(inside) if isinstance(of.how[k], Linear)]
    for k in reversed(linear):
        how = of.how[k]
        assert isinstance(how, Linear)
        joins = len({ops[k].inputs[p] for p in how.sums}) > 1
        read = {r for v in ops[k].outputs for r in readers[v] if r in inside}
        if joins or any(r in useful or not isinstance(of.how[r], Linear) for r in read):
            useful.add(k)
    return set(linear) - useful


def _size(of: Batch, inside: set[int]) -> int:
    """Bytes of what operations make with rows, in the bodies of loops as often as they run."""
    total = 0
    for k in inside:
        op, how = of.graph.operations[k], of.how[k]
        if isinstance(how, Inner):
            total += int(op.params["length"]) * _size(how.body, set(how.body.how))
        else:
            total += sum(of.graph.values[v].nbytes for v in op.outputs if of.has_rows(v))
    return total


def counts(rows: int) -> Iterator[int]:
    """Numbers of micro-batches: powers of two that divide the rows, and, where there is none, the
    other divisors."""
    twos = [1 << e for e in range(1, rows.bit_length()) if rows % (1 << e) == 0]
    yield from twos or (k for k in range(2, rows + 1) if rows % k == 0)
