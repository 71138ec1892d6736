"""Algebra: other forms of a program that cost less, found before any mesh is known.

The operations of a graph become terms in the e-graph, the rules of the books' program rulesets run
on them under a budget, an iteration at a time, and what they want is answered in between. Then the
cheapest operation of every class is chosen and the graph built again. Regions of loops and branches
are graphs of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.egraphs.run import Row, Stage, saturate
from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels import registry
from tapestry_egg.plans.plan import RuleStep
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, Rule, RuleBook
from tapestry_egg.rules.language.families import FAMILIES
from tapestry_egg.schedule.one_device import least_seconds, program_seconds, region_shares
from tapestry_egg.tracing.constants import may_prepare
from tapestry_egg.tracing.plain import handles_in
from tapestry_egg.work import Work

from .bypass import bypass
from .choose import Node, Terms, as_written, choose
from .derivation import derive, digest
from .folded_program import Folded, class_weights, fold, unfold
from .rebuild import Rebuilt, rebuild
from .requests import OPERATORS, Answers, Applied, Catalogue, rule_forms, splat

# Of these numbers no measurement is kept. The front's notes count the forms and regions that they
# leave out, and tell of rules that a budget ended.

#: Forms of one program that are searched: the one given, and the cheapest others.
MOST_FORMS = 3
#: How far the rules may go on one graph: the program's algebra saturates early or not at all.
BUDGET = Budget(iterations=20, rows=150_000, seconds=10.0)
#: A form must save this share of the program's seconds on one device.
LEAST_GAIN = 0.02
_LOAD = """
(ruleset load)
(rule ((constant v x)) ((splat (N v) x)) :ruleset load)
(rule ((leaf v)) ((union (N v) (Leaf v)) (set (order (N v)) v)) :ruleset load)
(rule ((node0 v s)) ((union (N v) (Op0 s)) (set (order (N v)) v)) :ruleset load)
(rule ((node1 v s a)) ((union (N v) (Op1 s (N a))) (set (order (N v)) v)) :ruleset load)
(rule ((node2 v s a b)) ((union (N v) (Op2 s (N a) (N b))) (set (order (N v)) v)) :ruleset load)
(rule ((node3 v s a b c))
      ((union (N v) (Op3 s (N a) (N b) (N c))) (set (order (N v)) v)) :ruleset load)
(rule ((node4 v s a b c d))
      ((union (N v) (Op4 s (N a) (N b) (N c) (N d))) (set (order (N v)) v)) :ruleset load)
"""
_MOST_OPERANDS = 4
# An iteration may make a million rows of a thousand. To read them takes longer than all else, so
# one that leaves so many times what the budget allows is taken back.
_OVER = 2
# Calls that it takes, per operation, to build a program anew and to price it.
_PER_OPERATION = 60
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
    by_clock: bool = False  # whether time ended an iteration of the rules
    others: int = 0  # forms that were found beside those that are searched, told of the first one
    regions: int = 0  # regions of it that were left as they are written, as they take too little
    slight: int = 0  # forms that were found, and save less than `least_gain`
    repeated: int = 0  # operations of which the rules saw another copy only, as layers are equal


@dataclass(frozen=True)
class Explored:
    """What the rules found out about one graph: its terms, and the signatures of their nodes."""

    terms: Terms
    catalogue: tuple[Applied, ...]
    timeline: tuple[Tick, ...] = ()
    by_clock: bool = False

    def only(self, rules: Collection[str]) -> Explored:
        """Without the nodes that only other rules than these have made."""
        terms = self.terms
        none: frozenset[str] = frozenset()
        nodes = tuple(
            tuple(
                n
                for n in nodes
                if n.value >= 0 or not terms.made.get((c, n.signature), none).isdisjoint(rules)
            )
            for c, nodes in enumerate(terms.nodes)
        )
        return replace(self, terms=replace(terms, nodes=nodes))


def forms(
    graph: BlockGraph,
    books: Sequence[RuleBook],
    target: Target,
    budget: Budget = BUDGET,
    least_gain: float = LEAST_GAIN,
) -> tuple[Form, ...]:
    """The graph as given, and up to two forms of it that take less time on one device, best first.

    They save more than the share `least_gain` of the time that the graph as given takes.
    Where rules of several rulesets together make the best form, those that one ruleset makes alone
    are forms too. Only operations change: inputs, outputs, constants and donation stay, and so do
    dtypes. Raises RuleError for a rule that egglog refuses or whose expressions have a fault.
    """
    rules = [r for b in books for r in b.rules if r.ruleset in PROGRAM_RULESETS]
    if not rules:
        return (Form(graph),)
    inner = _with_regions(graph, books, target, budget)
    folded = fold(inner.graph)
    small = folded.graph if folded else inner.graph
    explored = explore(small, rules, budget)
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
        graph, (), saturated, (), timeline, by_clock, regions=inner.regions, repeated=repeated
    )
    if not least:  # nothing computes, so nothing can be saved
        return (given_form,)
    # Of forms that cost the same, the one that needs the fewest rules.
    found.sort(key=lambda f: (round(f.seconds / least, 6), len(f.built.rules)))
    others: dict[float, Form] = {}
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
        others[place] = Form(built.graph, names, saturated, (*inner.steps, *steps))
    searched = list(others.values())[: MOST_FORMS - 1]
    left = len(others) - len(searched)
    return (replace(given_form, others=left, slight=len(slight)), *searched)


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
    graph: BlockGraph, books: Sequence[RuleBook], target: Target, budget: Budget
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
    known: dict[str, Form] = {}
    timeline: list[Tick] = []
    late: list[bool] = []
    repeated: list[int] = []

    def best(region: BlockGraph) -> Form:
        """The best form of a region; equal regions, as equal layers have, share one."""
        key = digest(region)
        if key not in known:
            found = forms(region, books, target, budget)
            known[key] = found[:2][-1]
            timeline.extend(found[0].timeline)
            late.append(found[0].by_clock)
            repeated.append(found[0].repeated)
        return known[key]

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
    named = tuple(sorted(names))
    left = sum(len(op.regions) for op in graph.operations) - len(worth)
    return Form(
        inner,
        named,
        saturated,
        tuple(steps),
        tuple(timeline),
        any(late),
        regions=left,
        repeated=sum(repeated),
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


@dataclass(frozen=True)
class Cheapest:
    """A graph, its seconds, what it chooses among the terms, and whether there was time to try all
    that looked worth it."""

    built: Rebuilt
    seconds: float
    pick: list[int]
    finished: bool
    explored: Explored  # what `pick` chooses among


def cheapest(
    graph: BlockGraph,
    explored: Explored,
    target: Target,
    given: float,
    folded: Folded | None = None,
    budget: Budget = BUDGET,
) -> Cheapest:
    """The cheapest of the graphs that compute what this one does, as far as tried.

    `given` are the seconds of this one. Where it is folded, seconds are those of the program that
    it stands for.
    """
    work, late = Work(), False
    terms, catalogue = explored.terms, explored.catalogue
    least = [least_seconds(a.signature, target) for a in catalogue]
    roots = [terms.class_of[v] for v in graph.outputs]
    roots += [terms.class_of[v] for op in graph.operations if op.effectful for v in op.inputs]
    weights = folded.weights if folded else None
    picked = as_written(terms, least)
    best = rebuild(graph, terms, catalogue, picked) or Rebuilt(graph, ())
    same = best.graph.operations == graph.operations
    seconds = given if same else program_seconds(best.graph, target, weights)

    def judge(pick: list[int]) -> bool:
        nonlocal best, seconds, picked, late
        if late := late or work.units >= budget.choice:
            return False
        work.add(_PER_OPERATION * len(graph.operations), 0)
        built = rebuild(graph, terms, catalogue, pick)
        if built is None:
            return False
        found = program_seconds(built.graph, target, weights)
        if found >= seconds:
            return False
        best, seconds, picked = built, found, list(pick)
        return True

    counts = class_weights(folded, terms) if folded else None
    chosen, finished = choose(terms, least, roots, judge, counts, work, budget.choice)
    if finished:
        bypass(terms, catalogue, least, roots, chosen, judge)
    return Cheapest(best, seconds, picked, finished and not late, explored)


def explore(graph: BlockGraph, rules: Sequence[Rule], budget: Budget = BUDGET) -> Explored:
    """Run rules of the program's rulesets on the operations of one graph (not of its regions)."""
    catalogue = Catalogue()
    facts, signatures = _facts(graph, catalogue)
    rules = _relevant(rules, {a.kernel for a in catalogue.entries})
    found = saturate(
        [(rule, rule_forms(rule)) for rule in rules],
        facts,
        (Stage(("load",), once=True), Stage(PROGRAM_RULESETS)),
        ("N", "Leaf", "made", *OPERATORS),
        budget,
        declared=_LOAD,
        requests=Answers(catalogue, rules),
        most_rows=_OVER * budget.rows,
    )
    terms = _terms(graph, found.tables, signatures, found.saturated)
    terms = _with_free(graph, terms, catalogue.entries)
    return Explored(terms, tuple(catalogue.entries), found.timeline, found.by_clock)


def _relevant(rules: Sequence[Rule], kernels: set[str]) -> list[Rule]:
    """The rules whose kernels occur in the program, or in what other such rules make of it: to
    declare a rule takes longer than to find that it matches nothing."""
    known = set(kernels)
    chosen: dict[int, Rule] = {}
    grown = True
    while grown:
        grown = False
        for k, rule in enumerate(rules):
            if k in chosen:
                continue
            named = _KERNEL.findall(rule.egg)
            families = _MEMBER.findall(rule.egg)
            if known.issuperset(named) and not any(known.isdisjoint(FAMILIES[f]) for f in families):
                chosen[k] = rule
                wants = rule.recipe.wants.values() if rule.recipe else ()
                known.update(w.kernel for w in wants if w.kernel)
                grown = True
    return [chosen[k] for k in sorted(chosen)]


_KERNEL = re.compile(r'\(kernel \S+ "([^"]+)"\)')
_MEMBER = re.compile(r'\(member \S+ "([^"]+)"\)')


def _facts(graph: BlockGraph, catalogue: Catalogue) -> tuple[dict[str, list[Row]], dict[int, int]]:
    """The graph as nodes over values, and the signature number of every value that is one.

    Types are without weakness, which changes no number: else products of weakly typed scalars would
    be other values than those of strongly typed ones, without end.
    """
    made = {v for op in graph.operations for v in op.outputs}
    facts: dict[str, list[Row]] = {
        "leaf": [(v,) for v in (*graph.inputs, *graph.constants) if v not in made],
        "constant": [
            (v, value) for v, a in graph.constants.items() if (value := splat(a)) is not None
        ],
    }
    signatures: dict[int, int] = {}
    for op in graph.operations:
        if not _is_term(graph, op):
            facts["leaf"].extend((v,) for v in op.outputs)
            continue
        (out,) = op.outputs
        types = tuple(graph.values[v].strong for v in op.inputs)
        entry = Applied(op.kernel, op.params, types, graph.values[out].strong, op.remat)
        number = catalogue.number(entry)
        signatures[out] = number
        facts.setdefault(f"node{len(op.inputs)}", []).append((out, number, *op.inputs))
    return facts, signatures


def _is_term(graph: BlockGraph, op: Operation) -> bool:
    """Whether rules may see an operation; what they do not see stays as it is."""
    if op.effectful or op.regions or len(op.outputs) != 1 or len(op.inputs) > _MOST_OPERANDS:
        return False
    if handles_in(op.params):
        return False
    types = tuple([graph.values[v] for v in op.inputs])
    out = (graph.values[op.outputs[0]],)
    return not registry.signature_of(op, types, out).opaque


def _terms(
    graph: BlockGraph,
    tables: Mapping[str, list[tuple[Any, ...]]],
    signatures: Mapping[int, int],
    saturated: bool,
) -> Terms:
    """The e-graph's classes, numbered: those of the program's values first, in their order, then
    new ones by how they are built. So the order in which rules were told or fired is forgotten."""
    numbers: dict[Any, int] = {}
    class_of: dict[int, int] = {}
    for value, token in sorted((row[0], row[1]) for row in tables["N"]):
        class_of[value] = numbers.setdefault(token, len(numbers))
    rows = _by_build([row for name in OPERATORS for row in tables[name]], numbers)
    producers = {v: op for op in graph.operations for v in op.outputs}
    nodes: list[dict[tuple[int, tuple[int, ...]], Node]] = [{} for _ in numbers]
    for v, c in sorted(class_of.items()):
        operation = producers.get(v)
        operands = tuple(class_of[u] for u in operation.inputs) if operation else ()
        s = signatures.get(v, -1)
        # Values that rules do not see are told apart by the value itself.
        nodes[c].setdefault((s if s >= 0 else -2 - v, operands), Node(s, operands, v))
    for row in rows:
        s, *tokens, token = row
        operands = tuple(numbers[t] for t in tokens)
        nodes[numbers[token]].setdefault((s, operands), Node(s, operands))
    made: dict[tuple[int, int], set[str]] = {}
    for name, token, s, *_ in tables["made"]:
        made.setdefault((numbers[token], s), set()).add(name)
    return Terms(
        nodes=tuple(tuple(n.values()) for n in nodes),
        class_of=class_of,
        made={key: frozenset(names) for key, names in made.items()},
        saturated=saturated,
    )


def _by_build(rows: Sequence[tuple[Any, ...]], numbers: dict[Any, int]) -> list[tuple[Any, ...]]:
    """The rows (signature, operands, class) in an order that only what they say determines; gives
    the classes that have no number yet the next ones, in this order."""
    rest = list(rows)
    out: list[tuple[Any, ...]] = []
    while rest:
        ready = [row for row in rest if all(t in numbers for t in row[1:-1])]
        if not ready:  # built of nothing that is known: there is no such row
            break
        ready.sort(key=lambda row: (row[0], [numbers[t] for t in row[1:-1]]))
        for row in ready:
            numbers.setdefault(row[-1], len(numbers))
        out += ready
        done = set(map(id, ready))
        rest = [row for row in rest if id(row) not in done]
    return out


def _with_free(graph: BlockGraph, terms: Terms, catalogue: Sequence[Applied]) -> Terms:
    """The terms with the nodes marked that need nothing but constants."""
    readers: dict[int, list[tuple[int, Node]]] = {}
    alone: list[tuple[int, Node]] = []
    for c, nodes in enumerate(terms.nodes):
        for n in nodes:
            if n.signature >= 0:
                entry = catalogue[n.signature]
                if may_prepare(entry.kernel, entry.inputs, (entry.output,)):
                    for d in set(n.operands):
                        readers.setdefault(d, []).append((c, n))
                    if not n.operands:
                        alone.append((c, n))
    fixed = {terms.class_of[v] for v in graph.constants} | {c for c, _ in alone}
    free = {(c, n.signature, n.operands) for c, n in alone}
    stack = sorted(fixed)
    while stack:
        for c, n in readers.get(stack.pop(), ()):
            if fixed.issuperset(n.operands):
                free.add((c, n.signature, n.operands))
                if c not in fixed:
                    fixed.add(c)
                    stack.append(c)
    if not free:
        return terms
    marked = tuple(
        tuple(replace(n, free=(c, n.signature, n.operands) in free) for n in nodes)
        for c, nodes in enumerate(terms.nodes)
    )
    return replace(terms, nodes=marked)
