"""Files of choice problems that others use, read and written.

In: files. Out: `ChoiceProblem`, and back. A format is a module with four functions:
`recognises(document)`, `read(document, name)` to a `ChoiceProblem`, `write(problem)` back to a JSON
document, and `answer(problem, choice)`, the chosen nodes as a JSON document from which others can
recompute the costs. Problems of programs, which join costs by labels and occupy memory pair by
pair, are of another type (`files/problem_file.py`).
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym.choices import Choice, ChoiceProblem
from tapestry_egg.packed import read_unpacked, unpacked, write_packed

#: Name of a format -> its module in this package, asked in this order.
FORMATS = {"egraph-serialize": "egraph_serialize", "iopddl": "iopddl"}


def read(path: str | Path) -> tuple[ChoiceProblem, str]:
    """The problem in a file (.json or .json.gz), and the name of its format.

    Raises ExtractError for a file that cannot be read, is no JSON, or has no known format.
    """
    return recognised(_decoded(read_unpacked(path, ExtractError), path), path)


def document_of(data: bytes, path: str | Path) -> Any:
    """What the bytes of a file say. Raises ExtractError where they are no JSON."""
    return _decoded(unpacked(data, path, ExtractError), path)


def _decoded(data: bytes, path: str | Path) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ExtractError("nested too deeply", where=str(path)) from None
    except ValueError as e:
        raise ExtractError(f"not JSON: {e}", where=str(path)) from None


def name_of(path: str | Path) -> str:
    """A problem's name: its file's, without the endings."""
    return Path(path).name.removesuffix(".gz").removesuffix(".json")


def recognised(document: Any, path: str | Path) -> tuple[ChoiceProblem, str]:
    """The problem of a document that was read from `path`, and the name of its format.

    Raises ExtractError for one that has no known format, or has a fault.
    """
    name = name_of(path)
    for form in FORMATS:
        module = _module(form)
        if module.recognises(document):
            try:
                return module.read(document, name).verify(), form
            except ExtractError as e:
                raise ExtractError(e.what, where=f"{path}: {e.where}", hint=e.hint) from e
    raise ExtractError(
        "no known format",
        where=str(path),
        hint=f"Formats are {', '.join(FORMATS)} and snapshots.",
    )


def write(problem: ChoiceProblem, path: str | Path, form: str) -> None:
    """Write a problem to a file (.json or .json.gz) of a format.

    Raises ExtractError for a problem that the format cannot say.
    """
    write_packed(path, json.dumps(_module(form).write(problem)).encode())


def answer(problem: ChoiceProblem, choice: Choice, form: str) -> Any:
    """A choice as the JSON document of a format."""
    return _module(form).answer(problem, choice)


def _module(form: str) -> Any:
    return import_module(f".{FORMATS[form]}", __name__)
