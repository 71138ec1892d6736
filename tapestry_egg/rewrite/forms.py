"""Forms: other programs that compute the same, found before any mesh is known.

The operations of a graph become terms in the e-graph, the rules of the books' program rulesets run
on them under a budget, an iteration at a time, and what they want is answered in between. Of what
the rules hold then, those programs are forms that take least on one device, and as many others as
there is room for. Regions of loops and branches are graphs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import RuleStep
from tapestry_egg.rewrite.recomputation.checkpoints import peak_alone
from tapestry_egg.rewrite.terms.explore import BUDGET, Explored, explore, is_wide
from tapestry_egg.rewrite.terms.rebuild import Rebuilt, rebuild
from tapestry_egg.rewrite.terms.requests import Applied
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, Rule, RuleBook
from tapestry_egg.schedule.one_device import least_seconds, program_seconds, region_shares
from tapestry_egg.work import Work

from .cheapest import PER_OPERATION, Cheapest, cheapest
from .derivation import derive, digest
from .extractions import Extracted, Extraction, extractions, without_twins
from .folded_program import Folded, fold, unfold
from .form import LEAST_GAIN, Form, Left

# Of these numbers no measurement is kept. The front's notes count the forms and regions that they
# leave out, and tell of rules that a budget ended.

#: Forms of one program that are searched for what they save on one device.
FASTER = 2
# What a byte that stands is worth in the form that holds least: so many passes over it. A kernel
# that keeps no scores takes three to ten passes over them more than those do that store them.
_PASSES = 100.0
# A form that takes longer must save this share of the peak on one device.
LEAST_SAVED = 0.1
# Forms whose seconds differ by a smaller share take the same time.
_SAME = 1e-6
# Units of work that the forms of a program may take, and more for each of its operations: less than
# half of what XLA takes to compile it. Of these an answer to the rules takes so many.
_LEAST, _EACH, _ANSWER = 1.0, 6e-4, 4e-4


def forms(
    graph: BlockGraph,
    books: Sequence[RuleBook],
    target: Target,
    budget: Budget = BUDGET,
    least_gain: float = LEAST_GAIN,
    room: int = 0,
    inner: bool = False,
    lean: bool = False,
    work: Work | None = None,
    until: float = math.inf,
) -> tuple[Form, ...]:
    """The graph as given, and up to two forms of it that take less time on one device, best first;
    with `lean` one that holds less memory there, whatever it takes; then those that the rules hold
    besides (`extractions`), as many as have `room` operations. Of a graph that is the `inner` one
    of a loop or a branch, and of one whose equal layers are seen as one, there are none of these.

    The former save more than the share `least_gain` of the time that the graph as given takes.
    Where rules of several rulesets together make the best form, those that one ruleset makes alone
    are forms too. No more is looked for when `work` has come to the budget for choices, to what a
    program of this size may take, or to `until`. Only operations change: inputs, outputs, constants
    and donation stay, and so do dtypes. Raises RuleError for a rule that egglog refuses or whose
    expressions have a fault.
    """
    rules = [r for b in books for r in b.rules if r.ruleset in PROGRAM_RULESETS]
    if not rules:
        return (Form(graph),)
    work = work or Work()
    until = min(until, budget.choice, _LEAST + _EACH * graph.size)

    def of_region(body: BlockGraph) -> tuple[Form, ...]:
        half = (work.units + until) / 2.0
        given = books, target, budget
        return forms(body, *given, inner=True, work=work, until=half)

    best = with_regions(graph, target, of_region)
    folded = fold(best.graph)
    small = folded.graph if folded else best.graph
    explored = explore(small, rules, budget)
    held = _Held(graph, rules, target, budget, best, folded, explored, work, until)
    held.took(explored.asked * _ANSWER)
    faster = _faster(held, least_gain, 1 if inner else FASTER)
    if not faster.seconds:  # nothing computes, so nothing can be saved
        return (faster.given,)
    if inner or folded or not room:
        unseen = held.has_choices if inner else room > 0
        found = (_told(faster.given, unseen=unseen or faster.given.left.unseen), *faster.forms)
    else:
        found = _with_others(held, faster, room)
    # Of all kernels those that keep no scores alone may take longer and store less.
    blocks = any(a.signature.blocks is not None for a in held.explored.catalogue)
    if not lean or not blocks:
        return found
    if held.is_late:
        return (replace(found[0], saturated=False), *found[1:])
    n = 1 + len(faster.forms)
    leanest = _leanest(held, faster, found[:n])
    same = {digest(f.graph) for f in leanest}
    others = [f for f in found[n:] if digest(f.graph) not in same]
    return (*found[:n], *leanest, *others)


@dataclass(frozen=True, eq=False)
class _Held:
    """A program and what the rules hold of it: `inner` is it with the best form of every region in
    its place, `folded` that with equal layers as one, and `explored` what was found of these."""

    graph: BlockGraph
    rules: Sequence[Rule]
    target: Target
    budget: Budget
    inner: Form
    folded: Folded | None
    explored: Explored
    work: Work
    until: float
    #: Programs priced so far, with the passes and the price of each.
    priced: list[tuple[BlockGraph, float, float]] = field(default_factory=list)

    @property
    def is_late(self) -> bool:
        """Whether there is no work left."""
        return self.work.units >= self.until

    def took(self, units: float) -> None:
        """Count work that was done."""
        self.work.add_units(units)

    def prices(self, graphs: int = 1) -> None:
        """Count what it takes to build so many programs anew and to price them, or to hold them
        against the one given."""
        self.work.add(PER_OPERATION * self.graph.size * graphs, 0)

    @property
    def small(self) -> BlockGraph:
        """The graph on which the rules have run."""
        return self.folded.graph if self.folded else self.inner.graph

    @cached_property
    def written(self) -> float:
        """Seconds of the program as given, on one device."""
        if self.inner.graph is self.graph:
            return self.given
        before = fold(self.graph) if self.folded else None
        graph, weights = (before.graph, before.weights) if before else (self.graph, None)
        return program_seconds(graph, self.target, weights)

    @property
    def given(self) -> float:
        """The same with the best form of every region."""
        return self.price(self.small)

    def price(self, graph: BlockGraph, passes: float = 0.0) -> float:
        """Seconds on one device of the program that the rules have run on or of another that they
        hold, and those of so many `passes` over all that it stores. Equal programs are priced
        once: every ruleset begins from the same one, and many try the same changes of it."""
        for known, of_passes, seconds in self.priced:
            same = known.operations == graph.operations and known.values == graph.values
            if same and of_passes == passes:
                return seconds
        weights = self.folded.weights if self.folded else None
        seconds = program_seconds(graph, self.target, weights, passes)
        self.priced.append((graph, passes, seconds))
        return seconds

    @cached_property
    def seconds(self) -> list[float]:
        """Of every signature the least seconds that it adds."""
        return [least_seconds(a.signature, self.target) for a in self.explored.catalogue]

    def cheapest(self, explored: Explored) -> Cheapest:
        """Of what was found the program that takes least on one device."""
        return self._cheapest(explored)

    def _cheapest(
        self, explored: Explored, passes: float = 0.0, first: Sequence[int] | None = None
    ) -> Cheapest:
        """The same, of what is priced at so many passes over what it stores."""
        small, target, folded, work = self.small, self.target, self.folded, self.work
        self.prices()
        price = partial(self.price, passes=passes)
        return cheapest(small, explored, target, price, folded, passes, first, work, self.until)

    def leanest(self, fastest: Cheapest) -> Cheapest:
        """The same where what stands counts most, from the one on that takes least."""
        return self._cheapest(self.explored, _PASSES, fastest.pick)

    def is_proven(self, built: Rebuilt) -> bool:
        """Whether a graph follows from the one given, as it must where a file is read."""
        return self.follows(Form(built.graph, built.rules))

    def follows(self, form: Form) -> bool:
        """The same of a form."""
        self.prices()
        return _is_proven(self.graph, form, self.rules)

    @property
    def has_choices(self) -> bool:
        """Whether the rules hold more than one way to compute some value."""
        own = without_twins(self.explored.terms, self.explored.catalogue)
        return any(len(nodes) > 1 for nodes in own)

    def extracted(self, known: Sequence[Form], room: int) -> Extracted:
        """Programs that the rules hold beside those that are known."""
        if self.is_late:
            return Extracted((), 0, 0, False)
        graphs = [self.small, *(f.graph for f in known)]
        terms, catalogue = self.explored.terms, self.explored.catalogue
        return extractions(self.small, terms, catalogue, self.seconds, graphs, room)


@dataclass(frozen=True)
class _Faster:
    """The form as given, with what is told of it, and those that take less on one device, best
    first: less than `seconds`. `best` takes least, be it as long."""

    given: Form
    forms: tuple[Form, ...]
    seconds: float
    best: Cheapest


def _faster(held: _Held, least_gain: float, most: int) -> _Faster:
    """The forms of a program that save more than a share of its seconds on one device, and as many
    as are wanted."""
    inner, explored = held.inner, held.explored
    best = held.cheapest(explored)
    found = [best]
    least = held.written * (1.0 - least_gain)
    mixed = found[0].seconds < least and len(_rulesets(found[0].built.rules, held.rules)) > 1
    alone = PROGRAM_RULESETS if mixed and most > 1 else ()
    for ruleset in alone:
        if held.is_late:
            break
        own = {r.name for r in held.rules if r.ruleset == ruleset}
        found.append(held.cheapest(explored.only(own)))
    finished = len(found) == 1 + len(alone) and all(f.finished for f in found)
    saturated = inner.saturated and explored.terms.saturated and finished
    left = Left(
        regions=inner.left.regions,
        repeated=inner.left.repeated + len(inner.graph.operations) - len(held.small.operations),
        untried=inner.left.untried + max(f.untried for f in found),
        wide=inner.left.wide + sum(is_wide(held.graph, op) for op in held.graph.operations),
    )
    given = Form(
        held.graph,
        (),
        saturated,
        (),
        (*inner.timeline, *explored.timeline),
        by_clock=inner.by_clock or explored.by_clock,
        left=left,
    )
    if not least:  # nothing computes, so nothing can be saved
        return _Faster(given, (), least, best)
    # Of forms that cost the same, the one that needs the fewest rules.
    found.sort(key=lambda f: (round(f.seconds / least, 6), len(f.built.rules)))
    changed = [f for f in found if inner.rules or f.built.rules]
    slight = [f for f in changed if least <= f.seconds < held.written * (1.0 - _SAME)]
    others: dict[float, Form] = {}
    unproven = 0
    for f in changed:
        place = round(f.seconds / least, 6)
        if f.seconds >= least or place in others or len(others) == most:
            continue
        built, steps = _whole(inner.graph, held.folded, f)
        names = tuple(sorted({*inner.rules, *built.rules}))
        form = Form(built.graph, names, saturated, (*inner.steps, *steps))
        if held.follows(form):  # else no file with a plan of it would be read
            others[place] = form
        else:
            unproven += 1
    few = tuple(others.values())
    gains = {round(f.seconds / least, 6) for f in changed if f.seconds < least}
    told = _told(
        given,
        forms=inner.left.forms + max(len(gains), len(few) + unproven) - len(few),
        slight=inner.left.slight + len({round(f.seconds / least, 6) for f in slight}),
    )
    return _Faster(told, few, least, best)


def _leanest(held: _Held, faster: _Faster, known: Sequence[Form]) -> tuple[Form, ...]:
    """The form of a program that holds the least memory on one device, where it holds less than
    those that are known."""
    found = held.leanest(faster.best)
    if not found.built.rules:
        return ()
    built, steps = _whole(held.inner.graph, held.folded, found)
    names = tuple(sorted({*held.inner.rules, *built.rules}))
    form = Form(built.graph, names, known[0].saturated, (*held.inner.steps, *steps), slower=True)
    if digest(form.graph) in {digest(f.graph) for f in known}:
        return ()
    least = min(peak_alone(f.graph, held.target) for f in known)
    if peak_alone(form.graph, held.target) > (1.0 - LEAST_SAVED) * least:
        return ()
    return (form,) if held.follows(form) else ()


def _told(given: Form, **changes: Any) -> Form:
    """The form as given, with changes to what is told of what was left out."""
    return replace(given, left=replace(given.left, **changes))


def _with_others(held: _Held, faster: _Faster, room: int) -> tuple[Form, ...]:
    """The programs that take less, and as many others as have `room` operations."""
    fits = room >= max(1, held.graph.size)
    made = held.extracted(faster.forms, room) if fits else Extracted((), 0, 0, False)
    given, left = faster.given, held.inner.left
    offered = [_extra(held, e, given.saturated) for e in made.found]
    extra = [f for f in offered if held.follows(f)]
    # Where all forms were looked at, these are among them.
    told = _told(
        given,
        forms=left.forms + made.more + len(offered) - len(extra),
        slight=left.slight,
        untried=left.untried if made.complete else given.left.untried,
        views=made.views,
        unseen=not made.complete or left.unseen,
    )
    return (told, *faster.forms, *extra)


def _extra(held: _Held, found: Extraction, saturated: bool) -> Form:
    """The form that an extraction is."""
    inner, explored = held.inner, held.explored
    steps = derive(inner.graph, explored.terms, explored.catalogue, found.pick)
    names = tuple(sorted({*inner.rules, *found.built.rules}))
    return Form(found.built.graph, names, saturated, (*inner.steps, *steps), extra=True)


def _is_proven(graph: BlockGraph, form: Form, rules: Sequence[Rule]) -> bool:
    """Whether a form follows from the program as it must when a plan is read from a file: what some
    chains of rules make, its proof does not find again."""
    from .equivalence import check_equivalent  # most first calls have no other form

    try:
        check_equivalent(graph, form.graph, set(form.rules), lambda: rules)
    except PlanError:
        return False
    return True


def _whole(
    graph: BlockGraph, folded: Folded | None, found: Cheapest
) -> tuple[Rebuilt, tuple[RuleStep, ...]]:
    """The whole program in the form that was found, for it or for the folded one, and the steps
    that lead to it."""
    terms, pick = found.explored.terms, found.pick
    catalogue: Sequence[Applied] = found.explored.catalogue
    built: Rebuilt | None = found.built
    if folded:
        terms, catalogue, pick = unfold(graph, folded, terms, catalogue, pick)
        built = rebuild(graph, terms, catalogue, pick)
    if built is None:  # a circle through several copies
        return Rebuilt(graph, ()), ()
    return built, derive(graph, terms, catalogue, pick)


def _rulesets(names: Sequence[str], rules: Sequence[Rule]) -> set[str]:
    return {r.ruleset for r in rules if r.name in names}


# Forms of regions: bodies of loops and branches, each in its best form.


# Regions that take less than this share of a program's seconds are left as they are.
_NEGLIGIBLE = 0.25 * LEAST_GAIN


def with_regions(
    graph: BlockGraph,
    target: Target,
    forms_of: Callable[[BlockGraph], tuple[Form, ...]],
) -> Form:
    """The graph with the best form of every region in its place.

    Regions stay as they are that all together take too little of the program's time for any form of
    them to matter: the predicates of loops, say.
    """
    worth = _worth_a_form(graph, target)
    names: set[str] = set()
    saturated = True
    operations: list[Operation] = []
    steps: list[RuleStep] = []
    known: dict[object, tuple[Form, ...]] = {}
    timeline: list[Tick] = []
    seen: list[tuple[Form, ...]] = []  # of every region that the rules saw, its forms

    def best(region: BlockGraph) -> Form:
        """The best form of a region; equal regions, as equal layers have, share one."""
        key = digest(region), tuple(region.values[v] for v in region.inputs)
        if key not in known:
            found = forms_of(region)
            known[key] = found
            timeline.extend(found[0].timeline)
            seen.append(found)
        return known[key][:2][-1]

    for number, op in enumerate(graph.operations):
        bodies = [
            best(region) if (number, k) in worth else Form(region)
            for k, region in enumerate(op.regions)
        ]
        operations.append(replace(op, regions=tuple(b.graph for b in bodies)) if bodies else op)
        names.update(name for b in bodies for name in b.rules)
        saturated &= all(b.saturated for b in bodies)
        for which, b in enumerate(bodies):
            steps += [replace(s, region=(number, which, *s.region)) for s in b.steps]
    inner = replace(graph, operations=tuple(operations)) if names else graph
    unworthy = sum(len(op.regions) for op in graph.operations) - len(worth)
    own = [found[0] for found in seen]  # the regions as given, with what is told of them
    told = sum((f.left for f in own), Left())
    return Form(
        inner,
        tuple(sorted(names)),
        saturated,
        tuple(steps),
        tuple(timeline),
        by_clock=any(f.by_clock for f in own),
        left=replace(
            told,
            regions=told.regions + unworthy,
            forms=told.forms + sum(len(f[2:]) for f in seen),
        ),
    )


def _worth_a_form(graph: BlockGraph, target: Target) -> set[tuple[int, int]]:
    """The regions, by the numbers of operation and region, without those that take least and
    together no more than the share `_NEGLIGIBLE` of the program's seconds."""
    if not any(op.regions for op in graph.operations):
        return set()
    shares = region_shares(graph, target)
    left = _NEGLIGIBLE
    worth = set()
    for key, share in sorted(shares.items(), key=lambda item: (item[1], item[0])):
        left -= share
        if left < 0.0:
            worth.add(key)
    return worth
