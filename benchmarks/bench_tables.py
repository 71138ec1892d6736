"""Measured times against what costs say of them.

    python -m benchmarks.bench_tables                 # packaged tables, each row left out in turn
    python -m benchmarks.bench_tables FOLDER          # and every row of tables in a folder

A folder holds `xla_matmul_table.csv` (device, b, m, n, k, dtype, time_us) and
`xla_collective_table.csv` (device, op, groups, group_size, tensor_bytes, time_us); rows that the
package does not have are foretold by those that it has. `at best` is how near any time that never
falls with bytes comes to nine in ten of the same rows, having seen them.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import MOVING, collective_seconds, kernel_seconds
from tapestry_egg.machine.tables.collectives import collective_table
from tapestry_egg.machine.tables.gemm import Gemm
from tapestry_egg.machine.tables.lookup import TableError, table_errors
from tapestry_egg.machine.target import load_target

TARGETS = ("h100", "b200", "gb200", "gb300", "b300", "mi355x")
DEVICES = {"sm_90": "h100", "sm_100_B200": "b200", "sm_100_GB200": "gb200", "gfx950": "mi355x"}
DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}


def left_out(name: str) -> Sequence[TableError]:
    """Errors of a target's own tables; of products only where the table is its own device's."""
    target = load_target(f"{name}:1")
    own = target.matmuls if target.matmul_speed == 1.0 else None
    return table_errors(own, target.collectives)


def monotone_floor(series: Sequence[Sequence[float]], share: float = 0.9) -> float:
    """The least relative error within which functions that never fall, one for each series, can
    come to that share of all points, each having seen them: noise that no model can tell.

    Of one series the most points that one function reaches within e are found by going through them
    with the highest lower end t(1 - e) so far: the next may be reached where its t(1 + e) is above.
    """

    def reached(times: Sequence[float], e: float) -> int:
        best = {float("-inf"): 0}
        for t in times:
            for low, count in list(best.items()):
                if low <= t * (1 + e):
                    key = max(low, t * (1 - e))
                    best[key] = max(best.get(key, 0), count + 1)
        return max(best.values())

    low, high, points = 0.0, 1.0, sum(len(s) for s in series)
    for _ in range(30):
        e = (low + high) / 2
        enough = sum(reached(s, e) for s in series) >= share * points
        low, high = (low, e) if enough else (e, high)
    return high


def floors(name: str) -> Mapping[str, float]:
    """`monotone_floor` of the collectives of a target's table, by kind and dtype."""
    file = load_target(f"{name}:1").collectives
    groups: dict[str, list[list[float]]] = defaultdict(list)
    for s in collective_table(file).series if file else ():
        groups[f"{s.kind} {s.dtype}"].append(np.exp(s.log_seconds).tolist())
    return {what: monotone_floor(series) for what, series in groups.items()}


def products(file: Path) -> Iterator[tuple[str, str, float]]:
    """(target, dtypes, relative error) of every row of a file."""
    for row in _rows(file):
        operands, out = row["dtype"].split("->")
        lhs, rhs = operands.split("x")
        batch, m, n, k = (float(row[x]) for x in "bmnk")
        gemm = Gemm(batch, m, n, k, DTYPES[lhs], DTYPES[rhs], DTYPES[out])
        target = load_target(f"{DEVICES[row['device']]}:1")
        target = replace(target, sustained=())  # rows are of some milliseconds
        flops = 2.0 * batch * m * n * k
        found = kernel_seconds(flops, 0.0, gemm.dtype, target, True, gemm)
        yield target.name, row["dtype"], float(found) / float(row["time_us"]) * 1e6 - 1


def collectives(file: Path) -> Iterator[tuple[str, str, float]]:
    """(target, kind, relative error) of every row of a file, permutes apart."""
    for row in _rows(file):
        kind = row["op"].replace("-", "_")
        if kind not in MOVING:
            continue
        groups, group = int(row["groups"]), int(row["group_size"])
        devices = groups * group
        name = DEVICES.get(row["device"]) or ("b300" if devices <= 8 else "gb300")
        nbytes = float(row["tensor_bytes"]) / (group if kind == "all_gather" else 1)
        mesh, target = MeshShape(("x", "y"), (groups, group)), load_target(f"{name}:{devices}")
        found = collective_seconds(kind, nbytes, (1,), mesh, target)
        size = "" if float(row["tensor_bytes"]) >= 1 << 20 else ", below 1 MiB"
        yield name, kind + size, float(found) / float(row["time_us"]) * 1e6 - 1


def worst_median() -> float:
    """The largest median error, in per cent, of products on H100 and B200, rows left out."""
    found = [table_errors(load_target(f"{x}:1").matmuls, None) for x in ("h100", "b200")]
    return 100 * max(e.median for errors in found for e in errors)


def _rows(file: Path) -> Iterator[Mapping[str, str]]:
    with file.open() as lines:
        yield from csv.DictReader(x for x in lines if not x.startswith("#"))


def _show(
    title: str,
    rows: Sequence[tuple[str, str, int, float, float]],
    least: Mapping[tuple[str, str], float] | None = None,
) -> None:
    print(f"{title}\n{'target':8} {'times of':44} {'rows':>5} {'median':>7} {'90 %':>7}", end="")
    print("  at best" if least else "")
    for target, what, count, median, high in rows:
        print(f"{target:8} {what:44} {count:5} {median:7.1%} {high:7.1%}", end="")
        print(f" {least[target, what]:8.1%}" if least and (target, what) in least else "")


def main(arguments: Sequence[str]) -> None:
    own = [
        (name, e.what, e.rows, e.median, e.high) for name in TARGETS for e in left_out(name)
    ]  # fmt: skip
    least = {(name, what): e for name in TARGETS for what, e in floors(name).items()}
    _show("packaged tables, each row left out in turn", own, least)
    for folder in arguments:
        errors: dict[tuple[str, str], list[float]] = defaultdict(list)
        for read, name in ((products, "matmul"), (collectives, "collective")):
            for target, what, error in read(Path(folder) / f"xla_{name}_table.csv"):
                errors[target, what].append(abs(error))
        _show(
            f"\nevery row of {folder}",
            [
                (*key, len(e), float(np.median(e)), float(np.percentile(e, 90)))
                for key, e in sorted(errors.items())
            ],
        )


if __name__ == "__main__":
    main(sys.argv[1:])
