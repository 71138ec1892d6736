"""Random problems of extraction, and enumeration of all their labellings as the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from hypothesis import strategies as st

from tapestry_egg.extract.problem.latencies import Latencies
from tapestry_egg.extract.problem.problem import Pair, Problem, Span, Use, Variable, label
from tapestry_egg.extract.problem.timeline import Timeline


@dataclass(frozen=True)
class Shape:
    """Sizes of random problems."""

    variables: int = 5
    rows: int = 4
    pairs: int = 7
    times: int = 4
    forbidden: float = 0.15


def random_problem(seed: int, shape: Shape = Shape(), tree: bool = False) -> Problem:
    """Costs with ties and zeros, labels that group rows, forbidden pairs, bytes over time."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, shape.variables + 1))
    variables = []
    for i in range(n):
        rows = int(rng.integers(1, shape.rows + 1))
        uses = tuple(random_use(rng, (rows,), shape.times) for _ in range(rng.integers(0, 3)))
        variables.append(
            Variable(f"v{i}", random_costs(rng, (rows,)), random_costs(rng, (rows,)), uses)
        )
    ends = [(int(rng.integers(0, b)), b) for b in range(1, n)] if tree else []
    if not tree and n > 1:
        for _ in range(rng.integers(0, shape.pairs + 1)):
            a, b = rng.choice(n, 2, replace=False)
            ends.append((int(a), int(b)))
    pairs = []
    for a, b in ends:
        label_a, label_b = (random_labels(rng, len(variables[x])) for x in (a, b))
        size = (int(label_a.max()) + 1, int(label_b.max()) + 1)
        seconds = random_costs(rng, size)
        seconds[rng.random(size) < shape.forbidden] = np.inf
        uses = tuple(random_use(rng, size, shape.times) for _ in range(rng.integers(0, 2)))
        pairs.append(Pair(a, b, label_a, label_b, seconds, random_costs(rng, size), uses))
    if variables:
        variables[0] = whatever(variables[0], rng.integers(0, 3, shape.times).astype(float))
    return Problem(tuple(variables), tuple(pairs), shape.times)


def ladder(seed: int, layers: int, times: int = 12) -> Problem:
    """Layers of three variables in a ring, each linked to the next layer by two pairs: the arrays
    are the same in all layers, the times at which they use memory are not."""
    rng = np.random.default_rng(seed)
    rows = [2, 3, 2]

    def span() -> tuple[int, int]:
        start = int(rng.integers(0, times - 1))
        return start, int(rng.integers(start + 1, times))

    own = [(rng.random(n), rng.random(n), rng.random(n)) for n in rows]
    ends = [(0, 1, 0), (1, 2, 0), (0, 2, 0), (2, 0, 1), (1, 1, 1)]  # from, to, layers onward
    tables = []
    for a, b, _ in ends:
        label_a, label_b = np.arange(rows[a]), np.minimum(np.arange(rows[b]), 1)
        shape = (rows[a], 2)
        seconds = np.where(rng.random(shape) < 0.15, np.inf, rng.random(shape))
        tables.append((label_a, label_b, seconds, rng.random(shape), rng.random(shape) - 0.3))
    variables, pairs = [], []
    for layer in range(layers):
        for k, (seconds, joules, amount) in enumerate(own):
            variables.append(Variable(f"{layer}.{k}", seconds, joules, (Use(*span(), amount),)))
        for (a, b, on), (*labels, seconds, joules, amount) in zip(ends, tables, strict=True):
            if layer + on < layers:
                i, j = 3 * layer + a, 3 * (layer + on) + b
                pairs.append(Pair(i, j, *labels, seconds, joules, (Use(*span(), amount),)))
    return Problem(tuple(variables), tuple(pairs), times)


def whatever(v: Variable, amounts: np.ndarray) -> Variable:
    """The variable, with bytes that it holds at each time whatever row is chosen."""
    uses = (Use(t, t + 1, np.full(len(v), b)) for t, b in enumerate(amounts))
    return replace(v, uses=(*v.uses, *uses))


def random_costs(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 6, size) * rng.choice([1e-3, 0.25])


def random_use(rng: np.random.Generator, size: tuple[int, ...], times: int) -> Use:
    start = int(rng.integers(0, times))
    return Use(start, int(rng.integers(start + 1, times + 1)), rng.integers(0, 5, size) * 1.0)


def random_labels(rng: np.random.Generator, rows: int) -> np.ndarray:
    labels, _ = label(rng.integers(0, rows, rows).tolist())
    return labels


seeds = st.integers(0, 10**6)


# The oracle


def cost(problem: Problem, rows: tuple[int, ...]) -> tuple[float, float, list[float]]:
    """Seconds, joules and bytes at each time of one labelling, entry by entry."""
    seconds = joules = 0.0
    profile = [0.0] * problem.times

    def occupy(use: Use, amount: float) -> None:
        for t in range(use.start, use.end):
            profile[t] += amount

    for v, r in zip(problem.variables, rows, strict=True):
        seconds, joules = seconds + float(v.seconds[r]), joules + float(v.joules[r])
        for use in v.uses:
            occupy(use, float(use.amount[r]))
    for p in problem.pairs:
        at = int(p.label_a[rows[p.a]]), int(p.label_b[rows[p.b]])
        seconds, joules = seconds + float(p.seconds[at]), joules + float(p.joules[at])
        for use in p.uses:
            occupy(use, float(use.amount[at]))
    return seconds, joules, profile


def labellings(problem: Problem) -> list[tuple[tuple[int, ...], float, float, list[float]]]:
    """Every labelling that is not forbidden, with its costs."""
    every = product(*(range(len(v)) for v in problem.variables))
    found = ((rows, *cost(problem, rows)) for rows in every)
    return [x for x in found if np.isfinite(x[1])]


def optimum(
    found: list[tuple[tuple[int, ...], float, float, list[float]]], peak: float, joules: float
) -> float:
    """The least seconds within the limits."""
    fitting = [s for _, s, j, p in found if max(p, default=0.0) <= peak and j <= joules]
    return min(fitting, default=np.inf)


def single(rows: int, seconds: float = 1.0) -> Variable:
    return Variable("v", np.full(rows, seconds), np.zeros(rows))


def problem_from(data: dict[str, np.ndarray]) -> Problem:
    """The problem of `problem_arrays`."""
    variables, times, units = (int(n) for n in data["counts"])
    shapes = [(n,) if m < 0 else (n, m) for n, m in data["shapes"].tolist()]
    ends = np.cumsum([int(np.prod(s)) for s in shapes])
    tables = [
        x.reshape(s) for x, s in zip(np.split(data["tables"], ends[:-1]), shapes, strict=True)
    ]
    labels = np.split(data["labels"], np.cumsum(data["sizes"])[:-1])
    last, last_span = np.cumsum(data["parts"][:, 6]), np.cumsum(data["parts"][:, 7])
    made: list[Variable | Pair] = []
    for k, (a, b, label_a, label_b, *costs, count, own) in enumerate(data["parts"].tolist()):
        uses = tuple(
            Use(start, end, tables[amount])
            for start, end, amount in data["uses"][last[k] - count : last[k]].tolist()
        )
        spans = tuple(
            Span(event, tables[amount])
            for event, amount in data["spans"][last_span[k] - own : last_span[k]].tolist()
        )
        seconds, joules = (tables[n] for n in costs)
        if a < 0:
            made.append(Variable(str(data["names"][k]), seconds, joules, uses, spans))
        else:
            line = labels[label_a], labels[label_b]
            made.append(Pair(a, b, *line, seconds, joules, uses, spans))
    found = [x for x in made if isinstance(x, Variable)]
    assert len(found) == variables
    pairs = tuple(x for x in made if isinstance(x, Pair))
    timeline = None
    if units >= 0:
        timeline = Timeline(units, data["issue"], data["arrive"], float(data["slowdown"]))
    latencies = None
    if (known := int(data["units"])) >= 0:
        latencies = Latencies(data["maker"], data["reader"], known)
    return Problem(tuple(found), pairs, times, timeline, latencies)
