"""The bars: what has been promised, measured again, each with its figure and whether it holds.

    make bars
    python -m benchmarks.bars --only calls front     # those whose names contain one of the words

Each bar runs in a process of its own, alone. A bar that needs what is not here (libraries, public
instances) says so and counts as neither. Exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_JOBS = 3  # jobs of two processes, each started twice


class Absent(Exception):
    """What a bar needs is not here."""


@dataclass(frozen=True)
class Bar:
    """A figure and its limit: at most `most`, or at least `least`."""

    name: str
    measure: Callable[[], float]
    unit: str = ""
    most: float | None = None
    least: float | None = None

    def holds(self, figure: float) -> bool:
        """Whether a figure is within the limit."""
        above = self.most is None or figure <= self.most
        return above and (self.least is None or figure >= self.least)

    @property
    def limit(self) -> str:
        """The limit in words."""
        return f"≤ {self.most:g}" if self.most is not None else f"≥ {self.least:g}"


def _calls(leaves: int) -> float:
    from benchmarks.bench_calls import measure

    return measure(leaves, 400 if leaves < 100 else 100).ratio


def _images() -> float:
    from benchmarks.bench_theory import PROJECTIONS, images_per_second

    return min(images_per_second(p) for p in PROJECTIONS.values()) / 1e6


def _tracing() -> float:
    from benchmarks.bench_theory import measure_trace

    row = measure_trace(96)
    return row["ours"] / row["jax"]


def _costing() -> float:
    from benchmarks.bench_snapshots import costing_seconds

    return costing_seconds(96)


def _command(*words: str) -> tuple[float, str]:
    """Run a command; its seconds, and what it said. Raises RuntimeError where it failed."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return time.perf_counter() - begin, done.stdout


def _verify() -> float:
    return _command("tapestry_egg", "verify", "--again")[0]


def _jobs() -> float:
    from benchmarks.bench_distributed import main

    return float(main(_JOBS))


def _snapshots(column: int) -> float:
    _, said = _command("benchmarks.bench_snapshots", "--layers", "12", "--seconds", "20")
    row = said.splitlines()[-1].split()
    return float(row[column].rstrip("%"))


def _example() -> tuple[float, float]:
    """Seconds that README's example is searched for, and the largest gap, in per cent."""
    from tests.story.one_tensor import Story

    begin = time.perf_counter()
    story = Story.told()
    return time.perf_counter() - begin, 100 * max(p.gap for p in story.front)


def _moved() -> float:
    """Bytes of README's example that were compiled and not planned, or the other way round."""
    from tests.story.one_tensor import Story

    found = re.findall(r"planned ([\d,]+) bytes, compiled ([\d,]+)", Story.told().run())
    amounts = [(int(a.replace(",", "")), int(b.replace(",", ""))) for a, b in found]
    return float(sum(abs(a - b) for a, b in amounts))


def _algebra() -> float:
    """TENSAT's graphs whose cost the rules lower on one H100."""
    from benchmarks.bench_algebra import PUBLISHED, published
    from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books

    books = load_books(DEFAULT_BOOKS)
    ratios = [published(name, books)["h100:1"].ratio for name in PUBLISHED]
    if max(ratios) > 1.0:
        raise RuntimeError(f"a cost rose: {ratios}")
    return float(sum(r < 0.9995 for r in ratios))


def _demo() -> float:
    """The largest gap of the demo's front, in per cent."""
    import tempfile

    import tapestry_egg as te

    with tempfile.TemporaryDirectory() as folder:
        _command("tapestry_egg", "demo", "--out", folder)
        front = te.load(Path(folder) / "gpt2.front.json")
    return 100 * max(p.gap for p in front)


def _first_calls(which: str) -> float:
    """Programs of other libraries: first calls beside `jax.jit`'s, or how many went wrong."""
    if not importlib.util.find_spec("numpyro") or not importlib.util.find_spec("haiku"):
        raise Absent("libraries of benchmarks/libraries")
    import tempfile

    from benchmarks.bench_strangers import bad, median_ratio

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        _command("benchmarks.bench_strangers", "--calls", "--json", str(path))
        rows = json.loads(path.read_text())
    return float(sum(map(bad, rows.values()))) if which == "different" else median_ratio(rows)


def _tables() -> float:
    """Products on H100 and B200: the worst median error of rows left out of their tables."""
    from benchmarks.bench_tables import worst_median

    return worst_median()


def _iopddl() -> float:
    """IOPDDL's public instances at the contest's limits: mean ratio to the best known."""
    folder = os.environ.get("TAPESTRY_EGG_IOPDDL")
    if not folder:
        raise Absent("TAPESTRY_EGG_IOPDDL, a folder of instances")
    _, said = _command("benchmarks.bench_iopddl", folder)
    return float(re.findall(r"mean\D*([\d.]+)", said)[-1])


BARS: Sequence[Bar] = (
    Bar("calls: 1 array, ratio to the raw executable", lambda: _calls(1), most=1.1),
    Bar("calls: 27 arrays, ratio", lambda: _calls(27), most=1.1),
    Bar("calls: 600 arrays, ratio", lambda: _calls(600), most=1.1),
    Bar("first calls: median of ratios to jax.jit", lambda: _first_calls("ratio"), most=3.0),
    Bar("first calls: results that differ", lambda: _first_calls("different"), most=0),
    Bar("theory: range images", _images, "M/s", least=1.0),
    Bar("theory: tracing 96 layers, ratio to JAX", _tracing, most=3.0),
    Bar("rules: the whole book verified", _verify, "s", most=120),
    Bar("rules: TENSAT's graphs made cheaper", _algebra, "of 7", least=5),
    Bar("jobs of two processes that went wrong", _jobs, f"of {2 * _JOBS}", most=0),
    Bar("tables: products left out, worst median", _tables, "%", most=5),
    Bar("search: strategies of 96 layers joined and priced", _costing, "s", most=3),
    Bar("search: 12 layers on 8×8", lambda: _snapshots(3), "s", most=20),
    Bar("search: 12 layers, largest gap", lambda: _snapshots(7), "%", most=1.0),
    Bar("front: README's example", lambda: _example()[0], "s", most=20),
    Bar("front: README's example, largest gap", lambda: _example()[1], "%", most=0.01),
    Bar("front: bytes planned and not compiled", _moved, "B", most=0),
    Bar("front: demo, largest gap", _demo, "%", most=15),
    Bar("gym: IOPDDL, mean ratio to the best", _iopddl, most=1.02),
)


def _alone(bar: Bar) -> Mapping[str, float | str]:
    """Measure a bar in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bars", "--one", bar.name]
    env = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "TAPESTRY_EGG_PLAN_CACHE": "off",
        **os.environ,
    }
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    found: Mapping[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each bar; 1 where one is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bars", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="words that names contain")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        bar = next(b for b in BARS if b.name == options.one)
        try:
            print(json.dumps({"figure": bar.measure()}))
        except Absent as e:
            print(json.dumps({"absent": str(e)}))
        return 0
    missed = 0
    for bar in BARS:
        if not any(word in bar.name for word in options.only):
            continue
        found = _alone(bar)
        if "figure" in found:
            figure = float(found["figure"])
            verdict = "ok" if bar.holds(figure) else "MISSED"
            words = f"{figure:.4g} {bar.unit}".rstrip()
        else:
            verdict = "absent" if "absent" in found else "FAILED"
            words = str(found.get("absent") or found.get("failed"))
        missed += verdict in ("MISSED", "FAILED")
        print(f"{verdict:7} {bar.name:45} {words:>14}   ({bar.limit})", flush=True)
    return min(1, missed)


if __name__ == "__main__":
    sys.exit(main())
