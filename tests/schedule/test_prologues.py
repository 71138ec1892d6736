"""What products compute of their operands on the fly, so that it is never stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.schedule.inlining import read_by_products
from tapestry_egg.schedule.lifetimes import lifetimes
from tapestry_egg.schedule.schedules import scheduled as schedule_of
from tests.schedule.test_lifetimes import N, X, h100s, made_by, scheduled


def relu(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.maximum(a + c, 0.0)


#: What is read by two products: whether they compute it, so that it is never stored.
PROLOGUES: dict[str, tuple[Callable[..., jax.Array], bool]] = {
    "of a bias and a number": (relu, True),
    "of one array": (lambda a, b, c: jnp.tanh(-a), True),
    "of two arrays": (lambda a, b, c: a * b, False),
    "of three": (lambda a, b, c: jnp.where(b > 0, a, 1.0), False),
    "rounded": (lambda a, b, c: relu(a, b, c).astype(jnp.bfloat16), False),
    "narrowed": (lambda a, b, c: relu(a, b, c).astype(jnp.float16), False),
    "of what is no argument": (lambda a, b, c: a + jnp.tanh(c), False),
}


@pytest.mark.parametrize("name", PROLOGUES)
def test_products_compute_what_is_no_more_to_read_than_its_result(name: str) -> None:
    made, inside = PROLOGUES[name]

    def f(x: jax.Array, w: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        y = made(x @ w, b, c)
        return y @ w.astype(y.dtype), w.T.astype(y.dtype) @ y

    plan = scheduled(f, X, X, X, jax.ShapeDtypeStruct((N,), jnp.float32))
    lives = lifetimes(plan)
    first, *readers = (made_by(plan, "dot_general", k)[0] for k in range(3))
    (a,) = plan.units[first].outputs
    both = set.intersection(*({v for *_, v in plan.units[r].reads} for r in readers))
    (y,) = (v for v in both if plan.producer[v] > first)
    assert lives.free[y] == inside
    assert (lives.last[a] == 2 * readers[-1]) == inside


#: Elements of products: whether products compute what they read.
ELEMENTS = {
    "float32": True,
    "float16": True,
    "bfloat16": True,
    "float64": False,
    "complex64": False,
    "int32": False,
}


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_products_compute_operands_of_floats_of_32_bits_or_less(dtype: str) -> None:
    """As XLA for H100 does."""
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((N, N), dtype)
        program = te.trace(lambda x, w: -x @ w, x, x)
    plan = schedule_of(program.graph, {})
    u, _ = made_by(plan, "neg")
    assert (u in read_by_products(plan)[1]) == ELEMENTS[dtype]
    (best, *_) = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    compiled = hlo_stats(te.compile(best, h100s()[:1]).compile())
    workspace = (4 << 20) * ("complex" in dtype)  # the library's, which plans do not count
    assert best.costs.peak_bytes == pytest.approx(compiled.peak_bytes - workspace, rel=0.02)


OWN = """
own:
  inputs: {x: }
  out: {shape: $x.shape, dtype: $x.dtype}
  fusion: loop
  in_products: WHEN
"""


@pytest.mark.parametrize("when, inside", [("always", True), ("never", False)])
def test_kernels_of_ones_own_say_whether_products_compute_them(
    when: str, inside: bool, tmp_path: Path
) -> None:
    (file := tmp_path / "own.yaml").write_text(OWN.replace("WHEN", when))
    x, w = te.tensor("x", (N, N)), te.tensor("w", (N, N))
    times = te.kernel("dot_general")
    by_rows = {"dimension_numbers": [[[1], [0]], [[], []]]}
    made = te.kernel("own", str(file))(times(x, w, **by_rows))
    program = te.program((times(made, w, **by_rows), times(w, made, **by_rows)), name="f")
    plan = schedule_of(program.graph, {})
    u, _ = made_by(plan, "own")
    assert (u in read_by_products(plan)[1]) == inside


def test_products_with_vectors_are_no_products_of_matrices() -> None:
    """They are multiplied element by element."""

    def f(x: jax.Array, w: jax.Array, c: jax.Array) -> Any:
        y = relu(x @ w, x, c)
        return y @ c, c @ y

    plan = scheduled(f, X, X, jax.ShapeDtypeStruct((N,), jnp.float32))
    first, *readers = (made_by(plan, "dot_general", k)[0] for k in range(3))
    both = set.intersection(*({v for *_, v in plan.units[r].reads} for r in readers))
    (y,) = (v for v in both if plan.producer[v] > first)
    assert not lifetimes(plan).free[y]


#: What a product reads of a stack of four matrices, and whether a copy of it is stored.
STACKS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "one of them": (lambda s, x: (s, x @ s[1]), False),
    "one, by two products": (lambda s, x: (s, (x @ s[1]) @ s[1].T), False),
    "one with a row written": (lambda s, x: ((t := s.at[1, 0].set(x[0])), x @ t[1]), False),
    "some rows of each": (lambda s, x: (s, x @ s[:, : N // 4].reshape(N, N)), True),
    "one of what is computed": (lambda s, x: (s, x @ (t := s @ x)[1] + t[0] + t[2]), True),
    "one that is not known": (lambda s, x: (s, x @ s[x[0, 0].astype(int)]), True),
}


@pytest.mark.parametrize("name", STACKS)
def test_products_read_one_matrix_of_a_stack_where_it_lies(name: str) -> None:
    """If the stack is the program's own. XLA for H100 holds a copy in the same cases."""
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    fn, stored = STACKS[name]
    program = te.trace(fn, jax.ShapeDtypeStruct((4, N, N), jnp.float32), X, donate_argnums=0)
    plan = schedule_of(program.graph, {})
    lives, products = lifetimes(plan), [made_by(plan, "dot_general", k) for k in (0, -1)]
    read = {v for *_, v in plan.units[products[1][0]].reads} - {v for _, v in products}
    assert any(not lives.free[v] for v in read - plan.program.given) == stored
    settings = te.Settings(forms=0, work=0.1, recompute=0)
    (best, *_) = te.optimize(program, "h100:1", settings=settings)
    compiled = hlo_stats(te.compile(best, h100s()[:1]).compile())
    assert best.costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.02)


def test_xla_for_h100_computes_rectifiers_inside_products() -> None:
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    def f(x: jax.Array, w: jax.Array, c: jax.Array) -> Any:
        a = x @ w
        y = relu(a, x, c)
        return (y @ w) @ w, jnp.where(a + c > 0, (y.T @ x) @ w, 0.0)

    devices, wide = h100s()[:1], jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    program = te.trace(f, wide, wide, jax.ShapeDtypeStruct((2048,), jnp.float32))
    front = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    compiled = hlo_stats(te.compile(front[0], devices).compile())
    assert front[0].costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01)
