"""What plans promise beside what XLA's compilers make of them: wire bytes and peaks.

    python -m benchmarks.bench_promises --target v5e:2x4          # needs `pip install libtpu`
    python -m benchmarks.bench_promises --target h100:8           # needs `make gpu-aot`
    python -m benchmarks.bench_promises --programs mlp,llama --plans 5 --minutes 4
    python -m benchmarks.bench_promises --table                   # of what was compiled so far

Programs are those of `models/` at sizes where memory matters. Of each program's front some plans,
from one end to the other and one that recomputes among them, are compiled ahead of time; nothing
runs and no device is needed. The folder `--out` keeps fronts and one line of JSON for each plan
compiled: what is there is not done again, so the benchmark goes on where it was stopped.

Wire bytes are per device and step, by bandwidth-optimal collectives, kind by kind and group by
group. The compiled peak is arguments + outputs - aliased + temporaries.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import TapestryError
from tapestry_egg.pipeline.rehearse import simulate_devices
from tapestry_egg.quantities import BYTES

if TYPE_CHECKING:
    from tapestry_egg.pipeline import Front
    from tapestry_egg.plans.plan import Plan

#: Arguments of `models.<name>.example`, where its own sizes would fit into a cache.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "convnet": {"batch": 512, "size": 64, "channels": 64},
    "decode": {"batch": 64, "prompt": 128, "width": 1024, "heads": 8, "groups": 8, "hidden": 4096},
    "gpt2": {"preset": "demo"},
    "graph_network": {"nodes": 8192, "edges": 65536, "features": 128, "width": 512},
    "llama": {
        "batch": 16, "sequence": 1024, "vocabulary": 8192,
        "layers": 4, "width": 1024, "heads": 8, "groups": 8, "hidden": 4096,
    },
    "lora": {"batch": 64, "sequence": 512, "vocabulary": 8192, "rank": 8, "width": 512},
    "mlp": {"widths": (4096, 8192, 8192, 4096), "batch": 8192},
    "moe": {"batch": 64, "tokens": 512, "width": 1024, "hidden": 4096},
    "nnx_gpt2": {"batch": 64, "sequence": 512, "vocabulary": 8192, "width": 512},
    "ragged_moe": {"batch": 64, "tokens": 512, "width": 512, "hidden": 2048},
    "recurrent": {"batch": 1024, "time": 64, "inputs": 256, "hidden": 1024},
    "resnet": {"batch": 1024, "size": 64},
    "sorting": {"batch": 4096, "length": 512, "channels": 64},
    "state_space": {"batch": 256, "time": 257, "inputs": 64, "width": 512, "states": 64},
    "vit": {"batch": 256, "size": 128, "width": 512},
    "while_loop": {"batch": 16384, "inputs": 512, "width": 2048, "outputs": 512},
}  # fmt: skip

#: Bars: wire bytes of a kind and group may be off by this share, and so may the peak.
WIRE, PEAK, PEAK_MEDIAN = 0.01, 0.10, 0.04


def program(name: str) -> Any:
    """A program of `SIZES`, traced; its state donated."""
    import jax

    from tapestry_egg.tracing.trace import trace

    fn, args = importlib.import_module(f"models.{name}").example(**SIZES[name])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, args
    )
    return trace(fn, *shapes, **({} if hasattr(fn, "trace") else {"donate_argnums": (0,)}))


def front_of(name: str, target: str, work: float, folder: Path) -> Front:
    """The front of a program, from the folder where it was searched before."""
    from tapestry_egg.files.files import load, save
    from tapestry_egg.pipeline import Front, Settings, optimize

    path = folder / f"{name}.front.json.gz"
    if path.exists():
        found = load(path)
        assert isinstance(found, Front)
        return found
    found = optimize(program(name), target, settings=Settings(work=work))
    save(found, path)
    return found


def chosen(front: Front, count: int) -> list[Plan]:
    """At most `count` plans from one end of a front to the other, one that recomputes among them
    where there is one."""
    last = len(front) - 1
    places = {round(i * last / max(count - 1, 1)) for i in range(count)}
    again = [k for k, plan in enumerate(front) if any(s.numbers for s in plan.steps)]
    if again and not places & set(again):
        places = {0, last, again[len(again) // 2], *sorted(places)[1 : count - 2]}
    return [front[k] for k in sorted(places)]


def measured(plan: Plan, devices: Sequence[Any]) -> dict[str, Any]:
    """One line: the plan's promises and what its executable moves and holds."""
    import tapestry_egg as te
    from tapestry_egg.plans.collectives import wire_bytes
    from tapestry_egg.runtime import compare, hlo_stats

    begin = time.process_time()
    stats = hlo_stats(te.compile(plan, devices).compile())
    rows = compare(plan, stats).rows
    return {
        "plan": plan.name,
        "mesh": str(plan.mesh),
        "recomputes": any(s.numbers for s in plan.steps),
        "planned_peak": plan.costs.peak_bytes,
        "compiled_peak": stats.peak_bytes,
        "arguments": stats.argument_bytes,
        "outputs": stats.output_bytes,
        "aliased": stats.alias_bytes,
        "temporaries": stats.temp_bytes,
        "reported_peak": stats.reported_peak_bytes,
        "wire": [
            [
                row.kind,
                row.group,
                wire_bytes(row.kind, row.planned_bytes, row.group),
                wire_bytes(row.kind, row.compiled_bytes, row.group),
            ]
            for row in rows
        ],
        "warnings": list(stats.warnings),
        "cpu_seconds": round(time.process_time() - begin, 1),
    }


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The plans compiled before."""
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            yield json.loads(line)


def wire_errors(row: Mapping[str, Any]) -> list[float]:
    """By kind and group, how far compiled wire bytes are from planned ones, as a share of these."""
    return [
        abs(compiled - planned) / planned if planned else float("inf")
        for _, _, planned, compiled in row["wire"]
        if planned != compiled
    ]


def wire_error(row: Mapping[str, Any]) -> float:
    """Bytes moved otherwise than planned, over all kinds and groups, as a share of all planned."""
    off = sum(abs(compiled - planned) for _, _, planned, compiled in row["wire"])
    return off / max(sum(planned for _, _, planned, _ in row["wire"]), 1.0)


def peak_error(row: Mapping[str, Any]) -> float:
    """Compiled over planned peak, less one: above zero the plan promised too little."""
    return float(row["compiled_peak"] / row["planned_peak"] - 1.0)


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line for each plan, and how many are within the bars."""
    head = (
        f"{'program':15} {'plan':6} {'mesh':10} {'planned':>10} {'compiled':>10} {'peak':>7} "
        f"{'wire':>7}  kinds and groups off by more than {WIRE:.0%}"
    )
    out, peaks, wires = [head], [], []
    for row in rows:
        peaks.append(peak_error(row))
        wires.append(max(wire_errors(row), default=0.0))
        off = [
            f"{kind}×{group} {planned / 2**20:.3g} -> {compiled / 2**20:.3g} MiB"
            for kind, group, planned, compiled in row["wire"]
            if abs(compiled - planned) > WIRE * planned
        ]
        out.append(
            f"{row['program']:15} {row['plan'] + ('r' if row['recomputes'] else ''):6}"
            f" {row['mesh']:10} {BYTES.format(row['planned_peak']):>10}"
            f" {BYTES.format(row['compiled_peak']):>10} {peaks[-1]:>+7.1%} {wire_error(row):>7.1%}"
            f"  {', '.join(off)}"
        )
    if peaks:
        out.append(
            f"{len(peaks)} plans: peak within {PEAK:.0%} of {sum(abs(p) <= PEAK for p in peaks)},"
            f" median {median(map(abs, peaks)):.1%} (bar {PEAK_MEDIAN:.0%}), worst"
            f" {max(peaks, key=abs):+.1%}; wire bytes of every kind and group within {WIRE:.0%} of"
            f" {sum(w <= WIRE for w in wires)}"
        )
    return "\n".join(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what is missing, print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_promises")
    parser.add_argument("--target", default="v5e:2x4")
    parser.add_argument("--programs", default=",".join(SIZES))
    parser.add_argument("--plans", type=int, default=5, help="of each front")
    parser.add_argument("--work", type=float, default=30.0, help="of each search")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after")
    parser.add_argument("--out", type=Path, default=Path("out/promises"))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    simulate_devices(1)
    from benchmarks.bench_strategies import devices_of

    folder = options.out / options.target.replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    status, rows = 0, []
    for name in options.programs.split(","):
        path = folder / f"{name}.jsonl"
        known = {row["plan"]: row for row in lines(path)}
        if not options.table and time.monotonic() < end:
            try:
                devices = devices_of(options.target)
                front = front_of(name, options.target, options.work, folder)
                for plan in chosen(front, options.plans):
                    if plan.name not in known and time.monotonic() < end:
                        known[plan.name] = {"program": name, **measured(plan, devices)}
                        with path.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(known[plan.name]) + "\n")
            except (TapestryError, RuntimeError) as error:  # XLA's: too large for the device
                print(f"{name}: {str(error)[:300]}", file=sys.stderr)
                status = 1
        rows += list(known.values())
    print(table(rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
