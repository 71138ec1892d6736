"""Primitives of other libraries are traced as what they are made of, so that they can be cut."""

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
from jax._src.lib.mlir.dialects import hlo
from jax.experimental import hijax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.runtime import compile
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import legal_dims, random_plan, signature_of
from tests.runtime.lowered import MESH, numbers, same


def foreign(
    name: str, function: Callable[..., Any], *, lowered: bool = True, run: Any = None
) -> Primitive:
    """A primitive as libraries make them: its meaning is a Python function."""
    made = Primitive(name)
    made.def_impl(run or function)
    made.def_abstract_eval(
        lambda *avals, **params: jax.core.ShapedArray(avals[0].shape, avals[0].dtype)
    )
    if lowered:
        mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))

    def batch(args: Any, dims: Any, **params: Any) -> Any:
        assert all(d in (0, None) for d in dims)
        return jax.vmap(lambda *xs: function(*xs, **params), dims)(*args), 0

    batching.primitive_batchers[made] = batch
    return made


def only_concrete(*xs: Any, **params: Any) -> Any:
    return jnp.asarray(np.asarray(xs[0]) * 2)


DOUBLE = foreign("test_double", lambda x: x * 2)
EAGER = foreign("test_eager", lambda x, *, by: x * by, lowered=False)
BOTH = foreign("test_both", lambda x: jnp.tanh(x) * 3, run=only_concrete)
SOLVE = foreign("test_solve", lambda b, a: jnp.linalg.solve(a, b[..., None])[..., 0])
CHOSEN = foreign(
    "test_chosen",
    lambda x, which: [jnp.sin, jnp.cos][int(which)](x),
    run=lambda x, which: [jnp.sin, jnp.cos][int(which)](x),
)


def _halved(x: Any, *, times: int) -> Any:
    return HALF.bind(x, times=times - 1) / 2 if times else x


HALF = foreign("test_half", _halved)
SILENT = Primitive("test_silent")
SILENT.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
SILENT.def_impl(only_concrete)
mlir.register_lowering(SILENT, lambda ctx, x: [hlo.add(x, x)])
CIRCLE = Primitive("test_circle")
CIRCLE.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
CIRCLE.def_impl(lambda x: CIRCLE.bind(x))
mlir.register_lowering(CIRCLE, lambda ctx, x: [hlo.add(x, x)])


def kernels(graph: BlockGraph) -> set[str]:
    found = {op.kernel for op in graph.operations}
    return found.union(*(kernels(r) for op in graph.operations for r in op.regions))


def program(x: jax.Array, a: jax.Array) -> Any:
    def step(c: jax.Array, row: jax.Array) -> Any:
        return DOUBLE.bind(c) * 0.5 + row, BOTH.bind(c)

    return {
        "lowered": DOUBLE.bind(x),
        "both": BOTH.bind(x),
        "inside": HALF.bind(x, times=5),
        "solved": jax.vmap(lambda b, a: SOLVE.bind(b, a))(x, a),
        "loop": lax.scan(step, x[0], x),
        "branch": lax.cond(x[0, 0] > 0, DOUBLE.bind, BOTH.bind, x),
    }


ARGS = (numbers(8, 4), numbers(8, 4, 4) + 4 * np.eye(4, dtype=np.float32))


def test_nothing_is_left_of_primitives_that_are_made_of_others() -> None:
    graph = trace(program, *ARGS).graph
    assert not any(k.startswith("test_") for k in kernels(graph))
    for op in graph.operations:
        if not op.regions and graph.values[op.outputs[0]].shape[:1] == (8,):
            assert legal_dims(signature_of(graph, op), 8), op.kernel


@pytest.mark.slow
def test_random_plans_give_the_original_numbers() -> None:
    traced = trace(program, *ARGS)
    wanted = jax.tree.map(np.asarray, jax.jit(program)(*ARGS))
    for seed in range(2):
        plan = random_plan(traced.graph, MESH, random.Random(seed))
        same(compile(replace(plan, program=traced))(*ARGS), wanted, 1e-3)


def test_what_says_only_how_it_is_evaluated_is_traced_so() -> None:
    traced = trace(lambda x: EAGER.bind(x, by=3.0), numbers(8))
    assert kernels(traced.graph) == {"mul"}
    same(traced(numbers(8)), numbers(8) * 3)


def test_a_function_that_asks_for_a_value_is_given_the_constants() -> None:
    traced = trace(lambda x: CHOSEN.bind(x, jnp.int32(1)), numbers(8))
    assert kernels(traced.graph) == {"cos"}
    later = trace(lambda x, i: CHOSEN.bind(x, i), numbers(8), np.int32(1))
    assert kernels(later.graph) == {"test_chosen"}  # known only when it runs


@pytest.mark.parametrize("primitive", [SILENT, CIRCLE])
def test_what_nothing_says_stays_whole_and_runs(primitive: Primitive) -> None:
    traced = trace(lambda x: primitive.bind(x) + 1, numbers(8, 8))
    (op, _) = traced.graph.operations
    assert op.kernel == primitive.name and signature_of(traced.graph, op).opaque
    plan = random_plan(traced.graph, MESH, random.Random(0))
    same(compile(replace(plan, program=traced))(numbers(8, 8)), numbers(8, 8) * 2 + 1)


def test_the_scope_names_the_primitive() -> None:
    (op,) = trace(lambda x: EAGER.bind(x, by=2.0), numbers(8)).graph.operations
    assert op.kernel == "mul" and op.scope.endswith("test_eager")


# Programs of libraries, where they are installed


@pytest.mark.slow
def test_lineax_solvers_are_cut_along_the_batch() -> None:
    lx = pytest.importorskip("lineax")

    def solve(a: jax.Array, b: jax.Array) -> jax.Array:
        return lx.linear_solve(lx.MatrixLinearOperator(a), b).value

    batched = jax.vmap(jax.grad(lambda a, b: solve(a, b).sum()))
    traced = trace(batched, ARGS[1], ARGS[0])
    for op in traced.graph.operations:
        if op.kernel in ("lu", "triangular_solve"):
            assert 0 in legal_dims(signature_of(traced.graph, op), 8)
    assert "lu" in kernels(traced.graph)
    plan = replace(random_plan(traced.graph, MESH, random.Random(0)), program=traced)
    same(compile(plan)(ARGS[1], ARGS[0]), jax.jit(batched)(ARGS[1], ARGS[0]), 1e-3)


@pytest.mark.slow
def test_optimistix_and_diffrax_leave_nothing_unknown() -> None:
    optx, diffrax = pytest.importorskip("optimistix"), pytest.importorskip("diffrax")

    def fit(y: jax.Array) -> Any:
        def residuals(y: jax.Array, _: Any) -> jax.Array:
            return jnp.stack([10 * (y[1] - y[0] ** 2), 1 - y[0]])

        solver = optx.LevenbergMarquardt(1e-3, 1e-3)
        return optx.least_squares(residuals, solver, y, throw=False).value

    def flow(y: jax.Array) -> Any:
        term = diffrax.ODETerm(lambda t, y, _: -y)
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 1, 0.1, y).ys

    for fn in (fit, flow):
        graph = trace(jax.vmap(fn), numbers(8, 2)).graph
        assert not {k for k in kernels(graph) if k in ("linear_solve", "vprim", "nonbatchable")}
        assert not {k for k in kernels(graph) if "vmap" in k}


def test_primitives_that_say_what_they_are_made_of_are_that() -> None:
    """`jnp.searchsorted`, `jnp.nonzero` and others are such, from JAX 0.12 on."""
    base: Any = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # until JAX 0.11

    class Scaled(base):  # type: ignore[misc]
        def __init__(self, aval: Any) -> None:
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

        def expand(self, x: Any) -> Any:
            return jnp.tanh(x) * 3

    x = numbers(8, 4)
    program = trace(lambda x: Scaled(jax.typeof(x))(x), x)
    assert [op.kernel for op in program.graph.operations] == ["tanh", "mul"]
    same(program(x), np.tanh(x) * 3)
