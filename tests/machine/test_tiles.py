"""Arrays in the tiles of TPUs; the expected figures are layouts that libtpu printed."""

from __future__ import annotations

from math import prod

import pytest

from tapestry_egg.machine.target import load_target
from tapestry_egg.machine.tiles import stored_bytes, tight_order

TILES = load_target("v5e:2x4").tiles

# Shape, itemsize -> elements of the tiles, as XLA lays it out where it enters a program.
ENTERING = [
    ((), 4, 128),
    ((100,), 4, 128),
    ((200,), 4, 256),  # {0:T(256)}
    ((5000,), 4, 5120),
    ((3,), 2, 256),  # {0:T(256)(128)(2,1)}
    ((3,), 1, 512),
    ((1, 1000), 4, 1024),  # {1,0:T(1,128)}
    ((1, 1000), 2, 2 * 1024),  # {1,0:T(2,128)(2,1)}
    ((3, 1000), 4, 4 * 1024),
    ((9, 1000), 4, 16 * 1024),
    ((1000, 3), 4, 4 * 1024),  # {0,1:T(4,128)}
    ((1000, 64), 4, 64 * 1024),  # {0,1:T(8,128)}
    ((4, 1000, 3), 4, 3 * 4 * 1024),  # {1,0,2:T(4,128)}
    ((64, 8, 8, 32), 4, 8 * 8 * 32 * 128),  # {0,3,2,1:T(8,128)}
    ((256, 8, 256, 64), 4, 256 * 8 * 256 * 64),  # {2,3,1,0:T(8,128)}
    ((4096, 1, 1), 2, 2 * 4096),
]


@pytest.mark.parametrize(("shape", "itemsize", "elements"), ENTERING)
def test_arrays_lie_in_the_fewest_tiles(
    shape: tuple[int, ...], itemsize: int, elements: int
) -> None:
    assert stored_bytes(shape, itemsize, TILES) == elements * itemsize


@pytest.mark.parametrize(
    ("shape", "windows", "itemsize", "elements"),
    [
        ((16, 64, 64, 32), (1, 2), 4, 16 * 64 * 64 * 128),  # {3,0,2,1:T(8,128)}
        ((128, 64, 64, 3), (1, 2), 2, 128 * 64 * 64 * 3),  # {0,2,3,1:T(8,128)(2,1)}
        ((128, 8, 8, 16), (1, 2), 4, 128 * 8 * 8 * 16),  # {0,3,2,1:T(8,128)}
        ((262144, 8), (0,), 4, 262144 * 128),  # {1,0:T(8,128)}
        ((1024, 3), (0, 1), 4, 1024 * 4),  # along one of them, where there is no other
    ],
)
def test_lanes_lie_along_no_dim_that_windows_move_along(
    shape: tuple[int, ...], windows: tuple[int, ...], itemsize: int, elements: int
) -> None:
    assert stored_bytes(shape, itemsize, TILES, windows) == elements * itemsize


@pytest.mark.parametrize("target", ["h100:8", "cpu:8"])
def test_elsewhere_there_are_none(target: str) -> None:
    tiles = load_target(target).tiles
    assert tiles is None
    assert stored_bytes((1000, 3), 4, tiles) == 4 * prod((1000, 3))


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((16, 256, 16), (0, 2, 1)),  # 16 columns would be padded to 128
        ((16, 256, 128), None),
        ((16, 16, 16), None),  # either way
        ((4, 2, 256, 16), (0, 1, 3, 2)),
        ((4, 128, 2, 8), (0, 2, 3, 1)),
        ((256, 16), None),  # vectors, one in each step
    ],
)
def test_a_stack_keeps_its_steps_outermost(
    shape: tuple[int, ...], order: tuple[int, ...] | None
) -> None:
    assert TILES is not None
    assert tight_order(shape, 4, TILES) == order
