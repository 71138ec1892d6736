"""Arrays of random keys are cut as other arrays are, and every device has its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.errors import PlanError
from tapestry_egg.extract.certify.legality import Illegal, check_layout
from tapestry_egg.graph.layout import Layout
from tapestry_egg.plans.collectives import apply
from tapestry_egg.plans.plan import Change
from tapestry_egg.runtime import compare, compile
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import legal_dims, random_plan, signature_of
from tests.runtime.lowered import MESH, numbers, same

KEYS = jax.random.split(jax.random.key(7), 8)


def plain(tree: Any) -> Any:
    """Keys as their words, all else as it is."""

    def words(x: Any) -> Any:
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return jax.tree.map(lambda x: np.asarray(words(x)), tree)


def sampled(keys: jax.Array, x: jax.Array) -> Any:
    more = jax.vmap(lambda k: jax.random.split(k, 4))(keys)
    noise = jax.vmap(lambda k: jax.random.normal(k, (4,)))(more[:, 0])
    return more, x * noise


def folded(keys: jax.Array, x: jax.Array) -> Any:
    some = jax.vmap(jax.random.fold_in)(keys, jnp.arange(8))
    return some, jax.vmap(lambda k: jax.random.bits(k, (4, 2)))(some)


def from_one(keys: jax.Array, x: jax.Array) -> Any:
    many = jax.random.split(keys[3], (8, 4))
    return many, jax.random.key_data(many), jax.vmap(jax.vmap(jax.random.uniform))(many)


def from_seeds(keys: jax.Array, x: jax.Array) -> Any:
    made = jax.vmap(jax.random.key)(jnp.arange(8, dtype=jnp.uint32))
    return jnp.concatenate([made, keys]), jnp.where(x[:, 0] > 0, made, keys)


def rearranged(keys: jax.Array, x: jax.Array) -> Any:
    table = keys.reshape(2, 4)
    place = (x[0, 0] > 0).astype(jnp.int32)
    return (
        table.T,
        jnp.flip(keys),
        jnp.broadcast_to(keys[:, None], (8, 4)),
        keys[jnp.array([5, 0, 3, 3])],
        keys.at[jnp.array([1, 6])].set(keys[:2]),
        lax.dynamic_slice(table, (place, 0), (1, 4)),
        lax.dynamic_update_slice(table, table[:1], (place, 0)),
    )


def looped(keys: jax.Array, x: jax.Array) -> Any:
    def step(carry: Any, key: jax.Array) -> Any:
        own, total = carry
        own, sub = jnp.moveaxis(jax.vmap(jax.random.split)(own), 1, 0)
        return (own, total + jax.vmap(jax.random.normal)(sub)), jax.random.fold_in(key, 1)

    return lax.scan(step, (keys, x[:, 0]), keys)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "fn",
    [
        *(
            pytest.param(fn, marks=pytest.mark.slow)
            for fn in (sampled, rearranged, looped, from_one, from_seeds)
        ),
        folded,
    ],
)
def test_random_plans_give_the_original_keys(fn: Callable[..., Any], seed: int) -> None:
    args = (KEYS, numbers(8, 4))
    program = trace(fn, *args)
    plan = replace(random_plan(program.graph, MESH, random.Random(seed)), program=program)
    same(plain(compile(plan)(*args)), plain(jax.jit(fn)(*args)))


def test_every_operation_on_keys_is_cut_along_them() -> None:
    seen = set()
    for fn in (sampled, folded, from_one, from_seeds):
        graph = trace(fn, KEYS, numbers(8, 4)).graph
        for op in graph.operations:
            if op.kernel.startswith("random_") and graph.values[op.outputs[0]].rank:
                seen.add(op.kernel)
                assert legal_dims(signature_of(graph, op), 4), op.kernel
    assert seen >= {"random_bits", "random_split", "random_fold_in", "random_seed"}
    assert seen >= {"random_unwrap"}


def test_keys_lie_in_blocks_and_are_never_partial() -> None:
    check_layout(Layout(((0,),)), (4,), "key<fry>", MESH)
    with pytest.raises(Illegal, match="never partial"):
        check_layout(Layout(((),), (0,), "sum"), (4,), "key<fry>", MESH)
    with pytest.raises(PlanError, match="do not add up"):
        apply(KEYS, Change("all_reduce", (0,), monoid="sum"), MESH)


@pytest.mark.slow
def test_planned_keys_move_the_planned_bytes() -> None:
    args = (jax.random.split(jax.random.key(0), 512), numbers(512, 64))
    program = trace(
        lambda k, x: jax.vmap(lambda k, x: x * jax.random.normal(k, (64,)))(k, x), *args
    )
    plan = te.optimize(program, "cpu:8", settings=te.Settings(work=0.1, forms=0, recompute=0)).best(
        "seconds"
    )
    assert plan.in_shardings[0].axes and plan.out_shardings[0].axes
    run = compile(plan)
    assert compare(plan, run.compile()).equal
    same(run(*args), jax.jit(program)(*args))
