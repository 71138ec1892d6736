"""The way of one tensor through a plan: where it is made, how it lies, its copies, who reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from tapestry_egg.columns import columns, starred, told_once, wrapped
from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.pytrees import matching, named_by_part
from tapestry_egg.plans.plan import Plan
from tapestry_egg.plans.planned import Moved
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES, TIME
from tapestry_egg.show.account import LEGEND, Account

_NUMBERED = re.compile(r"(?:(\d[\d:/]*)/)?%(\d+)\Z")
_LINE = re.compile(r"\.py:\d")


@dataclass(frozen=True, slots=True)
class Read:
    """Who reads a tensor: an operation, in which layout, whether as it lies or from which copy,
    what that sends in all runs, and what becomes of it where the reader is a mere view."""

    reader: str
    source: str
    layout: str
    how: str
    sent: float  # bytes of one device
    seconds: float
    makes: str = ""


@dataclass(frozen=True, slots=True)
class Alive:
    """Bytes of one device that hold a tensor, or are taken to make it or a copy of it, from when to
    when in a step, in seconds; `at_peak` where they are part of the plan's peak."""

    what: Literal["made", "copy", "making", "scratch", "result"]
    layout: str
    bytes: float
    begin: float
    end: float
    at_peak: bool


@dataclass(frozen=True)
class TensorWay:
    """The way of one tensor. `stored` is False for what exists inside kernels only; `alike` are the
    other tensors of the same pattern that lie and are read alike."""

    plan: str
    mesh: str
    name: str
    value: str
    type: str
    made_by: str
    source: str
    layout: str
    bytes: int
    device_bytes: int
    stored: bool
    leaves_as: tuple[str, ...]
    reads: tuple[Read, ...]
    alive: tuple[Alive, ...]
    collectives: tuple[int, ...]  # numbers in `plan.collectives`
    updating: tuple[int, ...] = ()  # and those of what becomes its next value
    alike: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        head = f"{self.name} of plan {self.plan}, mesh {self.mesh}"
        made = f"{self.made_by}{f' at {self.source}' if self.source else ''}"
        facts = [
            ("tensor", f"{self.value} {self.type}, {BYTES.format(self.bytes)}"),
            ("made by", made),
            ("layout", f"{self.layout}, {BYTES.format(self.device_bytes)} on a device"),
            *([("leaves as", ", ".join(self.leaves_as))] if self.leaves_as else []),
            *([] if self.stored else [("stored", "nowhere: its readers compute or view it")]),
        ]
        reads = [["reader", "reads", "how", "sent", "seconds", "at", "makes"]]
        for r in self.reads:
            sent = BYTES.format(r.sent) if r.sent else "-"
            took = TIME.format(r.seconds) if r.seconds else "-"
            reads.append([r.reader, r.layout, r.how, sent, took, r.source, r.makes])
        alive = [["what", "layout", "bytes", "from", "to", ""]]
        for a in self.alive:
            span = (TIME.format(a.begin), TIME.format(a.end), "at the peak" if a.at_peak else "")
            alive.append([a.what, a.layout, BYTES.format(a.bytes), *span])
        parts = [head, columns(facts, "  ")]
        parts += ["read by", told_once(reads, header=True) if self.reads else "  nobody"]
        if self.alive:
            parts += ["in memory", columns(alive, "  ", right=(2, 3, 4))]
        if self.collectives:
            numbers = ", ".join(map(str, self.collectives))
            parts.append(f"collectives  {numbers} (`--collective N` says why)")
        if self.updating:
            numbers = ", ".join(map(str, self.updating))
            parts.append(f"collectives of what becomes its next value  {numbers}")
        if self.alike:
            parts.append(f"and {len(self.alike)} like it: {', '.join(self.alike)}")
        return printable(wrapped("\n".join([*parts, LEGEND])))


def tensor_way(plan: Plan, name: str) -> TensorWay:
    """The way of the tensor of that name: a path of an argument (`[0]['w']`, or with `*` for many
    that are told as one), its last part (`w`) where only one argument ends so, a result
    (`result[0]['w']`), or a number as plans print it (`%12`, `40/%12` in a loop).

    Raises PlanError where there is no such tensor, or where many of a pattern differ; ExtractError
    for a plan of which it is not told what machine it was made for.
    """
    account = Account(plan, "the way of a tensor")
    if not isinstance(name, str):
        raise PlanError(
            f"{name!r:.80} names no tensor",
            where=f"plan {plan.name} of {plan.graph.name}",
            hint="Give a text: a path of the arguments, or a number as plans print it, '%12'.",
        )
    found = _named(account, name)
    ways = [_way(account, v) for v in found]
    kinds: dict[str, list[str]] = {}
    for way in ways:
        kinds.setdefault(_kind(way), []).append(way.name)
    if len(kinds) > 1:
        each = "; ".join(f"{names[0]} ({len(names)} alike)" for names in kinds.values())
        raise PlanError(
            f"{len(found)} tensors match, and differ: {each}",
            where=f"tensor {name!r} of plan {plan.name}",
            hint="Name one of them.",
        )
    alike = tuple(way.name for way in ways[1:])
    return replace(ways[0], alike=alike)


def _kind(way: TensorWay) -> str:
    """What tensors have in common that are told as one."""
    reads = sorted((r.reader.partition(" ")[0], r.layout, r.how) for r in way.reads)
    return repr((way.type, way.layout, reads))


def _named(account: Account, name: str) -> Sequence[int]:
    """The values of a name, in the order of the program."""
    graph, values = account.plan.graph, account.program.bodies[0].values
    if match := _NUMBERED.match(name):
        body = _body(account, match[1] or "")
        own = account.program.bodies[body].values if body >= 0 else ()
        if int(match[2]) < len(own):
            return [own[int(match[2])]]
    names = list(graph.input_names) or [f"%{v}" for v in graph.inputs]
    inputs = dict(zip(names, graph.inputs, strict=True))
    outputs = list(zip(graph.output_names, graph.outputs, strict=False))
    given = inputs | {f"result{n}": v for n, v in outputs}
    name = name.strip().replace('"', "'")
    for exact in (given, dict(outputs)):
        if name in exact:
            return [values[exact[name]]]
    # An argument before the results that are named like it: it is what they are made of.
    ending: list[str] = []
    for some in (inputs, given):
        ending = [n for n in named_by_part(name, list(some)) if n in given]
        if len(ending) == 1:
            return [values[given[ending[0]]]]
    if found := matching(name, given):
        return [values[given[n]] for n in found]
    every = list(dict.fromkeys([*given, *map(starred, given)]))
    near = ending[:3] or get_close_matches(name, every, 3, 0.0)
    hint = f"Nearest are {', '.join(near)}; %12 is value 12, `explain --all` lists all."
    if _LINE.search(name):
        hint = "For a line use `--line` or `--why-not`; `explain --all` lists numbers of values."
    raise PlanError(
        f"no tensor {name!r:.80}", where=f"plan {account.plan.name} of {graph.name}", hint=hint
    )


def _body(account: Account, inside: str) -> int:
    wanted = f"{inside}/" if inside else ""
    every = range(len(account.program.bodies))
    return next((b for b in every if account.inside(b) == wanted), -1)


def _way(account: Account, v: int) -> TensorWay:
    walk, program = account.walk, account.program
    body, local = walk.body_of[v], walk.local[v]
    graph, tensor = program.bodies[body].graph, program.types[v]
    producers = graph.producers()
    layout = walk.given[v]
    made_by, source = "a constant", ""
    if local in producers:
        made_by = account.called(body, producers[local])
        source = account.line(body, producers[local])
    elif local in graph.inputs:
        parent = program.bodies[body]
        made_by = "an argument" if body == 0 else account.called(parent.parent, parent.operation)
    back = {i: j for j, i in program.feedback.items()}
    leaves = []
    for j, value in enumerate(graph.outputs if body == 0 else ()):
        if value == local:
            leaves.append(graph.output_names[j] if graph.output_names else f"output {j}")
    if body == 0 and local in graph.inputs and (i := graph.inputs.index(local)) in back:
        old = graph.output_names[back[i]] if graph.output_names else f"output {back[i]}"
        leaves.append(f"its next value, {old or 'the output'}, which takes its place")
    lives = walk.ground.lives
    stored = v in lives.maker and lives.owns_memory(v)
    return TensorWay(
        plan=account.plan.name,
        mesh=str(account.mesh),
        name=account.value(v),
        value=f"{account.inside(body)}%{local}",
        type=str(tensor),
        made_by=made_by,
        source=source,
        layout=account.show(layout),
        bytes=tensor.nbytes,
        device_bytes=int(tensor.nbytes // max(1, account.mesh.parts(_cut(layout.dims)))),
        stored=stored,
        leaves_as=tuple(leaves),
        reads=tuple(_reads(account, v)),
        alive=tuple(_alive(account, v)),
        collectives=tuple(
            n
            for n, m in enumerate(account.moved)
            if _sends(m, program.bodies[body].graph) == local and account.body_at(m.path) == body
        ),
        updating=tuple(_updating(account, FlatId(v))),
    )


def _updating(account: Account, v: FlatId) -> Iterator[int]:
    """The collectives of values that become the next value of an argument."""
    first = account.program.bodies[0]
    inputs = [first.values[w] for w in first.graph.inputs]
    for n, m in enumerate(account.moved if v in inputs else ()):
        if m.fetch is not None:
            own = account.program.bodies[account.body_at(m.path)].values[m.fetch.value]
            if account.updates.get(own) == inputs.index(v):
                yield n


def _sends(moved: Moved, graph: BlockGraph) -> int | None:
    """The value of which a collective sends something; None where no value lies somewhere yet."""
    if moved.exchange is not None and moved.reader < len(graph.operations):
        inputs = graph.operations[moved.reader].inputs
        return inputs[moved.exchange.operand] if moved.exchange.operand < len(inputs) else None
    return None if moved.fetch is None else moved.fetch.value


def _cut(dims: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(a for axes in dims for a in axes)


def _reads(account: Account, v: int) -> list[Read]:
    walk, instances = account.walk, account.program.instances
    body, local = walk.body_of[v], walk.local[v]
    kept = walk.bodies[body].kept.get(local)
    own = {(m.need, m.unit): k for k, m in enumerate(walk.moves) if m.value == v}
    found: list[Read] = []
    told: set[int] = set()
    if v not in walk.ground.lives.maker:  # it exists inside one kernel only
        for i, instance in enumerate(instances):
            if v in instance.inputs:
                found.append(_read(account, v, i, "inside the kernel", None))
        return found
    for u, reads in enumerate(walk.ground.reads):
        for i, p, w, at, _ in reads:
            if w != v:
                continue
            need = walk.needed[i, p]
            k: int | None = None
            if need == walk.given[v]:
                how = "as produced"
            elif kept is not None and kept.layout == need and at <= kept.until:
                k, how = own.get((need, -1)), "kept copy"
            else:
                k, how = own.get((need, u)), "own copy"
            if k is not None:
                how = f"{how}: {account.changes(account.steps(walk.moves[k]))}"
                k = k if k not in told else None  # made once, paid once
                told |= {k} if k is not None else set()
            found.append(_read(account, v, i, how, k, at))
    return found


def _read(account: Account, v: int, i: int, how: str, copy: int | None, at: int = -1) -> Read:
    instance = account.program.instances[i]
    need = account.walk.needed[i, instance.inputs.index(v)]
    body = account.walk.body_of[v]
    if instance.port in ("output", "state"):
        reader, source = "leaves the program", ""
    elif instance.port:
        reader, source = account.called(body, at), account.line(body, at)
    else:
        reader = account.called(int(instance.body), instance.operation)
        source = account.line(int(instance.body), instance.operation)
    part = account.copies[copy] if copy is not None else None
    sent = part.wire_bytes if part else 0.0
    lacking = account.walk.margins.get(i, ())
    if rows := [e for e in lacking if instance.inputs[e.operand] == v]:
        states = any(e.states for e in rows)
        how = f"{how}, {'then states are combined' if states else 'with rows of its neighbours'}"
        operands = {e.operand for e in rows}
        sent += sum(
            m.planned.wire_bytes * m.planned.count
            for m in account.moved
            if m.exchange is not None
            and m.exchange.operand in operands
            and (account.body_at(m.path), m.reader) == (instance.body, instance.operation)
        )
    view = instance.signature.fusion == "view" and instance.outputs
    entering = instance.port in ("invariant", "stream", "carry")
    makes = account.value(instance.outputs[0]) if (view or entering) and instance.outputs else ""
    return Read(
        reader=reader,
        source=source,
        layout=account.show(need),
        how=how,
        sent=sent,
        seconds=part.seconds if part else 0.0,
        makes=makes if not instance.port or entering else "",
    )


def _alive(account: Account, v: int) -> list[Alive]:
    found = []
    for w, x in account.walk.held():
        if w == v and x.end > x.begin and x.amount:
            begin, end = account.seconds(x.begin, x.end)
            at_peak = x.begin <= account.peak_tick < x.end
            layout = account.show(x.layout)
            found.append(Alive(x.role, layout, x.amount, begin, end, at_peak))
    return found
