"""The report page, and plans and graphs as text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zlib
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import msgspec
import pytest

import tapestry_egg as te
from models import mlp
from tapestry_egg import report
from tapestry_egg.cli.app import main
from tapestry_egg.cli.searches import summary as summary_line
from tapestry_egg.columns import WIDEST, columns, lines_of, percent
from tapestry_egg.errors import PlanError
from tapestry_egg.extract.certify.legality import tensor_blocks
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.notes import INTERRUPTED, note
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, Source, TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.pipeline.batch import Outcome
from tapestry_egg.plans.plan import BodyPlan, Costs, Plan, PlannedCollective, Strategy
from tapestry_egg.report.page_data import packed, page_data
from tapestry_egg.report.report import write_report
from tapestry_egg.report.runs import Run, baselines, load_runs
from tapestry_egg.show import picture as picture_module
from tapestry_egg.show.chart import front_svg
from tapestry_egg.show.pages import plan_pages
from tapestry_egg.show.picture_svg import DrawnPage, drawn_page
from tapestry_egg.show.plot import front_info
from tapestry_egg.show.text import graph_data, graph_text, plan_data, plan_text

COLLECTIVE = PlannedCollective("all_gather", ("x",), 2, 1024, 512.0, 3, "%1", "output", "toy.py:3")
VOID = {"meta", "path", "line", "circle", "rect"}


def made() -> Front:
    """Two plans of one negation: whole, and with its rows cut over the mesh."""
    type_ = TensorType((4, 8), "float32")
    operation = Operation("neg", (0,), (1,), source=Source("toy.py", 3, 7))
    graph = BlockGraph("toy <1>", (type_, type_), (operation,), (0,), (1,), input_names=("x",))
    whole, rows = Layout.replicated(2), Layout(((0,), ()))
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
            ("cut", rows, ((0,), ()), Costs(0.001, 8192, 1.0), 0.0, (COLLECTIVE,)),
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
        assert "src" not in given and (given.get("href") or "#").startswith("#")
        self.ids |= {given["id"]} if given.get("id") else set()
        self.links |= {given["href"][1:]} if given.get("href") else set()  # type: ignore[index]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


IDS = {"across", "up", "chart", "said", "plan", "from", "to", "difference", "data"}


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    path = write_report(made(), tmp_path / "out")
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == {"whole", "cut"} and page.ids == IDS
    for word in ("toy <1> on cpu:2", "2 ms", "8 KiB", "all_gather", "toy.py:3"):
        assert word in page.text
    assert {p.name for p in path.parent.iterdir()} == {"index.html", "front.svg"}
    without = text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|import\(", without)
    assert {"from", "to", "plan"} <= set(re.findall(r'find\("(\w+)"\)', text)) <= IDS | {"shown"}


def test_what_was_not_searched_stands_below_a_heading_of_its_own(tmp_path: Path) -> None:
    notes = (INTERRUPTED, note("mesh-axes", 2, axes=2))
    text = write_report(replace(made(), notes=notes), tmp_path / "out.html").read_text("utf-8")
    assert f"<p>{INTERRUPTED}</p>" in text
    heading, items = text.split('<h2 id="not-searched">')[1].split("</h2>", 1)
    assert heading == "Not searched" and items.startswith("<ul><li>2 mesh shapes of")
    assert "--max-axes" in items
    assert 'id="not-searched"' not in write_report(made(), tmp_path / "o.html").read_text("utf-8")


def test_no_view_gives_a_gap_without_its_mark_where_it_is_not_proven(tmp_path: Path) -> None:
    front = made()
    whole, cut = front.plans
    merged = replace(
        cut, body=replace(cut.body, merged=(((0, cut.body.inputs[0]),) * 2,)), bound=0.0008
    )
    assert whole.is_proven and not merged.is_proven
    front = replace(front, plans=(whole, merged))
    assert [row["proven"] for row in front.table()] == [True, False]
    assert [line.split(",")[-2] for line in front.csv().splitlines()] == ["proven", "True", "False"]
    assert [plan_data(p)["proven"] for p in front.plans] == [True, False]
    assert "~25.00%" in str(front) and "~25.00%" in plan_text(merged)
    assert front.gap_shown == "~25.00%" and replace(front, plans=(whole,)).gap_shown == "0.00%"
    assert made().gap_shown == "-"  # no bound of one
    assert [p["gap"] for p in page_data(front)["plans"]] == ["0.00%", "~25.00%"]
    assert "~25.00%" in write_report(front, tmp_path / "p.html").read_text("utf-8")
    picture = front_svg(front_info(front))
    assert "each within ~25 % of its bound" in picture
    assert "gap ~25 %" in picture and "gap 0 %" in picture
    proven = [p.is_proven for p in front.plans]
    outcome = Outcome("toy", 2, gap=0.25, proven=all(proven))
    assert "gap ~25.00%" in summary_line(outcome)
    assert "gap 25.00%" in summary_line(replace(outcome, proven=True))


def test_a_report_is_a_file_where_it_is_named_so(tmp_path: Path) -> None:
    path = made().report(tmp_path / "toy.html")
    assert [p.name for p in tmp_path.iterdir()] == [path.name] == ["toy.html"]


def test_nothing_in_a_program_ends_the_script(tmp_path: Path) -> None:
    front = made()
    evil = "</script><script>alert(1)</script>"
    plans = tuple(replace(p, collectives=(replace(COLLECTIVE, value=evil),)) for p in front.plans)
    path = write_report(replace(front, plans=plans, graph_name=evil), tmp_path)
    text = path.read_text("utf-8")
    assert text.count("</script>") == 2 and "<script>alert" not in text
    (data,) = re.findall(r'id="data">(.*)</script>', text)
    assert any(evil in t for t in json.loads(data)["texts"])


@pytest.fixture(scope="module")
def trained() -> Front:
    step, args = mlp.example()
    return te.optimize(te.trace(step, *args), "h100:8", settings=te.Settings(work=0.2, workers=1))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_runs_and_shows_every_plan(trained: Front, tmp_path: Path) -> None:
    run = msgspec.convert(run_of(trained[0]), Run)
    by_hand = tuple(baselines(trained, [("by hand", trained[1])]))
    text = write_report(trained, tmp_path, {trained[0].name: run}, by_hand).read_text("utf-8")
    (data,) = re.findall(r'id="data">(.*)</script>', text)
    (tmp_path / "data.json").write_text(data)
    script = Path(report.__file__).with_name("page.js")
    stub = Path(__file__).with_name("stub.js")
    done = subprocess.run(
        ["node", str(stub), str(script), str(tmp_path / "data.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = json.loads(done.stdout)
    assert shown["dots"] == len(trained) + 1 == len(shown["shown"])
    assert "by hand (baseline) on " in shown["shown"].pop()
    assert shown["differences"].pop() == "Choose two plans.", "the last one, from itself"
    assert shown["numbers"] == []
    assert shown["ticks"] == [n << 20 for n in (32, 48, 64, 96)]  # of bytes: binary marks
    for plan, words in zip(trained, shown["shown"], strict=True):
        with lines_of(WIDEST):
            assert plan.explain() in words
        assert all(c.kind in words for c in plan.collectives)
    assert len(set(shown["walked"])) == len(trained) + 1, "arrow keys reach every plan"
    compiled = ["Planned against compiled" in words for words in shown["shown"]]
    assert compiled == [True] + [False] * (len(trained) - 1)
    assert "all_gather 2 1 KiB 1.5 KiB +512 B" in shown["shown"][0]
    for plan, words in zip(trained, shown["differences"], strict=True):
        assert plan.name in words
    for (axes, dims, blocks, cells), (plan, name) in zip(
        shown["blocks"], kinds(trained, data), strict=True
    ):
        mesh = MeshShape(*(tuple(x) for x in zip(*axes, strict=True)))
        assert mesh == plan.mesh
        layout = plan.in_shardings[plan.graph.input_names.index(name)]
        assert [list(d) for d in layout.dims] == dims
        begins, _ = tensor_blocks(layout, tensor_of(plan, name).shape, mesh)
        for k, of in enumerate(blocks):
            size = max(1, tensor_of(plan, name).shape[k] // mesh.parts(layout.dims[k]))
            assert of == (begins[:, k] // size).tolist()
        held = {d: (r, c) for r, row in enumerate(cells) for c, one in enumerate(row) for d in one}
        together = {
            (a, b)
            for a in range(mesh.devices)
            for b in range(mesh.devices)
            if (begins[a] == begins[b]).all()
        }
        assert {(a, b) for a in held for b in held if held[a] == held[b]} == together


def kinds(front: Front, data: str) -> list[tuple[Plan, str]]:
    """Plans and arguments in the order of the page's drawings."""
    found = json.loads(data)
    return [
        (plan, found["texts"][row[0]])
        for plan, told in zip((*front, front[1]), found["plans"], strict=True)
        for row in told["inputs"]
    ]


def tensor_of(plan: Plan, name: str) -> TensorType:
    return plan.graph.values[plan.graph.inputs[plan.graph.input_names.index(name)]]


@pytest.mark.slow
def test_the_data_of_a_page_adds_up(trained: Front) -> None:
    for plan, told in zip(trained, page_data(trained)["plans"], strict=True):
        seconds = sum(row[1] for row in told["parts"])
        assert seconds == pytest.approx(plan.costs.serial_seconds, rel=1e-3)
        assert sum(row[2] for row in told["moves"]) == pytest.approx(plan.costs.wire_bytes)
        assert max(amount for _, amount in told["memory"]) == plan.costs.peak_bytes
        assert sum(amount for _, amount in told["holds"]) == plan.costs.peak_bytes
        bars = [bar for _, some in told["lanes"] for bar in some]
        assert max(bar[1] for bar in bars) == pytest.approx(plan.costs.seconds, rel=1e-3)
        assert all(a <= b for a, b, _ in bars)
        assert sum(row[-1] for row in told["inputs"]) == len(plan.graph.inputs)


def run_of(plan: Plan, /, **changed: object) -> dict[str, object]:
    """What `run --json` prints of a plan that sent more than it planned."""
    sent = {"kind": "all_gather", "group": 2, "planned_bytes": 1024, "compiled_bytes": 1536}
    told = {
        **{"plan": plan.name, "mesh": str(plan.mesh), "platform": "cpu", "ok": False},
        **{"seconds": 0.003, "original_seconds": 0.001, "collectives": [sent]},
        **{"planned_peak_bytes": plan.costs.peak_bytes, "compiled_peak_bytes": 4 << 20},
        **{"differing": [], "differences": {}},
    }
    return {**told, **changed}


def test_runs_are_those_of_plans_of_the_front(tmp_path: Path) -> None:
    front, path = made(), tmp_path / "run.json"
    path.write_text(json.dumps(run_of(front["cut"])))
    runs = load_runs(front, [path])
    whole, cut = page_data(front, runs)["plans"]
    assert whole["run"] is None and cut["run"]["compiled_peak_bytes"] == 4 << 20
    assert cut["run"]["collectives"][0]["planned_bytes"] == 1024
    other = ({"plan": "p9"}, {"mesh": "4x"}, {"planned_peak_bytes": 1})
    for wrong in other:
        path.write_text(json.dumps(run_of(front["cut"], **wrong)))
        with pytest.raises(PlanError, match="the front does not have"):
            load_runs(front, [path])
    for text in ("{", "[]", json.dumps(run_of(front["cut"], seconds="long"))):
        path.write_text(text)
        with pytest.raises(PlanError, match="holds no run"):
            load_runs(front, [path])


def test_baselines_stand_beside_the_front(tmp_path: Path) -> None:
    front = made()
    whole, cut = front.plans
    beside = tuple(baselines(front, [("by hand", whole), ("pinned", replace(front, plans=(cut,)))]))
    assert [p.name for p in beside] == ["by hand", "pinned"] and not any(p.bound for p in beside)
    told = page_data(replace(front, original=replace(whole, name="own")), None, beside)["plans"]
    assert [p["kind"] for p in told] == ["", "", "as given", "baseline", "baseline"]
    assert [p["gap"] for p in told[3:]] == ["-", "-"] and told[3]["costs"] == told[0]["costs"]
    text = write_report(front, tmp_path / "b.html", None, beside).read_text("utf-8")
    assert '<a href="#by hand">' in text
    named = {"by hand": whole, "pinned": replace(front, plans=(cut,))}
    assert front.report(tmp_path / "c.html", baselines=named).read_text("utf-8") == text
    for name in ("cut", ""):
        with pytest.raises(PlanError, match="is taken"):
            list(baselines(front, [(name, whole)]))
    with pytest.raises(PlanError, match="other machine"):
        list(baselines(front, [("tpu", replace(whole, target="v5e:2x4"))]))
    graph = replace(whole.body.graph, input_names=("y",))
    other = replace(whole, body=replace(whole.body, graph=graph))
    with pytest.raises(PlanError, match="other arguments"):
        list(baselines(front, [("y", other)]))


def unpacked(text: str) -> str:
    return zlib.decompress(b64decode(text)).decode("utf-8")


@pytest.mark.slow
def test_pictures_of_plans_are_packed_while_there_is_room(
    trained: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = plan_pages(trained[0])
    (whole, left), *_ = packed([trained[0]])
    assert left == 0 and unpacked(whole).count("data-page=") == len(pages) > 3
    counts = set()
    for twelfths in range(2, 12):
        monkeypatch.setattr("tapestry_egg.report.page_data.ROOM", len(whole) * twelfths // 12)
        (some, left), *_ = packed([trained[0]])
        svg = unpacked(some)
        there = re.findall('data-page="([^"]+)"', svg)
        assert len(there) == len(pages) - left and len(some) < len(whole)
        assert set(re.findall('data-parent="([^"]+)"', svg)) <= set(there)
        counts.add(len(there))
    assert len(counts) > 4
    monkeypatch.setattr("tapestry_egg.report.page_data.ROOM", 4 * len(whole))
    large = next(p for p in pages if p.parent and any(q.parent == p.id for q in pages))
    noise = Random(0).randbytes(8 * len(whole)).hex()

    def heavy(page: picture_module.Page, by: Mapping[str, picture_module.Page]) -> DrawnPage:
        one = drawn_page(page, by)
        return replace(one, text=one.text + noise) if page == large else one

    monkeypatch.setattr("tapestry_egg.report.page_data.drawn_page", heavy)
    there = re.findall('data-page="([^"]+)"', unpacked(packed([trained[0]])[0][0]))
    gone = {p.id for p in pages if large.id in (p.id, p.parent)}  # it has no deeper ones
    assert set(there) == {p.id for p in pages} - gone and len(gone) > 1
    monkeypatch.setattr("tapestry_egg.report.page_data.ROOM", 0)
    assert unpacked(packed([trained[0]])[0][0]).count("data-page=") == 1, "the program, always"


@pytest.mark.slow
def test_reports_are_written_from_the_command_line(trained: Front, tmp_path: Path) -> None:
    trained.save(tmp_path / "mlp.front.json")
    (tmp_path / "run.json").write_text(json.dumps(run_of(trained[0])))
    with pytest.raises(SystemExit) as end:
        front, run = str(tmp_path / "mlp.front.json"), str(tmp_path / "run.json")
        main(["report", front, "--run", run, "--baseline", f"fastest={front}", "--recipes"])
    assert '<a href="#data parallel">' in (tmp_path / "mlp.html").read_text("utf-8")
    assert '<a href="#fastest">' in (tmp_path / "mlp.html").read_text("utf-8")
    assert '"compiled_bytes":1536' in (tmp_path / "mlp.html").read_text("utf-8")
    assert end.value.code == 0 and (tmp_path / "mlp.html").stat().st_size < 1 << 20


def test_a_plan_says_layouts_cuts_and_collectives() -> None:
    whole, cut = made().plans
    text = plan_text(cut, everything=True)
    assert "x  f32[4, 8]  [x, .]" in text
    assert "neg  toy.py:3:7  0/x" in text
    assert "all_gather  x         3  1.5 KiB  toy.py:3  %1  output" in text
    assert "bound of the search     -\n" in text
    assert "neg  toy.py:3:7  whole" in plan_text(whole, everything=True)
    assert "gap 0.00%" in plan_text(whole)
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


def test_a_path_that_looks_like_a_layout_is_broken_as_words_are() -> None:
    """`[1]` is an argument: the column of paths gives way, and no line is longer than asked."""
    rows = [["[1]", "[x, .]", "a"], ["[0][1]['kernel']['a_long_name']", "[., .]", "b"]]
    assert max(map(len, columns(rows, width=30).split("\n"))) <= 30
    assert "[x, .]" in columns([["[x, .]"], ["a b c d e f g h i j k l m n"]], width=8)
