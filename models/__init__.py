"""Training steps as people write them: plain JAX, no sharding, nothing bent to suit a planner.

Every module here has `example() -> (fn, args)`: a train step and small arguments for it.
`fn(state, *batch)` returns `(state, loss)` for the programs trained by stochastic gradient descent;
`gpt2`, trained by AdamW, takes and returns its optimizer state too. The batch divides by eight.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

PROGRAMS = (
    "convnet",
    "gpt2",
    "llama",
    "mlp",
    "moe",
    "recurrent",
    "sorting",
    "vit",
    "while_loop",
)


def example(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return `models.<name>.example()`: the train step and concrete arguments for one call."""
    module = importlib.import_module(f"{__name__}.{name}")
    fn, args = module.example()
    return fn, args
