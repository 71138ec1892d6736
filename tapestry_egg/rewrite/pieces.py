"""Pieces: new operations of a form, held against the little part of a program that they replace.

Rules run on that part alone, until what is new is among what they make of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.ids import ClassId
from tapestry_egg.metakernels.signatures.parameters import exact
from tapestry_egg.rewrite.terms.explore import makes, relevant
from tapestry_egg.rewrite.terms.requests import Applied
from tapestry_egg.rules.language.book import Rule

#: What a value is: a number shared by equal values. Those of the program come first.
Class = ClassId


@dataclass(frozen=True)
class New:
    """An operation of the form that the program does not have, on classes."""

    op: Operation
    operands: tuple[Class, ...]
    inputs: tuple[TensorType, ...]
    output: TensorType
    number: int  # its place in the form, for messages


@dataclass(frozen=True)
class Piece:
    """A small graph, values of it by class, and new operations that must be equal to some of it."""

    graph: BlockGraph
    at: Mapping[Class, int]
    new: tuple[tuple[Class, New], ...]
    pairs: tuple[tuple[Class, Class], ...]

    def key(self) -> Any:
        """Equal for pieces that differ in names alone, as those of equal layers do."""
        from .derivation import digest

        number = {c: k for k, (c, _) in enumerate(self.new)}

        def name(c: Class) -> Any:
            return ("new", number[c]) if c in number else self.at.get(c)

        said = [
            (n.op.kernel, exact(n.op.params), [name(d) for d in n.operands], n.inputs, n.output)
            for _, n in self.new
        ]
        return digest(self.graph), repr((said, [(name(b), name(v)) for b, v in self.pairs]))


def piece_of(
    given: BlockGraph,
    class_of: Mapping[int, Class],
    value_of: Mapping[Class, int],
    taken: Sequence[int],
    wanted: Sequence[int],
) -> tuple[BlockGraph, dict[Class, int]]:
    """Operations `taken` of a program as a graph of their own, and where in it each class is."""

    def same(v: int) -> int:
        return value_of[class_of[v]]

    operations = [given.operations[k] for k in taken]
    made = {op.outputs[0] for op in operations}
    read = {same(v) for op in operations for v in op.inputs} | {same(v) for v in wanted} | made
    number = {v: k for k, v in enumerate(sorted(read))}
    graph = BlockGraph(
        name="piece",
        values=tuple([given.values[v] for v in number]),
        operations=tuple(
            [
                replace(
                    op,
                    inputs=tuple([number[same(v)] for v in op.inputs]),
                    outputs=(number[op.outputs[0]],),
                    remat=None,
                    scope="",
                )
                for op in operations
            ]
        ),
        inputs=tuple([k for v, k in number.items() if v not in made and v not in given.constants]),
        outputs=tuple([number[same(v)] for v in wanted]),
        constants={number[v]: given.constants[v] for v in read if v in given.constants},
    )
    return graph, {class_of[v]: k for v, k in number.items()}


#: What was proven in this process, by the piece and the rules.
_PROVEN: dict[Any, bool] = {}


def proven(piece: Piece, rules: Sequence[Rule]) -> bool:
    """Whether rules that run on the piece alone make the new operations, and find them equal to
    what they stand for. Rules may promise more on the left than on the right, so what is new is
    no input of theirs."""
    rules = relevant(piece.graph, rules)
    key = (piece.key(), tuple([(r.name, r.egg) for r in rules]))
    if key not in _PROVEN:
        made = [
            (c, Applied(n.op.kernel, n.op.params, n.inputs, n.output, None), n.operands)
            for c, n in piece.new
        ]
        _PROVEN[key] = makes(piece.graph, piece.at, made, piece.pairs, rules)
    return _PROVEN[key]
