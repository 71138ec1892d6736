"""GPT-2's train step at full size planned for eight H100s; the same step, tiny, run.

Three plans of the tiny step run on eight simulated CPU devices, which give their numbers and their
collectives. Seconds, bytes and joules of both fronts are predictions for the target. The tiny step
is planned and run in a process of its own, while this one plans the other.

python -m examples.demo [FOLDER]
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import tapestry_egg as te
from models import gpt2
from tapestry_egg.extract.front.notes import INTERRUPTED
from tapestry_egg.pipeline.rehearse import rehearse_all, simulate_devices
from tapestry_egg.progress import reporter

TARGET, DEVICES = "h100:8", 8
#: Half a million tokens a step.
FULL = gpt2.config(preset="gpt2_small", batch=512)
#: What two processors compute within seconds. It fits on a device, so micro-batches are asked for.
TINY = gpt2.config(preset="tiny", layers=2, width=128, vocabulary=1024, sequence=64, batch=64)
EFFORT = {
    "gpt2": te.Settings(max_axes=1),
    "gpt2_tiny": te.Settings(work=2.0, max_axes=1, micro_batches=(4,)),
}

pretrain = gpt2.pretrain


def pretrain_args() -> tuple[Any, ...]:
    """The arguments that the tiny step runs on."""
    return gpt2.arguments(TINY, optimizer=gpt2.PRETRAINING)


def planned(name: str, config: Any, out: Path, quiet: bool = False) -> te.Front:
    """The front of a step, printed, and written with its graph and picture into `out`; `quiet`,
    without its progress."""
    tokens = config.batch * config.sequence
    print(
        f"{name}: {config.layers} layers of width {config.width}, vocabulary "
        f"{config.vocabulary:,}, {config.batch} sequences of {config.sequence} ({tokens:,} "
        "tokens) a step"
    )
    args = gpt2.abstract(config, gpt2.PRETRAINING)
    with contextlib.nullcontext() if quiet else reporter() as on_progress:
        program = te.trace(pretrain, *args, donate_argnums=(0, 1), name=name)
        te.save(program, out / f"{name}.json")
        front = te.optimize(program, TARGET, settings=EFFORT[name], on_progress=on_progress)
    print(front)
    te.save(front, out / f"{name}.front.json")
    front.plot(out / ("front.svg" if name == "gpt2" else f"{name}.front.svg"))
    if INTERRUPTED in front.notes:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)  # as a shell has it
    return front


def chosen(front: te.Front) -> list[te.Plan]:
    """The fastest plan, the one of the smallest peak, and the knee between them."""
    plans = sorted(front.plans, key=lambda p: p.costs.seconds)
    fast, small = plans[0], min(plans, key=lambda p: p.costs.peak_bytes)

    def distance(p: te.Plan) -> float:
        seconds = p.costs.seconds / fast.costs.seconds
        return math.hypot(seconds - 1.0, math.log(p.costs.peak_bytes / small.costs.peak_bytes))

    between = [p for p in plans if p not in (fast, small)]
    return [fast, *sorted(between, key=distance)[:1], *([small] if small != fast else [])]


def run_tiny(out: Path) -> bool:
    """Plan the tiny step and run three of its plans; whether all agree with the original."""
    simulate_devices(DEVICES)
    front = planned("gpt2_tiny", TINY, out, quiet=True)
    print(
        "\nXLA computes 16-bit values in 32 bits on CPUs, so compiled peaks are up to twice the "
        "planned.\n"
    )
    runs = list(rehearse_all(chosen(front), f"{__file__}:pretrain", repeat=1))
    print("\n\n".join(map(str, runs)))
    return all(run.ok for run in runs)


@contextlib.contextmanager
def beside(out: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """`run_tiny` in another process, and what it prints; it ends with the block."""
    command = [sys.executable, "-m", "examples.demo", str(out), "tiny"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, text=True)
        try:
            yield process, said
        finally:
            process.kill()
            process.wait()


def main(folder: str = "out/demo", step: str = "both") -> None:
    begin, out = time.perf_counter(), Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    if step == "tiny":
        sys.exit(not run_tiny(out))
    with beside(out) as (process, said):
        planned("gpt2", FULL, out)
        failed = process.wait()
        said.seek(0)
        print(said.read(), end="")
    print(f"{time.perf_counter() - begin:.0f} s in all; written: {out}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
