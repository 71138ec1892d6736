"""Hand-sharded GPT-2 steps: numbers of one device, flops of one eighth, only the stated bytes."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from benchmarks.baselines import BASELINES, abstract
from models import gpt2
from tapestry_egg.errors import PlanError

WAYS = 8
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

pytestmark = pytest.mark.skipif(
    jax.device_count() < WAYS, reason=f"needs {WAYS} devices (virtual ones do)"
)


def two_steps(compiled: Any, params: Any, opt_state: Any, batch: Any) -> Any:
    """The parameters, optimizer state and both losses of two steps."""
    params, opt_state, first = compiled(params, opt_state, batch)
    params, opt_state, second = compiled(params, opt_state, batch)
    return jax.tree.map(np.asarray, (params, opt_state, first, second))


@functools.cache
def alone(config: gpt2.Config) -> Any:
    """What `two_steps` gives on one device."""
    return two_steps(jax.jit(gpt2.step, compiler_options=QUICK), *gpt2.arguments(config))


def payloads(text: str) -> Counter[tuple[str, int]]:
    """Elements moved, by (opcode, group size), read off an HLO module without loops."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found: Counter[tuple[str, int]] = Counter()
    for line in text.splitlines():
        match = re.search(rf" = (.*?) ({kinds})\(", line)
        if match is None:
            assert not re.search(rf" ({kinds})", line.split("metadata=")[0]), line
            continue
        listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
        iota = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
        group = len(listed[1].split(",")) if listed else int(iota[1]) if iota else WAYS
        shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
        elements = sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)
        found[match[2], group] += elements * (group if match[2] == "reduce-scatter" else 1)
    return found


def expected(name: str, c: gpt2.Config) -> dict[tuple[str, int], int]:
    """The same from the formulas, for a batch and sizes that divide over eight devices."""
    d, layers, tables = c.width, c.layers, 1 if c.tied else 2
    positions, vocabulary = c.sequence * d, tables * c.vocabulary * d
    kernels, small = 12 * d * d, 13 * d
    everything = vocabulary + positions + layers * (kernels + small) + 2 * d
    tokens = c.batch * c.sequence
    stream = tokens * d
    seams = 4 * layers + 2
    softmax = 3 * tokens  # maximum, sum and the target's logit
    norms = (6 * layers + 2) * d  # norms, output biases and down biases
    cut = vocabulary + layers * (kernels + 7 * d)  # what tensor parallelism shards
    gather, reduce, scatter = "all-gather", "all-reduce", "reduce-scatter"
    return {
        "data_parallel": {(reduce, 8): everything + 1},
        "fsdp": {
            (gather, 8): everything + layers * kernels,
            (scatter, 8): everything,
            (reduce, 8): 1,
        },
        "fsdp_keep_gathered": {
            (gather, 8): everything,
            (scatter, 8): everything,
            (reduce, 8): 1,
        },
        "tensor_parallel": {(reduce, 8): seams * stream + softmax},
        "tensor_sequence_parallel": {
            (gather, 8): seams * stream,
            (scatter, 8): seams * stream,
            (reduce, 8): softmax + norms,
        },
        "tensor_sequence_parallel_regather": {
            (gather, 8): seams * stream + (2 * layers + 1) * stream,
            (scatter, 8): seams * stream,
            (reduce, 8): softmax + norms,
        },
        "data_tensor_parallel": {
            (reduce, 4): (seams * stream + softmax) // 2,
            (reduce, 2): cut // 4 + positions + norms + 1,
        },
        "data_tensor_sequence_parallel": {
            (gather, 4): seams * stream // 2,
            (scatter, 4): seams * stream // 2,
            (reduce, 4): softmax // 2,
            (reduce, 8): norms,
            (reduce, 2): (cut + positions) // 4 + 1,
        },
    }[name]


# One of each kind of cut; the others are combinations of these.
FIRST = {"tensor_sequence_parallel_regather", "data_tensor_parallel"}
CASES = [
    pytest.param(name, True, marks=[] if name in FIRST else pytest.mark.long) for name in BASELINES
]
CASES += [
    pytest.param(name, False, marks=pytest.mark.long)
    for name in ("fsdp", "tensor_sequence_parallel_regather")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tied"), CASES)
def test_baseline_is_the_same_step_and_moves_what_it_should(name: str, tied: bool) -> None:
    with jax.enable_x64(True):
        config = gpt2.config("tiny", layers=2, tied=tied, dtype="float64")
        run = BASELINES[name](config, jax.devices()[:WAYS])
        compiled = run.step.lower(*abstract(config, run)).compile(QUICK)
        assert payloads(compiled.as_text()) == expected(name, config)
        actual = two_steps(compiled, *run.place(gpt2.arguments(config)))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12),
            actual,
            alone(config),
        )


def dot_flops(jaxpr: Any) -> int:
    """Multiply-adds of all products in a jaxpr and the ones that it calls."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in contracted)
        total += sum(dot_flops(inner) for inner in jaxprs_in_params(eqn.params))
    return total


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n != "fsdp" else ()) for n in BASELINES]
)
def test_baseline_wastes_no_product(name: str) -> None:
    config = gpt2.config("tiny")
    run = BASELINES[name](config, jax.devices()[:WAYS])
    one = dot_flops(jax.make_jaxpr(gpt2.step)(*gpt2.abstract(config)).jaxpr)
    each = dot_flops(run.step.trace(*abstract(config, run)).jaxpr.jaxpr)
    assert each * WAYS == one > 0


@pytest.mark.slow
def test_arguments_survive_the_donation_of_their_copies() -> None:
    config = gpt2.config("tiny")
    args = gpt2.arguments(config)
    placed = BASELINES["data_parallel"](config, jax.devices()[:WAYS]).place(args)
    for leaf in jax.tree.leaves(placed):
        leaf.delete()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(args))


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("data_parallel", {"batch": 12}, "12 batch rows do not divide over 8 devices"),
        ("fsdp", {"batch": 12}, "12 batch rows"),
        ("tensor_parallel", {"heads": 4}, "4 heads"),
        ("tensor_parallel", {"vocabulary": 60}, "60 vocabulary entries"),
        ("tensor_sequence_parallel", {"sequence": 12}, "12 positions"),
        ("data_tensor_parallel", {"batch": 1}, "1 batch rows do not divide over 2 devices"),
    ],
)
def test_what_does_not_divide_is_refused(name: str, changes: dict[str, int], what: str) -> None:
    with pytest.raises(PlanError, match=what) as refused:
        BASELINES[name](gpt2.config("tiny", **changes), jax.devices()[:WAYS])
    assert refused.value.where == name
    assert refused.value.hint
