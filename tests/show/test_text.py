"""What `explain` says: everything when asked, and else equal layers once, within 80 columns."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.columns import WIDEST, columns, lines_of, readers_width, told_once
from tapestry_egg.extract.front.front import Front
from tapestry_egg.plans.peak import Peak, PeakPart
from tapestry_egg.quantities import BYTES, TIME

LAYERS = 4


def forward(w: list[jax.Array], x: jax.Array) -> jax.Array:
    for one in w:
        x = jnp.tanh(x @ one) + 1.0
    return x


@pytest.fixture(scope="module")
def plan() -> te.Plan:
    w = [jax.ShapeDtypeStruct((256, 256), "float32")] * LAYERS
    graph = te.trace(forward, w, jax.ShapeDtypeStruct((4096, 256), "float32"))
    pins = {"[0]": (None, "d"), "[1]": ("d",)}
    mesh = te.MeshShape(("d",), (4,))
    settings = te.Settings(work=0.3, workers=1)
    return te.optimize(graph, "h100:4", pins=pins, mesh=mesh, settings=settings).best("seconds")


def section(text: str, title: str) -> list[str]:
    """The lines below a title."""
    lines = text.split("\n")
    start = lines.index(title) + 1
    stop = next((k for k in range(start, len(lines)) if lines[k][:1] != " "), len(lines))
    return lines[start:stop]


def test_equal_layers_are_told_once(plan: te.Plan) -> None:
    (weights, data) = section(plan.explain(), "inputs")
    assert weights.split() == ["4×", "[0][*]", "f32[256,", "256]", "[.,", "d]"]
    assert data.split()[0] == "[1]"
    (product, others) = section(plan.explain(), "operations")
    assert product.split()[:2] == ["4×", "dot_general"]
    assert others.startswith(f"  and {2 * LAYERS} that run inside")


def test_everything_is_told_when_asked(plan: te.Plan) -> None:
    with lines_of(WIDEST):
        text = plan.explain(everything=True)
    assert len(section(text, "inputs")) == LAYERS + 1
    assert len(section(text, "operations")) == len(plan.graph.operations)
    assert len(section(text, "collectives")) == len(plan.collectives) + 1
    assert "×" not in "".join(section(text, "inputs"))


def test_values_that_differ_in_their_number_are_told_once() -> None:
    rows = [["%1", "add"], ["[0][1]", "-"], ["%22", "add"]]
    assert told_once(rows, paths=True).split() == ["2×", "%*", "add", "[0][1]", "-"]
    assert told_once(rows, paths=True, most=1).endswith("and 1 kinds more")


def test_where_time_and_memory_go_stands_before_the_layouts(plan: te.Plan) -> None:
    lines = plan.explain().split("\n")
    titles = ["time: kernels", "peak: ", "collectives, by kind", "inputs"]
    places = [next(k for k, x in enumerate(lines) if x.startswith(t)) for t in titles]
    assert places == sorted(places)
    dearest = lines[places[0] + 2].split()
    row = next(iter(plan.costs_by("line")))
    assert row.name.endswith(dearest[0]) and " ".join(dearest[1:3]) == TIME.format(row.seconds)


def test_totals_are_those_of_the_collectives(plan: te.Plan) -> None:
    head, *rows = section(plan.explain(), "collectives, by kind")
    assert head.split() == ["kind", "axes", "times", "payload", "sent"]
    sent = {}
    for one in plan.collectives:
        sent[one.kind] = sent.get(one.kind, 0.0) + one.count * one.wire_bytes
    assert {row.split()[0]: re.split(r"\s{2,}", row)[-1] for row in rows} == {
        kind: BYTES.format(total) for kind, total in sent.items()
    }


def test_no_line_is_wider_than_a_terminal(plan: te.Plan) -> None:
    long = replace(plan, rules=("a-rule-" * 40,), steps=())
    for everything in (False, True):
        lines = long.explain(everything).split("\n")
        assert max(map(len, lines)) <= 80
        # Nothing is cut off: what is longer goes on below.
        assert "a-rule-" * 40 in "".join(line.strip() for line in lines)


def test_layouts_and_numbers_of_a_table_are_whole_and_words_go_on_below() -> None:
    layout = "[x·y, ., z] +sum(w)"
    words = [f"word{k}" for k in range(40)]
    head = ["name", "layout", "ms", "why"]
    rows = [head, ["[0]['w']", layout, "12", " ".join(words)], ["x" * 60, "[.]", "7", "short"]]
    text = columns(rows, "  ", right=[2])
    lines = text.split("\n")
    assert max(map(len, lines)) <= 80 and len(lines) > 3
    assert layout in lines[1] and " 12  word0" in lines[1]
    assert [w for w in text.split() if w.startswith("word")] == words
    at = lines[0].index("why")
    assert all(line[:at].strip() == "" for line in lines[2:] if line[at:].startswith("word"))


def test_the_first_line_under_the_name_is_an_experts(plan: te.Plan) -> None:
    name, expert, *_ = plan.explain().split("\n")
    assert name.startswith("plan p0 of forward on h100:4, mesh 4d")
    assert "parallel over d (4 on nvlink)" in expert


def test_tables_call_files_by_the_end_of_their_paths(plan: te.Plan) -> None:
    with lines_of(WIDEST):
        texts = str(plan.peak()), str(plan.costs_by("line"))
    for text in texts:
        assert "test_text.py:" in text and "/test_text.py" not in text


def test_columns_that_do_not_fit_stand_below_and_no_word_is_broken() -> None:
    head = ["#", "kind", "type", "layout", "sent", "made by", "at"]
    row = [
        *("12", "all_gather &4", "f32[64, 2048, 16384]", "[y·x, ., .]", "512 MiB"),
        *("convert_element_type", "_classification.py:400"),
    ]
    other = [cell.replace("1", "22") for cell in row]
    lines = columns([head, row, other], "  ", right=(0, 4)).split("\n")
    assert max(map(len, lines)) <= 80 and len(lines) == 6
    assert "".join("".join(lines[2:4]).split()) == "".join("".join(row).split())
    for upper, lower in zip(lines[::2], lines[1::2], strict=True):
        assert lower.startswith("      ") and not upper.startswith("      ")
    # Where no cell is below there is no line.
    bare = columns([head, row, [*row[:5], "", ""]], "  ", right=(0, 4))
    assert [bool(line) for line in bare.split("\n")] == [True] * 5
    # Cells stand below their heads.
    assert lines[1].index("at") == lines[3].index("_classification.py:400")
    assert lines[0].index("type") == lines[2].index("f32[") == lines[4].index("f32[")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_peak_has_no_more_lines_than_arrays_ask_for(width: int) -> None:
    part = PeakPart(
        *("%705", "bf16[64, 2048, 32, 128]", "[y·x, ., ., .]", "made", 2.0**31),
        *("flash_attention_backward", "some_long_package/_classification.py:400"),
    )
    parts = tuple(replace(part, bytes=2.0**k) for k in range(12, 32))
    peak = Peak(sum(p.bytes for p in parts), 1e-3, "dot_general", "a.py:1", parts)
    with lines_of(width):
        lines = str(peak).split("\n")
    assert max(map(len, lines)) <= width
    assert len(lines) <= 2 + 3 * len(parts)
    assert sum("_classification.py:400" in line for line in lines) == len(parts)


def test_columns_of_the_environment_count_where_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for said in ("", "100", "500", "7", "many"):
        monkeypatch.setenv("COLUMNS", said)
        found[said] = readers_width()
    assert found == {"": 80, "100": 100, "500": WIDEST, "7": 60, "many": 80}
    monkeypatch.delenv("COLUMNS")
    assert readers_width() == 80


# What a prompt and a notebook show of results: a line, a table, a picture; no page of data.


@pytest.fixture(scope="module")
def front() -> Front:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w))

    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    graph = te.trace(loss, shape, shape, name="loss")
    return te.optimize(graph, "cpu:2", settings=te.Settings(work=0.1, forms=0, recompute=0))


def test_results_are_a_line_at_the_prompt(front: Front) -> None:
    plan = front.plans[0]
    assert repr(plan).startswith(f"Plan(p0 of loss on cpu:2, mesh {plan.mesh}: ")
    assert repr(plan.graph) == "BlockGraph(loss: 3 operations, 2 inputs, 1 outputs)"
    assert repr(front).startswith("Front(loss on cpu:2: ")
    for shown in (repr(plan), repr(plan.graph), repr(front), str(plan), f"{[plan]}"):
        assert len(shown) <= 120 and "\n" not in shown


def test_a_front_of_one_plan_or_none_has_no_range(front: Front) -> None:
    one = replace(front, plans=front.plans[:1])
    assert "1 plan, " in repr(one) and " to " not in repr(one)
    assert repr(replace(front, plans=())) == "Front(loss on cpu:2: 0 plans)"


def test_notebooks_show_the_picture_above_the_table(front: Front) -> None:
    shown = front._repr_mimebundle_()
    assert shown["text/plain"] == str(front)
    page = ET.fromstring(f"<body>{shown['text/html']}</body>")
    assert page.find("div/{http://www.w3.org/2000/svg}svg") is not None
    assert page.findtext("pre") == str(front)
    empty = replace(front, plans=())
    assert "<svg" not in empty._repr_mimebundle_()["text/html"]
