"""Extraction from public e-graphs, beside the best known values.

    python -m benchmarks.bench_gym FOLDER --seconds 10     # or TAPESTRY_GYM=FOLDER

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
from tapestry_egg.extract.gym import formats
from tapestry_egg.extract.gym.egraph.form import working_form
from tapestry_egg.extract.gym.egraph.greedy import cost_of, greedy_dag

#: Values that differ by less than this share are equal.
_TIE = 1e-7


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every file of the folder; returns 1 where a value is worse than the best known."""
    options = _parser().parse_args(arguments)
    folder = options.folder or os.environ.get("TAPESTRY_GYM", "")
    if not folder or not Path(folder).is_dir():
        print("no folder of e-graphs: nothing to measure")
        return 0
    root = Path(folder)
    files = sorted(p for p in root.rglob("*.json*") if p.name != "best_known.json")
    files = [p for p in files if options.only in str(p.relative_to(root))]
    known = root / "best_known.json"
    best = json.loads(known.read_text()) if known.is_file() else {}
    rows = []
    print(_HEAD, flush=True)
    for path in files:
        name = str(path.relative_to(root))
        row = {**_ours(path, options.seconds, options.seed), "name": name}
        row["best"] = best.get(name, {}).get("best")
        row["greedy"] = _greedy(path)
        rows.append(row)
        print(_line(row), flush=True)
    return _summary(rows)


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
        found = _last_line(done)
        written = list(Path(out).glob("*.json"))
        value = _recomputed(path, json.loads(written[0].read_text())) if written else None
    told = next(iter(found.get("values", {}).values()), math.nan)
    if value is not None and not math.isclose(value, told, rel_tol=1e-9, abs_tol=1e-9):
        raise SystemExit(f"{path}: printed {told}, the nodes written cost {value}")
    return {**found, "value": value, "ours_bound": found.get("bound"), "wall": wall}


def _last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object that a command printed last, or what it said of its failure."""
    lines = done.stdout.splitlines()
    if not lines:
        return {"error": f"status {done.returncode}: {done.stderr[-200:]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


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
    try:
        problem = formats.read(path)[0]
    except TapestryError:
        return None
    chosen = greedy_dag(form := working_form(problem), time.perf_counter() + 60.0)
    return None if chosen is None else cost_of(form, chosen) / form.scale


def _line(row: dict[str, Any]) -> str:
    text = (
        f"{row['name'][-46:]:46} {row.get('nodes', 0):>6} {_show(row['value']):>13} "
        f"{_show(row['ours_bound']):>13} {'yes' if row.get('proven') else 'no':6} "
        f"{row['wall']:>6.2f} {_show(row.get('best')):>13} {_show(row.get('greedy')):>13}"
    )
    if row["value"] is None:
        text += f" {row.get('reason') or row.get('error')}"
    return text


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"


def _worse(value: float | None, than: float | None) -> bool:
    if than is None:
        return False
    return value is None or value > than + _TIE * abs(than)


def _summary(rows: list[dict[str, Any]]) -> int:
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
    return int(bool(worse or greedy))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_gym", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", nargs="?", default="", help="or the variable TAPESTRY_GYM")
    parser.add_argument("--seconds", type=float, default=10.0, help="per file (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files whose path contains this")
    return parser


if __name__ == "__main__":
    sys.exit(main())
