"""The e-graph decides which plans there are, and it decides right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import permutations
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.certify.legality import check_strategy
from tapestry_egg.extract.front.front import Front
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.graph.layout_algebra import LayoutAlgebra
from tapestry_egg.metakernels.signatures.signature import IndexDim, OperationSignature, Passage
from tapestry_egg.metakernels.signatures.splits import Blocks, split
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.plans.plan import BodyPlan, Plan, Strategy
from tapestry_egg.rules.language.book import RuleBook, load_book, load_books
from tapestry_egg.schedule.flatten import FlatProgram, Instance, flatten
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import Saturated, saturate
from tapestry_egg.tracing.trace import Program, trace
from tapestry_egg.zspace import Projection, ZRange
from tests.extract.brute_ways import all_cuts, every_layout, every_step, every_strategy
from tests.metakernels.test_legality import random_signature

f32 = jnp.float32
SHARDING, COLLECTIVES = load_book("sharding"), load_book("collectives")
MESH = MeshShape(("x", "y"), (2, 2))


def traced(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Program:
    return trace(function, *(jax.ShapeDtypeStruct(s, f32) for s in shapes), **options)


def front_of(
    program: Program, books: Iterable[Any], mesh: MeshShape = MESH, rules: Iterable[Any] = ()
) -> Front:
    return optimize(
        program,
        f"h100:{mesh.devices}",
        ("seconds", "peak_bytes"),
        books=tuple(books),
        rules=tuple(rules),
        mesh_shapes=[mesh],
        settings=Settings(work=30.0),
    )


def steps(front: Front) -> set[str]:
    """Kinds of elementary changes that some plan makes."""
    return {s.kind for p in front for path in p.body.copies.values() for s in path}


def layouts(plan: Plan) -> set[Layout]:
    body: BodyPlan = plan.body
    found = {*body.inputs, *body.outputs}
    for s in body.strategies:
        found |= {*s.needs, *s.gives}
    return found


def best(front: Front) -> float:
    return front[0].costs.seconds


# Rules removed, rules added


def mlp(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
    """Two products: the sum of the second is best cut, and scattered."""
    return jnp.tanh(x @ w) @ v


def two_sorts(x: jax.Array) -> jax.Array:
    """Rows want one layout, columns the other."""
    return jnp.sort(jnp.sort(x, axis=1), axis=0)


def two_sums(x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """Two products over cut sums, added before they are combined."""
    return x @ w + y @ v


def without(book: RuleBook, name: str, folder: Path) -> Path:
    """A file with the rules of a shipped book but one."""
    data = yaml.safe_load(Path(book.path).read_text())
    data["rules"] = [r for r in data["rules"] if r["name"] != name]
    path = folder / f"{book.name}-without.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def only(book: RuleBook, name: str, folder: Path) -> Path:
    """A user's file with one rule, under a name of its own."""
    data = yaml.safe_load(Path(book.path).read_text())
    (rule,) = [r for r in data["rules"] if r["name"] == name]
    path = folder / "mine.yaml"
    rule = {**rule, "name": f"my-{name}"}
    path.write_text(yaml.safe_dump({"ruleset": data["ruleset"], "rules": [rule]}))
    return path


CASES = [
    ("all-to-all", "all_to_all", two_sorts, [(4096, 4096)]),
    ("reduce-scatter", "reduce_scatter", mlp, [(256, 65536), (65536, 256), (512, 256)]),
    ("all-gather", "all_gather", mlp, [(1024, 4096), (4096, 1024), (1024, 1024)]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "kind", "function", "shapes"), CASES)
def test_a_collective_without_its_rule_is_in_no_plan(
    rule: str, kind: str, function: Any, shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    program = traced(function, *shapes)
    full = front_of(program, [SHARDING, COLLECTIVES])
    assert kind in steps(full)
    less = front_of(program, [SHARDING, without(COLLECTIVES, rule, tmp_path)])
    assert kind not in steps(less)
    again = front_of(program, [SHARDING, COLLECTIVES.without(rule)])
    assert [p.costs for p in again] == [p.costs for p in less]
    # The plans that needed it are gone, and what is left is no better than before.
    assert [p.costs for p in less] != [p.costs for p in full]
    for p in less:
        assert any(
            q.costs.seconds <= p.costs.seconds * 1.003
            and q.costs.peak_bytes <= p.costs.peak_bytes * 1.003
            for q in full
        )


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "kind", "function", "shapes"), CASES[:2])
def test_a_rule_in_a_users_file_brings_a_new_plan(
    rule: str, kind: str, function: Any, shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    program = traced(function, *shapes)
    books = [SHARDING, COLLECTIVES.without(rule)]
    less = front_of(program, books)
    more = front_of(program, books, rules=[only(COLLECTIVES, rule, tmp_path)])
    full = front_of(program, [SHARDING, COLLECTIVES])
    assert kind not in steps(less) and kind in steps(more)
    assert [p.costs for p in more] == [p.costs for p in full]


@pytest.mark.slow
def test_partial_values_wait_only_by_their_rule(tmp_path: Path) -> None:
    program = traced(two_sums, *[(64, 1 << 20), (1 << 20, 64)] * 2)

    def waiting(front: Front) -> bool:
        return any(n.partial for p in front for s in p.body.strategies for n in s.needs)

    assert waiting(front_of(program, [SHARDING, COLLECTIVES]))
    name = "pass-partial-values-through"
    less = front_of(program, [without(SHARDING, name, tmp_path), COLLECTIVES])
    assert not waiting(less)
    assert best(less) >= best(front_of(program, [SHARDING, COLLECTIVES])) * (1 - 1e-9)


@pytest.mark.slow
def test_without_the_split_rule_everything_is_replicated(tmp_path: Path) -> None:
    program = traced(mlp, (1024, 4096), (4096, 1024), (1024, 1024))
    full = front_of(program, [SHARDING, COLLECTIVES])
    assert any(x.axes for p in full for x in layouts(p))
    less = front_of(program, [without(SHARDING, "split", tmp_path), COLLECTIVES])
    assert len(less) == 1
    assert not any(x.axes for p in less for x in layouts(p))
    assert not less[0].body.copies and less[0].costs.wire_bytes == 0


def test_without_any_rule_for_running_there_is_no_plan() -> None:
    program = traced(mlp, (64, 64), (64, 64), (64, 64))
    with pytest.raises(Exception, match="no rule says how devices share"):
        front_of(program, [SHARDING.without("whole"), COLLECTIVES])


# One coefficient of the facts


def saturated(signatures: list[OperationSignature], mesh: MeshShape) -> Saturated:
    return saturate(encode(alone(signatures), mesh), load_books([SHARDING, COLLECTIVES]))


def alone(signatures: list[OperationSignature]) -> FlatProgram:
    """A program of operations that have nothing to do with each other."""
    types: list[TensorType] = []
    instances = []
    for s in signatures:
        reads = range(len(types), len(types) + len(s.input_types))
        types += s.input_types
        gives = range(len(types), len(types) + len(s.output_types))
        types += s.output_types
        instances.append(Instance(s, tuple(reads), tuple(gives), 1.0, 0, operation=0))
    return FlatProgram((), tuple(instances), tuple(types), {})


def derived(found: Saturated, s: int) -> set[Strategy]:
    signature = found.encoding.signatures[s]
    n = len(signature.inputs)
    return {Strategy(r.cuts, r.layouts[:n], r.layouts[n:]) for r in found.strategies[s]}


def test_a_coefficient_set_to_zero_removes_what_needs_it_and_nothing_else() -> None:
    program = flatten(traced(mlp, (8, 16), (16, 8), (4, 8)).graph)
    encoding = encode(program, MESH)
    books = load_books([SHARDING, COLLECTIVES])
    before = saturate(encoding, books)
    rows = [r for r in encoding.facts["coefficient"] if r[-1] != 0]
    products = [s for s, x in enumerate(encoding.signatures) if x.kernel in ("dot_general", "tanh")]
    rows = [r for r in rows if r[0] in products]
    assert len(rows) >= 8
    for row in rows:
        s, p, _, d, _ = (int(x) for x in row)
        facts = dict(encoding.facts)
        facts["coefficient"] = [(*r[:-1], 0) if r == row else r for r in facts["coefficient"]]
        after = saturate(type(encoding)(**{**vars(encoding), "facts": facts}), books)
        signature = encoding.signatures[s]
        needing = {x for x in derived(before, s) if x.cuts[d]}
        assert needing
        left = derived(after, s)
        assert derived(before, s) - left == needing
        if p >= len(signature.inputs):
            # A map dim that an output does not follow can not be cut at all.
            assert left <= derived(before, s)
        else:
            # The operand is then the same for all blocks, and replicated.
            fresh = left - derived(before, s)
            assert all(x.cuts[d] for x in fresh)
            for x in fresh:
                assert not set(x.cuts[d]) & set(x.needs[p].axes)
        for other in range(len(encoding.signatures)):
            if other != s:
                assert derived(after, other) == derived(before, other)


# Legality, against enumeration over the devices


def like_a_kernels(rng: Random) -> OperationSignature:
    """A random operation whose operands are read inside of their tensors; no output follows a
    joined dim, and what a reduction starts with is the same for all of its steps. Half of those
    with operands let partial values through."""
    while True:
        s = random_signature(rng)
        whole = ZRange.from_shape(s.extents)
        joined, reduced = (
            [d for d, dim in enumerate(s.index) if dim.role == role] for role in ("join", "reduce")
        )
        starts = [s.inputs[p] for p in s.initial]
        if (
            not any(row[d] for p in s.outputs for row in p.matrix for d in joined)
            and not any(row[d] for p in starts for row in p.matrix for d in reduced)
            and all(
                ZRange.from_shape(t.shape).contains(p.image(whole))
                for p, t in zip(s.inputs, s.input_types, strict=True)
            )
        ):
            break
    passages: tuple[Passage, ...] = ()
    if rng.random() < 0.5:
        group = tuple(p for p in range(len(s.inputs)) if rng.random() < 0.5) or (0,)
        passages = (Passage(group, "sum", rng.choice(("sum", "max"))),)
    return replace(s, passages=passages, reads=(None,) * len(s.inputs))


@pytest.mark.slow
@given(st.integers(0, 2**32), st.sampled_from([(2, 2), (4,), (2, 3)]))
@settings(max_examples=15)
def test_derived_strategies_are_the_legal_ones(seed: int, sizes: tuple[int, ...]) -> None:
    rng, mesh = Random(seed), MeshShape(("x", "y")[: len(sizes)], sizes)
    found = saturated([like_a_kernels(rng) for _ in range(25)], mesh)
    assert found.saturated
    for s, signature in enumerate(found.encoding.signatures):
        mine, legal = derived(found, s), every_strategy(signature, mesh)
        assert mine == legal, (signature, sorted(mine ^ legal, key=repr)[:1])
        for strategy in mine:
            check_strategy(signature, strategy, mesh)


@pytest.mark.slow
def test_the_rules_derive_what_three_digits_of_a_dim_share() -> None:
    """Three digits together on one side, apart or in other order on the other."""
    mesh, sizes = MeshShape(("x", "y", "z"), (2, 2, 2)), (2, 2, 4)
    index = tuple(IndexDim(f"i{d}", n, "map") for d, n in enumerate(sizes))

    def put_together(dims: tuple[tuple[int, ...], ...]) -> tuple[Projection, TensorType]:
        """A tensor each of whose dims has some index dims as its digits, major to minor."""
        matrix = [[0] * 3 for _ in dims]
        for row, own in zip(matrix, dims, strict=True):
            for n, d in enumerate(own):
                row[d] = prod(sizes[e] for e in own[n + 1 :])
        form = Projection(tuple(map(tuple, matrix)), (0,) * len(dims), (1,) * len(dims))
        return form, TensorType(tuple(prod(sizes[d] for d in own) for own in dims), "float32")

    one, whole = put_together(((0, 1, 2),))
    signatures = [
        OperationSignature("reshape", index, (one,), (two,), (whole,), (type_,), reads=(None,))
        for two, type_ in map(put_together, [((0,), (1,), (2,)), ((2,), (0, 1))])
    ]
    found = saturated(signatures, mesh)
    for number, s in enumerate(found.encoding.signatures):
        mine = derived(found, number)
        assert mine == every_strategy(s, mesh), s
        assert any(len(x.needs[0].dims[0]) == 3 and all(x.cuts) for x in mine)


def test_a_shift_into_padding_is_off_its_blocks() -> None:
    """Boxes as large as the blocks, in order, and one element off: the operand is gathered, or
    its devices exchange rows."""
    shifted, plain = Projection(((1,),), (-1,), (1,)), Projection.identity(1)
    tensor = TensorType((8,), "float32")
    s = OperationSignature(
        "pad",
        (IndexDim("i", 8, "map"),),
        (shifted,),
        (plain,),
        (tensor,),
        (tensor,),
        outside=("sum",),
    )
    assert split(s, {0: (4,)}).inputs == ({0: Blocks(0, 1, -1)},)
    mine = derived(saturated([s], MeshShape(("x",), (4,))), 0)
    whole = Layout(((),))
    wanted = {(((),), (whole,)), (((0,),), (whole,)), (((0,),), (Layout(((0,),)),))}
    assert {(x.cuts, x.needs) for x in mine} == wanted


def reshape_signature() -> OperationSignature:
    """`f32[8]` as `f32[2, 4]`: the operand's one dim has two digits."""
    return OperationSignature(
        "reshape",
        (IndexDim("major", 2, "map"), IndexDim("minor", 4, "map")),
        (Projection(((4, 1),), (0,), (1,)),),
        (Projection.identity(2),),
        (TensorType((8,), "float32"),),
        (TensorType((2, 4), "float32"),),
        reads=(None,),
    )


def test_major_digits_are_cut() -> None:
    found = saturated([reshape_signature()], MESH)
    assert Strategy(((0,), ()), (Layout(((0,),)),), (Layout(((0,), ())),)) in derived(found, 0)


def test_a_minor_digit_is_cut_once_the_digits_above_are_single() -> None:
    found = saturated([reshape_signature()], MESH)
    both = Strategy(((0,), (1,)), (Layout(((0, 1),)),), (Layout(((0,), (1,))),))
    assert both in derived(found, 0)


def test_a_view_is_no_part_of_what_it_shows() -> None:
    """A kernel reads its box out of a replica and stores it; a view stores nothing."""
    minor = Strategy(((), (0,)), (Layout(((),)),), (Layout(((), (0,))),))
    kernel = reshape_signature()
    found = saturated([kernel, replace(kernel, fusion="view")], MESH)
    assert minor in derived(found, 0)
    assert minor not in derived(found, 1)
    assert derived(found, 1) < derived(found, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_rows_taken_in_chunks_are_stored_as_promised() -> None:
    """The ledger leaves no plan out where loops go over rows that a reshape has stacked."""

    def mapped(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.map(lambda b: jnp.tanh(b @ w).sum(0), x.reshape(8, -1, 64))

    program = traced(mapped, (64, 64), (1024, 64))
    mesh = MeshShape(("x", "y"), (2, 4))
    assert len(optimize(program, "cpu:8", mesh_shapes=[mesh], settings=Settings(work=0.5))) > 1


# The layout algebra


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)])
def test_layouts_are_all_there_are(sizes: tuple[int, ...]) -> None:
    mesh = MeshShape(("x", "y", "z")[: len(sizes)], sizes)
    algebra = LayoutAlgebra(mesh, (0, 1, 2), ("max", "sum"))
    assert len(set(algebra.layouts)) == len(algebra.layouts)
    for rank in (0, 1, 2):
        tensor = TensorType((mesh.devices,) * rank, "float32")
        mine = {x for x in algebra.layouts if len(x.dims) == rank}
        assert mine == set(every_layout(tensor, mesh, ("max", "sum")))
    lists = {p for k in range(1, len(sizes) + 1) for p in permutations(range(len(sizes)), k)}
    assert set(algebra.axis_lists) == lists
    assert all(algebra.layouts[n] == x for x, n in algebra.number.items())


def test_composition_puts_disjoint_axes_together() -> None:
    algebra = LayoutAlgebra(MESH, (1, 2), ("max", "sum"))
    rows = {(a, b): c for a, b, c in algebra.facts()["compose"]}
    layouts_ = algebra.layouts
    for (a, b), c in rows.items():
        one, two, both = layouts_[a], layouts_[b], layouts_[c]
        assert rows[b, a] == c
        assert not set(one.axes) & set(two.axes)
        assert sorted(both.axes) == sorted(one.axes + two.axes)
        for x, y, z in zip(one.dims, two.dims, both.dims, strict=True):
            assert z == x + y and not (x and y)
        assert {one.monoid, two.monoid} - {None} == {both.monoid} - {None}
    for n, layout in enumerate(layouts_):
        whole = algebra.number[Layout.replicated(len(layout.dims))]
        assert rows[n, whole] == n
    for (a, b), c in list(rows.items())[:400]:
        for d in range(len(layouts_)):
            left, inner = rows.get((c, d)), rows.get((b, d))
            right = rows.get((a, inner)) if inner is not None else None
            assert left == right, "composition is associative where it is defined"


def test_changes_are_the_elementary_steps() -> None:
    """What the collectives' rules derive is what the steps' meaning allows, and all of it."""
    from tapestry_egg.errors import PlanError
    from tapestry_egg.plans.collectives import after
    from tapestry_egg.plans.plan import Change

    signature = OperationSignature(
        "sum",
        (IndexDim("a", 4, "map"), IndexDim("b", 4, "map"), IndexDim("c", 4, "reduce", "max")),
        (Projection.identity(3),),
        (Projection(((1, 0, 0), (0, 1, 0)), (0, 0), (1, 1)),),
        (TensorType((4, 4, 4), "float32"),),
        (TensorType((4, 4), "float32"),),
        reads=(None,),
    )
    found = saturated([signature], MESH)
    monoids = found.encoding.algebra.monoids
    mine = set()
    for c in found.changes:
        reduces = c.kind in ("all_reduce", "reduce_scatter", "to_partial")
        dim = c.dim if c.dim >= 0 else None
        other = c.other if c.other >= 0 and not reduces else None
        step = Change(c.kind, c.axes, dim, other, monoids[c.other] if reduces else None)
        several = c.kind == "permute" or (c.kind == "slice" and dim is None)
        step = replace(step, dims=c.target.dims if several else None)
        assert after(step, c.source) == c.target
        mine.add((c.source, c.target, c.kind))
    for layout in found.encoding.algebra.layouts:
        for step in every_step(len(layout.dims), MESH, monoids):
            try:
                target = after(step, layout)
            except PlanError:
                continue
            if target in found.encoding.algebra.number:
                assert (layout, target, step.kind) in mine
    blocks = {
        x: (x.local_shape((64,) * len(x.dims), MESH), x.partial, x.monoid)
        for x in found.encoding.algebra.layouts
    }
    pairs = {(a, b) for a, b in permutations(blocks, 2) if blocks[a] == blocks[b]}
    whole = {(c.source, c.target) for c in found.changes if c.kind == "permute" and c.dim < 0}
    assert pairs == whole
    parts = {
        (a, b)
        for a, b in permutations(blocks, 2)
        if len(a.dims) == len(b.dims) and (a.partial, a.monoid) == (b.partial, b.monoid)
        if all(y[: len(x)] == x for x, y in zip(a.dims, b.dims, strict=True))
    }
    assert parts == {(a, b) for a, b, kind in mine if kind == "slice"}


def test_cuts_of_everything_are_counted_right() -> None:
    """The oracle itself: two axes over two dims, in every order."""
    assert len(list(all_cuts(2, 2))) == 1 + 2 * 2 + 2 * 4
    assert ZRange((0,), (4,)) == Projection.identity(1).image(ZRange((0,), (4,)))
