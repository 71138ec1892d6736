"""Energy and money: two parts of joules, units, clocks, prices, against hand numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tapestry_egg.errors import TargetError
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import collective_seconds, kernel_seconds, turning_seconds
from tapestry_egg.machine.energy import (
    collective_dynamic_joules,
    collective_joules,
    dollars,
    dynamic_joules,
    idle_joules,
    joules,
    turning_joules,
)
from tapestry_egg.machine.target import known_targets, load_target

from .test_targets import CHIP

CLOCK = "clock: {mhz: 1000, least: 500, most: 1200, ridge: 800, floor: 0.75, idle: 4}\n"
PRICE = 'price: {dollars_per_hour: 7.2, source: "a list", as_of: 2026-01}\n'


def test_joules_of_a_v100_by_hand() -> None:
    """A second of float32 arithmetic at half its published rate while half of memory's is read."""
    v100 = load_target("v100:16")
    expected = 66 + 85 + 0.5 * 263 + 0.5 * 52.1
    assert joules(7.85e12, 450e9, 0.0, 1.0, 1, v100, "float32") == pytest.approx(expected)
    # The tensor cores draw as much at their own full rate.
    assert joules(62.5e12, 450e9, 0.0, 1.0, 1, v100, "float16") == pytest.approx(expected)


def test_measured_watts_of_a_v100() -> None:
    """Two CUDA samples of the data that the target's file names, with the share of time that units
    were busy; the idle power is that of the board they ran on."""
    v100 = load_target("v100:1")
    for mhz, watts, kernel, arithmetic, memory in (
        (1380, 186.1, 0.981, 0.257, 0.222),  # matrixMul
        (1087, 122.2, 0.964, 0.258, 0.174),
        (1380, 156.3, 0.980, 0.043, 0.879),  # vectorAdd
        (945, 119.5, 0.983, 0.065, 0.876),
    ):
        chip = v100.at_clock(mhz)
        board = chip.power.idle_watts - 37.0 + 22.4
        work = dynamic_joules(
            arithmetic * chip.peak_rate("float32", True), memory * 900e9, 0.0, kernel, 1, chip
        )
        assert board + work == pytest.approx(watts, rel=0.1)


@pytest.mark.parametrize("spec", ["h100:8", "v100:16", "v5e:4x4", "cpu:8"])
def test_joules_are_the_dynamic_part_and_the_idle_one(spec: str) -> None:
    t = load_target(spec)
    mesh = t.mesh_shapes(1)[0]
    n = t.devices
    parts = dynamic_joules(1e9, 1e6, 0.0, 1e-3, n, t) + idle_joules(1e-3, n, t)
    assert joules(1e9, 1e6, 0.0, 1e-3, n, t) == pytest.approx(parts)
    seconds = collective_seconds("all_reduce", 1e6, (0,), mesh, t)
    moved = collective_dynamic_joules("all_reduce", 1e6, (0,), mesh, t)
    assert 0 < moved < collective_joules("all_reduce", 1e6, (0,), mesh, t)
    assert collective_joules("all_reduce", 1e6, (0,), mesh, t) - moved == pytest.approx(
        idle_joules(seconds, n, t)
    )


def test_joules_are_no_copy_of_seconds() -> None:
    """Of two kernels that take equally long, the one that computes more draws more."""
    h100 = load_target("h100:1")
    reads = h100.hbm_bytes_per_second * 1e-3
    sums = 0.9 * h100.rate("bfloat16", True) * 1e-3
    seconds = kernel_seconds(0.0, reads, "bfloat16", h100, True)
    assert seconds == kernel_seconds(sums, reads, "bfloat16", h100, True)
    one, two = (joules(f, reads, 0.0, seconds, 1, h100) for f in (0.0, sums))
    assert two > 1.5 * one


def test_a_clock_moves_rates_and_watts(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(CHIP + CLOCK + PRICE)
    t = load_target(f"{file}:2x4")
    slow = load_target(f"{file}:2x4@500")
    assert slow.spec == "mine:2x4@500" and slow == t.at_clock(500)
    assert slow.rate("bfloat16", True) == pytest.approx(0.5 * t.rate("bfloat16", True))
    assert slow.hbm_bytes_per_second == t.hbm_bytes_per_second
    share = 0.5 * 0.75**2  # f·V², below the ridge
    assert slow.power.kernel_watts == pytest.approx(15 * share)
    assert slow.power.idle_watts == pytest.approx(6 + 4 * share)
    # Energy per operation goes with the voltage squared alone.
    per_flop = dynamic_joules(1e12, 0.0, 0.0, 0.0, 1, t)
    assert dynamic_joules(1e12, 0.0, 0.0, 0.0, 1, slow) == pytest.approx(per_flop * 0.75**2)
    assert t.at_clock(900).power.flops_watts == pytest.approx(60 * 0.9 * 0.875**2)
    # From one clock to another is as from the file's own.
    assert slow.at_clock(900).power.idle_watts == pytest.approx(t.at_clock(900).power.idle_watts)
    assert slow.at_clock(1000).spec == t.spec
    for wrong in (499, 1201):
        with pytest.raises(TargetError, match="cannot be set"):
            t.at_clock(wrong)
    with pytest.raises(TargetError, match="nothing is known of other clocks"):
        load_target("v5e:4x4@900")
    with pytest.raises(TargetError, match="does not say how many"):
        load_target("v100:16@fast")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("least: 500", "least: 1100", "not in this order"),
        ("ridge: 800", "ridge: 1000", "not in this order"),
        ("floor: 0.75", "floor: 1.5", "at most 1"),
        ("idle: 4", "idle: 4, fan: 3", "unknown key 'fan'"),
        ("dollars_per_hour: 7.2", "dollars_per_hour: 0", "above 0"),
        ("as_of: 2026-01", "when: 2026-01", "'as_of' is missing"),
    ],
)
def test_malformed_clocks_and_prices(tmp_path: Path, old: str, new: str, says: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(CHIP + (CLOCK + PRICE).replace(old, new))
    with pytest.raises(TargetError, match=says):
        load_target(f"{file}:2x4")


def test_dollars(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(CHIP + PRICE)
    t = load_target(f"{file}:2x4")
    assert dollars(10.0, 8, t) == pytest.approx(10 * 8 * 7.2 / 3600)
    assert dollars(10.0, 8, t.at_price(3.6)) == pytest.approx(0.08)
    assert dollars(10.0, 8, replace(t, price=None)) == 0.0
    for wrong in (0.0, -1.0, float("nan"), float("inf"), True, "two"):
        with pytest.raises(TargetError, match="no price"):
            t.at_price(wrong)  # type: ignore[arg-type]


def test_a_group_of_one_costs_nothing_above_idle() -> None:
    mesh = MeshShape(("x", "y"), (8, 1))
    assert collective_dynamic_joules("all_gather", 1e6, (1,), mesh, load_target("h100:8")) == 0.0


@pytest.mark.parametrize(
    "name", [n for n in known_targets() if not load_target(f"{n}:4").power.measured]
)
def test_flat_out_draws_the_maximum(name: str) -> None:
    t = load_target(f"{name}:4")
    for dtype, contraction in (("bfloat16", True), ("float32", True), ("float32", False)):
        rate = t.rate(dtype, contraction)
        send = t.levels[0].full_bytes_per_second
        flat_out = joules(rate, t.hbm_bytes_per_second, send, 1.0, 1, t, dtype, contraction)
        # Files hold watts of three digits.
        assert flat_out == pytest.approx(t.power.max_watts, rel=0.005)
    assert t.power.idle_watts < t.power.max_watts


def test_collective_joules_by_hand() -> None:
    t, mesh = load_target("h100:8"), MeshShape(("x",), (8,))
    wire = 2 * 7 / 8 * 1e9
    seconds = collective_seconds("all_reduce", 1e9, (0,), mesh, t)
    by_hand = 8 * (137 * seconds + 24.5 * wire / 450e9 + 131 * 2 * wire / 3350e9)
    assert collective_joules("all_reduce", 1e9, (0,), mesh, t) == pytest.approx(by_hand)
    one = load_target("h100:1")
    assert collective_joules("all_reduce", 1e9, (0,), one.mesh_shapes()[0], one) == 0


def test_joules_of_writing_a_block_in_another_order_by_hand() -> None:
    """All of it is read, and written."""
    t, block = load_target("h100:8"), 2.0**28
    power, seconds = t.power, turning_seconds(block, t)
    one = seconds * (power.idle_watts + power.kernel_watts) + 2 * block * power.joules_per_byte
    assert turning_joules(block, 8, t) == pytest.approx(8 * one)
