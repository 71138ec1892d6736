"""Files: what is saved comes back, and whatever else is in a file is refused with its place."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import lax

from tapestry_egg.errors import GraphError, PlanError, TapestryError
from tapestry_egg.files.files import load, save
from tapestry_egg.graph import pytrees
from tapestry_egg.graph.arrays import decode_array, encode_array
from tapestry_egg.graph.blockgraph import BlockGraph, TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.plans.plan import BodyPlan, Change, Costs, Kept, Plan, PlannedCollective, Strategy
from tapestry_egg.tracing import codec
from tapestry_egg.tracing.graph_documents import SourceTable, graph_from_record, graph_record
from tapestry_egg.tracing.trace import Program, trace


def program(x: jax.Array, key: jax.Array, table: dict[str, jax.Array]) -> Any:
    """A bit of everything that files hold."""
    mask = np.tri(4, dtype=bool)

    def body(c: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = lax.cond(v.sum() > 0, lambda c: c + v, lambda c: c * 2.0, c)
        return c, c[:2]

    y = jnp.where(mask, x, -jnp.inf).astype(jnp.bfloat16) @ table["w"]
    z = table["w"].at[jnp.array([0, 2])].add(1.5, mode="drop")
    carry, rows = lax.scan(body, x[0], x, unroll=2)
    n, last = lax.while_loop(
        lambda s: (s[0] < 3) & (s[1][0] < 9.0), lambda s: (s[0] + 1, jnp.sin(s[1])), (0, carry)
    )
    return {"y": y, "z": [z, rows], "r": jax.random.uniform(key, (2,)), "n": (n, last, 2.5)}


def arguments() -> tuple[Any, ...]:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)
    return x, jax.random.key(0), {"w": x.astype(jnp.bfloat16)}


@functools.cache
def traced() -> Program:
    return trace(program, *arguments(), donate_argnums=2)


@functools.cache
def text(folder: Path) -> str:
    save(traced(), folder / "fuzz.json")
    return (folder / "fuzz.json").read_text()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: Any) -> Any:
    return json.loads(text(tmp_path_factory.mktemp("files")))


def same_graph(a: BlockGraph, b: BlockGraph) -> bool:
    """Equal in everything, the constants' bits included."""
    if len(a.operations) != len(b.operations) or list(a.constants) != list(b.constants):
        return False
    arrays = all(
        x.dtype == b.constants[v].dtype and x.tobytes() == b.constants[v].tobytes()
        for v, x in a.constants.items()
    )
    nested = all(
        len(p.regions) == len(q.regions)
        and all(same_graph(r, s) for r, s in zip(p.regions, q.regions, strict=True))
        and dataclasses.replace(p, regions=()) == dataclasses.replace(q, regions=())
        for p, q in zip(a.operations, b.operations, strict=True)
    )
    bare = [dataclasses.replace(g, constants={}, operations=()) for g in (a, b)]
    return arrays and nested and bare[0] == bare[1]


# ---- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["graph.json", "deep/er/graph.json.gz"])
def test_programs_come_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save(traced(), path)
    loaded = load(path)
    assert isinstance(loaded, Program)
    assert same_graph(loaded.graph, traced().graph)
    assert (loaded.in_tree, loaded.out_tree) == (traced().in_tree, traced().out_tree)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    before = path.read_bytes()
    save(loaded, path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    expected = jax.tree.leaves(jax.jit(program)(*arguments()))
    outputs = jax.tree.leaves(jax.jit(loaded)(*arguments()))
    for a, b in zip(expected, outputs, strict=True):
        assert a.dtype == b.dtype and a.weak_type == b.weak_type
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_bare_graphs_become_programs(tmp_path: Path) -> None:
    save(traced().graph, tmp_path / "g.json")
    loaded = load(tmp_path / "g.json")
    assert isinstance(loaded, Program) and same_graph(loaded.graph, traced().graph)
    assert len(loaded.flatten(*jax.tree.leaves(arguments()))) == 3


def test_operations_that_graphs_share_are_recorded_once() -> None:
    graph, table = traced().graph, SourceTable()
    other = dataclasses.replace(graph, operations=graph.operations[::-1])
    changed = [dataclasses.replace(op, scope=f"layer {k}") for k, op in enumerate(graph.operations)]
    scoped = dataclasses.replace(graph, operations=tuple(changed))
    records = [graph_record(g, table) for g in (graph, other, scoped)]
    for one, same in zip(records[0].operations, records[1].operations[::-1], strict=True):
        assert one is same
    for g, record in zip((graph, scoped), (records[0], records[2]), strict=True):
        alone = SourceTable()
        assert same_graph(graph_from_record(record, table.rows), g)
        assert same_graph(graph_from_record(graph_record(g, alone), alone.rows), g)


def test_files_read_well(tmp_path: Path) -> None:
    lines = text(tmp_path).splitlines()
    assert lines[1:3] == ['"tapestry_egg": "graph",', '"version": 1,']
    kernels = [line for line in lines if line.startswith('{"kernel":')]
    assert len(kernels) == len(traced().graph.operations)
    assert str(Path.cwd()) not in text(tmp_path)  # places are relative to where it was traced


DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64"]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_constants_come_back_bit_for_bit(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    array = np.asarray(data.draw(hnp.arrays(dtype, shape)))
    assert_constant(array)
    assert decode_array(encode_array(array)).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4"])
def test_extension_constants_come_back(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype))
    for shape in ((), (3,), (0, 2)):
        assert_constant(np.ones(shape, kind))


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0, 1e-45, 3.4e38])
def test_special_scalars_come_back(value: float) -> None:
    assert_constant(np.asarray(value, np.float32))
    assert_constant(np.asarray(value, np.float64))


def assert_constant(array: np.ndarray) -> None:
    from tapestry_egg.tracing.graph_documents import graph_document, graph_from_document

    type_ = TensorType(array.shape, array.dtype.name, weak=array.ndim == 0)
    graph = BlockGraph("c", (type_,), (), (), (0,), {0: array})
    document = json.loads(json.dumps(graph_document(graph), allow_nan=False))
    back = graph_from_document(document)
    assert back.values == graph.values
    assert back.constants[0].dtype == array.dtype
    assert back.constants[0].tobytes() == array.tobytes()


TREES = st.recursive(
    st.none() | st.just(0),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(TREES)
@settings(max_examples=60, deadline=None)
def test_trees_come_back(tree: Any) -> None:
    treedef = jax.tree.structure(tree)
    plain = json.loads(json.dumps(pytrees.encode_treedef(treedef)))
    pytrees.check_tree(plain, "$")
    assert pytrees.is_standard(plain)
    assert pytrees.decode_treedef(plain) == treedef
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    assert pytrees.leaf_paths(plain) == [jax.tree_util.keystr(p) for p, _ in paths]


def test_what_stands_for_a_namedtuple_that_is_not_loaded_is_one_class() -> None:
    """Where a plan from a file is compiled, its results and their shardings are built apart."""
    plain = {"namedtuple": "of.nobody:Moments", "fields": ["mu", "nu"], "items": ["*", "*"]}
    one, two = (jax.tree.structure(pytrees.build(plain, iter(range(2)), {})) for _ in range(2))
    assert one == two
    other = {**plain, "namedtuple": "of.somebody:Moments"}
    assert jax.tree.structure(pytrees.build(other, iter(range(2)), {})) != one


# ---- what is refused ---------------------------------------------------------------------------


def change(path: str, value: Any) -> Callable[[Any], None]:
    """Set what a path such as `operations.3.inputs` leads to."""

    def apply(document: Any) -> None:
        *steps, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        for step in steps:
            document = document[step]
        document[last] = value

    return apply


def changes(*several: tuple[str, Any]) -> Callable[[Any], None]:
    def apply(document: Any) -> None:
        for path, value in several:
            change(path, value)(document)

    return apply


WRONG: dict[str, tuple[Callable[[Any], None], str]] = {
    "kind": (change("tapestry_egg", "quilt"), r"\$\.tapestry_egg: not a graph"),
    "version": (change("version", 99), r"\$\.version: file version 99"),
    "version type": (change("version", True), r"\$\.version"),
    "unknown field": (change("oprations", []), r"unknown field `oprations`"),
    "input type": (change("operations.3.inputs", ["a"]), r"\$\.operations\[3\]\.inputs\[0\]"),
    "undefined": (change("operations.0.inputs", [44]), r"operation 0 .* before it is produced"),
    "type": (change("values.2", "float31[2]"), r"\$\.values\[2\]: 'float31\[2\]' is not a type"),
    "object type": (change("values.2", "object[2]"), r"\$\.values\[2\]"),
    "constant bytes": (change("constants.3", {"data": "AAAA"}), r"\$\.constants\.3: .* 3 bytes"),
    "constant text": (change("constants.3", {"data": "!"}), r"\$\.constants\.3: .*base64"),
    "constant too large": (
        changes(("values.2", "float16[]"), ("constants.2", 70000.0)),
        r"\$\.constants\.2: not a constant of type float16\[\]: overflow",
    ),
    "constant id": (change("constants.999", 1), r"\$\.constants\.999"),
    "tag": (
        change("operations.1.params", {"a": [{"$eval": "1"}]}),
        r"\$\.operations\[1\]\.params\.a\[0\]: unknown tag",
    ),
    "class": (
        change("operations.1.params", {"a": {"$class": "Popen", "args": "ls"}}),
        r"\$\.operations\[1\]\.params\.a: 'Popen' is not accepted",
    ),
    "handle": (change("operations.1.params", {"f": {"$handle": 0}}), r"another process"),
    "source": (change("operations.1.source", 5000), r"\$\.operations\[1\]\.source"),
    "regions": (change("operations.1.regions", [{}]), r"\$\.operations\[1\]\.regions\[0\]"),
    "tree": (change("in_tree", {"set": []}), r"\$\.in_tree: unknown container"),
    "leaves": (change("out_tree", "*"), r"\$\.out_tree: 1 leaves"),
    "not a call": (change("in_tree", {"list": ["*", "*", "*"]}), r"\$\.in_tree: expected the arg"),
    "donated": (change("donated", [True]), r"donated has 1 entries"),
}


@pytest.mark.parametrize("name", WRONG)
def test_faults_are_placed(name: str, saved: Any, tmp_path: Path) -> None:
    apply, message = WRONG[name]
    document = copy.deepcopy(saved)
    apply(document)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(GraphError, match=message) as e:
        load(path)
    assert str(e.value).startswith(f"{path}: $")


def test_loops_must_fit_their_bodies(saved: Any, tmp_path: Path) -> None:
    document = copy.deepcopy(saved)
    (i,) = (i for i, op in enumerate(document["operations"]) if op["kernel"] == "while")
    document["operations"][i]["params"]["body_nconsts"] = 1
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(GraphError, match=rf"\$\.operations\[{i}\]\.regions: while: .*expected"):
        load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b'{"tapestry_egg": "graph",\n "version": 1,,}', ":2:"),
        (b'{\n"tapestry_egg": "gra', ":2:"),
        (b"", ":1:1"),
        (b"[" * 100_000, ""),
        (b"\xff\xfe{}", ":1:"),
        (b"[]", ": $"),
        (b"\x1f\x8bnot gzip", ": cannot be decompressed"),
        (gzip.compress(b"{}", mtime=0)[:-4], ": cannot be decompressed"),
    ],
)
def test_broken_json_is_placed(content: bytes, place: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(GraphError) as e:
        load(path)
    assert str(e.value).startswith(f"{path}{place}")


def test_missing_files_and_unwritable_folders(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="cannot be read"):
        load(tmp_path / "nothing.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(TapestryError, match="cannot be written"):
        save(traced(), tmp_path / "file" / "graph.json")
    with pytest.raises(GraphError, match="cannot be saved"):
        save(object(), tmp_path / "o.json")  # type: ignore[arg-type]


# ---- plans -------------------------------------------------------------------------------------

MESH = MeshShape(("x", "y"), (2, 4))


def random_plan(rng: random.Random) -> Plan:
    """A plan in form; nothing about it makes sense."""

    def layout(rank: int) -> Layout:
        if rank == 0 or rng.random() < 0.3:
            return Layout(((),) * rank, (1,), "sum")
        dims = [()] * (rank - 1) + [rng.choice([(0,), (1, 0), ()])]
        return Layout(tuple(dims))

    def body(graph: BlockGraph) -> BodyPlan:
        def all_(values: tuple[int, ...]) -> tuple[Layout, ...]:
            return tuple(layout(graph.values[v].rank) for v in values)

        strategies = tuple(
            Strategy(
                cuts=rng.choice([(), ((0,), ()), ((1, 0),)]),
                needs=all_(op.inputs),
                gives=all_(op.outputs),
                bodies=tuple(body(region) for region in op.regions),
            )
            for op in graph.operations
        )
        v = rng.randrange(len(graph.values))
        source, target = all_((v, v))
        steps = (Change("all_gather", (0, 1), dim=0), Change("all_reduce", (1,), monoid="sum"))
        return BodyPlan(
            graph,
            all_(graph.inputs),
            all_(graph.outputs),
            strategies,
            {v: Kept(source, max(0, len(graph.operations) - 1))},
            {(v, source, target): steps},
        )

    collective = PlannedCollective("all_gather", ("x",), 2, 1024, 512.5, 3, "v", "dot", "a.py:3")
    return Plan(
        name="plan 1",
        mesh=MESH,
        target="h100:8",
        body=body(traced().graph),
        costs=Costs(0.1, 2**40 + 1, float("inf"), flops=1 / 3),
        bound=0.09,
        collectives=(collective,),
        rules=("some-rule",),
        program=traced(),
    )


def same_plan(a: Plan, b: Plan) -> bool:
    def same_body(x: BodyPlan, y: BodyPlan) -> bool:
        bare = [
            (
                p.inputs,
                p.outputs,
                p.kept,
                p.copies,
                [dataclasses.replace(s, bodies=()) for s in p.strategies],
            )
            for p in (x, y)
        ]
        nested = [[b for s in p.strategies for b in s.bodies] for p in (x, y)]
        return (
            same_graph(x.graph, y.graph)
            and bare[0] == bare[1]
            and all(same_body(m, n) for m, n in zip(*nested, strict=True))
        )

    bare = [dataclasses.replace(p, body=None) for p in (a, b)]  # type: ignore[arg-type]
    return bare[0] == bare[1] and same_body(a.body, b.body)


@pytest.mark.parametrize("seed", range(4))
def test_plans_come_back(seed: int, tmp_path: Path) -> None:
    plan = random_plan(random.Random(seed))
    save(plan, tmp_path / "plan.json.gz")
    loaded = load(tmp_path / "plan.json.gz", certify=False)
    assert isinstance(loaded, Plan) and same_plan(plan, loaded)
    assert loaded.program is not None and loaded.program.in_tree == traced().in_tree
    assert same_graph(loaded.program.graph, traced().graph)
    with pytest.raises(PlanError, match=r"\$\.origin\.machine: no machine"):
        load(tmp_path / "plan.json.gz")


def test_a_body_is_of_the_region_that_it_runs(tmp_path: Path) -> None:
    plan = random_plan(random.Random(0))
    i = next(i for i, op in enumerate(plan.graph.operations) if op.kernel == "while")
    strategy = plan.body.strategies[i]
    inner = dataclasses.replace(strategy.bodies[1].graph, name="rewritten")
    bodies = (strategy.bodies[0], dataclasses.replace(strategy.bodies[1], graph=inner))
    changed = dataclasses.replace(strategy, bodies=bodies)
    strategies = (*plan.body.strategies[:i], changed, *plan.body.strategies[i + 1 :])
    plan = dataclasses.replace(plan, body=dataclasses.replace(plan.body, strategies=strategies))
    with pytest.raises(PlanError, match="is of another graph"):
        save(plan, tmp_path / "plan.json")


PLAN_WRONG: dict[str, tuple[Callable[[Any], None], type[TapestryError], str]] = {
    "axis": (change("layouts.0.dims", [[7]]), PlanError, r"\$\.layouts\[0\]\.dims\[0\]"),
    "twice": (
        change("layouts.0", {"dims": [[0], [0]]}),
        PlanError,
        r"\$\.layouts\[0\]: an axis occurs twice",
    ),
    "layout": (change("body.inputs.0", 999), GraphError, r"\$\.body\.inputs\[0\]"),
    "strategies": (change("body.strategies", []), PlanError, r"\$\.body\.strategies: 0"),
    "needs": (change("body.strategies.2.needs", []), PlanError, r"strategies\[2\]\.needs"),
    "costs": (change("costs.seconds", "fast"), GraphError, r"\$\.costs\.seconds"),
    "graph": (change("graph.values.0", "x"), GraphError, r"\$\.graph\.values\[0\]"),
    "mesh": (change("mesh.sizes", [0, 4]), PlanError, r"\$\.mesh"),
}


@pytest.mark.parametrize("name", PLAN_WRONG)
def test_faults_of_plans_are_placed(name: str, tmp_path: Path) -> None:
    apply, kind, message = PLAN_WRONG[name]
    path = tmp_path / "plan.json"
    save(random_plan(random.Random(0)), path)
    document = json.loads(path.read_text())
    apply(document)
    path.write_text(json.dumps(document))
    with pytest.raises(kind, match=message):
        load(path)


def test_every_class_of_the_whitelist_exists() -> None:
    for name in (*codec.ENUMS, *codec.RECORDS):
        assert codec._class(name) is not None, name
