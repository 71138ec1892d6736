"""Extraction from public e-graphs, beside HiGHS and CP-SAT on the textbook program.

    python -m benchmarks.bench_gym FOLDER --seconds 10             # or TAPESTRY_GYM=FOLDER
    python -m benchmarks.bench_gym FOLDER --seconds 10 --baselines
    python -m benchmarks.bench_gym FOLDER --seconds 60 --front

The folder has egraph-serialize files (.json or .json.gz, in folders), as extraction-gym's
(github.com/egraphs-good/extraction-gym), and may have a `best_known.json`: file -> {"best",
"bound"}. Each file is solved by `python -m tapestry_egg.extract` in a process of its own; the value
is recomputed here from the nodes that it wrote. `best known` is compared up to rounding. Without a
folder, nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapestry_egg.errors import TapestryError
from tapestry_egg.extract import formats
from tapestry_egg.extract.check_choices import evaluate

from . import textbook

#: Values that differ by less than this share are equal.
_TIE = 1e-7


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every file of the folder; returns 1 where a value is worse than the best known."""
    options = _parser().parse_args(arguments)
    if options.one:
        return _one(options.one, options.folder, options.seconds)
    folder = options.folder or os.environ.get("TAPESTRY_GYM", "")
    if not folder or not Path(folder).is_dir():
        print("no folder of e-graphs: nothing to measure")
        return 0
    root = Path(folder)
    files = sorted(p for p in root.rglob("*.json*") if p.name != "best_known.json")
    files = [p for p in files if options.only in str(p.relative_to(root))]
    known = root / "best_known.json"
    best = json.loads(known.read_text()) if known.is_file() else {}
    if options.front:
        return _fronts(files, root, options.seconds)
    rows = []
    print(_HEAD + ("  highs             cp-sat" if options.baselines else ""), flush=True)
    for path in files:
        name = str(path.relative_to(root))
        row = {**_ours(path, options.seconds, options.seed), "name": name}
        row["best"] = best.get(name, {}).get("best")
        if not options.no_greedy:
            row["greedy"] = _greedy(path)
        if options.baselines:
            row |= {s: _baseline(path, s, options.seconds) for s in ("highs", "cp-sat")}
        rows.append(row)
        print(_line(row), flush=True)
    return _summary(rows, options.baselines)


_HEAD = (
    f"{'file':46} {'nodes':>6} {'value':>13} {'bound':>13} {'proven':6} {'wall':>6} "
    f"{'best known':>13} {'greedy':>13}"
)


def _ours(path: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Our answer, recomputed from the nodes written, and the wall time of the whole process."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "tapestry_egg.extract", str(path), "--json", "-o", out]
        command += ["--seconds", str(seconds), "--seed", str(seed)]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        wall = time.perf_counter() - started
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        written = list(Path(out).glob("*.json"))
        value = _recomputed(path, json.loads(written[0].read_text())) if written else None
    told = next(iter(found.get("values", {}).values()), math.nan)
    if value is not None and not math.isclose(value, told, rel_tol=1e-9, abs_tol=1e-9):
        raise SystemExit(f"{path}: printed {told}, the nodes written cost {value}")
    return {**found, "value": value, "ours_bound": found.get("bound"), "wall": wall}


def _recomputed(path: Path, answer: dict[str, Any]) -> float:
    """The DAG cost of an answer, from the two files alone; raises SystemExit for no answer."""
    document = json.loads(path.read_bytes() if path.suffix != ".gz" else _unzipped(path))
    nodes, choices = document["nodes"], answer["choices"]
    present = {n["eclass"] for n in nodes.values()}
    todo = [r for r in document["root_eclasses"] if r in present]
    state: dict[str, int] = {}
    stack = [(r, 0) for r in todo]
    while stack:
        c, leaving = stack.pop()
        if leaving:
            state[c] = 2
            continue
        if c in state:
            continue
        state[c] = 1
        node = nodes[choices[c]]
        if node["eclass"] != c:
            raise SystemExit(f"{path}: node {choices[c]} is not of class {c}")
        stack.append((c, 1))
        for child in node.get("children", ()):
            d = nodes[child]["eclass"]
            if state.get(d) == 1:
                raise SystemExit(f"{path}: a cycle through class {d}")
            stack.append((d, 0))
    return math.fsum(nodes[choices[c]].get("cost", 1.0) for c in state)


def _unzipped(path: Path) -> bytes:
    import gzip

    return gzip.decompress(path.read_bytes())


def _greedy(path: Path) -> float | None:
    """The value of greedy-DAG on the e-graph as it is."""
    from tapestry_egg.extract.methods import extract

    try:
        found = extract(formats.read(path)[0], seconds=60.0, method="greedy-dag")
    except TapestryError:
        return None
    return float(found.values[0]) if found.values else None


def _one(solver: str, path: str, seconds: float) -> int:
    """One baseline on one file, as JSON."""
    problem, _ = formats.read(path)
    found = (textbook.highs if solver == "highs" else textbook.cp_sat)(problem, seconds)
    value = None
    if found.choice is not None:
        checked = evaluate(problem, found.choice)
        value = float(checked.values[0]) if checked.feasible else None
    print(json.dumps({"value": value, "bound": found.bound, "proven": found.proven}))
    return 0


def _baseline(path: Path, solver: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.bench_gym", str(path), "--one", solver]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "--seconds", str(seconds)],
            capture_output=True,
            text=True,
            timeout=3 * seconds + 30,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        found = {"value": None, "bound": None, "proven": False}
    return {**found, "wall": time.perf_counter() - started}


def _line(row: dict[str, Any]) -> str:
    text = (
        f"{row['name'][-46:]:46} {row.get('nodes', 0):>6} {_show(row['value']):>13} "
        f"{_show(row['ours_bound']):>13} {'yes' if row.get('proven') else 'no':6} "
        f"{row['wall']:>6.2f} {_show(row.get('best')):>13} {_show(row.get('greedy')):>13}"
    )
    if row["value"] is None:
        text += f" {row.get('reason') or row.get('error')}"
    for solver in ("highs", "cp-sat"):
        if solver in row:
            b = row[solver]
            text += f"  {_show(b['value'])}{'*' if b['proven'] else ''} {b['wall']:.1f} s"
    return text


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"


def _worse(value: float | None, than: float | None) -> bool:
    if than is None:
        return False
    return value is None or value > than + _TIE * abs(than)


def _summary(rows: list[dict[str, Any]], baselines: bool) -> int:
    proven = sum(bool(r.get("proven")) for r in rows)
    walls = sorted(r["wall"] for r in rows)
    print(
        f"\n{len(rows)} files, {proven} settled ({proven / max(len(rows), 1):.1%}), "
        f"{sum(r.get('value') is None for r in rows)} without an answer; "
        f"wall {sum(walls):.1f} s, the longest {walls[-1] if walls else 0:.1f} s"
    )
    worse = [r["name"] for r in rows if _worse(r["value"], r.get("best"))]
    better = [r["name"] for r in rows if r["best"] is not None and _worse(r["best"], r["value"])]
    greedy = [r["name"] for r in rows if _worse(r["value"], r.get("greedy"))]
    print(f"worse than the best known: {worse or 'none'}; better: {better or 'none'}")
    print(f"above greedy-DAG: {greedy or 'none'}")
    for solver in ("highs", "cp-sat") if baselines else ():
        own = sum(r[solver]["proven"] for r in rows)
        print(f"{solver}: {own} proven, wall {sum(r[solver]['wall'] for r in rows):.1f} s")
    return int(bool(worse or greedy))


def _fronts(files: Sequence[Path], root: Path, seconds: float) -> int:
    print(f"{'file':46} {'points':>6} {'exact':5} {'epsilon':>9} {'method':12} {'seconds':>8}")
    for path in files:
        command = [sys.executable, "-m", "tapestry_egg.extract", str(path), "--front", "--json"]
        done = subprocess.run([*command, "--seconds", str(seconds)], capture_output=True, text=True)
        front = json.loads(done.stdout.splitlines()[-1])
        epsilon = front.get("epsilon")
        print(
            f"{str(path.relative_to(root))[-46:]:46} {len(front.get('points', ())):>6} "
            f"{'yes' if front.get('exact') else 'no':5} "
            f"{'-' if epsilon is None else f'{epsilon:.3%}':>9} {front.get('method', ''):12} "
            f"{front.get('seconds', 0.0):>8.2f}",
            flush=True,
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_gym", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", nargs="?", default="", help="or the variable TAPESTRY_GYM")
    parser.add_argument("--seconds", type=float, default=10.0, help="per file (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--baselines", action="store_true", help="HiGHS and CP-SAT beside ours")
    parser.add_argument("--no-greedy", action="store_true", help="without greedy-DAG")
    parser.add_argument("--front", action="store_true", help="fronts of cost and selected nodes")
    parser.add_argument("--one", choices=("highs", "cp-sat"), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
