"""The programs that benchmarks plan: of models/, TENSAT's graphs and benchmarks/unseen, by name.

Names are `models:NAME`, `tensat:NAME` and `unseen:MODULE:NAME`. `SMALL` is for programs that run
on a CPU, every array there; `SIZES` and `LARGE` are for those that are only compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .listed import listed

if TYPE_CHECKING:
    from tapestry_egg.tracing.trace import Program

Sizes = Mapping[str, Mapping[str, Any]]

#: Models that are not of `models.PROGRAMS`, for the zoo.
_ZOO = ("dlrm", "pinn", "unet")

#: Sizes at which the programs of `unseen` run within seconds; models have such sizes themselves.
SMALL: Sizes = {
    "language:bert_masked": {
        "layers": 2, "width": 32, "heads": 4, "vocabulary": 64,
        "batch": 8, "sequence": 16, "masked": 4,
    },
    "language:gpt_tied": {
        "layers": 2, "width": 32, "heads": 4, "vocabulary": 64, "batch": 8, "sequence": 16,
    },
    "language:llama_scan_remat": {
        "layers": 2, "width": 32, "heads": 4, "hidden": 64, "vocabulary": 64,
        "batch": 8, "sequence": 16,
    },
    "language:switch_experts": {
        "width": 16, "hidden": 32, "experts": 8, "vocabulary": 64,
        "batch": 8, "sequence": 16, "capacity": 4,
    },
    "tabular:dlrm": {
        "batch": 64, "dense": 5, "width": 8, "hidden": 32, "narrow": 16,
        "rows": (256, 128, 64, 64, 16, 8),
    },
    "tabular:gru_tagger": {
        "batch": 16, "time": 8, "width": 16, "hidden": 16, "vocabulary": 64, "tags": 8,
    },
    "tabular:lstm_stack": {"batch": 16, "time": 9, "features": 8, "hidden": 16},
    "vision:diffusion": {"batch": 8, "size": 8, "width": 16, "blocks": 2, "groups": 4},
    "vision:unet": {"batch": 8, "size": 16, "widths": (4, 8, 16)},
    "vision:vit_scan": {
        "batch": 8, "size": 16, "patch": 4, "layers": 2, "width": 32, "heads": 4, "classes": 16,
    },
}  # fmt: skip

_DECODER = {"layers": 2, "width": 512, "heads": 8}
_TEXT = {"batch": 16, "sequence": 256, "vocabulary": 4096}
#: Sizes for the examples of `models`, which are made to run on a CPU: no toys, quick to compile.
SIZES: Sizes = {
    "convnet": {"batch": 128, "size": 64, "channels": 32},
    "decode": {"batch": 64, "prompt": 64, "hidden": 1408, "groups": 4, **_DECODER},
    "graph_network": {"nodes": 512, "edges": 2048, "features": 16, "width": 256},
    "llama": {"hidden": 1408, "groups": 4, **_DECODER, **_TEXT},
    "lora": {"rank": 8, **_TEXT},
    "mlp": {"widths": (256, 2048, 2048, 128), "batch": 4096},
    "moe": {"batch": 32, "tokens": 256, "width": 256, "hidden": 1024},
    "nnx_gpt2": _TEXT,
    "ragged_moe": {"batch": 32, "tokens": 256, "width": 256, "hidden": 1024},
    "recurrent": {"batch": 512, "time": 64, "inputs": 64, "hidden": 512},
    "resnet": {"batch": 128, "size": 64},
    "sorting": {"batch": 1024, "length": 256, "channels": 32},
    "state_space": {"batch": 64, "time": 129, "inputs": 32, "width": 256, "states": 16},
    "while_loop": {"batch": 4096, "inputs": 256, "width": 1024, "outputs": 256},
}
#: Sizes nearer to those of real runs.
LARGE: Sizes = {
    "convnet": {"batch": 512, "size": 64, "channels": 64},
    "decode": {"batch": 64, "prompt": 128, "width": 1024, "heads": 8, "groups": 8, "hidden": 4096},
    "gpt2": {"preset": "demo"},
    "graph_network": {"nodes": 8192, "edges": 65536, "features": 128, "width": 512},
    "llama": {
        "batch": 16, "sequence": 1024, "vocabulary": 8192,
        "layers": 4, "width": 1024, "heads": 8, "groups": 8, "hidden": 4096,
    },
    "lora": {"batch": 64, "sequence": 512, "vocabulary": 8192, "rank": 8, "width": 512},
    "mlp": {"widths": (4096, 8192, 8192, 4096), "batch": 8192},
    "moe": {"batch": 64, "tokens": 512, "width": 1024, "hidden": 4096},
    "nnx_gpt2": {"batch": 64, "sequence": 512, "vocabulary": 8192, "width": 512},
    "ragged_moe": {"batch": 64, "tokens": 512, "width": 512, "hidden": 2048},
    "recurrent": {"batch": 1024, "time": 64, "inputs": 256, "hidden": 1024},
    "resnet": {"batch": 1024, "size": 64},
    "sorting": {"batch": 4096, "length": 512, "channels": 64},
    "state_space": {"batch": 256, "time": 257, "inputs": 64, "width": 512, "states": 64},
    "vit": {"batch": 256, "size": 128, "width": 512},
    "while_loop": {"batch": 16384, "inputs": 512, "width": 2048, "outputs": 512},
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A function with the arguments of a call, arrays or their shapes. What it returns in place of
    the arguments `donated` may take their memory."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]

    def trace(self) -> Program:
        """The program, traced."""
        import tapestry_egg as te

        return te.trace(self.function, *self.arguments, donate_argnums=self.donated)


def wanted(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Those of a list that are of the sets or programs named; all of them where none is named."""
    found = [x for x in every if not names or any(n == x or n in x.split(":") for n in names)]
    if not found:
        raise SystemExit(f"error: no program of {', '.join(names)}; there are {', '.join(every)}")
    return found


def compiled_ones() -> list[str]:
    """The programs whose plans are compiled at the sizes of `SIZES` and `LARGE`."""
    import models

    return [f"models:{n}" for n in models.PROGRAMS] + [f"unseen:{n}" for n in listed("unseen")]


def run_ones() -> list[str]:
    """The programs whose plans are run: all there are."""
    import models
    from models import tensat

    return [
        *(f"models:{n}" for n in sorted({*models.PROGRAMS, *_ZOO})),
        *(f"tensat:{n}" for n in tensat.NAMES),
        *(f"unseen:{n}" for n in listed("unseen")),
    ]


def described(name: str, sizes: Sizes) -> Made:
    """A program that is compiled: one of `models` at the sizes given, one of `unseen` at its own;
    arguments may be shapes."""
    of, _, rest = name.partition(":")
    if of == "unseen":
        from . import unseen

        return Made(*unseen.make(rest), donated=(0,))
    if rest == "gpt2":
        from models import gpt2

        return Made(gpt2.step, gpt2.abstract(gpt2.config()), donated=(0, 1))
    return _example(rest, sizes.get(rest, {}))


def small(name: str) -> Made:
    """A program with the arrays of a call, small enough to run."""
    of, _, rest = name.partition(":")
    if of == "unseen":
        from . import unseen

        return Made(*unseen.drawn(unseen.make(rest, **SMALL[rest])), donated=(0,))
    if of == "tensat":
        from models import tensat

        network = tensat.network(rest, "small")
        return Made(network.forward, network.arguments(), donated=())
    if rest == "gpt2":
        from models import gpt2

        config = gpt2.config("tiny")
        return Made(gpt2.step, gpt2.arguments(config), donated=(0, 1))
    return _example(rest, {})


def _example(name: str, sizes: Mapping[str, Any]) -> Made:
    function, arguments = importlib.import_module(f"models.{name}").example(**sizes)
    return Made(function, arguments, donated=(1 if name == "decode" else 0,))
