"""Pins of what a program computes: layouts that are fixed of values inside it and of its results.

    {"%12": ("x", None), "40/%3": ("x",), "train.py:17": (None, "y"), "result[0]['w']": ("x",)}

A value is named by its number as plans and graphs print it (`40/%3` is %3 in the loop that is
operation 40, `40:1/%3` in its second region), by the line that makes it, where only one value of
that line is read by other lines, or as a result, by its path. Such a pin is a constraint of the
program: the value exists in that layout, stored, and all that reads it reads it from there. Where
one value is several results or an argument (`lambda x: (x, x)`), the pin of a result is of that
result alone, which is a copy if others lie otherwise.

Paths of arguments and results may be named by a part that no other has (`"up"`, `"layers[1]"`; an
argument counts before results), and many by a pattern (`"[0]['layers'][*]['up']"`, where `[*]` is
any entry; what is also named by itself lies as said there).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tapestry_egg.columns import starred
from tapestry_egg.errors import ExtractError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, Source
from tapestry_egg.graph.pytrees import matching, named_by_part
from tapestry_egg.graph.sources import is_called
from tapestry_egg.machine.mesh_contract import MeshContract
from tapestry_egg.schedule.flatten import close_paths, is_below
from tapestry_egg.tracing.constraints import KERNEL, Constraint

from .pins import Pin, Pins, Spec, pin_of

#: Numbers of operations with nested graphs, and of the graph in each: from the program to a value.
Path = tuple[tuple[int, int], ...]

_NUMBER = re.compile(r"((?:\d+(?::\d+)?/)*)%(\d+)$")
_LINE = re.compile(r"(.+\.\w+):(\d+)$")
_RESULT = "result"
# Values of a line that an error lists.
_FEW = 6


@dataclass(frozen=True, slots=True)
class ValuePin:
    """A pinned value: where its graph is, its number there, and the layout."""

    path: Path
    value: int
    pin: Pin


@dataclass(frozen=True, slots=True)
class SplitPins:
    """Pins of inputs, by path; of values that the program computes; and of single results."""

    inputs: Pins
    inside: tuple[ValuePin, ...] = ()
    results: tuple[Pin, ...] = ()


def split_pins(graph: BlockGraph, pins: Pins | None) -> SplitPins:
    """The pins by what they are of.

    Raises ExtractError for a number that no value has, for a line that makes none or several, and
    for a layout that does not fit the value.
    """
    inputs: dict[str, Spec] = {}
    inside: dict[tuple[Path, int], ValuePin] = {}
    results: list[Pin] = []
    names = graph.input_paths
    for word, name, spec in _each(graph, pins or {}):
        found = _named(graph, name)
        if found is None:
            _pin_input(graph, inputs, name, spec, word)
            continue
        path, value = found
        tensor = nested(graph, path).values[value]
        pin = pin_of(-1, name, tensor, spec, f"pins[{word!r}]")
        alone = value not in graph.inputs and graph.outputs.count(value) == 1
        if _is_result(name) and not alone:
            at = _position(graph, name)
            results.append(replace(pin, position=at, output=True))
            continue
        if not path and value in graph.inputs:
            _pin_input(graph, inputs, names[graph.inputs.index(value)], spec, word)
            continue
        other = inside.setdefault((path, value), ValuePin(path, value, pin))
        if other.pin.dims != pin.dims:
            raise ExtractError(
                f"one value is pinned to {other.pin} and to {pin}",
                where=f"{other.pin.where}, {pin.where}",
                hint="Give one of them.",
            )
    return SplitPins(inputs, tuple(inside.values()), tuple(results))


def _each(graph: BlockGraph, pins: Pins) -> Iterator[tuple[str, str, Spec]]:
    """The user's words, each with what it names in full, and the layout: first those that name one
    thing, then what patterns name besides."""
    names = graph.input_paths
    given = [*names, *(f"{_RESULT}{path}" for path in graph.output_paths)]
    said: set[str] = set()
    for word, spec in pins.items():
        if "*" not in word:
            name = _in_full(word.strip(), names, given)
            said.add(name)
            yield word, name, spec
    for word, spec in pins.items():
        found = matching(word.strip(), given)
        for name in found or ([word] if "*" in word else []):
            if name not in said:
                yield word, name, spec


def _in_full(word: str, names: Sequence[str], given: Sequence[str]) -> str:
    """The path that a word is, or is a part of; the word itself where it is a number or a line, or
    names nothing. Raises ExtractError for a part of several paths."""
    if _NUMBER.match(word) or _LINE.match(word) or word in given:
        return word
    if any(is_below(word, name) for name in names):
        return word
    results = [name for name in given[len(names) :] if _is_result(name)]
    for some in [results] if _is_result(word) else [names, results]:
        part = word.removeprefix(_RESULT) if _is_result(word) else word
        found = named_by_part(part, some)
        if len(found) > 1:
            raise ExtractError(
                f"{word!r} is part of {len(found)} paths",
                where=f"pins[{word!r}]",
                hint=f"Name one of {', '.join(found[:_FEW])}{', ...' if found[_FEW:] else ''}; "
                f"or all that are alike, as {starred(found[0])}.",
            )
        if found:
            return found[0]
    return word


def _pin_input(
    graph: BlockGraph, inputs: dict[str, Spec], path: str, spec: Spec, word: str
) -> None:
    if path in inputs:  # two words for it: its path, which is that of a whole array, and its number
        value = graph.inputs[graph.input_paths.index(path)]
        where, tensor = f"pins[{word!r}]", graph.values[value]
        dims = [pin_of(-1, path, tensor, s, where).dims for s in (inputs[path], spec)]
        if dims[0] != dims[1]:
            raise ExtractError(
                f"argument {path} is pinned by its path and by its number, in different layouts",
                where=where,
                hint="Give one of them.",
            )
    inputs[path] = spec


def constrained(graph: BlockGraph, pins: tuple[ValuePin, ...]) -> BlockGraph:
    """The program that asks for those layouts itself, on whatever mesh has the axes: behind what
    makes a value stands a constraint, which all its readers read."""
    whole = graph

    def place(pin: ValuePin) -> tuple[int, ...]:
        made = nested(whole, pin.path).producers().get(pin.value, -1)
        return (*(k for k, _ in pin.path), made)

    # The last first: what is put in moves the operations behind it.
    for p in sorted(pins, key=place, reverse=True):
        graph = _within(graph, p.path, p)
    return graph


def nested(graph: BlockGraph, path: Path) -> BlockGraph:
    """The graph that a path leads to."""
    for operation, region in path:
        graph = graph.operations[operation].regions[region]
    return graph


def _within(graph: BlockGraph, path: Path, pin: ValuePin) -> BlockGraph:
    if not path:
        return _asked(graph, pin.value, pin.pin)
    (k, r), *rest = path
    op = graph.operations[k]
    regions = list(op.regions)
    regions[r] = _within(regions[r], tuple(rest), pin)
    operations = list(graph.operations)
    operations[k] = replace(op, regions=tuple(regions))
    return replace(graph, operations=tuple(operations))


def _asked(graph: BlockGraph, value: int, pin: Pin) -> BlockGraph:
    new = len(graph.values)
    producers = graph.producers()
    after = producers[value] + 1 if value in producers else 0
    source = graph.operations[after - 1].source if after else None
    # No mesh is named: the axes are those of whatever mesh the plan is for.
    params = Constraint(pin.dims, MeshContract((), ())).params()
    asked = Operation(KERNEL, (value,), (new,), params)
    if source is not None:
        asked = replace(asked, source=source, scope=graph.operations[after - 1].scope)

    def read(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new if v == value else v for v in values)

    before, behind = graph.operations[:after], graph.operations[after:]
    return replace(
        graph,
        values=(*graph.values, graph.values[value]),
        operations=(*before, asked, *(replace(op, inputs=read(op.inputs)) for op in behind)),
        outputs=read(graph.outputs),
    )


def _named(graph: BlockGraph, word: str) -> tuple[Path, int] | None:
    """Where the value of a name is; None for a name that is none of these."""
    if number := _NUMBER.match(word):
        return _numbered(graph, word, number[1], int(number[2]))
    if _is_result(word):
        return (), graph.outputs[_position(graph, word)]
    if line := _LINE.match(word):
        return _made_at(graph, word, line[1], int(line[2]))
    return None


def _numbered(graph: BlockGraph, word: str, inside: str, value: int) -> tuple[Path, int]:
    path: list[tuple[int, int]] = []
    for step in filter(None, inside.split("/")):
        operation, _, region = step.partition(":")
        at = nested(graph, tuple(path))
        k, r = int(operation), int(region or 0)
        if k >= len(at.operations) or r >= len(at.operations[k].regions):
            raise ExtractError(
                f"operation {step} of {word} has no nested graph",
                where=f"pins[{word!r}]",
                hint="`tapestry-egg show` prints the numbers of operations.",
            )
        path.append((k, r))
    at = nested(graph, tuple(path))
    if value >= len(at.values) or value in at.constants:
        what = "a constant" if value in at.constants else "none"
        raise ExtractError(
            f"{word} is {what}: values are numbered from %0 to %{len(at.values) - 1}",
            where=f"pins[{word!r}]",
            hint="`plan.explain(everything=True)` prints them.",
        )
    return tuple(path), value


def _is_result(word: str) -> bool:
    return word == _RESULT or word.startswith((f"{_RESULT}[", f"{_RESULT}."))


def _position(graph: BlockGraph, word: str) -> int:
    """Which result a word names."""
    path = word.removeprefix(_RESULT)
    names = graph.output_paths
    if path not in names:
        choice = close_paths(path, names)
        raise ExtractError(
            f"no result lies at {path!r}",
            where=f"pins[{word!r}]",
            hint=f"Results are named by their paths behind `{_RESULT}`: {choice}.",
        )
    return names.index(path)


def _made_at(graph: BlockGraph, word: str, file: str, line: int) -> tuple[Path, int]:
    found = list(_leaving(graph, file, line, ()))
    if len(found) == 1:
        return found[0][:2]
    listed = ", ".join(
        f"{''.join(f'{k}:{r}/' if r else f'{k}/' for k, r in path)}%{v} ({kernel})"
        for path, v, kernel in found[:_FEW]
    )
    more = f" and {len(found) - _FEW} more" if len(found) > _FEW else ""
    raise ExtractError(
        f"{word} makes {len(found)} values that are read elsewhere"
        if found
        else f"no value is made at {word} and read elsewhere",
        where=f"pins[{word!r}]",
        hint=f"Name one by its number: {listed}{more}."
        if found
        else "Lines are those of operations as plans print them, FILE:LINE.",
    )


def _leaving(
    graph: BlockGraph, file: str, line: int, path: Path
) -> Iterator[tuple[Path, int, str]]:
    """Values that a line makes and another line reads, or nothing but the end of their graph."""

    def at(source: Source) -> bool:
        # Files are told from the working directory on; they may be asked for in full, or in short.
        return source.line == line and is_called(source.file, file)

    readers = graph.readers()
    for k, op in enumerate(graph.operations):
        for r, region in enumerate(op.regions):
            yield from _leaving(region, file, line, (*path, (k, r)))
        if op.places is not None:  # written several times: who reads it was seen before that
            if any(map(at, op.places)):
                live = [v for v in op.outputs if v in graph.outputs or readers[v]]
                yield from ((path, v, op.kernel) for v in live)
            continue
        if op.regions or not at(op.source):
            continue
        for v in op.outputs:
            others = (graph.operations[i].source for i in readers[v])
            if v in graph.outputs or not all(map(at, others)):
                yield path, v, op.kernel
