"""What plans use of their machine: peak flops, memory, bytes by level of the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.extract.certify.cost_parts import useful
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import wire_shares
from tapestry_egg.machine.target import load_target
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.show.text import plan_data, plan_text

LAYERS, ROWS, WIDTH, INNER = 4, 128, 64, 256


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def gradient(remat: bool, scan: bool) -> Callable[..., Any]:
    def layer(x: jax.Array, w: Any) -> jax.Array:
        return x + jnp.tanh(x @ w[0]) @ w[1]

    one = jax.checkpoint(layer) if remat else layer

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (one(x, w), None), x, ws)
        else:
            for k in range(LAYERS):
                x = one(x, (ws[0][k], ws[1][k]))
        return jnp.sum(x * x)

    return jax.grad(loss)


@pytest.mark.parametrize("scan", [False, True])
def test_what_is_computed_again_is_not_useful(scan: bool) -> None:
    shapes = (shape(LAYERS, WIDTH, INNER), shape(LAYERS, INNER, WIDTH)), shape(ROWS, WIDTH)
    product = 2.0 * ROWS * WIDTH * INNER
    found, every = [], []
    for remat in (False, True):
        program = flatten(te.trace(gradient(remat, scan), *shapes).graph)
        found.append(sum(i.weight * i.signature.whole_flops for i in useful(program)))
        contractions = [i for i in program.instances if i.signature.contracts]
        every.append(sum(i.weight * i.signature.whole_flops for i in contractions))
    first = 0 if scan else 1  # unrolled, nobody asks for the gradient by the first layer's x
    assert found[0] == found[1] == pytest.approx(product * (6 * LAYERS - first))
    assert every[1] >= found[1] + product * LAYERS  # up(x) at least, of every layer, again


def test_a_device_of_two_hosts_sends_by_level() -> None:
    machine = load_target("h100:2x4")
    spans = machine.spans(MeshShape(("x",), (8,)), (0,))
    assert [(s.level, s.group) for s in spans] == [("nvlink", 4), ("network", 2)]
    # A gather takes its own block from the other host, then two each from three neighbours; a sum
    # is scattered inside first: 3/4, then half of the quarter left.
    for kind, network in {
        "all_gather": 1 / 7,
        "all_reduce": (1 / 8) / (3 / 4 + 1 / 8),
        "reduce_scatter": (1 / 8) / (3 / 4 + 1 / 8),
        "all_to_all": 4 / 7,
        "permute": 1 / 4,
    }.items():
        shares = wire_shares(kind, spans)
        assert shares == pytest.approx({"nvlink": 1 - network, "network": network})
    assert wire_shares("all_reduce", spans[:1]) == {"nvlink": 1.0}


def test_a_plan_tells_what_it_uses_in_its_first_lines() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        w, _ = jax.lax.scan(lambda w, _: (jnp.tanh(w @ w), None), w, None, length=3)
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w).astype(jnp.float32)))(w)

    half = jnp.bfloat16
    program = te.trace(step, shape(512, 512, dtype=half), shape(8192, 512, dtype=half))
    front = te.optimize(
        program,
        "h100:2x2",
        mesh_shapes=[MeshShape(("x", "y"), (2, 2))],
        pins={"[1]": (("x", "y"),)},
        settings=te.Settings(work=0.2, workers=1, front=False),
    )
    plan = front.best()
    use = plan.utilization()
    (one,) = use.products
    assert (one.dtype, one.flops) == ("bfloat16", 2 * (2 * 8192 + 3 * 512) * 512 * 512)
    assert one.peak == pytest.approx(989.4e12)
    assert use.share == pytest.approx(one.flops / (4 * 989.4e12 * plan.costs.seconds))
    assert plan.costs.wire_bytes > 0
    assert list(use.sent) == ["nvlink", "network"]
    assert sum(use.sent.values()) == pytest.approx(plan.costs.wire_bytes)
    lines = plan_text(plan).splitlines()
    assert max(map(len, lines)) <= 120
    head = "\n".join(lines[:40])
    for word in ("share of peak flops", "of bf16", "over nvlink", "over network", "GiB that a"):
        assert word in head
    assert plan_data(plan)["utilization"]["share"] == use.share
