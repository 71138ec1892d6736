"""Extraction on snapshots of GPT-2 train steps of any depth, on an 8 by 8 mesh of H100s.

    python -m benchmarks.bench_snapshots                     # fronts of 12 and 96 layers
    python -m benchmarks.bench_snapshots --layers 12 --seconds 20
    python -m benchmarks.bench_snapshots --alpa 4 12 48      # the fastest plan, beside Alpa's

The first table is the front over seconds, peak bytes and joules: how long its search took (the
making of the problem included), its plans, and the largest gap. The second compares the fastest
plan with the integer program of Alpa (Zheng et al., OSDI 2022) over the same strategies and the
same costs of copies, one algebraic form, no memory limit, solved by HiGHS: there each reader pays
for its own copy of a value, here readers may share one, so ours may only be faster.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tapestry_egg.extract.choices.unit_choices import UnitChoices
    from tapestry_egg.extract.problem.problem import Problem
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


def alpa(choices: UnitChoices) -> Problem:
    """Alpa's problem: a variable per unit, a pair per reader of a value, with the reader's copy."""
    from tapestry_egg.extract.problem.problem import Pair, Problem, Variable, label, merge_parallel

    plan, program = choices.schedule, choices.schedule.program
    variables, pairs = [], []
    for u, (unit, rows) in enumerate(zip(plan.units, choices.rows, strict=True)):
        root = program.instances[unit.root]
        weight = program.bodies[root.body].weight if not root.port else root.weight
        seconds = rows.seconds * weight
        for q, v in enumerate(unit.outputs):
            table = choices.copies[program.types[v]]
            have, haves = label([table.number[g[q]] for g in rows.gives])
            for r in plan.readers[v]:
                reads = [(k, i) for k, (i, _, w) in enumerate(plan.units[r].reads) if w == v]
                need, needs = label(
                    [
                        tuple(dict.fromkeys(table.number[n[k]] for k, _ in reads))
                        for n in choices.rows[r].needs
                    ]
                )
                cost = np.array(
                    [[sum(table.seconds[a, b] for b in n) for n in needs] for a in haves]
                )
                cost = cost * program.instances[reads[0][1]].weight
                if r == u:
                    seconds = seconds + cost[have, need]
                else:
                    pairs.append(Pair(u, r, have, need, cost, np.zeros_like(cost)))
        variables.append(Variable(f"unit {u}", seconds, np.zeros(len(rows))))
    return Problem(tuple(variables), merge_parallel(pairs), 1)


def program_of(problem: Problem) -> dict[str, Any]:
    """The least seconds of a problem as an integer program: one column for each row of a variable
    and for each legal pair of labels, as `milp` takes it."""
    from scipy.optimize import Bounds, LinearConstraint
    from scipy.sparse import coo_matrix

    cost: list[float] = []
    entries: list[tuple[int, int, float]] = []  # (constraint, column, factor)
    right: list[float] = []

    def columns(seconds: np.ndarray) -> np.ndarray:
        """A column for each entry; none, as -1, where it is forbidden."""
        legal = np.isfinite(seconds)
        found = np.full(seconds.shape, -1)
        found[legal] = np.arange(len(cost), len(cost) + int(legal.sum()))
        cost.extend(seconds[legal].tolist())
        return found

    rows = [columns(v.seconds) for v in problem.variables]
    for own in rows:  # one row of each
        entries += [(len(right), k, 1.0) for k in own[own >= 0].tolist()]
        right.append(1.0)
    for p in problem.pairs:  # rows of a label are as many as its pairs
        table = columns(p.seconds)
        for v, label, pairs in ((p.a, p.label_a, table), (p.b, p.label_b, table.T)):
            for k, mine in enumerate(pairs):
                own = rows[v][label == k]
                entries += [(len(right), c, 1.0) for c in own[own >= 0].tolist()]
                entries += [(len(right), c, -1.0) for c in mine[mine >= 0].tolist()]
                right.append(0.0)
    where, column, factor = zip(*entries, strict=True)
    matrix = coo_matrix((factor, (where, column)), shape=(len(right), len(cost)))
    # Marginals of pairs are whole numbers where rows are.
    whole = np.zeros(len(cost))
    whole[: sum(int((own >= 0).sum()) for own in rows)] = 1
    return {
        "c": np.array(cost),
        "constraints": LinearConstraint(matrix.tocsr(), right, right),
        "integrality": whole,
        "bounds": Bounds(0.0, 1.0),
    }


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


def beside_alpa(layers: int, size: Size, runs: int, seconds: float) -> None:
    """The fastest plan by both, interleaved, and a line of medians."""
    from scipy.optimize import milp

    from tapestry_egg.extract.engine.race import Effort, race
    from tapestry_egg.extract.problem.assemble import assemble

    choices = choices_of(layers, size)
    ours, theirs = [], []
    for _ in range(runs):
        begin = time.perf_counter()
        (archive,) = race([assemble(choices).problem], Effort(seconds=seconds, front=False))
        best = min(archive.candidates, key=lambda c: c.costs)
        bound = archive.bound(np.inf, np.inf)
        ours.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        problem = alpa(choices)
        asked = program_of(problem)
        found = milp(**asked, options={"time_limit": seconds, "mip_rel_gap": 1e-4})
        theirs.append(time.perf_counter() - begin)
    value = float("inf") if found.x is None else found.fun
    columns = len(asked["c"])
    print(
        f"{layers:6} {1e3 * best.seconds:11.4f} {100 * (best.seconds / bound - 1):7.3f}% "
        f"{median(ours):8.1f} {1e3 * value:11.4f} {1e3 * found.mip_dual_bound:11.4f} {columns:10} "
        f"{median(theirs):8.1f} {median(theirs) / median(ours):7.1f}",
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
    parser.add_argument("--alpa", type=int, nargs="*", help="layers to compare with Alpa's program")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds per solve of either")
    options = parser.parse_args(arguments)
    size = Size()
    print(f"GPT-2 train step, {size}, {TARGET} as {MESH[0]}x{MESH[1]}\n")
    if options.alpa is not None:
        print(
            f"{'layers':>6} {'ours ms':>11} {'gap':>8} {'s':>8} {'Alpa ms':>11} {'bound ms':>11} "
            f"{'columns':>10} {'s':>8} {'times':>7}"
        )
        for layers in options.alpa:
            beside_alpa(layers, size, options.runs, options.limit)
        return 0
    print(
        f"{'layers':>6} {'variables':>9} {'entries':>12} {'s':>8} {'plans':>6} {'MiB from':>9} "
        f"{'to':>9} {'worst gap':>9} {'median':>9} {'GiB':>7}"
    )
    for layers in options.layers:
        front(layers, size, options.seconds or (20.0 if layers <= 12 else 40.0), options.gap)
    return 0


if __name__ == "__main__":
    sys.exit(main())
