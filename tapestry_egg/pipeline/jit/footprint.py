"""Footprints: what a compiled plan needs of a device's memory, and which plan fits in the end.

Peaks follow a model of the compiler, and the compiled module may need more. Where a plan's peak
comes near the limit, the module is asked before it runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tapestry_egg.pipeline.settings import DANGER
from tapestry_egg.plans.plan import Plan
from tapestry_egg.quantities import BYTES
from tapestry_egg.runtime.compile import CompiledPlan, compile

if TYPE_CHECKING:
    import jax

# So many plans are compiled at most.
_TRIES = 4


def needed_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Bytes of one device that an executable needs; None where JAX does not say."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return int(
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


def compile_within(
    plans: Sequence[Plan],
    mesh: Any,
    limit: float | None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> CompiledPlan:
    """The first of the plans, best first, whose compiled module needs no more bytes than the limit.
    XLA is given the `options` besides those of the plan.

    Plans far below the limit are not asked. A plan that needs more is left for the next one that,
    if it exceeded its peak as much, would fit; after a few tries the one that needs the least is
    taken. Either way a warning says so, once.
    """

    def made_of(plan: Plan) -> CompiledPlan:
        made = compile(plan, mesh)
        return replace(made, more_options=options) if options else made

    best = made_of(plans[0])
    if limit is None or plans[0].costs.peak_bytes <= DANGER * limit:
        return best
    tried: list[tuple[int, CompiledPlan]] = []
    left = list(plans)
    while left and len(tried) < _TRIES:
        plan = left.pop(0)
        made = made_of(plan) if tried else best
        needed = needed_bytes(made.compile())
        if needed is None:
            return made
        tried.append((needed, made))
        if needed <= limit:
            break
        # What exceeds its peak by as much as this one did does not fit either.
        ratio = needed / max(plan.costs.peak_bytes, 1)
        fitting = [p for p in left if p.costs.peak_bytes * ratio <= limit]
        smaller = [p for p in left if p.costs.peak_bytes < plan.costs.peak_bytes]
        left = fitting or sorted(smaller, key=lambda p: p.costs.peak_bytes)[:1]
    needed, chosen = next(((n, c) for n, c in tried if n <= limit), min(tried, key=lambda t: t[0]))
    if len(tried) > 1 or needed > limit:
        warnings.warn(_told(tried[0], (needed, chosen), limit, len(tried)), stacklevel=4)
    return chosen


def _told(
    first: tuple[int, CompiledPlan], chosen: tuple[int, CompiledPlan], limit: float, tries: int
) -> str:
    def amount(n: float) -> str:
        return BYTES.format(n)

    plan = first[1].plan
    words = (
        f"plan {plan.name} of {plan.graph.name} was to need {amount(plan.costs.peak_bytes)} per "
        f"device, compiled it needs {amount(first[0])}, above the limit of {amount(limit)}: "
    )
    if chosen[0] <= limit:
        return words + f"plan {chosen[1].plan.name} runs, which needs {amount(chosen[0])}"
    return words + (
        f"of {tries} plans compiled none fits, and plan {chosen[1].plan.name} runs, which needs "
        f"the least, {amount(chosen[0])}"
    )
