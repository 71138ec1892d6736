"""Prices of collectives that may be merged: no more than what any grouping of them takes.

Groups of small random collectives are all listed here, and what they take and hold is worked out
from what the words say.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tapestry_egg.extract.seconds.merging import Merging, Mixture

TICKS = 24
MOST = 100.0


def takes(size: float) -> float:
    """Seconds of one collective: a latency, then ever less for a byte more."""
    return 5.0 + 3.0 * float(np.sqrt(size))


def drawn(rng: np.random.Generator) -> Merging:
    """Up to six slots of two kinds, one of which gathers, each with one or two collectives."""
    count = int(rng.integers(2, 7))
    made = np.sort(rng.integers(0, TICKS - 4, count))
    read = np.array([rng.integers(m, TICKS - 2) for m in made])
    until = np.array([rng.integers(r, TICKS) for r in read])
    slot = np.repeat(np.arange(count), rng.integers(1, 3, count))
    before = (read[:, None] <= made[None, :]) & (rng.random((count, count)) < 0.8)
    for k in range(count):  # whatever waits for what waits
        before |= before[:, k, None] & before[None, k, :]
    np.fill_diagonal(before, False)
    amounts = np.append(0.0, np.geomspace(1.0, MOST, 40))
    times = np.array([[takes(x) for x in amounts]] * 2)
    size = rng.integers(1, 60, len(slot)).astype(float)
    alone = np.interp(size, amounts, times[0])
    return Merging(
        slot,
        np.arange(len(slot)),
        rng.integers(0, 2, len(slot)),
        size,
        rng.integers(1, 20, len(slot)).astype(float),
        alone,
        np.zeros(len(slot)),
        before,
        made,
        read,
        until,
        np.array([True, False]),
        np.full(2, MOST),
        np.array([amounts] * 2),
        times,
        times,
    )


def partitions(members: list[int]) -> Iterator[list[list[int]]]:
    if not members:
        yield []
        return
    first, *rest = members
    for parts in partitions(rest):
        yield [[first], *parts]
        for k in range(len(parts)):
            yield [*parts[:k], [first, *parts[k]], *parts[k + 1 :]]


def costs(m: Merging, group: list[int], price: np.ndarray) -> float:
    """What a group takes, with what it holds while it waits; infinite if it cannot be."""
    if len(group) == 1:
        return float(m.alone[group[0]])
    slots = m.slot[group]
    waits = any(m.before[a, b] for a in slots for b in slots)
    if waits or len(set(m.kind[group])) > 1 or m.bytes[group].sum() > MOST:
        return np.inf
    total = float(np.interp(m.bytes[group].sum(), m.amounts[0], m.times[0]))
    begin = max(m.made[slots].max(), m.read[slots].min())
    for e in group:
        s = m.slot[e]
        span = (begin, m.read[s]) if m.gathers[m.kind[e]] else (m.until[s], m.made[slots].max())
        total += m.held[e] * float(price[span[0] : max(span)].sum())
    return total


def least(m: Merging, used: list[int], price: np.ndarray) -> float:
    return min(sum(costs(m, g, price) for g in parts) for parts in partitions(used))


def prices_of(m: Merging, mixture: Mixture) -> np.ndarray:
    return m.alone + m.less(m.shares(mixture))


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_prices_are_no_more_than_any_grouping_takes(first: int) -> None:
    tight = 0
    for seed in range(first, first + 60):
        rng = np.random.default_rng(seed)
        m = drawn(rng)
        mixture = m.evenly(m.relations(None))
        for scale in (0.0, 0.003, 0.03, 0.3, 3.0, 0.01):
            price = scale * rng.random(TICKS) * (rng.random(TICKS) < 0.5)
            relations = m.relations(np.concatenate(([0.0], np.cumsum(price))))
            mixture = m.fitted(mixture, relations)
            used = [int(rng.choice(np.flatnonzero(m.slot == s))) for s in set(m.slot.tolist())]
            used = [e for e in used if rng.random() < 0.8]
            best = least(m, used, price)
            often = np.bincount(np.array(used, dtype=int), minlength=len(m)).astype(float)
            for _ in range(3):
                paid = float(prices_of(m, mixture)[used].sum())
                assert paid <= best * (1 + 1e-9), (seed, scale)
                mixture = m.towards(mixture, often, relations, float(rng.random()))
            mixture = m.better(mixture, often, relations, 30)
            paid = float(prices_of(m, mixture)[used].sum())
            assert paid <= best * (1 + 1e-9), (seed, scale)
            tight += paid >= best * (1 - 0.01)
    assert tight > 180  # of 360: where nothing else is priced, most meet what they bound


def test_groups_take_and_hold_what_they_say() -> None:
    merged = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        m = drawn(rng)
        used = np.array([int(np.flatnonzero(m.slot == s)[0]) for s in set(m.slot.tolist())])
        profile = rng.integers(0, 30, TICKS).astype(float)
        limit = float(profile.max() + rng.integers(0, 10))
        found = m.grouped(used, profile, limit)
        held, inside = profile.copy(), {e for g in found.groups for e in g}
        alone = [[e] for e in used.tolist() if e not in inside]
        free = np.zeros(TICKS)
        total = sum(costs(m, list(g), free) for g in [*map(list, found.groups), *alone])
        assert total == pytest.approx(float(m.alone[used].sum()) - found.seconds)
        for group in found.groups:
            slots = m.slot[list(group)]
            begin = max(m.made[slots].max(), m.read[slots].min())
            for e in group:
                s = m.slot[e]
                gathers = m.gathers[m.kind[e]]
                a, b = (begin, m.read[s]) if gathers else (m.until[s], m.made[slots].max())
                held[a : max(a, b)] += m.held[e]
        assert held.max() <= max(limit, found.peak) * (1 + 1e-12)
        assert held.max() <= limit * (1 + 1e-12)
        merged += len(found.groups)
    assert merged > 60


@pytest.mark.parametrize("apart", ["all", "what waits a tick"])
def test_what_is_apart_matters(apart: str) -> None:
    """If more were thought to be in no group than are, some prices would be too high."""
    over = 0
    for seed in range(40):
        m = drawn(np.random.default_rng(seed))
        price = np.full(TICKS, 1e-3)
        relations = m.relations(np.concatenate(([0.0], np.cumsum(price))))
        if apart == "all":
            relations = [np.triu(np.ones_like(x), 1) for x in relations]
        else:
            relations = [
                x | y for x, y in zip(relations, m.relations(np.arange(99.0)), strict=True)
            ]
        used = [int(np.flatnonzero(m.slot == s)[0]) for s in set(m.slot.tolist())]
        paid = prices_of(m, m.evenly(relations))[used].sum()
        often = np.bincount(np.array(used), minlength=len(m)).astype(float)
        mixture = m.better(m.evenly(relations), often, relations, 30)
        paid = max(paid, prices_of(m, mixture)[used].sum())
        over += paid > least(m, used, price) * (1 + 1e-9)
    assert over
