"""Extraction: from a snapshot to the Pareto front of plans, with a bound for every point."""

from __future__ import annotations

if __name__ != "tapestry_egg.extract":
    raise ImportError("extract/ is the package tapestry_egg.extract; import it by that name")

from tapestry_egg.extract.front.front import Front as Front
