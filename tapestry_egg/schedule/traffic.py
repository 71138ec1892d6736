"""Memory traffic: what kernels read and write there once a compiler has fused them.

Units are what may lie differently from what surrounds it; kernels are fewer. A unit that all of its
readers compute for themselves (`inlining.py`) is no kernel, and they read what it reads. Nor is a
sum of rows whose readers read the same rows anyway: a program of XLA's for GPUs has a row at hand
from its first pass to its last, whether it writes rows then (softmax, layernorm;
xla/backends/gpu/transforms, "softmax rewriter", which is tried before all other fusion) or one more
sum of them (a variance), where the target says how long a row may be (`Target.rows`), and the row
lies on one device. And what one unit makes element by element its own kernel adds up, too, once,
beside writing it (a bias and its gradient): XLA's fusion of several outputs. Where a target's file
says `fusing`, kernels that read the same are one (`siblings.py`).

A logarithm of a sum of exponentials that is a kernel of its own reads what it adds up twice: for
the greatest element, which two kernels want then, and for the exponentials. And what writes a part
of an array, or scatters its elements, does so over the array that it starts from, where a kernel
made that for it alone or last: nothing else of it moves
(`HloDataflowAnalysis::GetInPlaceInputOutputPairs`; XLA copies arguments, and what is read later).

A kernel that computes element by element, or adds up, does the arithmetic of all units in it while
it reads and writes memory. What takes longer than that is exposed, and charged to these units
(`exposed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.ids import FlatId, InstanceId
from tapestry_egg.machine.compiler_choices import FusionCosts
from tapestry_egg.machine.costs import like_roofline
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels.signatures.signature import OperationSignature, evaluate

from .flatten import Instance
from .inlining import fusion, is_a_compiler_s_product, moves_last, read_as
from .lifetimes import lives_of
from .lying import renewed, turned_operands, turned_reads
from .schedules import Schedule
from .siblings import Reader, Shared, adds_exponentials, ends_in_sums, may_merge, siblings
from .units import Unit, is_view


@dataclass(frozen=True)
class UnitTraffic:
    """What a unit reads and writes of memory.

    `reads` are the bytes that it reads as shares of those of what it reads, one for every read of
    the unit: 0 where its kernel has read them already, more than 1 where it reads more of what that
    is computed from. `writes` are such shares of what it makes. What is `within` takes no kernel,
    and what is within `rows` none where its result is whole as it is made: no cut goes through a
    row that it adds up. Of a loop's stack, `launches` are as many as there are rounds.
    """

    reads: tuple[float, ...]
    writes: tuple[float, ...]
    within: bool = False
    rows: bool = False
    launches: float = 1.0

    def is_free(self, whole: bool) -> bool:
        """Whether the unit takes no kernel of its own; `whole` says that none of what it makes is
        made in parts."""
        return self.within or (self.rows and whole)


@dataclass(frozen=True)
class _Seen:
    """How a kernel sees what a view shows it: `copied` where its dims are turned, which products
    take, and other kernels have written in their own order before; `passes` where it says itself
    what it moves of its operand."""

    copied: bool
    passes: bool

    def share(self, read: float) -> float:
        """What is read and written of memory beside what the kernel says, as a share of what lies
        there, of which it would read so much."""
        return (0.0 if self.passes else read) + (read + 1.0 if self.copied else 0.0)


def traffic_of(schedule: Schedule, target: Target) -> Traffic:
    """The traffic of a schedule's units on a machine; the schedule remembers it."""
    key = target.epilogues, target.fusing, target.rows, target.fuses, target.slices
    return schedule.once(lambda: Traffic(schedule, target), "traffic", *key)


class Traffic:
    """The traffic of the units of one schedule, as a machine's compiler fuses them."""

    def __init__(self, schedule: Schedule, target: Target) -> None:
        self._schedule, self._program = schedule, schedule.program
        self._fusion = fusion(schedule, target.epilogues, target.fusing)
        self._longest = target.rows
        self._fuses, self._slices = target.fuses, target.slices
        stacks = renewed(schedule, target.epilogues)
        self._renewed = {schedule.units[u].root for u in stacks}
        self._inside = self._computed_inside()
        self._sources_of = self._found_sources()
        self._along_rows: set[int] = set()  # kernels that have sums of rows in them
        self._in_rows = self._sums_of_rows()
        self._sums_in: dict[int, int] = {}  # kernels that make a sum beside what they make
        self._beside = self._sums_beside()
        self._shared = self._merged(target.fusing) if self._fuses and target.fusing else {}
        lives = lives_of(schedule, target.epilogues, target.fusing)
        roots = {v: [self._root_of(u) for u in x.readers] for v, x in lives.turned_copies.items()}
        looped = [v for v, of in roots.items() if any(x.port for x in of)]
        # what loops read is turned once, before them
        self._turned_before = {x.outputs for v in looped for x in roots[v] if x.port}
        once = lives.turned_parts.union(*(lives.turned_copies[v].values for v in looped))
        reads = turned_reads(schedule, self._inside, once)
        self._turned = turned_operands(reads) if self._slices else frozenset()
        self._exposed: tuple[Target, Mapping[tuple[InstanceId, ...], float]] | None = None

    def of(self, unit: Unit) -> UnitTraffic:
        """The traffic of a unit; of a part of one, that of a kernel of its own."""
        return self._of_members.get(unit.members) or UnitTraffic(
            (1.0,) * len(unit.reads), (1.0,) * len(unit.outputs)
        )

    def moved(self, unit: Unit, target: Target) -> float:
        """Bytes that a unit's kernel reads and writes of memory on one device."""
        through = self.of(unit)
        made = zip(through.writes, unit.outputs, strict=True)
        moved = float(sum([share * self._program.sizes[v] for share, v in made]))
        for share, (i, p, _) in zip(through.reads, unit.reads, strict=True):
            signature = self._program.instances[i].signature
            moved += share * signature.read_bytes[p]
            if signature.scattered is not None and signature.scattered.operand == p:
                moved += scattered_bytes(signature, signature.extents, target)
        return moved

    def exposed(self, unit: Unit, target: Target) -> float:
        """The share of the arithmetic of a unit in others' kernels that these do not do while they
        read and write memory, by what they take on one device: more than 1 where several do it.
        Nothing of a sum of rows, which is a kernel of its own in other layouts."""
        if self._exposed is None or self._exposed[0] is not target:
            self._exposed = target, self._found_exposed(target) if self._fuses else {}
        return self._exposed[1].get(unit.members, 0.0)

    def _found_exposed(self, target: Target) -> Mapping[tuple[InstanceId, ...], float]:
        units, instances = self._schedule.units, self._program.instances
        own, most = [0.0] * len(units), [0.0] * len(units)  # most: with all that is in it
        for u, unit in enumerate(units):
            if self._root(unit).port or not self._takes_in(u):
                continue
            members = [instances[i].signature for i in unit.members]
            extents = [m.extents for m in members]
            own[u] = 0.0 if self._is_view(unit) else arithmetic_seconds(members, extents, target)
            most[u] = own[u] + sum([most[k] for k in self._makers_inside(unit)])
        guests = self._guests()
        taken = {u for others in guests.values() for u in others}
        found: dict[int, float] = {}
        for u, unit in enumerate(units):
            if not most[u] or u in taken or self._runs_inside(u):
                continue
            kernel = [u, *guests.get(u, ())]
            memory = self.moved(unit, target) / target.hbm_bytes_per_second
            if sum([most[k] for k in kernel]) <= max(own[u], memory):
                continue
            parts = {k: part for one in kernel for k, part in self._parts_inside(one).items()}
            parts |= dict.fromkeys(kernel[1:], 1.0)
            done = own[u] + sum([part * own[k] for k, part in parts.items() if self._in_rows[k]])
            parts = {k: part for k, part in parts.items() if not self._in_rows[k]}
            total = sum([part * own[k] for k, part in parts.items()])
            exposed = max(0.0, done + total - max(done, memory)) / total if total else 0.0
            for k, part in parts.items():
                found[k] = found.get(k, 0.0) + exposed * part
        return {units[k].members: share for k, share in found.items() if share}

    def _takes_in(self, u: int) -> bool:
        """Whether a unit is, or would be, a kernel that computes what it reads."""
        return self._kind(self._schedule.units[u]) != "kernel"

    def _runs_inside(self, u: int) -> bool:
        """Whether those that read what a unit makes compute it, or see it otherwise."""
        unit = self._schedule.units[u]
        inside = self._inside[u] or self._in_rows[u] or self._is_view(unit)
        return inside and not self._root(unit).port

    def _makers_inside(self, unit: Unit) -> set[int]:
        """The units that make what a unit reads, and run in its kernel."""
        makers = {self._schedule.producer[v] for *_, v in unit.reads}
        return {k for k in makers if k >= 0 and self._runs_inside(k)}

    def _guests(self) -> Mapping[int, Sequence[int]]:
        """By the kernels that also make what others would: sums of what they make, or of what they
        read."""
        hosts = {u: k for k, u in self._sums_in.items()}
        for u, values in self._shared.items():
            if self.of(self._schedule.units[u]).within:
                hosts[u] = next(iter(values.values())).unit
        found: dict[int, list[int]] = {}
        for u, host in hosts.items():
            while host in hosts:
                host = hosts[host]
            found.setdefault(host, []).append(u)
        return found

    def _parts_inside(self, u: int) -> dict[int, float]:
        """The units that the kernel of unit u computes, each with the part that it does of it."""
        parts, stack = dict[int, float](), [(u, 1.0)]
        while stack:
            reader, part = stack.pop()
            beside = self._shared.get(reader, {})  # another kernel has computed that
            for i, p, v in self._schedule.units[reader].reads:
                k = self._schedule.producer[v]
                if k < 0 or not self._runs_inside(k) or v in beside:
                    continue
                whole = self._program.sizes[v]
                read = self._program.instances[i].signature.read_bytes[p]
                share = part * min(1.0, read / whole if whole else 1.0)
                if share > parts.get(k, 0.0):
                    parts[k] = share
                    stack.append((k, share))
        return parts

    def shared(self, u: int) -> tuple[Shared, ...]:
        """What unit u reads in the kernel of another one that reads the same."""
        return self._read_beside.get(u, ())

    @cached_property
    def _read_beside(self) -> Mapping[int, tuple[Shared, ...]]:
        """By the units that other kernels take in; `reads` of these count none of it."""
        found = {}
        for u, values in self._shared.items():
            unit, own = self._schedule.units[u], []
            alone = float(self.of(unit).within)
            shares = self._shares(u)
            for v, by in values.items():
                read = next(k for k, (*_, w) in enumerate(unit.reads) if w == v)
                if shares[read]:
                    own.append(Shared(read, by.unit, by.value, shares[read], alone))
            found[u] = tuple(own)
        return found

    @cached_property
    def _of_members(self) -> Mapping[tuple[InstanceId, ...], UnitTraffic]:
        units = enumerate(self._schedule.units)
        if self._fuses:
            return {unit.members: self._fused(u) for u, unit in units}
        ports = (unit for _, unit in units if self._program.instances[unit.root].port)
        return {unit.members: self._of_port(unit) for unit in ports}

    def _fused(self, u: int) -> UnitTraffic:
        unit = self._schedule.units[u]
        root = self._program.instances[unit.root]
        if root.port:
            return self._of_port(unit)
        product = self._is_in_epilogue(u)
        over = self._written_over(u)
        merged = self._shared.get(u, {})
        shares = zip(self._shares(u), unit.reads, strict=True)
        reads = tuple(0.0 if v in merged else x for x, (*_, v) in shares)
        share = 1.0 if over is None else root.signature.written_share
        writes = (0.0 if product else share,) * len(unit.outputs)
        within = self._inside[u] or self._beside[u]
        within |= bool(merged) and root.signature.fusion == "reduce" and not any(reads)
        return UnitTraffic(reads, writes, within, self._in_rows[u])

    def _shares(self, u: int) -> tuple[float, ...]:
        """What a unit reads, as `UnitTraffic.reads`, if it is a kernel of its own."""
        unit = self._schedule.units[u]
        root = self._program.instances[unit.root]
        kernel = root.signature.fusion == "kernel"
        views = self._seen_through_views(unit) if kernel else {}
        reads = []
        left: dict[FlatId, float] = {}  # bytes of what the kernel reads that it has not read yet
        over = self._written_over(u)
        passes = 2.0 if adds_exponentials(root.signature) else 1.0
        for i, p, v in unit.reads:
            if v == over:
                reads.append(0.0)
                continue
            reader = self._program.instances[i].signature
            part = bool(reader.reads) and reader.reads[p] is not None
            scattered = reader.scattered is not None and reader.scattered.operand == p
            if part and (kernel or scattered):
                reads.append(1.0)
                continue
            own = self._program.types[v]
            if not own.shape:  # a number
                reads.append(0.0)
                continue
            size = reader.read_bytes[p] / own.itemsize if part else own.size
            share = self._share(v, size, {} if kernel else left)
            share = views[i].share(share) if i in views else share
            reads.append(passes * share + 2.0 * ((i, p) in self._turned))
        return tuple(reads)

    def _seen_through_views(self, unit: Unit) -> Mapping[InstanceId, _Seen]:
        """By the views of a kernel's unit that read memory, how the kernel sees what is there."""
        instances = self._program.instances
        makers = {v: i for i in unit.members for v in instances[i].outputs}
        root = instances[unit.root].signature
        found: dict[InstanceId, _Seen] = {}
        for p, v in enumerate(instances[unit.root].inputs):
            turned = False
            while v in makers:
                i = makers[v]
                turned |= read_as(instances[i].signature, 0)[0]
                v = instances[i].inputs[0]
                copied = turned and not root.contracts and not self._is_written_at_once(v)
                found[i] = _Seen(copied, bool(root.reads) and root.reads[p] is not None)
        return found

    def _written_over(self, u: int) -> FlatId | None:
        """The array that a unit writes a part or scattered elements into in place; None where it
        copies that first: an argument that the result does not feed back as, what is read later or
        is not in memory."""
        return self._over.get(u)

    @cached_property
    def _over(self) -> Mapping[int, FlatId]:
        """The same of all units that do. What one writes into, another may write into again."""
        instances, units = self._program.instances, self._schedule.units
        found: dict[int, FlatId] = {}
        left: dict[FlatId, FlatId] = {}  # what is written into -> what is in its place in the end
        for u in reversed(range(len(units))):
            root = instances[units[u].root]
            p = root.signature.written_into
            if p is None or (units[u].root, p, root.inputs[p]) not in units[u].reads:
                continue
            v, producer = root.inputs[p], self._schedule.producer[root.inputs[p]]
            last = max(self._schedule.readers[v]) == u and root.inputs.count(v) == 1
            if not last or self._inside[u] or self._inside[producer]:
                continue
            maker, made = instances[units[producer].root], root.outputs[0]
            made = left.get(made, made)
            renewed = {"carry": maker.inputs[-1:], "state": maker.inputs}.get(maker.port, ())
            computed = not maker.port and maker.signature.fusion != "view"
            if computed or renewed == (made,):
                found[u] = v
                left[v] = made
        return found

    def _of_port(self, unit: Unit) -> UnitTraffic:
        """Where slices of stacks are written and read by kernels of their own: a stack is filled
        with zeros first; then each round's slice is written into it, by what makes it where that
        goes element by element, else from where it was stored. Of one that is renewed a part is
        written, where it is. A library's kernel reads a copy of a slice. What a loop carries is
        copied where its next value cannot be written over it, unless rounds take turns
        (`pipeline/passes.py`). A result that nothing has computed is a copy.
        """
        root = self._program.instances[unit.root]
        reads, writes, launches = [0.0] * len(unit.reads), [0.0] * len(unit.outputs), 0.0
        if unit.root in self._copied_results:
            return UnitTraffic((2.0,) * len(reads), tuple(writes))
        if not self._slices or root.port not in ("stack", "stream", "carry", "invariant"):
            return UnitTraffic(tuple(reads), tuple(writes), launches=0.0)
        before = float(root.outputs in self._turned_before)
        if root.port == "invariant":
            return UnitTraffic((2.0 * before,), tuple(writes), launches=before)
        if root.port == "carry":
            copied = self.is_copied(unit) and not (self._in_pairs(root) and self.takes_turns(unit))
            if root.weight and copied:  # in a loop of no rounds nothing runs
                launches = root.input_weights[1] / root.weight
                reads = [2.0 * launches * (v == root.inputs[1]) for *_, v in unit.reads]
            return UnitTraffic(tuple(reads), tuple(writes), launches=launches)
        length = float(root.signature.index[0].size)
        if root.port == "stream":
            if any(self._is_kernel(r) for v in unit.outputs for r in self._readers(v)):
                reads, launches = [2.0], length
            reads, launches = [reads[0] + 2.0 * before], launches + before
        elif unit.root in self._renewed:
            launches = length
        elif self._is_written_at_once(root.inputs[0]):
            writes, launches = [1.0], 1.0
        else:
            writes, launches = [3.0], length + 1.0
        return UnitTraffic(tuple(reads), tuple(writes), launches=launches)

    @cached_property
    def _copied_results(self) -> frozenset[InstanceId]:
        """The results that are arguments or constants, or views of such, or leave a second time;
        but for a state that stays as it is. A caller gets arrays of its own."""
        instances, found, left = self._program.instances, set[InstanceId](), set[FlatId]()
        for unit in self._schedule.units:
            root = instances[unit.root]
            if root.port not in ("output", "state") or not unit.reads:
                continue
            v, turned = unit.reads[0][-1], False
            maker = self._schedule.units[self._schedule.producer[v]]
            while self._is_view(maker):
                turned |= any(read_as(instances[i].signature, 0)[0] for i in maker.members)
                v = maker.reads[0][-1]
                maker = self._schedule.units[self._schedule.producer[v]]
            is_own = root.port == "state" and v in root.outputs and not turned
            given = instances[maker.root].port in ("input", "constant", "state")
            if (given and not is_own) or v in left:
                found.add(unit.root)
            left.add(v)
        return frozenset(found)

    def is_copied(self, carry: Unit) -> bool:
        """Whether what makes the next value of what a loop carries reads the old one elsewhere than
        it writes; or is a loop that reads it, round by round, while it fills a stack. What enters a
        round and is the next value of another carry, or a turned one of its own, is copied, too.
        """
        root = self._program.instances[carry.root]
        old, following = set(root.outputs[:-1]), root.inputs[1]
        maker = first = self._schedule.producer[following]
        unit = self._schedule.units[maker]
        while self._is_view(unit):  # of what lies in memory, as its maker left it
            following = unit.reads[0][-1]
            maker = self._schedule.producer[following]
            unit = self._schedule.units[maker]
        made_by = self._program.instances[unit.root]
        if not made_by.port:
            return not old & self._read(unit) <= self._written(maker)
        if made_by.port in ("carry", "stream", "invariant") and following in made_by.outputs[:1]:
            return not {following} <= old & self._fusion.aligned[first]
        if made_by.port != "stack" or unit.root in self._renewed:
            return False
        spans = self._program.spans.values()
        begin, end = max(span for span in spans if span[0] <= unit.root < span[1])
        loop = (x for x in self._schedule.units if begin <= x.root < end)
        return any(
            old & self._read(x)
            for x in loop
            if self._program.instances[x.root].port in ("stream", "invariant")
        )

    def takes_turns(self, carry: Unit) -> bool:
        """Whether nothing is copied if a loop runs two rounds at a time, as the second makes the
        next value where the old one was: all that reads the old one has run by then, whatever the
        order. A value that another carry takes on was computed a round before, and is written over
        what that one had."""
        root = self._program.instances[carry.root]
        made_by = self._root_of(maker := self._maker(root.inputs[1]))
        if takes_on := made_by.port == "carry" and made_by is not root:
            made_by = self._root_of(maker := self._maker(made_by.inputs[1]))
            unit = self._schedule.units[maker]
            if made_by.port or not {*root.outputs[:-1]} & self._read(unit) <= self._written(maker):
                return False
        before, stack = set[int](), [maker]
        while stack:
            u = stack.pop()
            before.add(u)
            makers = {self._schedule.producer[v] for *_, v in self._schedule.units[u].reads}
            stack += makers - before
        readers = {u for v in root.outputs[:-1] for u in self._readers(v)}
        ports = [self._schedule.units[u] for u in readers if self._root_of(u).port]
        others = [x for x in ports if x is not carry and self._root(x).port == "carry"]
        if made_by.port or (others and takes_on) or not all(map(self.takes_turns, others)):
            return False
        return all(u in before or self._root_of(u).port for u in readers)

    def _in_pairs(self, carry: Instance) -> bool:
        """Whether a loop runs two rounds, or four and so on, at a time."""
        unroll: int = self._program.loop_of(carry).params.get("unroll", 1)
        return unroll % 2 == 0

    def _written(self, u: int) -> set[FlatId]:
        """The operands over which a unit may write."""
        over = self._written_over(u)
        return {*self._fusion.aligned[u], *(() if over is None else (over,))}

    def _root_of(self, u: int) -> Instance:
        return self._root(self._schedule.units[u])

    def _root(self, unit: Unit) -> Instance:
        return self._program.instances[unit.root]

    def _maker(self, v: FlatId) -> int:
        """The unit that makes a value, or what it is a view of."""
        while self._is_view(self._schedule.units[u := self._schedule.producer[v]]):
            v = self._schedule.units[u].reads[0][-1]
        return u

    def _readers(self, v: FlatId) -> set[int]:
        """The units that read a value, or a view of it."""
        found, stack = set[int](), list(self._schedule.readers[v])
        while stack:
            r = stack.pop()
            if self._is_view(self._schedule.units[r]):
                stack += [
                    x for w in self._schedule.units[r].outputs for x in self._schedule.readers[w]
                ]
            else:
                found.add(r)
        return found

    def _is_kernel(self, u: int) -> bool:
        return self._kind(self._schedule.units[u]) == "kernel"

    def _is_written_at_once(self, v: FlatId) -> bool:
        return self._kind(self._schedule.units[self._schedule.producer[v]]) == "loop"

    def _computed_inside(self) -> list[bool]:
        """The units that their readers compute, but for products; a view that no kernel computes is
        what the kernel before it writes."""
        units, found = self._schedule.units, list(self._fusion.within)
        for u in reversed(range(len(units))):
            readers = {r for v in units[u].outputs for r in self._schedule.readers[v]}
            stored = any(self._is_view(units[r]) and not found[r] for r in readers)
            found[u] = found[u] and not stored and not self._multiplies(units[u])
        return found

    def _found_sources(self) -> list[frozenset[FlatId]]:
        """Per value, what a kernel reads that reads it; nothing where it is a product within."""
        found = [frozenset({FlatId(v)}) for v in range(len(self._program.types))]
        for u, unit in enumerate(self._schedule.units):
            if self._inside[u] or self._is_view(unit):
                every = frozenset(w for *_, x in unit.reads for w in found[x])
            elif self._is_in_epilogue(u):
                every = frozenset()
            else:
                continue
            for v in unit.outputs:
                found[v] = every
        return found

    def _share(self, v: FlatId, size: float, left: dict[FlatId, float]) -> float:
        """Bytes of what a kernel reads for `size` elements of a value over those of these elements:
        of each source no more elements, and none of single numbers. What it reads of a source
        again, shifted by some rows, is in a cache by then: no more than the source has `left` is
        read, and is taken off."""
        total = 0.0
        for w in self._sources_of[v]:
            if (source := self._program.types[w]).shape:
                read = min(left.get(w, float(source.nbytes)), size * source.itemsize)
                left[w] = left.get(w, float(source.nbytes)) - read
                total += read
        whole = size * self._program.types[v].itemsize
        return total / whole if whole else 1.0

    def _is_in_epilogue(self, u: int) -> bool:
        """Whether what is made of a product is computed in its kernel."""
        return self._fusion.within[u] and self._multiplies(self._schedule.units[u])

    def _is_view(self, unit: Unit) -> bool:
        return is_view(self._program, unit)

    def _multiplies(self, unit: Unit) -> bool:
        return self._program.instances[unit.root].signature.multiplies

    def _sums_of_rows(self) -> list[bool]:
        """The units that sum rows which every kernel that reads the sums reads anyway; with them
        those that compute something of such sums, of one number for each row."""
        units, found = self._schedule.units, [False] * len(self._schedule.units)
        if not self._longest:
            return found
        kernels: dict[int, frozenset[int]] = {}  # that compute or read what a unit makes
        between: list[int] = []
        for u in reversed(range(len(units))):
            readers = {r for v in units[u].outputs for r in self._schedule.readers[v]}
            kernels[u] = frozenset(k for r in readers for k in kernels.get(r, {r}))
            found[u] = self._reduces_short_rows(units[u]) and self._at_hand(u, kernels[u])
            if found[u]:
                self._along_rows |= kernels[u]
            elif self._is_between(units[u], kernels[u]):
                between.append(u)
            elif not (self._inside[u] or self._is_view(units[u])):
                kernels[u] = frozenset({u})
        for u in reversed(between):
            makers = (self._schedule.producer[w] for w in self._read(units[u]))
            found[u] = any(k >= 0 and found[k] for k in makers)
        return found

    def _reduces_short_rows(self, unit: Unit) -> bool:
        signature = self._program.instances[unit.root].signature
        if signature.fusion != "reduce" or len(unit.outputs) != 1:
            return False
        (made,), read = signature.output_types, signature.input_types[0]
        return (
            len(signature.input_types) == 1
            and ends_in_sums(signature)
            and kind(made.dtype) == "float"
            and made.itemsize <= 4
            and read.size <= self._longest * made.size
        )

    def _at_hand(self, u: int, kernels: frozenset[int]) -> bool:
        """Whether kernels read all rows that a unit sums, and write rows of that length, or sum
        them."""
        unit = self._schedule.units[u]
        size = max(self._program.types[v].size for *_, v in unit.reads)
        rows = {
            w
            for *_, v in unit.reads
            for w in self._sources_of[v]
            if self._program.types[w].size == size
        }
        return bool(kernels) and all(
            self._of_rows(self._schedule.units[k], unit) == size
            and not (self._breaks_rows(u, size) or self._breaks_rows(k, size))
            and len(self._schedule.units[k].outputs) == 1
            and rows <= self._read(self._schedule.units[k])
            and not any((k, v) in self._fusion.behind for v in unit.outputs)
            for k in kernels
        )

    def _breaks_rows(self, u: int, size: int) -> bool:
        """Whether a unit reads arrays of so many elements with another dim last than lies last in
        memory: in none of its rows do elements lie beside one another there."""
        unit, instances = self._schedule.units[u], self._program.instances
        moved = any(
            moves_last(instances[i].signature, p)
            for i in unit.members
            for p, v in enumerate(instances[i].inputs)
            if self._program.types[v].size == size
        )
        makers = {m for *_, v in unit.reads if (m := self._schedule.producer[v]) >= 0}
        inside = {m for m in makers if self._inside[m] or self._is_view(self._schedule.units[m])}
        return moved or any(self._breaks_rows(m, size) for m in inside)

    def _of_rows(self, kernel: Unit, sums: Unit) -> int:
        """The elements of the rows that a kernel writes, or sums as another unit sums its own."""
        if not self._reduces_short_rows(kernel):
            return self._writes(kernel)
        made, other = (self._program.types[x.outputs[0]].size for x in (kernel, sums))
        (read,) = self._program.instances[kernel.root].signature.input_types
        return read.size if made == other else 0

    def _is_between(self, unit: Unit, kernels: frozenset[int]) -> bool:
        """Whether a unit computes fewer numbers, of fewer, than each of its kernels writes."""
        most = max([self._program.types[v].size for *_, v in unit.reads], default=0)
        return (
            self._kind(unit) in ("loop", "reduce")
            and bool(kernels)
            and all(self._writes(self._schedule.units[k]) > most for k in kernels)
        )

    def _writes(self, kernel: Unit) -> int:
        """The elements that a kernel writes, element by element, as one value; 0 of any other."""
        loop = self._kind(kernel) == "loop"
        return self._program.types[kernel.outputs[0]].size if loop else 0

    def _sums_beside(self) -> list[bool]:
        """The units that add up what the kernel of one other unit makes, and what that reads: one
        of each such kernel."""
        units, found = self._schedule.units, [False] * len(self._schedule.units)
        taken = set(self._along_rows)
        for u, unit in enumerate(units):
            if self._kind(unit) != "reduce" or self._in_rows[u]:
                continue
            sources = self._read(unit)
            makers = sorted({self._schedule.producer[w] for w in sources} - taken - {-1})
            for k in makers:
                beside = {*units[k].outputs, *self._read(units[k])}
                apart = any((u, v) in self._fusion.apart for v in units[k].outputs)
                if self._makes_all_of(units[k], unit) and sources <= beside and not apart:
                    found[u] = True
                    taken.add(k)
                    self._sums_in[k] = u
                    break
        return found

    def _merged(self, costs: FusionCosts) -> dict[int, dict[FlatId, Reader]]:
        """What units read that run in the kernels of others which read the same, each with who has
        read it."""
        units, instances = self._schedule.units, self._program.instances
        kernels, sources, apart = [], {}, {u for u, _ in self._fusion.apart}
        for u, unit in enumerate(units):
            taken = self._inside[u] or self._beside[u] or self._in_rows[u] or u in apart
            taken |= bool(instances[unit.root].port) or u in self._along_rows
            if not taken and not self._is_view(unit) and may_merge(self._program, unit):
                kernels.append(u)
                sources[u] = self._read(unit)
        given = self._program, costs.library_bytes
        own = {u for u, unit in enumerate(units) if is_a_compiler_s_product(unit, *given)}
        alone = self._along_rows | own
        return siblings(self._schedule, kernels, self._inside, self._sums_in, sources, alone)

    def _read(self, unit: Unit) -> set[FlatId]:
        return {w for *_, v in unit.reads for w in self._sources_of[v]}

    def _makes_all_of(self, maker: Unit, reduction: Unit) -> bool:
        """Whether a kernel makes, element by element, values of as many elements as are added."""
        (added, *_) = self._program.instances[reduction.root].signature.input_types
        sizes = {self._program.types[v].size for v in maker.outputs}
        return self._kind(maker) == "loop" and sizes == {added.size}

    def _kind(self, unit: Unit) -> str:
        """What compilers make of a unit's last operation; ports are views."""
        return self._program.instances[unit.root].signature.fusion


def arithmetic_seconds(
    members: Sequence[OperationSignature], extents: Sequence[tuple[int, ...]], target: Target
) -> float:
    """What the arithmetic of a unit that multiplies no matrices takes on a device to which its
    operations leave these extents of their index spaces."""
    root = members[-1]
    flops = float(sum([evaluate(m.flops, own) for m, own in zip(members, extents, strict=True)]))
    dtype = root.output_types[0].dtype if root.output_types else "float32"
    spilled = root.spilled_in(extents[-1])
    work = like_roofline(root.kernel, root.measured, flops, dtype, target, False, spilled)
    return float(work) / target.rate(dtype, False)


def scattered_bytes(
    signature: OperationSignature, extents: tuple[int, ...], target: Target
) -> float:
    """What elements at scattered places take beside the traffic that counts every byte once: bytes
    of memory that take as long, on a device whose part of the index space has these
    extents; they count with those of the operand `signature.scattered.operand`."""
    found, caches = signature.scattered, target.caches
    if found is None or caches is None:
        return 0.0
    return caches.scattered_bytes(
        found.bytes_at(extents),
        found.run,
        found.unit,
        found.within,
        found.times,
        found.counted,
        target.hbm_bytes_per_second,
    )
