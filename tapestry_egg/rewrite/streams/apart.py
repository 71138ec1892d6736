"""Rounds at once: what the rounds of a loop need not wait for each other with, outside of it.

A loop over time multiplies what it is given in each round by its weights, and what each round gives
by others; the derivative of a loop adds up a product of every round. Only what is carried needs the
rounds one after the other. The products that do not need it are made of all rounds together:
before the loop those that read nothing that is carried, after it those that nothing carried is made
of. The loop is given the former, one round at a time, and keeps what the latter read. What rounds
only add to, or keep the largest or least of, and do not read, is one sum over all rounds, or one
maximum, in the end. Numbers of 16 bits are added up in 32, and rounded once.

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

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, without_unread
from tapestry_egg.graph.loops import counts, with_operands
from tapestry_egg.metakernels import registry
from tapestry_egg.rewrite.attention.loops import without_unread_streams
from tapestry_egg.tracing.needless import Known

from .recurrences import Recurrence, is_monoid, last, previous, recurrences
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
class Fold:
    """A carried value that each round combines with the `terms` under a `monoid`, by operations
    (their numbers in the body) of which nothing else is read."""

    monoid: str
    terms: tuple[int, ...]
    operations: frozenset[int]


@dataclass(frozen=True)
class _Parts:
    """Which operations of a loop's body are made of all rounds before it (`early`) and after it
    (`late`), which of what it carries (by number) folds what is made outside, and which operations
    are `free`: nothing that is carried is needed for them."""

    free: frozenset[int]
    early: frozenset[int]
    late: frozenset[int]
    folds: dict[int, Fold]  # number of the carried value -> what becomes of it
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
        folds = folds_of(body, body.inputs[consts : consts + carries])
        ordered = recurrences(op, folds)
        if ordered is not None:
            every = frozenset(range(len(body.operations)))
            return _Parts(frozenset(), frozenset(), every, folds, ordered)
    ops, heavy = body.operations, _heavy(body)
    if not heavy:
        return None
    consts, carries = counts(op)
    carried = body.inputs[consts : consts + carries]
    free = _not_made_of(body, carried)
    early = frozenset(heavy & free)
    makers, folds = body.producers(), folds_of(body, carried)
    while True:
        roots = [body.outputs[j] for j in range(carries) if j not in folds]
        needed = _made_of(body, roots)
        late = (heavy - free) - needed
        after = _made_from(body, late)
        adding = frozenset[int]().union(*[fold.operations for fold in folds.values()])
        stuck = {k for k in after - adding if not _may_leave(body, ops[k])}
        if stuck:  # what these are made of is made in the loop
            kept = _made_of(body, [v for k in stuck for v in ops[k].inputs])
            heavy -= {k for k in kept | stuck if k not in free}
            continue
        of_products = after | free & _made_from(body, early)
        idle = [
            j
            for j, fold in folds.items()
            if of_products.isdisjoint(makers[v] for v in fold.terms if v in makers)
        ]
        if not idle:
            break
        for j in idle:
            del folds[j]
    leaving = after - adding | early
    if not leaving or len(leaving) > _MOST:
        return None
    return _Parts(frozenset(free), early, frozenset(after - adding), folds)


def _may_leave(body: BlockGraph, op: Operation) -> bool:
    """Whether of an operation on all rounds is known that each round has the same."""
    if op.effectful or not registry.is_repeatable(op):
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


def folds_of(body: BlockGraph, carried: Sequence[int]) -> dict[int, Fold]:
    """What is carried only to be combined with something under a monoid."""
    readers, leaving = body.readers(), list(body.outputs)
    found: dict[int, Fold] = {}
    for j, first in enumerate(carried):
        v, through, terms = first, list[int](), list[int]()
        monoids = {name for name, kinds in _KINDS.items() if kind(body.values[v].dtype) in kinds}
        while monoids and v not in leaving and len(readers[v]) == 1:
            op = body.operations[readers[v][0]]
            others = [u for u in op.inputs if u != v]
            kept = body.same_type(first, op.outputs[0]) and len(op.inputs) == 2
            if len(others) != 1 or not kept or not _is_term(body, others[0], first):
                break
            monoids &= _combines(body, op)
            through.append(readers[v][0])
            terms += others
            (v,) = op.outputs
        if monoids and through and v == body.outputs[j] and leaving.count(v) == 1:
            if not readers[v]:
                (name,) = monoids
                found[j] = Fold(name, tuple(terms), frozenset(through))
    return found


# The monoids that fold rounds, and the kinds of numbers that they lose nothing of.
_KINDS = {
    "sum": ("int", "uint", "float", "complex"),
    "max": ("int", "uint", "float"),
    "min": ("int", "uint", "float"),
}


def _is_term(body: BlockGraph, v: int, first: int) -> bool:
    """Whether a value is as large as what is carried, or one number for all of it."""
    own, whole = body.values[v], body.values[first]
    return own.dtype == whole.dtype and own.shape in ((), whole.shape)


def _combines(body: BlockGraph, op: Operation) -> set[str]:
    """The monoid that an operation of two operands is, of those that fold rounds."""
    own = registry.signature_in(body, op)
    return {name for name in _KINDS if is_monoid(own, name)}


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
        read = {v for k in late for v in body.operations[k].inputs}
        read.update(v for fold in parts.folds.values() for v in fold.terms)
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
        folded = [v for fold in self.parts.folds.values() for v in fold.terms]
        self._write([*folded, *body.outputs[self.carries :]])
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
        adding = [k for fold in parts.folds.values() for k in fold.operations]
        gone |= {v for k in adding for v in body.operations[k].outputs}
        same, every = ([v for v in given if v in own] for own in (self.same, self.all))
        carried = [j for j in range(self.carries) if j not in parts.folds]
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
        op, body, made, folds = self.op, self.body, self.made, self.parts.folds
        for j, (result, v) in enumerate(zip(op.outputs, body.outputs, strict=True)):
            if j in folds:
                first, terms = op.inputs[self.consts + j], map(self._of_rounds, folds[j].terms)
                values, each = zip(*terms, strict=True)
                total = partial(_total, folds[j].monoid, op.rounds, each)
                (made.stands[result],) = made.apply(total, (first, *values), op)
            elif j >= self.carries and self.all.get(v, result) != result:
                made.stands[result] = self.all[v]


def _total(monoid: str, rounds: int, each: Sequence[bool], first: Any, *terms: Any) -> Any:
    """What becomes of something that is combined with terms in so many rounds: with those of `each`
    round, or with the same one again and again."""
    import jax.numpy as jnp

    if monoid != "sum":
        combine = jnp.maximum if monoid == "max" else jnp.minimum
        for term, many in zip(terms, each, strict=True):
            first = combine(first, getattr(term, monoid)(0) if many else term)
        return first
    narrow = jnp.issubdtype(first.dtype, jnp.floating) and first.dtype.itemsize < 4
    total = first.astype(jnp.float32) if narrow else first
    stacks: dict[int, Any] = {}  # the terms of each round, by their rank
    for term, many in zip([term.astype(total.dtype) for term in terms], each, strict=True):
        if many:
            stacks[term.ndim] = stacks[term.ndim] + term if term.ndim in stacks else term
        else:
            total = total + rounds * term
    for stack in stacks.values():
        total = total + stack.sum(0, dtype=total.dtype)
    return total.astype(first.dtype)


def _once_each(rounds: int, value: Any) -> Any:
    """The same value in each of so many rounds."""
    import jax.numpy as jnp

    return jnp.broadcast_to(value, (rounds, *value.shape))
