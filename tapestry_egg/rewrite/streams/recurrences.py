"""Recurrences of a loop whose states are a prefix of what its rounds are given.

A carried value follows from that of the round before by the operations between the two. Where each
goes element by element, and its template says that sums pass through it (`passages`), the new value
is an affine map of the old one: by * old + plus. Affine maps compose to affine maps, so the states
of all rounds are an associative scan; a cumulative sum where `by` is one, and a cumulative product
where `plus` is zero. Where all are maxima, or minima, the states are cumulative ones of these.

Products of many `by` take part, so what overflows in these is not the same as in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, itemsize
from tapestry_egg.graph.loops import counts
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.monoids import monoid
from tapestry_egg.monoids.fold import zero

# The monoids of recurrences -> JAX's names of each on two arrays, and of its prefix.
_MONOIDS = {"sum": ("add", "cumsum"), "max": ("max", "cummax"), "min": ("min", "cummin")}


@dataclass(frozen=True)
class _Step:
    """One operation between a carried value and what it becomes. It is linear in the operands
    `group` together; or it `joins` two of them, being the monoid itself, or changes nothing."""

    op: Operation
    group: frozenset[int] = frozenset()
    joins: bool = False


@dataclass(frozen=True)
class Recurrence:
    """How carried value `number`, `old` in the body, becomes `new`; in no step, if that is not made
    of it. `reads` are the other values of the body that the steps read, without its constants."""

    number: int
    old: int
    new: int
    monoid: str
    steps: tuple[_Step, ...]
    reads: tuple[int, ...]

    def states(
        self, body: BlockGraph, batched: Sequence[bool], begins: Any, rounds: int, reverse: bool
    ) -> Callable[..., Any]:
        """A function of the first state and of what it `reads`, `batched` or the same in all
        rounds, that gives what the state becomes in every round. Every element of the first state
        is the number `begins`, if that is known."""
        of_all = monoid(self.monoid)
        (neutral,) = zero(of_all, np.dtype(body.values[self.old].dtype)).values()
        no_state = begins is not None and begins == neutral

        def run(first: Any, *given: Any) -> Any:
            import jax
            import jax.numpy as jnp

            def parts(*given: Any) -> tuple[Any, Any]:
                return _map(self, body, given)

            axes = tuple([0 if b else None for b in batched])
            by, plus = jax.vmap(parts, in_axes=axes)(*given) if any(batched) else parts(*given)
            if not any(batched):
                shape = (rounds, *first.shape)
                by, plus = (None if x is None else jnp.broadcast_to(x, shape) for x in (by, plus))
            begin = None if no_state and plus is not None else first
            if by is None or plus is None:
                return _cumulative(self.monoid, begin, by, plus, rounds, reverse)
            chosen = any(registry.meaning(s.op.kernel) == "choice" for s in self.steps)
            return _composed(begin, by, plus, reverse, chosen)

        return run


def recurrences(op: Operation, apart: Collection[int]) -> tuple[Recurrence, ...] | None:
    """How the values that a scan carries, but for the numbers `apart`, follow from the round
    before, each after those that it reads; None if one of them needs its rounds in order."""
    (body,), (consts, carries) = op.regions, counts(op)
    made_of = _carried_by_value(body, range(consts, consts + carries))
    left: dict[int, tuple[Recurrence, set[int]]] = {}
    for j in range(carries):
        if j in apart:
            continue
        found = _recurrence(body, j, body.inputs[consts + j], body.outputs[j])
        if found is None:
            return None
        reads = (*found.reads, *(() if found.steps or found.new == found.old else (found.new,)))
        left[j] = found, {i - consts for v in reads for i in made_of[v]}
    ordered: list[Recurrence] = []
    while left:
        ready = [j for j, (_, reads) in left.items() if left.keys().isdisjoint(reads)]
        if not ready:
            return None
        ordered += [left.pop(j)[0] for j in ready]
    return tuple(ordered)


def previous(first: Any, states: Any, reverse: bool) -> Any:
    """What is carried into every round, from what is carried out of it."""
    import jax.numpy as jnp

    parts = (states[1:], first[None]) if reverse else (first[None], states[:-1])
    return jnp.concatenate(parts)


def last(states: Any, reverse: bool) -> Any:
    """What is carried out of the last round."""
    return states[0 if reverse else -1]


def _carried_by_value(body: BlockGraph, places: Collection[int]) -> list[frozenset[int]]:
    """Of every value of a body at which of these places it takes what the value is made of."""
    found = [frozenset[int]()] * len(body.values)
    for k in places:
        found[body.inputs[k]] = frozenset((k,))
    for op in body.operations:
        of = frozenset[int]().union(*[found[v] for v in op.inputs])
        for v in op.outputs:
            found[v] = of
    return found


def _recurrence(body: BlockGraph, number: int, old: int, new: int) -> Recurrence | None:
    """How a carried value becomes another one, if its states are a prefix."""
    inside, through = {old}, list[Operation]()
    for op in body.operations:
        if not inside.isdisjoint(op.inputs):
            inside.update(op.outputs)
            through.append(op)
    needed, path = {new}, list[Operation]()
    for op in reversed(through):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            path.insert(0, op)
    if not path:
        return Recurrence(number, old, new, "sum", (), ())
    if any(not body.same_type(v, old) for op in path for v in op.outputs):
        return None
    reads = tuple(
        dict.fromkeys(
            v for op in path for v in op.inputs if v not in inside and v not in body.constants
        )
    )
    for name in _MONOIDS:
        if not _is_kept(name, body.values[old].dtype):
            continue
        steps = [_step(body, op, inside, name) for op in path]
        if None not in steps:
            known = tuple([s for s in steps if s is not None])
            return Recurrence(number, old, new, name, known, reads)
    return None


def _is_kept(name: str, dtype: str) -> bool:
    """Whether a prefix in numbers of that kind is what the loop gives, up to rounding that is as
    small as theirs."""
    if name != "sum":
        return kind(dtype) in ("int", "uint", "float")
    return kind(dtype) in ("int", "uint", "float", "complex") and itemsize(dtype) >= 4


def _step(body: BlockGraph, op: Operation, inside: set[int], name: str) -> _Step | None:
    """An operation between two states, if the monoid passes through it element by element."""
    sig = registry.signature_in(body, op)
    at = frozenset(p for p, v in enumerate(op.inputs) if v in inside)
    one = len(sig.outputs) == 1 and op.remat is None
    if not one or any(d.role != "map" for d in sig.index):
        return None
    shape = sig.output_types[0].shape
    alike = {
        p
        for p, projection in enumerate(sig.inputs)
        if projection == sig.outputs[0] and sig.input_types[p].shape == shape
    }
    if not at <= alike or not all(p in alike or _is_spread(sig, p) for p in range(len(sig.inputs))):
        return None
    if sig.means == "conversion":
        return _Step(op)
    if len(at) == 1 and is_monoid(sig, name):
        return _Step(op, joins=True)
    fitting = [g for g in _laws(sig, name) if at <= g]
    if name != "sum" or not fitting:
        return None
    return _Step(op, max(fitting, key=len))


def _is_spread(sig: OperationSignature, p: int) -> bool:
    """Whether operand p is one number, or has all dims of the result, some with one element that
    stands everywhere along it."""
    own, whole, shape = sig.inputs[p], sig.outputs[0], sig.input_types[p].shape
    if not shape:
        return True
    rows = zip(own.matrix, own.offset, own.shape, strict=True)
    wanted = zip(whole.matrix, whole.offset, whole.shape, strict=True)
    both = zip(shape, rows, wanted, strict=False)
    return len(shape) == len(whole.matrix) and all(n == 1 or a == b for n, a, b in both)


def is_monoid(sig: OperationSignature, name: str) -> bool:
    """Whether an operation of two operands combines them under a monoid: it adds them up, or it is
    one of both, whichever comes first, and passes the monoid on for both together."""
    if len(sig.inputs) != 2 or frozenset((0, 1)) not in _laws(sig, name) or not sig.commutes:
        return False
    return sig.adds if name == "sum" else sig.elements == "kept"


def _laws(sig: OperationSignature, name: str) -> list[frozenset[int]]:
    """The operands that a monoid passes through together."""
    return [frozenset(p.inputs) for p in sig.passages if p.monoid_in == p.monoid_out == name]


def _map(recurrence: Recurrence, body: BlockGraph, given: Sequence[Any]) -> tuple[Any, Any]:
    """`by` and `plus` of what a recurrence reads in one round; None for the one and the zero of its
    monoid. `by` has one element along dims where it is the same everywhere, if that is known."""
    import jax.numpy as jnp

    from tapestry_egg.tracing.emit import constant

    old = recurrence.old
    shape, dtype = body.values[old].shape, body.values[old].dtype
    zeros, ones = jnp.zeros(shape, dtype), jnp.ones(shape, dtype)
    known = {v: constant(x, body.values[v]) for v, x in body.constants.items()}
    known.update(zip(recurrence.reads, given, strict=True))
    by: dict[int, Any] = {old: None}
    plus: dict[int, Any] = {old: None}
    for step in recurrence.steps:
        op, (result,) = step.op, step.op.outputs
        at = [p for p, v in enumerate(op.inputs) if v in by]
        others = [known[v] for v in op.inputs if v not in by]
        run = partial(_applied, body, op, known)
        no_plus = all(plus[op.inputs[p]] is None for p in at)
        before, added = by[op.inputs[at[0]]], plus[op.inputs[at[0]]]
        if step.joins:
            added = jnp.broadcast_to(others[0], shape) if no_plus else run(plus, zeros)
            by[result], plus[result] = before, added
        elif not step.group:
            by[result], plus[result] = before, added
        else:
            nothing = {op.inputs[p]: zeros for p in step.group.difference(at)}
            times = before is None and registry.meaning(op.kernel) == "product"
            if times:
                by[result] = jnp.reshape(others[0], jnp.shape(others[0]) or (1,) * len(shape))
            else:
                each = {v: x if x is None else jnp.broadcast_to(x, shape) for v, x in by.items()}
                by[result] = run({**nothing, **each}, ones)
            plus[result] = None if no_plus and not nothing else run(plus, zeros)
    return by[recurrence.new], plus[recurrence.new]


def _applied(
    body: BlockGraph, op: Operation, known: Mapping[int, Any], of: Mapping[int, Any], none: Any
) -> Any:
    """The result of an operation of a body on the values `of`, or else those that are known."""
    from tapestry_egg.tracing.emit import emit

    ins = tuple(range(len(op.inputs)))
    types = (*[body.values[v] for v in op.inputs], body.values[op.outputs[0]])
    outs = (len(ins),)
    one = BlockGraph(body.name, types, (replace(op, inputs=ins, outputs=outs),), ins, outs)
    operands = [of[v] if v in of else known[v] for v in op.inputs]
    return emit(one)(*[none if x is None else x for x in operands])[0]


def _cumulative(name: str, first: Any, by: Any, plus: Any, rounds: int, reverse: bool) -> Any:
    """The states by * state, or state + plus in the sense of a monoid, of all rounds; no `first`
    state is the zero of that."""
    import jax.numpy as jnp
    from jax import lax

    if by is None and plus is None:
        return jnp.broadcast_to(first, (rounds, *first.shape))
    if by is not None:
        return first * lax.cumprod(by, 0, reverse=reverse)
    combine, cumulative = (getattr(lax, f) for f in _MONOIDS[name])
    totals = cumulative(plus, 0, reverse=reverse)
    return totals if first is None else combine(jnp.broadcast_to(first, totals.shape), totals)


def _composed(first: Any, by: Any, plus: Any, reverse: bool, chosen: bool) -> Any:
    """The states by * state + plus of all rounds; no `first` state is zero. Where a state may be
    `chosen` or not, one that is not finite is nothing if it is not."""
    import jax.numpy as jnp
    from jax import lax

    def times(x: Any, y: Any) -> Any:
        return jnp.where(x == 0, jnp.zeros_like(y), x * y) if chosen else x * y

    def both(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        return times(other[0], one[0]), times(other[0], one[1]) + other[1]

    if first is not None:
        place = lax.broadcasted_iota(jnp.int32, plus.shape, 0)
        begins = place == (plus.shape[0] - 1 if reverse else 0)
        first = jnp.broadcast_to(first, plus.shape)
        plus = lax.select(begins, times(by, first) + plus, plus)
    return lax.associative_scan(both, (by, plus), reverse=reverse)[1]
