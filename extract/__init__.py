"""Extraction: from what saturation found to the front of plans, with a bound for every point.

In: strategies. Out: a front. Its folders in order: `choices`, `problem`, `engine`, `certify`,
`front`; `gym` is extraction on its own, for the problems that others publish. To print what each
makes: `front.stages["choices"]`, `["problems"]`, `["results"]` and `["front"]`.
"""

from __future__ import annotations

if __name__ != "tapestry_egg.extract":
    raise ImportError("extract/ is the package tapestry_egg.extract; import it by that name")

from tapestry_egg.extract.front.front import Front as Front
