"""The network: variables, each of which takes one of its rows; what rows cost alone and in pairs.

A cost function network with several additive objectives and a memory profile over time, as flat
arrays for the loops of this folder. Ragged lists are stretches of one array: variable v has the
rows `row[v] .. row[v + 1]`. Arrays that several parts share, as equal layers do, are stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.problem.latencies import Latencies
from tapestry_egg.extract.problem.problem import Floats, Ints, Pair, Problem, Variable

Labels = NDArray[np.int32]
Flags = NDArray[np.bool_]


class Network(NamedTuple):
    """Variables in the order in which messages pass them, and pairs of them.

    Rows of a variable are grouped by label for each of its pairs, so that a pair's table is no
    larger than what the pair can tell apart. A cost of infinity forbids a row or a combination.
    Parts are all variables, then all pairs. Part k uses memory as the uses `use[k] .. use[k + 1]`
    say, each from time `begin` up to before time `end`, in the amounts that start at `amount` (by
    row, or by the entries of the pair's table).

    The times after the first `moments` are events, and amounts there are seconds: those of a
    timeline, where collectives run beside kernels; or latencies that merging may take away, first
    all of them, then those of each read, from the unit `maker` to the unit `reader`
    (`extract/problem/chains.py`).
    """

    row: Ints  # [variables + 1]
    seconds: Floats  # [rows]
    joules: Floats  # [rows]
    ends: Ints  # [pairs, 2], the two variables, the earlier one first
    shape: Ints  # [pairs, 2], how many labels each end has
    label: Ints  # [pairs, 2], where the labels of each end's rows start
    labels: Labels  # pooled
    entry: Ints  # [pairs], where the pair's table starts
    pair_seconds: Floats  # pooled tables
    pair_joules: Floats  # pooled tables
    link: Ints  # [variables + 1], the links of each variable
    links: Ints  # [2 * pairs], 2 * pair + which end of it the variable is
    use: Ints  # [parts + 1]
    begin: Ints  # [uses]
    end: Ints  # [uses]
    amount: Ints  # [uses]
    amounts: Floats  # pooled
    moments: int
    times: int
    maker: Ints  # [reads]
    reader: Ints  # [reads], rising
    units: int


class State(NamedTuple):
    """What a network costs at some prices, and the messages that bound it there."""

    cost: Floats  # [rows]
    table: Ints  # [pairs], where the priced table of each pair starts
    tables: Floats
    message: Ints  # [pairs, 2], where the messages to each end start
    messages: Floats
    share: Floats  # [variables], of a belief in each message


def network_of(problem: Problem) -> Network:
    """The network of an assembled problem, its variables in the same order."""
    variables, pairs = problem.variables, problem.pairs
    transposed: dict[int, tuple[Floats, Floats]] = {}

    def turned(table: Floats) -> Floats:
        if id(table) not in transposed:
            transposed[id(table)] = np.ascontiguousarray(table.T), table
        return transposed[id(table)][0]

    back = [p.a > p.b for p in pairs]
    ends = [(p.b, p.a) if b else (p.a, p.b) for p, b in zip(pairs, back, strict=True)]
    labels, label = _pooled(
        [
            x
            for p, b in zip(pairs, back, strict=True)
            for x in ((p.label_b, p.label_a) if b else (p.label_a, p.label_b))
        ]
    )
    # Seconds and joules of a pair start at the same place: they are pooled by both arrays.
    tables: dict[tuple[int, int, bool], int] = {}
    seconds: list[Floats] = []
    joules: list[Floats] = []
    entry, size = [], 0
    for p, b in zip(pairs, back, strict=True):
        key = id(p.seconds), id(p.joules), b
        if key not in tables:
            tables[key] = size
            seconds.append((turned(p.seconds) if b else p.seconds).ravel())
            joules.append((turned(p.joules) if b else p.joules).ravel())
            size += p.seconds.size
        entry.append(tables[key])
    count, begin, end, amounts = [], [], [], []
    parts: list[tuple[Variable | Pair, bool]] = [(v, False) for v in variables]
    parts += zip(pairs, back, strict=True)
    for part, b in parts:
        count.append(len(part.uses) + len(part.spans))
        for u in part.uses:
            begin.append(u.start)
            end.append(u.end)
            amounts.append(turned(u.amount) if b else u.amount)
        for s in part.spans:
            begin.append(problem.times + s.event)
            end.append(problem.times + s.event + 1)
            amounts.append(turned(s.amount) if b else s.amount)
    flat, amount = _pooled(amounts)
    every = np.array(ends, dtype=np.int64).reshape(-1, 2)
    link, links = _links(every, len(variables))
    shapes = [
        p.seconds.shape[::-1] if b else p.seconds.shape for p, b in zip(pairs, back, strict=True)
    ]
    events = 0 if problem.paths is None else len(problem.paths)
    none = np.zeros(0, dtype=np.int64)
    latencies = problem.latencies or Latencies(none, none, 0)
    return Network(
        row=starts([len(v) for v in variables]),
        seconds=_joined([v.seconds for v in variables]),
        joules=_joined([v.joules for v in variables]),
        ends=every,
        shape=np.array(shapes, dtype=np.int64).reshape(-1, 2),
        label=label.reshape(-1, 2),
        labels=labels.astype(np.int32),
        entry=np.array(entry, dtype=np.int64),
        pair_seconds=_joined(seconds),
        pair_joules=_joined(joules),
        link=link,
        links=links,
        use=starts(count),
        begin=np.array(begin, dtype=np.int64),
        end=np.array(end, dtype=np.int64),
        amount=amount,
        amounts=np.where(np.isfinite(flat), flat, 0.0).astype(np.float64),
        moments=problem.times,
        times=problem.times + events,
        maker=latencies.maker,
        reader=latencies.reader,
        units=latencies.units,
    )


def state_of(net: Network) -> State:
    """A state without prices or messages yet."""
    table = starts(net.shape.prod(axis=1))
    message = starts(net.shape.ravel())
    variables = len(net.row) - 1
    later = np.bincount(net.ends[:, 0], minlength=variables)  # pairs lead from earlier to later
    earlier = np.bincount(net.ends[:, 1], minlength=variables)
    return State(
        cost=np.zeros(int(net.row[-1])),
        table=table[:-1].copy(),
        tables=np.zeros(int(table[-1])),
        message=message[:-1].reshape(-1, 2).copy(),
        messages=np.zeros(int(message[-1])),
        share=1.0 / np.maximum(np.maximum(later, earlier), 1),
    )


def _pooled(arrays: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], Ints]:
    """Arrays end to end, those that occur more than once but once, and where each begins."""
    start: dict[int, int] = {}
    distinct: list[NDArray[Any]] = []
    size = 0
    for x in arrays:
        if id(x) not in start:
            start[id(x)] = size
            distinct.append(x.ravel())
            size += x.size
    flat = np.concatenate(distinct) if distinct else np.zeros(0, dtype=np.int64)
    return flat, np.array([start[id(x)] for x in arrays], dtype=np.int64)


def _joined(arrays: Sequence[Floats]) -> Floats:
    return np.concatenate(arrays).astype(np.float64) if arrays else np.zeros(0)


def starts(sizes: Sequence[int] | Ints) -> Ints:
    """Where lists of these sizes begin, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int64)


def _links(ends: Ints, variables: int) -> tuple[Ints, Ints]:
    """For every variable the pairs that it is in: `Network.link` and `Network.links`."""
    of = ends.ravel()  # entry 2 * pair + end
    order = np.argsort(of, kind="stable")
    return starts(np.bincount(of, minlength=variables)), order.astype(np.int64)
