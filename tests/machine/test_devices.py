"""Places of devices: by coordinates and hosts, so that what the costs call neighbours are some."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest

from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.devices import in_network_order, network_shape
from tapestry_egg.machine.target import load_target
from tapestry_egg.runtime.compiled import jax_mesh


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
