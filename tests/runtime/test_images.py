"""What is gathered for convolutions on GPUs lies with its dims in order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tapestry_egg.errors import TargetError
from tapestry_egg.runtime import hlo_stats
from tapestry_egg.runtime.lower.frame import in_order
from tapestry_egg.runtime.lower.lower import lower
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import plan_by_hand
from tests.runtime.lowered import MESH, X, Y, cut, numbers

CUT = PartitionSpec(None, None, None, "x")


def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def rectified(x: jax.Array, w: jax.Array) -> jax.Array:
    return convolve(lax.max(x, lax.full_like(x, 0)), w)


def doubled(x: jax.Array, w: jax.Array) -> jax.Array:
    """With the convolution of something else."""
    return lax.add(lax.add(x, x), convolve(lax.full_like(x, 1), w))


def put_in_order(fn: Any, platform: str) -> list[tuple[int, ...]]:
    """The shapes of what is, in a plan that gathers the first argument's channels."""
    x, w = numbers(2, 8, 8, 16), numbers(3, 3, 16, 16)
    graph, whole = trace(fn, x, w).graph, cut((), (), (), ())
    plan = plan_by_hand(graph, MESH, {}, (cut((), (), (), (X, Y)), whole), (whole,))
    mapped = jax.shard_map(
        lower(plan, platform=platform),
        mesh=Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("x", "y")),
        in_specs=(PartitionSpec(None, None, None, ("x", "y")), PartitionSpec()),
        out_specs=(PartitionSpec(),),
        check_vma=False,
    )
    (local,) = jax.make_jaxpr(mapped)(x, w).jaxpr.eqns
    found = local.params["jaxpr"].eqns
    assert any(e.primitive.name == "all_gather" for e in found)
    return [e.outvars[0].aval.shape for e in found if e.primitive.name == "layout_constraint"]


def test_what_a_convolution_reads_something_of_is_put_in_order_once() -> None:
    assert put_in_order(rectified, "cuda") == [(2, 8, 8, 16)]
    assert put_in_order(rectified, "tpu") == put_in_order(doubled, "cuda") == []


def test_a_compiler_for_gpus_holds_one_array_less_then() -> None:
    """XLA lays all that is computed of what is gathered along channels with these outermost."""
    from benchmarks.bench_strategies import devices_of

    try:
        mesh = Mesh(np.array(devices_of("h100:8")), ("x",))
    except TargetError as e:
        pytest.skip(str(e))

    def temporaries(order: bool) -> int:
        def local(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
            def loss(w: jax.Array, v: jax.Array, y: jax.Array) -> jax.Array:
                c = convolve(jax.nn.relu(y), w)
                d = c - c.mean((0, 1, 2))
                return jnp.square(y + convolve(jax.nn.relu(d), v)).mean()

            y = lax.all_gather(x, "x", axis=3, tiled=True)
            gw, gv, gy = jax.grad(loss, (0, 1, 2))(w, v, in_order(y) if order else y)
            return gw, gv, lax.psum_scatter(gy, "x", scatter_dimension=3, tiled=True)

        whole = PartitionSpec()
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(CUT, whole, whole),
            out_specs=(whole, whole, CUT),
            check_vma=False,
        )
        shapes = [((128, 32, 32, 32), CUT), *[((3, 3, 32, 32), whole)] * 2]
        arguments = [
            jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p)) for s, p in shapes
        ]
        return hlo_stats(jax.jit(mapped).lower(*arguments).compile()).temp_bytes

    assert temporaries(False) - temporaries(True) >= 4 * 128 * 32 * 32 * 32
