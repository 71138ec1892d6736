"""Collectives of a user's shard_map against `jax.jit`: every one over one axis and over several, on
operands that vary over all, some or none of the axes, alone and inside other functions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from tapestry_egg.tracing.trace import trace
from tests.plans.plans import signature_of
from tests.runtime.lowered import numbers, same
from tests.tracing.test_shard_maps import kernels

P = PartitionSpec
MESH = jax.make_mesh((2, 4), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
X = numbers(16, 16) / 4
W = numbers(16, 16, seed=1) / 4

# Over `axes`, of a block [16, 16] of which every device has its own, or the same.
COLLECTIVES: dict[str, Callable[[Any, Any, int], Any]] = {
    "psum": lambda x, axes, n: lax.psum(x, axes),
    "pmean": lambda x, axes, n: lax.pmean(x, axes),
    "psum_scatter": lambda x, axes, n: lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True),
    "psum_scatter of rows": lambda x, axes, n: lax.psum_scatter(x.reshape(n, -1), axes),
    "all_gather": lambda x, axes, n: lax.all_gather(x, axes, axis=1, tiled=True),
    "all_gather stacked": lambda x, axes, n: lax.all_gather(x, axes),
    "all_to_all": lambda x, axes, n: lax.all_to_all(x, axes, 0, 1, tiled=True),
    "all_to_all of rows": lambda x, axes, n: lax.all_to_all(x.reshape(n, -1), axes, 0, 0),
    "ppermute": lambda x, axes, n: lax.ppermute(x, axes, [(k, (k + 1) % n) for k in range(n)]),
    "ppermute of some": lambda x, axes, n: lax.ppermute(x, axes, [(1, 0)]),
    "axis_index": lambda x, axes, n: x * (1 + lax.axis_index(axes)) / lax.axis_size(axes),
}
OVER: tuple[Any, ...] = ("i", "j", ("i", "j"), ("j", "i"))
SIZES = {"i": 2, "j": 4, ("i", "j"): 8, ("j", "i"): 8}
LIES = (P(), P("i"), P(None, "j"), P("j", "i"))
#: Whether this JAX takes no permutation over axes named in another order than the mesh's.
IN_MESH_ORDER = hasattr(jax.config, "jax_raise_on_ppermute_sort_diff")


def inside(name: str, axes: Any) -> Callable[[Any], Any]:
    """The collective, and whatever its shape is a block of [4, 16] again, other on every device."""

    def block(x: Any) -> Any:
        x = jnp.resize(jnp.tanh(x), (16, 16))
        y = COLLECTIVES[name](x, axes, SIZES[axes])
        return jnp.sin(jnp.resize(y, (4, 16)) + lax.axis_index(("i", "j")))

    return block


def looped(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.scan(lambda c, _: (f(c), c.sum()), f(x), None, length=2)[0]


def branched(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # Not where the collective stands: all devices must come to it.
    return lambda x: lax.cond(lax.psum(x.sum(), ("i", "j")) > 0, f, lambda x: f(2 * x), x)


WITHIN: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "alone": lambda f: f,
    "scan": looped,
    "cond": branched,
    "checkpoint": jax.checkpoint,
}
AROUND: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "alone": lambda f: f,
    "grad": lambda f: jax.grad(lambda x: (f(x) ** 2).sum()),
    "checkpointed grad": lambda f: jax.grad(lambda x: (jax.checkpoint(f)(x) ** 2).sum()),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c + f(c).sum(), None), x, None, length=2)[0],
}


def over_blocks(ins: Any, outs: Any, fn: Any, **more: Any) -> Callable[..., Any]:
    return jax.shard_map(fn, mesh=MESH, in_specs=ins, out_specs=outs, **more)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(7, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_give_what_jax_jit_gives(name: str, count: int) -> None:
    """Places of the operand, axes and surroundings, as they are drawn for each collective."""
    draw = random.Random(name)
    for within, around in draw.sample([(w, a) for w in WITHIN for a in AROUND], count):
        axes, lies = draw.choice(OVER), draw.choice(LIES)
        if IN_MESH_ORDER and name.startswith("ppermute") and axes == ("j", "i"):
            axes = ("i", "j")
        block = WITHIN[within](inside(name, axes))
        fn = AROUND[around](over_blocks(lies, P(("i", "j")), block, check_vma=False))
        case = f"{name} over {axes} of {lies}, {within}, {around}"
        program = trace(fn, X)
        assert not {"shard_map", "axis_index", "ppermute"} & kernels(program.graph), case
        for got, wanted in zip(
            jax.tree.leaves(jax.jit(program)(X)), jax.tree.leaves(jax.jit(fn)(X)), strict=True
        ):
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3, err_msg=case)


def nested(x: jax.Array, w: jax.Array) -> jax.Array:
    """One shard_map inside another, over the axis that the outer one leaves."""

    def outer(x: jax.Array, w: jax.Array) -> jax.Array:
        inner = jax.shard_map(
            lambda x, w: lax.psum(x @ w, "j") + lax.axis_index("i"),
            in_specs=(P(None, "j"), P("j")),
            out_specs=P(),
            axis_names={"j"},
        )
        return lax.pmean(inner(x, w), "i") + inner(x, w)

    return over_blocks((P("i"), P()), P("i"), outer, axis_names={"i"})(x, w)


def one_way(x: jax.Array, _: jax.Array) -> jax.Array:
    return over_blocks(P("j"), P("j"), lambda x: lax.ppermute(x, "j", [(0, 1), (2, 0)]))(x)


def named_in_another_order(x: jax.Array, _: jax.Array) -> jax.Array:
    """JAX counts the devices of a permutation in the order of the mesh."""
    ring = [(k, (k + 1) % 8) for k in range(8)]
    return over_blocks(P(("j", "i")), P(("j", "i")), lambda x: lax.ppermute(x, ("j", "i"), ring))(x)


def the_same_everywhere(x: jax.Array, _: jax.Array) -> jax.Array:
    return over_blocks(
        P(), P("j"), lambda x: lax.all_to_all(x.reshape(4, 4, 16), "j", 0, 1)[0], check_vma=False
    )(x)


@pytest.mark.parametrize("fn", [nested, one_way, named_in_another_order, the_same_everywhere])
def test_what_vmap_alone_does_not_map(fn: Callable[..., Any]) -> None:
    program = trace(fn, X, W)
    if fn is named_in_another_order and IN_MESH_ORDER:
        pytest.skip("this JAX refuses names in another order than the mesh's")
    same(jax.jit(program)(X, W), np.asarray(jax.jit(fn)(X, W)))
    for op in program.graph.operations:
        assert not signature_of(program.graph, op).opaque, op.kernel


@pytest.mark.parametrize(("axes", "source"), [("j", 2), (("i", "j"), 5)])
def test_a_broadcast_from_one_device_is_one(axes: Any, source: int) -> None:
    """JAX lowers it for GPUs only."""
    fn = over_blocks(P(("i", "j")), P(("i", "j")), lambda x: lax.pbroadcast(x, axes, source))
    blocks = X.reshape(2, 4, 2, 16)
    sent = blocks[:, 2:3] if axes == "j" else blocks[1:, 1:2]
    same(jax.jit(trace(fn, X))(X), np.broadcast_to(sent, blocks.shape).reshape(16, 16))


def test_a_constraint_on_the_axes_that_are_left_binds() -> None:
    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(jnp.tanh(x @ w), P(P.UNCONSTRAINED, "j"))

    fn = over_blocks((P("i"), P()), P("i"), block, axis_names={"i"})
    graph = trace(fn, X, W).graph
    (asked,) = [op.params for op in graph.operations if op.kernel == "sharding_constraint"]
    assert asked["dims"][-2:] == [None, ["j"]] and asked["mesh"] == [["i", 2], ["j", 4]]


@pytest.mark.slow
def test_what_the_user_computes_again_is_computed_again() -> None:
    layer = jax.checkpoint(lambda x, w: jnp.sin(lax.psum(jnp.tanh(x @ w), "j")))
    fn = over_blocks((P("i", "j"), P("j")), P("i"), layer, check_vma=False)
    for gradient in (
        jax.grad(lambda x, w: fn(x, w).sum(), (0, 1)),
        over_blocks(
            (P("i", "j"), P("j")),
            (P("i", "j"), P("j")),
            jax.grad(lambda x, w: layer(x, w).sum(), (0, 1)),
            check_vma=False,
        ),
    ):
        program = trace(gradient, X, W)
        again = [op.kernel for op in program.graph.operations if op.remat is not None]
        assert "tanh" in again and "dot_general" in again
        same(jax.jit(program)(X, W), jax.tree.map(np.asarray, jax.jit(gradient)(X, W)), 1e-3)
