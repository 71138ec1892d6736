"""From a plan to the function that every device runs inside one `shard_map`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import Operation
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.graph.loops import counts
from tapestry_egg.machine.compiler_choices import FusionCosts
from tapestry_egg.machine.split_products import SplitK
from tapestry_egg.machine.tiles import Tiles
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.plans.compiler_options import GPUS
from tapestry_egg.plans.exchanges import Exchange, Reader, exchanges_of, sent_again, together
from tapestry_egg.plans.fetch import Fetch, fetches, place
from tapestry_egg.plans.lying import laid_in_order
from tapestry_egg.plans.plan import BodyPlan, Plan
from tapestry_egg.runtime.lower.kernels.block import IndexBlock
from tapestry_egg.runtime.lower.kernels.kernels import run_kernel
from tapestry_egg.runtime.lower.kernels.margins import Margined, exchange
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.lying import (
    computed_into_straight,
    products_read_straight,
    renewed_outputs,
)
from tapestry_egg.schedule.schedules import Schedule, schedule

from .frame import Frame
from .host_calls import Caller, calls, report, run_once
from .laid import laid_tight, turned_back
from .operands import turned_beside_computed, turned_slices
from .order import (
    SMALL,
    Tie,
    fills,
    last_reads,
    made_for_all,
    made_of_larger,
    made_once,
    repeats,
    stored,
    ties,
    written_late,
)
from .precision import ROUNDING
from .read_apart import read_apart, reduced_apart
from .regions import NOT_FAILED, REGIONS, Stacks
from .updates import updates, within_products

if TYPE_CHECKING:
    import jax

    from tapestry_egg.runtime.lower.kernels.margins import Came

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
    states = frozenset(dict(plan.origin.feedback).values()) if plan.origin else frozenset[int]()
    made = LocalBody(plan.body, plan.mesh, caller or Caller(), platform, beside, states)
    if machine is None:
        return made
    return replace(made, split=machine.split_k, fusing=machine.fusing, tiles=machine.tiles)


@dataclass(frozen=True, eq=False)
class LocalBody:
    """The local function of one graph: the program's, or that of a region."""

    body: BodyPlan
    mesh: MeshShape
    caller: Caller
    platform: str = ""
    beside: bool = False  # whether the plan counts on collectives that run beside kernels
    states: frozenset[int] = frozenset()  # places of the inputs that the outputs replace
    split: SplitK | None = None  # how the compiler makes products in parts
    fusing: FusionCosts | None = None  # by what it tells what kernels compute again
    tiles: Tiles | None = None  # in which arrays lie

    def __post_init__(self) -> None:
        self.reads, self.regions  # noqa: B018 - a plan that does not fit is refused early

    @cached_property
    def reads(self) -> tuple[tuple[Fetch, ...], ...]:
        return fetches(self.body)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the graph as it is, with nothing fed back."""
        return schedule(flatten(self.body.graph, {}))

    @cached_property
    def signatures(self) -> tuple[OperationSignature, ...]:
        """Of every operation, those with regions and effects included, which say nothing."""
        found, values = [], self.body.graph.values
        for op in self.body.graph.operations:
            read, made = (tuple([values[v] for v in vs]) for vs in (op.inputs, op.outputs))
            if op.regions:
                made_of = op.kernel, op.params, read, made, len(op.regions)
                found.append(registry.signature(*made_of))
            else:
                found.append(registry.signature_of(op, read, made))
        return tuple(found)

    @cached_property
    def ties(self) -> dict[int, Tie]:
        given = self.body, self.reads, self.mesh, self.sources, self.schedule, self.stored
        return ties(*given, self.beside, rounds=self.platform in ROUNDING)

    @cached_property
    def waited_for(self) -> frozenset[int]:
        """What large kernels wait for."""
        return frozenset(v for tie in self.ties.values() for v in tie.done)

    @cached_property
    def calls(self) -> bool:
        """Whether some call in it may fail, and all devices must know."""
        return self.mesh.devices > 1 and calls(self.body.graph)

    @cached_property
    def leaving(self) -> dict[int, tuple[Fetch, ...]]:
        """Value -> the copies of it that leave the body; they are made when it is."""
        found: dict[int, tuple[Fetch, ...]] = {}
        for f in self.reads[-1]:
            if f.origin == "copy":
                found[f.value] = (*found.get(f.value, ()), f)
        return found

    @cached_property
    def together(self) -> dict[int, tuple[Reader, ...]]:
        """The operations that get rows from neighbours, those together that send theirs so, by the
        first of them, which sends."""
        return {group[0].operation: group for group in together(self.body, self.exchanges)}

    @cached_property
    def exchanges(self) -> tuple[tuple[Exchange, ...], ...]:
        """What every operation gets from neighbours."""
        every = range(len(self.body.graph.operations))
        return tuple([exchanges_of(self.body, k, self.mesh) for k in every])

    @cached_property
    def makers(self) -> dict[int, int]:
        """Value -> the operation that makes it."""
        return self.body.graph.producers()

    @cached_property
    def made_copies(self) -> dict[tuple[int, Layout, int], Fetch]:
        """Copies by their keys, as the readers have them that make them."""
        return {f.key: f for reads in self.reads for f in reads if f.origin == "copy"}

    @cached_property
    def joint(self) -> tuple[dict[int, list[Fetch]], dict[int, list[Fetch]]]:
        """The copies that are made by one collective: by the operation after which they are, where
        they combine partial values or leave the body, and by that before which they are."""
        members: dict[int, list[tuple[int, Fetch]]] = {}
        for k, f in ((k, f) for k, reads in enumerate(self.reads) for f in reads if f.merged):
            members.setdefault(f.merged, []).append((k, f))
        after: dict[int, list[Fetch]] = {}
        before: dict[int, list[Fetch]] = {}
        end = len(self.body.graph.operations)
        for found in members.values():
            last = max(self.makers.get(f.value, -1) for _, f in found)
            soon = any(k == end or f.have.partial for k, f in found) and last >= 0
            place = last if soon else min(k for k, _ in found)
            (after if soon else before).setdefault(place, []).extend(f for _, f in found)
        return after, before

    @cached_property
    def regions(self) -> tuple[tuple[LocalBody, ...], ...]:
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
            found.append(tuple(replace(self, body=b, states=frozenset()) for b in strategy.bodies))
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
        a plain one that reads its operands as they were produced, or small blocks of them, and
        sends nothing."""
        return {
            op.outputs[0]: k
            for k, op in enumerate(self.body.graph.operations)
            if len(op.outputs) == 1
            and op.outputs[0] not in self.stored
            and not (op.regions or op.effectful)
            and not self.exchanges[k]
            and all(f.have == f.need or self._is_cut_out(f) for f in self.reads[k])
        }

    def _is_cut_out(self, f: Fetch) -> bool:
        """Whether a copy is little and sends nothing."""
        local = f.need.block(self.body.graph.values[f.value], self.mesh)
        steps = self.body.copies[f.value, f.have, f.need]
        return local.nbytes < SMALL and all(s.kind in ("slice", "to_partial") for s in steps)

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
        return stored(self.schedule, self.reads, self.fusing)

    @property
    def read(self) -> frozenset[int]:
        """Places of the inputs that operations read."""
        graph = self.body.graph
        every = {v for op in graph.operations for v in op.inputs}
        return frozenset(k for k, v in enumerate(graph.inputs) if v in every)

    def invariants_sent(self, count: int) -> tuple[int, ...]:
        """Which of its first `count` inputs, the same in every step of a loop, collectives send:
        themselves, or what is computed of such inputs alone."""
        graph = self.body.graph
        made_of = {v: frozenset((k,)) for k, v in enumerate(graph.inputs[:count])}
        made_of |= {v: frozenset[int]() for v in graph.constants}
        sent: set[int] = set()
        for op, reads in zip((*graph.operations, None), self.reads, strict=True):
            for f in reads:
                if any(s.kind not in ("slice", "to_partial") for s in f.steps):
                    sent |= made_of.get(f.value, frozenset())
            if op is not None and not op.effectful and made_of.keys() >= set(op.inputs):
                own = frozenset[int]().union(*(made_of[v] for v in op.inputs))
                made_of |= dict.fromkeys(op.outputs, own)
        return tuple(sorted(sent))

    def written_late(self, first: int, count: int) -> tuple[int, ...]:
        """Which of a loop's carries are written when all are there, on platforms that then copy
        less; inputs from place `first` on."""
        if self.platform not in GPUS:
            return ()
        return written_late(self.body, self.reads, self.mesh, self.sources, first, count)

    def renewed(self, first: int, carries: int) -> dict[int, int]:
        """Which of a loop's stacked outputs are written into the stack that an input is a slice
        of; inputs from place `first` on, outputs from `carries`. XLA for TPUs would copy that."""
        if self.platform in ROUNDING:
            return {}
        pairs = renewed_outputs(self.body.graph, first, carries)
        return {q: p for q, p in pairs.items() if self._is_renewed(q)}

    def _is_renewed(self, q: int) -> bool:
        """Whether a part is written, and leaves, where the slice is: as it lies, and no dim of the
        part is cut that it does not fill."""
        body, leaves = self.body, self.reads[-1][q]
        k = next(k for k, op in enumerate(body.graph.operations) if leaves.value in op.outputs)
        old, part, *_ = [self.reads[k][p] for p in self.signatures[k].writes]
        shapes = body.graph.values[old.value].shape, body.graph.values[part.value].shape
        local = old.need.local_shape(shapes[0], self.mesh)
        return (
            leaves.origin == old.origin == "produced"
            and not old.need.partial
            and all(n in (c, m) for n, m, c in zip(*shapes, local, strict=True))
        )

    @cached_property
    def anew(self) -> frozenset[tuple[int, int]]:
        """Operands of operations that a compiler is not to know: rows of them are sent that were
        sent before, or kernels are to read them that it would have make them."""
        found = sent_again([*self.together.values()])
        if self.platform in GPUS:
            found |= read_apart(self.schedule, self.fusing)
            found |= reduced_apart(self.reads, self.makers, self.stored)
        return found

    @cached_property
    def repeats(self) -> dict[int, tuple[int, ...]]:
        """Operations with which a kernel begins that stores what another has stored before."""
        given = self.body, self.schedule, self.stored, self.mesh
        return repeats(*given) if self.platform in GPUS else {}

    @cached_property
    def fills(self) -> frozenset[int]:
        """Operations that fill an array of some size from constants alone."""
        waited_for = self.waited_for if self.platform in GPUS else frozenset[int]()
        return fills(self.body, self.stored, self.mesh, waited_for)

    @cached_property
    def images(self) -> frozenset[int]:
        """Values that are gathered with their dims in order, for what convolutions read of them."""
        return computed_into_straight(self.body.graph) if self.platform in GPUS else frozenset()

    @cached_property
    def rows(self) -> frozenset[int]:
        """Results of products that are made with their dims in order, for who takes them so. XLA
        for TPUs may make them turned for others that read them, and turns them back, a copy."""
        graph = self.body.graph
        return products_read_straight(graph) if self.platform in ROUNDING else frozenset()

    @cached_property
    def turned_operands(self) -> frozenset[tuple[int, int]]:
        """Operands of products that are to lie in order, for what is computed beside them."""
        given = self.body, self.signatures, self.mesh
        return turned_beside_computed(*given) if self.platform in ROUNDING else frozenset()

    @cached_property
    def made_whole(self) -> frozenset[int]:
        """Operations with results in memory that the compiler would not make once and together.
        XLA for GPUs computes some again in every product that reads them, which keeps what they are
        made of; and parts of an operand one by one where they are read, holding all until then."""
        graph = self.body.graph
        once = made_once(self.schedule.program)
        found = {k for k, op in enumerate(graph.operations) if not once.isdisjoint(op.outputs)}
        if self.platform not in GPUS:
            return frozenset(found)
        found |= made_for_all(
            self.body, self.schedule, self.stored, self.mesh, self.split, self.fusing
        )
        found |= made_of_larger(self.body, self.reads, self.stored, self.mesh)
        readers = Counter(f.value for reads in self.reads for f in reads)
        for k, op in enumerate(graph.operations):
            own = self.signatures[k]
            again = own.in_products == "again" and any(readers[v] > 1 for v in op.outputs)
            apart = bool(own.moved) and len(op.outputs) > 1
            if (again or apart) and self.stored.issuperset(op.outputs):
                found.add(k)
        return frozenset(found)

    @cached_property
    def turned(self) -> dict[int, dict[int, int]]:
        """Per loop, operands whose slices are taken of what they are a transposition of, which
        nothing stores: operand -> the operation that transposes."""
        return turned_slices(self.body, self.reads, self.signatures, self.on_the_fly, self.mesh)

    @cached_property
    def updates(self) -> dict[int, tuple[int, ...]]:
        """Operations that compute a new state of the old one, large ones, where the compiler would
        turn the old one for them at once, and hold that until then: by which operands they read
        it."""
        given = self.body, self.signatures, self.states, self.mesh
        return updates(*given) if self.platform == "tpu" else {}

    @cached_property
    def within_products(self) -> dict[int, tuple[int, ...]]:
        """Updates that the kernels of products make, by the first of these, where they read the
        state as it lies: nothing can come between such a product and its update."""
        given = self.body, self.signatures, self.updates, self.reads, self.left_in_memory
        return within_products(*given) if self.updates else {}

    @cached_property
    def left_in_memory(self) -> frozenset[int]:
        """Values that are in memory when a state may be read for its update: no result of a product
        that the product's own kernel goes on with. A barrier on such a one would store it."""
        if self.platform != "tpu":
            return self.stored
        return stored(self.schedule, self.reads, self.fusing, epilogues=True)

    @cached_property
    def last_read(self) -> dict[int, int]:
        """Value -> the last reader of it in any layout; the body's outputs read last."""
        return last_reads(self.reads, self.sources)

    @cached_property
    def read_as_made(self) -> dict[int, int]:
        """The same but for the copies that are made before their readers' turn."""
        own = [[f for f in reads if not self._early(k, f)] for k, reads in enumerate(self.reads)]
        return last_reads(own, self.sources)

    @cached_property
    def made_early(self) -> dict[int, frozenset[tuple[int, Layout, int]]]:
        """Value -> the copies of it that are made before their readers' turn."""
        found: dict[int, set[tuple[int, Layout, int]]] = {}
        for k, reads in enumerate(self.reads):
            for f in reads:
                if self._early(k, f):
                    found.setdefault(f.value, set()).add(f.key)
        return {v: frozenset(keys) for v, keys in found.items()}

    def _early(self, k: int, f: Fetch) -> bool:
        leaves = k == len(self.reads) - 1 and f.origin == "copy"
        return bool(f.merged) or leaves

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

    @cached_property
    def slices(self) -> dict[int, jax.ShapeDtypeStruct]:
        """Outputs, by their places, that XLA for GPUs would hold until a round of a loop ends, and
        only then put into the loop's stacks: arrays of some size."""
        import jax

        if self.platform not in GPUS:
            return {}
        found, graph = {}, self.body.graph
        for q, (v, layout) in enumerate(zip(graph.outputs, self.body.outputs, strict=True)):
            whole = graph.values[v]
            local = layout.block(whole, self.mesh)
            if not whole.dtype.startswith("key<") and local.nbytes >= SMALL:
                found[q] = jax.ShapeDtypeStruct(local.shape, decode_dtype(whole.dtype))
        return found

    def run(
        self, arguments: Arrays, failed: Any, stacks: Stacks | None = None
    ) -> tuple[tuple[jax.Array, ...], Any]:
        """The outputs, and whether a call has failed by now; in the place of outputs that are put
        into `stacks`, nothing that is to be read."""
        import jax

        graph = self.body.graph
        frame = Frame(self, dict(zip(graph.inputs, arguments, strict=True)), stacks=stacks)
        for v, constant in graph.constants.items():
            frame.produced[v] = (
                jax.numpy.asarray(constant, constant.dtype)
                if constant.size  # XLA loses an empty one that enters a `shard_map`
                else jax.lax.empty(constant.shape, constant.dtype)
            )
        frame.stack(graph.inputs)
        for k, op in enumerate(graph.operations):
            operands = self._operands(frame, k)
            wider = self._exchanged(frame, k, operands)
            with jax.named_scope(op.scope or op.kernel):
                q = frame.renews(k)
                if q is None:
                    outputs, failed = self.run_operation(k, operands, failed, wider)
                else:
                    outputs = frame.renew(k, q, operands)
            if not self.rows.isdisjoint(op.outputs):
                outputs = [laid_in_order(x) for x in outputs]
            if self.tiles and self.platform in ROUNDING and self.signatures[k].into_rows:
                outputs = [turned_back(x, self.tiles) for x in outputs]
            frame.leave(k, outputs)
        frame.enter(None, len(graph.operations))
        found = frame.operands(len(graph.operations))
        for q in sorted(frame.unwritten()):
            frame.write(q, found[q])
        return tuple(found), failed

    def _operands(self, frame: Frame, k: int) -> list[jax.Array]:
        """The operands of operation k, and what has to wait for what before it."""
        import jax

        op = self.body.graph.operations[k]
        with jax.named_scope(op.scope or op.kernel):
            frame.enter(op.remat, k)
            frame.wait(k)
            frame.repeat(k)
            frame.hold_back(k)
            operands = frame.operands(k)
            if k in self.fills:
                operands = frame.not_before(k, operands, range(len(operands)))
            elif k in self.updates:
                operands = frame.update(k, operands)
            if k in self.turned and op.remat is None:
                operands = frame.turned(k, operands)
        return operands

    def _exchanged(self, frame: Frame, k: int, operands: Arrays) -> dict[int, Margined]:
        """The blocks of operands of operation k that lack rows, with those rows; they come now for
        all operations that send theirs with it."""
        import jax

        op = self.body.graph.operations[k]
        with jax.named_scope(op.scope or op.kernel):
            if k in self.together:
                blocks: dict[tuple[int, int], Margined] = {}
                for reader in self.together[k]:
                    j = reader.operation
                    for p in dict.fromkeys(e.operand for e in reader.rows):
                        blocks[j, p] = self.margined(j, p, operands if j == k else frame.early(j))
                exchange(self.together[k], blocks, self.mesh)
                frame.came.update({place: block.came for place, block in blocks.items()})
            return self.wider(k, operands, frame.came)

    def margined(self, k: int, p: int, operands: Arrays) -> Margined:
        """The block of operand p of operation k, which is to get rows of neighbours."""
        strategy = self.body.strategies[k]
        block = IndexBlock(self.signatures[k], strategy.cuts, self.mesh)
        return block.margined(operands, p, strategy.needs[p], place(self.body, k))

    def wider(
        self, k: int, operands: Arrays, came: Mapping[tuple[int, int], Came]
    ) -> dict[int, Margined]:
        """The blocks of operands of operation k with the rows that came for them."""
        found = {}
        for p in [p for j, p in came if j == k]:
            found[p] = self.margined(k, p, operands)
            found[p].came = came[k, p]
            found[p].widen(self.mesh)
        return found

    def _laid(self, op: Operation, operands: Arrays) -> Arrays:
        """The operands of a region, stacks in the order in which tiles pad them least: XLA for TPUs
        keeps the order in which they were before they were cut into steps, up to all lanes for
        each element, as long as the loop runs."""
        if not op.is_scan or self.tiles is None or self.platform not in ROUNDING:
            return operands
        first = sum(counts(op))
        return [*operands[:first], *(laid_tight(x, self.tiles) for x in operands[first:])]

    def run_operation(
        self,
        k: int,
        operands: Arrays,
        failed: Any,
        wider: Mapping[int, Margined] | None = None,
    ) -> tuple[Arrays, Any]:
        """The outputs of operation k, and whether a call has failed by now; `wider` are blocks of
        operands with rows of neighbours."""
        outputs: Arrays
        op, strategy = self.body.graph.operations[k], self.body.strategies[k]
        where, values = place(self.body, k), self.body.graph.values
        read, made = (tuple(values[v] for v in vs) for vs in (op.inputs, op.outputs))
        if op.regions:
            if op.kernel not in REGIONS:
                raise PlanError(f"region operation {op.kernel!r} is not known", where=where)
            operands = self._laid(op, operands)
            outputs, after = REGIONS[op.kernel](op.params, self.regions[k], operands, failed)
            failed = failed if after is None else after
        elif registry.meaning(op.kernel) == "rounding" and self.platform not in ROUNDING:
            outputs = operands
        elif registry.runs_once(op):
            outputs, failed = run_once(op, made, operands, self.mesh, self.caller, failed)
        else:
            given = op, read, made, strategy, operands, self.mesh, where, self.platform
            outputs = run_kernel(*given, wider)
        for q, (t, layout, x) in enumerate(zip(made, strategy.gives, outputs, strict=True)):
            wanted = layout.local_shape(t.shape, self.mesh)
            if x.shape != wanted:
                raise PlanError(
                    f"output {q} has local shape {x.shape}, its layout {layout} says {wanted}",
                    where=where,
                )
        return outputs, failed
