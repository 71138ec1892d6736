"""Child processes: started, asked, heard and ended in one way.

A child is a Python process that runs one function of this package, or of what else this process
can import: it imports from where this process imports, and nothing of the program that runs here.
It is asked on its standard input (frames) and tells on its standard output (frames, or lines of
JSON); what travels is plain data, so nothing that travels can execute. Ctrl-C does not reach it:
whoever started it decides what becomes of it. It ends with its standard input, and so with whoever
started it, however that one ends.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

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
