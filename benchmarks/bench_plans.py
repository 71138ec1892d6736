"""Every plan of every front run on virtual CPU devices: its numbers, its collectives, its memory.

    make bench-plans                                   # every program, half an hour or more
    python -m benchmarks.bench_plans mlp unseen        # sets (models, tensat, unseen) or programs
    python -m benchmarks.bench_plans --json out.json   # also as JSON; --resume keeps its rows
    python -m benchmarks.bench_plans --work 5 llama    # more search, so more plans
    python -m benchmarks.bench_promises --small --count 99  # the same programs compiled for h100

Programs are small and each runs in a process of its own. A plan is *good* when

* no group of its results is farther from what the program gives in float64 than four times what
  `jax.jit` on one device is, rounding where the program says (`ratio`; every array of 64 elements
  is a group, smaller ones are one together; gradients are in what train steps return);
* XLA compiled exactly the bytes of collectives that were promised, by kind and group.

`peak` is compiled over promised, of a CPU, whose compiler holds more than accelerators' do: it is
told and not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry_egg.pipeline.rehearse import simulate_devices

from . import programs
from .aside import aside

if TYPE_CHECKING:
    from tapestry_egg.plans.plan import Plan

TARGET = "cpu:8"
DEVICES = 8
#: Units of search for a front: few, so that plans are of all kinds and not only of the best.
WORK = 0.5
#: Seconds for one program, after which it has failed.
LIMIT = 1800.0
#: Results of fewer elements are judged together: a single number may be right by luck.
_GROUP = 64

HEAD = f"{'program':28} {'plan':5} {'mesh':10} {'ratio':>6} {'peak':>6} collectives"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status, 1 where a plan is bad or a program fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="sets (models, tensat, unseen) or programs (all)")
    parser.add_argument("--work", type=float, default=WORK, help="units of search for a front")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--resume", action="store_true", help="keep what the file has already")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one program")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        given.child.write_text(json.dumps(run(given.names[0], given.work)), encoding="utf-8")
        return 0
    told: dict[str, Any] = {}
    if given.resume and given.json and given.json.exists():
        told = json.loads(given.json.read_text("utf-8"))["programs"]
    print(HEAD, flush=True)
    for name in programs.wanted(given.names, programs.run_ones()):
        if name not in told or "fails" in told[name]:
            told[name] = alone(name, given.work, given.limit)
        print("\n".join(lines(name, told[name])), flush=True)
        if given.json:
            document = {"programs": told, "total": total(told)}
            given.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(f"\n{total(told)}")
    return int(any("fails" in t or not all(map(good, t["plans"])) for t in told.values()))


def alone(name: str, work: float, limit: float) -> dict[str, Any]:
    """The rows of one program, found in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer, begin = Path(folder) / "answer.json", time.perf_counter()
        words = ["benchmarks.bench_plans", name, "--work", str(work), "--child", str(answer)]
        found, last = aside(words, answer, limit)
        return {**found, "took": time.perf_counter() - begin} if found else {"fails": last}


def run(name: str, work: float) -> dict[str, Any]:
    """Plan a program and run every plan of its front, in this process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Twice as quick to compile; the module, its collectives and its memory are the same.
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    )
    simulate_devices(DEVICES)
    import tapestry_egg as te
    from tapestry_egg.runtime.measure.numerics import standard

    made = programs.small(name)
    traced = made.trace()
    front = te.optimize(traced, TARGET, settings=te.Settings(work=work))
    reference, original = standard(made.function, lambda: _fresh(made))
    names = traced.graph.output_names
    groups = [
        n if x.size >= _GROUP else "small ones"
        for n, x in zip(names, original, strict=True)
    ]  # fmt: skip
    return {"plans": [ran(plan, made, groups, reference, original) for plan in front]}


def ran(
    plan: Plan,
    made: programs.Made,
    groups: Sequence[str],
    reference: Sequence[Any],
    original: Sequence[Any],
) -> dict[str, Any]:
    """What running one plan showed; what it raised, where it cannot be run."""
    import jax

    import tapestry_egg as te
    from tapestry_egg.errors import TapestryError
    from tapestry_egg.runtime.measure.compare import compare
    from tapestry_egg.runtime.measure.numerics import ALLOWED, accuracy, on_host

    row: dict[str, Any] = {"plan": plan.name, "mesh": str(plan.mesh)}
    try:
        step = te.compile(plan, jax.devices()[: plan.mesh.devices])
        compared = compare(plan, step.compile())
        found = [on_host(x) for x in jax.tree.leaves(step(*_fresh(made)))]
    except (TapestryError, jax.errors.JaxRuntimeError, NotImplementedError) as error:
        return {**row, "fails": f"{type(error).__name__}: {error}"}
    ratios = {
        a.name: a.plan * ALLOWED / a.allowed if a.allowed else a.plan and float("inf")
        for a in accuracy(reference, original, found, groups)
    }
    worst = max(ratios, key=lambda k: ratios[k])
    return {
        **row,
        "ratio": ratios[worst],
        "worst": worst,
        "allowed": ALLOWED,
        "peak": compared.compiled_peak_bytes,
        "promised_peak": compared.planned_peak_bytes,
        "wire": {f"{r.kind} {r.group}": [r.planned_bytes, r.compiled_bytes] for r in compared.rows},
        "warnings": list(compared.warnings),
    }


def _fresh(made: programs.Made) -> tuple[Any, ...]:
    """The arguments again: those that are donated do not outlive a call."""
    import jax

    from tapestry_egg.runtime.measure.numerics import is_key

    def copied(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        return jax.random.clone(x) if is_key(x) else x.copy()

    found: tuple[Any, ...] = jax.tree.map(copied, made.arguments)
    return found


def good(row: dict[str, Any]) -> bool:
    """Whether a plan ran, is as accurate as it must be, and sends what it promised."""
    if "fails" in row:
        return False
    return row["ratio"] <= row["allowed"] and all(a == b for a, b in row["wire"].values())


def lines(name: str, told: dict[str, Any]) -> list[str]:
    """The rows of one program as text, under `HEAD`."""
    if "fails" in told:
        return [f"{name:28} fails: {told['fails'][:160]}"]
    found = []
    for row in told["plans"]:
        head = f"{name:28} {row['plan']:5} {row['mesh']:10}"
        if "fails" in row:
            found.append(f"{head} BAD: {row['fails'][:160]}")
            continue
        off = [f"{k}: {a:,} promised, {b:,} sent" for k, (a, b) in row["wire"].items() if a != b]
        found.append(
            f"{head} {row['ratio']:6.2f} {row['peak'] / row['promised_peak']:6.2f}"
            f" {'; '.join(off) or 'equal'}"
            + ("" if good(row) else f"  BAD ({row['worst']} is farthest off)")
        )
    return found


def total(told: dict[str, Any]) -> str:
    """How many programs and plans there are, and how many of the plans are good."""
    rows = [row for t in told.values() for row in t.get("plans", ())]
    ran = sum("plans" in t for t in told.values())
    return (
        f"{ran} of {len(told)} programs ran, {len(rows)} plans, "
        f"{sum(not good(r) for r in rows)} bad; the largest ratio is "
        f"{max((r['ratio'] for r in rows if 'ratio' in r), default=0.0):.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
