"""Small random programs: the network's exact front against the costs of every plan there is.

Every way to run every operation, every layout at the boundary and every copy kept or not is listed
and costed by the certificate (`brute.py`); a solver finds the network's least seconds within every
peak that some plan has. Neither knows of the other. Where one kind of choice is taken from the
network, the two part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from tapestry_egg.extract.problem.assemble import assemble
from tapestry_egg.extract.problem.columns import Columns
from tapestry_egg.extract.problem.copies import CopyTable
from tapestry_egg.extract.problem.unit_choices import unit_choices
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.rules.language.book import RuleBook, load_books
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.kernels import Schedule, scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import trace
from tests.extract.brute import choices, every_cost
from tests.reference.exact import exact

BOOKS = load_books(("sharding", "collectives"))

MESH, TARGET = MeshShape(("x",), (4,)), "h100:4"
SHAPES = ((512, 1024), (1024, 1024), (2048, 512))
# No more plans than this are listed, before copies are kept or not.
MOST = 1500

#: One argument, or two of one shape.
ONE: tuple[Callable[[jax.Array], jax.Array], ...] = (
    jnp.tanh,
    lambda x: jax.lax.cumsum(x, 0),
    lambda x: jax.lax.cumsum(x, 1),
    lambda x: jax.lax.cummax(x, 0),
    lambda x: jax.lax.cummax(x, 1),
    lambda x: jnp.sum(x, 0),
    lambda x: x @ x.T,
)
TWO: tuple[Callable[[jax.Array, jax.Array], jax.Array], ...] = (
    lambda x, y: x + y,
    lambda x, y: jnp.sin(x + y),
    lambda x, y: x * y,
)


def drawn(seed: int) -> tuple[Callable[[jax.Array], list[jax.Array]], tuple[int, int]]:
    """A program of one input and two or three steps, each of earlier values, and its shape."""
    rng = random.Random(seed)
    shape, count = rng.choice(SHAPES), rng.choice((2, 3, 3))
    steps = [(rng.random(), rng.random(), rng.random(), rng.random()) for _ in range(count)]

    def program(x: jax.Array) -> list[jax.Array]:
        values, read = [x], set()
        for which, first, second, kind in steps:
            whole = [k for k, v in enumerate(values) if v.ndim == 2]
            a = whole[-1 - int(first * min(2, len(whole)))]
            same = [k for k in whole if values[k].shape == values[a].shape and k != a]
            read.add(a)
            if same and kind < 0.4:
                b = same[int(second * len(same))]
                read.add(b)
                values.append(TWO[int(which * len(TWO))](values[a], values[b]))
            else:
                values.append(ONE[int(which * len(ONE))](values[a]))
        return [v for k, v in enumerate(values) if k and k not in read]

    return program, shape


def schedule_of(seed: int) -> Schedule | None:
    """The units of a random program; None where it has too many plans to be listed."""
    program, shape = drawn(seed)
    graph = prepare(trace(program, jax.ShapeDtypeStruct(shape, jnp.float32)).graph)
    plan = scheduled(graph, feedback_pairs(graph))
    order = [plan.program.instances[i] for unit in plan.units for i in unit.members]
    return plan if prod(len(choices(i, MESH)) for i in order) <= MOST else None


def fronts(plan: Schedule, without: str = "") -> tuple[list[tuple[float, float]], list[float]]:
    """(peak, seconds) of the front of every plan, and the network's seconds within those peaks;
    the network may lack what one rule derives."""
    machine = load_target(TARGET)
    every = sorted((c.peak_bytes, c.seconds) for c in every_cost(plan, MESH, machine))
    front: list[tuple[float, float]] = []
    for peak, seconds in every:
        if not front or seconds < front[-1][1] * (1 - 1e-9):
            front = [f for f in front if f[0] < peak] + [(peak, seconds)]
    found = saturate(encode(plan.program, MESH), _books(without))
    problem = assemble(unit_choices(plan, found, MESH, machine)).problem
    return front, [exact(problem, peak * (1 + 1e-9)) for peak, _ in front]


def _books(without: str) -> list[RuleBook]:
    return [b.without(without) if any(r.name == without for r in b.rules) else b for b in BOOKS]


def agree(seeds: Sequence[int], without: str = "") -> int:
    """How many of the programs have the front of all their plans; raises where one has not."""
    tried = 0
    for seed in seeds:
        plan = schedule_of(seed)
        if plan is None:
            continue
        tried += 1
        front, network = fronts(plan, without)
        np.testing.assert_allclose(network, [s for _, s in front], 1e-6, err_msg=f"seed {seed}")
    return tried


def test_the_network_has_the_front_of_all_plans() -> None:
    assert agree(range(4)) >= 2


@pytest.mark.slow
def test_more_networks_have_the_fronts_of_all_plans() -> None:
    """Seeds 33 and 64 keep a copy for the first of two operations of one kernel. (Seed 102 keeps
    one for a single reader, which the list of plans leaves out.)"""
    assert agree(range(4, 102)) >= 60


@pytest.mark.parametrize(("rule", "seed"), [("slice", 9), ("all-gather", 9)])
def test_without_a_change_of_layout_the_fronts_differ(rule: str, seed: int) -> None:
    with pytest.raises(AssertionError, match="seed"):
        agree([seed], rule)


@pytest.mark.parametrize("most", [-1.0, 0.0, 1.0])
def test_with_fewer_kept_copies_the_fronts_differ(
    most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With none, with those of gathers and sums alone, with those of one collective alone."""
    whole = Columns.sharable

    def fewer(columns: Columns, table: CopyTable, _: float) -> NDArray[np.bool_]:
        found = whole(columns, table, most)
        return found if most >= 0 else np.zeros_like(found)

    monkeypatch.setattr(Columns, "sharable", fewer)
    with pytest.raises(AssertionError, match="seed 13"):
        agree([13])
