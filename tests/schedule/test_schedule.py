"""Fusion into units, the order of units, and what is computed where it is read, by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.metakernels import registry
from tapestry_egg.schedule.flatten import feedback_pairs, flatten
from tapestry_egg.schedule.inlining import fusion
from tapestry_egg.schedule.repeated import repeat_cheap
from tapestry_egg.schedule.schedules import (
    Schedule,
    in_order,
    operation_groups,
    order_of,
    schedule,
)
from tapestry_egg.schedule.schedules import scheduled as in_place
from tapestry_egg.tracing.constraints import KERNEL as CONSTRAINT
from tapestry_egg.tracing.trace import trace

N = 512
X = jax.ShapeDtypeStruct((N, N), jnp.float32)


def scheduled(f: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Schedule:
    graph = repeat_cheap(trace(f, *args, donate_argnums=donate).graph)
    return schedule(flatten(graph, feedback_pairs(graph)))


def kernels(schedule: Schedule) -> list[tuple[str, ...]]:
    """Per unit that is no port, the kernels of its members."""
    instances = schedule.program.instances
    return [
        tuple(instances[i].signature.kernel for i in unit.members)
        for unit in schedule.units
        if not instances[unit.root].port
    ]


def find(schedule: Schedule, kernel: str, which: int = 0) -> int:
    """The unit with the given member, the which-th of them."""
    instances = schedule.program.instances
    found = [
        u
        for u, unit in enumerate(schedule.units)
        if any(
            instances[i].signature.kernel == kernel and not instances[i].port for i in unit.members
        )
    ]
    return found[which]


def test_an_elementwise_chain_is_one_unit() -> None:
    (unit,) = kernels(scheduled(lambda x: jnp.tanh(jnp.exp(x) * 2 + 1), X))
    assert [k for k in unit if k != "broadcast_in_dim"] == ["exp", "mul", "add", "tanh"]


def test_contractions_stand_alone_and_reductions_take_their_operand_in() -> None:
    units = kernels(scheduled(lambda x, w: jnp.exp(x @ w).sum(0), X, X))
    assert units == [("dot_general",), ("exp", "reduce_sum")]


def test_a_value_with_two_readers_is_a_unit_of_its_own() -> None:
    units = kernels(scheduled(lambda x: (jnp.exp(x).sum(0), jnp.sin(x).max(1)), X))
    assert units == [("exp", "reduce_sum"), ("sin", "reduce_max")]

    def shared(x: jax.Array) -> Any:
        e = jnp.exp(x)
        return e.sum(0), e.max(1)

    assert kernels(scheduled(shared, X)) == [("exp",), ("reduce_sum",), ("reduce_max",)]


def test_what_reductions_share_is_computed_in_each() -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        e = jnp.exp(x @ w)
        return e.sum(0), e.max(1)

    plan = scheduled(f, X, X)
    fused = fusion(plan)
    e, dot = find(plan, "exp"), find(plan, "dot_general")
    assert [u for u, within in enumerate(fused.within) if within] == [e]
    (product,) = plan.units[dot].outputs
    assert fused.aligned[e] == {product}


@pytest.mark.parametrize(
    ("other", "over"),
    [
        (lambda w: w, True),
        (lambda w: w[0], True),
        (lambda w: w[::-1], True),
        (lambda w: w.T, False),
    ],
)
def test_a_kernel_that_turns_an_operand_writes_over_none(
    other: Callable[[jax.Array], jax.Array], over: bool
) -> None:
    plan = scheduled(lambda x, w: jnp.tanh((x @ w) * other(w)) @ w, X, X)
    (product,) = plan.units[find(plan, "dot_general")].outputs
    assert (product in fusion(plan).aligned[find(plan, "tanh")]) is over


def test_what_a_contraction_reads_is_stored() -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        e = jnp.exp(x @ w) * x
        return e.sum(0), e @ w

    plan = scheduled(f, X, X)
    assert not any(fusion(plan).within)


@pytest.mark.parametrize(("readers", "within"), [(2, True), (3, True), (4, False)])
def test_a_sum_of_two_is_stored_for_many_readers(readers: int, within: bool) -> None:
    """Apart 2 + 1 + r arrays move, within 2r."""
    reductions = (jnp.sum, jnp.max, jnp.min, jnp.prod)[:readers]

    def f(x: jax.Array, y: jax.Array) -> Any:
        z = x + y
        return [r(z, axis=0) for r in reductions]

    plan = scheduled(f, X, X)
    assert fusion(plan).within[find(plan, "add")] is within


def sgd(params: list[jax.Array], x: jax.Array) -> Any:
    def loss(params: list[jax.Array]) -> jax.Array:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return y.sum()

    grads = jax.grad(loss)(params)
    return ([w - 0.1 * g for w, g in zip(params, grads, strict=True)],)


def test_updates_run_when_their_gradient_is_there_and_nothing_reads_the_old_weight() -> None:
    plan = scheduled(sgd, [X, X, X], X, donate=(0,))
    instances = plan.program.instances
    olds = [instances[u.root].outputs[0] for u in plan.units if instances[u.root].port == "state"]
    news = [instances[u.root].inputs[0] for u in plan.units if instances[u.root].port == "state"]
    updates = [plan.producer[v] for v in news]
    assert updates[2] < updates[1] < updates[0]
    products = [
        u
        for u, unit in enumerate(plan.units)
        if instances[unit.root].signature.kernel == "dot_general"
    ]
    assert updates[2] < products[-1]  # before the last gradient is computed
    for old, update in zip(olds, updates, strict=True):
        assert all(u <= update for u in plan.readers[old] if not instances[plan.units[u].root].port)


def test_small_updates_wait_their_turn() -> None:
    small = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plan = scheduled(sgd, [small] * 3, small, donate=(0,))
    roots = [u.root for u in plan.units]
    assert roots == sorted(roots)


def loops(states: list[jax.Array], x: jax.Array) -> Any:
    """Loops that are the last to read something, the first one of what is computed last."""
    made = [jnp.cumsum(x @ s, 0) for s in states]

    def summed(rows: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, row: (c + jnp.sin(row).sum(), None), jnp.float32(0), rows)[0]

    sums = [summed(m) for m in reversed(made)]
    chosen = jax.lax.cond(sums[0] > 0, jnp.sin, jnp.cos, x)
    return [s * sums[0] for s in states], sums, chosen.sum()


@pytest.mark.parametrize("program", [sgd, loops])
def test_units_are_the_same_in_the_program_as_it_is_scheduled(program: Any) -> None:
    graph = trace(program, [X, X, X], X, donate_argnums=(0,)).graph
    pairs = feedback_pairs(graph)
    before = repeat_cheap(graph)
    order = order_of(flatten(before, pairs))
    assert order != sorted(order)
    regions = [k for k in order if before.operations[k].regions]
    assert program is sgd or regions != sorted(regions)
    found, wanted = in_place(graph, pairs), schedule(flatten(in_order(before, pairs), pairs))
    assert found.program.instances == wanted.program.instances
    assert found.units == wanted.units
    assert (found.producer, found.readers) == (wanted.producer, wanted.readers)


def test_in_order_is_the_schedule_as_a_program() -> None:
    program = trace(sgd, [X, X, X], X, donate_argnums=(0,))
    graph = repeat_cheap(program.graph)
    pairs = feedback_pairs(graph)
    arranged = in_order(graph, pairs)
    verify_graph(arranged)
    assert Counter(map(id, arranged.operations)) == Counter(map(id, graph.operations))
    assert arranged.operations != graph.operations
    flat = flatten(arranged, pairs)
    plan = schedule(flat)
    order = [k for group in operation_groups(flat, plan.units) for k in group]
    assert order == list(range(len(arranged.operations)))


def test_what_waits_for_what_is_sent_with_its_copy_has_its_place_in_that_order() -> None:
    """An order taken anew is the same: what frees memory comes before what waited until then."""

    def f(x: jax.Array, y: jax.Array, z: jax.Array) -> Any:
        one, third = jnp.cumsum(x, 1), jnp.cumsum(z, 1)
        early, other = jnp.cumsum(one, 0), jnp.cumsum(y, 1)
        some = jnp.einsum("ij,ij->i", third, other)
        return some, jnp.cumsum(other, 0), jnp.tanh(early)

    graph = trace(f, X, X, X).graph
    (early, one), (late, other) = (
        (k, op.inputs[0])
        for k, op in enumerate(graph.operations)
        if op.kernel == "cumsum" and op.params["axis"] == 0
    )

    def taken(graph: BlockGraph, readers: Sequence[int]) -> list[int]:
        flat = flatten(graph, {})
        values = flat.bodies[0].values
        sent = [(values[v], (k,)) for v, k in zip((one, other), readers, strict=True)]
        return order_of(flat, [sent])

    order = taken(graph, (early, late))
    makes = next(k for k, op in enumerate(graph.operations) if other in op.outputs)
    frees = next(k for k, op in enumerate(graph.operations) if op.kernel == "dot_general")
    assert order.index(makes) < order.index(frees) < order.index(early)
    arranged = replace(graph, operations=tuple(graph.operations[k] for k in order))
    again = taken(arranged, (order.index(early), order.index(late)))
    assert again == list(range(len(order)))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_sent_at_once_waits_as_every_two_of_it_would(seed: int) -> None:
    """Also where that cannot be, and where some of it enters the program."""
    rng = np.random.default_rng(seed)

    def f(*given: jax.Array) -> Any:
        made = [*given]
        for _ in range(24):
            a, b = rng.choice(len(made), 2)
            made.append(jnp.tanh(made[a]) @ made[b])
        return made[-6:]

    graph = trace(f, X, X, X).graph
    flat = flatten(graph, {})
    readers: dict[int, list[int]] = {}
    for k, op in enumerate(graph.operations):
        for v in op.inputs:
            readers.setdefault(flat.bodies[0].values[v], []).append(k)

    def order(together: Any) -> list[int] | None:
        try:
            return order_of(flat, together)
        except PlanError:
            return None

    found = set()
    for _ in range(30):
        sent = [
            (v, tuple(rng.choice(readers[v], rng.integers(len(readers[v])) + 1).tolist()))
            for v in rng.choice([*readers], rng.integers(2, 6), replace=False).tolist()
        ]
        made = order([sent])
        assert made == order([*combinations(sent, 2)])
        found.add("impossible" if made is None else made == order(()))
    assert found == {"impossible", True, False}


def test_a_region_is_one_operation_of_the_order() -> None:
    def f(x: jax.Array) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), c.sum()), x, None, length=3)

    graph = trace(f, X).graph
    flat = flatten(graph, {})
    groups = operation_groups(flat, schedule(flat).units)
    scan = [k for k, op in enumerate(graph.operations) if op.kernel == "scan"]
    assert [k for g in groups for k in g if k in scan] == scan


def test_an_operation_in_two_graphs_has_the_signature_of_each() -> None:
    params = {"new_sizes": [24], "dimensions": None, "sharding": None}
    op = Operation("reshape", (0,), (1,), params)
    flat = (TensorType((24,), "float32"),)
    for shape in ((4, 6), (2, 12), (4, 6)):
        types = (TensorType(shape, "float32"),)
        found = registry.signature_of(op, types, flat)
        assert found == registry.signature("reshape", params, types, flat)
        assert found.input_types == types
    negated = Operation("neg", (0,), (1,))
    for types in (flat, (TensorType((8,), "float32"),)):
        assert registry.signature_of(negated, types, types).output_types == types


def test_a_cheap_operation_is_repeated_for_every_other_reader() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = jnp.broadcast_to(x, (64, 8))
        return jnp.cumsum(wide, axis=0), jnp.sort(wide, axis=0)

    graph = repeat_cheap(trace(f, np.zeros(8, np.float32)).graph)
    wide = [op.outputs[0] for op in graph.operations if op.kernel == "broadcast_in_dim"]
    read = [op.inputs[0] for op in graph.operations if op.kernel in ("cumsum", "sort")]
    assert len(wide) == 2 and sorted(read) == sorted(wide)


def test_what_is_constrained_exists_once() -> None:
    mesh = AbstractMesh((2, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2)

    def f(x: Any, w: Any, v: Any) -> Any:
        spread = jnp.broadcast_to(x[None], (8, N, N))
        y = jax.lax.with_sharding_constraint(spread, NamedSharding(mesh, PartitionSpec("t")))
        return jnp.einsum("tmk,tkn->tmn", y, w), jnp.einsum("tmk,tmn->tkn", y, v)

    many = jax.ShapeDtypeStruct((8, N, N), jnp.float32)
    made = kernels(scheduled(f, X, many, many))
    assert sum("sharding_constraint" in unit for unit in made) == 1


def test_a_number_that_is_constrained_is_written_anew_for_every_reader() -> None:
    """As it is asked for it only leaves; what is no number everywhere is read as it is asked for.
    XLA drops the collective that would bring it into another layout."""
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    asked = NamedSharding(mesh, PartitionSpec(None, "x"))

    def f(x: jax.Array, row: jax.Array) -> Any:
        number, rows = (
            jax.lax.with_sharding_constraint(jnp.broadcast_to(a, (N, N)), asked)
            for a in (row.sum(), row)
        )
        return jnp.sort(x * number), jnp.sort(x - rows), number

    graph = repeat_cheap(trace(f, X, jax.ShapeDtypeStruct((N,), jnp.float32)).graph)
    made = {v: op for op in graph.operations for v in op.outputs}
    product, difference = (
        next(op for op in graph.operations if op.kernel == k) for k in ("mul", "sub")
    )
    assert made[product.inputs[1]].kernel == "broadcast_in_dim"
    assert made[difference.inputs[1]].kernel == made[graph.outputs[2]].kernel == CONSTRAINT


def test_what_products_read_of_several_arrays_is_put_together_once() -> None:
    """They read it from memory; what takes it in, as a sum of squares, puts it together itself."""

    def f(x: jax.Array, left: jax.Array, right: jax.Array, w: jax.Array) -> Any:
        ends = jnp.concatenate([x[left], x[right]], axis=-1)
        return ends @ w, ends.T @ jnp.tanh(ends @ w), jnp.sum(ends * ends)

    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 16), (32, 8))]
    places = jax.ShapeDtypeStruct((2048,), jnp.int32)
    graph = repeat_cheap(trace(f, types[0], places, places, types[1]).graph)
    made = {op.outputs[0] for op in graph.operations if op.kernel == "concatenate"}
    read = [v for op in graph.operations if op.kernel == "dot_general" for v in op.inputs]
    turned = {op.outputs[0]: op.inputs[0] for op in graph.operations if op.kernel == "transpose"}
    assert len({turned.get(v, v) for v in read} & made) == 1
    assert len(made) == 2


def test_parts_of_what_is_computed_are_taken_of_one_copy() -> None:
    """As where compilers find the same computed for both, and store it for what takes parts; a
    broadcast alone is no array, whoever takes a part."""

    def f(x: jax.Array, y: jax.Array) -> Any:
        outer = jnp.exp(x[:, None] * y)
        wide = jnp.broadcast_to(y, (N, N))
        return outer[::2] * outer[1::2], outer.sum(0), wide[::2], jnp.cumsum(wide[1:], axis=0)

    row = jax.ShapeDtypeStruct((N,), jnp.float32)
    graph = repeat_cheap(trace(f, row, row).graph)
    made = {v: op for op in graph.operations for v in op.outputs}
    parts = [op for op in graph.operations if op.kernel == "slice"]
    cut = [op.inputs[0] for op in parts if made[op.inputs[0]].kernel == "exp"]
    (added,) = (op.inputs[0] for op in graph.operations if op.kernel == "reduce_sum")
    assert len(cut) == 2 and len(set(cut)) == 1
    assert made[added].kernel == "exp" and added not in cut
    assert len({op.inputs[0] for op in parts if op.inputs[0] not in cut}) == 2
