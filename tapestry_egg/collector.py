"""Python's garbage collector while a program is planned: it looks through everything more rarely.

Planning makes many objects, of which nearly all live until it ends or are freed by their counts.
Each time that they have grown by some, Python looks through every object of the process, those of
JAX and of the user's libraries included: that took up to a quarter of a first call, and freed
nothing. The youngest objects are looked through more rarely, too: more of them are free by then.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Collections of one generation before one of the next, and how many times as many new objects there
# are before one of the youngest: everything is looked through after some seventy million.
_RARELY, _YOUNG = 100, 10

_lock = threading.Lock()
_inside = 0  # how many are planning, in all threads
_before: tuple[int, int, int] | None = None
_ours: tuple[int, int, int] | None = None


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Within it, full collections come rarely; afterwards as often as before.

    What the user sets meanwhile stays.
    """
    global _inside, _before, _ours
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            young, middle, old = _before
            _ours = young * _YOUNG, max(middle, _RARELY), max(old, _RARELY)
            gc.set_threshold(*_ours)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _before is not None and gc.get_threshold() == _ours:
                if gc.get_count()[2] > _before[2] and not gc.get_freeze_count():
                    # What is there is old now, as after a full collection: else one would come at
                    # once, for what was planned.
                    gc.freeze()
                    gc.unfreeze()
                gc.set_threshold(*_before)
