"""Operations in groups of neighbours, called as the user's own program calls them: by scopes, else
by layers and functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from .blockgraph import BlockGraph, Operation

_INDEX = re.compile(r"\[\d+\]")
# What JAX's transformations write around a scope, and an entry of a path that is a name.
_AROUND = re.compile(r"(?:transpose|jvp|vmap|remat|checkpoint|jit)\(([^()]*)\)")
_NAME = re.compile(r"\['([^']*)'\]")

Group = tuple[str, list[int]]


def grouped(graph: BlockGraph, chosen: range, most: int) -> list[Group]:
    """Operations in at most about `most` groups of neighbours, as (what they are called, numbers).

    Neighbours in program order are grouped by as much of their place as leaves few enough groups,
    so that groups depend on each other one way only. Where even the outermost places change too
    often, small groups join their neighbours, and are called as most of their operations are.
    """
    places = _places(graph)

    def runs(depth: int) -> Iterator[Group]:
        for name, numbers in groupby(chosen, lambda i: _called(places[i], depth)):
            yield name, list(numbers)

    deepest = max((len(places[i][1]) for i in chosen), default=1)
    for depth in range(max(deepest, 1), 0, -1):
        found = list(runs(depth))
        if len(found) <= most:
            return found
    counted = [(Counter({name: len(numbers)}), numbers) for name, numbers in runs(1)]
    least = 1
    while len(counted) > most and least < 2 * len(chosen):
        counted = _joined(counted, least)
        least *= 2
    return [(names.most_common(1)[0][0], numbers) for names, numbers in counted]


def _joined(
    groups: Sequence[tuple[Counter[str], list[int]]], least: int
) -> list[tuple[Counter[str], list[int]]]:
    """Groups of fewer operations than `least`, and equally called ones, with those before them."""
    out: list[tuple[Counter[str], list[int]]] = []
    for names, numbers in groups:
        last = out[-1] if out else None
        if last is not None:
            small = min(len(last[1]), len(numbers)) < least
            if small or last[0].most_common(1)[0][0] == names.most_common(1)[0][0]:
                out[-1] = last[0] + names, last[1] + numbers
                continue
        out.append((names, numbers))
    return out


def _places(graph: BlockGraph) -> list[tuple[bool, tuple[str, ...]]]:
    """Per operation whether it belongs to a backward pass, and its place: the user's scopes, where
    there are some, else its layer and the function that it was written in. Beside a gradient, as in
    an optimizer, the function is before the layer: it runs over all of them."""
    found = []
    steps = any("jvp(" in op.scope for op in graph.operations)
    for op, layer in zip(graph.operations, layers(graph), strict=True):
        own = [_short(layer), _function(op)]
        beside = steps and "jvp(" not in op.scope
        words = _scopes(op) or tuple(filter(None, reversed(own) if beside else own))
        found.append(("transpose(" in op.scope, words))
    return found


def _called(place: tuple[bool, tuple[str, ...]], depth: int) -> str:
    backward, words = place
    name = "/".join(words[:depth])
    return f"{name} backward" if backward and name else name


def _scopes(op: Operation) -> tuple[str, ...]:
    """The scopes around an operation without what JAX's transformations and its own functions (an
    einsum's spelling) write into them."""
    scope = op.scope
    while scope != (inner := _AROUND.sub(r"\1", scope)):
        scope = inner
    return tuple(s for s in scope.split("/") if s and "->" not in s and "(" not in s)


def _function(op: Operation) -> str:
    """`attention`; of a function inside another, the outer one's name."""
    return op.source.function.partition(".<locals>")[0].rpartition(".")[2].strip("<>")


def _short(layer: str) -> str:
    """`layers[0]` of `[0]['layers'][0]`, `mu.layers[0]` of `[1][0].mu['layers'][0]`."""
    head = re.match(r"(\[\d+\])*", layer)
    inner = layer[head.end() :] if head else layer
    return _NAME.sub(r".\1", inner).lstrip(".")


# --- layers ---------------------------------------------------------------------------------------


def layers(graph: BlockGraph) -> list[str]:
    """Per operation the layer of its own weights; else of the operand that was made last."""
    names = graph.input_names or ("",) * len(graph.inputs)
    weights = {v: _layer(name) for v, name in zip(graph.inputs, names, strict=True)}
    made: dict[int, tuple[int, str]] = {}  # value -> place of its maker, layer
    found = []
    for k, op in enumerate(graph.operations):
        own = [weights[v] for v in op.inputs if weights.get(v)]
        others = sorted(made[v] for v in op.inputs if v in made)
        layer = own[0] if own else others[-1][1] if others else ""
        found.append(layer)
        for v in op.outputs:
            made[v] = (k, layer)
            # What is made of weights of one layer alone, such as a transpose, is its weight.
            if own and len(set(own)) == 1 and all(weights.get(x) for x in op.inputs):
                weights[v] = layer
    return found


def _layer(name: str) -> str:
    """The entry of the arguments that a leaf belongs to, by its path: up to the last index, if one
    follows the argument's own, else up to the leaf; empty for an argument that is a leaf itself."""
    indices = [m.end() for m in _INDEX.finditer(name)]
    if len(indices) > 1:
        return name[: indices[-1]]
    if name.count("[") + name.count(".") < 2:
        return ""
    return name[: max(name.rfind("["), name.rfind("."))] if name.count("[") > 2 else name
