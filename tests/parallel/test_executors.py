"""Executors: calls in other processes, what they say, and what the loss of a process costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tapestry_egg.errors import ExtractError
from tapestry_egg.parallel.executors import (
    Lost,
    Processes,
    WorkerLost,
    completed,
)
from tests.parallel import worker_calls as calls

ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_calls_run_elsewhere_on_plain_data() -> None:
    with Processes(2) as pool:
        for value in (3, -(2**62), 0.1, "é", b"\0\xff" * 70000, [1, [None, True]], ""):
            assert pool.submit(calls.double, value).result() == value * 2
        found = list(pool.map(calls.process, range(6)))
        assert os.getpid() not in found
        assert 1 <= len(set(found)) <= 2, "processes are used again"
        assert not pool.submit(calls.imported, "jax").result()
    assert not any(map(alive, found))


def test_what_a_call_tells_is_heard_and_what_it_prints_is_not() -> None:
    heard: list[tuple[int, Any]] = []
    with Processes(2) as pool:
        work = [[["a", "b"]], [["c"]], [[]]]
        done = dict(completed(pool, calls.say, work, lambda k, x: heard.append((k, x["word"]))))
    assert done == {0: 2, 1: 1, 2: 0}
    assert sorted(heard) == [(0, "a"), (0, "b"), (1, "c")]


def test_errors_arrive_as_they_were_raised_and_the_process_goes_on() -> None:
    with Processes(1) as pool:
        first = pool.submit(calls.process).result()
        with pytest.raises(ExtractError) as caught:
            pool.submit(calls.refuse, "no way").result()
        told = (caught.value.what, caught.value.where, caught.value.hint)
        assert told == ("no way", "here", "Try something else.")
        with pytest.raises(RuntimeError, match=r"(?s)worker_calls:divide.*ZeroDivisionError"):
            pool.submit(calls.divide, 1, 0).result()
        with pytest.raises(TypeError):
            pool.submit(calls.double, object()).result()
        assert pool.submit(calls.process).result() == first
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(calls.process)


@pytest.mark.parametrize("what", [lambda: 1, str.upper, Processes().submit])
def test_only_functions_of_modules_can_be_called(what: Any) -> None:
    with Processes(1) as pool, pytest.raises(TypeError, match="not a function of a module"):
        pool.submit(what)


def test_a_lost_worker_loses_its_own_call_only(tmp_path: Path) -> None:
    with Processes(2) as pool:
        kept = [pool.submit(calls.double, k) for k in range(4)]
        lost = pool.submit(calls.die, 1, str(tmp_path), 7)
        kept += [pool.submit(calls.double, k) for k in range(4, 8)]
        with pytest.raises(WorkerLost, match="code -9"):
            lost.result()
        assert [f.result() for f in kept] == [2 * k for k in range(8)]


def test_the_call_of_a_lost_worker_is_made_again(tmp_path: Path) -> None:
    with Processes(2) as pool:
        work = [(0, str(tmp_path), 5), (1, str(tmp_path), 6), (0, str(tmp_path), 7)]
        told = list(completed(pool, calls.die, work))
    assert {k: x for k, x in told if not isinstance(x, Lost)} == {0: 5, 1: 6, 2: 7}
    ((k, lost),) = [(k, x) for k, x in told if isinstance(x, Lost)]
    assert k in (1, 2) and lost.again and "code -9" in lost.reason
    for mark in tmp_path.iterdir():
        mark.unlink()
    with Processes(1) as pool:
        told = list(completed(pool, calls.die, [(2, str(tmp_path), 5), (0, str(tmp_path), 6)]))
    assert [x.again for k, x in told if isinstance(x, Lost) and k == 0] == [True, False]
    assert (1, 6) in told


def test_any_executor_will_do(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        assert dict(completed(threads, calls.double, [[1], [2]])) == {0: 2, 1: 4}
        with pytest.raises(ZeroDivisionError):
            list(completed(threads, calls.divide, [[1, 0]]))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as broken:
        told = list(completed(broken, calls.die, [(9, str(tmp_path), 5)]))
    assert [x.again for _, x in told] == [True, False], "a broken pool takes no more calls"


def test_an_exception_ends_the_processes(tmp_path: Path) -> None:
    mark = tmp_path / "running"
    begun = time.monotonic()
    with suppress(KeyboardInterrupt), Processes(1) as pool:
        future = pool.submit(calls.sleep, 600.0, str(mark))
        never = pool.submit(calls.double, 1)
        while not (mark.exists() and mark.read_text()):
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert time.monotonic() - begun < 300
    assert not alive(int(mark.read_text()))
    assert isinstance(future.exception(), WorkerLost) and never.cancelled()


@pytest.mark.slow
@pytest.mark.child
def test_an_interruption_reaches_the_calls_which_give_what_they_have(tmp_path: Path) -> None:
    with Processes(1) as pool:
        got = completed(pool, calls.until_stopped, [[str(tmp_path / "d")], [str(tmp_path / "e")]])
        threading.Thread(target=interrupt_at, args=(tmp_path / "d",)).start()
        assert next(got) == (0, "stopped")
        with pytest.raises(KeyboardInterrupt):
            next(got)
        # One that does not listen is over as well.
        got = completed(pool, calls.sleep, [[600.0, str(tmp_path / "f")]])
        threading.Thread(target=interrupt_at, args=(tmp_path / "f",)).start()
        with pytest.raises(KeyboardInterrupt):
            next(got)


def test_an_interruption_may_come_while_calls_are_still_submitted(tmp_path: Path) -> None:
    mark = tmp_path / "running"

    class Interrupted(Processes):
        def submit_heard(self, heard: Any, fn: Any, /, *args: Any) -> Future[Any]:
            if args[0] != str(mark):
                while not mark.exists():
                    time.sleep(0.01)
                raise KeyboardInterrupt
            return super().submit_heard(heard, fn, *args)

    with Interrupted(1) as pool:
        got = completed(pool, calls.until_stopped, [[str(mark)], ["second"], ["third"]])
        assert next(got) == (0, "stopped")
        with pytest.raises(KeyboardInterrupt):
            next(got)


def interrupt_at(mark: Path) -> None:
    while not mark.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_scripts_need_no_guard_and_leave_nothing_behind(tmp_path: Path) -> None:
    mark = tmp_path / "running"
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "from tapestry_egg.parallel.executors import Processes\n"
        "from tests.parallel import worker_calls as calls\n"
        "print('once')\n"
        "pool = Processes(2)\n"
        "assert pool.submit(calls.double, 4).result() == 8\n"
        f"pool.submit(calls.sleep, 600.0, {str(mark)!r})\n"
        f"while not os.path.exists({str(mark)!r}) or not open({str(mark)!r}).read():\n"
        "    time.sleep(0.01)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "once\n", done.stderr
    for _ in range(3000):
        if not alive(int(mark.read_text())):
            break
        time.sleep(0.01)
    assert not alive(int(mark.read_text())), "a worker ends with whoever started it"
