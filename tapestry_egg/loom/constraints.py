"""Constraints on Loom graphs: schema, references, cycles, selections and dtypes.

A constraint is a function from a `Checked` graph to issues. Those of this module are about nodes
and what they refer to; `dialects.py` has those about signatures and shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec
import networkx as nx

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.arrays import is_dtype
from tapestry_egg.zspace import ZRange, ZSpaceError

from .nodes import (
    APPLICATION,
    OPERATION,
    TENSOR,
    LoomGraph,
    Node,
    RangeRecord,
    SelectionRecord,
    full_name,
)

# What is wrong with a Loom graph: issues with a type, a summary and the data they speak of.


IssueType = Literal[
    "NodeSchemaError", "NodeValidationError", "NodeReferenceError", "ReferenceCycle"
]


@dataclass(frozen=True)
class Context:
    """A piece of the graph that an issue speaks of; `jsonpath` says where it stands."""

    name: str
    data: Any
    jsonpath: str = ""

    def to_json(self) -> dict[str, Any]:
        path = {"jsonpath": self.jsonpath} if self.jsonpath else {}
        return {"name": self.name, **path, "data": self.data}


@dataclass(frozen=True)
class ValidationIssue:
    """One fault of a graph."""

    type: IssueType
    summary: str
    contexts: tuple[Context, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """`{"type", "summary", "contexts": [{"name", "jsonpath"?, "data"}]}`."""
        contexts = [c.to_json() for c in self.contexts]
        return {"type": self.type, "summary": self.summary, "contexts": contexts}

    def __str__(self) -> str:
        """The same as indented text."""
        lines = [f"{self.type}: {self.summary}"]
        for context in self.contexts:
            at = f" {context.jsonpath}" if context.jsonpath else ""
            lines.append(f"  {context.name}{at}: {json.dumps(context.data)}")
        return "\n".join(lines)


class LoomError(GraphError):
    """A Loom graph does not keep to its dialect; `issues` holds all that was found."""

    def __init__(self, issues: Sequence[ValidationIssue], *, where: str = "") -> None:
        self.issues = tuple(issues)
        more = len(self.issues) - 1
        tail = f" (and {more} more issue{'' if more == 1 else 's'})" if more else ""
        place = next((c.jsonpath for c in self.issues[0].contexts if c.jsonpath), "")
        if where.endswith("$"):
            where += place.removeprefix("$")
        hint = "\n  ".join(line for issue in issues[:5] for line in str(issue).splitlines())
        super().__init__(f"{self.issues[0].summary}{tail}", where=where, hint=hint)


def node_issue(
    type_: IssueType, summary: str, node: Node, position: int | None = None, **data: Any
) -> ValidationIssue:
    """An issue about one node, with further data by name (`_` stands for a blank)."""
    path = "" if position is None else f"$.nodes[{position}]"
    contexts = [Context("Node", node.summary(), path)]
    contexts += [Context(name.replace("_", " "), value) for name, value in data.items()]
    return ValidationIssue(type_, summary, tuple(contexts))


_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True)
class Checked:
    """A graph with the bodies and tags that fit their schema, typed."""

    graph: LoomGraph
    node_types: Mapping[str, Any]
    tag_types: Mapping[str, Any]
    bodies: dict[str, Any] = field(default_factory=dict)  # node id -> body
    tags: dict[str, dict[str, Any]] = field(default_factory=dict)  # node id -> full name -> value
    positions: dict[str, int] = field(default_factory=dict)

    def nodes(self, kind: str) -> Iterator[tuple[Node, Any]]:
        """Nodes of a type with their typed bodies."""
        for node in self.graph.of_kind(kind):
            if node.id in self.bodies:
                yield node, self.bodies[node.id]

    @cached_property
    def shards(self) -> dict[str, list[tuple[Node, Any]]]:
        """Operation id -> its applications; those of unknown operations are here too."""
        out: dict[str, list[tuple[Node, Any]]] = {}
        for node, body in self.nodes(APPLICATION):
            out.setdefault(body.operationId, []).append((node, body))
        return out

    def issue(self, type_: IssueType, summary: str, node: Node, **data: Any) -> ValidationIssue:
        return node_issue(type_, summary, node, self.positions.get(node.id), **data)


Constraint = Callable[[Checked], Iterator[ValidationIssue]]


def schema_issues(checked: Checked) -> Iterator[ValidationIssue]:
    """Ids are distinct UUIDs, types are the dialect's, bodies and tags fit their schema.

    Fills `checked` with what fits.
    """
    for at, node in enumerate(checked.graph.nodes):
        path = f"$.nodes[{at}]"
        if not _UUID.fullmatch(node.id):
            yield node_issue("NodeSchemaError", f"{node.id!r} is not a UUID", node, at)
        if node.id in checked.positions:
            first = checked.graph.nodes[checked.positions[node.id]]
            yield node_issue(
                "NodeValidationError", "Two nodes have one id", node, at, First=first.summary()
            )
            continue
        checked.positions[node.id] = at
        schema = checked.node_types.get(node.kind)
        if schema is None:
            known = ", ".join(sorted(t.rpartition("/")[2] for t in checked.node_types))
            yield node_issue(
                "NodeValidationError", f"Type {node.type!r} is not one of {known}", node, at
            )
        else:
            body, issue = _typed(node.body, schema, node, f"{path}.body")
            if issue:
                yield issue
            else:
                checked.bodies[node.id] = body
        found = checked.tags.setdefault(node.id, {})
        for name, value in node.tags.items():
            schema = checked.tag_types.get(full_name(name))
            if schema is None:
                yield node_issue("NodeValidationError", f"Unknown tag {name!r}", node, at)
                continue
            tag, issue = _typed(value, schema, node, f"{path}.tags[{name!r}]")
            if issue:
                yield issue
            else:
                found[full_name(name)] = tag


def _typed(value: Any, schema: Any, node: Node, path: str) -> tuple[Any, ValidationIssue | None]:
    """The typed value, or what is wrong with it; ranges in it are ranges."""
    try:
        made = msgspec.convert(value, schema)
        for box in _ranges(made):
            box.range()
        return made, None
    except msgspec.ValidationError as e:
        what, _, inside = str(e).partition(" - at ")
        path += inside.strip("`").removeprefix("$")
    except ZSpaceError as e:
        what = e.what
    except RecursionError:
        what = "nested too deeply"
    contexts = (Context("Node", node.summary()), Context("Data", _short(value), path))
    return None, ValidationIssue("NodeSchemaError", what, contexts)


def _short(value: Any) -> Any:
    text = repr(value)
    return value if len(text) < 500 else text[:500] + "..."


def _ranges(value: Any) -> Iterator[RangeRecord]:
    """The ranges in a typed body or tag."""
    if isinstance(value, RangeRecord):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name != "params":
                yield from _ranges(getattr(value, name))
    elif isinstance(value, dict):
        for v in value.values():
            yield from _ranges(v)
    elif isinstance(value, list):
        for v in value:
            yield from _ranges(v)


# ---- constraints -------------------------------------------------------------------------------


def dtypes_are_known(checked: Checked) -> Iterator[ValidationIssue]:
    """Every tensor has a dtype that NumPy, ml_dtypes or JAX knows."""
    for node, body in checked.nodes(TENSOR):
        if not is_dtype(body.dtype):
            yield checked.issue("NodeValidationError", f"Unknown dtype {body.dtype!r}", node)


def selections_fit(checked: Checked) -> Iterator[ValidationIssue]:
    """Selections name tensors that exist and lie inside them; those of an operation's outputs are
    whole, and a tensor is the output of one operation at most."""
    made_by: dict[str, Node] = {}
    for kind in (OPERATION, APPLICATION):
        for node, body in checked.nodes(kind):
            for place, selection in selections(body):
                box = selection.range.range()
                tensor = tensor_range(checked, selection.tensorId)
                if isinstance(tensor, str):
                    yield checked.issue(
                        "NodeReferenceError",
                        f"{place} refers to {tensor}",
                        node,
                        Reference=selection.tensorId,
                    )
                    continue
                data = {"Selection": str(box), "Tensor": str(tensor)}
                if box.rank != tensor.rank:
                    what = f"{place} selects {box.rank} dims of a tensor that has {tensor.rank}"
                    yield checked.issue("NodeValidationError", what, node, **data)
                elif not tensor.contains(box):
                    what = f"{place} selects what its tensor does not have"
                    yield checked.issue("NodeValidationError", what, node, **data)
                elif kind == OPERATION and place.startswith("outputs"):
                    if box != tensor:
                        what = f"{place} of an operation is not its whole tensor"
                        yield checked.issue("NodeValidationError", what, node, **data)
                    first = made_by.setdefault(selection.tensorId, node)
                    if first is not node:
                        what = "A tensor is the output of two operations"
                        yield checked.issue(
                            "NodeValidationError", what, node, Other=first.summary()
                        )


def no_cycles(checked: Checked) -> Iterator[ValidationIssue]:
    """No operation reads, through others, what it makes."""
    edges: nx.DiGraph = nx.DiGraph()
    for node, body in checked.nodes(OPERATION):
        for place, selection in selections(body):
            if place.startswith("inputs"):
                edges.add_edge(selection.tensorId, node.id)
            else:
                edges.add_edge(node.id, selection.tensorId)
    nodes = checked.graph.by_id()
    for component in nx.strongly_connected_components(edges):
        inside = edges.subgraph(component)
        if inside.number_of_edges() == 0:
            continue
        cycle = [a for a, _ in nx.find_cycle(inside)]
        order = {node.id: at for at, node in enumerate(checked.graph.nodes)}
        first = min(range(len(cycle)), key=lambda k: order.get(cycle[k], len(order)))
        data = [nodes[i].summary() for i in cycle[first:] + cycle[:first] if i in nodes]
        yield ValidationIssue(
            "ReferenceCycle", "Reference Cycle detected", (Context("Cycle", data),)
        )


def selections(body: Any) -> Iterator[tuple[str, SelectionRecord]]:
    """Selections of an operation or application with their places, `inputs.x[0]`."""
    for side in ("inputs", "outputs"):
        for name, listed in getattr(body, side).items():
            for k, selection in enumerate(listed):
                yield f"{side}.{name}[{k}]", selection


def tensor_range(checked: Checked, id: str) -> ZRange | str:
    """The range of a tensor, or what the id stands for instead."""
    at = checked.positions.get(id)
    if at is None:
        return "a node that does not exist"
    node = checked.graph.nodes[at]
    if node.kind != TENSOR:
        return f"a node of type {node.kind.rpartition('/')[2]}, not a tensor"
    if id not in checked.bodies:
        return "a tensor that is malformed"
    return checked.bodies[id].range.range()  # type: ignore[no-any-return]
