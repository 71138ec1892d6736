"""Explore: what rules find out about one graph, as classes of equal values.

Operations become terms in the e-graph, a term over at most four others; the rules run on them under
a budget, an iteration at a time, and what they ask for is answered in between. What comes back is
numbered anew, so that it depends on what was found alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.egraphs.run import Facts, Round, Row, Saturation, saturate
from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.graph.ids import ClassId
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.parameters import exact
from tapestry_egg.reference.computed import Computed
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, Rule
from tapestry_egg.rules.language.families import FAMILIES
from tapestry_egg.tracing.constants import may_prepare
from tapestry_egg.tracing.plain import handles_in

from .rebuild import Node, Terms
from .requests import OPERATORS, Answers, Applied, Catalogue, rule_forms, splat

#: How far the rules may go on one graph: the program's algebra saturates early or not at all. No
#: measurement of the numbers is kept; the front's notes tell of rules that a budget ended.
BUDGET = Budget(iterations=20, rows=150_000, seconds=10.0)
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
# Operations of more are counted (`is_wide`), and the front's notes say so.
_MOST_OPERANDS = 4
# An iteration may make a million rows of a thousand. To read them takes longer than all else, so
# one that leaves so many times what the budget allows is taken back.
_OVER = 2


@dataclass(frozen=True)
class Explored:
    """What the rules found out about one graph: its terms, and the signatures of their nodes."""

    terms: Terms
    catalogue: tuple[Applied, ...]
    timeline: tuple[Tick, ...] = ()
    by_clock: bool = False
    asked: int = 0  # what rules asked and was answered

    def only(self, rules: Collection[str]) -> Explored:
        """Without the nodes that only other rules than these have made."""
        terms = self.terms
        nodes = tuple(
            tuple(
                n
                for n in nodes
                if n.value >= 0 or not terms.rules(c, n.signature).isdisjoint(rules)
            )
            for c, nodes in enumerate(terms.nodes)
        )
        return replace(self, terms=replace(terms, nodes=nodes))


def explore(graph: BlockGraph, rules: Sequence[Rule], budget: Budget = BUDGET) -> Explored:
    """Run rules of the program's rulesets on the operations of one graph (not of its regions)."""
    catalogue = Catalogue()
    facts, signatures = _facts(graph, catalogue)
    tables = ("N", "Leaf", "made", *OPERATORS)
    rules = relevant(graph, rules)
    answers = Answers(catalogue, rules)
    found = _run(rules, answers, facts, budget, tables)
    terms = _terms(graph, found.tables, signatures, found.saturated)
    terms = _with_free(graph, terms, catalogue.entries)
    asked = len(answers.answered)
    return Explored(terms, tuple(catalogue.entries), found.timeline, found.by_clock, asked)


def makes(
    graph: BlockGraph,
    at: Mapping[ClassId, int],
    new: Sequence[tuple[ClassId, Applied, Sequence[ClassId]]],
    pairs: Collection[tuple[ClassId, ClassId]],
    rules: Sequence[Rule],
    budget: Budget = BUDGET,
) -> bool:
    """Whether rules make new nodes of one graph, and find pairs of classes equal. They run only
    until they do.

    `at` says which value of the graph is in which class; `new` are classes with the kernels that
    make them and the classes that these read, each after those.
    """
    known = {*at, *(c for c, *_ in new)}
    if any(d not in known for _, _, operands in new for d in operands):
        return False
    if any(c not in known for pair in pairs for c in pair):
        return False
    catalogue = Catalogue()
    facts, _ = _facts(graph, catalogue)
    text = {c: f"(N {v})" for c, v in at.items()} | {c: f"new{k}" for k, (c, *_) in enumerate(new)}

    def goal() -> str:
        """The nodes as facts, as soon as rules have asked for all of their signatures."""
        numbers = {_exact(a): s for s, a in enumerate(catalogue.entries)}
        wanted = [(c, numbers.get(_exact(a)), operands) for c, a, operands in new]
        if any(s is None for _, s, _ in wanted):
            return ""
        nodes = [
            f"(= {text[c]} (Op{len(operands)} {' '.join([str(s), *(text[d] for d in operands)])}))"
            for c, s, operands in wanted
        ]
        return " ".join([*nodes, *(f"(= {text[b]} {text[v]})" for b, v in pairs)])

    return _run(rules, Answers(catalogue, rules), facts, budget, (), goal).reached


def _exact(a: Applied) -> Any:
    """What entries share that differ in nothing but the recomputed region that they are in."""
    return a.kernel, exact(a.params), a.inputs, a.output


def _run(
    rules: Sequence[Rule],
    answers: Answers,
    facts: Facts,
    budget: Budget,
    tables: Sequence[str],
    goal: Callable[[], str] | None = None,
) -> Saturation:
    return saturate(
        [(rule, rule_forms(rule)) for rule in rules],
        facts,
        (Round(("load",), once=True), Round(PROGRAM_RULESETS)),
        tables,
        budget,
        declared=_LOAD,
        requests=answers,
        most_rows=_OVER * budget.rows,
        goal=goal,
    )


def relevant(graph: BlockGraph, rules: Sequence[Rule]) -> list[Rule]:
    """The rules whose kernels occur in the graph, or in what other such rules make of it: to
    declare a rule takes longer than to find that it matches nothing."""
    known = {op.kernel for op in graph.operations if _is_term(graph, op)}
    chosen: dict[int, Rule] = {}
    grown = True
    while grown:
        grown = False
        for k, rule in enumerate(rules):
            if k in chosen:
                continue
            named, families = _matched(rule.egg)
            if known.issuperset(named) and not any(known.isdisjoint(FAMILIES[f]) for f in families):
                chosen[k] = rule
                wants = rule.recipe.wants.values() if rule.recipe else ()
                known.update(w.kernel for w in wants if w.kernel)
                grown = True
    return [chosen[k] for k in sorted(chosen)]


@cache
def _matched(egg: str) -> tuple[list[str], list[str]]:
    """The kernels and the families of kernels that a rule's text names."""
    return _KERNEL.findall(egg), _MEMBER.findall(egg)


_KERNEL = re.compile(r'\(kernel \S+ "([^"]+)"\)')
_MEMBER = re.compile(r'\(member \S+ "([^"]+)"\)')


def _facts(graph: BlockGraph, catalogue: Catalogue) -> tuple[dict[str, list[Row]], dict[int, int]]:
    """The graph as nodes over values, and the signature number of every value that is one.

    Types are without weakness, which changes no number: else products of weakly typed scalars would
    be other values than those of strongly typed ones, without end.
    """
    made = {v for op in graph.operations for v in op.outputs}
    computed = Computed.of(graph)

    def known(v: int) -> str | None:
        """What a scalar is as rules write it, if it is made of nothing but constants."""
        return None if (a := computed(v)) is None else splat(a)

    facts: dict[str, list[Row]] = {
        "leaf": [(v,) for v in (*graph.inputs, *graph.constants) if v not in made],
        "constant": [(v, x) for v, t in enumerate(graph.values) if not t.shape and (x := known(v))],
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


def is_wide(graph: BlockGraph, op: Operation) -> bool:
    """Whether rules would see an operation, if terms had as many operands."""
    return len(op.inputs) > _MOST_OPERANDS and _is_plain(graph, op)


def _is_term(graph: BlockGraph, op: Operation) -> bool:
    """Whether rules may see an operation; what they do not see stays as it is."""
    return len(op.inputs) <= _MOST_OPERANDS and _is_plain(graph, op)


def _is_plain(graph: BlockGraph, op: Operation) -> bool:
    """Whether an operation of one result is what its template says, and nothing else."""
    if op.effectful or op.regions or len(op.outputs) != 1:
        return False
    return not (handles_in(op.params) or registry.signature_in(graph, op).opaque)


def _terms(
    graph: BlockGraph,
    tables: Mapping[str, list[tuple[Any, ...]]],
    signatures: Mapping[int, int],
    saturated: bool,
) -> Terms:
    """The e-graph's classes, numbered: those of the program's values first, in their order, then
    new ones by how they are built. So the order in which rules were told or fired is forgotten."""
    numbers: dict[Any, ClassId] = {}
    class_of: dict[int, ClassId] = {}
    for value, token in sorted((row[0], row[1]) for row in tables["N"]):
        class_of[value] = numbers.setdefault(token, ClassId(len(numbers)))
    rows = _by_build([row for name in OPERATORS for row in tables[name]], numbers)
    producers = {v: op for op in graph.operations for v in op.outputs}
    place = graph.producers()
    nodes: list[dict[tuple[int, tuple[int, ...]], Node]] = [{} for _ in numbers]
    for v, c in sorted(class_of.items(), key=lambda x: (place.get(x[0], -1), x[0])):
        operation = producers.get(v)
        operands = tuple(class_of[u] for u in operation.inputs) if operation else ()
        s = signatures.get(v, -1)
        # Values that rules do not see are told apart by the value itself.
        nodes[c].setdefault((s if s >= 0 else -2 - v, operands), Node(s, operands, v))
    for row in rows:
        s, *tokens, token = row
        operands = tuple(numbers[t] for t in tokens)
        nodes[numbers[token]].setdefault((s, operands), Node(s, operands))
    made: dict[tuple[ClassId, int], set[str]] = {}
    for name, token, s, *_ in tables["made"]:
        made.setdefault((numbers[token], s), set()).add(name)
    return Terms(
        nodes=tuple(tuple(n.values()) for n in nodes),
        class_of=class_of,
        made={key: frozenset(names) for key, names in made.items()},
        saturated=saturated,
        place=place,
    )


def _by_build(
    rows: Sequence[tuple[Any, ...]], numbers: dict[Any, ClassId]
) -> list[tuple[Any, ...]]:
    """The rows (signature, operands, class) in an order that only what they say determines; gives
    the classes that have no number yet the next ones, in this order."""
    readers: dict[Any, list[int]] = {}  # class -> rows that wait for it to have a number
    waiting = []
    for k, row in enumerate(rows):
        unknown = {t for t in row[1:-1] if t not in numbers}
        waiting.append(len(unknown))
        for t in unknown:
            readers.setdefault(t, []).append(k)
    ready = [row for row, n in zip(rows, waiting, strict=True) if not n]
    out: list[tuple[Any, ...]] = []
    while ready:  # rows that are built of nothing known are left out: there are none
        ready.sort(key=lambda row: (row[0], [numbers[t] for t in row[1:-1]]))
        out += ready
        new = [row[-1] for row in ready if row[-1] not in numbers]
        for token in new:
            numbers.setdefault(token, ClassId(len(numbers)))
        ready = []
        for token in dict.fromkeys(new):
            for k in readers.get(token, ()):
                waiting[k] -= 1
                if not waiting[k]:
                    ready.append(rows[k])
    return out


def _with_free(graph: BlockGraph, terms: Terms, catalogue: Sequence[Applied]) -> Terms:
    """The terms with the nodes marked that need nothing but constants."""
    readers: dict[int, list[tuple[int, Node]]] = {}
    alone: list[tuple[int, Node]] = []
    may = [may_prepare(a.kernel, a.inputs, (a.output,)) for a in catalogue]
    for c, nodes in enumerate(terms.nodes):
        for n in nodes:
            if n.signature >= 0 and may[n.signature]:
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
