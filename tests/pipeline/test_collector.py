"""Full collections while a program is planned: rare, and as often as before afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.collector import rarely_collected


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_while_a_call_is_planned_full_collections_are_rare() -> None:
    gc.set_threshold(600, 8, 9)
    seen: list[tuple[int, ...]] = []
    step = te.jit(
        lambda x: x * 2.0, cache=False, on_progress=lambda _: seen.append(gc.get_threshold())
    )
    step(np.ones(64, np.float32))
    assert min(s[0] for s in seen) >= 6000 and min(s[1] * s[2] for s in seen) >= 10_000
    assert gc.get_threshold() == (600, 8, 9)


def test_within_each_other_the_last_one_restores() -> None:
    gc.set_threshold(600, 8, 9)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with rarely_collected():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with rarely_collected():
        thread.start()
        inside.wait()
    assert min(gc.get_threshold()[1:]) >= 100
    leave.set()
    thread.join()
    assert gc.get_threshold() == (600, 8, 9)


def test_what_the_user_sets_meanwhile_stays() -> None:
    with rarely_collected():
        gc.set_threshold(500, 7, 6)
    assert gc.get_threshold() == (500, 7, 6)
    gc.set_threshold(500, 7, 5000)
    with pytest.raises(KeyError), rarely_collected():
        assert gc.get_threshold() == (5000, 100, 5000)
        raise KeyError
    assert gc.get_threshold() == (500, 7, 5000)


@pytest.mark.slow
def test_no_full_collection_follows_at_once() -> None:
    gc.unfreeze()  # what was imported, see conftest.py
    gc.set_threshold(100, 2, 3)
    gc.collect()
    # Python looks through everything only once it has grown by a quarter.
    full, many = list[int](), 600_000 + len(gc.get_objects()) // 2

    def heard(phase: str, info: dict[str, int]) -> None:
        full.append(info["generation"] == 2 and phase == "start")

    gc.callbacks.append(heard)
    try:
        with rarely_collected():
            kept = [[] for _ in range(many)]  # type: ignore[var-annotated]
        few = [[] for _ in range(300)]  # type: ignore[var-annotated]
    finally:
        gc.callbacks.remove(heard)
    assert len(full) > 20 and not any(full)
    del kept, few


def test_what_the_user_froze_stays_frozen() -> None:
    gc.set_threshold(100, 2, 3)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with rarely_collected():
            kept = [[] for _ in range(20_000)]  # type: ignore[var-annotated]
        # What is frozen may still die by itself, a few objects; the lists would be 20 000.
        assert frozen - 1000 < gc.get_freeze_count() <= frozen
        del kept
    finally:
        gc.unfreeze()
