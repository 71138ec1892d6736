"""States that become what others were are copied there, beside what is still to be read."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tests.schedule.test_lifetimes import h100s

QUICK = te.Settings(work=0.1, forms=0, recompute=0, workers=1, merge=False)
SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

#: A step, how many of its arguments there are, the donated ones, and how many arrays it holds.
STEPS: dict[str, tuple[Any, int, tuple[int, ...], int]] = {
    "two change places": (lambda a, b: (b, a), 2, (0, 1), 3),
    "three change places": (lambda a, b, c: (b, c, a), 3, (0, 1, 2), 4),
    "two of three do": (lambda a, b, c: (b, a, c), 3, (0, 1, 2), 4),
    "two pairs do, one array serves both": (lambda a, b, c, d: (b, a, d, c), 4, (0, 1, 2, 3), 5),
    "one of two is renewed": (lambda a, b: (b + 1, a), 2, (0, 1), 3),
    "both are renewed": (lambda a, b: (b + 1, a + 1), 2, (0, 1), 3),
    "what is read is overwritten last": (lambda a, b, x: (b, x + a), 3, (0, 1), 4),
    "what is read no more, at once": (lambda a, b, x: (x * 2, a), 3, (0, 1), 3),
    "the step before": (lambda w, p, g: (w - 0.1 * g, w), 3, (0, 1), 3),
    "a turned one in the place of another": (lambda a, b: (b.T, a.T), 2, (0, 1), 4),
    "it leaves, and an argument takes its place": (lambda a, b: (b, a), 2, (1,), 3),
    "each stays": (lambda a, b: (a, b), 2, (0, 1), 2),
}


@pytest.mark.parametrize("target", ["cpu:1", "h100:1", "v5e:1"])
@pytest.mark.parametrize("name", STEPS)
def test_states_are_copied_to_each_other_s_places(target: str, name: str) -> None:
    """As XLA for H100 has it, where that is installed."""
    fn, count, donated, arrays = STEPS[name]
    program = te.trace(fn, *[SQUARE] * count, donate_argnums=donated)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a plan of which the certificate says something else
        plan = te.optimize(program, target, settings=QUICK).best("peak_bytes")
    assert plan.costs.peak_bytes == pytest.approx(arrays * SQUARE.size * 4, rel=0.01)
    if target == "h100:1":
        from tapestry_egg.runtime.measure.hlo import hlo_stats

        compiled = hlo_stats(te.compile(plan, h100s()[:1]).compile())
        assert compiled.peak_bytes == pytest.approx(plan.costs.peak_bytes, rel=0.01)


@pytest.mark.parametrize("target", ["h100:4", pytest.param("v5e:2x2", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", STEPS)
def test_search_and_certificate_agree_on_several_devices(target: str, name: str) -> None:
    fn, count, donated, _ = STEPS[name]
    program = te.trace(fn, *[SQUARE] * count, donate_argnums=donated)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert te.optimize(program, target, settings=QUICK)
