"""The timeline: what the rules did, in their own names, with a front wherever it goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import tapestry_egg as te
from tapestry_egg.egraphs.timeline import TITLES, Tick, timeline_rows, timeline_text
from tapestry_egg.extract.front.front import Front
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rewrite.forms import forms
from tests.rewrite.equal_forms import BOOKS, H100, graph_of, struct, two

SHAPES = [MeshShape(("x",), (4,)), MeshShape(("x", "y"), (2, 2))]


@pytest.fixture(scope="module")
def front() -> Front:
    graph = graph_of(two, struct(512, 64), struct(64, 32), struct(64, 32))
    return optimize(graph, "h100:4", mesh_shapes=SHAPES, settings=Settings(work=0.1))


@pytest.mark.slow
def test_a_front_tells_what_rules_did_on_the_program_and_on_each_mesh(front: Front) -> None:
    subjects = list(dict.fromkeys(tick.subject for tick in front.timeline))
    forms = (len(subjects) - 1) // len(SHAPES)
    assert forms > 1
    assert set(subjects) == {
        "algebra",
        *map(str, SHAPES),
        *(f"{shape} form {k}" for k in range(2, forms + 1) for shape in SHAPES),
    }
    by_rule = {rule for tick in front.timeline for rule in tick.matches}
    assert {"sum-of-contractions-rhs", "all-gather"} <= by_rule
    for subject in set(subjects) - {"algebra"}:
        rows = [tick.rows for tick in front.timeline if tick.subject == subject]
        assert rows == sorted(rows) and rows[-1] > rows[0]


def test_it_is_saved_with_the_front(front: Front, tmp_path: Path) -> None:
    front.save(tmp_path / "front.json")
    assert te.load(tmp_path / "front.json").timeline == front.timeline


def test_a_front_without_one_loads(front: Front, tmp_path: Path) -> None:
    replace(front, timeline=()).save(tmp_path / "front.json")
    assert te.load(tmp_path / "front.json").timeline == ()


def test_the_command_and_the_report_show_it(front: Front, tmp_path: Path) -> None:
    from tapestry_egg.cli.app import app

    front.save(tmp_path / "front.json")
    ran = CliRunner().invoke(app, ["front", str(tmp_path / "front.json"), "--timeline"])
    assert ran.exit_code == 0 and ran.stdout.rstrip() == timeline_text(
        te.load(tmp_path / "front.json").timeline
    )
    page = front.report(tmp_path / "report").read_text()
    assert "sum-of-contractions-rhs 1" in page and "iteration by iteration" in page


def test_rules_on_the_bodies_of_loops_are_in_it() -> None:
    def loop(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.tanh(two(c, w, v)), None), x, length=3)[0]

    graph = graph_of(loop, struct(64, 16), struct(16, 16), struct(16, 16))
    found = forms(graph, BOOKS, H100)[0].timeline
    assert "sum-of-contractions-rhs" in {rule for tick in found for rule in tick.matches}


TICKS = (
    Tick("algebra", 900, 0.25, {"b": 2, "a": 2, "c": 7}, "algebra"),
    Tick("algebra", 900, 0.5, {}, "algebra"),
    Tick("algebra", 12345, 0.001, {f"r{k}": 10 - k for k in range(6)}, "algebra"),
    Tick("sharding", 7, 0.0, {"d": 1}, "x=2"),
)


def test_a_row_for_each_iteration_that_did_something_the_busiest_rules_first() -> None:
    assert timeline_rows(TICKS) == [
        ("algebra", "algebra", "1", "900", "0.250", "c 7, a 2, b 2"),
        ("algebra", "algebra", "3", "12 345", "0.001", "r0 10, r1 9, r2 8, r3 7, 2 more rules 11"),
        ("x=2", "sharding", "1", "7", "", "d 1"),
    ]
    lines = timeline_text(TICKS).splitlines()
    assert lines[0].startswith(TITLES[0]) and len(lines) == 4
    assert {line.find("c 7") for line in lines[1:2]} == {line.find("d 1") for line in lines[3:]}
