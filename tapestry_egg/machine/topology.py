"""Topologies: the levels of a machine's network, and how a mesh axis lies in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Literal, cast

from tapestry_egg.errors import TargetError
from tapestry_egg.graph.layout import MeshShape

from .target_table import Table


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the network, as the chip's file gives it; level 0 is the innermost.

    A `switch` joins `max[0]` devices (any number when `max` is empty) that each send
    `bytes_per_second` to anyone. A `torus` has one dim per entry of `max`, and
    `bytes_per_second` is one link in one direction. A torus dim closes into a ring when its extent
    is a multiple of `wrap_multiple` (0: never) and, with `wrap_every_dim`, all others are too.
    Bandwidths here are already multiplied by the file's `efficiency`.
    """

    name: str
    kind: Literal["switch", "torus"]
    bytes_per_second: float
    latency_seconds: float
    max: tuple[int, ...] = ()
    wrap_multiple: int = 0
    wrap_every_dim: bool = False
    base_seconds: float = 0.0  # of a collective of no bytes, before its hops
    ring_seconds: float = 0.0  # of a step of a ring through the whole group, where measured
    tree_bytes_per_second: float = 0.0  # that each device sends in all-reduces that go by trees
    message_seconds: float = 0.0  # of each message of an all-to-all, where measured

    @property
    def rank(self) -> int:
        """Number of dims of a target's shape that this level spans."""
        return len(self.max) if self.kind == "torus" else 1

    @property
    def full_bytes_per_second(self) -> float:
        """What one device sends with all its links of this level in use."""
        return self.bytes_per_second * (2 * self.rank if self.kind == "torus" else 1)


@dataclass(frozen=True, slots=True)
class Link:
    """What a collective over some mesh axes gets: each device's send rate, and one hop's delay."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a collective's group that lies within one level of the network.

    `group` devices take part at this level. `bytes_per_second` is what each sends in a bandwidth-
    optimal ring or bucket algorithm, `hops` the links between the two farthest apart, and
    `exchange_seconds_per_byte` the time of an all-to-all per byte of a device's block.
    """

    level: str
    kind: Literal["switch", "torus"]
    group: int
    bytes_per_second: float
    latency_seconds: float
    hops: int
    exchange_seconds_per_byte: float
    base_seconds: float
    ring_seconds: float = 0.0
    tree_bytes_per_second: float = 0.0
    message_seconds: float = 0.0


def factorizations(n: int, most: int) -> list[tuple[int, ...]]:
    """Ordered factorizations of n into at most `most` factors, all greater than 1."""
    if n == 1:
        return []
    out: list[tuple[int, ...]] = [(n,)]
    if most > 1:
        for first in range(2, n // 2 + 1):
            if n % first == 0:
                out.extend((first, *rest) for rest in factorizations(n // first, most - 1))
    return out


def boundaries(sizes: tuple[int, ...]) -> frozenset[int]:
    """Device counts at which a row-major id carries into the next dim, the whole included."""
    out, n = set(), 1
    for s in reversed(sizes):
        n *= s
        out.add(n)
    return frozenset(out)


def is_chain(numbers: frozenset[int]) -> bool:
    ordered = sorted(numbers)
    return all(b % a == 0 for a, b in pairwise(ordered))


def part(shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """The shape of the first so many devices of a machine: neighbours inside the innermost dim
    first, whole inner dims before a second place of an outer one.

    `(4, 8)` has the parts `(1, 2)`, `(1, 8)`, `(3, 8)`; there is none of 12 devices. Raises
    TargetError for a number of which there is none.
    """
    taken: list[int] = []
    left = devices
    for n in reversed(shape):
        here = left if left < n else n
        if here < 1 or left % here:
            break
        taken.append(here)
        left //= here
    if left != 1 or len(taken) != len(shape):
        text = "x".join(map(str, shape))
        raise TargetError(f"{devices} devices are no part of {text}", hint=PARTS)
    return tuple(reversed(taken))


#: What parts a machine has, for messages.
PARTS = (
    "A part fills inner levels before it takes from outer ones: 1, 2 or 3 hosts, or some of one."
)


def parts(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The numbers of devices of all parts of a machine of at most `most` devices, rising."""
    found, inner = {1}, 1
    for n in reversed(shape):
        found |= {inner * k for k in range(1, n + 1)}
        inner *= n
    return tuple(sorted(n for n in found if n <= most))


def even_parts(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Of `parts` those that divide the machine evenly, and the largest, falling."""
    every = parts(shape, most)
    return tuple(n for n in reversed(every) if n == every[-1] or prod(shape) % n == 0)


@dataclass(frozen=True, slots=True)
class _Digit:
    """`count` devices of a group, `stride` apart, along one dim of the target's shape."""

    dim: int
    stride: int
    count: int


@lru_cache(maxsize=4096)
def find_spans(
    levels: tuple[Level, ...], shape: tuple[int, ...], mesh: MeshShape, axes: frozenset[int]
) -> tuple[Span, ...]:
    devices = prod(shape)
    if mesh.devices > devices:
        raise TargetError(f"mesh {mesh} has {mesh.devices} devices, the target has {devices}")
    whole = shape
    if mesh.devices < devices:
        devices, shape = mesh.devices, part(shape, mesh.devices)
    if any(not 0 <= a < len(mesh.sizes) for a in axes):
        raise TargetError(f"mesh {mesh} has no axes {sorted(axes)}")
    group = mesh.parts(tuple(axes))
    if group == 1:
        return ()
    cuts = boundaries(shape) | boundaries(mesh.sizes) | {1}
    inner = min(levels[0].rank, len(shape))
    if not is_chain(cuts):
        # Groups straddle dims unevenly. Charge them all to the outermost level: a line through
        # every device when that is a torus.
        level = levels[len(shape) - inner]
        if level.kind == "switch":
            return (_switch_span(level, group),)
        line = (_Digit(0, devices // group, group),)
        return (_torus_span(level, (devices,), line, (False,)),)

    digits: list[_Digit] = []
    ordered = sorted(cuts)
    for low, high in pairwise(ordered):
        if _place(mesh.sizes, low)[0] in axes:
            dim, stride = _place(shape, low)
            last = digits[-1] if digits else None
            if last and last.dim == dim and last.stride * last.count == stride:
                digits[-1] = _Digit(dim, last.stride, last.count * (high // low))
            else:
                digits.append(_Digit(dim, stride, high // low))

    spans = []
    first = len(shape) - inner
    here = tuple(d for d in digits if d.dim >= first)
    if here and levels[0].kind == "torus":
        moved = tuple(_Digit(d.dim - first, d.stride, d.count) for d in here)
        # A part of a ring is a line.
        whole_dims = tuple(a == b for a, b in zip(shape[first:], whole[first:], strict=True))
        spans.append(_torus_span(levels[0], shape[first:], moved, whole_dims))
    elif here:
        spans.append(_switch_span(levels[0], prod(d.count for d in here)))
    for k, level in enumerate(levels[1:], start=1):
        outer = [d.count for d in digits if d.dim == first - k]
        if outer:
            spans.append(_switch_span(level, prod(outer)))
    return tuple(spans)


def _place(sizes: tuple[int, ...], low: int) -> tuple[int, int]:
    """The dim, and the stride within it, of the digit that starts at device count `low`."""
    n = 1
    for d in range(len(sizes) - 1, -1, -1):
        if n <= low < n * sizes[d]:
            return d, low // n
        n *= sizes[d]
    raise AssertionError(f"{low} is outside {sizes}")


def _switch_span(level: Level, group: int) -> Span:
    return Span(
        level.name,
        level.kind,
        group,
        level.bytes_per_second,
        level.latency_seconds,
        group - 1,
        (group - 1) / group / level.bytes_per_second,
        level.base_seconds,
        level.ring_seconds,
        level.tree_bytes_per_second or level.bytes_per_second,
        level.message_seconds,
    )


def _torus_span(
    level: Level,
    extents: tuple[int, ...],
    digits: tuple[_Digit, ...],
    may_wrap: tuple[bool, ...],
) -> Span:
    """A group along one or more torus dims.

    A ring sends both ways at once, a line has one link at each end. Groups that interleave
    (stride s) share the links they pass over, s to a link. Over m dims the data is cut in m parts
    that go round the dims in different orders, so the rates add; the slowest dim paces all. In an
    all-to-all among n in a line or ring, ⌊n²/4⌋/n of a device's block crosses the busiest link.
    """
    closes = [level.wrap_multiple > 0 and n % level.wrap_multiple == 0 for n in extents]
    closes = [a and b for a, b in zip(closes, may_wrap, strict=True)]
    if level.wrap_every_dim and (len(extents) < level.rank or not all(closes)):
        closes = [False] * len(extents)
    rates, hops, exchange = [], 0, 0.0
    for d in digits:
        ring = closes[d.dim] and d.stride * d.count == extents[d.dim]
        rate = level.bytes_per_second * (2 if ring else 1) / d.stride
        rates.append(rate)
        hops += (d.count // 2 if ring else d.count - 1) * d.stride
        exchange = max(exchange, (d.count * d.count // 4) / d.count / rate)
    return Span(
        level.name,
        level.kind,
        prod(d.count for d in digits),
        len(rates) * min(rates),
        level.latency_seconds,
        hops,
        exchange,
        level.base_seconds,
    )


def published_link_rate(levels: Iterable[Table]) -> float:
    """Bytes per second that a device sends with all links of the innermost level, as published."""
    inner = next(iter(levels))
    links = 2 * len(_sizes(inner)) if inner["kind"].text() == "torus" else 1
    return inner.number("bytes_per_second") * links


def _sizes(level: Table) -> tuple[int, ...]:
    """The most devices along each dim of a level; empty where nothing is said of it."""
    sizes = level["max"].items() if "max" in level else ()
    return tuple(int(n.number(whole=True)) for n in sizes)


def read_level(table: Table) -> Level:
    """A level as a target's file gives it. Raises TargetError, with the place."""
    kind = table["kind"].text()
    if kind not in ("switch", "torus"):
        raise table.node.error(f"level kind {kind!r} is neither switch nor torus")
    most = _sizes(table)
    if len(most) != 1 and (kind == "torus") != (len(most) > 1):
        raise table.node.error(f"max {list(most)} does not fit a {kind}")
    multiple, every = 0, False
    if "wrap" in table:
        if kind != "torus":
            raise table.node.error("only a torus has a wrap")
        wrap = table.table("wrap")
        multiple, every = int(wrap.number("multiple", whole=True)), wrap.flag("every_dim")
        wrap.finish()
    level = Level(
        table["name"].text(),
        cast(Literal["switch", "torus"], kind),
        table.number("bytes_per_second") * table.number("efficiency", most=1),
        table.number("latency_seconds", zero=True),
        most,
        multiple,
        every,
        table.number("base_seconds", 0.0, zero=True),
        table.number("ring_seconds", 0.0, zero=True),
        table.number("tree_bytes_per_second", 0.0, zero=True),
        table.number("message_seconds", 0.0, zero=True),
    )
    figures = level.ring_seconds, level.tree_bytes_per_second, level.message_seconds
    if kind == "torus" and any(figures):
        raise table.node.error(
            "only a switch has figures of rings through all devices, trees, messages"
        )
    if level.tree_bytes_per_second and not level.ring_seconds:
        raise table.node.error(
            "tree_bytes_per_second without ring_seconds, which trees are held against"
        )
    table.finish()
    return level


def check_shape(name: str, spec: str, shape: tuple[int, ...], levels: tuple[Level, ...]) -> None:
    """Raise TargetError where a machine cannot have so many devices per level."""
    if not levels:
        raise TargetError(f"{name} has no levels", hint="Give it at least one.")
    if not shape or any(n < 1 for n in shape):
        raise TargetError(f"{shape} is not a shape of {name}", hint="Counts are positive.")
    most = levels[0].rank + len(levels) - 1
    if len(shape) > most:
        raise TargetError(
            f"{spec} has {len(shape)} dims, {name} at most {most}",
            hint=f"They are how devices are wired, outermost first: {_describe_levels(levels)}. "
            "Plans choose the dims of their mesh, or mesh_shapes says them.",
        )
    end = len(shape)
    for level in levels:
        dims = shape[max(0, end - level.rank) : end]
        end -= len(dims)
        if level.max and any(
            n > m for n, m in zip(sorted(dims)[::-1], sorted(level.max)[::-1], strict=False)
        ):
            outer = _divided(shape, levels)
            raise TargetError(
                f"{spec} is too large: {level.name} joins at most "
                f"{'x'.join(map(str, level.max))} devices",
                hint=(f"Write {name}:{'x'.join(map(str, outer))}. " if outer else "")
                + f"Outermost first: {_describe_levels(levels)}.",
            )


def _divided(shape: tuple[int, ...], levels: tuple[Level, ...]) -> tuple[int, ...]:
    """A number of devices as hosts of as many as one joins; nothing where it is no multiple."""
    if len(shape) > 1 or len(levels) < 2 or levels[0].rank > 1 or shape[0] % levels[0].max[0]:
        return ()
    return shape[0] // levels[0].max[0], levels[0].max[0]


def _describe_levels(levels: tuple[Level, ...]) -> str:
    outer = [f"number over the {level.name}" for level in levels[:0:-1]]
    inner = f"{levels[0].name} " + ("x".join(map(str, levels[0].max)) or "any number")
    return ", then ".join([*outer, inner + (" at most" if levels[0].max else "")])
