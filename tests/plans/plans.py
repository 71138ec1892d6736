"""Plans made by hand or at random, for tests of what runs them.

Strategies come from the images of index blocks (`brute_ways.py`), and paths between layouts from a
few fixed moves: nothing here is shared with the search that makes real plans.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.metakernels.signatures.splits import split
from tapestry_egg.plans.collectives import after
from tapestry_egg.plans.plan import BodyPlan, Change, Costs, Kept, Plan, Strategy
from tests.extract.brute_ways import cut_layout, with_partials

Cuts = tuple[tuple[int, ...], ...]


class Illegal(Exception):
    """The cuts do not make a strategy."""


def strategy(
    signature: OperationSignature,
    mesh: MeshShape,
    cuts: Mapping[int, tuple[int, ...]],
    passing: tuple[int, tuple[int, ...]] | None = None,
) -> Strategy:
    """The strategy of cutting index dim d by the axes cuts[d], and of letting partial values pass:
    `passing` is a passage's number and axes. Raises Illegal."""
    sizes, roles = signature.extents, tuple(d.role for d in signature.index)
    full = tuple(cuts.get(d, ()) for d in range(len(sizes)))
    for n, role, axes in zip(sizes, roles, full, strict=True):
        if axes and (role == "whole" or n % mesh.parts(axes)):
            raise Illegal("a dim that is whole, or does not divide")
    ports = [*zip(signature.inputs, signature.input_types, strict=True)]
    ports += [*zip(signature.outputs, signature.output_types, strict=True)]
    inputs = len(signature.inputs)
    plain = [
        cut_layout(f, t.shape, sizes, full, mesh, roles, is_output=p >= inputs)
        for p, (f, t) in enumerate(ports)
    ]
    if None in plain:
        raise Illegal("no blocks of the output, or two cuts of one dim")
    layouts = with_partials(signature, full, plain, dict([passing] if passing else ()))
    if layouts is None:
        raise Illegal("two monoids")
    if any(
        x.partial and t.dtype.startswith("key<") for x, (_, t) in zip(layouts, ports, strict=True)
    ):
        raise Illegal("keys are never partial")
    return Strategy(full, tuple(layouts[:inputs]), tuple(layouts[inputs:]))


def path(source: Layout, target: Layout, rng: random.Random | None = None) -> tuple[Change, ...]:
    """Steps from one layout to another; with `rng`, by way of shortcuts taken at random."""
    steps: list[Change] = []
    layout = source

    def go(step: Change) -> None:
        nonlocal layout
        steps.append(step)
        layout = after(step, layout)

    def coin() -> bool:
        return rng is not None and rng.random() < 0.7

    keep = set(target.partial) & set(source.partial) if source.monoid == target.monoid else set()
    pending = tuple(a for a in source.partial if a not in keep)
    for k, axes in enumerate(target.dims):
        ahead = axes[len(layout.dims[k]) :]
        if axes[: len(layout.dims[k])] == layout.dims[k] and ahead and coin():
            if set(ahead) <= set(pending):
                go(Change("reduce_scatter", ahead, k, monoid=source.monoid))
                pending = tuple(a for a in pending if a not in ahead)
            for other in range(len(layout.dims)):
                if other != k and layout.dims[other][-len(ahead) :] == ahead:
                    go(Change("all_to_all", ahead, other, k))
    if pending:
        order = list(pending)
        if rng is not None:
            rng.shuffle(order)
        go(Change("all_reduce", tuple(order), monoid=source.monoid))
    for k, axes in enumerate(target.dims):
        common = 0
        for a, b in zip(layout.dims[k], axes, strict=False):
            if a != b:
                break
            common += 1
        if layout.dims[k][common:]:
            go(Change("all_gather", layout.dims[k][common:], k))
    for k, axes in enumerate(target.dims):
        if axes[len(layout.dims[k]) :]:
            go(Change("slice", axes[len(layout.dims[k]) :], k))
    fresh = tuple(a for a in target.partial if a not in layout.partial)
    if fresh:
        go(Change("to_partial", fresh, monoid=target.monoid))
    assert layout == target, (source, target, layout)
    return tuple(steps)


def finish(
    graph: BlockGraph,
    mesh: MeshShape,
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout, ...],
    strategies: tuple[Strategy, ...],
    kept: Mapping[int, Kept] | None = None,
    rng: random.Random | None = None,
) -> BodyPlan:
    """The body plan with the steps of every copy that its readers want."""
    have = dict(zip(graph.inputs, inputs, strict=True))
    have.update({v: Layout.replicated(graph.values[v].rank) for v in graph.constants})
    wanted: list[tuple[int, Layout]] = []
    for op, s in zip(graph.operations, strategies, strict=True):
        wanted += zip(op.inputs, s.needs, strict=True)
        have.update(zip(op.outputs, s.gives, strict=True))
    wanted += zip(graph.outputs, outputs, strict=True)
    copies = {(v, have[v], need): path(have[v], need, rng) for v, need in wanted if need != have[v]}
    return BodyPlan(graph, inputs, outputs, strategies, kept or {}, copies)


def make_plan(body: BodyPlan, mesh: MeshShape) -> Plan:
    return Plan(body.graph.name or "test", mesh, "cpu", body, Costs(0.0, 0, 0.0))


def plan_by_hand(
    graph: BlockGraph,
    mesh: MeshShape,
    cuts: Mapping[int, Mapping[str, tuple[int, ...]]],
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout, ...],
    kept: Mapping[int, Kept] | None = None,
) -> Plan:
    """A plan from the cuts of each operation by the names of its index dims, `{"b0": (0,)}`;
    operations that are not named run whole."""
    strategies = []
    for k, op in enumerate(graph.operations):
        signature = signature_of(graph, op)
        number = {d.name: i for i, d in enumerate(signature.index)}
        named = cuts.get(k, {})
        strategies.append(strategy(signature, mesh, {number[n]: a for n, a in named.items()}))
    return make_plan(finish(graph, mesh, inputs, outputs, tuple(strategies), kept), mesh)


def signature_of(graph: BlockGraph, op: Operation) -> OperationSignature:
    return registry.signature(
        op.kernel,
        op.params,
        tuple(graph.values[v] for v in op.inputs),
        tuple(graph.values[v] for v in op.outputs),
    )


# Random plans


def random_plan(graph: BlockGraph, mesh: MeshShape, rng: random.Random) -> Plan:
    """A plan with random cuts, layouts, passages and kept copies everywhere."""
    inputs = tuple(random_layout(graph, v, mesh, rng) for v in graph.inputs)
    outputs = tuple(random_layout(graph, v, mesh, rng) for v in graph.outputs)
    return make_plan(random_body(graph, mesh, rng, inputs, outputs), mesh)


def random_axes(mesh: MeshShape, rng: random.Random, free: list[int]) -> tuple[int, ...]:
    count = rng.choice([0, 1, 1, 1, 2])
    return tuple(rng.sample(free, min(count, len(free))))


def random_layout(graph: BlockGraph, v: int, mesh: MeshShape, rng: random.Random) -> Layout:
    type_ = graph.values[v]
    free = list(range(len(mesh.sizes)))
    dims: list[tuple[int, ...]] = []
    for n in type_.shape:
        axes = random_axes(mesh, rng, free)
        axes = axes if n % mesh.parts(axes) == 0 and n else ()
        free = [a for a in free if a not in axes]
        dims.append(axes)
    return Layout(tuple(dims))


def random_strategy(signature: OperationSignature, mesh: MeshShape, rng: random.Random) -> Strategy:
    for _ in range(20):
        free = list(range(len(mesh.sizes)))
        cuts = {}
        for d in rng.sample(range(len(signature.index)), len(signature.index)):
            axes = random_axes(mesh, rng, free)
            if axes:
                cuts[d] = axes
                free = [a for a in free if a not in axes]
        passing = None
        if signature.passages and free and rng.random() < 0.5:
            passing = (rng.randrange(len(signature.passages)), tuple(rng.sample(free, 1)))
        try:
            return strategy(signature, mesh, cuts, passing)
        except Illegal:
            continue
    return strategy(signature, mesh, {})


def stacked(layout: Layout) -> Layout:
    return Layout(((), *layout.dims), layout.partial, layout.monoid)


def random_region(op: Operation, mesh: MeshShape, rng: random.Random) -> Strategy:
    def layouts(graph: BlockGraph, values: tuple[int, ...]) -> list[Layout]:
        return [random_layout(graph, v, mesh, rng) for v in values]

    body = op.regions[-1]
    if op.kernel == "scan":
        consts, carries = op.params["num_consts"], op.params["num_carry"]
        inside = layouts(body, body.inputs)
        carry = inside[consts : consts + carries]
        slices = layouts(body, body.outputs[carries:])
        plan = random_body(body, mesh, rng, tuple(inside), tuple(carry + slices))
        needs = inside[: consts + carries] + [stacked(x) for x in inside[consts + carries :]]
        return Strategy((), tuple(needs), tuple(carry + [stacked(x) for x in slices]), (plan,))
    if op.kernel == "while":
        n, m = op.params["cond_nconsts"], op.params["body_nconsts"]
        test = op.regions[0]
        asked = layouts(test, test.inputs[:n])
        used = layouts(body, body.inputs[:m])
        carry = layouts(body, body.inputs[m:])
        plans = (
            random_body(test, mesh, rng, tuple(asked + carry), (Layout(()),)),
            random_body(body, mesh, rng, tuple(used + carry), tuple(carry)),
        )
        return Strategy((), tuple(asked + used + carry), tuple(carry), plans)
    operands = layouts(body, body.inputs)
    results = layouts(body, body.outputs)
    plans = tuple(random_body(r, mesh, rng, tuple(operands), tuple(results)) for r in op.regions)
    return Strategy((), (Layout(()), *operands), tuple(results), plans)


def random_body(
    graph: BlockGraph,
    mesh: MeshShape,
    rng: random.Random,
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout, ...],
) -> BodyPlan:
    strategies = []
    for op in graph.operations:
        if op.regions:
            strategies.append(random_region(op, mesh, rng))
        else:
            strategies.append(random_strategy(signature_of(graph, op), mesh, rng))
    kept = {}
    for op, s in zip(graph.operations, strategies, strict=True):
        for v, need in zip(op.inputs, s.needs, strict=True):
            if rng.random() < 0.3:
                kept[v] = Kept(need, rng.randrange(len(graph.operations) + 1))
    produced = dict(zip(graph.inputs, inputs, strict=True))
    for op, s in zip(graph.operations, strategies, strict=True):
        produced.update(zip(op.outputs, s.gives, strict=True))
    kept = {v: k for v, k in kept.items() if produced.get(v) != k.layout}
    return finish(graph, mesh, inputs, outputs, tuple(strategies), kept, rng)


def all_cuts(signature: OperationSignature, mesh: MeshShape) -> list[Strategy]:
    """Every legal strategy that cuts at most two index dims by one axis each."""
    n = len(signature.index)
    found = []
    for choice in product([None, *range(n)], repeat=len(mesh.sizes)):
        used = [d for d in choice if d is not None]
        if len(set(used)) < len(used):
            continue
        cuts = {d: (a,) for a, d in enumerate(choice) if d is not None}
        try:
            found.append(strategy(signature, mesh, cuts))
        except Illegal:
            continue
    return found


def legal_dims(signature: OperationSignature, parts: int) -> tuple[int, ...]:
    """The index dims that may be cut into `parts`, each on its own."""
    return tuple(d for d in range(len(signature.index)) if split(signature, {d: (parts,)}).legal)
