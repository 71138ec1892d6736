"""Drawings read back from their SVG: boxes, arrows and ranges are those of the graph."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import tapestry_egg as te
from tapestry_egg.cli.app import app, main
from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.groups import grouped
from tapestry_egg.plans.plan import BodyPlan, Plan
from tapestry_egg.show import pages as pages_module
from tapestry_egg.show.drawing import draw, draw_plan, parse_cover
from tapestry_egg.show.layout import Edge, by_dot, layered, placed, ranks
from tapestry_egg.show.pages import MOST_GROUPS, MOST_SHARDS, Covers, graph_pages, plan_pages
from tapestry_egg.show.picture import Item, Link, Page, Picture, dot_text
from tapestry_egg.show.picture_svg import drawn_page, pages_svg

SVG = "{http://www.w3.org/2000/svg}"


def linear_relu(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.relu(x @ w + b)


@pytest.fixture(scope="module")
def linear() -> BlockGraph:
    """The worked example: x[100, 12] through a layer of 32 features, and a relu."""
    shapes = [(100, 12), (12, 32), (32,)]
    return te.trace(linear_relu, *(jax.ShapeDtypeStruct(s, "float32") for s in shapes)).graph


def four_shards(graph: BlockGraph) -> dict[Any, Any]:
    texts = {"dot_general": "m=2,n=2", "max": "i0=2,i1=2"}
    return dict(
        parse_cover(graph, f"{i}:{texts[op.kernel]}")
        for i, op in enumerate(graph.operations)
        if op.kernel in texts
    )


def graph_picture(
    graph: BlockGraph, covers: Covers | None = None, operations: range | None = None
) -> Picture:
    """The first page."""
    return graph_pages(graph, covers, operations)[0].picture


def test_a_place_is_the_name_of_its_file_and_its_line(linear: BlockGraph) -> None:
    """Not the whole path, which others need not have."""
    places = [item.title for item in graph_picture(linear).items if item.title]
    assert any("test_drawing.py:" in place for place in places)
    assert not any(str(Path(__file__).parent) in place for place in places)


def titled(pages: tuple[Page, ...], title: str) -> Picture:
    (found,) = (p.picture for p in pages if p.picture.title == title)
    return found


def own(picture: Picture) -> ElementTree.Element:
    return ElementTree.fromstring(pages_svg([drawn_page(Page("p", "", picture), {})]))


def items(svg: ElementTree.Element) -> dict[str, list[str]]:
    """Id of every box -> its lines of text."""
    found = {}
    for group in svg.iter(f"{SVG}g"):
        if group.get("class", "").startswith("item "):
            found[group.attrib["id"]] = [str(t.text) for t in group.iter(f"{SVG}text")]
    return found


def links(svg: ElementTree.Element) -> list[tuple[str, str, str]]:
    """Every arrow as (from, to, label), where boxes go by their first lines."""
    names = {id: lines[0] for id, lines in items(svg).items()}
    out = []
    for group in svg.iter(f"{SVG}g"):
        if group.get("class") == "link":
            label = "".join(str(t.text) for t in group.iter(f"{SVG}text"))
            out.append(
                (names[group.attrib["data-source"]], names[group.attrib["data-target"]], label)
            )
    return out


def boxes(svg: ElementTree.Element, kind: str) -> dict[str, tuple[float, ...]]:
    """Left, top, right and bottom of items."""
    out = {}
    for group in svg.iter(f"{SVG}g"):
        if group.get("class", "").startswith(kind):
            rect = group.find(f"{SVG}rect")
            assert rect is not None
            x, y, w, h = (float(rect.attrib[a]) for a in ("x", "y", "width", "height"))
            out[group.attrib["id"]] = (x, y, x + w, y + h)
    return out


def on_border(box: tuple[float, ...], at: Sequence[float]) -> bool:
    left, top, right, bottom = box
    edges = [at[0] - left, right - at[0], at[1] - top, bottom - at[1]]
    return min(edges) == pytest.approx(0, abs=0.5)


# ---- content -----------------------------------------------------------------------------------


def test_the_logical_graph(linear: BlockGraph) -> None:
    """The bias is broadcast: a view, so its arrow says how it is read and no box is drawn."""
    svg = own(graph_picture(linear))
    lines = list(items(svg).values())
    assert sorted(line[0] for line in lines) == sorted(
        ["[0]", "[1]", "[2]", "dot_general", "add", "max", "%4", "%6", "output"]
    )
    assert ["[0]", "f32[100, 12]"] in lines
    assert ["dot_general", "m 100, n 32, k 12 sum"] in lines
    assert sorted(links(svg)) == sorted(
        [
            ("[0]", "dot_general", ""),
            ("[1]", "dot_general", ""),
            ("dot_general", "%4", ""),
            ("%4", "add", ""),
            ("[2]", "add", "as [1, 32] by [i1]"),
            ("add", "%6", ""),
            ("%6", "max", ""),
            ("max", "output", ""),
        ]
    )


def test_the_sharded_graph_has_the_ranges_on_its_arrows(linear: BlockGraph) -> None:
    svg = own(graph_picture(linear, four_shards(linear)))
    drawn = links(svg)
    rows, columns = ["0:50", "50:100"], ["0:16", "16:32"]
    assert Counter(drawn)[("[0]", "dot_general", "[0:50, 0:12]")] == 2
    wanted = Counter(
        [("[0]", "dot_general", f"[{r}, 0:12]") for r in rows for _ in columns]
        + [("[1]", "dot_general", f"[0:12, {c}]") for _ in rows for c in columns]
        + [("dot_general", "%4", f"[{r}, {c}]") for r in rows for c in columns]
        + [("%6", "max", f"[{r}, {c}]") for r in rows for c in columns]
        + [("max", "output", f"[{r}, {c}]") for r in rows for c in columns]
    )
    assert Counter(d for d in drawn if d[2].startswith("[")) == wanted
    shards = [lines for lines in items(svg).values() if lines[0] == "dot_general"]
    assert shards == [["dot_general", f"[{r}, {c}, 0:12]"] for r in rows for c in columns]


def test_shards_of_a_reduced_dim_write_partial_values() -> None:
    graph = te.trace(lambda x: x.sum(0), jnp.ones((6, 4))).graph
    cover = dict([parse_cover(graph, "0:r=3")])
    drawn = links(own(graph_picture(graph, cover)))
    assert [d for d in drawn if d[1] == "output"] == [("reduce_sum", "output", "[0:4] +sum")] * 3
    assert [d[2] for d in drawn if d[0] == "[0]"] == ["[0:2, 0:4]", "[2:4, 0:4]", "[4:6, 0:4]"]


def test_shards_that_read_a_view_say_what_of_its_base() -> None:
    """Rows of the transpose are columns of x; the second half of every second one."""
    graph = te.trace(lambda x: jnp.sin(x.T[::2]), jnp.ones((6, 8))).graph
    sine = [op.kernel for op in graph.operations].index("sin")
    drawn = links(own(graph_picture(graph, dict([parse_cover(graph, f"{sine}:i0=2")]))))
    assert [d[2] for d in drawn if d[0] == "[0]"] == [
        "[0:6, 0:3] as [4, 6] by [i1, 2i0]",
        "[0:6, 4:7] as [4, 6] by [i1, 2i0]",
    ]


def test_many_shards_are_not_drawn_one_by_one(linear: BlockGraph) -> None:
    cover = dict([parse_cover(linear, "0:m=25,n=2")])
    lines = list(items(own(graph_picture(linear, cover))).values())
    shards = [line for line in lines if line[0] == "dot_general"]
    assert len(shards) == MOST_SHARDS - 1
    assert ["35 more", "within [28:100, 0:32, 0:12]"] in lines


def test_some_operations_of_a_graph(linear: BlockGraph) -> None:
    picture = graph_picture(linear, operations=range(2, 3))
    assert [lines[0] for lines in items(own(picture)).values()] == ["add", "%4", "[2]", "%6"]
    assert picture.subtitle == "1 operation of 4"
    view = graph_picture(linear, operations=range(1, 2))
    assert [lines[0] for lines in items(own(view)).values()] == ["broadcast_in_dim", "[2]", "%5"]
    for bad in (range(3, 9), range(0, 4, 2), range(3, 2)):
        with pytest.raises(GraphError, match="not among"):
            graph_picture(linear, operations=bad)


def control_flow(x: Any) -> Any:
    carried, _ = jax.lax.scan(lambda c, v: (c + jnp.sin(v), v), jnp.zeros(4), x)
    chosen = jax.lax.cond(carried[0] > 0, jnp.tanh, jnp.cos, carried)
    return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: c * 2, chosen)


def test_regions_open_their_graphs() -> None:
    pages = graph_pages(te.trace(control_flow, jnp.ones((3, 4))).graph)
    parents = {p.picture.title: p.parent for p in pages}
    by = {p.id: p.picture.title for p in pages}
    assert {title: by.get(parent, "") for title, parent in parents.items()} == {
        "control_flow": "",
        "body of scan": "control_flow",
        "cond": "control_flow",
        "branch 0 of cond": "cond",
        "branch 1 of cond": "cond",
        "while": "control_flow",
        "condition of while": "while",
        "body of while": "while",
    }
    inside = {
        "sin": "body of scan",
        "tanh": "branch 1 of cond",
        "cos": "branch 0 of cond",
        "lt": "condition of while",
    }
    for page in pages:
        for lines in items(own(page.picture)).values():
            assert inside.get(lines[0], page.picture.title) == page.picture.title
    first = links(own(pages[0].picture))
    assert [a for a, b, _ in first if b == "scan"].count("[0]") == 1
    opened = {i.lines[0]: by[i.opens] for i in pages[0].picture.items if i.opens}
    assert opened == {"scan": "body of scan", "cond": "cond", "while": "while"}


def test_an_operation_of_a_region_is_drawn_in_shards() -> None:
    graph = te.trace(control_flow, jnp.ones((3, 4))).graph
    loop = [op.kernel for op in graph.operations].index("scan")
    body = graph.operations[loop].regions[0]
    sine = [op.kernel for op in body.operations].index("sin")
    (_, halves) = parse_cover(body, f"{sine}:i=2")
    svg = own(titled(graph_pages(graph, {(loop, 0, sine): halves}), "body of scan"))
    assert [lines[1] for lines in items(svg).values() if lines[0] == "sin"] == ["[0:2]", "[2:4]"]


def deep(x: Any, ws: Any) -> Any:
    for k, w in enumerate(ws):
        with jax.named_scope(f"layer{k}"):
            with jax.named_scope("dense"):
                x = x @ w
            with jax.named_scope("norm"):
                x = jnp.tanh(x) - x.mean(0) * jnp.exp(x)
    return x


@pytest.fixture(scope="module")
def many() -> BlockGraph:
    return te.trace(deep, jnp.ones((4, 4)), [jnp.ones((4, 4))] * 12).graph


def test_a_large_graph_is_drawn_by_scope(many: BlockGraph) -> None:
    """Twelve layers of two scopes are more than 20 groups; each has what enters it beside it."""
    assert len(many.operations) > 60
    pages = graph_pages(many)
    svg = own(pages[0].picture)
    groups = {i.lines[0] for i in pages[0].picture.items if i.kind == "group"}
    assert groups == {f"layer{k}" for k in range(12)} and len(groups) <= MOST_GROUPS
    drawn = links(svg)
    for k in range(12):
        assert (f"[1][{k}]" if k else "2 tensors", f"layer{k}", "") in drawn
    assert all((f"layer{k}", f"layer{k + 1}", "f32[4, 4]") in drawn for k in range(11))
    assert ("layer11", "output", "") in drawn
    inner = Counter(
        i.title.split(": ")[1].split(",")[0]
        for p in pages[1:]
        for i in p.picture.items
        if i.kind == "operation"
    )
    every = Counter(op.kernel for op in many.operations)
    assert not set(inner) - set(every) and inner["dot_general"] == every["dot_general"] == 12


def test_a_covered_operation_of_a_large_graph_is_drawn_in_shards(many: BlockGraph) -> None:
    number = [op.kernel for op in many.operations].index("dot_general")
    pages = graph_pages(many, dict([parse_cover(many, f"{number}:m=2")]))
    drawn = links(own(titled(pages, "layer0")))
    value = f"%{many.operations[number].outputs[0]}"
    assert [d[2] for d in drawn if d[:2] == ("dot_general", value)] == ["[0:2, 0:4]", "[2:4, 0:4]"]
    assert any(source == value for source, _, _ in drawn)


@given(st.integers(1, 30))
def test_groups_hold_every_operation_once_in_order(many: BlockGraph, most: int) -> None:
    found = grouped(many, range(len(many.operations)), most)
    assert [i for _, numbers in found for i in numbers] == list(range(len(many.operations)))


# ---- layout ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["logical", "sharded", "regions", "large"])
def test_boxes_and_labels_lie_apart_and_arrows_point_down(
    case: str, linear: BlockGraph, many: BlockGraph
) -> None:
    picture = {
        "logical": lambda: graph_picture(linear),
        "sharded": lambda: graph_picture(linear, four_shards(linear)),
        "regions": lambda: graph_picture(te.trace(control_flow, jnp.ones((3, 4))).graph),
        "large": lambda: graph_picture(many),
    }[case]()
    svg = own(picture)
    places = boxes(svg, "item")
    for a, b in combinations(places.values(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    width, height = (float(svg.attrib[a]) for a in ("width", "height"))
    assert all(-1 <= a and -1 <= b and c <= width and d <= height for a, b, c, d in places.values())
    for group in svg.iter(f"{SVG}g"):
        if group.get("class") == "link":
            source, target = (
                places[group.attrib["data-source"]],
                places[group.attrib["data-target"]],
            )
            assert source[3] < target[1]
            (path,) = group.iter(f"{SVG}path")
            numbers = [float(n) for n in re.findall(r"-?[\d.]+", path.attrib["d"])]
            assert on_border(source, numbers[:2]) and on_border(target, numbers[-2:])
            for text in group.iter(f"{SVG}text"):
                x, y = float(text.attrib["x"]), float(text.attrib["y"])
                assert not any(a < x < c and b < y < d for a, b, c, d in places.values())


@pytest.mark.slow
@given(st.data())
def test_layers_of_any_graph_without_cycles(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] < p[1])
    edges = data.draw(st.lists(pairs, max_size=14)) if n > 1 else []
    rank = ranks(n, edges)
    assert all(rank[a] < rank[b] for a, b in edges)
    for v in range(n):  # nothing stands lower than it must, but for what only others wait for
        above = [rank[a] for a, b in edges if b == v]
        below = [rank[b] for a, b in edges if a == v]
        assert rank[v] == (max(above) + 1 if above else min(below) - 1 if below else 0)
    found = layered([(30.0, 20.0)] * n, [Edge(a, b, 25.0) for a, b in edges])
    assert all(found.centres[a][1] < found.centres[b][1] for a, b in edges)
    spots = [(x - 15, y - 10, x + 15, y + 10) for x, y in found.centres]
    spots += [(x - 12, y - 8, x + 12, y + 8) for x, y in filter(None, found.labels)]
    for one, other in combinations(spots, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart


def test_a_cycle_has_no_layers() -> None:
    with pytest.raises(ValueError, match="cycle"):
        ranks(2, [(0, 1), (1, 0)])


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz' dot")
def test_dot_places_boxes_where_it_is_installed() -> None:
    sizes = [(60.0, 30.0), (80.0, 40.0), (50.0, 30.0)]
    edges = [Edge(1, 2), Edge(0, 1, 120.0), Edge(0, 2)]
    found = by_dot("dot", sizes, edges)
    assert found is not None and found == placed(sizes, edges)
    boxes = [
        (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
        for (x, y), (w, h) in zip(found.centres, sizes, strict=True)
    ]
    assert boxes[0][3] < boxes[1][1] < boxes[1][3] < boxes[2][1]
    for e, route, label in zip(edges, found.routes, found.labels, strict=True):
        assert len(route) % 3 == 1 and bool(label) == bool(e.label)
        assert on_border(boxes[e.source], route[0]) and on_border(boxes[e.target], route[-1])


def test_a_dot_that_fails_is_not_asked_again(tmp_path: Path) -> None:
    broken = tmp_path / "dot"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert by_dot(str(broken), [(10.0, 10.0)], []) is None


# ---- files -------------------------------------------------------------------------------------


def test_dot_has_the_same_boxes_and_arrows(linear: BlockGraph) -> None:
    (page,) = graph_pages(linear, four_shards(linear))
    source = dot_text([page])
    for item in page.picture.items:
        assert f'"{item.id}" [' in source
    arrows = Counter(re.findall(r'"([^"]+)" -> "([^"]+)" \[label="([^"]*)"', source))
    assert arrows == Counter((k.source, k.target, k.label) for k in page.picture.links)
    nested = graph_pages(te.trace(control_flow, jnp.ones((3, 4))).graph)
    assert dot_text(nested).count('subgraph "cluster_') == len(nested) == 8


def test_without_dot_there_is_a_layout_of_our_own(
    linear: BlockGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = draw(linear, tmp_path / "graph.svg")
    assert items(ElementTree.parse(path).getroot())
    assert draw(linear, tmp_path / "graph.dot").read_text().startswith("digraph")


def test_names_are_text_not_markup() -> None:
    """Quotes, brackets and backslashes of names are shown, and an odd character is dropped."""
    name = 'a<b>&"c"\\n\x00'
    picture = Picture(
        name, (Item("x", "tensor", (name,)), Item("y", "tensor", ("y",))), (Link("x", "y", "<r>"),)
    )
    svg = own(picture)
    assert items(svg)["x"] == ['a<b>&"c"\\n']
    assert links(svg) == [('a<b>&"c"\\n', "y", "<r>")]
    assert r'label="a<b>&\"c\"\\n"' in dot_text([Page("p", "", picture)])


def test_a_picture_has_no_loose_ends() -> None:
    with pytest.raises(GraphError, match="loose ends"):
        Picture("p", (Item("x", "tensor", ("x",)),), (Link("x", "y"),))


def test_the_command_line_draws(linear: BlockGraph, tmp_path: Path) -> None:
    te.save(
        te.trace(linear_relu, jnp.ones((4, 6)), jnp.ones((6, 8)), jnp.ones(8)), tmp_path / "g.json"
    )
    run = CliRunner()
    out = tmp_path / "g.svg"
    arguments = ["show", str(tmp_path / "g.json"), "--svg", str(out)]
    result = run.invoke(app, [*arguments, "--operations", "0:2", "--cover", "0:m=2"])
    assert result.exit_code == 0, result.output
    text = out.read_text()
    assert "[0:2, 0:6]" in text and "[2:4, 0:6]" in text and ">max<" not in text
    assert run.invoke(app, [*arguments, "--operations", "two"]).exit_code == 2
    assert run.invoke(app, ["show", str(tmp_path / "g.json"), "--cover", "0:m=2"]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("dot:m=2", "begins with no operation"),
        ("99:m=2", "begins with no operation"),
        ("0:x=2", r"'x=2' cuts no index dim(.|\n)*m, n, k"),
        ("0:m=0", "cuts no index dim"),
        ("0:m", "cuts no index dim"),
    ],
)
def test_covers_that_are_none(linear: BlockGraph, text: str, what: str) -> None:
    with pytest.raises(GraphError, match=what):
        parse_cover(linear, text)


def test_a_cover_of_what_is_not_drawn_is_refused(linear: BlockGraph) -> None:
    cover = dict([parse_cover(linear, "0:m=2")])
    with pytest.raises(GraphError, match=r"no operation at \(0,\) is drawn"):
        graph_picture(linear, cover, range(2, 4))


# Pictures of plans: operations, kernels and collectives are all there, and boxes open pages.


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
