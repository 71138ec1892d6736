"""Serving: a worker process, seen from inside, and the frames that it and its asker exchange.

A frame is MessagePack of plain data. What is asked for comes on standard input, what is said and
what comes of a call leaves where standard output was (`serving.py`).
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import IO, Any

import msgspec

from tapestry_egg import errors
from tapestry_egg.errors import TapestryError

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


# Child processes: started, asked, heard and ended in one way.
#
# A child is a Python process that runs one function of this package, or of what else this process
# can import: it imports from where this process imports, and nothing of the program that runs here.
# It is asked on its standard input (frames) and tells on its standard output (frames, or lines of
# JSON); what travels is plain data, so nothing that travels can execute. Ctrl-C does not reach it:
# whoever started it decides what becomes of it. It ends with its standard input, and so with
# whoever started it, however that one ends.


# A terminal sends Ctrl-C to children too: first of all they are made deaf to it.
_START = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from {0} import {1}; {1}()"


class Child:
    """A process that runs a function (`module:name`), seen from whoever started it.

    `threads` is how many its numerical libraries may use, as many as they like where none is given.
    One that is `quiet` tells nothing on standard error.
    """

    def __init__(
        self, function: str, *arguments: str, threads: int | None = None, quiet: bool = False
    ) -> None:
        own = {"PYTHONPATH": os.pathsep.join(p or os.curdir for p in sys.path)}
        if threads is not None:
            own["OMP_NUM_THREADS"] = str(threads)
        # Nothing is imported from the current folder (-P), unless this process would as well.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START.format(*function.split(":")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env={**os.environ, **own},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.to, self.source = self.process.stdin, self.process.stdout
        self.open = True  # until the end of what it tells has come
        self._parts: list[bytes] = []  # of a line that has not ended yet

    def lines(self, seconds: float = 0.0) -> list[Any]:
        """What it has told in lines of JSON and was not read yet, at least one line where that
        comes within `seconds`; nothing more comes once it is not `open`."""
        end = time.perf_counter() + seconds
        while self.open and ready([self], end - time.perf_counter()):
            data = os.read(self.source.fileno(), 1 << 20)
            self.open = bool(data)
            head, newline, rest = data.rpartition(b"\n")
            if newline:
                text, self._parts = b"".join([*self._parts, head]), [rest]
                return [json.loads(line) for line in text.split(b"\n")]
            self._parts.append(rest)
        return []

    def end(self) -> int:
        """Tell it that nothing more comes, and wait until it has ended; its exit code."""
        self.open = False
        for stream in (self.to, self.source):
            with suppress(OSError, ValueError):
                stream.close()
        return self.process.wait()

    def kill(self) -> int:
        """End it now; its exit code."""
        self.process.kill()
        self.process.wait()
        return self.end()


def ready(children: Sequence[Child], seconds: float) -> list[Child]:
    """The children that have told something, or ended; waits up to `seconds` for the first."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.source, selectors.EVENT_READ, child)
        limit = None if seconds == float("inf") else max(0.0, seconds)
        return [key.data for key, _ in selector.select(limit)]


# Frames: eight bytes of length, then so many


def write_frame(stream: IO[bytes], data: bytes | memoryview) -> None:
    """Write a frame. Raises OSError where nobody reads."""
    stream.write(len(data).to_bytes(8, "big"))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """The next frame. Raises EOFError where the stream ends before the frame does."""
    head = stream.read(8)
    size = int.from_bytes(head, "big")
    data = stream.read(size) if len(head) == 8 else b""
    if len(head) < 8 or len(data) < size:
        raise EOFError
    return data


# In a child that is asked once

_sink: IO[bytes] | None = None


def request() -> bytes:
    """The frame that this child is asked with. From then on it ends with whoever asks, and what is
    printed goes to standard error."""
    global _sink
    with os.fdopen(os.dup(0), "rb") as source:
        data = read_frame(source)
    _sink = printed_aside()
    threading.Thread(target=_end_with_input, daemon=True).start()
    return data


def say(document: Any) -> None:
    """Tell a line of JSON to whoever asked."""
    assert _sink is not None, "only where a child was asked"
    _sink.write(json.dumps(document).encode() + b"\n")
    _sink.flush()


def printed_aside() -> IO[bytes]:
    """Standard output, for what is told alone: what is printed goes to standard error."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sink


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)
