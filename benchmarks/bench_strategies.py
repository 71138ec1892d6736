"""Hand-written GPT-2 shardings beside a searched front, by what XLA compiled of each.

    python -m benchmarks.bench_strategies                          # runs on 8 virtual CPU devices
    python -m benchmarks.bench_strategies --target h100:8          # compiles only; `make gpu-aot`
    python -m benchmarks.bench_strategies --preset tiny --only front

For every baseline the plan of the front that should be at least as good in bytes sent, peak and
flops, all three at once, is compiled as the baseline is, and the verdict holds the compiled figures
of both against each other. Then the baseline's own layouts are pinned, and the best plans that
start from them are held against the front in predicted seconds and peak.

Every figure is per device and step. `wire` is what a device sends by bandwidth-optimal collectives,
`peak` arguments, outputs and temporaries together, `loss` the difference to one device's loss.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import TapestryError, TargetError
from tapestry_egg.pipeline.rehearse import simulate_devices
from tapestry_egg.quantities import BYTES, OPERATIONS, TIME

if TYPE_CHECKING:
    from models import gpt2
    from tapestry_egg.graph.layout import MeshShape
    from tapestry_egg.pipeline import Front
    from tapestry_egg.plans.plan import Plan
    from tapestry_egg.tracing.trace import Program


# How much more than a baseline a plan may send, hold and compute and still be as good.
SLACK = {"wire_bytes": 0.02, "peak_bytes": 0.05, "flops": 0.02}
# Predictions of the front and of pinned plans come from one model; this is for ties.
_TIE = 0.005
OBJECTIVES = ("seconds", "peak_bytes", "joules", "wire_bytes", "flops")


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

    def excess(self, other: Row) -> dict[str, float]:
        """By what share this one exceeds the other, in what it exceeds it beyond `SLACK`."""
        shares = {k: getattr(self, k) / max(getattr(other, k), 1.0) - 1.0 for k in SLACK}
        return {k: share for k, share in shares.items() if share > SLACK[k]}


HEAD = (
    f"{'strategy':34} {'wire':>10} {'temp':>10} {'peak':>10} {'flops':>12} {'step':>9} {'loss':>8}"
)


def line(row: Row) -> str:
    """The row as text, under `HEAD`."""
    seconds = "" if row.seconds is None else TIME.format(row.seconds)
    loss = "" if row.loss_difference is None else f"{row.loss_difference:.0e}"
    return (
        f"{row.name:34} {BYTES.format(row.wire_bytes):>10}"
        f" {BYTES.format(row.temp_bytes):>10} {BYTES.format(row.peak_bytes):>10}"
        f" {OPERATIONS.format(row.flops):>12} {seconds:>9} {loss:>8}"
    )


@dataclass(frozen=True)
class ByHand:
    """A baseline as compiled, and where its arguments lie: its mesh and a layout per input path."""

    row: Row
    mesh: MeshShape
    pins: Mapping[str, tuple[tuple[str, ...], ...]]


def baselines(config: gpt2.Config, devices: Sequence[Any], reference: float) -> Iterator[ByHand]:
    """Every hand-written baseline that the config's sizes allow; says which they do not."""
    from benchmarks.baselines import BASELINES, abstract
    from models import gpt2

    for name, build in BASELINES.items():
        try:
            run = build(config, devices)
        except TapestryError as refused:
            print(f"{name:34} left out: {refused.what}", flush=True)
            continue
        compiled = run.step.lower(*abstract(config, run)).compile()
        measured: tuple[float, ...] = ()
        if runs(devices):
            measured = _measured(compiled, run.place(gpt2.arguments(config)), reference)
        yield ByHand(_row(name, compiled, *measured), *layouts(run.in_shardings))


def layouts(shardings: Any) -> tuple[MeshShape, dict[str, tuple[tuple[str, ...], ...]]]:
    """The mesh of a tree of `NamedSharding`s, without axes of size 1, and the layouts by path."""
    import jax

    from tapestry_egg.graph.layout import MeshShape

    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    mesh = leaves[0][1].mesh
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}

    def cut(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
        names = (entry,) if isinstance(entry, str) else entry or ()
        return tuple(n for n in names if n in sizes)

    pins = {jax.tree_util.keystr(path): tuple(map(cut, x.spec)) for path, x in leaves}
    return MeshShape(tuple(sizes), tuple(sizes.values())), pins


class Contest:
    """The plans of one front, compiled where a baseline asks for it, each at most once."""

    def __init__(
        self, front: Front, config: gpt2.Config, devices: Sequence[Any], reference: float
    ) -> None:
        self.front, self.config = front, config
        self.devices, self.reference = devices, reference
        self.compiled: dict[str, Row] = {}

    def row(self, plan: Plan) -> Row:
        """The plan as compiled; prints its line the first time."""
        import tapestry_egg as te
        from models import gpt2

        if plan.name not in self.compiled:
            run = te.compile(plan, self.devices)
            compiled = run.compile()
            measured: tuple[float, ...] = ()
            if runs(self.devices):
                measured = _measured(run, gpt2.arguments(self.config), self.reference)
            row = _row(f"{plan.name}, mesh {plan.mesh}", compiled, *measured)
            self.compiled[plan.name] = row
            print(line(row), flush=True)
        return self.compiled[plan.name]

    def answer(self, baseline: Row, tries: int = 3) -> tuple[Row, dict[str, float]]:
        """A plan's row that is as good as the baseline, or else the closest of `tries` plans.

        With it the shares by which it exceeds the baseline, empty where it is as good.
        """
        names = [p.name for p in self.likely(baseline)[:tries]]
        found = []
        for name in [*(n for n in self.compiled if n not in names), *names]:
            row = self.row(self.front[name])
            excess = row.excess(baseline)
            if not excess:
                return row, excess
            found.append((max(share - SLACK[k] for k, share in excess.items()), row, excess))
        _, row, excess = min(found, key=lambda f: f[0])
        return row, excess

    def likely(self, baseline: Row) -> list[Plan]:
        """The plans, those first that should exceed the baseline least where they do most."""

        def shares(plan: Plan) -> list[float]:
            costs = plan.costs
            each = [
                getattr(costs, k) / max(getattr(baseline, k), 1.0) / (1.0 + slack)
                for k, slack in SLACK.items()
            ]
            return sorted(each, reverse=True)

        return sorted(self.front, key=shares)


def pinned_plans(
    graph: Program, target: str, baseline: ByHand, *, seconds: float
) -> tuple[Plan, Plan]:
    """The fastest plan and that of the least peak whose inputs lie as the baseline's do.

    Raises what `tapestry_egg.optimize` raises.
    """
    import tapestry_egg as te
    from tapestry_egg.pipeline import Settings

    front = te.optimize(
        graph,
        target,
        ("seconds", "peak_bytes"),
        mesh_shapes=(baseline.mesh,),
        pins=baseline.pins,
        settings=Settings(seconds=seconds),
    )
    return front.best("seconds"), front.best("peak_bytes")


def covering(front: Front, plan: Plan) -> Plan | None:
    """A plan of the front that is predicted to be as fast as `plan` and no larger in peak."""
    most = {k: getattr(plan.costs, k) * (1.0 + _TIE) for k in ("seconds", "peak_bytes")}
    fitting = [p for p in front if all(getattr(p.costs, k) <= x for k, x in most.items())]
    return min(fitting, key=lambda p: p.costs.seconds, default=None)


def devices_of(target: str) -> Sequence[Any]:
    """The devices of `NAME:SHAPE`: virtual ones for `cpu`, else ones described to the compiler.

    Raises TargetError where JAX has no compiler for them here.
    """
    import jax
    from jax.experimental import topologies

    from tapestry_egg.machine.target import load_target

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


def _measured(step: Any, arguments: tuple[Any, Any, Any], reference: float) -> tuple[float, float]:
    """Seconds of a second step, and the first one's loss difference."""
    params, opt_state, batch = arguments
    params, opt_state, loss = step(params, opt_state, batch)
    difference = abs(float(loss) - reference)
    started = time.perf_counter()
    step(params, opt_state, batch)[2].block_until_ready()
    return time.perf_counter() - started, difference


def _verdict(row: Row, excess: Mapping[str, float]) -> str:
    if not excess:
        return f"dominated by {row.name}"
    words = ", ".join(f"{k} {share:+.1%} (allowed {SLACK[k]:+.0%})" for k, share in excess.items())
    return f"not dominated; closest is {row.name}: {words}"


def compare_compiled(by_hand: Sequence[ByHand], contest: Contest) -> int:
    """Print the plans compiled and the verdict per baseline; returns how many are not dominated."""
    verdicts = []
    for baseline in by_hand:
        row, excess = contest.answer(baseline.row)
        verdicts.append((baseline.row.name, row, excess))
    print(f"\ncompiled: {', '.join(f'{k} within {s:.0%}' for k, s in SLACK.items())}")
    for name, row, excess in verdicts:
        print(f"{name:34} {_verdict(row, excess)}")
    return sum(bool(excess) for _, _, excess in verdicts)


def compare_pinned(
    by_hand: Sequence[ByHand], front: Front, graph: Program, target: str, seconds: float
) -> int:
    """Print what the baselines' own layouts come to; returns how many plans are not dominated."""
    print(
        "\npredicted, from the baseline's own layouts: seconds, peak, and the plan as good in both"
    )
    open_ = 0
    found: dict[Any, str] = {}
    for baseline in by_hand:
        key = (baseline.mesh, tuple(sorted(baseline.pins.items())))
        if key in found:
            print(f"{baseline.row.name:34} as {found[key]}", flush=True)
            continue
        found[key] = baseline.row.name
        words = []
        for plan in pinned_plans(graph, target, baseline, seconds=seconds):
            better = covering(front, plan)
            open_ += better is None
            words.append(
                f"{TIME.format(plan.costs.seconds):>8}"
                f" {BYTES.format(plan.costs.peak_bytes):>9}"
                f" {better.name if better else 'NONE':5}"
            )
        print(f"{baseline.row.name:34} {' | '.join(words)}", flush=True)
    return open_


def main() -> int:
    """Print the tables; the exit code is 0 where every baseline is dominated."""
    from tapestry_egg.machine.target import load_target

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="demo", help="tiny, demo (default) or gpt2_small")
    parser.add_argument("--target", default="cpu:8", help="cpu:8 (default), h100:8, v5e:2x4, ...")
    parser.add_argument("--on", help="where to compile, if not for the target: cpu:8, ...")
    parser.add_argument("--only", choices=("baselines", "front"), help="leave the other out")
    parser.add_argument("--seconds", type=float, default=45.0, help="of search (default 45)")
    parser.add_argument(
        "--pinned",
        type=float,
        default=6.0,
        help="of search per pinned baseline (default 6; 0: none)",
    )
    options = parser.parse_args()
    on = options.on or options.target
    try:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator
        simulate_devices(load_target(on).devices)
        import jax

        import tapestry_egg as te
        from models import gpt2
        from tapestry_egg.pipeline import Settings

        config, devices = gpt2.config(options.preset), devices_of(on)
        reference = float("nan")
        if runs(devices):
            params, _, batch = gpt2.arguments(config)
            reference = float(jax.jit(gpt2.loss)(params, batch))
        print(f"GPT-2 {options.preset} on {on}: {config}\n\n{HEAD}", flush=True)
        by_hand: list[ByHand] = []
        if options.only != "front":
            for baseline in baselines(config, devices, reference):
                by_hand.append(baseline)
                print(line(baseline.row), flush=True)
        if options.only == "baselines":
            return 0
        graph = te.trace(gpt2.train_step, *gpt2.abstract(config))
        settings = Settings(seconds=options.seconds)
        front = te.optimize(graph, options.target, OBJECTIVES, settings=settings)
        print(f"\n{front}\n\n{HEAD}", flush=True)
        contest = Contest(front, config, devices, reference)
        if not by_hand:
            for plan in front:
                contest.row(plan)
            return 0
        lacking = compare_compiled(by_hand, contest)
        if options.pinned:
            lacking += compare_pinned(by_hand, front, graph, options.target, options.pinned)
    except TapestryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if not lacking else 2


if __name__ == "__main__":
    sys.exit(main())
