"""The core: a network with only the rows that bounds hardly exclude.

A network on a mesh of two axes has hundreds of rows a variable, and at given prices a handful
matters. Prices are moved on the core, which is passed many times quicker; what they prove is then
bounded on the whole network, whose messages go on from those of the core.
"""

from __future__ import annotations

import numpy as np

from tapestry_egg.extract.problem.compiled import compiled
from tapestry_egg.extract.problem.problem import Floats, Ints

from .network import Flags, Network, State
from .sweeps import least


@compiled
def promising(net: Network, belief: Floats, keep: int, known: Ints) -> Flags:
    """Which rows a core has: the `keep` of the least belief of each variable, and those of `known`
    labellings [known, variables]."""
    found = np.zeros(len(belief), dtype=np.bool_)
    best = np.zeros(keep, dtype=np.int64)
    for v in range(len(net.row) - 1):
        held = least(belief, net.row[v], net.row[v + 1], best)
        for k in range(held):
            found[best[k]] = True
        for k in range(len(known)):
            found[net.row[v] + known[k, v]] = True
    return found


@compiled
def restrict(net: Network, state: State, kept: Flags) -> tuple[Network, State, Ints, Ints]:
    """The network of some rows, its state with the messages of the whole one, where each of its
    rows is among all rows of its variable, and where its messages are among all messages."""
    variables, pairs = len(net.row) - 1, len(net.ends)
    row = np.zeros(variables + 1, dtype=np.int64)
    for v in range(variables):
        count = 0
        for r in range(net.row[v], net.row[v + 1]):
            count += kept[r]
        row[v + 1] = row[v] + count
    rows = int(row[variables])
    row_of, from_ = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    at = 0
    for v in range(variables):
        for r in range(net.row[v], net.row[v + 1]):
            if kept[r]:
                row_of[at], from_[at] = r - net.row[v], r
                at += 1
    # The labels that kept rows have, numbered anew in their old order.
    shape, label = np.zeros((pairs, 2), dtype=np.int64), np.zeros((pairs, 2), dtype=np.int64)
    length = 0
    for p in range(pairs):
        for end in range(2):
            v = net.ends[p, end]
            label[p, end] = length
            length += row[v + 1] - row[v]
    labels = np.zeros(length, dtype=np.int32)
    widest = 1
    for p in range(pairs):
        widest = max(widest, net.shape[p, 0], net.shape[p, 1])
    old, new = np.zeros((2, widest), dtype=np.int64), np.zeros((2, widest), dtype=np.int64)
    table, entry = np.zeros(pairs, dtype=np.int64), np.zeros(pairs, dtype=np.int64)
    message = np.zeros((pairs, 2), dtype=np.int64)
    entries = messages = used = 0
    for p in range(pairs):  # how much there is of everything
        for end in range(2):
            v = net.ends[p, end]
            for k in range(net.shape[p, end]):
                new[end, k] = 0
            for r in range(row[v], row[v + 1]):
                new[end, net.labels[net.label[p, end] + row_of[r]]] = 1
            for k in range(net.shape[p, end]):
                shape[p, end] += new[end, k]
            message[p, end] = messages
            messages += shape[p, end]
        table[p] = entry[p] = entries
        entries += shape[p, 0] * shape[p, 1]
    for k in range(variables + pairs):
        size = row[k + 1] - row[k] if k < variables else 0
        if k >= variables:
            size = shape[k - variables, 0] * shape[k - variables, 1]
        used += size * (net.use[k + 1] - net.use[k])
    seconds, joules = np.zeros(rows), np.zeros(rows)
    for r in range(rows):
        seconds[r], joules[r] = net.seconds[from_[r]], net.joules[from_[r]]
    pair_seconds, pair_joules = np.zeros(entries), np.zeros(entries)
    amounts, amount = np.zeros(used), np.zeros(len(net.begin), dtype=np.int64)
    message_of = np.zeros(messages, dtype=np.int64)
    used = 0
    for v in range(variables):
        for u in range(net.use[v], net.use[v + 1]):
            amount[u] = used
            for r in range(row[v], row[v + 1]):
                amounts[used] = net.amounts[net.amount[u] + row_of[r]]
                used += 1
    for p in range(pairs):
        for end in range(2):
            v = net.ends[p, end]
            for k in range(net.shape[p, end]):
                new[end, k] = -1
            for r in range(row[v], row[v + 1]):
                new[end, net.labels[net.label[p, end] + row_of[r]]] = 0
            count = 0
            for k in range(net.shape[p, end]):
                if new[end, k] == 0:
                    new[end, k] = count
                    old[end, count] = k
                    message_of[message[p, end] + count] = state.message[p, end] + k
                    count += 1
            for r in range(row[v], row[v + 1]):
                labels[label[p, end] + r - row[v]] = new[
                    end, net.labels[net.label[p, end] + row_of[r]]
                ]
        wide = net.shape[p, 1]
        for a in range(shape[p, 0]):
            for b in range(shape[p, 1]):
                here = entry[p] + a * shape[p, 1] + b
                there = net.entry[p] + old[0, a] * wide + old[1, b]
                pair_seconds[here] = net.pair_seconds[there]
                pair_joules[here] = net.pair_joules[there]
        for u in range(net.use[variables + p], net.use[variables + p + 1]):
            amount[u] = used
            for a in range(shape[p, 0]):
                for b in range(shape[p, 1]):
                    amounts[used] = net.amounts[net.amount[u] + old[0, a] * wide + old[1, b]]
                    used += 1
    carried = np.zeros(messages)
    for k in range(messages):
        carried[k] = state.messages[message_of[k]]
    small = Network(
        row,
        seconds,
        joules,
        net.ends,
        shape,
        label,
        labels,
        entry,
        pair_seconds,
        pair_joules,
        net.link,
        net.links,
        net.use,
        net.begin,
        net.end,
        amount,
        amounts,
        net.moments,
        net.times,
        net.maker,
        net.reader,
        net.units,
    )
    own = State(
        np.zeros(rows),
        table,
        np.zeros(entries),
        message,
        carried,
        state.share,
    )
    return small, own, row_of, message_of
