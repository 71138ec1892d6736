"""Which copies may be merged: prices and the certificate say it apart, and say the same."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.merging import Kind, kind_of, most_bytes, payload
from tapestry_egg.extract.certify.moves import Move
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.engine.archive import Candidate
from tapestry_egg.extract.front.plans import make_plan
from tapestry_egg.extract.problem.assemble import assemble
from tapestry_egg.extract.problem.columns import Columns
from tapestry_egg.extract.problem.mergeable import Mergeable
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.of_plans import plan_schedule
from tapestry_egg.schedule.schedules import scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import trace

MESH, TARGET = MeshShape(("x", "y"), (2, 2)), load_target("h100:2x2")


def of_all_sorts(
    x: jax.Array, y: jax.Array, long: jax.Array, keys: jax.Array
) -> tuple[jax.Array, ...]:
    """Copies in loops, of keys, of maxima and products, by two steps, as large as one may be."""
    h, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ y), None), y, None, length=3)
    noise = jax.vmap(lambda k: jax.random.uniform(k))(keys)
    return (
        h,
        jnp.max(x, 0),
        jnp.prod(x, 1),
        jnp.sum(long, 0),
        noise,
        jnp.sort(jnp.sort(x, 0), 1),
    )


def test_prices_merge_the_copies_that_plans_may_merge() -> None:
    assert TARGET.combiner is not None
    square = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    small = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    long = jax.ShapeDtypeStruct((8, int(TARGET.combiner.bytes) // 4), jnp.float32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 64))
    graph = prepare(trace(of_all_sorts, square, small, long, keys).graph)
    plan = scheduled(graph, feedback_pairs(graph))
    found = saturate(encode(plan.program, MESH), load_books(("sharding", "collectives")))
    assembled = assemble(unit_choices(plan, found, MESH, TARGET))
    problem, mergeable = assembled.problem, Mergeable(Columns(assembled.choices))

    def planned(walk: Walk, move: Move) -> Kind | None:
        kind = kind_of(walk, move)
        alone = walk.body_of[move.value] or payload(walk, [move]) > most_bytes(walk, move)
        return None if alone else kind

    def priced(move: Move) -> Kind | None:
        table = assembled.choices.table(move.value)
        if mergeable.latency(move.value) is None:
            return None
        at = table.number[move.have], table.number[move.need]
        kinds = mergeable._moves(table).items()
        return next((k for k, pairs in kinds if at in zip(*pairs, strict=True)), None)

    rng = np.random.default_rng(0)
    seen: Counter[str] = Counter()
    for _ in range(60):
        rows = np.array([rng.integers(len(v)) for v in problem.variables])
        seconds, joules, profile = problem.evaluate(rows)
        one = Candidate(rows, seconds, float(profile.max()), joules)
        made = make_plan(assembled, one, "", 0.0)
        walk = Walk(made, Ground(plan_schedule(made.body, {}), TARGET))
        walk.find_moves()
        for move in walk.moves:
            kind = priced(move)
            assert kind == planned(walk, move)
            seen[kind[0] if kind else "alone"] += 1
            if kind is None and kind_of(walk, move):
                seen["in a loop" if walk.body_of[move.value] else "too large"] += 1
            if kind and payload(walk, [move]) == TARGET.combiner.bytes:
                seen["as large as one may be"] += 1
            seen["keys"] += walk.program.types[move.value].dtype.startswith("key<")
    assert seen.keys() >= {"all_gather", "all_reduce", "reduce_scatter", "in a loop", "too large"}
    assert seen["as large as one may be"] and seen["keys"]
