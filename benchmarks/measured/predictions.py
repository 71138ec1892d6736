"""Predictions of many runs: side by side in processes, each kept in a file as soon as it is made.

A file of predictions is of one state of the code: those of another are made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from .predict import Prediction, predict
from .rows import Run

Predictions = dict[str, Prediction | str]


def predictions(
    runs: Sequence[Run],
    file: Path,
    *,
    workers: int = 1,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Predictions:
    """What is predicted of every run, by its key; of a run that failed, the error's first line.
    Those in `file` that this state of the code made are read, the others made and added to it."""
    from tapestry_egg.files.fingerprint import code_digest

    code = code_digest() + _programs_digest()
    found = _read(file, code)
    wanted = {run.key(): run for run in runs}
    missing = [run for key, run in wanted.items() if key not in found]
    file.parent.mkdir(parents=True, exist_ok=True)
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    with pool, open(file, "a", encoding="utf-8") as out:
        waiting = {pool.submit(_predicted, run): run for run in missing}
        for done, future in enumerate(as_completed(waiting), 1):
            key, made = waiting[future].key(), future.result()
            found[key] = made
            plain = made if isinstance(made, str) else made.as_dict()
            out.write(json.dumps({"key": key, "code": code, "made": plain}) + "\n")
            out.flush()
            tell(done, len(missing))
    return {key: found[key] for key in wanted}


def _predicted(run: Run) -> Prediction | str:
    from tapestry_egg.errors import TapestryError

    try:
        return predict(run)
    except TapestryError as e:
        return str(e).splitlines()[0]


def _read(file: Path, code: str) -> Predictions:
    if not file.exists():
        return {}
    found: Predictions = {}
    for line in file.read_text("utf-8").splitlines():
        entry: dict[str, Any] = json.loads(line)
        if entry["code"] == code:
            made = entry["made"]
            found[entry["key"]] = made if isinstance(made, str) else Prediction(**made)
    return found


def _programs_digest() -> str:
    import hashlib

    here = Path(__file__).parent
    text = b"".join((here / name).read_bytes() for name in ("programs.py", "predict.py"))
    return hashlib.sha256(text).hexdigest()[:16]
