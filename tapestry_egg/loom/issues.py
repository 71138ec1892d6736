"""What is wrong with a Loom graph: issues with a type, a summary and the data they speak of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tapestry_egg.errors import GraphError

from .nodes import Node

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
