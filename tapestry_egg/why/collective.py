"""Why a collective is there: of which value, from what layout to what, who wants it, its price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tapestry_egg.columns import columns, told_once, wrapped
from tapestry_egg.errors import PlanError
from tapestry_egg.extract.certify.kernel_work import block_bytes
from tapestry_egg.extract.certify.recount import Move
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.costs import BESIDE, carried_as, collective_seconds
from tapestry_egg.machine.energy import collective_joules
from tapestry_egg.plans.plan import Plan, Strategy
from tapestry_egg.plans.planned import Moved
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES, ENERGY, TIME
from tapestry_egg.show.account import LEGEND, Account

# Kernels beside a collective that are told one by one.
_FEW = 6


@dataclass(frozen=True, slots=True)
class Beside:
    """A kernel that runs while a collective is on its way, and for how long, in seconds."""

    kernel: str
    source: str
    seconds: float


@dataclass(frozen=True)
class CollectiveReason:
    """One of a plan's collectives, in all `count` runs of it in a step.

    `have` and `need` are the layouts between which the whole copy leads, by `steps`, of which this
    collective is one. `readers` take what it gives. Bytes are those of one device, joules those of
    all; `hidden` are the seconds of the copy during which the kernels `beside` run. `alike` are the
    numbers of others of the same kind, axes, bytes and line, `merged` those of all that are one
    collective with it; its seconds and joules are then its share of what that takes, by bytes.
    `update_of` is the argument of which the value becomes the next value, by elements alone.
    """

    plan: str
    mesh: str
    number: int
    kind: str
    axes: tuple[str, ...]
    group: int
    count: int
    payload_bytes: int
    wire_bytes: float
    seconds: float
    hidden: float
    joules: float
    value: str
    type: str
    made_by: str
    made_at: str
    have: str
    need: str
    steps: str
    readers: tuple[str, ...]
    source: str
    reason: str
    beside: tuple[Beside, ...]
    overlaps: bool
    alike: tuple[int, ...]
    merged: tuple[int, ...] = ()
    update_of: str = ""

    def data(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        over = ", ".join(self.axes)
        head = (
            f"collective {self.number} of plan {self.plan}, mesh {self.mesh}: {self.kind} over "
            f"{over}, groups of {self.group}"
        )
        times = f" in {self.count} runs" if self.count > 1 else ""
        sent, payload = (BYTES.format(x) for x in (self.wire_bytes, self.payload_bytes))
        hides = f"{TIME.format(self.hidden)} of them beside kernels"
        if not self.overlaps:
            hides = "beside nothing: collectives and kernels are counted one after another"
        facts = [
            ("of", f"{self.value} {self.type}"),
            ("made by", f"{self.made_by}{f' at {self.made_at}' if self.made_at else ''}"),
            *([("update of", self.update_of)] if self.update_of else []),
            ("from", self.have),
            ("to", f"{self.need}, by {self.steps}"),
            ("for", f"{self.readers[0]}{f' at {self.source}' if self.source else ''}"),
            *(("", r) for r in self.readers[1:_FEW]),
            *([("", f"and {len(self.readers) - _FEW} more")] if len(self.readers) > _FEW else []),
            ("why", self.reason),
            ("sends", f"{sent} a device{times} (payload {payload} each)"),
            ("takes", f"{TIME.format(self.seconds)}{times}, {ENERGY.format(self.joules)}"),
            ("hides", hides),
            *([("is one with", _ranges(self.merged))] if self.merged else []),
        ]
        parts = [head, columns(facts, "  ")]
        if self.beside:
            rows = [[b.kernel, TIME.format(b.seconds), b.source] for b in self.beside]
            parts += ["  behind", told_once(rows, right=(1,))]
        if self.alike:
            parts.append(f"and {len(self.alike)} like it: {_ranges(self.alike)}")
        return printable(wrapped("\n".join([*parts, LEGEND])))


def _ranges(numbers: Sequence[int]) -> str:
    """`1, 4 to 7`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def collective_reason(plan: Plan, number: int) -> CollectiveReason:
    """Why `plan.collectives[number]` is there.

    Raises PlanError for a number that is none, ExtractError for a plan of which it is not told what
    machine it was made for.
    """
    account = Account(plan, "the reason of a collective")
    count = len(account.moved)
    if not isinstance(number, int) or not 0 <= number < count:
        raise PlanError(
            f"there is no collective {number!r:.80}",
            where=f"plan {plan.name} of {plan.graph.name}",
            hint=f"They are 0 to {count - 1}." if count else "It has none.",
        )
    one = account.moved[number]
    if one.exchange is not None:
        return _exchanged(account, number)
    return _of_one_device(account, number) if one.fetch is None else _fetched(account, number)


def _alike(account: Account, number: int) -> tuple[int, ...]:
    p = account.moved[number].planned

    def key(x: Any) -> tuple[Any, ...]:
        return (x.kind, x.axes, x.payload_bytes, x.count, x.source, x.reader.partition(" ")[0])

    every = enumerate(account.moved)
    return tuple(n for n, m in every if n != number and key(m.planned) == key(p))


def _fetched(account: Account, number: int) -> CollectiveReason:
    one = account.moved[number]
    f, step, layout = one.fetch, one.step, one.layout
    assert f is not None and step is not None and layout is not None
    walk, b = account.walk, account.body_at(one.path)
    v = account.program.bodies[b].values[f.value]
    tensor = account.program.types[v]
    kind = carried_as(step.kind, step.monoid, tensor.dtype)
    amount = float(block_bytes(tensor, layout, account.mesh))
    producers = account.program.bodies[b].graph.producers()
    maker = producers.get(f.value, -1)
    move = _move(account, one, b, v)
    k = next((k for k, m in enumerate(walk.moves) if m is move), -1)
    return _told(
        account,
        number,
        (kind, amount, step.axes),
        move if move is not None and walk.with_others(move) is not None else None,
        hidden=account.copies[k].hidden if k >= 0 else 0.0,
        value=account.value(v),
        type=str(tensor),
        made_by=account.called(b, maker) if maker >= 0 else "an argument" if b == 0 else "the loop",
        made_at=account.line(b, maker),
        have=account.show(f.have),
        need=account.show(f.need),
        steps=account.changes(f.steps),
        readers=_readers(account, one, b),
        source=account.line(b, one.reader),
        update_of=_update_of(account, v),
        reason=_reason(account, one, b, maker),
        beside=_beside(account, k),
    )


def _update_of(account: Account, v: FlatId) -> str:
    """The argument of which a value becomes the next value; empty where it is of none."""
    i, first = account.updates.get(v), account.program.bodies[0]
    return "" if i is None else account.value(first.values[first.graph.inputs[i]])


def _exchanged(account: Account, number: int) -> CollectiveReason:
    """The rows of an operand that devices send to the ones beside them, or the states that they
    gather."""
    one = account.moved[number]
    p, e, layout, b = one.planned, one.exchange, one.layout, account.body_at(one.path)
    assert e is not None and layout is not None
    graph, (low, high) = account.program.bodies[b].graph, one.rows
    local = graph.operations[one.reader].inputs[e.operand]
    v, maker = account.program.bodies[b].values[local], graph.producers().get(local, -1)
    name, _, type_ = p.value.partition(" ")
    reader, rows = account.called(b, one.reader), low + high
    lacking = f"{rows} {'row' if rows == 1 else 'rows'} {'before' if low else 'after'} its block"
    need = f"the same with {lacking} along dim {e.dim}"
    steps = f"permute to the {'next' if low else 'previous'} device"
    why, payload = (
        f"{reader} reads {lacking}, which the device beside it has",
        float(p.payload_bytes),
    )
    if e.states:
        payload /= p.group if p.kind == "all_gather" else 1
        need, steps = "the states of all blocks", f"{p.kind} of the states"
        why = f"{reader} combines what the blocks of all devices come to"
    kind, every = (p.kind, payload) if e.states else (BESIDE, _together(account, number))
    return _told(
        account,
        number,
        (kind, every, e.axes),
        None,
        share=payload / every if every else 1.0,
        hidden=0.0,
        value=account.value(v) or name,
        type=type_,
        made_by=account.called(b, maker) if maker >= 0 else "an argument" if b == 0 else "the loop",
        made_at=account.line(b, maker),
        have=account.show(layout),
        need=need,
        steps=steps,
        readers=(reader,),
        source=account.line(b, one.reader),
        reason=why,
        beside=(),
    )


def _of_one_device(account: Account, number: int) -> CollectiveReason:
    """What the one device that runs an operation for all sends to the others."""
    one = account.moved[number]
    p, b = one.planned, account.body_at(one.path)
    name, _, type_ = p.value.partition(" ")
    caller, line = account.called(b, one.reader), account.line(b, one.reader)
    return _told(
        account,
        number,
        ("all_reduce", float(p.payload_bytes), tuple(range(len(account.mesh.sizes)))),
        None,
        hidden=0.0,
        value=name,
        type=type_,
        made_by=caller,
        made_at=line,
        have="on the first device",
        need="on every device",
        steps=p.kind,
        readers=(caller,),
        source=line,
        reason="a call out of the program runs once, on one device, which sends what it gave",
        beside=(),
    )


def _together(account: Account, number: int) -> float:
    """Bytes of the permute that carries some rows, all that it carries."""
    p = account.moved[number].planned
    every = [m.planned for m in account.moved if m.exchange is not None]
    together = [x.payload_bytes for x in every if p.merged and x.merged == p.merged]
    return float(sum(together) if together else p.payload_bytes)


def _told(
    account: Account,
    number: int,
    sent: tuple[str, float, tuple[int, ...]],
    merged: Move | None,
    share: float = 1.0,
    **told: Any,
) -> CollectiveReason:
    """With what is planned of it; `sent` is the kind, bytes and axes of the collective whose price
    it has, or a `share` of it; `merged` the copy whose one step it is, where that is made with
    others."""
    p, target = account.moved[number].planned, account.walk.target
    seconds = share * float(collective_seconds(*sent, account.mesh, target))
    joules = share * float(collective_joules(*sent, account.mesh, target))
    if merged is not None:
        seconds, joules = account.walk.copy(merged)[:2]
    return CollectiveReason(
        plan=account.plan.name,
        mesh=str(account.mesh),
        number=number,
        kind=p.kind,
        axes=p.axes,
        group=p.group,
        count=p.count,
        payload_bytes=p.payload_bytes,
        wire_bytes=p.wire_bytes * p.count,
        seconds=p.count * seconds,
        joules=p.count * joules,
        merged=tuple(
            n
            for n, m in enumerate(account.moved)
            if n != number and p.merged and m.planned.merged == p.merged
        ),
        overlaps=target.slowdown is not None,
        alike=_alike(account, number),
        **told,
    )


def _readers(account: Account, one: Moved, b: int) -> tuple[str, ...]:
    """Who takes the copy: its maker, and those that it is kept for."""
    f = one.fetch
    assert f is not None
    found = [account.called(b, one.reader)]
    body = account.walk.bodies[b]
    until = body.kept[f.value].until if f.keep else -1
    group = body.groups[one.reader] if one.reader < len(body.groups) else -1
    for k, (op, strategy) in enumerate(zip(body.graph.operations, body.strategies, strict=True)):
        wants = (f.value, f.need) in zip(op.inputs, strategy.needs, strict=True)
        shared = 0 <= group == (body.groups[k] if k < len(body.groups) else -1)
        if wants and k > one.reader and (k <= until or shared):
            found.append(f"{account.called(b, k)} at {account.line(b, k)}")
    return tuple(found)


def _move(account: Account, one: Moved, b: int, v: int) -> Move | None:
    """The copy that the recount makes of it."""
    f, walk = one.fetch, account.walk
    assert f is not None
    of = [m for m in walk.moves if (m.value, m.have, m.need) == (v, f.have, f.need)]
    unit = -1 if f.keep else account.unit_of.get((b, one.reader), -2)
    same = [m for m in of if m.unit == unit] or [m for m in of if m.reader == (b, one.reader)]
    return same[0] if same else None


def _reason(account: Account, one: Moved, b: int, maker: int) -> str:
    """Why the value does not lie as its reader wants it, in a sentence."""
    f, step = one.fetch, one.step
    assert f is not None and step is not None
    over = ", ".join(account.mesh.names[a] for a in step.axes)
    if step.kind in ("all_reduce", "reduce_scatter"):
        end = "every device needs the sums" if step.kind == "all_reduce" else "each needs a part"
        return (
            f"{_partial(account, b, maker, step.axes)} over {over}: {step.monoid}s of parts; {end}"
        )
    if step.kind == "permute":
        return f"its blocks lie on other devices along {over} than those that the reader wants"
    reads = _along(account, b, one.reader, f.value, step.dim or 0)
    if step.kind == "all_gather":
        return f"it is sharded along dim {step.dim} over {over}, {reads}"
    return f"it is sharded along dim {step.dim} over {over}, its reader along dim {step.to_dim}"


def _partial(account: Account, b: int, maker: int, axes: Sequence[int]) -> str:
    """Which operation cuts what it reduces, with what passes its partial values on."""
    graph, plans = account.program.bodies[b].graph, account.walk.bodies[b]
    producers = graph.producers()
    at, passed = maker, ""
    while at >= 0:
        op, strategy = graph.operations[at], plans.strategies[at]
        signature = account.signature(b, at)
        dims = zip(signature.index, strategy.cuts, strict=True) if signature else ()
        cut = [d for d, by in dims if d.role == "reduce" and set(by) & set(axes)]
        if cut:
            names = ", ".join(f"{d.name} ({d.size})" for d in cut)
            return f"{account.called(b, at)} sums along {names}, sharded{passed}"
        before = [
            producers.get(v, -1)
            for v, need in zip(op.inputs, strategy.needs, strict=True)
            if set(need.partial) & set(axes)
        ]
        # What was whole before is no sum: another operand is.
        before.sort(key=lambda k: k < 0 or not _gives_parts(plans.strategies[k], axes))
        if op.regions:
            return f"the body of {account.called(b, at)} makes it in parts{passed}, sharded"
        passed = passed or f" (and {account.called(b, at)} adds to it)"
        at = before[0] if before else -1
    return "it is made in parts"


def _gives_parts(strategy: Strategy, axes: Sequence[int]) -> bool:
    """Whether something that an operation makes is a partial value over some axes."""
    return any(set(given.partial) & set(axes) for given in strategy.gives)


def _along(account: Account, b: int, reader: int, value: int, dim: int) -> str:
    """What the reader does along a dim of the value that is gathered for it."""
    signature = account.signature(b, reader)
    if signature is None:
        return "and its reader needs all of it"
    p = account.program.bodies[b].graph.operations[reader].inputs.index(value)
    rows = signature.inputs[p].matrix
    dims = [d for d, n in zip(signature.index, rows[dim], strict=True) if n] if rows else []
    names = ", ".join(f"{d.name} ({d.size})" for d in dims)
    return f"and {account.called(b, reader)} reads all of {names or 'it'}"


def _beside(account: Account, k: int) -> tuple[Beside, ...]:
    """The kernels that run while copy k is on its way, longest first."""
    step = account.found.step
    found: dict[int, float] = {}
    for number, begin, end in step.flights:
        if number != k:
            continue
        for u, a, z in step.runs:
            if (both := min(end, z) - max(begin, a)) > 0.0:
                found[u] = found.get(u, 0.0) + both
    most = sorted(found.items(), key=lambda x: -x[1])[:_FEW]
    return tuple(
        Beside(account.unit(u), account.near(account.kernels[u].source), seconds)
        for u, seconds in most
    )
