"""First calls: what is left out of a search for one plan, and what that plan still is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg import pipeline
from tapestry_egg.pipeline import apart, passes, state
from tapestry_egg.rewrite.region_forms import _worth_a_form
from tapestry_egg.runtime.arguments import placed_as
from tapestry_egg.schedule.one_device import region_shares


def _layers(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ v


@pytest.mark.slow
def test_the_one_plan_is_as_fast_as_the_front_s_best() -> None:
    graph = te.trace(_layers, jnp.ones((64, 128)), jnp.ones((128, 64)), jnp.ones((32, 64)))
    whole = te.optimize(graph, "h100:8", settings=pipeline.Settings(work=4.0, recompute=0))
    quick = te.optimize(
        graph,
        "h100:8",
        ("seconds",),
        settings=pipeline.Settings(work=4.0, recompute=0, front=False),
    )
    assert len(quick.plans) == 1
    best = whole.best("seconds").costs.seconds
    assert quick.plans[0].costs.seconds <= best * (1.0 + pipeline.Settings().gap)


def test_long_programs_are_searched_on_few_axes() -> None:
    machine = te.load_target("h100:8")
    shapes = machine.distinct(machine.mesh_shapes(2))
    graph = te.trace(_layers, jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones((8, 8))).graph
    finest, notes = passes.quickly(shapes, graph.size, long=False)
    assert {len(s.sizes) for s in finest} == {2} and not notes
    few, notes = passes.quickly(shapes, graph.size, long=True)
    assert {len(s.sizes) for s in few} == {1}
    assert "only meshes of 1 axis" in notes[0]


def test_fronts_of_very_long_programs_are_searched_on_the_machine_s_own_meshes() -> None:
    machine = te.load_target("h100:32x8")
    shapes = machine.distinct(machine.mesh_shapes(2))
    assert passes.first_shapes(shapes, 12_000) == (shapes, ())
    few, notes = passes.first_shapes(shapes, 50_000)
    assert [s.sizes for s in few] == [(256,), (32, 8)]
    assert notes == ("50000 operations: 6 mesh shapes of as few axes as others were not searched",)
    parts = (*shapes, *machine.mesh_shapes(2, 64))
    few, _ = passes.first_shapes(parts, 50_000)
    assert [s.devices for s in few] == [256, 256, 64, 64]


@pytest.mark.slow
def test_a_first_look_tells_of_a_plan_before_all_are_made_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = te.trace(_layers, jnp.ones((16, 16)), jnp.ones((16, 16)), jnp.ones((16, 16)))

    def searched() -> tuple[te.Front, list[te.Phase]]:
        told: list[te.Phase] = []
        settings = pipeline.Settings(work=0.5, recompute=0, workers=1)
        return te.optimize(graph, "h100:2x2", settings=settings, on_progress=told.append), told

    whole, told = searched()
    assert not any(p.step == "look_first" and p.text for p in told)
    monkeypatch.setattr(apart, "_NETWORKS", 1)
    monkeypatch.setattr(apart, "_OPERATIONS", 1)
    looked, told = searched()
    first = next(k for k, p in enumerate(told) if p.text.startswith("front "))
    assert told[first].step == "look_first"
    assert first < next(k for k, p in enumerate(told) if p.step == "encode_facts")
    assert looked.table() == whole.table()
    # What it derived is not derived again, and is told once.
    rules = [
        sorted((str(t.subject), t.ruleset, t.rows) for t in f.timeline) for f in (whole, looked)
    ]
    assert rules[0] == rules[1]


def test_an_interruption_of_the_first_look_ends_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = te.trace(_layers, jnp.ones((16, 16)), jnp.ones((16, 16)), jnp.ones((16, 16)))
    monkeypatch.setattr(apart, "_NETWORKS", 1)
    monkeypatch.setattr(apart, "_OPERATIONS", 1)
    looks: list[str] = []
    seen: list[str] = []

    def tell(phase: te.Phase) -> None:
        looks.append(phase.step)
        if phase.text.startswith("front ") and not seen:  # a plan is there: that was enough
            seen.append(phase.text)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        te.optimize(
            graph,
            "h100:2x2",
            settings=pipeline.Settings(work=0.5, recompute=0, workers=1),
            on_progress=tell,
        )
    assert looks[-1] == "look_first"


@pytest.mark.slow
def test_long_programs_are_planned_as_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = te.trace(lambda x: jnp.sin(x) @ x + x @ x, jnp.ones((64, 64))).graph
    monkeypatch.setattr(state, "LONG", graph.size - 1)
    for front in (False, True):
        settings = pipeline.Settings(work=4.0, recompute=0, front=front)
        found = te.optimize(graph, "h100:2", ("seconds",), settings=settings)
        assert any("rules on the program were left out" in note for note in found.notes) != front
        assert any(p.rules for p in found) == front  # one product of a sum


def test_the_predicate_of_a_loop_is_not_searched_for_forms() -> None:
    def run(x: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.while_loop(
            lambda c: c[0] < n,
            lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[1])),
            (0, x),
        )[1]

    graph = te.trace(run, jnp.ones((256, 256)), 5).graph
    machine = te.load_target("cpu:8")  # without the time that a launch takes
    (loop,) = [k for k, op in enumerate(graph.operations) if op.regions]
    shares = region_shares(graph, machine)
    assert 0.0 < sum(shares.values()) <= 1.0 + 1e-9
    worth = _worth_a_form(graph, machine)
    assert worth == {max(shares, key=lambda key: shares[key])} and next(iter(worth))[0] == loop
    assert len(graph.operations[loop].regions) == 2


def test_an_argument_is_cut_on_the_host_and_given_up_where_it_is_donated() -> None:
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    wanted = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    for donated in (False, True):
        x = jax.device_put(jnp.arange(8.0), jax.devices()[0])
        placed = placed_as(x, wanted, donated)
        np.testing.assert_array_equal(np.asarray(placed), np.arange(8.0))
        assert placed.sharding.is_equivalent_to(wanted, 1)
