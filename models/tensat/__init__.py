"""The seven inference graphs on which TENSAT and TASO were evaluated, as plain JAX programs.

NasRNN, BERT, ResNeXt-50, NasNet-A, SqueezeNet, VGG-19 and Inception-v3 with the layers and sizes of
https://github.com/uwplse/tensat (src/*.rs, model/*.model): batch one, float32, no biases and no
normalisation (folded into the weights beforehand), every weight used once. Images are NHWC here.

`network(name)` has the published sizes, `network(name, "small")` the same layers with few channels
and small images.
"""

from __future__ import annotations

import importlib

from .network import Network

NAMES = ("nasrnn", "bert", "resnext", "nasnet", "squeezenet", "vgg", "inception")


def network(name: str, size: str = "published") -> Network:
    """The graph of that name; `size` is published, reduced (a run takes less than a second on one
    core of a CPU) or small."""
    module = importlib.import_module(f"{__name__}.{name}")
    found: Network = module.network(size)
    return found
