"""All that one line of the user's program costs in a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tapestry_egg.columns import columns, percent, shortened, wrapped
from tapestry_egg.errors import PlanError
from tapestry_egg.graph.sources import is_called
from tapestry_egg.plans.cost_table import CostPart, totals
from tapestry_egg.plans.plan import Plan
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES, ENERGY, OPERATIONS, TIME
from tapestry_egg.show.account import Account


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """`count` operations of the line that run inside kernels which end in another line."""

    operation: str
    kernel: str
    source: str
    count: int


@dataclass(frozen=True)
class LineCosts:
    """What one line costs in a step, on one device, but joules on all.

    `parts` are the kernels that end in it and the copies made for its operations; `share` is that
    of all kernels and collectives one after another. `elsewhere` runs inside other lines' kernels,
    whose costs are theirs. `peak_bytes` are those of the plan's peak that it made.
    """

    plan: str
    line: str
    text: str
    operations: int
    seconds: float
    hidden: float
    share: float
    flops: float
    hbm_bytes: float
    wire_bytes: float
    joules: float
    peak_bytes: float
    peak_share: float
    parts: tuple[CostPart, ...]
    elsewhere: tuple[Elsewhere, ...]

    def data(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        head = f"{self.line} in plan {self.plan}: {self.text}".rstrip(": ")
        hidden = f", {TIME.format(self.hidden)} beside kernels" if self.hidden else ""
        facts = [
            ("seconds", f"{TIME.format(self.seconds)}, {percent(self.share)} of all{hidden}"),
            ("work", f"{OPERATIONS.format(self.flops)}, {BYTES.format(self.hbm_bytes)} of memory"),
            ("sent", BYTES.format(self.wire_bytes)),
            ("energy", ENERGY.format(self.joules)),
            (
                "at the peak",
                f"{BYTES.format(self.peak_bytes)} of what it made, {percent(self.peak_share)}",
            ),
        ]
        rows = [["", "kernel or copy", "of", "seconds", "each", "flops", "sent", "bound"]]
        for group in _alike(self.parts):
            one, n = group[0], sum(p.count for p in group)
            whole = sum(p.seconds for p in group)
            flops, sent = (sum(getattr(p, k) for p in group) for k in ("flops", "wire_bytes"))
            rows.append(
                [
                    f"{n:g}×" if n != 1 else "",
                    shortened(one.name, 40),
                    one.value.partition(" ")[2] if one.value.startswith("%") else one.value,
                    TIME.format(whole),
                    TIME.format(whole / n) if n else "-",
                    OPERATIONS.format(flops) if flops else "-",
                    BYTES.format(sent) if sent else "-",
                    one.bound,
                ]
            )
        parts = [head, columns(facts, "  ")]
        if self.parts:
            parts.append(columns(rows, "  ", right=(0, 3, 4, 5, 6)))
        else:
            parts.append("  no kernel ends here, and nothing is moved for it")
        if self.elsewhere:
            parts.append(f"of {self.operations} operations these run inside kernels of other lines")
            inside = [
                [f"{e.count}×" if e.count > 1 else "", e.operation, e.kernel, e.source]
                for e in self.elsewhere
            ]
            parts.append(columns(inside, "  ", right=(0,)))
        parts.append("a kernel counts for the line of its last operation, a copy for its reader's")
        return printable(wrapped("\n".join(parts)))


def _alike(parts: Sequence[CostPart]) -> list[list[CostPart]]:
    """Equal kernels and copies together, those that take longest first."""
    groups: dict[tuple[str, str, str], list[CostPart]] = {}
    for p in parts:
        value = p.value.partition(" ")[2] if p.value.startswith("%") else p.value
        groups.setdefault((p.name, value, p.bound), []).append(p)
    return sorted(groups.values(), key=lambda g: -sum(p.seconds for p in g))


def line_costs(plan: Plan, line: str | int) -> LineCosts:
    """What `FILE:LINE` costs in a step; of the file the end of its path will do, and none is needed
    where only one file of the program has operations in the line of that number.

    Raises PlanError where no operation comes from there, ExtractError for a plan of which it is not
    told what machine it was made for.
    """
    account = Account(plan, "the costs of a line")
    asked, _, number = _in_the_only_file(account, line).rpartition(":")
    at = [
        (b, k)
        for b, body in enumerate(account.program.bodies)
        for k, op in enumerate(body.graph.operations)
        if str(op.source.line) == number and asked and is_called(op.source.file, asked)
    ]
    if not at:
        raise PlanError(
            f"no operation comes from {line!r:.80}",
            where=f"plan {plan.name} of {plan.graph.name}",
            hint=_nearest(account, asked, number),
        )
    op = account.program.bodies[at[0][0]].graph.operations[at[0][1]]
    source = f"{op.source.file}:{op.source.line}"
    found = [
        p
        for p in (*account.kernels, *account.copies)
        if p.source == source and (p.seconds > 0.0 or p.joules > 0.0)
    ]
    every = sum(p.seconds for p in (*account.kernels, *account.copies))
    made = _at_peak(account, set(at))
    peak = float(max(account.found.profile, default=0.0))
    sums = totals(found)
    del sums["count"]

    return LineCosts(
        plan=plan.name,
        line=f"{account.paths[op.source.file]}:{number}",
        text=op.source.text,
        operations=len(at),
        share=sums["seconds"] / every if every else 0.0,
        **sums,
        peak_bytes=made,
        peak_share=made / peak if peak else 0.0,
        parts=tuple(sorted(found, key=lambda p: -p.seconds)),
        elsewhere=_elsewhere(account, at),
    )


def _in_the_only_file(account: Account, line: str | int) -> str:
    """`FILE:LINE`, where the number alone says which file it is. Raises PlanError where several
    have such a line, or for what names no line."""
    where = f"plan {account.plan.name} of {account.plan.graph.name}"
    if isinstance(line, bool) or not isinstance(line, str | int):
        what = f"{line!r:.80} names no line"
        raise PlanError(what, where=where, hint="Give FILE:LINE, such as model.py:12.")
    if not (number := str(line)).isdecimal():
        return number
    sources = [op.source for body in account.program.bodies for op in body.graph.operations]
    files = sorted({account.paths[s.file] for s in sources if s.file and s.line == int(number)})
    if len(files) > 1:
        raise PlanError(
            f"{len(files)} files have operations in a line {number}",
            where=where,
            hint=f"Name one: {', '.join(f'{file}:{number}' for file in files[:6])}.",
        )
    return f"{files[0]}:{number}" if files else number


def _nearest(account: Account, asked: str, number: str) -> str:
    files = {f for f in account.paths if f}
    if not asked or not number.isdecimal():
        return "Give FILE:LINE, such as model.py:12."
    lines = {
        op.source.line
        for body in account.program.bodies
        for op in body.graph.operations
        if is_called(op.source.file, asked)
    }
    if not lines:
        return f"Files of the program are {', '.join(sorted(account.paths[f] for f in files)[:6])}."
    near = sorted(sorted(lines, key=lambda n: abs(n - int(number)))[:5])
    return f"Nearest lines with operations are {', '.join(map(str, near))}."


def _at_peak(account: Account, at: set[tuple[int, int]]) -> float:
    """Bytes at the plan's peak of values that some operations made, copies included."""
    total = 0.0
    made = {
        account.program.bodies[b].values[v]
        for b, k in at
        for v in account.program.bodies[b].graph.operations[k].outputs
    }
    for v, x in account.walk.lying:
        if v in made and x.begin <= account.peak_tick < x.end:
            total += x.amount
    return total


def _elsewhere(account: Account, at: Sequence[tuple[int, int]]) -> tuple[Elsewhere, ...]:
    counts: dict[tuple[str, str, str], int] = {}
    for b, k in at:
        u = account.unit_of.get((b, k))
        if u is None:
            continue
        root = account.program.instances[account.schedule.units[u].root]
        where = account.line(int(root.body), root.operation)
        op = account.program.bodies[b].graph.operations[k]
        if account.kernels[u].seconds > 0.0 and where != account.line(b, k):
            key = (op.kernel, root.signature.kernel, where)
            counts[key] = counts.get(key, 0) + 1
    return tuple(Elsewhere(*key, count) for key, count in counts.items())
