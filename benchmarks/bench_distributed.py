"""Two processes of four CPU devices, one of them slowed: do they end with one plan, and right?

    python -m benchmarks.bench_distributed [RUNS]

Every run is a job of its own with other objectives, limits and widths; process 0 or 1 is slowed.
Each is then started again on the same cache, and must not search.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

from tests.runtime.distributed_job import run_job

_OBJECTIVES = ("seconds", "peak_bytes", "joules", "wire_bytes")
_LIMITS: tuple[dict[str, Any], ...] = (
    {},
    {"peak_bytes": "96KiB"},
    {"seconds": 1.0, "peak_bytes": "1MiB"},
    {"wire_bytes": 1e6},
    {"joules": 1e3},
)


def main(runs: int) -> int:
    """Run the jobs; returns how many went wrong."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="jobs-of-two-") as folder:
        env = {"TAPESTRY_EGG_PLAN_CACHE": folder}
        for k in range(runs):
            for again in (False, True):
                asked = {
                    "minimize": _OBJECTIVES[k % len(_OBJECTIVES)],
                    "limits": _LIMITS[k % len(_LIMITS)],
                    "width": 32 + 32 * (k % 3),
                }
                slowed = {**asked, "sleep": 1.0 + k % 3, "nice": 15}
                pair = (slowed, asked) if k % 2 else (asked, slowed)
                began = time.monotonic()
                ended = run_job("train", *pair, env=env)
                plans = {e.told.get("plan") for e in ended}
                right = [e.code == 0 and all(e.told.get("right", [False])) for e in ended]
                searches = [e.told.get("searches", 0) for e in ended]
                most = 0 if again else 1
                good = len(plans) == 1 and all(right) and sum(searches) == most
                wrong += not good
                print(
                    f"{'again' if again else 'fresh'} {k:2}  {'good' if good else 'WRONG'}  "
                    f"{len(plans)} plan {str(min(map(str, plans)))[:8]}  right {right}  "
                    f"searches {searches}  {time.monotonic() - began:.0f} s  "
                    f"{asked['minimize']} {asked['limits']}",
                    flush=True,
                )
                if not good:
                    print("\n".join(e.text[-2000:] for e in ended), flush=True)
    print(f"{wrong} of {2 * runs} went wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)))
