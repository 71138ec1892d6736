"""Measured times against what costs say of them.

    python -m benchmarks.bench_tables                 # packaged tables, each row left out in turn

`at best` is how near any time that never
falls with bytes comes to nine in ten of the same rows, having seen them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tapestry_egg.machine.tables.collectives import collective_table
from tapestry_egg.machine.tables.lookup import TableError, table_errors
from tapestry_egg.machine.target import load_target

TARGETS = ("h100", "b200", "gb200", "gb300", "b300", "mi355x")


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


def worst_median() -> float:
    """The largest median error, in per cent, of products on H100 and B200, rows left out."""
    found = [table_errors(load_target(f"{x}:1").matmuls, None) for x in ("h100", "b200")]
    return 100 * max(e.median for errors in found for e in errors)


def main() -> None:
    least = {(name, what): e for name in TARGETS for what, e in floors(name).items()}
    print(f"{'target':8} {'times of':44} {'rows':>5} {'median':>7} {'90 %':>7}  at best")
    for name in TARGETS:
        for e in left_out(name):
            row = f"{name:8} {e.what:44} {e.rows:5} {e.median:7.1%} {e.high:7.1%}"
            floor = least.get((name, e.what))
            print(row if floor is None else f"{row} {floor:8.1%}")


if __name__ == "__main__":
    main()
