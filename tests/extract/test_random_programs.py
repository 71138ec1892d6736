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

from tapestry_egg.extract.problem import assemble as assemble_module
from tapestry_egg.extract.problem.assemble import assemble
from tapestry_egg.extract.problem.columns import Columns
from tapestry_egg.extract.problem.copies import CopyTable
from tapestry_egg.extract.problem.inner_sums import InnerSums
from tapestry_egg.extract.problem.unit_choices import unit_choices
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.rules.language.book import RuleBook, load_books
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.schedules import Schedule, scheduled
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


Drawn = tuple[Callable[..., list[jax.Array]], list[tuple[int, int]]]


def drawn(seed: int) -> Drawn:
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

    return program, [shape]


def products(seed: int) -> Drawn:
    """A program of one to three square inputs and two or three steps: products, sums of them,
    operands that several read, chains that are fused; and its shapes."""
    rng = random.Random(seed)
    n, inputs, count = (
        rng.choice((512, 1024, 2048)),
        rng.choice((1, 2, 2, 3)),
        rng.choice((2, 2, 3)),
    )
    steps = [(rng.random(), rng.random(), rng.random()) for _ in range(count)]
    ways: tuple[Callable[[jax.Array, jax.Array], jax.Array], ...] = (
        lambda x, y: jnp.tanh(x),
        lambda x, y: x @ y,
        lambda x, y: x @ y,
        lambda x, y: x + y,
        lambda x, y: jnp.sin(x - y),
    )

    def program(*arguments: jax.Array) -> list[jax.Array]:
        values, read = list(arguments), set()
        for which, first, second in steps:
            kind, last = int(which * len(ways)), len(values) - 1
            a = last if first < 0.6 else int((first - 0.6) / 0.4 * (last + 1))
            b = int(second * len(values))
            read |= {a, b} if kind else {a}
            values.append(ways[kind](values[a], values[b]))
        return [v for k, v in enumerate(values) if k >= inputs and k not in read]

    return program, [(n, n)] * inputs


def schedule_of(seed: int, draw: Callable[[int], Drawn] = drawn) -> Schedule | None:
    """The units of a random program; None where it has too many plans to be listed."""
    program, shapes = draw(seed)
    graph = prepare(trace(program, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).graph)
    plan = scheduled(graph, feedback_pairs(graph))
    order = [plan.program.instances[i] for unit in plan.units for i in unit.members]
    return plan if prod(len(choices(i, MESH)) for i in order) <= MOST else None


def fronts(plan: Schedule, without: str = "") -> tuple[list[tuple[float, float]], list[float]]:
    """(peak, seconds) of the front of every plan, and the network's seconds within those peaks;
    the network may lack what one rule derives."""
    machine = load_target(TARGET)
    every = sorted((c.peak_bytes, c.seconds) for c in every_cost(plan, MESH, machine, inside=True))
    front: list[tuple[float, float]] = []
    for peak, seconds in every:
        if not front or seconds < front[-1][1] * (1 - 1e-9):
            front = [f for f in front if f[0] < peak] + [(peak, seconds)]
    found = saturate(encode(plan.program, MESH), _books(without))
    problem = assemble(unit_choices(plan, found, MESH, machine)).problem
    return front, [exact(problem, peak * (1 + 1e-9)) for peak, _ in front]


def _books(without: str) -> list[RuleBook]:
    return [b.without(without) if any(r.name == without for r in b.rules) else b for b in BOOKS]


def agree(seeds: Sequence[int], without: str = "", draw: Callable[[int], Drawn] = drawn) -> int:
    """How many of the programs have the front of all their plans; raises where one has not."""
    tried = 0
    for seed in seeds:
        plan = schedule_of(seed, draw)
        if plan is None:
            continue
        tried += 1
        front, network = fronts(plan, without)
        np.testing.assert_allclose(network, [s for _, s in front], 1e-6, err_msg=f"seed {seed}")
    return tried


@pytest.mark.slow
def test_the_network_has_the_front_of_all_plans() -> None:
    assert agree(range(4)) >= 2
    assert agree(range(1, 3), draw=products) == 2


@pytest.mark.slow
def test_copies_for_single_readers_and_inside_kernels_are_in_the_network() -> None:
    """Seeds 33 and 64 keep a copy for the first of two operations of one kernel, seeds 102 and 107
    one for a single reader, made before another runs."""
    assert agree((33, 64, 102, 107)) == 4


@pytest.mark.long
def test_more_networks_have_the_fronts_of_all_plans() -> None:
    """Of products to seed 245 once; here some of them."""
    assert agree(range(4, 110)) >= 60
    assert agree(range(40), draw=products) >= 10


@pytest.mark.long
@pytest.mark.parametrize("first", range(110, 410, 50))
def test_hundreds_of_networks_have_the_fronts_of_all_plans(first: int) -> None:
    """With those above 300 programs."""
    assert agree(range(first, first + 50)) >= 30


def grams(_: int) -> Drawn:
    """The sine of a sum of two products of long rows."""

    def program(x: jax.Array) -> list[jax.Array]:
        dims = (((1,), (1,)), ((), ()))
        exactly = jax.lax.dot_general(x, x, dims, precision="highest")
        return [jnp.sin(jax.lax.dot_general(x, x, dims) + exactly)]

    return program, [(128, 65536)]


@pytest.mark.long
def test_sums_combined_inside_kernels_are_among_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.MOST", 4000)
    assert agree([0], draw=grams) == 1
    monkeypatch.setattr(InnerSums, "of", lambda self, u: None)
    with pytest.raises(AssertionError, match="seed 0"):
        agree([0], draw=grams)


@pytest.mark.slow
def test_without_copies_made_early_for_one_reader_the_fronts_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert agree([107]) == 1
    shared = assemble_module._shared_layouts
    monkeypatch.setattr(
        assemble_module,
        "_shared_layouts",
        lambda *given: tuple(s for s in shared(*given) if len(s[1]) > 1),
    )
    with pytest.raises(AssertionError, match="seed 107"):
        agree([107])


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "seed"), [("slice", 9), ("all-gather", 9)])
def test_without_a_change_of_layout_the_fronts_differ(rule: str, seed: int) -> None:
    with pytest.raises(AssertionError, match="seed"):
        agree([seed], rule)


@pytest.mark.slow
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
