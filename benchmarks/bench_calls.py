"""What a call through `te.jit` costs beside the raw executable: `python -m benchmarks.bench_calls`.

Both run the same XLA executable on eight virtual CPU devices, on a state of 1, 27 and 600 arrays
that is donated and comes back; calls alternate, so a busy machine slows both. A call is timed until
it returns, with the devices idle before it: the time to dispatch, not to compute.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import tapestry_egg as te
from tapestry_egg.pipeline import Settings

LEAVES = (1, 27, 600)


@dataclass(frozen=True)
class Row:
    """Medians in microseconds, and the median of the ratios of neighbouring calls."""

    leaves: int
    raw: float
    jitted: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.leaves:6} {self.raw:10.0f} {self.jitted:10.0f} {self.ratio:8.3f}"


def state_of(leaves: int) -> Any:
    """A state as optimisers have it: layers of dicts, six arrays in each."""
    arrays = [np.full((8, 16), i, np.float32) for i in range(leaves)]
    if leaves == 1:
        return arrays[0]
    return {f"layer{i // 6}": {} for i in range(0, leaves, 6)} | {
        f"layer{k}": {f"w{i}": arrays[6 * k + i] for i in range(len(arrays[6 * k : 6 * k + 6]))}
        for k in range((leaves + 5) // 6)
    }


def step(state: Any) -> Any:
    return jax.tree.map(lambda x: x * 0.5 + 1.0, state)


def measure(leaves: int, calls: int) -> Row:
    """Call the executable and `te.jit` in turn, `calls` times each."""
    optimized = te.jit(step, donate_argnums=0, settings=Settings(seconds=0.5))
    state = optimized(state_of(leaves))
    raw: Callable[[Any], Any] = optimized.compiled(state).compile()
    times: dict[str, list[float]] = {"raw": [], "te.jit": []}
    for k in range(calls + 5):
        turn: list[tuple[str, Callable[[Any], Any]]] = [("raw", raw), ("te.jit", optimized)]
        for name, call in turn if k % 2 else turn[::-1]:
            jax.block_until_ready(state)
            start = time.perf_counter()
            state = call(state)
            times[name].append(time.perf_counter() - start)
    ours, theirs = times["te.jit"][5:], times["raw"][5:]
    return Row(
        leaves,
        1e6 * statistics.median(theirs),
        1e6 * statistics.median(ours),
        statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=400, help="calls of each kind per row")
    calls = parser.parse_args().calls
    print(f"{'arrays':>6} {'raw us':>10} {'te.jit us':>10} {'ratio':>8}")
    for leaves in LEAVES:
        print(measure(leaves, max(20, calls if leaves < 100 else calls // 4)), flush=True)


if __name__ == "__main__":
    main()
