"""The census of a program: how much of its work lies in operations that can be split at all.

Every operation is counted by itself, as if compilers fused nothing: its arithmetic, and the bytes
of what it reads and writes. Bodies of a `scan` count as often as they run; of a `while` once, since
nobody knows how often; of a `cond` every branch once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from .blockgraph import BlockGraph, Operation, Source
from .flatten import flatten
from .metakernels import registry
from .metakernels.signature import OperationSignature, evaluate
from .zspace import Projection

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
    program = flatten(graph)
    looped = [False] * len(program.bodies)
    for b, body in enumerate(program.bodies):
        if body.parent >= 0:
            outer = program.bodies[body.parent].graph.operations[body.operation]
            looped[b] = looped[body.parent] or outer.kernel == "scan"
    counted = []
    for instance in program.instances:
        if instance.port:
            continue
        op = program.bodies[instance.body].graph.operations[instance.operation]
        signature = instance.signature
        split = frozenset(signature.index[d].role for d in legal_splits(signature))
        counted.append(
            Counted(
                op,
                _role(op, signature),
                _work(signature, instance.weight),
                split,
                "" if split else _reason(op, signature),
                looped[instance.body],
            )
        )
    return Census(graph.name, tuple(counted))


# Legality


def legal_splits(signature: OperationSignature) -> tuple[int, ...]:
    """Index dims of size > 1 that can be split: into their points, hence into any divisor of them.

    A dim of role `map` must reach every output, in blocks of one tensor dim in order; a `reduce`
    dim must reach none. Operands do not matter: what is not a block is read from the whole operand.
    No dim may reach random keys, which stay whole.
    """
    if 0 in signature.extents:
        return ()
    legal = []
    for d, dim in enumerate(signature.index):
        if dim.size < 2 or _reaches_keys(signature, d):
            continue
        if dim.role == "reduce":
            fits = not any(p.reaches(d) for p in signature.outputs)
        else:
            fits = dim.role == "map" and all(
                _in_blocks(p, d, signature.extents, t.shape)
                for p, t in zip(signature.outputs, signature.output_types, strict=True)
            )
        if fits:
            legal.append(d)
    return tuple(legal)


def _reaches_keys(signature: OperationSignature, d: int) -> bool:
    ports = (*signature.inputs, *signature.outputs)
    types = (*signature.input_types, *signature.output_types)
    return any(
        t.dtype.startswith("key<") and p.reaches(d) for p, t in zip(ports, types, strict=True)
    )


def _in_blocks(
    projection: Projection, d: int, extents: tuple[int, ...], shape: tuple[int, ...]
) -> bool:
    """Whether the images of equal blocks of index dim d are equal blocks of one tensor dim.

    The dim's stride a must fill the tensor (a·N = T), from 0 on, and all other index dims and the
    box together must fill the stride.
    """
    reached = projection.reaches(d)
    if len(reached) != 1:
        return False
    k = reached[0]
    row, size = projection.matrix[k], projection.shape[k]
    others = [(a, n) for e, (a, n) in enumerate(zip(row, extents, strict=True)) if e != d]
    least = projection.offset[k] + sum(min(a, 0) * (n - 1) for a, n in others)
    span = size + sum(abs(a) * (n - 1) for a, n in others)
    return row[d] == span and row[d] * extents[d] == shape[k] and least == 0


def _reason(op: Operation, signature: OperationSignature) -> str:
    """Why an operation has no legal split."""
    if signature.opaque:
        if op.effectful:
            return "has effects"
        known = op.kernel in registry.templates()
        return "no template fits its parameters" if known else "no template"
    if 0 in signature.extents:
        return "no index point"
    large = [dim for dim in signature.index if dim.size > 1]
    if not large:
        return "one index point"
    if any(_reaches_keys(signature, d) for d in range(len(signature.index))):
        return "random keys stay whole"
    roles = sorted({dim.role for dim in large})
    names = ", ".join(f"{dim.name} of {dim.size}" for dim in large)
    return f"{' and '.join(roles)}: {names}"


# Counting


def _role(op: Operation, signature: OperationSignature) -> str:
    if signature.opaque:
        return OPAQUE
    found = registry.entry(op.kernel, op.params, signature.input_types, signature.output_types)
    return OPAQUE if found is None else Path(found.origin.file).stem


def _work(signature: OperationSignature, times: float) -> Work:
    """Work of one operation that runs `times` often, over the whole index space."""
    extents = signature.extents
    moved = float(sum(t.nbytes for t in signature.output_types))
    reads = signature.reads or (None,) * len(signature.inputs)
    for projection, tensor, declared in zip(
        signature.inputs, signature.input_types, reads, strict=True
    ):
        if declared is None:
            moved += prod(projection.footprint(extents)) * tensor.itemsize
        else:
            moved += evaluate(declared, extents) * tensor.itemsize
    return Work(1, times * evaluate(signature.flops, extents), times * moved)
