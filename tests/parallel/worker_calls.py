"""Functions that tests call in worker processes, and an executor that loses workers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from tapestry_egg.errors import ExtractError
from tapestry_egg.parallel.executors import WorkerLost
from tapestry_egg.parallel.serving import tell


def double(value: Any) -> Any:
    return value * 2


def process(_: int = 0) -> int:
    return os.getpid()


def imported(name: str) -> bool:
    return name in sys.modules


def say(words: list[str]) -> int:
    print("this goes to standard error")
    for word in words:
        tell({"word": word})
    return len(words)


def refuse(what: str) -> None:
    raise ExtractError(what, where="here", hint="Try something else.")


def divide(a: int, b: int) -> float:
    return a / b


def die(times: int, folder: str, value: int) -> int:
    """Kill this process so many times, counted by files in a folder; then return the value."""
    marks = list(Path(folder).glob("died-*"))
    if len(marks) < times:
        (Path(folder) / f"died-{len(marks)}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def sleep(seconds: float, mark: str = "") -> float:
    if mark:
        Path(mark).write_text(str(os.getpid()))
    time.sleep(seconds)
    return seconds


def until_stopped(mark: str) -> str:
    """Run until interrupted, telling all the time; then say so."""
    try:  # the interruption may come as soon as the mark is there
        Path(mark).write_text(str(os.getpid()))
        while True:
            tell(b"x" * 100_000)
    except KeyboardInterrupt:
        return "stopped"


class Inline(Executor):
    """Makes calls at once, here; those of the numbers given lose their worker."""

    def __init__(self, *lost: int) -> None:
        self.lost, self.calls = lost, 0
        self._max_workers = 2

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.calls in self.lost:
            future.set_exception(WorkerLost("gone"))
        else:
            future.set_result(fn(*args, **kwargs))
        self.calls += 1
        return future
