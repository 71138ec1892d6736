"""Message passing: a bound on a network at given prices, and a labelling by decoding.

Sequential tree-reweighted message passing (Kolmogorov, "Convergent Tree-Reweighted Message Passing
for Energy Minimization", 2006). At given prices of joules and of bytes at each time the network is
an ordinary pairwise model. Every pass over its variables, forward or back, moves costs between
variables by messages and yields a bound on that model's least cost.
"""

from __future__ import annotations

import numpy as np

from tapestry_egg.extract.problem.compiled import compiled
from tapestry_egg.extract.problem.problem import Floats, Ints

from .network import Network, State


@compiled
def price(
    net: Network, state: State, second: float, joule: float, until: Floats, forbidden: float
) -> None:
    """Set what rows and pairs cost where a second costs `second`, a joule `joule`, and a byte from
    the start up to before time t `until[t]` [times + 1]; what is forbidden costs `forbidden`.

    Every message is brought to a least of zero: constants that earlier prices left in them, of
    other magnitudes, would round what is to come.
    """
    variables, pairs = len(net.row) - 1, len(net.ends)
    for p in range(pairs):
        for end in range(2):
            begin = state.message[p, end]
            low = np.inf
            for k in range(begin, begin + net.shape[p, end]):
                low = min(low, state.messages[k])
            for k in range(begin, begin + net.shape[p, end]):
                state.messages[k] -= low
    for k in range(variables + pairs):
        _price_part(net, state, k, second, joule, until, forbidden)


@compiled
def reprice(
    net: Network, state: State, second: float, joule: float, until: Floats, forbidden: float
) -> None:
    """As `price`, where nothing but `until` is other than when that was called last."""
    variables, pairs = len(net.row) - 1, len(net.ends)
    for k in range(variables + pairs):
        if k < variables or net.use[k + 1] > net.use[k]:
            _price_part(net, state, k, second, joule, until, forbidden)


@compiled
def _price_part(
    net: Network,
    state: State,
    k: int,
    second: float,
    joule: float,
    until: Floats,
    forbidden: float,
) -> None:
    """Price a variable or, after all of these, a pair."""
    variables = len(net.row) - 1
    if k < variables:
        into, own = state.cost, net.row[k]
        size = net.row[k + 1] - own
        seconds, joules, at = net.seconds, net.joules, own
    else:
        p = k - variables
        into, own = state.tables, state.table[p]
        size = net.shape[p, 0] * net.shape[p, 1]
        seconds, joules, at = net.pair_seconds, net.pair_joules, net.entry[p]
    cost, seconds, joules = into[own : own + size], seconds[at : at + size], joules[at : at + size]
    for r in range(size):
        s = seconds[r]
        cost[r] = forbidden if s == np.inf else second * s + joule * joules[r]
    for u in range(net.use[k], net.use[k + 1]):
        paid = until[net.end[u]] - until[net.begin[u]]
        if paid != 0.0:
            amounts = net.amounts[net.amount[u] : net.amount[u] + size]
            for r in range(size):
                cost[r] += paid * amounts[r]


@compiled
def sweep(net: Network, state: State, most: int, risen: float, enough: float) -> Floats:
    """Pass messages forward and back, `most` times, or until a bound is `enough` or rises by less
    than the share `risen` of itself; the bounds of all passes, two for each time."""
    variables = len(net.row) - 1
    widest, labelled = 1, 1
    for v in range(variables):
        widest = max(widest, net.row[v + 1] - net.row[v])
    for p in range(len(net.ends)):
        labelled = max(labelled, net.shape[p, 0], net.shape[p, 1])
    belief, mine = np.empty(widest), np.empty(labelled)
    bounds = np.zeros(2 * most)
    done = 0
    for n in range(most):
        for forward in (True, False):
            bound = 0.0
            for q in range(variables):
                v = q if forward else variables - 1 - q
                own = net.row[v]
                size = net.row[v + 1] - own
                for r in range(size):
                    belief[r] = state.cost[own + r]
                for i in range(net.link[v], net.link[v + 1]):
                    p, end = net.links[i] >> 1, net.links[i] & 1
                    label, message = net.label[p, end], state.message[p, end]
                    of_row = net.labels[label : label + size]
                    to_label = state.messages[message : message + net.shape[p, end]]
                    for r in range(size):
                        belief[r] += to_label[of_row[r]]
                low = np.inf
                for r in range(size):
                    low = min(low, belief[r])
                bound += low
                for i in range(net.link[v], net.link[v + 1]):
                    p, end = net.links[i] >> 1, net.links[i] & 1
                    if forward != (end == 0):
                        continue
                    label, back = net.label[p, end], state.message[p, end]
                    labels, others = net.shape[p, end], net.shape[p, 1 - end]
                    of_row = net.labels[label : label + size]
                    had = state.messages[back : back + labels]
                    into = state.message[p, 1 - end]
                    theirs = state.messages[into : into + others]
                    for k in range(labels):
                        mine[k] = np.inf
                    k, least_of = of_row[0], belief[0]
                    for r in range(1, size):
                        if of_row[r] == k:
                            least_of = min(least_of, belief[r])
                        else:
                            mine[k] = min(mine[k], least_of)
                            k, least_of = of_row[r], belief[r]
                    mine[k] = min(mine[k], least_of)
                    share = state.share[v]
                    for k in range(labels):
                        mine[k] = (mine[k] - low) * share - had[k]
                    if end == 0:
                        _down(state.tables, state.table[p], labels, others, mine, theirs)
                    else:
                        _across(state.tables, state.table[p], labels, others, mine, theirs)
            bounds[done] = bound
            done += 1
        if max(bounds[done - 1], bounds[done - 2]) >= enough:
            break
        if n and max(bounds[done - 1], bounds[done - 2]) <= (
            max(bounds[done - 3], bounds[done - 4]) + risen * abs(bounds[done - 1])
        ):
            break
    return bounds[:done]


@compiled
def _down(tables: Floats, at: int, rows: int, columns: int, add: Floats, least: Floats) -> None:
    """For every column of a table at `at` the least entry, with a number added to each row.

    Four rows at a time: what was least is read and written once for all of them.
    """
    for k in range(columns):
        least[k] = np.inf
    whole = rows - rows % 4
    for a in range(0, whole, 4):
        row = tables[at + a * columns : at + (a + 4) * columns]
        one, two = row[:columns], row[columns : 2 * columns]
        three, four = row[2 * columns : 3 * columns], row[3 * columns :]
        w, x, y, z = add[a], add[a + 1], add[a + 2], add[a + 3]
        for k in range(columns):
            low = min(min(w + one[k], x + two[k]), min(y + three[k], z + four[k]))
            least[k] = min(least[k], low)
    for a in range(whole, rows):
        x, row = add[a], tables[at + a * columns : at + (a + 1) * columns]
        for k in range(columns):
            least[k] = min(least[k], x + row[k])


@compiled
def _across(tables: Floats, at: int, columns: int, rows: int, add: Floats, least: Floats) -> None:
    """For every row of a table at `at` the least entry, with a number added to each column.

    Four rows at a time: their minima do not wait for each other.
    """
    whole = rows - rows % 4
    for a in range(0, whole, 4):
        row = tables[at + a * columns : at + (a + 4) * columns]
        one, two = row[:columns], row[columns : 2 * columns]
        three, four = row[2 * columns : 3 * columns], row[3 * columns :]
        w = x = y = z = np.inf
        for k in range(columns):
            more = add[k]
            w, x = min(w, more + one[k]), min(x, more + two[k])
            y, z = min(y, more + three[k]), min(z, more + four[k])
        least[a], least[a + 1], least[a + 2], least[a + 3] = w, x, y, z
    for a in range(whole, rows):
        low, row = np.inf, tables[at + a * columns : at + (a + 1) * columns]
        for k in range(columns):
            low = min(low, add[k] + row[k])
        least[a] = low


@compiled
def beliefs(net: Network, state: State) -> Floats:
    """[rows]: what each row costs with all messages to it: how little it is excluded."""
    found = np.empty(len(state.cost))
    for r in range(len(found)):
        found[r] = state.cost[r]
    for p in range(len(net.ends)):
        for end in range(2):
            v = net.ends[p, end]
            label, message = net.label[p, end], state.message[p, end]
            for r in range(net.row[v + 1] - net.row[v]):
                found[net.row[v] + r] += state.messages[message + net.labels[label + r]]
    return found


@compiled
def least(costs: Floats, begin: int, end: int, best: Ints) -> int:
    """Write to `best` which of the costs from `begin` up to before `end` are least, the least
    first; how many there are."""
    held, most = 0, len(best)
    for r in range(begin, end):
        if held < most or costs[r] < costs[best[held - 1]]:
            at = held if held < most else most - 1
            while at > 0 and costs[best[at - 1]] > costs[r]:
                best[at] = best[at - 1]
                at -= 1
            best[at] = r
            held = min(held + 1, most)
    return held


@compiled
def decode(net: Network, state: State) -> Ints:
    """One row per variable: each the best beside those that were taken before it, and by messages
    from those after it."""
    variables = len(net.row) - 1
    rows = np.zeros(variables, dtype=np.int64)
    for v in range(variables):
        own = net.row[v]
        size = net.row[v + 1] - own
        cost = np.empty(size)
        for r in range(size):
            cost[r] = state.cost[own + r]
        for i in range(net.link[v], net.link[v + 1]):
            p, end = net.links[i] >> 1, net.links[i] & 1
            label, message = net.label[p, end], state.message[p, end]
            if end == 0:  # the other end comes later
                for r in range(size):
                    cost[r] += state.messages[message + net.labels[label + r]]
            else:
                u = net.ends[p, 0]
                a = net.labels[net.label[p, 0] + rows[u]]
                row = state.table[p] + a * net.shape[p, 1]
                for r in range(size):
                    cost[r] += state.tables[row + net.labels[label + r]]
        best = 0
        for r in range(1, size):
            if cost[r] < cost[best]:
                best = r
        rows[v] = best
    return rows


@compiled
def evaluate(net: Network, rows: Ints) -> tuple[float, float, Floats]:
    """(seconds, joules, bytes at each moment and seconds of each event [times]) of one row per
    variable."""
    variables, pairs, moments = len(net.row) - 1, len(net.ends), net.moments
    seconds = joules = 0.0
    found = np.zeros(net.times + 1)
    for k in range(variables + pairs):
        if k < variables:
            at = rows[k]
            seconds += net.seconds[net.row[k] + at]
            joules += net.joules[net.row[k] + at]
        else:
            p = k - variables
            a = net.labels[net.label[p, 0] + rows[net.ends[p, 0]]]
            b = net.labels[net.label[p, 1] + rows[net.ends[p, 1]]]
            at = a * net.shape[p, 1] + b
            seconds += net.pair_seconds[net.entry[p] + at]
            joules += net.pair_joules[net.entry[p] + at]
        for u in range(net.use[k], net.use[k + 1]):
            amount, begin = net.amounts[net.amount[u] + at], net.begin[u]
            found[begin] += amount
            if begin < moments and net.end[u] < moments:
                found[net.end[u]] -= amount
    for t in range(1, moments):  # from where bytes rise and fall to how many there are
        found[t] += found[t - 1]
    return seconds, joules, found[: net.times]
