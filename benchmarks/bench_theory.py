"""How fast the theory layer is: range images per second, and tracing beside JAX's own.

    python -m benchmarks.bench_theory
    python -m benchmarks.bench_theory --layers 12 24        # other depths of the GPT

Range images are of a million random boxes at once, in NumPy, on one core. The traced program is the
train step of a GPT with AdamW, unrolled over its layers. `JAX` is what JAX takes to trace it to a
jaxpr, `ours` what it takes beyond that until the block graph is there; both are seconds of this
process' CPU, after a first, small trace. `peak` is the most memory that the process ever had.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tapestry_egg.zspace import Projection

_BOXES = 1 << 20

PROJECTIONS = {
    "linear, an operand": Projection(((1, 0, 0), (0, 0, 1)), (0, 0), (1, 1)),
    "convolution, the image": Projection(
        ((1, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 0, 1, 0, 0), (0, 0, 0, 1, 0)),
        (0, 0, -1, -1),
        (1, 1, 3, 3),
    ),
    "dense, of mixed signs": Projection(
        ((1, -2, 3), (-1, 1, 2), (2, 3, -1)), (5, -7, 0), (1, 2, 3)
    ),
}


def images_per_second(projection: Projection, seconds: float = 1.0) -> float:
    """Range images of random boxes per second of CPU, for about so many seconds."""
    rng = np.random.default_rng(0)
    starts = rng.integers(-1000, 1000, (_BOXES, projection.index_rank))
    ends = starts + rng.integers(0, 100, starts.shape)
    projection.images(starts, ends)
    begin, count = time.process_time(), 0
    while (taken := time.process_time() - begin) < seconds or not count:
        projection.images(starts, ends)
        count += _BOXES
    return count / taken


def equations(jaxpr: Any) -> int:
    """Number of equations, those of nested jaxprs included."""
    total = 0
    for eqn in jaxpr.eqns:
        total += 1
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    total += equations(inner)
    return total


def measure_trace(layers: int) -> dict[str, float]:
    """Trace a GPT's train step of so many layers, once by JAX alone and once by us."""
    import jax

    from models import gpt2
    from tapestry_egg.tracing.trace import trace

    def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
        begin = time.process_time()
        made = work()
        return time.process_time() - begin, made

    def step(depth: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A function of its own each time: JAX remembers what it has traced.
        def train_step(*args: Any) -> Any:
            return gpt2.step(*args)

        return train_step, gpt2.abstract(gpt2.config("tiny", layers=depth))

    fn, arguments = step(1)
    trace(fn, *arguments, donate_argnums=(0, 1))
    fn, arguments = step(layers)
    alone, traced = seconds(lambda: jax.jit(fn, donate_argnums=(0, 1)).trace(*arguments))
    count = equations(traced.jaxpr.jaxpr)
    del traced
    fn, arguments = step(layers)
    both, program = seconds(lambda: trace(fn, *arguments, donate_argnums=(0, 1)))
    return {
        "equations": count,
        "operations": len(program.graph.operations),
        "jax": alone,
        "ours": max(0.0, both - alone),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="range images and tracing")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        print(json.dumps(measure_trace(options.one)))
        return 0
    for name, projection in PROJECTIONS.items():
        print(f"{name:24} {images_per_second(projection) / 1e6:8.1f} M images/s")
    print(f"\n{'layers':>6} {'equations':>9} {'operations':>10} {'JAX':>8} {'ours':>8} {'peak':>8}")
    for layers in options.layers:
        # Each depth in a process of its own, so that its peak is its own too.
        command = [sys.executable, "-m", "benchmarks.bench_theory", "--one", str(layers)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = json.loads(out.splitlines()[-1])
        print(
            f"{layers:6} {row['equations']:9} {row['operations']:10} {row['jax']:7.2f}s"
            f" {row['ours']:7.2f}s {row['peak'] / 1e6:5.0f} MB",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
