"""Measured joules of training steps on 16 V100 at locked clocks, against the energy of `v100`.

    python -m benchmarks.bench_energy energy_v100.csv

The file has a row per run: layout, shapes, clock, seconds and joules per step. The work of a step
follows from its shapes; joules are judged for the measured seconds, what a device draws, and for
predicted ones. Nothing is fitted here. Left out are rows without a locked clock, and those
of several nodes.
"""

from __future__ import annotations

import csv
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from tapestry_egg.machine.energy import dynamic_joules, idle_joules
from tapestry_egg.machine.target import Target, load_target

VOCABULARY = 152_064  # Qwen2.5 7B


@dataclass(frozen=True)
class Work:
    """What one device does in a step: flops, bytes of memory and bytes sent, in all and without
    those that products read their weights by; and the share of a step that it waits for others."""

    flops: float
    hbm_bytes: float
    beside_bytes: float
    wire_bytes: float
    bubble: float


def work(row: dict[str, str]) -> Work:
    """The work of one step by a row's shapes.

    Flops are those of Narayanan et al. (SC21) with full recomputation: four forward passes of each
    layer, three of the vocabulary. Memory traffic: weights read once a pass and micro-batch, some
    34 bytes per token and hidden unit of activations (Korthikanti et al.) written and read in each
    of four passes, an optimizer step of 30 bytes per own weight. Sent: four all-reduces of
    activations a layer and pass that has them, and the gradients'. Kernels run but for the bubble
    of the pipeline.
    """
    n = {k: int(row[k]) for k in ("dp", "tp", "pp", "layers", "hidden", "ffn", "seq", "mbs", "gbs")}
    heads, kv = int(row["heads"]), int(row["kv_heads"])
    devices = n["dp"] * n["tp"] * n["pp"]
    h, s = n["hidden"], n["seq"]
    weights = h * (2 * h + 2 * h * kv // heads) + 3 * h * n["ffn"]
    tokens = n["gbs"] * s
    layer = 2 * tokens * weights + 4 * n["gbs"] * s * s * h
    flops = (4 * n["layers"] * layer + 3 * 2 * tokens * h * VOCABULARY) / devices
    micro = n["gbs"] // (n["dp"] * n["mbs"])
    own = n["layers"] * weights / (n["tp"] * n["pp"])
    local = n["mbs"] * s * h * micro * n["layers"] / n["pp"]
    beside = 4 * 2 * 34 * local / n["tp"] + 30 * own
    reduces = 6 * 2 * (n["tp"] - 1) / n["tp"] * 2 * local
    wire = reduces + 2 * (n["dp"] - 1) / n["dp"] * 2 * own
    bubble = (n["pp"] - 1) / (micro + n["pp"] - 1)
    return Work(flops, 4 * 2 * own * micro + beside, beside, wire, bubble)


def machine(row: dict[str, str]) -> Target:
    """The row's GPUs at its clock."""
    devices = int(row["dp"]) * int(row["tp"]) * int(row["pp"])
    return load_target(f"v100:{devices}").at_clock(float(row["clock_mhz"]))


def predicted_seconds(row: dict[str, str]) -> float:
    """Seconds of one step: products at their sustained rate, other traffic and what is sent, one
    after another, and the bubble."""
    target, done = machine(row), work(row)
    busy = done.flops / target.rate(row["precision_name"], True)
    busy += done.beside_bytes / target.hbm_bytes_per_second
    busy += done.wire_bytes / target.levels[0].bytes_per_second
    return busy / (1 - done.bubble)


def predicted(row: dict[str, str], seconds: float) -> float:
    """Joules of one step over all GPUs that takes so many seconds."""
    target, done = machine(row), work(row)
    spent = dynamic_joules(
        done.flops,
        done.hbm_bytes,
        done.wire_bytes,
        seconds * (1 - done.bubble),
        target.devices,
        target,
        row["precision_name"],
    )
    return float(spent + idle_joules(seconds, target.devices, target))


def main(path: Path) -> None:
    """Print measured and predicted joules of every clean row, and the errors' mean and worst."""
    lines = [x for x in path.read_text("utf-8").splitlines() if not x.startswith("#")]
    clean = {"world": "16", "gpus_metered": "16", "gbs": "16", "nodes": "1"}
    errors, both = [], []
    print(
        f"{'layout':18} {'MHz':>5} {'seconds':>8} {'watts':>7} {'joules':>9} {'predicted':>9} error"
        "  seconds  joules by both"
    )
    for row in csv.DictReader(lines):
        if any(row[k] != v for k, v in clean.items()) or not row["clock_mhz"].isdigit():
            continue
        row["precision_name"] = {"bf16": "bfloat16", "fp16": "float16"}[row["precision"]]
        true, found = (
            float(row["energy_j_per_step_metered"]),
            predicted(row, float(row["step_s"])),
        )
        errors.append(found / true - 1)
        seconds = predicted_seconds(row)
        both.append(predicted(row, seconds) / true - 1)
        layout = f"tp{row['tp']} pp{row['pp']} dp{row['dp']}"
        watts = float(row["avg_power_w_metered"])
        print(
            f"{layout:18} {row['clock_mhz']:>5} {row['step_s']:>8} {watts:7.0f} {true:9.0f} "
            f"{found:9.0f} {errors[-1]:+6.1%} {seconds:8.1f} {both[-1]:+6.1%}"
        )
    for name, found_ in (("measured", errors), ("predicted", both)):
        size = [abs(e) for e in found_]
        print(
            f"{len(size)} rows, {name} seconds: mean error {statistics.mean(size):.1%}, median "
            f"{statistics.median(size):.1%}, worst {max(size):.1%}, mean of signed "
            f"{statistics.mean(found_):+.1%}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
