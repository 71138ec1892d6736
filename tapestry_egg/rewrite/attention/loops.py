"""Loops: what a scan's body needs to be read on its own.

Masks that do not change from step to step stand before the loop; they are made in its body again.
What the forward loop of a derivative keeps of its scores, step by step, is made again in the body
of the backward loop, from what the scores are made of: that is kept instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, without_unread
from tapestry_egg.graph.loops import counts, with_operands
from tapestry_egg.metakernels import registry
from tapestry_egg.tracing.spelled import Spelled

from .sites import read_site, sites
from .sums import Foreign
from .views import Views


class Body(Spelled):
    """A region that is being changed: operations are put before those that it has."""

    def __init__(self, graph: BlockGraph) -> None:
        super().__init__(list(graph.values), dict(graph.constants))
        self.graph = graph
        self.replaced: dict[int, int] = {}

    def cloned(
        self, source: BlockGraph, wanted: Sequence[int], given: Callable[[int], int | None]
    ) -> dict[int, int]:
        """The values of another graph made again at the front of this one; `given` says which are
        here already."""
        made: dict[int, int] = {}
        producers = source.producers()

        def visit(v: int) -> None:
            stack = [v]
            while stack:
                u = stack[-1]
                here = made.get(u, given(u))
                if here is not None:
                    made[u] = here
                    stack.pop()
                    continue
                if u in source.constants:
                    made[u] = self.value(source.values[u])
                    self.constants[made[u]] = source.constants[u]
                    stack.pop()
                    continue
                op = source.operations[producers[u]]
                below = [w for w in op.inputs if w not in made]
                if below:
                    stack += below
                    continue
                outputs = tuple(self.value(source.values[w]) for w in op.outputs)
                made.update(zip(op.outputs, outputs, strict=True))
                inputs = tuple(made[w] for w in op.inputs)
                self.operations.append(replace(op, inputs=inputs, outputs=outputs))
                stack.pop()

        for v in wanted:
            visit(v)
        return made

    def made(self) -> BlockGraph:
        """The region, what was replaced being read as what replaces it."""
        operations = (*self.operations, *self.graph.operations)
        return self.anew(self.graph, operations, self.replaced)


def without_unread_streams(graph: BlockGraph) -> BlockGraph:
    """The graph without what nothing reads: operations, and what loops take and keep."""
    needed = set(graph.outputs)
    kept: list[Operation] = []
    for op in reversed(graph.operations):
        if not op.effectful and needed.isdisjoint(op.outputs):
            continue
        op = _narrow(op, needed) if op.is_scan and not op.effectful else op
        kept.append(op)
        needed.update(op.inputs)
    return without_unread(replace(graph, operations=tuple(reversed(kept))))


def _narrow(op: Operation, needed: set[int]) -> Operation:
    """A loop without the stacked results that nothing reads, and the constants and streams that
    its body then does not read."""
    consts, carried = counts(op)
    (body,) = op.regions
    outs = [k for k, v in enumerate(op.outputs) if k < carried or v in needed]
    inner = without_unread(replace(body, outputs=tuple(body.outputs[k] for k in outs)))
    read = {v for o in inner.operations for v in o.inputs} | set(inner.outputs)
    ins = [k for k, v in enumerate(body.inputs) if consts <= k < consts + carried or v in read]
    if len(ins) == len(op.inputs) and len(outs) == len(op.outputs):
        return replace(op, regions=(inner,))
    return replace(with_operands(op, inner, ins), outputs=tuple(op.outputs[k] for k in outs))


def with_masks_inside(graph: BlockGraph) -> BlockGraph:
    """The graph with what loops read of masks, made of nothing but constants, in their bodies."""
    if not any(
        registry.meaning(o.kernel) == "exponential"
        for op in graph.operations
        for r in op.regions
        for o in r.operations
    ):
        return graph
    masks = fixed(graph)
    return in_loops(graph, lambda op: making(graph, op, masks, masks))


def fixed(graph: BlockGraph) -> set[int]:
    """The values that are made of constants alone, as masks are."""
    known = {v for v in graph.constants if graph.constants[v].size == 1}
    made: set[int] = set()
    for op in graph.operations:
        if known.issuperset(op.inputs) and registry.is_light(op, graph.values):
            known.update(op.outputs)
            made.update(op.outputs)
    return made


def in_loops(graph: BlockGraph, change: Callable[[Operation], Operation]) -> BlockGraph:
    """The graph with its scans changed, without what nothing reads then; itself where none is."""
    operations = [change(op) if op.is_scan else op for op in graph.operations]
    if all(a is b for a, b in zip(operations, graph.operations, strict=True)):
        return graph
    return without_unread(replace(graph, operations=tuple(operations)))


def making(graph: BlockGraph, op: Operation, wanted: set[int], again: set[int]) -> Operation:
    """A loop whose body makes what is `wanted` of what does not change from step to step, and
    `again` what that is made of; the same operation where it is given none."""
    (region,), (count, _) = op.regions, counts(op)
    gone = [k for k in range(count) if op.inputs[k] in wanted]
    if not gone:
        return op
    body = Body(region)
    own = dict(zip(op.inputs[:count], region.inputs[:count], strict=True))
    more: dict[int, int] = {}  # value outside, value in the body

    def given(v: int) -> int | None:
        if v in again or v in graph.constants:
            return None
        if v not in own:
            own[v] = more[v] = body.value(graph.values[v].strong)
        return own[v]

    made = body.cloned(graph, [op.inputs[k] for k in gone], given)
    body.replaced = {region.inputs[k]: made[op.inputs[k]] for k in gone}
    kept = [k for k in range(len(op.inputs)) if k not in gone]
    return with_operands(op, body.made(), kept, [*more.items()])


def with_scores_inside(graph: BlockGraph) -> BlockGraph:
    """The graph whose backward loops make scores again instead of reading those that the forward
    loops kept."""
    return with_pairs(graph, _without_kept_scores)


#: A forward and a backward loop, and the program's values, which may become more -> the two anew,
#: or None where they stay.
OfLoops = Callable[[Operation, Operation, list[TensorType]], "tuple[Operation, Operation] | None"]


def with_pairs(graph: BlockGraph, change: OfLoops) -> BlockGraph:
    """The graph with loops, and those whose results they read, changed together."""
    producers = graph.producers()
    operations = list(graph.operations)
    values = list(graph.values)
    for number, op in enumerate(graph.operations):
        if not op.is_scan:
            continue
        sources = {producers[v] for v in op.inputs if v in producers}
        for source in sorted(k for k in sources if graph.operations[k].is_scan):
            pair = change(operations[source], operations[number], values)
            if pair is not None:
                operations[source], operations[number] = pair
    if operations == list(graph.operations):
        return graph
    return replace(graph, values=tuple(values), operations=tuple(operations))


def _without_kept_scores(
    forward: Operation, backward: Operation, values: list[TensorType]
) -> tuple[Operation, Operation] | None:
    """Both loops, where the backward one makes the scores again; None where it reads none. New
    values of the program are appended to `values`."""
    if forward.rounds != backward.rounds:
        return None
    inner, outer = forward.regions[0], backward.regions[0]
    of_scores = _scores(inner)
    link = Link(forward, backward, values)
    kept = {j: v for j, v in link.kept().items() if v in of_scores}
    if not kept:
        return None
    made = link.body.cloned(inner, list(kept.values()), lambda v: link.given(v, of_scores))
    link.body.replaced = {outer.inputs[j]: made[v] for j, v in kept.items()}
    return link.loops(set(kept))


class Link:
    """A forward loop that is made to keep more values, and the backward loop that reads them."""

    def __init__(self, forward: Operation, backward: Operation, values: list[TensorType]) -> None:
        self.forward, self.backward, self.values = forward, backward, values
        self.inner = forward.regions[0]
        self.body = Body(backward.regions[0])
        self.consts: list[tuple[int, int]] = []  # value outside, value in the backward body
        self.streams: list[tuple[int, int]] = []
        self.more: list[int] = []  # values of the forward body that it keeps as well
        self.outputs: list[int] = []
        self.known: dict[int, int] = {}
        self.makers = self.inner.producers()

    def kept(self) -> dict[int, int]:
        """Per place of what the backward loop reads of what the forward one keeps step by step, the
        value of the forward body that it is."""
        carried, first = counts(self.forward)[1], sum(counts(self.backward))
        at = {v: k for k, v in enumerate(self.forward.outputs) if k >= carried}
        return {
            j: self.inner.outputs[at[v]]
            for j, v in enumerate(self.backward.inputs)
            if j >= first and v in at
        }

    def given(self, v: int, again: set[int]) -> int | None:
        """The value of the backward body for one of the forward body that is not made again."""
        if v in again or v in self.inner.constants or self._is_fixed(v):
            return None
        if v not in self.known:
            self.known[v] = self.passed(v)
        return self.known[v]

    def _is_fixed(self, v: int) -> bool:
        """Whether a value is made as masks are, of constants alone."""
        stack, seen = [v], set[int]()
        while stack:
            u = stack.pop()
            if u in seen or u in self.inner.constants:
                continue
            seen.add(u)
            at = self.makers.get(u)
            if at is None or not registry.is_light(self.inner.operations[at], self.inner.values):
                return False
            stack += self.inner.operations[at].inputs
        return True

    def passed(self, v: int) -> int:
        """The value of the backward body that is a value of the forward body."""
        type_ = self.inner.values[v]
        consts, carried = counts(self.forward)
        where = self.inner.inputs.index(v) if v in self.inner.inputs else -1
        if 0 <= where < consts:
            outside = self.forward.inputs[where]
        elif where >= consts + carried:
            outside = self.forward.inputs[where]
        else:
            kept = [k for k, u in enumerate(self.inner.outputs) if u == v and k >= carried]
            outside = self.forward.outputs[kept[0]] if kept else -1
        own = self.backward.regions[0].inputs
        first, skipped = counts(self.backward)[0], sum(counts(self.backward))
        for k, u in enumerate(self.backward.inputs):
            if u == outside and (k < first if 0 <= where < consts else k >= skipped):
                return own[k]
        here = self.body.value(TensorType(type_.shape, type_.dtype))
        if 0 <= where < consts:
            self.consts.append((outside, here))
        elif outside >= 0:
            self.streams.append((outside, here))
        else:
            length = self.forward.rounds
            self.values.append(TensorType((length, *type_.shape), type_.dtype))
            self.more.append(v)
            self.outputs.append(len(self.values) - 1)
            self.streams.append((len(self.values) - 1, here))
        return here

    def loops(self, gone: set[int]) -> tuple[Operation, Operation]:
        """Both loops; the backward one without the inputs of these numbers."""
        inner, op = self.inner, self.backward
        forward = replace(
            self.forward,
            outputs=(*self.forward.outputs, *self.outputs),
            regions=(replace(inner, outputs=(*inner.outputs, *self.more)),),
        )
        kept = [k for k in range(len(op.inputs)) if k not in gone]
        return forward, with_operands(op, self.body.made(), kept, self.consts, self.streams)


def _scores(body: BlockGraph) -> set[int]:
    """The values of a body that are made of the scores of a softmax, row by row or one by one."""
    if not any(registry.meaning(op.kernel) == "exponential" for op in body.operations):
        return set()
    views = Views(body)
    found: set[int] = set()
    for op in sites(views):
        try:
            site = views.settled(partial(read_site, views, op))
        except (Foreign, ValueError):
            continue
        if site is not None and site.forward:
            found.add(site.scores.product.outputs[0])
    for op in body.operations:
        if not found.isdisjoint(op.inputs) and _goes_by_rows(body, op):
            found.update(op.outputs)
    return found


def _goes_by_rows(body: BlockGraph, op: Operation) -> bool:
    """Whether an operation is done to scores one by one, or row by row."""
    return not op.regions and registry.signature_in(body, op).fusion != "kernel"


def with_kept_results(graph: BlockGraph) -> BlockGraph:
    """The graph whose backward loops read the results of fused attention that the forward loops
    have, where they would make them again of the same operands."""
    return with_pairs(graph, _sharing)


def _fused(body: BlockGraph) -> list[Operation]:
    return [op for op in body.operations if registry.in_blocks(op.kernel)]


def _sharing(
    forward: Operation, backward: Operation, values: list[TensorType]
) -> tuple[Operation, Operation] | None:
    if forward.rounds != backward.rounds:
        return None
    inner, outer = forward.regions[0], backward.regions[0]
    link = Link(forward, backward, values)
    views, onward = (Views(inner), Views(outer)), _onward(forward, backward)
    replaced: dict[int, int] = {}
    for late in _fused(outer):
        for early in _fused(inner):
            same = early.kernel == late.kernel and early.params == late.params
            if same and _same_operands(views, early, late, onward):
                for a, b in zip(early.outputs, late.outputs, strict=True):
                    if any(b in op.inputs for op in outer.operations):
                        replaced[b] = link.passed(a)
                break
    if not replaced:
        return None
    link.body.replaced = replaced
    return link.loops(set())


def _onward(forward: Operation, backward: Operation) -> dict[int, int]:
    """Per value that the backward body is given the one of the forward body that it is."""
    ours, theirs = backward.regions[0], forward.regions[0]
    first, skipped = counts(backward)[0], sum(counts(backward))
    consts, carried = counts(forward)
    fixed = dict(zip(forward.inputs[:consts], theirs.inputs[:consts], strict=True))
    streams = dict(
        zip(forward.inputs[consts + carried :], theirs.inputs[consts + carried :], strict=True)
    )
    streams.update(zip(forward.outputs[carried:], theirs.outputs[carried:], strict=True))
    out: dict[int, int] = {}
    for k, (outside, here) in enumerate(zip(backward.inputs, ours.inputs, strict=True)):
        known = fixed if k < first else streams if k >= skipped else {}
        if outside in known:
            out[here] = known[outside]
    return out


def _same_operands(
    views: tuple[Views, Views], early: Operation, late: Operation, onward: Mapping[int, int]
) -> bool:
    """Whether two kernels, of the forward and the backward body, have the same operands."""
    ours, theirs = views[1], views[0]
    if len(early.inputs) != len(late.inputs):
        return False

    def same(k: int, a: int, b: int) -> bool:
        shape = theirs.graph.values[a].shape
        if ours.graph.values[b].shape != shape:
            return False
        dims = theirs.fresh(("operand", k), shape)
        at, inside = ours.see(b, dims, False, onward)
        return at in onward and (
            theirs.see(onward[at], inside, False) == theirs.see(a, dims, False)
        )

    try:
        return all(
            theirs.settled(partial(same, k, a, b))
            for k, (a, b) in enumerate(zip(early.inputs, late.inputs, strict=True))
        )
    except ValueError:
        return False
