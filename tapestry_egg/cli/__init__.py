"""The command line: one module a group of commands; nothing here imports JAX before it must.

In: files and options. Out: text on standard output, `--json` for programs, progress on standard
error, and so what native libraries print.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Sequence

#: The exit code of an interruption (Ctrl-C, SIGTERM), as shells have it.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script: `app.main`, but an interruption is one from the first import on, and ends
    the process without a word of Python's."""
    codes: list[int] = []
    # Registered first, it is called last: interrupted imports of native libraries leave them such
    # that the interpreter's own end crashes.
    atexit.register(_leave, codes)
    _keep_standard_output()
    try:
        from .app import main as run

        run(arguments)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        codes.append(INTERRUPTED)
    except SystemExit as end:
        if end.code != INTERRUPTED:
            raise
        codes.append(INTERRUPTED)
    if codes:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends already
        sys.exit(INTERRUPTED)


def _keep_standard_output() -> None:
    """Have what is not Python's print to standard error: HiGHS, as SciPy has it, prints a line for
    each integer program that it repairs, however it is told to be quiet (jump-dev/HiGHS.jl#312),
    and in the middle of `--json` nobody could read that."""
    stream = sys.__stdout__
    try:
        if stream is None or stream is not sys.stdout or stream.fileno() != 1:
            return
        stream.flush()
        own = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError):  # closed
        return
    lines = 1 if stream.line_buffering else -1
    sys.stdout = open(own, "w", lines, encoding=stream.encoding, errors=stream.errors)


def _leave(codes: Sequence[int]) -> None:
    if codes:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # nobody reads it any more
                pass
        os._exit(codes[0])
