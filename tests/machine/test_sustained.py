"""What products of matrices keep up within a device's power."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tapestry_egg.machine.costs import kernel_seconds
from tapestry_egg.machine.tables.gemm import Gemm
from tapestry_egg.machine.target import Target, load_target


def seconds(target: Target, m: int, n: int, k: int) -> float:
    gemm = Gemm(1.0, float(m), float(n), float(k), "bfloat16", "bfloat16", "bfloat16")
    return float(kernel_seconds(2.0 * m * n * k, 0.0, "bfloat16", target, True, gemm))


@pytest.mark.parametrize("name", ["h100", "h200", "p5"])
def test_products_again_and_again_take_what_the_power_lets_them(name: str) -> None:
    """One H100 drew its 700 W while products of 8192 took 1.50 to 1.55 ms each, those of 16384 x
    4096 x 16384 took 3.10 ms; what fills the cores less runs as fast as in the tables."""
    target = load_target(f"{name}:1")
    table = replace(target, sustained=())
    assert seconds(table, 8192, 8192, 8192) < 1.42e-3
    assert 1.5e-3 < seconds(target, 8192, 8192, 8192) < 1.55e-3
    assert seconds(target, 16384, 16384, 4096) == pytest.approx(3.10e-3, rel=0.01)
    assert seconds(target, 512, 512, 512) == seconds(table, 512, 512, 512)
