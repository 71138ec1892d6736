"""Long searches: kept in a file, gone on with, and nothing that was found is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.engine.archive import Archive, Candidate
from tapestry_egg.extract.engine.race import Effort, race
from tapestry_egg.extract.front.front import Front
from tapestry_egg.files import search_file
from tapestry_egg.files.search_file import SearchFile
from tapestry_egg.graph.layout import MeshShape
from tests.extract.random_problems import ladder

MESHES = [MeshShape(("x", "y"), (2, 2))]


def step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        hidden = x
        for one in w:
            hidden = jnp.tanh(hidden @ one["up"]) @ one["down"]
        return jnp.mean(hidden**2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


def planned(path: Path | None, work: float, **given: Any) -> Front:
    def f32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    w = [{"up": f32(64, 256), "down": f32(256, 64)} for _ in range(2)]
    return te.optimize(
        te.trace(step, w, f32(512, 64), donate_argnums=0),
        "h100:4",
        mesh_shapes=MESHES,
        settings=te.Settings(work=work, merge=False, recompute=0, forms=0),
        resume=path,
        **given,
    )


def costs(front: Front) -> list[tuple[float, float, float]]:
    return [(p.costs.seconds, p.costs.peak_bytes, p.costs.joules) for p in front.plans]


@pytest.fixture(scope="module")
def first_search(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Front]:
    file = tmp_path_factory.mktemp("search") / "step.search.npz"
    return file, planned(file, 0.3)


@pytest.fixture
def searched(first_search: tuple[Path, Front], tmp_path: Path) -> tuple[Path, Front]:
    """A copy of the file of a search, and the front that it found."""
    return Path(shutil.copy(first_search[0], tmp_path)), first_search[1]


@pytest.mark.slow
def test_nothing_is_lost_and_bounds_rise(searched: tuple[Path, Front]) -> None:
    file, first = searched
    assert costs(first) == costs(planned(None, 0.3)), "the file changes no first search"
    again = planned(file, 0.3)
    for p in first.plans:
        near = [q for q in again.plans if q.costs.peak_bytes <= p.costs.peak_bytes * (1 + 1e-9)]
        # A front leaves out a plan for another that is a hundredth worse in one thing alone.
        assert min(q.costs.seconds for q in near or again.plans) <= p.costs.seconds * 1.0101
        same = [q for q in again.plans if q.costs == p.costs]
        assert all(q.bound >= p.bound * (1 - 1e-9) for q in same)
    assert again.epsilon <= first.epsilon
    assert SearchFile.open(file).runs == 2


@pytest.mark.slow
def test_a_search_of_no_work_keeps_what_was_found(searched: tuple[Path, Front]) -> None:
    file, first = searched
    assert len(first.plans) > len(planned(None, 0.01).plans)
    again = planned(file, 0.01).plans
    for p in first.plans:
        assert any(
            q.costs.seconds <= p.costs.seconds
            and q.costs.peak_bytes <= p.costs.peak_bytes
            and q.costs.joules <= p.costs.joules
            for q in again
        ), p


@pytest.mark.slow
def test_another_program_begins_anew_and_both_are_kept(searched: tuple[Path, Front]) -> None:
    file, _ = searched
    before = set(SearchFile.open(file).archives)
    other = te.optimize(
        te.trace(lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((64, 64), "f4")),
        "h100:4",
        settings=te.Settings(work=0.1),
        resume=file,
    )
    assert other.plans and before < set(SearchFile.open(file).archives)


@pytest.mark.long
def test_limits_that_no_known_plan_meets_are_searched_for(
    first_search: tuple[Path, Front], tmp_path: Path
) -> None:
    file = tmp_path / "short.search.npz"
    planned(file, 0.05)
    least = min(p.costs.peak_bytes for p in first_search[1].plans)
    front = planned(file, 0.3, limits={"peak_bytes": least * 1.001})
    assert front.plans[0].costs.peak_bytes <= least * 1.001


def kept(tmp_path: Path) -> tuple[SearchFile, Any]:
    problem = ladder(1, 90)  # too long to be closed
    (archive,) = race([problem], Effort(work=0.05))
    file = SearchFile(tmp_path / "ladder.search.npz")
    file.note([problem], [archive], ended=True)
    return file, problem


def test_a_search_goes_on_with_all_its_work_and_its_time(tmp_path: Path) -> None:
    """What it took before, and that time ended it, is of the search before."""
    file, problem = kept(tmp_path)
    (archive,) = file.archives.values()
    archive.by_clock, archive.spent = True, 3.0
    file.write()
    known = SearchFile.open(file.path).known(problem)
    assert known is not None and (known.by_clock, known.spent) == (False, 0.0)
    for one, other in zip(known.candidates, archive.candidates, strict=True):
        assert one.costs == pytest.approx(other.costs, rel=1e-12)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    file, problem = kept(tmp_path)
    read, wrote = SearchFile.open(file.path).known(problem), file.known(problem)
    assert read is not None and wrote is not None
    assert [c.costs for c in read.candidates] == [c.costs for c in wrote.candidates]
    assert read.cuts == wrote.cuts and len(read.places) == len(wrote.places) > 0
    assert SearchFile.open(file.path).known(ladder(2, 90)) is None


def test_costs_are_those_of_the_labelling_whatever_the_file_says(tmp_path: Path) -> None:
    file, problem = kept(tmp_path)
    archive = file.archives[file.digest(problem)]
    archive.candidates = [Candidate(c.rows, 1e-9, 1.0, 1.0) for c in archive.candidates]
    file.write()
    read = SearchFile.open(file.path).known(problem)
    assert read is not None
    for c in read.candidates:
        seconds, joules, profile = problem.evaluate(c.rows)
        assert c.costs == (seconds, profile.max(), joules)


def outside(rows: Any) -> Any:
    return np.full_like(rows, 99)


def negative(rows: Any) -> Any:
    return np.full_like(rows, -1)


def shorter(rows: Any) -> Any:
    return rows[:-1]


@pytest.mark.parametrize("wrong", [outside, negative, shorter])
def test_rows_of_no_such_problem_are_refused(wrong: Callable[[Any], Any], tmp_path: Path) -> None:
    file, problem = kept(tmp_path)
    archive = file.archives[file.digest(problem)]
    archive.candidates = [Candidate(wrong(c.rows), *c.costs) for c in archive.candidates]
    file.write()
    with pytest.raises(ExtractError, match="labelling of no such problem") as e:
        SearchFile.open(file.path).known(problem)
    assert str(file.path) in str(e.value) and "anew" in str(e.value)


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    file, _ = kept(tmp_path)
    path = tmp_path / "other.npz"
    with np.load(file.path) as arrays:
        whole = dict(arrays)
    heads: list[Any] = [
        {"tapestry_egg": "problem", "version": 1},
        {**json.loads(str(whole["head"])), "version": 99},
        [],
        7,
    ]
    for head in heads:
        np.savez(path, **{**whole, "head": np.array(json.dumps(head))})
        with pytest.raises(ExtractError, match="is no file of a search"):
            SearchFile.open(path)
    np.savez(path, **{k: v for k, v in whole.items() if not k.endswith("rows")})
    with pytest.raises(ExtractError, match="is no file of a search"):
        SearchFile.open(path)
    for junk in (b"", b"PK\x03\x04junk", b"{}"):
        path.write_bytes(junk)
        with pytest.raises(ExtractError, match="is no file of a search"):
            SearchFile.open(path)


def test_objects_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "pickled.npz"
    np.savez(path, head=np.array([object()]), allow_pickle=True)
    with pytest.raises(ExtractError, match="is no file of a search"):
        SearchFile.open(path)


def test_improvements_are_written_while_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, problem = kept(tmp_path)
    monkeypatch.setattr(search_file, "OFTEN", 0.0)
    before = file.known(problem)
    assert before is not None
    better = Candidate(before.candidates[0].rows, 1e-12, 1.0, 1e-12)
    file.note([problem], [Archive([better])], ended=False)
    read = SearchFile.open(file.path)
    assert len(read.archives[file.digest(problem)].cuts) == len(before.cuts), "bounds are kept"
    monkeypatch.setattr(search_file, "OFTEN", 1e9)
    file.archives.clear()
    file.note([problem], [Archive([better])], ended=False)
    assert not file.archives, "not so often"
