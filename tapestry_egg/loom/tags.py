"""What a program has beyond Loom: tags of our own, and the dialects of graphs that may have them.

Weak types, constants, source lines, regions, the order of inputs and pytrees have no place in Loom.
They go into tags, and into a parameter for regions, so that nothing is lost on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tapestry_egg.tracing.graph_documents import Blob, GraphRecord, SourceRecord
from tapestry_egg.zspace import ZRange

from .dialects import APPLICATIONS, EXPRESSIONS
from .nodes import NOTE, NoteBody

#: Operation number -> boxes of its index space, as the reference executor takes them.
Covers = Mapping[tuple[int, ...], Sequence[ZRange]]

PROGRAM, VALUE, ORIGIN = "tapestry-egg:Program", "tapestry-egg:Value", "tapestry-egg:Origin"
REGIONS = "$regions"


class ProgramTag(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """On a note: the graph's name, inputs and outputs in order, by tensor id; the pytrees that the
    program takes and gives, where it takes and gives other than flat tuples."""

    name: str
    inputs: list[str]
    outputs: list[str]
    input_names: list[str] = []
    output_names: list[str] = []
    donated: list[bool] = []
    in_tree: Any = None
    out_tree: Any = None


class ValueTag(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """On a tensor: JAX's weak typing, and its value where it is a constant."""

    weak: bool = False
    constant: bool | int | float | Blob | None = None


class OriginTag(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """On an operation: where it comes from, and what JAX says of it."""

    source: tuple[str, int, int, str, str] | None = None
    scope: str = ""
    remat: int | None = None
    effectful: bool = False
    places: list[SourceRecord] | None = None


class RegionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A nested graph in the parameters of an operation, with its source lines."""

    graph: GraphRecord
    sources: list[SourceRecord] = []


_OURS: Mapping[str, Any] = {PROGRAM: ProgramTag, VALUE: ValueTag, ORIGIN: OriginTag}

#: Application expressions with what a traced program has beyond them, and the same without shards.
PROGRAMS = APPLICATIONS.extended("programs", tag_types=_OURS)
UNSHARDED = EXPRESSIONS.extended("unsharded programs", {NOTE: NoteBody}, _OURS)
