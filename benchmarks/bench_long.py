"""A long step: vocabulary 131 072, sequences of 32 768, eight layers, on eight H100.

    python -m benchmarks.bench_long                 # both by one count of costs, about five minutes
    python -m benchmarks.bench_long --compile cpu   # and what XLA for CPU says that each holds
    python -m benchmarks.bench_long --compile h100 sequence=8192 layers=4   # for H100, other sizes

What people write by hand is FSDP: parameters and batch cut over all devices, layers in a scan with
rematerialisation, plain attention and a plain loss. Its plan is the fastest one for the program as
it is written with these layouts pinned; beside it stand the plans that are found for the program.
Nothing is allocated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tapestry_egg as te
from benchmarks.devices import devices_of
from benchmarks.zoo import ShapesOnly
from models import llama
from tapestry_egg.columns import columns
from tapestry_egg.machine.objectives import PEAK_BYTES, SECONDS

DEVICES = 8
SIZES = {
    **{"layers": 8, "width": 2048, "heads": 16, "groups": 8, "hidden": 8192, "batch": DEVICES},
    **{"sequence": 32768, "vocabulary": 131072},
}
SMALL = {**SIZES, "layers": 2, "width": 64, "hidden": 128, "sequence": 256, "vocabulary": 1024}
MESH = te.MeshShape(("x",), (DEVICES,))
WORK = 5.0


@dataclass(frozen=True)
class Long:
    """The step, shapes of its arguments, and how FSDP lays them out."""

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    layouts: tuple[Any, ...]  # of PartitionSpecs

    @property
    def program(self) -> te.Program:
        """Traced, with the parameters donated."""
        return te.trace(self.step, *self.arguments, donate_argnums=0, name="long")


def long_step(sizes: dict[str, int]) -> Long:
    """The step at these sizes, every layer rematerialised."""
    found: list[Callable[..., Any]] = []

    def shapes() -> Any:
        step, arguments = llama.example(remat=True, **sizes)
        found.append(step)
        return arguments

    with mock.patch.object(np.random, "default_rng", ShapesOnly):
        arguments = jax.eval_shape(shapes)
    layouts = jax.tree.map(partial(_fsdp, layers=sizes["layers"]), arguments)
    return Long(found[0], arguments, layouts)


def _fsdp(x: jax.ShapeDtypeStruct, layers: int) -> PartitionSpec:
    """Cut along the first dim that divides, but not along that of layers."""
    stacked = x.ndim > 1 and x.shape[0] == layers and x.dtype == np.float32
    for d in range(int(stacked), x.ndim):
        if x.shape[d] % DEVICES == 0:
            return PartitionSpec(*[None] * d, "x")
    return PartitionSpec()


def by_hand(long: Long, work: float = WORK, merge: bool = True) -> te.Plan:
    """The fastest plan of the program as written, under FSDP's layouts; its collectives merged, or
    as they are written."""
    front = te.optimize(
        long.program,
        f"h100:{DEVICES}",
        books=("sharding", "collectives"),
        in_shardings=long.layouts,
        mesh=MESH,
        limits={"peak_bytes": "1TiB"},  # no device may hold it
        settings=te.Settings(work=work, recompute=0, front=False, micro_batches=(), merge=merge),
    )
    return min(front, key=lambda p: p.costs.seconds)


def found(long: Long, work: float = WORK) -> te.Front:
    """The front of the program."""
    return te.optimize(long.program, f"h100:{DEVICES}", settings=te.Settings(work=work))


def compiled_bytes(long: Long, plan: te.Plan | None, machine: str = "cpu") -> int:
    """What XLA allocates on a device: for a plan, or for `jax.jit` with FSDP's layouts. For H100 it
    compiles ahead of time (`make gpu-aot`)."""
    devices = list(devices_of(f"{machine}:{DEVICES}"))
    if plan is not None:
        made = te.compile(plan, devices).lower().compile()
    else:
        mesh = Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))
        layouts = jax.tree.map(lambda p: NamedSharding(mesh, p), long.layouts)
        lowered = jax.jit(long.step, in_shardings=layouts, donate_argnums=0).lower(*long.arguments)
        made = lowered.compile()
    memory = made.memory_analysis()
    return int(
        memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=float, default=WORK, help=f"of each search ({WORK:g})")
    parser.add_argument("--small", action="store_true", help="at sizes of a test")
    parser.add_argument("--compile", choices=("cpu", "h100"), help="compile, too")
    parser.add_argument("sizes", nargs="*", help="other sizes, as sequence=8192")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # nothing here runs on an accelerator
    other = dict(text.split("=") for text in given.sizes)
    sizes = {**(SMALL if given.small else SIZES), **{k: int(n) for k, n in other.items()}}
    long = long_step(sizes)
    hand, front = by_hand(long, given.work), found(long, given.work)
    print(front)
    rows = [["plan", "seconds", "to FSDP", "peak", "to FSDP", *["compiled"] * bool(given.compile)]]
    for name, plan in (("FSDP by hand", hand), *((p.name, p) for p in front)):
        costs = plan.costs
        row = [
            name,
            SECONDS.format(costs.seconds),
            f"{costs.seconds / hand.costs.seconds:.3f}",
            PEAK_BYTES.format(costs.peak_bytes),
            f"{costs.peak_bytes / hand.costs.peak_bytes:.3f}",
        ]
        if given.compile:
            own = None if plan is hand else plan
            row.append(PEAK_BYTES.format(compiled_bytes(long, own, given.compile)))
        rows.append(row)
    print(columns(rows))


if __name__ == "__main__":
    main()
