"""Plans on some of a machine's devices: when they are searched, what they cost, where they run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError, PlanError, TargetError
from tapestry_egg.extract.certify.certificate import certify
from tapestry_egg.machine.objectives import OBJECTIVES
from tapestry_egg.machine.power import Price
from tapestry_egg.pipeline.state import _devices
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.schedules import schedule

QUICK = te.Settings(work=0.4, recompute=0, forms=0)
# Times of collectives that were measured in groups of a host's eight are left out here, so that
# four devices of eight are four devices.
H100 = replace(te.load_target("h100:8"), collectives=None, price=Price(3.6))
# Energy is no reason to take fewer devices where nothing draws any.
FREE = replace(
    H100,
    power=replace(
        H100.power,
        idle_watts=0.0,
        kernel_watts=0.0,
        flops_watts=0.0,
        joules_per_byte=0.0,
        joules_per_wire_byte=0.0,
    ),
)
X, W, V = jnp.ones((256, 64)), jnp.ones((64, 2048)), jnp.ones((2048, 64))


def layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ v


def front(
    target: str | te.Target = H100, settings: te.Settings = QUICK, **options: Any
) -> te.Front:
    return te.optimize(te.trace(layers, X, W, V), target, settings=settings, **options)


@pytest.fixture(scope="module")
def four() -> te.Front:
    return front(limits={"devices": 4})


@pytest.mark.slow
def test_at_most_four_devices_gives_a_plan_on_four(four: te.Front) -> None:
    assert {p.mesh.devices for p in four} <= {1, 2, 4} and four.best().mesh.devices == 4
    said = str(four)
    assert re.search(r"^p0 +4x +4 ", said, re.M)
    assert "devices that a plan leaves unused draw and cost nothing" in said
    assert any(n.kind == "devices" and "(3)" in n.text for n in four.notes)
    assert "  4 of 8 devices, the first 4; the others do not count" in four.best().explain()
    # As fast as on a machine of four, and none of all eight beside them.
    alone = front(replace(H100, shape=(4,)), mesh_shapes=[four.best().mesh])
    for what in ("seconds", "joules", "peak_bytes"):
        one, other = (getattr(f.best().costs, what) for f in (four, alone))
        assert one == pytest.approx(other, rel=0.005), what


@pytest.mark.slow
def test_it_runs_on_four_and_sends_within_them(four: te.Front) -> None:
    plan = next(p for p in four if p.mesh.devices == 4 and p.collectives)
    run = te.compile(plan)
    assert set(run.mesh.devices.flat) == set(jax.devices()[:4])
    arguments = [jax.random.normal(jax.random.key(k), a.shape) for k, a in enumerate((X, W, V))]
    out = run(*arguments)
    np.testing.assert_allclose(out, layers(*arguments), rtol=1e-3, atol=1e-3)
    text = run.compile().as_text()
    assert "num_partitions=4" in text
    groups = [g for line in re.findall(r"replica_groups=(\S+)", text) for g in _members(line)]
    assert groups and all(max(g) < 4 for g in groups)


def _members(text: str) -> list[list[int]]:
    """The devices of groups as HLO writes them: `{{0,1},{2,3}}`, `[2,2]<=[4]`, or, those of a mesh
    that has them in a row, `mesh['x'=2,'y'=2] {'x'}`."""
    mesh = re.match(r"mesh\[(.*?)\]", text)
    if mesh:
        return [list(range(prod(int(n) for n in re.findall(r"=(\d+)", mesh[1]))))]
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\]", text)
    if iota:
        return [list(range(int(np.prod([int(n) for n in iota[2].split(",")]))))]
    return [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", text)]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["devices", "dollars"])
def test_as_an_objective_every_number_has_its_best(objective: str) -> None:
    def asked(plan: te.Plan) -> float:
        return plan.costs.dollars if objective == "dollars" else plan.mesh.devices

    machine = replace(FREE, shape=(4,))
    # Three numbers of devices share the work.
    settings = replace(QUICK, work=3 * QUICK.work)
    every = front(machine, settings, objectives=("seconds", "peak_bytes", objective))
    for n in (4, 2, 1):
        own = [p for p in every if p.mesh.devices == n]
        alone = front(replace(FREE, shape=(n,)), mesh_shapes=[te.MeshShape(("x",), (n,))])
        best = min(own, key=lambda p: p.costs.seconds)
        assert best.costs.seconds == pytest.approx(alone.best().costs.seconds, rel=0.01), n
        # What four devices can do is no bound of what one can, and no reason not to look.
        assert best.gap < 0.01, n
        for p in alone:
            of_p = (p.costs.seconds, p.costs.peak_bytes, asked(p))
            # More devices may do the same for no more of what is asked.
            assert any(
                all(x <= 1.02 * y for x, y in zip(of_q, of_p, strict=True))
                for q in every
                if (of_q := (q.costs.seconds, q.costs.peak_bytes, asked(q)))
            ), n
    assert every.best(objective).mesh.devices == 1
    assert every.best(limits={"devices": 2}).mesh.devices == 2


def test_idle_devices_count_where_they_are_asked_to() -> None:
    shapes = [te.MeshShape(("x",), (2,))]
    free = front(mesh_shapes=shapes).best()
    counted = front(mesh_shapes=shapes, idle="counted", limits={"devices": 2})
    held = counted.best()
    assert held.costs.seconds == pytest.approx(free.costs.seconds)
    more = 6 * H100.power.idle_watts * held.costs.seconds
    assert held.costs.joules - free.costs.joules == pytest.approx(more, rel=1e-9)
    assert held.costs.dollars == pytest.approx(4 * free.costs.dollars)
    assert free.costs.dollars == pytest.approx(free.costs.seconds * 2 * 3.6 / 3600)
    assert "leaves unused count in energy and price" in str(counted)
    with pytest.raises(ExtractError, match="neither free nor counted"):
        front(idle="sometimes")


def test_they_are_certified_and_saved(four: te.Front, tmp_path: Path) -> None:
    plan = next(p for p in four if p.mesh.devices == 4 and p.collectives)
    assert plan.origin is not None
    units = schedule(flatten(plan.body.graph, dict(plan.origin.feedback)))
    certify(plan, units, plan.origin.machine, {"devices": 4})
    with pytest.raises(ExtractError, match="devices"):
        certify(plan, units, plan.origin.machine, {"devices": 3})
    machine = replace(plan.origin.machine, idle_counted=True)
    with pytest.raises(ExtractError, match="joules"):
        certify(plan, units, machine)
    file = tmp_path / "four.json"
    four.save(file)
    again = te.load(file)
    assert again.plans == four.plans and str(again) == str(four)
    # Three devices are no part of two hosts of two.
    other = replace(four, plans=(replace(plan, mesh=te.MeshShape(("x",), (3,))),))
    text = file.read_text()
    other.save(file)
    with pytest.raises(PlanError):
        te.load(file)
    assert text


@pytest.mark.slow
def test_named_meshes_are_contracts() -> None:
    with pytest.raises(ExtractError, match="has 8 devices, plans may have 4"):
        front(mesh=te.MeshShape(("data",), (8,)), limits={"devices": 4})
    with pytest.raises(TargetError, match="has 4 devices, h100:8 has 8"):
        front(mesh=te.MeshShape(("data",), (4,)))
    found = front(mesh=te.MeshShape(("data",), (8,)), objectives=("seconds", "devices"))
    assert {p.mesh.devices for p in found} == {8} and not found.left_unused()
    with pytest.raises(TargetError, match="no part"):
        front("h100:2x2", mesh_shapes=[te.MeshShape(("x",), (3,))])
    with pytest.raises(ExtractError, match="less than one"):
        front(limits={"devices": 0})


@pytest.mark.parametrize(
    ("spec", "objectives", "limits", "whole", "counts", "left"),
    [
        ("h100:8", OBJECTIVES, {}, True, (8,), ()),
        ("h100:8", OBJECTIVES, {"devices": 8.0}, True, (8,), ()),
        ("h100:8", OBJECTIVES, {"devices": 4.0}, True, (4, 2, 1), (3,)),
        ("h100:8", ("seconds",), {"devices": 6.0}, True, (6, 4), ()),
        ("h100:8", OBJECTIVES, {"devices": 6.0}, False, (6, 4), ()),
        ("h100:8", ("seconds", "devices"), {}, True, (8, 4, 2, 1), (3, 5, 6, 7)),
        ("h100:8", ("seconds", "seconds * dollars"), {}, True, (8, 4, 2, 1), (3, 5, 6, 7)),
        ("h100:8", ("seconds",), {"dollars": 1.0}, True, (8, 4, 2, 1), (3, 5, 6, 7)),
        ("h100:8", ("seconds", "seconds * joules"), {}, True, (8,), ()),
        ("h100:2x4", ("seconds",), {"devices": 7.0}, True, (4,), ()),
    ],
)
def test_which_numbers_are_searched(
    spec: str,
    objectives: Sequence[str],
    limits: dict[str, float],
    whole: bool,
    counts: tuple[int, ...],
    left: tuple[int, ...],
) -> None:
    assert _devices(te.load_target(spec), objectives, limits, whole) == (counts, left)


@pytest.mark.slow
def test_where_jax_jit_stood() -> None:
    few = te.jit(layers, limits={"devices": 4}, settings=QUICK, cache=False)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("a",))
    spread = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a")))
    with pytest.warns(UserWarning, match="mesh 8a has 8 devices, plans may have 4.* moved"):
        out = few(spread, W, V)
    assert few.plan(spread, W, V).mesh.devices <= 4
    assert out.sharding.device_set <= set(jax.devices()[:4])
    np.testing.assert_allclose(out, layers(X, W, V), rtol=1e-4)
