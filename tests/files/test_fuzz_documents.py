"""Damaged graphs, plans, fronts and Loom graphs: each loads, or is refused with its JSON path."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg
from tapestry_egg import packed
from tapestry_egg.errors import GraphError, PlanError, TapestryError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.files import files
from tapestry_egg.files.files import load, save
from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.loom import loom_to_json, to_loom
from tapestry_egg.machine.target import load_target
from tapestry_egg.metakernels import registry
from tapestry_egg.monoids.definition import read_monoids
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.plans.plan import Plan
from tapestry_egg.rules.language.book import load_book
from tapestry_egg.show import text as show
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import Program, trace
from tests.metakernels.fuzz_mutations import damaged_document, damaged_text

JUNK: list[Any] = [
    *(None, True, -1, 3, 1e300, 10**18, "", "float32[2]", "key<x>[2]", [], {}, ["*"], "\u202e\0"),
    "float32[999999999999999,999999999999999]",
    *({"$dtype": "O"}, {"$int": "9" * 50}, {"$float": "nan"}, {"$enum": ["FftType", "FFT"]}),
    *({"$class": "x"}, {"$class": ["GatherDimensionNumbers"]}, {"$tree": "*"}, {"$handle": 0}),
    {"$array": {"dtype": "float32", "shape": [10**9, 10**9], "data": ""}},
    {"$jaxpr": {}, "closed": True},
    {"start": [10**20], "end": [10**21]},
    [[[[[]]]]],
]


def program(w: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
    """Parameters of many kinds, and every kind of region."""
    h = jnp.tanh(x @ w)
    c, rows = lax.scan(lambda c, v: (c + v, c * 2), h[0], h)
    c = lax.cond(c.sum() > 0, lambda c: c, lambda c: -c, c)
    _, last = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2.0), (0, c))
    pooled = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID")
    return {"a": last, "b": w.at[jnp.array([0, 2])].add(1.5), "c": pooled, "d": rows}


@functools.cache
def traced() -> Program:
    return trace(program, jnp.ones((4, 6)), jnp.ones((4, 4)))


@functools.cache
def documents(folder: Path) -> dict[str, Any]:
    """One saved document of each kind, as plain data."""
    front = optimize(traced(), "cpu:2", settings=Settings(work=0.3))
    plan = front.plans[0]
    for name, value in (("graph", traced()), ("plan", plan), ("front", front)):
        save(value, folder / f"{name}.json")
    found = {n: json.loads((folder / f"{n}.json").read_text()) for n in ("graph", "plan", "front")}
    return {**found, "loom": json.loads(json.dumps(loom_to_json(to_loom(traced()))))}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return documents(tmp_path_factory.mktemp("documents"))


def damaged(document: Any, rng: random.Random, count: int) -> Iterator[bytes]:
    """Three of four are damaged as data, with digests made anew, the others as text."""
    text = json.dumps(document)
    for i in range(count):
        if i % 4:
            found = damaged_document(document, rng, JUNK)
            with suppress(KeyError, AttributeError):
                found = files.sealed(found) if "plans" in found or "body" in found else found
            yield json.dumps(found).encode()
        else:
            yield damaged_text(text, rng).encode("utf-8", "surrogatepass")


def use(loaded: Any) -> None:
    """What the commands do first with what they have loaded."""
    if isinstance(loaded, Front):
        assert str(loaded)
        plans = list(loaded.plans)
    else:
        plans = [loaded] if isinstance(loaded, Plan) else []
    for plan in plans:
        show.plan_text(plan)
    for graph in {id(p.graph): p.graph for p in plans}.values() if plans else [loaded.graph]:
        show.graph_text(graph)
        for op in graph.operations:
            types = [[graph.values[v] for v in side] for side in (op.inputs, op.outputs)]
            try:
                registry.signature(op.kernel, op.params, *types, len(op.regions))
            except TapestryError as error:
                assert error.where and error.what


def fuzz(document: Any, folder: Path, seed: int, count: int) -> int:
    """How many of `count` damaged documents are refused."""
    path = folder / "damaged.json"
    refused = 0
    for data in damaged(document, random.Random(seed), count):
        path.write_bytes(data)
        try:
            use(load(path))
        except (GraphError, PlanError) as error:
            assert error.where.startswith(str(path)) and error.what, error
            refused += 1
    return refused


COUNTS = {"graph": 400, "plan": 120, "front": 80, "loom": 100}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
def test_hundreds_of_damaged_files(saved: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """Three of four are refused."""
    assert fuzz(saved[kind], tmp_path, 0, COUNTS[kind]) >= 0.75 * COUNTS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["graph", "loom"])
def test_what_still_loads_runs_or_is_refused(
    saved: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "damaged.json"
    run = 0
    for data in damaged(saved[kind], random.Random(2), 100):
        path.write_bytes(data)
        with suppress(GraphError):
            loaded = load(path)
            assert isinstance(loaded, Program)
            types = [(t.shape, decode_dtype(t.dtype)) for t in loaded.input_types]
            jax.eval_shape(emit(loaded), *(jax.ShapeDtypeStruct(*t) for t in types))
            run += 1
    assert run > 5


@pytest.mark.long
@pytest.mark.parametrize("kind", COUNTS)
def test_many_damaged_files(saved: dict[str, Any], tmp_path: Path, kind: str) -> None:
    assert fuzz(saved[kind], tmp_path, 1, 3 * COUNTS[kind]) >= 2.25 * COUNTS[kind]


# Traps


def nested(levels: int, step: Callable[[Any], Any], value: Any = 1) -> Any:
    for _ in range(levels):
        value = step(value)
    return value


def loops(levels: int) -> dict[str, Any]:
    """The fields of a graph of loops within loops."""
    graph: dict[str, Any] = {"name": "r", "values": ["float32[]"], "inputs": [0], "outputs": [0]}
    for _ in range(levels):
        loop = {"kernel": "scan", "inputs": [0], "outputs": [1], "regions": [graph]}
        graph = {**graph, "values": ["float32[]"] * 2, "outputs": [1], "operations": [loop]}
    return graph


@pytest.mark.parametrize(
    "make",
    [
        lambda d, n: d["operations"][0]["params"].update(x=nested(n, lambda x: [x])),
        lambda d, n: d["operations"][0]["params"].update(x=nested(n, lambda x: {"a": x})),
        lambda d, n: d["operations"][0]["params"].update(x=nested(n, lambda x: {"$list": [x]})),
        lambda d, n: d.update(out_tree=nested(n, lambda x: {"list": [x]}, "*")),
        lambda d, n: d.update(out_tree=nested(n, lambda x: {"dict": [["a", x]]}, "*")),
        lambda d, n: d.update(loops(n), constants={}, input_names=[], output_names=[]),
    ],
)
def test_what_is_nested_too_deeply_is_refused(
    saved: dict[str, Any], tmp_path: Path, make: Any
) -> None:
    document = json.loads(json.dumps(saved["graph"]))
    make(document, 150)
    path = tmp_path / "deep.json"
    path.write_text(json.dumps(document))
    with pytest.raises(GraphError, match=r"within|levels") as caught:
        load(path)
    assert caught.value.where.startswith(f"{path}: $.")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b" \n", "not JSON"),
        (b"null", "expected an object"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"version": NaN}', "not JSON"),
        (b'{"version": 1e999}', ""),
        (b'{"version": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b'{"tapestry_egg": "graph", "version": true}', "file version True"),
        (b'{"a": ' * 100_000, ""),
        (b'{"tapestry_egg": "\\ud800"}', ""),
    ],
)
def test_files_that_are_traps(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trap.json"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=said or None) as caught:
        load(path)
    assert caught.value.where.startswith(str(path))


def test_the_last_of_two_equal_keys_counts(saved: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text(json.dumps(saved["graph"])[:-1] + ', "name": "second"}')
    loaded = load(path)
    assert isinstance(loaded, Program) and loaded.graph.name == "second"


def test_a_compressed_file_may_not_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_MOST_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (64 << 20), mtime=0))
    with pytest.raises(GraphError, match="more than 1048576 bytes when decompressed"):
        load(path)


# Graphs made in this process


def test_damaged_graphs_in_memory() -> None:
    rng = random.Random(0)
    junk: list[Any] = [None, True, -1, 99, 1.5, "x", (), (0,), (99,), ("x",), ((0,),), {0: 1}, [0]]
    whole = traced().graph
    refused = 0
    for _ in range(300):
        if rng.random() < 0.5:
            field = rng.choice(["values", "operations", "inputs", "outputs", "constants"])
            graph = dataclasses.replace(whole, **{field: rng.choice(junk)})
        else:
            i = rng.randrange(len(whole.operations))
            field = rng.choice(["inputs", "outputs", "regions"])
            op = dataclasses.replace(whole.operations[i], **{field: rng.choice(junk)})
            graph = dataclasses.replace(
                whole, operations=(*whole.operations[:i], op, *whole.operations[i + 1 :])
            )
        try:
            verify_graph(graph, where="here")
        except GraphError as error:
            assert error.where.startswith("here") and error.what
            refused += 1
    assert refused >= 200


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (None, "expected a graph, given a NoneType"),
        (BlockGraph("g", (TensorType((-1,), "float32"),), (), (0,), ()), "has no tensor type"),
        (BlockGraph("g", (), (), (np.int64(0),), ()), "are not numbers of values"),  # type: ignore[arg-type]
        (
            BlockGraph("g", (), (Operation("f", (), (), regions=(1,)),), (), ()),
            "expected a graph, given a int",
        ),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_graph(graph: Any, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        verify_graph(graph)


# Damaged files of monoids, rules and targets: an error with its place, or a file that is fine.


PACKAGE = Path(tapestry_egg.__file__).parent
READERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "monoids": (read_monoids, ["monoids/monoids.yaml"]),
    "rules": (
        load_book,
        ["rules/books/algebra.yaml", "rules/books/fusion.yaml", "rules/books/sharding.yaml"],
    ),
    "targets": (
        lambda path: load_target(f"{path}:8"),
        ["machine/targets/h100.yaml", "machine/targets/v5e.yaml"],
    ),
}


@pytest.fixture(params=READERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"a: " + b"[" * 100_000, "more than 50 levels", id="deep list"),
        pytest.param(b"- " * 1_000 + b"a", "more than 50 levels", id="deep blocks"),
        pytest.param(b"#" * (5 << 20), "at most", id="large"),
        pytest.param(b"\xff\xfe", "not UTF-8", id="not UTF-8"),
        pytest.param(b"a: \x00", "not YAML", id="zero byte"),
        pytest.param(b"a: [\n", "not YAML", id="open list"),
        pytest.param(b"--- {}\n--- {}\n", "not YAML", id="two documents"),
        pytest.param(b"a: &a [*a]\n", None, id="an alias of what is around it"),
        pytest.param(b"? [a]\n: 1\n", None, id="a list for a name"),
        pytest.param(b"a: 2001-13-45\n", None, id="no such month"),
        pytest.param(b"a: !!python/object/apply:os.abort []\n", None, id="a call"),
    ],
)
def test_hostile_files_are_refused(
    kind: str, data: bytes, says: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(data)
    with pytest.raises(TapestryError, match=says) as e:
        READERS[kind][0](path)
    assert "mine.yaml" in e.value.where


def test_damaged_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    """Two entries of a shipped file at a time, with random damage: no other error ever leaves."""
    read, files = READERS[kind]
    rng = random.Random(f"damaged {kind}")
    refused = 0
    for _ in range(150):
        entries = (PACKAGE / rng.choice(files)).read_text("utf-8").split("\n\n")
        text = "\n\n".join(entries if kind == "targets" else [entries[0], rng.choice(entries)])
        path = tmp_path / "mine.yaml"
        path.write_text(damaged_text(text, rng), "utf-8", errors="replace")
        try:
            read(path)
        except TapestryError as e:
            assert e.where and e.what, e
            refused += 1
    assert refused > 30
