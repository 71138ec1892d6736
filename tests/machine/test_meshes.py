"""Parts of a machine: the first devices of it that make a box, and how meshes lie on them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.errors import TargetError
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.problem.assemble import assemble
from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.graph.layout_algebra import LayoutAlgebra
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.machine.devices import in_network_order, network_shape
from tapestry_egg.machine.energy import collective_joules
from tapestry_egg.machine.mesh_contract import MOST_AXES, MeshContract
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.machine.topology import even_parts, part, parts
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.runtime.compiled import jax_mesh
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.schedules import scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.trace import Program, trace


def _box(shape: tuple[int, ...], devices: int) -> tuple[int, ...] | None:
    """The extents of the first so many devices, one by one, where they fill a box."""
    places = np.array(np.unravel_index(np.arange(devices), shape)).T
    extents = tuple(int(n) for n in places.max(axis=0) + 1)
    return extents if prod(extents) == devices else None


@pytest.mark.parametrize(
    "shape", [(8,), (4, 8), (2, 6), (2, 3, 4), (1, 5), (5, 1), (1,), (3, 1, 2)]
)
def test_a_part_is_a_box_of_the_first_devices(shape: tuple[int, ...]) -> None:
    boxes = {n: _box(shape, n) for n in range(1, prod(shape) + 1)}
    assert parts(shape, prod(shape)) == tuple(n for n, box in boxes.items() if box)
    for n, box in boxes.items():
        if box:
            assert part(shape, n) == box
        else:
            with pytest.raises(TargetError, match="no part of"):
                part(shape, n)
    for n in (0, prod(shape) + 1):
        with pytest.raises(TargetError):
            part(shape, n)


def test_even_parts_and_the_largest() -> None:
    assert even_parts((8,), 8) == (8, 4, 2, 1)
    assert even_parts((8,), 6) == (6, 4, 2, 1)
    assert even_parts((64, 8), 330) == (328, 256, 128, 64, 32, 16, 8, 4, 2, 1)
    assert even_parts((4, 8), 12) == (8, 4, 2, 1)  # no part has 12


def test_neighbours_inside_a_host_come_first() -> None:
    machine = load_target("h100:4x8")
    inner, outer = (level.name for level in machine.levels)
    (eight,) = machine.spans(MeshShape(("x",), (8,)), (0,))
    assert (eight.level, eight.group) == (inner, 8)
    both = machine.spans(MeshShape(("x",), (16,)), (0,))
    assert [(s.level, s.group) for s in both] == [(inner, 8), (outer, 2)]
    # As on a machine of that many devices, but for the names of dims.
    own = load_target("h100:2x8")
    for mesh in own.mesh_shapes(3):
        for axis in range(len(mesh.sizes)):
            assert machine.spans(mesh, (axis,)) == own.spans(mesh, (axis,))
    with pytest.raises(TargetError, match="no part of 4x8"):
        machine.spans(MeshShape(("x",), (12,)), (0,))


def test_a_part_of_a_ring_is_a_line() -> None:
    machine = load_target("v6e:16x16")
    column, row = (machine.spans(MeshShape(("x", "y"), (16, 16)), (k,))[0] for k in (0, 1))
    assert (column.hops, row.hops) == (8, 8)
    # 8 of the 16 places of the outer dim: no link closes them, while the inner dim is whole.
    half = MeshShape(("x", "y"), (8, 16))
    column, row = (machine.spans(half, (k,))[0] for k in (0, 1))
    assert (column.hops, row.hops) == (7, 8)
    assert 2 * column.bytes_per_second == row.bytes_per_second
    # Where links close a dim of 4, they close no 4 of its 8 places.
    cube, part_of_it = load_target("v5p:4x4x4"), load_target("v5p:8x4x4")
    mesh = MeshShape(("x", "y"), (4, 16))
    assert cube.spans(mesh, (0,))[0].hops == 2 and part_of_it.spans(mesh, (0,))[0].hops == 3


def test_a_part_moves_and_draws_what_a_machine_of_its_size_does() -> None:
    whole, own = load_target("a100:2x8"), load_target("a100:4")
    mesh = MeshShape(("x", "y"), (2, 2))
    for kind in ("all_reduce", "all_gather", "slice"):
        for price in (collective_seconds, collective_joules):
            assert price(kind, 1e6, (0, 1), mesh, whole) == price(kind, 1e6, (0, 1), mesh, own)


def test_meshes_of_a_part() -> None:
    machine = load_target("h100:4x8")
    assert machine.mesh_shapes(2, 4) == load_target("h100:4").mesh_shapes(2)
    assert machine.mesh_shapes(3, 16) == load_target("h100:2x8").mesh_shapes(3)
    assert machine.mesh_shapes(2, 1) == (MeshShape(("x",), (1,)),)
    with pytest.raises(TargetError, match="no part"):
        machine.mesh_shapes(2, 12)


# Meshes that are the same but for the names of their axes are searched once.


KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
SPECS = ("h100:8", "h100:2x4", "h100:4x8", "cpu:12", "v5e:4x4", "v5e:2x4", "v5e:8x8")


def sizes(spec: str, axes: int = 2) -> list[tuple[int, ...]]:
    target = load_target(spec)
    return [mesh.sizes for mesh in target.distinct(target.mesh_shapes(axes))]


def test_on_one_switch_the_order_of_axes_is_all_the_same() -> None:
    assert sizes("h100:8") == [(8,), (2, 4)]
    assert sizes("h100:8", 3) == [(8,), (2, 4), (2, 2, 2)]
    assert sizes("cpu:12") == [(12,), (2, 6), (3, 4)]


def test_between_hosts_it_is_not() -> None:
    """Four groups of two hosts, or two groups that each lie in one host."""
    assert {(2, 4), (4, 2)} <= set(sizes("h100:2x4"))


def priced(mesh: MeshShape, order: tuple[int, ...], target: Target) -> list[float]:
    """What collectives take over every group of a mesh's axes, the axes read in an order."""
    groups = [g for n in range(len(order)) for g in combinations(order, n + 1)]
    return [
        float(collective_seconds(kind, nbytes, tuple(sorted(g)), mesh, target))
        for g in groups
        for kind in KINDS
        for nbytes in (64.0, 1e9)
    ]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("axes", [2, 3])
def test_what_is_left_out_costs_the_same_as_something_kept(spec: str, axes: int) -> None:
    target = load_target(spec)
    every = target.mesh_shapes(axes)
    kept = target.distinct(every)
    assert set(kept) <= set(every) and kept[0] == every[0]

    def alike(a: MeshShape, b: MeshShape) -> bool:
        same = tuple(range(len(b.sizes)))
        return any(
            tuple(a.sizes[k] for k in order) == b.sizes
            and priced(a, order, target) == pytest.approx(priced(b, same, target), rel=1e-12)
            for order in permutations(range(len(a.sizes)))
        )

    for mesh in every:
        assert mesh in kept or any(alike(mesh, other) for other in kept)


F32 = jnp.float32
WIDE, TALL = jax.ShapeDtypeStruct((16, 64), F32), jax.ShapeDtypeStruct((64, 32), F32)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def program() -> Program:
    return trace(step, TALL, WIDE, donate_argnums=(0,))


def problem(mesh: tuple[int, int]) -> Problem:
    graph, shape = program().graph, MeshShape(("x", "y"), mesh)
    plan = scheduled(graph, feedback_pairs(graph))
    found = saturate(encode(plan.program, shape), load_books(("sharding", "collectives")))
    return assemble(unit_choices(plan, found, shape, load_target("h100:8"))).problem


@pytest.mark.slow
def test_every_strategy_has_its_like_on_the_mesh_with_other_names() -> None:
    one, other = problem((2, 4)), problem((4, 2))
    for a, b in zip((*one.variables, *one.pairs), (*other.variables, *other.pairs), strict=True):
        for x, y in ((a.seconds, b.seconds), (a.joules, b.joules)):
            np.testing.assert_allclose(np.sort(x.ravel()), np.sort(y.ravel()), rtol=1e-12)


@pytest.mark.slow
def test_all_meshes_that_are_asked_for_are_searched() -> None:
    both = [MeshShape(("x", "y"), (2, 4)), MeshShape(("x", "y"), (4, 2))]
    settings = Settings(work=0.2, recompute=0, forms=0, merge=False)
    fronts = [
        optimize(program(), "h100:8", mesh_shapes=shapes, settings=settings)
        for shapes in (both[:1], both[1:], both)
    ]
    (costs, *others) = [[p.costs.seconds for p in front] for front in fronts]
    for found in others:
        assert found == pytest.approx(costs)
    assert {str(m) for m in (p.mesh for p in fronts[1])} == {str(both[1])}


# A named mesh: which meshes a plan may have, and which layouts the user's axes express.


def blocks_of(names: tuple[str, ...], sizes: tuple[int, ...], dims, shape) -> np.ndarray:
    """Per device (row-major on the mesh) and dim, the number of the block that it holds."""
    out = np.zeros((prod(sizes), len(shape)), int)
    for device, place in enumerate(np.ndindex(*sizes)):
        for k, cut in enumerate(dims):
            for name in cut:
                a = names.index(name)
                out[device, k] = out[device, k] * sizes[a] + place[a]
    return out


CASES = [
    ((8,), ("d",), (2, 4)),
    ((8,), ("d",), (2, 2, 2)),
    ((4, 2), ("a", "b"), (2, 2, 2)),
    ((2, 1, 4), ("a", "one", "b"), (2, 4)),
    ((2, 2, 2), ("a", "b", "c"), (4, 2)),
    ((2, 2, 2), ("a", "b", "c"), (2, 4)),
]


@pytest.mark.parametrize(("sizes", "names", "plan"), CASES)
def test_what_is_expressible_is_what_some_spec_of_the_user_gives(
    sizes: tuple[int, ...], names: tuple[str, ...], plan: tuple[int, ...]
) -> None:
    """By enumeration: every spec in the user's axes as blocks per device, and every layout of the
    plan's mesh; a layout is expressible just where some spec puts the same blocks everywhere."""
    contract = MeshContract(names, sizes)
    mesh = MeshShape(tuple(f"p{k}" for k in range(len(plan))), plan)
    shape = (8, 8)
    specs = {}
    real = [n for n, s in zip(names, sizes, strict=True) if s > 1]
    for count in range(len(real) + 1):
        for order in permutations(real, count):
            for where in product(range(2), repeat=count):
                dims = tuple(
                    tuple(n for n, k in zip(order, where, strict=True) if k == d) for d in range(2)
                )
                specs[blocks_of(names, sizes, dims, shape).tobytes()] = dims
    layouts = [x for x in LayoutAlgebra(mesh, (2,), ("sum",)).layouts if not x.partial]
    expressed = 0
    for layout in layouts:
        dims = tuple(tuple(mesh.names[a] for a in d) for d in layout.dims)
        same = specs.get(blocks_of(mesh.names, mesh.sizes, dims, shape).tobytes())
        found = contract.express(layout, mesh)
        assert (found is not None) == (same is not None), layout
        if found is not None:
            expressed += 1
            assert found == same
            back = tuple(contract.resolve(d, mesh) for d in found)
            assert Layout(back) == layout  # type: ignore[arg-type]
    assert 0 < expressed <= len(layouts)
    assert contract.express(Layout.replicated(2), mesh) == ((), ())


def test_meshes_are_the_users_own_and_its_refinements() -> None:
    own = MeshContract(("data", "one", "model"), (4, 1, 2))
    assert own.meshes(2) == (MeshShape(("data", "model"), (4, 2)),)
    assert own.meshes(3)[1:] == (MeshShape(("data0", "data1", "model"), (2, 2, 2)),)
    line = MeshContract(("x",), (8,))
    assert [m.sizes for m in line.meshes(2)] == [(8,), (2, 4), (4, 2)]
    assert MeshContract(("x",), (1,)).meshes(2) == (MeshShape(("x",), (1,)),)
    assert MeshContract(("x", "x0"), (4, 2)).meshes(3)[1].names == ("x_0", "x_1", "x0")
    many = MeshContract(tuple("abcd"), (2, 2, 2, 2)).meshes(2)
    assert many[0].sizes == (2, 2, 2, 2)
    assert {m.sizes for m in many[1:]} == {(4, 2, 2), (2, 4, 2), (2, 2, 4)}
    assert all(len(m.sizes) <= MOST_AXES for m in many[1:])
    for contract in (own, line, MeshContract(tuple("abcd"), (2, 2, 2, 2))):
        assert all(contract.blocks(m) is not None for m in contract.meshes(3))


def test_other_meshes_are_not_made_of_the_users_axes() -> None:
    own = MeshContract(("a", "b"), (2, 4))
    assert own.blocks(MeshShape(("x", "y"), (4, 2))) is None
    assert own.blocks(MeshShape(("x",), (4,))) is None
    mesh = MeshShape(("x", "y"), (2, 4))
    assert own.resolve(("c",), mesh) is None
    assert own.resolve(("b", "a"), mesh) == (1, 0)
    joined = MeshShape(("ab",), (8,))
    assert own.resolve(("a", "b"), joined) == (0,)
    assert own.resolve(("b", "a"), joined) is None and own.resolve(("a",), joined) is None


# Places of devices: by coordinates and hosts, so that what the costs call neighbours are some.


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int = 0
    platform: str = "gpu"
    coords: tuple[int, ...] | None = None
    slice_index: int | None = None
    core_on_chip: int = 0


def tpus(extents: tuple[int, ...], slices: int = 1, seed: int = 0) -> list[Device]:
    """Devices of tori in an order that says nothing, numbered so."""
    places = [(s, c) for s in range(slices) for c in product(*map(range, extents))]
    random.Random(seed).shuffle(places)
    return [Device(k, c[0] // 2, "tpu", c, s) for k, (s, c) in enumerate(places)]


def hops(a: Device, b: Device) -> int:
    assert a.coords and b.coords
    return sum(abs(x - y) for x, y in zip(a.coords, b.coords, strict=True))


@pytest.mark.parametrize(
    ("extents", "spec"), [((4, 4, 1), "v5e:4x4"), ((4, 8, 1), "v5e:8x4"), ((2, 4, 4), "v5p:2x4x4")]
)
def test_neighbours_on_the_mesh_are_neighbours_in_the_torus(
    extents: tuple[int, ...], spec: str
) -> None:
    devices, machine = tpus(extents), load_target(spec)
    shape = network_shape(devices)
    assert sorted(shape) == sorted(n for n in extents if n > 1)
    # Some mesh has the dims of the torus as its axes: along each, one hop.
    mesh = MeshShape(tuple("xyz"[: len(machine.shape)]), machine.shape)
    grid = np.empty(len(devices), object)
    grid[:] = in_network_order(devices, machine.shape)
    grid = grid.reshape(machine.shape)
    for axis in range(grid.ndim):
        lines = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
        for line in lines:
            assert all(hops(a, b) == 1 for a, b in pairwise(line))
    assert {d.id for d in grid.flat} == set(range(len(devices)))
    assert machine.spans(mesh, (0,))  # the model speaks of the same shape


def test_hosts_and_slices_are_the_outer_level() -> None:
    # Two hosts of four GPUs, their devices told in turn.
    gpus = [Device(k, process_index=k % 2) for k in range(8)]
    assert network_shape(gpus) == (2, 4)
    assert [d.process_index for d in in_network_order(gpus, (2, 4))] == [0] * 4 + [1] * 4
    # One process for each GPU: what one switch joins says `slice_index`.
    ranks = [Device(k, process_index=k, slice_index=k % 2) for k in range(8)]
    assert network_shape(ranks) == (2, 4)
    assert [d.slice_index for d in in_network_order(ranks, (2, 4))] == [0] * 4 + [1] * 4
    pods = tpus((2, 2, 1), slices=2)
    assert network_shape(pods) == (2, 2, 2)
    ordered = in_network_order(pods, (2, 2, 2))
    assert [d.slice_index for d in ordered] == [0] * 4 + [1] * 4
    assert [d.coords for d in ordered[:4]] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


def test_devices_that_do_not_say_where_they_are_keep_their_order() -> None:
    plain = [Device(k) for k in range(8)]
    assert network_shape(plain) == (8,)
    assert in_network_order(plain, (8,)) == plain
    uneven = [Device(k, process_index=int(k > 4)) for k in range(8)]
    assert network_shape(uneven) == (8,)
    holes = [Device(k, 0, "tpu", (k, k % 2, 0)) for k in range(4)]
    assert network_shape(holes) == (4,) and in_network_order(holes, (4,)) == holes


def test_a_plans_mesh_lies_so() -> None:
    import jax

    devices = jax.devices()
    mesh = MeshShape(("x", "y"), (2, 4))
    backwards = devices[::-1]
    assert list(jax_mesh(mesh, backwards, "cpu:8").devices.flat) == devices
    named = jax.sharding.Mesh(np.array(backwards), ("d",))
    assert list(jax_mesh(mesh, named, "cpu:8").devices.flat) == backwards, "a mesh has its order"


@pytest.mark.parametrize("spec", ["h100:8", "h100:4x8", "v5e:16x16", "v5e:2x4x4"])
def test_a_minor_axis_lies_on_the_links_that_the_costs_say(spec: str) -> None:
    """The innermost axis of every mesh stays within one host or slice as long as it fits there."""
    machine = load_target(spec)
    torus = machine.levels[0].kind == "torus"
    inner = machine.shape[-2:] if torus else machine.shape[-1:]
    outer = prod(machine.shape) // prod(inner)
    devices = (
        tpus((*inner, 1), outer)
        if torus
        else [Device(k, process_index=k % outer) for k in range(machine.devices)]
    )
    ordered = in_network_order(devices, machine.shape)
    for mesh in machine.mesh_shapes(2):
        last = mesh.sizes[-1]
        rows = [ordered[k : k + last] for k in range(0, len(ordered), last)]
        within = all(
            len({d.slice_index if torus else d.process_index for d in r}) == 1 for r in rows
        )
        spans = machine.spans(mesh, (len(mesh.sizes) - 1,))
        assert within == (all(s.level == machine.levels[0].name for s in spans)), mesh
