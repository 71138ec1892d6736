"""Processes of one job agree before they run anything together.

Under `jax.distributed` every process traces for itself. Before the first collective all say what
they are about to do; the first of them compares, and what differs is an error on every process that
names the process and the difference. Only the first one plans, and hands its plan to the others.
All of it goes through the key-value store of JAX's coordination service, so nothing here can hang
as a collective would: a process that dies or does not come is named after a time.

    tapestry-egg/alive/1                  "17 in": process 1 is at work here, and beats
    tapestry-egg/0-1/3/said/1             what process 1 is about to do, in the third round of 0, 1
    tapestry-egg/0-1/3/verdict            nothing, or what differs
    tapestry-egg/0-1/3/made, ../made/0    what the first process made, its digest and its pieces

Calls pair by their order, as collectives do.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tapestry_egg import errors
from tapestry_egg.errors import PeerError, TapestryError
from tapestry_egg.progress import CALL, logger

#: Names how many seconds a process may stay away before the others give up on it.
PATIENCE = "TAPESTRY_EGG_PEER_SECONDS"
_PATIENCE = 600.0
#: A process that is at work here shows it so often; silent for longer than `_SILENCE`, it is dead.
#: (JAX itself ends a job whose process has been silent for 100 s.)
_BEAT = 1.0
_SILENCE = 60.0
#: Seconds for the others to hear of an error before the process that tells it may end.
_HEARING = 10.0
#: One wait in the key-value store, in seconds: Ctrl-C is heard between two.
_SLICE = 1.0
#: Bytes of one value in the store, far below the limits of its messages.
_PIECE = 1 << 20

_ROOT = "tapestry-egg"

#: What a process is about to do: words, and what stands behind them as text or digests.
Statement = Mapping[str, str]


def participants(devices: Iterable[Any]) -> tuple[int, ...]:
    """The processes that own some of these devices, in order."""
    return tuple(sorted({int(d.process_index) for d in devices}))


def peers_of(devices: Iterable[Any]) -> Peers | None:
    """The processes that run on these devices together; None where that is one, or not this one."""
    import jax

    if jax.process_count() == 1:
        return None
    processes = participants(devices)
    if len(processes) == 1 or jax.process_index() not in processes:
        return None
    return _group(processes, jax.process_index(), _store())


class Peers:
    """Processes that plan and run together; the first of them leads.

    All of them make the same calls in the same order. Raises PeerError, on every process, for one
    that says something else, that is silent, or that does not come within `patience` seconds.
    """

    def __init__(
        self, processes: Sequence[int], me: int, store: Any, patience: float = _PATIENCE
    ) -> None:
        self.processes, self.me, self.leader = tuple(processes), me, min(processes)
        self.patience = patience
        self._store = store
        self._root = f"{_ROOT}/{_span(processes)}"
        self._round = 0
        self._turn = threading.RLock()
        self._beats = 0
        self._seen: dict[int, tuple[str, float]] = {}

    @property
    def leads(self) -> bool:
        """Whether this is the process that plans."""
        return self.me == self.leader

    @contextmanager
    def together(self) -> Iterator[None]:
        """While this is open, the others see that this process is at work and alive.

        One thread at a time; a TapestryError or any other error that leaves it is told to those
        who wait for this process, unless it is one that all of them raise.
        """
        with self._turn:
            stop = threading.Event()
            beating = threading.Thread(target=self._beat, args=(stop,), daemon=True)
            beating.start()
            state = "out"
            try:
                yield
            except BaseException as error:
                if not getattr(error, "_told", False):
                    state = f"failed {self._round} {_brief(error)}"
                raise
            finally:
                stop.set()
                beating.join()
                with suppress(Exception):  # the store may be what failed
                    self._show(state)

    def agree(self, doing: str, statement: Statement) -> None:
        """Compare what every process is about to do; all go on only if all say the same.

        `doing` is for people: "plan train_step". Raises PeerError on every process.
        """
        self._round += 1
        said = {"doing": doing, **statement}
        self._put(f"{self._round}/said/{self.me}", json.dumps(said).encode())
        if not self.leads:
            self._hear("verdict", doing)
            return
        try:
            for process in self.processes[1:]:
                other = json.loads(self._wait(f"{self._round}/said/{process}", process, doing))
                if other != said:
                    raise _difference(self.leader, said, process, other)
        except TapestryError as error:
            self._tell("verdict", error)
            raise
        self._put(f"{self._round}/verdict", b"{}")
        if self._round > 1:  # all have come here, so all have read what was before
            with suppress(Exception):
                self._store.key_value_delete(f"{self._root}/{self._round - 1}")

    def handed(self, doing: str, make: Callable[[], bytes]) -> bytes:
        """What the leader makes, on every process; what it raises is raised on every process."""
        name = f"{self._round}/made"
        if self.leads:
            try:
                data = make()
            except BaseException as error:
                self._tell("made", error)
                raise
            pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
            for k, piece in enumerate(pieces):
                self._put(f"{name}/{k}", piece)
            digest = hashlib.sha256(data).hexdigest()
            self._put(name, json.dumps({"pieces": len(pieces), "digest": digest}).encode())
            return data
        told = self._hear("made", doing)
        data = b"".join(
            self._wait(f"{name}/{k}", self.leader, doing) for k in range(int(told["pieces"]))
        )
        if hashlib.sha256(data).hexdigest() != told["digest"]:
            raise PeerError(
                f"what process {self.leader} sent was damaged on its way",
                where=f"process {self.me}",
            )
        return data

    def _tell(self, name: str, error: BaseException) -> None:
        """Let all others raise an error, and give those who are waiting the time to hear it.

        Process 0 runs the store: with its end JAX ends the others, whatever they were about to say.
        """
        mark_told(error)
        self._put(f"{self._round}/{name}", _report(error, self.me))
        end = time.monotonic() + min(_HEARING, self.patience)
        for process in self.processes[1:]:
            while self._here(process) and time.monotonic() < end:
                with suppress(Exception):
                    key = f"{self._root}/{self._round}/heard/{process}"
                    self._store.blocking_key_value_get_bytes(key, int(1e3 * _SLICE))
                    break

    def _hear(self, name: str, doing: str) -> dict[str, Any]:
        """What the leader tells, raised where it is an error."""
        told = self._wait(f"{self._round}/{name}", self.leader, doing)
        report: dict[str, Any] = json.loads(told)
        if "what" not in report:
            return report
        self._put(f"{self._round}/heard/{self.me}", b"yes")
        error = getattr(errors, str(report["kind"]))(
            report["what"], where=report["where"], hint=report["hint"]
        )
        raise mark_told(error)

    # ---- the store -----------------------------------------------------------------------------

    def _put(self, name: str, value: bytes) -> None:
        self._store.key_value_set_bytes(f"{self._root}/{name}", value, True)

    def _wait(self, name: str, process: int, doing: str) -> bytes:
        """A value that another process puts. Raises PeerError where that is gone or stays away."""
        key, began, silent_so_far = f"{self._root}/{name}", time.monotonic(), True
        while True:
            try:
                value: bytes = self._store.blocking_key_value_get_bytes(key, int(1e3 * _SLICE))
                return value
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PeerError(
                        f"JAX's coordination service, which process 0 runs, does not answer: "
                        f"{str(error).splitlines()[0]}",
                        where=f"process {self.me}, about to {doing}",
                        hint="See the log of process 0: it has probably ended.",
                    ) from None
            if silent_so_far and time.monotonic() - began > CALL:
                silent_so_far = False
                words = "process %d, about to %s, waits for process %d"
                logger.warning(words, self.me, doing, process)
            self._look()
            state, changed = self._seen.get(process, ("", began))
            still = time.monotonic() - max(changed, began)
            _, doing_now, *failure = [*state.split(" ", 3), ""]
            # One that failed in the round before this one, or in this one, will not come.
            if doing_now == "failed" and int(failure[0]) >= self._round - 1:
                raise PeerError(
                    f"process {process} failed: {failure[1]}",
                    where=f"process {self.me}, about to {doing}",
                    hint=f"See the log of process {process}.",
                )
            if doing_now == "in":
                silent = time.monotonic() - changed
                if silent > min(_SILENCE, self.patience):
                    raise PeerError(
                        f"process {process} died or hangs: it was at work and has been silent for "
                        f"{silent:.0f} s",
                        where=f"process {self.me}, about to {doing}",
                        hint=f"See the log of process {process}.",
                    )
            elif still > self.patience:
                raise PeerError(
                    f"process {process} has not come within {self.patience:g} s",
                    where=f"process {self.me}, about to {doing}",
                    hint=f"All of {_span(self.processes)} must make the same calls in the same "
                    f"order. See the log of process {process}; {PATIENCE} sets how long to wait.",
                )

    # ---- signs of life -------------------------------------------------------------------------

    def _show(self, state: str) -> None:
        self._beats += 1
        value = f"{self._beats} {state}".encode()
        self._store.key_value_set_bytes(f"{_ROOT}/alive/{self.me}", value, True)

    def _beat(self, stop: threading.Event) -> None:
        with suppress(Exception):  # those who wait will hear it from the store
            while True:
                self._show("in")
                if self.leads:
                    self._look()
                if stop.wait(_BEAT):
                    return

    def _here(self, process: int) -> bool:
        """Whether a process is at work here, as far as is known."""
        self._look()
        state, changed = self._seen.get(process, ("", 0.0))
        fresh = time.monotonic() - changed < min(_SILENCE, self.patience)
        return state.endswith(" in") and fresh

    def _look(self) -> None:
        """Note which processes have shown themselves since the last look."""
        with suppress(Exception):
            now = time.monotonic()
            for key, value in self._store.key_value_dir_get_bytes(f"{_ROOT}/alive/"):
                process, state = int(key.rpartition("/")[2]), bytes(value).decode()
                if self._seen.get(process, ("", now))[0] != state:
                    self._seen[process] = (state, now)


#: What to do about arguments that differ.
_SAME_DATA = (
    "Host arrays and numbers must be the same on every process. Of parts that every process has "
    "for itself, jax.make_array_from_process_local_data makes one array."
)


# ---- errors ------------------------------------------------------------------------------------


def _difference(leader: int, mine: Statement, process: int, other: Statement) -> PeerError:
    """The error for two processes that are about to do different things."""
    if mine["doing"] != other["doing"]:
        return PeerError(
            f"process {process} is about to {other['doing']}, process {leader} to {mine['doing']}",
            hint="All processes must make the same calls in the same order.",
        )
    names = [k for k in (*mine, *other) if mine.get(k) != other.get(k)]
    words = [
        f"{k}: {other.get(k, 'none')} there, {mine.get(k, 'none')} on process {leader}"
        for k in dict.fromkeys(names)
    ]
    return PeerError(
        f"process {process} is about to {other['doing']} differently: {'; '.join(words)}",
        hint=_SAME_DATA
        if all(k.startswith("argument ") for k in names)
        else "All processes must run one program, with the same versions, devices and options.",
    )


def _report(error: BaseException, process: int | None = None) -> bytes:
    """An error as the others will raise it."""
    if isinstance(error, TapestryError):
        known = next(c for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
        told = {"kind": known.__name__, "what": error.what}
        return json.dumps({**told, "where": error.where, "hint": error.hint}).encode()
    return json.dumps(
        {
            "kind": "PeerError",
            "what": f"process {process} failed: {_brief(error)}",
            "where": f"process {process}",
            "hint": f"See the log of process {process}.",
        }
    ).encode()


def _brief(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def mark_told(error: BaseException) -> BaseException:
    """The error, as one that the other processes know of."""
    error._told = True  # type: ignore[attr-defined]
    return error


# ---- groups of processes -----------------------------------------------------------------------

_GROUPS: dict[tuple[int, ...], Peers] = {}
_MAKING = threading.Lock()


def _group(processes: tuple[int, ...], me: int, store: Any) -> Peers:
    """The same object for the same processes of the same job: it counts their rounds."""
    with _MAKING:
        found = _GROUPS.get(processes)
        if found is None or found._store is not store:
            found = _GROUPS[processes] = Peers(processes, me, store)
        found.patience = _patience()
        return found


def _store() -> Any:
    """The key-value store of JAX's coordination service. JAX has no public name for it.

    Raises PeerError where this JAX keeps it elsewhere, or `jax.distributed` was not initialized.
    """
    try:
        from jax._src.distributed import global_state

        store = global_state.client
    except (ImportError, AttributeError):
        store = None
    needed = ("key_value_set_bytes", "blocking_key_value_get_bytes", "key_value_dir_get_bytes")
    if store is None or not all(hasattr(store, name) for name in needed):
        import jax

        raise PeerError(
            f"there are {jax.process_count()} processes, but no key-value store by which they "
            f"could agree (jax {jax.__version__})",
            hint="Call jax.distributed.initialize() in every process before anything else of JAX.",
        )
    return store


def _span(processes: Sequence[int]) -> str:
    """`0-3` for processes 0 to 3, else a digest of them all."""
    first, last = processes[0], processes[-1]
    if tuple(processes) == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    text = ",".join(map(str, processes))
    return text if len(text) < 40 else f"{first}..{last}:{zlib.crc32(text.encode()):08x}"


def _patience() -> float:
    """Seconds to wait for a process that has not come. Raises PeerError for what is no number."""
    text = os.environ.get(PATIENCE, "")
    try:
        seconds = float(text) if text else _PATIENCE
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise PeerError(
            f"{text!r} is not a number of seconds", where=PATIENCE, hint="Say 600, or inf."
        )
    return seconds
