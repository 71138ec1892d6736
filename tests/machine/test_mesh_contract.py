"""A named mesh: which meshes a plan may have, and which layouts the user's axes express."""

from __future__ import annotations

from itertools import permutations, product
from math import prod

import numpy as np
import pytest

from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.graph.layout_algebra import LayoutAlgebra
from tapestry_egg.machine.mesh_contract import MOST_AXES, MeshContract


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
