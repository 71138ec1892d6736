"""Functions that `nnx.jit` or `eqx.filter_jit` made, with something else where their `jax.jit` is.

These libraries keep their modules outside: what they call inside takes and gives arrays in pytrees
of their own.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from tapestry_egg.errors import TraceError
from tapestry_egg.graph.blockgraph import BlockGraph

# From the `jax.jit` inside of a library's function to what is to stand there.
Inside = Callable[[Any], Any]
# From a pytree that a library passes inside to better names of some of its leaves' paths.
Names = Callable[[Any], Mapping[str, str]]
# From a graph, with the names that the user knows, to the state of its `Program`.
Becomes = Callable[[BlockGraph], Mapping[str, str]]

_NNX, _EQUINOX = "flax.nnx.jit", "equinox.filter_jit"
# What a library has instead of some of `jax.jit`'s words.
_OTHERWISE = {
    (_EQUINOX, "donate"): f'Write {_EQUINOX}(f, donate="all"), which is kept.',
    (_EQUINOX, "static"): f"{_EQUINOX} keeps static what is no array.",
    (_EQUINOX, "in"): "Pin arguments by their paths instead: pins={...}.",
    (_EQUINOX, "out"): "Shard results inside the function instead: equinox.filter_shard.",
}

#: The number of an argument or of a result, at the beginning of a path.
_NUMBER = re.compile(r"^\[\d+\]")
#: The name of a number that equinox returns beside the user's results.
_MARKER = "marker"


@dataclass(frozen=True, slots=True)
class LibraryJit:
    """A jitted function of a library's. `around(inside)` is the same function around `inside` of
    the `jax.jit` that it has. `becomes` says which results inside are arguments of the next call:
    modules that the library updates in place, and what is donated. `names` are those that the user
    knows."""

    name: str
    around: Callable[[Inside], Any]
    becomes: Becomes
    names: Names

    def calling(self, inner: Callable[..., Any]) -> Any:
        """The library's function, which calls `inner` with arrays in pytrees of its own."""
        return self.around(lambda jitted: inner)


class Adopted:
    """What `te.jit` makes of a function that a library has jitted."""

    library: LibraryJit


def library_jit(fn: Any, words: Mapping[str, Any]) -> LibraryJit | None:
    """What is known of a function that a library has jitted; None where none has.

    Raises TraceError for `words` of `jax.jit` that are given beside: they are for the library's.
    """
    found = fn.library if isinstance(fn, Adopted) else None
    found = found or _of_partial(fn) or _of_nnx(fn) or _of_equinox(fn)
    if found is None:
        return None
    for word, value in words.items():
        if value is not None:
            raise TraceError(
                f"the function was jitted by {found.name}",
                where=word,
                hint=_OTHERWISE.get((found.name, word.partition("_")[0]))
                or f"Write {found.name}(f, {word}=...), which is kept.",
            )
    return found


class Answer(Exception):
    """Leads out of a library's function without a call."""


def answer_of(outer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the function inside of a library's answers instead of being called."""
    try:
        outer(*args, **kwargs)
    except Answer as answer:
        return answer.args[0]
    raise TraceError(
        "the library did not call its jitted function",
        hint="Pass the arguments that it is called with.",
    )


def _of_partial(fn: Any) -> LibraryJit | None:
    """Of a bound method, or a function with some arguments given (`functools.partial`, or a
    library's own class like it)."""
    if isinstance(fn, MethodType):
        inner, given, named = fn.__func__, (fn.__self__,), {}
    elif all(hasattr(fn, word) for word in ("func", "args", "keywords")):
        inner, given, named = fn.func, tuple(fn.args), dict(fn.keywords)
    else:
        return None
    library = library_jit(inner, {})
    if library is None:
        return None
    return replace(
        library, around=lambda inside: functools.partial(library.around(inside), *given, **named)
    )


def _of_nnx(fn: Any) -> LibraryJit | None:
    home = "flax.nnx.transforms.compilation"
    if home not in sys.modules or type(fn).__module__ != home or not hasattr(fn, "jitted_fn"):
        return None
    nnx: Any = sys.modules["flax.nnx"]
    info = fn.jitted_fn._jit_info
    simple = hasattr(fn, "graph")  # no references that are shared or change their structure

    def around(inside: Inside) -> Any:
        if hasattr(fn, "partial_args"):
            made = copy.copy(fn)
        else:  # what it traces knows itself, so that a copy would not do
            static = set(info.static_argnums)
            given = fn.in_shardings
            if isinstance(given, tuple):  # nnx put None at the static ones
                given = tuple(s for i, s in enumerate(given) if i not in static)
            made = nnx.jit(
                fn.fun,
                in_shardings=given,
                out_shardings=fn.out_shardings,
                static_argnums=info.static_argnums or None,
                static_argnames=info.static_argnames or None,
                donate_argnums=info.donate_argnums or None,
                donate_argnames=info.donate_argnames or None,
                device=info.device,
                backend=info.backend,
                graph=fn.graph if simple else True,
                graph_updates=not simple,
            )
        made.jitted_fn = inside(made.jitted_fn)
        return made

    return LibraryJit(_NNX, around, _mirrored, _module_names)


def _module_names(tree: Any) -> Mapping[str, str]:
    """The paths in modules of what nnx passes as flat lists: `[0].up.kernel` for
    `[0].states[0][3]`."""
    import jax

    def is_flat(x: Any) -> bool:
        return type(x).__name__ == "NodeStates" and hasattr(x, "states")

    found: dict[str, str] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_flat)[0]:
        if is_flat(node) and len(node.states) == 1 and isinstance(node.states[0], list):
            above = jax.tree_util.keystr(path)
            inside = _paths_inside(getattr(node, "_graphdef", None))
            if len(inside) == len(node.states[0]):
                found |= {f"{above}.states[0][{k}]": above + p for k, p in enumerate(inside)}
    return found if len(set(found.values())) == len(found) else {}


def _paths_inside(graphdef: Any) -> list[str]:
    """The paths of the arrays of an nnx graph, in its own order; none of a version that writes
    graphs down in another way."""
    found: list[str] = []

    def walk(path: str) -> None:
        node = next(nodes)
        kind = type(node).__name__
        if kind == "VariableDef":
            found.append(path)
        for _ in range(node.num_attributes if kind == "NodeDef" else 0):
            key, value = next(attributes)
            named = isinstance(key, str) and key.isidentifier()
            below = f"{path}.{key}" if named else f"{path}[{key!r}]"
            if type(value).__name__ == "NodeAttr":
                walk(below)
            elif type(value).__name__ != "Static":
                found.append(below)

    try:
        nodes, attributes = iter(graphdef.nodes), iter(graphdef.attributes)
        walk("")
    except (AttributeError, TypeError, ValueError, StopIteration):
        return []
    return found


def _mirrored(graph: BlockGraph) -> Mapping[str, str]:
    """The results of nnx that are arguments as the call leaves them: those of the same path below
    `[0]`, and of the same type."""
    given = dict(zip(graph.input_names, graph.inputs, strict=True))
    found = {}
    for name, v in zip(graph.output_names, graph.outputs, strict=True):
        own = name.removeprefix("[0]")
        if name.startswith("[0]") and own in given and graph.same_type(given[own], v):
            found[name] = own
    return found


def _of_equinox(fn: Any) -> LibraryJit | None:
    if "equinox" not in sys.modules or not type(fn).__module__.startswith("equinox"):
        return None
    if getattr(getattr(fn, "_cached", None), "_jit_info", None) is None:
        return None

    def around(inside: Inside) -> Any:
        made = copy.copy(fn)
        object.__setattr__(made, "_cached", inside(fn._cached))
        return made

    return LibraryJit(_EQUINOX, around, _donated, _user_paths)


def _donated(graph: BlockGraph) -> Mapping[str, str]:
    """The results of equinox that donated arguments become: those of the same type whose path in
    the result is that in the argument, but for the number of either."""
    given: dict[str, list[int]] = {}
    for i, name in enumerate(graph.input_names):
        if graph.donated[i]:
            given.setdefault(_NUMBER.sub("", name), []).append(i)
    found: dict[int, list[str]] = {}
    for name, v in zip(graph.output_names, graph.outputs, strict=True):
        alike = dict.fromkeys((*given.get(name, ()), *given.get(_NUMBER.sub("", name), ())))
        fitting = [i for i in alike if graph.same_type(graph.inputs[i], v)]
        if name != _MARKER and len(fitting) == 1:
            found.setdefault(fitting[0], []).append(name)
    return {names[0]: graph.input_names[i] for i, names in found.items() if len(names) == 1}


def _user_paths(tree: Any) -> Mapping[str, str]:
    """What equinox passes on, `[0]['rest'][2]`, by its path in the user's arguments: `[1].weight`;
    and what it returns, by its path in the user's result.

    It passes flat arrays, and their structures as the last, static argument. It returns a marker,
    arrays, and what is static.
    """
    import jax

    if not isinstance(tree, tuple) or len(tree) != 3:
        return {}  # arguments by keyword, or another version of equinox
    *parts, static = tree
    if not isinstance(static, tuple) or len(static) != 3:
        paths, _ = jax.tree_util.tree_flatten_with_path(parts)
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        return {n: n.removeprefix("[1]") if k else _MARKER for k, n in enumerate(names)}
    found = {}
    for part, (_, inside) in zip(("fun", "first", "rest"), static, strict=True):
        number = next((k for k, held in enumerate(parts) if part in held), 0)
        places = jax.tree.unflatten(inside, range(inside.num_leaves))
        for path, k in jax.tree_util.tree_flatten_with_path(places)[0]:
            if part != "rest":
                own = f"{'fun' if part == 'fun' else '[0]'}{jax.tree_util.keystr(path)}"
            elif path[0].idx == 1:
                own = jax.tree_util.keystr(path[1:])
            else:
                own = f"[{path[1].idx + 1}]{jax.tree_util.keystr(path[2:])}"
            found[f"[{number}]['{part}'][{k}]"] = own
    return found
