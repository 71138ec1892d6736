"""Graphs of one JAX run in another: what only newer ones ask for is left out, and put back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.tracing import plain

PROGRAMS = {
    "reduce_max": lambda x: jnp.max(x, 0),
    "reduce_min": lambda x: jnp.min(x, 0),
    "top_k": lambda x: jax.lax.top_k(x, 2),
}


def parameters(kernel: str) -> dict[str, Any]:
    """What the running JAX binds."""
    (eqn,) = jax.make_jaxpr(PROGRAMS[kernel])(jnp.ones((4, 8))).eqns
    return dict(eqn.params)


@pytest.mark.parametrize("kernel", PROGRAMS)
def test_what_is_left_out_is_what_the_running_jax_puts_back(kernel: str) -> None:
    given = parameters(kernel)
    kept = plain.without_defaults(kernel, given)
    assert plain.as_this_jax_asks(kernel, kept) == given


@pytest.mark.parametrize("kernel", PROGRAMS)
def test_graphs_hold_no_parameter_that_other_versions_refuse(kernel: str) -> None:
    graph = te.trace(PROGRAMS[kernel], jnp.ones((4, 8))).graph
    (op,) = (o for o in graph.operations if o.kernel == kernel)
    assert not set(op.params) & set(plain._SINCE[kernel])


def test_what_a_newer_jax_asks_for_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert plain.as_this_jax_asks("reduce_max", {"axes": (0,)}) == {
        "axes": (0,),
        "out_sharding": None,
    }
    unlike = {"k": 2, "axis": 1, "is_stable": False}
    assert plain.as_this_jax_asks("top_k", unlike) == unlike
    assert plain.without_defaults("top_k", unlike) == unlike
