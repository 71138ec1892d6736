"""Sweeps: messages through batches, one after the other, by as few array calls as there can be.

Most tables are so small that calling NumPy takes longer than what it does. So everything that is
read and written is found beforehand: costs of rows and messages lie in one array, and a batch reads
what it adds up by one gather, takes the least of rows by label for all its messages at once, and
each message is then one addition and one minimum, between views that were made once.

Messages are not brought to a least of zero: the constant that one has then is in the belief that it
is added to, whose least is counted, and not in the message back. Sums of both are as they would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from tapestry_egg.extract.problem.problem import Floats, Ints

from .batches import Batch, Side, Slot
from .pricing import Tables

# So many sums are made at once: half a megabyte, so that they stay in the processor's cache.
_TOGETHER = 1 << 16


class State:
    """Costs of all rows, and messages by kind of pair, in one array.

    `to_a[kind]` [members, labels] is what first variables get, `to_b[kind]` what second ones do.
    """

    def __init__(self, rows: int, tables: Tables) -> None:
        sizes = [(len(k.members), n) for k in tables.kinds for n in k.shape]
        starts = np.cumsum([rows, *(m * n for m, n in sizes)])
        self.array = np.zeros(int(starts[-1]))
        self.costs = self.array[:rows]
        self.messages = self.array[rows:]
        self.starts = starts[:-1].reshape(-1, 2)  # [kinds, (to a, to b)]
        found = [
            self.array[at : at + m * n].reshape(m, n)
            for at, (m, n) in zip(starts[:-1].tolist(), sizes, strict=True)
        ]
        self.to_a, self.to_b = found[0::2], found[1::2]
        lengths = [np.full(m, n) for m, n in sizes]
        self._length = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
        self._begin = np.cumsum(self._length) - self._length

    def settle(self) -> None:
        """Bring every message to a least of zero, so that constants do not grow."""
        if len(self._begin):
            least = np.minimum.reduceat(self.messages, self._begin)
            self.messages -= np.repeat(least, self._length)

    def of(self, slot: Slot) -> Floats:
        """The messages of a kind of pair that come to the batch of a slot."""
        return (self.to_a if slot.is_a else self.to_b)[slot.kind]

    def places(self, slot: Slot, labels: Ints) -> Ints:
        """Where those of a slot's members lie, at some labels: [members, labels]."""
        into = self.of(slot)
        at = np.arange(len(into))[slot.at] * into.shape[1]
        start = int(self.starts[slot.kind, 0 if slot.is_a else 1])
        return np.asarray(start + at[:, None] + labels)


@dataclass(frozen=True, eq=False, slots=True)
class _Message:
    """One message each of some members: `outgoing` are views of what is sent, [members, labels, 1]
    or [members, 1, labels], of `table` and of the `sums` of both, minimised along `axis` and
    written to `into`; `where` in `into` and among tables `at`, where these lie in no equal steps.
    """

    outgoing: Floats
    table: Floats
    sums: Floats
    axis: int
    into: Floats
    where: Ints | None = None


@dataclass(frozen=True, eq=False, slots=True)
class _Sending:
    """What a batch sends one way. `order` puts what all messages give, row after row of every
    member, into the order of labels, which begin at `starts` (None: one row each); `back` is where
    the messages lie that come back."""

    order: Ints
    starts: Ints | None
    back: Ints
    outgoing: Floats
    messages: tuple[_Message, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    """One batch: where its costs and incoming messages lie, [1 + slots, members, rows]; the share
    of a belief in each message, and what is sent forward and back."""

    gathered: Ints
    least: Floats  # [members], a view
    least_of_each: Floats  # [members, 1], the same
    share: float
    forward: _Sending | None
    back: _Sending | None


@dataclass(eq=False)
class Sweeps:
    """Sweeps through batches, in order and back."""

    batches: Sequence[Batch]
    rows_of: Sequence[Ints]  # per batch [members, rows], where the rows' costs lie
    state: State
    tables: Tables
    sides: Sequence[tuple[Side, Side]]
    _steps: list[_Step] = field(init=False, repr=False)
    _leasts: Floats = field(init=False, repr=False)
    _sums: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kinds = {s.kind for b in self.batches for s in b.slots}
        most = max((self.tables.kinds[k].size for k in kinds), default=0)
        self._sums = np.empty(max(most, _TOGETHER))
        self._leasts = np.zeros(sum(len(b.members) for b in self.batches))
        self._steps = []
        at = 0
        for batch, rows in zip(self.batches, self.rows_of, strict=True):
            least = self._leasts[at : at + len(batch.members)]
            at += len(batch.members)
            gathered = [rows] + [self.state.places(s, self._side(s).labels) for s in batch.slots]
            self._steps.append(
                _Step(
                    np.array(gathered),
                    least,
                    least[:, None],
                    batch.share,
                    self._sending([s for s in batch.slots if s.later], *rows.shape),
                    self._sending([s for s in batch.slots if not s.later], *rows.shape),
                )
            )

    def go(self, forward: bool) -> tuple[float, list[Floats]]:
        """Pass messages through all batches; the bound that this proves if they are all that there
        is, and beliefs on their rows, kept for their order alone."""
        array, add, least = self.state.array, np.add, np.minimum
        beliefs: list[Floats] = []
        for step in self._steps if forward else reversed(self._steps):
            belief = add.reduce(array.take(step.gathered), 0)
            least.reduce(belief, axis=1, out=step.least)
            belief -= step.least_of_each
            beliefs.append(belief)
            sending = step.forward if forward else step.back
            if sending is None:
                continue
            given = belief.take(sending.order)
            if sending.starts is not None:
                given = least.reduceat(given, sending.starts)
            given *= step.share
            np.subtract(given, array.take(sending.back), sending.outgoing)
            for m in sending.messages:
                if m.where is None:
                    add(m.outgoing, m.table, m.sums)
                    least.reduce(m.sums, axis=m.axis, out=m.into)
                else:
                    add(m.outgoing, m.table[m.where], m.sums)
                    m.into[m.where] = least.reduce(m.sums, m.axis)
        bound = float(add.reduce(self._leasts))
        return bound, beliefs if forward else beliefs[::-1]

    def _side(self, slot: Slot) -> Side:
        return self.sides[slot.kind][0 if slot.is_a else 1]

    def _sending(self, slots: Sequence[Slot], members: int, rows: int) -> _Sending | None:
        """What a batch of so many members, of so many rows each, sends at some slots."""
        if not slots:
            return None
        each = np.arange(members)[:, None]
        sides = [self._side(s) for s in slots]
        order = [(each * rows + side.order).ravel() for side in sides]
        starts = [
            ((n * members + each) * rows + side.starts).ravel() for n, side in enumerate(sides)
        ]
        back = [
            self.state.places(s, np.arange(len(side.starts))).ravel()
            for s, side in zip(slots, sides, strict=True)
        ]
        alone = all(side.identity for side in sides)
        outgoing = np.empty(sum(map(len, back)))
        at = np.cumsum([0, *map(len, back)]).tolist()
        messages = chain.from_iterable(
            self._messages(s, outgoing[i:j].reshape(members, -1))
            for s, i, j in zip(slots, at, at[1:], strict=False)
        )
        return _Sending(
            np.concatenate(order),
            None if alone else np.concatenate(starts),
            np.concatenate(back),
            outgoing,
            tuple(messages),
        )

    def _messages(self, slot: Slot, outgoing: Floats) -> list[_Message]:
        """The messages of one slot, of so many members at a time that sums stay in the cache."""
        table = self.tables.kinds[slot.kind].table
        into = (self.state.to_b if slot.is_a else self.state.to_a)[slot.kind]
        sent = outgoing[:, :, None] if slot.is_a else outgoing[:, None, :]
        regular = isinstance(slot.at, slice)
        if regular:
            table, into = table[slot.at], into[slot.at]
        members, size = len(outgoing), table[0].size
        count = max(1, _TOGETHER // size)
        found = []
        for k in range(0, members, count):
            some = slice(k, min(k + count, members))
            n = some.stop - k
            sums = self._sums[: n * size].reshape(n, *table.shape[1:])
            axis = 1 if slot.is_a else 2
            if regular:
                found.append(_Message(sent[some], table[some], sums, axis, into[some]))
            else:
                where = np.asarray(slot.at)[some]
                found.append(_Message(sent[some], table, sums, axis, into, where))
        return found
