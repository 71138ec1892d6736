"""Programs too long for other forms to be searched each on its own: their places are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings, patching
from tapestry_egg.rewrite.extractions import OPERATIONS, kernels_of, without_twins
from tapestry_egg.rewrite.patches import find_places
from tapestry_egg.rewrite.terms.explore import Explored, explore
from tapestry_egg.rewrite.terms.kernel_names import KernelNames
from tapestry_egg.rewrite.terms.rebuild import Rebuilt, rebuild
from tapestry_egg.rewrite.terms.terms import Node, as_written
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, load_books
from tapestry_egg.tracing.trace import trace
from tests.extract.random_programs import algebra, graph_of

RULES = [r for b in load_books(("algebra", "fusion")) for r in b.rules]
PROGRAM = [r for r in RULES if r.ruleset in PROGRAM_RULESETS]
TARGET = load_target("h100:8")
SQUARE = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def long(*factors: jax.Array) -> jax.Array:
    """Products of three factors between long chains."""
    h = jnp.tanh(factors[0])
    for a, b, c in zip(factors[::3], factors[1::3], factors[2::3], strict=True):
        h = h + (a @ b) @ c
        for k in range(170 // (len(factors) // 3)):
            h = jnp.tanh(h) + (k + 0.5)
    return h


def front_of(room: int) -> te.Front:
    """The front where the last factor is cut by columns and the others are whole."""
    program = te.trace(long, *[SQUARE] * 3)
    assert program.graph.size > OPERATIONS
    settings = Settings(workers=1, work=0.5, merge=False, recompute=0, forms=room)
    pins: dict[str, Any] = {"[0]": (None, None), "[1]": (None, None), "[2]": (None, "x")}
    meshes = [MeshShape(("x",), (8,))]
    return te.optimize(program, "h100:8", mesh_shapes=meshes, pins=pins, settings=settings)


@pytest.mark.slow
def test_a_product_of_three_in_a_long_program_is_multiplied_as_its_factors_lie() -> None:
    """One device takes the same for both, so that no form of one device has it."""
    plan = front_of(OPERATIONS)[0]
    assert "product-from-the-right" in plan.rules
    assert plan.costs.seconds < 0.75 * front_of(0)[0].costs.seconds


def explored(graph: BlockGraph) -> tuple[Explored, list[float]]:
    found = explore(graph, PROGRAM)
    return found, [1.0] * len(found.catalogue)


@pytest.mark.parametrize("most", [1, 2, 3, 1000])
def test_ways_beyond_the_room_for_them_are_counted_and_not_proven(most: int) -> None:
    graph = trace(long, *[SQUARE] * 9).graph
    found, seconds = explored(graph)
    asked: list[Rebuilt] = []
    places = find_places(
        graph, found.terms, found.catalogue, seconds, lambda b: not asked.append(b), most
    )
    kept = sum(len(ways) - 1 for ways in places.ways)
    assert kept == len(asked) == min(3, most)
    # Each place has two more, that make several products as one and read one of them.
    assert places.left == 9 - kept and places.complete


def test_no_way_is_looked_for_where_there_is_room_for_none() -> None:
    graph = trace(long, *[SQUARE] * 9).graph
    found, seconds = explored(graph)
    places = find_places(graph, found.terms, found.catalogue, seconds, lambda b: True, 0)
    assert not len(places) and not places.complete


@pytest.mark.parametrize("seed", range(12))
def test_what_is_named_of_a_change_is_what_the_changed_program_computes(seed: int) -> None:
    """Each is built whole here, and all that it computes is compared."""
    graph = graph_of(seed, algebra)
    found, seconds = explored(graph)
    terms, catalogue = found.terms, found.catalogue
    base, roots = as_written(terms, seconds), terms.roots(graph)
    names = KernelNames(graph, terms, catalogue, base, roots)
    by_name: dict[object, set[object]] = {}
    for c, k in changes(names, without_twins(terms, catalogue)):
        pick = [*base]
        pick[c] = k
        built = rebuild(graph, terms, catalogue, pick)
        made = names.moved(c, k)
        assert (made is None) == (built is None)
        if made is not None and built is not None:
            other = kernels_of(built.graph) != kernels_of(graph)
            assert (made[1] != names.own[c]) == other
            if other:
                by_name.setdefault(made, set()).add(kernels_of(built.graph))
    assert all(len(some) == 1 for some in by_name.values())
    every = [x for some in by_name.values() for x in some]
    assert len(every) == len(set(every)), "equal programs have equal names"


def changes(
    names: KernelNames, nodes: Sequence[Sequence[tuple[int, Node]]]
) -> list[tuple[int, int]]:
    """Other nodes of what a program computes."""
    return [
        (c, k)
        for c in sorted(names.own)
        for k, node in nodes[c]
        if k != names.base[c] and all(names.base[d] >= 0 for d in node.operands)
    ]


@pytest.mark.slow
def test_ways_for_which_tables_are_too_large_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """But those that have the operations of forms are searched whatever their tables."""
    monkeypatch.setattr(patching, "COLUMNS_OF_WAYS", 1)
    said = "1 way to compute a place of the program was not searched, as its tables are large"
    few, all_ways = front_of(OPERATIONS), front_of(1_000)
    assert said in few.notes and said not in all_ways.notes
    assert all_ways[0].costs.seconds < 0.75 * few[0].costs.seconds
