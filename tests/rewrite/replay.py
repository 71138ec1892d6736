"""Derivations taken again: each step's rules, and no others, are let loose on the program before,
and the program after is found among what they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, product

from tapestry_egg.errors import RuleError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.ids import ClassId
from tapestry_egg.plans.plan import RuleStep
from tapestry_egg.rewrite.changes import changed, is_change
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.recomputation.second_places import retake
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rewrite.terms.rebuild import Terms, as_written, rebuild
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, Rule
from tapestry_egg.tracing.constants import prepare

# Choices that are tried to find the program after a step.
_MOST_TRIES = 4000


def replay(
    graph: BlockGraph, steps: Sequence[RuleStep], rules: Mapping[str, object]
) -> list[BlockGraph]:
    """The programs after each step, made again from `graph` by the rules that each step names.

    `rules` are rules by name. Steps inside regions are taken there; recomputations are made from
    the numbers that they hold. Raises RuleError for a step that its rules do not allow.
    """
    # Rules that unite nothing only derive facts (an order, say) that others ask for.
    known = {name: r for name, r in rules.items() if isinstance(r, Rule)}
    always = [r for r in known.values() if r.ruleset in PROGRAM_RULESETS and "(union" not in r.egg]
    out: list[BlockGraph] = []
    now = graph
    for number, step in enumerate(steps):
        if step.numbers:
            now = retake(prepare(now), step.numbers)
            if digest(now) != step.digest:
                raise _refused(number, step, graph)
            out.append(now)
            continue
        if step.rules and is_change(step.rules[0]):
            now = changed(now, step.rules)
            if digest(now) != step.digest:
                raise _refused(number, step, graph)
            out.append(now)
            continue
        inner = inside(now, step.region)
        used = [known[name] for name in step.rules if name in known]
        explored = explore(inner, [*always, *used])
        terms, catalogue = explored.terms, explored.catalogue
        first = as_written(terms, [1.0] * len(catalogue))
        found = None
        tried: Iterator[Mapping[ClassId, int]] = chain(
            _told(terms, first, step), _alternatives(terms, first)
        )
        for changes in islice(tried, _MOST_TRIES):
            built = rebuild(
                inner, terms, catalogue, [changes.get(ClassId(c), k) for c, k in enumerate(first)]
            )
            if built is not None and digest(built.graph) == step.digest:
                found = built.graph
                break
        if found is None:
            raise _refused(number, step, graph)
        now = with_region(now, step.region, found)
        out.append(now)
    return out


def _told(terms: Terms, first: Sequence[int], step: RuleStep) -> Iterator[dict[ClassId, int]]:
    """Choices that compute the values of a step, and no others, another way: alike first."""
    classes = sorted({terms.class_of[v] for v in step.values if v in terms.class_of})
    others = [
        [
            k
            for k, n in enumerate(terms.nodes[c])
            if k != first[c]
            and not terms.made.get((c, n.signature), frozenset(step.rules)).isdisjoint(step.rules)
        ]
        for c in classes
    ]
    if not classes or not all(others):
        return
    for i in range(max(map(len, others))):
        yield {c: ks[min(i, len(ks) - 1)] for c, ks in zip(classes, others, strict=True)}
    yield from (dict(zip(classes, ks, strict=True)) for ks in product(*others))


def _refused(number: int, step: RuleStep, graph: BlockGraph) -> RuleError:
    return RuleError(f"step {number + 1} cannot be taken: {step}", where=graph.name or "derivation")


def _alternatives(terms: Terms, first: Sequence[int]) -> Iterator[dict[ClassId, int]]:
    """Choices that differ in one class, in all, and in two."""
    yield {}
    single = [
        (ClassId(c), k)
        for c, nodes in enumerate(terms.nodes)
        for k in range(len(nodes))
        if k != first[c]
    ]
    yield from ({c: k} for c, k in single)
    for way in (1, -1):  # all at once: the first alternative of each class, then the last
        yield dict(single[::-way])
    yield from ({c: k, d: m} for c, k in single for d, m in single if c < d)


def inside(graph: BlockGraph, region: Sequence[int]) -> BlockGraph:
    """The graph of a region: numbers of operation and region, from the outermost inwards."""
    for k in range(0, len(region), 2):
        graph = graph.operations[region[k]].regions[region[k + 1]]
    return graph


def with_region(graph: BlockGraph, region: Sequence[int], body: BlockGraph) -> BlockGraph:
    """The graph with another one in the place of one of its regions."""
    if not region:
        return body
    number, which, *rest = region
    op = graph.operations[number]
    inner = with_region(op.regions[which], rest, body)
    regions = tuple(inner if k == which else r for k, r in enumerate(op.regions))
    operations = list(graph.operations)
    operations[number] = replace(op, regions=regions)
    return replace(graph, operations=tuple(operations))
