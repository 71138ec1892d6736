"""Programs of other people's libraries, written as their users write them.

One module for a library or a group of them; every public function of a module makes one program:
`(function, arguments)`, of a size that is small but no toy, with random parameters. A module can be
read without its library: the functions import it. Libraries with train steps of their own are in
`benchmarks/strangers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.listed import function

#: A function and the arguments to call it with.
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def make(name: str) -> Program:
    """The program of a name."""
    made: Program = function("libraries", name)()
    return made
