"""Where operations come from: the user's lines, and whether a function is JAX's own."""

from __future__ import annotations

import linecache
import os
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from .blockgraph import Source

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def source_of(source_info: Any) -> Source:
    """The innermost line outside JAX's own files."""
    from jax._src import source_info_util

    frame = source_info_util.user_frame(source_info.traceback)
    if frame is None:
        return Source()
    return _source(frame.file_name, frame.start_line, frame.start_column, frame.function_name)


def caller() -> Source:
    """The innermost line outside this package, of the thread that asks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return Source()
    return _source(frame.f_code.co_filename, frame.f_lineno, 0, frame.f_code.co_name)


@cache
def _source(file: str, line: int, column: int, function: str) -> Source:
    text = linecache.getline(file, line).strip()
    return Source(short_file(file), line, column, function, text)


@cache
def short_file(file: str) -> str:
    """The file as a reader would name it: from the working folder, or from the package on."""
    for folder in (*_library_folders(), os.getcwd()):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :].replace(os.sep, "/")
    return file


def is_called(file: str, asked: str) -> bool:
    """Whether a file may be called so: either path is an end of the other."""
    ends = f"/{file}".endswith(f"/{asked}") or f"/{asked}".endswith(f"/{file}")
    return bool(file) and ends


@cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths["purelib"], paths["platlib"], *site.getsitepackages()})


def is_library(jaxpr: Any) -> bool:
    """Whether the jaxpr was traced from one of JAX's own functions."""
    from jax._src import source_info_util

    info = getattr(jaxpr, "debug_info", None)
    _, _, place = (getattr(info, "func_src_info", None) or "").partition(" at ")
    file = place.rpartition(":")[0]
    return bool(file) and not source_info_util.is_user_filename(file)
