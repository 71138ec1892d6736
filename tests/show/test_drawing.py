"""Drawings read back from their SVG: boxes, arrows and ranges are those of the graph."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import tapestry_egg as te
from tapestry_egg.cli.app import app
from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.groups import grouped
from tapestry_egg.show.drawing import MOST_SHARDS, draw, graph_picture, parse_cover
from tapestry_egg.show.layered_drawing import Edge, crossings, layered, ranks, spread
from tapestry_egg.show.picture import Item, Link, Picture, to_dot
from tapestry_egg.show.picture_svg import picture_svg

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


def own(picture: Picture) -> ElementTree.Element:
    return ElementTree.fromstring(picture_svg(picture, "own"))


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
    """Left, top, right and bottom of items or clusters."""
    out = {}
    for group in svg.iter(f"{SVG}g"):
        if group.get("class", "").startswith(kind):
            rect = group.find(f"{SVG}rect")
            assert rect is not None
            x, y, w, h = (float(rect.attrib[a]) for a in ("x", "y", "width", "height"))
            out[group.attrib["id"]] = (x, y, x + w, y + h)
    return out


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
    assert [lines[0] for lines in items(own(picture)).values()] == ["add", "%4", "%5", "%6"]
    assert "those from 2 to 2 drawn" in picture.subtitle
    for bad in (range(3, 9), range(0, 4, 2), range(3, 2)):
        with pytest.raises(GraphError, match="not among"):
            graph_picture(linear, operations=bad)


def control_flow(x: Any) -> Any:
    carried, _ = jax.lax.scan(lambda c, v: (c + jnp.sin(v), v), jnp.zeros(4), x)
    chosen = jax.lax.cond(carried[0] > 0, jnp.tanh, jnp.cos, carried)
    return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: c * 2, chosen)


def test_regions_are_frames_around_their_graphs() -> None:
    graph = te.trace(control_flow, jnp.ones((3, 4))).graph
    svg = own(graph_picture(graph))
    frames, places = boxes(svg, "cluster"), boxes(svg, "item")
    by_label = {c.label: c for c in graph_picture(graph).clusters}
    assert set(by_label) == {
        *("scan, 3 steps", "cond", "branch 0", "branch 1", "while", "condition", "body")
    }
    parent = {label: by_label[label].parent for label in ("branch 1", "condition", "body")}
    assert parent == {
        "branch 1": by_label["cond"].id,
        "condition": by_label["while"].id,
        "body": by_label["while"].id,
    }
    inside = {"sin": "scan, 3 steps", "tanh": "branch 1", "cos": "branch 0", "lt": "condition"}
    for id, lines in items(svg).items():
        if lines[0] in inside:
            x0, y0, x1, y1 = places[id]
            a, b, c, d = frames[by_label[inside[lines[0]]].id]
            assert a <= x0 and b <= y0 and x1 <= c and y1 <= d, lines[0]
    dashed = [link for link in graph_picture(graph).links if link.dashed]
    # A scan streams rows of x into its body; all else goes in and comes out as it is.
    ends = Counter((items(svg)[k.source][1], items(svg)[k.target][1], k.title) for k in dashed)
    assert ends == {
        ("f32[3, 4]", "f32[4]", "enters scan, 3 steps"): 1,
        ("f32[4]", "f32[4]", "enters scan, 3 steps"): 1,  # the zeros that it starts with
        ("f32[4]", "f32[4]", "leaves scan, 3 steps"): 1,
        ("f32[4]", "f32[4]", "enters cond"): 2,
        ("f32[4]", "f32[4]", "leaves cond"): 2,
        ("f32[4]", "f32[4]", "enters while"): 2,
        ("f32[4]", "f32[4]", "leaves while"): 1,
    }
    assert ["broadcast_in_dim", "i 4"] in items(svg).values()  # a view, but not of a tensor here
    assert {link.title for link in dashed} == {
        f"{verb} {region}"
        for verb in ("enters", "leaves")
        for region in ("scan, 3 steps", "cond", "while")
    }
    assert [target for _, target, _ in links(svg)].count("branch") == 1  # the predicate


def test_an_operation_of_a_region_is_drawn_in_shards() -> None:
    graph = te.trace(control_flow, jnp.ones((3, 4))).graph
    loop = [op.kernel for op in graph.operations].index("scan")
    body = graph.operations[loop].regions[0]
    sine = [op.kernel for op in body.operations].index("sin")
    (_, halves) = parse_cover(body, f"{sine}:i=2")
    svg = own(graph_picture(graph, {(loop, 0, sine): halves}))
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
    """Twelve layers of two scopes: 24 groups would do, and each has what enters it beside it."""
    assert len(many.operations) > 60
    svg = own(graph_picture(many))
    found = items(svg)
    groups = {lines[0] for lines in found.values() if len(lines) == 3}
    assert groups == {f"layer{k}/{part}" for k in range(12) for part in ("dense", "norm")}
    drawn = links(svg)
    for k in range(12):
        entering = f"[1][{k}]" if k else "2 tensors"
        assert (entering, f"layer{k}/dense", "") in drawn
        assert (f"layer{k}/dense", f"layer{k}/norm", "f32[4, 4]") in drawn
    assert ("layer11/norm", "output", "") in drawn


def test_a_covered_operation_of_a_large_graph_is_drawn_in_full(many: BlockGraph) -> None:
    number = [op.kernel for op in many.operations].index("dot_general")
    svg = own(graph_picture(many, dict([parse_cover(many, f"{number}:m=2")])))
    drawn = links(svg)
    value = f"%{many.operations[number].outputs[0]}"
    assert [d[2] for d in drawn if d[:2] == ("dot_general", value)] == ["[0:2, 0:4]", "[2:4, 0:4]"]
    assert any(source == value for source, _, _ in drawn)


@given(st.integers(1, 30), st.sets(st.integers(0, 60)))
def test_groups_hold_every_operation_once_in_order(
    many: BlockGraph, most: int, alone: set[int]
) -> None:
    found = grouped(many, range(len(many.operations)), alone, most)
    assert [i for _, numbers in found for i in numbers] == list(range(len(many.operations)))
    assert all(len(numbers) == 1 for _, numbers in found if alone & set(numbers))


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
    assert all(0 <= a and 0 <= b and c <= width and d <= height for a, b, c, d in places.values())
    for group in svg.iter(f"{SVG}g"):
        if group.get("class") == "link":
            source, target = (
                places[group.attrib["data-source"]],
                places[group.attrib["data-target"]],
            )
            assert source[3] < target[1]
            (path,) = group.iter(f"{SVG}path")
            numbers = [float(n) for n in re.findall(r"-?[\d.]+", path.attrib["d"])]
            assert numbers[1] == pytest.approx(source[3], abs=0.2)  # from the lower edge
            assert numbers[-1] == pytest.approx(target[1], abs=0.2)  # to the upper one
            assert source[0] <= numbers[0] <= source[2] and target[0] <= numbers[-2] <= target[2]
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
    placed = layered([(30.0, 20.0)] * n, [Edge(a, b, 25.0) for a, b in edges])
    assert all(placed.centres[a][1] < placed.centres[b][1] for a, b in edges)
    spots = [(x - 15, y - 10, x + 15, y + 10) for x, y in placed.centres]
    spots += [(x - 12, y - 8, x + 12, y + 8) for x, y in filter(None, placed.labels)]
    for one, other in combinations(spots, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart


def test_a_cycle_has_no_layers() -> None:
    with pytest.raises(ValueError, match="cycle"):
        ranks(2, [(0, 1), (1, 0)])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=10, unique=True))
def test_crossings_are_counted_pair_by_pair(edges: list[tuple[int, int]]) -> None:
    down = [[b + 4 for a, b in edges if a == v] for v in range(4)] + [[]] * 4
    pairs = combinations(edges, 2)
    crossing = sum((a - c) * (b - d) < 0 for (a, b), (c, d) in pairs)
    assert crossings([[0, 1, 2, 3], [4, 5, 6, 7]], down) == crossing


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 20)), min_size=1, max_size=5))
def test_spreading_is_least_squares(wanted: list[tuple[int, int]]) -> None:
    """Against SciPy's solution of the same quadratic programme."""
    from scipy.optimize import lsq_linear

    wishes, widths = [float(w) for w, _ in wanted], [float(w) for _, w in wanted]
    n = len(wanted)
    steps = [0.0, *((a + b) / 2 + 5 for a, b in pairwise(widths))]
    base = np.cumsum(steps)  # x = first + base + sums of non-negative slacks
    matrix = np.tril(np.ones((n, n)))
    lower = np.array([-np.inf] + [0.0] * (n - 1))
    best = lsq_linear(matrix, np.array(wishes) - base, (lower, np.inf), tol=1e-14)
    got = np.array(spread(wishes, widths, 5.0))
    assert (np.diff(got) >= np.diff(base) - 1e-9).all()
    cost = ((got - wishes) ** 2).sum()
    assert cost <= 2 * best.cost + 1e-6


# ---- files -------------------------------------------------------------------------------------


def test_dot_has_the_same_boxes_and_arrows(linear: BlockGraph) -> None:
    picture = graph_picture(linear, four_shards(linear))
    source = to_dot(picture).source
    for item in picture.items:
        assert f'"{item.id}"' in source
    arrows = Counter(re.findall(r'"([^"]+)" -> "([^"]+)" \[label="([^"]*)"', source))
    assert arrows == Counter((k.source, k.target, k.label) for k in picture.links)
    assert source.count('subgraph "cluster_') == len(picture.clusters) == 2
    nested = graph_picture(te.trace(control_flow, jnp.ones((3, 4))).graph)
    assert to_dot(nested).source.count("style=dashed") == sum(k.dashed for k in nested.links) == 10


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz' dot")
def test_dot_draws_where_it_is_installed(linear: BlockGraph) -> None:
    picture = graph_picture(linear, four_shards(linear))
    svg = ElementTree.fromstring(picture_svg(picture))
    titles = Counter(
        str(t.text)
        for g in svg.iter(f"{SVG}g")
        if g.get("class") in ("node", "edge")
        for t in g.findall(f"{SVG}title")
    )
    assert titles == Counter(i.id for i in picture.items) + Counter(
        f"{k.source}->{k.target}" for k in picture.links
    )


def test_without_dot_the_layout_is_our_own(
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
    assert "digraph" in to_dot(picture).source


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
