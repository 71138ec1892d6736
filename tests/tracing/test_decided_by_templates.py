"""What constants decide of an operation is said by its template, and by no name of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry
from tapestry_egg.tracing.jaxprs import block_graph
from tests.schedule.other_names import add_under_other_names

X = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(8, 8)
N = np.arange(64, dtype=np.int32).reshape(8, 8)
U = N.astype(np.uint8)
NONE = np.zeros((0, 8), np.float32)

#: The kernel that is called otherwise, a program of it, its argument, and how many operations there
#: are of what is decided.
DECIDED: dict[str, tuple[str, Callable[..., Any], Any, int]] = {
    "nothing is left by and": ("and", lambda n: n & 0, N, 1),
    "all bits are set by or": ("or", lambda n: n | -1, N, 1),
    "all bits of bytes are set by or": ("or", lambda u: u | np.uint8(255), U, 1),
    "flags are set by or": ("or", lambda n: (n > 3) | True, N, 1),
    "times 0": ("mul", lambda n: n * 0, N, 1),
    "times 0 of floats": ("mul", lambda x: x * 0, X, 1),
    "less itself": ("sub", lambda n: n - n, N, 1),
    "floats less themselves": ("sub", lambda x: x - x, X, 1),
    "exclusive or": ("xor", lambda n: n ^ n, N, 1),
    "equal to itself": ("eq", lambda n: n == n, N, 1),
    "other than itself": ("ne", lambda n: n != n, N, 1),
    "below 0": ("lt", lambda u: u < 0, U, 1),
    "from 0": ("ge", lambda u: u >= 0, U, 1),
    "above itself": ("gt", lambda n: n > n, N, 1),
    "0 is below": ("le", lambda u: np.uint8(0) <= u, U, 1),
    "to the power of 0": ("pow", lambda x: x ** jnp.zeros((8, 8)), X, 1),
    "to the whole power of 0": ("integer_pow", lambda x: lax.integer_pow(x, 0), X, 1),
    "to the whole power of 2": ("integer_pow", lambda x: lax.integer_pow(x, 2), X, 1),
    "a sum of nothing": ("reduce_sum", lambda x: x.sum(0), NONE, 1),
    "a product of nothing": ("dot_general", lambda x: x.T @ x, NONE, 1),
    "the first case": ("select_n", lambda x: lax.select_n(np.array(False), x, x * 2), X, 0),
    "one case twice": ("select_n", lambda x: lax.select_n(x > 0, x, x), X, 0),
    "all is updated": ("dynamic_update_slice",
     lambda x: lax.dynamic_update_slice(jnp.exp(x), x, (3, 0)), X, 0),
    "nothing is updated": ("dynamic_update_slice",
     lambda x: lax.dynamic_update_slice(x, x[:0] * 2, (3, 0)), X, 0),
    "all is written over": ("scatter", lambda x: jnp.exp(x).at[:].set(x), X, 0),
    "all of it is sliced": ("slice", lambda x: jnp.roll(x, 0, 0), X, 0),
    "all of it but its first row": ("slice", lambda x: x[1:], X, 1),
    "every second row": ("slice", lambda x: x[::2], X, 1),
    "all of it is one part": ("split", lambda x: lax.split(x, (8, 0))[0], X, 0),
    "two parts": ("split", lambda x: lax.split(x, (7, 1))[0], X, 1),
    "parts of two dims": ("split", lambda x: jnp.hstack(lax.split(x, (3, 5), 1)[::-1]), X, 3),
    "rows apart": ("unstack", lambda x: sum(jnp.unstack(x[:3])), X, 9),
    "one row is reversed": ("rev", lambda x: lax.rev(x[:1], (0,)), X, 1),
    "rows are reversed": ("rev", lambda x: lax.rev(x, (0,)), X, 1),
    "nothing is joined to it": ("concatenate", lambda x: jnp.concatenate([x, x[:0]]), X, 0),
    "one of two is joined": ("concatenate", lambda x: jnp.concatenate([x, jnp.sin(x[:0]), x]), X,
     1),
    "nobody reads what a barrier has": ("optimization_barrier",
     lambda x: lax.optimization_barrier((x, jnp.exp(x)))[0], X, 1),
    "nobody reads what is sorted along": ("sort",
     lambda x: lax.sort((x, jnp.exp(x)), dimension=0)[0], X, 1),
    "a part of a part": ("slice", lambda x: x[2:, 1:][::2], X, 1),
    "a part of what is cut off": ("pad", lambda x: lax.pad(x, 0.0, ((-2, 0, 0),) * 2)[::2], X, 1),
    "a number that is repeated": ("broadcast_in_dim",
     lambda n: n * jnp.broadcast_to(jnp.zeros((8,), jnp.int32), n.shape), N, 1),
}  # fmt: skip


def graph_of(function: Callable[..., Any], x: Any, kernel: str = "") -> BlockGraph:
    """The graph of a program; of a `kernel` with another name, if one is given."""
    closed = jax.make_jaxpr(function)(x)
    return block_graph(_renamed(closed.jaxpr, kernel), closed.consts, "program")


def _renamed(jaxpr: Jaxpr, kernel: str) -> Jaxpr:
    def of(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=_renamed(value.jaxpr, kernel))
        return value

    equations = []
    for e in jaxpr.eqns:
        made = e.replace(params={k: of(v) for k, v in e.params.items()})
        if e.primitive.name == kernel:
            made = made.replace(primitive=_mine(kernel, e.primitive.multiple_results))
        equations.append(made)
    return jaxpr.replace(eqns=equations)


@cache
def _mine(kernel: str, several: bool) -> Primitive:
    made = Primitive(f"my_{kernel}")
    made.multiple_results = several
    return made


@pytest.mark.parametrize("name", DECIDED)
def test_a_kernel_by_another_name_is_decided_alike(name: str, tmp_path: Path) -> None:
    kernel, function, x, count = DECIDED[name]
    add_under_other_names([kernel], tmp_path)
    theirs, mine = graph_of(function, x), graph_of(function, x, kernel)
    assert len(theirs.operations) == count
    names = [op.kernel.removeprefix("my_") for op in mine.operations]
    assert names == [op.kernel for op in theirs.operations]
    assert [op.inputs for op in mine.operations] == [op.inputs for op in theirs.operations]
    assert mine.outputs == theirs.outputs
    for v, constant in mine.constants.items():
        np.testing.assert_array_equal(constant, theirs.constants[v])


GATE = """
gate:
  inputs: {x: , on: "[]"}
  out: {shape: $x.shape, dtype: $x.dtype}
  project: {on: "[]"}
  %s
  flops: 1
  fusion: loop
"""


OPEN = Primitive("gate")
OPEN.def_abstract_eval(lambda x, on: x)


@pytest.mark.parametrize(
    ("said", "on", "left"),
    [
        ("settled: 0 if $on.number == 0 else none", 0.0, ["broadcast_in_dim"]),
        ("settled: 0 if $on.number == 0 else none", 1.0, ["gate"]),
        ("same_as: x if $on.number == 1 else none", 1.0, []),
        ("same_as: x if $on.number == 1 else none", 0.5, ["gate"]),
        ("commutes: false", 0.0, ["gate"]),
    ],
)
def test_a_template_of_ones_own_says_what_is_decided(
    said: str, on: float, left: list[str], tmp_path: Path
) -> None:
    _add(said, tmp_path)
    assert [op.kernel for op in _gated(on).operations] == left


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("settled: x", "'x' is not a number"),
        ("settled: $x.number.number", "'number' is not an attribute"),
        ("same_as: z", "'z' is neither an operand"),
        ("same_as: '[x, 1]'", "there is no operand 1 of x"),
        ("dilates: $on.number == 0", "'number' is not an attribute"),
        ("settled: 0 if $x.numbr == 0 else none", r"of a tensor, .*[\s\S]*size, id, number"),
        ("carries: {x: true}", "'x' in `carries` is one operand, which is never left out"),
        ("joins: [x]", "'x' in `joins` is one operand, which is never left out"),
    ],
)
def test_what_a_template_cannot_say_is_refused_with_its_place(
    said: str, fault: str, tmp_path: Path
) -> None:
    with pytest.raises(TemplateError, match=fault) as error:
        _add(said, tmp_path)
        op = next(op for op in _gated(0.0).operations if op.kernel == "gate")
        types = _gated(0.0).values
        registry.signature("gate", {}, [types[v] for v in op.inputs])
    assert "gate.yaml:6:" in str(error.value)


WHOLE = """
whole:
  inputs: {xs...: "[$n]"}
  outputs: {out: {shape: "[$n]", dtype: int32}}
  %s
"""

ROUNDED = Primitive("whole")
ROUNDED.def_abstract_eval(lambda x: x.update(dtype=np.dtype("int32")))


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("settled: 0.5", "0.5 is no int32"),
        ("settled: 1e400", "inf is no int32"),
        ("carries: {xs: true}", "the results are not those of the operands' types"),
    ],
)
def test_what_does_not_fit_the_result_is_refused_with_its_place(
    said: str, fault: str, tmp_path: Path
) -> None:
    path = tmp_path / "whole.yaml"
    path.write_text(WHOLE % said, "utf-8")
    registry.add_templates(path)
    closed = jax.make_jaxpr(lambda x: ROUNDED.bind(x))(X[0])
    with pytest.raises(TemplateError, match=fault) as error:
        graph = block_graph(closed.jaxpr, closed.consts, "program")
        registry.signature("whole", {}, [graph.values[v] for v in graph.inputs])
    assert "whole.yaml:5:" in str(error.value)


def _add(said: str, folder: Path) -> None:
    path = folder / "gate.yaml"
    path.write_text(GATE % said, "utf-8")
    registry.add_templates(path)


def _gated(on: float) -> BlockGraph:
    closed = jax.make_jaxpr(lambda x: OPEN.bind(x, np.float32(on)))(X)
    return block_graph(closed.jaxpr, closed.consts, "program")
