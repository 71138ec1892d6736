"""Executors: calls of functions on plain data, in processes of this machine or of others.

Whatever runs side by side goes through one interface, `concurrent.futures.Executor`. `Processes` is
the one that is used when none is given; a Dask cluster's, a pool of threads or any other will do.
A call names a function of a module of this package; its arguments and its result are plain data
(None, flags, numbers, text, bytes, lists and dicts of them), so that nothing that travels can
execute. A worker that is lost loses its own call and no other: `completed` submits it once more.
An interruption (Ctrl-C) reaches the calls that run, so that they can give what they have.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .serving import DONE, FAILED, REFUSED, STOPPED, Child, error_of, receive, send

#: Takes what a call says while it runs: the number of the call, and the data.
Heard = Callable[[int, Any], None]

#: The note on a result that an interruption cut short.
INTERRUPTED = "interrupted: this is what was found until then"


class WorkerLost(BrokenExecutor):
    """A worker process ended before its call did."""


@dataclass
class _Call:
    function: str
    arguments: list[Any]
    heard: Callable[[Any], None] | None
    future: Future[Any] = field(default_factory=Future)


class Processes(Executor):
    """Python processes that make calls, one each at a time; they start when they are needed.

    They import this package and what a function needs, never the program that runs here, so that
    scripts need no `__main__` guard. When one dies, its call raises `WorkerLost` and the next call
    gets a fresh process. Leaving a `with` block by an exception kills what still runs.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = max(1, workers or os.cpu_count() or 1)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._children: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The future of a call of a module's function on plain data, by position.

        Raises RuntimeError after `shutdown`, TypeError for what cannot travel.
        """
        if kwargs:
            raise TypeError("arguments travel by position")
        return self.submit_heard(None, fn, *args)

    def submit_heard(
        self, heard: Callable[[Any], None] | None, fn: Callable[..., Any], /, *args: Any
    ) -> Future[Any]:
        """`submit`, and call `heard`, in another thread, with everything that `fn` tells."""
        if not fn.__qualname__.isidentifier() or fn.__module__ == "__main__":
            raise TypeError(f"{fn.__qualname__} is not a function of a module")
        call = _Call(f"{fn.__module__}:{fn.__qualname__}", list(args), heard)
        with self._lock:
            if self._closed:
                raise RuntimeError("no calls after shutdown")
            self._calls.put(call)
            if len(self._threads) < self.workers:
                thread = threading.Thread(target=self._work, daemon=True)
                self._threads.append(thread)
                thread.start()
        return call.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; end the processes when they have made those that are there."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                self._cancel()
            for _ in self._threads:
                self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _cancel(self) -> None:
        with suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None and call.future.cancel():
                    call.future.set_running_or_notify_cancel()  # tells those who wait

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the calls that run; those that wait for a process are
        cancelled, as are those that do not catch it."""
        with self._lock:
            self._cancel()
            for child in self._children:
                child.interrupt()

    def kill(self) -> None:
        """End the processes now; calls that have no result yet raise `WorkerLost`."""
        self.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for child in self._children:
                child.process.kill()

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.kill()
        self.shutdown(wait=True)

    def _work(self) -> None:
        """Hand calls to one process after another, until there are no more."""
        child: _Worker | None = None
        while (call := self._calls.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                if child is None:
                    child = _Worker()
                    with self._lock:
                        self._children.add(child)
                call.future.set_result(child.result(call))
            except (EOFError, OSError):
                code = None if child is None else self._end(child)
                child = None
                call.future.set_exception(WorkerLost(f"a worker process ended (code {code})"))
            except BaseException as error:
                call.future.set_exception(error)
        if child is not None:
            self._end(child)

    def _end(self, child: _Worker) -> int:
        code = child.end()
        with self._lock:
            self._children.discard(child)
        return code


class _Worker(Child):
    """A worker process, seen from here."""

    def __init__(self) -> None:
        super().__init__("tapestry_egg.parallel.serving:serve", threads=1)
        self._lock = threading.Lock()

    def result(self, call: _Call) -> Any:
        """The result of a call made there. Raises what the function raised, CancelledError where it
        was interrupted, EOFError or OSError when the process is gone."""
        self._write([call.function, call.arguments])
        while True:
            what, data = receive(self.source)
            if what == DONE:
                return data
            if what == REFUSED:
                raise error_of(data)
            if what == STOPPED:
                raise CancelledError
            if what == FAILED:
                raise RuntimeError(f"{call.function} failed in a worker process\n{data}")
            if call.heard is not None:
                call.heard(data)

    def interrupt(self) -> None:
        with suppress(OSError, ValueError):  # it has ended
            self._write(None)

    def _write(self, data: Any) -> None:
        with self._lock:
            send(self.to, data)


# For whoever has work


@dataclass(frozen=True)
class Lost:
    """What became of a call whose worker was lost: why, and whether it is made once more."""

    reason: str
    again: bool


def completed(
    executor: Executor,
    function: Callable[..., Any],
    calls: Sequence[Sequence[Any]],
    heard: Heard | None = None,
) -> Iterator[tuple[int, Any]]:
    """Pairs of a call's number and its result, as the calls end.

    A call whose worker is lost yields `Lost` and is submitted once more; lost again, it yields a
    `Lost` that is not `again`, and that is all of it. What a function tells is `heard` where the
    executor is `Processes`. Raises what a function raises. An interruption (Ctrl-C) interrupts the
    calls; what they still give is yielded before KeyboardInterrupt is raised.
    """
    running: dict[Future[Any], int] = {}
    tried = [0] * len(calls)
    waiting = deque(range(len(calls)))
    lost: list[tuple[int, Lost]] = []
    stopping = False

    def submit(k: int) -> None:
        tried[k] += 1
        try:
            if isinstance(executor, Processes):
                told = None if heard is None else lambda data: heard(k, data)
                running[executor.submit_heard(told, function, *calls[k])] = k
            else:
                running[executor.submit(function, *calls[k])] = k
        except BrokenExecutor as error:
            lost.append((k, Lost(_words(error), False)))

    while waiting or running:
        try:  # whoever interrupts may do so while calls are still being submitted
            while waiting:
                submit(waiting.popleft())
            done = wait(running, return_when=FIRST_COMPLETED).done
        except KeyboardInterrupt:
            if stopping or not isinstance(executor, Processes):
                for future in running:
                    future.cancel()
                raise
            stopping = True
            waiting.clear()
            executor.interrupt()
            continue
        for future in sorted(done, key=running.__getitem__):
            k = running.pop(future)
            try:
                yield k, future.result()
                continue
            except BaseException as error:
                if not _is_loss(error):
                    raise
                loss = Lost(_words(error), tried[k] < 2)
            if not stopping:
                lost.append((k, loss))
                if loss.again:
                    waiting.append(k)
        yield from lost
        lost.clear()
    if stopping:
        raise KeyboardInterrupt


def _is_loss(error: BaseException) -> bool:
    """Whether an error speaks of a worker, not of the function that it ran."""
    own = isinstance(error, BrokenExecutor | CancelledError | ConnectionError | MemoryError)
    return own or type(error).__module__.partition(".")[0] == "distributed"


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def host_only() -> None:
    """Keep JAX off the accelerators: tracing and searching need none."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
