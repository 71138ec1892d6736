"""Dialects: which nodes and tags a graph may have, and what must hold of them.

EXPRESSIONS    tensors and operations (the unsharded program)
APPLICATIONS   the same with notes and applications (its shards)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .agreement import application_indexes_agree, applications_agree, signatures_agree
from .constraints import (
    Checked,
    Constraint,
    dtypes_are_known,
    no_cycles,
    schema_issues,
    selections_fit,
)
from .issues import LoomError, ValidationIssue
from .nodes import (
    APPLICATION,
    IO_SEQUENCE_POINT,
    IPF_INDEX,
    IPF_SIGNATURE,
    NOTE,
    OPERATION,
    TENSOR,
    ApplicationBody,
    LoomGraph,
    NoteBody,
    OperationBody,
    RangeRecord,
    SequencePoint,
    SignatureRecord,
    TensorBody,
)


@dataclass(frozen=True)
class Dialect:
    """A set of node types and tag types (full name -> record class) with constraints."""

    name: str
    node_types: Mapping[str, Any]
    tag_types: Mapping[str, Any] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()

    def extended(
        self,
        name: str,
        node_types: Mapping[str, Any] | None = None,
        tag_types: Mapping[str, Any] | None = None,
        constraints: tuple[Constraint, ...] = (),
    ) -> Dialect:
        """A dialect that has all of this one and more."""
        return Dialect(
            name,
            {**self.node_types, **(node_types or {})},
            {**self.tag_types, **(tag_types or {})},
            (*self.constraints, *constraints),
        )

    def issues(self, graph: LoomGraph) -> list[ValidationIssue]:
        """All that is wrong with a graph.

        The constraints are asked only of a graph whose nodes all fit their schema.
        """
        checked = Checked(graph, self.node_types, self.tag_types)
        found = list(schema_issues(checked))
        if found:
            return found
        for constraint in self.constraints:
            found.extend(constraint(checked))
        return found

    def check(self, graph: LoomGraph, where: str = "") -> LoomGraph:
        """The graph itself. Raises LoomError with every issue where there is one."""
        found = self.issues(graph)
        if found:
            raise LoomError(found, where=where or f"graph {graph.id}")
        return graph


EXPRESSIONS = Dialect(
    "operation expressions",
    {TENSOR: TensorBody, OPERATION: OperationBody},
    {IPF_SIGNATURE: SignatureRecord, IPF_INDEX: RangeRecord, IO_SEQUENCE_POINT: SequencePoint},
    (dtypes_are_known, selections_fit, no_cycles, signatures_agree),
)

APPLICATIONS = EXPRESSIONS.extended(
    "application expressions",
    {NOTE: NoteBody, APPLICATION: ApplicationBody},
    constraints=(applications_agree, application_indexes_agree),
)
