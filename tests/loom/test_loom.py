"""Loom graphs: the worked examples round-trip and are valid; every fault gives its issue."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry_egg.errors import GraphError
from tapestry_egg.files.files import load
from tapestry_egg.loom import (
    APPLICATIONS,
    EXPRESSIONS,
    LoomError,
    loom_from_json,
    loom_to_json,
    sharded,
    write_loom,
)
from tapestry_egg.loom.nodes import APPLICATION, IPF_INDEX, body_of
from tapestry_egg.zspace import ZRange
from tests.loom.loom_graphs import (
    EYE,
    G,
    N,
    add_with_mask,
    ipf,
    linear_relu,
    matmul,
    matmul_row_sum,
    sharded_add,
    uid,
)

EXAMPLES = [add_with_mask, sharded_add, matmul_row_sum, linear_relu, matmul]


def parts(graph: Any, operation: int) -> dict[str, dict[str, str]]:
    """Index of every shard of an operation -> its selections, as text."""
    out = {}
    for node in graph.of_kind(APPLICATION):
        body = body_of(node)
        if body.operationId == uid(operation):
            index = ZRange(**node.tag(IPF_INDEX))
            out[str(index)] = {
                name: str(listed[0].range.range())
                for side in (body.inputs, body.outputs)
                for name, listed in side.items()
            }
    return out


# ---- examples ----------------------------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_round_trip(example: Callable[[], Any], tmp_path: Path) -> None:
    document = example()
    graph = loom_from_json(document)
    assert loom_to_json(graph) == document
    write_loom(graph, tmp_path / "graph.json")
    assert json.loads((tmp_path / "graph.json").read_text()) == document


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_valid(example: Callable[[], Any]) -> None:
    graph = loom_from_json(example())
    shards = any(n.kind == APPLICATION for n in graph.nodes)
    dialect = APPLICATIONS if shards else EXPRESSIONS
    assert dialect.issues(graph) == []


def test_short_names_of_types_are_the_long_ones() -> None:
    text = json.dumps(sharded_add()).replace(N, "loom:").replace(G, "loom:")
    graph = loom_from_json(json.loads(text))
    assert APPLICATIONS.issues(graph) == []
    assert loom_to_json(graph) == json.loads(text)


def test_x5_matmul_in_four_shards() -> None:
    boxes = [b for rows in ZRange.from_shape((10, 12)).split(0, 5) for b in rows.split(1, 6)]
    graph = sharded(loom_from_json(matmul()), uid(4), boxes)
    assert APPLICATIONS.issues(graph) == []
    assert parts(graph, 4) == {
        "zr[0:5, 0:6]": {"X": "zr[-10:-5, 0:5]", "Y": "zr[0:5, 0:6]", "Z": "zr[0:5, 0:6]"},
        "zr[0:5, 6:12]": {"X": "zr[-10:-5, 0:5]", "Y": "zr[0:5, 6:12]", "Z": "zr[0:5, 6:12]"},
        "zr[5:10, 0:6]": {"X": "zr[-5:0, 0:5]", "Y": "zr[0:5, 0:6]", "Z": "zr[5:10, 0:6]"},
        "zr[5:10, 6:12]": {"X": "zr[-5:0, 0:5]", "Y": "zr[0:5, 6:12]", "Z": "zr[5:10, 6:12]"},
    }


def test_x6_shards_are_those_written_out() -> None:
    graph = loom_from_json(matmul_row_sum())
    assert list(parts(graph, 5)) == ["zr[0:3, 0:2]", "zr[0:3, 2:4]", "zr[0:3, 4:5]"]
    columns = ZRange.from_shape((3, 5)).split(1, 2)
    assert parts(sharded(graph, uid(5), columns), 5) == parts(graph, 5)
    rows = ZRange.from_shape((3,)).split(0, 2)
    assert parts(sharded(graph, uid(6), rows), 6) == parts(graph, 6)


def test_x7_linear_relu_in_four_shards() -> None:
    boxes = [b for rows in ZRange.from_shape((100, 32)).split(0, 50) for b in rows.split(1, 16)]
    graph = loom_from_json(linear_relu())
    for operation in (6, 7):
        graph = sharded(graph, uid(operation), boxes)
    assert APPLICATIONS.issues(graph) == []
    linear, relu = parts(graph, 6), parts(graph, 7)
    assert linear["zr[0:50, 0:16]"] == {
        "x": "zr[-40:10, 20:32]",
        "W": "zr[0:12, 0:16]",
        "b": "zr[0:16]",
        "z": "zr[0:50, 0:16]",
    }
    assert linear["zr[50:100, 16:32]"]["x"] == "zr[10:60, 20:32]"
    volume = {
        name: sum(ZRange.parse(part[name]).size for part in linear.values()) for name in "xWbz"
    }
    assert volume == {"x": 2400, "W": 768, "b": 64, "z": 3200}
    # Every shard of the relu reads what one shard of the linear layer made: they can be fused.
    assert [p["x"] for p in relu.values()] == [p["z"] for p in linear.values()]


def test_an_operation_without_a_signature_cannot_be_sharded() -> None:
    graph = loom_from_json(add_with_mask())
    with pytest.raises(GraphError, match="no signature"):
        sharded(graph, uid(5), [ZRange.from_shape((10, 5))])
    with pytest.raises(GraphError, match="there is no operation"):
        sharded(graph, uid(1), [])


def test_what_is_no_cover_is_refused() -> None:
    graph = loom_from_json(matmul())
    with pytest.raises(GraphError, match=r"point \(5, 0\) of .* is left out"):
        sharded(graph, uid(4), [ZRange.parse("zr[0:5, 0:12]")])


# ---- issues ------------------------------------------------------------------------------------


def node(document: Any, number: int) -> Any:
    return next(n for n in document["nodes"] if n["id"] == uid(number))


def body(document: Any, number: int) -> Any:
    return node(document, number)["body"]


def index_tag(document: Any, number: int) -> Any:
    return node(document, number)["tags"][f"{G}IPFIndex"]


def signature_tag(document: Any, number: int) -> Any:
    return node(document, number)["tags"][f"{G}IPFSignature"]


def gap_and_overlap(d: Any) -> None:
    """Shards of the right total size that overlap and leave a gap."""
    for number, start in ((5, 0), (6, 0)):
        shifted = {"start": [start, 0], "end": [start + 5, 5]}
        index_tag(d, number).update(shifted)
        body(d, number)["outputs"]["result"][0]["range"] = shifted
        body(d, number)["inputs"]["tensors"][0]["range"] = shifted
        body(d, number)["inputs"]["tensors"][1]["range"] = {
            "start": [200 + start, 50],
            "end": [205 + start, 55],
        }


FAULTS: list[tuple[str, Callable[[Any], Any], str, str]] = [
    ("an id that is no UUID", lambda d: node(d, 1).update(id="t0"), "NodeSchemaError",
     "not a UUID"),
    ("an id twice", lambda d: node(d, 2).update(id=uid(1)), "NodeValidationError",
     "Two nodes have one id"),
    ("an unknown type", lambda d: node(d, 1).update(type="loom:Matrix"), "NodeValidationError",
     "not one of"),
    ("an unknown tag", lambda d: node(d, 1).update(tags={"loom:Colour": 1}), "NodeValidationError",
     "Unknown tag"),
    ("a body that lacks a field", lambda d: body(d, 1).pop("dtype"), "NodeSchemaError", "dtype"),
    ("a body with more fields", lambda d: body(d, 1).update(x=1), "NodeSchemaError", "`x`"),
    ("a name that is none",
     lambda d: body(d, 4).update(inputs={"1st": body(d, 4)["inputs"]["tensors"]}),
     "NodeSchemaError", "matching regex"),
    ("an empty list of selections", lambda d: body(d, 4).update(inputs={"tensors": []}),
     "NodeSchemaError", "length >= 1"),
    ("a range that ends before it starts", lambda d: body(d, 1)["range"].update(end=[-1, 5]),
     "NodeSchemaError", "ends before it starts"),
    ("a dtype that is none", lambda d: body(d, 1).update(dtype="int31"), "NodeValidationError",
     "Unknown dtype"),
    ("a tensor that is not there",
     lambda d: body(d, 4)["inputs"]["tensors"][0].update(tensorId=uid(9)), "NodeReferenceError",
     "does not exist"),
    ("an operation where a tensor should be",
     lambda d: body(d, 4)["inputs"]["tensors"][0].update(tensorId=uid(4)), "NodeReferenceError",
     "of type Operation"),
    ("a selection outside its tensor", lambda d: body(d, 1)["range"].update(end=[9, 5]),
     "NodeValidationError", "does not have"),
    ("a selection of another rank", lambda d: body(d, 1).update(range={"start": [0], "end": [10]}),
     "NodeValidationError", "selects 2 dims of a tensor that has 1"),
    ("an output that is not the whole tensor", lambda d: body(d, 3)["range"].update(end=[11, 5]),
     "NodeValidationError", "not its whole tensor"),
    ("a signature without an index", lambda d: node(d, 4)["tags"].pop(f"{G}IPFIndex"),
     "NodeValidationError", "lacks an IPFIndex"),
    (
        "a projection that misses the selection",
        lambda d: signature_tag(d, 4)["inputs"].update(
            tensors=[ipf(EYE, [0, 0], [1, 1]), ipf(EYE, [200, 49], [1, 1])]
        ),
        "NodeValidationError",
        "not the image of the index",
    ),
    ("a projection of another index rank",
     lambda d: signature_tag(d, 4)["outputs"].update(result=[ipf([[1], [0]], [0, 0], [1, 5])]),
     "NodeValidationError", "The projection of outputs.result"),
    ("a projection that selects nothing",
     lambda d: signature_tag(d, 4)["outputs"].update(result=[ipf(EYE, [0, 0], [0, 1])]),
     "NodeValidationError", "below 1"),
    ("a projection too few", lambda d: signature_tag(d, 4)["inputs"]["tensors"].pop(),
     "NodeValidationError", "2 and 1 entries, in the IPFSignature"),
    ("an application of nothing", lambda d: body(d, 5).update(operationId=uid(1)),
     "NodeReferenceError", "refers to no operation"),
    ("an operation without applications", lambda d: d.update(nodes=d["nodes"][:4]),
     "NodeValidationError", "no application"),
    ("an application of other tensors",
     lambda d: body(d, 5)["inputs"]["tensors"][0].update(tensorId=uid(3)), "NodeValidationError",
     "of another tensor"),
    ("an application of other names",
     lambda d: body(d, 5).update(outputs={"z": body(d, 5)["outputs"]["result"]}),
     "NodeValidationError", "outputs have names"),
    ("an application without an index", lambda d: node(d, 5).pop("tags"), "NodeValidationError",
     "application .* lacks an IPFIndex"),
    ("a shard that selects another box than its index gives",
     lambda d: body(d, 5)["inputs"]["tensors"][1]["range"].update(start=[201, 50]),
     "NodeValidationError", "not the image of the index"),
    ("a shard that selects more than its operation",
     lambda d: body(d, 5)["inputs"]["tensors"][1]["range"].update(start=[0, 0]),
     "NodeValidationError", "inputs.* of an application leaves that of its operation"),
    ("a shard too few", lambda d: d["nodes"].pop(), "NodeValidationError", "point .* is left out"),
    ("shards that overlap and leave a gap", gap_and_overlap, "NodeValidationError",
     "do not cover the operation's: .* overlap"),
    ("outputs that overlap and leave a gap", gap_and_overlap, "NodeValidationError",
     "each element once: .* overlap"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "type_", "what"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_fault_is_an_issue(change: Callable[[Any], Any], type_: str, what: str) -> None:
    document = sharded_add()
    change(document)
    issues = APPLICATIONS.issues(loom_from_json(document))
    assert any(i.type == type_ and re.search(what, i.summary) for i in issues), issues
    with pytest.raises(LoomError) as raised:
        APPLICATIONS.check(loom_from_json(document))
    assert raised.value.issues == tuple(issues)


def test_an_issue_has_the_node_its_place_and_the_data() -> None:
    document = sharded_add()
    body(document, 1)["range"]["end"] = [9, 5]
    issue = APPLICATIONS.issues(loom_from_json(document))[0]
    assert issue.to_json() == {
        "type": "NodeValidationError",
        "summary": "inputs.tensors[0] selects what its tensor does not have",
        "contexts": [
            {
                "name": "Node",
                "jsonpath": "$.nodes[3]",
                "data": {"id": uid(4), "label": "op:add", "type": f"{N}Operation"},
            },
            {"name": "Selection", "data": "zr[0:10, 0:5]"},
            {"name": "Tensor", "data": "zr[0:9, 0:5]"},
        ],
    }
    assert "\n  Selection: " in str(issue)


def test_a_schema_fault_has_its_json_path() -> None:
    document = sharded_add()
    body(document, 4)["outputs"]["result"][0]["range"]["end"] = [1.5, 5]
    (issue,) = APPLICATIONS.issues(loom_from_json(document))
    assert issue.contexts[1].jsonpath == "$.nodes[3].body.outputs[...][0].range.end[0]"


def test_a_cycle_lists_its_nodes() -> None:
    """B = f(A), A = g(B): the cycle starts with the node that comes first in the file."""
    document = linear_relu()
    body(document, 6)["inputs"]["x"][0].update(tensorId=uid(5))
    document["nodes"] = [n for n in document["nodes"] if n["id"] != uid(1)]
    for n in document["nodes"]:
        n.pop("tags", None)
    body(document, 6)["inputs"]["x"][0]["range"] = {"start": [0, 0], "end": [100, 32]}
    (issue,) = EXPRESSIONS.issues(loom_from_json(document))
    assert issue.type == "ReferenceCycle"
    assert issue.summary == "Reference Cycle detected"
    (context,) = issue.to_json()["contexts"]
    assert context["name"] == "Cycle"
    assert [n["label"] for n in context["data"]] == ["Z", "op:relu", "Y", "op:linear"]


def test_a_tensor_is_made_once() -> None:
    document = linear_relu()
    body(document, 7)["outputs"]["y"][0]["tensorId"] = uid(4)
    summaries = [i.summary for i in EXPRESSIONS.issues(loom_from_json(document))]
    assert "A tensor is the output of two operations" in summaries


def test_the_dialect_of_expressions_has_no_shards() -> None:
    issues = EXPRESSIONS.issues(loom_from_json(sharded_add()))
    assert {i.type for i in issues} == {"NodeValidationError"} and len(issues) == 2


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ([], "Expected `object`"),
        ({"nodes": []}, "id"),
        ({"id": "a", "nodes": [{"type": "t"}]}, r"nodes\[0\]"),
        ({"id": "a", "nodes": {}}, "nodes"),
        ({"id": "a", "nodes": [], "edges": []}, "edges"),
    ],
)
def test_what_is_no_graph_is_refused(document: Any, what: str) -> None:
    with pytest.raises(
        GraphError, match=rf"(?s)(not a Loom graph.*{what}|{what}.*not a Loom graph)"
    ):
        loom_from_json(document)


def test_a_file_that_is_no_json_has_its_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"id": "a",\n "nodes": [,]}')
    with pytest.raises(GraphError, match=r"bad.json:2:12: not JSON"):
        load(path)


@pytest.mark.slow
@given(data=st.data())
def test_no_damage_to_an_example_escapes_as_another_error(data: st.DataObject) -> None:
    """Any value put anywhere: it is still valid, or an issue, or a GraphError."""
    document = copy.deepcopy(data.draw(st.sampled_from([sharded_add(), matmul_row_sum()])))
    at: Any = document
    while True:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
        inner = at[key]
        if not inner or not isinstance(inner, dict | list) or data.draw(st.integers(0, 4)) == 0:
            break
        at = inner
    at[key] = data.draw(
        st.sampled_from([None, -1, 10**30, 1.5, "x", [], {}, [[]], {"start": [0], "end": []}])
    )
    try:
        APPLICATIONS.issues(loom_from_json(document))
    except GraphError:
        pass
