"""Functions that tests run as child processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from tapestry_egg.parallel.serving import Child, request, say, write_frame


def answer() -> None:
    """Tell what was asked, the arguments and the environment; print what nobody is to read."""
    asked = request()
    print("not for whoever asks")
    os.system("echo nor this")
    threads = os.environ.get("OMP_NUM_THREADS")
    say({"asked": list(asked), "arguments": sys.argv[1:], "threads": threads})
    say("long " * 100_000)


def raw() -> None:
    """Tell a line in two pieces, and two lines at once, when each is asked for."""
    for piece in (b'{"one":', b' 1}\n[2]\n"thr', b'ee"\n'):
        if not sys.stdin.buffer.readline():
            return
        os.write(1, piece)
    sys.stdin.buffer.readline()


def busy() -> None:
    """Work for long, whatever signal of a terminal comes."""
    request()
    os.kill(os.getpid(), signal.SIGINT)
    say(os.getpid())
    time.sleep(600.0)


def parent() -> None:
    """A process that is killed while its child works."""
    child = Child("tests.parallel.child_calls:busy")
    write_frame(child.to, b"")
    (number,) = child.lines(60.0)
    print(json.dumps(number), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
