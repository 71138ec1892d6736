"""Algebra: other forms of a program that cost less, found before any mesh is known.

The operations of a graph become terms in the e-graph, the rules of the books' program rulesets run
on them under a budget, an iteration at a time, and what they want is answered in between. Then the
cheapest operation of every class is chosen and the graph built again. Regions of loops and branches
are graphs of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import RuleStep
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, Rule, RuleBook
from tapestry_egg.schedule.one_device import least_seconds, program_seconds, region_shares

from .cheapest import Cheapest, cheapest
from .choose import Terms, as_written
from .derivation import derive, digest
from .explore import BUDGET, Explored, explore, is_wide
from .extractions import FORMS, Extraction, extractions
from .folded_program import Folded, fold, unfold
from .patches import Built, LayerPlaces, Patches, Path, Places, find_places
from .rebuild import Rebuilt, rebuild
from .requests import Applied

# Of these numbers no measurement is kept. The front's notes count the forms and regions that they
# leave out, and tell of rules that a budget ended.

#: Forms of one program that are searched: the one given, and the cheapest others.
MOST_FORMS = 3
#: A form must save this share of the program's seconds on one device.
LEAST_GAIN = 0.02
# Where there is no room for so many ways, places that only a form of their own has are not looked
# for: the network of all its programs takes its share of the work from the others.
_WAYS = 2
# Forms whose seconds differ by a smaller share take the same time.
_SAME = 1e-6
# Regions that take less than this share of a program's seconds are left as they are.
_NEGLIGIBLE = 0.25 * LEAST_GAIN


@dataclass(frozen=True)
class Form:
    """An equal program: its graph, the rules that made it from the one given, whether the rules had
    nothing more to say when it was chosen, the steps that lead to it, and the timeline of the rules
    on the program and its regions."""

    graph: BlockGraph
    rules: tuple[str, ...] = ()
    saturated: bool = True
    steps: tuple[RuleStep, ...] = ()
    timeline: tuple[Tick, ...] = field(default=(), compare=False)
    slower: bool = False  # takes longer than the one given, on one device, and holds less memory
    by_clock: bool = False  # whether time ended an iteration of the rules
    others: int = 0  # forms that were found beside those that are searched, told of the first one
    regions: int = 0  # regions of it that were left as they are written, as they take too little
    slight: int = 0  # forms that were found, and save less than `least_gain`
    repeated: int = 0  # operations of which the rules saw another copy only, as layers are equal
    untried: int = 0  # kinds of change that looked worth a trial and were given none
    wide: int = 0  # operations of more operands than rules see
    extra: bool = False  # searched for what it may take on a mesh, not for its time on one device
    views: int = 0  # forms that differ in views alone from one that is searched, or counted
    ended: int = 0  # softmaxes of which not all was read, told of the first form
    counts: int = 0  # numbers of micro-batches that were left out, told of the first form
    whole: str = ""  # the operation that needs the whole batch, where micro-batches save too little
    states: int = 0  # dims of the program's state that were not tried as its batch
    unsplit: bool = False  # no micro-batches were looked for, as memory is not short
    # The places of it that can be computed in several ways, all of which are searched together.
    patches: Patches | None = field(default=None, compare=False)
    # Those in its regions, while these are made forms of.
    inner: tuple[tuple[Path, Places], ...] = field(default=(), compare=False)
    unseen: bool = False  # whether there are choices among the rules' terms that were not looked at


def forms(
    graph: BlockGraph,
    books: Sequence[RuleBook],
    target: Target,
    budget: Budget = BUDGET,
    least_gain: float = LEAST_GAIN,
    room: int = 0,
    region: bool = False,
) -> tuple[Form, ...]:
    """The graph as given, and up to two forms of it that take less time on one device, best first;
    then those that the rules hold besides (`extractions`), as many as have `room` operations. Where
    these are too many to search each on its own, or where the body of a loop has such, they are
    ways to compute places of the program (`patches`), as they always are of a `region`.

    The former save more than the share `least_gain` of the time that the graph as given takes.
    Where rules of several rulesets together make the best form, those that one ruleset makes alone
    are forms too. Only operations change: inputs, outputs, constants and donation stay, and so do
    dtypes. Raises RuleError for a rule that egglog refuses or whose expressions have a fault.
    """
    rules = [r for b in books for r in b.rules if r.ruleset in PROGRAM_RULESETS]
    if not rules:
        return (Form(graph),)
    inner = _with_regions(graph, books, target, budget, room)
    folded = fold(inner.graph)
    small = folded.graph if folded else inner.graph
    explored = explore(small, rules, budget)
    merged: Form | None = None  # with equal values merged, where that has places
    weights = folded.weights if folded else None
    given = program_seconds(small, target, weights)
    written = given
    if inner.graph is not graph:
        before = fold(graph) if folded else None
        written = program_seconds(
            before.graph if before else graph, target, before.weights if before else None
        )
    found = [cheapest(small, explored, target, given, folded, budget)]
    least = written * (1.0 - least_gain)
    mixed = found[0].seconds < least and len(_rulesets(found[0].built.rules, rules)) > 1
    for ruleset in PROGRAM_RULESETS if mixed else ():
        own = {r.name for r in rules if r.ruleset == ruleset}
        found.append(cheapest(small, explored.only(own), target, given, folded, budget))
    saturated = inner.saturated and explored.terms.saturated and all(f.finished for f in found)
    timeline, by_clock = (*inner.timeline, *explored.timeline), inner.by_clock or explored.by_clock
    repeated = inner.repeated + len(inner.graph.operations) - len(small.operations)
    given_form = Form(
        graph,
        (),
        saturated,
        (),
        timeline,
        by_clock=by_clock,
        regions=inner.regions,
        repeated=repeated,
        untried=inner.untried + max(f.untried for f in found),
        wide=inner.wide + sum(is_wide(graph, op) for op in graph.operations),
    )
    if not least:  # nothing computes, so nothing can be saved
        return (given_form,)
    # Of forms that cost the same, the one that needs the fewest rules.
    found.sort(key=lambda f: (round(f.seconds / least, 6), len(f.built.rules)))
    others: dict[float, Form] = {}
    unproven = 0
    slight = {
        round(f.seconds / least, 6)
        for f in found
        if (inner.rules or f.built.rules) and least <= f.seconds < written * (1.0 - _SAME)
    }
    for f in found:
        place = round(f.seconds / least, 6)
        if not (inner.rules or f.built.rules) or f.seconds >= least or place in others:
            continue
        built, steps = _whole(inner.graph, folded, f)
        names = tuple(sorted({*inner.rules, *built.rules}))
        form = Form(built.graph, names, saturated, (*inner.steps, *steps))
        if _is_proven(graph, form, rules):  # else no file with a plan of it would be read
            others[place] = form
        else:
            unproven += 1
    searched = list(others.values())[: MOST_FORMS - 1]
    left = inner.others + len(others) + unproven - len(searched)
    little = inner.slight + len(slight)
    if not room or folded:
        patches = Patches(graph, inner.inner).within(room)
        if folded and room >= (1 + _WAYS) * len(small.operations) and not inner.inner:
            patches, merged = _of_layers(graph, folded, explored, rules, target, budget, room)
        told = replace(
            given_form,
            others=left + patches.left,
            slight=little,
            unseen=room > 0,
            patches=patches if patches and merged is None else None,
        )
        extra = [replace(merged, patches=patches)] if patches and merged else []
        return (told, *searched, *extra)
    every = [least_seconds(a.signature, target) for a in explored.catalogue]
    known = [small, *(f.graph for f in searched)]

    def proven(built: Rebuilt) -> bool:
        return _is_proven(graph, Form(built.graph, built.rules), rules)

    if region:
        mine = find_places(graph, explored.terms, explored.catalogue, every, proven)
        told = replace(
            given_form,
            others=inner.others if mine.complete else left,
            slight=inner.slight if mine.complete else little,
            patches=Patches(graph, (((), mine), *inner.inner)),
            unseen=not mine.complete,
        )
        return (told, *searched)
    made = extractions(small, explored.terms, explored.catalogue, every, known, room)
    patches = Patches(graph)
    if inner.inner or made.more or not made.complete:
        mine = find_places(graph, explored.terms, explored.catalogue, every, proven)
        patches = Patches(graph, (((), mine), *inner.inner))
        if not len(mine) and not inner.inner and room >= (1 + _WAYS) * graph.size:
            base = as_written(explored.terms, every)
            merged = _merged(graph, explored.terms, explored.catalogue, rules, base)
        if merged is not None:
            patches = _of_merged(graph, merged, rules, target, budget)
            mine = patches.parts[0][1]
        few = patches.programs(min(FORMS, room // max(1, graph.size) - 1))
        if inner.inner and few is not None and mine.complete:
            offered = _few(searched, few, saturated)
            extra = [f for f in offered if _is_proven(graph, f, rules)]
            told = replace(
                given_form,
                others=inner.others + patches.left + len(offered) - len(extra),
                slight=inner.slight,
                views=made.views,
                unseen=inner.unseen,
            )
            return (told, *searched, *extra)
        # Too many to search each on its own: together, as ways of the places where they differ.
        patches = patches.within(room)
        held = None if merged else patches.parts[0][1].holds
        made = extractions(small, explored.terms, explored.catalogue, every, known, room, held)
    offered = [_extra(inner, explored, e, saturated) for e in made.found]
    extra = [f for f in offered if _is_proven(graph, f, rules)]
    if merged is not None and patches:
        extra = [f for f in extra if digest(f.graph) != digest(merged.graph)]
        extra.append(replace(merged, patches=patches, saturated=saturated))
    # Where all forms were looked at, these are among them.
    beside = sum(part.left for path, part in patches.parts if path or not made.complete)
    told = replace(
        given_form,
        others=inner.others + made.more + len(offered) - len(extra) + beside,
        slight=inner.slight,
        untried=inner.untried if made.complete else given_form.untried,
        views=made.views,
        unseen=not made.complete or inner.unseen,
        patches=patches if patches and merged is None else None,
    )
    return (told, *searched, *extra)


def _merged(
    graph: BlockGraph,
    terms: Terms,
    catalogue: Sequence[Applied],
    rules: Sequence[Rule],
    pick: Sequence[int],
) -> Form | None:
    """The graph with one value in the place of all that rules say are equal to it, the first that
    is made, as `pick` computes each class as it is written; None where there are no such, or where
    a file would not be read that says so."""
    first = rebuild(graph, terms, catalogue, pick)
    if first is None or first.graph.operations == graph.operations:
        return None
    left = len(graph.operations) - len(first.graph.operations)
    now = digest(first.graph)
    step = RuleStep(first.rules, f"{left} operations", "equal values that were there before", now)
    steps = (step,) if first.rules and now != digest(graph) else ()
    form = Form(first.graph, first.rules, True, steps, extra=True)
    return form if _is_proven(graph, form, rules) else None


def _of_merged(
    graph: BlockGraph, merged: Form, rules: Sequence[Rule], target: Target, budget: Budget
) -> Patches:
    """The places of a graph whose equal values are merged."""
    explored = explore(merged.graph, rules, budget)
    seconds = [least_seconds(a.signature, target) for a in explored.catalogue]

    def proven(built: Rebuilt) -> bool:
        names = tuple(sorted({*merged.rules, *built.rules}))
        return _is_proven(graph, Form(built.graph, names), rules)

    mine = find_places(merged.graph, explored.terms, explored.catalogue, seconds, proven)
    return Patches(merged.graph, (((), mine),))


def _of_layers(
    graph: BlockGraph,
    folded: Folded,
    explored: Explored,
    rules: Sequence[Rule],
    target: Target,
    budget: Budget,
    room: int,
) -> tuple[Patches, Form | None]:
    """The places of a graph whose equal layers are folded, and the form that has them where that is
    not the graph as given, but the one with equal values merged."""

    def seconds() -> list[float]:
        return [least_seconds(a.signature, target) for a in explored.catalogue]

    pick = as_written(explored.terms, seconds())
    whole = unfold(graph, folded, explored.terms, explored.catalogue, pick)
    merged = _merged(graph, whole[0], whole[1], rules, whole[2])
    base = graph if merged is None else merged.graph
    if merged is not None:
        again = fold(base)
        if again is None:  # it has become too short for that
            some = room >= (1 + _WAYS) * base.size
            patches = _of_merged(graph, merged, rules, target, budget) if some else Patches(base)
            return patches.within(room), merged
        folded, explored = again, explore(again.graph, rules, budget)
    small = folded.graph

    def proven(built: Rebuilt) -> bool:
        return _is_proven(small, Form(built.graph, built.rules), rules)

    found = find_places(small, explored.terms, explored.catalogue, seconds(), proven)
    patches = Patches(base, (((), LayerPlaces.of(found, base, folded)),), len(small.operations))
    names = merged.rules if merged else ()

    def makes(ways: Sequence[int]) -> bool:
        built = patches.built(ways)
        return built is not None and _is_proven(
            graph, Form(built.graph, tuple(sorted({*names, *built.rules}))), rules
        )

    patches = patches.within(room)
    return patches.only(makes), merged


def _extra(inner: Form, explored: Explored, found: Extraction, saturated: bool) -> Form:
    """The form that an extraction is."""
    steps = derive(inner.graph, explored.terms, explored.catalogue, found.pick)
    names = tuple(sorted({*inner.rules, *found.built.rules}))
    return Form(found.built.graph, names, saturated, (*inner.steps, *steps), extra=True)


def _few(searched: Sequence[Form], built: Sequence[Built], saturated: bool) -> list[Form]:
    """Some programs as forms, without those that are searched already."""
    known = {digest(f.graph) for f in searched}
    made = [Form(b.graph, b.rules, saturated, b.steps, extra=True) for b in built]
    return [f for f in made if digest(f.graph) not in known]


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


def _with_regions(
    graph: BlockGraph, books: Sequence[RuleBook], target: Target, budget: Budget, room: int
) -> Form:
    """The graph with the best form of every region in its place, and where there is `room` for
    other forms the places of the regions.

    Regions stay as they are that all together take too little of the program's time for any form of
    them to matter: the predicates of loops, say.
    """
    worth = _worth_a_form(graph, target)
    names: set[str] = set()
    saturated = True
    operations: list[Operation] = []
    steps: list[RuleStep] = []
    known: dict[object, tuple[Form, ...]] = {}
    places: list[tuple[Path, Places]] = []
    timeline: list[Tick] = []
    seen: list[tuple[Form, ...]] = []  # of every region that the rules saw, its forms
    untaken = 0  # ways to compute places of regions of which not one is searched

    def best(number: int, which: int, region: BlockGraph) -> Form:
        """The best form of a region; equal regions, as equal layers have, share one."""
        nonlocal untaken
        key = digest(region), tuple(region.values[v] for v in region.inputs)
        if key not in known:
            found = forms(region, books, target, budget, room=room, region=True)
            known[key] = found
            timeline.extend(found[0].timeline)
            seen.append(found)
        own = known[key][0].patches
        if own is not None:
            every = own.inside(number, which)
            places.extend(p for p in every if len(p[1]))
            untaken += sum(part.left for _, part in every if not len(part))
        return known[key][:2][-1]

    for number, op in enumerate(graph.operations):
        bodies = [
            best(number, k, region) if (number, k) in worth else Form(region)
            for k, region in enumerate(op.regions)
        ]
        operations.append(replace(op, regions=tuple(b.graph for b in bodies)) if bodies else op)
        names.update(name for b in bodies for name in b.rules)
        saturated &= all(b.saturated for b in bodies)
        for which, b in enumerate(bodies):
            steps += [replace(s, region=(number, which, *s.region)) for s in b.steps]
    inner = replace(graph, operations=tuple(operations)) if names else graph
    named = tuple(sorted(names))
    left = sum(len(op.regions) for op in graph.operations) - len(worth)
    own = [found[0] for found in seen]  # the regions as given, with what is told of them
    return Form(
        inner,
        named,
        saturated,
        tuple(steps),
        tuple(timeline),
        any(f.by_clock for f in own),
        regions=left + sum(f.regions for f in own),
        others=untaken + sum(f[0].others + (0 if room else len(f[2:])) for f in seen),
        inner=tuple(places),
        unseen=any(f.unseen for f in own),
        slight=sum(f.slight for f in own),
        repeated=sum(f.repeated for f in own),
        untried=sum(f.untried for f in own),
        wide=sum(f.wide for f in own),
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


def _rulesets(names: Sequence[str], rules: Sequence[Rule]) -> set[str]:
    return {r.ruleset for r in rules if r.name in names}
