"""Forms with fused attention, found first, so that rules work on a program without its scores; and
forms that hold less memory and take longer.

What is recognised of a program (`streams/`) makes another one of it. The rules run on the one that
takes less time on one device; where that is the program as given, the other one is a form too, if
it holds less memory. So is the program with dims padded that devices cannot share, with its largest
product in blocks of rows, and with its batch in micro-batches: what a number of these saves, and
what it costs, is estimated on one device. Where nobody says how many, they are searched only where
memory seems short: the fewest that fit well, one between these and the fewest that can, and the
fewest that save nearly all that any number can. There the products that read most, in blocks of
what they sum, are a form, too, if the operands of the largest, gathered in blocks over a square of
devices, are much beside what a device holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import le

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels import registry
from tapestry_egg.plans.plan import EVEN_PARTS, MICRO_BATCHES, ROWS, SHIFTS, RuleStep
from tapestry_egg.quantities import BYTES
from tapestry_egg.rewrite.recomputation.checkpoints import peak_alone
from tapestry_egg.rewrite.rows import even_parts, shifts
from tapestry_egg.rewrite.streams import (
    apart,
    blocks,
    large_inside,
    micro_batches,
    temporal,
    written_out,
)
from tapestry_egg.rewrite.streams.streamed import RULE, RULESET, count_streams, streams_of
from tapestry_egg.rewrite.terms.explore import BUDGET
from tapestry_egg.rules.language.book import RuleBook
from tapestry_egg.schedule.one_device import least_seconds, program_seconds

from . import stacked
from .derivation import digest
from .form import LEAST_GAIN, Form, Left
from .forms import LEAST_SAVED, forms

# Of these numbers no measurement is kept. Micro-batches that they leave out are counted.

# The share of what the most micro-batches save that others may leave.
_NEARLY = 0.15
# Peaks of plans are no less than the peak on one device divided by the devices, and seldom near it.
_FITS = 0.5
# The least number of devices on which a product gathers blocks of both operands.
_SQUARE = 4
# Rounds at once make a form if they save this share of the seconds on one device: the forms of what
# they make are looked for beside those of the program as it is. Stacked copies may take as much
# more.
_MUCH = 0.1


def forms_with_streams(
    graph: BlockGraph,
    books: Sequence[RuleBook],
    target: Target,
    budget: Budget = BUDGET,
    least_gain: float = LEAST_GAIN,
    slower: bool = True,
    room: int = 0,
    batches: Callable[[Form], Batched] | None = None,
    shared: bool = False,
    limit: float = math.inf,
) -> tuple[Form, ...]:
    """The graph as given and up to two forms of it, as `forms.forms` finds them, of the program
    with chains of products that are alike stacked, with shifts that devices can share, and with
    fused attention where that is faster. Behind these,
    if `slower` ones are wanted, those that only hold less memory: that with fused attention, and
    that in blocks of rows; then as many others as have `room` operations, and
    those that `batches` makes of the program, with its attention fused where that is faster; then,
    with `shared`, those whose dims the target's devices can share; and one that gathers less at a
    time where devices, which may hold `limit` bytes each, are short of memory; that with loops
    over stacks written out, and the same with fused attention where that is faster; and what rules
    make of a small program without stacks. The fastest of the program whose loops make products of
    all rounds at once come before them."""
    if not any(r.ruleset == RULESET for b in books for r in b.rules):
        return forms(graph, books, target, budget, least_gain, room, lean=slower)
    n, changes, written = target.devices, list[tuple[BlockGraph, RuleStep]](), graph
    made, chains, few = stacked.stacks_of(graph) if n > 1 else (graph, 0, 0)
    is_stacked = chains > 0 and _is_as_fast(made, graph, target)
    if is_stacked:
        took = "the products of arrays alike", "those of a stack"
        changes.append((graph, _step(graph, made, target, stacked.RULE, *took)))
        graph = made
    shifted = shifts.with_shifts(graph, n) if n > 1 else graph
    if shifted is not graph:
        took = "shifts", f"as many rows as {n} devices share"
        changes.append((graph, _step(graph, shifted, target, f"{SHIFTS}{n}", *took)))
        graph = shifted
    inside = large_inside.with_invariants_inside(graph)
    if inside is not graph and program_seconds(inside, target) < program_seconds(graph, target):
        what = "what is large and does not change is made inside"
        changes.append((graph, _step(graph, inside, target, large_inside.RULE, "loops", what)))
        graph = inside
    streamed, ended = streams_of(graph)
    found, base = _with_streams(
        graph, streamed, books, target, budget, least_gain, slower, room, limit
    )
    split = batches(base) if batches else Batched()
    every = _undominated(found, split.forms, target)
    told = replace(
        found[0].left,
        forms=found[0].left.forms + len(found) - len(every),
        softmaxes=ended,
        stacked=chains if is_stacked else 0,
        slower=0 if is_stacked else chains,
        unstacked=few,
        counts=split.others,
        twice=split.twice,
        again=split.again,
        whole=split.whole,
        states=split.untried,
        unsplit=split.unsplit,
    )
    best = next((f for f in every[1:] if not (f.slower or f.extra)), base)
    others = (
        *((_shared(best, target) or _shared(base, target)) if shared else ()),
        *(_gathering_less(base, target, limit) if slower else ()),
    )
    found = (replace(found[0], left=told), *every[1:], *split.forms, *others)
    stored = n > 1 and written_out.stores_slices(graph)
    most = written_out.MOST if slower or stored else written_out.FEW
    fused = [f for f in found[1:] if RULE in f.rules and not (f.slower or f.extra)]
    out, long = _written_out(found[0], target, most)
    # XLA copies a cache, if fused attention reads it where it was renewed
    for form in fused[:1] if out and not written_out.renews(graph) else ():
        out += _written_out(form, target, most)[0]
    found = (replace(found[0], left=replace(told, loops=long)), *found[1:])
    found = (*_with_rows_looked_up(found, target), *out)
    for before, step in reversed(changes):
        found = _of_changed(found, before, step)
    at_once, unfit = _at_once(written, books, target, budget, least_gain, limit)
    told = replace(found[0].left, forms=found[0].left.forms + unfit)
    found = (replace(found[0], left=told), *found[1:])
    alone: tuple[Form, ...] = ()  # what rules make of a small program without stacks
    if is_stacked and written.size <= room:
        alone = forms(written, books, target, budget, least_gain, room - written.size)[1:]
    faster = [f for f in found[1:] if not (f.slower or f.extra)]
    rest = [f for f in found[1:] if f.slower or f.extra]
    rest += [f for f in at_once if f.extra]
    every = (*[f for f in at_once if not f.extra], *faster, *alone)
    return (found[0], *sorted(every, key=lambda f: _shared_seconds(f.graph, target)), *rest)


def _is_as_fast(made: BlockGraph, graph: BlockGraph, target: Target) -> bool:
    """Whether a program takes about as long as another one on one device, both with their attention
    fused."""
    after, before = (program_seconds(streams_of(g)[0], target) for g in (made, graph))
    return after <= (1.0 + _MUCH) * before


def _at_once(
    graph: BlockGraph,
    books: Sequence[RuleBook],
    target: Target,
    budget: Budget,
    least_gain: float,
    limit: float,
) -> tuple[tuple[Form, ...], int]:
    """The fastest forms of the program whose loops make of all rounds at once what they can, and
    one with its loops written out; none where that saves little. And how many there are that
    devices which hold `limit` bytes seem to have no memory for. States stay in loops on CPUs, where
    a round waits for no launch, and keeps what it carries in a cache."""
    states = target.platform != "cpu" and apart.has_states(graph)
    made = apart.with_rounds_at_once(graph, states)
    if made is graph:
        return (), 0
    before, after = (_shared_seconds(g, target) for g in (graph, made))
    if after > (1.0 - _MUCH) * before:
        return (), 0
    most = max(_FITS * limit * target.devices, peak_alone(graph, target))
    if not math.isinf(limit) and peak_alone(made, target) > most:
        return (), 1
    what = "what need not wait is made of all rounds at once"
    rule = apart.STATES if states else apart.RULE
    step = _step(graph, made, target, rule, "loops", what)
    base, *others = forms_with_streams(made, books, target, budget, least_gain, slower=False)
    faster = [f for f in others if not (f.slower or f.extra)]
    out = [f for f in others if any(r in written_out.NAMES for r in f.rules)]
    every = (*(faster or [replace(base, left=Left())]), *out)
    return tuple([f.behind(step) for f in every]), 0


def _shared_seconds(graph: BlockGraph, target: Target) -> float:
    """Seconds of a program whose kernels all devices share evenly: each launches every kernel."""
    n = target.devices
    return program_seconds(graph, replace(target, launch_seconds=n * target.launch_seconds)) / n


def _with_rows_looked_up(found: Sequence[Form], target: Target) -> tuple[Form, ...]:
    """The forms with single rows looked up where they are; the first one stays beside its own."""
    n, made = target.devices, list[Form]()
    for form in found:
        graph = shifts.with_rows_looked_up(form.graph, n) if n > 1 else form.graph
        if graph is form.graph:
            made.append(form)
            continue
        what = f"single rows of what {n} devices share are looked up"
        step = _step(form.graph, graph, target, f"{ROWS}{n}", "rows", what)
        looked = replace(form.then(graph, step, form.slower, form.extra), left=form.left)
        made += [looked] if made else [form, looked]
    return tuple(made)


def _of_changed(found: Sequence[Form], graph: BlockGraph, step: RuleStep) -> tuple[Form, ...]:
    """The program as given, before the forms of what a step makes of it, this one among them."""
    given = replace(found[0], graph=graph, rules=(), steps=())
    base, *others = (f.behind(step) for f in found)
    faster = [f for f in others if not (f.slower or f.extra)]
    if not faster:
        return (given, base, *others)
    rest = [f for f in others if f.slower or f.extra]
    return (given, *faster, *rest, replace(base, extra=True))


def _with_streams(
    graph: BlockGraph,
    streamed: BlockGraph,
    books: Sequence[RuleBook],
    target: Target,
    budget: Budget,
    least_gain: float,
    slower: bool,
    room: int,
    limit: float,
) -> tuple[tuple[Form, ...], Form]:
    """The forms of a graph and of the same with streams, and the one that is split further: as
    given, or with fused attention."""
    extra: list[Form] = []

    def find(of: BlockGraph) -> tuple[Form, ...]:
        found = forms(of, books, target, budget, least_gain, room, lean=slower)
        extra[:] = [f for f in found if f.extra]
        return tuple([f for f in found if not f.extra])

    if streamed is graph:
        found = find(graph)
        lean = _lean(found, Form(graph), target, limit) if slower else ()
        return (*found, *lean, *extra), found[0]
    before, after = program_seconds(graph, target), program_seconds(streamed, target)
    step = RuleStep(
        (RULE,),
        f"{count_streams(streamed) - count_streams(graph)} softmaxes and their derivatives",
        f"kernels that keep no scores: on one device {after / max(before, 1e-30) - 1.0:+.1%} time",
        digest(streamed),
    )
    fused = Form(streamed, (RULE,), True, (step,))
    if after >= before:
        found = find(graph)
        if not slower:
            return (*found, *extra), fused
        peaks = [peak_alone(g, target) for g in (graph, streamed)]
        if peaks[1] <= (1.0 - LEAST_SAVED) * peaks[0]:
            found = (*found, replace(fused, saturated=found[0].saturated, slower=True))
        return (*found, *_lean(found, fused, target, limit), *extra), fused
    found = find(streamed)
    given = replace(found[0], graph=graph, rules=(), steps=())
    made = [f.behind(step) for f in found[1:]]
    extra[:] = [f.behind(step) for f in extra]
    fused = replace(fused, saturated=given.saturated)
    faster, leaner = ([f for f in made if f.slower is slow] for slow in (False, True))
    every = (given, *(faster or [fused]), *leaner)
    return (*every, *(_lean(every, fused, target, limit) if slower else ()), *extra), fused


def _undominated(found: Sequence[Form], batched: Sequence[Form], target: Target) -> Sequence[Form]:
    """The forms without those that rules make to hold less memory where another one does so in as
    little time, on one device; and without blocks of a product that is little larger than its
    operands where micro-batches do."""
    lean = [f for f in found if f.slower]
    costs = {
        id(f): (program_seconds(f.graph, target), peak_alone(f.graph, target))
        for f in (*lean, *batched)
        if len(lean) > 1 or batched
    }

    def beaten(form: Form) -> bool:
        others = batched if blocks.OF_LARGEST in form.rules else lean
        if {RULE, blocks.RULE} & set(form.rules) or not costs:
            return False
        mine, every = costs[id(form)], [costs[id(f)] for f in others]
        return any(other != mine and all(map(le, other, mine)) for other in every)

    return [f for f in found if not (f.slower and beaten(f))]


def _lean(found: Sequence[Form], form: Form, target: Target, limit: float) -> tuple[Form, ...]:
    """The form with its largest product in blocks of rows, where it holds less memory on one
    device: beside those that rules find, for these save time and this one memory. A product that
    is little larger than its operands is cut where memory is short, or where the rules have found
    what takes longer and holds less: blocks may take its place."""
    changes = {blocks.RULE: blocks.with_blocks}
    held = peak_alone(form.graph, target)
    if held > _FITS * limit * target.devices or any(f.slower for f in found):
        changes[blocks.OF_LARGEST] = blocks.with_blocks_of_largest
    forms, least = list[Form](), held
    for rule, change in changes.items():
        made = change(form.graph)
        if made is form.graph or any(made == f.graph for f in forms):
            continue
        if peak_alone(made, target) > (1.0 - LEAST_SAVED) * least:
            continue
        least = peak_alone(made, target)
        step = RuleStep(
            (rule,),
            "the largest product and what reads it",
            f"a loop: on one device {BYTES.format(held)} -> {BYTES.format(least)}",
            digest(made),
        )
        forms.append(replace(form.then(made, step, slower=True), saturated=found[0].saturated))
    return tuple(forms)


def _shared(form: Form, target: Target) -> tuple[Form, ...]:
    """The form with dims padded that the devices of the target cannot share evenly, where they
    share too little of its work as it is."""
    n = target.devices
    if n < 2:
        return ()
    made = even_parts.with_even_parts(form.graph, n)
    saved = 0.0
    if made is not form.graph:
        saved = max(
            _products(form.graph, target, x) - _products(made, target, x) for x in (False, True)
        )
    if saved > target.launch_seconds:
        what = f"dims that {n} devices cannot share evenly", "padded ones"
        return (_changed(form, target, made, f"{EVEN_PARTS}{n}", *what),)
    return ()


def _gathering_less(form: Form, target: Target, limit: float) -> tuple[Form, ...]:
    """The form with the products that read most in blocks of what they sum."""
    n = target.devices
    if n < _SQUARE or math.isinf(limit):
        return ()
    values = form.graph.values
    for _, op in temporal.largest_products(form.graph)[:1]:
        gathered = sum(values[v].nbytes for v in op.inputs) / math.sqrt(n)
        held = peak_alone(form.graph, target) / n + gathered
        if held <= _FITS * limit or gathered < LEAST_SAVED * held:
            return ()
        made = temporal.with_blocks_of_sums(form.graph)
        if made is not form.graph:
            what = "the products that read most", "loops over blocks of their sums"
            return (_changed(form, target, made, temporal.RULE, *what),)
    return ()


def _written_out(form: Form, target: Target, most: int) -> tuple[tuple[Form, ...], int]:
    """The form with loops written out, at most so many operations, on GPUs, if copies of slices of
    stacks take much of a device's time where devices share the work. And how many such loops are
    too long."""
    if target.fusing is None or target.epilogues:
        return (), 0
    every, chosen = (written_out.sliced_bytes(form.graph, n) for n in (math.inf, most))
    seconds = program_seconds(form.graph, target) / target.devices
    much = _MUCH * seconds * target.hbm_bytes_per_second / 2.0
    if sum(every.values()) < much:
        return (), 0
    long = len(every) - len(chosen)
    if sum(chosen.values()) < much:
        return (), long
    shared = target.devices > 1
    made = written_out.with_loops_written_out(form.graph, most, shared)
    few = long > 0 and most == written_out.FEW
    name = (written_out.SHARED if shared else written_out.RULE) + "-few" * few
    step = _step(form.graph, made, target, name, "loops over stacks", "every round")
    return (form.then(made, step, extra=True),), long


def _changed(
    form: Form, target: Target, made: BlockGraph, name: str, where: str, what: str
) -> Form:
    """The form after one more change of it, of that name."""
    step = _step(form.graph, made, target, name, where, what)
    return form.then(made, step, slower=True, extra=True)


def _step(
    graph: BlockGraph, made: BlockGraph, target: Target, name: str, where: str, what: str
) -> RuleStep:
    """The step of that name that makes one program of another."""
    before, after = (program_seconds(g, target) for g in (graph, made))
    took = f"{what}: on one device {after / max(before, 1e-30) - 1.0:+.1%} time"
    return RuleStep((name,), where, took, digest(made))


def _products(graph: BlockGraph, target: Target, in_all: bool) -> float:
    """Seconds that the products of a program take where devices share each as evenly as they can
    (`in_all` as for `even_parts.shared`), those in loops as often as these run."""
    total = 0.0
    for op in graph.operations:
        times = op.rounds
        total += times * sum(_products(region, target, in_all) for region in op.regions)
        if op.regions:
            continue
        sig = registry.signature_in(graph, op)
        if sig.contracts:
            devices = even_parts.shared(sig, sig.extents, target.devices, in_all)
            total += least_seconds(sig, target) / devices
    return total


@dataclass(frozen=True)
class Batched:
    """Forms of a program in micro-batches; how many other numbers of them there are, the operation
    that keeps the batch from being split where too little of the program can be, how many dims
    of its state were not tried as the batch, and whether the program has an input that may hold a
    batch, but none was looked for, as memory is not short. `twice` are the other numbers of forms
    that compute values twice, `again` more such forms, which were not split."""

    forms: tuple[Form, ...] = ()
    others: int = 0
    whole: str = ""
    untried: int = 0
    unsplit: bool = False
    twice: int = 0
    again: int = 0


def batched(
    form: Form,
    target: Target,
    counts: Sequence[int] | None,
    limit: float = math.inf,
    short: bool = False,
) -> Batched:
    """The form in micro-batches: in each of `counts`, or, where these are None, in as many as
    seem worth a search, if memory seems short: `limit` are the bytes that a device may hold. Where
    it must be `short`, in each of `counts` only then, too.
    """
    if counts is not None and not counts:
        return Batched()
    tried = _Tried(form.graph, target)
    if (short or counts is None) and tried.fits(1, limit):
        return Batched(unsplit=micro_batches.may_hold_a_batch(form.graph))
    found, untried = micro_batches.batch_of(form.graph)
    if found is None:
        return Batched(untried=untried)
    tried.found = found
    divisors = list(micro_batches.counts(found.rows))
    if counts is None:
        counts = tried.worth(divisors, limit)
    made = [(n, g) for n in dict.fromkeys(counts) if (g := tried.graph(n)) is not None]
    forms = tuple([_in_parts(form, tried, n, g) for n, g in made])
    whole = ""
    if not forms and found.late is not None:
        place = f" ({found.late.source})" if found.late.source.file else ""
        whole = f"{found.late.kernel}{place}"
    left = len(set(divisors) - {n for n, _ in made}) if forms else 0
    return Batched(forms, left, whole, untried)


class _Tried:
    """A program in micro-batches of several numbers, and what they hold on one device."""

    def __init__(self, given: BlockGraph, target: Target) -> None:
        self.given, self.target = given, target
        self.found: micro_batches.Found | None = None
        self.graphs: dict[int, BlockGraph | None] = {1: given}
        self.peaks: dict[int, float] = {}

    def graph(self, n: int) -> BlockGraph | None:
        """The program in `n` micro-batches, None where it cannot be."""
        if n not in self.graphs:
            self.graphs[n] = self.found.split(n) if self.found else None
        return self.graphs[n]

    def peak(self, n: int) -> float:
        """Its peak on one device; infinite where it cannot be."""
        if n not in self.peaks:
            graph = self.graph(n)
            self.peaks[n] = math.inf if graph is None else peak_alone(graph, self.target)
        return self.peaks[n]

    def fits(self, n: int, limit: float) -> bool:
        """Whether a device may hold its part of it."""
        if math.isinf(limit) or (n == 1 and _all_bytes(self.given) <= limit):
            return True
        return self.peak(n) <= _FITS * limit * self.target.devices

    def worth(self, divisors: Sequence[int], limit: float) -> list[int]:
        """Numbers of micro-batches that are worth a search."""
        given, room = self.peak(1), limit * self.target.devices
        # Where a device has less than one row of a micro-batch, others than the batch are cut.
        most = [n for n in divisors if self._rows() // n >= self.target.devices] or divisors[:1]
        if not most:
            return []
        if self.peak(most[-1]) > room and (more := self._fitting(divisors[len(most) :], limit)):
            return more
        if self.peak(most[-1]) > (1.0 - LEAST_SAVED) * given:
            return []
        saved = given - self.peak(most[-1])
        near = next(n for n in most if given - self.peak(n) >= (1.0 - _NEARLY) * saved)
        # Fewer cannot fit: of those from there on, one in the middle may do and is quicker. Where
        # none fits well, more take longer and hold next to nothing less.
        least = next((k for k, n in enumerate(most) if self.peak(n) <= room), len(most) - 1)
        fit = next((k for k, n in enumerate(most) if self.fits(n, limit)), least)
        return sorted({most[(least + fit) // 2], near, most[fit]})

    def _fitting(self, divisors: Sequence[int], limit: float) -> list[int]:
        """Of some numbers the first that fits well, and one between it and the first that fits at
        all; none where none does, for then they would cost time and be of no use."""
        room = limit * self.target.devices
        least = next((k for k, n in enumerate(divisors) if self.peak(n) <= room), None)
        if least is None:
            return []
        fit = next((k for k, n in enumerate(divisors) if self.fits(n, limit)), least)
        return sorted({divisors[(least + fit) // 2], divisors[fit]})

    def _rows(self) -> int:
        return self.found.rows if self.found else 0


def _in_parts(form: Form, tried: _Tried, n: int, graph: BlockGraph) -> Form:
    assert tried.found is not None
    before, after = (program_seconds(g, tried.target) for g in (form.graph, graph))
    name = f"{MICRO_BATCHES}{n}"
    step = RuleStep(
        (name,),
        f"loss, forward and backward over the {tried.found.rows} rows of {tried.found.name}",
        f"a loop: micro-batches: {n}; on one device {BYTES.format(tried.peak(1))} -> "
        f"{BYTES.format(tried.peak(n))}, {after / max(before, 1e-30) - 1.0:+.1%} time",
        digest(graph),
    )
    return form.then(graph, step, slower=True, extra=True)


def _all_bytes(graph: BlockGraph) -> int:
    """Bytes of all values of a program: no less than its peak."""
    inner = sum(_all_bytes(r) for op in graph.operations for r in op.regions)
    return sum(t.nbytes for t in graph.values) + inner
