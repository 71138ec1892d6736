"""Programs that stand as functions in the modules of a folder, listed without an import of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: What is installed wherever the package is.
_AT_HAND = sys.stdlib_module_names | {"jax", "numpy"}


def listed(package: str) -> dict[str, tuple[str, ...]]:
    """The public functions of a package's modules as `module:function`, and the packages that each
    needs: those that its module imports at the top, and its own."""
    found = {}
    for path in sorted((Path(__file__).parent / package).glob("[!_]*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        shared = {name for node in tree.body for name in _imported(node)}
        for node in functions:
            if not node.name.startswith("_"):
                own = {name for part in ast.walk(node) for name in _imported(part)}
                needs = sorted((shared | own) - _AT_HAND)
                found[f"{path.stem.removesuffix('_steps')}:{node.name}"] = tuple(needs)
    return found


def missing(needs: tuple[str, ...]) -> tuple[str, ...]:
    """Those of some packages that are not installed."""
    return tuple(name for name in needs if importlib.util.find_spec(name) is None)


def function(package: str, name: str, ending: str = "") -> Callable[..., Any]:
    """The function of a name in a package, whose modules have an ending."""
    module, _, own = name.partition(":")
    found: Callable[..., Any] = getattr(
        importlib.import_module(f"benchmarks.{package}.{module}{ending}"), own
    )
    return found


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]
