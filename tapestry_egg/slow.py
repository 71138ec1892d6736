"""What a first call says when it takes long: which pass it is at, once for each, in the log.

As JAX's own alarm for slow compilation does, through `logging`: the logger is "tapestry_egg", the
level WARNING. Calls of less than two seconds, and passes of less than one, say nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Self

from .progress import Phase, Progress, Reporter

logger = logging.getLogger("tapestry_egg")

#: Seconds of a call, and of a pass of it, that pass in silence.
CALL, STAGE = 2.0, 1.0


class Alarm(Reporter):
    """Tells of the stages of slow first calls of a function `name`, and passes what is told on.

    A context manager around the call; what it is called with are the phases of planning.
    """

    def __init__(self, name: str, progress: Progress | None = None) -> None:
        self._name, self._progress = name, progress
        self._begin = time.monotonic()
        self._told: set[tuple[str, str, str]] = set()
        self._timer: threading.Timer | None = None

    def __call__(self, phase: Phase) -> None:
        if self._progress is not None:
            self._progress(phase)
        if phase.done:
            self._stop()
        elif phase.key not in self._told:
            self._told.add(phase.key)
            self._stop()
            self._timer = threading.Timer(self._silence(), self._tell, (phase,))
            self._timer.daemon = True
            self._timer.start()

    def _silence(self) -> float:
        return max(STAGE, CALL - (time.monotonic() - self._begin))

    def _tell(self, phase: Phase) -> None:
        logger.warning(
            "%s is being planned, %.0f s so far; now: %s",
            self._name,
            time.monotonic() - self._begin,
            phase,
        )

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop()
