"""Which partial values pass through a kernel: every law that might be declared, in numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapestry_egg.graph.blockgraph import Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature, Passage
from tapestry_egg.reference.executor import combine
from tapestry_egg.reference.kernels import reference
from tapestry_egg.tracing.trace import trace

Array = Any
MONOIDS = ("sum", "prod", "max", "min")

#: Kernel, a function of one such operation, and the shapes of its arguments.
CASES: dict[str, tuple[Callable[..., Array], tuple[tuple[int, ...], ...]]] = {
    "add": (lax.add, ((2, 3), (2, 3))),
    "sub": (lax.sub, ((2, 3), (2, 3))),
    "mul": (lax.mul, ((2, 3), (2, 3))),
    "div": (lax.div, ((2, 3), (2, 3))),
    "max": (lax.max, ((2, 3), (2, 3))),
    "neg": (lax.neg, ((2, 3),)),
    "exp": (lax.exp, ((2, 3),)),
    "log": (lax.log, ((2, 3),)),
    "tanh": (lax.tanh, ((2, 3),)),
    "abs": (lax.abs, ((2, 3),)),
    "transpose": (lambda x: x.T, ((2, 3),)),
    "reshape": (lambda x: x.reshape(6), ((2, 3),)),
    "reduce_sum": (lambda x: x.sum(1), ((2, 3),)),
    "reduce_max": (lambda x: x.max(1), ((2, 3),)),
    "cumsum": (lambda x: lax.cumsum(x, 1), ((2, 3),)),
    "broadcast_in_dim": (lambda x: jnp.broadcast_to(x, (2, 3)), ((1, 3),)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y]), ((2, 3), (1, 3))),
    "dot_general": (jnp.matmul, ((2, 3), (3, 2))),
}


def operation(kernel: str) -> tuple[Operation, OperationSignature]:
    fn, shapes = CASES[kernel]
    graph = trace(fn, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).graph
    (op,) = (op for op in graph.operations if op.kernel == kernel)
    types = [tuple(graph.values[v] for v in ids) for ids in (op.inputs, op.outputs)]
    return op, registry.signature(op.kernel, op.params, *types)


def holds(op: Operation, s: OperationSignature, law: Passage) -> bool:
    """f(x•y) = f(x)•f(y) for random x and y, the other operands the same, of either sign or not."""
    rng = np.random.default_rng(3)
    for positive in (True, False, True, False):
        if op.kernel == "log" and not positive:
            continue

        def draw(shape: tuple[int, ...], positive: bool = positive) -> Array:
            sign = 1 if positive else rng.choice([-1, 1], shape)
            return (rng.uniform(0.3, 2, shape) * sign).astype(np.float32)

        x = [draw(t.shape) for t in s.input_types]
        y = [draw(t.shape) if p in law.inputs else x[p] for p, t in enumerate(s.input_types)]
        both = [
            combine(law.monoid_in, a, b) if p in law.inputs else a
            for p, (a, b) in enumerate(zip(x, y, strict=True))
        ]
        (fx,), (fy,), (f,) = (reference(op.kernel, op.params, s, v) for v in (x, y, both))
        if not np.allclose(f, combine(law.monoid_out, fx, fy), 1e-4, 1e-5):
            return False
    return True


def candidates(s: OperationSignature) -> list[Passage]:
    ports = range(len(s.inputs))
    groups = [g for n in range(1, len(ports) + 1) for g in combinations(ports, n)]
    return [Passage(g, a, b) for g in groups for a, b in product(MONOIDS, repeat=2)]


@pytest.mark.parametrize("kernel", CASES)
def test_declared_laws_hold_and_wrong_ones_are_caught(kernel: str) -> None:
    op, s = operation(kernel)
    true = {law for law in candidates(s) if holds(op, s, law)}
    assert set(s.passages) <= true
    # Numbers tell laws apart: most candidates are wrong, and each wrong one is caught.
    assert len(true) <= len(candidates(s)) / 3


def test_a_replicated_operand_is_not_added_to_every_partial_one() -> None:
    """psum(partial + replicated), the classic error: both operands must be partial, or none."""
    op, s = operation("add")
    sums = {law.inputs for law in s.passages if law.monoid_in == law.monoid_out == "sum"}
    assert sums == {(0, 1)}
    assert not holds(op, s, Passage((0,), "sum", "sum"))
    assert not holds(op, s, Passage((1,), "sum", "sum"))
    product_, t = operation("dot_general")
    assert {law.inputs for law in t.passages} == {(0,), (1,)}
    assert not holds(product_, t, Passage((0, 1), "sum", "sum"))


def test_laws_that_change_the_monoid() -> None:
    negated, s = operation("neg")
    assert Passage((0,), "max", "min") in s.passages
    assert not holds(negated, s, Passage((0,), "max", "max"))
    grown, t = operation("exp")
    assert holds(grown, t, Passage((0,), "sum", "prod"))
    assert not holds(grown, t, Passage((0,), "sum", "sum"))
