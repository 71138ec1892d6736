"""What is known of all copies of a tensor at once, beside what each says of itself."""

from __future__ import annotations

from itertools import product

import jax
import pytest

import tapestry_egg as te
from tapestry_egg.extract.problem.copies import CopyTable
from tapestry_egg.extract.problem.unit_choices import unit_choices
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.schedules import scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate


def tables(sizes: tuple[int, ...]) -> list[CopyTable]:
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 16), (16, 8), ())]
    graph = te.trace(lambda x, w, s: s * (x @ w), *shapes).graph
    plan = scheduled(graph, feedback_pairs(graph, None))
    mesh = MeshShape(("x", "y", "z")[: len(sizes)], sizes)
    found = saturate(encode(plan.program, mesh), load_books(DEFAULT_BOOKS))
    return list(unit_choices(plan, found, mesh, load_target("h100:8")).copies.values())


def collects(have: Layout, kept: Layout) -> bool:
    """Every dim keeps a beginning of the axes that cut it, or is cut further over axes over which
    the value was partial; nothing stays partial."""
    for before, after in zip(have.dims, kept.dims, strict=True):
        gathered = list(before)
        while gathered and tuple(gathered) != after:
            gathered.pop()
        scattered = before == after[: len(before)]
        further = after[len(before) :]
        if tuple(gathered) != after and not (scattered and set(further) <= set(have.partial)):
            return False
    return not kept.partial


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_tables_say_of_all_pairs_what_layouts_and_paths_say_of_each(sizes: tuple[int, ...]) -> None:
    seen: set[tuple[bool, bool, bool]] = set()
    for table in tables(sizes):
        for (a, have), (b, kept) in product(enumerate(table.layouts), repeat=2):
            mine, rest = set(have.partial), set(kept.partial)
            said = tuple(bool(x[a, b]) for x in (table.in_place, table.combines, table.collects))
            assert said == (
                have.dims == kept.dims and rest < mine,
                not mine <= rest,
                collects(have, kept),
            )
            seen.add(said)  # type: ignore[arg-type]
            if table.following[a, b] < 0:
                continue
            sent = [s for s in table.path(have, kept) if s.kind not in ("slice", "to_partial")]
            assert table.sends[a, b] == len(sent)
            assert bool(sent) == (table.wire[a, b] > 0)
    assert len(seen) >= 4
