"""Parts of a machine: the first devices of it that make a box, and how meshes lie on them."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from tapestry_egg.errors import TargetError
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.machine.energy import collective_joules
from tapestry_egg.machine.target import load_target
from tapestry_egg.machine.topology import even_parts, part, parts


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
