"""Hand-written GPT-2 shardings beside the plans of a searched front, by what XLA compiled of each.

    python -m benchmarks.bench_strategies                          # runs on 8 virtual CPU devices
    python -m benchmarks.bench_strategies --target h100:8          # compiles only; `make gpu-aot`
    python -m benchmarks.bench_strategies --preset tiny --only front

Every figure is per device and step. `wire` is what a device sends by bandwidth-optimal collectives,
`peak` arguments, outputs and temporaries together, `loss` the difference to one device's loss.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import TapestryError, TargetError
from tapestry_egg.rehearse import simulate_devices
from tapestry_egg.units import format_quantity as show

if TYPE_CHECKING:
    from models import gpt2
    from tapestry_egg.pipeline import Front
    from tapestry_egg.plan import Plan


@dataclass(frozen=True)
class Row:
    """One sharded step as compiled, and as run where it was."""

    name: str
    wire_bytes: float
    temp_bytes: int
    peak_bytes: int
    flops: float
    seconds: float | None = None
    loss_difference: float | None = None

    def dominates(self, other: Row) -> bool:
        """Whether this one sends no more, holds no more and computes at most 1 % more."""
        return (
            self.wire_bytes <= other.wire_bytes
            and self.peak_bytes <= other.peak_bytes
            and self.flops <= 1.01 * other.flops
        )


HEAD = (
    f"{'strategy':34} {'wire':>10} {'temp':>10} {'peak':>10} {'flops':>12} {'step':>9} {'loss':>8}"
)


def line(row: Row) -> str:
    """The row as text, under `HEAD`."""
    seconds = "" if row.seconds is None else show(row.seconds, "seconds")
    loss = "" if row.loss_difference is None else f"{row.loss_difference:.0e}"
    return (
        f"{row.name:34} {show(row.wire_bytes, 'wire_bytes'):>10}"
        f" {show(row.temp_bytes, 'peak_bytes'):>10} {show(row.peak_bytes, 'peak_bytes'):>10}"
        f" {show(row.flops, 'flops'):>12} {seconds:>9} {loss:>8}"
    )


def baseline_rows(config: gpt2.Config, devices: Sequence[Any], reference: float) -> Iterator[Row]:
    """A row per hand-written baseline that the config's sizes allow; says which they do not."""
    from benchmarks.baselines import BASELINES, abstract
    from models import gpt2

    for name, build in BASELINES.items():
        try:
            run = build(config, devices)
        except TapestryError as refused:
            print(f"{name:34} left out: {refused.what}", flush=True)
            continue
        compiled = run.step.lower(*abstract(config, run)).compile()
        if not runs(devices):
            yield _row(name, compiled)
            continue
        params, opt_state, batch = run.place(gpt2.arguments(config))
        params, opt_state, loss = compiled(params, opt_state, batch)
        difference = abs(float(loss) - reference)
        started = time.perf_counter()
        compiled(params, opt_state, batch)[2].block_until_ready()
        yield _row(name, compiled, time.perf_counter() - started, difference)


def front_rows(
    config: gpt2.Config,
    target: str,
    devices: Sequence[Any],
    reference: float,
    *,
    seconds: float = 45.0,
    plans: int = 6,
) -> Iterator[Row]:
    """A row for each of at most `plans` plans, spread evenly over the front searched for `target`.

    `seconds` is the time given to the search. Raises what `tapestry_egg.optimize` raises.
    """
    import tapestry_egg as te
    from models import gpt2
    from tapestry_egg.pipeline import Settings

    graph = te.trace(gpt2.train_step, *gpt2.abstract(config))
    front = te.optimize(graph, target, settings=Settings(seconds=seconds))
    print(f"{len(front)} plans on the front, every plan within {front.epsilon:.1%} of one")
    for plan in spread(front, plans):
        name = f"{plan.name}, mesh {plan.mesh}"
        run = te.compile(plan, devices)
        compiled = run.compile()
        if not runs(devices):
            yield _row(name, compiled)
            continue
        params, opt_state, batch = gpt2.arguments(config)
        params, opt_state, loss = run(params, opt_state, batch)
        difference = abs(float(loss) - reference)
        started = time.perf_counter()
        run(params, opt_state, batch)[2].block_until_ready()
        yield _row(name, compiled, time.perf_counter() - started, difference)


def spread(front: Front, most: int) -> list[Plan]:
    """At most `most` plans of the front, both its ends among them."""
    last = len(front) - 1
    if last < most:
        return list(front)
    return [front[round(i * last / max(most - 1, 1))] for i in range(most)]


def devices_of(target: str) -> Sequence[Any]:
    """The devices of `NAME:SHAPE`: virtual ones for `cpu`, else ones described to the compiler.

    Raises TargetError where JAX has no compiler for them here.
    """
    import jax
    from jax.experimental import topologies

    from tapestry_egg.target import load_target

    machine = load_target(target)
    if machine.name == "cpu":
        return jax.devices("cpu")[: machine.devices]
    shape = "x".join(map(str, machine.shape))
    try:
        if machine.name == "h100":
            described = topologies.get_topology_desc(
                platform="cuda",
                topology_name=machine.name,
                topology=f"1x{shape}" if "x" in shape else f"1x1x{shape}",
                target_config=(resources.files(__package__) / "h100.txtpb").read_text(),
            )
        else:
            described = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{machine.name}:{shape}"
            )
    except Exception as e:  # JAX's plugins raise whatever they like
        raise TargetError(
            f"JAX cannot compile for {target} here: {e}",
            hint="For h100, `make gpu-aot` installs the compiler; for TPUs, `pip install libtpu`.",
        ) from None
    return described.devices


def runs(devices: Sequence[Any]) -> bool:
    """Whether the devices are there, and not only described."""
    return bool(devices[0].platform == "cpu")


def _row(name: str, compiled: Any, *measured: float) -> Row:
    from tapestry_egg.runtime import hlo_stats

    stats = hlo_stats(compiled)
    return Row(name, stats.wire_bytes, stats.temp_bytes, stats.peak_bytes, stats.flops, *measured)


def main() -> int:
    """Print both tables, then which baselines a plan of the front dominates."""
    from tapestry_egg.target import load_target

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="demo", help="tiny, demo (default) or gpt2_small")
    parser.add_argument("--target", default="cpu:8", help="cpu:8 (default), h100:8, v5e:2x4, ...")
    parser.add_argument("--only", choices=("baselines", "front"), help="leave the other out")
    parser.add_argument("--seconds", type=float, default=45.0, help="of search (default 45)")
    parser.add_argument("--plans", type=int, default=6, help="of the front, at most (default 6)")
    options = parser.parse_args()
    try:
        simulate_devices(load_target(options.target).devices)
        import jax

        from models import gpt2

        config, devices = gpt2.config(options.preset), devices_of(options.target)
        reference = float("nan")
        if runs(devices):
            params, _, batch = gpt2.arguments(config)
            reference = float(jax.jit(gpt2.loss)(params, batch))
        print(f"GPT-2 {options.preset} on {options.target}: {config}\n\n{HEAD}", flush=True)
        by_hand: list[Row] = []
        searched: list[Row] = []
        if options.only != "front":
            for row in baseline_rows(config, devices, reference):
                by_hand.append(row)
                print(line(row), flush=True)
        if options.only != "baselines":
            print()
            for row in front_rows(
                config,
                options.target,
                devices,
                reference,
                seconds=options.seconds,
                plans=options.plans,
            ):
                searched.append(row)
                print(line(row), flush=True)
    except TapestryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if by_hand and searched:
        print()
        for row in by_hand:
            better = [plan.name for plan in searched if plan.dominates(row)]
            print(f"{row.name:34} {'dominated by ' + better[0] if better else 'not dominated'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
