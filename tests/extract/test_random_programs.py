"""Small random programs: the network's exact front against the costs of every plan there is.

Every way to run every operation, every layout at the boundary and every copy kept or not is listed
and costed by the certificate (`tables.py`); a solver finds the network's least seconds within every
peak that some plan has, and just below. Neither knows of the other. Where one kind of choice is
taken from the network, the two part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.extract.choices.inner_copies import InnerCopies
from tapestry_egg.extract.choices.joiner import Joiner, UnitRows
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.problem import kept
from tapestry_egg.extract.problem.assemble import assemble
from tapestry_egg.extract.problem.columns import Columns
from tapestry_egg.extract.problem.kept import Keeping
from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.rules.language.book import RuleBook, load_books
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tests.extract.brute import every_cost
from tests.extract.random_programs import (
    Drawn,
    algebra,
    drawn,
    mixed,
    narrow,
    products,
    schedule_of,
)
from tests.extract.tables import Point, Tables
from tests.reference.exact import exact

BOOKS = load_books(("sharding", "collectives"))
# Tables add up what units and values hold, as searches do, which is all but for places of results.
MESH, TARGET = MeshShape(("x",), (4,)), replace(load_target("h100:4"), reserves=False)
#: No more combinations than these are added up: of ways to run units that differ from outside.
MOST = 200_000
# Solvers hold limits to a millionth.
_BELOW = 1e-5


def tables_of(plan: Schedule) -> Tables:
    return Tables(plan, MESH, TARGET)


def network(plan: Schedule, without: str = "") -> Problem:
    """The network of a program with every copy, which may lack what one rule derives."""
    found = saturate(encode(plan.program, MESH), _books(without))
    return assemble(unit_choices(plan, found, MESH, TARGET), keeping=Keeping(0)).problem


def apart_of(front: Sequence[Point], problems: Sequence[Problem]) -> float:
    """How far the best of some networks is from the front of all plans."""
    limits = [f.peak * (1 + 1e-9) for f in front] + [f.peak * (1 - _BELOW) for f in front]
    apart = 0.0
    for limit in limits:
        least = min((f.seconds for f in front if f.peak <= limit), default=np.inf)
        found = min(exact(p, limit) for p in problems)
        if np.isfinite(least) or np.isfinite(found):
            apart = max(apart, abs(found / least - 1.0) if np.isfinite(least) else np.inf)
    return apart


def _books(without: str) -> list[RuleBook]:
    return [b.without(without) if any(r.name == without for r in b.rules) else b for b in BOOKS]


def agree(seeds: Sequence[int], without: str = "", draw: Callable[[int], Drawn] = drawn) -> int:
    """How many of the programs have the front of all their plans; raises where one has not."""
    tried = 0
    for seed in seeds:
        plan = tables_of(schedule_of(seed, draw))
        if plan.rows > MOST:
            continue
        tried += 1
        apart = apart_of(plan.front(), [network(plan.schedule, without)])
        assert apart < 1e-6, f"seed {seed}: {apart:.2%}"
    return tried


# Kinds of choice, frozen


def _fastest(joiner: Joiner, rows: UnitRows) -> UnitRows:
    """Those of the rows of a kernel that take least."""
    kept = np.flatnonzero(rows.seconds <= rows.seconds.min() * (1 + 1e-9))
    columns = {
        k: x[kept] if isinstance(x, np.ndarray) else tuple(x[r] for r in kept)
        for k, x in vars(rows).items()
    }
    return replace(rows, **columns)


def _layouts(patch: pytest.MonkeyPatch) -> None:
    every = Joiner.rows
    patch.setattr(Joiner, "rows", lambda self, u, unit: _fastest(self, every(self, u, unit)))


def _kept(patch: pytest.MonkeyPatch) -> None:
    every = Columns.sharable
    patch.setattr(Columns, "sharable", lambda *a: np.zeros_like(every(*a)))


def _kept_by_gathers(patch: pytest.MonkeyPatch) -> None:
    every = Columns.sharable
    patch.setattr(Columns, "sharable", lambda self, table, _: every(self, table, 0.0))


def _endings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kept.KeptCopies, "_endings", lambda self, v, readers, sharing: sharing[-1:])


def _early(patch: pytest.MonkeyPatch) -> None:
    every = kept._shared_layouts
    patch.setattr(
        kept,
        "_shared_layouts",
        lambda *given: tuple(s for s in every(*given) if len(s[1]) > 1),
    )


def _stores(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InnerCopies, "of", lambda self, u: ())


def _sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InnerCopies, "_may_be_sent", lambda self, i: False)


#: Kinds of choice, and what takes each from the network: it runs every kernel as that is fastest;
#: keeps no copy; only those of gathers and sums; all to the last reader; none for one reader alone;
#: combines no sum inside a kernel, and sends nothing from inside one.
FROZEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "layouts": _layouts,
    "kept copies": _kept,
    "kept copies but gathers and sums": _kept_by_gathers,
    "how long copies are kept": _endings,
    "copies made early": _early,
    "store points in fused chains": _stores,
    "values sent inside kernels": _sent,
}


@contextmanager
def frozen(kind: str) -> Iterator[None]:
    """Networks without one kind of choice."""
    with pytest.MonkeyPatch.context() as patch:
        if kind:
            FROZEN[kind](patch)
        yield


def differs(kind: str, seed: int, draw: Callable[[int], Drawn]) -> bool:
    """Whether the front of all plans, which the network of a program has, is another without one
    kind of choice."""
    plan = tables_of(schedule_of(seed, draw))
    front = plan.front()
    assert apart_of(front, [network(plan.schedule)]) < 1e-6
    with frozen(kind):
        return apart_of(front, [network(plan.schedule)]) >= 1e-6


def with_sorts(patch: pytest.MonkeyPatch) -> None:
    """Sorts, whose dim is never cut, in the place of scans."""
    patch.setattr(jax.lax, "cumsum", lambda x, d: jax.lax.sort(x, d))
    patch.setattr(jax.lax, "cummax", lambda x, d: jax.lax.sort(x, d, is_stable=False))


#: Of each kind the draw and the seed of a program whose front it changes.
CHANGED: tuple[tuple[str, Callable[[int], Drawn], int], ...] = (
    ("layouts", drawn, 9),
    ("kept copies", mixed, 23),
    ("kept copies but gathers and sums", drawn, 13),
    ("how long copies are kept", drawn, 166),
    ("copies made early", drawn, 107),
    ("values sent inside kernels", narrow, 5),
)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "draw", "seed"), CHANGED)
def test_without_a_kind_of_choice_the_fronts_differ(
    kind: str, draw: Callable[[int], Drawn], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "copies made early":
        with_sorts(monkeypatch)
    assert differs(kind, seed, draw)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "seed"), [("slice", 9), ("all-gather", 5)])
def test_without_a_change_of_layout_the_fronts_differ(rule: str, seed: int) -> None:
    with pytest.raises(AssertionError, match="seed"):
        agree([seed], rule)


# The tables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "seed"), [(drawn, 9), (products, 4), (mixed, 15), (mixed, 23), (algebra, 1)]
)
def test_tables_say_what_the_certificate_says_of_every_plan(
    draw: Callable[[int], Drawn], seed: int
) -> None:
    """Of plans drawn at random, of those in the front, and of all where these are few. Of the last
    program a product leaves turned, and is in memory to the end unless it leaves as a copy."""
    plan = tables_of(schedule_of(seed, draw))
    front = plan.front()
    for point in (*front, *plan.drawn(30)):
        assert plan.certified(point) == pytest.approx((point.peak, point.seconds), rel=1e-9)
    if plan.combinations > 1_500:
        return
    every = [(c.peak_bytes, c.seconds) for c in every_cost(plan.schedule, MESH, TARGET, True)]
    least: list[tuple[float, float]] = []
    for peak, seconds in sorted(every):
        if not least or seconds < least[-1][1] * (1 - 1e-9):
            least.append((peak, seconds))
    np.testing.assert_allclose([(f.peak, f.seconds) for f in front], least, rtol=1e-9)


# The networks


@pytest.mark.slow
def test_the_network_has_the_front_of_all_plans() -> None:
    assert agree(range(4)) == 4
    assert agree(range(4), draw=products) == 4
    assert agree((4, 15, 22, 23), draw=mixed) == 4


@pytest.mark.slow
def test_copies_for_single_readers_and_inside_kernels_are_in_the_network() -> None:
    """Seeds 33 and 64 keep a copy for the first of two operations of one kernel, seeds 102 and 107
    one for a single reader, made before another runs."""
    assert agree((33, 64, 102, 107)) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("draw", "end"), [(drawn, 200), (products, 100), (mixed, 60), (narrow, 40)]
)
def test_hundreds_of_networks_have_the_fronts_of_all_plans(
    draw: Callable[[int], Drawn], end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.MOST", 1_000_000)
    assert agree(range(end), draw=draw) >= 0.5 * end


def grams(again: int) -> Drawn:
    """The sine of a sum of two products of long rows; and the sine `again` of what it differs by
    from something, all of it one kernel."""

    def program(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        dims = (((1,), (1,)), ((), ()))
        exactly = jax.lax.dot_general(x, x, dims, precision="highest")
        found = jnp.sin(jax.lax.dot_general(x, x, dims) + exactly)
        return [jnp.sin(found - y) if again else found]

    return program, [(128, 65536), (128, 128)]


@pytest.mark.slow
@pytest.mark.parametrize("again", [0, 1])
def test_sums_combined_inside_kernels_are_among_all_plans(again: int) -> None:
    """Not only the last that a kernel makes: no partial sum passes the first sine."""
    assert differs("store points in fused chains", again, grams)
