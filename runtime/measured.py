"""Run a compiled plan under JAX's profiler, and tell its time beside what was planned."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from tapestry_egg.errors import TapestryError
from tapestry_egg.extract.certify.cost_parts import cost_parts
from tapestry_egg.plans.compiler_options import GPUS
from tapestry_egg.runtime.compiled import CompiledPlan
from tapestry_egg.runtime.measure.measurement import Measurement, profiled, rows_of
from tapestry_egg.scratch import scratch

#: XLA for GPUs then launches every kernel by itself, and the profiler says whose it is.
_NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}


def measure(run: CompiledPlan, *args: Any, steps: int = 5, **kwargs: Any) -> Measurement:
    """The device time of a plan by kernel and collective, from JAX's profiler, beside the plan.

    `run` is what `te.compile` returns, the arguments are those of a call; each of `steps` calls
    gets copies of them, so that donated ones can be given again. Works on CPU devices; those of
    GPUs and TPUs are read by the lines of operations that the profiler records for them. GPUs run
    many kernels as one graph, of which the profiler does not say what is of which operation: there
    the clock tells of the plan as it is, the profile of the plan compiled again without graphs.
    Other profiles must not be recorded at the same time. Raises TapestryError for what is no
    compiled plan, and where the profile holds nothing of it.
    """
    import jax

    if not isinstance(run, CompiledPlan) or steps < 1:
        raise TapestryError(
            f"{run!r:.60} in {steps} steps cannot be measured",
            where="measure",
            hint="Give what te.compile returns, its arguments, and at least one step.",
        )
    parts = cost_parts(run.plan)

    def copied() -> tuple[tuple[Any, ...], dict[str, Any]]:
        given: tuple[tuple[Any, ...], dict[str, Any]] = jax.tree.map(
            lambda x: x.copy() if isinstance(x, jax.Array) else x, (args, kwargs)
        )
        return given

    def timed(run: CompiledPlan) -> list[float]:
        took = []
        for _ in range(steps):
            once, more = jax.block_until_ready(copied())
            begin = time.perf_counter()
            jax.block_until_ready(run(*once, **more))
            took.append(time.perf_counter() - begin)
        return took

    def first(run: CompiledPlan) -> CompiledPlan:
        once, more = copied()
        jax.block_until_ready(run(*once, **more))  # compiled and placed
        return run

    shown, took = first(run), []
    if run.mesh.devices.flat[0].platform in GPUS:
        took, shown = timed(run), first(replace(run, more_options=_NO_GRAPHS))
    with scratch() as folder:
        with jax.profiler.trace(str(folder)):
            recorded = timed(shown)
        found = profiled(folder, shown.compile().as_text() or "", steps)
    plan = run.plan
    return Measurement(
        plan=plan.name,
        graph=plan.graph.name,
        target=plan.target,
        device=run.mesh.devices.flat[0].device_kind,
        steps=steps,
        step_seconds=statistics.median(took or recorded),
        planned_seconds=plan.costs.seconds,
        rows=rows_of(plan, parts, found),
        instructions=found,
    )
