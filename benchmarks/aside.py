"""One program of a benchmark in a process of its own, which leaves its answer in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

#: What is said of a process that did not end in time.
LATE = "no result in time"


def aside(words: list[str], answer: Path, limit: float, **environment: str) -> tuple[Any, str]:
    """The JSON that `python -m` of some words leaves in a file within `limit` seconds, empty if it
    leaves none; and the last line of what it says of errors."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, said = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        said = LATE
    found = json.loads(answer.read_text("utf-8")) if answer.exists() else {}
    last = said.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
    return found, last[0]
