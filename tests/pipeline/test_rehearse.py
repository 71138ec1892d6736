"""Rehearsals of plans that take random keys: drawn ones, or the program's own."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.pipeline import Settings
from tapestry_egg.pipeline.rehearse import rehearse, rehearse_all
from tapestry_egg.tracing.entry import load_entry

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
        assert shown.differences == (("result", 0.0),)
        assert "farthest: result by 0 of" in str(shown)


def test_of_several_plans_each_is_held_against_the_original_which_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keyed.py"
    file.write_text(PROGRAM.format(impl="threefry2x32"))
    program = load_entry(str(file))
    plan = te.jit(program.function, settings=Settings(work=0.2)).plan(*program.arguments)
    numerics = import_module("tapestry_egg.runtime.measure.numerics")
    standard, asked = numerics.standard, list[object]()
    monkeypatch.setattr(numerics, "standard", lambda *a: (asked.append(a), standard(*a))[1])
    compiling = import_module("tapestry_egg.runtime.compiled")
    compiled, plans = compiling.compile, list[object]()

    def second_is_wrong(given: Any, *rest: Any) -> Any:
        plans.append(given)
        found = compiled(given, *rest)
        return Wrong(found) if len(plans) == 2 else found

    monkeypatch.setattr(compiling, "compile", second_is_wrong)
    for repeat in (1, 2):
        for known in (plans, asked, Wrong.calls):
            known.clear()
        shown = list(rehearse_all((plan, plan, plan), str(file), repeat=repeat))
        assert [x.ok for x in shown] == [True, False, True]
        assert all(x.seconds > 0.0 and x.original_seconds > 0.0 for x in shown)
        assert len(plans) == 3 and len(asked) == 1 and len(Wrong.calls) == repeat


class Wrong:
    """A compiled plan whose first output is 2 % off; it counts its calls."""

    calls: ClassVar[list[object]] = []

    def __init__(self, plan: Any) -> None:
        self._plan, self.compile = plan, plan.compile

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        first, *rest = self._plan(*arguments)
        return [first * 1.02, *rest]


@pytest.mark.parametrize("dtype", ["", pytest.param(", jnp.float32", marks=pytest.mark.slow)])
def test_a_wrong_plan_of_a_program_that_draws_is_told(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keyed.py"
    text = PROGRAM.format(impl="threefry2x32").replace("(16, 8))", f"(16, 8){dtype})", 1)
    file.write_text(text)
    program = load_entry(str(file))
    plan = te.jit(program.function, settings=Settings(work=0.2)).plan(*program.arguments)
    right = rehearse(plan, str(file), repeat=1)
    assert right.ok
    assert "float64 decides" in str(right)
    compiling = import_module("tapestry_egg.runtime.compiled")
    compiled = compiling.compile
    monkeypatch.setattr(compiling, "compile", lambda *a, **k: Wrong(compiled(*a, **k)))
    assert not rehearse(plan, str(file), repeat=1).ok


CARRIES = """
import jax, jax.numpy as jnp
def recurrent(w, x):
    def cell(h, x):
        h = jnp.tanh(x + h @ w)
        return h, h
    return jax.lax.scan(cell, jnp.zeros((4, 8), jnp.float32), x)[1]
def example(): return recurrent, (jnp.eye(8) / 2, jnp.linspace(-1, 1, 160).reshape(5, 4, 8))
"""


@pytest.mark.slow
def test_a_program_that_says_what_a_loop_carries_is_judged_by_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recurrent.py"
    file.write_text(CARRIES)
    program = load_entry(str(file))
    plan = te.jit(program.function, settings=Settings(work=0.2)).plan(*program.arguments)
    right = rehearse(plan, str(file), repeat=1)
    assert right.ok and right.accuracy
    compiling = import_module("tapestry_egg.runtime.compiled")
    compiled = compiling.compile
    monkeypatch.setattr(compiling, "compile", lambda *a, **k: Wrong(compiled(*a, **k)))
    assert not rehearse(plan, str(file), repeat=1).ok


DOUBLE = """
import numpy as np
def total(x): return x.sum(0)
def example():
    random = np.random.default_rng(0)
    large = random.normal(size=(512, 4)) * 1e6
    rows = np.concatenate([large, random.normal(size=(512, 4)) - large])
    return total, (random.permutation(rows),)
"""


def test_a_program_in_float64_is_judged_by_how_far_its_roundings_move_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "double.py"
    file.write_text(DOUBLE)
    with jax.enable_x64(True):
        program = load_entry(str(file))
        plan = te.jit(program.function, settings=Settings(work=0.2)).plan(*program.arguments)
        right = rehearse(plan, str(file), repeat=1)
        assert right.ok and right.accuracy, right
        compiling = import_module("tapestry_egg.runtime.compiled")
        compiled = compiling.compile
        monkeypatch.setattr(compiling, "compile", lambda *a, **k: Slightly(compiled(*a, **k)))
        assert not rehearse(plan, str(file), repeat=1).ok


class Slightly(Wrong):
    """A compiled plan whose first output is off in the last places of 32 bits."""

    def __call__(self, *arguments: Any) -> Any:
        first, *rest = self._plan(*arguments)
        return [first.astype(jnp.float32).astype(jnp.float64), *rest]
