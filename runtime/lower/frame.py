"""The local arrays of one body of a plan while it is emitted, and what waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from tapestry_egg.graph.layout import Layout
from tapestry_egg.plans.collectives import apply, turns
from tapestry_egg.plans.compiler_options import GPUS
from tapestry_egg.plans.fetch import Fetch, group_of
from tapestry_egg.plans.lying import laid_in_order
from tapestry_egg.runtime.lower.kernels.kernels import signed

from .laid import barrier, in_order
from .order import BESIDE, SMALL
from .regions import NOT_FAILED, Stacks, Turned

if TYPE_CHECKING:
    import jax

    from tapestry_egg.runtime.lower.kernels.margins import Came

    from .lower import LocalBody

    Arrays = Sequence[jax.Array]

#: What tells a copy from all others of a body (`Fetch.key`).
Key = tuple[int, Layout, int]


@dataclass
class Frame:
    """The local arrays that exist while one body is being emitted."""

    local: LocalBody
    produced: dict[int, jax.Array]
    kept: dict[int, jax.Array] = field(default_factory=dict)
    region: int | None = None  # the checkpoint region of the operation at hand
    #: per checkpoint region, what it reads from outside, behind a barrier
    barred: dict[int, tuple[dict[int, jax.Array], dict[int, jax.Array]]] = field(
        default_factory=dict
    )
    made_by: dict[int, int] = field(default_factory=dict)  # value -> operation
    #: copies that leave, or were made with others, before their readers' turn
    left: dict[Key, jax.Array] = field(default_factory=dict)
    #: copies that were made before the turn of who makes them; operations before which all are made
    #: that one collective makes
    ready: set[Key] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    #: by operation and operand, rows of neighbours that came for blocks
    came: dict[tuple[int, int], Came] = field(default_factory=dict)
    #: those of them that kernels run beside, by the tie before which they were made
    on_their_way: list[tuple[Key, ...]] = field(default_factory=list)
    #: what waited for a large kernel's operands, since the next one collects it while that one runs
    ahead: set[int] = field(default_factory=set)
    stacks: Stacks | None = None  # that this round of a loop writes
    written: dict[int, bool] = field(default_factory=dict)  # stack -> whether a kernel waits for it
    #: per kernel, the copies that its operations made
    shared: dict[int, dict[tuple[int, Layout], jax.Array]] = field(default_factory=dict)
    #: by identity, arrays that are kept here, and each behind the last barrier of its own
    behind: dict[int, tuple[jax.Array, jax.Array]] = field(default_factory=dict)
    #: per update that a product's kernel makes, the states that it reads
    old: dict[int, dict[int, jax.Array]] = field(default_factory=dict)

    def enter(self, region: int | None, k: int) -> None:
        """Begin operation k, of a checkpoint region (or of none).

        The region's inputs pass through one barrier, so that XLA neither merges the recomputation
        with the first computation nor begins it before its cotangents are there. Where all inputs
        were there long before, the result before operation k passes through it too. On GPUs what
        others read later of the inputs is read behind it: what is computed of them on the fly is
        then apart from what was before. XLA may have that in memory, and would hold it until then.
        """
        self.region = region
        if region is None or region in self.barred:
            return
        inputs = self.local.remat_inputs[region]
        produced = {v: self.produced[v] for v in inputs if v in self.produced}
        kept = {v: self.kept[v] for v in inputs if v in self.kept}
        newest = max((self.made_by.get(v, -1) for v in inputs), default=-1)
        late = {u: self.produced[u] for u in self._alive(k) if self.made_by[u] > newest}
        produced, kept, late = barrier((produced, kept, late))
        self.barred[region] = produced, kept
        later, derived = self._read_outside(region, k), self.local.derived
        renewed = {
            v: x
            for v, x in produced.items()
            if v in self.made_by and not later.isdisjoint((v, *derived.get(v, ())))
        }
        self._renew({**renewed, **late}, k)

    def _read_outside(self, region: int, k: int) -> set[int]:
        """What operations from k on read, for GPUs, that are not of the region."""
        operations, reads = self.local.body.graph.operations, self.local.reads
        if self.local.platform not in GPUS:
            return set()
        own = {j for j, op in enumerate(operations) if op.remat == region}
        return {f.value for j in range(k, len(reads)) if j not in own for f in reads[j]}

    def again(self, v: int, region: int) -> None:
        """Compute a value that is not stored from what a region has of its sources: behind a
        barrier of its own it would be stored from its first computation to here."""
        produced = self.barred[region][0]
        stack = [v]
        while stack:
            below = self.local.body.graph.operations[self.local.on_the_fly[stack[-1]]].inputs
            missing = [w for w in below if self._outside(w, region) and w not in produced]
            if not missing:
                v = stack.pop()
                produced[v] = self._compute(v, produced)
            stack += missing

    def _outside(self, v: int, region: int) -> bool:
        """Whether a value is computed on the fly, by operations that are not the region's own."""
        k = self.local.on_the_fly.get(v)
        return k is not None and self.local.body.graph.operations[k].remat != region

    def _renew(self, barred: dict[int, jax.Array], k: int) -> None:
        """Put values behind a barrier for operation k and later ones, and what these read that is
        computed on the fly from them."""
        self.produced.update(barred)
        made = self.local.on_the_fly
        stale = {w for v in barred for w in self.local.derived.get(v, ()) if w in self.made_by}
        order = sorted(stale, key=made.__getitem__)
        wanted: set[int] = set()
        for w in reversed(order):
            if w in wanted or self.local.last_read.get(w, -1) >= k:
                wanted |= {w, *self.local.body.graph.operations[made[w]].inputs}
        for w in order:
            if w in wanted:
                self.produced[w] = self._compute(w, {})

    def _compute(self, v: int, known: dict[int, jax.Array]) -> jax.Array:
        """A value that is computed on the fly, from arrays in `known` where they are there."""
        k = self.local.on_the_fly[v]
        op = self.local.body.graph.operations[k]
        own = {} if op.remat is None else self.barred[op.remat][0]
        operands = []
        for p, f in enumerate(self.local.reads[k]):
            x = next((s for s in (known, own) if f.value in s), self.produced)[f.value]
            x = self._anew(x) if (k, p) in self.local.anew else x
            steps = self.local.body.copies[f.value, f.have, f.need] if f.have != f.need else ()
            for step in steps:
                x = apply(x, step, self.local.mesh, self.local.platform)
            operands.append(x)
        outputs, _ = self.local.run_operation(k, operands, NOT_FAILED)
        return outputs[0]

    def _alive(self, k: int) -> tuple[int, ...]:
        """The value computed last that is in memory and that operation k or a later one reads."""
        for u in reversed(self.made_by):
            if u in self.local.left_in_memory and self.local.last_read.get(u, -1) >= k:
                return (u,)
        return ()

    def wait(self, k: int) -> None:
        """Keep the plan's order: what operation k reads waits for the results before it."""
        tie = self.local.ties.get(k)
        if tie is None:
            return
        asked = (*tie.held, *tie.ahead)
        # Copies that were made with others are what is read, not what they were made of.
        there = {f.key: self.left[f.key] for f in asked if f.merged and f.key in self.left}
        held = {
            f.value: self._of_region(f.origin, f.value, tie.region)
            for f in asked
            if f.key not in there
        }
        now = {v: store[v] for v, store in held.items() if v in store}
        known = [v for v in tie.done if v in self.produced]
        left = {key: x for key, x in self.left.items() if key[0] in known}
        beside = self.local.beside
        # What only copies are read of that are there already waits no more.
        done = {v: self.produced[v] for v in known if beside or self._is_read(v, k)}
        if beside:  # they are on their way while the next kernels run
            self.on_their_way.append(tuple(left))
            left = {}
            if len(self.on_their_way) > BESIDE:
                left = {key: self.left[key] for key in self.on_their_way.pop(0)}
        late = (
            {q: self.stacks.arrays[q] for q, waits in self.written.items() if not waits}
            if self.stacks
            else {}
        )
        if not (now or there) or not (done or left or late):
            return
        keys, read_at_once = tuple(left), tuple(there)  # of a value in two layouts: no order
        now, here, done, gone, late = barrier(
            (now, tuple(there.values()), done, tuple(left.values()), late)
        )
        self.left.update(zip(read_at_once, here, strict=True))
        if self.stacks is not None:
            self.stacks.arrays.update(late)
            self.written.update(dict.fromkeys(late, True))
        self._renew(done, k)
        self.left.update(zip(keys, gone, strict=True))
        self.ahead |= {f.value for f in tie.ahead}
        read = {f.value for f in self.local.reads[k]}
        for v, x in now.items():
            if v in read or held[v] is not self.produced:
                held[v][v] = x
            else:  # an operand is computed from it
                self._renew({v: x}, k)

    def _is_read(self, v: int, k: int) -> bool:
        """Whether a value is read as it was made by operation k or a later one."""
        missing = any(key not in self.left for key in self.local.made_early.get(v, ()))
        return missing or self.local.read_as_made.get(v, -1) >= k

    def leave(self, k: int, outputs: Arrays) -> None:
        op = self.local.body.graph.operations[k]
        if k in self.local.made_whole:
            outputs = barrier(outputs)
        for v, x in zip(op.outputs, outputs, strict=True):
            self.produced[v] = x
            self.made_by[v] = k
            for f in self.local.leaving.get(v, ()):
                if not f.merged:
                    self.left[f.key] = self._copy(f, self._apart(v, x) if f.again else x)
        self.stack(op.outputs)
        self._join(self.local.joint[0].get(k, ()), k + 1)

    def _apart(self, v: int, x: jax.Array) -> jax.Array:
        """Value v, of which a compiler is to make another copy that leaves, not before the last."""
        before = [key for key in self.left if key[0] == v]
        if not before:
            apart: jax.Array = barrier(x)
        else:
            apart, self.left[before[-1]] = barrier((x, self.left[before[-1]]))
        return apart

    def stack(self, made: Sequence[int]) -> None:
        """Put what of a loop's stacks is there now into them."""
        for q in self.unwritten():
            f = self.local.reads[-1][q]
            if f.value in made and (f.origin == "produced" or f.key in self.left):
                self.write(q, self.left.get(f.key, self.produced[f.value]))

    def unwritten(self) -> set[int]:
        """The outputs that are to be put into stacks and are not yet."""
        return set() if self.stacks is None else self.stacks.arrays.keys() - self.written.keys()

    def write(self, q: int, x: jax.Array) -> None:
        """Put output q of this round into its stack."""
        assert self.stacks is not None, "asked before"
        self.stacks.write(q, x)
        self.written[q] = False

    def renews(self, k: int) -> int | None:
        """The output of which operation k writes a part into its stack; None of all others."""
        graph, renewed = self.local.body.graph, self.stacks.renewed if self.stacks else ()
        found = [q for q in renewed if graph.outputs[q] in graph.operations[k].outputs]
        return found[0] if found else None

    def renew(self, k: int, q: int, operands: Arrays) -> Arrays:
        """Write what operation k does into the stack of output q; its result."""
        assert self.stacks is not None, "asked before"
        _, part, *starts = [operands[p] for p in self.local.signatures[k].writes]
        self.written[q] = False
        return (self.stacks.renew(q, part, [signed(x) for x in starts]),)

    def _join(self, members: Sequence[Fetch], k: int) -> None:
        """Make copies that one collective makes, before operation k: one after another, nothing
        between them, as compilers look for what they merge. They are taken out of what the
        collective gives at once, which else stays as long as the last of them is not read."""
        # First, since tying a copy to another member's source replaces that source.
        late = {f.key: self._late(f.value, k) for f in members if f.again}
        sources = [late[f.key] if f.again else self.produced[f.value] for f in members]
        sources = self._in_turn(k, sources)
        made = [self._copy(f, x) for f, x in zip(members, sources, strict=True)]
        made = barrier(made) if self.local.platform in GPUS else made
        self.left.update((f.key, x) for f, x in zip(members, made, strict=True))

    def operands(self, k: int) -> list[jax.Array]:
        """The operands of reader k, in the layouts that it needs."""
        self._join_once(k, k)
        reads = self.local.reads[k]
        group = group_of(self.local.body, k)
        own = {} if group < 0 else self.shared.setdefault(group, {})
        if self.region is not None:
            for f in reads:
                if self._outside(f.value, self.region):
                    self.again(f.value, self.region)
        at_end = k == len(self.local.reads) - 1
        wanted = {f.key for f in reads if f.merged or at_end}
        wanted |= {f.key for f in reads if f.key in self.ready}
        there = wanted & self.left.keys()
        for f in reads:  # first, since tying a copy to another operand replaces that operand
            if f.again and f.key not in there:
                own[f.value, f.need] = self._copy(f, self._late(f.value, k))
        for f in reads:
            if f.key in there:
                own[f.value, f.need] = self.left[f.key]
            elif f.origin == "copy" and not f.again:
                own[f.value, f.need] = self._copy(f, self._made(f))
        found = [
            own[f.value, f.need]
            if f.origin in ("own", "copy")
            else self._store(f.origin, f.value)[f.value]
            for f in reads
        ]
        anew = self.local.anew
        found = [self._anew(x) if (k, p) in anew else x for p, x in enumerate(found)]
        beside = self.local.turned_operands
        found = [laid_in_order(x) if (k, p) in beside else x for p, x in enumerate(found)]
        tie = self.local.ties.get(k)
        if tie is not None and tie.arrived:
            done = {v: self.produced[v] for v in tie.done if v in self.produced}
            found, done = barrier((found, done))
            self._renew(done, k)
        return found

    def early(self, k: int) -> list[jax.Array]:
        """The operands of operation k before its turn; of copies only its own kernel's."""
        reads, anew = enumerate(self.local.reads[k]), self.local.anew
        found = [
            (p, self._early(f.value) if f.have == f.need else self._copied(f, k)) for p, f in reads
        ]
        return [self._anew(x) if (k, p) in anew else x for p, x in found]

    def _copied(self, f: Fetch, k: int) -> jax.Array:
        """A copy that operation k reads, made for it before its turn if it is not there."""
        if f.origin == "kept" and f.value in self._store("kept", f.value):
            return self._store("kept", f.value)[f.value]
        own = self.shared.get(group_of(self.local.body, k), {})
        if f.key not in self.left and (f.value, f.need) in own:
            return own[f.value, f.need]
        if f.key not in self.left:
            for place, members in self.local.joint[1].items():
                if f.key in [one.key for one in members]:
                    self._join_once(place, k)
        if f.key not in self.left:
            maker = self.local.made_copies[f.key]
            x = self._late(f.value, k) if maker.again else self._early(f.value)
            self.left[f.key] = self._copy(maker, x)
            self.ready.add(f.key)
        return self.left[f.key]

    def _join_once(self, place: int, k: int) -> None:
        """Make copies before operation k that one collective makes before operation `place`."""
        if place not in self.joined:
            self.joined.add(place)
            self._join(self.local.joint[1].get(place, ()), k)

    def _early(self, v: int) -> jax.Array:
        """Value v; what is not there yet is computed for this, by operations of its reader's kernel
        that send nothing any more."""
        if self.region is not None and self._outside(v, self.region):
            self.again(v, self.region)
        store = self._store("produced", v)
        if v not in store:
            k = self.local.makers[v]
            operands, q = self.early(k), self.local.body.graph.operations[k].outputs.index(v)
            wider = self.local.wider(k, operands, self.came)
            return self.local.run_operation(k, operands, NOT_FAILED, wider)[0][q]
        return store[v]

    def repeat(self, k: int) -> None:
        """Keep a kernel that begins with operation k apart from one that stores the same."""
        read = {
            u: self.produced[u]
            for v in self.local.repeats.get(k, ())
            for u in self.local.sources.get(v, (v,))
            if u in self.produced and u not in self.local.body.graph.constants
        }
        read = {u: x for u, x in read.items() if u in self.made_by} or read
        late = {u: self.produced[u] for u in self._alive(k)} if read else {}
        self._renew(barrier({**read, **late}), k)

    def turned(self, k: int, operands: list[Any]) -> list[Any]:
        """Operands of a loop; in the place of stacks that are transposed, what those are of."""
        graph = self.local.body.graph
        for p, by in self.local.turned[k].items():
            order = self.local.signatures[by].permutation
            assert order is not None, "asked before"
            operands[p] = Turned(self.produced[graph.operations[by].inputs[0]], order)
        return operands

    def not_before(
        self, k: int, operands: list[jax.Array], which: Sequence[int]
    ) -> list[jax.Array]:
        """Operands of operation k, `which` of them not available before what was computed last
        before it.

        XLA fills arrays that need nothing at once, several in one kernel at the program's start,
        and then holds all of them until the last is read.
        """
        alive = self._alive(k)
        if not alive or not which:
            return operands
        kept = {u: self.produced[u] for u in alive}
        late, waited = barrier(([operands[p] for p in which], kept))
        self._renew(waited, k)
        found = list(operands)
        for p, x in zip(which, late, strict=True):
            found[p] = x
        return found

    def hold_back(self, k: int) -> None:
        """Put states that the kernel of product k renews behind what is in memory before it."""
        for update in self.local.within_products.get(k, ()):
            inputs = self.local.body.graph.operations[update].inputs
            alive = {u: self.produced[u] for u in self._alive(k)}
            old = {v: self.produced[v] for v in {inputs[p] for p in self.local.updates[update]}}
            if alive:
                old, alive = barrier((old, alive))
                self._renew(alive, k)
            self.old[update] = old

    def update(self, k: int, operands: list[jax.Array]) -> list[jax.Array]:
        """Operands of operation k, the state that it renews not available before what was computed
        last before it, or before the kernel that it is in."""
        which = self.local.updates[k]
        if k not in self.old:
            return self.not_before(k, operands, which)
        inputs, old = self.local.body.graph.operations[k].inputs, self.old.pop(k)
        return [old[inputs[p]] if p in which else x for p, x in enumerate(operands)]

    def _in_turn(self, k: int, sources: list[jax.Array]) -> list[jax.Array]:
        """What is sent together before operation k, not before what was computed last, and what the
        large kernel before it made: XLA for GPUs would send what is there at once, and hold what
        arrives while that kernel runs."""
        if not sources or self.local.platform not in GPUS or self.local.beside:
            return sources
        large = (u for u in reversed(self.made_by) if u in self.local.waited_for)
        alive = [*self._alive(k), *(u for u in islice(large, 1) if self._is_read(u, k))]
        if not alive:
            return sources
        late, waited = barrier((sources, {u: self.produced[u] for u in alive}))
        self._renew(waited, k)
        return list(late)

    def _made(self, f: Fetch) -> jax.Array:
        return self._store("produced", f.value)[f.value]

    def _copy(self, f: Fetch, x: jax.Array) -> jax.Array:
        for step in f.steps:
            x = apply(x, step, self.local.mesh, self.local.platform)
            if f.value in self.local.images and turns(step, x.shape):
                x = in_order(x)
        local = f.steps and f.steps[-1].kind in ("slice", "to_partial")
        if local and x.size * x.dtype.itemsize >= SMALL:
            x = barrier(x)  # a block of its own: cut out inside a reader, it would keep the whole
        if f.keep:
            self.kept[f.value] = x
        return x

    def _store(self, origin: str, v: int) -> dict[int, jax.Array]:
        """The table that holds value v, as produced or as kept, for the operation at hand."""
        return self._of_region("kept" if origin != "produced" else origin, v, self.region)

    def _of_region(self, origin: str, v: int, region: int | None) -> dict[int, jax.Array]:
        """The same for operations of a checkpoint region, or of none."""
        which = 1 if origin == "kept" else 0
        if region in self.barred and v in self.barred[region][which]:
            return self.barred[region][which]
        return self.produced if which == 0 else self.kept

    def _late(self, v: int, k: int) -> jax.Array:
        """Value v, not available before reader k's other operands are.

        A copy that moves the same bytes a second time is in the plan to save memory in between. XLA
        would merge it with the first one; a barrier together with an operand that the reader waits
        for anyway keeps the two apart and the second one late. Each begins behind the one before:
        operands may be alike, such as zeros, and so would be the barriers.
        """
        x = self._store("produced", v)[v]
        if v in self.ahead:  # late enough, and apart from the first one
            self.ahead.remove(v)
            return x
        tie = self._tie(v, k)
        late: jax.Array
        if tie is None:
            late = self._anew(x)
        else:
            store, other = tie
            _, last = self.behind.get(id(x), (x, x))
            late, store[other] = barrier((last, store[other]))
            self.behind[id(x)] = x, late
            if store is self.produced:
                self._renew({other: store[other]}, k)
        return late

    def _anew(self, x: jax.Array) -> jax.Array:
        """An array behind barriers of its own: where it is read so several times, a compiler would
        make one of barriers that are alike, and one of what is made of them."""
        _, last = self.behind.get(id(x), (x, x))
        late: jax.Array = barrier(last)
        self.behind[id(x)] = x, late
        return late

    def _tie(self, v: int, k: int) -> tuple[dict[int, jax.Array], int] | None:
        """The array to tie a late copy of v to: of what the reader's operands are, or are computed
        of on the fly, that computed last, if there is one; else whatever was computed last and is
        read again. A barrier on what is computed on the fly would store it; what is kept is stored,
        and nothing that it was computed of is read."""
        sources = self.local.sources
        # What the reader itself is to keep, and reads twice, is not there yet.
        there = {
            f.value
            for f in self.local.reads[k]
            if f.origin == "kept" and f.value in self._store("kept", f.value)
        }
        others = {
            u: "kept" if u in there else "produced"
            for f in self.local.reads[k]
            # Of what was made with others the copy is read, and a barrier on what nothing reads is
            # none: two such copies would be one.
            if not (f.merged and f.key in self.left)
            for u in ((f.value,) if f.value in there else sources.get(f.value, (f.value,)))
            if u != v and u in self.made_by
        }
        if others:
            u = max(others, key=self.made_by.__getitem__)
            return self._store(others[u], u), u
        alive = [u for u in self.made_by if u != v and self._is_read(u, k)]
        if alive:
            u = max(alive, key=self.made_by.__getitem__)
            return self._store("produced", u), u
        return None
