"""Lanes: what every device does when, as a plan tells it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import tapestry_egg as te
from models import mlp, recurrent, while_loop
from tapestry_egg.errors import ExtractError
from tapestry_egg.pipeline.settings import Settings

pytestmark = pytest.mark.slow

BRIEF = Settings(work=0.1, workers=1, recompute=0, forms=0)


@pytest.fixture(
    scope="module",
    params=["h100:8 beside", "h100:8", "cpu:8 beside"],
)
def front(request: pytest.FixtureRequest) -> te.Front:
    step, args = mlp.example()
    target, _, overlap = request.param.partition(" ")
    settings = replace(BRIEF, overlap=bool(overlap), forms=0)
    mesh = te.MeshShape(("x", "y"), (2, 4))
    return te.optimize(te.trace(step, *args), target, mesh_shapes=[mesh], settings=settings)


def slowdown(front: te.Front) -> float | None:
    assert front.plans[0].origin is not None
    return front.plans[0].origin.machine.slowdown


def test_nothing_of_one_stream_overlaps(front: te.Front) -> None:
    for plan in front.plans:
        lanes = plan.lanes()
        for stream in ("compute", "links"):
            bars = [x for x in lanes if x.stream == stream]
            for before, after in pairwise(bars):
                assert after.start >= before.end * (1 - 1e-12)


def test_lanes_end_when_the_step_does(front: te.Front) -> None:
    hidden = 0.0
    for plan in front.plans:
        lanes = plan.lanes()
        own, beside = sum(x.end - x.start for x in lanes), sum(x.hidden for x in lanes)
        # Each stream is slowed down by what is hidden.
        slowed = 2 * (slowdown(front) or 0.0) * beside
        assert own - slowed == pytest.approx(plan.costs.serial_seconds)
        assert max(x.end for x in lanes) == pytest.approx(plan.costs.seconds)
        hidden += beside
    assert (hidden > 0.0) == (slowdown(front) is not None)


def test_seconds_are_the_sum_of_all_where_nothing_runs_beside_anything(front: te.Front) -> None:
    if slowdown(front) is None:
        for plan in front.plans:
            assert plan.costs.seconds == plan.costs.serial_seconds
            assert not any(note.kind == "overlap" for note in front.notes)
    else:
        assert any(p.costs.seconds < p.costs.serial_seconds for p in front.plans)
        assert any(note.kind == "overlap" for note in front.notes)


@pytest.mark.parametrize("model", [recurrent, while_loop])
def test_programs_with_loops_are_certified(model: ModuleType) -> None:
    step, args = model.example()
    settings = replace(BRIEF, overlap=True, forms=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a plan that the certificate refuses is a warning
        front = te.optimize(te.trace(step, *args), "h100:8", settings=settings)
    assert any(p.costs.seconds < p.costs.serial_seconds for p in front.plans)


def test_a_plan_made_for_overlap_is_admitted_from_its_file(front: te.Front, tmp_path: Path) -> None:
    te.save(front, tmp_path / "mlp.front.json")
    loaded = te.load(tmp_path / "mlp.front.json")
    assert isinstance(loaded, te.Front)
    assert [p.costs for p in loaded.plans] == [p.costs for p in front.plans]


def test_a_plan_without_a_machine_has_no_lanes(front: te.Front) -> None:
    with pytest.raises(ExtractError, match="what machine"):
        replace(front.plans[0], origin=None).lanes()
