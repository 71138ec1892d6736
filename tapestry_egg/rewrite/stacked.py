"""Stacked copies: products that a program makes of one array after another, made of all at once.

An optimiser that turns every weight by a chain of products (Newton and Schulz's iteration in Muon,
the roots of Shampoo) makes the same small products of each. Devices that share one of them send
parts of it in every product of the chain. Of a stack of all weights each device has some whole ones
instead, and sends nothing but these, before the chain and after it.

Copies grow around products that are alike and of which none is made of another
(`folded_program.py`). Taken are the chains of products among what they have in common, and what
stands around them, as far as their work is much for the bytes of which there are stacks then. All
that the program has of such a chain is a copy, wherever it stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.rewrite.streams.written import Read, Written

from .folded_program import Flags, Ints, Net, Stretch, grown
from .slices import Slices, Values, is_light, with_slices_at_once

#: The name of this change in the rules and steps of plans.
RULE = "stacked-copies"

#: Copies that a chain has at least. On h100:8 two experts that read slices take 77 us in place of
#: 125, two heads 24 in place of 29, two towers with their gradients 131 in place of 148; Muon's
#: products of two weights take as long as before.
LEAST_COPIES = 2
#: Operations that one copy of a chain has at most: all are traced anew, and take milliseconds.
_MOST = 200
# Flops for each byte that stacks copy, at least: a product of a matrix and a vector has half of
# one. This spares comparisons on one device, which refuse more: two products of 2 to 1024 rows with
# eight weights of 2048 x 2048 each never gain.
_LEAST_WORK = 4.0


def with_stacked_copies(graph: BlockGraph) -> BlockGraph:
    """The graph with chains of products that it makes of many arrays made of stacks of these; the
    same graph if there are none whose work is much for what is stacked."""
    return stacks_of(graph)[0]


def stacks_of(graph: BlockGraph) -> tuple[BlockGraph, int, int]:
    """`with_stacked_copies`, in bodies of loops and branches too; how many chains are stacked
    there, and how many are left as they are written: because their work is little for what would
    be stacked, they are long, or JAX cannot make a kernel of many arrays at once."""
    counts = [0, 0]

    def change(region: BlockGraph) -> BlockGraph:
        made, stacked, left = _stacked(region.map_regions(change))
        counts[0] += stacked
        counts[1] += left
        return made

    return change(graph), counts[0], counts[1]


def _stacked(graph: BlockGraph) -> tuple[BlockGraph, int, int]:
    """`stacks_of`, without regions."""
    chains, left = _chains(graph)
    order = _order(graph, chains)
    while order is None:  # some are made of what others of them lead to
        chains.pop()
        left += 1
        order = _order(graph, chains)
    if not chains:
        return graph, 0, left
    written = Written(list(graph.values), dict(graph.constants))
    stacks: dict[Values, int] = {}
    count = 0
    for k in order:
        if k < 0:
            known = dict(stacks)
            if written.takes(chains[~k].writer(written, stacks)):
                count += 1
                continue
            stacks = known
            left += 1
        for n in (k,) if k >= 0 else sorted(chains[~k].every):
            op = graph.operations[n]
            written.operations.append(replace(op, inputs=written.read(op.inputs)))
    if not count:
        return graph, 0, left
    return with_slices_at_once(written.program(graph), stacks.values()), count, left


def _chains(graph: BlockGraph) -> tuple[list[_Chain], int]:
    """The chains of a program, those of which most is stacked first; and how many are left."""
    products = [_count_products(graph, op) for op in graph.operations]
    if sum(products) < 2:
        return [], 0
    program = _Program(graph, products)
    found: list[_Chain] = []
    placed: dict[int, Values] = {}
    left = set[frozenset[int]]()
    taken = np.zeros(program.net.count, dtype=np.bool_)
    for members in program.repeated():
        if taken[members].any():
            continue
        positions = _Positions(program, grown(program.net, members, taken))
        for copies in positions.chains():
            every = program.copies(copies, taken)
            while len(every) >= LEAST_COPIES:
                found.append(_Chain(program, every, placed))
                taken[[*found[-1].every]] = True
                every = program.copies(copies, taken)
        left |= positions.left
    stacked = {int(program.net.kind[k]) for chain in found for k in chain.every}
    return sorted(found, key=lambda c: -len(c.every)), sum(stacked.isdisjoint(own) for own in left)


def _count_products(graph: BlockGraph, op: Operation) -> int:
    """How many products an operation makes one after another, its rounds one by one. What devices
    cannot share at all, as the eigenvectors of one matrix, counts as a chain of its own."""
    if op.regions:
        return op.rounds * sum(_count_products(r, o) for r in op.regions for o in r.operations)
    sig = registry.signature_in(graph, op)
    if sig.fusion == "kernel" and sig.whole_flops and all(d.role == "whole" for d in sig.index):
        return 2
    return int(sig.contracts)


def _work(graph: BlockGraph, op: Operation) -> float:
    """Flops of an operation, of all its rounds."""
    if op.regions:
        return op.rounds * sum(_work(r, o) for r in op.regions for o in r.operations)
    return float(registry.signature_in(graph, op).whole_flops)


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
        self.work = [
            _work(graph, op) if n else 0.0 for op, n in zip(graph.operations, products, strict=True)
        ]
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

    @cached_property
    def slices(self) -> Slices:
        return Slices(self.graph, self.net)

    @cached_property
    def read_by(self) -> Mapping[int, Sequence[int]]:
        """Per value the operations that read it."""
        return self.graph.readers()

    def repeated(self) -> list[Ints]:
        """Operations that make products, alike and apart from each other, at least as many as there
        are copies: those that make several products, or one that is made of another of these."""
        kinds: dict[tuple[int, int], list[int]] = {}
        for k, count in enumerate(self.products):
            if count:
                kinds.setdefault((int(self.net.kind[k]), self.step(k)), []).append(k)
        groups = []
        for own in kinds.values():
            some, bits = list[int](), 0
            for k in own:  # none is made of a later one
                if not self.before[k] & bits:
                    some.append(k)
                    bits |= 1 << k
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

    def copies(self, known: Sequence[Sequence[int]], taken: Flags) -> list[list[int]]:
        """Copies of a chain, of those that are `known` and of what else the program has of it, none
        with operations that are `taken`, or made of another: [copies][operations]."""
        found: list[list[int]] = []
        used = {*np.flatnonzero(taken).tolist()}
        # Of each place in the chain the operations that copies have there, and what these are made
        # of: a bit for each.
        there, below = ([0] * len(known[0]) for _ in range(2))

        def add(own: Sequence[int]) -> None:
            free = used.isdisjoint(own) and len({*own}) == len(own)
            if free and not any(
                self.before[k] & there[n] or below[n] >> k & 1 for n, k in enumerate(own)
            ):
                found.append([*own])
                used.update(own)
                for n, k in enumerate(own):
                    there[n] |= 1 << k
                    below[n] |= self.before[k]

        for own in known:
            add(own)
        last = [k for k in found[0] if not self._is_read(k, found[0])] if found else []
        if len(last) == 1:
            step = self.step(last[0])
            # The n-th step of an iteration is a copy of other n-th ones.
            for k in np.flatnonzero(self.net.kind == self.net.kind[last[0]]).tolist():
                if k not in used and self.step(k) == step:
                    image = self._alike(found[0], last[0], k)
                    if image is not None:
                        add(image)
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
    all copies. Chains that are `left` are told apart by the kinds of their products."""

    def __init__(self, program: _Program, stretch: Stretch) -> None:
        self.program, self.left = program, set[frozenset[int]]()
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
        # What chains before make and read, of which there are stacks.
        self._stacked = set[int]()
        # What need not be copied either, as the model copy has it: what all copies read, or of
        # which they read a slice each.
        self._free = set[int]()
        shared = {
            values[model]
            for own in images.values()
            for values in zip(*[graph.operations[n].inputs for n in own], strict=True)
            if program.slices.is_shared(values) or program.slices.order(values) is not None
        }
        self._add_free(shared)
        self._read_by, self._ends = program.read_by, {*graph.outputs}

    def chains(self) -> Iterator[list[list[int]]]:
        """Products that read each other's results, and what is best stacked with them: the
        operations of each copy, those of the model first."""
        products = {k for k in self.reads if self.program.products[k]}
        for part in self._waves(self._between(products)):
            if not self._is_chain(part):
                continue
            taken = self._fitted(part) if len(part) <= _MOST else part
            if len(taken) > _MOST or self._worth(taken)[0] < _LEAST_WORK:
                kinds = self.program.net.kind
                self.left.add(frozenset([int(kinds[k]) for k in part & products]))
            else:
                for k in taken:
                    op = self.program.graph.operations[k]
                    self._stacked |= {*op.inputs, *op.outputs}
                self._add_free(self._stacked)
                every = [self.images[k] for k in sorted(taken)]
                yield [sorted(taken), *[list(own) for own in zip(*every, strict=True)]]

    def _is_chain(self, some: set[int]) -> bool:
        """Whether a few operations make more than one product, or one of what is stacked."""
        count = sum(self.program.products[k] for k in some)
        reads = (v for k in some for v in self.program.graph.operations[k].inputs)
        return count > 1 or (count > 0 and not self._stacked.isdisjoint(reads))

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

    def _waves(self, some: set[int]) -> Iterator[set[int]]:
        """The connected parts of some positions, those first that read nothing that is made of
        others of them elsewhere, as the backward pass does what is made of the forward one."""
        while some:
            later = self._closed(self._returned(some), self.readers) & some
            if later == some:
                return
            yield from self._connected(some - later)
            some = later

    def _returned(self, some: set[int]) -> set[int]:
        """Those of some positions that read what is made of others of them elsewhere."""
        program, bits = self.program, 0
        for k in some:
            for n in self.images[k]:
                bits |= 1 << n
        found = set[int]()
        for k in some:
            makers = {program.makers.get(v) for v in program.graph.operations[k].inputs}
            makers -= self.reads[k] & some
            if any(m is not None and program.before[m] & bits for m in makers):
                found.add(k)
        return found

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
        """The part with more positions at its edges, then with fewer, as long as that is worth
        more."""
        for step in (self._grown, self._shrunk):
            while True:
                best = max(step(part), key=self._worth, default=part)
                if self._worth(best) <= self._worth(part):
                    break
                part = best
        return part

    def _grown(self, part: set[int]) -> Iterator[set[int]]:
        """The part with one more position, and what lies between."""
        beside = {n for k in part for n in self.reads[k] | self.readers[k]} - part
        for k in sorted(beside):
            if not self._returned(more := self._between(part | {k})):
                yield more

    def _shrunk(self, part: set[int]) -> Iterator[set[int]]:
        """The part without one of its positions, and all before or behind it."""
        for of in (self.reads, self.readers):
            for k in sorted(part):
                if self._is_chain(less := part - self._closed((k,), of)):
                    yield less

    def _add_free(self, values: Collection[int]) -> None:
        """Add what chains have stacks of, and what light operations make of that."""
        self._free |= {*values}
        graph = self.program.graph
        for k in sorted(self.images):
            op = graph.operations[k]
            if self._free.issuperset(op.inputs) and is_light(graph, op):
                self._free |= {*op.outputs}

    def _worth(self, some: set[int]) -> tuple[float, int, int]:
        """Work of products for each byte of which there are stacks; where it is equal, what leaves
        fewer bytes is worth more, and then fewer operations are."""
        graph = self.program.graph
        inside = {v for k in some for v in graph.operations[k].outputs}
        read = {v for k in some for v in graph.operations[k].inputs}
        read -= inside | self._free
        work = sum(self.program.work[k] for k in some)
        left = (v for v in inside if v in self._ends or not some.issuperset(self._read_by[v]))
        stacks, leaving = (sum(graph.values[v].nbytes for v in of) for of in (read, left))
        return work / (1.0 + stacks), -leaving, -len(some)


class _Chain:
    """Operations that are stacked, [operations][copies], and `every` one of them; the values that
    leave, [values][copies]. Of values that chains make, those of all copies are `placed`."""

    def __init__(
        self,
        program: _Program,
        copies: Sequence[Sequence[int]],
        placed: dict[int, Values],
    ) -> None:
        self.program, graph = program, program.graph
        copies = _in_order(program, copies, placed)
        self.every = frozenset(k for own in copies for k in own)
        self.operations = [[graph.operations[k] for k in own] for own in zip(*copies, strict=True)]
        inside = {v: {*own} for own in copies for k in own for v in graph.operations[k].outputs}
        read_by, ends = graph.readers(), {*graph.outputs}
        for own in self.operations:
            for values in _of_copies([op.outputs for op in own]):
                placed.update(dict.fromkeys(values, values))
        self.leaving = {
            values
            for own in self.operations
            for values in _of_copies([op.outputs for op in own])
            if any(v in ends or not inside[v].issuperset(read_by[v]) for v in values)
        }

    def writer(self, made: Written, stacks: dict[Values, int]) -> Callable[[], None]:
        """What writes the chain into a program that has some `stacks` already, which it adds to."""

        def write() -> None:
            for own in self.operations:
                reads = [
                    self._read(values, own[0], made, stacks)
                    for values in _of_copies([op.inputs for op in own])
                ]
                results, each = made.at_once(self.program.graph, own[0], reads)
                outputs = _of_copies([op.outputs for op in own])
                for values, result in zip(outputs, results, strict=True):
                    if each:
                        stacks[values] = result
                    else:  # all copies make the same
                        made.stands.update(dict.fromkeys(values, result))
            for own in self.operations:
                for values in _of_copies([op.outputs for op in own]):
                    if values in self.leaving and values in stacks:
                        parts = made.apply(_apart, (stacks[values],), own[0])
                        made.stands.update(zip(values, parts, strict=True))

        return write

    def _read(
        self, values: Values, reader: Operation, made: Written, stacks: dict[Values, int]
    ) -> Read:
        """What all copies read in one place."""
        if values not in stacks:
            if self.program.slices.is_shared(values):
                constant = self.program.graph.constants.get(values[0])
                return (made.read(values[:1])[0], False) if constant is None else constant
            (stacks[values],) = made.apply(_stack, made.read(values), reader)
        return stacks[values], True


def _in_order(
    program: _Program, copies: Sequence[Sequence[int]], placed: Mapping[int, Values]
) -> list[Sequence[int]]:
    """Copies in the order of the stacks that they read, of what chains make or of slices; of the
    program where they read none."""
    graph, slices = program.graph, program.slices
    sizes: dict[tuple[int, ...], int] = defaultdict(int)
    for own in zip(*copies, strict=True):
        for values in _of_copies([graph.operations[k].inputs for k in own]):
            stack = placed.get(values[0], ())
            if len(stack) > 1 and {*stack} == {*values}:
                return [copies[values.index(v)] for v in stack]
            order = slices.order(values)
            if order is not None:
                sizes[tuple(order)] += sum(graph.values[v].nbytes for v in values)
    if sizes:
        return [copies[k] for k in max(sizes, key=sizes.__getitem__)]
    return sorted(copies, key=min)


def _stack(*arrays: Any) -> Any:
    """One array of many."""
    import jax.numpy as jnp

    return jnp.stack(arrays)


def _apart(stack: Any) -> list[Any]:
    """The arrays of a stack."""
    from jax import lax

    return [lax.index_in_dim(stack, k, 0, False) for k in range(stack.shape[0])]


def _of_copies(values: Sequence[Sequence[int]]) -> list[Values]:
    """What each copy has of some values, value by value."""
    return list(zip(*values, strict=True))


def _order(graph: BlockGraph, chains: Sequence[_Chain]) -> list[int] | None:
    """The operations of a program, and chains (~k: the k-th), each after those that it reads, as
    early as they stand in the program, effects one after another; None where chains wait for each
    other."""
    node = {k: ~n for n, chain in enumerate(chains) for k in chain.every}
    makers, waiting = graph.producers(), defaultdict[int, int](int)
    behind = defaultdict[int, set[int]](set)
    last: dict[int, int] = {}  # where a node stands: behind all of it
    effect: int | None = None
    for k, op in enumerate(graph.operations):
        own = node.get(k, k)
        last[own] = k
        before = [node.get(m, m) for v in op.inputs if (m := makers.get(v)) is not None]
        if op.effectful:
            before += [] if effect is None else [effect]
            effect = own
        for of in before:
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
