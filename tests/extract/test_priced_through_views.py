"""Kernels that read through views: the search and the certificate price them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te

_U = jax.ShapeDtypeStruct((64, 128), jnp.float32)
_PLACES = jax.ShapeDtypeStruct((64, 128), jnp.int32)


def _turned(x: jax.Array) -> jax.Array:
    return x.T.reshape(32, -1)


KERNELS = [
    lambda x, j: jnp.zeros(1000).at[j].add(x),
    lambda x, j: jnp.zeros(1000).at[j].max(x),
    lambda x, j: jnp.zeros((1000, 128)).at[j % 9].set(x[..., None]),
    lambda x, j: x[j % 7],
    lambda x, j: lax.sort((j, x), num_keys=1)[1],
    lambda x, j: lax.top_k(x, 4)[0],
    lambda x, j: jnp.cumsum(x, axis=-1),
    lambda x, j: lax.cumlogsumexp(x, axis=0),
    lambda x, j: jnp.fft.rfft(x),
]


@pytest.mark.parametrize(
    ("target", "view", "kernel"),
    [
        *(("h100:4", jnp.ravel, kernel) for kernel in KERNELS),
        *(pytest.param("v5e:2x2", _turned, k, marks=pytest.mark.slow) for k in KERNELS[::2]),
    ],
)
def test_search_and_certificate_price_alike_what_views_show_a_kernel(
    kernel: Callable[..., Any], view: Callable[..., Any], target: str
) -> None:
    """A front whose plans the certificate prices otherwise is an error."""

    def program(x: jax.Array, j: jax.Array) -> jax.Array:
        return kernel(view(x), view(j))

    front = te.optimize(
        te.trace(program, _U, _PLACES), target, settings=te.Settings(work=0.1, forms=0, recompute=0)
    )
    for plan in front:
        told = sum(part.seconds for part in plan.costs_by("kernel").parts)
        assert plan.costs.seconds == pytest.approx(told)
