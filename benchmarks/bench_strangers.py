"""Strangers' programs: does every one get a plan, how soon, with the right numbers?

    python -m benchmarks.bench_strangers                       # all, full extents
    python -m benchmarks.bench_strangers --small linen nnx:gpt # small extents, by library or name
    python -m benchmarks.bench_strangers --numbers             # small, run on 8 CPU devices too
    python -m benchmarks.bench_strangers --front --work 20     # a front instead of one plan
    python -m benchmarks.bench_strangers --calls               # first calls of te.jit, timed
    python -m benchmarks.bench_strangers --json out.json       # rows as JSON; goes on with --resume

Every train step of `benchmarks/strangers` runs in a process of its own; with `--calls`, or by name,
those of `benchmarks/libraries` do too. A row says

* operations, and wall seconds that tracing took (JAX's own tracing included);
* C: CPU seconds in which `jax.jit` lowers and compiles the step for one CPU device;
* planning in CPU seconds of all processes, divided by how much slower this machine runs a loop of
  Python than the one that all budgets are stated for (cs), in units of C, and in wall seconds;
* how many plans, the fastest plan's seconds, the least peak, the widest gap;
* with `--numbers`: `equal` if the fastest plan gives what `jax.jit` gives on eight CPU devices.

With `--calls` it has the wall and CPU seconds from the first call to its result, under `jax.jit`
and `te.jit` with nothing cached, on eight CPU devices. The outcome is `equal`, `differs`, `slow`
(over two minutes), or `broken` if `jax.jit` itself fails.

The passes that took longest follow with `--passes`. Exit code 1 if a program fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import libraries, strangers
from benchmarks.agreement import (
    allowances,
    coarsest,
    cpu_seconds,
    difference,
    leaves_of,
    plain,
)
from benchmarks.aside import aside
from benchmarks.listed import listed, missing

HEAD = (
    f"{'program':28} {'ops':>6} {'trace s':>7} {'C':>6} {'cs':>7} {'in C':>6} {'wall':>6} "
    f"{'plans':>5} {'fastest':>9} {'least peak':>10} {'gap':>7}  outcome"
)
HEAD_OF_CALLS = f"{'program':34} {'jax.jit':>8} {'te.jit':>8} {'ratio':>6} {'of CPU':>6}  outcome"
#: Seconds after which a first result is late.
SLOW = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the programs named (default: all); 1 if one fails, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="libraries, or programs as library:function")
    parser.add_argument("--small", action="store_true", help="extents of a few")
    parser.add_argument("--numbers", action="store_true", help="run the fastest plan (small)")
    parser.add_argument("--calls", action="store_true", help="first calls of te.jit, small")
    parser.add_argument("--front", action="store_true", help="a front instead of one plan")
    parser.add_argument("--work", type=float, default=5.0, help="units of work (5)")
    parser.add_argument("--limit", type=float, default=900.0, help="wall seconds for a program")
    parser.add_argument("--target", help="default: h100:8, with --numbers cpu:8")
    parser.add_argument("--passes", action="store_true", help="CPU seconds of passes, too")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--resume", action="store_true", help="keep rows of the file that are well")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FILE"), help="internal")
    given = parser.parse_args(arguments)
    given.small |= given.numbers or given.calls
    given.target = given.target or ("cpu:8" if given.numbers else "h100:8")
    if given.child:
        return _child(given, *given.child)
    rows: dict[str, dict[str, Any]] = {}
    if given.resume and given.json and given.json.exists():
        rows = {k: v for k, v in json.loads(given.json.read_text("utf-8")).items() if not bad(v)}
    print(HEAD_OF_CALLS if given.calls else HEAD, flush=True)
    every = listed("strangers")
    if given.names or given.calls:
        every |= listed("libraries")
    wanted = {n: x for n, x in every.items() if not given.names or named(n, given.names)}
    for name, needs in wanted.items():
        if name not in rows:
            lacking = missing(needs)
            rows[name] = (
                {"outcome": f"needs {', '.join(lacking)}"} if lacking else measure(name, given)
            )
        print(line(name, rows[name], given.passes), flush=True)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    failed = [n for n in wanted if bad(rows[n])]
    print(f"{len(wanted) - len(failed)} of {len(wanted)} planned")
    if given.calls:
        print(f"median ratio of seconds: {median_ratio(rows):.2f}")
    return int(bool(failed))


def median_ratio(rows: dict[str, dict[str, Any]]) -> float:
    """The median of first calls under `te.jit` over those under `jax.jit`, in wall seconds."""
    both = [r["te"][0] / r["jax"][0] for r in rows.values() if "te" in r]
    return statistics.median(both) if both else float("nan")


def named(name: str, wanted: Sequence[str]) -> bool:
    """Whether a program is among those asked for, by library or by the beginning of its name."""
    return any(name == w or name.startswith(w if ":" in w else f"{w}:") for w in wanted)


def bad(row: dict[str, Any]) -> bool:
    """Whether a row is of a program that failed; one that is not installed did not."""
    return not row["outcome"].startswith(("ok", "equal", "needs", "broken"))


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The row of one program, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        flags = [f"--work={given.work}", f"--target={given.target}"]
        flags += [f"--{f}" for f in ("small", "numbers", "calls", "front") if getattr(given, f)]
        began = time.monotonic()
        row: dict[str, Any]
        row, last = aside(
            ["benchmarks.bench_strangers", *flags, "--child", name, str(path)],
            path,
            given.limit,
            JAX_PLATFORMS="cpu",
            TAPESTRY_EGG_PLAN_CACHE="off",
            KERAS_BACKEND="jax",
            TF_CPP_MIN_LOG_LEVEL="3",
            XLA_FLAGS="--xla_force_host_platform_device_count=8",
        )
        if "outcome" not in row:
            row["outcome"] = f"ended in {row.get('at')}: {last:.200}"
        row["whole"] = time.monotonic() - began
        return row


def line(name: str, row: dict[str, Any], passes: bool = False) -> str:
    """One row of the table."""
    if "jax" in row:
        (a, b), (c, d) = row["jax"], row.get("te", (float("nan"),) * 2)
        return f"{name:34} {a:8.2f} {c:8.2f} {c / a:6.2f} {d / b:6.2f}  {row['outcome']}"

    def number(key: str, form: str) -> str:
        return format(row[key], form) if row.get(key) is not None else "-"

    ratio = row["cpu"] / row["C"] if row.get("cpu") and row.get("C") else None
    text = (
        f"{name:28} {number('operations', 'd'):>6} {number('traced', '.1f'):>7} "
        f"{number('C', '.1f'):>6} {number('cs', '.1f'):>7} {f'{ratio:.2f}' if ratio else '-':>6} "
        f"{number('wall', '.0f'):>6} {number('plans', 'd'):>5} {row.get('fastest', '-'):>9} "
        f"{row.get('peak', '-'):>10} {number('gap', '.1%'):>7}  {row['outcome']}"
    )
    if passes and row.get("passes"):
        taken = sorted(row["passes"].items(), key=lambda x: -x[1])[:6]
        text += "\n" + " " * 30 + ", ".join(f"{k} {v:.1f}" for k, v in taken)
    return text


def slowness() -> float:
    """How much longer a loop of Python takes here than where cs are CPU seconds (1.3 s for it)."""
    began, x = time.process_time(), 0
    for i in range(5_000_000):
        x += i * i % 7
    return (time.process_time() - began) * 4 / 1.3


class _Row(dict[str, Any]):
    """A row that is on disk after every change, so that a crash says how far it came."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def note(self, **values: Any) -> None:
        self.update(values)
        self._path.write_text(json.dumps(self), encoding="utf-8")


def _child(given: argparse.Namespace, name: str, path: str) -> int:
    """Measure one program in this process, and write its row to a file."""
    row = _Row(Path(path))
    try:
        row.note(at="building")
        (_called if given.calls else _planned)(given, _made(name, given.small), row)
    except Exception as error:
        traceback.print_exc()
        inner = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(inner.filename).name}:{inner.lineno}"
        told = " ".join(str(error).split())
        said = "broken: " if given.calls and row["at"] in ("building", "jax.jit") else ""
        row.note(outcome=f"{said}{type(error).__name__} in {row.get('at')}: {told:.300} ({where})")
    return 0


def _made(name: str, small: bool) -> strangers.Step:
    """The program of a name, of either folder."""
    if name in listed("strangers"):
        return strangers.make(name, small)
    function, arguments = libraries.make(name)
    return strangers.Step(function, lambda: arguments, donated=())


def _called(given: argparse.Namespace, step: strangers.Step, row: _Row) -> None:
    import jax
    import numpy as np

    import tapestry_egg as te

    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.ones(3)))  # the compiler is loaded
    made = step.arguments()
    host = jax.device_get(jax.tree.map(plain, made))
    found = []
    for name, jit in (("jax", jax.jit), ("te", te.jit)):
        row.note(at=f"{name}.jit")
        jax.clear_caches()  # what one has traced, the other traces again
        results, *spent = _first(jit(step.function), made)
        found.append(results)
        row.note(**{name: spent})
    expected, ours = found
    jitted = jax.jit(step.function)
    off = difference(expected, ours, allowances(jitted, made, host, expected))
    late = "slow" if row["te"][0] > SLOW else "equal"
    row.note(operations=len(jax.make_jaxpr(step.function)(*made).eqns))
    row.note(outcome=f"differs: {off}" if off else late)


def _first(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, float, float]:
    """The results of the first call, and its wall and CPU seconds."""
    import jax

    used, began = cpu_seconds(), time.perf_counter()
    results = jax.block_until_ready(function(*arguments))
    return leaves_of(results), time.perf_counter() - began, cpu_seconds() - used


def _planned(given: argparse.Namespace, step: strangers.Step, row: _Row) -> None:
    import jax

    import tapestry_egg as te
    from tapestry_egg.quantities import BYTES, TIME

    described = step.described()
    row.note(at="trace")
    began = time.monotonic()
    graph = te.trace(step.function, *described, donate_argnums=step.donated)
    row.note(
        traced=time.monotonic() - began,
        operations=getattr(graph, "graph", graph).size,
        at="jit",
    )
    if not given.numbers:
        jitted = jax.jit(step.function, donate_argnums=step.donated, keep_unused=True)
        traced = jitted.trace(*described)
        used = cpu_seconds()
        traced.lower().compile()
        row.note(C=cpu_seconds() - used)
    passes: dict[str, float] = {}
    last: list[Any] = ["read_question", cpu_seconds()]

    def tell(phase: Any) -> None:
        if phase.step != last[0]:
            now = cpu_seconds()
            passes[last[0]] = passes.get(last[0], 0.0) + now - last[1]
            last[:] = phase.step, now
            row.note(at=phase.step, passes=passes)

    factor, began, used = slowness(), time.monotonic(), cpu_seconds()
    settings = te.Settings(work=given.work, front=given.front)
    front = te.optimize(graph, given.target, settings=settings, on_progress=tell)
    cpu = cpu_seconds() - used
    tell(type("End", (), {"step": "after"}))
    plans = front.plans
    row.note(
        cpu=cpu,
        cs=cpu / factor,
        wall=time.monotonic() - began,
        plans=len(plans),
        fastest=TIME.format(min(p.costs.seconds for p in plans)),
        peak=BYTES.format(min(p.costs.peak_bytes for p in plans)),
        gap=max(p.gap for p in plans),
    )
    if given.numbers:
        row.note(at="running")
        row.note(outcome=_compared(step, front))
    else:
        row.note(outcome="ok")


def _compared(step: strangers.Step, front: Any) -> str:
    """Whether the fastest plan gives what `jax.jit` gives on the same arguments, up to rounding."""
    import jax

    import tapestry_egg as te

    made = jax.jit(step.arguments)()
    host = jax.device_get(jax.tree.map(plain, made))
    jitted = jax.jit(step.function)
    expected = leaves_of(jitted(*made))
    allowed = allowances(jitted, made, host, expected, coarsest(step.function, made))
    run = te.compile(front.best("seconds"))
    off = difference(expected, leaves_of(run(*made)), allowed)
    return f"differs: {off}" if off else "equal"


if __name__ == "__main__":
    sys.exit(main())
