"""The peak that plans promise beside the peak that XLA's compiler for H100 gives them.

    python -m benchmarks.peak                          # a front of the demo's step
    python -m benchmarks.peak --preset gpt2_small      # takes minutes per plan
    python -m benchmarks.peak --plans out/demo         # plans saved before, one file each
    make gpu-aot                                       # installs the compiler; no GPU is needed

Compiled is arguments + outputs - aliased + temporaries, per device. Nothing runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import TapestryError, TargetError
from tapestry_egg.pipeline.rehearse import simulate_devices
from tapestry_egg.quantities import BYTES, TIME

if TYPE_CHECKING:
    from tapestry_egg.plans.plan import Plan

HEAD = f"{'plan':10} {'mesh':10} {'predicted':>12} {'compiled':>12} {'error':>8} {'compile':>9}"


def saved(where: Path) -> Iterator[Plan]:
    """The plans in a file or folder, by name."""
    from tapestry_egg.files.files import load
    from tapestry_egg.plans.plan import Plan

    for path in sorted(where.glob("*.json*")) if where.is_dir() else [where]:
        found = load(path)
        if isinstance(found, Plan):
            yield found


def searched(preset: str, count: int, seconds: float) -> Iterator[Plan]:
    """At most `count` plans of a GPT-2 preset's front, from one end to the other."""
    from models import gpt2
    from tapestry_egg.pipeline import Settings, optimize
    from tapestry_egg.tracing.trace import trace

    config = gpt2.config(preset)
    program = trace(gpt2.step, *gpt2.abstract(config), donate_argnums=(0, 1))
    front = optimize(program, "h100:8", settings=Settings(seconds=seconds))
    print(front, flush=True)
    last = len(front) - 1
    for k in sorted({round(i * last / max(count - 1, 1)) for i in range(count)}):
        yield front[k]


def errors(plans: Iterator[Plan], devices: Sequence[Any]) -> list[float]:
    """Compile every plan and print its line; predicted over compiled, less one."""
    import tapestry_egg as te
    from tapestry_egg.runtime import hlo_stats

    print(HEAD, flush=True)
    found = []
    for plan in plans:
        begin = time.perf_counter()
        compiled = hlo_stats(te.compile(plan, devices).compile()).peak_bytes
        spent = time.perf_counter() - begin
        found.append(plan.costs.peak_bytes / compiled - 1.0)
        print(
            f"{plan.name:10} {plan.mesh!s:10} {BYTES.format(plan.costs.peak_bytes):>12}"
            f" {BYTES.format(compiled):>12} {found[-1]:>+8.1%} {TIME.format(spent):>9}",
            flush=True,
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peak", description=__doc__)
    parser.add_argument("--preset", default="demo", help="of models/gpt2.py")
    parser.add_argument("--plans", type=Path, help="a file or folder of saved plans instead")
    parser.add_argument("--count", type=int, default=8, help="plans of the front to compile")
    parser.add_argument("--seconds", type=float, default=45.0, help="of search")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator
    simulate_devices(1)
    from .bench_strategies import devices_of

    try:
        devices = devices_of("h100:8")
    except TargetError as missing:
        print(f"skipped: {missing}")
        return 0
    try:
        plans = (
            saved(options.plans)
            if options.plans
            else searched(options.preset, options.count, options.seconds)
        )
        off = sorted(map(abs, errors(plans, devices)))
    except TapestryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if off:
        median = (off[(len(off) - 1) // 2] + off[len(off) // 2]) / 2
        print(f"median error {median:.1%}, worst {off[-1]:.1%}, of {len(off)} plans")
    return 0


if __name__ == "__main__":
    sys.exit(main())
