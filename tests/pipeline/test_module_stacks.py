"""Train steps of random stacks of library modules are planned, and give what `jax.jit` gives."""

from __future__ import annotations

import jax
import pytest
from hypothesis import HealthCheck, given, settings

import tapestry_egg as te
from benchmarks.agreement import allowances, difference, leaves_of, plain

from .module_stacks import Stack, made, stacks

#: Enough for a plan of each; more would only better it.
FEW = te.Settings(work=0.2, front=False)


@pytest.mark.long
@settings(max_examples=12, suppress_health_check=list(HealthCheck), print_blob=False)
@given(stacks())
def test_stacks_of_modules_are_planned_for_gpus(stack: Stack) -> None:
    step, arguments = made(stack)
    graph = te.trace(step, *jax.eval_shape(arguments), donate_argnums=0)
    front = te.optimize(graph, "h100:8", settings=FEW)
    assert front.plans


@pytest.mark.long
@settings(max_examples=6, suppress_health_check=list(HealthCheck), print_blob=False)
@given(stacks())
def test_plans_of_stacks_give_what_jax_gives(stack: Stack) -> None:
    step, arguments = made(stack)
    values = jax.jit(arguments)()
    graph = te.trace(step, *jax.eval_shape(arguments))
    plan = te.optimize(graph, "cpu:8", settings=FEW).plans[0]
    jitted = jax.jit(step)
    expected, host = leaves_of(jitted(*values)), jax.device_get(jax.tree.map(plain, values))
    allowed = allowances(jitted, values, host, expected)
    assert not difference(expected, leaves_of(te.compile(plan)(*values)), allowed)
