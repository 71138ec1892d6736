"""What plans promise to hold and to send, beside what the ledger counts in their programs.

    python -m benchmarks.bench_ledger                 # every program of models and unseen, an hour
    python -m benchmarks.bench_ledger unseen llama    # a set (models, unseen) or programs
    python -m benchmarks.bench_ledger --small         # all, at the sizes of bench_plans
    python -m benchmarks.bench_ledger --kept FOLDER   # the fronts kept there, others put there

Every plan of every front is emitted for its target and counted (`runtime/ledger/`); no device and
no compiler is needed. `peak` is counted over promised, less one. Bytes on the wire are by kind and
mesh axes. A plan that the ledger refuses is marked, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tapestry_egg.errors import PlanError, TapestryError
from tapestry_egg.quantities import BYTES

from . import programs
from .bench_promises import front_of

if TYPE_CHECKING:
    from tapestry_egg.plans.plan import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status, 1 where the ledger refuses a plan."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="sets (models, unseen) or programs (all)")
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--small", action="store_true", help="all, at the sizes of bench_plans")
    parser.add_argument("--kept", type=Path, help="keep fronts here, and take those that are here")
    parser.add_argument("--work", type=float, default=2.0, help="units of search for a front")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    every = programs.run_ones() if options.small else programs.compiled_ones()
    print(f"{'program':28} {'plan':5} {'mesh':10} {'promised':>10} {'counted':>10} {'peak':>7}")
    off, refused = [], 0
    for name in programs.wanted(options.names, every):
        made = programs.small(name) if options.small else programs.described(name, programs.SIZES)
        try:
            plans = front_of(name, made.trace(), options.target, options.work, options.kept)
        except TapestryError as error:
            print(f"{name:28} fails: {error!s:.120}")
            continue
        for plan in plans:
            counted, why = recounted(plan)
            off.append(counted / plan.costs.peak_bytes - 1.0)
            refused += bool(why)
            amounts = (BYTES.format(n) for n in (plan.costs.peak_bytes, counted))
            row = " ".join(f"{x:>10}" for x in amounts)
            print(f"{name:28} {plan.name:5} {plan.mesh!s:10} {row} {off[-1]:>+7.1%} {why}".rstrip())
    within = sum(abs(x) <= 0.1 for x in off)
    print(f"\nwithin 10 %: {within} of {len(off)}; least {min(off, default=0.0):+.1%}, ", end="")
    print(f"most {max(off, default=0.0):+.1%}; refused: {refused}")
    return int(refused > 0)


def recounted(plan: Plan) -> tuple[int, str]:
    """Bytes that the ledger counts at the peak, and why it refuses the plan, if it does."""
    from tapestry_egg.runtime.emitted import emitted
    from tapestry_egg.runtime.ledger.check import check, held_by

    program = emitted(plan)
    try:
        check(plan, program)
    except PlanError as error:
        return held_by(plan, program), f"refused: {error.what}"
    return held_by(plan, program), ""


if __name__ == "__main__":
    sys.exit(main())
