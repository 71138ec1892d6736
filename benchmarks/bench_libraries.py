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
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import libraries

DEVICES = 8
LIMIT = 120.0
# How much farther than a run on moved inputs a result may be, and how many roundings besides.
_MARGIN, _ROUNDINGS = 16.0, 64.0
_MOVED = 2  # runs on moved inputs


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
            lacking = libraries.missing(needs)
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
            outcome = "slow" if ours["what"] == _LATE else "fails"
            return {**told, "outcome": outcome, **ours}
        told["te"] = ours
        what = _difference(Path(folder))
        if what:
            return {**told, "outcome": "differs", "what": what}
        if ours["seconds"] > limit:
            return {**told, "outcome": "slow"}
        return {**told, "outcome": "equal"}


_LATE = "no result in time"


def _run(name: str, mode: str, folder: str, limit: float) -> dict[str, Any]:
    """What one process says of a program."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "KERAS_BACKEND": "jax",
        "TAPESTRY_EGG_CACHE": folder,
    }
    command = [sys.executable, "-m", "benchmarks.bench_libraries", "--child", name, mode, folder]
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"what": _LATE}
    path = Path(folder) / f"{mode}.json"
    if path.exists():
        return dict(json.loads(path.read_text("utf-8")))
    return {"what": f"exit code {done.returncode}: {done.stderr[-2000:]}"}


def _difference(folder: Path) -> str:
    """How the results in a folder differ by more than rounding; nothing if they do not."""
    import numpy as np

    plain, ours = (np.load(folder / f"{mode}.npz") for mode in ("jax", "te"))
    for key in plain.files:
        if key.startswith("allowed"):
            continue
        if key not in ours.files:
            return f"{key} is missing"
        a, b = plain[key], ours[key]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{key} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
        off = _distance(a, b)
        allowed = float(plain[f"allowed {key}"])
        if not off <= allowed:
            return (
                f"{key} {a.dtype}{list(a.shape)} is off by {off:.3g}, rounding gives {allowed:.3g}"
            )
    return (
        "" if len(ours.files) == sum(not k.startswith("allowed") for k in plain.files) else "more"
    )


def _distance(a: Any, b: Any) -> float:
    """The greatest difference of two arrays; infinite where only one is not finite. Of whole
    numbers and flags: the share that differs."""
    import numpy as np

    if a.size == 0:
        return 0.0
    if a.dtype.kind not in "fcV":
        return float(np.mean(a != b))
    a, b = _wide(a), _wide(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(a - b))
    return float(np.max(np.nan_to_num(off, nan=np.inf, posinf=np.inf)))


def _wide(a: Any) -> Any:
    import numpy as np

    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


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
    host = jax.device_get(jax.tree.map(_plain, args))  # before arguments are donated
    if mode == "te":
        import tapestry_egg as te

        jitted = te.jit(
            fn, on_progress=lambda p: stages.append((time.perf_counter(), str(p))), **words
        )
    else:
        jitted = jax.jit(fn, **words)
    cpu, begin = _cpu(), time.perf_counter()
    out = jax.block_until_ready(jitted(*args))
    seconds, spent = time.perf_counter() - begin, _cpu() - cpu
    found = _arrays(out)
    told: dict[str, Any] = {"seconds": seconds, "cpu": spent}
    if mode == "te":
        told["stages"] = [(round(at - begin, 3), text) for at, text in stages]
    else:
        told["operations"] = len(
            jax.make_jaxpr(fn, static_argnums=words.get("static_argnums", ()))(*args).eqns
        )
        rng = np.random.default_rng(0)
        moved = [_arrays(jitted(*_moved(args, host, rng))) for _ in range(_MOVED)]
        for key in list(found):
            found[f"allowed {key}"] = _allowed(found[key], [m[key] for m in moved])
    np.savez(folder / f"{mode}.npz", **found)
    return told


def _allowed(a: Any, moved: Sequence[Any]) -> Any:
    """How far from an array a result may be: as far as inputs that are moved by a rounding take it,
    with some margin, and some roundings of its greatest magnitude."""
    import jax
    import numpy as np

    apart = _MARGIN * max(_distance(a, m) for m in moved)
    if a.dtype.kind not in "fcV" or a.size == 0:
        return np.float64(apart)
    finite = np.abs(_wide(a)[np.isfinite(_wide(a))])
    eps = float(jax.numpy.finfo(a.dtype).eps)
    return np.float64(apart + _ROUNDINGS * eps * float(finite.max(initial=0.0)))


def _plain(x: Any) -> Any:
    import jax

    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x


def _arrays(tree: Any) -> dict[str, Any]:
    """The leaves of a result by their paths."""
    import jax
    import numpy as np

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        f"{k} result{jax.tree_util.keystr(path)}": np.asarray(_plain(x))
        for k, (path, x) in enumerate(leaves)
    }


def _moved(args: Any, host: Any, rng: Any) -> Any:
    """Arguments whose floats are moved by at most a unit in the last place."""
    import jax
    import numpy as np

    def move(x: Any, kept: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(kept, impl=jax.random.key_impl(x))
        kept = np.asarray(kept)
        if not jax.dtypes.issubdtype(kept.dtype, np.inexact):
            return jax.numpy.asarray(kept)
        eps = float(jax.numpy.finfo(kept.dtype).eps)
        noise = 1.0 + eps * rng.uniform(-1.0, 1.0, kept.shape)
        return jax.numpy.asarray((_wide(kept) * noise).astype(kept.dtype))

    return jax.tree.map(move, args, host)


def _cpu() -> float:
    """CPU seconds of this process and of all that it started, ended or not."""
    own = os.times()
    spent = own.user + own.system + own.children_user + own.children_system
    return spent + sum(_process(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(x) for x in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _process(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _wanted(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    every = libraries.programs()
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
