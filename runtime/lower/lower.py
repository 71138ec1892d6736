"""From a plan to the function that every device runs inside one `shard_map`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import Operation
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.metakernels import registry
from tapestry_egg.plans.collectives import apply
from tapestry_egg.plans.exchanges import sent_again
from tapestry_egg.plans.fetch import Fetch, fetches, group_of, place
from tapestry_egg.plans.plan import BodyPlan, Plan, Strategy

from .host_calls import Caller, calls, report, run_once
from .kernels import CUT_WHERE_READ, GPUS, TAKEN_INTO_PRODUCTS, run_kernel
from .order import BESIDE, SMALL, Tie, fills, last_reads, stored, ties
from .precision import ROUNDING
from .regions import NOT_FAILED, REGIONS

if TYPE_CHECKING:
    import jax

    Arrays = Sequence[jax.Array]


def lower(
    plan: Plan, caller: Caller | None = None, *, platform: str = ""
) -> Callable[..., tuple[jax.Array, ...]]:
    """The local function of a plan: local blocks of the graph's inputs in, of its outputs out.

    To be called inside `jax.shard_map` over a mesh with the plan's axes, with `check_vma=False`.
    The layouts of inputs and outputs are `plan.in_shardings` and `plan.out_shardings`. What has
    effects is run by the device that `caller` names (the first), and by no other. For the compiler
    of `platform` (JAX's name) collectives are spelled such that it keeps them, and operands are
    rounded where it would do so itself. Raises
    PlanError where the plan does not fit its graph: at once for layouts and copies, when traced for
    kernels.
    """
    machine = plan.origin.machine if plan.origin else None
    beside = machine is not None and machine.slowdown is not None
    return _LocalBody(plan.body, plan.mesh, caller or Caller(), platform, beside)


@dataclass(frozen=True, eq=False)
class _LocalBody:
    """The local function of one graph: the program's, or that of a region."""

    body: BodyPlan
    mesh: MeshShape
    caller: Caller
    platform: str = ""
    beside: bool = False  # whether the plan counts on collectives that run beside kernels

    def __post_init__(self) -> None:
        self.reads, self.regions  # noqa: B018 - a plan that does not fit is refused early

    @cached_property
    def reads(self) -> tuple[tuple[Fetch, ...], ...]:
        return fetches(self.body)

    @cached_property
    def ties(self) -> dict[int, Tie]:
        return ties(self.body, self.reads, self.mesh, self.sources, self.beside)

    @cached_property
    def calls(self) -> bool:
        """Whether some call in it may fail, and all devices must know."""
        return self.mesh.devices > 1 and calls(self.body.graph)

    @cached_property
    def leaving(self) -> dict[int, tuple[Fetch, ...]]:
        """Value -> the copies of it that leave the body and move bytes."""
        found: dict[int, tuple[Fetch, ...]] = {}
        for f in self.reads[-1]:
            if f.origin == "copy" and f.moves:
                found[f.value] = (*found.get(f.value, ()), f)
        return found

    @cached_property
    def joint(self) -> tuple[dict[int, list[Fetch]], dict[int, list[Fetch]]]:
        """The copies that are made by one collective: by the operation after which they are, where
        they combine partial values or leave the body, and by that before which they are."""
        members: dict[int, list[tuple[int, Fetch]]] = {}
        for k, f in ((k, f) for k, reads in enumerate(self.reads) for f in reads if f.merged):
            members.setdefault(f.merged, []).append((k, f))
        made = {v: k for k, op in enumerate(self.body.graph.operations) for v in op.outputs}
        after: dict[int, list[Fetch]] = {}
        before: dict[int, list[Fetch]] = {}
        end = len(self.body.graph.operations)
        for found in members.values():
            last = max(made.get(f.value, -1) for _, f in found)
            soon = any(k == end or f.have.partial for k, f in found) and last >= 0
            place = last if soon else min(k for k, _ in found)
            (after if soon else before).setdefault(place, []).extend(f for _, f in found)
        return after, before

    @cached_property
    def regions(self) -> tuple[tuple[_LocalBody, ...], ...]:
        """Per operation, the local functions of its regions."""
        found = []
        for k, (op, strategy) in enumerate(
            zip(self.body.graph.operations, self.body.strategies, strict=True)
        ):
            if len(op.regions) != len(strategy.bodies):
                raise PlanError(
                    f"{len(strategy.bodies)} body plans for {len(op.regions)} regions",
                    where=place(self.body, k),
                )
            found.append(tuple(replace(self, body=b) for b in strategy.bodies))
        return tuple(found)

    @cached_property
    def remat_inputs(self) -> dict[int, tuple[int, ...]]:
        """Per checkpoint region, the values that it reads from outside, constants excepted; in the
        place of those that it computes on the fly, what they are computed from."""
        graph = self.body.graph
        makes: dict[int, set[int]] = {}
        reads: dict[int, dict[int, None]] = {}
        for op in graph.operations:
            if op.remat is not None:
                makes.setdefault(op.remat, set()).update(op.outputs)
                seen = reads.setdefault(op.remat, {})
                seen.update(dict.fromkeys(u for v in op.inputs for u in self.sources.get(v, (v,))))
        return {
            r: tuple(v for v in values if v not in makes[r] and v not in graph.constants)
            for r, values in reads.items()
        }

    @cached_property
    def on_the_fly(self) -> dict[int, int]:
        """Value that is not stored -> the operation that a later reader can take again for it:
        a plain one that reads its operands as they were produced."""
        return {
            op.outputs[0]: k
            for k, op in enumerate(self.body.graph.operations)
            if len(op.outputs) == 1
            and op.outputs[0] not in self.stored
            and not (op.regions or op.effectful)
            and all(f.origin == "produced" for f in self.reads[k])
        }

    @cached_property
    def sources(self) -> dict[int, tuple[int, ...]]:
        """Value that is computed on the fly -> the values that it is computed from in the end."""
        found: dict[int, tuple[int, ...]] = {}
        for v, k in self.on_the_fly.items():  # in program order
            inputs = self.body.graph.operations[k].inputs
            found[v] = tuple(dict.fromkeys(u for w in inputs for u in found.get(w, (w,))))
        return found

    @cached_property
    def stored(self) -> frozenset[int]:
        """Values that are in memory as they are, not computed where they are read."""
        return stored(self.body.graph)

    @cached_property
    def sent_again(self) -> frozenset[tuple[int, int]]:
        """Operands of operations, of which rows are sent that were sent before."""
        return sent_again(self.body, self.mesh)

    @cached_property
    def fills(self) -> frozenset[int]:
        """Operations that fill an array of some size from constants alone."""
        return fills(self.body, self.stored, self.mesh)

    @cached_property
    def made_whole(self) -> frozenset[int]:
        """Operations with results in memory that the compiler would not make once and together."""
        if self.platform not in GPUS:
            return frozenset()
        readers = Counter(f.value for reads in self.reads for f in reads)
        found = set()
        for k, op in enumerate(self.body.graph.operations):
            again = op.kernel in TAKEN_INTO_PRODUCTS and any(readers[v] > 1 for v in op.outputs)
            apart = op.kernel in CUT_WHERE_READ and len(op.outputs) > 1
            if (again or apart) and self.stored.issuperset(op.outputs):
                found.add(k)
        return frozenset(found)

    @cached_property
    def last_read(self) -> dict[int, int]:
        """Value -> the last reader of it in any layout; the body's outputs read last."""
        return last_reads(self.reads, self.sources)

    @cached_property
    def derived(self) -> dict[int, tuple[int, ...]]:
        """Value -> what is computed from it on the fly, in program order."""
        found: dict[int, list[int]] = {}
        for w, sources in self.sources.items():
            for v in sources:
                found.setdefault(v, []).append(w)
        return {v: tuple(ws) for v, ws in found.items()}

    def __call__(self, *arguments: jax.Array) -> tuple[jax.Array, ...]:
        outputs, failed = self.run(arguments, NOT_FAILED)
        if self.calls:
            report(outputs, failed, self.mesh, self.caller)
        return outputs

    def run(self, arguments: Arrays, failed: Any) -> tuple[tuple[jax.Array, ...], Any]:
        """The outputs, and whether a call has failed by now."""
        import jax

        graph = self.body.graph
        frame = _Frame(self, dict(zip(graph.inputs, arguments, strict=True)))
        for v, constant in graph.constants.items():
            frame.produced[v] = jax.numpy.asarray(constant, constant.dtype)
        for k, op in enumerate(graph.operations):
            with jax.named_scope(op.scope or op.kernel):
                frame.enter(op.remat, k)
                frame.wait(k)
                operands = frame.operands(k)
                if k in self.fills:
                    operands = frame.not_before(k, operands)
                strategy = self.body.strategies[k]
                outputs, failed = self.run_operation(k, op, strategy, operands, failed)
            frame.leave(k, outputs)
        frame.enter(None, len(graph.operations))
        return tuple(frame.operands(len(graph.operations))), failed

    def run_operation(
        self, k: int, op: Operation, strategy: Strategy, operands: Arrays, failed: Any
    ) -> tuple[Arrays, Any]:
        """Its outputs, and whether a call has failed by now."""
        outputs: Arrays
        where = place(self.body, k)
        if op.regions:
            if op.kernel not in REGIONS:
                raise PlanError(f"region operation {op.kernel!r} is not known", where=where)
            outputs, after = REGIONS[op.kernel](op.params, self.regions[k], operands, failed)
            failed = failed if after is None else after
        elif op.kernel == "round_operand" and self.platform not in ROUNDING:
            outputs = operands
        elif registry.runs_once(op):
            types = tuple(self.body.graph.values[v] for v in op.outputs)
            outputs, failed = run_once(op, types, operands, self.mesh, self.caller, failed)
        else:
            values = self.body.graph.values
            outputs = run_kernel(
                op,
                tuple(values[v] for v in op.inputs),
                tuple(values[v] for v in op.outputs),
                strategy,
                operands,
                self.mesh,
                where,
                self.platform,
            )
        for q, (v, layout, x) in enumerate(zip(op.outputs, strategy.gives, outputs, strict=True)):
            wanted = layout.local_shape(self.body.graph.values[v].shape, self.mesh)
            if x.shape != wanted:
                raise PlanError(
                    f"output {q} has local shape {x.shape}, its layout {layout} says {wanted}",
                    where=where,
                )
        return outputs, failed


@dataclass
class _Frame:
    """The local arrays that exist while one body is being emitted."""

    local: _LocalBody
    produced: dict[int, jax.Array]
    kept: dict[int, jax.Array] = field(default_factory=dict)
    region: int | None = None  # the checkpoint region of the operation at hand
    #: per checkpoint region, what it reads from outside, behind a barrier
    barred: dict[int, tuple[dict[int, jax.Array], dict[int, jax.Array]]] = field(
        default_factory=dict
    )
    made_by: dict[int, int] = field(default_factory=dict)  # value -> operation
    #: copies that leave, or were made with others, before their readers' turn
    left: dict[tuple[int, Layout], jax.Array] = field(default_factory=dict)
    #: those of them that kernels run beside, by the tie before which they were made
    on_their_way: list[tuple[tuple[int, Layout], ...]] = field(default_factory=list)
    #: what waited for a large kernel's operands, since the next one collects it while that one runs
    ahead: set[int] = field(default_factory=set)
    #: per kernel, the copies that its operations made
    shared: dict[int, dict[tuple[int, Layout], jax.Array]] = field(default_factory=dict)

    def enter(self, region: int | None, k: int) -> None:
        """Begin operation k, of a checkpoint region (or of none).

        The region's inputs pass through one barrier, so that XLA neither merges the recomputation
        with the first computation nor begins it before its cotangents are there. Where all inputs
        were there long before, the result before operation k passes through it too.
        """
        self.region = region
        if region is None or region in self.barred:
            return
        inputs = self.local.remat_inputs[region]
        produced = {v: self.produced[v] for v in inputs if v in self.produced}
        kept = {v: self.kept[v] for v in inputs if v in self.kept}
        newest = max((self.made_by.get(v, -1) for v in inputs), default=-1)
        late = {u: self.produced[u] for u in self._alive(k) if self.made_by[u] > newest}
        produced, kept, late = _barrier((produced, kept, late))
        self.barred[region] = produced, kept
        self._renew(late, k)

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
        op, strategy = self.local.body.graph.operations[k], self.local.body.strategies[k]
        own = {} if op.remat is None else self.barred[op.remat][0]
        operands = []
        for w in op.inputs:
            store = next((s for s in (known, own) if w in s), self.produced)
            operands.append(store[w])
        outputs, _ = self.local.run_operation(k, op, strategy, operands, NOT_FAILED)
        return outputs[0]

    def _alive(self, k: int) -> tuple[int, ...]:
        """The value computed last that is in memory and that operation k or a later one reads."""
        for u in reversed(self.made_by):
            if u in self.local.stored and self.local.last_read.get(u, -1) >= k:
                return (u,)
        return ()

    def wait(self, k: int) -> None:
        """Keep the plan's order: what operation k reads waits for the results before it."""
        tie = self.local.ties.get(k)
        if tie is None:
            return
        held = {
            f.value: self._store("kept" if f.origin == "kept" else "produced", f.value)
            for f in (*tie.held, *tie.ahead)
        }
        now = {v: store[v] for v, store in held.items() if v in store}
        done = {v: self.produced[v] for v in tie.done if v in self.produced}
        left = {key: x for key, x in self.left.items() if key[0] in done}
        if self.local.beside:  # they are on their way while the next kernels run
            self.on_their_way.append(tuple(left))
            left = {}
            if len(self.on_their_way) > BESIDE:
                left = {key: self.left[key] for key in self.on_their_way.pop(0)}
        if not now or not done:
            return
        now, done, left = _barrier((now, done, left))
        self._renew(done, k)
        self.left.update(left)
        self.ahead |= {f.value for f in tie.ahead}
        for v, x in now.items():
            held[v][v] = x

    def leave(self, k: int, outputs: Arrays) -> None:
        op = self.local.body.graph.operations[k]
        if k in self.local.made_whole:
            outputs = _barrier(outputs)
        for v, x in zip(op.outputs, outputs, strict=True):
            self.produced[v] = x
            self.made_by[v] = k
            for f in self.local.leaving.get(v, ()):
                if not f.merged:
                    self.left[v, f.need] = self._copy(f, x)
        self._join(self.local.joint[0].get(k, ()))

    def _join(self, members: Sequence[Fetch]) -> None:
        """Make copies that one collective makes: one after another, with nothing between them, as
        compilers look for what they merge."""
        for f in members:
            self.left[f.value, f.need] = self._copy(f, self.produced[f.value])

    def operands(self, k: int) -> list[jax.Array]:
        """The operands of reader k, in the layouts that it needs."""
        self._join(self.local.joint[1].get(k, ()))
        reads = self.local.reads[k]
        group = group_of(self.local.body, k)
        own = {} if group < 0 else self.shared.setdefault(group, {})
        if self.region is not None:
            for f in reads:
                if self._outside(f.value, self.region):
                    self.again(f.value, self.region)
        for f in reads:  # first, since tying a copy to another operand replaces that operand
            if f.again and not f.merged:
                own[f.value, f.need] = self._copy(f, self._late(f.value, k))
        for f in reads:
            at_end = k == len(self.local.reads) - 1
            if (f.merged or at_end) and (f.value, f.need) in self.left:
                own[f.value, f.need] = self.left[f.value, f.need]
            elif f.origin == "copy" and not f.again:
                own[f.value, f.need] = self._copy(f, self._store("produced", f.value)[f.value])
        found = [
            own[f.value, f.need]
            if f.origin in ("own", "copy")
            else self._store(f.origin, f.value)[f.value]
            for f in reads
        ]
        again = self.local.sent_again
        found = [_barrier(x) if (k, p) in again else x for p, x in enumerate(found)]
        tie = self.local.ties.get(k)
        if tie is not None and tie.arrived:
            done = {v: self.produced[v] for v in tie.done if v in self.produced}
            found, done = _barrier((found, done))
            self._renew(done, k)
        return found

    def not_before(self, k: int, operands: list[jax.Array]) -> list[jax.Array]:
        """Operands of operation k, not available before what was computed last before it.

        XLA fills arrays that need nothing at once, several in one kernel at the program's start,
        and then holds all of them until the last is read.
        """
        alive = self._alive(k)
        if not alive:
            return operands
        late, waited = _barrier((operands, {u: self.produced[u] for u in alive}))
        self._renew(waited, k)
        return list(late)

    def _copy(self, f: Fetch, x: jax.Array) -> jax.Array:
        for step in f.steps:
            x = apply(x, step, self.local.mesh, self.local.platform)
        local = f.steps and f.steps[-1].kind in ("slice", "to_partial")
        if local and x.size * x.dtype.itemsize >= SMALL:
            x = _barrier(x)  # a block of its own: cut out inside a reader, it would keep the whole
        if f.keep:
            self.kept[f.value] = x
        return x

    def _store(self, origin: str, v: int) -> dict[int, jax.Array]:
        """The table that holds value v, as produced or as kept, for the operation at hand."""
        which = 0 if origin == "produced" else 1
        if self.region is not None and v in self.barred[self.region][which]:
            return self.barred[self.region][which]
        return self.produced if which == 0 else self.kept

    def _late(self, v: int, k: int) -> jax.Array:
        """Value v, not available before reader k's other operands are.

        A copy that moves the same bytes a second time is in the plan to save memory in between. XLA
        would merge it with the first one; a barrier together with an operand that the reader waits
        for anyway keeps the two apart and the second one late.
        """
        x = self._store("produced", v)[v]
        if v in self.ahead:  # late enough, and apart from the first one
            self.ahead.remove(v)
            return x
        tie = self._tie(v, k)
        late: jax.Array
        if tie is None:
            late = _barrier(x)
        else:
            store, other = tie
            late, store[other] = _barrier((x, store[other]))
        return late

    def _tie(self, v: int, k: int) -> tuple[dict[int, jax.Array], int] | None:
        """The array to tie a late copy of v to: the reader's operand computed last, if it computes
        one, else whatever was computed last and is read again."""
        others = [f for f in self.local.reads[k] if f.value != v and f.value in self.made_by]
        if others:
            f = max(others, key=lambda f: self.made_by[f.value])
            return self._store("kept" if f.origin == "kept" else "produced", f.value), f.value
        alive = [u for u in self.made_by if u != v and self.local.last_read.get(u, -1) >= k]
        if alive:
            u = max(alive, key=self.made_by.__getitem__)
            return self._store("produced", u), u
        return None


def _barrier(tree: Any) -> Any:
    """`lax.optimization_barrier` of a pytree of arrays; of nothing, nothing."""
    import jax

    return jax.lax.optimization_barrier(tree) if jax.tree.leaves(tree) else tree
