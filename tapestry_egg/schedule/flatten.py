"""The flat program: a block graph and the bodies of its loops as one list of operation instances.

Every boundary becomes a *port*, an instance whose kernel is the identity and whose strategies come
from the same generic split rule as everyone else's:

port           reads                          produces                       partial values
`input`        -                              a graph input                  no
`constant`     -                              a constant (not cut)           no
`output`       a graph output                 -                              no
`state`        the output that feeds back     the donated input              no
`invariant`    an outer value                 the value inside the region    yes
`stream`       an outer stack `[T, d...]`     its slice `[d...]` inside      yes
`stack`        a slice inside                 the outer stack                yes
`carry`        initial value, carried value   value inside, final value      yes
`branch`       each branch's result           the result outside             yes
`predicate`    the condition                  -                              no

So a loop's carry keeps one layout because one identity has one strategy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property
from typing import TYPE_CHECKING

from tapestry_egg.errors import ExtractError, GraphError
from tapestry_egg.graph.blockgraph import (
    COND,
    REGIONS_SAID,
    SCAN,
    WHILE,
    BlockGraph,
    Operation,
    TensorType,
)
from tapestry_egg.graph.ids import BodyId, FlatId
from tapestry_egg.graph.loops import counts
from tapestry_egg.metakernels.signatures.signature import (
    IndexDim,
    OperationSignature,
    Passage,
    Role,
)
from tapestry_egg.zspace import Projection

if TYPE_CHECKING:
    from tapestry_egg.plans.plan import RuleStep

#: The number of an argument or of a result, at the beginning of a path.
_PLACE = re.compile(r"^\[\d+\]")
# Paths that a message lists one and all.
_FEW = 6


@dataclass(frozen=True)
class Instance:
    """One operation or port of the flat program; value ids are the flat program's."""

    signature: OperationSignature
    inputs: tuple[FlatId, ...]
    outputs: tuple[FlatId, ...]
    weight: float  # how often one step runs it
    body: BodyId
    operation: int = -1  # index in the body's graph; -1 for ports
    port: str = ""
    input_weights: tuple[float, ...] = ()  # how often a copy made for each operand would run


@dataclass(frozen=True)
class Body:
    """One graph of the nest. `values[v]` is the flat id of the graph's value v."""

    graph: BlockGraph
    parent: BodyId  # the one that holds the region operation; -1 for the program itself
    operation: int  # the region operation in the parent's graph
    region: int
    weight: float
    values: tuple[FlatId, ...]


@dataclass(frozen=True)
class FlatProgram:
    """Instances in program order over numbered values."""

    bodies: tuple[Body, ...]
    instances: tuple[Instance, ...]
    types: tuple[TensorType, ...]
    feedback: Mapping[int, int]  # graph output position -> graph input position
    # (body, region operation) -> from which instance up to before which its region runs
    spans: Mapping[tuple[BodyId, int], tuple[int, int]] = field(default_factory=dict)
    rules: tuple[str, ...] = ()  # those that made this form of the program from the one given
    steps: tuple[RuleStep, ...] = ()  # and how

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Value -> its bytes."""
        return tuple([t.nbytes for t in self.types])

    @cached_property
    def given(self) -> frozenset[FlatId]:
        """The values that the program is given."""
        values = self.bodies[0].values
        return frozenset(values[v] for v in self.bodies[0].graph.inputs)

    @cached_property
    def renewing(self) -> frozenset[FlatId]:
        """The values that the program is given, and what these are once parts of them are written
        anew: in loops, too, whose rounds all read them or renew them."""
        found = set(self.given)
        for x in self.instances:
            if x.port in ("invariant", "carry"):
                known = x.inputs[0] in found
            else:
                known = any(x.inputs[p] in found for p in x.signature.writes[:1])
            if known:
                found.update(x.outputs)
        return frozenset(found)

    def loop_of(self, port: Instance) -> Operation:
        """The loop, or other operation with regions, that a port brings something into."""
        body = self.bodies[self.body_of[port.outputs[0]]]
        return self.bodies[body.parent].graph.operations[body.operation]

    @cached_property
    def body_of(self) -> tuple[BodyId, ...]:
        """Value -> the body that it is a value of."""
        out = [BodyId(0)] * len(self.types)
        for b, body in enumerate(self.bodies):
            for v in body.values:
                out[v] = BodyId(b)
        return tuple(out)

    @cached_property
    def operation_of(self) -> tuple[int, ...]:
        """Instance -> the operation of the program itself that it is, or runs in a region of; -1
        for ports of the program."""
        out = [x.operation if x.body == 0 else -1 for x in self.instances]
        for (body, operation), (start, stop) in self.spans.items():
            if body == 0:
                out[start:stop] = [operation] * (stop - start)
        return tuple(out)

    @cached_property
    def first_instances(self) -> tuple[int, ...]:
        """Operation of the program itself -> the first instance of it, or of its regions; behind
        these the first that is of none."""
        graph = self.bodies[0].graph
        found = [len(graph.constants) + len(graph.inputs)]
        for k in range(len(graph.operations)):
            span = self.spans.get((BodyId(0), k))
            found.append(span[1] if span else found[-1] + 1)
        return tuple(found)


@cache
def identity_signature(
    kernel: str, tensor: TensorType, reads: int, gives: int, *, partial: bool, whole: bool = False
) -> OperationSignature:
    """Signature of an identity between `reads` operands and `gives` outputs of one tensor type."""
    same = Projection.identity(tensor.rank)
    box = Projection(
        tuple((0,) * tensor.rank for _ in tensor.shape),
        (0,) * tensor.rank,
        tensor.shape,
        index_rank=tensor.rank,
    )
    through = box if whole else same
    role: Role = "whole" if whole else "map"
    return OperationSignature(
        kernel=kernel,
        index=tuple(IndexDim(f"d{k}", n, role) for k, n in enumerate(tensor.shape)),
        inputs=(through,) * reads,
        outputs=(through,) * gives,
        input_types=(tensor,) * reads,
        output_types=(tensor,) * gives,
        passages=(Passage(tuple(range(reads)), "sum", "sum"),) if partial and reads else (),
        reads=(None,) * reads,
        fusion="view",
    )


def stack_signature(
    kernel: str, inner: TensorType, length: int, *, inside: bool
) -> OperationSignature:
    """Identity between a stack `[T, d...]` and its slice `[d...]`; T is never cut.

    `inside` says that the slice is the output (a stream), otherwise the stack is (a stack).
    """
    outer = TensorType((length, *inner.shape), inner.dtype, inner.weak)
    r = inner.rank
    index = (
        IndexDim("t", length, "whole"),
        *(IndexDim(f"d{k}", n, "map") for k, n in enumerate(inner.shape)),
    )
    eye = tuple(tuple(int(c == k + 1) for c in range(r + 1)) for k in range(r))
    slice_ = Projection(eye, (0,) * r, (1,) * r, index_rank=r + 1)
    stack = Projection(
        ((0,) * (r + 1), *eye), (0,) * (r + 1), (length, *(1,) * r), index_rank=r + 1
    )
    return OperationSignature(
        kernel=kernel,
        index=index,
        inputs=(stack,) if inside else (slice_,),
        outputs=(slice_,) if inside else (stack,),
        input_types=(outer,) if inside else (inner,),
        output_types=(inner,) if inside else (outer,),
        passages=(Passage((0,), "sum", "sum"),),
        reads=(None,),
        fusion="view",
    )


def feedback_pairs(graph: BlockGraph, state: Mapping[str, str] | None = None) -> dict[int, int]:
    """Which outputs feed back as which inputs: output position -> input position.

    A donated input pairs with the output of the same pytree path and type, else with the only one
    of its type whose path is the same but for the number of the argument or of the result: the
    cache `[1]['keys']` with `[0]['keys']`. `state` adds pairs by path or prefix, `{"[0]": "[1]"}`
    for output [0], and all that is in it, that becomes argument [1]. Raises ExtractError for a path
    of `state` that no output or no input has, and for a pair of two types.
    """
    inputs = graph.input_names or tuple(f"[{i}]" for i in range(len(graph.inputs)))
    outputs = graph.output_names or tuple(f"[{j}]" for j in range(len(graph.outputs)))
    by_name = {name: i for i, name in enumerate(inputs)}
    named = dict(state or {})
    for path in named:
        if not any(is_below(path, name) for name in outputs):
            raise _no_such_path("output", path, f"state[{path!r}]", outputs)
    pairs: dict[int, int] = {}
    named_pairs: dict[int, int] = {}
    for j, name in enumerate(outputs):
        above = max((path for path in named if is_below(path, name)), key=len, default=None)
        becomes = name if above is None else named[above] + name[len(above) :]
        i = by_name.get(becomes)
        if i is None:
            if above is not None:
                raise _no_such_path("input", becomes, f"state[{above!r}]", inputs)
            continue
        a, b = graph.values[graph.inputs[i]], graph.values[graph.outputs[j]]
        same = (a.shape, a.dtype) == (b.shape, b.dtype)
        if above is not None and not same:
            raise ExtractError(
                f"output {name or 0} is {b}, input {becomes} is {a}",
                where=f"state[{above!r}]",
                hint="What feeds back has the shape and dtype of what it becomes.",
            )
        donated = bool(graph.donated) and graph.donated[i]
        if above is not None and i in named_pairs.values():
            raise ExtractError(
                f"two outputs become input {becomes}",
                where=f"state[{above!r}]",
                hint="An input is one output of the call before.",
            )
        if above is not None:
            named_pairs[j] = i
        elif same and donated:
            pairs[j] = i
    # What the user says goes before what the names suggest, and whole names before their ends.
    taken = set(named_pairs.values())
    found = {**{j: i for j, i in pairs.items() if i not in taken}, **named_pairs}
    return {**found, **_elsewhere(graph, inputs, outputs, found)}


def _elsewhere(
    graph: BlockGraph, inputs: Sequence[str], outputs: Sequence[str], found: Mapping[int, int]
) -> dict[int, int]:
    """Donated inputs that have no output yet, and outputs of their type whose names end as theirs,
    each the only one for the other."""
    given = set(found.values())
    by_output: dict[int, list[int]] = {}
    by_input: dict[int, list[int]] = {}
    for i, v in enumerate(graph.inputs):
        if not graph.donated or not graph.donated[i] or i in given:
            continue
        for j, w in enumerate(graph.outputs):
            ends = (outputs[j], _PLACE.sub("", outputs[j]))
            if j in found or not graph.same_type(v, w):
                continue
            if _PLACE.sub("", inputs[i]) in ends:
                by_output.setdefault(j, []).append(i)
                by_input.setdefault(i, []).append(j)
    return {j: i for j, (i, *others) in by_output.items() if not others and len(by_input[i]) == 1}


def is_below(path: str, name: str) -> bool:
    """Whether `path` is `name` or leads to it: `[0]` to `[0]['w']` and to `[0].mu`, not `[01]`."""
    return name.startswith(path) and name[len(path) : len(path) + 1] in ("", "[", ".")


def _no_such_path(what: str, path: str, where: str, names: tuple[str, ...]) -> ExtractError:
    return ExtractError(
        f"no {what} lies at {path!r}",
        where=where,
        hint=f"{what.capitalize()}s are named by their paths: {close_paths(path, names)}.",
    )


def close_paths(path: str, names: Sequence[str]) -> str:
    """All paths where they are few, else those most like one that does not exist, or the first
    there are, and how many others; for messages."""
    few = len(names) <= _FEW
    found = list(names) if few else get_close_matches(path, names, 3, 0.3) or list(names[:3])
    more = [f"and {len(names) - len(found)} others"] if len(names) > len(found) else []
    return ", ".join([*(repr(n) if not n else n for n in found), *more])


class _Flattener:
    def __init__(self) -> None:
        self.types: list[TensorType] = []
        self.bodies: list[Body] = []
        self.instances: list[Instance] = []
        self.spans: dict[tuple[BodyId, int], tuple[int, int]] = {}

    def value(self, tensor: TensorType) -> FlatId:
        self.types.append(tensor)
        return FlatId(len(self.types) - 1)

    def port(
        self,
        kind: str,
        signature: OperationSignature,
        reads: list[FlatId],
        gives: list[FlatId],
        body: BodyId,
        weight: float,
        input_weights: tuple[float, ...] | None = None,
    ) -> None:
        self.instances.append(
            Instance(
                signature,
                tuple(reads),
                tuple(gives),
                weight,
                body,
                port=kind,
                input_weights=input_weights or (weight,) * len(reads),
            )
        )

    def identity(
        self,
        kind: str,
        reads: list[FlatId],
        gives: list[FlatId],
        body: BodyId,
        weight: float,
        *,
        partial: bool,
        whole: bool = False,
        input_weights: tuple[float, ...] | None = None,
    ) -> None:
        tensor = self.types[(reads + gives)[0]]
        signature = identity_signature(
            f"port_{kind}", tensor, len(reads), len(gives), partial=partial, whole=whole
        )
        self.port(kind, signature, reads, gives, body, weight, input_weights)

    def open_body(
        self, graph: BlockGraph, parent: BodyId, operation: int, region: int, weight: float
    ) -> BodyId:
        values = tuple(self.value(t) for t in graph.values)
        self.bodies.append(Body(graph, parent, operation, region, weight, values))
        number = BodyId(len(self.bodies) - 1)
        for v in graph.constants:
            self.identity("constant", [], [values[v]], number, weight, partial=False, whole=True)
        return number

    def fill_body(self, number: BodyId) -> None:
        from tapestry_egg.metakernels import registry

        body = self.bodies[number]
        for i, op in enumerate(body.graph.operations):
            reads = [body.values[v] for v in op.inputs]
            gives = [body.values[v] for v in op.outputs]
            if op.regions:
                start = len(self.instances)
                self.region(op, i, number, reads, gives)
                self.spans[number, i] = (start, len(self.instances))
                continue
            signature = registry.signature_of(
                op, tuple([self.types[v] for v in reads]), tuple([self.types[v] for v in gives])
            )
            if op.effectful:
                signature = registry.opaque(
                    op.kernel, signature.input_types, signature.output_types, once=True
                )
            self.instances.append(
                Instance(
                    signature,
                    tuple(reads),
                    tuple(gives),
                    body.weight,
                    number,
                    operation=i,
                    input_weights=(body.weight,) * len(reads),
                )
            )

    def region(
        self, op: Operation, i: int, outer: BodyId, reads: list[FlatId], gives: list[FlatId]
    ) -> None:
        handler = {SCAN: self.scan, WHILE: self.while_, COND: self.cond}.get(op.kernel)
        if handler is None:
            raise GraphError(
                f"unknown region operation {op.kernel!r}",
                where=str(op.source),
                hint=f"Regions are {REGIONS_SAID}.",
            )
        handler(op, i, outer, reads, gives)

    def scan(
        self, op: Operation, i: int, outer: BodyId, reads: list[FlatId], gives: list[FlatId]
    ) -> None:
        consts, carries = counts(op)
        length = int(op.params["length"])
        w = self.bodies[outer].weight
        inner_w = w * length
        body = self.open_body(op.regions[0], outer, i, 0, inner_w)
        inside = [self.bodies[body].values[v] for v in op.regions[0].inputs]
        leaving = [self.bodies[body].values[v] for v in op.regions[0].outputs]
        for k in range(consts):
            self.identity("invariant", [reads[k]], [inside[k]], outer, w, partial=True)
        for k in range(consts + carries, len(reads)):
            signature = stack_signature("port_stream", self.types[inside[k]], length, inside=True)
            self.port("stream", signature, [reads[k]], [inside[k]], outer, w)
        for k in range(carries):
            self.identity(
                "carry",
                [reads[consts + k], leaving[k]],
                [inside[consts + k], gives[k]],
                outer,
                w,
                partial=True,
                input_weights=(w, inner_w),
            )
        self.fill_body(body)
        for k in range(carries, len(gives)):
            signature = stack_signature("port_stack", self.types[leaving[k]], length, inside=False)
            self.port("stack", signature, [leaving[k]], [gives[k]], outer, w, (inner_w,))

    def while_(
        self, op: Operation, i: int, outer: BodyId, reads: list[FlatId], gives: list[FlatId]
    ) -> None:
        nc, nb = int(op.params["cond_nconsts"]), int(op.params["body_nconsts"])
        w = self.bodies[outer].weight
        test = self.open_body(op.regions[0], outer, i, 0, w)
        body = self.open_body(op.regions[1], outer, i, 1, w)
        in_test = [self.bodies[test].values[v] for v in op.regions[0].inputs]
        in_body = [self.bodies[body].values[v] for v in op.regions[1].inputs]
        leaving = [self.bodies[body].values[v] for v in op.regions[1].outputs]
        for k in range(nc):
            self.identity("invariant", [reads[k]], [in_test[k]], outer, w, partial=True)
        for k in range(nb):
            self.identity("invariant", [reads[nc + k]], [in_body[k]], outer, w, partial=True)
        for k, final in enumerate(gives):
            self.identity(
                "carry",
                [reads[nc + nb + k], leaving[k]],
                [in_test[nc + k], in_body[nb + k], final],
                outer,
                w,
                partial=True,
            )
        self.fill_body(test)
        verdict = self.bodies[test].values[op.regions[0].outputs[0]]
        self.identity("predicate", [verdict], [], outer, w, partial=False, whole=True)
        self.fill_body(body)

    def cond(
        self, op: Operation, i: int, outer: BodyId, reads: list[FlatId], gives: list[FlatId]
    ) -> None:
        w = self.bodies[outer].weight
        # One branch runs. Nobody knows which, so each counts as often as another: seconds are a
        # mean, which is a sum over branches as all costs are; memory has room for the largest.
        each = w / len(op.regions)
        self.identity("predicate", [reads[0]], [], outer, w, partial=False, whole=True)
        branches = [self.open_body(g, outer, i, r, each) for r, g in enumerate(op.regions)]
        for k, v in enumerate(reads[1:]):
            inner = [
                self.bodies[b].values[g.inputs[k]]
                for b, g in zip(branches, op.regions, strict=True)
            ]
            self.identity("invariant", [v], inner, outer, w, partial=True)
        for b in branches:
            self.fill_body(b)
        for k, v in enumerate(gives):
            leaving = [
                self.bodies[b].values[g.outputs[k]]
                for b, g in zip(branches, op.regions, strict=True)
            ]
            often = (each,) * len(leaving)
            self.identity("branch", leaving, [v], outer, w, partial=True, input_weights=often)


def flatten(graph: BlockGraph, feedback: Mapping[int, int] | None = None) -> FlatProgram:
    """Flatten a block graph with its regions into instances; `feedback` as `feedback_pairs` gives.

    Raises GraphError for a region operation that it does not know.
    """
    pairs = dict(feedback_pairs(graph) if feedback is None else feedback)
    f = _Flattener()
    top = f.open_body(graph, BodyId(-1), -1, 0, 1.0)
    values = f.bodies[top].values
    returning = {i: j for j, i in pairs.items()}
    for i, v in enumerate(graph.inputs):
        if i in returning:
            out = values[graph.outputs[returning[i]]]
            f.identity("state", [out], [values[v]], top, 1.0, partial=False)
        else:
            f.identity("input", [], [values[v]], top, 1.0, partial=False)
    f.fill_body(top)
    for j, v in enumerate(graph.outputs):
        if j not in pairs:
            f.identity("output", [values[v]], [], top, 1.0, partial=False)
    return FlatProgram(tuple(f.bodies), tuple(f.instances), tuple(f.types), pairs, dict(f.spans))
