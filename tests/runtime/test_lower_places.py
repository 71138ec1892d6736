"""Kernels whose results depend on where a shard lies: random bits, slices and updates."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from tapestry_egg.graph.layout import Layout
from tapestry_egg.runtime import compile
from tapestry_egg.runtime.lower.kernels.kernels import _counters
from tapestry_egg.tracing.codec import primitive
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import all_cuts, finish, make_plan, plan_by_hand, signature_of
from tests.runtime.lowered import MESH, X, Y, numbers, repeated, same

pytestmark = pytest.mark.slow  # to compile

Array = Any


def strategies_of(fn: Any, *args: Any, least: int, most: int = 8) -> None:
    """Run `fn`, one operation, under some strategies of at most two cuts, all in one plan."""
    graph = trace(fn, *args).graph
    (op,) = graph.operations
    strategies = all_cuts(signature_of(graph, op), MESH)
    assert len(strategies) >= least
    strategies = random.Random(0).sample(strategies, min(most, len(strategies)))
    program = repeated(fn, len(strategies), *args)
    layouts = [
        tuple(Layout.replicated(program.graph.values[v].rank) for v in ids)
        for ids in (program.graph.inputs, program.graph.outputs)
    ]
    body = finish(program.graph, MESH, *layouts, tuple(strategies))
    for got in compile(replace(make_plan(body, MESH), program=program))(*args):
        same(got, fn(*args))


@pytest.mark.parametrize("start", [-3, 0, 3, 7, 99])
def test_a_slice_at_a_place_in_parts(start: int) -> None:
    strategies_of(
        lambda x, i: lax.dynamic_slice_p.bind(x, i, np.int32(2), slice_sizes=(8, 4)),
        numbers(12, 8),
        np.int32(start),
        least=7,
    )


@pytest.mark.parametrize("start", [-3, 3, 99])
def test_blocks_of_a_slice_at_a_place_are_of_the_clamped_one(start: int) -> None:
    """XLA makes one slice of a slice's slice, and clamps its start no more than that needs."""

    def f(x: Array, i: Array) -> Array:
        return lax.tanh(lax.dynamic_slice_p.bind(x, np.int32(2), i, slice_sizes=(12, 4)))

    x, i = numbers(12, 8), np.int32(start)
    program = trace(f, x, i)
    at = next(k for k, op in enumerate(program.graph.operations) if op.kernel == "tanh")
    whole, scalar, blocks = Layout(((), ())), Layout(()), Layout(((), (Y,)))
    cuts = {at: {"i1": (Y,)}}
    plan = plan_by_hand(program.graph, MESH, cuts, (whole, scalar), (blocks,))
    same(compile(replace(plan, program=program))(x, i), f(x, i))


@pytest.mark.parametrize("start", [-3, 3, 99])
def test_blocks_of_a_single_window_are_of_the_clamped_one(start: int) -> None:
    """As those of a slice, which XLA makes of a gather at one place."""
    window = lax.GatherDimensionNumbers((0, 1), (), (1,))

    def f(x: Array, i: Array) -> Array:
        return lax.tanh(lax.gather(x, i, window, (12, 4), mode="clip"))

    x, i = numbers(12, 8), np.array([start], np.int32)
    program = trace(f, x, i)
    at = next(k for k, op in enumerate(program.graph.operations) if op.kernel == "tanh")
    whole, place, blocks = Layout(((), ())), Layout(((),)), Layout(((), (Y,)))
    plan = plan_by_hand(program.graph, MESH, {at: {"i1": (Y,)}}, (whole, place), (blocks,))
    same(compile(replace(plan, program=program))(x, i), f(x, i))


@pytest.mark.parametrize("start", [-3, 0, 3, 6, 14, 99])
def test_an_update_at_a_place_that_several_shards_hold(start: int) -> None:
    """Updates of four rows in shards of eight, four and two: all of one, part of two, or more."""
    strategies_of(
        lambda x, u, i: lax.dynamic_update_slice_p.bind(x, u, i, np.int32(0)),
        numbers(16, 8),
        numbers(4, 8, seed=1),
        np.int32(start),
        least=7,
    )


def test_a_cache_cut_along_time_takes_one_new_row() -> None:
    cache, new = numbers(2, 16, 4), numbers(2, 1, 4, seed=1)

    def write(cache: Array, new: Array, t: Array) -> Array:
        return lax.dynamic_update_slice(cache, new, (0, t, 0))

    rows, whole, scalar = Layout(((), (X, Y), ())), Layout(((), (), ())), Layout(())
    program = trace(write, cache, new, np.int32(0))
    at = next(k for k, op in enumerate(program.graph.operations)
              if op.kernel == "dynamic_update_slice")  # fmt: skip
    plan = plan_by_hand(program.graph, MESH, {at: {"i1": (X, Y)}}, (rows, whole, scalar), (rows,))
    run = compile(replace(plan, program=program))
    for t in (0, 1, 7, 15, 40):
        same(run(cache, new, np.int32(t)), write(cache, new, np.int32(t)))


# Random bits


def bits(width: int, shape: tuple[int, ...]) -> Any:
    return lambda key: primitive("random_bits").bind(key, bit_width=width, shape=shape)


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, 32])
def test_random_bits_are_the_same_under_any_cut(width: int) -> None:
    strategies_of(bits(width, (8, 4, 16)), jax.random.key(7), least=13, most=3)


@pytest.mark.slow
def test_bits_of_several_keys() -> None:
    strategies_of(bits(32, (8, 16)), jax.random.split(jax.random.key(0), 3), least=7, most=2)


def test_other_generators_run_whole() -> None:
    key = jax.random.key(0, impl="rbg")
    graph = trace(bits(32, (8, 16)), key).graph
    assert signature_of(graph, graph.operations[0]).opaque


@pytest.mark.slow
def test_dropout_in_shards_drops_what_it_drops_whole() -> None:
    def dropout(key: Array, x: Array) -> Array:
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    args = (jax.random.key(1), numbers(16, 8))
    program = trace(dropout, *args)
    cuts = {}
    for k, op in enumerate(program.graph.operations):
        signature = signature_of(program.graph, op)
        if op.kernel == "random_bits" or program.graph.values[op.outputs[0]].shape == (16, 8):
            rows = next(d.name for d in signature.index if d.size == 16)
            cuts[k] = {rows: (X, Y)}
    assert len(cuts) > 5
    layouts = (Layout(()), Layout(((X, Y), ())))
    plan = plan_by_hand(program.graph, MESH, cuts, layouts, (Layout(((X, Y), ())),))
    same(compile(replace(plan, program=program))(*args), dropout(*args))


def test_counters_of_more_than_32_bits() -> None:
    row = 2**9 * (2**7 + 1)
    carries = -pow(129, -1, 2**23) % 2**23  # row · carries = 2³² - 2⁹ (mod 2³²)
    shape, offsets, local = (2**23 + 2, 2**9, 2**7 + 1), (carries, 500, 60), (2, 3, 4)
    call: Any = SimpleNamespace(params={"shape": local}, output_offset=lambda k: offsets[k])
    high, low = _counters(call, shape, 0)
    at = np.indices(local).astype(object)
    wanted = np.zeros(local, object)
    for k, n in enumerate(shape):
        wanted = wanted * n + at[k] + offsets[k]
    got = np.asarray(high).astype(object) * 2**32 + np.asarray(low).astype(object)
    assert (got == wanted).all() and wanted.max() > 2**33
    assert (row * carries) % 2**32 + offsets[1] * shape[2] > 2**32
