"""Running a plan: lower it to one `shard_map`, compile, and compare with what XLA made of it."""

from __future__ import annotations

if __name__ != "tapestry_egg.runtime":
    raise ImportError("runtime/ is the package tapestry_egg.runtime; import it by that name")
