"""The demo: GPT-2's train step at full size planned for eight H100s; the same step, tiny, run.

Three plans of the tiny step run on eight virtual CPU devices, which give their numbers and their
collectives. Seconds, bytes and joules of both fronts are predictions for the target.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tapestry_egg.errors import TapestryError
from tapestry_egg.extract.front.notes import INTERRUPTED
from tapestry_egg.progress import Phase, Progress

if TYPE_CHECKING:
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.pipeline import Settings
    from tapestry_egg.plans.plan import Plan
    from tapestry_egg.tracing.trace import Program

TARGET = "h100:8"
DEVICES = 8
#: Half a million tokens a step.
FULL: Mapping[str, Any] = {"preset": "gpt2_small", "batch": 512}
FULL_EFFORT: Mapping[str, Any] = {"work": 20.0, "max_axes": 1}
#: What two processors compute within seconds. It fits on a device, so micro-batches are asked for.
TINY: Mapping[str, Any] = {"preset": "tiny", "layers": 2, "width": 128, "vocabulary": 1024,
                           "sequence": 64, "batch": 64}  # fmt: skip
TINY_EFFORT: Mapping[str, Any] = {"work": 2.0, "max_axes": 1, "micro_batches": (4,)}


def demo(out: Path, on_progress: Progress | None = None, sizes: Mapping[str, Any] = FULL) -> bool:
    """Run the main job end to end; writes graphs, fronts and a picture into `out`.

    `sizes` are the arguments of `models.gpt2.config` for the step that is planned and not run.
    Returns whether every plan that ran gave the original's numbers and planned collectives.
    Raises TapestryError when it is not run from a checkout, and KeyboardInterrupt after an
    interruption of a search, with what was found until then written.
    """

    from tapestry_egg.pipeline import Settings
    from tapestry_egg.runtime.measure.numerics import as_written, in_float64

    tell = on_progress or (lambda _: None)
    begin = time.perf_counter()
    gpt2 = _model()
    full, tiny = gpt2.config(**sizes), gpt2.config(**TINY)

    def planned(name: str, config: Any, effort: Mapping[str, Any]) -> tuple[Program, Front]:
        tokens = config.batch * config.sequence
        print(
            f"{name}: {config.layers} layers of width {config.width}, vocabulary "
            f"{config.vocabulary:,}, {config.batch} sequences of {config.sequence} ({tokens:,} "
            "tokens) a step"
        )
        args = gpt2.abstract(config, gpt2.PRETRAINING)
        return _planned(name, gpt2.pretrain, args, Settings(**effort), out, on_progress)

    out.mkdir(parents=True, exist_ok=True)
    _, front = planned("gpt2", full, FULL_EFFORT)
    print(f"picture: {front.plot(out / 'front.svg')}\n")
    program, front = planned("gpt2_tiny", tiny, TINY_EFFORT)
    print(
        "\nXLA computes 16-bit values in 32 bits on CPUs, so compiled peaks are up to twice the "
        "planned.\n"
    )
    arguments = gpt2.arguments(tiny, optimizer=gpt2.PRETRAINING)
    reference = in_float64(gpt2.pretrain, arguments)
    original = as_written(gpt2.pretrain, arguments)
    ok = True
    for plan in chosen(front):
        # Plans take over the buffers of their arguments.
        fresh = gpt2.arguments(tiny, optimizer=gpt2.PRETRAINING)
        ok &= _run(plan, fresh, reference, original, program.graph.output_names, tell)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    return ok


def _planned(
    name: str,
    step: Any,
    args: tuple[Any, ...],
    settings: Settings,
    out: Path,
    on_progress: Progress | None,
) -> tuple[Program, Front]:
    """Trace a step and print its front, both written into `out`."""
    from tapestry_egg.files.files import save
    from tapestry_egg.pipeline import optimize
    from tapestry_egg.tracing.trace import trace

    tell = on_progress or (lambda _: None)
    tell(Phase("trace", "", None, name))
    program = trace(step, *args, donate_argnums=(0, 1), name=name)
    tell(Phase("trace", f"{len(program.graph.operations)} operations", 1.0, name))
    save(program, out / f"{name}.json")
    front = optimize(program, TARGET, settings=settings, on_progress=on_progress)
    print(front)
    save(front, out / f"{name}.front.json")
    if INTERRUPTED in front.notes:
        front.plot(out / "front.svg")
        raise KeyboardInterrupt
    return program, front


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
