"""docs/rules: a user's rule for a kernel of theirs, each in a file of its own, changes the plan."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.reference import kernels
from tapestry_egg.rules import load_book
from tapestry_egg.rules.verify.verdicts import verify_rule
from tapestry_egg.tracing.trace import trace

FOLDER = Path(__file__).parents[2] / "docs" / "rules"


@pytest.fixture(scope="module")
def largest() -> Iterator[ModuleType]:
    """The example, its kernel known while it is looked at: other tests go through all kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_OWN", {})
        spec = importlib.util.spec_from_file_location("largest", FOLDER / "largest.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.slow
def test_a_rule_for_a_kernel_of_ones_own_changes_the_plan(largest: ModuleType) -> None:
    (rule,) = load_book(largest.RULES).rules
    verdict = verify_rule(rule)
    assert verdict.instances and "largest" in verdict.kernels
    function, arguments = largest.example()

    def best(**options: object) -> te.Plan:
        return optimize(
            trace(function, *arguments),
            "h100:8",
            mesh_shapes=[MeshShape(("x",), (8,))],
            settings=Settings(work=1.0),
            **options,  # type: ignore[arg-type]
        ).best("seconds")

    without, with_it = best(), best(rules=[largest.RULES])
    assert "sort" in {op.kernel for op in without.graph.operations}
    assert {op.kernel for op in with_it.graph.operations} == {"largest", "mul"}
    assert with_it.rules == ("largest-instead-of-sorting",)
    assert with_it.costs.seconds < without.costs.seconds
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=a.shape).astype(np.float32) for a in arguments]
    run = te.compile(with_it, jax.devices()[:8])
    np.testing.assert_array_equal(run(*inputs), np.sort(inputs[0])[:, -1:] * inputs[1])
