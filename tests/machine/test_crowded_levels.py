"""What a device sends where more hosts share a switch; kernels that spill what they work on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tapestry_egg.machine.costs import like_roofline
from tapestry_egg.machine.target import load_target

LEVEL = replace(load_target("p5:2x8").levels[-1], crowded=((2, 8e9), (8, 2e9)))


@pytest.mark.parametrize(("group", "rate"), [(1, 8e9), (2, 8e9), (4, 4e9), (8, 2e9), (64, 2e9)])
def test_rates_go_by_how_many_share_a_switch(group: int, rate: float) -> None:
    assert LEVEL.rate(group) == pytest.approx(rate)
    assert replace(LEVEL, crowded=()).rate(group) == LEVEL.bytes_per_second


def test_a_kernel_that_spills_waits_for_memory_beside_its_flops() -> None:
    target = load_target("h100:1")
    rate = target.rate("float32", False)
    for spilled in (0.0, 0.5):
        work = like_roofline("nowhere_measured", None, 1e9, "float32", target, False, spilled)
        seconds = 1e9 / rate + spilled * 1e9 / target.hbm_bytes_per_second
        assert work / rate == pytest.approx(seconds)
