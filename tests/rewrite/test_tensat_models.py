"""The graphs of TENSAT's evaluation: their sizes as published, and their forms' numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
import pytest

from models import tensat
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline.census import census
from tapestry_egg.plans.compiler_options import OWN_REDUCTIONS_ON_CPUS
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
from tapestry_egg.runtime.measure.numerics import accuracy
from tapestry_egg.schedule.one_device import program_seconds
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace

BOOKS = load_books(DEFAULT_BOOKS)
SLOW = {"inception", "nasnet", "squeezenet"}

# Shape of the (last) output and number of weights. The latter are those of public implementations
# without biases, normalisation and, for Inception-v3, the classifier: torchvision's vgg19 has
# 143,667,240 parameters of which 14,696 are biases, squeezenet1_1 1,235,496 and 3,944.
PUBLISHED = {
    "nasrnn": ((1, 512), 5 * 8 * 2 * 512**2 + 512),
    "bert": ((64, 1024), 8 * 4 * 1024**2),
    "resnext": ((1, 7, 7, 2048), 22_911_680),
    "nasnet": ((1, 7, 7, 5120), 39_838_528),
    "squeezenet": ((1, 1000), 1_231_552),
    "vgg": ((1, 1000), 143_652_544),
    "inception": ((1, 2048), 21_751_136),
}


@pytest.mark.parametrize("name", tensat.NAMES)
def test_the_published_networks_have_their_known_sizes(name: str) -> None:
    network = tensat.network(name)
    out = jax.tree.leaves(jax.eval_shape(network.forward, *network.abstract()))[-1]
    weights = sum(prod(shape) for shape in network.shapes())
    assert (out.shape, weights) == PUBLISHED[name]


@pytest.mark.parametrize("name", tensat.NAMES)
def test_all_their_work_can_be_split(name: str) -> None:
    network = tensat.network(name, "small")
    found = census(trace(network.forward, *network.abstract()).graph)
    assert found.flops_share == 1.0


def outputs(fn: Callable[..., Any], *args: Any) -> list[np.ndarray]:
    """Flat outputs, compiled with little optimisation: these programs run once."""
    flags = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    run = jax.jit(fn, compiler_options=flags | OWN_REDUCTIONS_ON_CPUS)
    return [np.asarray(x) for x in jax.tree.leaves(run(*args))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * (n in SLOW)) for n in tensat.NAMES],
)
def test_their_forms_cost_less_and_give_the_same_numbers(name: str) -> None:
    network = tensat.network(name, "small")
    args = network.arguments()
    graph = trace(partial(network.forward, args[0]), *args[1:]).graph
    found: list[BlockGraph] = []
    for spec in ("h100:1", "cpu:1"):
        target = load_target(spec)
        for form in forms(graph, BOOKS, target, least_gain=0.0)[1:2]:
            assert program_seconds(form.graph, target) < program_seconds(graph, target)
            found.append(prepare(form.graph))
    if not found:
        return
    original = outputs(network.forward, *args)
    with jax.enable_x64(True):
        reference = outputs(network.forward, *jax.tree.map(np.float64, args))
    for form_graph in found:
        verdicts = accuracy(reference, original, outputs(emit(form_graph), *args[1:]))
        assert all(v.ok for v in verdicts), "; ".join(map(str, verdicts))
