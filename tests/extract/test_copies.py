"""What is known of all copies of a tensor at once, beside what each says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.extract.choices.copies import CopyTable, StepCosts, copy_table
from tapestry_egg.extract.choices.once import JoinedUnits
from tapestry_egg.extract.choices.unit_choices import UnitChoices, unit_choices
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import Saturated, saturate


def saturated(
    function: Any, sizes: tuple[int, ...], *shapes: tuple[int, ...]
) -> tuple[Schedule, Saturated, MeshShape, Target]:
    graph = te.trace(function, *[jax.ShapeDtypeStruct(s, "float32") for s in shapes]).graph
    plan = scheduled(graph, feedback_pairs(graph, None))
    mesh = MeshShape(("x", "y", "z")[: len(sizes)], sizes)
    found = saturate(encode(plan.program, mesh), load_books(DEFAULT_BOOKS))
    return plan, found, mesh, load_target("h100:8")


def choices(function: Any, sizes: tuple[int, ...], *shapes: tuple[int, ...]) -> UnitChoices:
    return unit_choices(*saturated(function, sizes, *shapes))


def tables(sizes: tuple[int, ...]) -> list[CopyTable]:
    found = choices(lambda x, w, s: s * (x @ w), sizes, (8, 16), (16, 8), ())
    return list(found.copies.values())


def test_nothing_is_sent_for_what_holds_one_number() -> None:
    """XLA writes the number anew where a gather of it would stand."""

    def sums(xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, x: (c + x, None), jnp.zeros((8, 16)), xs)[0]

    found = choices(sums, (8,), (4, 8, 16))
    (fill,) = found.fills
    table, others = found.table(fill), found.copies[TensorType((8, 16), "float32")]
    assert set(np.unique(table.wire)) == {0.0, np.inf}
    whole, cut = (table.number[Layout(dims)] for dims in (((), ()), ((0,), ())))
    assert (table.wire[whole, cut], table.seconds[cut, whole]) == (0.0, np.inf)
    assert 0.0 < others.wire[cut, whole] < np.inf


def test_what_is_computed_of_single_numbers_is_followed_as_far_as_xla_sees_it() -> None:
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def program(xs: jax.Array) -> Sequence[jax.Array]:
        z = jnp.full((8, 8), xs.sum())
        laid = jax.lax.with_sharding_constraint(z, NamedSharding(mesh, P()))
        looped, _ = jax.lax.scan(lambda c, x: (c @ z + x, None), xs, jnp.full((2, 8, 8), xs[0, 0]))
        return [
            jnp.exp(z).T,
            z.sum(0) > 0,
            z @ z,
            z + xs,
            jnp.sort(z, 0),
            laid,
            laid * 2,  # of the number, not of how it is to lie
            jnp.arange(8.0) + z,
            looped,
        ]

    found = choices(program, (8,), (8, 8))
    makers = {v: i.signature for i in found.schedule.program.instances for v in i.outputs}
    kernels = {makers[v].kernel for v in found.fills}
    assert kernels >= {"broadcast_in_dim", "exp", "transpose", "reduce_sum", "gt", "mul"}
    assert kernels >= {"port_invariant", "port_stream"}
    assert not kernels & {"dot_general", "sort", "sharding_constraint", "add", "port_carry"}


def collects(have: Layout, kept: Layout) -> bool:
    """Every dim keeps a beginning of the axes that cut it, or is cut further over axes over which
    the value was partial; nothing stays partial."""
    for before, after in zip(have.dims, kept.dims, strict=True):
        gathered = list(before)
        while gathered and tuple(gathered) != after:
            gathered.pop()
        scattered = before == after[: len(before)]
        further = after[len(before) :]
        if tuple(gathered) != after and not (scattered and set(further) <= set(have.partial)):
            return False
    return not kept.partial


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_tables_say_of_all_pairs_what_layouts_and_paths_say_of_each(sizes: tuple[int, ...]) -> None:
    seen: set[tuple[bool, bool, bool]] = set()
    for table in tables(sizes):
        for (a, have), (b, kept) in product(enumerate(table.layouts), repeat=2):
            mine, rest = set(have.partial), set(kept.partial)
            said = tuple(bool(x[a, b]) for x in (table.in_place, table.combines, table.collects))
            assert said == (
                have.dims == kept.dims and rest < mine,
                not mine <= rest,
                collects(have, kept),
            )
            steps = table.path(have, kept) if table.following[a, b] >= 0 and a != b else ()
            for kind, found in (
                ("all_gather", table.turned),
                ("reduce_scatter", table.turned_before),
            ):
                assert found[a, b] == any(s.kind == kind and s.dim for s in steps)
            seen.add(said)  # type: ignore[arg-type]
            if table.following[a, b] < 0:
                continue
            sent = [s for s in table.path(have, kept) if s.kind not in ("slice", "to_partial")]
            assert table.sends[a, b] == len(sent)
            assert bool(sent) == (table.wire[a, b] > 0)
    assert len(seen) >= 4


MATRICES = ("seconds", "local", "joules", "wire", "scratch", "sends", "turned", "turned_before")


@pytest.mark.parametrize("sizes", [(2, 4), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_tables_of_some_layouts_are_what_those_of_all_have_of_them(sizes: tuple[int, ...]) -> None:
    """Ways between them lead through others all the same."""
    _, found, mesh, target = saturated(lambda x, w: x @ w, sizes, (8, 16), (16, 8))
    algebra, rng, through = found.encoding.algebra, np.random.default_rng(0), 0
    given = (
        [x for x in algebra.layouts if len(x.dims) == 2],
        [c for c in found.changes if len(c.source.dims) == 2],
        algebra.monoids,
        StepCosts(mesh, target),
    )
    for tensor in (TensorType((8, 16), "float32"), TensorType((8, 4), "int32")):
        whole = copy_table(tensor, *given)
        for share in (0.05, 0.2, 0.5) * 3:
            used = {x for x in whole.layouts if rng.random() < share}
            table = copy_table(tensor, *given, used)
            assert table.layouts == tuple(x for x in whole.layouts if x in used)
            at = [whole.number[x] for x in table.layouts]
            for name in MATRICES:
                assert np.array_equal(getattr(table, name), getattr(whole, name)[np.ix_(at, at)])
            for name in ("local_bytes", "held_bytes", "turn_seconds", "turn_joules"):
                assert np.array_equal(getattr(table, name), getattr(whole, name)[at])
            for a, b in product(table.layouts, repeat=2):
                if np.isfinite(table.seconds[table.number[a], table.number[b]]):
                    assert table.path(a, b) == whole.path(a, b)
            single = {(table.layouts[a], table.layouts[b]): x for a, b, x in table.single()}
            every = {(whole.layouts[a], whole.layouts[b]): x for a, b, x in whole.single()}
            assert single == {k: x for k, x in every.items() if used.issuperset(k)}
            through += len(table.through)
    assert through > 0


def test_where_strategies_are_left_out_tables_are_of_the_layouts_of_the_others() -> None:
    plan, found, mesh, target = saturated(lambda x, w: x @ w, (2, 4), (8, 16), (16, 8))
    few = replace(found, strategies=tuple(s[:3] for s in found.strategies), some=True)
    every, some = (unit_choices(plan, f, mesh, target) for f in (found, few))
    for tensor, table in some.copies.items():
        assert 0 < len(table.layouts) < len(every.copies[tensor].layouts)
    for rows in some.rows:
        assert len(rows) > 0
    known = JoinedUnits()
    assert known.on_mesh(found) is known.on_mesh(found)
    assert known.on_mesh(few) is not known.on_mesh(found)
    assert known.on_mesh(few) is not known.on_mesh(few)


def test_tensors_of_equal_blocks_have_equal_tables_in_arrays_of_their_own() -> None:
    graph = te.trace(
        lambda x, y, z: (x * 2.0, y.T * 3.0, z * 2),
        jax.ShapeDtypeStruct((8, 16), "float32"),
        jax.ShapeDtypeStruct((8, 16), "float32"),
        jax.ShapeDtypeStruct((8, 16), "int32"),
    ).graph
    plan = scheduled(graph, feedback_pairs(graph, None))
    mesh, target = MeshShape(("x", "y"), (2, 4)), load_target("h100:8")
    found = saturate(encode(plan.program, mesh), load_books(DEFAULT_BOOKS))
    every = list(unit_choices(plan, found, mesh, target).copies.values())
    every = [t for t in every if t.tensor.rank == 2]
    assert len({t.tensor for t in every}) == 3
    layouts, algebra = found.encoding.algebra.layouts, found.encoding.algebra
    for table in every:
        alone = copy_table(
            table.tensor,
            [x for x in layouts if len(x.dims) == 2],
            [c for c in found.changes if len(c.source.dims) == 2],
            algebra.monoids,
            StepCosts(mesh, target),
        )
        for x in fields(CopyTable):
            one, other = getattr(table, x.name), getattr(alone, x.name)
            assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
        assert all(t is table or t.seconds is not table.seconds for t in every)


@pytest.mark.parametrize("sizes", [(8,), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_copies_take_the_shortest_paths(sizes: tuple[int, ...]) -> None:
    for table in tables(sizes):
        steps = nx.DiGraph()
        steps.add_nodes_from(range(len(table.layouts)))
        for a, b in table.step_of:
            assert table.path(table.layouts[a], table.layouts[b])
            if len(table.path(table.layouts[a], table.layouts[b])) == 1:
                steps.add_edge(a, b, weight=table.seconds[a, b])
        for a, least in nx.all_pairs_dijkstra_path_length(steps):
            for b in range(len(table.layouts)):
                assert table.seconds[a, b] == pytest.approx(least.get(b, np.inf), rel=1e-9)
