"""Pictures of plans: operations, kernels and collectives are all there, and boxes open pages."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.cli.app import main
from tapestry_egg.errors import GraphError
from tapestry_egg.plans.plan import BodyPlan, Plan
from tapestry_egg.show import pages as pages_module
from tapestry_egg.show.drawing import draw_plan
from tapestry_egg.show.pages import plan_pages
from tapestry_egg.show.picture import Page
from tapestry_egg.show.picture_svg import drawn_page, pages_svg

SVG = "{http://www.w3.org/2000/svg}"


def program(x: Any, ws: Any, v: Any) -> Any:
    """Two layers, a scan and a choice."""
    for k, w in enumerate(ws):
        with jax.named_scope(f"layer{k}"):
            x = jnp.tanh(x @ w) + 1.0
    x, _ = jax.lax.scan(lambda c, _: (jnp.sin(c @ v) * 2.0, None), x, None, length=3)
    return jax.lax.cond(x.sum() > 0, lambda y: jnp.exp(y) + y, lambda y: y * 3.0, x)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The one that pins make: weights cut by columns, so that something is sent."""
    given = te.trace(program, jnp.ones((8, 8)), [jnp.ones((8, 8))] * 2, jnp.ones((8, 8)))
    settings = te.Settings(work=0.05, workers=1, max_axes=1)
    pins = {"[1][*]": (None, "x"), "[2]": (None, "x")}
    front = te.optimize(given, "cpu:4", pins=pins, settings=settings)
    return next(p for p in front if p.collectives)


def bodies(body: BodyPlan) -> list[BodyPlan]:
    inner = [b for s in body.strategies for one in s.bodies for b in bodies(one)]
    return [body, *inner]


def by_kernels(pages: tuple[Page, ...]) -> list[Page]:
    """Pages of kernels: not those of groups or branches, nor what is inside a kernel."""
    kinds = {i.opens: i.kind for p in pages for i in p.picture.items if i.opens}
    return [
        p
        for p in pages
        if kinds.get(p.id) != "kernel" and not any(i.kind == "group" for i in p.picture.items)
    ]


@pytest.mark.parametrize("most", [2, 24])
def test_every_operation_and_collective_has_its_place(
    plan: Plan, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module._Body, "most", most)
    pages = plan_pages(plan)
    assert any(i.kind == "group" for i in pages[0].picture.items) == (most == 2)
    drawn = Counter(
        name
        for page in by_kernels(pages)
        for item in page.picture.items
        if item.kind in ("operation", "kernel", "region") and "operation" in item.title
        for name in item.title.partition(": ")[2].partition(",")[0].split(" + ")
    )
    every = Counter(op.kernel for b in bodies(plan.body) for op in b.graph.operations)
    assert drawn == every and {"dot_general", "scan", "cond"} <= set(every)
    said = Counter(
        words.partition(":")[0]
        for page in by_kernels(pages)
        for link in page.picture.links
        if link.sends
        for words in link.title.split("; ")
    )
    shown = Counter(f"{c.kind} of {c.value} over {', '.join(c.axes)}" for c in plan.collectives)
    assert said == shown and plan.collectives


def test_kernels_are_those_of_the_plan(plan: Plan) -> None:
    fused = {n for n, k in Counter(plan.body.groups).items() if n >= 0 and k > 1}
    assert sum(i.kind == "kernel" for i in plan_pages(plan)[0].picture.items) == len(fused) > 0


def test_boxes_open_pages_that_lead_back(plan: Plan) -> None:
    pages = plan_pages(plan)
    opened = {i.opens: p.id for p in pages for i in p.picture.items if i.opens}
    assert pages[0].parent == "" and {p.id: p.parent for p in pages[1:]} == opened
    titles = {p.picture.title for p in pages}
    assert {"body of scan", "branch 0 of cond", "branch 1 of cond"} <= titles


def test_a_layout_has_one_colour_and_the_legend_says_it(plan: Plan) -> None:
    pages = plan_pages(plan)
    colours: dict[str, set[str]] = {}
    for page in pages:
        words = dict(page.picture.legend)
        for item in page.picture.items:
            if item.kind == "tensor" and len(item.lines) == 3:
                colours.setdefault(item.lines[2], set()).add(item.fill)
                assert words[item.fill] in (item.lines[2], "replicated")
    assert all(len(found) == 1 for found in colours.values())
    cut = [fill for layout, (fill,) in colours.items() if "x" in layout]
    assert len(set(cut)) == len(cut) > 1


def test_arrows_say_what_one_device_sends(plan: Plan) -> None:
    labels = [k.label for page in by_kernels(plan_pages(plan)) for k in page.picture.links]
    for c in plan.collectives:
        assert any(label.startswith(f"{c.kind} x ") for label in labels)
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    assert gathers and "all_gather x 192 B" in labels  # three of four blocks of 8 x 2 floats


def test_the_svg_shows_one_page_and_loads_nothing(plan: Plan, tmp_path: Path) -> None:
    path = draw_plan(plan, tmp_path / "p.svg")
    text = path.read_text("utf-8")
    shown = [
        g.get("display", "inline")
        for g in ElementTree.fromstring(text).iter(f"{SVG}g")
        if g.get("data-page")
    ]
    assert shown == ["inline", *["none"] * (len(shown) - 1)] and len(shown) > 5
    assert not re.search(r"https?://|@import|url\((?!#)", text.replace(SVG[1:-1], ""))
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    first = plan_pages(plan)[0]
    assert "<script" in text and "<script" not in pages_svg([drawn_page(first, {})])
    assert draw_plan(plan, tmp_path / "p.dot").read_text("utf-8").startswith("digraph")
    with pytest.raises(GraphError, match="png"):
        draw_plan(plan, tmp_path / "p.png")


def test_the_command_line_draws_plans(plan: Plan, tmp_path: Path) -> None:
    te.save(plan, tmp_path / "p.json")
    with pytest.raises(SystemExit) as end:
        main(["show", str(tmp_path / "p.json"), "--svg", str(tmp_path / "p.svg")])
    assert not end.value.code and "data-opens" in (tmp_path / "p.svg").read_text("utf-8")
