"""Train steps as people write them with public libraries, to be planned whole.

One module for a library; every public function of a module makes one program: a step, a function
that makes the arguments of one call (state first), and which arguments are donated. Nothing is
allocated until `arguments` is called: `described` gives shapes alone. With `small=True` extents are
a few, for runs on CPU devices; without it they are those of real runs.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: What a module needs besides JAX, optax and the library of its name.
_NEEDS = {
    "brax_steps": ("brax", "flax"),
    "diffrax_steps": ("diffrax", "equinox"),
    "equinox_steps": ("equinox",),
    "haiku_steps": ("haiku", "jraph"),
    "keras_steps": ("keras",),
    "linen_steps": ("flax",),
    "nnx_steps": ("flax",),
    "optax_steps": ("optax",),
    "penzai_steps": ("penzai",),
    "scientific_steps": ("distrax", "lineax", "optimistix"),
}


@dataclass(frozen=True)
class Step:
    """A train step: the function, what makes its arguments, and which of these it may overwrite."""

    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    donated: tuple[int, ...] = (0,)

    def described(self) -> tuple[Any, ...]:
        """The arguments as shapes and dtypes."""
        import jax

        made: tuple[Any, ...] = jax.eval_shape(self.arguments)
        return made


def programs() -> tuple[str, ...]:
    """The names of all programs as `library:function`; nothing is imported."""
    return tuple(
        f"{path.stem.removesuffix('_steps')}:{node.name}"
        for path in sorted(Path(__file__).parent.glob("*_steps.py"))
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    )


def missing(name: str) -> tuple[str, ...]:
    """Packages that a program needs and that are not installed."""
    from importlib.util import find_spec

    needs = ("optax", *_NEEDS[f"{name.partition(':')[0]}_steps"])
    return tuple(package for package in needs if find_spec(package) is None)


def make(name: str, small: bool = False) -> Step:
    """The program of a name."""
    library, _, function = name.partition(":")
    module = importlib.import_module(f"{__name__}.{library}_steps")
    made: Step = getattr(module, function)(small)
    return made
