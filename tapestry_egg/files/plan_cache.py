"""Fronts on disk, so that what was planned once is not planned again.

An entry is named by a digest of everything that decides a front: the program (wherever it stands in
its file), the machine, rules, options, and the versions and code of what plans. It says what it
belongs to and carries a digest; one that is damaged is a warning and is replaced. Entries are
written whole or not at all, so processes share a folder. Those used longest ago go first when the
folder grows above its size.

    TAPESTRY_EGG_PLAN_CACHE         `off`, or a folder (default: `plans` in the cache folder)
    TAPESTRY_EGG_PLAN_CACHE_BYTES   size of the folder (default: 256MiB)
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry_egg.atomic import write_atomic
from tapestry_egg.errors import GraphError, TapestryError
from tapestry_egg.quantities import BYTES
from tapestry_egg.rules.language.book import RuleBook, load_books
from tapestry_egg.rules.language.receipts import content
from tapestry_egg.rules.verify.trust import cache_folder

from .fingerprint import (
    OFF,
    code_digest,
    installed,
    options_digest,
    options_form,
    program_fingerprint,
)
from .plan_message import packed, unpacked

if TYPE_CHECKING:
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.machine.target import Target
    from tapestry_egg.tracing.trace import Program

#: Where fronts are kept, or that they are not; and how much of them.
PLACE, SIZE = "TAPESTRY_EGG_PLAN_CACHE", "TAPESTRY_EGG_PLAN_CACHE_BYTES"
_BYTES = 256 << 20
#: Seconds after which what an interrupted write left behind is removed.
_STALE = 3600.0

#: Options that change no plan: how many processors search, and who is told.
_ASIDE = frozenset(("on_progress", "executor", "workers"))


def plan_key(program: Program, target: Target, options: Mapping[str, Any]) -> str:
    """A name for the front of a program on a machine under the options of `optimize`.

    Raises RuleError for a rule book that cannot be read.
    """
    import tapestry_egg
    from tapestry_egg.metakernels import registry

    versions = {"tapestry-egg": tapestry_egg.__version__, "code": code_digest(), **installed()}
    return options_digest(
        {
            "program": program_fingerprint(program),
            "target": target,
            "options": plain_options(options),
            "templates": [Path(p).read_text(encoding="utf-8") for p in registry.added()],
            "versions": versions,
        }
    )


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `optimize` that decide a front, as plain data; rule books by their rules."""
    plain: dict[str, Any] = {}
    for name, value in options.items():
        if name in _ASIDE:
            continue
        if name in ("rules", "books"):
            books = load_books(value)
            plain[name] = [[(content(r), r.name, r.law) for r in book.rules] for book in books]
            continue
        form = options_form(value)
        if isinstance(form, dict) and name == "settings":
            form = {k: v for k, v in form.items() if k not in _ASIDE}
        plain[name] = form
    return plain


@dataclass(frozen=True)
class PlanCache:
    """A folder of fronts, of at most `most_bytes`."""

    folder: Path
    most_bytes: int = _BYTES

    def get(
        self, key: str, program: Program, rules: Sequence[str | Path | RuleBook] = ()
    ) -> Front | None:
        """The front kept under `key`, over this program; None where there is none.

        Its plans are certified as those of any file are (`admission.py`), with the user's `rules`:
        that they compute this program, are legal, and cost what they say. Warns of an entry that
        is damaged, and removes it.
        """
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        from .admission import admit_front

        try:
            front = unpacked(_checked(data, key), program)
            admit_front(front, f"{path}: $", rules)
        except TapestryError as error:
            warnings.warn(f"{path}: a kept plan is not used, and made again: {error}", stacklevel=2)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # used now: it goes last
        return front

    def put(self, key: str, front: Front, program: Program) -> None:
        """Keep a front; one that cannot be written, or is too large, is not kept."""
        try:
            data = packed(front, program)
            if len(data) > self.most_bytes // 4:
                return
            write_atomic(self._path(key), _head(key, data) + data)
        except TapestryError:  # a folder that cannot be written costs time only
            return
        self._make_room()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.front"

    def _make_room(self) -> None:
        """Remove the entries used longest ago, until the others fit; others may do so as well."""
        found = []
        now = time.time()
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                with suppress(OSError):
                    status = entry.stat()
                    if entry.name.endswith(".front"):
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
                    elif entry.name.endswith(".tmp") and now - status.st_mtime > _STALE:
                        os.unlink(entry.path)
        size = sum(s for _, s, _ in found)
        for _, bytes_, path in sorted(found):
            if size <= self.most_bytes:
                return
            with suppress(OSError):
                os.unlink(path)
            size -= bytes_


def chosen_cache(asked: bool | str | Path | None) -> PlanCache | None:
    """The cache that `te.jit(cache=...)` asks for: a folder, the default one (True, None) or none.

    The environment decides where nothing, or True, is asked for.
    Raises TapestryError for a size that is none.
    """
    if asked is False:
        return None
    place = os.environ.get(PLACE, "")
    if asked is None or asked is True:
        if place.lower() in OFF:
            return None
        folder = Path(place) if place else cache_folder() / "plans"
    else:
        folder = Path(asked)
    size = os.environ.get(SIZE, "")
    try:
        most = int(BYTES.parse(size, "memory")) if size else _BYTES
    except TapestryError as error:
        raise TapestryError(error.what, where=SIZE, hint=error.hint) from None
    return PlanCache(folder, most)


def _head(key: str, data: bytes) -> bytes:
    digest = hashlib.sha256(key.encode() + data).hexdigest()
    return f"tapestry-egg front 1 {digest}\n".encode()


def _checked(data: bytes, key: str) -> bytes:
    """What follows the head of an entry. Raises GraphError where it is not that of `key`."""
    _, _, body = data.partition(b"\n")
    if data[: len(data) - len(body)] != _head(key, body):
        raise GraphError("the file is damaged, or belongs elsewhere")
    return body
