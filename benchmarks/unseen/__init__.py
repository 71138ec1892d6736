"""Programs as people write them that no table, rule or default of ours was made on.

One module for a kind of network; every public function of a module makes one program: a train step
`(function, arguments)` whose first argument is the state that it returns first. Arguments are
described (`jax.ShapeDtypeStruct`), so that sizes are those of real runs and nothing is allocated.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: A train step, and the arguments that describe one call.
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def programs() -> tuple[str, ...]:
    """The names of all programs as `module:function`; nothing is imported."""
    return tuple(
        f"{path.stem}:{node.name}"
        for path in sorted(Path(__file__).parent.glob("*.py"))
        if not path.stem.startswith("_")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    )


def make(name: str) -> Program:
    """The program of a name."""
    module, _, function = name.partition(":")
    made: Program = getattr(importlib.import_module(f"{__name__}.{module}"), function)()
    return made
