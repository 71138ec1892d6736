"""egraph-serialize JSON: the e-graphs of extraction-gym, egg and egglog.

`nodes` maps a node's id to its `op`, `eclass`, `cost` (1 when left out) and `children`, which are
ids of *nodes* and stand for their classes. `root_eclasses` are the classes to extract.
(github.com/egraphs-good/egraph-serialize)
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym.choices import Choice, ChoiceProblem, column, rows


def recognises(document: Any) -> bool:
    """Whether a JSON document is of this format."""
    return (
        isinstance(document, dict)
        and isinstance(document.get("nodes"), dict)
        and isinstance(document.get("root_eclasses"), list)
    )


def read(document: Mapping[str, Any], name: str) -> ChoiceProblem:
    """The choice problem of an e-graph.

    Classes and the nodes of a class stand in the order of the file. Roots that name no class are
    left out, with a remark, unless all do. Raises ExtractError for a
    malformed node or a child that is no node.
    """
    nodes: Mapping[str, Any] = document["nodes"]
    members: dict[str, list[str]] = {}
    for key, node in nodes.items():
        if not isinstance(node, dict) or not isinstance(node.get("eclass"), str):
            raise ExtractError("a node has no eclass", where=f"nodes[{key!r}]")
        members.setdefault(node["eclass"], []).append(key)
    for i, root in enumerate(document["root_eclasses"]):
        if not isinstance(root, str):
            raise ExtractError(f"{root!r} is no class", where=f"root_eclasses[{i}]")
    roots = list(dict.fromkeys(document["root_eclasses"]))
    # lean-egg writes roots under names that other classes have swallowed: they say nothing more.
    # Where no root is left, nothing can be extracted: they stay, as classes without nodes.
    kept = [root for root in roots if root in members]
    stale = [root for root in roots if root not in members] if kept else []
    for root in kept or roots:
        members.setdefault(root, [])
    number = {c: i for i, c in enumerate(members)}
    order = list(chain.from_iterable(members.values()))
    class_of = {key: number[node["eclass"]] for key, node in nodes.items()}
    children = []
    for key in order:
        try:
            children.append([class_of[child] for child in nodes[key].get("children", ())])
        except (KeyError, TypeError) as e:
            raise ExtractError(f"child {e} is no node", where=f"nodes[{key!r}]") from e
    try:
        costs, allowed = column([nodes[key].get("cost", 1) for key in order])
    except ExtractError as e:
        at = int(e.where.removeprefix("entry "))
        raise ExtractError(e.what, where=f"nodes[{order[at]!r}]") from e
    child_start, flat = rows(children)
    sizes = [len(m) for m in members.values()]
    return ChoiceProblem(
        name=name,
        classes=tuple(members),
        nodes=tuple(order),
        node_start=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        cost=costs,
        allowed=allowed,
        child_start=child_start,
        children=flat,
        roots=np.array([number[root] for root in kept or roots], dtype=np.int64),
        remarks=tuple(f"root {root} names no class and is left out" for root in stale),
        labels=tuple(str(nodes[key].get("op", "")) for key in order),
    )


def write(problem: ChoiceProblem) -> dict[str, Any]:
    """The document of a problem; nodes that are forbidden or cannot be completed are left out.

    Raises ExtractError for a problem with pairs or limits, which the format cannot say.
    """
    if not problem.sums:
        raise ExtractError("egraph-serialize has no pairs and limits", where=problem.name)
    present = problem.allowed.copy()
    node_class = problem.node_class()
    while True:
        count = np.bincount(node_class[present], minlength=len(problem.classes))
        there = np.flatnonzero(present).tolist()
        lacking = [n for n in there if not count[problem.children_of(n)].all()]
        if not lacking:
            break
        present[lacking] = False
    first: dict[int, int] = {}
    for n in np.flatnonzero(present)[::-1].tolist():
        first[int(node_class[n])] = n
    nodes = {
        problem.nodes[n]: {
            "op": problem.labels[n] if problem.labels else problem.nodes[n],
            "children": [problem.nodes[first[c]] for c in problem.children_of(n).tolist()],
            "eclass": problem.classes[node_class[n]],
            "cost": problem.cost[n].item(),
        }
        for n in np.flatnonzero(present).tolist()
    }
    return {"nodes": nodes, "root_eclasses": [problem.classes[r] for r in problem.roots]}


def answer(problem: ChoiceProblem, choice: Choice) -> dict[str, Any]:
    """The chosen node of every class that is needed: `{"choices": {class: node}}`."""
    return {"choices": choice.names(problem)}
