"""Every program that the classes of equal values hold, one node for each class that is needed.

An oracle for what is searched of them: no choice is preferred, none left out as a view or a twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rewrite.terms.rebuild import Terms, rebuild
from tapestry_egg.rules.language.book import Rule


class TooMany(Exception):
    """There are more choices than are looked at."""


def every_form(graph: BlockGraph, rules: Sequence[Rule], most: int) -> list[BlockGraph]:
    """The programs that the rules make of one, itself among them; equal ones once. Raises TooMany
    where there are more than `most` choices."""
    explored = explore(graph, rules)
    terms = explored.terms
    if not terms.saturated:
        raise TooMany
    found = {digest(graph): graph}
    for n, chosen in enumerate(_choices(terms, terms.roots(graph))):
        if n >= most:
            raise TooMany
        pick = [chosen.get(c, 0) for c in range(len(terms.nodes))]
        built = rebuild(graph, terms, explored.catalogue, pick)
        if built is not None:
            found.setdefault(digest(built.graph), built.graph)
    return list(found.values())


def _choices(terms: Terms, roots: Sequence[int]) -> Iterator[dict[int, int]]:
    """Of every class that is needed the number of a node."""

    def grow(chosen: dict[int, int], waiting: tuple[int, ...]) -> Iterator[dict[int, int]]:
        while waiting and waiting[-1] in chosen:
            waiting = waiting[:-1]
        if not waiting:
            yield chosen
            return
        c = waiting[-1]
        for k, node in enumerate(terms.nodes[c]):
            yield from grow({**chosen, c: k}, (*waiting[:-1], *node.operands))

    return grow({}, tuple(roots))
