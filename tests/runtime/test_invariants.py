"""What a loop gathers in every round though it is the same in all is gathered inside the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.runtime import compare
from tapestry_egg.runtime.measure.hlo_text import parse
from tests.runtime.lowered import numbers, same

Array = Any


def twice(y: Array, w: Array, v: Array) -> Array:
    return jnp.tanh(jnp.tanh(y @ w) @ v)


def in_while(w: Array, v: Array, x: Array) -> Array:
    return lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, twice(s[1], w, v)), (0, x))[1]


def in_while_beside_nothing(w: Array, v: Array, x: Array) -> Any:
    """The least of what is carried has no elements."""
    begin = (0, x, jnp.zeros(0))
    return lax.while_loop(
        lambda s: s[0] < 5, lambda s: (s[0] + 1, twice(s[1], w, v), s[2] * 2), begin
    )[1:]


def in_scan_beside_nothing(w: Array, v: Array, x: Array) -> Any:
    begin = (x, jnp.zeros(0))
    return lax.scan(lambda s, _: ((twice(s[0], w, v), s[1] * 2), None), begin, None, length=5)[0]


def in_while_of_sums(w: Array, v: Array, x: Array) -> Array:
    """The bound is computed: what XLA makes of it is not known when the loop is planned."""
    bound = lax.add(jnp.int32(3), lax.mul(jnp.int32(2), jnp.int32(1)))
    return lax.while_loop(lambda s: s[0] < bound, lambda s: (s[0] + 1, twice(s[1], w, v)), (0, x))[
        1
    ]


def in_while_until(w: Array, v: Array, x: Array) -> Array:
    """How often it runs is known to nobody."""
    return lax.while_loop(
        lambda s: (s[0] < 5) & (s[1][0, 0] < 9.0), lambda s: (s[0] + 1, twice(s[1], w, v)), (0, x)
    )[1]


@pytest.mark.slow
def test_what_a_condition_that_calls_sends_is_sent_once_a_round_and_inside() -> None:
    asked = []

    def goes_on(z: Any, i: Any) -> Any:
        asked.append((float(z), int(i)))
        return np.bool_(i < 3)

    def fn(w: Array, x: Array) -> Array:
        def more(s: Any) -> Any:
            z = jnp.tanh(s[1] @ w).sum()
            return io_callback(goes_on, jax.ShapeDtypeStruct((), bool), z, s[0], ordered=True)

        return lax.while_loop(more, lambda s: (s[0] + 1, jnp.tanh(s[1])), (0, x))[1]

    arguments = (0.06 * numbers(256, 256), numbers(512, 256))
    front = te.optimize(
        te.trace(fn, *arguments),
        "cpu:8",
        mesh_shapes=[MeshShape(("x",), (8,))],
        pins={"[0]": ("x", None), "[1]": ("x", None)},
        settings=Settings(work=1.0, recompute=0, forms=0),
    )
    plan = front.best("peak_bytes")
    assert [c.kind for c in plan.collectives].count("all_gather") == 1
    run = te.compile(plan, jax.devices()[:8])
    compiled = run.lower().compile()
    module = parse(compiled.as_text())
    entry = module.computations[module.entry]
    assert not any(i.opcode.startswith("all-") for i in entry.instructions)
    comparison = compare(plan, compiled)
    assert comparison.equal, f"\n{comparison}"
    same(run(*arguments), jax.jit(fn)(*arguments), 1e-3)
    assert [i for _, i in asked] == [0, 1, 2, 3] * 2
    ours, plain = ([z for z, _ in half] for half in (asked[:4], asked[4:]))
    np.testing.assert_allclose(ours, plain, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [in_while, in_while_beside_nothing, in_scan_beside_nothing, in_while_of_sums, in_while_until],
)
def test_what_a_loop_gathers_in_every_round_is_gathered_inside_it(fn: Callable[..., Any]) -> None:
    arguments = (0.06 * numbers(256, 256), 0.06 * numbers(256, 256, seed=1), numbers(512, 256))
    front = te.optimize(
        te.trace(fn, *arguments),
        "cpu:8",
        mesh_shapes=[MeshShape(("x",), (8,))],
        pins={f"[{i}]": ("x", None) for i in range(3)},
        settings=Settings(work=1.0, recompute=0, forms=0),
    )
    plan = front.best("peak_bytes")
    gathers = [
        c for c in plan.collectives if c.kind == "all_gather" and c.reader.startswith("dot_general")
    ]
    assert len(gathers) == 2
    run = te.compile(plan, jax.devices()[:8])
    compiled = run.lower().compile()
    module = parse(compiled.as_text())
    inside = {
        name: sum(i.opcode == "all-gather" for i in computation.instructions)
        for name, computation in module.computations.items()
    }
    if fn is not in_while_until:  # nothing that a loop counts by is tied to what it gathers
        assert 'known_trip_count":{"n":"5"}' in compiled.as_text()
    # The one element that a condition reads comes from the device that has it.
    assert inside[module.entry] == 0 and sum(inside.values()) == 2
    comparison = compare(plan, compiled)
    assert comparison.equal, f"\n{comparison}"
    same(run(*arguments), jax.jit(fn)(*arguments), 1e-3)
