"""The census of a program: how much of its work lies in operations that can be split at all.

Every operation is counted by itself, as if compilers fused nothing: its arithmetic, and the bytes
of what it reads and writes. Bodies of a `scan` count as often as they run; of a `while` once, since
nobody knows how often; of a `cond` each branch as often as another, so that they add up to one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, Source
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature, evaluate
from tapestry_egg.metakernels.signatures.splits import split
from tapestry_egg.schedule.flatten import FlatProgram, flatten
from tapestry_egg.zspace import ZRange

#: The role of operations without a template; other roles are the files that templates stand in.
OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class Work:
    """An amount of work: operations of the graph, and what one run of the program does in them."""

    operations: int = 0
    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.operations + other.operations, self.flops + other.flops, self.bytes + other.bytes
        )


@dataclass(frozen=True, slots=True)
class Counted:
    """One operation with its work, over all the times that it runs.

    `role` is the family of its template: the template file's name, or `opaque`. `split` lists the
    roles (`map`, `reduce`, `scan`) of the index dims of size > 1 with a legal split; `reason` says
    why there are none. `looped` says that it is in the body of a scan.
    """

    operation: Operation
    role: str
    work: Work
    split: frozenset[str]
    reason: str = ""
    looped: bool = False


@dataclass(frozen=True)
class Census:
    """The operations of one program, counted."""

    name: str
    counted: tuple[Counted, ...]

    def work(self, role: str = "", *, split: str = "", looped: bool = False) -> Work:
        """Work of the operations of one role, or of all.

        `split` keeps those that can be split along an index dim of the role it names, or along any
        (`"any"`); `looped` keeps those in bodies of scans.
        """
        return sum(
            (
                c.work
                for c in self.counted
                if role in ("", c.role)
                and (split in c.split or not split or (split == "any" and bool(c.split)))
                and (c.looped or not looped)
            ),
            Work(),
        )

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that occur, those with the most arithmetic and traffic first."""
        found = {c.role for c in self.counted}
        return tuple(sorted(found, key=lambda r: (-self.work(r).flops, -self.work(r).bytes, r)))

    @property
    def flops_share(self) -> float:
        """Share of the arithmetic that is in operations with a legal split, 1 if there is none."""
        return share(self.work(split="any").flops, self.work().flops)

    @property
    def bytes_share(self) -> float:
        """Share of the traffic that is in operations with a legal split, 1 if there is none."""
        return share(self.work(split="any").bytes, self.work().bytes)

    @property
    def whole(self) -> tuple[Counted, ...]:
        """Operations that cannot be split, the largest first.

        Those of one kernel, reason and source line are one, with their work added up.
        """
        merged: dict[tuple[str, str, Source], Counted] = {}
        for c in self.counted:
            if c.split:
                continue
            key = (c.operation.kernel, c.reason, c.operation.source)
            before = merged[key].work if key in merged else Work()
            merged[key] = replace(c, work=before + c.work)
        return tuple(sorted(merged.values(), key=lambda c: (-c.work.flops, -c.work.bytes)))


def share(part: float, whole: float) -> float:
    """part / whole, and 1 of nothing."""
    return part / whole if whole else 1.0


def census(graph: BlockGraph) -> Census:
    """Count the operations of a graph, those in its regions included."""
    return census_of(flatten(graph), graph.name)


def census_of(program: FlatProgram, name: str = "") -> Census:
    """Count the operations of a flat program."""
    looped = [False] * len(program.bodies)
    for b, body in enumerate(program.bodies):
        if body.parent >= 0:
            outer = program.bodies[body.parent].graph.operations[body.operation]
            looped[b] = looped[body.parent] or outer.is_scan
    counted = []
    kinds: dict[tuple[int, bool], Counted] = {}  # by signature: there are few, made once each
    for instance in program.instances:
        if instance.port:
            continue
        op = program.bodies[instance.body].graph.operations[instance.operation]
        kind = id(instance.signature), op.effectful
        if kind not in kinds:
            kinds[kind] = _counted(op, instance.signature)
        once = kinds[kind]
        work = Work(1, instance.weight * once.work.flops, instance.weight * once.work.bytes)
        counted.append(replace(once, operation=op, work=work, looped=looped[instance.body]))
    return Census(name, tuple(counted))


def _counted(op: Operation, signature: OperationSignature) -> Counted:
    """An operation that runs once."""
    roles, refusals = legal_roles(signature)
    reason = "" if roles else _reason(op, signature, refusals)
    return Counted(op, _role(op, signature), _work(signature), roles, reason)


# Legality


def legal_roles(signature: OperationSignature) -> tuple[frozenset[str], str]:
    """Roles of the index dims of size > 1 that can be split evenly, and what forbids others.

    Projections are affine: a dim that can be split evenly into one number of parts can be split
    into every number that divides it, so only the least is tried.
    """
    roles: set[str] = set()
    refusals: dict[str, None] = {}
    for d, dim in enumerate(signature.index):
        if dim.size < 2 or dim.role in roles:
            continue
        least = next(n for n in range(2, dim.size + 1) if dim.size % n == 0)
        found = split(signature, {d: (least,)})
        if found.legal:
            roles.add(dim.role)
        else:
            refusals[found.refusal] = None
    first = "; ".join(list(refusals)[:2])
    return frozenset(roles), first + (f"; {len(refusals) - 2} more" if len(refusals) > 2 else "")


def _reason(op: Operation, signature: OperationSignature, refusals: str) -> str:
    """Why an operation has no legal split."""
    if signature.opaque:
        if op.effectful:
            return "has effects"
        known = op.kernel in registry.templates()
        return "no template fits its parameters" if known else "no template"
    return refusals or "one index point"


# Counting


def _role(op: Operation, signature: OperationSignature) -> str:
    if signature.opaque:
        return OPAQUE
    found = registry.entry(op.kernel, op.params, signature.input_types, signature.output_types)
    return OPAQUE if found is None else Path(found.origin.file).stem


def _work(signature: OperationSignature) -> Work:
    """Work of one operation over its whole index space."""
    whole = ZRange.from_shape(signature.extents)
    moved = float(sum(t.nbytes for t in signature.output_types))
    reads = signature.reads or (None,) * len(signature.inputs)
    for p, (tensor, declared) in enumerate(zip(signature.input_types, reads, strict=True)):
        if declared is None:
            elements = 0.0 if whole.is_empty else float(signature.operand_box(p, whole).size)
        else:
            elements = evaluate(declared, signature.extents)
        moved += elements * tensor.itemsize
    return Work(1, evaluate(signature.flops, signature.extents), moved)
