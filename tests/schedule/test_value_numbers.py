"""Values that are computed alike have one number, whatever the order of operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.value_numbers import ValueNumbers

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def swapped(graph: BlockGraph) -> BlockGraph:
    """The two first operations of a graph, and of its regions, in the other order."""
    first, second, *others = (
        replace(op, regions=tuple(map(swapped, op.regions))) for op in graph.operations
    )
    assert not set(first.outputs) & set(second.inputs)
    return replace(graph, operations=(second, first, *others))


def results(*graphs: BlockGraph) -> list[list[int]]:
    """The numbers of what graphs give, all by one numbering."""
    shared = ValueNumbers()
    found = []
    for graph in graphs:
        program = flatten(graph)
        number, values = shared.of(program), program.bodies[0].values
        found.append([number[values[v]] for v in graph.outputs])
    return found


def loop(factor: float) -> Any:
    def body(c: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(c) * factor, jnp.cos(x) - c

    return lambda x: jax.lax.scan(body, x[0], x)


def unordered(c: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = jnp.sin(c), jnp.cos(x)
    return a * b, b - a


def test_the_order_of_operations_plays_no_part_in_loops_either() -> None:
    def fn(x: jax.Array) -> Any:
        y, z = jnp.sin(x), jnp.cos(x)
        return y * z, jax.lax.scan(unordered, x[0], x)

    graph = te.trace(fn, X).graph
    one, other = results(graph, swapped(graph))
    assert one == other and len(set(one)) == 3


def test_what_is_computed_otherwise_has_another_number() -> None:
    one, same, other = results(*(te.trace(loop(f), X).graph for f in (2.0, 2.0, 3.0)))
    assert one == same and not set(one) & set(other)


def test_what_differs_in_parameters_or_length_or_is_a_call_has_a_number_of_its_own() -> None:
    def fn(x: jax.Array) -> Any:
        call = jax.jit(lambda x: io_callback(np.sin, X, x))
        sums = jnp.sum(x, 0), jnp.sum(x, 0), jnp.sum(x, 1)
        stacks = [jax.lax.scan(lambda c, _: (c, jnp.sin(x)), 0.0, None, length=n) for n in (2, 3)]
        return *sums, call(x), call(x), *(y for _, y in stacks)

    ((first, again, *others),) = results(te.trace(fn, X).graph)
    assert first == again and len({first, *others}) == 6


def test_constants_are_known_by_what_they_hold_and_its_dtype() -> None:
    held = [np.zeros(512, d) for d in ("float32", "float32", "int32")]
    held += [np.ones(512, "float32"), np.zeros((2, 256), "float32")]
    given = [jnp.asarray(x) for x in held]
    ((*found,),) = results(te.trace(lambda x: [x, *given], X).graph)
    assert found[1] == found[2] and len(set(found)) == 5


def test_a_loop_over_what_another_has_stacked_knows_its_values() -> None:
    def fn(w: jax.Array, x: jax.Array) -> Any:
        def forwards(c: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(c * k), c

        def backwards(c: jax.Array, given: Any) -> tuple[jax.Array, jax.Array]:
            k, stored = given
            return c + jnp.sum(k), jnp.tanh(stored * k)

        end, stored = jax.lax.scan(forwards, x, w)
        return jax.lax.scan(backwards, jnp.sum(end), (w, stored), reverse=True)

    program = flatten(te.trace(fn, X, jax.ShapeDtypeStruct((8,), jnp.float32)).graph)
    number = ValueNumbers().of(program)
    tanh = [x.outputs[0] for x in program.instances if x.signature.kernel == "tanh"]
    assert len(tanh) == 2 and number[tanh[0]] == number[tanh[1]]
