"""Progress: what the pipeline says while it works, and how a terminal or a log shows it.

The pipeline calls a `Progress` with one `Phase` after another. It knows nothing of terminals:
`reporter()` returns a `Progress` that draws bars on a terminal and writes plain lines elsewhere.
Both talk on stderr only, standard output is for data.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import TaskID

Verb = Literal["trace", "encode", "saturate", "extract", "lower", "run"]

#: The six verbs in the order in which every program passes through them.
VERBS: tuple[Verb, ...] = ("trace", "encode", "saturate", "extract", "lower", "run")


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing that the pipeline has to say: a verb or pass, how far it is, and how it goes.

    `fraction` is from 0 to 1, or None where the end is not in sight; 1 closes it. `text` is
    short and holds the best so far (`front 7  gap 0.8 %`). `subject` is the graph or plan at work,
    `step` the pass, by its name in the pipeline's table.

    >>> str(Phase("saturate", "iteration 6  12 000 rows", 0.5, "gpt2", "find_forms"))
    'saturate find_forms gpt2: 50 %  iteration 6  12 000 rows'
    """

    phase: Verb
    text: str = ""
    fraction: float | None = None
    subject: str = ""
    step: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What the phases of one verb or pass have in common."""
        return self.subject, self.phase, self.step

    @property
    def done(self) -> bool:
        return self.fraction is not None and self.fraction >= 1.0

    def __str__(self) -> str:
        head = " ".join(part for part in (self.phase, self.step, self.subject) if part)
        share = (
            "" if self.fraction is None or self.done else f"{self.fraction:.0%}".replace("%", " %")
        )
        tail = "  ".join(part for part in (share, self.text) if part)
        return f"{head}: {tail}" if tail else head


#: What the pipeline calls; anything that takes a Phase will do, `list.append` included.
Progress = Callable[[Phase], None]


class Reporter:
    """A Progress with a life time: what it draws appears on entry and stops on exit.

    This one says nothing.
    """

    def __call__(self, phase: Phase) -> None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Lines(Reporter):
    """Plain lines for logs and pipes: when a pass begins and ends, and now and then between.

    `every` is the least number of seconds between two lines of one pass.
    """

    def __init__(self, stream: TextIO | None = None, every: float = 5.0) -> None:
        self._stream = stream
        self._every = every
        self._last: dict[tuple[str, str, str], float] = {}
        self._begun: dict[tuple[str, str, str], float] = {}

    def __call__(self, phase: Phase) -> None:
        now = time.monotonic()
        key = phase.key
        begun = self._begun.setdefault(key, now)
        if not phase.done and now - self._last.get(key, float("-inf")) < self._every:
            return
        self._last[key] = now
        line = str(phase)
        if phase.done:
            line += f"  ({now - begun:.1f} s)"
            self._begun.pop(key)
            self._last.pop(key)
        print(line, file=self._stream or sys.stderr, flush=True)


class Bars(Reporter):
    """One line per pass on a terminal, with a bar, the seconds so far and its words.

    Finished passes stay as a record of where the time went.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            console=Console(file=stream or sys.stderr),
            # What is printed meanwhile goes above the bars, but data for a pipe stays in the pipe.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._tasks: dict[tuple[str, str, str], TaskID] = {}

    def __call__(self, phase: Phase) -> None:
        key = phase.key
        words = "  ".join(part for part in (phase.subject, phase.text) if part)
        if key not in self._tasks:
            name = f"{phase.phase:<8} {phase.step}".rstrip()
            self._tasks[key] = self._bars.add_task(name, total=None, words=words)
        known = phase.fraction is not None
        self._bars.update(
            self._tasks[key],
            total=1.0 if known else None,
            completed=phase.fraction,
            words=words,
        )
        if phase.done:
            self._tasks.pop(key)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


def reporter(stream: TextIO | None = None, *, quiet: bool = False) -> Reporter:
    """A reporter that suits `stream` (default: stderr): bars on a terminal, lines elsewhere.

    With `quiet` it says nothing.
    """
    if quiet:
        return Reporter()
    to = stream or sys.stderr
    return Bars(to) if to.isatty() else Lines(to)


# What a first call says when it takes long: which pass it is at, once for each, in the log.
#
# As JAX's own alarm for slow compilation does, through `logging`: the logger is "tapestry_egg", the
# level WARNING. Calls of less than two seconds, and passes of less than one, say nothing.


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

    def __exit__(self, *_: object) -> None:
        self._stop()
