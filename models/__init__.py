"""Programs as people write them: no sharding, nothing bent to suit a planner.

Plain JAX, Flax NNX (`lora`, `nnx_gpt2`, `resnet`) and Equinox (`graph_network`, `state_space`).
Every module has `forward` and `forward_args()`, the arguments of one call, and
`example() -> (fn, args)`: a train step, `fn(state, *batch) -> (state, loss)`, and small arguments
for it. Two differ: the step of `gpt2` takes and returns its optimizer state by itself, and the
example of `decode` generates tokens. The leading dim of everything in a batch divides by eight.
`tensat` holds inference graphs of another kind, see there; `dlrm`, `pinn` and `unet` are for the
zoo (`benchmarks/zoo.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

PROGRAMS = (
    "convnet",
    "decode",
    "gpt2",
    "graph_network",
    "llama",
    "lora",
    "mlp",
    "moe",
    "nnx_gpt2",
    "ragged_moe",
    "recurrent",
    "resnet",
    "sorting",
    "state_space",
    "vit",
    "while_loop",
)


def example(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return `models.<name>.example()`: the train step and concrete arguments for one call."""
    fn, args = _module(name).example()
    return fn, args


def forward(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return `models.<name>.forward` and concrete arguments for one call."""
    module = _module(name)
    return module.forward, module.forward_args()


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
