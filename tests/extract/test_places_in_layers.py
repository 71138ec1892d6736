"""Equal layers that can be computed in several ways, all alike: one problem of all programs.

The programs are written down by hand, and each is posed alone; a solver finds the least seconds of
each, and of the one problem, within every peak. Programs as short as these are folded for the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.pins.boundary import Fixed, restrict
from tapestry_egg.extract.pins.pins import Pin
from tapestry_egg.extract.places.axis import Names
from tapestry_egg.extract.places.patched import patched
from tapestry_egg.extract.places.programs import Patched
from tapestry_egg.extract.problem.assemble import assemble
from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings
from tapestry_egg.pipeline.patching import Posed, Programs
from tapestry_egg.rewrite import folded_program, repeats
from tapestry_egg.rewrite import forms as forms_module
from tapestry_egg.rewrite.derivation import digest, replay
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rewrite.fused_forms import forms_with_streams
from tapestry_egg.rewrite.streams.streamed import RULE
from tapestry_egg.rules.language.book import Rule, load_books
from tapestry_egg.schedule.schedules import scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import trace
from tests.extract.labellings import agreeing
from tests.reference.exact import exact

Array = jax.Array
BOOKS = load_books(("algebra", "fusion", "sharding", "collectives"))
RULES = {r.name: r for b in BOOKS for r in b.rules}
MESH, TARGET = MeshShape(("x",), (4,)), load_target("h100:4")
LAYERS = 12


@pytest.fixture(autouse=True)
def short_programs_fold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(folded_program, "LEAST_OPERATIONS", 24)
    monkeypatch.setattr(folded_program, "_LEAST_SHARE", 0.9)
    for module in (folded_program, repeats):
        monkeypatch.setattr(module, "CONTEXT", 1)
    yield


def layers(right: bool, slack: bool = True) -> Callable[..., Array]:
    """Layers with a product of three factors, the last two of which are multiplied first where
    `right`; turned twice in vain where `slack`."""

    def run(h: Array, *factors: Array) -> Array:
        for k in range(LAYERS):
            a, b, c = factors[3 * k : 3 * k + 3]
            h = h.T.T if slack else h
            h = jnp.tanh(h + (a @ (b @ c) if right else (a @ b) @ c))
        return h

    return run


def shapes(m: int, k: int, n: int, p: int) -> list[jax.ShapeDtypeStruct]:
    own = [(m, p), *[(m, k), (k, n), (n, p)] * LAYERS]
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in own]


SHAPES = shapes(1024, 6, 1024, 512)


def fixed(graph: BlockGraph) -> Fixed:
    """All last factors are cut by columns."""
    found = []
    for k, v in enumerate(graph.inputs):
        shape = graph.values[v].shape
        dims = ((), ("x",)) if k and k % 3 == 0 else ((), ())
        found.append(Pin(k, "", "the test", shape, dims, False))
    return Fixed(tuple(found))


def placed() -> Form:
    """The form of the layers that has places."""
    graph = trace(layers(right=False), *SHAPES).graph
    found = forms(graph, BOOKS, TARGET, room=10_000)
    (form,) = (f for f in found if f.patches is not None)
    return form


def together(form: Form) -> Patched:
    """The one problem of all its programs."""
    assert form.patches is not None
    question: Any = SimpleNamespace(
        machine=TARGET,
        pairs={},
        books=BOOKS,
        settings=Settings(),
        words=SimpleNamespace(fixed=fixed(form.graph)),
    )
    programs = Programs(question, form, form.patches, scheduled(prepare(form.graph), {}))
    counts = [len(ways) for ways in form.patches.places]
    made = patched(Posed(programs, MESH), counts, Names(form.patches.values, programs.stands))
    assert made is not None and not made.left
    return made


def alone(right: bool) -> Problem:
    """The problem of one of the programs as it is written by hand."""
    graph = trace(layers(right, slack=False), *SHAPES).graph
    plan = scheduled(prepare(graph), {})
    choices = unit_choices(plan, saturate(encode(plan.program, MESH), BOOKS), MESH, TARGET)
    return assemble(restrict(choices, fixed(graph))).problem


@pytest.mark.slow
def test_one_problem_has_the_programs_whose_layers_are_all_alike() -> None:
    form = placed()
    laid = together(form)
    problems = [alone(right) for right in (False, True)]
    sizes = [float(sum(u.amount.max() for v in p.variables for u in v.uses)) for p in problems]
    apart = []
    for limit in np.geomspace(max(sizes) / 64, max(sizes), 4):
        one, other = (exact(p, float(limit)) for p in problems)
        found = exact(laid.problem, float(limit))
        assert found <= min(one, other) * (1 + 2e-6), "but for what the solver leaves open"
        apart.append(one != pytest.approx(other, rel=1e-3))
    assert any(apart)


@pytest.mark.long
def test_every_labelling_is_one_of_its_own_program_at_the_same_costs() -> None:
    form = placed()
    assert form.patches is not None
    laid = together(form)
    drawn = list(agreeing(laid, 25))
    assert len({ways for ways, *_ in drawn}) > 15


def test_places_are_of_the_program_whose_equal_values_are_merged() -> None:
    """Nothing is turned twice first; then a place changes every copy of its layer, and the places
    together make what is written by hand. Steps lead there."""
    graph = trace(layers(right=False), *SHAPES).graph
    form = placed()
    assert form.patches is not None
    by_hand = [digest(trace(layers(r, slack=False), *SHAPES).graph) for r in (False, True)]
    assert digest(form.graph) == by_hand[0] and form.rules
    count = len(form.patches)
    single = [form.patches.built([p == k for p in range(count)]) for k in range(count)]
    changed = [len(b.stands[()]) for b in single if b is not None]
    assert sum(changed) == LAYERS and max(changed) > 1
    every = form.patches.built([1] * count)
    assert every is not None and digest(every.graph) == by_hand[1]
    made = replay(graph, [*form.steps, *every.steps], RULES)
    assert digest(made[-1]) == by_hand[1]


def test_ways_that_make_no_program_alone_are_counted() -> None:
    patches = placed().patches
    assert patches is not None
    fewer = patches.only(lambda ways: not ways[0])
    assert len(fewer) == len(patches) - 1
    assert fewer.left == patches.left + len(patches.places[0]) - 1


def test_equal_layers_count_once_against_the_room_for_ways() -> None:
    """Ways of them are as many programs of the folded one's operations."""
    patches = placed().patches
    assert patches is not None and 0 < patches.distinct < patches.graph.size
    for most in (1, 2):
        fewer = patches.within((1 + most) * patches.distinct)
        assert sum(len(ways) - 1 for ways in fewer.places) == most
        assert fewer.left == patches.left + len(patches) - most


def test_equal_values_are_merged_only_where_a_proof_of_it_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else no file with a plan of it would be read."""
    whole = forms_module._is_proven

    def refused(graph: BlockGraph, form: Form, rules: Sequence[Rule]) -> bool:
        return not form.extra and whole(graph, form, rules)

    graph, merged = trace(layers(right=False), *SHAPES).graph, digest(placed().graph)
    monkeypatch.setattr(forms_module, "_is_proven", refused)
    found = forms(graph, BOOKS, TARGET, room=10_000)
    assert merged not in {digest(f.graph) for f in found}


def test_ways_of_layers_that_no_proof_is_found_of_alone_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the whole program, whatever is proven of the folded one."""
    whole, size = forms_module._is_proven, placed().graph.size

    def refused(graph: BlockGraph, form: Form, rules: Sequence[Rule]) -> bool:
        of_all = form.graph.size >= size and not form.extra
        return not of_all and whole(graph, form, rules)

    graph = trace(layers(right=False), *SHAPES).graph
    monkeypatch.setattr(forms_module, "_is_proven", refused)
    found = forms(graph, BOOKS, TARGET, room=10_000)
    assert not any(f.patches for f in found)


@pytest.mark.slow
def test_layers_take_the_way_that_their_factors_suit(tmp_path: Path) -> None:
    """On one device both ways take the same; the plan of the better one computes what the program
    does and is read again."""
    given = shapes(256, 256, 256, 256)

    def front(room: int) -> te.Front:
        program = te.trace(layers(right=False), *given)
        pins = {f"[{k}]": (None, "x" if k and k % 3 == 0 else None) for k in range(len(given))}
        settings = Settings(workers=1, work=2.0, merge=False, recompute=0, forms=room)
        mesh = [MeshShape(("x",), (8,))]
        return te.optimize(program, "h100:8", mesh_shapes=mesh, pins=pins, settings=settings)

    plan = front(10_000)[0]
    assert "product-from-the-right" in plan.rules
    assert plan.costs.seconds < 0.99 * front(0)[0].costs.seconds
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(rng.normal(size=s.shape) / 16, jnp.float32) for s in given]
    np.testing.assert_allclose(
        te.compile(plan)(*inputs), layers(right=False)(*inputs), rtol=1e-3, atol=1e-4
    )
    te.save(plan, tmp_path / "plan.json")
    again = te.load(tmp_path / "plan.json")
    assert isinstance(again, te.Plan) and again.costs == plan.costs


# Beside fused attention


def attended(x: Array, q: Array, k: Array, v: Array, *factors: Array) -> Array:
    """Attention, and products of three factors of which it reads nothing."""
    heads = [(x @ w).reshape(2, 512, 4, 64).transpose(0, 2, 1, 3) for w in (q, k, v)]
    scores = jax.nn.softmax(heads[0] @ heads[1].swapaxes(-1, -2) / 8.0, axis=-1)
    h = (scores @ heads[2]).transpose(0, 2, 1, 3).reshape(2, 512, 256)
    for a, b, c in zip(factors[::3], factors[1::3], factors[2::3], strict=True):
        h = h + (a @ b) @ c
    return h


def bare(q: Array, k: Array, v: Array, *factors: Array) -> Array:
    """The same of one head whose scores are made of what enters: no values are equal."""
    h = jax.nn.softmax(q @ k.T / 8.0, axis=-1) @ v
    for a, b, c in zip(factors[::3], factors[1::3], factors[2::3], strict=True):
        h = h + (a @ b) @ c
    return h


@pytest.mark.slow
@pytest.mark.parametrize("program", [attended, bare])
def test_programs_with_fused_attention_have_places(program: Callable[..., Array]) -> None:
    """Beside the form that rules find, which multiplies some of the factors first."""
    dtype = jnp.bfloat16  # in which cuDNN has attention
    square = jax.ShapeDtypeStruct((256, 256), dtype)
    rows = jax.ShapeDtypeStruct((512, 256), dtype)
    own = {attended: [jax.ShapeDtypeStruct((2, 512, 256), dtype), *[square] * 3]}
    many = [jax.ShapeDtypeStruct(s, dtype) for s in [(512, 256), (256, 256), (256, 256)] * 4]
    graph = trace(program, *own.get(program, [rows] * 3), *many).graph
    found = forms_with_streams(graph, BOOKS, TARGET, room=10_000)
    placed = [f for f in found if f.patches is not None and RULE in f.rules]
    assert any(not f.extra and {RULE} < {*f.rules} for f in found)
    assert len(placed) == 1 and len(placed[0].patches or ()) >= 4
    assert (placed[0].rules == (RULE,)) == (program is bare)
    built = placed[0].patches.built([1] * len(placed[0].patches)) if placed[0].patches else None
    assert built is not None and built.rules
