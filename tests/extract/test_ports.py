"""A plan whose ports are no identities is refused, wherever they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.extract.certify.legality import Illegal
from tapestry_egg.extract.certify.recount import check_port
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.schedule.flatten import Instance, flatten

MESH = MeshShape(("x",), (2,))
WHOLE, ROWS = Layout.replicated(2), Layout(((0,), ()))
SUM = Layout(((), ()), (0,), "sum")


def loop(x: jax.Array, ws: jax.Array) -> tuple[jax.Array, jax.Array]:
    def body(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ w)
        return h, h

    return jax.lax.scan(body, x, ws)


PROGRAM = flatten(te.trace(loop, jnp.ones((4, 4)), jnp.ones((6, 4, 4))).graph, {})


def port(kind: str) -> Instance:
    return next(i for i in PROGRAM.instances if i.port == kind)


def stacked(x: Layout, rounds: tuple[int, ...] = ()) -> Layout:
    return Layout((rounds, *x.dims), x.partial, x.monoid)


@pytest.mark.parametrize(
    ("kind", "needs", "gives", "what"),
    [
        ("output", (WHOLE,), (), ""),
        ("output", (SUM,), (), "a partial value crosses the boundary"),
        ("input", (), (SUM,), "a partial value crosses the boundary"),
        ("input", (), (Layout(((0,), (0,))),), "the input port: "),
        ("carry", (WHOLE, WHOLE), (WHOLE, WHOLE), ""),
        ("carry", (ROWS, ROWS), (ROWS, ROWS), ""),
        ("carry", (ROWS, WHOLE), (ROWS, ROWS), "the carry port changes the layout"),
        ("stream", (stacked(ROWS),), (ROWS,), ""),
        ("stream", (stacked(ROWS),), (WHOLE,), "the stream port changes the layout"),
        ("stream", (stacked(WHOLE, (0,)),), (WHOLE,), "cuts the dim that the loop runs over"),
        ("stack", (ROWS,), (stacked(ROWS),), ""),
        ("stack", (WHOLE,), (stacked(WHOLE, (0,)),), "cuts the dim that the loop runs over"),
    ],
)
def test_a_port_is_the_identity(
    kind: str, needs: tuple[Layout, ...], gives: tuple[Layout, ...], what: str
) -> None:
    if not what:
        check_port(port(kind), needs, gives, MESH)
        return
    with pytest.raises(Illegal, match=what):
        check_port(port(kind), needs, gives, MESH)
