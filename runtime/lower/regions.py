"""Loops and branches: how the local functions of an operation's regions are called.

Of a region's operands, its outputs, and whether a call in it has failed by now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tapestry_egg.graph.blockgraph import COND, SCAN, WHILE
from tapestry_egg.runtime.measure.trip_counts import ONE_ROUND
from tapestry_egg.tracing.control_flow import switched

if TYPE_CHECKING:
    import jax

    Arrays = Sequence[jax.Array]


class LocalFunction(Protocol):
    """The local function of one region."""

    @property
    def calls(self) -> bool:
        """Whether some call in it may fail, and all devices must know."""

    @property
    def slices(self) -> Mapping[int, jax.ShapeDtypeStruct]:
        """Outputs, by their places, that are worth storing at once where a loop stacks them."""

    @property
    def read(self) -> frozenset[int]:
        """Places of the inputs that something in it reads, not only hands on."""

    def renewed(self, first: int, carries: int) -> Mapping[int, int]:
        """Outputs of a loop's body, of which it writes a part into the stack whose slice an input
        is -> that input; slices are inputs from place `first` on, `carries` outputs carried."""

    def invariants_sent(self, count: int) -> tuple[int, ...]:
        """Which of the first inputs collectives send, where so many are the same in every step."""

    def written_late(self, first: int, count: int) -> tuple[int, ...]:
        """Which of the carries, inputs from place `first` on, are to be written when all are there,
        since one is made before what it replaces is read last."""

    def run(
        self, arguments: Arrays, failed: Any, stacks: Stacks | None = None
    ) -> tuple[tuple[jax.Array, ...], Any]:
        """The outputs, and whether a call has failed by now."""


@dataclass
class Stacks:
    """What a round of a loop stacks: `arrays[q]` is that of output q, and the round's slice of it
    is at place `number`. Written as soon as a slice is there, it holds no memory of its own."""

    number: jax.Array
    arrays: dict[int, jax.Array]
    renewed: frozenset[int] = frozenset()  # those that hold what they held before, but for a part

    def renew(self, q: int, part: jax.Array, starts: Sequence[jax.Array]) -> jax.Array:
        """Write a part of the round's slice of output q where it is; the slice as it is then."""
        from jax import lax

        stack = self.arrays[q]
        # Of the round's slice alone, as the update of a slice keeps within that.
        places = [
            lax.clamp(np.zeros((), x.dtype), x, np.asarray(n - m, x.dtype))
            for x, n, m in zip(starts, stack.shape[1:], part.shape, strict=True)
        ]
        at = [self.number, *(lax.convert_element_type(x, np.int32) for x in places)]
        self.arrays[q] = lax.dynamic_update_slice(stack, part[None], at)
        found: jax.Array = lax.dynamic_index_in_dim(self.arrays[q], self.number, 0, keepdims=False)
        return found

    def write(self, q: int, x: jax.Array) -> None:
        """Put the round's slice into the stack of output q."""
        from jax import lax

        self.arrays[q] = lax.dynamic_update_index_in_dim(self.arrays[q], x, self.number, 0)


@dataclass(frozen=True, eq=False)
class Turned:
    """A stack as it lies in memory; its dims in the `order` given are those of the stack.

    A loop that takes slices of the transposed stack would have a copy of all of it made first.
    """

    array: jax.Array
    order: tuple[int, ...]

    def slice(self, number: jax.Array) -> jax.Array:
        """What the stack has at a place of its first dim."""
        from jax import lax

        first, *rest = self.order
        one = lax.dynamic_index_in_dim(self.array, number, first, keepdims=False)
        return lax.transpose(one, [d - (d > first) for d in rest])


#: No call has failed. Where no call may, nothing else goes through loops and branches.
NOT_FAILED = 0

_Region = tuple[Any, Any]


def _scan(
    params: Any, regions: tuple[LocalFunction, ...], operands: Arrays, failed: Any
) -> _Region:
    from jax import lax

    consts = operands[: params["num_consts"]]
    rest = operands[params["num_consts"] :]
    carries = params["num_carry"]
    streams = rest[carries:]
    sent = regions[0].invariants_sent(len(consts))
    tied = _tied(rest, regions[0].read, len(consts), carries)
    turned = [x for x in streams if isinstance(x, Turned)]
    length = params["length"]
    together = regions[0].written_late(len(consts), carries)
    begin = len(consts) + carries
    renewed = {
        q: p - begin
        for q, p in (regions[0].renewed(begin, carries) if length else {}).items()
        if not isinstance(streams[p - begin], Turned)
    }
    of_stack = {p: q for q, p in renewed.items()}
    early = {q: x for q, x in regions[0].slices.items() if q >= carries and length}
    early = {q: x for q, x in early.items() if q not in renewed}

    # A number that is carried, and not read from an array of numbers, is to XLA the loop's own: a
    # slice at its place is then copied without a kernel.
    first, by = (length - 1, -1) if params["reverse"] else (0, 1)

    def step(carry: tuple[Any, Any, Any, Any], given: Any) -> tuple[tuple[Any, Any, Any, Any], Any]:
        before, failed, arrays, number = carry
        found = iter(given)
        slices = [
            x.slice(number)
            if isinstance(x, Turned)
            else lax.dynamic_index_in_dim(arrays[of_stack[p]], number, 0, keepdims=False)
            if p in of_stack
            else next(found)
            for p, x in enumerate(streams)
        ]
        stacks = Stacks(number, dict(arrays), frozenset(renewed)) if early or renewed else None
        arguments = _in_each_step(consts, before, slices, sent, tied)
        outputs, failed = regions[0].run(arguments, failed, stacks)
        outputs = _together(outputs, together)
        late = [x for q, x in enumerate(outputs) if q >= carries and q not in arrays]
        arrays, number = stacks.arrays if stacks else {}, None if number is None else number + by
        return (list(outputs[:carries]), failed, arrays, number), late

    (final, failed, arrays, _), late = lax.scan(
        step,
        (
            list(rest[:carries]),
            _flag(failed, regions),
            _empty(early, length, operands) | {q: streams[p] for q, p in renewed.items()},
            np.int32(first) if turned or early or renewed else None,
        ),
        [x for p, x in enumerate(streams) if not (isinstance(x, Turned) or p in of_stack)],
        length=length,
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    found = iter(late)
    every = range(carries, carries + len(arrays) + len(late))
    return [*final, *(arrays[q] if q in arrays else next(found) for q in every)], failed


def _empty(
    slices: Mapping[int, jax.ShapeDtypeStruct], length: int, operands: Arrays
) -> dict[int, jax.Array]:
    """Stacks to be written, not made before a loop's operands are."""
    from tapestry_egg.runtime.lower.kernels.late_fills import each_filled

    known = [x for x in operands if not isinstance(x, Turned)]
    after = known[-1] if known else 0
    fills = [((length, *x.shape), 0, x.dtype) for x in slices.values()]
    return dict(zip(slices, each_filled(fills, after=after), strict=True))


def _while(
    params: Any, regions: tuple[LocalFunction, ...], operands: Arrays, failed: Any
) -> _Region:
    import jax
    from jax import lax

    n, m = params["cond_nconsts"], params["body_nconsts"]
    asked, run = operands[:n], operands[n : n + m]
    test, body = regions
    failed = _flag(failed, regions)
    sent = body.invariants_sent(len(run))
    # A counter that the condition reads is left alone: XLA would not know how often the loop runs.
    asked_for = frozenset(k - n for k in test.read)
    first = list(operands[n + m :])
    tied = _tied(first, body.read, m, len(first), asked_for)
    together = body.written_late(m, len(first))
    if test.calls:
        # A condition has no room for a flag. A round asks, and only then does what is to be done:
        # before the loop and at the end of its body, what is sent to ask would stand there twice.
        sent_asked = test.invariants_sent(n)
        tied_asked = _tied(first, test.read, n, len(first))

        def work(carry: Arrays, failed: Any) -> tuple[Any, Any]:
            outputs, failed = body.run(_in_each_step(run, carry, (), sent, tied), failed)
            return list(_together(outputs, together)), failed

        def ask(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            carry, _, failed = state
            arguments = _in_each_step(asked, carry, (), sent_asked, tied_asked)
            (go,), failed = test.run(arguments, failed)
            go = go & (failed == 0)
            carry, failed = lax.cond(go, work, lambda *same: same, carry, failed)
            return carry, go, failed

        with jax.named_scope(ONE_ROUND):
            final, _, failed = lax.while_loop(
                lambda state: state[1], ask, (first, jax.numpy.array(True), failed)
            )
        return final, failed

    def goes_on(state: tuple[Any, Any]) -> Any:
        (go,), _ = test.run((*asked, *state[0]), NOT_FAILED)
        return go & (state[1] == 0) if body.calls else go

    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        outputs, failed = body.run(_in_each_step(run, state[0], (), sent, tied), state[1])
        return list(_together(outputs, together)), failed

    with jax.named_scope(ONE_ROUND):
        final, failed = lax.while_loop(goes_on, step, (first, failed))
    return final, failed


def _tied(
    others: Sequence[Any],
    read: frozenset[int],
    count: int,
    carries: int,
    asked_for: frozenset[int] = frozenset(),
) -> int:
    """The place among a loop's carries and slices of what its invariants are tied to, a carry where
    there is one.

    XLA drops a tie to what has no elements or is not `read` (places of inputs, of which the first
    `count` are invariants); `asked_for` are the carries that the condition reads.
    """

    def cost(k: int) -> tuple[bool, bool, bool, int, int]:
        x = others[k].array if isinstance(others[k], Turned) else others[k]
        bytes_ = x.size * x.dtype.itemsize
        return not x.size, count + k not in read, k in asked_for, bytes_, k

    return min(range(carries or len(others)), key=cost, default=0)


def _in_each_step(
    consts: Arrays, carries: Arrays, slices: Arrays, sent: Sequence[int], tied: int
) -> list[jax.Array]:
    """The arguments of a loop's body: what is the same in every step, carried, and cut out.

    What is `sent` of the first is not available before something of a step's own: XLA would send it
    once, before the loop, and hold what it gathered until the loop's end, where the plan has it
    sent in every step and held for a moment.
    """
    import jax

    own, others = list(consts), [*carries, *slices]
    if sent and others:
        late, others[tied] = jax.lax.optimization_barrier(([own[i] for i in sent], others[tied]))
        for i, x in zip(sent, late, strict=True):
            own[i] = x
    return own + others


def _together(outputs: Arrays, places: Sequence[int]) -> tuple[jax.Array, ...]:
    """Outputs of a round, those at some places not before all of these are there."""
    import jax

    found = list(outputs)
    if places:
        late = jax.lax.optimization_barrier([found[q] for q in places])
        for q, x in zip(places, late, strict=True):
            found[q] = x
    return tuple(found)


def _cond(
    params: Any, regions: tuple[LocalFunction, ...], operands: Arrays, failed: Any
) -> _Region:
    def branch(region: LocalFunction) -> Callable[..., Any]:
        return lambda failed, *xs: region.run(xs, failed)

    given = [operands[0], _flag(failed, regions), *operands[1:]]
    outputs, failed = switched(params, [branch(r) for r in regions], given)
    return outputs, failed


def _flag(failed: Any, regions: tuple[LocalFunction, ...]) -> Any:
    """The flag as regions carry it: an s32[] where one of them calls, and else nothing at all."""
    import jax.numpy as jnp

    return jnp.asarray(failed, jnp.int32) if any(r.calls for r in regions) else None


#: Kernel with regions -> how it runs them.
REGIONS: dict[str, Callable[[Any, tuple[LocalFunction, ...], Arrays, Any], _Region]] = {
    SCAN: _scan,
    WHILE: _while,
    COND: _cond,
}
