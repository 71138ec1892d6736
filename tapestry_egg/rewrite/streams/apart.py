"""Rounds at once: what the rounds of a loop need not wait for each other with, outside of it.

A loop over time multiplies what it is given in each round by its weights, and what each round gives
by others; the derivative of a loop adds up a product of every round. Only what is carried needs the
rounds one after the other. The products that do not need it are made of all rounds together:
before the loop those that read nothing that is carried, after it those that nothing carried is made
of. The loop is given the former, one round at a time, and keeps what the latter read. What is added
to round by round, and not read, is one sum over all rounds in the end.

A loop whose carried values all follow from those of the round before by a recurrence that needs no
order (`recurrences.py`) has no rounds that wait: its states are made by prefix sums, products,
maxima, or an associative scan of affine maps, and all else of all rounds at once.

JAX says what a kernel of all rounds is (`jax.vmap`). More is in memory, and there are fewer and
larger kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, without_unread
from tapestry_egg.graph.loops import counts, with_operands
from tapestry_egg.metakernels import registry
from tapestry_egg.rewrite.attention.loops import without_unread_streams
from tapestry_egg.tracing.needless import Known

from .recurrences import Recurrence, last, previous, recurrences
from .written import Written

#: The names of this change in the rules and steps of plans, the second where states are prefixes.
RULE, STATES = "rounds-at-once", "states-at-once"

#: Operations that leave one loop at most: each is traced anew, and takes milliseconds.
_MOST = 400


def with_rounds_at_once(graph: BlockGraph, states: bool = False) -> BlockGraph:
    """The graph with the products of loops that need not wait for each other made of all rounds at
    once, and with all of a loop whose `states` are prefixes, if these are wanted; the same graph if
    there are none. What was added to something carried is added up in another order."""
    graph = graph.map_regions(partial(with_rounds_at_once, states=states))
    found = [_parts(op, states) for op in graph.operations]
    parts = {k: own for k, own in enumerate(found) if own is not None}
    if not parts:
        return graph
    makers = {v: op for op in graph.operations for v in op.outputs}
    known = Known(graph.values, graph.constants, makers)
    made = Written(list(graph.values), dict(graph.constants))
    for k, op in enumerate(graph.operations):
        op = replace(op, inputs=made.read(op.inputs))
        if k not in parts or not made.takes(_Apart(op, parts[k], made, known).write):
            made.operations.append(op)
    return without_unread_streams(made.program(graph))


def has_states(graph: BlockGraph) -> bool:
    """Whether a loop of the program, or in one, has states that are prefixes."""
    found = (_parts(op, states=True) for op in graph.walk())
    return any(own is not None and own.states is not None for own in found)


@dataclass(frozen=True)
class _Parts:
    """Which operations of a loop's body are made of all rounds before it (`early`) and after it
    (`late`), which of what it carries (by number) is the sum of what is made outside, and which
    operations are `free`: nothing that is carried is needed for them."""

    free: frozenset[int]
    early: frozenset[int]
    late: frozenset[int]
    sums: dict[int, int]  # number of the carried value -> what is added to it
    # How the other carried values follow from the round before, each after those that it reads,
    # if nothing of the loop needs its rounds one after the other; None if something does.
    states: tuple[Recurrence, ...] | None = None


def _parts(op: Operation, states: bool) -> _Parts | None:
    """What may leave a loop, all of it if its `states` may be prefixes; None where nothing may."""
    if not op.is_scan or op.rounds < 2 or op.effectful:
        return None
    (body,) = op.regions
    few = len(body.operations) <= _MOST
    if states and few and all(_may_leave(body, o) for o in body.operations):
        consts, carries = counts(op)
        sums = _sums(body, body.inputs[consts : consts + carries])
        ordered = recurrences(op, sums)
        if ordered is not None:
            every = frozenset(range(len(body.operations)))
            return _Parts(frozenset(), frozenset(), every, sums, ordered)
    ops, heavy = body.operations, _heavy(body)
    if not heavy:
        return None
    consts, carries = counts(op)
    carried = body.inputs[consts : consts + carries]
    free = _not_made_of(body, carried)
    early = frozenset(heavy & free)
    makers, sums = body.producers(), _sums(body, carried)
    while True:
        roots = [body.outputs[j] for j in range(carries) if j not in sums]
        needed = _made_of(body, roots)
        late = (heavy - free) - needed
        after = _made_from(body, late)
        adding = {makers[body.outputs[j]] for j in sums}
        stuck = {k for k in after - adding if not _may_leave(body, ops[k])}
        if stuck:  # what these are made of is made in the loop
            kept = _made_of(body, [v for k in stuck for v in ops[k].inputs])
            heavy -= {k for k in kept | stuck if k not in free}
            continue
        of_products = after | free & _made_from(body, early)
        idle = [j for j, v in sums.items() if makers.get(v) not in of_products]
        if not idle:
            break
        for j in idle:
            del sums[j]
    leaving = after - adding | early
    if not leaving or len(leaving) > _MOST:
        return None
    return _Parts(frozenset(free), early, frozenset(after - adding), sums)


def _may_leave(body: BlockGraph, op: Operation) -> bool:
    """Whether of an operation on all rounds is known that each round has the same."""
    if op.remat is not None or op.effectful or not registry.is_repeatable(op):
        return False
    return not registry.signature_in(body, op).opaque


def _heavy(body: BlockGraph) -> set[int]:
    """The products of matrices and windows, which one kernel makes of however many rounds."""
    return {
        k
        for k, op in enumerate(body.operations)
        if _may_leave(body, op) and registry.signature_in(body, op).contracts
    }


def _not_made_of(body: BlockGraph, values: Sequence[int]) -> set[int]:
    """The operations that can be made of all rounds, as what they need can, without some values."""
    made = {*body.inputs, *body.constants} - set(values)
    found: set[int] = set()
    for k, op in enumerate(body.operations):
        if _may_leave(body, op) and made.issuperset(op.inputs):
            found.add(k)
            made.update(op.outputs)
    return found


def _made_of(body: BlockGraph, values: Sequence[int]) -> set[int]:
    """The operations of which some values are made."""
    wanted, found = set(values), set[int]()
    for k in reversed(range(len(body.operations))):
        if not wanted.isdisjoint(body.operations[k].outputs):
            found.add(k)
            wanted.update(body.operations[k].inputs)
    return found


def _made_from(body: BlockGraph, operations: Collection[int]) -> set[int]:
    """Some operations, and those that are made of their results."""
    made, found = set[int](), set[int]()
    for k, op in enumerate(body.operations):
        if k in operations or not made.isdisjoint(op.inputs):
            found.add(k)
            made.update(op.outputs)
    return found


def _sums(body: BlockGraph, carried: Sequence[int]) -> dict[int, int]:
    """What is carried only to be added to -> what is added, in numbers that lose nothing by it."""
    readers, makers = body.readers(), body.producers()
    leaving = list(body.outputs)
    found: dict[int, int] = {}
    for j, v in enumerate(carried):
        result, type_ = body.outputs[j], body.values[v]
        if kind(type_.dtype) not in ("int", "float") or np.dtype(type_.dtype).itemsize < 4:
            continue
        if result not in makers or readers[v] != [makers[result]] or v in leaving:
            continue
        op = body.operations[makers[result]]
        alone = leaving.count(result) == 1 and not readers[result]
        if registry.meaning(op.kernel) == "sum" and alone and op.inputs.count(v) == 1:
            (found[j],) = [u for u in op.inputs if u != v]
    return {j: u for j, u in found.items() if body.values[u].shape == body.values[carried[j]].shape}


class _Apart:
    """One loop, with what leaves it."""

    def __init__(self, op: Operation, parts: _Parts, made: Written, known: Known) -> None:
        self.op, self.parts, self.made = op, parts, made
        self.known = known  # of the program that is given
        (self.body,) = op.regions
        self.consts, self.carries = counts(op)
        # Values of the body as the program has them: of all rounds, or the same in each.
        self.all: dict[int, int] = {}
        self.same: dict[int, int] = {}
        last = self.consts + self.carries
        for k, v in enumerate(self.body.inputs):
            if k < self.consts:
                self.same[v] = op.inputs[k]
            elif k >= last:
                self.all[v] = op.inputs[k]

    def write(self) -> None:
        """Write the operations before the loop, it, and those after it; or those of all rounds,
        without a loop."""
        body, parts = self.body, self.parts
        if parts.states is not None:
            self._without_loop(parts.states)
            return
        first = _made_of(body, [v for k in parts.early for v in body.operations[k].outputs])
        for k in sorted(first):
            self._at_once(k)
        given = [v for k in sorted(parts.early) for v in body.operations[k].outputs]
        late = sorted(parts.late)
        # What is late is made anew of what needs no round to wait; the loop keeps the rest.
        read = {v for k in late for v in body.operations[k].inputs} | set(parts.sums.values())
        read -= {v for k in late for v in body.operations[k].outputs}
        free = {v for k in parts.free for v in body.operations[k].outputs}
        for k in sorted(_made_of(body, list(read & free)) - first):
            self._at_once(k)
        self._loop(given, sorted(read - self.all.keys() - self.same.keys() - {*body.constants}))
        for k in late:
            self._at_once(k)
        self._leave()

    def _without_loop(self, states: Sequence[Recurrence]) -> None:
        """Write what every round makes: the states, each after what it follows from, and then what
        is read of the rest."""
        op, body, made = self.op, self.body, self.made
        reverse = bool(op.params["reverse"])
        for state in states:
            first = op.inputs[self.consts + state.number]
            if state.new == state.old:
                self.same[state.old] = first
                continue
            self._write(state.reads if state.steps else (state.new,))
            if state.steps:
                given = [self._of_rounds(v) for v in state.reads]
                begins = self.known.number(first)
                run = state.states(body, [b for _, b in given], begins, op.rounds, reverse)
                inputs = (first, *[v for v, _ in given])
                (self.all[state.new],) = made.apply(run, inputs, op)
            elif state.new not in self.all:
                self._repeat(state.new)
            run = partial(previous, reverse=reverse)
            (self.all[state.old],) = made.apply(run, (first, self.all[state.new]), op)
        self._write([*self.parts.sums.values(), *body.outputs[self.carries :]])
        for v in body.outputs[self.carries :]:
            if v not in self.all:
                self._repeat(v)
        self._leave()
        for state in states:
            result, first = op.outputs[state.number], op.inputs[self.consts + state.number]
            if state.new == state.old:
                made.stands[result] = first
            else:
                run = partial(last, reverse=reverse)
                (made.stands[result],) = made.apply(run, (self.all[state.new],), op)

    def _write(self, values: Sequence[int]) -> None:
        """Write the operations that some values are made of, and that are not yet written."""
        known = {*self.all, *self.same, *self.body.constants}
        wanted, found = set(values) - known, list[int]()
        for k in reversed(range(len(self.body.operations))):
            op = self.body.operations[k]
            if not wanted.isdisjoint(op.outputs):
                found.append(k)
                wanted.update(v for v in op.inputs if v not in known)
        for k in reversed(found):
            self._at_once(k)

    def _of_rounds(self, v: int) -> tuple[int, bool]:
        """A value of the body in the program, and whether that has it of all rounds."""
        if v in self.body.constants:
            self.same[v] = self.made.value(self.body.values[v])
            self.made.constants[self.same[v]] = self.body.constants[v]
        return (self.all[v], True) if v in self.all else (self.same[v], False)

    def _repeat(self, v: int) -> None:
        """Write what is the same in all rounds once for each."""
        value, _ = self._of_rounds(v)
        run = partial(_once_each, self.op.rounds)
        (self.all[v],) = self.made.apply(run, (value,), self.op)

    def _at_once(self, k: int) -> None:
        """An operation of all rounds; of one where it is the same in each."""
        op, body = self.body.operations[k], self.body
        reads = [
            body.constants[v]
            if v in body.constants
            else ((self.all[v], True) if v in self.all else (self.same[v], False))
            for v in op.inputs
        ]
        made, each = self.made.at_once(body, op, reads)
        (self.all if each else self.same).update(zip(op.outputs, made, strict=True))

    def _loop(self, given: Sequence[int], kept: Sequence[int]) -> None:
        """The loop, which is `given` values and keeps others."""
        op, body, made, parts = self.op, self.body, self.made, self.parts
        last, apart = self.consts + self.carries, parts.early | parts.late
        gone = {v for k in apart for v in body.operations[k].outputs}
        gone |= {body.outputs[j] for j in parts.sums}
        same, every = ([v for v in given if v in own] for own in (self.same, self.all))
        carried = [j for j in range(self.carries) if j not in parts.sums]
        stacked = {
            op.outputs[j]: v
            for j, v in enumerate(body.outputs)
            if j >= self.carries and (v not in gone or v in self.same)
        }
        self.all.update((v, result) for result, v in stacked.items())
        for v in kept:
            if v not in self.all:
                type_ = body.values[v]
                self.all[v] = made.value(replace(type_, shape=(op.rounds, *type_.shape)))
                stacked[self.all[v]] = v
        inner = replace(
            body,
            operations=tuple(
                [
                    o
                    for k, o in enumerate(body.operations)
                    if k not in apart and gone.isdisjoint(o.outputs)
                ]
            ),
            outputs=(*[body.outputs[j] for j in carried], *stacked.values()),
            input_names=(),
            output_names=(),
            donated=(),
        )
        kept = [*range(self.consts), *[self.consts + j for j in carried]]
        kept += range(last, len(op.inputs))
        consts, streams = [(self.same[v], v) for v in same], [(self.all[v], v) for v in every]
        loop = with_operands(op, inner, kept, consts, streams)
        outputs = (*[op.outputs[j] for j in carried], *stacked)
        regions = (without_unread(loop.regions[0]),)
        made.operations.append(replace(loop, outputs=outputs, regions=regions))

    def _leave(self) -> None:
        """What the loop no longer gives."""
        op, body, made, sums = self.op, self.body, self.made, self.parts.sums
        for j, (result, v) in enumerate(zip(op.outputs, body.outputs, strict=True)):
            if j in sums:
                first, (added, batched) = op.inputs[self.consts + j], self._of_rounds(sums[j])
                total = _total if batched else partial(_repeated, op.rounds)
                (made.stands[result],) = made.apply(total, (first, added), op)
            elif j >= self.carries and self.all.get(v, result) != result:
                made.stands[result] = self.all[v]


def _total(first: Any, added: Any) -> Any:
    """What something is to which one after another is added."""
    return first + added.sum(0, dtype=added.dtype)


def _repeated(rounds: int, first: Any, added: Any) -> Any:
    """What it is where the same is added so many times."""
    return first + rounds * added


def _once_each(rounds: int, value: Any) -> Any:
    """The same value in each of so many rounds."""
    import jax.numpy as jnp

    return jnp.broadcast_to(value, (rounds, *value.shape))
