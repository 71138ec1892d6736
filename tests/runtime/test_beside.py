"""Collectives beside kernels: plans that count on it leave compilers the room, others do not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import TargetError
from tapestry_egg.machine.compiler_choices import Combiner
from tapestry_egg.machine.target import load_target
from tapestry_egg.plans.compiler_options import passed_options
from tapestry_egg.plans.plan import Plan
from tapestry_egg.runtime.compiled import CompiledPlan
from tests.runtime.lowered import numbers

pytestmark = pytest.mark.slow  # to search

LAYERS, WIDTH, HIDDEN, ROWS = 4, 64, 256, 512
COLLECTIVES = ("psum", "reduce_scatter", "all_gather", "all_to_all", "psum_invariant")


def step(w: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(w: Any) -> jax.Array:
        h = x
        for up, down in w:
            h = h + jax.nn.relu(h @ up) @ down
        return jnp.mean((h - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


def arguments(scale: int = 1, layers: int = LAYERS) -> tuple[Any, ...]:
    width, hidden, rows = WIDTH * scale, HIDDEN * scale, ROWS * scale
    w = [(numbers(width, hidden) / 16, numbers(hidden, width) / 16) for _ in range(layers)]
    return w, numbers(rows, width, seed=1), numbers(rows, width, seed=2)


def front(merge: bool, layers: int) -> te.Front:
    """Of a step so large that its kernels take as long as its collectives."""
    given = arguments(16, layers)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), given)
    settings = te.Settings(work=0.2, overlap=True, recompute=0, forms=0, workers=1, merge=merge)
    return te.optimize(te.trace(step, *shapes), "h100:8", settings=settings)


@pytest.fixture(scope="module")
def beside() -> te.Front:
    return front(merge=True, layers=2)


@pytest.fixture(scope="module")
def apart() -> te.Front:
    return front(merge=False, layers=LAYERS)


def alone(plans: te.Front) -> list[Plan]:
    """Plans whose collectives are each on their own."""
    return [p for p in plans if not any(c.merged for c in p.collectives)]


def local_equations(plan: Plan) -> Sequence[Any]:
    """What every device runs, in a plan for abstract devices."""
    (mapped,) = [e for e in te.compile(plan).trace().jaxpr.eqns if e.primitive.name == "shard_map"]
    found: Sequence[Any] = mapped.params["jaxpr"].eqns
    return found


def dots_beside(equations: Sequence[Any]) -> list[int]:
    """Of each collective, how many products neither wait for it nor does it wait for."""
    needs: list[set[int]] = []
    made: dict[Any, int] = {}
    for k, e in enumerate(equations):
        before: set[int] = set()
        for x in e.invars:
            if not isinstance(x, jax.extend.core.Literal) and x in made:
                before |= needs[made[x]] | {made[x]}
        needs.append(before)
        made.update(dict.fromkeys(e.outvars, k))
    dots = [k for k, e in enumerate(equations) if e.primitive.name == "dot_general"]
    return [
        sum(d not in needs[k] and k not in needs[d] for d in dots)
        for k, e in enumerate(equations)
        if e.primitive.name in COLLECTIVES
    ]


def test_products_need_not_wait_for_what_the_plan_sends_beside_them(apart: te.Front) -> None:
    for plan in (apart[0], apart[-1]):
        hidden = {b.name for b in plan.lanes() if b.stream == "links" and b.hidden > 0}
        assert hidden
        free = [n for n in dots_beside(local_equations(plan)) if n]
        assert len(free) >= len(hidden), plan
        machine = replace(plan.origin.machine, overlaps=False)
        serial = replace(plan, origin=replace(plan.origin, machine=machine))
        assert sum(map(bool, dots_beside(local_equations(serial)))) < len(free) / 2


def test_nothing_waits_for_a_rectified_product_that_products_compute(beside: te.Front) -> None:
    """A barrier would store what is computed on the fly; it waits for what that is made of."""
    for plan in (*alone(beside)[:2], beside[-1]):
        equations = local_equations(plan)
        rectified = {e.outvars[0] for e in equations if e.params.get("name") == "relu"}
        rectified |= {e.outvars[0] for e in equations if e.primitive.name == "max"}
        barriers = [e for e in equations if e.primitive.name == "optimization_barrier"]
        assert rectified and barriers
        assert rectified.isdisjoint(x for e in barriers for x in e.invars)


def test_plans_with_collectives_beside_kernels_give_the_numbers() -> None:
    args = arguments()
    expected = jax.jit(step)(*args)
    settings = te.Settings(work=0.2, overlap=True, recompute=0, forms=0, workers=1)
    target = replace(load_target("h100:8"), launch_seconds=0.0)
    plans = te.optimize(te.trace(step, *args), target, settings=settings)
    for plan in (plans[0], plans[len(plans) // 2], plans[-1]):
        found = te.compile(plan)(*args)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_what_the_compiler_is_told(beside: te.Front) -> None:
    for plan in beside:
        options = plan.compiler_options
        assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
        assert options["xla_gpu_dot_merger_threshold_mb"] == 0
        merged = {c.kind for c in plan.collectives if c.merged}
        for kind in ("all_reduce", "reduce_scatter", "all_gather"):
            most = options[f"xla_gpu_{kind}_combine_threshold_bytes"]
            assert (most > 1) == (kind in merged)
    plan = alone(beside)[0]
    serial = replace(plan.origin.machine, overlaps=False)
    plan = replace(plan, origin=replace(plan.origin, machine=serial))
    told = [v for k, v in plan.compiler_options.items() if k.endswith("_bytes")]
    assert set(told) == {131072}  # no gradient is as small
    # Whatever a file says of a machine, XLA is told of every kind that it merges.
    for overlaps, least in ((False, 131072), (True, 1)):
        merger = Combiner(bytes=1 << 50, kinds=("all_gather",))
        other = replace(serial, combiner=merger, overlaps=overlaps)
        plan = replace(beside[0], origin=replace(beside[0].origin, machine=other), collectives=())
        thresholds = [v for k, v in plan.compiler_options.items() if k.endswith("_bytes")]
        assert thresholds == [least] * 3
    assert passed_options(plan, "cuda") == plan.compiler_options
    assert passed_options(plan, "tpu") == {}
    assert replace(beside[0], origin=None).compiler_options == {}


def test_tpus_hide_collectives_in_the_memory_that_the_plan_promises(beside: te.Front) -> None:
    machine = load_target("v5e:2x4")
    plan = replace(beside[0], origin=replace(beside[0].origin, machine=machine))
    for share, percent in ((0.372, 37), (0.009, 0), (1.7, 100)):
        costs = replace(plan.costs, peak_bytes=int(share * machine.hbm_bytes))
        options = {"xla_tpu_scheduler_percent_shared_memory_limit": percent}
        assert replace(plan, costs=costs).compiler_options == options
        assert passed_options(replace(plan, costs=costs), "tpu") == options
        assert passed_options(replace(plan, costs=costs), "cuda") == {}


def beside_products(module: str) -> int:
    """How many collectives of a compiled module begin before a product and end after it."""
    on_their_way: dict[str, bool] = {}
    count = 0
    for line in module[module.index("ENTRY") :].splitlines():
        found = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\(%?([\w.-]*)", line)
        if not found:
            continue
        name, operation, operand = found.groups()
        if operation.endswith("-start"):
            on_their_way[name] = False
        elif operation.endswith("-done"):
            count += on_their_way.pop(operand)
        elif re.match("gemm|dot|cublas|custom-call", name):
            on_their_way = dict.fromkeys(on_their_way, True)
    return count


def test_xla_for_h100_hides_them(apart: te.Front) -> None:
    """In the order of the compiled module, with the planned bytes and within the planned peak."""
    from benchmarks.devices import devices_of
    from tapestry_egg.runtime.measure.compare import compare

    try:
        devices = devices_of("h100:8")
    except TargetError as missing:
        pytest.skip(str(missing))
    for plan in (apart[0], apart[-1]):
        compiled = te.compile(plan, devices).compile()
        compared = compare(plan, compiled)
        assert compared.equal, compared
        assert compared.peak_ratio <= 1.1
        hidden = {b.name for b in plan.lanes() if b.stream == "links" and b.hidden > 0}
        assert beside_products(compiled.as_text()) >= 0.4 * len(hidden)


def test_a_compiler_without_an_option_compiles_without_them(beside: te.Front) -> None:
    class Lowered:
        def compile(self) -> str:
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option: 'xla_gpu'")

    def again(tree: Any, with_options: bool) -> Any:
        assert not with_options
        return SimpleNamespace(lower=lambda: SimpleNamespace(compile=lambda: "without"))

    run: Any = SimpleNamespace(plan=beside[0], more_options=None, _trace=again)
    with pytest.warns(UserWarning, match="does not know an option"):
        assert CompiledPlan._with_options(run, Lowered(), None) == "without"  # type: ignore[arg-type]
    run.more_options = {"xla_gpu": 1}  # the user's own
    with pytest.raises(jax.errors.JaxRuntimeError):
        CompiledPlan._with_options(run, Lowered(), None)  # type: ignore[arg-type]
