"""The algebra of programs on the seven graphs of TENSAT's and TASO's evaluation (`models/tensat`).

    python -m benchmarks.bench_algebra                       # all seven
    python -m benchmarks.bench_algebra nasrnn inception

Cost by the model on one device of every target, before and after; seconds that it took to find
(rules, choice and rebuilding, in this process and egglog's); and what TENSAT and TASO report (Yang
et al., "Equality Saturation for Tensor Graph Superoptimization", MLSys 2021): seconds of search,
and by how much the graph became faster on their GPU. As there, weights are fixed: what is computed
from them alone is computed once, before the first run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a cost rose."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_algebra", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PUBLISHED)}")
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
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
