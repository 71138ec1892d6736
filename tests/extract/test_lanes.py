"""Lanes: what every device does when, as a plan tells it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import tapestry_egg as te
from models import mlp
from tapestry_egg.errors import ExtractError
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline.settings import Settings

BRIEF = Settings(work=0.5, workers=1)


@pytest.fixture(scope="module", params=["h100:8", "cpu:8"])
def front(request: pytest.FixtureRequest) -> te.Front:
    step, args = mlp.example()
    return te.optimize(te.trace(step, *args), request.param, settings=BRIEF)


def test_nothing_of_one_stream_overlaps(front: te.Front) -> None:
    for plan in front.plans:
        lanes = plan.lanes()
        for stream in ("compute", "links"):
            bars = [x for x in lanes if x.stream == stream]
            for before, after in pairwise(bars):
                assert after.start >= before.end * (1 - 1e-12)


def test_what_is_hidden_is_what_both_streams_do_at_once(front: te.Front) -> None:
    slowdown = load_target(front.target).overlap_slowdown or 0.0
    for plan in front.plans:
        lanes = plan.lanes()
        own = sum(x.end - x.start for x in lanes)
        hidden = sum(x.hidden for x in lanes)
        # Each stream is slowed down by what is hidden.
        assert own - 2 * slowdown * hidden == pytest.approx(plan.costs.serial_seconds)
        end = max(x.end for x in lanes)
        assert end == pytest.approx(plan.costs.serial_seconds - (1 - slowdown) * hidden)
        if front.target == "cpu:8":
            assert hidden == 0.0


def test_a_plan_without_a_machine_has_no_lanes(front: te.Front) -> None:
    with pytest.raises(ExtractError, match="what machine"):
        replace(front.plans[0], origin=None).lanes()
