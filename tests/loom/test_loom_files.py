"""Loom files: wherever a graph is read, Loom is read; what is traced comes back as it was."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.cli.app import main
from tapestry_egg.errors import GraphError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.files.files import load, load_sharded
from tapestry_egg.loom import from_loom, loom_from_json, loom_to_json, to_loom, write_loom
from tapestry_egg.reference.executor import execute
from tapestry_egg.tracing.graph_documents import graph_document
from tapestry_egg.tracing.trace import Program, trace
from tests.loom.loom_graphs import (
    add_with_mask,
    linear_relu,
    matmul,
    matmul_row_sum,
    sharded_add,
    uid,
)

SOURCE = """
import jax, jax.numpy as jnp

def step(w, x):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"]))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)

def step_args():
    w = {"a": jnp.full((8, 16), 0.1), "b": jnp.full((16, 4), 0.2)}
    return w, jnp.ones((8, 8))
"""


def tapestry(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in arguments])
    return int(exit_.value.code or 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one program, traced to a graph file and to a Loom file."""
    folder = tmp_path_factory.mktemp("loom")
    (folder / "p.py").write_text(SOURCE)
    assert tapestry("trace", f"{folder / 'p.py'}:step", "-q", "-o", folder / "g.json") == 0
    line = ["trace", f"{folder / 'p.py'}:step", "--loom", "-q", "-o", folder / "g.loom.json"]
    assert tapestry(*line) == 0
    return folder


def drawn(program: Program) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(-3, 4, t.shape).astype(t.dtype) for t in program.input_types]


# ---- there and back ----------------------------------------------------------------------------


def test_a_traced_program_comes_back_from_its_loom_file(files: Path) -> None:
    one, other = load(files / "g.json"), load(files / "g.loom.json")
    assert isinstance(one, Program) and isinstance(other, Program)
    assert graph_document(other.graph) == graph_document(one.graph)
    assert [op.source for op in other.graph.operations] == [
        op.source for op in one.graph.operations
    ]
    assert (other.in_tree, other.out_tree) == (one.in_tree, one.out_tree)
    inputs = drawn(one)
    for a, b in zip(execute(one.graph, inputs), execute(other.graph, inputs), strict=True):
        np.testing.assert_array_equal(a, b)


def everything(x: Any, w: Any) -> Any:
    """Constants, every kind of region, a weak type, parameters that are records and enums."""
    h = jnp.tanh(lax.dot(x, w, precision=lax.Precision.HIGHEST))
    table = jnp.asarray(np.arange(16.0, dtype=np.float32).reshape(4, 4))
    c, rows = lax.scan(lambda c, v: (c + v @ table, c * 2), h[0], h)
    c = lax.cond(c.sum() > 0, lambda c: c, lambda c: -c, c)
    _, last = lax.while_loop(lambda s: s[1][0] < 3, lambda s: (s[0] + 1, s[1] * 2.0), (0, c))
    return {"last": last, "at": (w.at[jnp.array([0, 2])].add(1.5), rows[1:])}


@pytest.mark.parametrize("name", ["g.loom.json", "g.loom.json.gz"])
def test_regions_and_constants_come_back(tmp_path: Path, name: str) -> None:
    program = trace(everything, jnp.ones((6, 4)), jnp.ones((4, 4)))
    write_loom(to_loom(program), tmp_path / name)
    assert ((tmp_path / name).read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    again = te.load(tmp_path / name)
    assert isinstance(again, Program)
    assert (again.in_tree, again.out_tree) == (program.in_tree, program.out_tree)
    inputs = drawn(program)
    for a, b in zip(execute(program.graph, inputs), execute(again.graph, inputs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_same_fronts_are_found(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["optimize", files / "g.json", files / "g.loom.json", "--target", "cpu:2", "--work", 1]
    assert tapestry(*line, "-j", 1, "-q", "-o", files / "out") == 0
    one, other = (load(files / "out" / f"{n}.front.json") for n in ("g", "g.loom"))
    assert isinstance(one, Front) and isinstance(other, Front) and one.plans
    assert [p.costs for p in one.plans] == [p.costs for p in other.plans]
    capsys.readouterr()
    assert tapestry("census", files / "g.json", "--json") == 0
    counted = capsys.readouterr().out
    assert tapestry("census", files / "g.loom.json", "--json") == 0
    assert capsys.readouterr().out == counted
    # Plans are not Loom.
    assert tapestry("show", files / "out" / "g.front.json", "--loom") == 1
    assert "holds plans; Loom has graphs" in capsys.readouterr().err
    assert tapestry("show", files / "g.json", "--loom", "--json") == 2


# ---- printed -----------------------------------------------------------------------------------


def test_show_prints_either_file_as_either(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for name in ("g.json", "g.loom.json"):
        assert tapestry("show", files / name) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "dot_general" in said[0]
    for name in ("g.json", "g.loom.json"):
        assert tapestry("show", files / name, "--loom") == 0
        assert capsys.readouterr().out == (files / "g.loom.json").read_text()


def test_shards_asked_for_are_printed_kept_and_drawn(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = load(files / "g.json").graph  # type: ignore[union-attr]
    dot = next(i for i, op in enumerate(graph.operations) if op.kernel == "dot_general")
    assert tapestry("show", files / "g.json", "--loom", "--cover", f"{dot}:m=2,n=4") == 0
    path = tmp_path / "cut.json"
    path.write_text(capsys.readouterr().out)
    loaded, covers = load_sharded(path)
    assert isinstance(loaded, Program) and list(covers) == [(dot,)] and len(covers[(dot,)]) == 8
    inputs = drawn(loaded)
    for a, b in zip(execute(graph, inputs), execute(graph, inputs, covers), strict=True):
        np.testing.assert_allclose(a, b, 1e-6)
    assert tapestry("show", path, "--loom") == 0
    assert capsys.readouterr().out == path.read_text()
    assert tapestry("show", path, "--svg", tmp_path / "cut.dot") == 0
    assert tapestry("show", files / "g.json", "--svg", tmp_path / "whole.dot") == 0
    cut, whole = ((tmp_path / f"{n}.dot").read_text() for n in ("cut", "whole"))
    assert cut != whole


# ---- graphs of others --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "example", [add_with_mask, sharded_add, matmul_row_sum, linear_relu, matmul]
)
def test_graphs_of_others_are_shown_and_counted(
    example: Callable[[], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With shards or without, of kernels that nobody knows here."""
    document = example()
    (tmp_path / "g.json").write_text(json.dumps(document))
    kernels = [n["body"]["kernel"] for n in document["nodes"] if n["type"].endswith("/Operation")]
    assert tapestry("show", tmp_path / "g.json") == 0
    assert all(f"= {kernel}(" in capsys.readouterr().out for kernel in kernels[:1])
    assert tapestry("census", tmp_path / "g.json") == 0
    assert "no template" in capsys.readouterr().out
    (tmp_path / "g.json.gz").write_bytes(gzip.compress(json.dumps(document).encode()))
    again = load(tmp_path / "g.json.gz")
    assert isinstance(again, Program)
    assert [op.kernel for op in again.graph.operations] == kernels
    assert len(again.in_tree["tuple"][0]["tuple"]) == len(again.graph.inputs)


# ---- faults ------------------------------------------------------------------------------------


def nodes(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [n for n in document["nodes"] if n["type"].endswith(f"/{kind}")]


def of_kernel(document: dict[str, Any], kernel: str) -> dict[str, Any]:
    return next(n for n in nodes(document, "Operation") if n["body"]["kernel"] == kernel)


def params(document: dict[str, Any], kernel: str) -> dict[str, Any]:
    found: dict[str, Any] = of_kernel(document, kernel)["body"]["params"]
    return found


def program_tag(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = nodes(document, "Note")[0]["tags"]["tapestry-egg:Program"]
    return found


def constant(document: dict[str, Any]) -> dict[str, Any]:
    tags = (n.get("tags", {}).get("tapestry-egg:Value", {}) for n in nodes(document, "Tensor"))
    return next(tag for tag in tags if "data" in str(tag.get("constant")))


def huge() -> dict[str, Any]:
    body = {"dtype": "float32", "range": {"start": [0], "end": [1 << 62]}}
    return {"id": uid(1), "type": "loom:Tensor", "body": body}


FAULTS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "an object of a process": (
        lambda d: params(d, "dot_general").update(precision={"$handle": 1}),
        r"nodes\[\d+\]\.body\.params\.precision", "objects of another process"),
    "a class of Python's": (
        lambda d: params(d, "dot_general").update(precision={"$class": "os.system"}),
        r"nodes\[\d+\]\.body\.params\.precision", "not accepted"),
    "a precision that compilers do not know": (
        lambda d: params(d, "dot_general").update(precision="most"),
        r"nodes\[\d+\]\.body\.params\.precision", "is no precision"),
    "a region with an edge to nowhere": (
        lambda d: params(d, "scan")["$regions"][0]["graph"].update(outputs=[9999]),
        r"nodes\[\d+\]\.body\.params\.\$regions\[0\]\.graph", "output"),
    "regions of a kernel that has none": (
        lambda d: params(d, "dot_general").update({"$regions": params(d, "scan")["$regions"]}),
        r"\$", "only scan, while and cond"),
    "more bytes than can be counted": (
        lambda d: d["nodes"].append(huge()),
        r"nodes\[\d+\]\.body", "63 bits|not a type"),
    "a constant of too few bytes": (
        lambda d: constant(d).update(constant={"data": "AAAA"}),
        r"nodes\[\d+\]\.tags\['tapestry-egg:Value'\]\.constant", "bytes"),
    "an output that is no tensor": (
        lambda d: program_tag(d).update(outputs=["x"]),
        r"nodes\[0\]\.tags\['tapestry-egg:Program'\]", "names a tensor 'x'"),
    "a tree of other leaves": (
        lambda d: program_tag(d).update(out_tree={"tuple": ["*"]}),
        r"nodes\[0\]\.tags\['tapestry-egg:Program'\]\.out_tree", "leaves"),
    "a selection beyond its tensor": (
        lambda d: of_kernel(d, "tanh")["body"]["inputs"]["x"][0]["range"].update(end=[99, 4]),
        r"nodes\[\d+\]: inputs\.x\[0\]", "selects what its tensor does not have"),
    "a field that is none": (lambda d: d.update(edges=[]), r"\$", "not a Loom graph"),
}  # fmt: skip


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    program = trace(everything, jnp.ones((6, 4)), jnp.ones((4, 4)))
    found: dict[str, Any] = json.loads(json.dumps(loom_to_json(to_loom(program))))
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused_with_their_place(
    document: dict[str, Any], name: str, tmp_path: Path
) -> None:
    change, where, what = FAULTS[name]
    bad = copy.deepcopy(document)
    change(bad)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(bad))
    with pytest.raises(GraphError, match=rf"(?s)^\S*bad\.json: .*{where}.*({what})"):
        load(path)


def test_a_file_that_is_neither_says_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(GraphError, match="Loom graphs have `nodes`"):
        load(tmp_path / "x.json")


def test_flat_programs_need_no_trees_in_their_file() -> None:
    """Flat programs have no trees in the file; those of a dict do."""
    flat = trace(lambda x: (jnp.sin(x),), jnp.ones(3))
    (note,) = [n for n in to_loom(flat).nodes if n.type.endswith("/Note")]
    assert "in_tree" not in note.tags["tapestry-egg:Program"]
    graph, _ = from_loom(loom_from_json(loom_to_json(to_loom(flat))))
    assert graph_document(graph) == graph_document(flat.graph)
