"""What is loaded is certified: no single change to a saved plan or front is believed that changes
numbers or costs, whoever made it."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.errors import GraphError, PlanError, TapestryError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.files.admission import admit_front
from tapestry_egg.files.files import load, save, sealed
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.plans.plan import Plan
from tapestry_egg.rewrite.equivalence import check_equivalent
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
from tapestry_egg.tracing.trace import Program, trace
from tests.files.attacks import changes, get

RULES = [r for b in load_books(DEFAULT_BOOKS) for r in b.rules]
W, V = (np.random.default_rng(k).normal(size=(64, 32)).astype(np.float32) for k in range(2))


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(w: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - y) ** 2)


def step(w: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> tuple[dict[str, jax.Array]]:
    """A train step: donation, feedback, partial sums."""
    return (jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x, y)),)


def loop(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Rules rewrite the body."""
    return lax.scan(lambda c, _: (jnp.tanh(c @ w + c @ v), None), x, length=2)[0]


def joined(x: jax.Array) -> jax.Array:
    """Constants are prepared."""
    weights = jnp.concatenate([jnp.asarray(W) * 2.0, jnp.transpose(jnp.asarray(V.T))], axis=1)
    return jnp.tanh(x @ weights) * 0.25


def branches(x: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = lax.cond(n > 0, lambda x: x * 2.0, lambda x: jnp.sin(x), x)
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ c[1]), (n, y))


def window(x: jax.Array, w: jax.Array) -> jax.Array:
    """Neighbours send the rows at the ends of their blocks."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers))


def margins(x: jax.Array, w: jax.Array) -> jax.Array:
    """Rows that neighbours lack, of a window whose steps do not make up its operand."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def convolved(x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=numbers)

    return jnp.tanh(convolved(jnp.tanh(convolved(x))))


def heads(x: jax.Array, w: jax.Array) -> jax.Array:
    """A dim that two index dims make up."""
    q = (x @ w).reshape(16, 4, 32)
    return jnp.einsum("shd,thd->hst", q, q)


def chains(*x: jax.Array) -> list[jax.Array]:
    """Two places, each faster in its own way."""
    return [(a @ b) @ c for a, b, c in (x[:3], x[3:])]


def layers(x: jax.Array, up: jax.Array, down: jax.Array) -> list[jax.Array]:
    """Gradients that are summed beside what follows."""

    def loss(w: list[jax.Array]) -> jax.Array:
        h = jnp.concatenate([x] * 8)
        for _ in range(2):
            h = h + jax.nn.relu(h @ w[0]) @ w[1]
        return jnp.mean(h**2)

    return jax.grad(loss)([up, down])


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "step": (
        step,
        ({"up": struct(256, 512), "down": struct(512, 256)}, struct(256, 256), struct(256, 256)),
        "cpu:8",
    ),
    "loop": (loop, (struct(2048, 256), struct(256, 256), struct(256, 256)), "h100:8"),
    "joined": (joined, (struct(1024, 64),), "cpu:8"),
    "window": (window, (struct(1, 64, 32, 8), struct(3, 3, 8, 8)), "cpu:8"),
    "branches": (branches, (struct(64, 64), jax.ShapeDtypeStruct((), jnp.int32)), "cpu:8"),
    "margins": (margins, (struct(1, 66, 32, 8), struct(3, 3, 8, 8)), "cpu:8"),
    "heads": (heads, (struct(16, 24), struct(24, 128)), "cpu:8"),
    "panels": (jnp.matmul, (struct(256, 256), struct(256, 256)), "cpu:8"),
    "chains": (chains, (struct(256, 256),) * 6, "h100:8"),
    "beside": (layers, (struct(32, 256), struct(256, 1024), struct(1024, 256)), "h100:8"),
}

BLOCKS = dict.fromkeys(("[0]", "[1]", "result"), ("x", "y"))
#: What is asked beside the program: so that neighbours, digits of a dim, blocks of a sum, places
#: with ways of their own and collectives beside kernels occur, as `shows` says.
ASKED: dict[str, dict[str, Any]] = {
    "heads": {
        "mesh_shapes": [MeshShape(("x", "y"), (4, 2))],
        "pins": {"[0]": (None, None), "[1]": (None, ("x", "y")), "result": ("x", None, None)},
        "settings": Settings(work=1.0, recompute=0, forms=0),
    },
    "panels": {
        "mesh_shapes": [MeshShape(("x", "y"), (2, 4))],
        "pins": BLOCKS,
        "limits": {"peak_bytes": 6 * 4 * 256 * 256 // 8},
        "settings": Settings(work=1.0, recompute=0, forms=0),
    },
    "chains": {
        "mesh_shapes": [MeshShape(("x",), (8,))],
        "pins": {"[0]": ("x", None), "[5]": (None, "x")}
        | {f"[{k}]": (None, None) for k in range(1, 5)},
    },
    "margins": {
        "mesh_shapes": [MeshShape(("x", "y"), (2, 4))],
        "pins": {"[0]": (None, "x", None, None), "result": (None, "x", None, None)},
    },
    "beside": {"settings": Settings(work=0.4, recompute=0, forms=0, overlap=True)},
}


def shows(name: str, front: Front) -> bool:
    """Whether a front has what its case is there for."""
    kinds = [c.kind for p in front for c in p.collectives]
    match name:
        case "window" | "margins":
            return "permute" in kinds
        case "heads":
            return kinds == ["all_reduce"]
        case "panels":
            return any("blocks-of-sums" in p.rules for p in front)
        case "chains":
            return {r for p in front for r in p.rules} == {
                f"product-from-the-{side}" for side in ("left", "right")
            }
        case "beside":
            return any(b.hidden > 0 for p in front for b in p.lanes() if b.stream == "links")
    return True


@functools.cache
def front_of(name: str) -> Front:
    fn, arguments, target = CASES[name]
    program = trace(fn, *arguments, donate_argnums=0 if name == "step" else ())
    asked = {"settings": Settings(work=1.0)} | ASKED.get(name, {})
    return optimize(program, target, **asked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def saved(name: str, folder: Path) -> Path:
    path = folder / f"{name}.json"
    if not path.exists():
        front = front_of(name.removesuffix(".plan"))
        save(front.plans[0] if name.endswith(".plan") else front, path)
    return path


def plans_of(loaded: Any) -> dict[str, Plan]:
    return {p.name: p for p in (loaded.plans if isinstance(loaded, Front) else [loaded])}


def arguments_of(name: str) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)

    def drawn(s: jax.ShapeDtypeStruct) -> np.ndarray:
        if s.dtype == jnp.float32:
            return (rng.normal(size=s.shape) / 4).astype(np.float32)
        return np.ones(s.shape, s.dtype)

    return jax.tree.map(drawn, CASES[name][1])  # type: ignore[no-any-return]


def what_runs(document: Any, plan: Any) -> str:
    """All that running a plan depends on."""
    origin = document["origin"]
    graph = document["graphs"][plan["graph"]] if "graphs" in document else document["graph"]
    parts = [plan["mesh"], plan["layouts"], plan["body"], graph]
    return json.dumps([*parts, origin["program"], origin["in_tree"], origin["out_tree"]])


def same(a: Any, b: Any) -> bool:
    (xs, t), (ys, u) = jax.tree.flatten(a), jax.tree.flatten(b)
    return t == u and all(
        x.dtype == y.dtype and np.allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max(initial=0))
        for x, y in zip(xs, ys, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, "step.plan", "loop.plan"])
def test_no_single_change_is_believed_that_changes_anything(name: str, folder: Path) -> None:
    """Digests are made anew after every change. What is still accepted gives the same numbers and
    costs as before."""
    path = saved(name, folder)
    document, true = json.loads(path.read_text()), plans_of(load(path))
    arguments = arguments_of(name.removesuffix(".plan"))
    entries = {p["name"]: p for p in document.get("plans", [document])}
    expected: dict[str, Any] = {}
    outcomes: Counter[str] = Counter()
    changed_path = folder / f"{name}.changed.json"

    def run(plan: Plan) -> Any:
        return jax.tree.map(np.asarray, te.compile(plan)(*arguments))

    for place, said, changed in changes(document, len(name), 45):
        changed_path.write_text(json.dumps(sealed(changed)))
        try:
            loaded = load(changed_path)
        except TapestryError as error:
            assert error.where.startswith(f"{changed_path}: $"), (place, said, error)
            outcomes["refused"] += 1
            continue
        outcomes["accepted"] += 1
        for k, plan in enumerate(plans_of(loaded).values()):
            was = plan.name if plan.name in true else list(true)[k]
            for objective in ("seconds", "peak_bytes", "joules", "wire_bytes", "flops"):
                costs = [getattr(p.costs, objective) for p in (plan, true[was])]
                assert costs[0] == pytest.approx(costs[1], rel=1e-9), (place, said, objective)
            # Whatever the file says of the machine, the compiler is told to merge no more.
            for option, bytes_ in true[was].compiler_options.items():
                told = plan.compiler_options.get(option, bytes_)
                assert told <= bytes_, (place, said, option)
            entry = changed.get("plans", [changed])[k]
            if what_runs(changed, entry) != what_runs(document, entries[was]):
                if was not in expected:
                    expected[was] = run(true[was])
                assert same(run(plan), expected[was]), (place, said)
    assert outcomes["refused"] > 20


def changed(path: Path, place: tuple[Any, ...], value: Any, seal: bool = True) -> Path:
    """A copy of a file with one entry changed."""
    document = json.loads(path.read_text())
    get(document, place[:-1])[place[-1]] = value
    other = path.with_suffix(".one.json")
    other.write_text(json.dumps(sealed(document) if seal else document))
    return other


@pytest.mark.slow
def test_true_files_are_believed_and_say_what_they_said(folder: Path) -> None:
    for name in CASES:
        front, loaded = front_of(name), load(saved(name, folder))
        assert isinstance(loaded, Front)
        assert shows(name, loaded), name
        assert [p.costs for p in loaded] == [p.costs for p in front]
        assert loaded.usable_bytes == front.usable_bytes
        plan = loaded.plans[0]
        arguments = arguments_of(name)
        assert same(
            jax.tree.map(np.asarray, te.compile(plan)(*arguments)),
            jax.tree.map(np.asarray, te.compile(front.plans[0])(*arguments)),
        )


@pytest.mark.slow
def test_one_number_of_a_form_is_refused_with_its_operation(folder: Path) -> None:
    path = saved("step", folder)
    document = json.loads(path.read_text())
    graph = document["graphs"][0]
    v = next(v for v, c in graph["constants"].items() if c == pytest.approx(0.1))
    bad = changed(path, ("graphs", 0, "constants", v), 0.9)
    with pytest.raises(PlanError, match="does not follow from the program") as caught:
        load(bad)
    assert caught.value.where.startswith(f"{bad}: $.plans[0].graph, ")
    assert "after it was written" in caught.value.hint
    # The same number in the program: the forms are then of another one.
    given = document["origin"]["program"]["constants"]
    v = next(v for v, c in given.items() if c == pytest.approx(0.1))
    with pytest.raises(PlanError, match="does not follow"):
        load(changed(path, ("origin", "program", "constants", v), 0.9))


@pytest.mark.parametrize("kind", [float, bool])
def test_a_number_of_another_kind_is_another_parameter(kind: type, folder: Path) -> None:
    """1.0 and True are equal to 1 in Python, and are not to JAX."""
    path = saved("step", folder)
    document = json.loads(path.read_text())
    dots = [k for k, op in enumerate(document["graphs"][0]["operations"]) if "dot" in op["kernel"]]
    ((lhs, _), _) = document["graphs"][0]["operations"][dots[0]]["params"]["dimension_numbers"]
    assert lhs == [1]
    place = ("graphs", 0, "operations", dots[0], "params", "dimension_numbers", 0, 0, 0)
    with pytest.raises(PlanError, match="does not follow"):
        load(changed(path, place, kind(1)))


REFUSED: dict[str, tuple[tuple[Any, ...], Callable[[Any], Any], str]] = {
    "seconds": (("plans", 0, "costs", "seconds"), lambda x: x * (1 + 1e-8), "plans[0].costs.secon"),
    "peak": (("plans", 0, "costs", "peak_bytes"), lambda x: x - 1, "plans[0].costs.peak_bytes"),
    "bound": (("plans", 0, "bound"), lambda x: x * 2, "plans[0].bound"),
    "machine": (
        ("origin", "machine", "hbm_bytes_per_second"),
        lambda x: x * 2,
        "plans[0].costs.seconds",
    ),
    "target": (("plans", 0, "target"), lambda x: "h100:8", "plans[0].target"),
    "mesh": (("plans", 0, "mesh", "sizes"), lambda x: x[::-1], "plans[0]."),
    "usable": (("usable_bytes",), lambda x: 10**9, "usable_bytes"),
    "feedback": (("origin", "feedback", 0, 1), lambda x: 1, "origin.feedback[0]"),
    "groups": (("plans", 0, "body", "groups", 0), lambda x: x + 1, "plans[0].body.groups"),
    "payload": (("plans", 0, "collectives", 0, "count"), lambda x: 2, "plans[0].collectives[0]"),
    "donated": (("graphs", 0, "donated", 0), lambda x: not x, "plans[0].graph"),
    "keys": (
        ("origin", "in_tree", "tuple", 0, "tuple", 0, "dict", 0, 0),
        lambda x: "side",
        "origin.in_tree",
    ),
    # As an older version's file has it, whose template has fewer index dims.
    "index dims": (
        ("plans", 0, "body", "strategies", 0, "cuts"),
        lambda x: x[:-1],
        "plans[0].body.strategies[0]",
    ),
    "unused step": (
        ("plans", 0, "body", "copies", 0, 3, 0, "to_dim"),
        lambda x: 0,
        "plans[0].body.copies[0][3][0]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_is_refused_with_its_place(name: str, folder: Path) -> None:
    place, change, said = REFUSED[name]
    path = saved("step", folder)
    value = get(json.loads(path.read_text()), place)
    bad = changed(path, place, change(value))
    with pytest.raises((PlanError, GraphError)) as caught:
        load(bad)
    assert caught.value.where.startswith(f"{bad}: $.{said}"), caught.value
    if name in ("seconds", "peak", "index dims"):
        assert "Search again: `tapestry-egg optimize" in caught.value.hint


def test_the_plan_of_the_users_own_shardings_is_certified_too(tmp_path: Path) -> None:
    front = front_of("step")
    save(replace(front, original=replace(front.plans[-1], name="given")), tmp_path / "front.json")
    loaded = load(tmp_path / "front.json")
    assert isinstance(loaded, Front) and loaded.original is not None
    bad = changed(tmp_path / "front.json", ("original", "costs", "peak_bytes"), 1)
    with pytest.raises(PlanError, match=r"\$\.original\.costs\.peak_bytes"):
        load(bad)


def test_damage_by_accident_is_told_apart_by_digests(folder: Path) -> None:
    bad = changed(saved("step", folder), ("plans", 1, "bound"), 1e-9, seal=False)
    with pytest.raises(GraphError, match=r"\$\.plans\[1\]: is not as it was written"):
        load(bad)
    bad = changed(saved("step", folder), ("notes",), ["all is well"], seal=False)
    with pytest.raises(GraphError, match=r"\$\.notes: is not as it was written"):
        load(bad, certify=False)


def test_plans_of_version_1_cannot_be_certified(folder: Path) -> None:
    with pytest.raises(GraphError, match=r"\$\.version: file version 1, .* of 3\n.*optimize"):
        load(changed(saved("step", folder), ("version",), 1))


def test_prepared_constants_are_computed_again_not_read(folder: Path) -> None:
    loaded = load(saved("joined", folder))
    assert isinstance(loaded, Front)
    graph = loaded.plans[0].graph
    assert graph.prepared is not None and len(graph.constants) > 0
    text = saved("joined", folder).read_text()
    (large,) = (a for a in graph.constants.values() if a.ndim == 2)
    np.testing.assert_array_equal(large, np.concatenate([W * 2, V], axis=1))
    # The weights are there twice, as given and for the forms; their join is not.
    assert text.count('"data"') == 4
    save(loaded, folder / "again.json")
    assert json.loads((folder / "again.json").read_text()) == json.loads(text)


MINE = """
ruleset: algebra
rules:
  - name: sorting-twice
    law: "sort(sort(x)) = sort(x)"
    reason: What is sorted stays as it is.
    numerics: exact
    given: [s]
    guard: $s.kernel == sort
    egg: |
      (rule ((= a (Op1 s x)) (= b (Op1 s a))) ((union b a)))
"""


@pytest.mark.slow
def test_rules_of_the_users_own_are_found_again(tmp_path: Path) -> None:
    book = tmp_path / "mine.yaml"
    book.write_text(MINE)
    program = trace(lambda x, w: jnp.sort(jnp.sort(x)) @ w, struct(8192, 8192), struct(8192, 8))
    mesh = [MeshShape(("x",), (8,))]
    front = optimize(program, "h100:8", rules=[book], mesh_shapes=mesh, settings=Settings(work=0.5))
    plan = front.best("seconds")
    assert plan.rules == ("sorting-twice",)
    path = tmp_path / "plan.json"
    save(plan, path)
    assert isinstance(load(path), Plan)
    moved = book.rename(tmp_path / "other.yaml")
    with pytest.raises(PlanError, match=r"mine\.yaml, which is not there\n.*--rules"):
        load(path)
    assert isinstance(load(path, rules=[moved]), Plan)
    moved.write_text(MINE.replace("sorting-twice", "another-name"))
    with pytest.raises(PlanError, match="does not follow"):
        load(path, rules=[moved.rename(book)])


@pytest.mark.slow
def test_fronts_hold_no_form_that_is_not_read_again(tmp_path: Path) -> None:
    """What is best on one device shares a·b and c·b among four products, unproven."""

    def products(x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        u, v = (x @ a) @ b, (x @ c) @ b
        return (u + v) * d + (x @ (a * 2)) @ b, u, v, (a + c) @ b

    shapes = [(32, 24), (24, 40), (40, 24), (24, 40), (32, 24)]
    program = trace(products, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    quick = Settings(work=0.3, recompute=0, workers=1, forms=0)
    books = ["sharding", "collectives", "algebra", "linear", "structure"]  # nothing is stacked
    asked: Any = {"mesh_shapes": [MeshShape(("x",), (8,))], "settings": quick, "books": books}
    front = optimize(program, "h100:8", **asked)
    save(front, tmp_path / "products.front.json")
    assert len(load(tmp_path / "products.front.json").plans) == len(front.plans)
    assert any("form" in note.kind for note in front.notes)


@pytest.mark.slow
def test_an_output_that_is_another_value_of_the_form_is_refused() -> None:
    """Also where that value is itself held to be equal to something else."""
    given = trace(loop, struct(2048, 256), struct(256, 256), struct(256, 256)).graph
    form = front_of("loop").best("seconds").graph
    name = "sum-of-contractions-rhs"
    check_equivalent(given, form, [name], lambda: RULES)
    (k,) = (k for k, op in enumerate(form.operations) if op.regions)
    op = form.operations[k]
    (region,) = op.regions
    for v in (*region.inputs, *(v for op in region.operations for v in op.outputs)):
        if region.values[v] == region.values[region.outputs[0]] and v != region.outputs[0]:
            other = replace(op, regions=(replace(region, outputs=(v,)),))
            operations = (*form.operations[:k], other, *form.operations[k + 1 :])
            with pytest.raises(PlanError):
                check_equivalent(given, replace(form, operations=operations), [name], lambda: RULES)


def test_a_plan_made_by_hand_says_that_it_cannot_be_certified(tmp_path: Path) -> None:
    plan = replace(front_of("joined").plans[0], origin=None)
    save(plan, tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"\$\.origin\.machine: no machine .*\n.*certify=False"):
        load(tmp_path / "plan.json")
    assert isinstance(load(tmp_path / "plan.json", certify=False), Plan)


def test_a_bare_graph_has_a_program_too(tmp_path: Path) -> None:
    program = trace(joined, struct(1024, 64))
    mesh = [MeshShape(("x",), (8,))]
    front = optimize(program.graph, "cpu:8", mesh_shapes=mesh, settings=Settings(work=0.5))
    save(front, tmp_path / "front.json")
    loaded = load(tmp_path / "front.json")
    assert isinstance(loaded, Front) and isinstance(loaded.plans[0].program, Program)


def test_two_plans_of_one_name_are_refused() -> None:
    front = front_of("step")
    twice = replace(front, plans=(front.plans[0], front.plans[0]))
    with pytest.raises(PlanError, match="two plans have one name"):
        admit_front(twice, "front")
