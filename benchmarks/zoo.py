"""The zoo: programs that people run, each with its front, as one table.

    python -m benchmarks.zoo                     # models/ at the sizes of their tests
    python -m benchmarks.zoo --full              # at the sizes that people run, as shapes
    python -m benchmarks.zoo llama vit --work 5  # some of them, with so much work each

Full sizes are never allocated: the models' own `example` is evaluated for its shapes alone, with a
generator of random numbers that JAX traces. A program that fails is told, and the rest is done.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import numpy as np

import tapestry_egg as te
from models import tensat
from tapestry_egg.columns import columns
from tapestry_egg.extract.front.notes import INTERRUPTED
from tapestry_egg.machine.objectives import PEAK_BYTES, SECONDS

WORK = 5.0


@dataclass(frozen=True)
class Entry:
    """A program of models/ at some size, for some machine."""

    name: str
    module: str
    target: str
    sizes: Mapping[str, Any] = field(default_factory=dict)


#: One of each kind, at the sizes of its tests; a machine of eight.
_KINDS = (
    *("mlp", "gpt2", "llama", "lora", "decode", "moe", "ragged_moe", "vit", "resnet", "convnet"),
    *("unet", "dlrm", "pinn", "recurrent", "state_space", "graph_network", "sorting", "while_loop"),
)
_TENSAT = ("bert", "inception", "nasnet", "nasrnn", "resnext", "squeezenet", "vgg")
SMALL = (
    *(Entry(name, name, "h100:8") for name in _KINDS),
    *(Entry(f"tensat.{name}", f"tensat.{name}", "h100:8") for name in _TENSAT),
)


def _llama(
    name: str, target: str, batch: int, layers: int, width: int, heads: int, hidden: int
) -> Entry:
    sizes = {"layers": layers, "width": width, "heads": heads, "groups": 8, "hidden": hidden}
    text = {"batch": batch, "sequence": 8192, "vocabulary": 128256, "remat": True}
    return Entry(name, "llama", target, {**sizes, **text})


#: As published, with batches of 4 to 8 million tokens at most. Those of one layer or block are of
#: the size that such layers have in the model they are named after.
FULL = (
    _llama("Llama-3-8B", "h100:8x8", 64, 32, 4096, 32, 14336),
    _llama("Llama-3-70B", "h100:32x8", 256, 80, 8192, 64, 28672),
    _llama("Llama-3-405B", "h100:128x8", 512, 126, 16384, 128, 53248),
    Entry("ViT-H", "vit", "h100:8", {"batch": 512, "size": 224, "width": 1280, "layers": 32}),
    Entry(
        "decode, 8B",
        "decode",
        "h100:8",
        {
            **{"batch": 64, "prompt": 1024, "layers": 32, "width": 4096, "heads": 32},
            **{"groups": 8, "hidden": 14336, "vocabulary": 128256},
        },
    ),
    Entry(
        "a layer of Mixtral",
        "ragged_moe",
        "h100:8",
        {"batch": 32, "tokens": 4096, "width": 4096, "hidden": 14336, "experts": 8},
    ),
    Entry("U-Net, 64 x 64", "unet", "h100:8", {"batch": 256, "size": 64, "channels": 128}),
    Entry(
        "DLRM, 26 tables",
        "dlrm",
        "h100:8",
        {
            **{"batch": 65536, "rows": 1_000_000, "tables": 26, "width": 128, "dense": 13},
            "hidden": 512,
        },
    ),
    Entry("PINN", "pinn", "h100:8", {"batch": 1 << 20, "width": 512, "layers": 6}),
    Entry("GPT-3 175B", "gpt2", "h100:32x8", {"preset": "gpt3"}),
    Entry(
        "LoRA on a GPT of 1.3B",
        "lora",
        "h100:8",
        {
            **{"batch": 32, "sequence": 2048, "vocabulary": 50304, "rank": 16},
            **{"width": 2048, "heads": 16, "layers": 24},
        },
    ),
    Entry(
        "two layers of Mamba",
        "state_space",
        "h100:8",
        {"batch": 64, "time": 2049, "inputs": 64, "width": 2048, "states": 16},
    ),
    Entry(
        "a graph network",
        "graph_network",
        "h100:8",
        {"nodes": 16384, "edges": 262144, "features": 128, "width": 512, "layers": 4},
    ),
)


class ShapesOnly:
    """What the models use of NumPy's generators, as JAX traces it: shapes without bytes."""

    def __init__(self, seed: int = 0) -> None:
        self.key = jax.random.key(seed)

    def normal(self, loc: float = 0.0, scale: float = 1.0, size: Any = ()) -> jax.Array:
        return loc + scale * jax.random.normal(self.key, size)

    def uniform(self, low: float, high: float, size: Any = ()) -> jax.Array:
        return jax.random.uniform(self.key, size, minval=low, maxval=high)

    def integers(self, low: int, high: int, size: Any = ()) -> jax.Array:
        shape = (size,) if isinstance(size, int) else size
        return jax.random.randint(self.key, shape, low, high)


def program(entry: Entry) -> te.Program:
    """An entry traced, from shapes alone where it has sizes of its own."""
    if entry.module.startswith("tensat."):
        made = tensat.network(entry.module.removeprefix("tensat."), "small")
        return te.trace(made.forward, *made.abstract(), name=entry.name)
    example = importlib.import_module(f"models.{entry.module}").example
    if not entry.sizes:
        function, arguments = example()
        return te.trace(function, *arguments, donate_argnums=0, name=entry.name)
    found: list[Callable[..., Any]] = []

    def shapes() -> Any:
        function, arguments = example(**entry.sizes)
        found.append(function)
        return arguments

    with mock.patch.object(np.random, "default_rng", ShapesOnly):
        arguments = jax.eval_shape(shapes)
    return te.trace(found[0], *arguments, donate_argnums=0, name=entry.name)


def row(entry: Entry, work: float) -> tuple[list[str], bool]:
    """An entry's line of the table, and whether its search was interrupted. Errors are told in
    it."""
    begin = time.perf_counter()
    try:
        traced = program(entry)
        front = te.optimize(traced, entry.target, settings=te.Settings(work=work))
        fits = [plan for plan in front if front.fits(plan)]
        fast = min(fits or front, key=lambda plan: plan.costs.seconds)
    except Exception as e:  # one program's fault is no other's
        told = f"{type(e).__name__}: {e}".splitlines()[0][:70]
        return [entry.name, entry.target, told, *[""] * (len(HEADER) - 3)], False
    took = time.perf_counter() - begin
    cells = [
        entry.name,
        entry.target,
        str(traced.graph.size),
        str(len(front)),
        SECONDS.format(fast.costs.seconds),
        PEAK_BYTES.format(fast.costs.peak_bytes) + ("" if front.fits(fast) else " !"),
        PEAK_BYTES.format(min(p.costs.peak_bytes for p in front)),
        fast.gap_shown,
        front.gap_shown,
        f"{took:.0f} s",
    ]
    return cells, INTERRUPTED in front.notes


HEADER = [
    *("program", "target", "operations", "plans", "fastest", "its peak", "least peak"),
    *("its gap", "worst gap", "found in"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="words in the names of programs; all without")
    parser.add_argument("--full", action="store_true", help="at the sizes that people run")
    parser.add_argument("--work", type=float, default=WORK, help=f"for each ({WORK:g})")
    given = parser.parse_args()
    rows, interrupted = [HEADER], False
    for entry in FULL if given.full else SMALL:
        if given.names and not any(n.lower() in entry.name.lower() for n in given.names):
            continue
        try:
            cells, interrupted = row(entry, given.work)
            rows.append(cells)
            print("  ".join(cells), flush=True)
        except KeyboardInterrupt:  # before there was a front
            interrupted = True
        if interrupted:
            break
    print(columns(rows))
    sys.exit(130 if interrupted else 0)


if __name__ == "__main__":
    main()
