"""Searches on disk: what has been found and proved of each problem, to go on from.

A file is an `.npz` of plain arrays, in which nothing can execute. A problem is known by a hash of
its arrays, so what was found counts for the same program, machine, rules and version alone, and a
file may hold that of several. Labellings are evaluated anew when they are read; bounds are told,
not proven again, as those of fronts are.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tapestry_egg.atomic import write_atomic
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.engine.archive import Archive, Candidate
from tapestry_egg.extract.engine.transport import archive_arrays, archive_from, problem_arrays
from tapestry_egg.extract.problem.problem import Ints, Problem

VERSION = 2

#: While a search goes on its file is written anew after so many seconds.
OFTEN = 60.0


@dataclass
class SearchFile:
    """What is known of problems, by their hashes, and the file that it is kept in."""

    path: Path
    archives: dict[str, Archive] = field(default_factory=dict)
    runs: int = 0  # that have written it
    _digests: dict[int, tuple[Problem, str]] = field(default_factory=dict)
    _written: float = -math.inf

    @classmethod
    def open(cls, path: str | Path) -> SearchFile:
        """The file, or an empty one where there is none.

        Raises ExtractError for a file that is none of a search, or of another version.
        """
        found = cls(Path(path))
        if found.path.exists():
            try:
                _read(found, found.path.read_bytes())
            except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as e:
                raise ExtractError(
                    f"is no file of a search: {e}",
                    where=str(path),
                    hint="Name another file, or remove this one: the search then begins anew.",
                ) from None
        return found

    def digest(self, problem: Problem) -> str:
        """A hash of all that a problem is."""
        known = self._digests.get(id(problem))
        if known is None:
            told = hashlib.sha256()
            for name, array in sorted(problem_arrays(problem).items()):
                told.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
                told.update(np.ascontiguousarray(array).tobytes())
            known = self._digests[id(problem)] = (problem, told.hexdigest())
        return known[1]

    def known(self, problem: Problem) -> Archive | None:
        """What earlier searches found of a problem, evaluated anew; None where that is no plan.

        Raises ExtractError where the file's numbers are not those of such a problem.
        """
        found = self.archives.get(self.digest(problem))
        if found is None or not found.candidates:
            return None
        candidates = [self.evaluated(problem, c.rows) for c in found.candidates]
        # What a limit of time ended may go on now.
        return replace(found, candidates=candidates, by_clock=False, spent=0.0)

    def evaluated(self, problem: Problem, rows: Ints) -> Candidate:
        """A labelling of the file with its costs. Raises ExtractError where it is none of the
        problem."""
        sizes = [len(v) for v in problem.variables]
        if rows.shape == (len(sizes),) and ((rows >= 0) & (rows < sizes)).all():
            found = Candidate.of(problem, rows)
            if np.isfinite(found.seconds):
                return found
        raise ExtractError(
            "holds a labelling of no such problem",
            where=str(self.path),
            hint="Remove the file: the search then begins anew.",
        )

    def note(self, problems: Sequence[Problem], found: Sequence[Archive], ended: bool) -> None:
        """Take in what is found of problems. The file is written when their search has `ended`,
        and now and then before."""
        if not ended and time.monotonic() - self._written < OFTEN:
            return
        for problem, archive in zip(problems, found, strict=True):
            if not archive.candidates:
                continue
            joined = Archive() if ended else self._of(problem)
            joined.join(archive)
            self.archives[self.digest(problem)] = joined
        self.write()

    def _of(self, problem: Problem) -> Archive:
        """A copy of what the file has of a problem."""
        copy = Archive()
        copy.join(self.archives.get(self.digest(problem), Archive()))
        return copy

    def write(self) -> None:
        """Write the file. Raises TapestryError where it cannot be written."""
        arrays: dict[str, np.ndarray] = {}
        entries: list[dict[str, Any]] = []
        for n, (digest, archive) in enumerate(self.archives.items()):
            own = archive_arrays(archive)
            arrays.update({f"{n} {name}": array for name, array in own.items()})
            entries.append({"problem": digest, "arrays": sorted(own)})
        head = {"tapestry_egg": "search", "version": VERSION, "problems": entries}
        head["runs"] = self.runs + 1
        out = io.BytesIO()
        np.savez_compressed(out, head=np.array(json.dumps(head)), **arrays)  # type: ignore[arg-type]
        write_atomic(self.path, out.getvalue())
        self._written = time.monotonic()


def _read(into: SearchFile, data: bytes) -> None:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        head = json.loads(str(arrays["head"]))
        if head["tapestry_egg"] != "search":
            raise ValueError("it is of another kind")
        if head["version"] != VERSION:
            raise ValueError(f"it is of version {head['version']!r:.20}, not {VERSION}")
        for n, entry in enumerate(head["problems"]):
            own = {name: arrays[f"{n} {name}"] for name in entry["arrays"]}
            into.archives[str(entry["problem"])] = archive_from(own)
        into.runs = int(head["runs"])
