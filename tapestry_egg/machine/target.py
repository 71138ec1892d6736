"""Targets: a chip's datasheet and how many there are of it, read from data files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from importlib import resources
from itertools import combinations, permutations
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any, Literal

from tapestry_egg.errors import TargetError
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.tables.collectives import collective_table
from tapestry_egg.machine.tables.files import TableFile
from tapestry_egg.machine.tables.matmuls import matmul_table
from tapestry_egg.yaml_nodes import YamlNode, compose_yaml_text, read_yaml_text

from .caches import Caches
from .compiler_choices import Combiner, FusionCosts
from .power import Clock, Power, Price, read_clock, read_power, read_price
from .rate_names import computed_as, families
from .split_products import SplitK
from .target_table import Table
from .tiles import Tiles
from .topology import Level as Level
from .topology import Link as Link
from .topology import Span as Span
from .topology import (
    boundaries,
    check_shape,
    factorizations,
    find_spans,
    is_chain,
    part,
    published_link_rate,
    read_level,
)


@dataclass(frozen=True, slots=True)
class Target:
    """A machine: `shape` counts devices per level, outermost first (`h100:4x8` is 4 hosts of 8).

    `hbm_bytes` is what a program may use of one device. Rates are per device: `peak` and `vector`
    in flop/s (contractions; everything else), both as published; `rate` multiplies the efficiency
    in, and `hbm_bytes_per_second` has it already.
    """

    name: str
    shape: tuple[int, ...]
    hbm_bytes: int
    hbm_bytes_per_second: float
    peak: tuple[tuple[str, float], ...]
    vector: tuple[tuple[str, float], ...]
    flops_efficiency: float
    launch_seconds: float
    power: Power
    levels: tuple[Level, ...]
    title: str = ""
    sources: tuple[str, ...] = ()
    retrieved: str = ""
    shared_memory: bool = False  # one memory for all devices, so none is a limit of one of them
    # Seconds that compute loses to every second of communication that runs beside it; None where
    # nothing runs beside anything.
    overlap_slowdown: float | None = None
    overlaps: bool = False  # whether seconds count on it
    # Whether devices that a plan leaves unused count in its joules and dollars.
    idle_counted: bool = False
    clock: Clock | None = None  # None where nothing is known of other clocks than the file's
    mhz: float = 0.0  # the clock that was chosen; 0 is the file's own
    price: Price | None = None
    matmuls: TableFile | None = None  # measured times of products of matrices
    # Flop/s of products of matrices, again and again, at which the device draws all of its power.
    sustained: tuple[tuple[str, float], ...] = ()
    # Flop/s of contractions that no table holds, where they are not the usual share of the peak.
    attained: tuple[tuple[str, float], ...] = ()
    matmul_speed: float = 1.0  # how much faster than the device that the table was measured on
    collectives: TableFile | None = None  # measured times over the innermost level
    link_speed: float = 1.0  # how much faster its links are than those of that table
    # As what contractions at default precision read their operands, where not as they are.
    operands: tuple[tuple[str, str], ...] = ()
    split_k: SplitK | None = None  # how its compiler splits products; None where it splits none
    step_seconds: float = 0.0  # of a step that waits for the one before, inside a kernel
    caches: Caches | None = None  # None: scattered elements cost what others do
    fusing: FusionCosts | None = None  # of what kernels compute again; None: costs nothing
    combiner: Combiner | None = None  # which collectives its compiler makes into one; None: none
    tiles: Tiles | None = None  # in which arrays lie in memory; None: element by element
    # Whether its compiler computes in the kernel of a product what is made of it by elements.
    epilogues: bool = False
    # Whether its compiler computes values in the kernels that read them. (An eager framework has
    # none that does.)
    fuses: bool = True
    # The longest rows that its compiler sums and reads again in one kernel; 0: none.
    rows: int = 0
    # Whether slices of a loop's stacks are written and read by kernels of their own.
    slices: bool = False
    # Whether its compiler holds memory for results that are not donated from the first kernel on.
    reserves: bool = False

    def __post_init__(self) -> None:
        check_shape(self.name, self.spec, self.shape, self.levels)

    @property
    def platform(self) -> str:
        """JAX's name of what its devices are: of those whose compilers lay arrays in tiles TPUs."""
        if self.tiles is not None:
            return "tpu"
        return "gpu" if self.combiner is not None else "cpu"

    @property
    def devices(self) -> int:
        return prod(self.shape)

    @property
    def spec(self) -> str:
        """The spelling that `load_target` reads: `h100:4x8`."""
        chosen = f"@{self.mhz:g}" if self.mhz else ""
        return f"{self.name}:{'x'.join(map(str, self.shape))}{chosen}"

    def at_clock(self, mhz: float) -> Target:
        """The same machine with the clock of its compute units set: its rates and watts follow.

        Memory and links keep theirs. Raises TargetError for a clock that cannot be set, and where
        the target's file says nothing of clocks.
        """
        clock, power = self.clock, self.power
        if clock is None:
            raise TargetError(
                f"nothing is known of other clocks of {self.name}",
                hint="A target file says it under the key clock.",
            )
        if not clock.least_mhz <= mhz <= clock.most_mhz:
            raise TargetError(
                f"the clock of {self.name} cannot be set to {mhz:g} MHz",
                hint=f"It goes from {clock.least_mhz:g} to {clock.most_mhz:g} MHz.",
            )
        now = self.mhz or clock.mhz
        faster = mhz / now
        more = clock.switching(mhz) / clock.switching(now)
        idle = clock.idle_watts * (clock.switching(mhz) - clock.switching(now))
        return replace(
            self,
            mhz=0.0 if mhz == clock.mhz else mhz,
            peak=tuple((k, x * faster) for k, x in self.peak),
            vector=tuple((k, x * faster) for k, x in self.vector),
            attained=tuple((k, x * faster) for k, x in self.attained),
            step_seconds=self.step_seconds / faster,
            matmul_speed=self.matmul_speed * faster,
            power=replace(
                power,
                idle_watts=power.idle_watts + idle,
                kernel_watts=power.kernel_watts * more,
                flops_watts=power.flops_watts * more,
            ),
        )

    def at_price(self, dollars_per_device_hour: float) -> Target:
        """The same machine at a price of your own. Raises TargetError for what is no price."""
        price = Price(dollars_per_device_hour, "given")
        price.check(self.name)
        return replace(self, price=price)

    def __str__(self) -> str:
        return self.spec

    @property
    def usable_bytes(self) -> int | None:
        """Bytes of one device that a program may use; None where devices share one memory."""
        return None if self.shared_memory else self.hbm_bytes

    @property
    def stores_products(self) -> bool:
        """Whether its compiler stores what a product makes for another kernel to read, as XLA for
        GPUs does, whose estimate of kernels `fusing` is."""
        return self.fusing is not None and not self.epilogues

    @property
    def slowdown(self) -> float | None:
        """Seconds that compute loses to every second of communication beside it, where seconds
        count on that; None where they are a sum."""
        return self.overlap_slowdown if self.overlaps else None

    def rate(self, dtype: str, contraction: bool) -> float:
        """Sustained flop/s for operands of `dtype`; `contraction` lets the matrix units work.

        A dtype without an entry runs as the family it belongs to (`float8_e4m3fn` as float8,
        `uint8` as int8, `complex64` as float32), else outside the matrix units, else as float32.
        """
        attained = dict(self.attained) if contraction else {}
        for name in families(dtype):
            if name in attained:
                return attained[name]
            if contraction and name in dict(self.peak):
                break
        return self.peak_rate(dtype, contraction) * self.flops_efficiency

    def sustained_rate(self, dtype: str) -> float:
        """Flop/s that products of matrices can keep up within the device's power."""
        kept = dict(self.sustained)
        return next((kept[name] for name in families(dtype) if name in kept), inf)

    def peak_rate(self, dtype: str, contraction: bool) -> float:
        """The published flop/s of the unit that does the work (see `rate`)."""
        tables = [dict(self.peak), dict(self.vector)] if contraction else [dict(self.vector)]
        for table in tables:
            for name in families(dtype):
                if name in table:
                    return table[name]
        return tables[-1]["float32"]

    def computed_as(self, dtype: str) -> str:
        """What a product of a dtype with its precision computes in: `float32@highest`, or without
        the precision where that changes nothing here."""
        return computed_as(dtype, dict(self.peak))

    def held(self, devices: int) -> int:
        """How many devices a plan on so many of them keeps powered and paid for."""
        return self.devices if self.idle_counted else devices

    def mesh_shapes(self, max_axes: int = 2, devices: int | None = None) -> tuple[MeshShape, ...]:
        """Every way to lay the devices out as a mesh of at most `max_axes` axes, all larger than 1;
        or the first `devices` of them, a part of the machine (`topology.part`).

        Axes are called x, y, z, w, v, u, in that order; the last is the innermost. Left out are
        meshes whose groups would straddle a level or torus dim unevenly (2 hosts of 6 as 3 x 4).
        The mesh of one axis comes first, then those that respect the target's own dims. A single
        device has the one mesh `1x`. Raises TargetError when `max_axes` is not in 1..6, and where
        there is no part of so many devices.
        """
        if not 1 <= max_axes <= len(_AXES):
            raise TargetError(f"a mesh has 1 to {len(_AXES)} axes, not {max_axes}")
        shape = self.shape if devices is None else part(self.shape, devices)
        dims = boundaries(shape)
        found = []
        for sizes in factorizations(prod(shape), max_axes):
            own = boundaries(sizes)
            if is_chain(dims | own):
                found.append((len(sizes), len(dims - own), sizes))
        return tuple(
            MeshShape(tuple(_AXES[: len(sizes)]), sizes) for _, _, sizes in sorted(found)
        ) or (MeshShape(("x",), (1,)),)

    def is_even(self, mesh: MeshShape) -> bool:
        """Whether no group of a mesh straddles a level or torus dim unevenly."""
        return is_chain(boundaries(part(self.shape, mesh.devices)) | boundaries(mesh.sizes))

    def distinct(self, meshes: Iterable[MeshShape]) -> tuple[MeshShape, ...]:
        """Those meshes of which no earlier one is the same but for the names of its axes.

        Axes may change names where all groups of them lie in the network as before: on eight
        devices that one switch joins, whatever runs on 2 x 4 runs as well on 4 x 2.
        """
        kept: list[MeshShape] = []
        for mesh in meshes:
            if not any(self._alike(mesh, other) for other in kept):
                kept.append(mesh)
        return tuple(kept)

    def _alike(self, a: MeshShape, b: MeshShape) -> bool:
        if sorted(a.sizes) != sorted(b.sizes):
            return False
        axes = range(len(a.sizes))
        groups = [g for n in axes for g in combinations(axes, n + 1)]
        return any(
            all(self.spans(a, tuple([new[k] for k in g])) == self.spans(b, g) for g in groups)
            for new in permutations(axes)
            if tuple([a.sizes[k] for k in new]) == b.sizes
        )

    def spans(self, mesh: MeshShape, axes: tuple[int, ...]) -> tuple[Span, ...]:
        """How a group over the given mesh axes lies in the network, innermost level first.

        A mesh of fewer devices lies on the first of them (`topology.part`). Levels in which the
        group does not move are left out. Raises TargetError when the mesh has more devices, or a
        number of which the machine has no part, or no such axis.
        """
        return find_spans(self.levels, self.shape, mesh, frozenset(axes))

    def link(self, mesh: MeshShape, axes: tuple[int, ...]) -> Link:
        """The slowest level that the given mesh axes span, devices laid out row-major.

        A group of one device moves nothing: infinite bandwidth, no delay.
        """
        spans = self.spans(mesh, axes)
        if not spans:
            return Link(inf, 0.0)
        slowest = min(spans, key=lambda s: s.bytes_per_second)
        return Link(slowest.bytes_per_second, slowest.latency_seconds)


_AXES = "xyzwvu"


def known_targets() -> tuple[str, ...]:
    """Names of the targets that come with the package, sorted."""
    folder = resources.files("tapestry_egg.machine") / "targets"
    return tuple(
        sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
    )


def load_target(spec: str | Path) -> Target:
    """The target spelled `NAME:SHAPE`, as `h100:8`, `h100:4x8` (hosts x GPUs) or `v5e:4x4`.

    In place of NAME stands a known target or the path of a file of the same form as theirs
    (`chips/mine.yaml:8`). `v100:16@1200` sets the clock of the compute units, in MHz.
    Raises TargetError for an unknown name, a missing or malformed shape, and
    a malformed file, with file, line and column.
    """
    name, colon, shape_text = str(spec).rpartition(":")
    shape_text, at, mhz = shape_text.partition("@")
    numbers = re.fullmatch(r"[0-9]+(x[0-9]+)*", shape_text)
    if not colon or not numbers or (at and not re.fullmatch(r"[0-9]+(\.[0-9]+)?", mhz)):
        bare = _bare(str(spec))
        known = bare in known_targets() or _is_file(bare)
        unknown = "" if known else f", and {bare!r} is no known target"
        example = bare if known else "h100"
        hint = f"Write NAME:SHAPE, as {example}:8 or {example}:2x8."
        if not known:
            hint += f" {_known_hint(bare)}"
        raise TargetError(f"target {str(spec)!r} does not say how many devices{unknown}", hint=hint)
    target = _load(name, tuple(int(n) for n in shape_text.split("x")))
    return target.at_clock(float(mhz)) if at else target


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name


def _known_hint(name: str, shape: str = "") -> str:
    """The known targets, and first the one that a name that is not among them is nearest to."""
    known = known_targets()
    lower = name.lower()
    near = [k for k in known if lower.startswith(k)] or get_close_matches(lower, known, 1, 0.5)
    kinds = [k for k in known if _load(k, (1,)).platform == lower] or near[-1:]
    guess = f"Did you mean {' or '.join(repr(k + shape) for k in kinds)}? " if kinds else ""
    return f"{guess}Known are {', '.join(known)}; or give the path of a .yaml file."


def _load(name: str, shape: tuple[int, ...]) -> Target:
    if _is_file(name):
        return _read(read_yaml_text(Path(name), TargetError, name), name, shape, Path(name).parent)
    if name not in known_targets():
        raise TargetError(
            f"unknown target {name!r}",
            hint=_known_hint(name, f":{'x'.join(map(str, shape))}"),
        )
    return _read(_shipped(name), f"targets/{name}.yaml", shape, None)


def _shipped(name: str) -> str:
    file = resources.files("tapestry_egg.machine") / "targets" / f"{name}.yaml"
    return file.read_text("utf-8")


#: Figures of a target that may be zero.
_MAY_BE_NOTHING = frozenset(
    "launch_seconds step_seconds mhz rows overlap_slowdown idle_watts kernel_watts flops_watts "
    "joules_per_byte joules_per_wire_byte latency_seconds base_seconds ring_seconds "
    "tree_bytes_per_second message_seconds wrap_multiple".split()
)


def _figures(record: Any, where: str) -> Iterator[tuple[str, str, float]]:
    """The place, name and value of every number of a record, but of those that check themselves."""
    for f in fields(record):
        value, place = getattr(record, f.name), f"{where}.{f.name}"
        if f.name in ("clock", "price", "shape") or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            yield place, f.name, value
        elif is_dataclass(value):
            yield from _figures(value, place)
        for k, one in enumerate(value if isinstance(value, tuple) else ()):
            if is_dataclass(one):
                yield from _figures(one, f"{place}[{k}]")
            elif isinstance(one, tuple) and isinstance(one[1], int | float):
                yield f"{place}.{one[0]}", f.name, one[1]


def check_machine(target: Target, where: str) -> None:
    """Check the figures of a target that did not come from a target file.

    Raises TargetError, with `where` extended by the field.
    """
    for place, name, value in _figures(target, where):
        zero = value == 0 and name not in _MAY_BE_NOTHING
        if not isfinite(value) or value < 0 or zero:
            raise TargetError(f"{value!r} is out of range", where=place)
    if target.overlap_slowdown is not None and target.overlap_slowdown > 1:
        raise TargetError(
            f"{target.overlap_slowdown!r} is out of range", where=f"{where}.overlap_slowdown"
        )
    if "float32" not in dict(target.vector):
        raise TargetError("there is no rate for float32", where=f"{where}.vector")
    if target.clock is not None:
        target.clock.check(f"{where}.clock")
    if target.price is not None:
        target.price.check(f"{where}.price")
    if target.combiner is not None:
        target.combiner.check(f"{where}.combiner")
    _checked("matmuls", target.matmuls)
    _checked("collectives", target.collectives)
    if any(level.kind == "torus" for level in target.levels[1:]):
        raise TargetError("only the innermost level can be a torus", where=f"{where}.levels")


def _checked(kind: Literal["matmuls", "collectives"], file: TableFile | None) -> TableFile | None:
    """The same file, read whole once; raises TargetError with file and line."""
    if file is not None and kind == "matmuls":
        matmul_table(file)
    elif file is not None:
        collective_table(file)
    return file


def _bare(spec: str) -> str:
    return spec.partition(":")[0] or "h100"


def _table(text: str, file: str) -> Table:
    """The keys of a file, and those that it lacks of the shipped target that it is `like`."""
    node = compose_yaml_text(text, TargetError, file)
    if node is None:
        raise TargetError("the file is empty", where=file)
    top = Table(node)
    if "like" in top:
        name = top["like"].text()
        if name not in known_targets():
            raise top["like"].error(f"unknown target {name!r:.80}", _known_hint(name))
        top.fill(_table(_shipped(name), f"targets/{name}.yaml"), but="name")
    return top


def _read(text: str, file: str, shape: tuple[int, ...], folder: Path | None) -> Target:
    top = _table(text, file)
    slowdown: float | None = None
    if "overlap" in top:
        overlap = top.table("overlap")
        slowdown = overlap.number("slowdown", zero=True, most=1)
        overlap.finish()

    def pairs(key: str) -> Iterator[tuple[str, YamlNode]]:
        return iter(top[key].mapping().items() if key in top else ())

    peak, vector, sustained, attained = (
        tuple((name, node.number()) for name, node in pairs(key))
        for key in ("peak", "vector", "sustained", "attained")
    )
    if "float32" not in dict(vector):
        raise top["vector"].error("vector has no entry float32")
    combiner = top.given("combiner", Combiner)
    if combiner is not None:
        combiner.check(file)
    hbm = top.table("hbm")
    usable = hbm.number("bytes") - hbm.number("reserved_bytes", zero=True)
    if usable <= 0:
        raise hbm.node.error("nothing is left of hbm after reserved_bytes")
    efficiency = top.table("efficiency")
    target_levels = tuple(read_level(t) for t in top.tables("levels"))
    if not target_levels:
        raise top.node.error("levels is empty")
    if any(level.kind == "torus" for level in target_levels[1:]):
        raise top.node.error("only the innermost level can be a torus")
    full_links = published_link_rate(top.tables("levels"))
    matmuls = collectives = None
    speed = 1.0
    if "tables" in top:
        tables = top.table("tables")
        matmuls, collectives = [tables.file(k, folder) for k in ("matmuls", "collectives")]
        speed = tables.number("matmul_speed", 1.0)
        tables.finish()
    found = Target(
        name=top["name"].text(),
        shape=shape,
        hbm_bytes=int(usable),
        hbm_bytes_per_second=hbm.number("bytes_per_second") * efficiency.number("hbm", most=1),
        peak=peak,
        vector=vector,
        sustained=sustained,
        attained=attained,
        flops_efficiency=efficiency.number("flops", most=1),
        launch_seconds=top.number("launch_seconds", zero=True),
        power=read_power(top.table("power"), hbm.number("bytes_per_second"), full_links),
        levels=target_levels,
        title=top["title"].text(),
        sources=top["sources"].texts(),
        retrieved=top["retrieved"].text(),
        shared_memory=hbm.flag("shared"),
        overlap_slowdown=slowdown,
        clock=read_clock(top.table("clock")) if "clock" in top else None,
        price=read_price(top.table("price")) if "price" in top else None,
        matmuls=_checked("matmuls", matmuls),
        matmul_speed=speed,
        collectives=_checked("collectives", collectives),
        operands=tuple((name, node.text()) for name, node in pairs("operands")),
        split_k=top.given("split_k", SplitK),
        fusing=top.given("fusing", FusionCosts),
        step_seconds=top.number("step_seconds", 0.0, zero=True),
        caches=top.given("caches", Caches),
        combiner=combiner,
        tiles=top.given("tiles", Tiles),
        epilogues=top.flag("epilogues"),
        rows=int(top.number("rows", 0)),
        slices=top.flag("slices"),
        reserves=top.flag("reserves"),
    )
    for table in (hbm, efficiency, top):
        table.finish()
    return found
