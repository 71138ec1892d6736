"""The demo: a GPT-2 train step in, its front for eight H100s out, three plans run and checked.

The plans run on eight virtual CPU devices, which give their numbers and their collectives; the
seconds, bytes and joules of the front are predictions for the target.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tapestry_egg.errors import TapestryError
from tapestry_egg.extract.front.notes import INTERRUPTED
from tapestry_egg.progress import Phase, Progress

if TYPE_CHECKING:
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.plans.plan import Plan

TARGET = "h100:8"
DEVICES = 8


def demo(out: Path, on_progress: Progress | None = None, preset: str = "demo") -> bool:
    """Run the main job end to end; writes the graph, the front and its picture into `out`.

    Returns whether every plan that ran gave the original's numbers and planned collectives.
    Raises TapestryError when it is not run from a checkout, and KeyboardInterrupt after an
    interruption of the search, with what was found until then written.
    """

    from tapestry_egg.files.files import save
    from tapestry_egg.pipeline import optimize
    from tapestry_egg.runtime.measure.numerics import as_written, in_float64
    from tapestry_egg.tracing.trace import trace

    tell = on_progress or (lambda _: None)
    begin = time.perf_counter()
    gpt2 = _model()
    config = gpt2.config(preset)
    args = gpt2.arguments(config)
    tell(Phase("trace", "", None, "gpt2"))
    program = trace(gpt2.step, *args, donate_argnums=(0, 1), name="gpt2")
    tell(Phase("trace", f"{len(program.graph.operations)} operations", 1.0, "gpt2"))
    out.mkdir(parents=True, exist_ok=True)
    save(program, out / "gpt2.json")
    front = optimize(program, TARGET, on_progress=on_progress)
    print(front)
    save(front, out / "gpt2.front.json")
    print(f"picture: {front.plot(out / 'front.svg')}\n")
    if INTERRUPTED in front.notes:
        raise KeyboardInterrupt
    reference = in_float64(gpt2.step, args)
    original = as_written(gpt2.step, args)
    ok = True
    for plan in chosen(front):
        ok &= _run(
            plan, gpt2.arguments(config), reference, original, program.graph.output_names, tell
        )
    print(f"{time.perf_counter() - begin:.0f} s in all")
    return ok


def chosen(front: Front) -> list[Plan]:
    """The fastest plan, the one of the smallest peak, and the knee between them."""
    plans = sorted(front.plans, key=lambda p: p.costs.seconds)
    if len(plans) < 3:
        return plans
    fast, small = plans[0], min(plans, key=lambda p: p.costs.peak_bytes)

    def distance(p: Plan) -> float:
        seconds = p.costs.seconds / fast.costs.seconds
        peak = p.costs.peak_bytes / small.costs.peak_bytes
        return float(np.hypot(seconds - 1.0, np.log(peak)))

    knee = min((p for p in plans if p not in (fast, small)), key=distance)
    return [fast, knee, small]


def _run(
    plan: Plan,
    args: tuple[Any, ...],
    reference: Sequence[np.ndarray],
    original: Sequence[np.ndarray],
    names: Sequence[str],
    tell: Progress,
) -> bool:
    """Compile and run one plan on virtual devices; print how it compares."""
    import jax

    from tapestry_egg.runtime.compile import compile
    from tapestry_egg.runtime.measure.compare import compare
    from tapestry_egg.runtime.measure.numerics import accuracy

    tell(Phase("lower", "", None, plan.name))
    step = compile(plan)
    executable = step.compile()
    tell(Phase("lower", f"{plan.mesh}", 1.0, plan.name))
    tell(Phase("run", f"{DEVICES} virtual devices", None, plan.name))
    outputs = [np.asarray(x) for x in jax.tree.leaves(step(*args))]
    tell(Phase("run", "", 1.0, plan.name))
    groups = ["loss" if n == "[2]" else "parameters and state" for n in names]
    checks = accuracy(reference, original, outputs, groups)
    comparison = compare(plan, executable)
    print(f"{plan.name} on {plan.mesh}: loss {float(outputs[-1]):.6f}")
    for check in checks:
        print(f"  {check}")
    print(comparison)
    print()
    return all(c.ok for c in checks) and comparison.equal


def _model() -> Any:
    """The GPT-2 program of the checkout that this package lies in."""
    from tapestry_egg.tracing.entry import import_file

    path = Path(__file__).resolve().parents[2] / "models" / "gpt2.py"
    if not path.exists():
        raise TapestryError(
            "the demo's program is not here",
            where=str(path),
            hint="Run the demo from a checkout of tapestry-egg: `make demo`.",
        )
    return import_file(path)
