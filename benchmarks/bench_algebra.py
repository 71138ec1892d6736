"""The algebra of programs on the seven graphs of TENSAT's and TASO's evaluation (`models/tensat`).

    python -m benchmarks.bench_algebra                       # all seven
    python -m benchmarks.bench_algebra nasrnn inception --repeats 50
    python -m benchmarks.bench_algebra --no-run              # the cost model only

The first table has the published sizes: cost by the model on one device of every target, before
and after; seconds that it took to find (rules, choice and rebuilding, in this process and
egglog's); and what TENSAT and TASO report (Yang et al., "Equality Saturation for Tensor Graph
Superoptimization", MLSys 2021): seconds of search, and by how much the graph became faster on their
GPU. The second has sizes that run in less than a second on a CPU: run times of the original and of
the form chosen for `cpu:1` under `jax.jit`, taken in turns in one process, medians; of the clock,
and of the processors' time that the process used, which other work on the machine disturbs less.
`same` says that XLA compiles both to the same instructions, whatever the clock says.

As there, weights are fixed: what is computed from them alone is computed once, before the first
run. Both functions that are measured take their weights as arguments.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.rewrite.form import Form
    from tapestry_egg.rules.language.book import RuleBook

#: Seconds of search and speedup in percent, by TASO and by TENSAT.
PUBLISHED = {
    "nasrnn": (177.3, 45.4, 0.5, 68.9),
    "bert": (13.6, 8.5, 1.4, 9.2),
    "resnext": (25.3, 5.5, 0.7, 8.8),
    "nasnet": (1226.0, 1.9, 10.6, 7.3),
    "squeezenet": (16.4, 6.7, 0.3, 24.5),
    "vgg": (8.9, 8.9, 0.4, 8.9),
    "inception": (68.6, 6.3, 5.1, 10.0),
}
TARGETS = ("h100:1", "cpu:1")
# The model tells no smaller differences.
LEAST_GAIN = 0.001


@dataclass(frozen=True)
class Cost:
    """Seconds by the model before and after, of the search, and the rules that were used."""

    before: float
    after: float
    search: float
    form: Form

    @property
    def ratio(self) -> float:
        return self.after / self.before


def fixed(graph: BlockGraph, arrays: Sequence[np.ndarray]) -> BlockGraph:
    """The graph with its first inputs as constants."""
    k = len(arrays)
    return replace(
        graph,
        inputs=graph.inputs[k:],
        constants={**graph.constants, **dict(zip(graph.inputs, arrays, strict=False))},
        input_names=graph.input_names[k:],
        donated=graph.donated[k:],
    )


def open_again(graph: BlockGraph) -> tuple[BlockGraph, list[np.ndarray]]:
    """The graph with its constant tensors as further inputs, and their values."""
    tensors = {v: a for v, a in graph.constants.items() if graph.values[v].rank}
    scalars = {v: a for v, a in graph.constants.items() if v not in tensors}
    inputs = (*graph.inputs, *tensors)
    opened = replace(graph, inputs=inputs, constants=scalars, input_names=(), donated=())
    return opened, list(tensors.values())


def cost(graph: BlockGraph, target: str, books: Sequence[RuleBook]) -> Cost:
    """Search for the cheapest form on one device."""
    from tapestry_egg.machine.target import load_target
    from tapestry_egg.rewrite.forms import forms
    from tapestry_egg.schedule.one_device import program_seconds

    machine = load_target(target)
    begin = time.perf_counter()
    best = forms(graph, books, machine, least_gain=LEAST_GAIN)[:2][-1]
    spent = time.perf_counter() - begin
    before, after = (program_seconds(g, machine) for g in (graph, best.graph))
    return Cost(before, after, spent, best)


def published(name: str, books: Sequence[RuleBook]) -> dict[str, Cost]:
    """Costs of the network with its published sizes on every target; the weights have no values."""
    import tapestry_egg as te
    from models import tensat

    network = tensat.network(name)
    weights, *inputs = network.abstract()
    zeros = [np.broadcast_to(np.zeros((), np.float32), w.shape) for w in weights]
    graph = fixed(te.trace(network.forward, weights, *inputs).graph, zeros)
    return {target: cost(graph, target, books) for target in TARGETS}


@dataclass(frozen=True)
class Run:
    """Seconds of the original and of the optimised function, by the clock and by the processors'
    time, and whether both were compiled to the same instructions."""

    clock: tuple[float, float]
    processor: tuple[float, float]
    same: bool


def measured(name: str, repeats: int, books: Sequence[RuleBook]) -> tuple[Cost, Run]:
    """The cost on `cpu:1` of the network in its reduced size, and medians of run times."""
    import jax

    import tapestry_egg as te
    from models import tensat
    from tapestry_egg.tracing.constants import prepare
    from tapestry_egg.tracing.emit import emit

    network = tensat.network(name, "reduced")
    weights, *inputs = network.arguments()
    traced = te.trace(network.forward, weights, *inputs).graph
    found = cost(fixed(traced, [np.asarray(w) for w in weights]), "cpu:1", books)
    graph, kept = open_again(prepare(found.form.graph))
    arguments = (weights, *inputs), (*inputs, *jax.device_put(kept))
    compiled = [
        jax.jit(fn).lower(*args).compile()
        for fn, args in zip((network.forward, emit(graph)), arguments, strict=True)
    ]
    one, other = (partial(c, *args) for c, args in zip(compiled, arguments, strict=True))
    for a, b in zip(jax.tree.leaves(one()), jax.tree.leaves(other()), strict=True):
        scale = float(np.abs(np.asarray(a)).max())
        off = float(np.abs(np.asarray(a) - np.asarray(b)).max())
        if not off <= 1e-3 * scale:
            raise SystemExit(f"{name}: the optimised function is off by {off / scale:.1e}")
    same = instructions(compiled[0].as_text()) == instructions(compiled[1].as_text())
    return found, Run(*in_turns(one, other, repeats), same)


def instructions(text: str) -> list[str]:
    """The instructions of an optimised HLO module without names and places, sorted."""
    lines = (re.sub(r", metadata=.*|%[\w.-]+|\bparameter\(\d+\)", "", x) for x in text.splitlines())
    return sorted(x for x in lines if " = " in x)


def in_turns(
    one: Callable[[], Any], other: Callable[[], Any], repeats: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Medians of the seconds of two functions, run one after the other, each as often first."""
    import jax

    clock: tuple[list[float], list[float]] = ([], [])
    processor: tuple[list[float], list[float]] = ([], [])
    for k in range(repeats):
        for which in (0, 1) if k % 2 else (1, 0):
            begin = time.perf_counter(), time.process_time()
            jax.block_until_ready((one, other)[which]())
            clock[which].append(time.perf_counter() - begin[0])
            processor[which].append(time.process_time() - begin[1])
    return (
        (median(clock[0]), median(clock[1])),
        (median(processor[0]), median(processor[1])),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 1 where a cost rose or a run became slower by more than 2 %."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_algebra", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PUBLISHED)}")
    parser.add_argument("--repeats", type=int, default=20, help="runs of each function")
    parser.add_argument("--no-run", action="store_true", help="leave the second table out")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books

    books = load_books(DEFAULT_BOOKS)
    names = options.names or list(PUBLISHED)
    failed = False
    print(
        f"{'':11}"
        + "".join(f"{t + ', ms':>20} {'ratio':>6} {'search':>7}" for t in TARGETS)
        + f"{'TASO':>15} {'TENSAT':>15}"
    )
    used: dict[str, set[str]] = {}
    for name in names:
        line = f"{name:11}"
        for target, c in published(name, books).items():
            line += f"{c.before * 1e3:>9.3f} -> {c.after * 1e3:>7.3f}"
            line += f" {c.ratio:>6.3f} {c.search:>5.2f} s"
            failed |= c.ratio > 1.0
            used.setdefault(name, set()).update(f"{r} ({target})" for r in c.form.rules)
        taso, faster, tensat, fastest = PUBLISHED[name]
        line += f"{taso:>7.1f} s {faster:>+4.1f}% {tensat:>6.1f} s {fastest:>+4.1f}%"
        print(line, flush=True)
    for name in names:
        print(f"{name}: {', '.join(sorted(used.get(name, ()))) or 'no rule'}")
    if options.no_run:
        return int(failed)
    print(
        f"\n{'reduced':11}{'model, ms':>20} {'ratio':>6}{'clock, ms':>20} {'ratio':>6}"
        f"{'processor, ms':>20} {'ratio':>6}"
    )
    for name in names:
        c, run = measured(name, options.repeats, books)
        line = f"{name:11}{c.before * 1e3:>9.3f} -> {c.after * 1e3:>7.3f} {c.ratio:>6.3f}"
        for before, after in (run.clock, run.processor):
            line += f"{before * 1e3:>9.2f} -> {after * 1e3:>7.2f} {after / before:>6.3f}"
        line += "   same" if run.same else f"   {', '.join(c.form.rules)}"
        print(line, flush=True)
        failed |= c.ratio > 1.0 or not (run.same or run.clock[1] <= 1.02 * run.clock[0])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
