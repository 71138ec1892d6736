"""Collectives put together: none that waits for another, and no sets that wait in a circle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product
from types import SimpleNamespace
from typing import Any, cast, get_args

import networkx as nx
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.front import merging
from tapestry_egg.extract.merged import members
from tapestry_egg.extract.merged.members import Candidates, Member, Which, untangled
from tapestry_egg.machine.target import load_target
from tapestry_egg.plans.plan import Merged, Plan
from tapestry_egg.schedule.of_plans import plan_schedule
from tests.extract.test_merging import every_searched

H100 = load_target("h100:8")


def drawn(seed: int, patch: pytest.MonkeyPatch, most: int = 16) -> Candidates:
    """Copies of some of the values of a random program, of two kinds: unit u makes value u."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, most))
    reads = [sorted({int(v) for v in rng.integers(0, u, 2)}) if u else [] for u in range(count)]
    users = {v: [u for u in range(count) if v in reads[u]] for v in range(count)}
    units = [SimpleNamespace(reads=[(0, 0, v) for v in own]) for own in reads]
    maker = {v: v for v in range(count)}
    lives = SimpleNamespace(maker=maker, users=users, end=2 * count, made=lambda v: 2 * v)
    found = Candidates.__new__(Candidates)
    found.walk = cast(
        Any,
        SimpleNamespace(
            ground=SimpleNamespace(lives=lives),
            schedule=SimpleNamespace(units=units),
            read_at=lambda move: 2 * users[move.value][0],
        ),
    )
    before = members.ancestors(found.walk)
    found.members = {}
    for v in range(count):
        if rng.random() < 0.6:  # what no unit reads leaves as a new state does
            readers = sum(1 << u for u in users[v])
            move = cast(Any, SimpleNamespace(value=v))
            one = Member((v, cast(Any, "whole"), 0), move, 1.0, 1.0, 1.0, v, readers, before[v])
            kind = cast(Any, (("all_reduce", "all_gather")[int(rng.integers(2))], (0,)))
            found.members.setdefault(kind, []).append(one)
    found._by_key = {m.key: (kind, m) for kind, own in found.members.items() for m in own}
    found._groups = {}
    found._most_bytes = 3.0
    patch.setattr(Candidates, "_seconds", lambda *_: 1.0)
    return found


@pytest.mark.parametrize("which", ["before", "after"])
def test_sets_of_random_programs_wait_for_none_of_their_own_nor_in_a_circle(
    which: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = 0
    for seed in range(300):
        found = drawn(seed, monkeypatch)
        graph = waits(found.walk, found)
        groups, saved = found.groups(which)
        assert saved == sum(len(group) - 1 for group in groups)
        assert all(2 <= len(group) <= 3 for group in groups)
        sound(graph, groups)
        sets += len(groups)
    assert sets > 100


def test_groups_of_several_kinds_are_cut_up_where_they_wait_in_a_circle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups that may be stay as they are, and of the others nothing is left out but single copies,
    nor is what saves most cut."""
    circles = 0
    for seed in range(200):
        found = drawn(seed, monkeypatch, most=60)
        graph = waits(found.walk, found)
        groups = [group for own in found.members.values() for group in free_of_each_other(own)]
        cut = untangled(groups, len)
        sound(graph, [tuple(m.key for m in own) for own in cut])
        longest = max(groups, key=len, default=[])
        assert longest in cut or not groups
        assert all(any(set(names(own)) <= set(names(g)) for g in groups) for own in cut)
        try:
            sound(graph, [tuple(m.key for m in group) for group in groups])
        except AssertionError:
            circles += 1
            assert len(cut) > len(groups) or sum(map(len, cut)) < sum(map(len, groups))
        else:
            assert sorted(map(names, cut)) == sorted(map(names, groups))
    assert circles > 20


def test_a_circle_through_three_groups_is_cut_where_it_is_worth_least() -> None:
    """Of each group one copy is made of what one of the group before it leads to."""

    def copy(v: int, readers: int, before: int) -> Member:
        return Member(
            (v, cast(Any, "whole"), 0), cast(Any, None), 1.0, 1.0, 1.0, v, readers, before
        )

    first = [copy(0, 0b001, 0), copy(1, 0, 0b100), copy(2, 0, 0)]
    second = [copy(3, 0b010, 0), copy(4, 0, 0b001)]
    third = [copy(5, 0b100, 0), copy(6, 0, 0b010), copy(7, 0, 0)]
    assert untangled([first, second, third], len) == [first, third]
    assert untangled([first, second], len) == [first, second]
    fourth = [*third, copy(8, 0, 0b010)]
    assert untangled([first, [*second, copy(9, 0, 0)], fourth], len) == [
        fourth,
        first,
        [second[0], copy(9, 0, 0)],
    ]


def names(group: Sequence[Member]) -> list[int]:
    return [m.key[0] for m in group]


def free_of_each_other(members: Sequence[Member]) -> list[list[Member]]:
    """Copies of one kind in groups of two and more, none of which is made of what reads another."""
    groups: list[list[Member]] = []
    for m in members:
        for group in groups:
            if not any(m.readers & x.before or x.readers & m.before for x in group):
                group.append(m)
                break
        else:
            groups.append([m])
    return [group for group in groups if len(group) > 1]


def sound(graph: nx.DiGraph, groups: Sequence[Merged]) -> None:
    """No copy of a set waits for another of it, and no sets wait for each other in a circle."""
    for group in groups:
        for a, b in permutations(group, 2):
            assert not nx.has_path(graph, a, b)
    named = {key: f"set {n}" for n, group in enumerate(groups) for key in group}
    assert nx.is_directed_acyclic_graph(nx.relabel_nodes(graph, named))


def waits(walk: Walk, found: Candidates) -> nx.DiGraph:
    """Units, and copies between the unit that makes a value and all that read it."""
    graph, lives = nx.DiGraph(), walk.ground.lives
    for u, unit in enumerate(walk.schedule.units):
        graph.add_node(u)
        graph.add_edges_from((lives.maker[v], u) for _, _, v in unit.reads if lives.maker[v] < u)
    for m in (m for own in found.members.values() for m in own):
        graph.add_edge(lives.maker[m.move.value], m.key)
        graph.add_edges_from(
            (m.key, u) for u in range(len(walk.schedule.units)) if m.readers >> u & 1
        )
    assert nx.is_directed_acyclic_graph(graph)
    return graph


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Every plan that a search kept, none of it merged."""
    return [p for p in every_searched()[1] if p.mesh.devices > 1]


def candidates(plan: Plan) -> tuple[Walk, Candidates]:
    walk = Walk(plan, Ground(plan_schedule(plan.body, {}), H100))
    walk.find_moves()
    return walk, Candidates(walk)


@pytest.mark.slow
def test_none_waits_for_another_and_sets_not_in_a_circle(plans: list[Plan]) -> None:
    sets = 0
    for plan in plans:
        walk, found = candidates(plan)
        graph = waits(walk, found)
        for which, gathers in product(("before", "after"), (True, False)):
            groups, _ = found.groups(which, gathers)
            sound(graph, groups)
            sets += len(groups)
    assert sets > 10


@pytest.mark.slow
def test_what_may_be_saved_is_the_most_of_all_that_is_tried(plans: list[Plan]) -> None:
    for plan in plans:
        _, found = candidates(plan)
        ways = product(get_args(Which), (True, False))
        saved = [found.groups(*way)[1] for way in ways]
        assert found.most_saved() == max(saved)


@pytest.mark.slow
def test_what_is_put_together_is_a_plan(plans: list[Plan]) -> None:
    made = 0
    for plan in plans[:12]:
        walk, found = candidates(plan)
        for which in ("before", "after"):
            groups, saved = found.groups(which)
            if not groups:
                continue
            one = merging._made(plan, groups, walk.ground, {})
            assert isinstance(one, te.Plan)
            assert plan.costs.seconds - one.costs.seconds == pytest.approx(saved, rel=1e-6)
            made += 1
    assert made > 3
