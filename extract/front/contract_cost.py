"""What a named mesh costs: the fastest plan within the contract against the fastest without it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapestry_egg.extract.choices.unit_choices import UnitChoices
from tapestry_egg.extract.engine.archive import Archive
from tapestry_egg.extract.engine.search import Search
from tapestry_egg.extract.front.sizes import Room
from tapestry_egg.extract.problem.assemble import assemble
from tapestry_egg.machine.mesh_contract import MeshContract
from tapestry_egg.quantities import TIME

# With more rows to choose from than these the search for the other plan would take too long, and
# the note says that instead. No measurement of the number is kept.
_ROWS = 60_000
# What is good enough for the search.
_GAP = 0.004
# A difference below this share of the seconds is none.
_SLIGHT = 1e-3


def contract_cost(
    free: Sequence[UnitChoices], bound: Sequence[Archive], contract: MeshContract
) -> str:
    """How much longer the fastest plan takes because the boundary is laid out by the user's axes.

    `free` are the choices without that, `bound` what was found with it for the same form of the
    program. Pins hold in both. Where there is too much to choose from, the words say that; empty
    where nothing was found.
    """
    within = min((c.seconds for a in bound for c in a.candidates), default=np.inf)
    if not np.isfinite(within):
        return ""
    room = Room()
    kept = [room.keeping(s) for s in free]
    if any(k is None for k in kept):
        return f"The cost of the mesh {contract} is not known: without it tables are too large."
    problems = [
        assemble(s, once=room.once, keeping=k).problem for s, k in zip(free, kept, strict=True)
    ]
    rows = sum(len(v) for p in problems for v in p.variables)
    if rows > _ROWS:
        return (
            f"The cost of the mesh {contract} is not known: without it there are {rows} rows to "
            f"choose from, more than {_ROWS}."
        )
    least, proven = np.inf, np.inf
    for problem in problems:
        search = Search(problem, _GAP)
        search.fastest()
        least = min(least, *(c.seconds for c in search.archive.candidates))
        proven = min(proven, search.archive.bound(np.inf, np.inf))
    least = min(least, within)
    share = within / least - 1.0 if least > 0 else 0.0
    most = within / proven - 1.0 if proven > 0 else np.inf
    if share < _SLIGHT:
        found = f"The mesh {contract} costs no time"
        return f"{found}: at most {100 * most:.1f} %." if _SLIGHT <= most < np.inf else f"{found}."
    return (
        f"The mesh {contract} costs {100 * share:.1f} %: {TIME.format(within)} instead of "
        f"{TIME.format(least)} with free layouts at the boundary"
        + (f" (at least {TIME.format(proven)})." if proven > 0 else ".")
    )
