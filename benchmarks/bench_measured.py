"""Training runs that others measured, beside what is predicted of them.

    python -m benchmarks.bench_measured DIRECTORY                    # all tables
    python -m benchmarks.bench_measured DIRECTORY --only ultrascale --workers 2

DIRECTORY holds the published measurements as CSV files; they are no part of this repository. Every
run is written as a JAX program (`measured/programs.py`), its layouts pinned as they were, and
planned; what the plan costs is the prediction. Predictions are kept in `--out`, one line each, and
made again when the code changes; so the benchmark goes on where it was stopped. Nothing is fitted
on training runs but one factor, on those of the 1B model, and only where a table says so.

* `ultrascale`: Llama-like 1B and 8B on 8 to 512 H100, data and tensor parallel, ZeRO 0 and 1.
* `korthikanti`: GPTs of 22B to 1T on A100; pipelines by formula around a stage's program.
* `mosaic`: GPTs of 125M to 70B on A100 and H100, fully sharded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from .measured import rows, tables
from .measured.predict import Prediction
from .measured.predictions import Predictions, predictions
from .measured.rows import Run

NAMES = ("ultrascale", "korthikanti", "mosaic")


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    made = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for k, name in enumerate(columns):
        made.add_column(name, justify="left" if k == 0 else "right")
    for line in lines:
        made.add_row(*line)
    return made


def ultrascale(
    runs: Sequence[Run], found: Predictions, launch: float, console: Console
) -> dict[str, Any]:
    """The tables of the H100 runs."""
    plain = tables.judged(runs, found, launch)
    host = tables.host_factor(plain)
    judged = tables.judged(runs, found, launch, host)
    console.print(
        f"{len(judged)} of {len(runs)} runs predicted; of 1B a factor on the host's time to "
        f"dispatch: {host:.3f}"
    )
    out: dict[str, Any] = {
        "runs": len(runs),
        "predicted": len(judged),
        "host factor": host,
    }
    lines = []
    for name in ("1B", "8B", "all", "all but 64 hosts"):
        for label, rows_ in (("as predicted", plain), ("factor on the host's", judged)):
            part = [
                r
                for r in rows_
                if name == "all" or name == r.run.group[0]
                or (name.startswith("all but") and r.run.group[1] != tables.SUSPECT)
            ]  # fmt: skip
            e = tables.errors(part)
            if e is not None:
                out[f"{name} {label}"] = tables.plain(e)
                shares = (percent(x) for x in (e.median, e.mean, e.ninetieth, e.bias))
                lines.append((f"{name}, {label}", str(e.count), *shares))
    columns = ("tokens per second", "runs", "median", "mean", "90th", "bias")
    console.print(table("", columns, lines))

    choices = tables.choices(judged)
    without = {c.group: c.correlation for c in tables.choices(plain)}
    out["groups"] = tables.plain(choices)
    out["rank correlation without factor"] = {" ".join(k): v for k, v in without.items()}
    lines = [
        (
            f"{c.group[0]}, {c.group[1]} hosts",
            f"{c.ran}/{c.count}",
            *("" if x is None else f"{x:.3f}" for x in (without.get(c.group), c.correlation)),
            "" if c.regret is None else f"{c.regret:.2f}",
            str(c.failed_before),
            c.chosen,
        )
        for c in choices
    ]
    columns = (
        *("group", "ran", "rank correlation without factor", "with the host's", "regret"),
        *("failed before", "chosen"),
    )
    console.print(table("", columns, lines))
    regrets = [c.regret for c in choices if c.regret and c.group[1] != tables.SUSPECT]
    if regrets:
        out["regret"] = {"median": median(regrets), "mean": mean(regrets), "worst": max(regrets)}
        console.print(
            f"regret, 512 devices apart: median {median(regrets):.2f}, mean {mean(regrets):.2f}, "
            f"worst {max(regrets):.2f}"
        )

    said = tables.fit(judged)
    out["fit"] = tables.plain(said)
    console.print(
        f"of {said.ran} runs that ran {said.said_to_fit} are said to fit; of {said.too_large} "
        f"failures above {rows.CAPACITY / 1e9:.0f} GB by formula {said.refused} are refused, of "
        f"{said.other_failures} others {said.other_refused}"
    )
    peak = tables.peaks(judged)
    if peak is not None:
        out["peak"] = tables.plain(peak)
        console.print(
            f"peak: median error {percent(peak.median)}, 90th {percent(peak.ninetieth)}, bias "
            f"{percent(peak.bias)}"
        )
    return out


def korthikanti(runs: Sequence[Run], found: Predictions, console: Console) -> dict[str, Any]:
    """Seconds per step of the eight runs, whose softmax was one kernel."""
    lines, sizes, out = [], [], {}
    for run in runs:
        made = found.get(run.key())
        if not isinstance(made, Prediction):
            continue
        stage = made.seconds - made.softmax_seconds + made.fused_softmax_seconds
        seconds = rows.pipelined(run, stage)
        error = seconds / run.seconds - 1
        sizes.append(abs(error))
        out[run.name] = {"measured": run.seconds, "predicted": seconds}
        lines.append((run.name, f"{run.seconds:.2f} s", f"{seconds:.2f} s", percent(error)))
    console.print(table("", ("Korthikanti", "measured", "predicted", "error"), lines))
    if sizes:
        out["error"] = {"mean": mean(sizes), "worst": max(sizes)}
        console.print(f"mean {percent(mean(sizes))}, worst {percent(max(sizes))}")
    return out


def mosaic(
    runs: Sequence[Run], found: Predictions, launch: float, console: Console
) -> dict[str, Any]:
    """Seconds of Mosaic's steps; PyTorch's FSDP gathers and sums beside products, as far as these
    last."""
    lines, out = [], {}
    each: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        made = found.get(run.key())
        if not isinstance(made, Prediction):
            continue
        working = tables.with_attention(run, made)
        beside = max(working - made.data_seconds, made.data_seconds)
        host = (made.dispatches + made.collectives) * launch
        seconds = max(beside, host)
        error = seconds / run.seconds - 1
        for group in (run.group, (run.group[0], "all")):
            each.setdefault(group, []).append(error)
        out[run.name] = {"measured": run.seconds, "predicted": seconds, "devices": beside}
        shares = (percent(s / run.seconds - 1) for s in (seconds, working))
        times = (f"{s:.2f} s" for s in (run.seconds, seconds, beside, host))
        lines.append((f"{run.group[0]} {run.name}", *times, *shares))
    columns = ("run", "measured", "predicted", "devices", "host", "error", "nothing beside")
    console.print(table("", columns, lines))
    for (chip, devices), errors in sorted(each.items()):
        sizes = sorted(map(abs, errors))
        told = {"runs": len(sizes), "median": median(sizes), "bias": median(errors)}
        out[f"{chip} {devices}"] = told
        console.print(
            f"{chip}, {devices} devices: {len(sizes)} runs, median error {percent(told['median'])},"
            f" bias {percent(told['bias'])}, worst {percent(sizes[-1])}"
        )
    return out


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="of the CSV files")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--out", type=Path, default=Path("out/measured"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the tables to this file")
    options = parser.parse_args(words)
    console = Console()
    known: dict[str, Sequence[Run]] = {
        "ultrascale": list(rows.ultrascale(options.directory)),
        "korthikanti": list(rows.korthikanti(options.directory)),
        "mosaic": list(rows.mosaic(options.directory)),
    }
    status, out = 0, {}
    for name in options.only:
        runs = known[name]
        with console.status(f"{name}: predicting") as line:

            def tell(done: int, of: int, name: str = name, line: Any = line) -> None:
                line.update(f"{name}: {done} of {of} predicted")

            file = options.out / f"{name}.jsonl"
            found = predictions(runs, file, workers=options.workers, tell=tell)
        for key, made in found.items():
            if isinstance(made, str):
                console.print(f"{name}: {key.rsplit(')|', 1)[-1]}: {made}", style="red")
                status = 1
        console.rule(name, align="left")
        if name == "ultrascale":
            launch = rows.launch_seconds(options.directory)
            out[name] = ultrascale(runs, found, launch, console)
        elif name == "korthikanti":
            out[name] = korthikanti(runs, found, console)
        else:
            launch = rows.launch_seconds(options.directory)
            out[name] = mosaic(runs, found, launch, console)
    if options.json:
        options.json.write_text(json.dumps(out, indent=1), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
