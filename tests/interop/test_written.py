"""What is written for other tools: e-graphs, PartitionSpecs, tables."""

from __future__ import annotations

import csv
import io
import json
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.extract.gym.formats.egraph_serialize import read
from tapestry_egg.interop.egraph_json import egraph_document

ARRAY = jax.ShapeDtypeStruct


def test_the_egraph_holds_the_program_and_what_equals_it() -> None:
    def product(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return (a @ b) @ c

    program = te.trace(product, *(ARRAY(s, "float32") for s in ((64, 8), (8, 64), (64, 8))))
    document = json.loads(json.dumps(egraph_document(program)))
    (root,) = document["root_eclasses"]
    nodes = document["nodes"]
    ways = [n for n in nodes.values() if n["eclass"] == root]
    assert len(ways) >= 2 and all(n["op"].startswith("dot_general") for n in ways)
    inputs = {n["op"] for n in nodes.values() if not n["children"]}
    assert inputs == {"[0]", "[1]", "[2]"}
    # a @ (b @ c) is cheaper, and an extractor that knows nothing of us finds it: every class by the
    # least cost of a tree.
    least: dict[str, float] = {}
    for _ in nodes:
        for n in nodes.values():
            parts = [least.get(nodes[c]["eclass"], float("inf")) for c in n["children"]]
            least[n["eclass"]] = min(least.get(n["eclass"], float("inf")), n["cost"] + sum(parts))
    given = sum(n["cost"] for key, n in nodes.items() if key.endswith(".0") and n["children"])
    assert least[root] < given
    assert read(document, "mine").roots.size == 1


@cache
def front() -> te.Front:
    def step(w: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
        return {"y": jnp.tanh(x @ w)}

    shapes = ARRAY((512, 256), "float32"), ARRAY((1024, 512), "float32")
    mesh = te.MeshShape(("d", "t"), (2, 2))
    return te.optimize(
        te.trace(step, *shapes),
        "h100:4",
        mesh=mesh,
        pins={"[0]": (None, "t"), "[1]": (("d", "t"),)},
        settings=te.Settings(work=0.5, workers=1),
    )


def test_specs_are_those_of_the_plan() -> None:
    plan = front().best()
    specs = json.loads(json.dumps(plan.specs()))
    assert specs["mesh"] == {"d": 2, "t": 2}
    assert specs["inputs"] == {"[0]": [None, "t"], "[1]": [["d", "t"], None]}
    (made,) = specs["outputs"].values()
    entries = [tuple(e) if isinstance(e, list) else e for e in made]
    while entries and entries[-1] is None:
        entries.pop()
    assert P(*entries) == plan.output_specs["y"]


def test_the_table_as_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(front().csv())))
    assert [row["plan"] for row in rows] == [p.name for p in front()]
    assert [float(row["seconds"]) for row in rows] == [p.costs.seconds for p in front()]
    assert [int(row["peak_bytes"]) for row in rows] == [p.costs.peak_bytes for p in front()]
