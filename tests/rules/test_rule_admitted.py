"""Made-up operations are tried only where JAX has them, which JAX itself says here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry

#: A kernel, its parameters, and JAX's function of an operand.
Case = tuple[str, Mapping[str, Any], Callable[[Any], Any]]


def slices(a: list[int], b: list[int], steps: list[int] | None) -> Case:
    params = {"start_indices": a, "limit_indices": b, "strides": steps}
    return "slice", params, lambda x: lax.slice(x, a, b, steps)


CASES: list[Case] = [
    slices([0, 0], [1, 3], None),
    slices([0, 0], [2, 4], [1, 2]),
    slices([1, 0], [1, 3], None),
    slices([2, 0], [1, 3], None),
    slices([0, 0], [9, 3], None),
    slices([0], [1], None),
    slices([0, 0], [1, 1], [1, 0]),
    *(
        ("transpose", {"permutation": p}, lambda x, p=p: lax.transpose(x, p))
        for p in ([1, 0], [0, 1], [0, 0], [0], [0, 1, 2])
    ),
    *(
        ("reshape", {"new_sizes": n}, lambda x, n=n: jnp.reshape(x, n))
        for n in ([12], [2, 6], [3], [0], [])
    ),
    *(
        ("squeeze", {"dimensions": d}, lambda x, d=d: lax.squeeze(x, d))
        for d in ([0], [1], [2], [], [0, 0])
    ),
    *(("rev", {"dimensions": d}, lambda x, d=d: lax.rev(x, d)) for d in ([0], [1, 0], [5], [0, 0])),
    *(
        ("reduce_max", {"axes": d}, lambda x, d=d: lax.reduce_max_p.bind(x, axes=tuple(d)))
        for d in ([0], [0, 1], [5])
    ),
    *(("argmax", {"axes": [d]}, lambda x, d=d: lax.argmax(x, d, "int32")) for d in (0, 1, 7)),
    *(("cumsum", {"axis": d}, lambda x, d=d: lax.cumsum(x, d)) for d in (0, 1, 2)),
    *(("sort", {"dimension": d}, lambda x, d=d: lax.sort(x, dimension=d)) for d in (0, 1, 3)),
]


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (0, 4), (12,), ()], ids=str)
def test_an_operation_is_tried_where_jax_has_it(shape: tuple[int, ...]) -> None:
    operand = jax.ShapeDtypeStruct(shape, "float32")
    told = []
    for kernel, params, function in CASES:
        try:
            jax.eval_shape(function, operand)
            takes = True
        except (TypeError, ValueError, IndexError, ZeroDivisionError):
            takes = False
        found = registry.valid(kernel, params, [TensorType(shape, "float32")])
        assert found == takes, (kernel, params, shape, takes)
        told.append(takes)
    assert any(told) and not all(told)
