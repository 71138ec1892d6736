"""Receipts: files whose plans this installation has certified before, by their content.

A receipt is an empty file in the cache folder, named by a digest of what was certified and of all
that certifies: the package's code and the versions beside it. It is kept when a file of plans has
been certified, or is written with plans that were. Whoever can write to that folder can change the
package's rules and caches as well. A process whose functions were replaced while it ran, or differ
from the package's files, keeps none.

    TAPESTRY_EGG_RECEIPTS   `off`, or a folder (default: `certified` in the cache folder)
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import _lru_cache_wrapper as _Cached
from functools import cache, cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tapestry_egg.atomic import write_atomic
from tapestry_egg.errors import TapestryError
from tapestry_egg.metakernels import registry
from tapestry_egg.plans.plan import Plan
from tapestry_egg.rules.verify.trust import cache_folder

from .fingerprint import code_digest, installed

#: Where receipts are kept, or that they are not; words for not.
PLACE, OFF = "TAPESTRY_EGG_RECEIPTS", frozenset(("off", "0", "no", "false"))
#: Receipts that are kept: those used longest ago go first.
_MOST = 4096


def is_certified(data: bytes) -> bool:
    """Whether a file of this content was certified before."""
    path = _path(data)
    if path is None:
        return False
    try:
        os.utime(path)  # used now: it goes last
    except OSError:
        return False
    return True


def keep(data: bytes, plans: Sequence[Plan]) -> None:
    """Remember that the plans in a file of this content are certified. What depends on rule books
    or templates of the user's, which may change, is not remembered."""
    path = _path(data)
    own = any(p.origin is None or p.origin.books for p in plans)
    if path is None or own or registry.added() or not _is_as_written():
        return
    with suppress(TapestryError, OSError):  # a folder that cannot be written costs time only
        write_atomic(path, b"")
        kept = sorted((e.stat().st_mtime_ns, e.path) for e in os.scandir(path.parent))
        for _, old in kept[:-_MOST]:
            os.unlink(old)


def _path(data: bytes) -> Path | None:
    place = os.environ.get(PLACE, "")
    if place.lower() in OFF:
        return None
    found = hashlib.sha256(_judges())
    found.update(data)
    folder = Path(place) if place else cache_folder() / "certified"
    return folder / found.hexdigest()[:40]


@cache
def _judges() -> bytes:
    return repr((code_digest(), sorted(installed().items()))).encode()


def _is_as_written() -> bool:
    """Whether the functions of the package in this process are those of its files."""
    modules = [m for n, m in list(sys.modules.items()) if n.startswith("tapestry_egg")]
    known: set[CodeType] = set()
    for module in modules:
        if module.__spec__ is not None:
            known |= _written(module.__spec__)
    return all(code in known for module in modules for code in _running(module))


_WRITTEN: dict[str, frozenset[CodeType]] = {}


def _written(spec: ModuleSpec) -> frozenset[CodeType]:
    """The code in the file of a module, read once."""
    if spec.name not in _WRITTEN:
        read = getattr(spec.loader, "get_code", lambda _: None)
        _WRITTEN[spec.name] = frozenset(_codes(read(spec.name)))
    return _WRITTEN[spec.name]


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    if code is not None:
        yield code
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from _codes(inner)


def _running(module: ModuleType) -> Iterator[CodeType]:
    """The code of the functions and methods that a module holds, but of generated ones and those of
    other packages."""
    for value in list(vars(module).values()):
        own = isinstance(value, type) and value.__module__ == module.__name__
        for one in (value, *(vars(value).values() if own else ())):
            function = _function(one)
            if function is not None and not _is_others(function):
                yield function.__code__


def _function(value: Any) -> FunctionType | None:
    """The function in a method, a property or a wrapper."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, staticmethod | classmethod | FunctionType | _Cached):
        value = getattr(value, "__wrapped__", value)
    return value if isinstance(value, FunctionType) else None


def _is_others(function: FunctionType) -> bool:
    file, root = function.__code__.co_filename, function.__module__.partition(".")[0]
    installed = "site-packages" in Path(file).parts and root != "tapestry_egg"
    return file == "<string>" or installed or root in sys.stdlib_module_names
