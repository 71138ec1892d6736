"""The report page, and plans and graphs as text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from tapestry_egg.columns import columns, percent
from tapestry_egg.extract.front.front import Front
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, Source, TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.plans.plan import BodyPlan, Costs, Plan, PlannedCollective, Strategy
from tapestry_egg.show.report import write_report
from tapestry_egg.show.text import graph_data, graph_text, plan_data, plan_text

VOID = {"meta", "path", "line", "circle", "rect"}


def made() -> Front:
    """Two plans of one negation: whole, and with its rows cut over the mesh."""
    type_ = TensorType((4, 8), "float32")
    operation = Operation("neg", (0,), (1,), source=Source("toy.py", 3, 7))
    graph = BlockGraph("toy <1>", (type_, type_), (operation,), (0,), (1,), input_names=("x",))
    whole, rows = Layout.replicated(2), Layout(((0,), ()))
    moved = PlannedCollective("all_gather", ("x",), 2, 1024, 512.0, 3, "%1", "output", "toy.py:3")
    plans = [
        Plan(
            name,
            MeshShape(("x",), (2,)),
            "cpu:2",
            BodyPlan(graph, (layout,), (layout,), (Strategy(cuts, (layout,), (layout,)),)),
            costs,
            bound=bound,
            collectives=collectives,
            rules=("cut",),
        )
        for name, layout, cuts, costs, bound, collectives in [
            ("whole", whole, ((), ()), Costs(0.002, 4096, 1.0), 0.002, ()),
            ("cut", rows, ((0,), ()), Costs(0.001, 8192, 1.0), 0.0, (moved,)),
        ]
    ]
    return Front(tuple(plans), target="cpu:2", graph_name="toy <1>")


class Page(HTMLParser):
    """Tags must close in order; collects ids, links, outside addresses and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert "src" not in given and not (given.get("href") or "#").startswith("http")
        self.ids |= {given["id"]} if given.get("id") else set()
        self.links |= {given["href"][1:]} if given.get("href") else set()  # type: ignore[index]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    path = write_report(made(), tmp_path / "out")
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    assert page.links == page.ids == {"whole", "cut"}
    for word in ("toy <1> on cpu:2", "2 ms", "8 KiB", "all_gather", "toy.py:3"):
        assert word in page.text
    assert {p.name for p in path.parent.iterdir()} == {"index.html", "front.svg"}


def test_a_plan_says_layouts_cuts_and_collectives() -> None:
    whole, cut = made().plans
    text = plan_text(cut, everything=True)
    assert "x  f32[4, 8]  [x, .]" in text
    assert "neg  0/x" in text and "toy.py:3:7" in text
    assert "all_gather  x         2      3  1.5 KiB  toy.py:3  %1  output" in text
    assert "proven bound            -\n" in text
    assert "neg  whole" in plan_text(whole, everything=True)
    assert "gap 0.0 %" in plan_text(whole)
    data = plan_data(cut)
    assert data["inputs"] == [{"name": "x", "layout": "[x, .]"}]
    assert data["collectives"][0]["payload_bytes"] == 1024


def test_a_graph_reads_like_a_jaxpr() -> None:
    graph = made().plans[0].graph
    lines = graph_text(graph).splitlines()
    assert lines[1] == "  %0 f32[4, 8] = input  x"
    assert lines[2] == "  %1 f32[4, 8] = neg(%0)  # toy.py:3:7"
    assert lines[3] == "  return %1"
    assert graph_data(graph)["kernels"] == {"neg": 1}


def test_regions_are_indented_and_counted() -> None:
    inner = made().plans[0].graph
    outer = BlockGraph(
        "loop", inner.values, (Operation("scan", (0,), (1,), regions=(inner,)),), (0,), (1,)
    )
    assert "      %1 f32[4, 8] = neg(%0)  # toy.py:3:7" in graph_text(outer).splitlines()
    assert graph_data(outer)["kernels"] == {"neg": 1, "scan": 1}


def test_columns_align() -> None:
    assert columns([["a", "1"], ["bb", "22"]], right=[1]) == "a    1\nbb  22"
    assert percent(0.05) == "5.0 %" and percent(float("inf")) == "-"
