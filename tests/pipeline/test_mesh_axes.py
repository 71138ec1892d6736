"""Axes of meshes: when those of three are searched without being asked for, which forms of large
programs are searched on those of two, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.extract.engine import search
from tapestry_egg.extract.front.notes import INTERRUPTED, note
from tapestry_egg.extract.front.sizes import entries, entries_of_three_axes
from tapestry_egg.machine.objectives import OBJECTIVES
from tapestry_egg.pipeline import finer, passes, searches
from tapestry_egg.pipeline.pipeline import PASSES, run_passes
from tapestry_egg.pipeline.state import State, read_question
from tapestry_egg.rules.language.book import DEFAULT_BOOKS
from tests.extract.random_programs import Drawn, algebra, mixed

BRIEF = te.Settings(work=0.3, recompute=0, forms=0)
X, W, V = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 64), (64, 2048), (2048, 64)))
LEFT = note("mesh-axes", axes=2)


def layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ v


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w).sum()


def posed(
    fn: Any = layers,
    given: tuple[Any, ...] = (X, W, V),
    target: str = "h100:2x4",
    settings: te.Settings = BRIEF,
    objectives: Sequence[str] = OBJECTIVES,
    **words: Any,
) -> State:
    """What is to be searched."""
    question = read_question(
        te.trace(fn, *given), target, objectives, books=DEFAULT_BOOKS, settings=settings, **words
    )
    until = PASSES.index(next(p for p in PASSES if p.run is passes.add_axes))
    return run_passes(State(question), PASSES[: until + 1])[0]


def axes(state: State) -> list[int]:
    """Of the meshes of all networks, in order."""
    return [len(n.mesh.sizes) for n in state.networks]


@pytest.mark.slow
def test_three_axes_on_several_hosts() -> None:
    found = te.optimize(te.trace(layers, X, W, V), "h100:2x4", settings=BRIEF)
    assert not any(note.kind == "mesh-axes" for note in found.notes)
    # As good as if that mesh alone had been asked for, though four meshes share the work.
    finest = [te.MeshShape(("x", "y", "z"), (2, 2, 2))]
    alone = te.optimize(te.trace(layers, X, W, V), "h100:2x4", settings=BRIEF, mesh_shapes=finest)
    for p in alone:
        seconds, peak = 1.02 * p.costs.seconds, 1.02 * p.costs.peak_bytes
        assert any(q.costs.seconds <= seconds and q.costs.peak_bytes <= peak for q in found)


@pytest.mark.slow
def test_which_meshes_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    state = posed()
    assert axes(state) == [1, 2, 2, 3]
    assert axes(posed(target="h100:8")) == [1, 2]
    assert axes(posed(settings=replace(BRIEF, max_axes=2))) == [1, 2, 2]
    assert axes(posed(settings=replace(BRIEF, front=False))) == [1, 2, 2]
    assert axes(posed(mesh=te.MeshShape(("data", "model"), (2, 4)))) == [2, 3]
    monkeypatch.setattr(passes, "THREE_AXES", 20_000)
    assert axes(posed()) == [1, 2, 2]
    found = te.optimize(te.trace(layers, X, W, V), "h100:2x4", settings=BRIEF)
    assert LEFT in found.notes


@pytest.mark.slow
@pytest.mark.parametrize(("fn", "given"), [(layers, (X, W, V)), (jax.grad(loss), (W, X))])
def test_the_size_of_tables_is_predicted(fn: Any, given: tuple[Any, ...]) -> None:
    *small, large = posed(fn, given).problems
    assert len(large.choices.mesh.sizes) == 3
    assert 2 / 3 < entries_of_three_axes(small) / entries(large.problem) < 3 / 2
    # Where a named mesh has two axes there is none of one.
    assert 1 / 2 < entries_of_three_axes(small[1:]) / entries(large.problem) < 2
    assert entries_of_three_axes(small[:1]) == float("inf")


def chain(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a @ b) @ a


def two_products(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b + a @ a


# The second form associates the other way; it has one product of a sum, and is faster.
@pytest.mark.slow
@pytest.mark.parametrize(("fn", "form"), [(chain, 0), (two_products, 1)])
def test_one_form_has_three_axes(fn: Any, form: int) -> None:
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    state = posed(fn, (square, square), settings=replace(BRIEF, forms=5))
    assert len(state.forms) > 1 and max(axes(state)) == 3
    (mine,) = {n.number for n in state.networks if len(n.mesh.sizes) == 3}
    assert mine == form
    for n, problem in zip(state.networks, state.problems, strict=True):
        assert problem.choices.schedule is state.schedules[n.number]
        assert problem.choices.mesh == n.mesh
    for name in ("encodings", "strategies", "choices"):
        assert len(getattr(state, name)) == len(state.problems)
    assert note("three-axes", len(state.forms) - 1, forms=len(state.forms)) in state.notes


# Large programs: forms that gave no plan of the front on meshes of few axes are searched on no
# others. Here all programs are large.

HOSTS = "h100:2x4"
DRAWN = [(algebra, 3, HOSTS), (mixed, 3, HOSTS), (mixed, 8, HOSTS), (mixed, 2, "h100:8")]
FORMS = te.Settings(work=0.5, recompute=2)


def of_seed(draw: Callable[[int], Drawn], seed: int) -> tuple[Any, tuple[Any, ...]]:
    fn, shapes = draw(seed)
    return fn, tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "seed", "target"), DRAWN[::3])
def test_forms_left_out_on_finer_meshes_win_nothing(
    draw: Callable[[int], Drawn], seed: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SMALL", 1)
    fn, given = of_seed(draw, seed)
    program = te.trace(fn, *given)
    some = te.optimize(program, target, settings=FORMS)
    assert any(n.kind == "finer-meshes" for n in some.notes)
    monkeypatch.setattr(passes, "_in_rounds", lambda _: False)
    every = te.optimize(program, target, settings=FORMS)
    assert not any(n.kind == "finer-meshes" for n in every.notes)
    for end in ("seconds", "peak_bytes"):
        best, known = (min(getattr(p.costs, end) for p in found) for found in (some, every))
        assert best <= 1.01 * known


@pytest.mark.slow
@pytest.mark.parametrize("objectives", [OBJECTIVES, ("seconds", "devices")])
@pytest.mark.parametrize(("draw", "seed", "target"), DRAWN[1:3])
def test_forms_left_out_are_beaten_where_they_were_searched(
    draw: Callable[[int], Drawn],
    seed: int,
    target: str,
    objectives: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "SMALL", 1)
    state = posed(*of_seed(draw, seed), target, FORMS, objectives)
    made = {(n.number, n.mesh) for n in state.networks if n.mesh in state.shapes}
    left = {(n.number, n.mesh) for n in state.left}
    assert not made & left and len(made | left) == len(state.forms) * len(state.shapes)
    assert [n.count for n in state.notes if n.kind == "finer-meshes"] == [len(left)]
    assert all(len(mesh.sizes) == 2 for _, mesh in left)
    for form, mesh in left:
        # Where it has no plan worth showing: on the coarsest meshes, or on all finer ones.
        rivals = [n for n in state.networks if n.search and n.mesh.devices == mesh.devices]
        own = [n for n in rivals if n.number == form]
        axes = max(len(n.mesh.sizes) for n in own)
        for n in own:
            for c in n.search.archive.candidates if len(n.mesh.sizes) == axes else ():
                assert any(
                    all(a <= 1.01 * b for a, b in zip(d.costs, c.costs, strict=True))
                    for other in rivals
                    if other.number != form or len(other.mesh.sizes) < axes
                    for d in other.search.archive.candidates
                )


def test_forms_are_held_against_those_on_as_many_devices() -> None:
    """What is known of other parts of a machine, however fast, changes nothing."""
    rng = np.random.default_rng(0)
    sizes = {4: [(4,), (2, 2)], 8: [(8,), (2, 4)]}
    kept = left = 0
    for _ in range(40):
        networks = [
            SimpleNamespace(
                number=form,
                mesh=SimpleNamespace(devices=devices, sizes=own),
                search=SimpleNamespace(
                    archive=SimpleNamespace(
                        candidates=[
                            SimpleNamespace(costs=(1.0 + rng.random(3)) * 16.0 / devices**2)
                            for _ in range(2)
                        ]
                    )
                ),
            )
            for form in range(4)
            for devices, every in sizes.items()
            for own in every
        ]
        for axes in (0, 2):
            vain = finer._vain(cast(State, SimpleNamespace(networks=networks)), axes)
            for devices in sizes:
                some = [n for n in networks if n.mesh.devices == devices]
                alone = finer._vain(cast(State, SimpleNamespace(networks=some)), axes)
                assert alone == {x for x in vain if x[1] == devices}
                # The least of each cost is worth going on with.
                for k in range(2):
                    best = min(
                        some, key=lambda n: min(c.costs[k] for c in n.search.archive.candidates)
                    )
                    assert (best.number, devices) not in alone or len(best.mesh.sizes) < axes
                left += len(alone)
                kept += 4 - len(alone)
    assert left > 50 and kept > 50


def test_all_forms_are_searched_where_meshes_are_named_or_plans_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(search, "SMALL", 1)
    fn, given = of_seed(algebra, 3)
    assert posed(fn, given, settings=FORMS).left
    shapes = [te.MeshShape(("x",), (8,)), te.MeshShape(("x", "y"), (2, 4))]
    one, kept = replace(FORMS, front=False), tmp_path / "kept.search"
    timed = replace(FORMS, seconds=60.0)
    for words in (
        {"mesh_shapes": shapes},
        {"settings": one},
        {"settings": timed},
        {"resume": kept},
    ):
        state = posed(fn, given, **{"settings": FORMS, **words})
        assert not state.left and len(state.networks) >= 2 * len(state.forms)


@pytest.mark.parametrize("at", ["ends of all forms", "tables", "ends on finer meshes"])
def test_an_interruption_on_finer_meshes_leaves_what_was_found(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SMALL", 1)
    fn, given = of_seed(algebra, 3)
    calls = 0
    own = searches.search_ends

    def ended(state: State) -> None:
        nonlocal calls
        calls += 1
        if calls == (2 if at == "ends on finer meshes" else 1):
            raise KeyboardInterrupt
        own(state)

    def no_tables(state: State, more: object) -> State:
        raise KeyboardInterrupt

    if at == "tables":
        monkeypatch.setattr(passes, "with_networks", no_tables)
    else:
        monkeypatch.setattr(searches, "search_ends", ended)
    found = te.optimize(te.trace(fn, *given), HOSTS, settings=FORMS)
    assert len(found) and INTERRUPTED in found.notes
    forms, meshes = found.searched
    assert (forms > 1) == (at != "ends of all forms") and meshes == 1
