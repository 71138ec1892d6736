"""Windows and shifts over a dim that devices share: neighbours send the rows at their ends."""

from __future__ import annotations

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
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.certify.certificate import walked
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.plans.exchanges import AHEAD, Exchange, Reader, rounds, sent_together
from tapestry_egg.plans.plan import Plan
from tapestry_egg.runtime.emitted import audit
from tests.runtime.lowered import as_planned

Array = Any
NHWC = ("NHWC", "HWIO", "NHWC")
#: No other forms: what is tried here are layouts.
QUICK = Settings(work=0.3, recompute=0, forms=0)
ROWS = MeshShape(("x",), (8,))


def normal(*shape: int) -> Array:
    rng = np.random.default_rng(sum(shape))
    return np.asarray(rng.normal(size=shape), np.float32)


def convolved(x: Array, w: Array, stride: int = 1) -> Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=NHWC)


def pooled(x: Array, combine: Any, start: float) -> Array:
    return lax.reduce_window(x, start, combine, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def depthwise(x: Array, w: Array) -> Array:
    """Holes in the window, and channels first."""
    return lax.conv_general_dilated(
        *(x, w, (1, 1), "SAME"),
        rhs_dilation=(1, 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=3,
    )


def valid(x: Array, w: Array, *how: int) -> Array:
    """Strides and holes of rows, and no padding."""
    stride, holes = how or (1, 1)
    return lax.conv_general_dilated(
        *(x, w, (stride, 1), "VALID"), rhs_dilation=(holes, 1), dimension_numbers=NHWC
    )


def looped(x: Array, w: Array) -> Array:
    return lax.scan(lambda x, w: (jnp.tanh(convolved(x, w)), None), x, w)[0]


def gradients(x: Array, w: Array) -> Array:
    return jax.grad(lambda x, w: (convolved(x, w) ** 2).sum(), (0, 1))(x, w)


def greatest(x: Array) -> Array:
    """Pooling and its gradient read the same rows."""
    return jax.grad(lambda x: (jnp.tanh(pooled(x, lax.max, -jnp.inf)) ** 2).sum())(x)


def shifted(x: Array, n: int = 2) -> Array:
    """Rows move on, and others come in from outside; what is moved is computed on the fly."""
    return x + lax.pad(x * 2.0, 1.5, [(0, 0, 0), (n, -n, 0), (0, 0, 0), (0, 0, 0)])


def differences(x: Array, n: int = 1) -> Array:
    """Of what stands before and after, inside; the border stays."""
    return jnp.asarray(x).at[:, n:-n].set(jnp.sin(x[:, 2 * n :]) - x[:, : -2 * n] * x[:, n:-n])


def steps(x: Array) -> Array:
    """Steps of heat along rows, with zeros at the border."""

    def step(x: Array) -> Array:
        inside = x[:, 1:-1] + 0.1 * (x[:, 2:] + x[:, :-2] - 2.0 * x[:, 1:-1])
        return jnp.pad(inside, [(0, 0), (1, 1), (0, 0), (0, 0)])

    return lax.scan(lambda x, _: (step(x), None), x, length=4)[0]


def wrapped(x: Array) -> Array:
    y = jnp.pad(x, [(0, 0), (1, 1), (0, 0), (0, 0)], "wrap")
    return y[:, 2:] - y[:, :-2]


X, W = normal(1, 32, 6, 3), normal(3, 3, 3, 5)
#: Programs, their arguments, and the rows that a device of eight sends of 32: to the next one, and
#: to the one before.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Array, ...], list[int]]] = {
    "convolution": (convolved, (X, W), [1, 1]),
    "strides": (lambda x, w: convolved(x, w, 2), (X, W), [1]),
    "even window": (convolved, (X, normal(4, 2, 3, 5)), [1, 2]),
    "two": (
        lambda x, w, v: convolved(convolved(x, w), v),
        (X, W, normal(5, 1, 5, 2)),
        [1, 1, 2, 2],
    ),
    "depthwise": (depthwise, (X, normal(3, 3, 1, 6)), [1, 1]),
    "max": (lambda x: pooled(x, lax.max, -jnp.inf), (-abs(X),), [1]),
    "sum": (lambda x: pooled(x, lax.add, 0.0), (X,), [1]),
    "loop": (looped, (X, normal(2, 3, 3, 3, 3)), [1, 1]),
    # Of blocks of eight rows (nine, with strides) blocks of seven (four) are made.
    "no padding": (valid, (normal(1, 64, 6, 3), normal(9, 3, 3, 5)), [7, 7]),
    "no padding, strides": (
        lambda x, w: valid(x, w, 2, 1),
        (normal(1, 72, 6, 3), normal(9, 3, 3, 5)),
        [7, 6],
    ),
    "no padding, holes": (
        lambda x, w: valid(x, w, 1, 4),
        (normal(1, 64, 6, 3), normal(3, 3, 3, 5)),
        [7, 7],
    ),
    "shift": (shifted, (X,), [2]),
    "shift back": (lambda x: shifted(x, -1), (X,), [1]),
    "every second row": (lambda x: jnp.tanh(x[:, ::2]), (X,), []),
    "slice and pad": (
        lambda x: jnp.pad(jnp.sin(x)[:, :-2], [(0, 0), (2, 0), (0, 0), (0, 0)]),
        (X,),
        [2],
    ),
    "zeros before": (
        lambda x: jnp.concatenate([jnp.zeros((1, 1, 6, 3)), x[:, :-1]], 1),
        (X,),
        [1],
    ),
    "ring": (lambda x: jnp.roll(x, 1, 1), (X,), [1]),
    "ring back": (lambda x: x - jnp.roll(jnp.sin(x), -3, 1), (X,), [3]),
    "ring both ways": (lambda x: jnp.roll(x, 2, 1) - jnp.roll(x, -1, 1), (X,), [2, 1]),
    "ring of two dims": (lambda x: jnp.roll(x, (1, 2), (1, 2)), (X,), [1]),
    "wrapped": (wrapped, (X,), [1, 1]),
    "ends stay": (
        lambda x: x - jnp.concatenate([x[:, :1], x[:, :-1]], 1),
        (X,),
        [1],
    ),
    "inside": (differences, (X,), [1, 1]),
    "further inside": (lambda x: differences(x, 2), (X,), [2, 2]),
    "steps": (steps, (X,), [1, 1]),
}


def least(function: Callable[..., Any], arguments: tuple[Array, ...], target: str) -> Plan:
    """The plan of least memory with the first argument in blocks of rows, and the results."""
    program = te.trace(function, *arguments)
    ranks = [len(x.shape) for x in jax.tree.leaves(jax.eval_shape(function, *arguments))]
    pins: dict[str, Any] = {"[0]": (None, "x", None, None)}
    if len(ranks) == 1:
        pins["result"] = (None, "x", None, None)
    front = te.optimize(program, target, pins=pins, mesh_shapes=[ROWS], settings=QUICK)
    return front.best("peak_bytes")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_devices_send_the_rows_that_their_neighbours_lack(name: str) -> None:
    function, arguments, rows = PROGRAMS[name]
    plan = least(function, arguments, "cpu:8")
    as_planned(plan, arguments, function(*arguments))
    assert {c.kind for c in plan.collectives} <= {"permute", "all_reduce"}, "nothing is gathered"
    sent = [c for c in plan.collectives if c.kind == "permute"]
    assert len(sent) == len(rows)
    assert all(c.group == 8 and c.wire_bytes == c.payload_bytes for c in sent)
    widths = [3, 3, 5, 5] if name == "two" else [3] * len(rows)
    assert [c.payload_bytes for c in sent] == [
        4 * n * 6 * channels for n, channels in zip(rows, widths, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradients", "greatest"])
def test_gradients_give_the_numbers_and_move_what_was_planned(name: str) -> None:
    """A gradient sums over what it shares; one of pooling reads what pooling has read: every
    operation sends its rows, though a compiler would rather send them once."""
    function, arguments = {"gradients": (gradients, (X, W)), "greatest": (greatest, (X,))}[name]
    program = te.trace(function, *arguments)
    pins = {"[0]": (None, "x", None, None)}
    front = te.optimize(program, "cpu:8", pins=pins, mesh_shapes=[ROWS], settings=QUICK)
    assert any(c.kind == "permute" for p in front.plans for c in p.collectives)
    for plan in front.plans:
        as_planned(plan, arguments, function(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
def test_neighbours_are_those_of_the_blocks_whatever_the_order_of_axes(
    order: tuple[str, ...],
) -> None:
    mesh, arguments = MeshShape(("x", "y"), (4, 2)), (normal(1, 16, 16, 3), W)
    pins = {"[0]": (None, order, None, None), "result": (None, order, None, None)}
    program = te.trace(convolved, *arguments)
    front = te.optimize(program, "cpu:8", pins=pins, mesh_shapes=[mesh], settings=QUICK)
    plan = front.best("peak_bytes")
    assert [(c.kind, c.axes) for c in plan.collectives] == [("permute", order)] * 2
    as_planned(plan, arguments, convolved(*arguments))


@pytest.mark.slow
def test_corners_come_from_the_neighbours_of_neighbours() -> None:
    """Cut along both dims: rows go first, then columns with the rows that came."""
    mesh, arguments = MeshShape(("x", "y"), (4, 2)), (normal(1, 16, 12, 3), W)
    pins = dict.fromkeys(("[0]", "result"), (None, "x", "y", None))
    program = te.trace(convolved, *arguments)
    front = te.optimize(program, "cpu:8", pins=pins, mesh_shapes=[mesh], settings=QUICK)
    plan = front.best("peak_bytes")
    row, column = 4 * 6 * 3, 4 * (4 + 2) * 3  # bytes
    assert [c.payload_bytes for c in plan.collectives] == [row, row, column, column]
    as_planned(plan, arguments, convolved(*arguments))


@pytest.mark.slow
def test_what_no_device_reads_is_not_sent() -> None:
    """A window of one that steps by two reads every second column only up to the last but one."""
    mesh, arguments = MeshShape(("x",), (4,)), (normal(1, 8, 4, 3), normal(2, 3, 3, 4))
    function = lambda x, w: lax.conv_general_dilated(  # noqa: E731
        *(x, w, (1, 2), ((1, 0), (0, 0))), dimension_numbers=NHWC
    )
    pins = dict.fromkeys(("[0]", "result"), (None, "x", None, None))
    program = te.trace(function, *arguments)
    front = te.optimize(program, "cpu:4", pins=pins, mesh_shapes=[mesh], settings=QUICK)
    plan = front.best("peak_bytes")
    assert [(c.kind, c.payload_bytes) for c in plan.collectives] == [("permute", 4 * 3 * 3)]
    as_planned(plan, arguments, function(*arguments))


def lacked(out: int, parts: int, stride: int, hole: int, low: int) -> tuple[list[int], list[int]]:
    """Rows that a device sends, one way and the other, for a convolution of windows of three and
    for its gradient with respect to the operand: by what each device reads, counted out."""

    def sides(made: int, read: int, reads: Callable[[int], list[int]]) -> list[int]:
        own, block, most = made // parts, read // parts, [0, 0]
        for j in range(parts):
            rows = [r for i in range(j * own, (j + 1) * own) for r in reads(i) if 0 <= r < read]
            most[0] = max(most[0], j * block - min(rows))
            most[1] = max(most[1], max(rows) + 1 - (j + 1) * block)
        return [n for n in most if n]

    def back(i: int) -> list[int]:
        return [p for p in range(out) if i in [stride * p + hole * k - low for k in range(3)]]

    forward = sides(out, out * stride, lambda p: [stride * p + hole * k - low for k in range(3)])
    return forward, sides(out * stride, out, back)


#: Mesh, rows, columns, stride and hole of two convolutions one after another.
STEPS = {
    "rows and columns": (MeshShape(("x", "y"), (2, 4)), 30, 60, 1, 1),
    "strides": (ROWS, 64, 16, 2, 1),
    "holes": (ROWS, 64, 16, 1, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_case_26_a_train_step_sends_edges_and_sums_gradients_of_weights(name: str) -> None:
    """Both convolutions, the gradient of what is between them and those of both kernels take the
    edges of blocks; the gradients of kernels are summed, and nothing is gathered."""
    mesh, rows, columns, stride, hole = STEPS[name]
    x, w, v = normal(1, rows, columns, 4), 0.3 * normal(3, 3, 4, 4), 0.3 * normal(3, 3, 4, 4)

    def convolution(x: Array, w: Array) -> Array:
        return lax.conv_general_dilated(
            *(x, w, (stride, stride), "SAME"), rhs_dilation=(hole, hole), dimension_numbers=NHWC
        )

    def step(x: Array, w: Array, v: Array) -> tuple[Array, Array]:
        loss = lambda w, v: (convolution(jnp.tanh(convolution(x, w)), v) ** 2).sum()  # noqa: E731
        one, two = jax.grad(loss, (0, 1))(w, v)
        return w - 0.1 * one, v - 0.1 * two

    whole = (None,) * 4
    pins = {f: whole for f in ("[1]", "[2]", "result[0]", "result[1]")}
    pins["[0]"] = (None, "x", "y" if len(mesh.sizes) > 1 else None, None)
    program = te.trace(step, x, w, v)
    front = te.optimize(
        program,
        "cpu:8",
        objectives=("seconds", "wire_bytes"),
        pins=pins,
        mesh_shapes=[mesh],
        settings=QUICK,
    )
    plan = front.best("wire_bytes")
    as_planned(plan, (x, w, v), step(x, w, v))

    extents, parts = (rows, columns), (*mesh.sizes, 1)[:2]
    low = [max(0, (n // stride - 1) * stride + 2 * hole + 1 - n) // 2 for n in extents]
    sent = []  # bytes of every permute
    for times, shrunk, backward in ((2, 1, False), (2, stride, False), (1, stride**2, True)):
        have = [n // shrunk for n in extents]  # of what is read
        edges = [
            lacked(*(n if backward else n // stride, m, stride, hole, a))[backward]
            for n, m, a in zip(have, parts, low, strict=True)
        ]
        wide = have[1] // parts[1]
        sent += times * [4 * 4 * n * wide for n in edges[0]]
        if parts[1] > 1:  # columns go with the rows that came
            sent += times * [4 * 4 * n * (have[0] // parts[0] + sum(edges[0])) for n in edges[1]]
    assert sorted(c.payload_bytes for c in plan.collectives if c.kind == "permute") == sorted(sent)
    others = [c for c in plan.collectives if c.kind != "permute"]
    assert all(c.payload_bytes <= w.nbytes for c in others), "only of kernels"
    assert plan.costs.wire_bytes == sum(sent) + 2 * (w.nbytes + v.nbytes) * 7 / 8


@pytest.mark.slow
def test_plans_that_exchange_rows_are_read_back_and_certified(tmp_path: Path) -> None:
    pins = dict.fromkeys(("[0]", "result"), (None, "x", None, None))
    program = te.trace(convolved, X, W)
    front = te.optimize(program, "cpu:8", pins=pins, mesh_shapes=[ROWS], settings=QUICK)
    front.save(tmp_path / "front")
    assert [p.costs for p in te.load(tmp_path / "front").plans] == [p.costs for p in front.plans]
    plan = front.best("peak_bytes")
    assert plan.collectives
    kernels = [op.kernel for op in plan.graph.operations]
    k, strategies = kernels.index("conv_general_dilated"), list(plan.body.strategies)
    strategy = strategies[k]
    gathered = replace(strategy, needs=(Layout.replicated(4), strategy.needs[1]))
    for wrong in (
        replace(strategy, needs=(Layout(((), (), (0,), ())), strategy.needs[1])),
        replace(strategy, needs=(strategy.needs[0], Layout(((0,), (), (), ())))),
        gathered,
    ):
        strategies[k] = wrong
        body = replace(plan.body, strategies=tuple(strategies))
        with pytest.raises(ExtractError):
            walked(replace(plan, body=body), "plan")


@pytest.mark.slow
def test_it_is_told_who_sends_which_rows_and_why() -> None:
    plan = least(convolved, (X, W), "h100:8")
    back = [c for c in range(len(plan.collectives)) if plan.collectives[c].kind == "permute"][1]
    told = plan.collective(back)
    assert (told.value, told.have) == ("[0]", "[., x, ., .]")
    assert told.need == "the same with 1 row after its block along dim 1"
    assert told.reason.startswith("conv_general_dilated")
    assert told.reason.endswith("reads 1 row after its block, which the device beside it has")
    assert told.seconds < 20e-6 and "previous device" in str(told)
    way = plan.tensor("[0]")
    assert set(way.collectives) >= {back - 1, back}
    (read,) = [r for r in way.reads if "conv" in r.reader]
    assert read.how == "as produced, with rows of its neighbours"
    assert read.sent == 2 * 4 * 6 * 3


def shallow(h: Array) -> tuple[tuple[Array, ...], Array]:
    """Steps of the shallow water equations: three kernels a step, which read rows beside their
    blocks of three arrays and of a product of two."""

    def step(c: tuple[Array, ...], _: Any) -> tuple[tuple[Array, ...], Array]:
        h, u, v = c
        dx, dy = (lambda q, d=d: (jnp.roll(q, -1, d) - jnp.roll(q, 1, d)) / 2 for d in (0, 1))
        after = (
            h - 0.1 * (dx(h * u) + dy(h * v)),
            u - 0.1 * (u * dx(u) + v * dy(u) + 9.8 * dx(h)),
            v - 0.1 * (u * dx(v) + v * dy(v) + 9.8 * dy(h)),
        )
        return after, h.sum()

    return lax.scan(step, (h, 0 * h, 0 * h), length=3)


def permutes(run: Any) -> int:
    """The permutes of a compiled module, those in loops once."""
    return run.lower().compile().as_text().count(" collective-permute(")


@pytest.mark.slow
def test_kernels_whose_operands_are_there_send_their_rows_together() -> None:
    h = 1 + 0.1 * normal(256, 64)
    pins = {f: ("x", None) for f in ("[0]", *[f"result[0][{k}]" for k in range(3)])}
    kinds = ("seconds", "wire_bytes")
    asked: Any = {"mesh_shapes": [ROWS], "pins": pins, "settings": QUICK}
    front = te.optimize(te.trace(shallow, h), "cpu:8", kinds, **asked)
    plan = front.best("wire_bytes")
    run = as_planned(plan, (h,), shallow(h))
    sent = [c for c in plan.collectives if c.kind == "permute"]
    assert [(c.payload_bytes, c.count) for c in sent] == [(4 * 64, 3)] * 8  # of four, both ways
    assert len({c.merged for c in sent}) == permutes(run) == 2
    audit(plan)


@pytest.mark.slow
def test_rows_that_a_later_kernel_reads_are_in_memory_until_then() -> None:
    """Two convolutions read the same rows, and a third those of another value: nothing is sent for
    the second, which runs after a kernel that makes much more."""

    def program(x: Array, w: Array, v: Array) -> tuple[Array, ...]:
        one = convolved(x, w)
        return one, jnp.tanh(one @ jnp.ones((5, 5))), convolved(x, v)

    arguments = (X, W, normal(3, 1, 3, 2))
    plan = least(program, arguments, "cpu:8")
    run = as_planned(plan, arguments, program(*arguments))
    row = 4 * 6 * 3
    assert [(c.kind, c.payload_bytes) for c in plan.collectives] == [("permute", row)] * 2
    assert permutes(run) == 2
    walk, _ = walked(plan, "plan")
    ((first, last, held),) = {(a, b, n) for a, b, n in walk.rows_ahead}
    kernels = [walk.program.instances[u.root].signature.kernel for u in walk.schedule.units]
    assert kernels[first] == kernels[last] == "conv_general_dilated"
    assert held == row and len([*walk.rows_ahead]) == 2
    audit(plan)


def reader(k: int, value: int, rows: int = 1, **more: Any) -> Reader:
    """Operation k, a kernel on its own, which reads a value and some rows before its block."""
    e = Exchange(0, 0, (0,), rows, 0, 4, 4 * rows, fuses=True, dtype="float32")
    words = {"unit": k, "needs": (Layout(((0,),)),), **more}
    return Reader(k, (value,), makes=(100 + k,), exchanges=(e,), **words)


@pytest.mark.parametrize(
    ("second", "groups"),
    [
        (reader(5, 1), 1),
        (reader(5, 2), 2),  # made by operation 3
        (reader(5, 1, copies=True), 2),  # of a copy that is made when it runs
        (reader(5, 1, copies=True, unit=2), 1),
        (reader(5, 1, remat=7), 2),  # in a checkpoint region
        (reader(5, 1, rows=AHEAD // 4), 1),
        (reader(5, 1, rows=AHEAD // 4 + 1), 2),  # too much to be held
        (reader(5, 102), 2),  # made by the first, in another kernel
        (reader(5, 1, rows=AHEAD, unit=2), 1),
    ],
)
def test_rows_go_together_if_they_are_there_and_few(second: Reader, groups: int) -> None:
    first, made = reader(2, 0), {2: 3, 102: 2}
    found = sent_together([first, second], lambda v: made.get(v, -1))
    assert len(found) == groups
    assert [r.operation for g in found for r in g] == [2, 5]
    if groups == 1:
        (one,) = rounds(found[0], ROWS)
        assert [len(p.pieces) for p in one.permutes] == [2]


@pytest.mark.slow
@pytest.mark.parametrize("window", [9, 11])
def test_what_reaches_over_the_next_block_is_gathered(window: int) -> None:
    """Blocks of four rows: a window of nine has margins of four, one of eleven of five."""
    arguments = (X, normal(window, 1, 3, 2))
    plan = least(convolved, arguments, "cpu:8")
    kinds = {c.kind for c in plan.collectives}
    assert kinds == ({"permute"} if window == 9 else {"all_gather"})
    as_planned(plan, arguments, convolved(*arguments))


@pytest.mark.slow
def test_rows_are_sent_once_where_kernels_are_made_to_wait() -> None:
    """What kernels compute of a value is computed anew behind the barriers that keep the plan's
    order, but not what has to be sent for it."""

    def flips(spins: jax.Array, keys: jax.Array) -> jax.Array:
        def sweep(s: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            for k in (0, 1):
                near = sum(jnp.roll(s, by, dim) for by in (1, -1) for dim in (0, 1))
                u = jax.random.uniform(jax.random.fold_in(key, k), s.shape)
                s = jnp.where(u < jnp.exp(-s * near), -s, s)
            return s, None

        return lax.scan(sweep, spins, keys)[0]

    keys = jax.random.split(jax.random.key(0), 10)
    program = te.trace(flips, jax.ShapeDtypeStruct((4096, 4096), jnp.float32), keys)
    settings = Settings(work=0.2, workers=1, recompute=0, merge=False)
    mesh = MeshShape(("x",), (8,))
    best = te.optimize(program, "h100:8", mesh_shapes=[mesh], settings=settings).plans[0]
    row = 4096 * 4
    assert best.costs.wire_bytes == 10 * 4 * row  # two rows a colour and round, both ways
    audit(replace(best))
