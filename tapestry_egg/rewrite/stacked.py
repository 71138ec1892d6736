"""Stacked copies: products that a program makes of one array after another, made of all at once.

An optimiser that turns every weight by a chain of products (Newton and Schulz's iteration in Muon,
the roots of Shampoo) makes the same small products of each. Devices that share one of them send
parts of it in every product of the chain. Of a stack of all weights each device has some whole ones
instead, and sends nothing but these, before the chain and after it.

Copies grow around products that are alike and of which none is made of another
(`folded_program.py`). Taken are the chains of products among what they have in common, and what
stands around them, as long as that makes the arrays fewer or smaller that enter the stack and leave
it. Then all that the program has of such a chain is a copy, wherever it stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, without_unread
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels import registry
from tapestry_egg.schedule.one_device import least_seconds

from .folded_program import LEAST_COPIES, Flags, Ints, Net, Stretch, grown
from .written import Written

#: The name of this change in the rules and steps of plans.
RULE = "stacked-copies"

#: Operations that one copy of a chain has at most: all are traced anew, and take milliseconds.
_MOST = 200


def with_stacked_copies(graph: BlockGraph, target: Target | None = None) -> BlockGraph:
    """The graph with chains of products that it makes of many arrays made of stacks of these; the
    same graph if there are none, or if stacking them takes a target as long as the products do."""
    chains = [c for c in _chains(graph) if target is None or _pays(graph, c, target)]
    order = _order(graph, chains)
    while order is None:  # some are made of what others of them lead to
        chains.pop()
        order = _order(graph, chains)
    if not chains:
        return graph
    made = Written(list(graph.values), dict(graph.constants))
    for k in order:
        if k < 0 and made.takes(chains[~k].writer(graph, made)):
            continue
        for n in (k,) if k >= 0 else sorted(chains[~k].every):
            op = graph.operations[n]
            made.operations.append(replace(op, inputs=made.read(op.inputs)))
    if not made.stands:
        return graph
    changed = replace(
        graph,
        values=tuple(made.values),
        operations=tuple(made.operations),
        outputs=made.read(graph.outputs),
        constants=made.constants,
    )
    return without_unread(changed)


def _chains(graph: BlockGraph) -> list[_Chain]:
    """The chains of a program, those of which most is stacked first."""
    products = [_count_products(graph, op) for op in graph.operations]
    if sum(products) < 2:
        return []
    program = _Program(graph, products)
    found: list[_Chain] = []
    taken = np.zeros(program.net.count, dtype=np.bool_)
    for members in program.repeated():
        if taken[members].any():
            continue
        for copies in _Positions(program, grown(program.net, members, taken)).chains():
            for model in copies:
                every = [] if taken[model].any() else program.copies(model, taken)
                if len(every) >= LEAST_COPIES:
                    found.append(_Chain(graph, every))
                    taken[[*found[-1].every]] = True
    return sorted(found, key=lambda c: -len(c.every))


def _count_products(graph: BlockGraph, op: Operation) -> int:
    """How many products an operation makes one after another, its rounds one by one. What devices
    cannot share at all, as the eigenvectors of one matrix, counts as a chain of its own."""
    if op.regions:
        return op.rounds * sum(_count_products(r, o) for r in op.regions for o in r.operations)
    sig = registry.signature_in(graph, op)
    if sig.fusion == "kernel" and sig.whole_flops and all(d.role == "whole" for d in sig.index):
        return 2
    return int(sig.contracts)


def _seconds(graph: BlockGraph, op: Operation, target: Target) -> float:
    """The least seconds of an operation on one device, its rounds one by one."""
    if op.regions:
        return op.rounds * sum(_seconds(r, o, target) for r in op.regions for o in r.operations)
    return least_seconds(registry.signature_in(graph, op), target)


def _is_repeatable(graph: BlockGraph, op: Operation) -> bool:
    """Whether of an operation on a stack is known that each of its arrays gets the same."""
    if op.remat is not None or op.effectful or (op.regions and not op.is_scan):
        return False
    if op.regions:
        return all(_is_repeatable(r, o) for r in op.regions for o in r.operations)
    return registry.is_repeatable(op) and not registry.signature_in(graph, op).opaque


class _Program:
    """A program, how many `products` each of its operations makes, and what they are made of."""

    def __init__(self, graph: BlockGraph, products: Sequence[int]) -> None:
        self.graph, self.products, self.net = graph, products, Net(graph)
        self.makers = graph.producers()
        # Of every operation those that it is made of, itself among them: a bit for each.
        self.before: list[int] = []
        for k, op in enumerate(graph.operations):
            bits = 1 << k
            for v in op.inputs:
                if (maker := self.makers.get(v)) is not None:
                    bits |= self.before[maker]
            self.before.append(bits)
        self._of_kind: dict[int, int] = defaultdict(int)
        for k, kind in enumerate(self.net.kind.tolist()):
            self._of_kind[kind] |= 1 << k

    def repeated(self) -> list[Ints]:
        """Operations that make products, alike and apart from each other, at least as many as there
        are copies: those that make several products, or one that is made of another of these."""
        kinds: dict[tuple[int, int], list[int]] = {}
        for k, count in enumerate(self.products):
            if count:
                kinds.setdefault((int(self.net.kind[k]), self.step(k)), []).append(k)
        groups = []
        for own in kinds.values():
            some: list[int] = []
            for k in own:
                if all(self.are_apart(k, n) for n in some):
                    some.append(k)
            if len(some) >= LEAST_COPIES:
                groups.append(some)
        every = sum(1 << k for own in groups for k in own)
        return [
            np.array(own, dtype=np.int64)
            for own in groups
            if self.products[own[0]] > 1 or self.before[own[0]] & every != 1 << own[0]
        ]

    def step(self, k: int) -> int:
        """The how manieth of its kind an operation is, of those that it is made of."""
        return (self.before[k] & self._of_kind[int(self.net.kind[k])]).bit_count()

    def are_apart(self, a: int, b: int) -> bool:
        """Whether none of two operations is the other one, or made of it."""
        return not (self.before[a] >> b & 1 or self.before[b] >> a & 1)

    def copies(self, model: Sequence[int], taken: Flags) -> list[list[int]]:
        """All that the program has of the chain `model`, none of it among operations that are
        `taken`, nor made of another: [copies][operations]."""
        last = [k for k in model if not self._is_read(k, model)]
        found = [list(model)]
        if len(last) > 1:
            return found
        used, step = {*np.flatnonzero(taken).tolist(), *model}, self.step(last[0])
        # The n-th step of an iteration is a copy of other n-th ones.
        for k in np.flatnonzero(self.net.kind == self.net.kind[last[0]]).tolist():
            if k in used or self.step(k) != step:
                continue
            own = self._alike(model, last[0], k)
            if own is None or not used.isdisjoint(own):
                continue
            if all(self.are_apart(a, b) for x in found for a, b in zip(x, own, strict=True)):
                found.append(own)
                used.update(own)
        return found

    def _is_read(self, k: int, model: Sequence[int]) -> bool:
        made = {*self.graph.operations[k].outputs}
        return any(not made.isdisjoint(self.graph.operations[n].inputs) for n in model)

    def _alike(self, model: Sequence[int], last: int, k: int) -> list[int] | None:
        """The operations of the copy of a chain that ends in operation k as it does in `last`."""
        inside, image, stack = {*model}, {last: k}, [(last, k)]
        while stack:
            a, b = stack.pop()
            if self.net.kind[a] != self.net.kind[b]:
                return None
            reads = zip(self.net.inputs[a], self.net.inputs[b], strict=True)
            for v, w in reads:
                maker = self.makers.get(v)
                if maker is None or maker not in inside:
                    continue
                other = self.makers.get(w)
                if other is None or self.net.slot[v] != self.net.slot[w]:
                    return None
                if image.setdefault(maker, other) != other:
                    return None
                stack.append((maker, other))
        alike = len(image) == len(model) == len({*image.values()})
        return [image[n] for n in model] if alike else None


class _Positions:
    """The positions of a stretch that can be stacked, as its model copy has them, with their
    `images` in all copies: by operation those that it reads, and that read it, in the same way in
    all copies."""

    def __init__(self, program: _Program, stretch: Stretch) -> None:
        self.program = program
        graph, makers, model = program.graph, program.makers, stretch.model
        self.images = images = {
            own[model]: own
            for own in stretch.images.tolist()
            if _is_repeatable(graph, graph.operations[own[model]])
            and any(program.are_apart(own[model], k) for k in own)
        }
        self.reads: dict[int, set[int]] = {k: set() for k in images}
        self.readers: dict[int, set[int]] = {k: set() for k in images}
        for k, own in images.items():
            for values in zip(*[graph.operations[n].inputs for n in own], strict=True):
                maker = makers.get(values[model], -1)
                if images.get(maker) == [makers.get(v) for v in values]:
                    self.reads[k].add(maker)
                    self.readers[maker].add(k)
        # What a copy reads that others read as well, or an equal constant in its place.
        self.shared = {
            values[model]
            for own in images.values()
            for values in zip(*[graph.operations[n].inputs for n in own], strict=True)
            if _is_shared(graph, values)
        }
        self._read_by = graph.readers()
        self._leaving = {*graph.outputs}

    def chains(self) -> Iterator[list[list[int]]]:
        """Products that read each other's results, and what is best stacked with them: the
        operations of each copy, those of the model first."""
        products = {k for k in self.reads if self.program.products[k]}
        for part in self._connected(self._between(products)):
            if self._is_chain(part) and self._is_chain(taken := self._fitted(part)):
                every = [self.images[k] for k in sorted(taken)]
                yield [sorted(taken), *[list(own) for own in zip(*every, strict=True)]]

    def _is_chain(self, some: set[int]) -> bool:
        """Whether a few operations make more than one product."""
        return len(some) <= _MOST and sum(self.program.products[k] for k in some) > 1

    def _closed(self, some: Collection[int], following: dict[int, set[int]]) -> set[int]:
        """Some positions and those that follow them, from one to the next."""
        found, stack = {*some}, [*some]
        while stack:
            more = following[stack.pop()] - found
            found |= more
            stack += more
        return found

    def _between(self, some: Collection[int]) -> set[int]:
        """Some positions and all that lie between two of them."""
        return self._closed(some, self.readers) & self._closed(some, self.reads)

    def _connected(self, some: set[int]) -> Iterator[set[int]]:
        """The parts of some positions that read nothing of each other."""
        left = set(some)
        while left:
            part, stack = set[int](), [min(left)]
            while stack:
                k = stack.pop()
                if k in left:
                    left.remove(k)
                    part.add(k)
                    stack += self.reads[k] | self.readers[k]
            yield part

    def _fitted(self, part: set[int]) -> set[int]:
        """The part with more positions at its edges, then with fewer, as long as less enters and
        leaves."""
        for step in (self._grown, self._shrunk):
            while True:
                best = min(step(part), key=self._moved, default=part)
                if self._moved(best) >= self._moved(part):
                    break
                part = best
        return part

    def _grown(self, part: set[int]) -> Iterator[set[int]]:
        """The part with one more position, and what lies between."""
        beside = {n for k in part for n in self.reads[k] | self.readers[k]} - part
        for k in sorted(beside):
            yield self._between(part | {k})

    def _shrunk(self, part: set[int]) -> Iterator[set[int]]:
        """The part without one of its positions, and all before or behind it."""
        for of in (self.reads, self.readers):
            for k in sorted(part):
                if self._is_chain(less := part - self._closed((k,), of)):
                    yield less

    def _moved(self, some: set[int]) -> tuple[int, int, int]:
        """Bytes that enter and leave one copy of some positions; then what is to be compared where
        these are equal, products and operations."""
        graph = self.program.graph
        inside = {v for k in some for v in graph.operations[k].outputs}
        read = {v for k in some for v in graph.operations[k].inputs} - inside - self.shared
        left = {v for v in inside if v in self._leaving or not some.issuperset(self._read_by[v])}
        products = sum(self.program.products[k] for k in some)
        return sum(graph.values[v].nbytes for v in read | left), -products, len(some)


class _Chain:
    """Operations that are stacked, `every` one by copy, [copies][operations]; the values that enter
    and that leave, [values][copies]."""

    def __init__(self, graph: BlockGraph, copies: Sequence[Sequence[int]]) -> None:
        self.first = [graph.operations[k] for k in copies[0]]
        self.copies, self.every = len(copies), frozenset(k for own in copies for k in own)
        operations = [[graph.operations[own[p]] for own in copies] for p in range(len(copies[0]))]
        made = {v for op in self.first for v in op.outputs}
        reads = (vs for own in operations for vs in zip(*[op.inputs for op in own], strict=True))
        entering = dict.fromkeys(vs for vs in reads if vs[0] not in made)
        self.constants = {vs[0] for vs in entering if _is_one_constant(graph, vs)}
        self.entering = [vs for vs in entering if vs[0] not in self.constants]
        inside = {v: {*own} for own in copies for k in own for v in graph.operations[k].outputs}
        read_by, ends = graph.readers(), {*graph.outputs}
        self.leaving = [
            vs
            for own in operations
            for vs in zip(*[op.outputs for op in own], strict=True)
            if any(v in ends or not inside[v].issuperset(read_by[v]) for v in vs)
        ]

    @property
    def moved(self) -> list[tuple[int, ...]]:
        """The values of which there are stacks."""
        return [vs for vs in (*self.entering, *self.leaving) if len({*vs}) > 1]

    def writer(self, graph: BlockGraph, made: Written) -> Any:
        """What writes the chain, of stacks, into a program."""

        def write() -> None:
            given = [vs if len({*vs}) > 1 else vs[:1] for vs in self.entering]
            run = self._run(graph, [len(vs) for vs in given])
            inputs = made.read([v for vs in given for v in vs])
            results = made.apply(run, inputs, self.first[0])
            made.stands.update(zip([v for vs in self.leaving for v in vs], results, strict=True))

        return write

    def _run(self, graph: BlockGraph, given: Sequence[int]) -> Any:
        """A function of what enters, so many arrays of each, that gives what leaves."""
        import jax
        import jax.numpy as jnp

        from tapestry_egg.tracing.emit import emit

        one = replace(
            graph,
            operations=tuple(self.first),
            inputs=tuple([vs[0] for vs in self.entering]),
            outputs=tuple([vs[0] for vs in self.leaving]),
            constants={v: graph.constants[v] for v in sorted(self.constants)},
            input_names=(),
            output_names=(),
            donated=(),
        )
        stacked = jax.vmap(emit(one), in_axes=tuple([0 if n > 1 else None for n in given]))

        def run(*arrays: Any) -> list[Any]:
            left = iter(arrays)
            parts = [[next(left) for _ in range(n)] for n in given]
            results = stacked(*[jnp.stack(p) if len(p) > 1 else p[0] for p in parts])
            every = range(self.copies)
            return [jax.lax.index_in_dim(x, c, 0, False) for x in results for c in every]

        return run


def _is_shared(graph: BlockGraph, values: Sequence[int]) -> bool:
    """Whether values are one, or constants of the same elements."""
    return len({*values}) == 1 or _is_one_constant(graph, values)


def _is_one_constant(graph: BlockGraph, values: Sequence[int]) -> bool:
    """Whether values are constants of the same elements."""
    found = [graph.constants.get(v) for v in values]
    first = found[0]
    return first is not None and all(x is not None and np.array_equal(x, first) for x in found)


def _pays(graph: BlockGraph, chain: _Chain, target: Target) -> bool:
    """Whether the products of a chain take longer than stacking what enters and leaves it, which is
    read and written once more each."""
    seconds = sum(_seconds(graph, op, target) for op in chain.first)
    amount = sum(graph.values[vs[0]].nbytes for vs in chain.moved)
    return seconds > 2.0 * amount / target.hbm_bytes_per_second


def _order(graph: BlockGraph, chains: Sequence[_Chain]) -> list[int] | None:
    """The operations of a program, and chains (~k: the k-th), each after those that it reads, as
    early as they stand in the program; None where chains wait for each other."""
    node = {k: ~n for n, chain in enumerate(chains) for k in chain.every}
    makers, waiting = graph.producers(), defaultdict[int, int](int)
    behind = defaultdict[int, set[int]](set)
    last: dict[int, int] = {}  # where a node stands: behind all of it
    for k, op in enumerate(graph.operations):
        own = node.get(k, k)
        last[own] = k
        for v in op.inputs:
            if (maker := makers.get(v)) is not None:
                of = node.get(maker, maker)
                if of != own and own not in behind[of]:
                    behind[of].add(own)
                    waiting[own] += 1
    ready = [(last[n], n) for n in last if not waiting[n]]
    heapify(ready)
    found: list[int] = []
    while ready:
        _, n = heappop(ready)
        found.append(n)
        for other in behind[n]:
            waiting[other] -= 1
            if not waiting[other]:
                heappush(ready, (last[other], other))
    return found if len(found) == len(last) else None
