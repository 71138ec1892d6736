"""Rehearsals of plans that take random keys: drawn ones, or the program's own."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.pipeline import Settings
from tapestry_egg.pipeline.rehearse import rehearse

PROGRAM = """
import jax, jax.numpy as jnp
def f(k, x): return jax.random.normal(k, (16, 8)) + x
def example(): return f, (jax.random.key(0, impl="{impl}"), jnp.ones((16, 8)))
"""


@pytest.mark.parametrize("impl", ["threefry2x32", "unsafe_rbg"])
def test_typed_keys_are_drawn_or_the_programs_own(impl: str, tmp_path: Path) -> None:
    def f(k: jax.Array, x: jax.Array) -> jax.Array:
        return jax.random.normal(k, (16, 8)) + x

    x = jnp.ones((16, 8))
    plan = te.jit(f, settings=Settings(work=0.2)).plan(jax.random.key(0, impl=impl), x)
    file = tmp_path / "keyed.py"
    file.write_text(PROGRAM.format(impl=impl))
    for program in (None, str(file)):
        shown = rehearse(plan, program, repeat=1)
        assert shown.ok
        assert [share for _, share in shown.differences] == [0.0]
