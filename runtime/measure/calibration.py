"""Calibration: this machine's own times, by JAX on whatever devices there are, as a target file.

Products of matrices over a grid of shapes, a copy in memory, arithmetic outside the matrix units,
the floor of a kernel, collectives over the devices, and power where the driver tells. What cannot
be measured here is taken from a known target and said so.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

from tapestry_egg.errors import TargetError
from tapestry_egg.progress import Phase, Progress

#: What a target is called whose devices say that they are of such a kind, first match.
_LIKE = ("gb300", "gb200", "b300", "b200", "h200", "h100", "a100", "v100", "mi355x", "v6e", "v5p")
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class Extent:
    """What is measured: sizes of products and their batches, bytes of messages and of the copy,
    and for how long each is repeated, in seconds."""

    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    dtypes: tuple[str, ...]
    messages: tuple[int, ...]
    copy: int
    repeat: float

    @classmethod
    def of(cls, platform: str, quick: bool) -> Extent:
        """What suits a platform: a quick one tells little more than that everything works."""
        small = platform == "cpu"
        if quick:
            return cls((32, 128), (1,), ("float32",), (1 << 12, 1 << 16), 1 << 20, 2e-3)
        if small:
            messages = tuple(1 << k for k in range(10, 25, 2))
            return cls((64, 256, 1024), (1, 4), ("float32",), messages, 1 << 24, 1e-2)
        large = tuple(1 << k for k in range(10, 31, 2))
        sizes = (256, 512, 1024, 2048, 4096)
        return cls(sizes, (1, 4), ("float32", "bfloat16"), large, 1 << 28, 1e-2)


@dataclass(frozen=True)
class Calibration:
    """What was measured, in seconds, bytes and watts."""

    platform: str
    device: str  # what the devices call themselves
    devices: int
    launch: float  # of the least kernel, within a program
    copy_rate: float  # bytes per second, read and written
    vector_rate: float  # float32 flop/s outside the matrix units
    products: dict[tuple[int, int, int, int, str], float]
    collectives: dict[tuple[str, int, int], float]  # by kind, group and bytes
    watts: tuple[float, float] | None  # idle, and the limit; None where no driver tells
    memory: int | None  # bytes of one device, as it says itself


def calibrate(quick: bool = False, on_progress: Progress | None = None) -> Calibration:
    """Measure this machine's devices, those of this process."""
    import jax

    devices = jax.local_devices()
    platform = devices[0].platform
    extent = Extent.of(platform, quick)
    groups = [g for g in range(2, len(devices) + 1) if len(devices) % g == 0]
    work = _work(extent, len(devices), groups)
    products: dict[tuple[int, int, int, int, str], float] = {}
    collectives: dict[tuple[str, int, int], float] = {}
    watts = driver_watts()
    for done, (what, key, measure) in enumerate(work):
        if on_progress:
            on_progress(Phase("run", what, done / len(work)))
        seconds = measure()
        if len(key) == 5:
            products[key] = seconds
        else:
            collectives[key] = seconds
    launch, copy_rate, vector_rate = _launch(extent), _copy_rate(extent), _vector_rate(extent)
    if on_progress:
        on_progress(Phase("run", f"{len(work)} times measured", 1.0))
    stats = None
    with suppress(Exception):  # devices that cannot be asked
        stats = devices[0].memory_stats()
    memory = int(stats["bytes_limit"]) if stats and stats.get("bytes_limit") else None
    return Calibration(
        platform, devices[0].device_kind, len(devices), launch, copy_rate, vector_rate,
        products, collectives, watts, memory if platform != "cpu" else None,
    )  # fmt: skip


def like_target(device: str, platform: str) -> str:
    """The known target that a device is of; raises TargetError where none is."""
    if platform == "cpu":
        return "cpu"
    name = device.lower().replace(" lite", "e")
    for known in _LIKE:
        if known in name:
            return known
    if "v5e" in name:
        return "v5e"
    raise TargetError(
        f"no known target is like {device!r}",
        hint="Say with --like whose power and outer links to take.",
    )


def driver_watts() -> tuple[float, float] | None:
    """(watts drawn now, the power limit) of the first GPU, as NVIDIA's driver says; None where it
    does not."""
    words = ["nvidia-smi", "--query-gpu=power.draw,power.limit", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout
        draw, limit = (float(x) for x in said.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return (draw, limit) if 0 < draw <= limit else None


def _work(
    extent: Extent, devices: int, groups: list[int]
) -> list[tuple[str, tuple[Any, ...], Callable[[], float]]]:
    found: list[tuple[str, tuple[Any, ...], Callable[[], float]]] = []
    sizes = extent.sizes
    for dtype, batch, m, n, k in product(extent.dtypes, extent.batches, sizes, sizes, sizes):
        measure = partial(_product, extent, batch, m, n, k, dtype)
        found.append((f"{dtype} {batch}x{m}x{n}x{k}", (batch, m, n, k, dtype), measure))
    for kind, group, nbytes in product(COLLECTIVES, groups, extent.messages):
        measure = partial(_collective, extent, kind, group, devices, nbytes)
        found.append((f"{kind} over {group}, {nbytes} bytes", (kind, group, nbytes), measure))
    return found


def _seconds(extent: Extent, call: Callable[..., Any], *args: Any) -> float:
    """Seconds of one call: the least of three means over calls sent one after another.

    On several CPU devices each call is waited for: of calls under way at a time, the threads of one
    can wait for those of another, which have no processor to run on, and XLA ends the process.
    """
    import jax

    wait = jax.default_backend() == "cpu" and jax.device_count() > 1
    jax.block_until_ready(call(*args))  # compiles
    count, found = 1, []
    while True:
        begin = time.perf_counter()
        for _ in range(count):
            out = call(*args)
            if wait:
                jax.block_until_ready(out)
        jax.block_until_ready(out)
        spent = time.perf_counter() - begin
        if spent >= extent.repeat:
            found.append(spent / count)
            if len(found) == 3:
                return min(found)
        else:
            count = max(count * 2, int(count * extent.repeat / max(spent, 1e-7)))


def _product(extent: Extent, batch: int, m: int, n: int, k: int, dtype: str) -> float:
    import jax
    import jax.numpy as jnp

    x, y = jnp.ones((batch, m, k), dtype), jnp.ones((batch, k, n), dtype)
    return _seconds(extent, jax.jit(jnp.matmul), x, y)


def _launch(extent: Extent) -> float:
    """Seconds of each of a chain of tiny products within one program."""
    import jax
    import jax.numpy as jnp

    steps = 64

    def chain(x: Any) -> Any:
        for _ in range(steps):
            x = x @ x
        return x

    return _seconds(extent, jax.jit(chain), jnp.zeros((8, 8))) / steps


def _copy_rate(extent: Extent) -> float:
    import jax
    import jax.numpy as jnp

    x = jnp.ones(extent.copy // 4, "float32")
    return 2 * extent.copy / _seconds(extent, jax.jit(lambda x: x + 1), x)


def _vector_rate(extent: Extent) -> float:
    """Flop/s of a polynomial of high degree, evaluated in one fused loop."""
    import jax
    import jax.numpy as jnp

    degree = 64

    def polynomial(x: Any) -> Any:
        out = x
        for _ in range(degree):
            out = out * x + 0.5
        return out

    x = jnp.full(extent.copy // 16, 0.25, "float32")
    return 2.0 * degree * x.size / _seconds(extent, jax.jit(polynomial), x)


def _collective(extent: Extent, kind: str, group: int, devices: int, nbytes: int) -> float:
    """Seconds of a collective in groups of neighbours; bytes as tables count them."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh(
        (devices // group, group), ("out", "in"), devices=jax.local_devices()[:devices]
    )
    whole = PartitionSpec(("out", "in"))
    count = max(group * group, nbytes // 4 // (group * group) * (group * group))

    def body(x: Any) -> Any:
        if kind == "all_gather":
            return lax.all_gather(x, "in", tiled=True)
        if kind == "all_reduce":
            return lax.psum(x, "in")
        if kind == "reduce_scatter":
            return lax.psum_scatter(x, "in", tiled=True)
        return lax.all_to_all(x, "in", 0, 0, tiled=True)

    each = count // group if kind == "all_gather" else count
    put = NamedSharding(mesh, whole)
    x = jax.device_put(jnp.ones(each * devices, "float32"), put)
    moved = jax.shard_map(body, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return _seconds(extent, jax.jit(moved), x)


def matmul_lines(found: Calibration) -> Iterator[str]:
    """The table of products, line by line."""
    dtypes = list(dict.fromkeys(key[4] for key in found.products))
    yield f"# Products of matrices, measured on {found.device} by tapestry-egg calibrate."
    yield "# unit: microseconds per batch of products of m x k by k x n"
    yield ",".join(["batch", "m", "n", "k", *(f"{d}*{d}->{d}" for d in dtypes)])
    for shape in dict.fromkeys(key[:4] for key in found.products):
        cells = [found.products.get((*shape, d)) for d in dtypes]
        yield ",".join([*map(str, shape), *("" if c is None else f"{c * 1e6:.5g}" for c in cells)])


def collective_lines(found: Calibration) -> Iterator[str]:
    """The table of collectives, line by line; nothing where there is one device."""
    if not found.collectives:
        return
    sizes = sorted({nbytes for _, _, nbytes in found.collectives})
    yield f"# Collectives over {found.devices} x {found.device}, by tapestry-egg calibrate."
    yield "# unit: microseconds; a column for each number of bytes of the whole tensor (all_gather,"
    yield "#   reduce_scatter) or of the tensor of one device"
    yield ",".join(["kind", "dtype", "devices", "group", *map(str, sizes)])
    for kind, group in dict.fromkeys(key[:2] for key in found.collectives):
        cells = [f"{found.collectives[kind, group, b] * 1e6:.5g}" for b in sizes]
        yield ",".join([kind, "float32", str(found.devices), str(group), *cells])


def best_rates(found: Calibration) -> dict[str, float]:
    """The best flop/s of the products of each dtype."""
    best: dict[str, float] = {}
    for (*shape, dtype), seconds in found.products.items():
        best[dtype] = max(best.get(dtype, 0.0), 2.0 * prod(shape) / seconds)
    return best


def link_rate(found: Calibration) -> float | None:
    """The best bytes per second that a device sent in an all-gather over all; None for one."""
    rates = [
        nbytes * (group - 1) / group / seconds
        for (kind, group, nbytes), seconds in found.collectives.items()
        if kind == "all_gather" and group == found.devices
    ]
    return max(rates, default=None)
