"""Child processes: what they are asked and tell, what they import, and how they end."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tapestry_egg.parallel.serving import Child, ready, write_frame

CALLS = "tests.parallel.child_calls"
#: Seconds within which a busy machine does what it is asked.
SOON = 120.0


def gone(pid: int) -> bool:
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            time.sleep(0.01)
            continue
        return True
    return False


@pytest.mark.parametrize("threads", [None, 1])
def test_it_is_asked_and_tells_and_what_it_prints_is_not_heard(threads: int | None) -> None:
    child = Child(f"{CALLS}:answer", "a", "b c", threads=threads, quiet=True)
    write_frame(child.to, bytes(range(256)) * 1000)
    told = []
    while child.open:
        told += child.lines(SOON)
    own = os.environ.get("OMP_NUM_THREADS") if threads is None else str(threads)
    assert told == [
        {"asked": list(range(256)) * 1000, "arguments": ["a", "b c"], "threads": own},
        "long " * 100_000,
    ]
    assert child.end() == 0 and child.lines(SOON) == []


def test_lines_come_whole_and_none_is_waited_for_in_vain() -> None:
    child = Child(f"{CALLS}:raw")

    def ask() -> None:
        child.to.write(b"\n")
        child.to.flush()

    assert child.lines() == [] and ready([child], 0.0) == []
    ask()
    assert ready([child], SOON) == [child]
    assert child.lines() == [] and child.open, "half a line"
    ask()
    assert child.lines(SOON) == [{"one": 1}, [2]]
    ask()
    assert child.lines(SOON) == ["three"] and child.open
    assert child.kill() == -signal.SIGKILL and not child.lines()


def test_one_that_has_told_is_ready_and_so_is_one_that_has_ended() -> None:
    children = [Child(f"{CALLS}:raw") for _ in range(3)]
    children[1].process.kill()
    assert ready(children, SOON) == [children[1]]
    assert children[1].lines(SOON) == [] and not children[1].open
    assert [child.end() for child in children] == [0, -signal.SIGKILL, 0], "it ends with its input"


def test_a_signal_of_the_terminal_does_not_reach_it() -> None:
    child = Child(f"{CALLS}:busy")
    write_frame(child.to, b"")
    assert child.lines(SOON) == [child.process.pid]
    child.process.send_signal(signal.SIGINT)
    assert child.lines(0.2) == [] and child.open
    child.to.close()
    assert child.process.wait(SOON) == 0


def test_it_ends_with_whoever_started_it() -> None:
    parent = Child(f"{CALLS}:parent")
    (number,) = parent.lines(SOON)
    assert parent.end() == -signal.SIGKILL
    assert gone(number)


def test_it_imports_from_where_this_process_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "of_the_user.py").write_text(
        "from tapestry_egg.parallel.serving import request, say\n"
        "def main():\n"
        "    request()\n"
        "    say('found')\n"
    )
    # A file in the current folder that has the name of a module is not imported for it.
    (tmp_path / "selectors.py").write_text("raise SystemExit(7)")
    monkeypatch.syspath_prepend(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    child = Child("of_the_user:main")
    with suppress(OSError):
        write_frame(child.to, b"")
    assert child.lines(SOON) == ["found"]
    assert child.end() == 0
