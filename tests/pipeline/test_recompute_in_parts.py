"""Micro-batches whose steps compute values twice: what fits where neither does by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import PlanError
from tapestry_egg.extract.front.notes import note
from tapestry_egg.files.admission import admit
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.runtime.measure.numerics import accuracy, as_written, in_float64
from tapestry_egg.tracing import constants

pytestmark = pytest.mark.slow  # to search

ROWS, WIDTH, LAYERS = 512, 16, 8
DEVICES = 2
TARGET = f"h100:{DEVICES}"
SHAPES = [MeshShape(("x",), (DEVICES,))]
#: Bytes that a device has for a step whose activations take 16 KiB there for each layer and use.
LIMITS = {"peak_bytes": 56 << 10}
QUICK = te.Settings(work=0.3, forms=0, merge=False, micro_batches=(8,))
#: Of a constant something is computed, once, before the program runs.
SHIFT = np.linspace(0.0, 1.0, WIDTH, dtype="f4")


def loss(w: list[jax.Array], x: jax.Array) -> jax.Array:
    for one in w:
        x = x + jax.nn.gelu(jnp.sin(x) @ one + jnp.exp(SHIFT))
    return jnp.mean(x**2)


def step(w: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w, x))


def arguments() -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    w = [rng.normal(size=(WIDTH, WIDTH)).astype("f4") / 4 for _ in range(LAYERS)]
    return w, rng.normal(size=(ROWS, WIDTH)).astype("f4")


PROGRAM = te.trace(step, *arguments(), donate_argnums=0)


@pytest.fixture(scope="module")
def front() -> te.Front:
    return te.optimize(PROGRAM, TARGET, limits=LIMITS, mesh_shapes=SHAPES, settings=QUICK)


def both(front: te.Front) -> list[te.Plan]:
    return [p for p in front.plans if p.micro_batches > 1 and "recompute" in p.rules]


def test_micro_batches_compute_values_twice_where_memory_is_short(front: te.Front) -> None:
    """No plan that does one of both alone is as fast within the limit."""
    fastest = min(front.plans, key=lambda p: p.costs.seconds)
    assert fastest in both(front)
    settings = te.Settings(work=0.1, forms=0, merge=False, recompute=0)
    alone = te.optimize(PROGRAM, TARGET, limits=LIMITS, mesh_shapes=SHAPES, settings=settings)
    assert all(p.costs.seconds > 1.2 * fastest.costs.seconds for p in alone)


def test_such_plans_give_the_numbers_and_send_what_they_say(front: te.Front) -> None:
    from tapestry_egg.runtime import compare

    plan, args = both(front)[0], arguments()
    run = te.compile(plan, jax.devices()[:DEVICES])
    assert not [r for r in compare(plan, run.compile()).rows if r.planned_bytes != r.compiled_bytes]
    exact, written = in_float64(step, args), as_written(step, args)
    (told,) = accuracy(exact, written, run(*arguments()))
    assert told.plan <= told.allowed


def test_saved_ones_follow_from_their_program(front: te.Front, tmp_path: Path) -> None:
    path = tmp_path / "front.json"
    te.save(front, path)
    assert [p.rules for p in te.load(path).plans] == [p.rules for p in front.plans]


def test_saved_ones_load_on_machines_that_round_their_constants_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step reads of such numbers is told by how they are computed, not by their bits."""

    def scaled(w: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(w: list[jax.Array]) -> jax.Array:
            y = x
            for one in w:
                y = y + jax.nn.gelu(jnp.sin(y) @ one) * jnp.exp(jnp.float32(0.3))
            return jnp.mean(y**2)

        return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))

    def rounded_up(*given: Any) -> dict[int, np.ndarray]:
        made = compute(*given)
        return {v: np.asarray(np.nextafter(a, np.inf, dtype=a.dtype)) for v, a in made.items()}

    program = te.trace(scaled, *arguments(), donate_argnums=0)
    settings = replace(QUICK, work=0.05)
    front = te.optimize(program, TARGET, limits=LIMITS, mesh_shapes=SHAPES, settings=settings)
    path = tmp_path / "front.json"
    te.save(front, path)
    compute = constants.compute
    monkeypatch.setattr(constants, "compute", rounded_up)
    assert both(front) and [p.rules for p in te.load(path).plans] == [p.rules for p in front.plans]


def test_what_computes_values_twice_and_is_not_split_is_told(front: te.Front) -> None:
    """Here two programs do; one of them is split, where no more are asked for."""
    settings = replace(QUICK, work=0.05, recompute=2)
    more = te.optimize(PROGRAM, TARGET, limits=LIMITS, mesh_shapes=SHAPES, settings=settings)
    told = [[n for n in f.notes if n.kind == "batch-forms"] for f in (front, more)]
    assert told == [[note("batch-forms")], []]


def test_those_of_another_program_are_refused(front: te.Front) -> None:
    """What is made again is told by numbers that may be any; the program is still the given one."""
    plan = both(front)[0]
    admit([plan], ["plan"], "here")
    other = replace(plan, body=replace(plan.body, graph=with_sines(plan.graph)))
    with pytest.raises(PlanError, match="does not follow from the program"):
        admit([other], ["plan"], "here")


def test_a_file_cannot_have_values_made_again_and_again(front: te.Front) -> None:
    """Each time may double the program, before it is held against anything."""
    plan = both(front)[0]
    again, change = plan.steps
    with pytest.raises(PlanError, match="more than once"):
        admit([replace(plan, body=plan.body, steps=(again, again, change))], ["plan"], "here")


def test_constants_of_a_file_are_not_computed_that_no_machine_has_room_for(front: te.Front) -> None:
    def grown(w: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        made = jnp.asarray(SHIFT)
        for _ in range(9):
            made = jnp.concatenate([made] * 16)
        return [a + made[:WIDTH] * x[0, 0] for a in w]

    plan, program = both(front)[0], te.trace(grown, *arguments(), donate_argnums=0)
    assert plan.program is not None
    other = replace(plan, program=replace(plan.program, graph=program.graph))
    with pytest.raises(PlanError, match="constants of 64 bytes are made into"):
        admit([other], ["plan"], "here")


def with_sines(graph: BlockGraph) -> BlockGraph:
    """The graph with sines in the place of hyperbolic tangents."""
    operations = [
        replace(
            op,
            kernel="sin" if op.kernel == "tanh" else op.kernel,
            regions=tuple(map(with_sines, op.regions)),
        )
        for op in graph.operations
    ]
    return replace(graph, operations=tuple(operations))
