"""Rows for the same neighbours: those that are there together go in one permute, and once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import PlanError
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.plans.plan import Plan
from tapestry_egg.runtime import compare
from tapestry_egg.runtime.emitted import audit
from tests.runtime.lowered import as_planned

Array = Any
QUICK = Settings(work=1.0, recompute=0, workers=1)
LINE, GRID = MeshShape(("x",), (8,)), MeshShape(("x", "y"), (4, 2))
#: Columns that eight devices cannot share, nor four.
ROWS, COLUMNS = 32, 18


def normal(*shape: int) -> Array:
    return np.asarray(np.random.default_rng(len(shape)).normal(size=shape), np.float32)


def planned(function: Callable[..., Any], arguments: Any, mesh: MeshShape, **pins: Any) -> Plan:
    """The plan that sends least of those whose arguments and results are cut along their last two
    dims."""

    def cut(x: Any) -> tuple[Any, ...]:
        last = ("x", "y" if len(mesh.sizes) > 1 else None)
        return (*[None] * (x.ndim - 2), *last)

    results = jax.tree.leaves(jax.eval_shape(function, *arguments))
    names = ["result"] if len(results) == 1 else [f"result[{k}]" for k in range(len(results))]
    own = {f"[{k}]": cut(x) for k, x in enumerate(arguments)}
    own |= {name: cut(x) for name, x in zip(names, results, strict=True)}
    program = te.trace(function, *arguments)
    front = te.optimize(
        program,
        "cpu:8",
        objectives=("seconds", "wire_bytes"),
        pins=own | pins,
        mesh_shapes=[mesh],
        settings=QUICK,
    )
    return front.best("wire_bytes")


def permutes(plan: Plan) -> list[int]:
    """Bytes of every permute of a plan, those of one permute together."""
    found: dict[int, int] = {}
    for k, c in enumerate(plan.collectives):
        if c.kind == "permute":
            key = -c.merged or k + 1
            found[key] = found.get(key, 0) + c.payload_bytes
    return sorted(found.values())


def run_as_planned(function: Callable[..., Any], arguments: Any, plan: Plan) -> None:
    """Numbers are those of `jax.jit`; the program sends what the plan says, as often."""
    run = as_planned(plan, arguments, jax.jit(function)(*arguments))
    compared = compare(plan, run.compile())
    assert all(r.planned_count == r.compiled_count for r in compared.rows)
    audit(plan)


#: D2Q9: every population moves on by one of these steps.
STEPS = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]


def lattice(f: Array) -> Array:
    """A lattice gas: populations move on, and relax towards their mean."""

    def round_(f: Array, _: None) -> tuple[Array, None]:
        f = jnp.stack([jnp.roll(f[k], by, (0, 1)) for k, by in enumerate(STEPS)])
        return f - 0.6 * (f - f.mean(0)), None

    return jax.lax.scan(round_, f, None, length=3)[0]


def rolled_in_numpy(f: Array) -> Array:
    f = np.asarray(f, np.float64)
    for _ in range(3):
        f = np.stack([np.roll(f[k], by, (0, 1)) for k, by in enumerate(STEPS)])
        f = f - 0.6 * (f - f.mean(0))
    return f


def far(x: Array) -> Array:
    """Differences of fourth order: two rows to either side."""
    near, wide = (jnp.roll(x, -n, 0) - jnp.roll(x, n, 0) for n in (1, 2))
    return 8.0 * near - wide


def diagonal(x: Array) -> Array:
    return sum(jnp.roll(x, (1, by), (0, 1)) for by in (-1, 0, 1))


def fields(x: Array, y: Array) -> Array:
    """Two fields, of which one is also changed on the way."""
    return jnp.roll(x, 1, 0) * 2.0 + jnp.roll(jnp.tanh(y), 2, 0) + jnp.roll(y * x, 1, 0)


def one_after_another(x: Array) -> Array:
    return jnp.roll(jnp.sin(jnp.roll(x, 1, 0)), 1, 0)


def two_types(x: Array) -> Array:
    return jnp.roll(x, 1, 0) + jnp.roll((x * 8).astype(jnp.int32), 1, 0)


def border(x: Array) -> Array:
    """Zeros come in at one end, and the other end at the other."""
    return jnp.roll(x, 1, 0) + jnp.pad(x, [(1, 0), (0, 0)])[:-1]


ROW, COLUMN = 4 * COLUMNS, 4 * (ROWS // 4)
#: Programs, meshes, and the bytes of every permute.
PROGRAMS: dict[str, tuple[Callable[..., Any], int, MeshShape, list[int]]] = {
    "two rows": (far, 1, LINE, [2 * ROW, 2 * ROW]),
    "the same row": (diagonal, 1, LINE, [ROW]),
    "fields": (fields, 2, LINE, [4 * ROW]),
    "one after another": (one_after_another, 1, LINE, [ROW, ROW]),
    "types": (two_types, 1, LINE, [ROW, ROW]),
    "border": (border, 1, LINE, [ROW, ROW]),
    # Two devices along y: the next one is the one before. Corners go with the rows that came.
    "corners": (diagonal, 1, GRID, [ROW // 2, 2 * COLUMN]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_for_one_neighbour_go_in_one_permute(name: str) -> None:
    function, count, mesh, sent = PROGRAMS[name]
    arguments = [normal(ROWS, COLUMNS) + k for k in range(count)]
    plan = planned(function, arguments, mesh)
    assert {c.kind for c in plan.collectives} == {"permute"}
    assert permutes(plan) == sorted(sent)
    run_as_planned(function, arguments, plan)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [LINE, GRID], ids=str)
def test_a_lattice_gas_sends_to_every_neighbour_once_a_round(mesh: MeshShape) -> None:
    """Nine members of a unit read the same array, each in a layout of its own if that were best."""
    f = normal(9, ROWS if mesh is LINE else 36, COLUMNS)
    plan = planned(lattice, [f], mesh)
    if mesh is LINE:
        assert permutes(plan) == [3 * ROW, 3 * ROW]
    else:  # the two along y are one, since the next device is the one before
        assert permutes(plan) == [3 * 4 * 9, 3 * 4 * 9, 6 * 4 * 9]
    assert {c.kind for c in plan.collectives} == {"permute"}
    assert all(c.count == 3 for c in plan.collectives)
    run_as_planned(lattice, [f], plan)
    got = te.compile(plan, jax.devices()[:8])(f)
    np.testing.assert_allclose(got, rolled_in_numpy(f), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_permute_of_many_rows_waits_once() -> None:
    """Its latency is counted once, in the search, the certificate and the price of each part."""
    arguments = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 3
    seconds, steps = [], []
    for count in (1, 2, 3):
        function = lambda *xs: sum(jnp.roll(x * 2.0, 1, 0) for x in xs)  # noqa: E731
        program = te.trace(function, *arguments[:count])
        pins = {**{f"[{k}]": ("x", None) for k in range(count)}, "result": ("x", None)}
        front = te.optimize(program, "h100:8", pins=pins, mesh_shapes=[LINE], settings=QUICK)
        plan = front.plans[0]
        told = [plan.collective(k) for k in range(len(plan.collectives))]
        assert len(told) == count and all(len(x.merged) == count - 1 for x in told)
        seconds.append(sum(x.seconds for x in told))
        steps.append(plan.costs.seconds)
        assert plan.bound <= plan.costs.seconds
    assert steps[2] - steps[0] < seconds[0], "no second latency"
    assert seconds[2] < 1.5 * seconds[0], "8 KiB more to send, and no more to wait for"


@pytest.mark.slow
def test_a_plan_that_sends_fewer_rows_than_it_says_is_refused() -> None:
    arguments = [normal(ROWS, COLUMNS)]
    plan = planned(far, arguments, LINE)
    first, *others = plan.collectives
    less = replace(first, payload_bytes=first.payload_bytes // 2, wire_bytes=first.wire_bytes / 2)
    with pytest.raises(PlanError, match="bytes by permute"):
        audit(replace(plan, collectives=(less, *others)))


def random_program(seed: int) -> Callable[..., Any]:
    """Shifts of three fields and of what is made of them, some of it by kernels of its own."""
    rng = np.random.default_rng(seed)
    steps = [[int(x) for x in rng.integers(0, 1 << 30, 5)] for _ in range(rng.integers(8, 18))]

    def run(*given: Array) -> tuple[Array, Array]:
        made = list(given)
        for kind, a, b, c, d in steps:
            x, y = made[a % len(made)], made[b % len(made)]
            match kind % 6:
                case 0 | 1 | 2:
                    z = jnp.roll(x, c % 5 - 2, d % 2) + (y if kind % 6 else 0)
                case 3:
                    z = jnp.roll(x, (c % 5 - 2, d % 3 - 1), (0, 1)) * y
                case 4:
                    z = jnp.tanh(x + y)
                case _:
                    z = 0.5 * x @ jnp.eye(16)
            made.append(z)
        return sum(made[3:]), made[-1]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 20, 103, 106, 120, 124])
def test_programs_of_shifts_send_what_was_planned(seed: int) -> None:
    """Some operations run before others that come first, to send with them, and take copies that
    these would have made."""
    arguments = [normal(32, 16) + k for k in range(3)]
    function, mesh = random_program(seed), LINE if seed % 2 else GRID
    pins = {"[1]": (None, "x"), "[2]": (None, None) if seed % 4 else (None, "x")}
    plan = planned(function, arguments, mesh, **pins)
    assert any(c.kind == "permute" for c in plan.collectives)
    run_as_planned(function, arguments, plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [220, 235])
@pytest.mark.filterwarnings("error")
def test_no_plan_takes_less_than_is_proven(seed: int) -> None:
    """Kernels whose rows an earlier kernel sends make way for others to send theirs together."""
    arguments = [normal(32, 16) + k for k in range(3)]
    cut = {f"[{k}]": ("x", "y" if seed % 2 == 0 else None) for k in range(3)}
    front = te.optimize(
        te.trace(random_program(seed), *arguments),
        "h100:8",
        ("seconds", "wire_bytes"),
        pins=cut,
        mesh_shapes=[LINE if seed % 2 else GRID],
        settings=QUICK,
    )
    assert all(p.bound <= p.costs.seconds for p in front.plans)
