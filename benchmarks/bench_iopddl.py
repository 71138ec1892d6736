"""IOPDDL: our answers against the best known ones, at the contest's time limits.

    python -m benchmarks.bench_iopddl FOLDER [--letters BGP] [--seeds 3] [--share 1.0]

FOLDER (or the environment's IOPDDL) holds `asplos-2025-iopddl-<A..Y>.json.gz` of
github.com/google/iopddl; without it there is nothing to measure. Every answer is printed by
`python -m tapestry_egg.extract` in a process of its own, whose time includes reading, and its cost
and memory are recounted here from what was printed. Best known: the least cost that the contest's
teams, XLA, or ti2-group/iopddl_experiments (MIT) reached, in time or later.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Letter -> (time limit in seconds, best in time, best known).
CONTEST = {
    "A": (60, 6548641531, 6548641531),
    "B": (60, 532843, 532843),
    "C": (60, 84102445244, 84102445244),
    "D": (60, 309396217429, 309396217429),
    "E": (60, 338965335000, 331239394812),
    "F": (120, 364364563561, 361354466823),
    "G": (120, 217039, 217039),
    "H": (120, 527715404000, 527715404000),
    "I": (120, 583706456000, 583706456000),
    "J": (120, 1325097240000, 1325097240000),
    "K": (180, 2242635784, 2242635784),
    "L": (180, 1970993742, 1970993742),
    "M": (180, 49928157537, 49928157537),
    "N": (180, 199470115118, 199470115118),
    "O": (180, 221037852000, 219518764980),
    "P": (240, 651833115436, 651833115436),
    "Q": (240, 526776842042, 526776842042),
    "R": (240, 367060921200, 351826900528),
    "S": (240, 1521949307, 1511377982),
    "T": (240, 671305744606, 656798881333),
    "U": (300, 2443995952, 2443995952),
    "V": (300, 1617084, 1617084),
    "W": (300, 11818845467155, 11614976869921),
    "X": (300, 278109753000, 278109753000),
    "Y": (300, 595085773000, 595085773000),
}

# Of the limit, what is left for the start and the end of the process: seconds.
_RESERVE = 2.0


@dataclass(frozen=True)
class Run:
    """One answer: its cost as recounted, the bound, and the seconds it took from start to end."""

    cost: int | None
    bound: float
    proven: bool
    wall: float
    cpu: float


def recount(document: dict[str, Any], x: list[int]) -> int:
    """The cost of an answer by the contest's rules. Raises ValueError beyond the limit."""
    p = document["problem"]
    costs = p["nodes"]["costs"]
    total = sum(c[r] for c, r in zip(costs, x, strict=True))
    for (a, b), table in zip(p["edges"]["nodes"], p["edges"]["costs"], strict=True):
        total += table[x[a] * len(costs[b]) + x[b]]
    steps: dict[int, int] = {}
    nodes = p["nodes"]
    for (a, b), usage, r in zip(nodes["intervals"], nodes["usages"], x, strict=True):
        if a < b:
            steps[a] = steps.get(a, 0) + usage[r]
            steps[b] = steps.get(b, 0) - usage[r]
    used = most = 0
    for t in sorted(steps):
        used += steps[t]
        most = max(most, used)
    if most > document["problem"]["usage_limit"]:
        raise ValueError(f"{most} is used, the limit is {document['problem']['usage_limit']}")
    return int(total)


def measured(path: Path, document: dict[str, Any], seconds: float, seed: int) -> Run:
    """One run of the command that may search for some seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tapestry_egg.extract", str(path), "--json"]
        begun = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command += ["--seconds", str(seconds), "--seed", str(seed), "-o", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - begun
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        row = json.loads(done.stdout)
        answers = list(Path(folder).glob("*.json"))
        cost = recount(document, json.loads(answers[0].read_text())) if answers else None
    bound = float("-inf") if row.get("bound") is None else row["bound"]
    return Run(cost, bound, bool(row.get("proven")), wall, cpu)


def instances(options: argparse.Namespace) -> Iterator[tuple[str, Path, dict[str, Any], float]]:
    """Letter, path, document and seconds to search of every instance that is there."""
    for letter in options.letters:
        path = Path(options.folder) / f"asplos-2025-iopddl-{letter}.json.gz"
        if not path.exists():
            continue
        document = json.loads(gzip.decompress(path.read_bytes()))
        yield letter, path, document, max(CONTEST[letter][0] * options.share - _RESERVE, 0.1)


def main() -> None:
    """Print one line per instance, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=os.environ.get("IOPDDL", ""))
    parser.add_argument("--letters", default="".join(CONTEST))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the contest's time limits")
    options = parser.parse_args()
    if not options.folder or not Path(options.folder).is_dir():
        print("no folder of instances: skipped")
        return
    heads = ("in time", "best known", "ours", "ratio", "bound", "gap", "wall s", "cpu s")
    print("  " + "".join(f"{h:>16}" for h in heads))
    ratios = []
    for letter, path, document, seconds in instances(options):
        _, in_time, known = CONTEST[letter]
        runs = [measured(path, document, seconds, seed) for seed in range(options.seeds)]
        # An answer that is missing counts as one without value.
        costs = [run.cost if run.cost is not None else float("inf") for run in runs]
        ours = statistics.median(costs)
        ratios.append(in_time / ours)
        bound = max(run.bound for run in runs)
        gap = 0.0 if any(r.proven for r in runs) else (ours - bound) / abs(ours)
        wall, cpu = max(r.wall for r in runs), max(r.cpu for r in runs)
        print(
            f"{letter} {in_time:>16}{known:>16}{ours:>16}{ratios[-1]:>16.5f}"
            f"{bound:>16.8g}{gap:>16.4%}{wall:>16.1f}{cpu:>16.1f}",
            flush=True,
        )
    if ratios:
        print(f"{len(ratios)} instances, mean ratio {statistics.mean(ratios):.5f}")


if __name__ == "__main__":
    main()
