"""Programs of many libraries under `jax.jit` and under `te.jit`: results, and time to the first.

    python -m benchmarks.bench_libraries                       # all that are installed
    python -m benchmarks.bench_libraries equinox flax:mlp      # modules or programs
    python -m benchmarks.bench_libraries --json out.json       # also as JSON; resumes with --resume

Every program runs in two processes of its own, with eight virtual CPU devices: one calls it under
`jax.jit`, one under `te.jit` with nothing cached. A program's outcome is

* `equal`: the results agree up to rounding, and the first came in time;
* `differs`: a result is farther off than rounding explains, or has another type;
* `fails`: `te.jit` raised an error where `jax.jit` did not;
* `slow`: no result within `--limit` seconds (120);
* `broken`: `jax.jit` itself fails (a library too old for this JAX); not counted.

What rounding explains: the program is run again with every number of its inputs moved by at most
one unit in the last place; results may differ by as much as these do, and by some roundings of the
greatest magnitude. Seconds are those from the call to the result, tracing, planning and compiling
included; CPU seconds those of the process and all that it started.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import libraries
from benchmarks.agreement import allowances, cpu_seconds, difference, leaves_of, plain
from benchmarks.aside import LATE, aside
from benchmarks.listed import listed, missing

DEVICES = 8
LIMIT = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs named (default: all); 1 if one fails, differs or is slow, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="modules, or programs as module:function")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--resume", action="store_true", help="keep what the file has already")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a first result")
    parser.add_argument("--child", nargs=3, metavar=("NAME", "MODE", "FOLDER"), help="internal")
    given = parser.parse_args(arguments)
    if given.child:
        return _child(*given.child)
    wanted = _wanted(given.names)
    outcomes: dict[str, dict[str, Any]] = {}
    if given.resume and given.json and given.json.exists():
        outcomes = json.loads(given.json.read_text("utf-8"))["programs"]
    print(HEAD, flush=True)
    for name, needs in wanted.items():
        if name not in outcomes or outcomes[name]["outcome"] == "not installed":
            lacking = missing(needs)
            outcomes[name] = (
                {"outcome": "not installed", "what": ", ".join(lacking)}
                if lacking
                else measure(name, given.limit)
            )
        print(line(name, outcomes[name]), flush=True)
        if given.json:
            told = {"programs": outcomes, "totals": totals(outcomes)}
            given.json.write_text(json.dumps(told, indent=1), encoding="utf-8")
    for key, value in totals(outcomes).items():
        print(f"{key}: {value}")
    bad = {"fails", "differs", "slow"}
    return int(any(o["outcome"] in bad for o in outcomes.values()))


HEAD = f"{'program':34} {'outcome':>13} {'jax.jit':>8} {'te.jit':>8} {'ratio':>6} {'cpu':>6}"


def line(name: str, outcome: dict[str, Any]) -> str:
    """One outcome as text, under `HEAD`."""
    text = f"{name:34} {outcome['outcome']:>13}"
    if "te" in outcome:
        a, b = outcome["jax"], outcome["te"]
        text += f" {a['seconds']:8.2f} {b['seconds']:8.2f} {b['seconds'] / a['seconds']:6.2f}"
        text += f" {b['cpu'] / a['cpu']:6.2f}"
    return f"{text}  {outcome['what'][:160]}" if outcome.get("what") else text


def totals(outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How many programs had which outcome, and the medians of the ratios of first calls."""
    counts = Counter(o["outcome"] for o in outcomes.values())
    both = [o for o in outcomes.values() if "te" in o]
    found: dict[str, Any] = dict(sorted(counts.items()))
    found["libraries"] = len(
        {name.partition(":")[0] for name, o in outcomes.items() if o["outcome"] == "equal"}
    )
    for key in ("seconds", "cpu"):
        ratios = [o["te"][key] / o["jax"][key] for o in both]
        if ratios:
            found[f"median ratio of {key}"] = round(statistics.median(ratios), 2)
    return found


def measure(name: str, limit: float = LIMIT) -> dict[str, Any]:
    """Run one program under `jax.jit` and under `te.jit`, and compare."""
    with tempfile.TemporaryDirectory(prefix="bench-libraries-") as folder:
        plain = _run(name, "jax", folder, 10 * limit)
        if "seconds" not in plain:
            return {"outcome": "broken", "what": plain["what"], "trace": plain.get("trace", "")}
        ours = _run(name, "te", folder, limit + 60.0)
        told = {"jax": plain}
        if "seconds" not in ours:
            outcome = "slow" if ours["what"] == LATE else "fails"
            return {**told, "outcome": outcome, **ours}
        told["te"] = ours
        what = _difference(Path(folder))
        if what:
            return {**told, "outcome": "differs", "what": what}
        if ours["seconds"] > limit:
            return {**told, "outcome": "slow"}
        return {**told, "outcome": "equal"}


def _run(name: str, mode: str, folder: str, limit: float) -> dict[str, Any]:
    """What one process says of a program."""
    found, last = aside(
        ["benchmarks.bench_libraries", "--child", name, mode, folder],
        Path(folder) / f"{mode}.json",
        limit,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"--xla_force_host_platform_device_count={DEVICES}",
        TF_CPP_MIN_LOG_LEVEL="3",
        KERAS_BACKEND="jax",
        TAPESTRY_EGG_CACHE=folder,
    )
    return found or {"what": last}


def _difference(folder: Path) -> str:
    """How the results in a folder differ by more than rounding; nothing if they do not."""
    import numpy as np

    told, ours = (np.load(folder / f"{mode}.npz") for mode in ("jax", "te"))
    expected = {k: told[k] for k in told.files if not k.startswith("allowed ")}
    return difference(expected, ours, {k: told[f"allowed {k}"] for k in expected})


# In a process of its own


def _child(name: str, mode: str, folder: str) -> int:
    told: dict[str, Any] = {}
    try:
        made = libraries.make(name)
        fn, args, words = (*made, {}) if len(made) == 2 else made
        told = _first_call(fn, args, words, mode, Path(folder))
    except Exception as e:
        told["what"] = f"{type(e).__name__}: {e}"
        told["trace"] = traceback.format_exc()
    (Path(folder) / f"{mode}.json").write_text(json.dumps(told), encoding="utf-8")
    return 0


def _first_call(
    fn: Callable[..., Any], args: Any, words: dict[str, Any], mode: str, folder: Path
) -> dict[str, Any]:
    import jax
    import numpy as np

    stages: list[tuple[float, str]] = []
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.ones(3)))  # the compiler is loaded
    host = jax.device_get(jax.tree.map(plain, args))  # before arguments are donated
    if mode == "te":
        import tapestry_egg as te

        jitted = te.jit(
            fn, on_progress=lambda p: stages.append((time.perf_counter(), str(p))), **words
        )
    else:
        jitted = jax.jit(fn, **words)
    cpu, begin = cpu_seconds(), time.perf_counter()
    out = jax.block_until_ready(jitted(*args))
    seconds, spent = time.perf_counter() - begin, cpu_seconds() - cpu
    found = leaves_of(out)
    told: dict[str, Any] = {"seconds": seconds, "cpu": spent}
    if mode == "te":
        told["stages"] = [(round(at - begin, 3), text) for at, text in stages]
    else:
        told["operations"] = len(
            jax.make_jaxpr(fn, static_argnums=words.get("static_argnums", ()))(*args).eqns
        )
        allowed = allowances(jitted, args, host, found)
        found |= {f"allowed {key}": most for key, most in allowed.items()}
    np.savez(folder / f"{mode}.npz", **found)
    return told


def _wanted(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    every = listed("libraries")
    if not names:
        return every
    chosen = {p: needs for p, needs in every.items() if p in names or p.partition(":")[0] in names}
    unknown = [
        n for n in names if n not in chosen and n not in {p.partition(":")[0] for p in every}
    ]
    if unknown:
        raise SystemExit(f"no program {unknown[0]!r}; there are {', '.join(every)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
