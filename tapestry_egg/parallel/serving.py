"""Serving: a worker process, seen from inside, and the frames that it and its asker exchange.

A frame is MessagePack of plain data. What is asked for comes on standard input, what is said and
what comes of a call leaves where standard output was (`child.py`).
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import IO, Any

import msgspec

from tapestry_egg import errors
from tapestry_egg.errors import TapestryError

from .child import printed_aside, read_frame, write_frame

# What a frame from a worker holds: something said, the result, or why there is none.
SAID, DONE, REFUSED, FAILED, STOPPED = range(5)
# What interrupts a call in its process; Ctrl-C itself reaches whoever asks.
_STOP = signal.SIGUSR1


def send(stream: IO[bytes], data: Any) -> None:
    """Write a frame of plain data."""
    write_frame(stream, msgspec.msgpack.encode(data))


def receive(stream: IO[bytes]) -> Any:
    """The plain data of the next frame. Raises EOFError where there is none."""
    return msgspec.msgpack.decode(read_frame(stream))


_server: _Server | None = None


def tell(data: Any) -> None:
    """Say something to whoever waits for this call; heard only where this is a worker process."""
    if _server is not None:
        _server.write([SAID, data])


def serve() -> None:
    """Make the calls that come on standard input; what is printed goes to standard error.

    Ends with standard input, and so with the process that asks, in the middle of a call too.
    """
    global _server
    _server = _Server()
    _server.serve()


class _Server:
    """A worker process, seen from inside."""

    def __init__(self) -> None:
        self._sink = printed_aside()
        self._calls: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        # Calls that have come, the last of them that was interrupted, and the one that runs.
        self._come = self._stopped = self._at = 0
        self._held = False
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(_STOP, lambda number, frame: self._check())
        threading.Thread(target=self._listen, daemon=True).start()

    def serve(self) -> None:
        count = 0
        while True:
            name, arguments = self._calls.get()
            count += 1
            try:
                self._at = count
                self._check()
                module, _, function = name.partition(":")
                frame = [DONE, getattr(import_module(module), function)(*arguments)]
                self._at = 0
            except TapestryError as error:
                frame = [REFUSED, record(error)]
            except KeyboardInterrupt:
                frame = [STOPPED, None]
            except BaseException as error:
                frame = [FAILED, "".join(traceback.format_exception(error))]
            self._at = 0
            self.write(frame)

    def write(self, frame: Any) -> None:
        """Write a frame, whole whatever comes meanwhile."""
        self._held = True
        try:
            send(self._sink, frame)
        finally:
            self._held = False
        self._check()

    def _check(self) -> None:
        """Raise KeyboardInterrupt, once, where the call that runs was interrupted."""
        if 0 < self._at <= self._stopped and not self._held:
            self._stopped = 0
            raise KeyboardInterrupt

    def _listen(self) -> None:
        source = os.fdopen(os.dup(0), "rb")
        with suppress(EOFError):
            while True:
                frame = receive(source)
                if frame is None:
                    self._stopped = self._come
                    os.kill(os.getpid(), _STOP)
                else:
                    self._come += 1
                    self._calls.put(frame)
        os._exit(0)


def record(error: TapestryError) -> list[str]:
    """An error as plain data: its class and its words."""
    known = next(c for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
    return [known.__name__, error.what, error.where, error.hint]


def error_of(data: Sequence[str]) -> TapestryError:
    """The error of `record`."""
    kind, what, where, hint = data
    return getattr(errors, kind)(what, where=where, hint=hint)
