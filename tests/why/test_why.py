"""Answers to why a plan is as it is add up to what the plan says, and fit a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.cli.app import main
from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.plans.fetch import fetches, produced_layouts
from tapestry_egg.show.account import Account

pytestmark = pytest.mark.slow

BRIEF = te.Settings(work=0.3, workers=1, recompute=0, forms=0)
#: Of a question.
ONE = replace(BRIEF, work=0.5, front=False)
LAYERS = 3


def train(w: Any, x: jax.Array) -> Any:
    def loss(w: Any) -> jax.Array:
        def layer(h: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ k), None

        h = x
        for one in w["layers"]:
            h = jnp.tanh(h @ one["up"]) @ one["down"]
        return jnp.sum(jax.lax.scan(layer, h, w["stack"])[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


@pytest.fixture(scope="module")
def front() -> te.Front:
    layer = {
        "up": jax.ShapeDtypeStruct((512, 2048), "float32"),
        "down": jax.ShapeDtypeStruct((2048, 512), "float32"),
    }
    w = {
        "layers": [layer] * LAYERS,
        "stack": jax.ShapeDtypeStruct((4, 512, 512), "float32"),
    }
    graph = te.trace(train, w, jax.ShapeDtypeStruct((8192, 512), "float32"), donate_argnums=0)
    return te.optimize(graph, "h100:8", settings=BRIEF, books=["sharding", "collectives"])


@pytest.fixture(scope="module")
def overlapped() -> te.Plan:
    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

    s = jax.ShapeDtypeStruct
    w = {"up": s((1024, 4096), "float32"), "down": s((4096, 1024), "float32")}
    graph = te.trace(step, w, s((8192, 1024), "float32"))
    settings = replace(BRIEF, overlap=True)
    return te.optimize(graph, "h100:8", settings=settings).best("seconds")


@pytest.fixture(scope="module")
def moving(front: te.Front) -> te.Plan:
    """The plan with most collectives."""
    return max(front, key=lambda p: len(p.collectives))


def lines(plan: te.Plan) -> set[str]:
    """The lines that a plan's program comes from."""

    def of(graph: te.BlockGraph) -> Iterator[str]:
        for op in graph.operations:
            yield f"{op.source.file}:{op.source.line}"
            for region in op.regions:
                yield from of(region)

    return {x for x in of(plan.graph) if x[0] != ":"}


def test_no_answer_is_wider_than_a_terminal(front: te.Front, moving: te.Plan) -> None:
    answers = [
        moving.explain(),
        moving.peak(),
        *(moving.tensor(name) for name in moving.graph.input_names),
        *(moving.collective(n) for n in range(len(moving.collectives))),
        *(moving.line(place) for place in lines(moving)),
        *(moving.difference(p) for p in front),
    ]
    for answer in answers:
        text = str(answer)
        assert max(map(len, text.split("\n"))) <= 120, text


def test_the_peak_is_made_of_its_arrays(front: te.Front) -> None:
    for plan in front:
        found = plan.peak()
        assert sum(p.bytes for p in found.parts) == found.bytes == plan.costs.peak_bytes
        assert sum(found.by_kind().values()) == found.bytes


def test_tensors_at_the_peak_are_the_peak(moving: te.Plan) -> None:
    account = Account(moving)
    names = {account.value(v) for v, x in account.walk.held() if x.amount}
    assert sum(
        a.bytes for name in names for a in moving.tensor(name).alive if a.at_peak
    ) == pytest.approx(moving.costs.peak_bytes)


def test_a_tensor_tells_every_reader_and_its_layout(moving: te.Plan) -> None:
    graph, given = moving.graph, produced_layouts(moving.body)
    for v, name in zip(graph.inputs, graph.input_names, strict=True):
        way = moving.tensor(name)
        assert way.layout == given[v].show(moving.mesh)
        plain = [
            (f"{op.kernel} #{k}", strategy.needs[p].show(moving.mesh))
            for k, (op, strategy) in enumerate(
                zip(graph.operations, moving.body.strategies, strict=True)
            )
            for p, w in enumerate(op.inputs)
            if w == v
        ]
        told = [(r.reader, r.layout) for r in way.reads if r.reader != "leaves the program"]
        assert sorted(told) == sorted(plain)
        value = f"%{v} {graph.values[v]}"
        own = [n for n, c in enumerate(moving.collectives) if c.value == value]
        assert sorted(set(own)) == sorted(set(way.collectives))


def test_a_reader_takes_the_copy_that_the_plan_fetches(front: te.Front) -> None:
    kept = 0
    for plan in front:
        graph = plan.graph
        ways: dict[int, Any] = {}
        for k, reads in enumerate(fetches(plan.body)[:-1]):
            for f in reads:
                of_copy = f.keep or f.origin == "kept"
                if f.value not in graph.inputs and not of_copy:
                    continue
                if f.value not in ways:
                    ways[f.value] = plan.tensor(f"%{f.value}")
                meant = "as produced" if f.origin == "produced" else "own copy"
                meant = "kept copy" if of_copy and f.origin != "produced" else meant
                op = graph.operations[k]
                way = ways[f.value]
                told = [
                    r.how.partition(":")[0] for r in way.reads if r.reader == f"{op.kernel} #{k}"
                ]
                assert meant in told, (plan.name, way.name, op.kernel, k)
                kept += meant == "kept copy"
    assert kept, "no plan of the example keeps a copy"


def test_bytes_that_a_tensors_copies_send_are_those_of_its_collectives(moving: te.Plan) -> None:
    sent = 0.0
    for name in moving.graph.input_names:
        way = moving.tensor(name)
        some = sum(
            moving.collectives[n].wire_bytes * moving.collectives[n].count for n in way.collectives
        )
        assert sum(r.sent for r in way.reads) == pytest.approx(some)
        sent += some
    assert sent > 0.0, "the example moves no weights"


def test_collectives_of_an_update_are_told_with_the_weight(moving: te.Plan) -> None:
    told = moving.explain().partition("on the way to a new value of the state")[2]
    graph = moving.graph
    found = set()
    for v, name in zip(graph.inputs, graph.input_names, strict=True):
        for n in moving.tensor(name).updating:
            one = moving.collectives[n]
            assert moving.collective(n).update_of == name
            sizes = re.findall(r"\d+", one.value.partition("[")[2])
            # What becomes a weight has its elements, or in a loop those of one step.
            assert {*map(int, sizes)} <= {*graph.values[v].shape}, (name, one.value)
            assert one.value != f"%{v} {graph.values[v]}"
            found.add(n)
    sums = {
        n for n, c in enumerate(moving.collectives) if c.kind in ("reduce_scatter", "all_reduce")
    }
    gradients = {n for n in sums if not moving.collectives[n].value.endswith("[]")}
    rows = f"[{8192}"  # what has the rows of the data is no gradient
    assert {n for n in gradients if rows not in moving.collectives[n].value} <= found
    assert found and told


def test_a_value_in_a_loop_has_a_name_and_a_way(moving: te.Plan) -> None:
    k = next(k for k, op in enumerate(moving.graph.operations) if op.kernel == "scan")
    body = moving.graph.operations[k].regions[0]
    v = body.operations[0].outputs[0]
    way = moving.tensor(f"{k}/%{v}")
    assert way.made_by == f"{body.operations[0].kernel} #{k}/0"
    assert way.type == str(body.values[v])


def test_equal_tensors_are_told_once(front: te.Front) -> None:
    plan = front.best("seconds")
    ways = [plan.tensor(f"[0]['layers'][{k}]['up']") for k in range(LAYERS)]
    if len({w.layout for w in ways}) == 1 and len({len(w.reads) for w in ways}) == 1:
        try:
            told = plan.tensor("[0]['layers'][*]['up']")
        except PlanError as e:
            assert "differ" in str(e)
        else:
            assert told.name == ways[0].name and told.alike == tuple(w.name for w in ways[1:])
    with pytest.raises(PlanError, match="differ: "):
        plan.tensor("*")


def test_names_that_are_none_are_told_what_there_is(moving: te.Plan) -> None:
    with pytest.raises(PlanError, match=r"Nearest are .*\['up'\]"):
        moving.tensor("[0]['layers'][0]['upp']")
    with pytest.raises(PlanError, match=r"Nearest are .*result\['stack'\]"):
        moving.tensor("result['stac']")
    with pytest.raises(PlanError, match="For a line use `--line`"):
        moving.tensor("train.py:12")
    assert moving.tensor("stack").name == "[0]['stack']"  # its result is called so, too
    with pytest.raises(PlanError, match=f"They are 0 to {len(moving.collectives) - 1}"):
        moving.collective(len(moving.collectives))
    with pytest.raises(PlanError, match="Nearest lines with operations are"):
        moving.line("test_why.py:1")
    with pytest.raises(PlanError, match=r"Files of the program are .*test_why\.py"):
        moving.line("nowhere.py:1")


def test_a_line_may_be_named_by_its_number_where_one_file_has_it(moving: te.Plan) -> None:
    place = min(lines(moving))
    number = int(place.rpartition(":")[2])
    assert moving.line(number) == moving.line(str(number)) == moving.line(place)
    with pytest.raises(PlanError, match=r"no operation comes from 3(?s:.*)FILE:LINE"):
        moving.line(3)
    for name in (None, 3.5, True, b"test_why.py:3"):
        with pytest.raises(PlanError, match=r"names no line(?s:.*)Give FILE:LINE"):
            moving.line(name)  # type: ignore[arg-type]


def test_a_number_of_lines_of_two_files_asks_which(moving: te.Plan) -> None:
    graph = moving.graph
    one, number = graph.operations[0], int(min(lines(moving)).rpartition(":")[2])
    there = replace(one, source=replace(one.source, file="/other/model.py", line=number))
    other = replace(graph, operations=(there, *graph.operations[1:]))
    plan = replace(moving, body=replace(moving.body, graph=other), program=None)
    with pytest.raises(PlanError, match=r"2 files have operations(?s:.*)Name one: .*model\.py"):
        plan.line(number)


def test_what_is_no_name_of_a_tensor_or_a_collective_is_refused(moving: te.Plan) -> None:
    with pytest.raises(PlanError, match="3 names no tensor"):
        moving.tensor(3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="there is no collective 'x'"):
        moving.collective("x")  # type: ignore[arg-type]


def test_a_reason_says_what_the_plan_says(moving: te.Plan) -> None:
    total = 0.0
    for n, one in enumerate(moving.collectives):
        told = moving.collective(n)
        assert (told.kind, told.axes, told.group) == (one.kind, one.axes, one.group)
        assert told.payload_bytes == one.payload_bytes
        assert told.wire_bytes == one.wire_bytes * one.count
        assert one.reader.partition(" ")[0] in told.readers[0] or one.reader == "output"
        total += told.seconds
    local = sum(p.seconds for p in moving.costs_by("collective").parts if p.kind == "collective")
    changes = [name for p in moving.costs_by("collective") for name in [p.name]]
    if not any("slice" in name or "to_partial" in name for name in changes):
        assert total == pytest.approx(local)
    assert 0.0 < total <= local * (1 + 1e-9)


def test_partial_sums_are_traced_to_what_is_cut(front: te.Front) -> None:
    said = [
        plan.collective(n).reason
        for plan in front
        for n, one in enumerate(plan.collectives)
        if one.kind in ("all_reduce", "reduce_scatter")
    ]
    assert any("sums along" in s for s in said)
    assert all(("sums along" in s or "the body of scan" in s) and ", sharded" in s for s in said), (
        said
    )


def test_what_hides_a_collective_is_told(overlapped: te.Plan) -> None:
    told = [overlapped.collective(n) for n in range(len(overlapped.collectives))]
    hidden = [t for t in told if t.hidden > 0.0]
    assert hidden, "nothing is hidden in the example"
    for t in hidden:
        assert sum(b.seconds for b in t.beside) == pytest.approx(t.hidden)
        assert "behind" in str(t)
    assert sum(t.hidden for t in told) == pytest.approx(
        sum(p.hidden for p in overlapped.costs_by("collective").parts)
    )


def test_lines_add_up_to_the_step(moving: te.Plan) -> None:
    found = [moving.line(place) for place in lines(moving)]
    table = {r.name: r for r in moving.costs_by("line")}
    named = sum(r.seconds for name, r in table.items() if name)
    assert sum(f.seconds for f in found) == pytest.approx(named)
    assert sum(f.joules for f in found) == pytest.approx(
        sum(r.joules for name, r in table.items() if name)
    )
    assert sum(f.share for f in found) <= 1.0 + 1e-9
    assert all(e.source != f.line for f in found for e in f.elsewhere)


def test_a_difference_adds_up_to_the_change_of_the_totals(front: te.Front) -> None:
    one = front.plans[0]
    for other in front.plans[1:]:
        found = one.difference(other)
        for name, amount in (("serial_seconds", "seconds"), ("joules", "joules")):
            change = getattr(other.costs, name) - getattr(one.costs, name)
            assert sum(getattr(p, amount) for p in found.parts) == pytest.approx(change, abs=1e-12)
        sent = other.costs.wire_bytes - one.costs.wire_bytes
        assert sum(m.sent_other - m.sent_one for m in found.moves) == pytest.approx(sent, abs=1e-6)
        peak = other.costs.peak_bytes - one.costs.peak_bytes
        assert sum(y - x for _, x, y in found.memory) == pytest.approx(peak)
        back = other.difference(one)
        assert {(p.name, p.seconds) for p in back.parts} == {
            (p.name, -p.seconds) for p in found.parts
        }
        moved = [
            name
            for name, x, y in zip(
                one.graph.input_names, one.in_shardings, other.in_shardings, strict=True
            )
            if x.show(one.mesh) != y.show(other.mesh)
        ]
        assert set(moved) <= {x.name for x in found.lies}


def test_a_plan_does_not_differ_from_itself(moving: te.Plan) -> None:
    found = moving.difference(moving)
    assert not (found.lies or found.made or found.moves or found.parts)
    assert "the same collectives" in str(found) and "every tensor has the same layout" in str(found)


def layout_of(dims: tuple[str | None, ...]) -> str:
    """A layout as it is shown."""
    return f"[{', '.join(d or '.' for d in dims)}]"


def test_another_layout_is_searched_and_its_price_told(front: te.Front, tmp_path: Path) -> None:
    plan = front.best("seconds")
    path = "[0]['layers'][0]['up']"
    lies = plan.tensor(path).layout
    axis = plan.mesh.names[0]
    layout = (axis, None) if lies != f"[{axis}, .]" else (None, axis)
    answer = front.why_not({path: layout}, plan.name, settings=ONE)
    assert answer.found is not None and answer.difference is not None
    assert answer.found.tensor(path).layout == answer.asked[0][1] != lies
    te.save(answer.found, tmp_path / "asked.json")  # a plan of the program, which can be taken
    taken = te.load(tmp_path / "asked.json")
    assert isinstance(taken, te.Plan) and taken.costs == answer.found.costs
    assert dict(answer.lies)[path] == lies
    assert answer.seconds == answer.found.costs.seconds
    mine, theirs = plan.costs, answer.found.costs
    assert answer.within == (theirs.peak_bytes <= mine.peak_bytes)
    assert answer.better == (
        theirs.seconds < mine.seconds * (1 - 1e-6)
        and theirs.peak_bytes <= mine.peak_bytes
        and theirs.joules <= mine.joules * (1 + 1e-6)
    )
    asked = layout_of(layout)
    alike = [p for p in front if p.mesh == plan.mesh and p.tensor(path).layout == asked]
    assert answer.holders == tuple(p.name for p in alike)
    assert all(name in answer.covered for name in answer.holders) or answer.better
    if answer.within and not answer.better:
        assert answer.seconds >= plan.costs.seconds * (1 - 1e-9)
    assert answer.bound <= answer.seconds * (1 + 1e-6)
    above = answer.bound > plan.costs.seconds * (1 + 1e-6)
    # Nothing runs beside kernels here, so bounds hold however collectives are merged.
    assert not answer.merged and answer.proven == above
    for line in str(answer).split("\n"):  # no bound, and no best, without what it is one of
        if line.startswith(("the fastest", "of the plans searched", "the bound of such plans")):
            assert f"on {plan.mesh}, " in line
    assert [m.dim for m in answer.means] and all(m.tensor == path for m in answer.means)
    assert max(map(len, str(answer).split("\n"))) <= 120


def test_what_holds_more_is_found_beyond_the_peak(front: te.Front) -> None:
    plan = front.best("peak_bytes")
    whole = {"[0]['layers'][0]['up']": (None, None)}
    answer = front.why_not(whole, plan.name, settings=ONE)
    assert answer.found is not None
    assert answer.found.costs.peak_bytes > plan.costs.peak_bytes
    assert not answer.within and not answer.better
    assert ", the peak of this plan, none was found" in str(answer)
    assert "whatever its peak: " in str(answer)
    # A bound of merged plans is none of all plans, and is not called proven.
    merged = " ".join(str(replace(answer, merged=True, proven=False)).split())
    assert "none takes less" not in merged and "only of plans of which merging" in merged
    # A plan that takes twice of everything is beaten by any such plan, and the answer says so.
    twice = {k: 2 * getattr(plan.costs, k) for k in ("seconds", "peak_bytes", "joules")}
    slow = replace(plan, costs=replace(plan.costs, **twice))
    beaten = slow.why_not(whole, settings=ONE)
    assert beaten.better and not beaten.proven and "Search longer" in beaten.covered


def test_plans_of_the_front_that_lie_so_are_named(front: te.Front) -> None:
    def lying(plan: te.Plan) -> dict[str, str]:
        graph = plan.graph
        layouts = zip(graph.input_names, plan.in_shardings, strict=True)
        return {name: layout.show(plan.mesh) for name, layout in layouts}

    one, other, path = next(
        (p, q, path)
        for p in front
        for q in front
        if p.mesh == q.mesh
        for path, layout in lying(p).items()
        if lying(q)[path] != layout
    )
    there = lying(other)[path]
    spec = tuple(None if d == "." else tuple(d.split("·")) for d in there.strip("[]").split(", "))
    answer = front.why_not({path: spec}, one.name, settings=ONE)
    wanted = [p.name for p in front if p.mesh == one.mesh and lying(p)[path] == there]
    assert other.name in wanted and list(answer.holders) == wanted


def test_a_cut_means_to_a_product_what_its_projection_says(front: te.Front) -> None:
    axis = front.plans[0].mesh.names[0]
    rows, columns = (
        front.plans[0].why_not({"[0]['layers'][0]['up']": layout}, settings=ONE)
        for layout in ((axis, None), (None, axis))
    )
    products = [[m for m in a.means if "dot_general" in m.reader] for a in (rows, columns)]
    assert "summed over" in products[0][0].means  # x @ w["up"] sums over its rows
    assert "sharded along dim 1" in products[1][0].means


def test_a_layout_that_cannot_be_is_refused_with_the_reason(front: te.Front) -> None:
    plan = front.plans[0]
    axis = plan.mesh.names[0]
    nowhere = plan.why_not({"[0]['stack']": ("nowhere",)})
    assert "no mesh has the axis 'nowhere'" in nowhere.refused and nowhere.found is None
    assert not nowhere.means
    same = plan.tensor("[0]['stack']").layout
    spec = tuple(None if d == "." else tuple(d.split("·")) for d in same.strip("[]").split(", "))
    assert plan.why_not({"[0]['stack']": spec}).refused == "it does"
    uneven = plan.why_not({"[0]['stack']": ((*plan.mesh.names,),)})  # 4 over 8 devices
    assert "cannot be cut evenly" in uneven.refused, axis
    with pytest.raises(ExtractError, match="no input lies at"):
        plan.why_not({"[7]": (axis,)})


def test_questions_are_asked_from_the_command_line(
    front: te.Front, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.front.json"
    front.save(file)
    plan, last = front.plans[0], front.plans[-1]

    def asked(*options: str) -> Any:
        with pytest.raises(SystemExit) as end:
            main(["explain", str(file), "--plan", plan.name, *options, "--json"])
        assert end.value.code == 0
        return json.loads(capsys.readouterr().out)

    assert asked("--tensor", "[0]['stack']")["type"] == "f32[4, 512, 512]"
    assert asked("--collective", "0")["kind"] == plan.collectives[0].kind
    place = next(iter(lines(plan)))
    assert asked("--line", place)["seconds"] == plan.line(place).seconds
    assert asked("--peak")["bytes"] == plan.costs.peak_bytes
    assert asked("--diff", last.name)["other"] == last.name
    refused = asked("--why-not", "[0]['stack'] = P('nowhere')")
    assert "nowhere" in refused["refused"]
    assert asked("--why-not", "[0]['stack']=nowhere")["refused"] == refused["refused"]
    with pytest.raises(SystemExit) as end:
        main(["explain", str(file), "--peak", "--line", "x:1"])
    assert end.value.code == 2


def test_a_plan_that_was_asked_for_inside_a_program_is_one_to_keep(tmp_path: Path) -> None:
    """Of a program with constants that are computed before it runs, too."""

    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x.T) @ x + jnp.arange(16.0)

    graph = te.trace(step, jax.ShapeDtypeStruct((64, 16), "float32"))
    settings = te.Settings(work=0.2, workers=1, front=False)
    plan = te.optimize(graph, "h100:2", settings=settings).best()
    assert plan.graph.prepared is not None
    made = next(op.outputs[0] for op in plan.graph.operations if op.kernel == "tanh")
    answer = plan.why_not({f"%{made}": (None, "x")}, settings=settings)
    assert answer.found is not None
    te.save(answer.found, tmp_path / "asked.json")
    taken = te.load(tmp_path / "asked.json")
    assert isinstance(taken, te.Plan) and taken.costs == answer.found.costs
