"""The e-graph of a program as egraph-serialize JSON, which egg's and egglog's own tools read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.rewrite.terms.explore import Explored, explore
from tapestry_egg.rewrite.terms.requests import Applied
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, RuleBook
from tapestry_egg.tracing.trace import Program


def egraph_document(
    program: Program | BlockGraph, rules: Sequence[str | Path | RuleBook] = ()
) -> dict[str, Any]:
    """What the rules find out about a program, as the e-graph that holds it.

    Classes are values, nodes the ways to compute them: `op` is a kernel with its parameters, or the
    place of an input. The `cost` of a node is what its template counts: flops and bytes moved, no
    seconds. What happens inside loops and branches is one node. The rules are those that ship and
    `rules`, within the budgets of `optimize`; `python -m tapestry_egg.extract` reads the document.
    (github.com/egraphs-good/egraph-serialize)
    """
    from tapestry_egg.rules import load_books
    from tapestry_egg.rules.language.book import book_names

    graph = program.graph if isinstance(program, Program) else program
    books = load_books([*book_names(), *rules])
    known = [r for b in books for r in b.rules if r.ruleset in PROGRAM_RULESETS]
    return _document(graph, explore(graph, known))


def _document(graph: BlockGraph, explored: Explored) -> dict[str, Any]:
    terms = explored.terms
    maker = {v: op for op in graph.operations for v in op.outputs}
    paths = dict(zip(graph.inputs, graph.input_names, strict=False))
    first = {c: f"{c}.0" for c, nodes in enumerate(terms.nodes) if nodes}
    costs = [_cost(a) for a in explored.catalogue]
    nodes: dict[str, Any] = {}
    for c, ways in enumerate(terms.nodes):
        for k, way in enumerate(ways):
            if way.signature >= 0:
                entry = explored.catalogue[way.signature]
                op, cost = _called(entry.kernel, entry.params), costs[way.signature]
            elif way.value in maker:  # an operation that rules do not see
                made = maker[way.value]
                op, cost = f"{_called(made.kernel, made.params)}#{way.value}", 1.0
            else:
                op, cost = paths.get(way.value) or f"%{way.value}", 0.0
            nodes[f"{c}.{k}"] = {
                "op": op,
                "children": [first[d] for d in way.operands],
                "eclass": str(c),
                "cost": cost,
            }
    roots = dict.fromkeys(str(c) for c in terms.roots(graph))
    return {"nodes": nodes, "root_eclasses": list(roots), "class_data": {}}


def _cost(applied: Applied) -> float:
    moved = sum(t.nbytes for t in (*applied.inputs, applied.output))
    return float(applied.signature.whole_flops + moved)


def _called(kernel: str, params: Any) -> str:
    said = ", ".join(f"{k}={v}" for k, v in sorted(params.items()))
    return f"{kernel}[{said}]" if said else kernel
