"""The command line: one module a group of commands; nothing here imports JAX before it must.

In: files and options. Out: text on standard output, `--json` for programs, progress on standard
error.
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


def _leave(codes: Sequence[int]) -> None:
    if codes:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # nobody reads it any more
                pass
        os._exit(codes[0])
