"""Derivations: how rules lead from a program, one step at a time, to a form of it.

Between the program as given and a form there is a chain of whole programs. Each step computes one
value in another way; all of them are equal, and every one can be run.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels.signatures.parameters import hashable
from tapestry_egg.plans.plan import RuleStep
from tapestry_egg.rewrite.terms.rebuild import Terms, as_written, rebuild
from tapestry_egg.rewrite.terms.requests import Applied

# Programs with more values that are computed another way change all those alike in one step; so do
# those whose steps have more operations together, for each is a program that is built.
_MOST_STEPS, _MOST_OPERATIONS = 32, 40_000


def derive(
    graph: BlockGraph, terms: Terms, catalogue: Sequence[Applied], pick: Sequence[int]
) -> tuple[RuleStep, ...]:
    """The steps from `graph` to the form that `pick` chooses among its terms."""
    current = as_written(terms, [1.0] * len(catalogue))
    before = rebuild(graph, terms, catalogue, current)
    if before is None:
        return ()
    steps: list[RuleStep] = []
    pending: list[int] = []
    given = before.graph.operations == graph.operations and before.graph.outputs == graph.outputs
    last, seen = digest(graph if given else before.graph), frozenset(before.rules)
    changed = [c for c in _downwards(graph, terms, pick) if current[c] != pick[c]]
    most = min(_MOST_STEPS, _MOST_OPERATIONS // max(1, len(graph.operations)))
    for group in _groups(terms, pick, changed, most):
        for c in group:
            current[c] = pick[c]
        pending += group
        after = rebuild(graph, terms, catalogue, current)
        if after is None:  # only together with the next one
            continue
        now = digest(after.graph)
        if now != last:
            steps.append(_step(graph, terms, catalogue, pending, current, after.rules, seen, now))
            last, seen = now, frozenset(after.rules)
        pending = []
    return tuple(steps)


def _groups(
    terms: Terms, pick: Sequence[int], changed: Sequence[int], most: int
) -> list[list[int]]:
    """The classes of each step: those that share a new operation (results that one rule rewrites
    together), or where that makes more than `most` steps all that the same rules change."""
    by_new: dict[int, int] = {}  # new class -> group
    groups: dict[int, list[int]] = {}
    for c in changed:
        mine = {c, *_new_below(terms, pick, c)}
        found = sorted({by_new[d] for d in mine if d in by_new})
        into = found[0] if found else len(groups)
        merged = [d for g in found for d in groups.pop(g)] + [c]
        groups[into] = merged
        by_new.update(dict.fromkeys(mine, into))
        by_new.update({d: into for d, g in by_new.items() if g in found})
    steps = [sorted(set(g), key=list(changed).index) for _, g in sorted(groups.items())]
    if len(steps) <= most:
        return steps
    alike: dict[object, list[int]] = {}
    for step in steps:
        nodes = [(c, terms.nodes[c][pick[c]]) for c in step]
        kind = tuple((terms.rules(c, n.signature), n.value >= 0) for c, n in nodes)
        alike.setdefault(kind, []).extend(step)
    return list(alike.values())


def _new_below(terms: Terms, pick: Sequence[int], c: int) -> set[int]:
    """Classes without an operation of the program that a chosen operation is built on."""
    found: set[int] = set()
    stack = [c]
    while stack:
        at = stack.pop()
        for d in terms.nodes[at][pick[at]].operands:
            if d not in found and all(n.value < 0 for n in terms.nodes[d]):
                found.add(d)
                stack.append(d)
    return found


def _step(
    graph: BlockGraph,
    terms: Terms,
    catalogue: Sequence[Applied],
    classes: Sequence[int],
    pick: Sequence[int],
    rules: Sequence[str],
    seen: frozenset[str],
    now: str,
) -> RuleStep:
    c = classes[0]
    node = terms.nodes[c][pick[c]]
    own = [v for v, d in sorted(terms.class_of.items()) if d == c]
    # The rules of the new operations of this step; where several made one of them, one is enough.
    needed: list[str] = []
    stack, done = list(classes), set()
    while stack:
        d = stack.pop()
        chosen = terms.nodes[d][pick[d]]
        if d in done or chosen.value >= 0:
            continue
        done.add(d)
        names = sorted(terms.rules(d, chosen.signature))
        if names and not set(names) & set(needed):
            needed.append(names[0])
        stack.extend(e for e in chosen.operands)
    if not needed:
        needed = sorted(set(rules) - seen) or sorted(terms.rules(c, -1))
    entry = catalogue[node.signature] if node.signature >= 0 else None
    producers = graph.producers()
    source = ""
    if own and own[0] in producers:
        place = graph.operations[producers[own[0]]].source
        source = str(place) if place.file else ""
    output = graph.values[own[0]] if own else (entry.output if entry else "")
    inputs = ", ".join(map(str, entry.inputs)) if entry else ""
    return RuleStep(
        tuple(needed),
        f"%{own[0]} {output}" if own else str(output),
        f"{entry.kernel}({inputs})" if entry else f"%{node.value}",
        now,
        source,
        values=tuple(v for v, d in sorted(terms.class_of.items()) if d in set(classes)),
    )


def _downwards(graph: BlockGraph, terms: Terms, pick: Sequence[int]) -> list[int]:
    """Classes that the outputs need, each before those that it is computed from."""
    order: list[int] = []
    seen: set[int] = set()
    for root in terms.roots(graph):
        stack = [(root, False)]
        while stack:
            c, leaving = stack.pop()
            if leaving:
                order.append(c)
            elif c not in seen:
                seen.add(c)
                stack.append((c, True))
                stack.extend((d, False) for d in terms.nodes[c][pick[c]].operands)
    return order[::-1]


def digest(graph: BlockGraph) -> str:
    """A hash of what a graph computes and how: equal for graphs that differ only in the numbering
    and order of their operations. Regions count by their own digests. The graph remembers it."""
    known: str | None = graph.__dict__.get("_digest")
    if known is None:
        known = graph.__dict__["_digest"] = _digest(graph)
    return known


def _digest(graph: BlockGraph) -> str:
    known: dict[int, str] = {v: f"in {k}" for k, v in enumerate(graph.inputs)}
    for v, array in graph.constants.items():
        known[v] = f"const {_content(array)} {graph.values[v]}"
    effects = []
    for op in graph.operations:
        regions = [digest(r) for r in op.regions]
        reads = [known[v] for v in op.inputs]
        said = f"({_kernel_text(op)}, {reads!r}, {regions!r}, {op.remat!r})"
        made = hashlib.sha256(said.encode()).hexdigest()
        for q, v in enumerate(op.outputs):
            known[v] = f"{made} {q}"
        if op.effectful:
            effects.append(made)
    text = repr(([known[v] for v in graph.outputs], effects))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _kernel_text(op: Operation) -> str:
    """The kernel of an operation with its parameters, as digests have them; the operation remembers
    it, as most are in many forms of a program."""
    text: str | None = op.__dict__.get("_text")
    if text is None:
        text = op.__dict__["_text"] = f"{op.kernel!r}, {hashable(op.params)!r}"
    return text


#: Hashes of constants by `id`: forms of one program share large arrays. Those of arrays that are
#: gone are dropped where there are many: what a weak reference calls would swallow an interruption.
_CONTENTS: dict[int, tuple[weakref.ref[np.ndarray], str]] = {}
_MOST_CONTENTS = 4096


def _content(array: np.ndarray) -> str:
    """A hash of an array's elements."""
    key = id(array)
    known = _CONTENTS.get(key)
    if known is None or known[0]() is not array:
        if len(_CONTENTS) >= _MOST_CONTENTS:
            for gone in [k for k, (array_of, _) in _CONTENTS.items() if array_of() is None]:
                del _CONTENTS[gone]
        data = hashlib.sha256(array.tobytes()).hexdigest()
        known = _CONTENTS[key] = weakref.ref(array), data
    return known[1]
