"""What a slow first call says, and that a quick one says nothing."""

from __future__ import annotations

import logging

import pytest

from tapestry_egg import progress
from tapestry_egg.progress import Phase


def test_each_stage_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "CALL", 0.0)
    monkeypatch.setattr(progress, "STAGE", 0.0)
    passed: list[Phase] = []
    with (
        caplog.at_level(logging.WARNING, "tapestry_egg"),
        progress.Alarm("step", passed.append) as a,
    ):
        for _ in range(2):
            for phase in (Phase("encode", "7 operations", None, "8x"), Phase("saturate")):
                a(phase)
                if a._timer is not None:
                    a._timer.join()
            a(Phase("saturate", "", 1.0))
            assert a._timer is None
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2 and len(passed) == 6
    assert "step is being planned" in told[0] and "encode 8x: 7 operations" in told[0]
    assert "saturate" in told[1]


def test_a_quick_stage_and_a_call_that_ends_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with progress.Alarm("step") as alarm:
        alarm(Phase("encode"))
        first = alarm._timer
        alarm(Phase("encode", "", 1.0))
        alarm(Phase("extract"))
        last = alarm._timer
    for timer in (first, last):
        assert timer is not None
        timer.join()
    assert not caplog.records
