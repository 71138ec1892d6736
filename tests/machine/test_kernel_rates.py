"""Rates of kernels from tables of measurements."""

import pytest

from tapestry_egg.machine.costs import kernel_seconds, like_roofline
from tapestry_egg.machine.tables.kernel_rates import kernel_rate
from tapestry_egg.machine.target import load_target


def test_rates_are_the_tables_own_and_interpolated_between() -> None:
    at = [kernel_rate("flash_attention", (1, 128, n), "bfloat16", "h100") for n in (4096, 8192)]
    assert at == [591e12, 644e12]
    between = kernel_rate("flash_attention", (1, 128, 5793), "bfloat16", "h100")
    assert between == pytest.approx((591e12 + 644e12) / 2, rel=1e-4)
    # Beyond the ends the last ones hold; other widths have those of the nearest one.
    assert kernel_rate("flash_attention", (1, 128, 1 << 20), "bfloat16", "h100") == 688e12
    assert kernel_rate("flash_attention", (1, 96, 4096), "float16", "h100") == 591e12
    assert kernel_rate("flash_attention", (1, 64, 4096), "bfloat16", "h100") == 336e12


@pytest.mark.parametrize("kernel", ["flash_attention", "flash_attention_backward"])
def test_the_device_that_was_measured_has_the_rates_of_its_kind(kernel: str) -> None:
    """The rows of Blackwell were measured on GB200 (the head of the file)."""
    rates = [kernel_rate(kernel, (1, 128, 8192), "bfloat16", x) for x in ("gb200", "b200")]
    assert rates[0] == rates[1] and rates[0]


def test_no_table_no_rate() -> None:
    assert kernel_rate("flash_attention", (1, 128, 4096), "float32", "h100") is None
    assert kernel_rate("flash_attention", (1, 128, 4096), "bfloat16", "v5e") is None
    assert kernel_rate("dot_general", None, "bfloat16", "h100") is None


def test_a_measured_rate_takes_the_place_of_the_roofline() -> None:
    target = load_target("h100:1")
    work = like_roofline("flash_attention", (1, 64, 4096), 336e12, "bfloat16", target, True)
    seconds = kernel_seconds(work, 0.0, "bfloat16", target, True)
    assert seconds - target.launch_seconds == pytest.approx(1.0)
    assert like_roofline("dot_general", None, 7.0, "bfloat16", target, True) == 7.0


def test_a_kernel_that_spills_waits_for_memory_beside_its_flops() -> None:
    target = load_target("h100:1")
    rate = target.rate("float32", False)
    for spilled in (0.0, 0.5):
        work = like_roofline("nowhere_measured", None, 1e9, "float32", target, False, spilled)
        seconds = 1e9 / rate + spilled * 1e9 / target.hbm_bytes_per_second
        assert work / rate == pytest.approx(seconds)
