"""Two processes of four CPU devices each: one plan, right numbers, and errors instead of hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapestry_egg.errors import ExtractError, PeerError, TapestryError
from tapestry_egg.runtime.processes.distributed import PATIENCE, Peers

from .distributed_job import Ended, run_job


class Store:
    """The key-value store of a job, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, overwrite: bool = False) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1e3):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_dir_get_bytes(self, folder: str) -> list[tuple[str, bytes]]:
        with self.changed:
            return [(k, v) for k, v in self.values.items() if k.startswith(folder)]

    def key_value_delete(self, folder: str) -> None:
        with self.changed:
            for key in [k for k in self.values if k.startswith(f"{folder}/")]:
                del self.values[key]


def in_processes(
    count: int, run: Callable[[Peers], Any], store: Store | None = None, patience: float = 60.0
) -> list[Any]:
    """What `run` gives, or raises, in each of `count` processes, played by threads."""
    shared = store or Store()
    found: list[Any] = [None] * count

    def one(k: int) -> None:
        try:
            found[k] = run(Peers(range(count), k, shared, patience))
        except BaseException as error:
            found[k] = error

    threads = [threading.Thread(target=one, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_have_what_the_first_made() -> None:
    made = []
    data = bytes(range(256)) * 10_000  # several pieces

    def run(peers: Peers) -> bytes:
        def make() -> bytes:
            made.append(peers.me)
            return data

        with peers.together():
            peers.agree("plan f", {"limits": "none"})
            return peers.handed("plan f", make)

    assert in_processes(3, run) == [data] * 3
    assert made == [0]


def test_rounds_that_all_have_passed_are_forgotten() -> None:
    store = Store()

    def run(peers: Peers) -> None:
        for k in range(5):
            with peers.together():
                peers.agree(f"plan f{k}", {})
                peers.handed(f"plan f{k}", lambda: b"front")

    assert in_processes(2, run, store) == [None, None]
    assert {k.split("/")[2] for k in store.values if "/alive/" not in k} == {"5"}


def test_a_difference_is_raised_by_all_and_names_the_process() -> None:
    def run(peers: Peers) -> None:
        with peers.together():
            peers.agree("plan f", {"limits": "40GiB" if peers.me == 2 else "60GiB"})

    errors = in_processes(4, run)
    assert len({str(e) for e in errors}) == 1
    assert all(isinstance(e, PeerError) for e in errors)
    assert "process 2 is about to plan f differently: limits: 40GiB" in str(errors[0])


def test_another_order_of_calls_names_both() -> None:
    def run(peers: Peers) -> None:
        with peers.together():
            peers.agree("plan g" if peers.me == 1 else "plan f", {})

    errors = in_processes(3, run)
    assert all("process 1 is about to plan g, process 0 to plan f" in str(e) for e in errors)


def test_what_the_first_raises_all_raise_and_the_next_round_is_a_new_one() -> None:
    def run(peers: Peers) -> list[str]:
        said = []
        for error in (ExtractError("no plan", where="limits", hint="Ask less."), KeyError("bug")):

            def make(error: Exception = error) -> bytes:
                raise error

            try:
                with peers.together():
                    peers.agree("plan f", {})
                    peers.handed("plan f", make)
            except (TapestryError, KeyError) as raised:
                said.append(f"{type(raised).__name__} {raised}")
        with peers.together():
            peers.agree("plan f", {})
            return [*said, peers.handed("plan f", lambda: b"front").decode()]

    first, *others = in_processes(3, run)
    assert first == ["ExtractError limits: no plan\n  Ask less.", "KeyError 'bug'", "front"]
    assert others[0] == others[1] == [first[0], others[0][1], "front"]
    assert others[0][1].startswith("PeerError process 0: process 0 failed: KeyError: 'bug'")


def test_a_process_that_does_not_come_is_named() -> None:
    def run(peers: Peers) -> None:
        if peers.me != 1:
            with peers.together():
                peers.agree("plan f", {})

    errors = in_processes(3, run, patience=0.5)
    assert all("process 1 has not come within 0.5 s" in str(errors[k]) for k in (0, 2))


def test_a_first_process_that_does_not_come_is_named() -> None:
    def run(peers: Peers) -> None:
        if peers.me != 0:
            with peers.together():
                peers.agree("plan f", {})

    errors = in_processes(3, run, patience=0.5)
    assert all("process 0 has not come within 0.5 s" in str(errors[k]) for k in (1, 2))


@pytest.mark.slow
def test_who_is_at_work_is_waited_for_longer() -> None:
    def run(peers: Peers) -> bytes:
        def slow() -> bytes:
            time.sleep(4.0)
            return b"front"

        with peers.together():
            peers.agree("plan f", {})
            return peers.handed("plan f", slow)

    assert in_processes(2, run, patience=2.5) == [b"front"] * 2


def test_a_process_that_dies_at_work_is_named() -> None:
    def run(peers: Peers) -> None:
        if peers.me == 1:
            peers._show("in")  # its last sign of life
            peers._put("1/said/1", b'{"doing": "plan f"}')
            return
        with peers.together():
            peers.agree("plan f", {})
            peers.handed("plan f", lambda: b"front")
            peers.agree("run f", {})

    first, _ = in_processes(2, run, patience=1.0)
    assert "process 1 died or hangs" in str(first)


def test_a_process_that_fails_by_itself_is_named() -> None:
    def run(peers: Peers) -> None:
        with peers.together():
            peers.agree("plan f", {})
            peers.handed("plan f", lambda: b"front")
            if peers.me == 1:
                raise MemoryError("too much")
        with peers.together():
            peers.agree("run f", {})

    first, second, third = in_processes(3, run)
    assert "process 1 failed: MemoryError: too much" in str(first)
    assert str(third) == str(first)
    assert isinstance(second, MemoryError)


def test_patience_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from tapestry_egg.runtime.processes import distributed

    monkeypatch.setenv(PATIENCE, "90")
    assert distributed._patience() == 90.0
    monkeypatch.setenv(PATIENCE, "soon")
    with pytest.raises(PeerError, match="'soon' is not a number of seconds"):
        distributed._patience()


# ---- jobs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job() -> list[Ended]:
    """All scenarios in two processes."""
    return whole(run_job("train calls faults", {}, {"sleep": 1.0, "nice": 10}))


def whole(ended: list[Ended]) -> list[Ended]:
    assert [e.code for e in ended] == [0, 0], "\n".join(e.text for e in ended)
    return ended


def check_train(ended: list[Ended], searches: list[int]) -> None:
    told = [e.told["train"] for e in ended]
    assert all(all(one["right"]) and one["global"] for one in told), told
    assert told[0]["plan"] == told[1]["plan"]
    assert [one["searches"] for one in told] == searches


@pytest.mark.slow
def test_two_processes_have_one_plan_and_right_numbers_and_search_once(job: list[Ended]) -> None:
    check_train(job, [1, 0])


@pytest.mark.long
def test_a_second_job_finds_the_plan_of_the_first_one(tmp_path: Path) -> None:
    env = {"TAPESTRY_EGG_PLAN_CACHE": str(tmp_path)}
    first, second = (whole(run_job("train", {}, {}, env=env)) for _ in range(2))
    check_train(first, [1, 0])
    check_train(second, [0, 0])
    assert first[0].told["train"]["plan"] == second[0].told["train"]["plan"]


@pytest.mark.slow
def test_every_difference_is_an_error_on_every_process(job: list[Ended]) -> None:
    first, second = (e.told["faults"] for e in job)
    for name, words in {
        "program": "process 1 is about to plan step differently: ",
        "limits": 'limits: {"peak_bytes": "2000000000.0"} there',
        "version": "tapestry-egg: 9.9",
        "data": "argument [1]: its own copy",
        "order": "process 1 is about to plan square, process 0 to plan double",
        "unmet": "no plan meets the limits",
    }.items():
        assert words in first[name], name
        assert second[name] == first[name]
    assert first["unmet"].startswith("ExtractError")
    assert first["defect"] == "ZeroDivisionError: a defect"
    assert "process 0 failed: ZeroDivisionError: a defect" in second["defect"]
    assert "process 1 is about to run double differently: compilation: " in first["compilation"]
    assert second["compilation"] == "ZeroDivisionError: no memory"
    assert first["nothing"] == second["nothing"] == "none"
    assert "process 1 has not come within 2 s" in first["absent"]
    assert second["absent"] == first["absent"]  # it came too late


@pytest.mark.slow
def test_calls_into_python_are_made_once_in_all_and_what_they_raise_comes_everywhere(
    job: list[Ended],
) -> None:
    first, second = (e.told["calls"] for e in job)
    once = ["io 1", "pure 2", "debug 3", "loop 3", "loop 4", "loop 5"]
    assert all(first["right"]) and all(second["right"])
    assert first["made"] == 2 * once and second["made"] == []
    assert "the user's own" in first["raised"]
    assert "failed in another process" in second["raised"]


@pytest.mark.long
def test_another_number_of_devices_is_an_error_on_every_process() -> None:
    ended = run_job("train", {}, {"devices": 2})
    for e in ended:
        assert "devices: 2 local ones of 6 there, 4 local ones" in e.told.get("error", ""), e.text


@pytest.mark.long
def test_a_process_that_dies_while_the_first_one_plans_is_named() -> None:
    env = {PATIENCE: "6"}
    first, second = run_job("train", {"search_sleep": 10.0}, {"dies_after": 5.0}, env=env)
    assert second.code == 9, second.text
    assert "process 1 died or hangs" in first.told.get("error", ""), first.text
