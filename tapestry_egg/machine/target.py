"""Targets: a chip's datasheet, how many there are of it, and what its compiler makes of arrays and
kernels (tiles, split products, power, fusion, merged sends); data files name the figures."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import resources
from itertools import combinations, permutations
from math import inf, isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import TargetError
from tapestry_egg.graph.blockgraph import itemsize
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.tables.collectives import collective_table
from tapestry_egg.machine.tables.files import TableFile
from tapestry_egg.machine.tables.gemm import Gemm
from tapestry_egg.machine.tables.matmuls import matmul_table
from tapestry_egg.yaml_nodes import compose_yaml_text, read_yaml_text

from .target_table import Table
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

if TYPE_CHECKING:
    Machine = TypeVar("Machine", bound="Target")


# Tiles: how TPUs lay arrays out in memory, and what that pads.
#
# An array lies in tiles of `rows` x `lanes` words, along two of its dims: those that have to be
# padded least; of what windows move over, or rows are added to, and what is computed from that
# element by element, lanes lie along a dim that these do not move along (`schedule/lying.py`). What
# is narrower than a word is packed along the rows, and arrays of few rows lie in tiles of fewer,
# down to what fills a word. Vectors lie in tiles of one row to a whole tile's elements. Read off
# the layouts of modules that libtpu 0.0.42 and 0.0.52 compiled.


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of `rows` x `lanes` words of `word` bytes."""

    lanes: int
    rows: int
    word: int


def read_tiles(table: Table) -> Tiles:
    """The figures of a target's file."""
    lanes, rows, word = [int(table.number(k, whole=True)) for k in ("lanes", "rows", "word")]
    table.finish()
    return Tiles(lanes, rows, word)


def stored_bytes(
    shape: Sequence[int], itemsize: int, tiles: Tiles | None, windows: Collection[int] = ()
) -> int:
    """Bytes of an array in memory: of its elements, or of the fewest tiles that hold it, whose
    lanes lie along none of the dims that `windows` move along."""
    whole = prod(shape) * itemsize
    if tiles is None or not whole:
        return whole
    packed = max(tiles.word // itemsize, 1)  # elements of a word
    if len(shape) < 2:
        elements = prod(shape)
        tile = min(max(_power(elements), tiles.lanes * packed), tiles.lanes * tiles.rows)
        return _up(elements, tile) * itemsize
    best, pairs = 0, list(permutations(range(len(shape)), 2))
    pairs = [(lanes, rows) for lanes, rows in pairs if lanes not in windows] or pairs
    for lanes, rows in pairs:
        high = min(max(_power(shape[rows]), packed), tiles.rows)
        padded = whole // (shape[lanes] * shape[rows])
        padded *= _up(shape[lanes], tiles.lanes) * _up(shape[rows], high)
        best = min(best, padded) if best else padded
    return best


def tight_order(shape: Sequence[int], itemsize: int, tiles: Tiles) -> tuple[int, ...] | None:
    """The dims of a stack, that of its steps first, from the outermost to that along lanes, in an
    order in which it is padded least; None where none is padded less than as they are written."""
    written = tuple(range(len(shape)))
    if len(shape) < 3:
        return None

    def padded(order: tuple[int, ...]) -> int:
        *outer, rows, lanes = (shape[d] for d in order)
        return prod(outer) * stored_bytes((rows, lanes), itemsize, tiles, windows=(0,))

    best = min(((0, *inner) for inner in permutations(written[1:])), key=padded)
    return best if padded(best) < padded(written) else None


def _up(n: int, tile: int) -> int:
    return -(-n // tile) * tile


def _power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(n - 1, 0).bit_length()


# Scratch that XLA takes for products of matrices: sums over many terms, made in parts.
#
# Its compiler for GPUs cuts the summed dim of a product into s parts and stores s products of the
# result's size before it adds them up (`SplitkRewriter`, xla/service/gpu/transforms; as of jaxlib
# 0.10). It takes the first s of 1, 2, 4 ... 2048 of least cost, in units of its own, with constants
# per generation of GPUs: for products of m×k by k×n in tiles of at most 128 × 128 on c cores
#
#     larger of   2 · flop · tile · ceil(k / s) · waves, waves = tiles · tile / (128² · c) or 1
#                 byte · (bytes of both operands and of what is stored)
#     and if s > 1:  sum · (bytes of all parts and of the result) + launch


# As the formula above has them: a tile, and the most parts.
_TILE = 128
_LARGEST = 2048


@dataclass(frozen=True, slots=True)
class SplitK:
    """What the compiler takes parts to cost on one generation of GPUs with `cores` of them."""

    cores: int
    flop: float
    byte: float
    sum: float
    launch: float


def read_split_k(table: Table) -> SplitK:
    """The figures of a target's file."""
    costs = [table.number(k) for k in ("flop", "byte", "sum", "launch")]
    cores = int(table.number("cores"))
    table.finish()
    return SplitK(cores, *costs)


def split_scratch(gemm: Gemm[NDArray[np.float64]], costs: SplitK) -> NDArray[np.float64]:
    """Bytes of the partial products of a contraction, per entry; 0 where it is not split.

    Integers are not split.
    """
    sizes = np.broadcast_arrays(gemm.batch, gemm.m, gemm.n, gemm.k)
    batch, m, n, k = [np.asarray(x, dtype=np.float64) for x in sizes]
    if "int" in gemm.lhs or gemm.lhs == "bool":
        return np.zeros(batch.shape)
    result, part = itemsize(gemm.out), max(itemsize(gemm.out), 4)
    tile = np.minimum(m, _TILE) * np.minimum(n, _TILE)
    tiles = np.ceil(m / _TILE) * np.ceil(n / _TILE) * batch
    operands = batch * k * (m * itemsize(gemm.lhs) + n * itemsize(gemm.rhs))
    best, parts = np.full(batch.shape, np.inf), np.ones(batch.shape)
    s = 1
    while s <= _LARGEST:
        waves = np.maximum(tiles * s * tile / (_TILE**2 * costs.cores), 1.0)
        compute = 2 * costs.flop * tile * np.ceil(k / s) * waves
        stored = batch * s * m * n * (part if s > 1 else result)
        cost = np.maximum(compute, costs.byte * (operands + stored))
        if s > 1:
            cost = cost + costs.sum * (stored + batch * m * n * result) + costs.launch
        parts = np.where(cost < best, s, parts)
        best = np.minimum(cost, best)
        s *= 2
    return np.where(parts > 1, parts * batch * m * n * part, 0.0)


def multiplied(gemm: Gemm[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Bytes of the products of all elements of a matrix and a vector, per entry: what the compiler
    stores before it adds them up, where it sums along columns."""
    every = gemm.batch * gemm.m * gemm.n * gemm.k * itemsize(gemm.out)
    return np.asarray(every, dtype=np.float64)


# Power, clock and price of one device, as target files give them.


@dataclass(frozen=True, slots=True)
class Power:
    """What one device draws, by unit.

    It always draws `idle_watts`: waiting, its clocks running. While a kernel runs it draws
    `kernel_watts` more, whatever the kernel does, and `flops_watts` more where arithmetic runs at
    its published rate; bytes read from or written to memory, and bytes sent, cost joules each.
    All units at once may draw more than `max_watts`: then a device slows down, which is not
    modelled. `measured` says whether the figures were measured on such a device.
    """

    idle_watts: float
    max_watts: float
    kernel_watts: float
    flops_watts: float
    joules_per_byte: float
    joules_per_wire_byte: float
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Clock:
    """How arithmetic and its power follow the clock of the compute units.

    A file's rates and watts hold at `mhz`; `least_mhz` to `most_mhz` can be set. Voltage, as a
    share of that at `mhz`, is `floor` up to `ridge_mhz` and rises linearly from there (Schoonhoven
    et al., "Going green: optimizing GPUs for energy efficiency through model-steered auto-tuning",
    2022). Of the idle power, `idle_watts` follow the clock.
    """

    mhz: float
    least_mhz: float
    most_mhz: float
    ridge_mhz: float
    floor: float
    idle_watts: float

    def voltage(self, mhz: float) -> float:
        """The voltage at a clock, as a share of that at the file's own."""
        steps = max(0.0, mhz - self.ridge_mhz) / (self.mhz - self.ridge_mhz)
        return self.floor + (1.0 - self.floor) * steps

    def switching(self, mhz: float) -> float:
        """What switching draws at a clock, as a share of that at the file's own: f·V²."""
        return mhz / self.mhz * self.voltage(mhz) ** 2

    def check(self, where: str) -> None:
        """Raise TargetError where the figures contradict each other."""
        numbers = (self.mhz, self.least_mhz, self.most_mhz, self.ridge_mhz, self.idle_watts)
        if not all(isfinite(x) and x >= 0 for x in numbers) or not 0 < self.floor <= 1:
            raise TargetError("a figure is out of range", where=where)
        if not 0 < self.least_mhz <= self.mhz <= self.most_mhz or self.ridge_mhz >= self.mhz:
            raise TargetError("least, ridge, mhz and most are not in this order", where=where)


@dataclass(frozen=True, slots=True)
class Price:
    """What a device costs, whoever says so."""

    dollars_per_device_hour: float
    source: str = ""
    as_of: str = ""

    def check(self, where: str) -> None:
        """Raise TargetError for what is no price."""
        price = self.dollars_per_device_hour
        if isinstance(price, bool) or not isinstance(price, int | float):
            raise TargetError(f"{price!r:.40} is no price", where=where)
        if not isfinite(price) or price <= 0:
            raise TargetError(
                f"{price!r} dollars for an hour of a device is no price",
                where=where,
                hint="Give a positive number.",
            )


def at_clock(target: Machine, mhz: float) -> Machine:
    """`Target.at_clock`."""
    clock, power = target.clock, target.power
    if clock is None:
        raise TargetError(
            f"nothing is known of other clocks of {target.name}",
            hint="A target file says it under the key clock.",
        )
    if not clock.least_mhz <= mhz <= clock.most_mhz:
        raise TargetError(
            f"the clock of {target.name} cannot be set to {mhz:g} MHz",
            hint=f"It goes from {clock.least_mhz:g} to {clock.most_mhz:g} MHz.",
        )
    now = target.mhz or clock.mhz
    faster = mhz / now
    more = clock.switching(mhz) / clock.switching(now)
    idle = clock.idle_watts * (clock.switching(mhz) - clock.switching(now))
    return replace(
        target,
        mhz=0.0 if mhz == clock.mhz else mhz,
        peak=tuple((k, x * faster) for k, x in target.peak),
        vector=tuple((k, x * faster) for k, x in target.vector),
        attained=tuple((k, x * faster) for k, x in target.attained),
        step_seconds=target.step_seconds / faster,
        matmul_speed=target.matmul_speed * faster,
        power=replace(
            power,
            idle_watts=power.idle_watts + idle,
            kernel_watts=power.kernel_watts * more,
            flops_watts=power.flops_watts * more,
        ),
    )


def read_power(table: Table, hbm_rate: float, link_rate: float) -> Power:
    """The key `power` of a target file, given the published rates of memory and of all links."""
    busy = table.table("busy")
    idle, most = table.number("idle", zero=True), table.number("max")
    if idle > most:
        raise table.error(f"power idle {idle:g} W is above max {most:g} W")
    found = Power(
        idle_watts=idle,
        max_watts=most,
        kernel_watts=busy.number("kernel", zero=True),
        flops_watts=busy.number("flops", zero=True),
        joules_per_byte=busy.number("hbm", zero=True) / hbm_rate,
        joules_per_wire_byte=busy.number("link", zero=True) / link_rate,
        measured=table.flag("measured"),
    )
    table.finish()
    busy.finish()
    return found


def read_clock(table: Table) -> Clock:
    """The key `clock` of a target file."""
    found = Clock(
        mhz=table.number("mhz"),
        least_mhz=table.number("least"),
        most_mhz=table.number("most"),
        ridge_mhz=table.number("ridge", zero=True),
        floor=table.number("floor", most=1),
        idle_watts=table.number("idle", zero=True),
    )
    table.finish()
    if not found.least_mhz <= found.mhz <= found.most_mhz or found.ridge_mhz >= found.mhz:
        raise table.error("least, ridge, mhz and most are not in this order")
    return found


def read_price(table: Table) -> Price:
    """The key `price` of a target file."""
    found = Price(table.number("dollars_per_hour"), table.text("source"), table.text("as_of"))
    table.finish()
    return found


# What XLA's compiler for GPUs knows of a device when it decides what kernels compute again.
#
# Its estimate of a kernel (xla/service/gpu/model/gpu_performance_model_base.cc) has the units of
# all cores add and multiply at the device's highest clock, and memory move bytes at its full rate.
# An operation counts as many cycles as XLA measured on that generation, or three where its table
# (hlo_op_profiles_data.h) has none. How `schedule/inlining.py` uses that is told there.


#: Seconds that XLA takes a launch to last, on all GPUs (kKernelLaunchOverhead).
LAUNCH_SECONDS = 1e-6


@dataclass(frozen=True, slots=True)
class FusionCosts:
    """A GPU as XLA describes it: `cores` of so many `units` at `hertz`, of which a sum in float32
    takes `cycles`, beside memory of `bytes_per_second`. On the device XLA tries kernels of products
    out: those whose results take `library_bytes` or more are taken to be the library's then, which
    leaves its workspace beside a result (None: all are XLA's own)."""

    cores: int
    units: int
    hertz: float
    cycles: int
    bytes_per_second: float
    library_bytes: int | None = None

    @property
    def bytes_per_flop(self) -> float:
        """The bytes that memory moves in the time of a flop; each unit does two in a cycle."""
        return self.cycles * self.bytes_per_second / (2 * self.cores * self.units * self.hertz)

    @property
    def launch_bytes(self) -> float:
        """The bytes that memory moves in the time of a launch."""
        return LAUNCH_SECONDS * self.bytes_per_second


def read_fusion_costs(table: Table) -> FusionCosts:
    """The figures of a target's file."""
    cores, units, cycles = [int(table.number(k, whole=True)) for k in ("cores", "units", "cycles")]
    told = "library_bytes" in table.keys()
    library = int(table.number("library_bytes", whole=True)) if told else None
    hertz, rate = table.number("hertz"), table.number("bytes_per_second")
    found = FusionCosts(cores, units, hertz, cycles, rate, library)
    table.finish()
    return found


# Collectives that a compiler makes into one.
#
# XLA puts collectives of one kind, over the same devices, that do not wait for each other, into one
# launch (`AllReduceCombiner`, `ReduceScatterCombiner`, `AllGatherCombiner`), as long as they have
# no more bytes together than its options say (`xla_gpu_all_reduce_combine_threshold_bytes` and so
# on; 30 MiB by default on GPUs). Sums of several types are never one (`GetAllReduceKey`), gathers
# are. What one sum of several is made of is first copied into one array (`AllReduceContiguous`),
# and its results out of that.


#: The kinds that XLA for GPUs makes into one.
MERGED_KINDS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True, slots=True)
class Combiner:
    """The kinds of collectives that are made into one, up to so many bytes of payload together:
    what enters them on one device, of all-gathers what leaves them. Of the kinds `contiguous` all
    that enters is one array."""

    bytes: int
    kinds: tuple[str, ...]
    contiguous: tuple[str, ...] = ()

    def check(self, where: str) -> None:
        """Raises TargetError for a kind that is never made into one, and for no bytes."""
        for kind in (*self.kinds, *self.contiguous):
            if kind not in MERGED_KINDS:
                raise TargetError(
                    f"{kind!r} is none of {', '.join(MERGED_KINDS)}", where=f"{where}.kinds"
                )
        if self.bytes <= 0:
            raise TargetError(f"{self.bytes!r} is out of range", where=f"{where}.bytes")


def type_together(kind: str, dtype: str) -> str | None:
    """What type all members have of a collective of this kind that moves `dtype`; None: any."""
    return None if kind == "all_gather" else dtype


def read_combiner(table: Table, where: str) -> Combiner:
    """The figures of a target's file."""
    contiguous = table.texts("contiguous") if "contiguous" in table.keys() else ()
    found = Combiner(int(table.number("bytes", whole=True)), table.texts("kinds"), contiguous)
    table.finish()
    found.check(where)
    return found


# What scattered elements cost: lines of memory, and sectors of the cache that all cores share.


@dataclass(frozen=True, slots=True)
class Caches:
    """The shared cache of a device: its `bytes`, its rate, and the `sector` that it moves for the
    least element; `core` bytes lie in the cache of one core, and `line` bytes are the least that
    memory moves."""

    bytes: float
    bytes_per_second: float
    sector: float
    core: float
    line: float

    def scattered_bytes(
        self,
        nbytes: float,
        run: float,
        unit: float,
        within: float,
        times: float,
        counted: bool,
        memory_rate: float,
    ) -> float:
        """The bytes that memory moves in the time that scattered elements of `nbytes` take, beyond
        those that are counted once already (`Scattered` says what the others are).

        Runs anywhere in more than the cache holds move lines of memory; in less they move sectors
        of the cache, and those that a core holds only what they are. Sums are made in the shared
        cache, wherever they are.
        """
        moved = nbytes * times * max(1.0, self.line / run) if within > self.bytes else 0.0
        if times > 1.0 or within > self.core:
            sectors = nbytes * times * max(1.0, self.sector / unit)
            moved = max(moved, sectors * memory_rate / self.bytes_per_second)
        return max(0.0, moved - nbytes) if counted else moved


def read_caches(table: Table) -> Caches:
    """The figures of a target's file."""
    names = ("bytes", "bytes_per_second", "sector", "core", "line")
    found = Caches(*[table.number(k) for k in names])
    table.finish()
    return found


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
        return at_clock(self, mhz)

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


# What people call devices of several targets -> the usual ones among them.
_FAMILIES = {"tpu": ("v5e", "v6e"), "gpu": ("h100", "a100")}


def _known_hint(name: str, shape: str = "") -> str:
    """The known targets, and first the one that a name that is not among them is nearest to."""
    known = known_targets()
    lower = name.lower()
    near = [k for k in known if lower.startswith(k)] or get_close_matches(lower, known, 1, 0.5)
    kinds = _FAMILIES.get(lower, near[-1:])
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
    file = resources.files("tapestry_egg.machine") / "targets" / f"{name}.yaml"
    return _read(file.read_text("utf-8"), f"targets/{name}.yaml", shape, None)


def check_machine(target: Target, where: str) -> None:
    """Check the figures of a target that did not come from a target file.

    Raises TargetError, with `where` extended by the field.
    """
    power = target.power
    positive: list[tuple[str, float]] = [
        ("hbm_bytes", target.hbm_bytes),
        ("hbm_bytes_per_second", target.hbm_bytes_per_second),
        ("flops_efficiency", target.flops_efficiency),
        ("matmul_speed", target.matmul_speed),
        ("link_speed", target.link_speed),
        *((f"peak.{k}", x) for k, x in target.peak),
        *((f"vector.{k}", x) for k, x in target.vector),
        *((f"sustained.{k}", x) for k, x in target.sustained),
        *((f"attained.{k}", x) for k, x in target.attained),
        ("power.max_watts", power.max_watts),
        *(
            (f"levels[{k}].bytes_per_second", x.bytes_per_second)
            for k, x in enumerate(target.levels)
        ),
    ]
    others: list[tuple[str, float]] = [
        ("launch_seconds", target.launch_seconds),
        ("step_seconds", target.step_seconds),
        ("power.idle_watts", power.idle_watts),
        ("power.kernel_watts", power.kernel_watts),
        ("power.flops_watts", power.flops_watts),
        ("power.joules_per_byte", power.joules_per_byte),
        ("power.joules_per_wire_byte", power.joules_per_wire_byte),
        ("mhz", target.mhz),
        *((f"levels[{k}].latency_seconds", x.latency_seconds) for k, x in enumerate(target.levels)),
        *((f"levels[{k}].base_seconds", x.base_seconds) for k, x in enumerate(target.levels)),
        *(
            (f"levels[{k}].{name}", getattr(x, name))
            for k, x in enumerate(target.levels)
            for name in ("ring_seconds", "tree_bytes_per_second", "message_seconds")
        ),
    ]
    if target.overlap_slowdown is not None and not 0 <= target.overlap_slowdown <= 1:
        raise TargetError(
            f"{target.overlap_slowdown!r} is out of range", where=f"{where}.overlap_slowdown"
        )
    for name, value in positive + others:
        if not isfinite(value) or value < 0 or (value == 0 and (name, value) in positive):
            raise TargetError(f"{value!r} is out of range", where=f"{where}.{name}")
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


def _read(text: str, file: str, shape: tuple[int, ...], folder: Path | None) -> Target:
    node = compose_yaml_text(text, TargetError, file)
    if node is None:
        raise TargetError("the file is empty", where=file)
    top = Table(node, file, "the file")
    slowdown: float | None = None
    if "overlap" in top.keys():
        overlap = top.table("overlap")
        slowdown = overlap.number("slowdown", zero=True, most=1)
        overlap.finish()

    peak, vector = top.table("peak"), top.table("vector")
    more = [top.table(k) if k in top.keys() else None for k in ("sustained", "attained")]
    rates = [tuple((k, t.number(k)) for k in t.keys()) if t else () for t in (peak, vector, *more)]
    if "float32" not in vector.keys():
        raise vector.error("vector has no entry float32")
    operands: tuple[tuple[str, str], ...] = ()
    if "operands" in top.keys():
        read_as = top.table("operands")
        operands = tuple((k, read_as.text(k)) for k in read_as.keys())
    split_k = read_split_k(top.table("split_k")) if "split_k" in top.keys() else None
    fusing = read_fusion_costs(top.table("fusing")) if "fusing" in top.keys() else None
    caches = read_caches(top.table("caches")) if "caches" in top.keys() else None
    step = top.number("step_seconds", zero=True) if "step_seconds" in top.keys() else 0.0
    combiner = read_combiner(top.table("combiner"), file) if "combiner" in top.keys() else None
    tiles = read_tiles(top.table("tiles")) if "tiles" in top.keys() else None
    flags = ("epilogues", "slices", "reserves")
    epilogues, slices, reserves = [k in top.keys() and top.flag(k) for k in flags]
    rows = int(top.number("rows")) if "rows" in top.keys() else 0
    hbm = top.table("hbm")
    shared = "shared" in hbm.keys() and hbm.flag("shared")
    usable = hbm.number("bytes") - hbm.number("reserved_bytes", zero=True)
    if usable <= 0:
        raise hbm.error("nothing is left of hbm after reserved_bytes")
    efficiency = top.table("efficiency")
    target_levels = tuple(read_level(t) for t in top.tables("levels"))
    if not target_levels:
        raise top.error("levels is empty")
    if any(level.kind == "torus" for level in target_levels[1:]):
        raise top.error("only the innermost level can be a torus")
    name, title, retrieved = [top.text(k) for k in ("name", "title", "retrieved")]
    sources, flops_efficiency = top.texts("sources"), efficiency.number("flops", most=1)
    hbm_rate = hbm.number("bytes_per_second") * efficiency.number("hbm", most=1)
    launch = top.number("launch_seconds", zero=True)
    full_links = published_link_rate(top.tables("levels"))
    power = read_power(top.table("power"), hbm.number("bytes_per_second"), full_links)
    clock = read_clock(top.table("clock")) if "clock" in top.keys() else None
    price = read_price(top.table("price")) if "price" in top.keys() else None
    matmuls = collectives = None
    speed = 1.0
    if "tables" in top.keys():
        tables = top.table("tables")
        matmuls, collectives = [tables.file(k, folder) for k in ("matmuls", "collectives")]
        if "matmul_speed" in tables.keys():
            speed = tables.number("matmul_speed")
        tables.finish()
    for table in (top, hbm, efficiency):
        table.finish()
    return Target(
        name=name,
        shape=shape,
        hbm_bytes=int(usable),
        hbm_bytes_per_second=hbm_rate,
        peak=rates[0],
        vector=rates[1],
        sustained=rates[2],
        attained=rates[3],
        flops_efficiency=flops_efficiency,
        launch_seconds=launch,
        power=power,
        levels=target_levels,
        title=title,
        sources=sources,
        retrieved=retrieved,
        shared_memory=shared,
        overlap_slowdown=slowdown,
        clock=clock,
        price=price,
        matmuls=_checked("matmuls", matmuls),
        matmul_speed=speed,
        collectives=_checked("collectives", collectives),
        operands=operands,
        split_k=split_k,
        fusing=fusing,
        step_seconds=step,
        caches=caches,
        combiner=combiner,
        tiles=tiles,
        epilogues=epilogues,
        rows=rows,
        slices=slices,
        reserves=reserves,
    )


# Under which names a device's rates for a dtype may be listed.
#
# Products that ask for another precision than the default compute in `float32@highest`, a dtype
# with its precision: where a target lists no rate for that it computes as it does without.


def families(dtype: str) -> tuple[str, ...]:
    """Names under which a rate for `dtype` may be listed, the closest first."""
    base, _, precision = dtype.partition("@")
    names = _families(base)
    return (*(f"{n}@{precision}" for n in names), *names) if precision else names


def computed_as(dtype: str, rates: Container[str]) -> str:
    """The dtype that a product computes in: without its precision where no rate is of that."""
    base, _, precision = dtype.partition("@")
    known = any(f"{name}@{precision}" in rates for name in _families(base))
    return dtype if precision and known else base


def _families(dtype: str) -> tuple[str, ...]:
    if dtype.startswith("float8"):
        return (dtype, "float8", "bfloat16")
    if dtype.startswith(("float4", "float6")):
        return (dtype, "float4", "float8", "bfloat16")
    if dtype in ("int2", "int4", "int8", "uint2", "uint4", "uint8", "bool"):
        return (dtype, "int8")
    return {
        "float16": ("float16", "bfloat16"),
        "tensorfloat32": ("tensorfloat32", "float32"),
        "complex64": ("complex64", "float32"),
        "complex128": ("complex128", "float64"),
    }.get(dtype, (dtype,))
