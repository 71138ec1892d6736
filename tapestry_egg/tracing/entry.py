"""A program named on the command line: `gpt2.py:step`, or a file of another tool's; its function
and its arguments."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tapestry_egg.errors import TraceError

_HOW = (
    "Give the file a function `example()` that returns (function, arguments), "
    "or `NAME_args()` that returns the arguments of NAME."
)

#: Endings of files of other tools -> the plugin whose `from_file` reads them.
_FOREIGN = dict.fromkeys((".mlir", ".stablehlo", ".jax", ".jaxexport"), "interop.foreign")

#: Files imported on their own, by the name of their module: path and time of the last change.
_IMPORTED: dict[str, tuple[str, int]] = {}


@dataclass(frozen=True)
class Entry:
    """A function with one set of arguments for it, ready to trace."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def is_entry(text: str) -> bool:
    """Whether `text` names a program (`FILE.py`, `FILE.py:NAME`, a StableHLO module, an exported
    function), and not a saved file."""
    return file_of(text).suffix in (".py", *_FOREIGN)


def file_of(text: str) -> Path:
    """The file of `FILE.py:NAME`."""
    return Path(_split(text)[0])


def _split(text: str) -> tuple[str, str]:
    """File and function of `FILE.py:NAME`; a colon elsewhere belongs to the file's name."""
    head, colon, tail = text.rpartition(":")
    return (head, tail) if colon and head.endswith(".py") else (text, "")


def load_entry(text: str) -> Entry:
    """Import the file of `FILE.py:NAME` and get its function and arguments; a file of another
    tool's is read, and has no arguments.

    This runs the file, as `python FILE.py` would. With NAME, the function is that name in the file
    and its arguments are `NAME_args()`, else the arguments that `example()` returns. Without NAME,
    `example()` returns both: `(function, arguments)`. Arguments are a tuple of pytrees of arrays;
    `jax.ShapeDtypeStruct` will do where only shapes are wanted.

    Raises TraceError when the file cannot be read or fails, or lacks what is named.
    """
    file, name = _split(text)
    path = Path(file)
    if path.suffix in _FOREIGN:
        made = importlib.import_module(f"tapestry_egg.{_FOREIGN[path.suffix]}").from_file(path)
        return Entry(made.name, made, ())
    module = import_file(path)
    if name:
        function = getattr(module, name, None)
        if not callable(function):
            raise TraceError(
                f"no function {name!r} in the file",
                where=str(path),
                hint=f"It has {', '.join(_functions(module)) or 'none'}.",
            )
        if hasattr(module, f"{name}_args"):
            arguments = _call(path, module, f"{name}_args")
        else:
            arguments = _example(path, module, name)[1]
    else:
        function, arguments = _example(path, module)
        name = ""
    if not isinstance(arguments, tuple):
        arguments = (arguments,)
    stem = path.parent.name if path.stem == "__init__" else path.stem
    return Entry(f"{stem}-{name}" if name else stem, function, arguments)


def _example(path: Path, module: ModuleType, name: str = "") -> tuple[Callable[..., Any], Any]:
    if not hasattr(module, "example"):
        given = [f"{path}:{n}" for n in _functions(module) if hasattr(module, f"{n}_args")]
        if name:
            what = f"no arguments to trace {name!r} with"
            hint = f"Give the file a function `{name}_args()` that returns them."
        elif given:
            what = "no function is named, and there is no example()"
            hint = f"Write {' or '.join(given)}."
        else:
            what, hint = "the file says no arguments to trace with", _HOW
        raise TraceError(what, where=str(path), hint=hint)
    pair = _call(path, module, "example")
    if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[0])):
        raise TraceError("example() returns no (function, arguments)", where=str(path), hint=_HOW)
    return pair


def _functions(module: ModuleType) -> list[str]:
    """The names of the functions that a file defines, those that a library has wrapped included."""
    return sorted(
        n
        for n, v in vars(module).items()
        if n[0] != "_"
        and callable(v)
        and not inspect.isclass(v)
        and getattr(v, "__module__", module.__name__) == module.__name__
    )


def _call(path: Path, module: ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)()
    except Exception as error:
        raise user_error(path, f"{name}()", error) from error


def import_file(path: Path) -> ModuleType:
    """The user's module of a file, imported under its package's name if it lies in one; once,
    unless the file changes: what it registers it registers once.

    Raises TraceError for a missing file or one whose import fails, at the user's own line.
    """
    if not path.is_file():
        raise TraceError("no such file", where=str(path), hint="Write FILE.py or FILE.py:NAME.")
    # What the file imports stands beside it, or, for a file of a package, beside the package.
    folder = path.resolve().parent
    parts = [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    # A name of its own for a lone file, so that `json.py` does not stand in for the library.
    name = ".".join(parts) if len(parts) > 1 else f"program_{path.stem}"
    stamp = (str(path.resolve()), path.stat().st_mtime_ns)
    if name in sys.modules and _IMPORTED.get(name) == stamp:
        return sys.modules[name]
    try:
        if len(parts) > 1:
            return importlib.import_module(name.removesuffix(".__init__"))
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise TraceError("not a Python file", where=str(path), hint="Write FILE.py:NAME.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        _IMPORTED[name] = stamp
        return module
    except TraceError:
        raise
    except Exception as error:
        sys.modules.pop(name, None)
        raise user_error(path, "importing it", error) from error


def line_in(path: Path, error: Exception) -> int | None:
    """The innermost line of a file that an exception came by; None where it did not."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()), None)


def user_error(path: Path, doing: str, error: Exception) -> TraceError:
    """The user's own exception, at the user's own line."""
    line = line_in(path, error)
    if isinstance(error, SyntaxError):
        line = error.lineno
    return TraceError(
        f"{doing} raised {type(error).__name__}: {error}",
        where=f"{path}:{line}" if line else str(path),
        hint="The program must run by itself before it can be traced.",
    )
