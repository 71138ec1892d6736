"""Extraction on snapshots of GPT-2 train steps of any depth, on an 8 by 8 mesh of H100s.

    python -m benchmarks.bench_snapshots                     # fronts of 12 and 96 layers
    python -m benchmarks.bench_snapshots --layers 12 --seconds 20

The table is the front over seconds, peak bytes and joules: how long its search took (the making of
the problem included), its plans, and the largest gap.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tapestry_egg.extract.choices.unit_choices import UnitChoices
    from tapestry_egg.graph.layout import MeshShape
    from tapestry_egg.machine.target import Target
    from tapestry_egg.schedule.schedules import Schedule
    from tapestry_egg.shard.strategies import Saturated

TARGET, MESH = "h100:8x8", (8, 8)


@dataclass(frozen=True)
class Size:
    """What is the same at all depths."""

    width: int = 1024
    heads: int = 16
    sequence: int = 512
    vocabulary: int = 32768
    batch: int = 64


def derived(layers: int, size: Size) -> tuple[Schedule, Saturated, MeshShape, Target]:
    """A train step (AdamW included) with so many layers, unrolled, and what the rules make of it on
    the mesh."""
    import tapestry_egg as te
    from models import gpt2
    from tapestry_egg.graph.layout import MeshShape
    from tapestry_egg.machine.target import load_target
    from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
    from tapestry_egg.schedule.flatten import feedback_pairs
    from tapestry_egg.schedule.schedules import scheduled
    from tapestry_egg.shard.encode import encode
    from tapestry_egg.shard.strategies import saturate

    config = gpt2.config("demo", layers=layers, **vars(size))
    graph = te.trace(gpt2.train_step, *gpt2.abstract(config)).graph
    feedback = feedback_pairs(graph, None)
    plan = scheduled(graph, feedback)
    mesh = MeshShape(("x", "y"), MESH)
    found = saturate(encode(plan.program, mesh), load_books(DEFAULT_BOOKS))
    return plan, found, mesh, load_target(TARGET)


def choices_of(layers: int, size: Size) -> UnitChoices:
    """The snapshot of such a step."""
    from tapestry_egg.extract.choices.unit_choices import unit_choices

    return unit_choices(*derived(layers, size))


def costing_seconds(layers: int) -> float:
    """Seconds in which the strategies of a step are joined to rows and priced, once derived, with
    the garbage collector as `optimize` has it."""
    from tapestry_egg.collector import rarely_collected
    from tapestry_egg.extract.choices.unit_choices import unit_choices

    step = derived(layers, Size())
    with rarely_collected():
        begin = time.perf_counter()
        unit_choices(*step)
        return time.perf_counter() - begin


def front(layers: int, size: Size, seconds: float, gap: float) -> None:
    """Search the front of one depth and print its line."""
    from tapestry_egg.extract.engine.race import Effort, race
    from tapestry_egg.extract.problem.assemble import assemble

    choices = choices_of(layers, size)
    begin = time.perf_counter()
    problem = assemble(choices).problem
    made = time.perf_counter() - begin
    entries = sum(p.seconds.size for p in problem.pairs)
    effort = Effort(seconds=seconds - made, gap=gap)
    (archive,) = race([problem], effort)
    took = time.perf_counter() - begin
    gaps = [
        c.seconds / max(archive.bound(c.peak, c.joules), archive.bound(c.peak, np.inf)) - 1.0
        for c in archive.corners()
    ]
    peaks = [c.peak / 2**20 for c in archive.corners()]
    used = max(
        resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(
        f"{layers:6} {len(problem.variables):9} {entries:12} {took:8.1f} {len(gaps):6} "
        f"{max(peaks):9.1f} {min(peaks):9.1f} {100 * max(gaps):8.2f}% {100 * median(gaps):8.2f}% "
        f"{used / 2**20:7.2f}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 96])
    parser.add_argument(
        "--seconds", type=float, help="of search per front (20 to 12 layers, 40 beyond)"
    )
    parser.add_argument(
        "--gap", type=float, default=0.01, help="that is good enough (default 1 %%)"
    )
    options = parser.parse_args(arguments)
    size = Size()
    print(f"GPT-2 train step, {size}, {TARGET} as {MESH[0]}x{MESH[1]}\n")
    print(
        f"{'layers':>6} {'variables':>9} {'entries':>12} {'s':>8} {'plans':>6} {'MiB from':>9} "
        f"{'to':>9} {'worst gap':>9} {'median':>9} {'GiB':>7}"
    )
    for layers in options.layers:
        front(layers, size, options.seconds or (20.0 if layers <= 12 else 40.0), options.gap)
    return 0


if __name__ == "__main__":
    sys.exit(main())
