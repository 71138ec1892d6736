"""What a search takes of memory is bounded: tables that would be too large are not made, and the
front says what was left out for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.problem.problem import Pair
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.graph.layout_algebra import LayoutAlgebra, count_layouts
from tapestry_egg.pipeline import passes, settings
from tapestry_egg.pipeline.settings import Settings

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
SETTINGS = Settings(work=0.05, workers=1, micro_batches=(), forms=0, recompute=0, max_axes=3)


def chain(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    """Values that several products read, so that copies are shared."""
    made = [jnp.tanh(x @ y)]
    for _ in range(3):
        made.append(jnp.tanh(made[-1] @ y))
    return made


def found(**options: Any) -> te.Front:
    own = replace(SETTINGS, **options)
    return te.optimize(te.trace(chain, X, X), "h100:8", settings=own, keep_stages=True)


def entries(front: te.Front, axes: Iterable[int] = (1, 2, 3)) -> int:
    """Entries of the tables of all pairs, each table once."""
    tables: dict[int, int] = {}
    for posed in front.stages["problems"].value:
        if len(posed.choices.mesh.sizes) in axes:
            pairs: tuple[Pair, ...] = posed.problem.pairs
            tables |= {id(p.seconds): p.seconds.size for p in pairs}
    return sum(tables.values())


@pytest.fixture(scope="module")
def whole() -> te.Front:
    return found()


def test_where_there_is_room_nothing_is_left_out(whole: te.Front) -> None:
    assert not any("tables" in note.kind for note in whole.notes)
    assert len(whole.stages["problems"].value) == 3


def test_values_of_large_tables_share_no_copies_first(whole: te.Front) -> None:
    # No problem may have more than half of the room, and the largest has nearly all entries.
    every, most = entries(whole), entries(whole) * 8 // 5
    front = found(entries=most)
    (said,) = [note for note in front.notes if "tables" in note.kind]
    assert said.kind == "shared-tables" and "Settings(entries=" in said.setting
    assert 0 < entries(front) <= most / 2 + entries(whole, (1, 2)) < every
    assert len(front.stages["problems"].value) == 3
    # Less is chosen from, and at the same costs.
    assert front.best("seconds").costs.seconds >= whole.best("seconds").costs.seconds * (1 - 1e-9)


def test_meshes_without_room_are_left_out_and_named(whole: te.Front) -> None:
    # Half of it is room for the meshes of fewer axes, and for none of three.
    most = 8 * entries(whole, (1, 2))
    assert most < entries(whole, (3,))
    front = found(entries=most)
    assert [p.choices.mesh.sizes for p in front.stages["problems"].value] == [(8,), (2, 4)]
    assert any("1 network (2x×2y×2z)" in note.text for note in front.notes)
    assert entries(front) <= most
    assert front.plans


def test_tables_are_fewer_where_there_is_little_work(
    whole: te.Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_ENTRIES", 0.0)
    monkeypatch.setattr(settings, "_ENTRIES_PER_WORK", entries(whole) / SETTINGS.most_work(0))
    front = found()
    assert any(note.kind == "shared-tables" for note in front.notes)
    assert 0 < entries(front) < entries(whole)
    # However little there is, one problem is posed, and has a plan.
    monkeypatch.setattr(settings, "_ENTRIES_PER_WORK", 0.0)
    front = found()
    assert len(front.stages["problems"].value) == 1 and front.plans
    assert any(note.kind == "tables" for note in front.notes)


def test_without_room_for_any_it_says_so() -> None:
    with pytest.raises(ExtractError, match=r"entries than there is room for") as e:
        found(entries=1)
    assert "Settings(entries=" in str(e.value)


def test_meshes_of_too_many_layouts_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "COPIES", 92 * 92 - 1)
    front = found()
    assert {p.mesh.sizes for p in front.plans} <= {(8,), (2, 4)}
    (said,) = [note for note in front.notes if note.kind == "layouts"]
    assert said.text.startswith("1 mesh shape (2x×2y×2z)")
    monkeypatch.setattr(passes, "COPIES", 1)
    with pytest.raises(ExtractError, match="too many layouts"):
        found()


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("rank", range(4))
def test_layouts_are_counted_as_they_are_made(axes: int, rank: int) -> None:
    mesh = MeshShape(tuple("xyz"[:axes]), (2,) * axes)
    for monoids in (("sum",), ("max", "sum")):
        made = LayoutAlgebra(mesh, (rank,), monoids).layouts
        assert len(made) == count_layouts(axes, rank, len(monoids))
