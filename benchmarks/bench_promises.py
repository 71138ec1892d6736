"""What plans promise to hold and to send, beside what XLA's compilers make of them.

    make bench-promises                # every program: takes an hour or more; `make bench`, a few
    python -m benchmarks.bench_promises unseen llama       # a set (models, unseen) or programs
    python -m benchmarks.bench_promises --target v5e:2x4 --large mlp
    python -m benchmarks.bench_promises --small --count 99 # every plan of every small program
    python -m benchmarks.bench_promises --json out.json    # also as JSON; --resume keeps its rows
    python -m benchmarks.bench_promises --kept out/fronts  # the fronts kept there, promised anew
    make gpu-aot         # installs the compiler for h100; `pip install libtpu` that for TPUs

Of every front at least five plans are compiled: the fastest, that of the least memory, those that
recompute, and others in between. `peak` is arguments + outputs - aliased + temporaries of one
device; its error is compiled over promised, less one. Bytes on the wire are payloads by kind and
group; their error is the largest, by kind and group, as a share of all that is sent. Nothing runs,
and no device is needed. With `--cache` modules that were compiled before are not compiled again.
Products are XLA's own kernels then, or all are cuBLAS's with `--library`. An H100 on which XLA
tries them out has cuBLAS make large ones. So what a plan promises is counted here for products made
as they are compiled here.

TPUs hold small arrays in memory on the chip, which XLA leaves out of the temporaries: plans for
them are compiled with every array in the memory that is promised. Their compiler leaves holes
between arrays and says what it holds at a time, too: `held` is the error by that.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import TapestryError, TargetError
from tapestry_egg.pipeline.rehearse import simulate_devices
from tapestry_egg.quantities import BYTES

from . import programs

if TYPE_CHECKING:
    from tapestry_egg.machine import Target
    from tapestry_egg.plans.plan import Plan
    from tapestry_egg.runtime.compiled import CompiledPlan
    from tapestry_egg.tracing.trace import Program


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status, 1 where a program fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="sets (models, unseen) or programs (all)")
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--large", action="store_true", help="models at larger sizes")
    parser.add_argument("--small", action="store_true", help="all, at the sizes of bench_plans")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--resume", action="store_true", help="keep what the file has already")
    parser.add_argument("--kept", type=Path, help="keep fronts here, and take those that are here")
    parser.add_argument("--cache", type=Path, help="keep what was compiled here")
    parser.add_argument("--library", action="store_true", help="cuBLAS makes all products")
    parser.add_argument("--count", type=int, default=6, help="plans of a front to compile")
    parser.add_argument("--work", type=float, default=20.0, help="units of search for a front")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    simulate_devices(1)
    from jax.errors import JaxRuntimeError

    import tapestry_egg as te

    from .devices import devices_of

    try:
        devices = devices_of(options.target)
    except TargetError as missing:
        print(f"skipped: {missing}")
        return 0
    told: dict[str, Any] = {}
    if options.resume and options.json and options.json.exists():
        told = json.loads(options.json.read_text("utf-8"))["programs"]
    print(HEAD, flush=True)
    failed = False
    every = programs.run_ones() if options.small else programs.compiled_ones()
    for name in programs.wanted(options.names, every):
        if name not in told or "fails" in told[name]:
            try:
                sizes = programs.LARGE if options.large else programs.SIZES
                made = programs.small(name) if options.small else programs.described(name, sizes)
                traced = made.trace()
                front = front_of(name, traced, options.target, options.work, options.kept)
                machine = compiling(te.load_target(options.target), options.library)
                plans = recounted(chosen(front, options.count), traced, machine)
                told[name] = measured(plans, devices, options.cache, options.library)
            except (TapestryError, JaxRuntimeError) as error:  # or XLA cannot compile it
                told[name] = {"fails": str(error)}
        failed |= "fails" in told[name]
        print("\n".join(lines(name, told[name])), flush=True)
        if options.json:
            document = {"programs": told, "total": total(told)}
            options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    print()
    for key, value in total(told).items():
        print(f"{key}: {value}")
    return int(failed)


def front_of(name: str, traced: Program, target: str, work: float, kept: Path | None) -> list[Plan]:
    """The plans of a program's front; those kept before, with what the model says of them now."""
    import tapestry_egg as te
    from tapestry_egg.pipeline import Settings

    words = "-".join((name, target)).replace(":", "-")
    path = kept / f"{words}.json" if kept else None
    if path and path.exists():
        plans = te.load(path, certify=False)
        return recounted(list(plans), traced, te.load_target(target))
    front = te.optimize(traced, target, ("seconds", "peak_bytes"), settings=Settings(work=work))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        te.save(front, path)
    return list(front)


def compiling(machine: Target, library: bool) -> Target:
    """A machine whose products are made as they are compiled: all by the library, or none."""
    if machine.fusing is None:
        return machine
    made = 0 if library else None
    return replace(machine, fusing=replace(machine.fusing, library_bytes=made))


def recounted(plans: Sequence[Plan], traced: Program, machine: Target) -> list[Plan]:
    """Plans of a program with the costs that the model finds of them now on a machine."""
    from tapestry_egg.extract.certify.recount import Ground, Walk
    from tapestry_egg.schedule.of_plans import plan_schedule

    found = []
    for plan in plans:  # one that merges collectives has an order of its own
        ground = Ground(plan_schedule(plan.body, dict(plan.origin.feedback)), machine)
        found.append(replace(plan, costs=Walk(plan, ground).certificate().costs, program=traced))
    return found


def chosen(front: Sequence[Plan], count: int) -> list[Plan]:
    """Plans from one end of a front to the other, among them two that recompute if any do."""
    last = len(front) - 1
    places = {round(i * last / max(count - 1, 1)) for i in range(count)}
    again = [i for i, p in enumerate(front) if "recompute" in p.rules]
    if again:
        places |= {again[0], again[-1]}
    return [front[i] for i in sorted(places)]


def measured(
    plans: Sequence[Plan], devices: Sequence[Any], cache: Path | None, library: bool = False
) -> dict[str, Any]:
    """The rows of one program."""
    rows = []
    for plan in plans:
        compiled = compiled_as(plan, devices, cache, library)
        rows.append(
            {
                "plan": plan.name,
                "mesh": str(plan.mesh),
                "recomputes": "recompute" in plan.rules,
                "promised_peak": plan.costs.peak_bytes,
                **compiled,
            }
        )
    return {"rows": rows}


def compiled_as(
    plan: Plan, devices: Sequence[Any], cache: Path | None, library: bool = False
) -> dict[str, Any]:
    """Peak and payloads of a plan as compiled; looked up by its module where it was before."""
    import tapestry_egg as te
    from tapestry_egg.runtime import compare, hlo_stats

    run = te.compile(plan, devices)
    options = OPTIONS.get(devices[0].platform, {})
    path = None
    if cache:
        text = f"{run.lower().as_text()}{plan.compiler_options}{options or ''}"
        text += LIBRARY * library
        text += importlib.metadata.version("jaxlib")
        path = cache / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
        if path.exists():
            return dict(json.loads(path.read_text("utf-8")))
    executable, spaced = _executable(run, options, library)
    stats = hlo_stats(executable)
    sent = {f"{r.kind} {r.group}": r for r in compare(plan, stats).rows}
    found = {
        "peak": stats.peak_bytes,
        "arguments": stats.argument_bytes,
        "outputs": stats.output_bytes - stats.alias_bytes,
        "temporaries": stats.temp_bytes,
        "held": stats.reported_peak_bytes if options else None,
        "spaced": spaced,
        "promised_wire": {name: r.planned_bytes for name, r in sent.items()},
        "wire": {name: r.compiled_bytes for name, r in sent.items()},
    }
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), encoding="utf-8")
    return found


def _executable(run: CompiledPlan, options: dict[str, Any], library: bool) -> tuple[Any, bool]:
    """A plan as compiled, and whether products have cuBLAS's space in memory, of 4 MiB.

    Without a GPU to try them on, XLA makes products by Triton with tiles that it has not for all
    (the step of `models.vit` under plain `jax.jit`, too), and refuses.
    """
    from jax.errors import JaxRuntimeError

    plain = {**run.plan.compiler_options, LIBRARY: False}
    if library:
        return run.lower().compile(plain), False
    try:
        return run.lower().compile(options) if options else run.compile(), False
    except JaxRuntimeError as refused:
        if "output tile sizes" not in str(refused):
            raise
    return run.lower().compile(plain), True


#: With what XLA is to compile beside what a plan asks for, by JAX's name of the platform.
OPTIONS = {"tpu": {"xla_msa_enable": "false"}}
#: The option without which XLA for GPUs has products made by cuBLAS.
LIBRARY = "xla_gpu_enable_triton_gemm"

HEAD = f"{'program':28} {'plan':5} {'mesh':8} {'promised':>10} {'compiled':>10} {'peak':>7} wire"


def peak_error(row: dict[str, Any]) -> float:
    """Compiled over promised peak, less one."""
    return float(row["peak"] / row["promised_peak"] - 1.0)


def held_error(row: dict[str, Any]) -> float | None:
    """The same of what is held at a time, without holes, where the compiler says it."""
    return row["held"] / row["promised_peak"] - 1.0 if row.get("held") else None


def wire_error(row: dict[str, Any]) -> float:
    """The largest difference of a kind and group, as a share of all bytes promised."""
    promised, compiled = row["promised_wire"], row["wire"]
    off = [abs(compiled.get(k, 0) - promised.get(k, 0)) for k in {*promised, *compiled}]
    return max(off, default=0) / max(sum(promised.values()), 1)


def lines(name: str, told: dict[str, Any]) -> list[str]:
    """The rows of one program as text, under `HEAD`."""
    if "fails" in told:
        return [f"{name:28} fails: {told['fails'][:160]}"]
    found = []
    for row in told["rows"]:
        mark = "*" if row["recomputes"] else ""
        line = (
            f"{name:28} {row['plan'] + mark:5} {row['mesh']:8}"
            f" {BYTES.format(row['promised_peak']):>10} {BYTES.format(row['peak']):>10}"
            f" {peak_error(row):>+7.1%}"
        )
        off = wire_error(row)
        held = held_error(row)
        if row.get("spaced"):
            line += " (with cuBLAS's 4 MiB, not judged)"
        words = "" if held is None else f" held {held:+.1%}"
        found.append(f"{line} {'equal' if not off else f'{off:.1%}'}{words}")
    return found


def total(told: dict[str, Any]) -> dict[str, Any]:
    """Of all rows, and of each program: worst and median errors."""
    good = {n: t["rows"] for n, t in told.items() if t.get("rows")}
    found: dict[str, Any] = {}
    for name, rows in good.items():
        off = [abs(peak_error(r)) for r in rows if not r.get("spaced")]
        wire = max(map(wire_error, rows))
        peak = f"peak worst {max(off):.1%} median {statistics.median(off):.1%}, " if off else ""
        found[name] = f"{peak}wire {wire:.1%}"
    rows = [r for some in good.values() for r in some]
    if off := [abs(peak_error(r)) for r in rows if not r.get("spaced")]:
        found["peak"] = (
            f"worst {max(off):.1%}, median {statistics.median(off):.1%}, within 10 %: "
            f"{sum(x <= 0.1 for x in off)} of {len(off)}"
        )
        holds = [abs(x) for x in map(held_error, rows) if x is not None]
        if holds:
            found["held"] = (
                f"worst {max(holds):.1%}, median {statistics.median(holds):.1%}, within 10 %: "
                f"{sum(x <= 0.1 for x in holds)} of {len(holds)}"
            )
    if wires := [wire_error(r) for r in rows]:
        found["wire"] = f"worst {max(wires):.1%}, within 1 %: {sum(x <= 0.01 for x in wires)}"
    return found


if __name__ == "__main__":
    sys.exit(main())
