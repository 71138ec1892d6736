"""Devices: where they are in the machine's network, and so which place they take on a mesh.

A target counts devices per level of its network, outermost first, row-major (`h100:4x8`: hosts,
then GPUs; `v5e:4x4`: the dims of the torus), and a plan's mesh lies row-major over that. So devices
are put in this order by what they say of themselves: slice, process or host, coordinates in the
torus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import permutations, product
from math import prod
from typing import Any

Ints = tuple[int, ...]


def network_shape(devices: Sequence[Any]) -> Ints:
    """The shape, outermost level first, of the network that the devices are all of.

    Hosts (or slices) of equally many devices are a level; within one, devices with coordinates that
    fill a box are a torus of its extents, without dims of 1. Otherwise they are one row.
    """
    groups = Counter(_group(d) for d in devices)
    outer = len(groups) if len(set(groups.values())) == 1 else 1
    inner = len(devices) // outer
    extents = _extents(devices)
    if extents is None or prod(extents) != inner:
        torus: Ints = (inner,)
    else:
        torus = tuple(n for n in extents if n > 1) or (1,)
    return (outer, *torus) if outer > 1 else torus


def memory_limit(devices: Sequence[Any]) -> int | None:
    """Bytes that a program may use of each device, as those of this process say; None where none
    says (CPU devices share the memory of the machine)."""
    found = []
    for d in devices:
        stats = None
        with suppress(Exception):  # a device of another process, or none that can be asked
            stats = d.memory_stats()
        if d.platform != "cpu" and stats and stats.get("bytes_limit"):
            found.append(int(stats["bytes_limit"]))
    return min(found, default=None)


def in_network_order(devices: Sequence[Any], shape: Ints) -> list[Any]:
    """The devices so that, row-major, they lie in a network of that shape as its levels say.

    A torus whose dims come in another order is turned; where the devices do not say where they are,
    or do not fill the shape, those of one host stay together in their own order.
    """
    extents = _extents(devices)
    together = sorted(devices, key=lambda d: (_group(d), d.process_index, d.id))
    if extents is None:
        return together
    for turned in _turns(extents, shape, len({_group(d) for d in devices})):
        return sorted(
            devices,
            key=lambda d: (
                _group(d),
                *(_coordinates(d)[k] for k in turned),
            ),
        )
    return together


def _turns(extents: Ints, shape: Ints, groups: int) -> list[Ints]:
    """The orders of the torus' dims in which it has the shape, nearest to their own order first."""
    inner = tuple(n for n in (shape[1:] if groups > 1 and shape[0] == groups else shape) if n > 1)
    return [
        turn
        for turn in permutations(range(len(extents)))
        if tuple(extents[k] for k in turn if extents[k] > 1) == inner
    ]


def _group(device: Any) -> Ints:
    """What joins devices by the fastest links: the slice; for others than TPUs, the host."""
    slice_index = getattr(device, "slice_index", None)
    if _coordinates(device) or device.platform == "tpu":
        return (int(slice_index or 0),)
    if slice_index is not None and device.platform != "cpu":
        return (int(slice_index),)
    return (int(device.process_index),)


def _coordinates(device: Any) -> Ints:
    return tuple(int(c) for c in getattr(device, "coords", None) or ())


def _extents(devices: Sequence[Any]) -> Ints | None:
    """The extents of the box that the coordinates of every group fill, one device at each; None
    where they do not."""
    boxes: dict[Ints, set[Ints]] = {}
    for d in devices:
        place = _coordinates(d)
        if not place or place in boxes.setdefault(_group(d), set()):
            return None
        boxes[_group(d)].add(place)
    found = set()
    for places in boxes.values():
        ends = [(min(c), max(c)) for c in zip(*places, strict=True)]
        if places != set(product(*(range(a, b + 1) for a, b in ends))):
            return None
        found.add(tuple(b - a + 1 for a, b in ends))
    return found.pop() if len(found) == 1 else None
