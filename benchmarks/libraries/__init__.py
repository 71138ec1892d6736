"""Programs of other people's libraries, written as their users write them.

One module for a library or a group of them; every public function of a module makes one program:
`(function, arguments)`, of a size that is small but no toy, with random parameters. A module can be
read without its library: the functions import it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: A function and the arguments to call it with, or a third entry: its keyword arguments for
#: `jax.jit` and `te.jit` (`static_argnums` and the like).
Program = (
    tuple[Callable[..., Any], tuple[Any, ...]]
    | tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
)


def programs() -> dict[str, tuple[str, ...]]:
    """The names of all programs as `module:function`, and the packages that each needs.

    Nothing is imported: what a program needs are the modules that its function imports, and those
    in the module's `REQUIRES`.
    """
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        shared = _requires(tree)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                own = {name for part in ast.walk(node) for name in _imported(part)}
                needs = sorted({*shared, *own} - {"jax", "numpy", "functools", "typing"})
                found[f"{path.stem}:{node.name}"] = tuple(needs)
    return found


def missing(needs: tuple[str, ...]) -> tuple[str, ...]:
    """Those of some packages that are not installed."""
    return tuple(name for name in needs if importlib.util.find_spec(name) is None)


def make(name: str) -> Program:
    """The program of a name."""
    module, _, function = name.partition(":")
    made: Program = getattr(importlib.import_module(f"{__name__}.{module}"), function)()
    return made


def _requires(tree: ast.Module) -> tuple[str, ...]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "REQUIRES":
            return tuple(ast.literal_eval(node.value))
    return ()


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.partition(".")[0]]
    return []
