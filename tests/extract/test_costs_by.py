"""Where the costs of a plan come from, and what they would be elsewhere."""

from __future__ import annotations

import json
import re
from dataclasses import astuple, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError, TargetError
from tapestry_egg.extract.front.what_if import changed
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.plans.cost_table import KEYS
from tapestry_egg.show.lanes import draw_lanes, lanes_svg, trace_events, write_trace

BRIEF = Settings(work=0.2, workers=1, recompute=0, forms=0, micro_batches=())


def step(w, x):  # type: ignore[no-untyped-def]
    def loss(w):  # type: ignore[no-untyped-def]
        def layer(h, k):  # type: ignore[no-untyped-def]
            return jnp.tanh(h @ k), None

        h = jnp.tanh(x @ w["layers"][0]["up"]) @ w["layers"][1]["up"]
        return jnp.sum(jax.lax.scan(layer, h, w["stack"])[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


@pytest.fixture(scope="module")
def front() -> te.Front:
    w = {
        "layers": [{"up": jnp.ones((512, 2048))}, {"up": jnp.ones((2048, 512))}],
        "stack": jnp.ones((3, 512, 512)),
    }
    program = te.trace(step, w, jnp.ones((4096, 512)))
    return te.optimize(program, "h100:8", settings=BRIEF, books=["sharding", "collectives"])


@pytest.fixture(scope="module")
def smallest(front: te.Front) -> te.Plan:
    return front.best("peak_bytes")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["layer", "line"])
def test_tables_add_up_to_the_plan(front: te.Front, key: str) -> None:
    for plan in front:
        table = plan.costs_by(key)
        costs = plan.costs
        for name, whole in (
            ("seconds", costs.serial_seconds),
            ("joules", costs.joules),
            ("flops", costs.flops),
            ("wire_bytes", costs.wire_bytes),
        ):
            assert sum(getattr(r, name) for r in table) == pytest.approx(whole), name
        assert sum(r.share for r in table) == pytest.approx(1.0)
        assert sum(r.hidden for r in table) == pytest.approx(sum(x.hidden for x in plan.lanes()))
        assert all(r.exposed == pytest.approx(r.seconds - r.hidden) for r in table)
        assert [r.seconds for r in table] == sorted((r.seconds for r in table), reverse=True)


def test_kernels_and_collectives_are_told_apart(smallest: te.Plan) -> None:
    kernels, collectives = smallest.costs_by("kernel"), smallest.costs_by("collective")
    assert {r.bound for r in kernels if r.seconds} <= {"compute", "memory", "launch"}
    assert any(r.name.startswith("all_gather(") and r.wire_bytes > 0 for r in collectives)
    assert not any(r.flops for r in collectives)
    both = [*kernels, *collectives]
    assert sum(r.seconds for r in both) == pytest.approx(smallest.costs.serial_seconds)
    loops = [p for p in kernels.parts if p.kind == "kernel" and p.count == 3]
    assert any("dot_general" in p.name for p in loops)  # the body of the scan runs three times


def test_layers_are_the_entries_whose_weights_were_read(smallest: te.Plan) -> None:
    names = {r.name for r in smallest.costs_by("layer")}
    assert {"[0]['layers'][0]", "[0]['layers'][1]"} <= names
    assert any("scan at " in name for name in names)


def test_what_bounds_a_kernel() -> None:
    """A large product computes, a sum of two reads memory, a small one is launched."""

    def three(a, b, v):  # type: ignore[no-untyped-def]
        return a @ a, b + b, v * 2.0

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 4096), (1 << 26,), (8,))]
    plan = te.optimize(te.trace(three, *shapes), "h100:1", settings=BRIEF).plans[0]
    bounds = {r.name: r.bound for r in plan.costs_by("kernel")}
    assert bounds == {"dot_general": "compute", "add": "memory", "mul": "launch"}


def test_tables_as_data_and_text(smallest: te.Plan) -> None:
    for key in KEYS:
        table = smallest.costs_by(key)
        rows = json.loads(json.dumps(table.data()))
        assert [row[key] for row in rows] == [r.name for r in table]
        lines = str(table).splitlines()
        told = [line for line in lines if re.search(r"\d %", line)]  # others are the rest of a name
        assert len(told) == len(table) and lines[0].startswith(key), str(table)
        for k, name in enumerate(("flops", "memory", "sent", "hidden")):
            cells = [(r.flops, r.hbm_bytes, r.wire_bytes, r.hidden)[k] for r in table]
            assert (name in lines[0].split()) == any(cells), "a column of nothing is left out"
    with pytest.raises(ExtractError, match="no table of costs by 'colour'"):
        smallest.costs_by("colour")
    with pytest.raises(ExtractError, match="what machine"):
        replace(smallest, origin=None).costs_by("line")


def test_memory_reaches_the_peak(front: te.Front) -> None:
    for plan in front:
        curve = plan.memory_curve()
        assert max(amount for _, amount in curve) == plan.costs.peak_bytes
        times = [at for at, _ in curve]
        assert times == sorted(times) and times[0] >= 0.0
        assert times[-1] <= max(x.end for x in plan.lanes()) * (1 + 1e-9)


def test_the_picture_holds_every_bar(smallest: te.Plan, tmp_path: Path) -> None:
    svg = draw_lanes(smallest, tmp_path / "lanes.svg").read_text()
    lanes = smallest.lanes()
    assert svg.count("<rect ") == len(lanes)
    edges = [float(x) for x in re.findall(r'<rect x="([\d.]+)"', svg)]
    by_stream = [x.start for s in ("compute", "links") for x in lanes if x.stream == s]
    scale = (edges[-1] - 96.0) / by_stream[-1]
    assert edges == pytest.approx([96.0 + scale * at for at in by_stream], abs=0.02)
    assert "<script" not in lanes_svg(lanes, (), "<script>")


def test_the_trace_is_in_the_trace_event_format(smallest: te.Plan, tmp_path: Path) -> None:
    events = json.loads(write_trace(smallest, tmp_path / "trace.json").read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in bars] == [
        (x.name, x.start * 1e6, (x.end - x.start) * 1e6) for x in smallest.lanes()
    ]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {threads[e["tid"]] for e in bars} == {x.stream for x in smallest.lanes()}
    counted = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(counted) == smallest.costs.peak_bytes
    assert trace_events((), (), "nothing")["traceEvents"]


# What if


def test_nothing_changed_costs_the_same(front: te.Front) -> None:
    again = front.what_if()
    for was, now in zip(front, again, strict=True):
        assert astuple(now.costs) == pytest.approx(astuple(was.costs), rel=1e-12)
    assert all(p.bound == 0.0 for p in again) and again.epsilon == float("inf")
    assert "no bound is proven" in str(again.notes[0]) and "  -\n" in f"{again}\n"
    assert "gap*" in str(front) and "gap*" not in str(again), "no mark without its footnote"
    assert "gap*" in str(front) and "gap*" not in str(again), "no mark without its footnote"


def test_faster_links_cost_as_a_search_for_them_would(front: te.Front) -> None:
    h100 = load_target("h100:8")
    levels = [replace(x, bytes_per_second=2 * x.bytes_per_second) for x in h100.levels]
    faster = replace(h100, levels=tuple(levels), link_speed=2.0)
    one, other = front.what_if(links=2), front.what_if(faster)
    assert [p.costs for p in one] == [p.costs for p in other]
    assert any(now.costs.seconds < was.costs.seconds for was, now in zip(front, one, strict=True))
    for was, now in zip(front, one, strict=True):
        assert now.costs.seconds <= was.costs.seconds
        if not was.costs.wire_bytes:  # what little is sent may take no less than its delay
            assert now.costs.seconds == was.costs.seconds
        assert now.costs.peak_bytes == was.costs.peak_bytes
        assert now.origin is not None and now.origin.machine == faster


def test_trees_over_faster_links_send_as_much_more() -> None:
    slow, mesh = load_target("p5:32x8"), MeshShape(("x", "y"), (32, 8))
    fast = changed(slow, {"links": 2})
    assert fast.levels[1].tree_bytes_per_second == 2 * slow.levels[1].tree_bytes_per_second > 0
    moved = [collective_seconds("all_reduce", 2.0**25, (0,), mesh, t) for t in (slow, fast)]
    hops = 10 * slow.levels[1].latency_seconds + slow.launch_seconds
    assert moved[0] - hops == pytest.approx(2 * (moved[1] - hops))


@pytest.mark.slow
def test_on_another_machine_what_is_sent_runs_beside_kernels_as_it_did(front: te.Front) -> None:
    program = front[0].program
    assert program is not None
    beside = te.optimize(program, "h100:8", settings=replace(BRIEF, overlap=True))
    assert any(p.costs.seconds < p.costs.serial_seconds for p in beside)
    again = beside.what_if(load_target("h100:8"))
    assert [p.costs for p in again] == [p.costs for p in beside.what_if()]


def test_more_flops_are_those_of_all_units_and_of_what_was_measured() -> None:
    """And draw as much for each: joules of an operation stay."""
    was = load_target("h100:8")
    now = changed(was, {"flops": 2})
    kinds = [(dtype, products) for dtype in ("bfloat16", "float32") for products in (False, True)]
    rates = [[t.peak_rate(*kind) for kind in kinds] for t in (was, now)]
    assert rates[1] == [2 * rate for rate in rates[0]]
    assert now.matmul_speed == 2 * was.matmul_speed
    drawn = [t.power.flops_watts / t.peak_rate("float32", True) for t in (was, now)]
    assert drawn[0] == drawn[1] > 0


def test_memory_of_another_size_is_no_longer_shared() -> None:
    """Of a CPU all devices share one; what is asked about is what each has."""
    shared = load_target("cpu:8")
    assert shared.shared_memory and not changed(shared, {"memory": "1GiB"}).shared_memory


def test_memory_price_and_clock(front: te.Front) -> None:
    least = min(p.costs.peak_bytes for p in front)
    tight = front.what_if(memory=least)
    assert [tight.fits(p) for p in tight] == [p.costs.peak_bytes <= least for p in front]
    dear = front.what_if(price="3600")
    assert [p.costs.dollars for p in dear] == pytest.approx([8 * p.costs.seconds for p in front])
    v100 = load_target("v100:8")
    slow, fast = front.what_if(v100, clock=900), front.what_if(v100)
    assert slow.target == "v100:8@900"
    for a, b in zip(slow, fast, strict=True):
        assert a.costs.seconds > b.costs.seconds and a.costs.joules < b.costs.joules


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speed": 2}, "'speed' cannot be changed"),
        ({"links": 0}, "not an amount of links"),
        ({"hbm": "fast"}, "not an amount of hbm"),
        ({"memory": "much"}, "is not an amount"),
        ({"clock": 900}, "nothing is known of other clocks"),
    ],
)
def test_figures_that_a_machine_has_not(
    front: te.Front, changes: dict[str, float | str], says: str
) -> None:
    with pytest.raises(te.TapestryError, match=says):
        front.what_if(None, **changes)


def test_another_number_of_devices_takes_a_search(front: te.Front) -> None:
    with pytest.raises(TargetError, match="not for h100:4"):
        front.what_if(load_target("h100:4"))
